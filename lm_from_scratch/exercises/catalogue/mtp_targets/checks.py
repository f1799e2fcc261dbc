"""Targets of several depths: shifted far enough, in one document, and never padding."""

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer, integers
from lm_from_scratch.text import targets


def reference(idx: Tensor, positions: Tensor, n_depth: int) -> Tensor:
    """The package's targets of each depth."""
    each = [targets.mtp_targets(idx, d, positions=positions) for d in range(n_depth)]
    return torch.stack(each)


def row(*lengths: int) -> list[int]:
    """Positions of documents of these lengths, one after the other; a negative one is padding."""
    places: list[int] = []
    for length in lengths:
        places += range(length) if length > 0 else [-1] * -length
    return places


def given(g: Generator, rows: list[list[int]], n_depth: int) -> Call:
    """Any tokens at these positions."""
    positions = torch.tensor(rows)
    return call(integers(g, 0, 151_936, *positions.shape), positions, n_depth)


def next_token(g: Generator) -> Call:
    """Token 0 is a target like any other."""
    idx, positions, n_depth = given(g, [row(6), row(6)], 1).args
    idx[0, 3] = 0
    return call(idx, positions, n_depth)


def packed(g: Generator) -> Call:
    cut = integer(g, 3, 6)
    return given(g, [row(cut, 10 - cut), row(4, 3, 3)], 3)


def on_the_right(g: Generator) -> Call:
    pads = integer(g, 2, 5)
    return given(g, [row(9 - pads, -pads), row(9)], 3)


def on_the_left(g: Generator) -> Call:
    pads = integer(g, 2, 5)
    return given(g, [row(-pads, 9 - pads), row(-9)], 3)


def same_tokens(g: Generator) -> Call:
    """Documents that hold one token only, the padding's too."""
    token = integers(g, 0, 151_936, 1)
    positions = torch.tensor([row(5, 5), row(6, -4)])
    return call(token.expand(2, 10).clone(), positions, 3)


# ------------------------------------------------------------------------------- wrong answers

PLAIN, FIRST, PACKED = "one document, three depths", "one depth", "several documents in a row"
SHORT, RIGHT, LEFT = "documents of one token", "padding on the right", "padding on the left"
BETWEEN, SAME, DEEP = "padding between documents", "one token only", "more depths than tokens"
SAME_DOC = "same = (here >= 0) & (ahead == here + d + 1)"
TAKEN = "idx[:, d + 1 :].masked_fill(~same, -100)"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("depth d is shifted by d, so that depth 1 is asked for what it has seen",
     {"targets[d, :, : T - d - 1] = idx[:, d + 1 :].masked_fill(~same, -100)":
          "targets[d, :, : T - max(d, 1)] = idx[:, max(d, 1) :].masked_fill("
          "torch.nn.functional.pad(~same, (0, int(d > 0)), value=True), -100)"}, PLAIN),
    ("every depth has the target of the first",
     {"for d in range(min(n_depth, T)):": "for e in range(n_depth):\n"
      "        d = 0", "targets[d, :,": "targets[e, :,"}, PLAIN),
    ("the target of a token is itself",
     {TAKEN: "idx[:, : T - d - 1].masked_fill(~same, -100)"}, FIRST),
    ("targets are shifted to the right", {
     "targets[d, :, : T - d - 1]": "targets[d, :, d + 1 :]",
     TAKEN: "idx[:, : T - d - 1].masked_fill(~same, -100)"}, FIRST),
    ("the last columns have targets from the beginning of the row",
     {"targets[d, :, : T - d - 1] = idx[:, d + 1 :].masked_fill(~same, -100)":
          "targets[d] = idx.roll(-d - 1, 1)\n"
          "        targets[d, :, : T - d - 1] = idx[:, d + 1 :].masked_fill(~same, -100)"}, FIRST),
    ("targets cross from one document into the next",
     {SAME_DOC: "same = (here >= 0) & (ahead >= 0)"}, PACKED),
    ("only the first token ahead is looked at, and the others may be of the next document",
     {SAME_DOC: "same = (here >= 0) & (ahead >= 0) & (positions[:, 1 : T - d] == here + 1)"},
     PACKED),
    ("a document ends where the target is at place 0, and nowhere else",
     {SAME_DOC: "same = (here >= 0) & (ahead > 0)"}, SHORT),
    ("any higher place counts as the same document",
     {SAME_DOC: "same = (here >= 0) & (ahead > here)"}, SHORT),
    ("padding on the left is taken for a token before the first",
     {SAME_DOC: "same = ahead == here + d + 1"}, LEFT),
    ("padding has targets", {SAME_DOC: "same = (ahead == here + d + 1) | (here < 0)"}, LEFT),
    ("padding is a target",
     {SAME_DOC: "same = (here >= 0) & ((ahead == here + d + 1) | (ahead < 0))"}, RIGHT),
    ("what has no target is 0, a token like any other", {"~same, -100)": "~same, 0)"}, PACKED),
    ("what has no target is -1", {"~same, -100)": "~same, -1)"}, PACKED),
    ("the end of a row is 0, a token like any other",
     {"(n_depth, B, T), -100": "(n_depth, B, T), 0"}, FIRST),
    ("depths begin at 1, and the last has nothing before it",
     {"targets[d, :,": "targets[(d + 1) % n_depth, :,"}, PLAIN),
    ("depth and row are exchanged", {"return targets": "return targets.transpose(0, 1)"}, PLAIN),
    ("more depths than tokens raise an error", {"range(min(n_depth, T))": "range(n_depth)"}, DEEP),
    ("only as many depths as there are tokens are returned",
     {"return targets": "return targets[: T - 1]"}, DEEP),
    ("a token that is repeated is no target",
     {TAKEN: "idx[:, d + 1 :].masked_fill(~same | (idx[:, d + 1 :] == idx[:, : T - d - 1]), -100)"},
     SAME),
    ("token 0 is no target, as if it were padding",
     {TAKEN: "idx[:, d + 1 :].masked_fill(~same | (idx[:, d + 1 :] == 0), -100)"}, FIRST),
    ("the token with the padding's number is no target",
     {TAKEN: "idx[:, d + 1 :].masked_fill(~same | (idx[:, d + 1 :] == idx[1, -1]), -100)"}, SAME),
]  # fmt: skip

