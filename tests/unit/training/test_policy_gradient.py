"""policy_gradient.py: the gradient of an expected reward, by all answers that there are."""

import math
from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import torch
from tiny_models import tiny_gpt2
from torch import Tensor

from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training import policy_gradient
from lm_from_scratch.training.log_probs import token_log_probs
from lm_from_scratch.training.policy_gradient import constant_mean, mean_of_means, token_mean

INF = math.inf

# ------------------------------------------------------------------ a model with fifteen answers

END, LONGEST = 2, 3


@cache
def every_answer() -> tuple[Tensor, Tensor, Tensor]:
    """All answers of at most 3 tokens by a model of the tokens 0, 1 and END: rows (15, 3) of what
    the model reads, with the prompt END, the targets, -100 after the end, and rewards (15,)."""
    answers = [(*said, END) for n in range(LONGEST) for said in product((0, 1), repeat=n)]
    answers += list(product((0, 1), repeat=LONGEST))
    padded = torch.tensor([[*a, *[0] * (LONGEST - len(a))] for a in answers])
    counts = torch.arange(LONGEST) < torch.tensor([[len(a)] for a in answers])
    idx = torch.cat([torch.full((len(answers), 1), END), padded[:, :-1]], dim=1)
    rewards = torch.tensor([3.0 * (a[0] == 1) - len(a) + 0.5 * sum(a) for a in answers])
    return idx, padded.masked_fill(~counts, IGNORE), rewards.double()


def fifteen() -> torch.nn.Module:
    changes = dict(vocab_size=3, n_layer=1, bos_token_id=END, eos_token_id=END)
    return tiny_gpt2(seed=3, **changes).double()


def spoken(model: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities (15, 3), the mask, the probability of each answer (15,), and its reward."""
    idx, targets, rewards = every_answer()
    log_probs = token_log_probs(model(idx), targets)
    return log_probs, targets != IGNORE, log_probs.sum(dim=1).exp(), rewards


def gradient(loss: Tensor, model: torch.nn.Module) -> Tensor:
    weights = list(model.parameters())
    found = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
    parts = zip(found, weights, strict=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in parts]
    )


def test_the_answers_are_all_there_are() -> None:
    _, _, probability, _ = spoken(fifteen())
    assert probability.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert probability.min() > 0.001


@pytest.mark.parametrize("baseline", [0.0, -1.3, 100.0])
def test_reinforce_follows_the_expected_reward(baseline: float) -> None:
    """The mean over all answers, by their probability, is the gradient: no baseline moves it."""
    model = fifteen()
    log_probs, mask, probability, rewards = spoken(model)
    loss = sum(
        p.item() * policy_gradient.reinforce_loss(l[None], r[None], m[None], baseline)
        for l, m, p, r in zip(log_probs, mask, probability, rewards, strict=True)
    )
    found = gradient(loss, model)
    torch.testing.assert_close(-found, gradient((probability * rewards).sum(), model))

    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(0)).double()
    values = []
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    with torch.no_grad():
        for step in (1e-5, -1e-5):
            moved = weights + step * direction
            torch.nn.utils.vector_to_parameters(moved, model.parameters())
            _, _, p, rewards = spoken(model)
            values.append((p * rewards).sum().item())
    slope = (values[0] - values[1]) / 2e-5
    assert (-found @ direction).item() == pytest.approx(slope, rel=1e-6)


def over_all_pairs(loss_of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The mean gradient of a loss of two answers to one prompt, over all 225 pairs; and that of
    minus the expected reward."""
    model = fifteen()
    log_probs, mask, probability, rewards = spoken(model)
    p, total = probability.detach(), torch.zeros(())
    for i, j in product(range(15), repeat=2):
        total = total + p[i] * p[j] * loss_of(log_probs[[i, j]], rewards[[i, j]], mask[[i, j]])
    return gradient(total, model), gradient(-(probability * rewards).sum(), model)


def test_leaving_one_out_has_no_bias() -> None:
    def loss(log_probs: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
        baseline = policy_gradient.leave_one_out(rewards[None])[0]
        return policy_gradient.reinforce_loss(log_probs, rewards, mask, baseline)

    torch.testing.assert_close(*over_all_pairs(loss))


def test_centred_groups_of_two_go_half_as_far() -> None:
    """GRPO's first step without scaling is (G - 1) / G of the true gradient, by the constant."""

    def loss(log_probs: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
        advantages = policy_gradient.group_advantages(rewards[None], scale=False)[0]
        average = constant_mean(LONGEST)
        return policy_gradient.grpo_loss(
            log_probs, log_probs, advantages, mask, average=average
        ).loss

    found, exact = over_all_pairs(loss)
    torch.testing.assert_close(found, exact / 2 / LONGEST)


# ------------------------------------------------------------------------------------ advantages


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [2.0, 4.0, 6.0, 8.0]], dtype=torch.float64)
    centred = policy_gradient.group_advantages(rewards, scale=False)
    assert centred.tolist() == [[0.75, -0.25, -0.25, -0.25], [-3.0, -1.0, 1.0, 3.0]]
    scaled = policy_gradient.group_advantages(rewards, eps=0.0)
    assert scaled[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert scaled[1, 3].item() == pytest.approx(3 / math.sqrt(20 / 3))
    assert policy_gradient.leave_one_out(rewards)[1].tolist() == [6.0, 16 / 3, 14 / 3, 4.0]


@pytest.mark.parametrize("scale", [True, False])
def test_a_group_of_equal_rewards_teaches_nothing(scale: bool) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.3, 1000.1, 12345.678])[:, None]
    assert (rewards.expand(-1, 7).mean(dim=1, keepdim=True) != rewards).any()  # it is rounded
    for G in range(2, 20):
        assert not policy_gradient.group_advantages(rewards.expand(-1, G), scale).any()


