"""A probe finds what one matrix can read off, and nothing else."""

import pytest
import torch
import torch.nn.functional as F

from lm_from_scratch.inside.probe import fit_probe


def classes(n: int, C: int = 5, K: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """States whose class is the largest of K of their own directions."""
    x = torch.randn(n, C, dtype=torch.float64) * 3 + 1
    return x, (x @ torch.randn(C, K, dtype=torch.float64)).argmax(-1)


def test_what_is_linear_is_found_on_new_examples() -> None:
    torch.manual_seed(0)
    x, y = classes(600)
    probe = fit_probe(x[:400], y[:400], 3)
    assert probe.accuracy(x[400:], y[400:]) > 0.95
    assert probe(x).shape == (600, 3)


def test_what_is_not_linear_is_not_found() -> None:
    torch.manual_seed(0)
    x = torch.randn(1200, 2, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()  # exclusive or
    assert fit_probe(x[:800], y[:800], 2).accuracy(x[800:], y[800:]) < 0.6


def test_it_is_at_the_minimum_of_its_loss() -> None:
    """In float64 the gradient that autograd gives of the formula, written again, is 0."""
    torch.manual_seed(0)
    x, y = classes(200)
    y[:40] = torch.randint(3, (40,))  # no state is sure of its class
    probe = fit_probe(x, y, 3, decay=0.1)
    weight = probe.weight.clone().requires_grad_(True)
    bias = probe.bias.clone().requires_grad_(True)
    z = (x - x.mean(0)) / x.std(0, correction=0)
    loss = F.cross_entropy(z @ weight + bias, y) + 0.05 * (weight**2).sum()
    for gradient in torch.autograd.grad(loss, [weight, bias]):
        assert gradient.abs().max() < 1e-4
    torch.testing.assert_close(probe(x), z @ probe.weight + probe.bias)


def test_scale_and_shift_of_a_feature_change_nothing() -> None:
    torch.manual_seed(0)
    x, y = classes(200)
    other = x * torch.tensor([1e3, 1e-3, 1, -2, 5], dtype=x.dtype) + 7
    a, b = fit_probe(x, y, 3)(x), fit_probe(other, y, 3)(other)
    torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


def test_a_feature_that_never_changes_does_no_harm() -> None:
    torch.manual_seed(0)
    x, y = classes(200)
    x[:, 2] = 4.0
    assert fit_probe(x, y, 3)(x).isfinite().all()


@pytest.mark.parametrize(
    ("x", "y", "n_classes", "message"),
    [
        ((4, 2), [0, 1, 0], 2, r"x has shape \(4, 2\) and y \(3,\), not \(N, C\), \(N,\)"),
        ((4,), [0, 1, 0, 1], 2, r"x has shape \(4,\) and y"),
        ((3, 2), [0, 1, 2], 2, r"y holds 0 ... 2, not 0 ... 1"),
        ((3, 2), [0, -1, 1], 2, r"y holds -1 ... 1, not 0 ... 1"),
        ((0, 2), [], 2, r"x has shape \(0, 2\)"),
        ((3, 2), [0, 1, 1], 0, r"n_classes=0 must be an integer, at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(x, y, n_classes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_probe(torch.randn(x), torch.tensor(y, dtype=torch.long), n_classes)


def test_half_precision_is_fitted_in_float32_and_nothing_flows_back() -> None:
    torch.manual_seed(0)
    x, y = classes(400)
    half = x.bfloat16().requires_grad_(True)
    with torch.no_grad():
        probe = fit_probe(half + 0, y, 3)
    assert fit_probe(half * 1, y, 3).weight.dtype == probe.weight.dtype == torch.float32
    assert probe.accuracy(half, y) > 0.95 and half.grad is None
