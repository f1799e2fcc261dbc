"""Attention in tiles: a running maximum, a running sum, and what repairs them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lm_from_scratch.attention.online_softmax import attend_in_tiles
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer, integers, normal


def reference(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, tile: int) -> Tensor:
    """The package's tiles, for one head of one row."""
    queries, keys = (torch.zeros(1, len(x), dtype=torch.long) for x in (q, k))
    seen = Visibility(queries, keys, allowed=visible[None, None])
    return attend_in_tiles(q[None, None], k[None, None], v[None, None], seen, tile)[0, 0]


def inputs(g: Generator, T: int, S: int, tile: int, D: int = 4) -> Call:
    """All keys are visible."""
    q, k, v = normal(g, T, D), normal(g, S, D), normal(g, S, D)
    return call(q, k, v, torch.ones(T, S, dtype=torch.bool), tile)


def causal(g: Generator) -> Call:
    q, k, v, visible, tile = inputs(g, 6, 9, 4).args
    return call(q, k, v, visible & (torch.arange(9) <= torch.arange(3, 9)[:, None]), tile)


def with_offsets(g: Generator, rows: Tensor, columns: Tensor) -> Call:
    """Scores of ordinary size, plus rows[t] * columns[s]."""
    T, S = len(rows), len(columns)
    q, k, v = normal(g, T, 16), normal(g, S, 16), normal(g, S, 16)
    q[:, 0], k[:, 0] = rows, 4 * columns  # the root of 16 is 4
    return call(q, k, v, torch.ones(T, S, dtype=torch.bool), 4)


def rise_and_fall(g: Generator) -> Call:
    """Tile by tile the largest score rises by 200 for the first queries, and falls for the last."""
    steps = torch.tensor([0.0, 200.0, 400.0]).repeat_interleave(4)
    return with_offsets(g, torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]), steps)


def first_hidden(g: Generator) -> Call:
    """Left padding that fills a tile, and more."""
    q, k, v, visible, tile = inputs(g, 5, 12, 4).args
    visible[:, : integer(g, 4, 7)] = False
    visible[2, :8] = False  # two tiles
    return call(q, k, v, visible, tile)


def no_key(g: Generator) -> Call:
    q, k, v, visible, tile = inputs(g, 4, 7, 3).args
    visible[integer(g, 0, 4)] = False
    return call(q, k, v, visible, tile)


def loud_hidden(g: Generator) -> Call:
    """Hidden keys whose scores are 300 above the visible ones, one in each tile."""
    loud = torch.zeros(10)
    loud[[1, 6, 8]] = 300.0
    q, k, v, visible, tile = with_offsets(g, torch.ones(3), loud).args
    return call(q, k, v, visible & (loud == 0), tile)


def half(g: Generator) -> Call:
    """Scores near 180, where the step of float16 is 0.125. All products and sums are exact."""
    q = torch.full((3, 16), 4.0)
    k = torch.full((40, 16), 12.0)
    q[:, 0] = 1.0
    k[:, 0] = integers(g, -16, 17, 40) / 4
    visible = torch.ones(3, 40, dtype=torch.bool)
    return call(q.half(), k.half(), normal(g, 40, 16, dtype=torch.float16), visible, 7)


def many(g: Generator) -> Call:
    """One key with a weight near 1, and 60 tiles that bring 1/3000 each, with the sign of the first
    value reversed. In float16 1 + 1/3000 is 1."""
    q, k = torch.ones(3, 16), torch.zeros(961, 16)
    k[:, 0] = integers(g, -16, 17, 961) / 4
    k[0, 0] = 44.0
    v = normal(g, 16).sign().expand(961, 16).clone()
    v[1:] *= -1
    return call(q.half(), k.half(), v.half(), torch.ones(3, 961, dtype=torch.bool), 16)


