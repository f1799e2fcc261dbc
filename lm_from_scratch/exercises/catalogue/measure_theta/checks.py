"""Which theta reads a longer text: the package's rotation is followed from position to position."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer
from lm_from_scratch.layers.rope import inverse_frequencies, rotation

Choice = tuple[int, float | None]


@lru_cache(maxsize=4096)
def way(theta: float, head_dim: int, length: int) -> Tensor:
    """The angle by which each pair has turned at the last position, added up turn by turn (D/2,).

    A pair turns by one radian at most between two positions, so that a turn is never missed.
    """
    speeds = inverse_frequencies(head_dim, theta, dtype=torch.float64)
    cos, sin = (part[0, 0] for part in rotation(torch.arange(length)[None], speeds))
    turned = torch.complex(cos, sin)
    return (turned[1:] * turned[:-1].conj()).angle().sum(0)


def safe_theta(
    thetas: list[float], head_dim: int, trained: int, length: int, theta: float = 10000.0
) -> Choice:
    known = way(theta, head_dim, trained)
    slow = known < 2 * math.pi
    safe = [
        new
        for new in thetas
        if bool((way(new, head_dim, length) <= known * (1 + 1e-9))[slow].all())
    ]
    return int(slow.sum()), min(safe, default=None)


def clear(theta: float, head_dim: int, trained: int) -> int:
    """The next length at which no pair is within 1 % of a whole turn."""
    while bool(((way(theta, head_dim, trained) / (2 * math.pi) - 1).abs() < 0.015).any()):
        trained += 1
    return trained


def needed(theta: float, head_dim: int, trained: int, length: int) -> list[float]:
    """The theta that each slow pair needs, pair 0 apart."""
    known = way(theta, head_dim, trained).tolist()
    more = (length - 1) / (trained - 1)
    half = head_dim // 2
    return [theta * more ** (half / i) for i in range(1, half) if known[i] < 2 * math.pi]


def mixed(g: Generator, *thetas: float) -> list[float]:
    return [round(thetas[i], 3) for i in torch.randperm(len(thetas), generator=g).tolist()]


def usual(g: Generator) -> Call:
    """The first slow pair decides. Between it and the last there is a theta as well. The first of
    the list is safe, and not the smallest."""
    D = 2 * integer(g, 8, 12)
    trained = clear(10000.0, D, integer(g, 90, 130))
    length = trained * integer(g, 3, 5)
    first, *_, last = needed(10000.0, D, trained, length)
    between = (last * 10000.0 * (length - 1) / (trained - 1)) ** 0.5
    others = mixed(g, 10000.0, between, last * 1.2, (first * last) ** 0.5, first * 1.3)
    return call([round(first * 9, 3), *others], D, trained, length)


def given(g: Generator) -> Call:
    """Another theta in training."""
    D, theta = 2 * integer(g, 8, 12), 1000.0 * integer(g, 300, 600)
    trained = clear(theta, D, integer(g, 150, 300))
    length = trained * 2
    first, *_, last = needed(theta, D, trained, length)
    return call(
        mixed(g, 20000.0, theta, (first * last) ** 0.5, first * 1.4, first * 20),
        D, trained, length, theta,
    )  # fmt: skip


def short(g: Generator) -> Call:
    """So few tokens that one more or less decides."""
    D, theta = 2 * integer(g, 8, 12), 100.0
    trained = clear(theta, D, integer(g, 11, 15))
    length = 2 * trained - 1 + integer(g, 0, 3)
    first, *others = needed(theta, D, trained, length)
    part = D / (D - 2 * len(others) - 2)  # a change of theta to this power changes the angle
    near = [theta, first * 0.98**part, first * 1.02**part, first * 3]
    return call(mixed(g, *near), D, trained, length, theta)


def shorter(g: Generator) -> Call:
    """A shorter text: the theta may be smaller than in training. The last pair decides."""
    D = 2 * integer(g, 8, 12)
    trained = clear(10000.0, D, integer(g, 300, 400))
    length = trained // 3
    last = needed(10000.0, D, trained, length)[-1]
    smaller = mixed(g, 10000.0, last * 0.7, last * 1.2, last / 20)
    larger = mixed(g, last * 0.7, 30000.0, 50000.0)
    return call((smaller, D, trained, length), (larger, D, trained, length))


def each(function: Callable[..., Choice], *calls: tuple[Any, ...]) -> list[Choice]:
    return [function(*given) for given in calls]


def none(g: Generator) -> Call:
    D = 2 * integer(g, 8, 12)
    trained = clear(10000.0, D, integer(g, 90, 130))
    length = 3 * trained
    first = needed(10000.0, D, trained, length)[0]
    return call(mixed(g, 10000.0, first * 0.8, first * 0.5), D, trained, length)


def first_pair(g: Generator) -> Call:
    """Seven tokens: pair 0 has turned by 6 radians, and no theta changes its speed. It is no
    trouble in a shorter text."""
    D = 2 * integer(g, 4, 9)
    return call((mixed(g, 1e4, 1e9, 1e15), D, 7, integer(g, 9, 25)), (mixed(g, 1e4, 9e4), D, 7, 4))


def all_round(g: Generator) -> Call:
    """A small theta and long texts: every pair is known all round."""
    return call(mixed(g, 30.0, float(integer(g, 2, 9)), 500.0), 8, 450, 2000, 30.0)


# ------------------------------------------------------------------------------- wrong answers

KNOWN = "(trained - 1) * theta ** (-i / half)"
LARGEST = "(length - 1) * new ** (-i / half)"
SLOW = "known[i] < 2 * math.pi"
FITS = "all(largest[i] <= known[i] for i in slow)"
RESULT = "return len(slow), min(safe, default=None)"
USUAL, GIVEN, SHORT = "a text several times as long", "another theta in training", "short texts"
SHORTER, NONE = "a text shorter than in training", "no theta is large enough"
FIRST, ROUND = "seven tokens in training", "all pairs are known all round"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the last pair alone, as in the formula of NTK scaling", {FITS: "largest[-1] <= known[-1]"},
     USUAL),
    ("every pair, also those that are known all round",
     {FITS: "all(largest[i] <= known[i] for i in range(half))"}, USUAL),
    ("one slow pair without new angles is enough", {FITS: "any(" + FITS[4:]}, USUAL),
    ("theta grows as the text does", {FITS: "new >= theta * (length - 1) / (trained - 1)"}, USUAL),
    ("half a turn is taken for a whole one", {SLOW: "known[i] < math.pi"}, FIRST),
    ("a turn is one radian", {SLOW: "known[i] < 1"}, USUAL),
    ("a turn is 360 radians", {SLOW: "known[i] < 360"}, USUAL),
    ("the pairs that are known all round are counted",
     {RESULT: "return half - len(slow), min(safe, default=None)"}, USUAL),
    ("features are counted, not pairs",
     {RESULT: "return 2 * len(slow), min(safe, default=None)"}, USUAL),
    ("the largest safe theta", {"min(safe": "max(safe"}, USUAL),
    ("the first safe theta of the list",
     {"min(safe, default=None)": "(safe[0] if safe else None)"}, USUAL),
    ("the theta of training is taken, too, which is not on the list",
     {"for new in thetas:": "for new in [*thetas, theta]:"}, SHORTER),
    ("where pair 0 is not known all round, no theta is safe",
     {FITS: "0 not in slow and " + FITS}, FIRST),
    ("the largest theta of the list, which is always the safest",
     {"min(safe, default=None)": "max(thetas)"}, USUAL),
    ("the exponent is i/D, not 2i/D",
     {KNOWN: "(trained - 1) * theta ** (-i / head_dim)",
      LARGEST: "(length - 1) * new ** (-i / head_dim)"}, USUAL),
    ("the old theta is always 10000", {KNOWN: "(trained - 1) * 10000.0 ** (-i / half)"}, GIVEN),
    ("the largest distance is the number of tokens",
     {KNOWN: "trained * theta ** (-i / half)", LARGEST: "length * new ** (-i / half)"}, FIRST),
    ("one token too many in the text to read", {LARGEST: "(length + 1) * new ** (-i / half)"},
     SHORT),
    ("a theta below that of training is never safe", {FITS: "new >= theta and " + FITS}, SHORTER),
    ("where the text is shorter, every theta is safe",
     {FITS: "length < trained or " + FITS}, SHORTER),
    ("the largest theta where none is safe", {"default=None": "default=max(thetas)"}, NONE),
    ("the theta of training where none is safe", {"default=None": "default=theta"}, NONE),
    ("whole turns are taken off an angle before it is compared",
     {FITS: "all(largest[i] % (2 * math.pi) <= known[i] for i in slow)"}, FIRST),
    ("pair 0 is known all round in any text",
     {"[i for i in range(half) if": "[i for i in range(1, half) if"}, FIRST),
    ("the theta of training where every pair is known",
     {"min(safe, default=None)": "(min(safe, default=None) if slow else theta)"}, ROUND),
]  # fmt: skip

CASES = (
    Case(USUAL, usual,
         "pair by pair: is it known all round, and if not, how far does it turn in the text?",
         points=3, teaching="the question itself, at sizes like those of the lesson"),
    Case(GIVEN, given, "what was seen in training follows from the theta of training",
         teaching="a theta as in models of today"),
    Case(SHORT, short, "the last position is one below the number of tokens", points=2),
    Case(SHORTER, shorter,
         "in a shorter text slow pairs may turn faster; the answer is on the list", use=each),
    Case(NONE, none, "where no theta is safe, the result says None",
         teaching="the question itself, without an answer on the list"),
    Case(FIRST, first_pair, "pair 0 turns by one radian per position, whatever theta is", use=each),
    Case(ROUND, all_round, "no pair can come to a new angle: the smallest theta will do"),
)  # fmt: skip

EXERCISE = Exercise(
    name="measure_theta", function="safe_theta", page="2_qwen2/2_rope", minutes=25, difficulty=2,
    outcome="Decide which theta lets a model with RoPE read longer texts, and which pair decides.",
    after=("rope",), reference=safe_theta, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Make a list of the angles that the pairs reach in training. Which of them are below a "
        "whole turn?",
        "Make the same list for one new theta and the text to read. For which pairs do the two "
        "lists have to be compared?",
        "Try it for every theta of the list and keep those that pass. Which pair stops most of "
        "them, and what if none passes?",
    ),
)  # fmt: skip
