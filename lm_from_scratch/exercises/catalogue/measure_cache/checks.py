"""How long a text fits: bytes of caches, from tensors on a device that stores nothing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer

BYTES = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}
LONGEST = 10**9  # what is not full by then never is: the sizes below are chosen so


def nbytes(layers: list[tuple[Any, ...]], tokens: int, rows: int, number: int) -> int:
    """What a cache takes, measured: each tensor is made, on the device "meta", and asked."""

    def made(*shape: int) -> int:
        return torch.empty(rows, *shape, dtype=BYTES[number], device="meta").nbytes

    total = 0
    for kind, *sizes in layers:
        if kind == "full":
            heads, width = sizes
            total += made(heads, tokens, width) + made(heads, tokens, width)
        elif kind == "sliding":
            heads, width, window = sizes
            total += made(heads, window, width) + made(heads, window, width)
        elif kind == "latent":
            total += made(tokens, sizes[0])
        else:
            total += made(sizes[0])
    return total


def longest_text(
    layers: list[tuple[Any, ...]], budget: int, rows: int = 1, number: int = 2
) -> int | None:
    """Found by halving: the cache of S tokens fits, that of S + 1 does not."""
    if nbytes(layers, LONGEST, rows, number) <= budget:
        return None
    low, high = 0, LONGEST  # low fits, or is 0
    while high - low > 1:
        middle = (low + high) // 2
        fits = nbytes(layers, middle, rows, number) <= budget
        low, high = (middle, high) if fits else (low, middle)
    return low


def bytes_for(layers: list[tuple[Any, ...]], tokens: int, g: Generator, **how: int) -> int:
    """So many tokens fit, and most of another."""
    rows, number = how.get("rows", 1), how.get("number", 2)
    here, next_one = (nbytes(layers, S, rows, number) for S in (tokens, tokens + 1))
    return here + integer(g, (next_one - here) // 2 + 1, next_one - here)


def full(g: Generator) -> Call:
    layers = [("full", integer(g, 2, 5), integer(g, 5, 9))] * 3
    return call(layers, bytes_for(layers, integer(g, 9, 40), g))


def sliding(g: Generator) -> Call:
    heads, width = integer(g, 2, 5), integer(g, 5, 9)
    windows = integer(g, 5, 9), integer(g, 60, 90)  # shorter and longer than the text
    layers = [("full", heads, width), *(("sliding", heads, width, w) for w in windows)]
    return call(layers, bytes_for(layers, integer(g, 20, 40), g))


def latent(g: Generator) -> Call:
    layers = [("full", 2, 4), ("latent", integer(g, 9, 20)), ("latent", integer(g, 30, 40))]
    return call(layers, bytes_for(layers, integer(g, 9, 40), g))


def state(g: Generator) -> Call:
    layers = [
        ("state", integer(g, 90, 300)),
        ("state", integer(g, 90, 300)),
        ("full", 2, integer(g, 4, 9)),
    ]
    return call(layers, bytes_for(layers, integer(g, 9, 40), g))


def several(g: Generator) -> Call:
    layers = [("full", 2, 6), ("sliding", 2, 6, integer(g, 4, 9)), ("latent", 9), ("state", 700)]
    how = dict(rows=integer(g, 3, 7), number=4)
    return call(layers, bytes_for(layers, integer(g, 9, 40), g, **how), **how)


def to_the_last_byte(g: Generator) -> Call:
    """A small cache, and one of which a float cannot hold the bytes: the last one is missing."""
    small = [("full", integer(g, 2, 5), 7), ("state", integer(g, 90, 300))]
    large = [("latent", 2**30 + integer(g, 1, 9))]
    fits, misses = nbytes(small, integer(g, 9, 40), 1, 2), nbytes(large, 4 * 10**8, 1, 2) - 1
    return call((small, fits), (large, misses))


def nearly_nothing(g: Generator) -> Call:
    """What is there at the start fits, and no token does; then one."""
    width, start = integer(g, 9, 30), integer(g, 9, 30)
    grows = [("latent", width), ("state", start)]
    one = 2 * (start + width)
    return call((grows, 2 * start), (grows, one - 1), (grows[:1], 0), (grows, one))


def ends(g: Generator) -> Call:
    """A window that has no room, for a layer that grows beside it; and room to the last byte, where
    none does."""
    grows = [("sliding", 2, 8, integer(g, 20, 40)), ("full", 2, 8)]
    stays = [("sliding", 2, 8, integer(g, 20, 40)), ("state", integer(g, 90, 300))]
    small, enough = nbytes(grows, 0, 1, 2) - integer(g, 2, 300), nbytes(stays, 0, 1, 2)
    return call((grows, small), (stays, enough), (stays, enough - 1))


def each(function: Callable[..., Any], *machines: tuple[Any, ...]) -> list[Any]:
    return [function(*machine) for machine in machines]


def published(g: Generator) -> Call:
    """Sizes of a model of 7 billion weights that mixes: gigabytes, not exactly."""
    layers = [("full", 4, 128)] * 7 + [("sliding", 4, 128, 1024 * integer(g, 2, 9))] * 21
    return call(layers, 11 * 2**30 + 1, rows=8, number=1)


# ------------------------------------------------------------------------------- wrong answers

FULL, SLIDES, LATENT = "growing += 2 * heads", "fixed += 2 * heads", "growing += s"
STATE = "fixed += s"
LEFT = "budget - rows * number * fixed"
RESULT = "left // (rows * number * growing)"
FIRST, SECOND, THIRD = "full layers", "layers that slide", "layers with a latent"
FOURTH, ROWS = "layers with a state", "several rows, numbers of four bytes"
LAST, LITTLE = "a budget that is used to the last byte", "no room for a token"
ENDS, LARGE = "no room, and no end", "eight texts, gigabytes"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("keys are counted, not values", {FULL: "growing += heads", SLIDES: "fixed += heads"}, FIRST),
    ("values of a window are forgotten", {SLIDES: "fixed += heads"}, SECOND),
    ("a number is counted as a byte",
     {LEFT: "budget - rows * fixed", RESULT: "left // (rows * growing)"}, FIRST),
    ("bytes are taken for bits", {LEFT: "8 * budget - rows * number * fixed"}, FIRST),
    ("the first layer stands for all", {"in layers:": "in layers[:1]:"}, FIRST),
    ("a layer that slides grows like any other",
     {"fixed += 2 * heads * width * window": "growing += 2 * heads * width"}, SECOND),
    ("a window is not multiplied by its length",
     {"heads * width * window": "heads * width"}, SECOND),
    ("layers that slide are left out", {"fixed += 2 * heads * width * window": "pass"}, SECOND),
    ("a latent is kept twice, as if it were a key and a value",
     {LATENT: "growing += 2 * s"}, THIRD),
    ("a state is kept for every token", {STATE: "growing += s"}, FOURTH),
    ("a state is left out", {"            fixed += sizes[0]": "            pass"}, FOURTH),
    ("one text, however many rows there are",
     {LEFT: "budget - number * fixed", RESULT: "left // (number * growing)"}, ROWS),
    ("all rows share their windows and states", {LEFT: "budget - number * fixed"}, ROWS),
    ("the tokens of all rows together", {RESULT: "left // (number * growing)"}, ROWS),
    ("numbers of two bytes, whatever is given",
     {LEFT: "budget - rows * 2 * fixed", RESULT: "left // (rows * 2 * growing)"}, ROWS),
    ("numbers of four bytes by default", {"number: int = 2": "number: int = 4"}, FIRST),
    ("rounded up: the last token does not fit",
     {RESULT: "-(-left // (rows * number * growing))"}, FIRST),
    ("rounded to the nearest", {RESULT: "round(left / (rows * number * growing))"}, FIRST),
    ("what is there at the start is rounded to whole tokens",
     {RESULT: "max(0, budget // (rows * number * growing) - fixed // growing)"}, LITTLE),
    ("one token less than fits", {RESULT: "(left - 1) // (rows * number * growing)"}, LAST),
    ("a part of a token", {RESULT: "left / (rows * number * growing)"}, FIRST),
    ("rounded in float, where 53 bits are too few",
     {RESULT: "int(left / (rows * number * growing))"}, LAST),
    ("None instead of 0 tokens", {RESULT: RESULT + " or None"}, LITTLE),
    ("one token always fits", {RESULT: f"max(1, {RESULT})"}, LITTLE),
    ("None where nothing grows, also if there is no room for the start",
     {"if left < 0:": "if growing and left < 0:"}, ENDS),
    ("a length below zero", {"if left < 0:": "if left < -(10**12):"}, ENDS),
    ("None where nothing fits", {"return 0": "return None"}, ENDS),
    ("0 where no text is too long", {"return None": "return 0"}, ENDS),
    ("a division by zero where nothing grows", {"if growing == 0:": "if growing < 0:"}, ENDS),
]  # fmt: skip

CASES = (
    Case(FIRST, full, "a key and a value for each head, in each layer, two bytes a number",
         points=2, teaching="the formula of the lesson"),
    Case(SECOND, sliding, "room for a window is there from the start, and no larger later",
         teaching="windows alone"),
    Case(THIRD, latent, "one vector of a token, for keys and values of all heads",
         teaching="latents alone"),
    Case(FOURTH, state, "a state is as large after a thousand tokens as after one",
         teaching="states alone"),
    Case(ROWS, several, "every row has its own windows and states, too; look at `number`",
         teaching="all four kinds at once, small enough to add up by hand"),
    Case(LAST, to_the_last_byte,
         "what fits exactly fits, and what misses a byte does not; whole numbers need //",
         use=each),
    Case(LITTLE, nearly_nothing, "0 is a number of tokens: None says that there is no limit",
         use=each),
    Case(ENDS, ends, "windows larger than the budget: 0 tokens. Nothing grows, and all fits: None",
         use=each),
    Case(LARGE, published,
         "28 layers with 4 heads of width 128, 21 of them with a window of thousands",
         teaching="sizes of a published model, where a factor of two is gigabytes"),
)  # fmt: skip

EXERCISE = Exercise(
    name="measure_cache", function="longest_text", page="5_caching/2_kinds_of_cache", minutes=20,
    difficulty=2,
    outcome="Say how long a text fits into the memory of a machine, for layers that remember in "
            "different ways.",
    after=("growing_cache",), reference=longest_text, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Ask two questions of each layer: what does it keep before the first token, and how much "
        "more does it keep for each token?",
        "Both are numbers, not bytes. Add each of them over all layers first; rows and bytes of a "
        "number multiply both sums.",
        "What is left of the budget after the first sum is divided by the second. Which two things "
        "may be wrong with that division, and what does the text say of them?",
    ),
)  # fmt: skip
