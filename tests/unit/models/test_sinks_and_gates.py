"""Attention with sinks and with gates against gpt-oss and Qwen3-Next of transformers."""

import random
from typing import Any

import pytest
import torch
from caches import KINDS, in_chunks
from tiny_models import enlarge_, token_ids
from torch import Tensor, nn

from lm_from_scratch.attention.visibility import Visibility, positions_from_mask
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.layers.activation import GatedMLP
from lm_from_scratch.layers.rope import RotaryEmbedding, apply_rope
from lm_from_scratch.models.gated_attention import GatedAttention, GatedForCausalLM
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config
from lm_from_scratch.models.sink_attention import SinkAttention, SinkForCausalLM
from lm_from_scratch.training.loss import causal_lm_loss

OURS = {"gpt_oss": SinkAttention, "qwen3_next": GatedAttention}
MODELS = {"gpt_oss": SinkForCausalLM, "qwen3_next": GatedForCausalLM}
families = pytest.mark.parametrize("family", OURS)


def drawn(family: str, seed: int) -> dict[str, Any]:
    """Sizes in our words; no two alike, by chance."""
    draw = random.Random(f"{family} {seed}")
    n_kv_head, shared, n_layer = draw.choice([1, 2, 3]), draw.choice([1, 2, 3]), draw.choice([2, 3])
    sizes: dict[str, Any] = dict(
        vocab_size=97,
        n_layer=n_layer,
        n_kv_head=n_kv_head,
        n_head=n_kv_head * shared,
        head_dim=draw.choice([4, 10, 16]),
        n_embd=draw.choice([12, 20, 36]),
        intermediate_size=draw.choice([20, 33]),
        qkv_bias=draw.choice([False, True]),
        rms_norm_eps=draw.choice([1e-6, 1e-5, 1e-2]),
        rope_theta=draw.choice([1e4, 1.5e5]),
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    if family == "gpt_oss":
        types = [draw.choice([FULL, SLIDING]) for _ in range(n_layer)]
        sizes |= dict(sliding_window=draw.choice([2, 3, 6]), layer_types=tuple(types))
    return sizes


def in_their_words(family: str, sizes: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    layers = list(sizes.get("layer_types", [FULL] * sizes["n_layer"]))
    words = dict(
        vocab_size=97,
        num_hidden_layers=sizes["n_layer"],
        num_attention_heads=sizes["n_head"],
        num_key_value_heads=sizes["n_kv_head"],
        head_dim=sizes["head_dim"],
        hidden_size=sizes["n_embd"],
        intermediate_size=sizes["intermediate_size"],
        attention_bias=sizes["qkv_bias"],
        rms_norm_eps=sizes["rms_norm_eps"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": sizes["rope_theta"],
            "partial_rotary_factor": 1.0,
        },
        layer_types=layers,
        eos_token_id=2,
        pad_token_id=0,
    )
    if family == "gpt_oss":
        words |= dict(sliding_window=sizes["sliding_window"], num_local_experts=2)
    else:
        words |= dict(mlp_only_layers=list(range(sizes["n_layer"])))
    config = AutoConfig.for_model(family, **words)
    config._attn_implementation = "eager"
    return config


class Dense(GatedMLP):
    """A gated MLP in the place of the experts, which this file is not about."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


def theirs(family: str, sizes: dict[str, Any], seed: int) -> Any:
    from transformers import AutoModelForCausalLM as HFModel

    twin = HFModel.from_config(in_their_words(family, sizes)).eval()
    if family == "gpt_oss":
        for layer in twin.model.layers:
            layer.mlp = Dense(sizes["n_embd"], sizes["intermediate_size"], "silu")
    enlarge_(twin, seed)
    for name, parameter in twin.named_parameters():
        if name.endswith("sinks"):
            parameter.data.mul_(8)  # std 1
    return twin


def ours_from(family: str, twin: nn.Module, sizes: dict[str, Any]) -> Any:
    """The same weights here. Between the layers, Qwen3-Next counts the weights of norms from 1."""
    model = MODELS[family](Qwen2Config(**sizes)).eval()
    weights = {name: x.clone() for name, x in twin.state_dict().items()}
    if family == "qwen3_next":
        for name in weights:
            if name.endswith("layernorm.weight") or name == "model.norm.weight":
                weights[name] += 1.0
    model.load_state_dict(weights)
    return model


def module_pair(family: str, seed: int) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    sizes = drawn(family, seed)
    twin = theirs(family, sizes, seed).model.layers[0].self_attn
    ours = OURS[family](Qwen2Config(**sizes))
    ours.load_state_dict(twin.state_dict())
    return ours.eval(), twin.eval(), sizes


def rotations(family: str, sizes: dict[str, Any], positions: Tensor) -> tuple[Any, Any]:
    """Cosines and sines for us, and for them: Qwen3-Next has them twice, side by side."""
    pair = RotaryEmbedding(sizes["head_dim"], sizes["rope_theta"])(positions, torch.float32)
    if family == "gpt_oss":
        return pair, tuple(x[:, 0] for x in pair)
    return pair, tuple(torch.cat([x[:, 0], x[:, 0]], dim=-1) for x in pair)


@families
@pytest.mark.parametrize("seed", range(25))
def test_the_module_is_that_of_transformers(family: str, seed: int) -> None:
    """Outputs, and the gradients of every parameter and of the input; rows are padded on the left
    in every second config."""
    ours, twin, sizes = module_pair(family, seed)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, : 4 * (seed % 2)] = 0
    positions, real = positions_from_mask(mask), mask.bool()
    window = None if seed % 3 else 4
    visibility = Visibility(positions, positions, window=window)
    x = torch.randn(2, 9, sizes["n_embd"], generator=generator)
    seen = visibility.mask | torch.eye(9).bool()  # softmax of theirs must see something
    added = torch.zeros(2, 1, 9, 9).masked_fill(~seen, torch.finfo(torch.float32).min)
    our_rotation, their_rotation = rotations(family, sizes, positions)
    found = []
    for module in (ours, twin):
        at = x.clone().requires_grad_()
        if module is ours:
            y = module(at, our_rotation, visibility, NO_CACHE)
        else:
            y = module(at, their_rotation, added)[0]
        y[real].square().sum().backward()
        grads = {name: p.grad for name, p in module.named_parameters()}
        found.append((y[real], at.grad[real], grads))
    torch.testing.assert_close(found[0][0], found[1][0], atol=5e-5, rtol=0)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-4)
    for name, grad in found[1][2].items():
        rounding = 5e-6 * float(grad.abs().max()) + 1e-6  # sums of terms of that size
        torch.testing.assert_close(found[0][2][name], grad, atol=rounding, rtol=0, msg=name)


@families
@pytest.mark.parametrize("seed", range(25))
def test_whole_models_agree_cached_and_padded(family: str, seed: int) -> None:
    """With a dense MLP in place of the experts: full and sliding layers by the masks and caches of
    transformers, logits, loss, left padding, pieces."""
    sizes = drawn(family, seed)
    twin = theirs(family, sizes, seed)
    model = ours_from(family, twin, sizes)
    idx = token_ids(2, 12, seed=seed)
    with torch.no_grad():
        want = twin(idx, labels=idx)
        logits = model(idx)
        torch.testing.assert_close(logits, want.logits, atol=5e-5, rtol=1e-5)
        loss = causal_lm_loss(logits[:, :-1], idx[:, 1:])
        torch.testing.assert_close(loss, want.loss, atol=1e-5, rtol=0)
        fed = in_chunks(idx, [5, 1, 4, 2], model=model)
        torch.testing.assert_close(fed, want.logits, atol=5e-5, rtol=1e-5)
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[1, :5] = 0
        positions = positions_from_mask(mask)
        want = twin(idx, attention_mask=mask, position_ids=positions.clamp(min=0)).logits
        padded = in_chunks(idx, [7, 1, 4], positions, model=model)
        torch.testing.assert_close(padded[mask.bool()], want[mask.bool()], atol=5e-5, rtol=1e-5)
        cached = twin(idx[:, :8], use_cache=True)
        rest = twin(idx[:, 8:], past_key_values=cached.past_key_values).logits
        torch.testing.assert_close(fed[:, 8:], rest, atol=5e-5, rtol=1e-5)


def model_of(family: str, **changes: Any) -> Any:
    sizes = dict(
        vocab_size=97, n_layer=3, n_head=6, n_kv_head=2, n_embd=48, intermediate_size=56,
        head_dim=8, tie_word_embeddings=False, eos_token_id=2,
    )  # fmt: skip
    model = MODELS[family](Qwen2Config(**{**sizes, **changes})).eval()
    enlarge_(model)
    return model.double()


WINDOWS = {"full": {}, "W = 4": dict(sliding_window=4, max_window_layers=0),
           "W = 3 in two layers": dict(sliding_window=3, max_window_layers=1)}  # fmt: skip
EXACT = [kind for kind in KINDS if "bits" not in kind]


@families
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("kind", EXACT)
@torch.no_grad()
def test_every_kind_of_cache_gives_one_full_pass(family: str, windows: str, kind: str) -> None:
    """A sink takes no slot, and a gate belongs to the token that looks: neither is cached."""
    model = model_of(family, **WINDOWS[windows])
    if not (cache := KINDS[kind](model)):
        return
    idx = token_ids(2, 16)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, :3] = 0
    positions = positions_from_mask(mask)
    alone = model(idx[1:, 3:])[0]
    parts, start = [], 0
    for n in (6, 1, 1, 5, 1, 2):
        at = slice(start, start := start + n)
        parts.append(model(idx[:, at], positions=positions[:, at], cache=cache))
    fed = torch.cat(parts, dim=1)
    torch.testing.assert_close(fed[0], model(idx[:1])[0], atol=1e-9, rtol=0)
    torch.testing.assert_close(fed[1, 3:], alone, atol=1e-9, rtol=0)


@families
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    model, rows = model_of(family), [token_ids(9).tolist(), token_ids(5, seed=2).tolist()]
    packed = model(
        torch.tensor([rows[0] + rows[1]]),
        positions=torch.tensor([[*range(9), *range(5)]]),
        documents=torch.tensor([[0] * 9 + [1] * 5]),
    )
    for part, row in zip(packed[0].split([9, 5]), rows, strict=True):
        torch.testing.assert_close(part, model(torch.tensor([row]))[0], atol=1e-10, rtol=0)


@torch.no_grad()
def test_a_layer_may_turn_a_part_of_its_features() -> None:
    """As Qwen3-Next does with a quarter of them: ``rotate`` is handed in."""
    sizes = drawn("qwen3_next", 1) | dict(head_dim=16)
    twin = theirs("qwen3_next", sizes, 1).model.layers[0].self_attn
    ours = GatedAttention(Qwen2Config(**sizes)).eval()
    ours.load_state_dict(twin.state_dict())

    def part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = 2 * cos.shape[-1]
        return torch.cat([apply_rope(x[..., :n], cos, sin), x[..., n:]], dim=-1)

    ours.rotate = part
    x, positions = torch.randn(1, 7, sizes["n_embd"]), torch.arange(7)[None]
    rotation, theirs_too = rotations("qwen3_next", sizes | dict(head_dim=4), positions)
    visibility = Visibility(positions, positions, dense=True)
    added = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    want = twin(x, theirs_too, added)[0]
    torch.testing.assert_close(ours(x, rotation, visibility, NO_CACHE), want, atol=5e-5, rtol=0)


@families
def test_fresh_weights(family: str) -> None:
    """Sinks are drawn like the weights, norms counted from 1 begin at 0, the others at 1."""
    torch.manual_seed(0)
    model = MODELS[family](
        Qwen2Config(vocab_size=97, n_layer=8, n_head=64, n_kv_head=2, n_embd=128, eos_token_id=None)
    )
    for name, p in model.named_parameters():
        if name.endswith("sinks"):
            assert 0.01 < p.std() < 0.03
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            assert (p == 0).all()
        elif name.endswith("norm.weight"):
            assert (p == 1).all()


@families
def test_published_widths(family: str) -> None:
    """gpt-oss-20b and Qwen3-Next-80B-A3B: parameters of one attention layer."""
    sizes = {
        "gpt_oss": dict(n_embd=2880, n_head=64, n_kv_head=8, head_dim=64, qkv_bias=True),
        "qwen3_next": dict(n_embd=2048, n_head=16, n_kv_head=2, head_dim=256, qkv_bias=False),
    }[family]
    with torch.device("meta"):
        count = sum(p.numel() for p in OURS[family](Qwen2Config(**sizes)).parameters())
    C, H, Hkv, D = (sizes[key] for key in ("n_embd", "n_head", "n_kv_head", "head_dim"))
    plain = C * D * (2 * H + 2 * Hkv)
    if family == "gpt_oss":
        assert count == plain + D * (H + 2 * Hkv) + C + H
    else:
        assert count == plain + C * H * D + 2 * D
