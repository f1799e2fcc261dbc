"""Keys shared across layers: whose keys a layer reads, and what is left in the cache."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer
from lm_from_scratch.models.gemma4 import sources
from lm_from_scratch.models.qwen2 import FULL, SLIDING


def reference(
    kinds: list[str], shared: int, numbers: dict[str, int], tokens: int, window: int
) -> tuple[list[int], int]:
    """The package's own sources; each layer that reads itself keeps what it sees."""
    reads, length = sources(kinds, shared), {FULL: tokens, SLIDING: min(tokens, window)}
    own = [kind for layer, kind in enumerate(kinds) if reads[layer] == layer]
    return reads, sum(numbers[kind] * length[kind] for kind in own)


def given(g: Generator, kinds: list[str], shared: int, short: bool = False) -> Call:
    """With other widths for the two kinds, and a text that is longer or shorter than the window."""
    window = integer(g, 20, 40)
    numbers = {SLIDING: 2 * integer(g, 40, 60), FULL: 2 * integer(g, 61, 90)}
    tokens = window - integer(g, 3, 9) if short else window + integer(g, 50, 90)
    return call(kinds, shared, numbers, tokens, window)


def mixed(g: Generator, own: int, shared: int) -> list[str]:
    """Layers in any order; the last with keys is one that slides, the one before it is not, and the
    first two have both kinds; the layers that share begin with one that sees everything."""
    draw = torch.randint(2, (own + shared,), generator=g).tolist()
    kinds = [(SLIDING, FULL)[n] for n in draw]
    kinds[:2], kinds[own - 2 : own], kinds[own : own + 2] = (
        [FULL, SLIDING], [FULL, SLIDING], [FULL, SLIDING],
    )  # fmt: skip
    return kinds


def both(function: Callable[..., Any], kinds: list[str], *rest: Any) -> list[Any]:
    """And the same with the two kinds exchanged."""
    others = [FULL if kind == SLIDING else SLIDING for kind in kinds]
    return [function(kinds, *rest), function(others, *rest)]


def pattern(interval: int, n: int) -> list[str]:
    return [FULL if (layer + 1) % interval == 0 else SLIDING for layer in range(n)]


# ------------------------------------------------------------------------------- wrong answers

EIGHT, NOBODY, GEMMA, MIXED = "eight layers", "nobody shares", "Gemma 4 E4B", "kinds in any order"
SHORT, ONE = "a text shorter than the window", "one layer has keys"

LAST = "{kind: layer for layer, kind in enumerate(kinds[:first])}"
READS = "[last[kind] for kind in kinds[first:]]"
LENGTH = "min(tokens, window) if kind == SLIDING else tokens"
LOOP = "for kind in kinds[:first]:"
KEPT = "kept += numbers[kind] * length"
FIRST = "first = len(kinds) - shared"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("all read from the last layer that has keys, whatever its kind",
     {READS: "[first - 1] * shared"}, EIGHT),
    ("each reads from the first layer of its kind",
     {LAST: "{kind: kinds.index(kind) for kind in kinds}"}, EIGHT),
    ("each reads from the layer below it", {READS: "[*range(first - 1, len(kinds) - 1)]"}, EIGHT),
    ("each reads from the last layer of its kind, which may share itself",
     {LAST: "{kind: layer for layer, kind in enumerate(kinds)}"}, EIGHT),
    ("each reads from the latest layer of its kind below it, which may share itself",
     {READS: "[max((i for i in range(n) if kinds[i] == kinds[n]), default=0) "
      "for n in range(first, len(kinds))]"}, MIXED),
    ("the first layers share, not the last", {FIRST: "first = shared or len(kinds)"}, MIXED),
    ("a slice that ends at minus 0 is empty: without sharing nobody has keys",
     {LOOP: "for kind in kinds[:-shared]:"}, NOBODY),
    ("layers that share have keys in the cache, too", {LOOP: "for kind in kinds:"}, EIGHT),
    ("only layers that others read count",
     {LOOP: "for kind in (kinds[i] for i in sorted({*reads[first:]})):"}, EIGHT),
    ("every layer keeps the whole text", {LENGTH: "tokens"}, EIGHT),
    ("every layer keeps a window", {LENGTH: "min(tokens, window)"}, EIGHT),
    ("a window is full from the first token on",
     {LENGTH: "window if kind == SLIDING else tokens"}, SHORT),
    ("a layer that slides keeps the window and its own token",
     {LENGTH: "min(tokens, window + 1) if kind == SLIDING else tokens"}, EIGHT),
    ("a layer that slides does not keep the latest token",
     {LENGTH: "min(tokens, window - 1) if kind == SLIDING else tokens"}, EIGHT),
    ("the two kinds are exchanged", {LENGTH: "min(tokens, window) if kind != SLIDING else tokens"},
     EIGHT),
    ("keys and values are counted twice", {KEPT: "kept += 2 * numbers[kind] * length"}, EIGHT),
    ("all layers are as wide as one that slides",
     {KEPT: "kept += numbers.get(SLIDING, 0) * length"}, EIGHT),
    ("one layer more shares", {FIRST: "first = len(kinds) - shared - 1"}, EIGHT),
    ("one layer fewer shares", {FIRST: "first = len(kinds) - max(shared - 1, 0)"}, EIGHT),
    ("layers are counted from 1",
     {"return reads, kept": "return [layer + 1 for layer in reads], kept"}, EIGHT),
    ("only the layers that share are listed", {"return reads, kept": "return reads[first:], kept"},
     EIGHT),
    ("the list of the caller is cut",
     {"return reads, kept": "del kinds[first:]\n    return reads, kept"}, EIGHT),
]  # fmt: skip

CASES = (
    Case(EIGHT, lambda g: given(g, [SLIDING if c == "S" else FULL for c in "SSFSSFSF"], 4),
         "layers 4 to 7 read from 3, 2, 3 and 2; the cache holds three windows and one text",
         points=3, teaching="the table of the text"),
    Case(NOBODY, lambda g: given(g, pattern(3, integer(g, 4, 8)), 0),
         "with shared = 0 each layer reads its own keys; mind a slice that ends at -0"),
    Case(MIXED, lambda g: given(g, mixed(g, 7, 6), 6),
         "look for the last layer of each kind among those that have keys", points=2, use=both,
         teaching="no pattern to rely on, and two models of the same shape"),
    Case(GEMMA, lambda g: given(g, pattern(6, 42), 18),
         "24 layers have keys, and four of them see everything", points=2,
         teaching="the model of the lesson"),
    Case(SHORT, lambda g: given(g, pattern(4, integer(g, 8, 12)), 3, short=True),
         "a layer cannot keep more tokens than there are", points=2),
    Case(ONE, lambda g: given(g, [(SLIDING, FULL)[integer(g, 0, 2)]] * 5, 4),
         "layers of one kind alone: all read from layer 0", teaching="the smallest cache"),
)  # fmt: skip

EXERCISE = Exercise(
    name="shared_keys", function="shared_keys", page="9_since_qwen2/11_shared_keys",
    minutes=15, difficulty=1,
    outcome="Say whose keys a layer reads, and count what a cache with shared layers holds.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Take the table of the text: why does layer 5 not read from layer 3, which is nearer?",
        "A layer that shares can only read where something is kept: among the layers before the "
        "first that shares. How do you find the last of each kind there?",
        "A dictionary from kind to layer, filled in order, remembers the last. For the numbers, "
        "go through the layers that have keys: how many tokens does each of them keep?",
    ),
)  # fmt: skip
