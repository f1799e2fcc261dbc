"""Published families that are Qwen2 with other numbers, and Qwen3: each against transformers, on
tiny random models of drawn sizes with large weights."""

import random
from typing import Any

import pytest
import torch
from caches import in_chunks
from tiny_models import ROPES, enlarge_, hf_twin, ours_from_hf, token_ids

from lm_from_scratch.attention.kinds import ATTENTION_KINDS, use_attention_
from lm_from_scratch.checkpoint.configs import config_from_dict, config_to_dict
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.models.causal_lm import build
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.models.qwen3 import SIZES, Qwen3Config, Qwen3ForCausalLM
from lm_from_scratch.text.batches import padded_batch
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.loss import causal_lm_loss

FAMILIES = ["llama", "mistral", "qwen3"]


def drawn(family: str, seed: int) -> dict[str, Any]:
    """A config of that family in the words of transformers: no two sizes alike, by chance."""
    draw = random.Random(f"{family} {seed}")
    n_kv_head, shared = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    width = n_kv_head * shared * draw.choice([4, 6, 8])
    n_layer = draw.choice([1, 2, 3])
    config: dict[str, Any] = dict(
        vocab_size=97,
        hidden_size=width,
        intermediate_size=draw.choice([20, 33, 56]),
        num_hidden_layers=n_layer,
        num_attention_heads=n_kv_head * shared,
        num_key_value_heads=n_kv_head,
        max_position_embeddings=draw.choice([64, 128]),
        rms_norm_eps=draw.choice([1e-6, 1e-5, 1e-2]),
        rope_parameters=draw.choice(ROPES),
        tie_word_embeddings=draw.choice([False, True]),
        hidden_act=draw.choice(["silu", "silu", "gelu"]),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    if family == "qwen3" or draw.choice([False, True]):
        config["head_dim"] = draw.choice([4, 10, 16])
    if family == "mistral":
        config["sliding_window"] = draw.choice([None, 3, 7])
    if family == "qwen3" and draw.choice([False, True]):
        config |= dict(use_sliding_window=True, sliding_window=draw.choice([3, 6]))
        config["layer_types"] = [draw.choice([FULL, SLIDING]) for _ in range(n_layer)]
    return config


def theirs(family: str, seed: int = 0, **changes: Any) -> Any:
    from transformers import AutoConfig
    from transformers import AutoModelForCausalLM as HFModel

    config = AutoConfig.for_model(family, **drawn(family, seed) | changes)
    config._attn_implementation = "eager"
    model = HFModel.from_config(config).eval()
    enlarge_(model, seed)
    return model


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_folder_computes_what_transformers_does(family: str, seed: int) -> None:
    twin = theirs(family, seed)
    model = ours_from_hf(twin)
    assert type(model) is (Qwen3ForCausalLM if family == "qwen3" else Qwen2ForCausalLM)
    idx = token_ids(2, 12, seed=seed)
    want = twin(idx, labels=idx)
    logits = model(idx)
    torch.testing.assert_close(logits, want.logits, atol=5e-5, rtol=0)
    with torch.no_grad():
        fed = in_chunks(idx, [5, 1, 4, 2], model=model)
    torch.testing.assert_close(fed, want.logits, atol=5e-5, rtol=0)


@pytest.mark.parametrize("seed", range(25, 50))
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_have_the_loss_and_gradients_of_transformers(family: str, seed: int) -> None:
    twin = theirs(family, seed)
    model = ours_from_hf(twin)
    rows = [token_ids(9, seed=seed).tolist(), token_ids(5, seed=seed + 1).tolist()]
    batch = padded_batch(rows, 0, "left")
    labels = batch.idx.masked_fill(batch.positions <= 0, IGNORE)
    want = twin(
        batch.idx,
        attention_mask=(batch.positions >= 0).long(),
        position_ids=batch.positions.clamp(min=0),
        labels=labels,
    )
    want.loss.backward()
    loss = causal_lm_loss(model(batch.idx, positions=batch.positions), batch.targets)
    loss.backward()
    torch.testing.assert_close(loss, want.loss, atol=1e-5, rtol=0)
    gradients = {name: p.grad for name, p in twin.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], atol=1e-4, rtol=1e-4, msg=name)
    with torch.no_grad():
        alone = model(torch.tensor([rows[1]]))[0]
        fed = in_chunks(batch.idx, [4, 3, 1, 1], batch.positions, model=model)
        packed = model(
            torch.tensor([rows[0] + rows[1]]),
            positions=torch.tensor([[*range(9), *range(5)]]),
            documents=torch.tensor([[0] * 9 + [1] * 5]),
        )
    torch.testing.assert_close(fed[1, 4:], alone, atol=5e-5, rtol=0)
    torch.testing.assert_close(packed[0, 9:], alone, atol=5e-5, rtol=0)


