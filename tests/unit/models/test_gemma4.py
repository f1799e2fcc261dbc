"""Gemma 4: layers that read the keys of an earlier layer, and embeddings for every layer; and what
its files say."""

import json
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.paged import BlockPool, PagedCache
from lm_from_scratch.cache.slots import StaticCache, cache_for
from lm_from_scratch.checkpoint.cache_sizes import cached_numbers
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.commands.generate import engine_for
from lm_from_scratch.generation.engine import Engine
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.requests import Request
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.layers.rope import log_scale
from lm_from_scratch.models.gemma4 import Gemma4Config, Gemma4ForCausalLM, sources
from lm_from_scratch.models.qwen2 import FULL, SLIDING
from lm_from_scratch.models.randomize import randomize_
from lm_from_scratch.text.batch import padded_batch

SIZES: dict[str, Any] = dict(
    vocab_size=97, n_layer=6, n_head=4, n_kv_head=2, n_embd=24, head_dim=8, global_head_dim=8,
    intermediate_size=28, sliding_window=4, layer_types=(SLIDING, FULL) * 3, kv_shared_layers=0,
    per_layer_width=6, per_layer_vocab_size=97, eos_token_id=None,
)  # fmt: skip
IDX = torch.randint(97, (2, 13), generator=torch.Generator().manual_seed(1))


def model(**changes: Any) -> Gemma4ForCausalLM:
    made = Gemma4ForCausalLM(Gemma4Config(**SIZES | changes)).double().eval()
    randomize_(made)
    return made


def near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


@pytest.mark.parametrize("shared", [0, 1, 3, 4])
@pytest.mark.parametrize("width", [0, 6])
@torch.no_grad()
def test_pieces_and_padded_rows_are_a_whole_pass(shared: int, width: int) -> None:
    m = model(kv_shared_layers=shared, per_layer_width=width)
    whole, own = m(IDX), 6 - shared
    paged = PagedCache(BlockPool(own, 2, 8, n_blocks=8, block_size=4, dtype=torch.float64))
    by_window = cache_for(m.config.windows, slack=4)
    for cache in (GrowingCache(own), StaticCache(own, 20), by_window, paged):
        pieces = [m(part, cache=cache) for part in IDX.split([5, 1, 4, 3], dim=1)]
        near(torch.cat(pieces, dim=1), whole)
    rows = [IDX[0].tolist(), IDX[1, :7].tolist()]
    batch = padded_batch(rows, 0, "left")
    logits = m(batch.idx, positions=batch.positions)
    near(logits[1, -7:], m(IDX[1:, :7])[0])
    want = [m(torch.tensor([row]))[0, -1].argmax() for row in rows]
    assert [out[0] for out in complete(generate(m, rows, 1, GREEDY))] == [int(n) for n in want]


@pytest.mark.parametrize("shared", [1, 3, 4])
@torch.no_grad()
def test_a_cache_holds_what_the_layers_with_keys_keep(shared: int) -> None:
    m = model(kv_shared_layers=shared, layer_types=(FULL,) * 6)
    m(IDX, cache=(cache := cache_for(m.config.windows, reserve=13)))
    assert cache.nbytes == 2 * (6 - shared) * 13 * 2 * 2 * 8 * 8
    names = {name for name, _ in m.named_parameters() if "k_proj" in name or "k_norm" in name}
    assert len(names) == 2 * (6 - shared)


@torch.no_grad()
def test_a_layer_that_shares_sees_keys_and_values_of_its_source() -> None:
    m = model(kv_shared_layers=2)
    seen: dict[int, tuple[Tensor, ...]] = {}
    for layer, block in enumerate(m.model.layers):
        block.self_attn.attend = lambda q, k, v, visibility, dropout, layer=layer: (
            seen.setdefault(layer, (k, v)),
            formula_attention(q, k, v, visibility),
        )[1]
    m(IDX)
    assert seen[4][0] is seen[2][0] and seen[5][1] is seen[3][1] and seen[4][0] is not seen[0][0]


def test_an_engine_has_blocks_for_the_layers_with_keys() -> None:
    m, prompts = model(kv_shared_layers=1), [IDX[0].tolist(), IDX[1, :7].tolist()]
    requests = [Request(prompt=prompt, max_new_tokens=5, sampler=GREEDY) for prompt in prompts]
    engine = engine_for(m, requests)
    numbers = [engine.submit(request) for request in requests]
    list(engine.run())
    assert [engine.results[n] for n in numbers] == complete(generate(m, prompts, 5, GREEDY))
    wide = model(global_head_dim=12)
    with pytest.raises(ValueError, match="the blocks of a pool are alike in all layers"):
        Engine(wide, engine.pool)