def test_advantages_know_neither_level_nor_unit() -> None:
    rewards = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    want = policy_gradient.group_advantages(rewards)
    torch.testing.assert_close(policy_gradient.group_advantages(rewards + 7), want)
    torch.testing.assert_close(
        policy_gradient.group_advantages(rewards * 9), want, rtol=1e-3, atol=0
    )
    assert want.sum(dim=1).abs().max() < 1e-12
    assert want.std(dim=1).tolist() == pytest.approx([1.0] * 3, rel=1e-3)


def test_an_advantage_is_to_the_others_what_leaving_one_out_says() -> None:
    rewards = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    against_others = rewards - policy_gradient.leave_one_out(rewards)
    centred = policy_gradient.group_advantages(rewards, scale=False)
    torch.testing.assert_close(centred, 0.75 * against_others)


# ------------------------------------------------------------------------------------------ GRPO

AVERAGES = {"means": mean_of_means, "tokens": token_mean, "constant": constant_mean(9)}


def drawn(seed: int = 0, B: int = 4, T: int = 5) -> dict[str, Tensor]:
    """Answers of lengths 0 to 5. Where nothing was said, the numbers are those of no answer."""
    g = torch.Generator().manual_seed(seed)
    log_probs = -2 * torch.rand(B, T, generator=g, dtype=torch.float64)
    old, reference = log_probs + 0.4 * torch.randn(2, B, T, generator=g, dtype=torch.float64)
    mask = torch.arange(T) < torch.tensor([[T], [2], [1], [0]])
    return dict(
        log_probs=log_probs.masked_fill(~mask, -INF).requires_grad_(),
        old_log_probs=old.masked_fill(~mask, -INF),
        advantages=torch.randn(B, generator=g, dtype=torch.float64),
        mask=mask,
        reference_log_probs=reference.masked_fill(~mask, -7.0),
    )


def by_hand(
    x: dict[str, Tensor], low: float, high: float, kl: float, average: str
) -> tuple[float, float, float]:
    """Loss, clipped share and divergence, one token after another."""
    rows, clipped, divergences = [], [], []
    for b, row in enumerate(x["mask"].tolist()):
        A, tokens = x["advantages"][b].item(), []
        for t in range(sum(row)):
            lp, old, ref = (
                x[name][b, t].item()
                for name in ("log_probs", "old_log_probs", "reference_log_probs")
            )
            ratio = math.exp(lp) / math.exp(old)
            gain = min(ratio * A, min(max(ratio, 1 - low), 1 + high) * A)
            odds = math.exp(ref) / math.exp(lp)
            divergences.append(odds - math.log(odds) - 1)
            tokens.append(-gain + kl * divergences[-1])
            clipped.append(ratio > 1 + high if A > 0 else ratio < 1 - low)
        rows.append(tokens)
    flat = [loss for tokens in rows for loss in tokens]
    loss = {
        "means": sum(sum(tokens) / max(len(tokens), 1) for tokens in rows) / len(rows),
        "tokens": sum(flat) / len(flat),
        "constant": sum(flat) / (len(rows) * 9),
    }[average]
    return loss, sum(clipped) / len(flat), sum(divergences) / len(flat)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.1, 0.4), (0.0, 0.0), (INF, INF)])