@pytest.mark.parametrize("seed", range(50, 56))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_comes_back_as_the_family_that_it_was(family: str, seed: int, tmp_path) -> None:
    """Also in windows, ties and rotation; and a model made here is read by transformers."""
    model = ours_from_hf(theirs(family, seed))
    idx = token_ids(1, 12)
    twin = hf_twin(model)
    assert twin.config.model_type == family
    assert type(twin).__name__ == f"{family.title()}ForCausalLM"
    torch.testing.assert_close(twin(idx).logits, model(idx), atol=5e-5, rtol=0)
    save_pretrained(model, tmp_path / "again")
    again = from_pretrained(tmp_path / "again")
    assert again.config == model.config
    assert torch.equal(again(idx), model(idx))


QWEN3 = dict(
    vocab_size=97, n_layer=2, n_head=6, n_kv_head=2, n_embd=20, head_dim=8, intermediate_size=28,
    eos_token_id=2,
)  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_a_qwen3_made_here_is_read_by_transformers(tied: bool) -> None:
    model = build(Qwen3Config(**QWEN3, tie_word_embeddings=tied)).eval()
    assert isinstance(model, Qwen3ForCausalLM)
    enlarge_(model)
    twin, idx = hf_twin(model), token_ids(2, 9)
    torch.testing.assert_close(twin(idx).logits, model(idx), atol=5e-5, rtol=0)
    assert twin.config.model_type == "qwen3"


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"sliding_window": 4, "max_window_layers": 0}, "mistral"),
    ],
)
def test_a_model_without_biases_is_written_as_a_llama_or_a_mistral(changes, family) -> None:
    sizes = {name: n for name, n in QWEN3.items() if name != "head_dim"} | {"n_embd": 24}
    model = build(Qwen2Config(**sizes, qkv_bias=False, **changes)).eval()
    enlarge_(model)
    twin, idx = hf_twin(model), token_ids(2, 9)
    assert twin.config.model_type == family
    torch.testing.assert_close(twin(idx).logits, model(idx), atol=5e-5, rtol=0)


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
@torch.no_grad()
def test_every_kind_of_attention_and_greedy_text(kind: str) -> None:
    twin = theirs("qwen3", 7, use_sliding_window=False, layer_types=None)
    model = ours_from_hf(twin)
    use_attention_(model, kind)
    idx = token_ids(1, 6)
    torch.testing.assert_close(model(idx), twin(idx).logits, atol=5e-5, rtol=0)
    want = twin.generate(idx, max_new_tokens=9, do_sample=False, eos_token_id=None)
    assert complete(generate(model, idx, 9, GREEDY)) == want[:, 6:].tolist()


def test_a_score_is_bounded_by_the_weights_of_the_norms() -> None:
    """What the normalisation is for: inputs a thousand times larger change no score."""
    model = build(Qwen3Config(**QWEN3)).eval()
    enlarge_(model)
    attention = model.model.layers[0].self_attn
    x, scores = torch.randn(1, 5, 20), []
    for scale in (1.0, 1000.0):
        q = attention.q_norm(attention.q_proj(scale * x).view(1, 5, -1, 8))
        k = attention.k_norm(attention.k_proj(scale * x).view(1, 5, -1, 8))
        scores.append((q[:, :, 0] @ k[:, :, 0].mT) / 8**0.5)
    torch.testing.assert_close(scores[0], scores[1], atol=1e-3, rtol=1e-3)
    largest = (attention.q_norm.weight * attention.k_norm.weight).abs().max() * 8**0.5
    assert scores[1].abs().max() <= largest


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes_have_their_parameters(name: str) -> None:
    with torch.device("meta"):
        model = build(Qwen3Config(**SIZES[name]))
    count = sum(p.numel() for p in model.parameters()) / 1e9
    published = {"Qwen3-0.6B": 0.6, "Qwen3-1.7B": 1.7, "Qwen3-4B": 4.0, "Qwen3-8B": 8.2}
    assert round(count, 1) == published[name]


def test_what_a_family_does_not_have_is_refused_by_name() -> None:
    for family, key in [
        ("llama", "attention_bias"),
        ("llama", "mlp_bias"),
        ("qwen3", "attention_bias"),
    ]:
        with pytest.raises(ValueError, match=f"{key}=True is not supported, only {key}=False"):
            config_from_dict({"model_type": family, key: True})
    windows = Qwen2Config(qkv_bias=False, sliding_window=8, max_window_layers=3)
    with pytest.raises(ValueError, match=r"windows=.* cannot be those of a mistral"):
        config_to_dict(windows)
    with pytest.raises(ValueError, match="qkv_bias=True cannot be written: in a llama it is False"):
        config_to_dict(Qwen2Config(), "llama")


#: Ours is written where theirs is None, or the other way round; none changes what is computed.
NOT_COMPARED = {"architectures", "rope_parameters", "rope_scaling", "max_window_layers"}


def test_what_a_file_leaves_out_is_what_transformers_takes() -> None:
    from transformers import AutoConfig

    for family in ["qwen2", *FAMILIES]:
        ours = config_from_dict({"model_type": family})
        written = config_to_dict(ours, family)
        defaults = AutoConfig.for_model(family)
        for key in {*written} & {*defaults.to_dict()} - NOT_COMPARED:
            theirs = getattr(defaults, key)
            assert theirs == written[key], (family, key)
        assert ours.rope_theta == defaults.rope_parameters["rope_theta"]
