"""The rule of visibility: real, not after the query, within the window, in the same document."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer, refusal


def reference(
    query_positions: Tensor,
    key_positions: Tensor,
    window: int | None = None,
    query_documents: Tensor | None = None,
    key_documents: Tensor | None = None,
) -> Tensor:
    """The package's rule."""
    seen = Visibility(query_positions, key_positions, query_documents, key_documents, window)
    return seen.rule()


def sequence(g: Generator) -> Call:
    length = integer(g, 4, 7)
    places = torch.arange(length)[None].repeat(2, 1)
    return call(places, places.clone())


def chunk(g: Generator) -> Call:
    past = integer(g, 3, 6)
    places = torch.arange(past + 3)[None].repeat(2, 1)
    return call(places[:, past:].clone(), places)


def left_padded(n_padding: list[int], length: int) -> Tensor:
    """A row for each number of padding tokens, which are before the real ones."""
    padding = torch.tensor(n_padding)[:, None]
    return (torch.arange(length)[None] - padding).clamp(min=-1)


def padded(g: Generator) -> Call:
    places = left_padded([0, integer(g, 2, 5), 1], 7)
    return call(places, places.clone())


def windowed(g: Generator) -> Call:
    places = torch.arange(8)[None].repeat(2, 1)
    return call(places, places.clone(), integer(g, 2, 5))


def packed(g: Generator) -> Call:
    """Three documents in a row, of other lengths in the other row, the middle one numbered 0."""
    first = integer(g, 3, 5)
    rows = [(first, 3, 9 - 3 - first), (2, 4, 3)]
    places = torch.tensor([[i for size in row for i in range(size)] for row in rows])
    numbers = [7, 0, -1]
    documents = torch.tensor(
        [[n for n, size in zip(numbers, row, strict=True) for _ in range(size)] for row in rows]
    )
    return call(places, places.clone(), None, documents, documents.clone())


def ring(g: Generator) -> Call:
    """Keys in the order of their slots, which is not that of their positions. The second row began
    later, so it has fewer of them; both rows are asked for the same two positions, the latest
    first. It is in the first slot, and no position fits into 16 bits."""
    newest = 7 * integer(g, 5720, 5740)
    held = torch.arange(newest - 5, newest + 1)
    slots = torch.full((2, 7), -1)
    slots[0, held % 7] = held
    slots[1, held[2:] % 7] = held[2:]
    return call(held[None, -2:].flip(1), slots, 3)


def smallest(g: Generator) -> Call:
    places = torch.arange(integer(g, 4, 7))[None]
    return call(places, places.clone())


def together(g: Generator) -> Call:
    """Two rows ask for one row of keys, which holds two documents; the window ends inside them."""
    first = integer(g, 4, 6)
    places = torch.tensor([[*range(first), *range(9 - first)]])
    documents = torch.tensor([[4] * first + [2] * (9 - first)])
    columns = torch.tensor([[first - 2, first - 1, 8], [first, first + 2, 7]])
    return call(places[0, columns], places, 3, documents[0, columns], documents)


def small_windows(function: Callable[..., Any], queries: Tensor, keys: Tensor) -> Any:
    refuse = refusal(ValueError)
    return {
        "window=1": function(queries, keys, 1),
        "window=0": refuse(function, queries, keys, 0),
        "window=-2": refuse(function, queries, keys, -2),
    }


# ------------------------------------------------------------------------------- wrong answers