CASES = (
    Case(FIRST, next_token, "depth 0 is the next token, and the last column has none", points=2),
    Case(PLAIN, lambda g: given(g, [row(8), row(8)], 3),
         "at depth 2 the target of column i is column i + 3", points=2,
         teaching="the shift of each depth"),
    Case(PACKED, packed, "the last d + 1 tokens of each document have no target at depth d",
         points=2, teaching="what packing changes"),
    Case(SHORT, lambda g: given(g, [row(1, 1, 2, 1, 3), row(1, 1, 1, 1, 4)], 3),
         "a document of one token has no target, and is no target's way",
         teaching="documents shorter than a depth"),
    Case(RIGHT, on_the_right, "the last real token has no target", teaching="padding as a target"),
    Case(LEFT, on_the_left, "position -1 is followed by 0, and is no token all the same", points=2,
         teaching="-1 + 1 = 0"),
    Case(BETWEEN, lambda g: given(g, [row(4, -1, 4), row(-1, 3, -2, 3)], 4),
         "padding ends a document as well", teaching="all at once"),
    Case(SAME, same_tokens, "positions say where a document ends, tokens do not"),
    Case(DEEP, lambda g: given(g, [row(4), row(2, 2)], 6),
         "a depth that no token has a target for is -100 everywhere"),
    Case("a single column", lambda g: given(g, [row(1), row(-1)], 2), "nothing follows",
         teaching="the shortest row"),
)  # fmt: skip

EXERCISE = Exercise(
    name="mtp_targets", function="mtp_targets", page="9_since_qwen2/8_multi_token_prediction",
    minutes=20, difficulty=2,
    outcome="Say what each depth of a model must predict, in packed and padded rows.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Write the row `a b c` on paper, and below it what depth 0 and depth 1 must say at each "
        "column.",
        "Compare two slices: the columns that are d + 1 places further on, and those they are "
        "ahead of. When do two positions belong to one document?",
        "In one document positions differ by exactly as much as columns do. Is that enough to know "
        "a document by? Padding is -1 at every column, and its neighbour may be a position 0.",
    ),
)  # fmt: skip
