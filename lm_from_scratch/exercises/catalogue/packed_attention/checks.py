"""Attention over packed sequences: where each begins, and to which end the mask is aligned."""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from lm_from_scratch.attention.varlen import varlen_attention
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal, refusal


def cumulative(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def packed(
    g: Generator,
    queries: list[int],
    keys: list[int],
    heads: tuple[int, int] = (3, 3),
    D: int = 4,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Call:
    """q, k, v and the bounds, from the lengths of the sequences."""
    (H, Hkv), N, M = heads, sum(queries), sum(keys)
    q = normal(g, N, H, D, scale=scale, dtype=dtype)
    k = normal(g, M, Hkv, D, scale=scale, dtype=dtype)
    v = normal(g, M, Hkv, D, dtype=dtype)
    return call(q, k, v, cumulative(queries), cumulative(keys))


def whole_sequences(g: Generator) -> Call:
    return packed(g, [3, 5, 2], [3, 5, 2])


def after_a_cache(g: Generator) -> Call:
    """One new token, three of three, two of six."""
    return packed(g, [1, 3, 2], [4, 3, 6], heads=(2, 2), D=5)


def shared_heads(g: Generator) -> Call:
    return packed(g, [4, 3], [4, 3], heads=(6, 2), D=3)


def and_nothing(
    function: Any, q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor
) -> dict[str, Tensor]:
    return {
        "the result": function(q, k, v, cu_seq_q, cu_seq_k),
        "the result without a sequence": function(q[:0], k[:0], v[:0], cu_seq_q[:1], cu_seq_k[:1]),
    }


def low_scores(g: Generator) -> Call:
    """Every score is about -20000: 200 * -200 / sqrt(4), and a little more or less."""
    q, k, v, *bounds = packed(g, [5, 3], [5, 3], heads=(1, 1), dtype=torch.float64).args
    q[..., 0], k[..., 0] = 200.0, -200.0
    return call(q, k, v, *bounds)


def double(g: Generator) -> Call:
    """float64, bounds in int32."""
    made = packed(g, [4, 1, 3], [4, 1, 3], heads=(4, 2), D=6, dtype=torch.float64)
    return call(*made.args[:3], *(x.int() for x in made.args[3:]))


def refused(
    function: Any, q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor
) -> dict[str, Any]:
    refuse = refusal(ValueError)
    low = cu_seq_q - torch.arange(len(cu_seq_q))  # counts of targets, not of tokens
    four = cu_seq_k[[0, 1, 2, 3, 3]]  # the fourth sequence is empty
    more = cu_seq_q.clone()
    more[1] += 1
    later = cu_seq_q.clone()
    later[1] -= 1
    return {
        "the result": function(q, k, v, cu_seq_q, cu_seq_k),
        "a call with bounds of queries that end too early": refuse(
            function, q, k, v, low, cu_seq_k
        ),
        "a call with bounds of keys that end too early": refuse(function, q, k, v, cu_seq_q, low),
        "a call with one key more than the bounds": refuse(
            function, q, torch.cat((k, k[:1])), torch.cat((v, v[:1])), cu_seq_q, cu_seq_k
        ),
        "a call with one query less than the bounds": refuse(
            function, q[:-1], k, v, cu_seq_q, cu_seq_k
        ),
        "a call with three sequences of queries and four of keys": refuse(
            function, q, k, v, cu_seq_q, four
        ),
        "a call with four sequences of queries and three of keys": refuse(
            function, q, k, v, four, cu_seq_k
        ),
        "a call with four queries and three keys in a sequence": refuse(
            function, q, k, v, more, cu_seq_k
        ),
        "a call with one query too many in the second sequence": refuse(
            function, q, k, v, later, cu_seq_k
        ),
    }


def spans(
    q: Tensor, k: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor
) -> Iterator[tuple[slice, slice]]:
    """The queries and the keys of each sequence; ValueError where they do not fit."""
    bounds_q, bounds_k = cu_seq_q.tolist(), cu_seq_k.tolist()
    if (bounds_q[-1], bounds_k[-1]) != (len(q), len(k)):
        raise ValueError("bounds")
    for (a, b), (c, d) in zip(pairwise(bounds_q), pairwise(bounds_k), strict=True):
        if b - a > d - c:
            raise ValueError("more queries than keys")
        yield slice(a, b), slice(c, d)


# ------------------------------------------------------------------------------- wrong answers

BOUNDS = "bounds_q, bounds_k = cu_seq_q.tolist(), cu_seq_k.tolist()"
SIZES, RESULT = "H, D = q.shape[1:]", "return torch.cat(results)"
SOFTMAX = "scores.masked_fill(~visible, -torch.inf).softmax(-1)"
K = "k.repeat_interleave(H // k.shape[1], dim=1)"
V = "v.repeat_interleave(H // v.shape[1], dim=1)"


def by_place(q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor) -> Tensor:
    """A query whose keys all are further to the right sees none, and so everything."""
    mask = torch.zeros(len(q), len(k), dtype=torch.bool)
    for queries, keys in spans(q, k, cu_seq_q, cu_seq_k):
        mask[queries, keys] = True
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask.tril(), -1e30).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v)


