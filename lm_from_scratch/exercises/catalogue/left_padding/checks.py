"""Positions in a padded batch: what counts, and where the next token of each row is."""

from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers, refusal

Pair = tuple[Tensor, Tensor]


def reference(attention_mask: Tensor) -> Pair:
    """The package's positions, and the largest of each row plus one."""
    positions = positions_from_mask(attention_mask)
    return positions, positions.amax(dim=1) + 1


def both(function: Any, attention_mask: Tensor) -> dict[str, Tensor]:
    """The two results by name."""
    result = function(attention_mask)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TypeError("the function must return two tensors: return positions, following")
    return {"the first result, positions,": result[0], "the second result, next,": result[1]}


def shuffled(g: Generator, rows: Tensor) -> Tensor:
    return rows[torch.randperm(len(rows), generator=g)]


def left(g: Generator) -> Call:
    """Texts of 2, 4 and 7 tokens in an order of the seed."""
    lengths = shuffled(g, torch.tensor([2, 4, 7]))
    return call((torch.arange(7) >= 7 - lengths[:, None]).long())


def right(g: Generator) -> Call:
    """No row is full, so that the last column tells nothing."""
    lengths = shuffled(g, torch.tensor([3, 5, 1, 4]))
    return call((torch.arange(6) < lengths[:, None]).long())


def between(g: Generator) -> Call:
    """Padding on both sides and inside, another number of tokens in each row."""
    rows = torch.tensor([[0, 1, 1, 0, 0, 1, 0, 1, 0], [1, 0, 1, 1, 0, 1, 1, 1, 0]])
    return call(shuffled(g, rows))


def many_columns(g: Generator) -> Call:
    """Odd numbers of tokens near 300: 8 bits are too few, and bfloat16 has even numbers alone."""
    lengths = torch.tensor([[289], [309]]) + 2 * integers(g, 0, 4, 2, 1)
    return call(torch.arange(320) >= 320 - lengths)


def in_all_dtypes(function: Any, attention_mask: Tensor) -> dict[str, Any]:
    dtypes = (torch.bool, torch.int32, torch.uint8, torch.bfloat16)
    return {
        f"{name} of a mask in {str(dtype).removeprefix('torch.')}": value
        for dtype in dtypes
        for name, value in both(function, attention_mask.to(dtype)).items()
    }


def refused(function: Any, attention_mask: Tensor) -> dict[str, Any]:
    refuse = refusal(ValueError)
    return {
        **both(function, attention_mask),
        "a mask with a 2": refuse(function, attention_mask * 2),
        "a mask of 0 and a half": refuse(function, attention_mask * 0.5),
        "a mask of 0, a half and 1": refuse(
            function, (attention_mask + attention_mask.roll(1, 1)) * 0.5
        ),
        "an additive mask": refuse(function, attention_mask.log()),
        "a mask of one axis": refuse(function, attention_mask[0]),
        "a mask of four axes": refuse(function, attention_mask[:, None, None]),
    }


# ------------------------------------------------------------------------------- wrong answers

POSITIONS = "torch.where(real, real.cumsum(1) - 1, PADDING)"
CHECK = "attention_mask.dim() != 2 or not (real | (attention_mask == 0)).all()"
COLUMNS = "torch.arange(real.shape[1])"
RESULT = "return positions, real.sum(1)"

