"""sinks.py: two ways to one mean, and the laws of a score without a value."""

import copy

import pytest
import torch
from tiny_models import token_ids

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.gqa import repeat_kv
from lm_from_scratch.attention.kinds import use_attention_
from lm_from_scratch.attention.sinks import (
    SINK_KINDS,
    formula_sink_attention,
    sink_attention,
    sink_weights,
    with_sinks,
)
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.instruments.conformance import CASES
from lm_from_scratch.instruments.record import record_attention
from lm_from_scratch.models.gpt_oss import GptOssConfig, GptOssForCausalLM


def drawn(case, dtype=torch.float64):
    q, k, v, _ = (x if x is None else x.to(dtype) for x in case.tensors(torch.float64))
    q, k, v = (x.repeat(case.copies, 1, 1, 1) for x in (q, k, v))
    sinks = torch.randn(q.shape[1], generator=torch.Generator().manual_seed(3)).to(dtype) * 2
    return [x.detach().clone().requires_grad_() for x in (q, k, v, sinks)]


@pytest.mark.parametrize("name", CASES)
def test_the_fast_way_is_the_formula_in_value_and_gradient(name: str) -> None:
    case, found = CASES[name], []
    for compute in SINK_KINDS.values():
        q, k, v, sinks = drawn(case)
        y = compute(q, k, v, case.visibility(), sinks, 0.0)
        grads = torch.autograd.grad(
            (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum(), (q, k, v, sinks)
        )
        found.append([y.detach(), *grads])
    for formula, fast in zip(*found, strict=True):
        assert torch.isfinite(fast).all()
        torch.testing.assert_close(fast, formula, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_a_sink_turns_plain_attention_down_by_a_sigmoid(name: str) -> None:
    """y = sigmoid(log-sum-exp - sink) times attention without it."""
    q, k, v, sinks = drawn(CASES[name])
    vis = CASES[name].visibility()
    scores = q @ repeat_kv(k, q.shape[1]).mT / q.shape[-1] ** 0.5
    total = scores.masked_fill(~vis.mask, -torch.inf).logsumexp(-1, keepdim=True)  # (B, H, T, 1)
    passed = torch.sigmoid(total - sinks.view(1, -1, 1, 1))
    want = passed * formula_attention(q, k, v, vis)
    for compute in SINK_KINDS.values():
        torch.testing.assert_close(compute(q, k, v, vis, sinks, 0.0), want, atol=1e-12, rtol=0)
    rest = sink_weights(q, k, vis, sinks).sum(-1, keepdim=True)
    torch.testing.assert_close(rest, passed, atol=1e-12, rtol=0)


def simple(T: int = 6, S: int = 6, H: int = 4, Hkv: int = 2, D: int = 5):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, H, T, D), (2, Hkv, S, D), (2, Hkv, S, D)
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    positions = torch.arange(S)[None]
    return q, k, v, Visibility(positions[:, S - T :], positions, dense=True)


@pytest.mark.parametrize("compute", SINK_KINDS.values(), ids=SINK_KINDS)
@pytest.mark.parametrize(("T", "S"), [(6, 6), (1, 6), (3, 6)])
def test_a_low_sink_is_none_and_a_high_one_is_silence(compute, T: int, S: int) -> None:
    q, k, v, vis = simple(T, S)
    low, high = (torch.full((4,), z, dtype=torch.float64) for z in (-1e4, 1e4))
    plain = formula_attention(q, k, v, vis)
    torch.testing.assert_close(compute(q, k, v, vis, low, 0.0), plain, atol=1e-9, rtol=0)
    assert compute(q, k, v, vis, high, 0.0).abs().max() < 1e-9


def test_a_sink_is_neither_scaled_nor_shared_nor_a_value() -> None:
    """One query, one key, a score of 0: the key's weight is 1 / (1 + e^z)."""
    q, k = torch.zeros(1, 2, 1, 9), torch.zeros(1, 1, 1, 9)
    v, at = torch.ones(1, 1, 1, 9), torch.zeros(1, 1, dtype=torch.long)
    sinks = torch.tensor([0.0, 2.0])
    for compute in SINK_KINDS.values():
        y = compute(q, k, v, Visibility(at, at), sinks, 0.0)[0, :, 0]
        want = 1 / (1 + sinks.exp())
        torch.testing.assert_close(y, want[:, None].expand(2, 9), atol=1e-6, rtol=0)


def test_a_row_that_sees_nothing_is_0_without_nan_and_has_a_gradient_of_0() -> None:
    positions = torch.tensor([[-1, -1, 0, 1, 2, 3], [-1] * 6])
    for T in (6, 1):
        q, k, v, _ = simple(T)
        sinks = torch.zeros(4, dtype=torch.float64)
        inputs = [x.requires_grad_() for x in (q, k, v, sinks)]
        vis = Visibility(positions[:, -T:], positions)
        for compute in SINK_KINDS.values():
            y = compute(q, k, v, vis, sinks, 0.0)
            assert (y[1] == 0).all() and (T == 1 or (y[0, :, :2] == 0).all())
            for grad in torch.autograd.grad(y.square().sum(), inputs):
                assert torch.isfinite(grad).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    q, k, v, vis = simple()
    sinks = torch.tensor([-1.0, 0.0, 1.0, 3.0], dtype=torch.float64)
    want = formula_sink_attention(q, k, v, vis, sinks)
    for compute in SINK_KINDS.values():
        y = compute(*(x.to(dtype) for x in (q, k, v)), vis, sinks.to(dtype), 0.0)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), want, atol=0.03, rtol=0)