def heads_as_tokens(q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor) -> Tensor:
    """Each token mixes its heads, and no other token is read."""
    list(spans(q, k, cu_seq_q, cu_seq_k))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if len(k) != len(q):
        raise RuntimeError("the batch dimensions of SDPA do not match")
    return F.scaled_dot_product_attention(q, k, v)


NAN = "its result is NaN, which the report says in words"

WHOLE, FEWER = "three whole sequences", "fewer queries than keys, after a cache"
GROUPS, EMPTY = "six query heads, two key heads", "sequences of one token or none"
DOUBLE, REFUSED = "float64, bounds in int32", "bounds that do not fit"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("one long sequence: tokens see the sequences before theirs",
     {BOUNDS: BOUNDS.replace(".to", "[[0, -1]].to")}, WHOLE),
    ("the mask is aligned to the first key, not to the last", {".tril(S - T)": ".tril()"}, FEWER),
    ("nothing hides the future within a sequence", {".tril(S - T)": ""}, WHOLE),
    ("every inner bound is one too low: the last token belongs to the next sequence",
     {BOUNDS: f"{BOUNDS}\n    for bounds in (bounds_q, bounds_k):\n"
      "        bounds[1:-1] = [max(bound - 1, 0) for bound in bounds[1:-1]]"}, WHOLE),
    ("the bounds of the queries are used for the keys too",
     {"q[a:b], k[c:d]": "q[a:b], k[a:b]", "weights, v[c:d]": "weights, v[a:b]",
      "T, S = b - a, d - c": "T, S = b - a, b - a"}, FEWER),
    ("causal by the place in the row, where queries and keys are not side by side",
     by_place, FEWER),
    ("the scores are not scaled", {" / D**0.5": ""}, WHOLE),
    ("the scores are divided by D, not by its root", {"D**0.5": "D"}, WHOLE),
    ("the scores are divided by the root of the number of heads", {"D**0.5": "H**0.5"}, WHOLE),
    ("a token does not see itself",
     {".tril(S - T)": ".tril(S - T - 1)", "-torch.inf": "-1e30"}, WHOLE),
    ("a token sees the one after it", {".tril(S - T)": ".tril(S - T + 1)"}, WHOLE),
    ("the weights are set to 0 after the softmax, and no longer add up to 1",
     {SOFTMAX: "scores.softmax(-1) * visible"}, WHOLE),
    ("a hidden score of 0 is a score like any other",
     {SOFTMAX: "(scores * visible).softmax(-1)"}, WHOLE),
    ("softmax over the queries",
     {SOFTMAX: "scores.masked_fill(~visible, -1e30).softmax(-2)"}, WHOLE),
    ("the row of key heads is repeated, so that head 0 goes with query heads 0, 2, 4",
     {K: "k.repeat(1, H // k.shape[1], 1)", V: "v.repeat(1, H // v.shape[1], 1)"}, GROUPS),
    ("all query heads use key head 0",
     {K: "k[:, :1].expand(-1, H, -1)", V: "v[:, :1].expand(-1, H, -1)"}, GROUPS),
    ("empty sequences are taken out, and queries meet the keys of another sequence",
     {BOUNDS: BOUNDS.replace(".to", ".unique().to")}, EMPTY),
    ("without a sequence there is nothing to put together",
     {"results = [q[:0]]": "results = []"}, EMPTY),
    ("hidden scores of -10000, above the visible ones",
     {"-torch.inf": "-1e4"}, "every score about -20000"),
    ("exp without a maximum subtracted",
     {SOFTMAX: "scores.exp() * visible\n        weights = weights / weights.sum(-1, keepdim=True)"},
     "scores of several hundred", NAN),
    ("float64 is computed in float32",
     {"torch.cat(results)": "torch.cat(results).to(q.dtype)",
      "q[a:b], k[c:d])": "q[a:b].float(), k[c:d].float())",
      "weights, v[c:d]": "weights, v[c:d].float()"}, DOUBLE),
    ("a view of tensors that are not contiguous",
     {SIZES: f"N, {SIZES[:-4]}\n    q.view(N, H * D)"}, DOUBLE),
    ("heads come before tokens in the result",
     {"torch.cat(results)": "torch.cat(results).transpose(0, 1)"}, WHOLE),
    ("a sequence with more queries than keys is accepted", {"T > S": "False"}, REFUSED),
    ("bounds that end too early are accepted, and the last tokens are lost",
     {"bounds_q[-1] != len(q) or bounds_k[-1] != len(k)": "False"}, REFUSED),
    ("the last bound of the keys is not compared with M",
     {" or bounds_k[-1] != len(k)": ""}, REFUSED),
    ("the last bound of the queries is not compared with N",
     {"bounds_q[-1] != len(q) or ": ""}, REFUSED),
    ("the numbers of sequences are not compared", {"strict=True": "strict=False"}, REFUSED),
    ("only the first sequence is refused", {"T > S": "T > S and a == 0"}, REFUSED),
    ("nothing is refused",
     {"bounds_q[-1] != len(q) or bounds_k[-1] != len(k)": "False", "strict=True": "strict=False",
      "T > S": "False"}, REFUSED),
    ("heads are taken for tokens: SDPA wants them first", heads_as_tokens, WHOLE),
    ("q is scaled in place", {RESULT: f"q.data /= D**0.5\n    {RESULT}"}, WHOLE),
    ("the weights are detached",
     {"weights, v[c:d]": "weights.detach(), v[c:d]"}, "gradients of q, k and v"),
]  # fmt: skip

