"""norm.py: equal to torch and to a float64 formula, in value and in gradient."""

import math

import pytest
import torch
import torch.nn.functional as F

from lm_from_scratch.layers.layer_norm import LayerNorm, layer_norm
from lm_from_scratch.layers.norm import (
    RMSNorm,
    RMSNormFunction,
    ZeroCentredRMSNorm,
    rms_norm,
    zero_centred_rms_norm,
)


def case(dtype: torch.dtype, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, 33, generator=generator, dtype=torch.float64) * scale + 5.0
    w = torch.randn(33, generator=generator, dtype=torch.float64)
    b = torch.randn(33, generator=generator, dtype=torch.float64)
    return x.to(dtype), w.to(dtype), b.to(dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 5e-6), (torch.bfloat16, 0.07), (torch.float16, 9e-3)],
)
def test_formula_equals_torch(dtype: torch.dtype, tolerance: float) -> None:
    x, w, b = case(dtype)
    ours, theirs = layer_norm(x, w, b, 1e-5), F.layer_norm(x, (33,), w, b, 1e-5)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


def test_module_runs_the_formula_in_value_and_gradient() -> None:
    x, w, b = case(torch.float64)
    module = LayerNorm(33, eps=1e-3).double()
    with torch.no_grad():
        module.weight.copy_(w)
        module.bias.copy_(b)
    grads = []
    for f in (lambda t: module(t), lambda t: layer_norm(t, module.weight, module.bias, 1e-3)):
        t = x.clone().requires_grad_()
        y = f(t)
        out = torch.autograd.grad((y * y.detach().sin()).sum(), [t, module.weight, module.bias])
        grads.append([y.detach(), *out])
    for ours, formula in zip(*grads, strict=True):
        torch.testing.assert_close(ours, formula, atol=1e-11, rtol=1e-10)


def test_gradcheck_in_float64() -> None:
    x, w, b = (t[..., :5].clone().requires_grad_() for t in case(torch.float64))
    assert torch.autograd.gradcheck(layer_norm, (x[:1, :2].detach().requires_grad_(), w, b))