@pytest.mark.parametrize("compute", SINK_KINDS.values(), ids=SINK_KINDS)
@pytest.mark.parametrize("T", [1, 6])
def test_dropout_keeps_the_mean(compute, T: int) -> None:
    torch.manual_seed(0)
    q, k, v, vis = simple(T)
    sinks = torch.ones(4, dtype=torch.float64)
    want = compute(q, k, v, vis, sinks, 0.0)
    many = [x.repeat(1500, 1, 1, 1) for x in (q, k, v)]
    some = compute(*many, vis, sinks, 0.5).view(1500, *want.shape)
    torch.testing.assert_close(some.mean(0), want, atol=0.15, rtol=0)
    assert (some[0] - want).abs().max() > 0.1


def test_with_sinks_has_the_signature_of_all_kinds() -> None:
    q, k, v, vis = simple()
    sinks = torch.randn(4, dtype=torch.float64)
    attend = with_sinks(sinks)
    assert torch.equal(attend(q, k, v, vis), sink_attention(q, k, v, vis, sinks))
    assert torch.equal(attend(q, k, v, vis, 0.0), attend(q, k, v, vis))


def test_sinks_that_do_not_fit_are_refused() -> None:
    q, k, v, vis = simple()
    for sinks in (torch.zeros(2), torch.zeros(1, 4), torch.zeros(())):
        for compute in SINK_KINDS.values():
            with pytest.raises(ValueError, match=r"sinks have shape .*each of the 4 query heads"):
                compute(q, k, v, vis, sinks, 0.0)


SMALL = dict(
    vocab_size=97, n_layer=3, n_head=6, n_kv_head=2, n_embd=48, intermediate_size=56,
    n_expert=4, top_k=2, eos_token_id=2,
)  # fmt: skip


def small_model() -> GptOssForCausalLM:
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**SMALL, initializer_range=0.25)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    return model


@torch.no_grad()
def test_a_built_model_keeps_its_sinks_when_the_kind_is_switched() -> None:
    model, idx = small_model(), token_ids(2, 9)
    want = model(idx)
    for kind in SINK_KINDS:
        use_attention_(model, kind)
        torch.testing.assert_close(model(idx), want, atol=5e-5, rtol=0)
    for kind in ("tiled", "flex", "packed"):
        with pytest.raises(ValueError, match=f"attention kind '{kind}' has no sinks, only"):
            use_attention_(model, kind)
    assert torch.equal(copy.deepcopy(model)(idx), model(idx))


@torch.no_grad()
def test_recorded_weights_leave_the_share_of_the_sink_out() -> None:
    model, idx = small_model(), token_ids(2, 9)
    want = model(idx)
    with record_attention(model) as maps:
        assert torch.equal(model(idx), want)
    for (weights,), layer in zip(maps, model.model.layers, strict=True):
        sums = weights.sum(-1)
        assert (sums < 1 + 1e-6).all() and 0.05 < (1 - sums).mean() < 0.95
        assert layer.self_attn.sinks.abs().max() > 0
    copied = copy.deepcopy(model)  # also after recording, a copy has sinks of its own
    for layer in copied.model.layers:
        layer.self_attn.sinks.fill_(-1e4)
    assert not torch.allclose(copied(idx), want) and torch.equal(model(idx), want)