RULE = "(key >= 0) & (key <= query)"
TOGETHER = "documents and a window, two rows of queries for one of keys"
QUERY = "query_positions[:, None, :, None]"
KEY = "key_positions[:, None, None, :]"
COLUMNS_T = "torch.arange(query_positions.shape[1])[None, None, :, None]"
COLUMNS_S = "torch.arange(key_positions.shape[1])[None, None, None, :]"
WINDOW, RING, LEFT = "a window", "a ring of seven slots", "left padding, another number in each row"
TRIANGLE, DOCUMENTS = "one sequence, a triangle", "three documents in one row"
NARROW = "a window of 1, and those below it"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("a window of W + 1 keys: the query's own is not counted",
     {"key > query - window": "key >= query - window"}, WINDOW),
    ("a window of W - 1 keys", {"key > query - window": "key > query - window + 1"}, WINDOW),
    ("the window is not used", {"mask & (key > query - window)": "mask"}, WINDOW),
    ("positions are kept in 16 bits, where 40000 becomes negative",
     {QUERY: f"{QUERY}.short()", KEY: f"{KEY}.short()"}, RING),
    ("columns instead of positions: the triangle starts at the first key",
     {QUERY: COLUMNS_T, KEY: COLUMNS_S}, "three queries after a cache"),
    ("columns counted from the end, so that padding and order are not seen",
     {QUERY: f"{COLUMNS_T} + key_positions.shape[1] - query_positions.shape[1]", KEY: COLUMNS_S},
     LEFT),
    ("the future by columns, the rest by positions",
     {RULE: f"(key >= 0) & (query >= 0) & ({COLUMNS_S} <= {COLUMNS_T}"
      " + key_positions.shape[1] - query_positions.shape[1])"}, RING),
    ("the window by columns, the rest by positions",
     {"key > query - window": f"{COLUMNS_S} > {COLUMNS_T} - window"
      " + key_positions.shape[1] - query_positions.shape[1]"}, RING),
    ("a query does not see its own key", {"key <= query": "key < query"}, TRIANGLE),
    ("the future instead of the past", {"key <= query": "key >= query"}, TRIANGLE),
    ("everything in the own document is visible, the future too",
     {"mask & (asking == asked)": "asking == asked"}, DOCUMENTS),
    ("the future is not hidden", {"(key <= query)": "(query >= 0)"}, TRIANGLE),
    ("padding keys are visible", {RULE: "(query >= 0) & (key <= query)"}, LEFT),
    ("nothing is done about padding", {RULE: "key <= query"}, LEFT),
    ("position 0 is taken for padding", {"key >= 0": "key > 0"}, TRIANGLE),
    ("a padding query sees the first key",
     {QUERY: "query_positions.clamp(min=0)[:, None, :, None]"}, LEFT),
    ("a padding query sees itself",
     {RULE: "((key >= 0) & (key <= query)) | ((query < 0) & (key == query))"}, LEFT),
    ("the first row of the batch is used for all rows",
     {KEY: "key_positions[:1, None, None, :].expand(key_positions.shape[0], -1, -1, -1)"}, LEFT),
    ("documents are not compared", {"mask & (asking == asked)": "mask"}, DOCUMENTS),
    ("the keys of other documents, instead of its own",
     {"asking == asked": "asking != asked"}, DOCUMENTS),
    ("a document sees those with a lower number",
     {"asking == asked": "asking >= asked"}, DOCUMENTS),
    ("document 0 is taken for none",
     {"asking == asked": "(asking == asked) | (asked == 0)"}, DOCUMENTS),
    ("True where the key is hidden", {"    return mask": "    return ~mask"}, TRIANGLE),
    ("0 and minus infinity instead of True and False",
     {"    return mask": "    return torch.where(mask, 0.0, -torch.inf)"}, TRIANGLE),
    ("no axis for the heads", {"    return mask": "    return mask[:, 0]"}, TRIANGLE),
    ("rows are keys and columns are queries", {"    return mask": "    return mask.mT"}, TRIANGLE),
    ("a window of 0 is taken for none",
     {"if window is not None and window < 1:": "if window and window < 1:",
      "if window is not None:\n        mask": "if window:\n        mask"}, NARROW),
    ("as many rows as the queries have",
     {"    return mask": "    return mask[: query_positions.shape[0]]"}, RING),
    ("as many rows as the keys have",
     {"    return mask": "    return mask[: key_positions.shape[0]]"}, TOGETHER),
    ("the window is forgotten where there are documents",
     {"if window is not None:": "if window is not None and query_documents is None:"}, TOGETHER),
    ("documents are forgotten where there is a window",
     {"if query_documents is not None:": "if query_documents is not None and not window:"},
     TOGETHER),
    ("the window counts columns of visible keys, not positions",
     {"mask & (key > query - window)": "mask & (mask.flip(-1).cumsum(-1).flip(-1) <= window)"},
     RING),
    ("document 0 is hidden, as if it were padding",
     {"asking == asked": "(asking == asked) & (asked != 0)"}, DOCUMENTS),
    ("a padding query sees everything, so that its row is not empty",
     {"    return mask": "    return mask | (query < 0)"}, LEFT),
    ("only a window of 0 is refused", {"window < 1": "window == 0"}, NARROW),
    ("padding is marked in the positions of the caller",
     {"return mask": "key_positions[key_positions < 0] = 10**6\n    return mask"}, LEFT),
]  # fmt: skip

CASES = (
    Case(TRIANGLE, sequence,
         "a query sees its own key and those before it; the result is (B, 1, T, S)", points=2,
         teaching="the plain triangle, and the first thing to read"),
    Case("three queries after a cache", chunk,
         "compare positions: the first query is not at position 0",
         teaching="the corner of the mask, with nothing else new"),
    Case(LEFT, padded,
         "a key of position -1 is hidden from all, and a query of position -1 sees nothing",
         points=2),
    Case(WINDOW, windowed, "W keys, the query's own included: positions t - W + 1 to t",
         points=2, teaching="the window, where each row can be counted"),
    Case(DOCUMENTS, packed,
         "positions start again in each document, so only the number keeps two apart", points=2),
    Case(RING, ring,
         "a slot is no position: the keys bring theirs. One row of queries is for both rows. The "
         "text has gone on to position 40000"),
    Case(TOGETHER, together,
         "all conditions hold at once, and either side may have one row for all"),
    Case(NARROW, smallest,
         "with 1 each token sees itself alone; 0 and -2 would hide everything, and are refused",
         use=small_windows),
)  # fmt: skip

EXERCISE = Exercise(
    name="visibility", function="visible", page="3_attention/2_masks", minutes=20, difficulty=1,
    outcome="Write one rule from positions so that padding, caches, windows, packed documents and "
            "ring buffers need no special case.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Give both tensors axes of size 1, so that a comparison of the two is (B, 1, T, S).",
        "Four conditions, joined by `&`. The first two are `key >= 0` and `key <= query`: together "
        "they also leave a padding query nothing.",
        "Queries and keys need axes of their own, so that every pair meets: (B, 1, T, 1) and "
        "(B, 1, 1, S). Then there are up to four conditions, each a comparison; two of them "
        "are tested only if they are given.",
    ),
)  # fmt: skip