def test_grpo_token_by_token(clip: tuple[float, float], kl: float, average: str) -> None:
    seen = []
    for seed in range(8):
        x = drawn(seed)
        found = policy_gradient.grpo_loss(**x, clip=clip, kl=kl, average=AVERAGES[average])
        want = by_hand(x, *clip, kl, average)
        assert [n.item() for n in found] == pytest.approx(want, rel=1e-9)
        assert not (found.clipped.requires_grad or found.kl.requires_grad)
        seen.append(found.clipped.item())
    assert (max(seen) > 0.3) == (clip != (INF, INF))


@pytest.mark.parametrize("average", AVERAGES)
def test_the_gradient_is_right_and_padding_has_none(average: str) -> None:
    x = drawn(1)
    mask, full = x["mask"], x["log_probs"].detach().clone()
    real = full[mask].requires_grad_()

    def loss(real: Tensor) -> Tensor:
        x["log_probs"] = full.masked_scatter(mask, real)
        return policy_gradient.grpo_loss(**x, kl=0.2, average=AVERAGES[average]).loss

    assert torch.autograd.gradcheck(loss, real)
    x = drawn(1)
    found = policy_gradient.grpo_loss(**x, kl=0.2, average=AVERAGES[average]).loss
    (gradient,) = torch.autograd.grad(found, x["log_probs"])
    assert gradient[~mask].abs().max() == 0 and gradient[mask].isfinite().all()


def test_two_tokens_by_hand() -> None:
    """One has become twice as probable, one half as probable; both answers are praised."""
    log_probs = torch.tensor([[-1.0], [-1.0]]).requires_grad_()
    old = log_probs.detach() + torch.tensor([[-math.log(2)], [math.log(2)]])
    mask = torch.ones(2, 1, dtype=torch.bool)
    found = policy_gradient.grpo_loss(log_probs, old, torch.tensor([1.0, 1.0]), mask)
    assert found.loss.item() == pytest.approx(-(1.2 + 0.5) / 2)
    assert found.clipped.item() == 0.5
    (gradient,) = torch.autograd.grad(found.loss, log_probs)
    assert gradient.flatten().tolist() == pytest.approx([0.0, -0.25])


@pytest.mark.parametrize(
    ("ratio", "advantage", "pulls"),
    [(1.5, 1, False), (1.5, -1, True), (0.5, 1, True), (0.5, -1, False), (1.1, 1, True)],
)
def test_only_what_has_gone_far_enough_is_clipped(
    ratio: float, advantage: float, pulls: bool
) -> None:
    """A praised token that has become less probable since still pulls, and a blamed one that has
    become more probable."""
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    found = policy_gradient.grpo_loss(
        log_probs, log_probs - math.log(ratio), torch.tensor([float(advantage)]), mask
    )
    (gradient,) = torch.autograd.grad(found.loss, log_probs)
    assert gradient.item() == pytest.approx(-advantage * ratio if pulls else 0.0)
    assert found.clipped.item() == (not pulls)


def test_the_first_step_is_that_of_reinforce() -> None:
    x = drawn(2)
    x["old_log_probs"] = x["log_probs"]
    del x["reference_log_probs"]
    found = policy_gradient.grpo_loss(**x, average=constant_mean(9))
    plain = policy_gradient.reinforce_loss(x["log_probs"], x["advantages"], x["mask"])
    gradients = [torch.autograd.grad(l, x["log_probs"])[0] for l in (9 * found.loss, plain)]
    torch.testing.assert_close(*gradients)
    assert found.clipped == 0 and found.kl == 0


def test_a_long_answer_weighs_as_the_average_says() -> None:
    """Four wrong tokens beside one: which share of the gradient does each token get?"""
    log_probs = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * 4, [True] + [False] * 3])
    weights = {}
    for name, average in {**AVERAGES, "constant": constant_mean(4)}.items():
        loss = policy_gradient.grpo_loss(
            log_probs, log_probs, -torch.ones(2), mask, average=average
        ).loss
        gradient = torch.autograd.grad(loss, log_probs)[0]
        weights[name] = gradient[:, 0].tolist()
        assert gradient[1, 1:].tolist() == [0.0] * 3
    assert weights == {"means": [1 / 8, 1 / 2], "tokens": [1 / 5] * 2, "constant": [1 / 8] * 2}


