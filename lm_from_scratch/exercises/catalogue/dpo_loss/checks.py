"""The loss of DPO: sums over whole answers, a frozen reference, and where a run begins."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers, normal
from lm_from_scratch.training import preference

Result = dict[str, Tensor]


def package(log_probs: Tensor, reference: Tensor, mask: Tensor, beta: float) -> Any:
    """What the package says of these pairs."""
    chosen, rejected = log_probs.masked_fill(~mask, 0.0).sum(-1)
    before, instead = reference.masked_fill(~mask, 0.0).sum(-1)
    return preference.dpo_loss(chosen, rejected, before, instead, beta)


def reference(log_probs: Tensor, reference: Tensor, mask: Tensor, beta: float = 0.1) -> Result:
    """The package's loss, less its loss where both models are the same."""
    now = package(log_probs, reference, mask, beta)
    start = package(reference, reference, mask, beta)
    loss = now.losses.mean()
    return {
        "loss": loss,
        "gain": (start.losses.mean() - loss).detach(),
        "wins": (now.margins > 0).to(loss.dtype).mean(),
    }


def drawn(
    g: Generator, B: int, T: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of a model and its reference, and a mask of everything."""
    now, before = (-2 * normal(g, 2, B, T, dtype=dtype).abs() for _ in range(2))
    return now, before, before < 1


def cut(g: Generator, mask: Tensor) -> Tensor:
    """Only the tokens of an answer, which begins and ends somewhere: at least one of them."""
    T = mask.shape[2]
    first = integers(g, 0, T // 2, 1, mask.shape[1], 1)  # a pair has one prompt
    last = integers(g, T // 2, T, *mask.shape[:2], 1)
    places = torch.arange(T)
    return (places >= first) & (places <= last)


def one_pair(g: Generator) -> Call:
    return call(*drawn(g, 1, 4))


def lengths(g: Generator) -> Call:
    now, before, mask = drawn(g, 5, 9)
    return call(now, before, cut(g, mask))


def by_beta(beta: float) -> Callable[[Generator], Call]:
    def make(g: Generator) -> Call:
        now, before, mask = drawn(g, 4, 8)
        return call(now, before, cut(g, mask), beta)

    return make


def rubbish(g: Generator) -> Call:
    """-inf, NaN and large numbers where no answer is."""
    now, before, mask = drawn(g, 4, 8)
    mask = cut(g, mask)
    mask[:, :, -1] = False
    mask[:, :, 3] = True
    now[:, :, -1] = torch.tensor([-torch.inf, torch.nan, 1e30, -torch.inf])
    before[:, :, -1] = torch.tensor([-torch.inf, 0.0, 1e30, torch.nan])
    return call(now, before, mask)


def first_step(g: Generator) -> Call:
    _, before, mask = drawn(g, 6, 7)
    return call(before.clone(), before, cut(g, mask))


def far_apart(g: Generator) -> Call:
    """Rewards that differ by hundreds: one pair is far wrong, one far right."""
    now, before, mask = drawn(g, 2, 5)
    far = 1500.0 * (1 + torch.rand(1, generator=g))
    now[0, 0], before[0, 1] = now[0, 0] - far, before[0, 1] - far
    return call(now, before, mask)


def both_fall(g: Generator) -> Call:
    """All answers become less probable; in two of three pairs the rejected one more so."""
    _, before, mask = drawn(g, 3, 6)
    fall = torch.tensor([[1.0, 1.0, 3.0], [2.0, 2.5, 1.0]])[..., None]
    return call(before - fall * (1 + 0.1 * normal(g, 2, 3, 6)), before, mask)


def longer(g: Generator) -> Call:
    """The rejected answers are long: what is more probable depends on the reference."""
    before = -1 - 0.1 * normal(g, 2, 4, 14).abs()
    now, mask = before + 0.05 * normal(g, 2, 4, 14), before < 1
    mask[0, :, 3:] = False
    now[0, :2] += 0.3
    now[1, 2:] += 0.3
    return call(now, before, mask)


def precise(g: Generator) -> Call:
    """One pair is nearly as it was: its chosen answer has gained a millionth."""
    now, before, mask = drawn(g, 3, 5, dtype=torch.float64)
    now, before, mask = now - 1000, before - 1000, cut(g, mask)
    now[:, 0] = before[:, 0]
    now[0, 0, mask[0, 0]] += 1e-6
    return call(now, before, mask)


def frozen(function: Any, log_probs: Tensor, reference: Tensor, mask: Tensor) -> Any:
    """What reaches the reference, and which results have a gradient."""
    reference = reference.clone().requires_grad_()
    results = function(log_probs.clone().requires_grad_(), reference, mask)
    if results["loss"].requires_grad:
        results["loss"].backward()
    return {
        "a gradient reaches the reference": reference.grad is not None,
        "these have a gradient": [key for key in sorted(results) if results[key].requires_grad],
    }


# ------------------------------------------------------------------------------- wrong answers

PAIR, LENGTHS, RUBBISH = "one pair", "answers of other lengths", "anything outside the answers"
FIRST, FALL, FAR = "before the first step", "both answers fall", "rewards far apart"
GRADIENT, FROZEN = "the gradient of the loss", "what has no gradient"
RATIOS = "ratios = torch.where(mask, log_probs - reference.detach(), 0.0)"
LOSS = "loss = -F.logsigmoid(margins).mean()"
GAIN = "math.log(2) - loss.detach()"
SUMS = "beta * ratios.sum(2)"
NAN = "its result is NaN, which the report says in words"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the mean over tokens instead of the log-probability of the whole answer",
     {SUMS: "beta * ratios.sum(2) / mask.sum(2)"}, PAIR),
    ("prompt and padding count as well", {RATIOS: "ratios = log_probs - reference.detach()"},
     LENGTHS),
    ("only the model is masked, and the reference counts its prompt as well",
     {RATIOS: "ratios = log_probs.masked_fill(~mask, 0.0) - reference.detach()"}, LENGTHS),
    ("a number times 0 hides what is outside, and NaN stays NaN",
     {RATIOS: "ratios = (log_probs - reference.detach()) * mask"}, RUBBISH, NAN),
    ("the reference is left out", {"log_probs - reference.detach()": "log_probs"}, PAIR),
    ("chosen and rejected are exchanged", {"chosen - rejected": "rejected - chosen"}, PAIR),
    ("beta multiplies the loss, not the rewards",
     {SUMS: "ratios.sum(2)", ").mean()\n    wins": ").mean() * beta\n    wins"}, PAIR),
    ("beta divides", {SUMS: "ratios.sum(2) / beta"}, PAIR),
    ("beta is always 0.1", {SUMS: "0.1 * ratios.sum(2)"}, "another beta"),
    ("beta is left out", {SUMS: "ratios.sum(2)"}, PAIR),
    ("the sigmoid without its logarithm", {LOSS: "loss = -margins.sigmoid().mean()"}, PAIR),
    ("the logarithm of a sigmoid that is rounded to 0",
     {LOSS: "loss = -margins.sigmoid().log().mean()"}, FAR),
    ("something small is added before the logarithm",
     {LOSS: "loss = -(margins.sigmoid() + 1e-8).log().mean()"}, FAR),
    ("the margin itself is the loss, without end", {LOSS: "loss = -margins.mean()"}, PAIR),
    ("a hinge: a pair that is right by 1 costs nothing",
     {LOSS: "loss = (1 - margins).relu().mean()"}, PAIR),
    ("the sum over the pairs", {LOSS: "loss = -F.logsigmoid(margins).sum()"}, LENGTHS),
    ("the loss of the mean margin, not the mean of the losses",
     {LOSS: "loss = -F.logsigmoid(margins.mean())"}, FALL),
    ("probabilities are subtracted, not their logarithms",
     {"log_probs - reference.detach()": "log_probs.exp() - reference.detach().exp()"}, PAIR),
    ("the loss of each answer alone, where only their difference matters",
     {LOSS: "loss = -(F.logsigmoid(chosen) + F.logsigmoid(-rejected)).mean()"}, PAIR),
    ("a run is taken to begin at a loss of 0", {GAIN: "-loss.detach()"}, FIRST),
    ("a run is taken to begin at a loss of 1: bits instead of nats",
     {GAIN: "1 - loss.detach()"}, FIRST),
    ("a run is taken to begin at ½", {GAIN: "0.5 - loss.detach()"}, FIRST),
    ("the gain has the sign of a loss", {GAIN: "loss.detach() - math.log(2)"}, PAIR),
    ("the start is rounded to 0.693", {GAIN: "0.693 - loss.detach()"}, FIRST),
    ("equal rewards count as won", {"margins > 0": "margins >= 0"}, FIRST),
    ("won from a margin of a thousandth on", {"margins > 0": "margins > 1e-3"}, "float64"),
    ("won is what became more probable, whatever became of the other",
     {"margins > 0": "chosen > 0"}, FALL),
    ("won is what the model finds more probable, without its reference",
     {"(margins > 0)": "(torch.where(mask, log_probs, 0.0).sum(2).diff(dim=0)[0] < 0)"},
     "long rejected answers"),
    ("the gain has a gradient, and the loss is pulled twice", {GAIN: "math.log(2) - loss"}, FROZEN),
    ("the reference learns as well", {"reference.detach()": "reference"}, FROZEN),
    ("the rejected answer is detached", {"chosen - rejected": "chosen - rejected.detach()"},
     GRADIENT),
    ("computed in float32",
     {"mask, log_probs - reference": "mask, log_probs.float() - reference",
      "detach(), 0.0)": "detach().float(), 0.0)",
      LOSS: "loss = -F.logsigmoid(margins).mean().to(log_probs.dtype)"}, "float64"),
    ("the caller's log-probabilities are overwritten",
     {RATIOS: f"log_probs.detach().masked_fill_(~mask, 0.0)\n    {RATIOS}"}, LENGTHS),
]  # fmt: skip

CASES = (
    Case(PAIR, one_pair,
         "sum the log-probabilities of each answer, subtract those of the reference, times beta",
         points=2, teaching="the formula, with nothing masked"),
    Case(LENGTHS, lengths,
         "only the tokens of the answer count, in both models; long and short answers are sums",
         points=2, teaching="a batch as it is in training"),
    Case(RUBBISH, rubbish, "NaN times 0 is NaN: replace what is outside, do not multiply it",
         points=2),
    Case(FIRST, first_step,
         "all margins are 0: what is -log of the sigmoid of 0? No pair is won yet", points=3),
    Case("another beta", by_beta(0.5), "beta multiplies the rewards, whatever it is"),
    Case(FALL, both_fall,
         "a pair is won if its chosen answer fell less: only the difference counts", points=2,
         teaching="a chosen answer that becomes less probable all the way"),
    Case("long rejected answers", longer,
         "a long answer is less probable than a short one, in the reference as well",
         teaching="what makes a reward of a probability"),
    Case(FAR, far_apart,
         "the sigmoid of -1000 is 0 in float32, and its logarithm is not: use the function that "
         "gives both at once"),
    Case("float64", precise,
         "compute in the dtype of the log-probabilities; a small lead is a lead"),
    Case(GRADIENT, lengths, "both answers pull, in opposite directions; what is masked does not",
         gradient=True),
    Case(FROZEN, one_pair, "detach the reference, and what is only reported", use=frozen, points=2),
)  # fmt: skip

EXERCISE = Exercise(
    name="dpo_loss", function="dpo_loss", page="10_after_pretraining/2_preferences", minutes=25,
    difficulty=2,
    outcome="Write the loss of preferences, and say what it must be before the first step.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Four numbers for each pair: how probable each answer is, in each model. The probability "
        "of a whole answer is a product, so its logarithm is a sum.",
        "Before the first step the model is the reference: all four rewards are 0. Put that into "
        "the formula of the loss by hand; nothing else enters `gain`.",
        "Subtract first, replace what is masked by 0 (`masked_fill`), then sum. "
        "`F.logsigmoid` is exact where `sigmoid` is rounded to 0.",
    ),
)  # fmt: skip
