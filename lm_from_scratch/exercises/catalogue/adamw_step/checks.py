"""One step of AdamW: bias correction, the place of eps, and decay apart from the gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal
from lm_from_scratch.optim.adamw import adamw

BETAS = (0.9, 0.999)


def nothing(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two means before the first step."""
    return torch.zeros_like(x), torch.zeros_like(x)


def first_step(g: Generator) -> Call:
    x, grad = normal(g, 3, 5), normal(g, 3, 5, scale=2)
    return call(x, grad, *nothing(x), 1, lr=0.1, weight_decay=0.0)


def decayed(g: Generator) -> Call:
    x, grad = normal(g, 7, scale=3), normal(g, 7)
    return call(x, grad, *nothing(x), 1, lr=0.1, weight_decay=0.3)


def tiny(g: Generator) -> Call:
    size = 10 ** (-torch.rand(4, 3, generator=g) - 5.5)  # from 3e-7 to 3e-6
    grad = torch.where(normal(g, 4, 3) < 0, -size, size)
    x = normal(g, 4, 3, scale=0.01)
    return call(x, grad, *nothing(x), 1, lr=0.1, eps=1e-6, weight_decay=0.0)


def default(g: Generator) -> Call:
    x = normal(g, 2, 3, 4, dtype=torch.float64) / 3  # no float32 has these digits
    grad = normal(g, 2, 3, 4, dtype=torch.float64) / 3e6
    return call(x, grad, *nothing(x), 1)


def twelve(g: Generator) -> Call:
    grads = normal(g, 12, 3, 4)
    grads[7:, :, 0] = 0.0  # no more gradient, but the mean still pushes
    return call(normal(g, 3, 4, scale=0.1), grads, lr=0.05, betas=BETAS, weight_decay=0.0)


def late(g: Generator) -> Call:
    x, m = normal(g, 4, 3), normal(g, 4, 3, scale=0.1)
    return call(x, normal(g, 4, 3), m, m.square() + 0.1, 2000, lr=0.1, betas=BETAS)


def other_betas(g: Generator) -> Call:
    return call(normal(g, 5), normal(g, 3, 5), lr=0.05, betas=(0.5, 0.8), weight_decay=0.01)


def steps(
    function: Callable[..., Any], param: Tensor, grads: Tensor, **options: Any
) -> dict[str, Tensor]:
    """All steps of a run, each with what the one before returned."""
    exp_avg, exp_avg_sq = nothing(param)
    seen = {}
    for t, grad in enumerate(grads, start=1):
        param, exp_avg, exp_avg_sq = function(param, grad, exp_avg, exp_avg_sq, t, **options)
        seen[f"the parameter after step {t}"] = param
    return {**seen, "exp_avg at the end": exp_avg, "exp_avg_sq at the end": exp_avg_sq}


# ------------------------------------------------------------------------------- wrong answers