CASES = (
    Case(WHOLE, whole_sequences,
         "take the slice of each sequence and compute ordinary causal attention there", points=2,
         teaching="the plain form, and the first thing to read"),
    Case(FEWER, after_a_cache,
         "query t of T is token S - T + t of its sequence: the triangle is at the right end "
         "of the keys. Queries and keys have bounds of their own", points=3),
    Case(GROUPS, shared_heads,
         "query heads 0, 1, 2 share key head 0: each key head is repeated three times in place, "
         "not the whole row of heads", points=2, teaching="shared heads, without anything else"),
    Case(EMPTY, lambda g: packed(g, [0, 1, 4, 0, 0, 2, 0], [0, 1, 4, 3, 0, 2, 0], heads=(2, 2)),
         "an empty sequence keeps its place in both tensors of bounds; without any sequence the "
         "result is (0, H, D)", use=and_nothing),
    Case("scores of several hundred", lambda g: packed(g, [6, 4], [6, 4], scale=15.0),
         "exp(100) is infinite in float32: softmax subtracts the largest score first",
         tolerance=(1e-3, 1e-4), teaching="the overflow, at the other end than the next case"),
    Case("every score about -20000", low_scores,
         "what is hidden needs a score below every other: minus infinity, not -10000"),
    Case(DOUBLE, double, "keep the dtype of q, whatever the dtype of the bounds is",
         teaching="digits, and bounds as kernels take them"),
    Case(REFUSED, whole_sequences,
         "compare the last bounds with N and M, the numbers of sequences with each other, and T "
         "with S; raise a ValueError", use=refused),
    Case("gradients of q, k and v", shared_heads,
         "nothing may be detached: the weights depend on q and k", gradient=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="packed_attention", function="packed_attention", page="3_attention/3_flex_and_packing",
    minutes=30, difficulty=2,
    outcome="Write causal attention over packed sequences so that each gives what it gives alone, "
            "also when its earlier tokens come from a cache.",
    reference=varlen_attention, after=("attention",), cases=CASES, wrong=planted(WRONG),
    hints=(
        "Write attention for one sequence first. How many keys does its first query see, if 2 of 6 "
        "tokens are new?",
        "`pairwise(cu_seq_q.tolist())` gives the beginning and end of each slice; `zip` it with "
        "that of the keys, `strict=True`. The mask of one sequence is a lower triangle of shape "
        "(T, S), moved to the right by S - T.",
        "In one document the last query sees all keys, so the triangle ends in the corner, not "
        "at the start: by how much is it moved? What is the result of a batch without any "
        "document?",
    ),
)  # fmt: skip
