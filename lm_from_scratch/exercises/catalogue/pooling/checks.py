"""Pooling of a classifier: which column holds the last real token of each row."""

from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.attention.visibility import PADDING
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers, normal, refusal
from lm_from_scratch.models.heads import last_token


def shuffled(g: Generator, rows: list[list[int]]) -> Tensor:
    """The rows in an order of the seed."""
    return torch.tensor(rows)[torch.randperm(len(rows), generator=g)]


def right(g: Generator) -> Call:
    """No row is full, and one has a single token."""
    rows = [[0, 1, 2, 3, -1, -1], [0, -1, -1, -1, -1, -1], [0, 1, 2, 3, 4, -1]]
    return call(normal(g, 3, 6, 5), shuffled(g, rows))


def left(g: Generator) -> Call:
    rows = [[-1, -1, -1, 0, 1], [0, 1, 2, 3, 4], [-1, -1, -1, -1, 0], [-1, 0, 1, 2, 3]]
    return call(normal(g, 4, 5, 3), shuffled(g, rows))


def both_sides(g: Generator) -> Call:
    """The last column is always padding; inside there is some too."""
    rows = [[-1, 0, 1, 2, -1, 3, -1], [-1, -1, 0, -1, 1, -1, -1], [0, -1, -1, 1, 2, -1, -1]]
    return call(normal(g, 3, 7, 4), shuffled(g, rows))


def later(g: Generator) -> Call:
    """Texts that go on from positions 7 and 40003, and three texts in a row."""
    rows = [[7, 8, 9, -1, -1, -1], [0, 1, 0, 1, 2, 0], [-1, 40_003, 40_004, 40_005, 40_006, -1]]
    return call(normal(g, 3, 6, 2), shuffled(g, rows))


def senseless_padding(g: Generator) -> Call:
    """NaN in the states of padding; one row is padding alone."""
    positions = shuffled(g, [[0, 1, -1, -1, -1], [-1] * 5, [-1, 0, 1, 2, -1]])
    x = normal(g, 3, 5, 4).masked_fill((positions == PADDING)[..., None], torch.nan)
    return call(x, positions)


def real_rows(function: Any, x: Tensor, positions: Tensor) -> Any:
    """The result without the row that is padding alone, which may hold anything."""
    result = function(x, positions)
    if isinstance(result, Tensor) and result.shape == (len(x), x.shape[-1]):
        return {"rows": len(x), "those with a token": result[(positions >= 0).any(1)]}
    return result


def long(g: Generator) -> Call:
    """Of hundreds of columns: their numbers fit neither into 8 bits nor into bfloat16."""
    lengths = 2 * integers(g, 130, 150, 2, 1)
    columns = torch.arange(301)
    positions = columns.where(columns < lengths, PADDING)
    return call(normal(g, 2, 301, 6, dtype=torch.bfloat16), positions)


def other_shapes(function: Any, x: Tensor, positions: Tensor) -> dict[str, Any]:
    refuse = refusal(ValueError)
    return {
        "the states": function(x, positions),
        "a call with the positions of one row": refuse(function, x, positions[:1]),
        "a call with one position for each row": refuse(function, x, positions[:, :1]),
        "a call with too many columns": refuse(function, x[:, :-1], positions),
        "a call with positions of one axis": refuse(function, x, positions[0]),
        "a call with the axes of positions exchanged": refuse(function, x, positions.T),
    }


# ------------------------------------------------------------------------------- wrong answers

LAST = "torch.where(positions >= 0, torch.arange(T), 0).amax(1)"
TAKEN = "x[torch.arange(B), last]"
REAL = "(positions >= 0)[..., None]"


def last_state(x: Tensor, positions: Tensor | None = None) -> Tensor:
    return last_token(x, positions=positions)


