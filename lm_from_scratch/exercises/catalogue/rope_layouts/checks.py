"""The rows of a projection, moved from half-split to interleaved pairs, head by head."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers, normal, refusal
from lm_from_scratch.layers.rope import (
    apply_rope_interleaved,
    inverse_frequencies,
    rotation,
    to_interleaved,
)


def refusals(function: Callable[..., Any], weight: Tensor, heads: list[int]) -> dict[str, str]:
    use = refusal(ValueError)
    return {f"n_head={n} for {len(weight)} rows": use(function, weight, n) for n in heads}


def scores(
    function: Callable[..., Any],
    x: Tensor,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    heads: list[int],
) -> dict[str, Tensor]:
    """Weights are converted, and used with the rotation of neighbours."""
    dim = len(query) // heads[0]
    cos, sin = rotation(positions, inverse_frequencies(dim, 10000.0))
    turned = []
    for weight, n_head in zip((query, key), heads, strict=True):
        made = F.linear(x, function(weight, n_head))
        split = made.unflatten(-1, (n_head, dim)).transpose(1, 2)  # (B, H, T, D)
        turned.append(apply_rope_interleaved(split, cos, sin))
    q, k = turned
    repeated = k.repeat_interleave(heads[0] // heads[1], dim=1)
    return {"the attention scores": q @ repeated.transpose(-1, -2) / dim**0.5}


def numbered_weight(g: Generator) -> Call:
    rows = torch.arange(24.0)[:, None] + 100 * torch.arange(1, 6)
    return call(rows + 1000 * integers(g, 0, 5, 1), 3)


def shared_keys(g: Generator) -> Call:
    return call(
        x=normal(g, 2, 5, 9),
        positions=integers(g, 3, 30, 2, 5),
        query=normal(g, 48, 9),
        key=normal(g, 16, 9),
        heads=[6, 2],
    )


# ------------------------------------------------------------------------------- wrong answers

SIZES, MOVED = "(n_head, 2, -1)", "heads.transpose(1, 2).flatten(0, 2)"
CHECK = "if n_head < 1 or rows % (2 * n_head) != 0:"
ONE, BIAS, WEIGHT = "one head, in bfloat16", "a bias of numbered rows", "a weight of numbered rows"
SCORES, SIZE = "attention scores, fewer key heads", "what is no head of whole pairs"


#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the other direction, from interleaved to half-split", {SIZES: "(n_head, -1, 2)"}, BIAS),
    ("the columns of a square matrix move as well",
     {f"return {MOVED}": f"moved = {MOVED}\n    if weight.shape[:1] == weight.shape[1:]:\n"
      f"        heads = moved.mT.unflatten(0, {SIZES})\n        moved = {MOVED}.mT\n"
      "    return moved"}, ONE),
    ("all rows are taken for one head", {SIZES: "(1, 2, -1)"}, BIAS),
    ("a bias is left as it is",
     {"    heads = weight": "    if weight.dim() == 1:\n        return weight\n    heads = weight"},
     BIAS),
    ("only for matrices: a bias has no second axis",
     {f"weight.unflatten(0, {SIZES})": "weight.reshape(n_head, 2, -1, weight.shape[1])"}, BIAS),
    ("the last two axes change places, which is right for a bias only",
     {"transpose(1, 2)": "transpose(-1, -2)"}, WEIGHT),
    ("the columns are moved, not the rows",
     {f"return {MOVED}": "if weight.dim() > 1:\n"
      f"        return torch.cat([weight[:, 0::2], weight[:, 1::2]], dim=1)\n    return {MOVED}"},
     WEIGHT),
    ("heads and halves change places", {"transpose(1, 2)": "transpose(0, 1)"}, BIAS),
    ("nothing is moved", {MOVED: "heads.flatten(0, 2)"}, BIAS),
    ("the second half comes first in each pair",
     {MOVED: "heads.flip(1).transpose(1, 2).flatten(0, 2)"}, BIAS),
    ("the halves of each head change places, and no pair is made",
     {MOVED: "heads.flip(1).flatten(0, 2)"}, BIAS),
    ("i is paired with D - 1 - i",
     {MOVED: "torch.stack([heads[:, 0], heads[:, 1].flip(1)], 2).flatten(0, 2)"}, BIAS),
    ("the second row of each pair has the other sign, as in the rotation",
     {MOVED: "torch.stack([heads[:, 0], -heads[:, 1]], 2).flatten(0, 2)"}, BIAS),
    ("the heads are interleaved with each other",
     {"weight.unflatten(0, (n_head, 2, -1))": "weight.unflatten(0, (n_head, -1))",
      MOVED: "heads.transpose(0, 1).flatten(0, 1)"}, BIAS),
    ("the number of heads is taken for their size",
     {SIZES: "(-1, 2, n_head // 2)", "heads = weight": "heads = weight"}, BIAS),
    ("the result keeps an axis for the heads", {"flatten(0, 2)": "flatten(1, 2)"}, BIAS),
    ("a view of rows that were moved, which are not contiguous",
     {".flatten(0, 2)": ".view(weight.shape)"}, BIAS),
    ("the result is float32", {MOVED: f"{MOVED}.float()"}, ONE),
    ("heads of an odd size are not refused by ValueError",
     {"rows % (2 * n_head)": "rows % n_head"}, SIZE),
    ("n_head=0 is not refused by ValueError", {"n_head < 1 or ": ""}, SIZE),
    ("nothing is refused by ValueError", {CHECK: "if False:"}, SIZE),
    ("the rows are detached", {MOVED: f"{MOVED}.detach()"}, "the gradient of the weight"),
    ("written into the weight itself", {MOVED: f"weight.copy_({MOVED})"}, BIAS),
]  # fmt: skip

CASES = (
    Case(BIAS, lambda g: call(torch.arange(12.0) + 100 * integers(g, 0, 5, 1), 2),
         "a bias has one axis. With 2 heads of 6, the rows of the first are 0, 3, 1, 4, 2, 5",
         points=2),
    Case(WEIGHT, numbered_weight,
         "3 heads of 8: rows 0, 4, 1, 5, 2, 6, 3, 7, and the same 8 and 16 further on. Columns "
         "stay", points=2, teaching="rows can be read off: their numbers are the values"),
    Case(ONE, lambda g: call(normal(g, 10, 10, dtype=torch.bfloat16), 1),
         "n_head=1 is a head too: its rows are 0, 5, 1, 6, 2, 7, 3, 8, 4, 9. Nothing is computed, "
         "so the dtype stays"),
    Case(SCORES, shared_keys,
         "6 query heads and 2 key heads, now turned as neighbours: the scores must stay what they "
         "were with half-split pairs", points=3, use=scores, tolerance=(1e-4, 1e-4),
         teaching="what the conversion is for"),
    Case(SIZE, lambda g: call(normal(g, 12, 5), heads=[3, 2, 4, 5, 0, -1]),
         "12 rows are 3 heads of 4. They are not 4 heads of 3 (an odd number), nor 5, 0 or -1",
         use=refusals),
    Case("the gradient of the weight", lambda g: call(normal(g, 18, 4), 3),
         "moved rows stay in the graph: no detach, no .data", gradient=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="rope_layouts", function="interleave", page="2_qwen2/2_rope", minutes=20, difficulty=2,
    outcome="Convert the projections of a checkpoint so that another layout of RoPE gives the "
            "same scores.",
    after=("rope",), reference=to_interleaved, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Cut the rows into heads, each head into two halves, each half into D/2 rows. Which two of "
        "these axes change places?",
        "`weight.unflatten(0, (n_head, 2, -1))` has the axes head, half, row of the half, and the "
        "columns where there are any. A pair is what differs in the half only, so the half must "
        "come last.",
        "Give the rows an axis for heads, one for the two halves and one for the pair within "
        "them. Only the last two change places. What must be checked before rows can be cut "
        "so?",
    ),
)  # fmt: skip
