"""Sinkhorn's algorithm: what is divided first, how often, and in which precision."""

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal
from lm_from_scratch.layers.hyper_connections import sinkhorn


def reference(scores: Tensor, rounds: int = 20) -> Tensor:
    """The package's own, of the exponentials, without its small number in the sums."""
    work = torch.promote_types(scores.dtype, torch.float32)
    shifted = scores.to(work) - scores.to(work).amax(dim=(-2, -1), keepdim=True)
    return sinkhorn(shifted.exp(), rounds, eps=0.0).to(scores.dtype)


def one(g: Generator) -> Call:
    return call(normal(g, 3, 3, scale=2.0), 1)


def two(g: Generator) -> Call:
    return call(normal(g, 3, 3, scale=2.0), 2)


def many(g: Generator) -> Call:
    """Far apart, so that twenty rounds have not reached the end."""
    return call(normal(g, 2, 5, 4, 4, scale=3.0))


def large(g: Generator) -> Call:
    """Each matrix at another height, all within 20."""
    heights = torch.tensor([300.0, -300.0, 90.0])[:, None, None]
    return call(normal(g, 3, 4, 4).clamp(-9, 9) + heights, 3)


def half(g: Generator) -> Call:
    return call(normal(g, 90, 4, 4, scale=3.0, dtype=torch.bfloat16), 12)


def double(g: Generator) -> Call:
    return call(normal(g, 2, 3, 3, dtype=torch.float64), 3)


def few(g: Generator) -> Call:
    return call(normal(g, 2, 3, 3), 3)


# ------------------------------------------------------------------------------- wrong answers

ONE, TWO, MANY, LARGE = "one round", "two rounds", "twenty rounds", "scores of 300 and -300"
BRAIN, DOUBLE, GRADIENTS = "bfloat16", "float64 keeps its digits", "gradients"