def test_every_weight_learns_and_the_source_for_its_readers_too() -> None:
    m = model(kv_shared_layers=3)
    m(IDX).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in m.parameters())


@pytest.mark.parametrize(
    ("kinds", "shared"),
    [
        ([FULL] * 4, 3),
        ([SLIDING, FULL] * 3, 2),
        (([SLIDING] * 5 + [FULL]) * 7, 18),
        (([SLIDING] * 4 + [FULL]) * 7, 20),
        ([SLIDING, SLIDING, FULL, FULL], 0),
    ],
)
def test_sources_are_those_of_gemma_4(kinds: list[str], shared: int) -> None:
    """Transformers says of each layer whether it stores keys for others, or reads the last ones."""
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(
        "gemma4_text", num_hidden_layers=len(kinds), layer_types=[*kinds],
        num_kv_shared_layers=shared,
    ).kv_sharing_modes  # fmt: skip
    stored: dict[str, int] = {}
    for layer, (kind, mode) in enumerate(zip(kinds, theirs, strict=True)):
        stored |= {kind: layer} if mode == "store" else {}
        assert sources(kinds, shared)[layer] == (stored[kind] if mode == "reuse" else layer)


@pytest.mark.parametrize(("kinds", "shared"), [([SLIDING, FULL], 1), ([FULL], 1), ([FULL], -1)])
def test_layers_without_a_source_are_refused(kinds: list[str], shared: int) -> None:
    with pytest.raises(ValueError, match="cannot share keys: the first"):
        sources(kinds, shared)


@torch.no_grad()
def test_a_published_file_holds_keys_that_nobody_reads(tmp_path) -> None:
    """And they are left there."""
    m = model(kv_shared_layers=2).float()
    save_pretrained(m, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".3.self_attn." in name and re.search("[kv]_", name)]:
        tensors[name.replace(".3.", ".5.")] = tensors[name].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(from_pretrained(tmp_path)(IDX), m(IDX))


@torch.no_grad()
@pytest.mark.parametrize("one_key_is_a_value", [False, True])
def test_what_a_config_says_of_a_cache_is_what_it_holds(one_key_is_a_value: bool, tmp_path) -> None:
    more: dict[str, Any] = {"keys_are_values": True, "global_n_kv_head": 1}
    more = more if one_key_is_a_value else {}
    more |= {"kv_shared_layers": 2, "global_head_dim": 12, "sliding_window": 20}
    m = model(per_layer_width=0, **more).float()
    cache = GrowingCache(4, reserve=13)
    m(IDX[:1], cache=cache)
    save_pretrained(m, tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    assert cache.nbytes == 4 * cached_numbers(contents, 13)


@torch.no_grad()
def test_a_layer_is_told_its_own_part() -> None:
    """Other numbers for layer 4 change what leaves layer 4, and nothing before it."""
    m = model()
    left: list[list[Tensor]] = [[], []]
    for table in left:
        hooks = [
            block.register_forward_hook(lambda *a, table=table: table.append(a[2]))
            for block in m.model.layers
        ]
        m(IDX)
        for hook in hooks:
            hook.remove()
        m.model.embed_tokens_per_layer.weight[:, 4 * 6 : 5 * 6] += 1.0
    same = [torch.equal(a, b) for a, b in zip(*left, strict=True)]
    assert same == [True] * 4 + [False] * 2


def test_embeddings_in_place_of_ids_have_no_rows_for_the_layers() -> None:
    with pytest.raises(ValueError, match="embeddings have no token ids"):
        model()(torch.randn(2, 5, 24).double())
    assert model(per_layer_width=0)(torch.randn(2, 5, 24).double()).shape == (2, 5, 97)


def test_queries_grow_as_in_llama_4() -> None:
    """Its attention of layers without rotation, fed ones."""
    from transformers.models.llama4 import modeling_llama4 as llama4

    config = llama4.Llama4TextConfig(
        hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        num_hidden_layers=4, floor_scale=16, attn_scale=0.3, attn_temperature_tuning=True,
    )  # fmt: skip
    attention = llama4.Llama4TextAttention(config, 3)
    assert not attention.use_rope
    positions = torch.arange(200)
    want = torch.log1p(torch.floor((positions.float() + 1) / 16)) * 0.3 + 1.0
    assert (attention.floor_scale, attention.attn_scale) == (16, 0.3)
    scales = log_scale(positions[None], 16, 0.3)
    torch.testing.assert_close(scales, want[None, None, :, None])
    assert torch.equal(scales[..., :15, :], torch.ones(1, 1, 15, 1))