def test_it_normalises_and_eps_stands_inside_the_root() -> None:
    one, zero = torch.ones(64).double(), torch.zeros(64).double()
    x = case(torch.float64)[0][..., :33]
    y = layer_norm(x, one[:33], zero[:33], eps=0.0)
    torch.testing.assert_close(y.mean(-1), torch.zeros(2, 7).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(y.var(-1, unbiased=False), torch.ones(2, 7).double())
    tiny = torch.tensor([1e-3, -1e-3] * 32).double()  # variance 1e-6
    inside = 1e-3 / (1e-6 + 1e-5) ** 0.5
    torch.testing.assert_close(layer_norm(tiny, one, zero, 1e-5)[0].item(), inside)


def test_half_precision_is_computed_in_float32() -> None:
    x = (torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 300).half()
    one, zero = torch.ones(64).half(), torch.zeros(64).half()
    y = layer_norm(x, one, zero)
    assert x.float().square().max() > torch.finfo(torch.float16).max  # the square overflows
    assert y.abs().max() > 2
    torch.testing.assert_close(y, F.layer_norm(x, (64,), one, zero), atol=2e-3, rtol=0)
    torch.testing.assert_close(LayerNorm(64).half()(x), y, atol=2e-3, rtol=0)


# ---------------------------------------------------------------------------------------- RMSNorm


def rms_formula(x, weight, eps):
    """Row by row in float64, with Python's own arithmetic."""
    rows = []
    for row in x.double().reshape(-1, x.shape[-1]).tolist():
        mean_square = sum(value * value for value in row) / len(row)
        rows.append([value / math.sqrt(mean_square + eps) for value in row])
    return torch.tensor(rows, dtype=torch.float64).reshape(x.shape) * weight.double()


@pytest.mark.parametrize("eps", [1e-6, 1e-3, 0.5])
@pytest.mark.parametrize("shape", [(7,), (5, 1), (3, 4, 9), (2, 3, 4, 6)])
def test_rms_norm_equals_the_formula_and_torch(shape: tuple, eps: float) -> None:
    x = torch.randn(shape, dtype=torch.float64) * 3 + 2
    weight = torch.randn(shape[-1], dtype=torch.float64)
    layer = RMSNorm(shape[-1], eps).double()
    layer.load_state_dict({"weight": weight})
    want = rms_formula(x, weight, eps)
    torch.testing.assert_close(rms_norm(x, weight, eps), want, atol=1e-12, rtol=0)
    torch.testing.assert_close(layer(x), want, atol=1e-12, rtol=0)
    torch.testing.assert_close(F.rms_norm(x, shape[-1:], weight, eps), want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("function", [rms_norm, RMSNormFunction.apply])
def test_the_gradient_of_rms_norm_is_exact(function) -> None:
    x = torch.randn(3, 2, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: function(x, w, 1e-3), (x, weight))
    row = x.detach()[0, 0].requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: function(x, w, 1e-3), (row, weight))
    tiny = (x.detach() * 1e-4).requires_grad_()  # where eps carries the gradient
    assert torch.autograd.gradcheck(lambda x: function(x, weight.detach(), 1e-6), tiny, eps=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_hand_made_gradient_equals_the_automatic_one_in_every_dtype(dtype) -> None:
    x = (torch.randn(4, 5, 33) * 3).to(dtype)
    weight, grad = torch.randn(33).to(dtype), torch.randn(4, 5, 33).to(dtype)
    got = []
    for function in (rms_norm, RMSNormFunction.apply):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = function(*leaves, 1e-6)
        y.backward(grad)
        got.append([y.detach(), *(leaf.grad for leaf in leaves)])
        assert all(t.dtype == dtype for t in got[-1])
    exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
    y = rms_norm(*exact, 1e-6)
    y.backward(grad.double())
    wants = [y.detach(), *(leaf.grad for leaf in exact)]
    tolerance = 4 * torch.finfo(dtype).eps
    for mine, automatic, want in zip(*got, wants, strict=True):
        scale = want.abs().max().item() + 1
        assert (mine.double() - want).abs().max() < tolerance * scale
        assert (automatic.double() - want).abs().max() < tolerance * scale


def test_rms_norm_equals_transformers_bit_by_bit_in_low_precision() -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        theirs = Qwen2RMSNorm(48).to(dtype)
        with torch.no_grad():
            theirs.weight.copy_(torch.randn(48))
        x = (torch.randn(2, 5, 48) * 7).to(dtype)
        got = rms_norm(x, theirs.weight, theirs.variance_epsilon)
        if dtype == torch.float32:
            torch.testing.assert_close(got, theirs(x), atol=2e-6, rtol=2e-6)
        else:
            assert torch.equal(got, theirs(x))


def test_rms_norm_keeps_the_mean_square_not_the_mean() -> None:
    x = torch.randn(50, 64, dtype=torch.float64) + 5
    y = rms_norm(x, torch.ones(64, dtype=torch.float64))
    torch.testing.assert_close(y.square().mean(-1), torch.ones(50).double(), atol=1e-6, rtol=0)
    assert (y.mean(-1) > 0.9).all() and (y.var(-1) < 0.2).all()
    centred = x - x.mean(-1, keepdim=True)
    assert (rms_norm(centred, torch.ones(64).double()) - y).abs().max() > 1.0


def test_the_eps_of_rms_norm_stands_inside_the_root() -> None:
    x = torch.full((1, 4), 1e-3, dtype=torch.float64)
    y = rms_norm(x, torch.ones(4, dtype=torch.float64), eps=1e-6)
    torch.testing.assert_close(y, torch.full_like(y, 1 / math.sqrt(2)))


def test_large_half_precision_activations_do_not_overflow_in_rms_norm() -> None:
    x = torch.full((1, 8), 300.0).half()
    torch.testing.assert_close(RMSNorm(8).half()(x), torch.ones(1, 8).half())


def test_a_float32_weight_over_bfloat16_activations_gives_float32() -> None:
    x = torch.randn(2, 3, 8).bfloat16()
    layer = RMSNorm(8)
    assert layer(x).dtype == rms_norm(x, layer.weight).dtype == torch.float32
    assert repr(layer) == "RMSNorm(8, eps=1e-06)"


def test_rms_norm_refuses_another_width() -> None:
    """A width of 1 would be spread over all features, with no error at all."""
    for width in (16, 1):
        with pytest.raises(ValueError, match=f"x has {width} features, and the weight 8"):
            RMSNorm(8)(torch.ones(2, width))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_zero_centred_norm_is_that_of_qwen3_next(dtype: torch.dtype) -> None:
    """The weight is counted from 1, and half precision is rounded after the product."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    x, w, _ = case(dtype)
    ours, theirs = ZeroCentredRMSNorm(33, 1e-3).to(dtype), Qwen3NextRMSNorm(33, 1e-3).to(dtype)
    with torch.no_grad():
        ours.weight.copy_(w)
        theirs.weight.copy_(w)
    y = ours(x)
    assert y.dtype == dtype
    if dtype == torch.float64:  # theirs computes in float32
        torch.testing.assert_close(y, rms_norm(x, 1 + w, 1e-3), atol=0, rtol=0)
        torch.testing.assert_close(y, theirs(x), atol=1e-5, rtol=0)
    else:
        torch.testing.assert_close(y, theirs(x), atol=2e-6, rtol=2e-6)
    assert torch.equal(zero_centred_rms_norm(x, w, 1e-3), y)
    fresh = ZeroCentredRMSNorm(33)
    torch.testing.assert_close(fresh(x.float()), RMSNorm(33)(x.float()), atol=1e-6, rtol=1e-6)
    assert repr(fresh) == "ZeroCentredRMSNorm(33, eps=1e-06)"
