"""The loss of GRPO: answers against their group, a clip with a sign, and groups that are idle."""

from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer, integers, normal
from lm_from_scratch.training import policy_gradient
from lm_from_scratch.training.policy_gradient import group_advantages, token_mean

Result = dict[str, Tensor]


def package(
    log_probs: Tensor, old: Tensor, rewards: Tensor, mask: Tensor, clip: float, **penalty: Any
) -> Tensor:
    """The package's loss of these groups."""
    return policy_gradient.grpo_loss(
        log_probs.flatten(0, 1),
        old.flatten(0, 1),
        group_advantages(rewards).flatten(),
        mask.flatten(0, 1),
        clip=(clip, clip),
        average=token_mean,
        **penalty,
    ).loss


def reference(
    log_probs: Tensor,
    old: Tensor,
    reference: Tensor,
    rewards: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    kl: float = 0.04,
) -> Result:
    """The package's loss; what a group teaches is seen in its gradient."""
    apart = reference.flatten(0, 1)
    loss = package(log_probs, old, rewards, mask, clip, kl=kl, reference_log_probs=apart)
    leaf = torch.where(mask, log_probs, 0.0).detach().requires_grad_()
    base = torch.where(mask, old, 0.0).detach()
    (gradient,) = torch.autograd.grad(package(leaf, base, rewards, mask, clip), leaf)
    return {"loss": loss, "teaches": (gradient != 0).flatten(1).any(1)}


# ------------------------------------------------------------------------------------- arguments

# Sums of these, and their means, are exact: a group of equal rewards has an advantage of 0.
REWARDS = torch.tensor([0.0, 0.25, 0.5, 1.0])


