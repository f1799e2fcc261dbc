"""Every family computes what transformers does: one suite, a row for each family.

In float64, with a bound at the size of what is compared. Configs are drawn (model_families.py);
most of them are compared in `make test-all` alone.
"""

import copy
from itertools import accumulate, chain
from typing import Any

import pytest
import torch
from model_families import (
    FAMILIES,
    POOLING,
    PUBLISHED,
    Pair,
    drawn,
    in_float64,
    kinds,
    near,
    near_gradients,
    pair,
    several_seeds,
    theirs,
)
from tiny_models import enlarge_, hf_twin, ours_from_hf, token_ids
from torch import Tensor

from lm_from_scratch.attention.kinds import ATTENTION_KINDS, use_attention_
from lm_from_scratch.attention.sinks import SINK_KINDS
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import Cache
from lm_from_scratch.cache.paged import BlockPool, PagedCache
from lm_from_scratch.cache.slots import StaticCache, cache_for
from lm_from_scratch.checkpoint.configs import config_from_dict, config_to_dict
from lm_from_scratch.checkpoint.weights import load_checkpoint, save_pretrained
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.instruments.record import record_attention, record_hidden_states
from lm_from_scratch.models.deepseek_v4 import HASHED
from lm_from_scratch.models.qwen2 import FULL
from lm_from_scratch.models.qwen3_next import LINEAR
from lm_from_scratch.text.batch import padded_batch
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.loss import causal_lm_loss

families = pytest.mark.parametrize("family", FAMILIES)
published = pytest.mark.parametrize("family", PUBLISHED)
seeds = pytest.mark.parametrize("seed", several_seeds(range(30)))
#: For what takes several passes.
less_seeds = pytest.mark.parametrize("seed", several_seeds(range(30), quick=1))
#: Other configs for what takes longer.
OTHERS = range(50, 54)
#: Transformers generates nothing with layers that all have a state in place of keys.
few_with_attention = pytest.mark.parametrize(
    ("family", "seed"),
    [
        pytest.param(f, seed, marks=[pytest.mark.slow] * (i >= 1))
        for f in FAMILIES
        for i, seed in enumerate(s for s in OTHERS if FULL in kinds(drawn(f, s)))
    ],
)

ROWS = [token_ids(12, seed=1).tolist(), token_ids(7, seed=2).tolist(), [11]]


# ---------------------------------------------------------------------------------- whole texts


@families
@seeds
def test_logits_states_loss_and_gradients_of_a_full_pass(family: str, seed: int) -> None:
    both, idx = pair(family, seed), token_ids(2, 12, seed=seed)
    labels = idx.clone()
    labels[0, :3] = IGNORE
    want = both.theirs(idx, labels=labels, output_hidden_states=True)
    with record_hidden_states(both.ours) as states:
        logits = both.ours(idx)
    near(logits, want.logits)
    for layer, hidden in enumerate(want.hidden_states[:-1]):
        near(states[layer][0], hidden, f"before layer {layer}")
    near(states[-1][0], want.hidden_states[-1], "after the last norm")
    targets = torch.full_like(idx, IGNORE)
    targets[:, :-1] = labels[:, 1:]
    loss = causal_lm_loss(logits, targets)
    near_gradients(both, loss, want.loss)


@families
@less_seeds
def test_padded_rows_and_their_loss_and_gradients(family: str, seed: int) -> None:
    both = pair(family, seed)
    for side in ("left", "right"):
        batch = padded_batch(ROWS, 0, side)
        positions, real = batch.positions, batch.positions >= 0
        labels = batch.idx.masked_fill(positions <= 0, IGNORE)  # no pad predicts a first token
        want = both.theirs(batch.idx, positions, labels=labels)
        logits = both.ours(batch.idx, positions=positions)
        near(logits[real], want.logits[real], side)
        loss = causal_lm_loss(logits, batch.targets)
        near_gradients(both, loss, want.loss)


