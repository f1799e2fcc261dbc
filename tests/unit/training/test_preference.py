"""preference.py: a coin at first, then a margin."""

import math

import pytest
import torch
from torch import Tensor

from lm_from_scratch.training import preference


def drawn(seed: int = 0, B: int = 5) -> list[Tensor]:
    """Log-probabilities of chosen and rejected answers, by the model and by the reference."""
    g = torch.Generator().manual_seed(seed)
    each = [-10 * torch.rand(B, generator=g, dtype=torch.float64) for _ in range(4)]
    return [t.requires_grad_() for t in each]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0, 7.0])
def test_a_model_that_is_its_reference_tosses_a_coin(beta: float) -> None:
    chosen, rejected, _, _ = drawn()
    found = preference.dpo_loss(chosen, rejected, chosen, rejected, beta)
    assert found.losses.tolist() == pytest.approx([math.log(2)] * 5, abs=1e-12)
    assert found.margins.tolist() == [0.0] * 5
    gradients = torch.autograd.grad(found.losses.sum(), (chosen, rejected))
    assert gradients[0].tolist() == pytest.approx([-beta / 2] * 5)
    assert gradients[1].tolist() == pytest.approx([beta / 2] * 5)


def test_a_pair_by_hand() -> None:
    """The chosen answer has become e times as probable, the rejected one e squared times less."""
    numbers = (torch.tensor([x]) for x in (-4.0, -7.0, -5.0, -5.0))
    found = preference.dpo_loss(*numbers, beta=0.5)
    assert found.chosen_rewards.tolist() == [0.5]
    assert found.rejected_rewards.tolist() == [-1.0]
    assert found.margins.tolist() == [1.5]
    assert found.losses.item() == pytest.approx(0.2014133)  # -log of 0.8175745


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_the_loss_is_the_surprise_at_the_judgement(beta: float, smoothing: float) -> None:
    for seed in range(5):
        given = drawn(seed)
        found = preference.dpo_loss(*given, beta, smoothing)
        for i, (c, r, ref_c, ref_r) in enumerate(zip(*(t.tolist() for t in given), strict=True)):
            preferred = sigmoid(beta * ((c - ref_c) - (r - ref_r)))
            want = -(1 - smoothing) * math.log(preferred) - smoothing * math.log(1 - preferred)
            assert found.losses[i].item() == pytest.approx(want, rel=1e-8)
            assert found.chosen_rewards[i].item() == pytest.approx(beta * (c - ref_c))
            assert found.rejected_rewards[i].item() == pytest.approx(beta * (r - ref_r))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_gradient_is_right(smoothing: float) -> None:
    chosen, rejected, *reference = (t.detach() for t in drawn(1))
    chosen.requires_grad_(), rejected.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda c, r: preference.dpo_loss(c, r, *reference, 0.7, smoothing).losses,
        (chosen, rejected),
    )


def test_a_step_raises_the_margin_most_where_the_judgement_is_wrong() -> None:
    given = drawn(2)
    found = preference.dpo_loss(*given, beta=0.3)
    up, down = torch.autograd.grad(found.losses.sum(), given[:2])
    want = [-0.3 * sigmoid(-m) for m in found.margins.tolist()]
    assert up.tolist() == pytest.approx(want) and down.tolist() == pytest.approx([-x for x in want])


def test_no_gradient_reaches_the_reference() -> None:
    given = drawn()
    found = preference.dpo_loss(*given)
    gradients = torch.autograd.grad(found.losses.sum(), given, allow_unused=True)
    assert [g is not None for g in gradients] == [True, True, False, False]
    assert not any(t.requires_grad for t in (found.chosen_rewards, found.margins))


def test_smoothing_gives_the_margin_a_best_value() -> None:
    best = math.log(0.9 / 0.1)
    zero = torch.zeros(1, dtype=torch.float64)
    margin = (zero + best).requires_grad_()
    loss = preference.dpo_loss(margin, zero, zero, zero, 1.0, label_smoothing=0.1).losses.sum()
    assert torch.autograd.grad(loss, margin)[0].abs().item() < 1e-12


def test_large_margins_are_finite() -> None:
    zero, far = torch.zeros(2), torch.tensor([1e4, -1e4], requires_grad=True)
    found = preference.dpo_loss(far, zero, zero, zero, 1.0)
    assert found.losses.tolist() == [0.0, 1e4]
    assert torch.autograd.grad(found.losses.sum(), far)[0].tolist() == [0.0, -1.0]


def test_what_does_not_fit_is_refused() -> None:
    pair = [torch.zeros(3)] * 4
    with pytest.raises(ValueError, match=r"shapes \[\(2,\), \(3,\)\]; all four must be \(B,\)"):
        preference.dpo_loss(torch.zeros(2), *pair[1:])
    with pytest.raises(ValueError, match=r"\(2, 3\).*one number for each answer"):
        preference.dpo_loss(*[torch.zeros(2, 3)] * 4)
    with pytest.raises(ValueError, match="beta=0 must be a positive number"):
        preference.dpo_loss(*pair, beta=0)
    for bad in (0.5, -0.1, math.nan):
        with pytest.raises(ValueError, match=rf"label_smoothing={bad} must be in \[0, 0.5\)"):
            preference.dpo_loss(*pair, label_smoothing=bad)
