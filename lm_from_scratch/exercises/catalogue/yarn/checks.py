"""YaRN: which pairs slow down, where the ramp begins and ends, and how much scores grow."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer
from lm_from_scratch.layers.rope_scaling import YaRNScaling


def yarn(
    head_dim: int,
    theta: float,
    factor: float,
    original_length: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> tuple[Tensor, float]:
    """The package's own scaling."""
    scaling = YaRNScaling(
        factor=factor, original_length=original_length, beta_fast=beta_fast, beta_slow=beta_slow
    )
    return scaling.frequencies(torch.zeros(1, 1, dtype=torch.long), head_dim, theta)


def named(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Two results by their names; the second may be a tensor of no dimension."""
    result = function(*args, **kwargs)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TypeError(
            f"two results are expected, a tensor and a number, not {type(result).__name__}"
        )
    speeds, number = result
    if isinstance(number, Tensor) and number.dim() == 0:
        number = number.item()
    return {"the speeds": speeds, "the factor of cosines": number}


def _factor(g: Generator) -> float:
    return 1.5 + integer(g, 1, 9)


# ------------------------------------------------------------------------------- wrong answers

FIRST, LAST = "max(math.floor(pair(beta_fast)), 0)", "math.ceil(pair(beta_slow))"
SLOWED = "((i - first) / max(last - first, 1)).clamp(0, 1)"
NEW = "(1 - slowed) * speeds + slowed * speeds / factor"
STRETCH = "0.1 * math.log(factor) + 1.0"
SPEEDS = "1.0 / theta ** (torch.arange(0, head_dim, 2) / head_dim)"

USUAL, THETA, BETAS = "the usual settings", "a larger theta", "other betas"
SHORT, LONG, STEP = "a short length", "a long length", "first and last are equal"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("all pairs are slowed, as in linear scaling", {SLOWED: "torch.ones(len(i))"}, USUAL),
    ("fast pairs are slowed and slow ones kept: the ramp goes the other way",
     {NEW: "slowed * speeds + (1 - slowed) * speeds / factor"}, USUAL),
    ("beta_fast and beta_slow have changed places",
     {FIRST: FIRST.replace("fast", "slow"), LAST: LAST.replace("slow", "fast")}, USUAL),
    ("no ramp: a step at the last pair", {SLOWED: "(i >= last).float()"}, USUAL),
    ("a ramp in turns, as the paper writes and Llama 3 has it",
     {SLOWED: "1 - ((original_length * speeds / (2 * math.pi) - beta_slow)\n"
      "                  / (beta_fast - beta_slow)).clamp(0, 1)"}, USUAL),
    ("the ends of the ramp are not rounded",
     {FIRST: "max(pair(beta_fast), 0)", LAST: "pair(beta_slow)"}, USUAL),
    ("the ends of the ramp are rounded inwards",
     {FIRST: FIRST.replace("floor", "ceil"), LAST: LAST.replace("ceil", "floor")}, USUAL),
    ("the ends of the ramp are rounded to the nearest pair",
     {FIRST: FIRST.replace("math.floor", "round"), LAST: LAST.replace("math.ceil", "round")},
     THETA),
    ("both ends are rounded down", {"math.ceil(": "math.floor("}, USUAL),
    ("radians are taken for turns: 2 pi is missing", {"2 * math.pi * turns": "turns"}, USUAL),
    ("pairs are counted as features: D instead of D / 2",
     {"head_dim / 2 * math.log": "head_dim * math.log"}, USUAL),
    ("the length after scaling, not that of training",
     {"original_length / (": "factor * original_length / ("}, USUAL),
    ("the ends of the ramp are always those of theta 10000",
     {"math.log(ratio, theta)": "math.log(ratio, 10000.0)"}, THETA),
    ("theta is always 10000",
     {SPEEDS: SPEEDS.replace("theta", "10000.0"),
      "math.log(ratio, theta)": "math.log(ratio, 10000.0)"}, THETA),
    ("the speeds are always those of theta 10000",
     {SPEEDS: SPEEDS.replace("theta", "10000.0")}, THETA),
    ("a larger theta, as in NTK scaling, instead of slower pairs",
     {NEW: "1.0 / (theta * factor ** (head_dim / (head_dim - 2))) ** (2 * i / head_dim)"}, USUAL),
    ("slow pairs become faster: the factor multiplies",
     {"slowed * speeds / factor": "slowed * speeds * factor"}, USUAL),
    ("the times of a turn are mixed on the ramp, not the speeds",
     {NEW: "speeds / (1 - slowed + slowed * factor)"}, USUAL),
    ("the ramp is not limited to 0 and 1", {".clamp(0, 1)": ""}, USUAL),
    ("cosines and sines are not multiplied", {STRETCH: "1.0"}, USUAL),
    ("the factor of the cosines lacks the 1", {STRETCH: "0.1 * math.log(factor)"}, USUAL),
    ("the factor of the scores, which is the square of that of cosines",
     {STRETCH: f"({STRETCH}) ** 2"}, USUAL),
    ("the logarithm to base 10 in the factor of the cosines",
     {STRETCH: "0.1 * math.log10(factor) + 1.0"}, USUAL),
    ("the logarithm to base 2 in the factor of the cosines",
     {STRETCH: "0.1 * math.log2(factor) + 1.0"}, USUAL),
    ("the root of the factor of the cosines", {STRETCH: f"({STRETCH}) ** 0.5"}, USUAL),
    ("pair i has the speed theta ** (-i / D), not -2i / D",
     {SPEEDS: SPEEDS.replace("(torch", "(0.5 * torch")}, USUAL),
    ("the speeds are multiplied by the factor of the cosines",
     {"return speeds,": f"return speeds * ({STRETCH}),"}, USUAL),
    ("the betas are always 32 and 1",
     {"pair(beta_fast)": "pair(32.0)", "pair(beta_slow)": "pair(1.0)"}, BETAS),
    ("the ramp may begin before the first pair", {FIRST: "math.floor(pair(beta_fast))"}, SHORT),
    ("the ramp must end at the last pair",
     {LAST: "min(math.ceil(pair(beta_slow)), head_dim // 2 - 1)"}, LONG),
    ("0 / 0 where the ramp has no width",
     {"max(last - first, 1)": "(last - first)"}, STEP, "a result with NaN is never named"),
    ("where the ramp has no width, its pair is slowed too",
     {SLOWED: f"{SLOWED} if last > first else (i >= first).float()"}, STEP),
]  # fmt: skip

CASES = (
    Case(USUAL, lambda g: call(64, 10000.0, _factor(g), 4096),
         "with D = 64, theta = 10000 and L = 4096, first is 10 and last is 23: up to pair 10 "
         "nothing changes, from pair 23 on speeds are divided by the factor", points=3, use=named,
         tolerance=(1e-5, 0.0), teaching="the plain method, and the first thing to read"),
    Case(THETA, lambda g: call(64, 1000000.0, _factor(g), 32768),
         "theta counts twice: in the speeds, and in which pair makes how many turns. With 1000000 "
         "and L = 32768, first is 11 and last is 20", points=2, use=named, tolerance=(1e-5, 0.0)),
    Case(BETAS, lambda g: call(32, 10000.0, _factor(g), 4096, beta_fast=8.0, beta_slow=2.0),
         "with D = 32, L = 4096, beta_fast 8 and beta_slow 2, first is 7 and last is 11", points=2,
         use=named, tolerance=(1e-5, 0.0)),
    Case(SHORT, lambda g: call(32, 10000.0, _factor(g), 180 + integer(g, 0, 18)),
         "here even pair 0 makes fewer than 32 turns: first is 0, not -1", use=named,
         tolerance=(1e-5, 0.0), teaching="the limit alone, with a ramp; the last case has it too"),
    Case(LONG, lambda g: call(64, 10000.0, _factor(g), 131072),
         "here every pair makes more than one turn: last is 35, though the last pair is 31",
         use=named, tolerance=(1e-5, 0.0)),
    Case(STEP, lambda g: call(16, 10000.0, _factor(g), 6),
         "with L = 6, first and last are both 0, and 0 / 0 is NaN. Pair 0 stays as it is, and "
         "pair 1 is slowed fully", use=named, tolerance=(1e-5, 0.0)),
)  # fmt: skip

EXERCISE = Exercise(
    name="yarn", function="yarn", page="2_qwen2/2_rope", minutes=30, difficulty=3,
    outcome="Compute the speeds and the factor of YaRN so that they are those of a published "
            "checkpoint.",
    after=("rope",), reference=yarn, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Take logarithms on both sides of theta**(-2i/D) * L / (2 pi) = r, and solve for i.",
        "i(r) = D/2 * ln(L / (2 pi r)) / ln(theta). More turns are a smaller i: beta_fast is where "
        "the ramp begins.",
        "i(turns) is a logarithm to the base theta, and the two borders come from two numbers "
        "of turns. Between them the share of slowing is a straight line; outside it is cut off "
        "at 0 and 1. What if both borders are one pair?",
    ),
)  # fmt: skip
