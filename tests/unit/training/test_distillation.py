"""distillation.py: two divergences, a temperature, and what is excluded."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training import distillation
from lm_from_scratch.training.loss import causal_lm_loss

INF = math.inf


def drawn(seed: int = 0, B: int = 2, T: int = 4, V: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """A student's logits and a teacher's, with gradients, and targets, some of which do not
    count."""
    g = torch.Generator().manual_seed(seed)
    student, teacher = 2 * torch.randn(2, B, T, V, generator=g, dtype=torch.float64)
    targets = torch.randint(0, V, (B, T), generator=g)
    targets[torch.rand(B, T, generator=g) < 0.3] = IGNORE
    targets[0, 0] = 0
    return student.requires_grad_(), teacher.requires_grad_(), targets


def shares(logits: list[float], temperature: float) -> list[float]:
    weights = [math.exp(z / temperature) for z in logits]
    return [w / sum(weights) for w in weights]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_both_divergences_by_the_definition(temperature: float) -> None:
    student, teacher, _ = drawn()
    forward = distillation.forward_kl(student, teacher, temperature)
    reverse = distillation.reverse_kl(student, teacher, temperature)
    for b in range(2):
        for t in range(4):
            q = shares(student[b, t].tolist(), temperature)
            p = shares(teacher[b, t].tolist(), temperature)
            assert forward[b, t].item() == pytest.approx(temperature**2 * kl(p, q), rel=1e-9)
            assert reverse[b, t].item() == pytest.approx(temperature**2 * kl(q, p), rel=1e-9)


def test_a_coin_and_a_loaded_coin() -> None:
    fair, loaded = torch.zeros(2), torch.tensor([math.log(3.0), 0.0])  # 3/4 and 1/4
    assert distillation.forward_kl(fair, loaded).item() == pytest.approx(0.1308, abs=1e-4)
    assert distillation.reverse_kl(fair, loaded).item() == pytest.approx(0.1438, abs=1e-4)
    assert distillation.forward_kl(loaded, loaded, 5.0).item() == pytest.approx(0.0, abs=1e-7)


def test_torch_has_the_same_divergence() -> None:
    student, teacher, _ = drawn(3)
    want = F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)
    torch.testing.assert_close(distillation.forward_kl(student, teacher), want)


@pytest.mark.parametrize("temperature", [1.0, 4.0, 1000.0])
def test_the_gradient_of_a_warm_teacher_does_not_shrink(temperature: float) -> None:
    """It is temperature * (q - p), and tends to the difference of the centred logits over V."""
    student, teacher, _ = drawn()
    loss = distillation.forward_kl(student, teacher, temperature).sum()
    (found,) = torch.autograd.grad(loss, student)
    q, p = (z / temperature for z in (student, teacher))
    torch.testing.assert_close(found, temperature * (q.softmax(-1) - p.softmax(-1)))
    if temperature == 1000:
        centred = [z - z.mean(-1, keepdim=True) for z in (student, teacher)]
        torch.testing.assert_close(found, (centred[0] - centred[1]) / 6, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl"])
def test_the_gradient_is_right(name: str) -> None:
    student, teacher, targets = drawn(1)
    divergence = getattr(distillation, name)
    assert torch.autograd.gradcheck(lambda z: divergence(z, teacher.detach(), 1.5), student)
    assert torch.autograd.gradcheck(
        lambda z: distillation.distillation_loss(
            z, teacher.detach(), targets, 2.0, 0.3, divergence
        ),
        student,
    )


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl"])
def test_no_gradient_reaches_the_teacher(name: str) -> None:
    student, teacher, targets = drawn()
    divergence = getattr(distillation, name)
    loss = distillation.distillation_loss(student, teacher, targets, 1.0, 1.0, divergence)
    loss = loss + divergence(student, teacher).sum()
    assert torch.autograd.grad(loss, teacher, allow_unused=True) == (None,)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl"])
def test_what_both_exclude_costs_nothing(name: str) -> None:
    """As if the vocabulary did not have it; with a temperature, too."""
    student, teacher, _ = drawn()
    divergence = getattr(distillation, name)
    pad = torch.full((2, 4, 3), -INF, dtype=torch.float64)
    wide = torch.cat([student, pad], -1), torch.cat([teacher, pad], -1)
    found, want = divergence(*wide, 2.0), divergence(student, teacher, 2.0)
    torch.testing.assert_close(found, want)
    gradients = [torch.autograd.grad(x.sum(), student)[0] for x in (found, want)]
    torch.testing.assert_close(*gradients)


def test_what_one_alone_excludes() -> None:
    some, all_ = torch.tensor([0.0, 1.0, -INF]), torch.tensor([0.0, 1.0, 1.0])
    assert distillation.forward_kl(all_, some).isfinite()
    assert distillation.reverse_kl(some, all_).isfinite()
    student = some.clone().requires_grad_()
    loss = distillation.forward_kl(student, all_)
    assert loss.item() == INF
    assert torch.autograd.grad(loss, student)[0].isfinite().all()
    assert distillation.reverse_kl(all_, some).item() == INF


def test_a_teacher_that_is_sure_is_a_label() -> None:
    student, _, targets = drawn(2)
    sure = torch.full_like(student, -INF).scatter(-1, targets.clamp(min=0)[..., None], 0.0)
    for share in (0.0, 0.4, 1.0):
        found = distillation.distillation_loss(student, sure, targets, 1.0, share)
        torch.testing.assert_close(found, causal_lm_loss(student, targets))


def test_the_mixture_counts_what_has_a_target() -> None:
    student, teacher, targets = drawn(4)
    counts = targets != IGNORE
    found = distillation.distillation_loss(student, teacher, targets, 3.0, 0.25)
    imitation = distillation.forward_kl(student, teacher, 3.0)
    want = 0.25 * imitation[counts].mean() + 0.75 * causal_lm_loss(student, targets)
    torch.testing.assert_close(found, want)
    other = teacher.detach().masked_fill(~counts[..., None], math.nan)  # nobody looks there
    again = distillation.distillation_loss(student, other, targets, 3.0, 0.25)
    assert torch.equal(found, again)
    (gradient,) = torch.autograd.grad(again, student)
    assert gradient[~counts].abs().max() == 0 and gradient[counts].abs().max() > 0


def test_no_target_at_all_gives_zero() -> None:
    student, teacher, targets = drawn()
    none = torch.full_like(targets, IGNORE)
    loss = distillation.distillation_loss(student, teacher, none, 2.0, 0.5)
    (gradient,) = torch.autograd.grad(loss, student)
    assert loss.item() == 0.0 and gradient.abs().max() == 0


def test_low_precision_is_cast_up() -> None:
    student, teacher, _ = drawn()
    found = distillation.forward_kl(student.bfloat16(), teacher.float())
    assert found.dtype == torch.float32


def test_what_does_not_fit_is_refused() -> None:
    z = torch.zeros(2, 3, 5)
    with pytest.raises(ValueError, match=r"\(2, 3, 5\), the teacher's \(2, 3, 6\)"):
        distillation.forward_kl(z, torch.zeros(2, 3, 6))
    with pytest.raises(ValueError, match="temperature=0 must be a positive number"):
        distillation.reverse_kl(z, z, 0)
    targets = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"share=1.5 must be in \[0, 1\]"):
        distillation.distillation_loss(z, z, targets, share=1.5)
    with pytest.raises(ValueError, match=r"targets \(2, 2\)"):
        distillation.distillation_loss(z, z, targets[:, :2])