WIDE = "scores if scores.dtype == torch.float64 else scores.float()"
TOP = "wide.amax(dim=(-2, -1), keepdim=True)"
START, FIRST = "(wide - top).exp()", "start / start.sum(dim=-2, keepdim=True)"
ROWS, COLUMNS = "mix / mix.sum(dim=-1, keepdim=True)", "even / even.sum(dim=-2, keepdim=True)"
LOOP, RESULT = "range(rounds - 1)", "return mix.to(scores.dtype)"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the rows are divided first, and last",
     {FIRST: "start / start.sum(dim=-1, keepdim=True)",
      ROWS: "mix / mix.sum(dim=-2, keepdim=True)",
      COLUMNS: "even / even.sum(dim=-1, keepdim=True)"}, ONE),
    ("a round of rows and columns too many", {LOOP: "range(rounds)"}, ONE),
    ("a round of rows and columns too few", {LOOP: "range(rounds - 2)"}, TWO),
    ("the rows are divided last",
     {RESULT: "mix = mix / mix.sum(dim=-1, keepdim=True)\n    return mix.to(scores.dtype)"}, ONE),
    ("only the columns are divided", {ROWS: "mix"}, TWO),
    ("only the rows are divided after the first time", {COLUMNS: "even"}, TWO),
    ("within a round the columns come before the rows",
     {ROWS: "mix / mix.sum(dim=-2, keepdim=True)",
      COLUMNS: "even / even.sum(dim=-1, keepdim=True)"}, TWO),
    ("rows and columns are divided by sums of the same matrix",
     {COLUMNS: "even / mix.sum(dim=-2, keepdim=True)"}, TWO),
    ("columns sum to their length, not to 1",
     {RESULT: "mix = mix * mix.shape[-1]\n    " + RESULT}, ONE),
    ("a row is divided by its length, the root of the sum of squares",
     {ROWS: "mix / mix.norm(dim=-1, keepdim=True)", FIRST: "start / start.norm(dim=-2, "
      "keepdim=True)", COLUMNS: "even / even.norm(dim=-2, keepdim=True)"}, ONE),
    ("the scores are taken as they are, without the exponential",
     {START: "(wide - top).abs() + 1"}, ONE),
    ("the squares of the scores make them positive", {START: "wide.square()"}, ONE),
    ("the first division is a softmax of rows, which changes what the columns see",
     {FIRST: "start.softmax(dim=-1)"}, ONE),
    ("the exponential of large scores is infinite", {TOP: "0.0"}, LARGE,
     "a result of NaN is never named"),
    ("one number is subtracted from all matrices, and small ones vanish",
     {TOP: "wide.max()"}, LARGE,
     "a result of NaN is never named"),
    ("the mean of the batch is subtracted", {TOP: "wide.mean()"}, LARGE,
     "a result of NaN is never named"),
    ("a small number in the sums is larger than the sums of small matrices",
     {TOP: "0.0", FIRST: "start / (start.sum(dim=-2, keepdim=True) + 1e-6)"}, LARGE),
    ("always twenty rounds", {LOOP: "range(19)"}, ONE),
    ("a few rounds are taken for the end", {LOOP: "range(min(rounds, 5) - 1)"}, MANY),
    ("it goes on until the rows sum to 1",
     {LOOP: "range(500)"}, ONE),
    ("only the first matrix is mixed",
     {"wide = " + WIDE: "scores = scores + 0 * scores\n    wide = (" + WIDE + ")[:1].expand_as("
      "scores)"}, MANY),
    ("the sum is over the matrices of the batch", {FIRST: "start / start.sum(dim=0, keepdim=True)"},
     MANY),
    ("rounded to the dtype of the scores in every round",
     {COLUMNS: "(even / even.sum(dim=-2, keepdim=True)).to(scores.dtype).to(wide.dtype)"}, BRAIN),
    ("all is computed in half precision", {WIDE: "scores"}, BRAIN),
    ("the result stays float32", {RESULT: "return mix"}, BRAIN),
    ("float64 is computed in float32", {WIDE: "scores.float()"}, DOUBLE),
    ("gradients flow through the last round alone",
     {ROWS: "mix.detach() / mix.detach().sum(dim=-1, keepdim=True)"}, GRADIENTS),
    ("the sums are detached",
     {ROWS: "mix / mix.sum(dim=-1, keepdim=True).detach()",
      COLUMNS: "even / even.sum(dim=-2, keepdim=True).detach()"}, GRADIENTS),
    ("the transposed matrix", {RESULT: "return mix.mT.to(scores.dtype)"}, ONE),
]  # fmt: skip

CASES = (
    Case(ONE, one, "one round divides the columns, and nothing else", points=3),
    Case(TWO, two, "columns, rows, columns: each division uses the matrix as it is then", points=3,
         teaching="the loop"),
    Case(MANY, many, "matrices of a batch are apart; do all the rounds", points=2),
    Case(LARGE, large, "subtract the largest score of each matrix first", points=2),
    Case(BRAIN, half, "compute in float32, and round once at the end", tolerance=(4e-3, 1e-3)),
    Case(DOUBLE, double, "nothing becomes float32", tolerance=(1e-9, 1e-9)),
    Case(GRADIENTS, few, "every division has a gradient, its sum too", gradient=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="sinkhorn", function="doubly_stochastic", page="9_since_qwen2/10_residual_streams",
    minutes=15, difficulty=1,
    outcome="Make a doubly stochastic matrix of any scores, by Sinkhorn's algorithm.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Take a matrix of 2 by 2 and do two rounds by hand. Which sums are 1 after each division?",
        "A column runs along the next to last dimension: its sum is a sum over dim=-2, with "
        "keepdim=True so that it can divide.",
        "Divide the columns once before a loop of rounds - 1, in which rows come first. And what "
        "does a softmax subtract before it takes exponentials?",
    ),
)  # fmt: skip
