"""The learning rate of a run: a warm-up, then half a cosine as long as what is left of the run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import refusal
from lm_from_scratch.training import train


def learning_rate(step: int, steps: int, lr: float, min_lr: float = 0.0, warmup: int = 0) -> float:
    """The rate of the package's training loop; its config refuses a warm-up that is too long."""
    config = train.Schedule(steps=steps, lr=lr, min_lr=min_lr, warmup=warmup)
    return train.learning_rate(step, config)


def number(g: Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high, (), generator=g))


def rate(g: Generator) -> float:
    return 1e-3 * number(g, 1, 10)


def rising(g: Generator) -> Call:
    warmup = number(g, 4, 9)
    wanted = (1, 2, warmup - 1, warmup)
    lr = rate(g)
    return call(wanted, number(g, 30, 50), lr=lr, min_lr=0.4 * lr, warmup=warmup)


def falling(g: Generator) -> Call:
    warmup, half = number(g, 4, 9), number(g, 12, 20)
    steps = warmup + 2 * half
    wanted = (warmup + 1, warmup + half // 2, warmup + half, steps - 1, steps)
    return call(wanted, steps, lr=rate(g), min_lr=0.0, warmup=warmup)


def floor(g: Generator) -> Call:
    warmup, rest = number(g, 2, 6), number(g, 25, 45)
    steps, lr = warmup + rest, rate(g)
    wanted = (warmup + 1, warmup + rest // 2, steps - 2, steps - 1, steps)
    return call(wanted, steps, lr=lr, min_lr=0.2 * lr, warmup=warmup)


def long(g: Generator) -> Call:
    steps = 2 * number(g, 900, 1100)
    return call((1, 2, steps // 4, steps // 2, steps - 1, steps), steps, rate(g))


def after(g: Generator) -> Call:
    steps, lr = number(g, 20, 40), rate(g)
    return call((steps, steps + 1, steps + 7, 2 * steps), steps, lr, 0.1 * lr, 5)


def too_long(g: Generator) -> Call:
    warmup = number(g, 6, 12)
    return call(lengths=(warmup, warmup - 1), warmup=warmup, lr=rate(g))


def rates(
    function: Callable[..., Any], wanted: tuple[int, ...], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """The rates of some steps."""
    return {f"the rate of step {t}": function(t, *args, **kwargs) for t in wanted}


def refused(
    function: Callable[..., Any], lengths: tuple[int, ...], warmup: int, lr: float
) -> dict[str, Any]:
    """Runs that are not longer than their warm-up, and one that is longer by a step."""
    steps = warmup + 1
    last = function(steps, steps, lr=lr, min_lr=0.1 * lr, warmup=warmup)
    seen: dict[str, Any] = {f"the last rate with warmup={warmup} and steps={steps}": last}
    one = function(1, 1, lr=lr, min_lr=0.1 * lr)
    seen["the rate of a run of one step, without warm-up"] = one
    for steps in lengths:
        answer = refusal(ValueError)(function, 1, steps, lr=lr, warmup=warmup)
        seen[f"a call with warmup={warmup} and steps={steps}"] = answer
    return seen


# ------------------------------------------------------------------------------- wrong answers

RISE = "lr * step / warmup"
PROGRESS = "min((step - warmup) / (steps - warmup), 1.0)"
COSINE = "0.5 * (1.0 + math.cos(math.pi * progress))"
RESULT = "min_lr + cosine * (lr - min_lr)"
FALL, WARM, MIN = "the cosine after it, down to 0", "the warm-up", "down to min_lr"
LATER, LONG = "after the last step", "no warm-up, a long run"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("a cosine of 1000 steps, however long the run is", {PROGRESS: "(step - warmup) / 1000"}, FALL),
    ("the warm-up counts from 0, so that step 1 does nothing",
     {RISE: "lr * (step - 1) / warmup"}, WARM),
    ("the warm-up is one step ahead, and step `warmup` has lr all the same",
     {RISE: "min(lr, lr * (step + 1) / warmup)"}, WARM),
    ("the warm-up begins with 2 parts of `warmup + 1`",
     {RISE: "lr * (step + 1) / (warmup + 1)"}, WARM),
    ("the warm-up reaches lr one step too late", {RISE: "lr * step / (warmup + 1)"}, WARM),
    ("the warm-up rises from min_lr, not from 0",
     {RISE: "min_lr + (lr - min_lr) * step / warmup"}, WARM),
    ("min_lr is the lowest rate of the warm-up, too", {RISE: f"max(min_lr, {RISE})"}, WARM),
    ("no warm-up: the full rate at once", {RISE: "lr"}, WARM),
    ("the cosine begins with step 1, under the warm-up",
     {"(step - warmup) / (steps - warmup)": "step / steps"}, FALL),
    ("the cosine begins after the warm-up, but is as long as the whole run",
     {"(steps - warmup)": "steps"}, FALL),
    ("the cosine begins one step late", {"(step - warmup) /": "(step - 1 - warmup) /"}, FALL),
    ("the first step after the warm-up still has the rate lr",
     {"(step - warmup) / (steps - warmup)": "(step - warmup - 1) / max(steps - warmup - 1, 1)"},
     FALL),
    ("the steps count from 0, in the warm-up and in the cosine",
     {"    if step <= warmup": "    step -= 1\n    if step < warmup"}, WARM),
    ("the cosine ends one step early", {"(steps - warmup),": "(steps - 1 - warmup),"}, FALL),
    ("a whole period of the cosine: down, and up again",
     {"math.pi * progress": "2 * math.pi * progress"}, FALL),
    ("a quarter of the cosine, from 1 to 0", {COSINE: "math.cos(0.5 * math.pi * progress)"}, FALL),
    ("a straight line instead of the cosine", {COSINE: "1.0 - progress"}, FALL),
    ("1 + cosine is not halved", {COSINE: COSINE.removeprefix("0.5 * ")}, FALL),
    ("the cosine goes from 1 to -1, not to 0", {COSINE: "math.cos(math.pi * progress)"}, FALL),
    ("the angle in degrees", {"math.pi * progress": "180 * progress"}, FALL),
    ("min_lr cuts the curve off, but does not lift it", {RESULT: "max(min_lr, cosine * lr)"}, MIN),
    ("min_lr is added on top of lr", {RESULT: "min_lr + cosine * lr"}, MIN),
    ("min_lr is not used", {RESULT: "cosine * lr"}, MIN),
    ("the rate rises again after the last step", {PROGRESS: PROGRESS[4:-6]}, LATER),
    ("after the last step the rate is 0, not min_lr",
     {f"return {RESULT}": f"return {RESULT} if step <= steps else 0.0"}, LATER),
    ("without warm-up, step 1 is a warm-up all the same",
     {"    if step <= warmup": "    warmup = max(warmup, 1)\n    if step <= warmup"}, LONG),
    ("without warm-up a division by 0", {"if step <= warmup:": "if step / warmup <= 1:"}, LONG),
    ("another min_lr than 0 by default", {"min_lr: float = 0.0": "min_lr: float = 1e-5"}, LONG),
    ("a warm-up by default", {"warmup: int = 0": "warmup: int = 100"}, LONG),
    ("a warm-up as long as the run is accepted",
     {"warmup >= steps": "warmup > steps"}, "a warm-up as long as the run"),
]  # fmt: skip

CASES = (
    Case(WARM, rising, "a straight line from 0: step 1 has lr / warmup, step `warmup` has lr",
         points=2, use=rates),
    Case(FALL, falling,
         "the progress is 0 at the end of the warm-up and 1 in the last step of this run; half "
         "way the rate is half of lr", points=3, use=rates,
         teaching="the curve alone, with no other floor than 0"),
    Case(MIN, floor,
         "what falls is the part of lr above min_lr; half way the rate is the mean of both",
         points=2, use=rates),
    Case(LONG, long,
         "with warmup=0 step 1 belongs to the cosine, and nothing is divided by 0", use=rates),
    Case(LATER, after,
         "a cosine rises again after its lowest point: hold the progress at 1", use=rates),
    Case("a warm-up as long as the run", too_long, "raise ValueError before any division",
         use=refused),
)  # fmt: skip

EXERCISE = Exercise(
    name="lr_schedule", function="learning_rate", page="1_gpt2/4_training", minutes=15,
    difficulty=1,
    outcome="Write a learning rate of warm-up and cosine so that it knows the length of its run.",
    reference=learning_rate, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Which numbers must come out at step 1, at step `warmup`, half way between there and the "
        "last step, and in the last step?",
        "First the progress p, from 0 to 1, over `steps - warmup` steps. The cosine of pi * p goes "
        "from 1 to -1; make that 1 to 0.",
        "A number from 1 to 0 chooses between two rates: at 1 it is `lr`, at 0 `min_lr`, at a half "
        "their mean. After the last step p stays at 1.",
    ),
)  # fmt: skip