LEFT, RIGHT = "padding on the left", "padding on the right"
BOTH, ALONE = "padding on both sides and between tokens", "a row of padding alone"
DTYPES, REFUSED = "320 columns, in other dtypes", "what is no mask"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("padding is counted: a text starts at its column, not at 0",
     {"real.cumsum(1) - 1": COLUMNS, "real.sum(1)": "positions.amax(1) + 1"}, LEFT),
    ("padding gets position 0, and so is taken for a first token", {", PADDING)": ", 0)"}, LEFT),
    ("padding gets position 1, as in some libraries", {", PADDING)": ", 1)"}, LEFT),
    ("positions start at 1", {"real.cumsum(1) - 1": "real.cumsum(1)"}, LEFT),
    ("the next token is at the number of columns, padding included",
     {"real.sum(1)": "torch.full_like(real.sum(1), real.shape[1])"}, LEFT),
    ("all rows go on from the end of the longest text",
     {"real.sum(1)": "real.sum(1).max().expand(len(real))"}, LEFT),
    ("the position of the last token instead of the next one",
     {"real.sum(1)": "real.sum(1) - 1"}, LEFT),
    ("0 is taken for a token and 1 for padding",
     {"return positions":
      "positions = torch.where(real, -1, (~real).cumsum(1) - 1)\n    return positions",
      "real.sum(1)": "(~real).sum(1)"}, LEFT),
    ("counted down the columns, over the rows of the batch",
     {"real.cumsum(1)": "real.cumsum(0)"}, LEFT),
    ("counted through the whole batch, without a new start in each row",
     {"real.cumsum(1)": "real.flatten().cumsum(0).view_as(real)"}, LEFT),
    ("the running count is kept where a token is followed by padding",
     {POSITIONS: "real.cumsum(1) - 1"}, RIGHT),
    ("the next token is read from the last column, which may be padding",
     {"real.sum(1)": "positions[:, -1] + 1"}, RIGHT),
    ("the padding of a row is subtracted from all of its columns, as if it were on the left",
     {POSITIONS: f"({COLUMNS} - (~real).sum(1, keepdim=True)).where(real, PADDING)"}, RIGHT),
    ("the columns are moved by the padding of their row, which is right on the left alone",
     {POSITIONS: f"({COLUMNS} - (~real).sum(1, keepdim=True)).clamp(min=PADDING)"}, RIGHT),
    ("the text is taken to fill all columns from its first token to its last",
     {POSITIONS: f"({COLUMNS} - real.int().argmax(1, keepdim=True)).where(real, PADDING)",
      "real.sum(1)": "positions.amax(1) + 1"}, BOTH),
    ("positions are columns, and only the next one is counted",
     {"real.cumsum(1) - 1": COLUMNS}, LEFT),
    ("columns are counted from the first token on, also those of padding",
     {POSITIONS: f"({COLUMNS} - real.int().argmax(1, keepdim=True)).where(real, PADDING)"}, BOTH),
    ("positions start at 1, and the next one is one more",
     {"real.cumsum(1) - 1": "real.cumsum(1)", "real.sum(1)": "real.sum(1) + 1"}, LEFT),
    ("a row of padding alone goes on at -1",
     {"real.sum(1)": "real.sum(1).where(real.any(1), -1)"}, ALONE),
    ("the columns up to the last token are counted, padding included",
     {"real.sum(1)": f"(({COLUMNS} + 1) * real).amax(1) - real.int().argmax(1)"}, BOTH),
    ("a row of padding alone is taken to hold one token",
     {"real.sum(1)": "real.sum(1).clamp(min=1)"}, ALONE),
    ("axes of size 1 are lost by squeeze",
     {"real.sum(1)": "real.sum(1, keepdim=True).squeeze()"}, "one row of one token"),
    ("the next positions keep an axis of size 1",
     {"real.sum(1)": "real.sum(1, keepdim=True)"}, LEFT),
    ("counted in the dtype of the mask, which is too small",
     {"real.cumsum(1) - 1": "real.to(attention_mask.dtype).cumsum(1).long() - 1"}, DTYPES),
    ("the results have the dtype of the mask",
     {"real.sum(1)": "real.sum(1).to(attention_mask.dtype)",
      "return positions": "return positions.to(attention_mask.dtype)"}, DTYPES),
    ("only for masks that can be subtracted, which bool cannot",
     {"torch.where(real, ": "torch.where(1 - attention_mask == 0, "}, DTYPES),
    ("written into the mask itself",
     {RESULT: "if attention_mask.dtype == torch.int64:\n"
      f"        positions = attention_mask.copy_(positions)\n    {RESULT}"}, LEFT),
    ("the next position is summed in the dtype of the mask, which is too small",
     {"real.sum(1)": "attention_mask.sum(1).long()"}, DTYPES),
    ("only the smallest and the largest number are looked at",
     {CHECK:
      "attention_mask.dim() != 2 or attention_mask.aminmax()[0] < 0 or attention_mask.max() > 1"},
     REFUSED),
    ("nothing is refused",
     {CHECK: "False", "real.cumsum(1)": "real.cumsum(-1)", "real.sum(1)": "real.sum(-1)"}, REFUSED),
    ("any number is accepted, an additive mask too", {CHECK: "attention_mask.dim() != 2"}, REFUSED),
    ("only numbers above 1 are refused: an additive mask has none",
     {CHECK: "attention_mask.dim() != 2 or attention_mask.max() > 1"}, REFUSED),
]  # fmt: skip

CASES = (
    Case(LEFT, left, "a running count of the ones, minus 1, is the position of each token",
         points=2, use=both, teaching="the plain form, and the first thing to read"),
    Case(RIGHT, right,
         "the last column is padding here and says nothing about the row: count the tokens, and "
         "write -1 to every column of padding", points=2, use=both,
         teaching="the other usual side, where the last column tells nothing"),
    Case(BOTH, between,
         "the first and the last token of a row do not tell how many are between them: count",
         points=2, use=both),
    Case(ALONE,
         lambda g: call(shuffled(g, torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 1, 1]]))),
         "no token is there, so the next one is at 0", use=both),
    Case("one row of one token", lambda g: call(torch.ones(1, 1, dtype=torch.int64)),
         "the results have shapes (1, 1) and (1,): do not squeeze", use=both),
    Case(DTYPES, many_columns,
         "compare first, then count: bool adds up to int64, but bfloat16 cannot hold 257",
         use=in_all_dtypes),
    Case(REFUSED, left,
         "raise a ValueError unless there are two axes and every number is 0 or 1", use=refused),
)  # fmt: skip

EXERCISE = Exercise(
    name="left_padding", function="padded_positions", page="5_caching/4_padded_batches", minutes=15,
    difficulty=1,
    outcome="Write the positions of a padded batch so that each row gives what its text gives "
            "alone, wherever the padding is.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Go through one row by hand with a finger and count aloud. What do you say at a 0?",
        "`cumsum(1)` of the mask is the running count, which includes the token itself. Padding "
        "has a running count too: replace it.",
        "A running sum counts the real tokens up to each place. What has to be subtracted, so "
        "that the first is 0, and what is where there is no token? The last count of a row "
        "is also its next position.",
    ),
)  # fmt: skip