def given(
    g: Generator,
    rewards: Tensor,
    T: int = 6,
    moved: float = 0.5,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Call:
    """Log-probabilities, of which the ratio to the old ones is up to exp(``moved``) either way and
    not on the border; all tokens count."""
    shape = (*rewards.shape, T)
    old, base = (-1 - normal(g, *shape, dtype=dtype).abs() for _ in range(2))
    change = moved * (2 * torch.rand(shape, generator=g, dtype=dtype) - 1)
    for border in (1.2, 0.8, 1.4, 0.6):
        near = (change.exp() - border).abs() < 1e-3
        change = torch.where(near, change + 0.01, change)
    mask = torch.ones(shape, dtype=torch.bool)
    return call(old + change, old, base, rewards.to(dtype), mask, **options)


def drawn(g: Generator, P: int, G: int) -> Tensor:
    """Rewards of which no group has only equal ones."""
    rewards = REWARDS[integers(g, 0, 4, P, G)]
    rewards[:, 0], rewards[:, 1] = 0.0, 1.0
    return rewards


def masked(g: Generator, made: Call) -> Call:
    """The same; of each answer only some tokens count, at least one."""
    mask = made.args[4]
    T = mask.shape[2]
    first, last = integers(g, 0, T // 2, *mask.shape[:2], 1), integers(g, T // 2, T, *mask.shape)
    places = torch.arange(T)
    mask &= (places >= first) & (places <= last[..., :1])
    return made


def first_step(g: Generator) -> Call:
    made = given(g, drawn(g, 2, 4), moved=0.0, kl=0.0)
    return masked(g, made)


def moved(g: Generator) -> Call:
    return given(g, drawn(g, 3, 4), kl=0.0)


def rubbish(g: Generator) -> Call:
    """-inf and NaN at the end of all answers but one, and an answer without a token."""
    made = given(g, drawn(g, 2, 4), T=7)
    log_probs, old, base, rewards, mask = made.args
    rewards[1] = torch.tensor([0.0, 1.0, 1.0, 0.25])
    mask[:, :, 5:], mask[0, 0, 5] = False, True
    mask[1, 2] = False
    for x, bad in ((log_probs, -torch.inf), (old, torch.nan), (base, -torch.inf)):
        x[:, :, 6] = bad
    log_probs[1, 2], old[1, 2], base[1, 2] = torch.nan, -torch.inf, torch.nan
    return made


def equal(g: Generator) -> Call:
    """All right, all wrong, all half right, and one that differs."""
    rewards = torch.tensor([1.0, 0.0, 0.5, 1.0])[:, None].repeat(1, 4)
    rewards[3, integer(g, 0, 4)] = 0.0
    return given(g, rewards[torch.randperm(4, generator=g)], moved=0.05)


def far(g: Generator) -> Call:
    """Two groups have gone as far as they may: right answers up, wrong ones down. One went the
    other way, two have a single token left, one has such tokens outside its answers."""
    rewards = torch.tensor([1.0, 0.0]).repeat(6, 1)
    made = given(g, rewards, T=4, moved=0.0, kl=0.0)
    log_probs, mask = made.args[0], made.args[4]
    change = 0.3 + 0.4 * torch.rand(6, 2, 4, generator=g)
    change[:, 1] *= -1
    change[2] *= -1
    at = integer(g, 0, 4)
    change[[3, 5], 0, at], change[[4, 5], 1, at] = 0.1, -0.1
    mask[5, :, at] = False
    order = torch.randperm(6, generator=g)
    log_probs += change[order]
    mask[:] = mask[order]
    return made


def wide(g: Generator) -> Call:
    """The last group has gone farther than 0.2 and not as far as 0.4; one wrong token has become a
    thousand times as probable."""
    made = given(g, drawn(g, 3, 4), clip=0.4, kl=0.1)
    log_probs, old, _, rewards, _ = made.args
    log_probs[2] = old[2] + torch.where(rewards[2] > rewards[2].mean(), 0.25, -0.3)[:, None]
    old[0, 0, 0] = log_probs[0, 0, 0] - 7
    return made


def small(g: Generator) -> Call:
    """Rewards a hair apart: what is added to the standard deviation shows."""
    rewards = 0.5 + 1e-3 * torch.rand(2, 4, generator=g)
    return given(g, rewards, dtype=torch.float64, kl=0.0)


def fixed(function: Any, *args: Tensor, **options: Any) -> Any:
    """Which arguments a gradient reaches."""
    names = ("log_probs", "old", "reference", "rewards")
    leaves = [x.clone().requires_grad_() for x in args[:4]]
    loss = function(*leaves, args[4], **options)["loss"]
    if loss.requires_grad:
        loss.backward()
    return {"a gradient reaches": [n for n, x in zip(names, leaves) if x.grad is not None]}


# ------------------------------------------------------------------------------- wrong answers

FIRST, MOVED, KL = "the first step", "a later step", "a penalty of 0.3"
LENGTHS, RUBBISH = "answers of other lengths", "anything outside the answers"
EQUAL = "equal rewards"
FAR, WIDE, SMALL = "gone too far", "another clip", "rewards a hair apart"
GRADIENT, FIXED = "the gradient of the loss", "what has no gradient"
ABOVE = "above = rewards.detach() - rewards.detach().mean(1, keepdim=True)"
STD = "(above.std(1, keepdim=True) + 1e-4)"
RATIO = "ratio = torch.where(mask, log_probs - old.detach(), 0.0).exp()"
MIN = "losses = -torch.minimum(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)"
K3 = "((-gain).exp() + gain - 1)"
MEAN = "torch.where(mask, losses, 0.0).sum() / mask.sum()"
FREE = "free = torch.where(A > 0, ratio < 1 + clip, ratio > 1 - clip)"
TEACHES = "(free & mask & (A != 0)).any(2).any(1)"
NAN = "its result is NaN, which the report says in words"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the mean and the deviation of the whole batch, not of the group",
     {ABOVE: "above = rewards.detach() - rewards.detach().mean()",
      STD: "(above.std() + 1e-4)"}, EQUAL),
    ("the rewards themselves are the advantages", {ABOVE: "above = rewards.detach()"}, FIRST),
    ("not divided by the standard deviation", {f" / {STD}": ""}, FIRST),
    ("the standard deviation of all there are, not of a sample",
     {"above.std(1, keepdim=True)": "above.std(1, keepdim=True, correction=0)"}, FIRST),
    ("nothing is added to the standard deviation",
     {"above.std(1, keepdim=True) + 1e-4": "above.std(1, keepdim=True)"}, EQUAL),
    ("another small number is added to the standard deviation", {"1e-4": "1e-8"}, SMALL),
    ("an answer without a token is left out of its group",
     {ABOVE: "some = mask.any(2)\n    n = some.sum(1, keepdim=True)\n    above = rewards.detach()"
      " - (rewards.detach() * some).sum(1, keepdim=True) / n"}, RUBBISH),
    ("clipped always, where the smaller of two is wanted",
     {MIN: "losses = -ratio.clamp(1 - clip, 1 + clip) * A"}, MOVED),
    ("the larger of the two", {"torch.minimum": "torch.maximum"}, MOVED),
    ("never clipped", {MIN: "losses = -ratio * A"}, MOVED),
    ("the clip is always 0.2", {"ratio.clamp(1 - clip, 1 + clip)": "ratio.clamp(0.8, 1.2)"}, WIDE),
    ("which groups teach is judged with a clip of 0.2",
     {FREE: "free = torch.where(A > 0, ratio < 1.2, ratio > 0.8)"}, WIDE),
    ("the logarithm of the ratio is limited, of bad answers too",
     {"0.0).exp()": "0.0).clamp(-5, 5).exp()"}, WIDE),
    ("the ratio the other way round: old by new",
     {"log_probs - old.detach(), 0.0).exp()": "old.detach() - log_probs, 0.0).exp()"}, MOVED),
    ("the ratio of whole answers, not of tokens",
     {"0.0).exp()": "0.0).sum(2, keepdim=True).exp() * torch.ones_like(log_probs)"}, MOVED),
    ("the logarithm of the ratio instead of the ratio", {"0.0).exp()": "0.0)"}, MOVED),
    ("the sign is missing: bad answers become more probable", {"losses = -torch": "losses = torch"},
     MOVED),
    ("the penalty is that of the other direction", {K3: "(gain.exp() - gain - 1)"}, KL),
    ("the penalty may be negative: the difference of logarithms alone", {K3: "gain"}, KL),
    ("the penalty is subtracted: the model is pushed away",
     {"losses = losses + kl": "losses = losses - kl"}, KL),
    ("the penalty is measured from the old model", {"reference.detach()": "old.detach()"}, KL),
    ("the mean over answers of their means", {MEAN: "(torch.where(mask, losses, 0.0).sum(2) / "
     "mask.sum(2).clamp(min=1)).mean()"}, LENGTHS),
    ("divided by all places, padding too", {"/ mask.sum()": "/ mask.numel()"}, LENGTHS),
    ("masked at the end only, by a product with 0", {
      RATIO: "ratio = (log_probs - old.detach()).exp()",
      "torch.where(mask, log_probs - reference.detach(), 0.0)": "log_probs - reference.detach()",
      "torch.where(mask, losses, 0.0)": "(losses * mask)"}, RUBBISH, NAN),
    ("the ratio is 1 outside the answers, and counts there",
     {"torch.where(mask, losses, 0.0)": "losses"}, LENGTHS),
    ("every group with different rewards is said to teach, however far it has gone",
     {TEACHES: "(A != 0).any(2).any(1)"}, FAR),
    ("a group is said to teach if one answer was right",
     {TEACHES: "(rewards.detach() > 0).any(1)"}, EQUAL),
    ("a group of equal rewards is said to teach", {" & (A != 0)": ""}, EQUAL),
    ("tokens outside the answers are said to teach", {"free & mask & (A": "free & (A"}, FAR),
    ("a token outside the clip is said to teach nothing, whichever way it went",
     {FREE: "free = (ratio < 1 + clip) & (ratio > 1 - clip)"}, FAR),
    ("which answers teach, not which prompts", {".any(2).any(1)": ".any(2)"}, FIRST),
    ("the old log-probabilities get a gradient", {"old.detach()": "old"}, FIXED),
    ("the reference gets a gradient", {"reference.detach()": "reference"}, FIXED),
    ("the rewards get a gradient", {ABOVE: ABOVE.replace(".detach()", "")}, FIXED),
    ("the new log-probabilities are detached in the ratio",
     {"log_probs - old.detach()": "log_probs.detach() - old.detach()"}, GRADIENT),
    ("the gradient of the penalty is cut off",
     {"log_probs - reference.detach()": "(log_probs - reference).detach()"}, GRADIENT),
]  # fmt: skip

