"""AdamW or GaLore, and with which rank: the optimizer takes a step, and its state is counted."""

from functools import lru_cache
from typing import Any

import torch
from torch import Generator, nn

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer
from lm_from_scratch.optim.galore import GaLore

Shape = tuple[int, ...]
Choice = tuple[int | None, int]


@lru_cache(maxsize=4096)
def state(shape: Shape, rank: int | None, number: int) -> int:
    """The bytes that the package's optimizer keeps for a weight after a step."""
    weight = nn.Parameter(torch.zeros(shape, dtype={2: torch.bfloat16, 4: torch.float32}[number]))
    weight.grad = torch.ones_like(weight)
    optimizer = GaLore([weight], rank=rank)
    optimizer.step()
    kept = optimizer.state[weight].values()
    return sum(tensor.nbytes for tensor in kept if tensor.dim())  # counters have no dimension


def total(shapes: list[Shape], rank: int | None, number: int) -> int:
    return sum(state(shape, rank, number) for shape in shapes)


def choose_rank(shapes: list[Shape], budget: int, number: int = 4) -> Choice:
    if (adam := total(shapes, None, number)) <= budget:
        return None, adam
    low, high = 0, max(min(shape) for shape in shapes if len(shape) == 2)
    while low < high:
        middle = (low + high + 1) // 2
        if total(shapes, middle, number) <= budget:
            low = middle
        else:
            high = middle - 1
    return low, total(shapes, low, number) if low else 0


def one_matrix(g: Generator) -> Call:
    """A tall one; the budget lies between two ranks."""
    shape = (integer(g, 30, 40), integer(g, 20, 25))
    return call([shape], state(shape, integer(g, 4, 7), 4) + integer(g, 1, 60))


def layers(g: Generator) -> list[Shape]:
    """Tall, wide and square matrices beside vectors of norms and biases, some of them alike."""
    side = integer(g, 12, 17)
    square = [(side,), (side, side)] * 2
    return [*square, (integer(g, 30, 40), side), (side, integer(g, 22, 28)), (90,)]


def several(g: Generator) -> Call:
    shapes = layers(g)
    return call(shapes, total(shapes, integer(g, 3, 6), 4) + integer(g, 1, 100))


def exact(g: Generator) -> Call:
    """Rank 1 fits to the byte."""
    shapes = layers(g)
    return call(shapes, total(shapes, 1, 4))


def brain(g: Generator) -> Call:
    shapes = layers(g)
    return call(shapes, total(shapes, integer(g, 2, 4), 2) + integer(g, 1, 100), number=2)


def adam(g: Generator) -> Call:
    """In a dtype where GaLore would keep wider numbers."""
    shapes = layers(g)
    return call(shapes, total(shapes, None, 2) + integer(g, 1, 100), 2)


def room(g: Generator) -> Call:
    """AdamW fits to the byte, and many times."""
    shapes = layers(g)
    fits = total(shapes, None, 4)
    return call(shapes, (fits, fits * integer(g, 3, 9)))


def each(function: Any, shapes: list[Shape], budgets: tuple[int, ...]) -> list[Choice]:
    return [function(shapes, budget) for budget in budgets]


def high(g: Generator) -> Call:
    """A rank above half of the side, as large matrices have it where AdamW just does not fit."""
    return call([(integer(g, 200, 210), 210 + 11 * integer(g, 0, 9))], 332_000)


def thin(g: Generator) -> Call:
    """Matrices of LoRA's shape, whose smaller side is below the rank of the others."""
    shapes: list[Shape] = [
        (2, integer(g, 60, 70)),
        (integer(g, 40_000, 40_010), 3),
        (40, integer(g, 22, 26)),
        (1, 50),
        (40, 1),
    ]
    return call(shapes, total(shapes, integer(g, 5, 8), 4) + integer(g, 1, 60))


def nothing(g: Generator) -> Call:
    """A byte is missing for rank 1; the vectors alone do not fit; there is nothing."""
    shapes = layers(g)
    return call(shapes, (total(shapes, 1, 4) - 1, integer(g, 9, 90), 0))


# ------------------------------------------------------------------------------- wrong answers

