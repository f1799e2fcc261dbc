"""norm.py: equal to torch and to a float64 formula, in value and in gradient."""

import pytest
import torch
import torch.nn.functional as F

from lm_from_scratch.norm import LayerNorm, layer_norm


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


def test_G26_half_precision_is_computed_in_float32() -> None:
    x = (torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 300).half()
    one, zero = torch.ones(64).half(), torch.zeros(64).half()
    y = layer_norm(x, one, zero)
    assert x.float().square().max() > torch.finfo(torch.float16).max  # the square overflows
    assert y.abs().max() > 2
    torch.testing.assert_close(y, F.layer_norm(x, (64,), one, zero), atol=2e-3, rtol=0)
    torch.testing.assert_close(LayerNorm(64).half()(x), y, atol=2e-3, rtol=0)