class Largest(TorchDispatchMode):
    """The size of the largest floating-point tensor that an operation makes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its whole compiler to skip it

    def __init__(self, given: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.given = {x.untyped_storage().data_ptr() for x in given}
        self.numbers = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            counts = isinstance(x, Tensor) and x.is_floating_point()
            if counts and x.untyped_storage().data_ptr() not in self.given:
                self.numbers = max(self.numbers, x.numel())
        return result


def largest_tensor(
    function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, visible: Tensor, tile: int
) -> dict[str, Any]:
    """The result, and whether a tensor of all scores was made for it."""
    with Largest((q, k, v)) as mode:
        y = function(q, k, v, visible, tile)
    less = mode.numbers < visible.numel()
    return {"the result": y, "the largest tensor": "below T x S" if less else "T x S or more"}


# ------------------------------------------------------------------------------- wrong answers

MASK = "scores = scores.masked_fill(~visible[:, keys], -torch.inf)"
NEW_M = "torch.maximum(m, scores.amax(1, keepdim=True))"
P = "p = torch.exp(scores - new_m)"
RESULT = "(a / l.clamp(min=1)).to(q.dtype)"
NAN = "all its wrong results hold NaN, and all NaN look alike"


def all_scores(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, tile: int) -> Tensor:
    scores = (q.float() @ k.float().T / math.sqrt(q.shape[1])).masked_fill(~visible, -torch.inf)
    return (scores.softmax(1).nan_to_num(0.0) @ v.float()).to(q.dtype)


TILES, ONE_TILE = "three tiles, the last is shorter", "all keys in one tile"
CAUSAL, BLIND = "a causal mask", "a query that sees no key"
JUMPS, LOW = "scores that rise or fall by 200 from tile to tile", "all scores near -300"
HIDDEN_TILE, HALF = "the first tile is hidden", "float16, scores near 180"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the sum is not repaired when the maximum rises", {"l = rescale * l": "l = l"}, TILES),
    ("the weighted values are not repaired when the maximum rises",
     {"a = rescale * a": "a = a"}, TILES),
    ("nothing is repaired when the maximum rises",
     {"l = rescale * l": "l = l", "a = rescale * a": "a = a"}, TILES),
    ("the factor is turned round: exp(new maximum - old maximum)",
     {"torch.exp(m - new_m)": "torch.exp(new_m - m) if start else torch.zeros(T, 1)"}, TILES),
    ("a softmax in each tile, and the mean of the tiles",
     {"a = rescale * a + p": "a = a + p / p.sum(1, keepdim=True)",
      "a / l.clamp(min=1)": "a / math.ceil(len(k) / tile)"}, TILES),
    ("a softmax in each tile, and their sum",
     {"a = rescale * a + p": "a = a + p / p.sum(1, keepdim=True)", "a / l.clamp(min=1)": "a"},
     TILES),
    ("the last tile alone counts", {"l = rescale * l + p": "l = p", "a = rescale * a + p": "a = p"},
     TILES),
    ("not divided by the sum", {"a / l.clamp(min=1)": "a"}, ONE_TILE),
    ("the shorter last tile is left out",
     {"range(0, len(k), tile)": "range(0, max(len(k) - tile + 1, 1), tile)"}, TILES),
    ("tiles share a key", {"start + tile": "start + tile + 1"}, TILES),
    ("the mean of the exponentials of a tile, not their sum",
     {"p.sum(1, keepdim=True)": "p.mean(1, keepdim=True)"}, TILES),
    ("the root of D is missing", {" / math.sqrt(D)": ""}, ONE_TILE),
    ("the mask is not used", {MASK: "pass"}, CAUSAL),
    ("hidden scores are 0", {"-torch.inf": "0.0"}, CAUSAL),
    ("hidden scores are a finite number, so that a row without a key is a mean",
     {"-torch.inf": "-1e4"}, BLIND),
    ("the maximum of the tile, not of all tiles so far",
     {NEW_M: "scores.amax(1, keepdim=True).clamp(min=-1e30)"}, JUMPS, NAN),
    ("the maximum of the first tile for all", {NEW_M: f"m if start else {NEW_M}"}, JUMPS, NAN),
    ("no maximum is subtracted", {NEW_M: "torch.zeros(T, 1)", "torch.exp(m - new_m)": "1.0"},
     JUMPS),
    ("the maximum starts at 0",
     {"torch.full((T, 1), torch.finfo(torch.float32).min)": "torch.zeros(T, 1)"}, LOW),
    ("the maximum starts at the smallest positive number",
     {"torch.finfo(torch.float32).min": "torch.finfo(torch.float32).tiny"},
     LOW, "a start at 0 gives the same results"),
    ("hidden keys count for the maximum",
     {MASK: "pass", P: f"{P} * visible[:, keys]", "clamp(min=1)": "clamp(min=1e-30)"},
     "hidden scores above all others"),
    ("the maximum starts at minus infinity, and NaN is made 0 at the end",
     {"torch.finfo(torch.float32).min": "-torch.inf", RESULT: f"{RESULT}.nan_to_num(0.0)"},
     HIDDEN_TILE),
    ("the maximum starts at minus infinity",
     {"torch.finfo(torch.float32).min": "-torch.inf"}, HIDDEN_TILE, NAN),
    ("0 / 0 in a row without a key", {"l.clamp(min=1)": "l"}, BLIND, NAN),
    ("1 is added to the sum, against a division by 0", {"l.clamp(min=1)": "(l + 1)"}, ONE_TILE),
    ("the scores are rounded to half precision",
     {"q.float() @ k[keys].float().T / math.sqrt(D)": "(q @ k[keys].T).float() / math.sqrt(D)"},
     HALF),
    ("the sums are kept in half precision",
     {"torch.zeros(T, 1)": "torch.zeros(T, 1, dtype=q.dtype)",
      "torch.zeros(T, D)": "torch.zeros(T, D, dtype=q.dtype)",
      "        m = new_m": "        l, a, m = l.to(q.dtype), a.to(q.dtype), new_m"},
     "float16, 60 tiles of small weights"),
    ("divided by the sum in every tile, and the quotient added to",
     {"        m = new_m": "        a, m = a / l.clamp(min=1), new_m", RESULT: "a.to(q.dtype)"},
     TILES),
    ("one maximum for all queries, far above some of them",
     {NEW_M: "torch.maximum(m, scores.amax())",
      "(a / l.clamp(min=1))": "torch.where(l > 0, a / l, 0.0)"}, JUMPS),
    ("the result stays float32", {".to(q.dtype)": ""}, HALF),
    ("all scores exist at once", all_scores, "no tensor of all scores"),
]  # fmt: skip

CASES = (
    Case(ONE_TILE, lambda g: inputs(g, 3, 7, 9),
         "with one tile nothing is repaired: scores, maximum, exponentials, a / l",
         tolerance=(1e-4, 1e-4), teaching="everything but the repair"),
    Case(TILES, lambda g: inputs(g, 3, 11, 4),
         "when the maximum rises, both sums are multiplied by exp(old maximum - new maximum)",
         points=2, tolerance=(1e-4, 1e-4), teaching="the repair, with nothing else new"),
    Case(CAUSAL, causal,
         "a tile has its own columns of the mask; the last tile is hidden from some queries",
         tolerance=(1e-4, 1e-4), teaching="the mask, where no query meets a hidden tile first"),
    Case(JUMPS, rise_and_fall,
         "exp(200) is infinite: the maximum is that of all tiles so far, and it never falls",
         tolerance=(1e-4, 1e-4)),
    Case(LOW, lambda g: with_offsets(g, torch.ones(3), torch.full((10,), -300.0)),
         "the maximum may be far below 0: a start at 0 is not low enough", tolerance=(1e-4, 1e-4)),
    Case("hidden scores above all others", loud_hidden,
         "a hidden score of 300 must not become the maximum: hide first, then look for it",
         tolerance=(1e-4, 1e-4)),
    Case(HIDDEN_TILE, first_hidden,
         "minus infinity less minus infinity is NaN: the maximum may start at a finite number",
         points=2, tolerance=(1e-4, 1e-4)),
    Case(BLIND, no_key,
         "its sums stay 0, and 0 / 0 is NaN; in all other rows the sum is at least 1",
         tolerance=(1e-4, 1e-4)),
    Case(HALF, half, "near 180 the step of float16 is 0.125, which changes a weight by 13 %"),
    Case("float16, 60 tiles of small weights", many,
         "1 + 1/3000 is 1 in float16, however often it is added: keep l and a in float32"),
    Case("no tensor of all scores", lambda g: inputs(g, 6, 24, 6),
         "work on one tile at a time, and keep only m, l and a from one to the next",
         tolerance=(1e-4, 1e-4), use=largest_tensor),
)  # fmt: skip

EXERCISE = Exercise(
    name="online_softmax", function="tiled_attention", page="3_attention/1_attention", minutes=35,
    difficulty=3,
    outcome="Write attention over tiles of keys so that every running sum stays right when the "
            "maximum changes, and when a tile is hidden.",
    reference=reference, after=("attention",), cases=CASES, wrong=planted(WRONG),
    hints=(
        "Write it for one tile first. Which of your three numbers for each query are relative to "
        "the old maximum when the second tile comes?",
        "For each tile: scores, -inf where hidden, `new_m` = the larger of `m` and the tile's "
        "maximum, `rescale = exp(m - new_m)`, `p = exp(scores - new_m)`. Then both sums become "
        "`rescale` times the old one plus that of the tile.",
        "What is m before the first tile, so that no difference of infinities comes up? And a "
        "row that has seen no key has l = 0: what may you divide by there, so that no other "
        "row changes?",
    ),
)  # fmt: skip