NUMBERS = "min(rank, short) * (short + 2 * long)"
FIXED = "sum(2 * number * shape[0] for shape in shapes if len(shape) == 1)"
ONE, SEVERAL, EXACT = "one matrix", "matrices and vectors", "rank 1, and no byte more"
BRAIN, ADAM = "weights of two bytes", "AdamW fits, with two bytes"
ROOM, THIN = "AdamW fits exactly, and many times", "matrices with a side below the rank"
HIGH, NOTHING = "a high rank", "not even rank 1"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the basis is forgotten", {NUMBERS: "min(rank, short) * 2 * long"}, ONE),
    ("one moment, not two", {NUMBERS: "min(rank, short) * (short + long)"}, ONE),
    ("a basis on each side", {NUMBERS: "min(rank, short) * (short + long + 2 * long)"}, ONE),
    ("the basis is on the larger side, the moments on the smaller one",
     {NUMBERS: "min(rank, short) * (long + 2 * short)"}, ONE),
    ("the moments are as large as the matrix",
     {NUMBERS: "min(rank, short) * short + 2 * short * long"}, ONE),
    ("the moments are rank by rank", {NUMBERS: "min(rank, short) * (short + 2 * rank)"}, ONE),
    ("the basis is on the second side, whichever is smaller",
     {"sorted(shape) for": "shape[::-1] for",
      NUMBERS: "min(rank, short, long) * (short + 2 * long)",
      "max(short for short, _ in sides)": "max(map(min, sides))"}, SEVERAL),
    ("the vectors have no state", {FIXED: "0"}, SEVERAL),
    ("a vector is a matrix of one column",
     {FIXED: "0", "for shape in shapes if len(shape) == 2]":
      "if len(shape) == 2 else [1, *shape] for shape in shapes]"}, SEVERAL),
    ("a vector has one moment",
     {FIXED: "sum(number * shape[0] for shape in shapes if len(shape) == 1)"}, SEVERAL),
    ("the moments of vectors are float32, whatever the weight",
     {FIXED: "sum(8 * shape[0] for shape in shapes if len(shape) == 1)"}, BRAIN),
    ("the moments of a matrix have the dtype of the weight",
     {"if fixed + 4 * numbers": "numbers = sum(min(rank, short) * "
      "(4 * short + 2 * number * long) for short, long in sides)\n        if fixed + numbers",
      "return rank, fixed + 4 * numbers": "return rank, fixed + numbers"}, BRAIN),
    ("basis and moments have the dtype of the weight",
     {"if fixed + 4 * numbers": "if fixed + number * numbers",
      "return rank, fixed + 4 * numbers": "return rank, fixed + number * numbers"}, BRAIN),
    ("AdamW's moments are float32, whatever the weight",
     {"adam = sum(2 * number": "adam = sum(8"}, ADAM),
    ("GaLore, even where AdamW fits", {"if adam <= budget": "if False"}, ROOM),
    ("AdamW keeps one moment", {"adam = sum(2 * ": "adam = sum("}, HIGH),
    ("the full rank is taken for AdamW",
     {"return None, adam": "return max(min(shape) for shape in shapes if len(shape) == 2), adam"},
     ADAM),
    ("a state of exactly AdamW's size does not fit", {"if adam <= budget": "if adam < budget"},
     ROOM),
    ("much room is used for GaLore at full rank",
     {"if adam <= budget": "if adam <= budget < 2 * adam"}, ROOM),
    ("matrices of one shape count once", {"for shape in shapes if len(shape) == 2]":
     "for shape in set(shapes) if len(shape) == 2]"}, SEVERAL),
    ("a matrix with one column is a vector",
     {"for shape in shapes if len(shape) == 2]":
      "for shape in shapes if len(shape) == 2 and shape[1] > 1]",
      FIXED: "sum(2 * number * shape[0] for shape in shapes if len(shape) == 1 or shape[1] == 1)"},
     THIN),
    ("the rank is at most half of the side",
     {"range(max(short for short, _ in sides), 0, -1)":
      "range(max(short for short, _ in sides) // 2, 0, -1)"}, HIGH),
    ("a rank below zero, where the vectors do not fit",
     {"    for rank in range":
      "    if fixed > budget:\n        return -1, 0\n    for rank in range"}, NOTHING),
    ("a state of exactly the budget does not fit",
     {"if fixed + 4 * numbers <= budget": "if fixed + 4 * numbers < budget"}, EXACT),
    ("the rank is above the smaller side of a matrix",
     {NUMBERS: "rank * (short + 2 * long)"}, THIN),
    ("no rank is above the smallest side of all",
     {"max(short for short, _ in sides)": "min(short for short, _ in sides)"}, THIN),
    ("a matrix whose side is below the rank is left to AdamW",
     {NUMBERS: "min(rank, short) * (short + 2 * long) if rank < short else 2 * short * long"},
     THIN),
    ("the smallest rank that fits",
     {"range(max(short for short, _ in sides), 0, -1)":
      "range(1, max(short for short, _ in sides) + 1)"}, ONE),
    ("what is left of the budget, not what is used",
     {"return rank, fixed + 4 * numbers": "return rank, budget - fixed - 4 * numbers"}, ONE),
    ("numbers instead of bytes",
     {"return rank, fixed + 4 * numbers": "return rank, (fixed + 4 * numbers) // 4"}, ONE),
    ("rank 0 with the bytes of the vectors, where no rank fits", {"return 0, 0": "return 0, fixed"},
     NOTHING),
    ("None where nothing fits", {"return 0, 0": "return None, 0"}, NOTHING),
    ("rank 1 where nothing fits", {"return 0, 0": "return 1, budget"}, NOTHING),
]  # fmt: skip

CASES = (
    Case(ONE, one_matrix, "how many numbers are the basis, and how many the two moments?", points=2,
         teaching="one matrix, before sums"),
    Case(SEVERAL, several,
         "the basis is on the smaller side of each matrix; vectors are as under AdamW", points=3,
         teaching="the question itself, at a model of several shapes"),
    Case(EXACT, exact, "a state as large as the budget fits"),
    Case(BRAIN, brain, "what AdamW keeps has the dtype of the weight, what GaLore keeps is float32",
         points=2),
    Case(ADAM, adam, "try AdamW first, with the bytes of this dtype"),
    Case(ROOM, room,
         "a state as large as the budget fits; GaLore is for budgets that AdamW does not meet",
         use=each),
    Case(THIN, thin, "the rank of a matrix is at most its smaller side", points=2),
    Case(HIGH, high, "any rank up to the smaller side may be the answer"),
    Case(NOTHING, nothing, "vectors and rank 1 are the least there is; else (0, 0)", use=each),
)  # fmt: skip

EXERCISE = Exercise(
    name="measure_rank", function="choose_rank", page="7_optimizers/2_galore", minutes=20,
    difficulty=2,
    outcome="Decide from a budget of bytes between AdamW and GaLore, and choose the rank.",
    after=("galore_project",), reference=choose_rank, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Write a function that gives the bytes of the state for one rank. The decision comes last.",
        "Sort the two sides of a matrix: what has the smaller side in its shape, and what has the "
        "larger one?",
        "A state never shrinks when the rank grows. From which end do you try ranks, and where do "
        "you stop?",
    ),
)  # fmt: skip