def test_no_gradient_reaches_what_is_fixed() -> None:
    x = drawn(3)
    names = ("old_log_probs", "advantages", "reference_log_probs")
    fixed = [x[name].requires_grad_() for name in names]
    loss = policy_gradient.grpo_loss(**x, kl=0.5).loss
    assert torch.autograd.grad(loss, fixed, allow_unused=True, retain_graph=True) == (None,) * 3
    assert loss.requires_grad
    rewards, baseline = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    l = torch.zeros(2, 3, requires_grad=True)
    loss = policy_gradient.reinforce_loss(l, rewards, torch.ones(2, 3), baseline)
    assert torch.autograd.grad(loss, (rewards, baseline), allow_unused=True) == (None, None)


def test_the_estimate_of_the_divergence() -> None:
    """Over all tokens it is KL(model, reference); its gradient is that of KL(reference, model)."""
    g = torch.Generator().manual_seed(0)
    z, reference = torch.randn(2, 6, generator=g, dtype=torch.float64)
    z.requires_grad_()
    log_p, log_q = z.log_softmax(-1), reference.log_softmax(-1)
    p = log_p.exp().detach()
    found = policy_gradient.grpo_loss(
        log_p[None], log_p[None], torch.zeros(1), torch.ones(1, 6), (0.2, 0.2), log_q[None], 1.0,
        average=lambda x, mask: (p * x).sum(),
    ).loss  # fmt: skip
    kl = [(a.exp() * (a - b)).sum() for a, b in ((log_p, log_q), (log_q, log_p))]
    assert found.item() == pytest.approx(kl[0].item())
    gradients = [torch.autograd.grad(x, z, retain_graph=True)[0] for x in (found, *kl)]
    torch.testing.assert_close(gradients[0], gradients[2])
    assert (gradients[0] - gradients[1]).abs().max() > 0.05


def test_no_token_at_all_gives_zero() -> None:
    x = drawn()
    x["mask"] = torch.zeros_like(x["mask"])
    for average in AVERAGES.values():
        found = policy_gradient.grpo_loss(**x, kl=1.0, average=average)
        (gradient,) = torch.autograd.grad(found.loss, x["log_probs"])
        assert [n.item() for n in found] == [0.0] * 3 and gradient.abs().max() == 0


# ---------------------------------------------------------------------------------------- errors


def test_what_does_not_fit_is_refused() -> None:
    x = drawn()
    loss = policy_gradient.grpo_loss
    with pytest.raises(ValueError, match=r"advantages \(3,\); they must be \(B, T\) and \(B,\)"):
        loss(**{**x, "advantages": torch.zeros(3)})
    for name in ("old_log_probs", "mask", "reference_log_probs"):
        with pytest.raises(ValueError, match=rf"{name} has shape \(4, 4\); it must be \(4, 5\)"):
            loss(**{**x, name: torch.zeros(4, 4)})
    with pytest.raises(ValueError, match=r"clip=\(-0.1, 0.2\) must be two numbers"):
        loss(**x, clip=(-0.1, 0.2))
    with pytest.raises(ValueError, match="kl=-1 must be a finite number, not negative"):
        loss(**x, kl=-1)
    with pytest.raises(ValueError, match="kl=1 needs reference_log_probs"):
        loss(**{**x, "reference_log_probs": None}, kl=1)
    with pytest.raises(ValueError, match="length=0 must be an integer, at least 1"):
        constant_mean(0)
    with pytest.raises(ValueError, match=r"advantages of shape \(4, 4\)"):
        policy_gradient.reinforce_loss(x["log_probs"], torch.zeros(4), x["mask"], torch.zeros(4, 1))


def test_rewards_that_cannot_be_compared_are_refused() -> None:
    for function in (policy_gradient.group_advantages, policy_gradient.leave_one_out):
        for bad in (torch.zeros(8), torch.zeros(8, 1)):
            with pytest.raises(ValueError, match=r"it must be \(P, G\), with G at least 2"):
                function(bad)
        for bad in (torch.ones(2, 2, dtype=torch.long), torch.tensor([[0.0, math.nan]])):
            with pytest.raises(ValueError, match="must be finite floating-point numbers"):
                function(bad)