MEAN = "mean = exp_avg / (1 - beta1**step)"
MEAN_SQUARE = "mean_square = exp_avg_sq / (1 - beta2**step)"
FIRST = "beta1 * exp_avg + (1 - beta1) * grad\n"
SECOND = "beta2 * exp_avg_sq + (1 - beta2) * grad.square()"
DIRECTION = "mean / (torch.sqrt(mean_square) + eps)"
NEW = "(1 - lr * weight_decay) * param - lr * direction"
START = "beta1, beta2 = betas\n"
FIRST_STEP, GRADIENT = "the first step, without decay", "a gradient near 1e-6, eps 1e-6"
DECAY, DEFAULTS, TWELVE = "decay", "the defaults, in float64", "twelve steps in a row"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("no bias correction", {MEAN: "mean = exp_avg", MEAN_SQUARE: "mean_square = exp_avg_sq"},
     FIRST_STEP),
    ("eps is added before the bias correction, so that it acts 31.6 times in step 1",
     {MEAN_SQUARE: "correction = 1 - beta2**step",
      DIRECTION: "mean * correction**0.5 / (exp_avg_sq.sqrt() + eps)"}, GRADIENT),
    ("eps inside the root", {DIRECTION: "mean / (mean_square + eps).sqrt()"}, GRADIENT),
    ("the decay as an L2 penalty, part of the gradient",
     {START: f"{START}    grad = grad + weight_decay * param\n", "(1 - lr * weight_decay) * ": ""},
     DECAY),
    ("the decay twice, in the gradient and apart from it",
     {START: f"{START}    grad = grad + weight_decay * param\n"}, DECAY),
    ("the decay after the step, so that the step decays too",
     {NEW: "(1 - lr * weight_decay) * (param - lr * direction)"}, DECAY),
    ("the decay without the learning rate",
     {"(1 - lr * weight_decay)": "(1 - weight_decay)"}, DECAY),
    ("no decay by default", {"weight_decay: float = 1e-2": "weight_decay: float = 0.0"}, DEFAULTS),
    ("the decay is missing", {"(1 - lr * weight_decay) * ": ""}, DECAY),
    ("the decay makes weights grow", {"(1 - lr * weight_decay)": "(1 + lr * weight_decay)"}, DECAY),
    ("only the first mean is corrected", {MEAN_SQUARE: "mean_square = exp_avg_sq"}, FIRST_STEP),
    ("only the mean of the squares is corrected", {MEAN: "mean = exp_avg"}, FIRST_STEP),
    ("the corrected means are handed to the next step",
     {"return new, exp_avg, exp_avg_sq": "return new, mean, mean_square"}, FIRST_STEP),
    ("the correction counts one step too many",
     {"beta1**step": "beta1**(step + 1)", "beta2**step": "beta2**(step + 1)"}, FIRST_STEP),
    ("every step is corrected as if it were the first",
     {"beta1**step": "beta1", "beta2**step": "beta2"}, TWELVE),
    ("no more correction after 1,000 steps",
     {"beta1**step": "beta1 ** (step if step < 1000 else 1e9)",
      "beta2**step": "beta2 ** (step if step < 1000 else 1e9)"}, "step 2,000 of a run"),
    ("the root is divided by the correction, not by its root",
     {DIRECTION: "mean / (exp_avg_sq.sqrt() / (1 - beta2**step) + eps)"}, FIRST_STEP),
    ("the two betas are exchanged", {"beta1, beta2 = betas": "beta2, beta1 = betas"}, FIRST_STEP),
    ("the new gradient is added with weight 1",
     {"(1 - beta1) * grad\n": "grad\n", "(1 - beta2) * grad.square()": "grad.square()"},
     FIRST_STEP),
    ("the square of the mean, not the mean of the squares",
     {"grad.square()": "exp_avg.square()"}, FIRST_STEP),
    ("the root is missing", {"torch.sqrt(mean_square)": "mean_square"}, TWELVE),
    ("one mean of squares for the whole tensor",
     {"grad.square()": "grad.square().mean()"}, FIRST_STEP),
    ("the step goes along the gradient, not against it",
     {"- lr * direction": "+ lr * direction"}, FIRST_STEP),
    ("the gradient itself over the root, as in RMSProp",
     {DIRECTION: "grad / (torch.sqrt(mean_square) + eps)"}, TWELVE),
    ("a number whose gradient is 0 does not move",
     {"lr * direction": "lr * direction * (grad != 0)"}, TWELVE),
    ("always the same eps", {"+ eps": "+ 1e-8"}, GRADIENT),
    ("always the same betas", {"= betas": "= (0.9, 0.999)"}, "other betas"),
    ("always the same decay", {"lr * weight_decay": "lr * 0.01"}, DECAY),
    ("the means are changed in place",
     {f"exp_avg = {FIRST}": "exp_avg.mul_(beta1).add_((1 - beta1) * grad)\n",
      f"exp_avg_sq = {SECOND}": "exp_avg_sq.mul_(beta2).add_((1 - beta2) * grad.square())"},
     FIRST_STEP),
    ("float64 is computed in float32",
     {START: f"{START}    kind = param.dtype\n"
      "    param, grad = param.float(), grad.float()\n"
      "    exp_avg, exp_avg_sq = exp_avg.float(), exp_avg_sq.float()\n",
      "return new, exp_avg, exp_avg_sq":
      "return new.to(kind), exp_avg.to(kind), exp_avg_sq.to(kind)"}, DEFAULTS),
]  # fmt: skip

CASES = (
    Case(FIRST_STEP, first_step,
         "in step 1 the corrected means are the gradient and its square, so that every number "
         "moves by lr against the sign of its gradient; the means are returned uncorrected",
         points=2, teaching="the formula where every value can be worked out by hand"),
    Case(TWELVE, twelve,
         "step t divides by 1 - beta**t; a number whose gradient is 0 still moves, as long as its "
         "mean is not 0", points=2, use=steps),
    Case(DECAY, decayed,
         "the decay is no part of the gradient: theta is multiplied by 1 - lr * weight_decay, "
         "here 0.97, and the step is subtracted from that", points=2,
         teaching="the decay alone, large enough to see"),
    Case(GRADIENT, tiny,
         "eps is added to the root of the corrected mean. Before the correction it acts 31.6 "
         "times as strong in step 1: 1 / sqrt(1 - 0.999)", points=2),
    Case("step 2,000 of a run", late,
         "step t divides by 1 - beta**t however large t is: at 2,000 the second mean still lacks "
         "14 %"),
    Case("other betas", other_betas, "take both betas from the argument", use=steps),
    Case(DEFAULTS, default,
         "lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2; float64 stays float64"),
)  # fmt: skip

EXERCISE = Exercise(
    name="adamw_step", function="adamw_step", page="7_optimizers/1_adamw", minutes=20, difficulty=1,
    outcome="Write a step of AdamW so that correction, eps and decay are where they belong.",
    reference=adamw, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Follow the text in its order: two running means, two corrections, one direction, one "
        "move. Which of these does the next step need?",
        "`grad.square()` is the second gradient. The corrected means are only for this step's "
        "direction, so give them names of their own.",
        "In step 1 the corrected means are the gradient and its square, whatever the betas are. "
        "The decay needs the old parameter and no mean: it is a factor of its own, a little below "
        "1.",
    ),
)  # fmt: skip