RIGHT, LONG = "padding on the right", "bfloat16, hundreds of columns"
WITHOUT, NAN = "no positions", "NaN in the padding, and a row of padding alone"
LEFT, REFUSED = "padding on the left", "positions of another shape"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the last column, whatever it holds", {f"return {TAKEN}": "return x[:, -1]"}, RIGHT),
    ("columns are numbered in 8 bits", {LAST: f"({LAST}).to(torch.int8).long()"}, LONG),
    ("float64 is rounded to float32",
     {"x[:, -1]": "x[:, -1].float().to(x.dtype)", TAKEN: f"{TAKEN}.float().to(x.dtype)"}, WITHOUT),
    ("a row of padding alone is left out of the result",
     {TAKEN: f"{TAKEN}[(positions >= 0).any(1)]"}, NAN),
    ("the largest position is taken for a column",
     {LAST: "positions.amax(1).clamp(0, T - 1)"}, LEFT),
    ("the tokens are counted: right for padding on the right alone",
     {LAST: "(positions >= 0).sum(1) - 1"}, LEFT),
    ("the token before the first padding, or the last column if padding comes first",
     {LAST: "((positions < 0).int().argmax(1) - 1) % T"},
     "padding on both sides and between tokens"),
    ("the token with the largest position, not the rightmost",
     {LAST: "positions.argmax(1)"}, "positions from 7 on, and three texts in a row"),
    ("the last token of the first text in a row",
     {LAST: "torch.where((positions >= 0) & ((positions == 0).cumsum(1) < 2), torch.arange(T), 0)"
      ".amax(1)"}, "positions from 7 on, and three texts in a row"),
    ("the first real token, which has read nothing",
     {LAST: "(positions >= 0).int().argmax(1)"}, RIGHT),
    ("the first column", {f"return {TAKEN}": "return x[:, 0]"}, RIGHT),
    ("the mean of all real tokens",
     {f"return {TAKEN}": f"return (x * {REAL}).sum(1) / {REAL}.sum(1)"}, RIGHT),
    ("the largest of each feature over all real tokens",
     {f"return {TAKEN}": f"return x.masked_fill(~{REAL}, -9e9).amax(1)"}, RIGHT),
    ("one column for the whole batch",
     {LAST: "torch.where(positions >= 0, torch.arange(T), 0).max().expand(B)"}, RIGHT),
    ("position 0 is taken for padding", {"positions >= 0": "positions > 0"}, LEFT),
    ("one column too far to the left", {".amax(1)": ".amax(1) - 1"}, RIGHT),
    ("x[:, columns] takes all columns from every row", {TAKEN: "x[:, last]"}, RIGHT),
    ("the axis of the tokens is kept", {TAKEN: "x[torch.arange(B), last][:, None]"}, RIGHT),
    ("gather with an index that is not expanded: one feature alone",
     {TAKEN: "x.gather(1, last[:, None, None])[:, 0]"}, RIGHT),
    ("the padding is multiplied by 0, and NaN stays",
     {TAKEN: "(x * (torch.arange(T) == last[:, None])[..., None]).sum(1)"}, NAN,
     "its result is NaN, which the report says in words"),
    ("a row without a token is not expected",
     {LAST: "torch.stack([row.nonzero()[-1, 0] for row in positions >= 0])"}, NAN),
    ("positions must be given", {"positions: Tensor | None = None": "positions: Tensor"}, WITHOUT),
    ("the result is float32", {TAKEN: "x[torch.arange(B), last].float()"}, LONG),
    ("a view of states that are not contiguous",
     {TAKEN: "x.view(B * T, -1)[torch.arange(B) * T + last]"}, LONG),
    ("the states of padding are overwritten in x itself",
     {f"return {TAKEN}": f"states = {TAKEN}\n    x.data[positions < 0] = 0.0\n    return states"},
     RIGHT),
    ("only the number of positions is compared",
     {"positions.shape != (B, T)": "positions.numel() != B * T",
      LAST: LAST.replace("positions", "positions.reshape(B, T)")}, REFUSED),
    ("positions of any shape are accepted", {"positions.shape != (B, T)": "False"}, REFUSED),
    ("the states are detached",
     {TAKEN: "x.detach()[torch.arange(B), last]"}, "the gradient of the states"),
]  # fmt: skip

CASES = (
    Case(RIGHT, right,
         "each row has a last column of its own: the largest column whose position is not -1",
         points=2, teaching="the plain form, and the first thing to read"),
    Case(LEFT, left,
         "a position counts from the start of the text, a column from the start of the row",
         points=2, teaching="the side on which generation pads"),
    Case("padding on both sides and between tokens", both_sides,
         "neither the first padding nor the number of tokens tells where the last one is",
         points=2, teaching="padding that no rule for one side survives, without anything else"),
    Case("positions from 7 on, and three texts in a row", later,
         "the rightmost real token is wanted, not the one with the largest position"),
    Case(WITHOUT, lambda g: call(normal(g, 3, 4, 6, dtype=torch.float64) / 3),
         "positions is None by default: nothing is padding, so take the last column",
         gradient=True),
    Case(NAN, senseless_padding,
         "0 * NaN is NaN: choose by an index, do not multiply. A row without a token needs some "
         "column, any will do", use=real_rows),
    Case(LONG, long,
         "an index keeps the dtype of x; columns are counted in whole numbers of 64 bits"),
    Case(REFUSED, right,
         "compare positions.shape with x.shape[:2] and raise a ValueError: broadcasting accepts "
         "too much", use=other_shapes),
    Case("the gradient of the states", both_sides,
         "only the chosen states get a gradient, and nothing may be detached", gradient=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="pooling", function="last_state", page="4_classification/1_sequences", minutes=15,
    difficulty=1,
    outcome="Write the pooling of a causal classifier so that it finds the last real token "
            "wherever the padding is.",
    reference=last_state, cases=CASES, wrong=planted(WRONG),
    hints=(
        "You need one number for each row: a column. Write the mask of real tokens of a row and "
        "the numbers of its columns below each other.",
        "Put 0 into the columns of padding, and take the largest of the row.",
        "Among the real tokens of a row, which column is the last? Numbers of columns, with "
        "padding replaced by something smaller, have a maximum. Then one index for rows and "
        "one for columns, side by side.",
    ),
)  # fmt: skip