@families
@seeds
@torch.no_grad()
def test_documents_in_one_row_are_what_they_are_alone(family: str, seed: int) -> None:
    both, lengths = pair(family, seed), [len(row) for row in ROWS]
    packed = both.ours(
        torch.tensor([[*chain(*ROWS)]]),
        positions=torch.cat([torch.arange(n) for n in lengths])[None],
        documents=torch.arange(3).repeat_interleave(torch.tensor(lengths))[None],
    )
    for row, logits in zip(ROWS, packed[0].split(lengths), strict=True):
        near(logits, both.theirs(torch.tensor([row])).logits[0])


@families
@torch.no_grad()
def test_embeddings_may_be_given_instead_of_tokens(family: str) -> None:
    both = pair(family, 0)
    x = torch.randn(2, 9, both.ours.config.n_embd, dtype=torch.float64)
    config = both.ours.config
    if HASHED in getattr(config, "routes", ()) or getattr(config, "per_layer_width", 0):
        with pytest.raises(ValueError, match="embeddings have no token ids"):
            both.ours(x)
        return
    with in_float64():
        want = both.twin(inputs_embeds=x, use_cache=False).logits
    near(both.ours(x), want)


# --------------------------------------------------------------------------------- through caches

CACHES: dict[str, Any] = {
    "growing": lambda c: GrowingCache(len(c.windows)),
    "static": lambda c: StaticCache(len(c.windows), 20),
    "by window": lambda c: cache_for(c.windows, slack=4),
    "paged": lambda c: PagedCache(
        BlockPool(c.n_layer, *c.kv_shape[:2], 40, 4, torch.float64, value_dim=c.kv_shape[2])
    ),
}


@torch.no_grad()
def fed(both: Pair, cache: Cache, idx: Tensor, chunks: list[int], positions=None) -> Tensor:
    """The logits of a text that comes in pieces."""
    assert sum(chunks) == idx.shape[1]
    logits = []
    for end, n in zip(accumulate(chunks), chunks, strict=True):
        part = None if positions is None else positions[:, end - n : end]
        logits.append(both.ours(idx[:, end - n : end], positions=part, cache=cache))
    return torch.cat(logits, dim=1)


@families
@less_seeds
@torch.no_grad()
def test_pieces_and_single_tokens_of_whole_and_of_padded_rows(family: str, seed: int) -> None:
    both, idx = pair(family, seed), token_ids(2, 12, seed=seed)
    want, config = both.theirs(idx).logits, both.ours.config
    for chunks in ([5, 1, 3, 3], [1] * 12):
        for cache in (GrowingCache(len(config.windows)), cache_for(config.windows, slack=4)):
            near(fed(both, cache, idx, chunks), want, f"{chunks}")
    batch = padded_batch(ROWS, 0, "left")
    real = batch.positions >= 0
    want = both.theirs(batch.idx, batch.positions).logits
    for cache in (GrowingCache(len(config.windows)), cache_for(config.windows, slack=4)):
        logits = fed(both, cache, batch.idx, [5, 1, 3, 3], batch.positions)
        near(logits[real], want[real], "padded")


#: Families whose layers have a state in place of keys, or differ in what they keep of a token.
NO_BLOCKS = {f for f in FAMILIES if LINEAR in kinds(drawn(f, 1))} | {"gemma4_text"}


@pytest.mark.parametrize(
    ("family", "kind"),
    [(f, k) for f in FAMILIES for k in CACHES if k != "paged" or f not in NO_BLOCKS],
)
@torch.no_grad()
def test_every_kind_of_cache(family: str, kind: str) -> None:
    both, idx = pair(family, 1), token_ids(2, 14)
    cache = CACHES[kind](both.ours.config)
    near(fed(both, cache, idx, [5, 1, 4, 3, 1]), both.theirs(idx).logits)


