"""Causal attention: the corner of the mask after a cache, shared key heads, scores of any size."""

from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.attention.attention import attention_weights
from lm_from_scratch.attention.gqa import repeat_kv
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers, normal


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The package's formula, which takes values of another width when its two parts are joined."""
    T, S = q.shape[2], k.shape[2]
    places = torch.arange(S)[None]
    weights = attention_weights(q, k, Visibility(places[:, S - T :], places, dense=True))
    return weights @ repeat_kv(v, q.shape[1])


def inputs(
    g: Generator,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    widths: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> Call:
    """q and k are scaled, so scores grow with the square; a batch of 2."""
    (H, Hkv), (T, S), (D, Dv) = heads, sizes, widths
    return call(
        normal(g, 2, H, T, D, scale=scale, dtype=dtype),
        normal(g, 2, Hkv, S, D, scale=scale, dtype=dtype),
        normal(g, 2, Hkv, S, Dv, dtype=dtype),
    )


def square(g: Generator) -> Call:
    return inputs(g, (3, 3), (5, 5), (8, 8))


def shifted(g: Generator, q0: float, k0: float, dtype: torch.dtype) -> Call:
    """Scores that are all near q0 * k0 * 4, and differ by a few units.

    Queries and keys are multiples of 1/4 and D is 16, so float32 holds every product and sum.
    """
    q = torch.full((2, 3, 6, 16), q0)
    k = torch.full((2, 3, 6, 16), k0)
    q[..., 0] = 1.0
    k[..., 0] = k0 + integers(g, -16, 17, 2, 3, 6) / 4
    q, k = q.to(dtype), k.to(dtype)
    return call(q, k, normal(g, 2, 3, 6, 16, dtype=dtype))


def in_half(function: Any, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Both dtypes of 16 bits; bfloat16 does not overflow, but near 18000 its step is 64 or more."""
    return {
        "the result in float16": function(q, k, v),
        "the result in bfloat16": function(*(x.bfloat16() for x in (q, k, v))),
    }


# ------------------------------------------------------------------------------- wrong answers

SCORES = "q.to(work) @ k.to(work).mT / math.sqrt(q.shape[-1])"
WORK = "torch.float64 if q.dtype == torch.float64 else torch.float32"
SOFTMAX = "scores.masked_fill(future, -torch.inf).softmax(-1)"
CACHE, SQUARE = "4 queries, the last of 7 tokens", "as many queries as keys"
GROUPS, HALF = "6 query heads share 3 key heads", "float16, products above 65504, and bfloat16"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the triangle starts at the first key, as if there were no cache",
     {"triu(S - T + 1)": "triu(1)"}, CACHE),
    ("the root of D is missing", {" / math.sqrt(q.shape[-1])": ""}, SQUARE),
    ("divided by D, not by its root", {"math.sqrt(q.shape[-1])": "q.shape[-1]"}, SQUARE),
    ("multiplied by the root of D",
     {"/ math.sqrt(q.shape[-1])": "* math.sqrt(q.shape[-1])"}, SQUARE),
    ("nothing hides the future", {SOFTMAX: "scores.softmax(-1)"}, SQUARE),
    ("a query does not see its own key", {"triu(S - T + 1)": "triu(S - T)"}, CACHE),
    ("a query sees one key of the future", {"triu(S - T + 1)": "triu(S - T + 2)"}, SQUARE),
    ("the past is hidden instead of the future",
     {"triu(S - T + 1)": "tril(S - T - 1)"}, SQUARE),
    ("the softmax runs over the queries, not over the keys",
     {".softmax(-1)": ".softmax(-2)"}, SQUARE),
    ("weights are set to 0 after the softmax, so that rows do not sum to 1",
     {SOFTMAX: "scores.softmax(-1).masked_fill(future, 0.0)"}, SQUARE),
    ("hidden scores are -10000, which is above a visible score",
     {"-torch.inf": "-1e4"}, "visible scores near -20000"),
    ("hidden scores are 0, which is a score like any other", {"-torch.inf": "0.0"}, SQUARE),
    ("key heads are repeated as 0 1 2 0 1 2, so that a head reads another group's keys",
     {"k = k.repeat_interleave(group, dim=1)": "k = k.repeat(1, group, 1, 1)",
      "v = v.repeat_interleave(group, dim=1)": "v = v.repeat(1, group, 1, 1)"}, GROUPS),
    ("keys are repeated as 0 0 1 1 2 2, and values as 0 1 2 0 1 2",
     {"v = v.repeat_interleave(group, dim=1)": "v = v.repeat(1, group, 1, 1)"}, GROUPS),
    ("the root is of the width of v",
     {"math.sqrt(q.shape[-1])": "math.sqrt(v.shape[-1])"}, "values of another width"),
    ("exponentials without the maximum subtracted",
     {SOFTMAX: "scores.masked_fill(future, -torch.inf).exp()\n"
      "    weights = weights / weights.sum(-1, keepdim=True)"}, "scores beyond a thousand",
     "its results are NaN or equal to the right ones, and all NaN look alike"),
    ("the scores are rounded to half precision", {SCORES: "(q / math.sqrt(q.shape[-1])) @ k.mT"},
     HALF),
    ("float32 only after the product, which has overflowed by then",
     {"q.to(work) @ k.to(work).mT": "(q @ k.mT).to(work)"}, HALF,
     "all its wrong results hold NaN, and all NaN look alike"),
    ("float16 becomes float32, and bfloat16 is forgotten",
     {WORK: "torch.float32 if q.dtype == torch.float16 else q.dtype"}, HALF),
    ("the result stays float32", {"weights.to(q.dtype) @ v": "weights @ v.to(work)"}, HALF),
    ("float64 is computed in float32", {WORK: "torch.float32"}, "float64 keeps its digits"),
    ("squeeze removes the axis of a single query",
     {"weights.to(q.dtype) @ v": "(weights.to(q.dtype) @ v).squeeze()"},
     "one query after 5 tokens"),
    ("a view of a tensor that is not contiguous",
     {"    group =": "    q.view(-1, *q.shape[2:])\n    group ="},
     SQUARE),
    ("the weights are detached",
     {"weights.to(q.dtype)": "weights.detach().to(q.dtype)"}, "gradients of q, k and v"),
]  # fmt: skip

CASES = (
    Case(SQUARE, square,
         "scores over the root of D, future keys hidden before the softmax over the keys", points=3,
         teaching="the plain formula, and the first thing to read"),
    Case(CACHE, lambda g: inputs(g, (3, 3), (4, 7), (8, 8)),
         "the first query is token 3: it sees 4 keys, and the last query sees all 7", points=2,
         teaching="the corner of the mask, with nothing else new"),
    Case("one query after 5 tokens", lambda g: inputs(g, (3, 3), (1, 6), (8, 8)),
         "one query is an axis of size 1, which stays"),
    Case(GROUPS, lambda g: inputs(g, (6, 3), (5, 5), (8, 8)),
         "each key head is repeated in place: 0 0 1 1 2 2, not 0 1 2 0 1 2", points=2),
    Case("values of another width", lambda g: inputs(g, (3, 3), (5, 5), (4, 9)),
         "the root is of the width of q, 4; the result has the width of v, 9"),
    Case("scores beyond a thousand", lambda g: inputs(g, (3, 3), (6, 6), (16, 16), scale=20),
         "exp(89) is above the largest float32: a softmax subtracts the largest score first",
         tolerance=(5e-4, 5e-4), teaching="an overflow that one sees in float32 too"),
    Case("visible scores near -20000", lambda g: shifted(g, 50.0, -100.0, torch.float32),
         "what hides a key must lie below every visible score, and -10000 does not"),
    Case(HALF, lambda g: shifted(g, 40.0, 120.0, torch.float16),
         "76800 = 40 * 120 * 16 is above the largest float16, and the next bfloat16 is 77312: "
         "multiply in float32", use=in_half),
    Case("float64 keeps its digits", lambda g: inputs(g, (3, 3), (5, 5), (6, 6), torch.float64),
         "only float16 and bfloat16 become float32"),
    Case("gradients of q, k and v", square, "weights depend on q and k: nothing may be detached",
         gradient=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="attention", function="causal_attention", page="3_attention/1_attention", minutes=30,
    difficulty=2,
    outcome="Write causal attention so that it also holds after a cache, for grouped heads and "
            "for scores of any size.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Write it first for T = S and H = Hkv. Then ask which row of the S x S triangle belongs to "
        "the first query.",
        "The rows are the last T of the triangle: `triu(S - T + 1)` marks what is hidden. "
        "`repeat_interleave` along the head axis gives each key head to its whole group.",
        "Three places decide: the dtype of the product of q and k, what is at a hidden "
        "score so that its weight is 0 and not just small, and the dtype in which the weights "
        "meet the values.",
    ),
)  # fmt: skip