CASES = (
    Case(FIRST, first_step,
         "all ratios are 1: the loss is minus the mean of the advantages over the tokens", points=2,
         teaching="advantages alone"),
    Case(MOVED, moved, "with A < 0 the smaller of two products is the one with the larger ratio",
         points=2, teaching="the clip, without a penalty"),
    Case(KL, lambda g: given(g, drawn(g, 2, 3), moved=0.1, kl=0.3),
         "the penalty has the reference above and the model below the line, as in the formula",
         points=2, teaching="the penalty, with ratios that no clip reaches"),
    Case(LENGTHS, lambda g: masked(g, given(g, drawn(g, 3, 4), T=9)),
         "the sum over all tokens that count, by their number in the whole batch", points=2,
         teaching="a batch as it is in training"),
    Case(RUBBISH, rubbish,
         "replace what is outside before you take exp; the answer without a token still has a "
         "reward", teaching="values alone; the case of gradients has the same numbers", points=2),
    Case(EQUAL, equal, "where all answers got the same, none is better than its group: 0 by 1e-4",
         points=3),
    Case(FAR, far,
         "a good answer whose ratio is above the clip pulls no more, and neither does a bad one "
         "below it; a good answer below the clip still does", points=3),
    Case(WIDE, wide, "clip and kl are arguments"),
    Case(SMALL, small, "1e-4 is added to the standard deviation, not to the variance",
         teaching="where the small number shows"),
    Case("float64", lambda g: given(g, drawn(g, 2, 3), dtype=torch.float64),
         "compute in the dtype of the log-probabilities", teaching="more digits"),
    Case(GRADIENT, rubbish,
         "the ratio is 1 in the first step, and has a gradient all the same; NaN times 0 is NaN "
         "in a gradient, too", gradient=True),
    Case(FIXED, moved, "detach the old log-probabilities, the reference and the advantages",
         use=fixed, points=2),
)  # fmt: skip

EXERCISE = Exercise(
    name="grpo_loss", function="grpo_loss", page="10_after_pretraining/3_rewards", minutes=35,
    difficulty=3,
    outcome="Write the loss of GRPO, and predict which prompts of a batch teach nothing.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Do it in three parts, and look at each alone: advantages (P, G, 1), the clipped product "
        "(P, G, T), the penalty (P, G, T). The mean comes last.",
        "When does the smaller of two products not depend on the ratio? Draw both against the "
        "ratio, once for A = 1 and once for A = -1.",
        "A token has a gradient if it counts, its advantage is not 0, and its ratio has not gone "
        "beyond the clip *in the direction in which A pulls it*. A group teaches if it "
        "has one such token.",
    ),
)  # fmt: skip