@few_with_attention
@torch.no_grad()
def test_greedy_text_of_padded_prompts(family: str, seed: int) -> None:
    both, prompts = pair(family, seed), ROWS[:2]
    batch = padded_batch(prompts, 0, "left")
    batches = [batch]
    if drawn(family, seed)["model_type"] in POOLING:  # it would pool the padding
        batches = [padded_batch([prompt], 0, "left") for prompt in prompts]
    want = []
    for one in batches:
        with in_float64():
            texts = both.twin.generate(
                one.idx, attention_mask=(one.positions >= 0).long(), max_new_tokens=9,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        want += texts[:, one.idx.shape[1] :].tolist()
    assert complete(generate(both.ours, prompts, 9, GREEDY)) == want
    assert complete(generate(both.ours, prompts, 9, GREEDY, prefill_chunk=5)) == want


# -------------------------------------------------------------------------------------- attention


slides = 4  # a seed at which some layer has a window, in these families
SLIDING = {
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "deepseek_v4",
}
SINKS = {"gpt_oss", "deepseek_v4"}
#: Kinds take turns in `make test`, two for each family; those of sinks are few.
kinds_with_sinks = [
    pytest.param(f, k, marks=[pytest.mark.slow] * ((n + i) % 5 > 1 and f not in SINKS))
    for n, f in enumerate(FAMILIES)
    for i, k in enumerate(ATTENTION_KINDS)
    if (f not in SINKS or k in SINK_KINDS) and FULL in kinds(drawn(f, slides))
]


def with_kind(family: str, kind: str) -> Pair:
    both = pair(family, slides)
    assert any(both.ours.config.windows) or family not in SLIDING
    model = copy.deepcopy(both.ours)
    use_attention_(model, kind)
    return Pair(model.float() if kind == "flex" else model, both.twin)


@pytest.mark.parametrize(("family", "kind"), kinds_with_sinks)
@torch.no_grad()
def test_every_kind_of_attention(family: str, kind: str) -> None:
    """Whole, padded and in pieces; `flex` computes in float32."""
    both, bound = with_kind(family, kind), 1e-5 if kind == "flex" else 1e-9
    for side in ("left", "right")[: 1 if kind == "flex" else 2]:
        batch = padded_batch(ROWS, 0, side)
        positions, real = batch.positions, batch.positions >= 0
        want = both.theirs(batch.idx, positions).logits[real]
        near(both.ours(batch.idx, positions=positions)[real].double(), want, side, bound)
        cache = GrowingCache(len(both.ours.config.windows))
        logits = fed(both, cache, batch.idx, [5, 1, 3, 3], positions)
        near(logits[real].double(), want, side, bound)


@pytest.mark.parametrize(
    ("family", "kind"), [row for row in kinds_with_sinks if "flex" not in row.values]
)
def test_gradients_of_every_kind_of_attention(family: str, kind: str) -> None:
    """`flex` has none on a CPU."""
    both, batch = with_kind(family, kind), padded_batch(ROWS, 0, "left")
    labels = batch.idx.masked_fill(batch.positions <= 0, IGNORE)
    logits = both.ours(batch.idx, positions=batch.positions)
    want = both.theirs(batch.idx, batch.positions, labels=labels).loss
    near_gradients(both, causal_lm_loss(logits, batch.targets), want)


@few_with_attention
@torch.no_grad()
def test_attention_weights(family: str, seed: int) -> None:
    both, idx = pair(family, seed), token_ids(2, 9, seed=seed)
    want = both.theirs(idx, output_attentions=True).attentions
    with record_attention(both.ours) as maps:
        both.ours(idx)
    weighing = [weights for weights in want if weights is not None]
    for layer, weights in zip(maps, weighing, strict=True):
        near(layer[0], weights)


# ---------------------------------------------------------------------------------------- folders


@published
@pytest.mark.parametrize("seed", several_seeds(OTHERS, quick=1))
@torch.no_grad()
def test_a_folder_goes_both_ways(family: str, seed: int, tmp_path) -> None:
    """What is loaded and saved is read by transformers as the family that it was, and comes back
    bit for bit."""
    from transformers import AutoModelForCausalLM

    twin, idx = theirs(family, seed), token_ids(1, 12)
    twin.save_pretrained(tmp_path / "theirs")
    checkpoint = load_checkpoint(tmp_path / "theirs")
    save_pretrained(checkpoint.model, tmp_path / "ours", published=checkpoint.published)
    again = load_checkpoint(tmp_path / "ours")
    assert again.model.config == checkpoint.model.config and not again.model.training
    assert torch.equal(again.model(idx), checkpoint.model(idx))
    with in_float64():
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
        back.config._experts_implementation = "eager"
    assert type(back) is type(twin)
    model = checkpoint.model.double()
    near(model(idx), Pair(model, back.eval().double()).theirs(idx).logits)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.slow] * (family != "gemma3_text"))
        for family in PUBLISHED
        if family.endswith("_text")
    ],
)
@torch.no_grad()
def test_the_part_for_text_of_a_model_for_pictures_is_read(family: str, tmp_path) -> None:
    """And written as a folder of its own, which transformers reads as a model for text."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.for_model(family.removesuffix("_text"), vision_config={})
    text = drawn(family, slides)
    for key in ("depth", "num_hidden_layers", "intermediate_size", "out_hidden_size"):
        setattr(config.vision_config, key, 1)
    config.text_config = AutoConfig.for_model(**text)
    config.text_config._experts_implementation = "eager"
    config.tie_word_embeddings = text["tie_word_embeddings"]
    whole = AutoModelForImageTextToText.from_config(config).eval()
    enlarge_(whole)
    whole.save_pretrained(tmp_path / "whole")
    checkpoint, idx = load_checkpoint(tmp_path / "whole"), token_ids(2, 12)
    logits = checkpoint.model(idx)
    near(logits, whole(idx, use_cache=False).logits, bound=5e-5)
    save_pretrained(checkpoint.model, tmp_path / "text", published=checkpoint.published)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    assert back.config.model_type == family
    near(logits, back(idx, use_cache=False).logits, bound=5e-5)


@published
@torch.no_grad()
def test_a_model_of_ours_is_read_by_transformers(family: str, tmp_path) -> None:
    """One that nothing came with: a Llama or a Mistral is recognised by its config."""
    model, idx = copy.deepcopy(pair(family, slides).ours), token_ids(1, 12)
    with in_float64():
        twin = hf_twin(model.float())
        twin.config._experts_implementation = "eager"
    assert type(twin) is type(pair(family, slides).twin)
    near(model.double()(idx), Pair(model, twin.double()).theirs(idx).logits)
    back = ours_from_hf(twin.float())
    assert back.config == model.config and torch.equal(back(idx), model.float()(idx))


@published
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_lower_precision_is_as_near_to_float64_as_that_of_transformers(
    family: str, dtype: torch.dtype
) -> None:
    twin, idx = theirs(family, 2), token_ids(2, 12)
    model, exact = ours_from_hf(twin), pair(family, 2).theirs(idx).logits
    logits, want = model.to(dtype)(idx), twin.to(dtype)(idx, use_cache=False).logits
    assert logits.dtype == dtype
    error, their_error = ((x.double() - exact).square().mean().sqrt() for x in (logits, want))
    assert error < 3 * their_error + torch.finfo(dtype).eps * exact.abs().max()


# ---------------------------------------------------------------------------------------- configs

#: Ours is written where theirs is None, or the other way round; none changes what is computed.
NOT_COMPARED = {"architectures", "rope_parameters", "rope_scaling", "max_window_layers"}


@published
def test_what_a_file_leaves_out_is_what_transformers_takes(family: str) -> None:
    from transformers import AutoConfig

    ours = config_from_dict({"model_type": family})
    written, defaults = config_to_dict(ours, family), AutoConfig.for_model(family)
    values = defaults.to_dict()
    compared = {*written} & {*values} - NOT_COMPARED
    assert len(compared) >= 13
    assert {key: written[key] for key in compared} == {key: values[key] for key in compared}
    if family != "gpt2":
        rope = defaults.rope_parameters
        assert ours.rope_theta == rope.get("main", rope.get(FULL, rope))["rope_theta"]


@published
def test_a_drawn_config_is_written_and_read_as_the_same(family: str) -> None:
    """Of layers that slide, the window of each; there are several words for it."""
    several = "sliding_window", "layer_types", "max_window_layers"

    def values(config: Any) -> dict[str, Any]:
        own = {name: value for name, value in vars(config).items() if name not in several}
        return {**own, "windows": config.windows}

    for seed in range(50):
        config = config_from_dict(drawn(family, seed))
        assert values(config_from_dict(config_to_dict(config))) == values(config)
