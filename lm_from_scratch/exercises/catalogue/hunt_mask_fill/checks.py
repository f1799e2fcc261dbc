"""Bug hunt: a mask that is added, and what the first repairs of it break."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers, normal


def reference(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """The package's formula, told what is visible."""
    queries, keys = (torch.zeros(1, x.shape[2], dtype=torch.long) for x in (q, k))
    return formula_attention(q, k, v, Visibility(queries, keys, allowed=visible))


def causal(padding: list[int], T: int, side: str) -> Tensor:
    """What is visible in rows with that much padding on one side: (B, 1, T, T)."""
    columns = torch.arange(T)
    n = torch.tensor(padding)[:, None]
    real = columns >= n if side == "left" else columns < T - n
    return (columns <= columns[:, None]) & real[:, None, None]


def inputs(g: Generator, side: str, scale: float = 1.0) -> Call:
    """Two rows, padded by 3 tokens and by 1; q and k are scaled."""
    q, k = (normal(g, 2, 3, 6, 4, scale=scale) for _ in range(2))
    return call(q, k, normal(g, 2, 3, 6, 4), causal([3, 1], 6, side))


def ordinary(g: Generator) -> Call:
    return inputs(g, "right")  # the first token is real: no query is without a key


def left_padded(g: Generator) -> Call:
    return inputs(g, "left")


def large(g: Generator) -> Call:
    """Scores of millions; and other tokens for what is under the padding."""
    q, k, v, visible = inputs(g, "right", scale=1000).args
    padding = ~visible[:, :, -1:].mT  # (B, 1, T, 1)
    other_k = torch.where(padding, normal(g, 2, 3, 6, 4, scale=1000), k)
    other_v = torch.where(padding, normal(g, 2, 3, 6, 4), v)
    return call(q, k, v, visible, other_k=other_k, other_v=other_v)


def other_padding(
    function: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    other_k: Tensor,
    other_v: Tensor,
) -> dict[str, Any]:
    """How far the result moves when only hidden keys and values change."""
    before, after = function(q, k, v, visible), function(q, other_k, other_v, visible)
    return {"the largest change": (after - before).abs().max().item()}


def far_below(g: Generator) -> Call:
    """Four queries that see all real keys; visible scores near -200000, hidden ones near 0. All
    sums are exact."""
    visible = causal([2, 1], 6, "right")[:, :, -1:].repeat(1, 1, 6, 1)
    q = torch.full((2, 3, 6, 16), 200.0)
    k = torch.full((2, 3, 6, 16), -250.0)
    q[..., 0] = 1.0
    k[..., 0] = integers(g, -16, 17, 2, 3, 6) / 4
    for row, n in enumerate((2, 1)):
        k[row, :, -n:] = 0.0
    return call(q[:, :, 2:], k, normal(g, 2, 3, 6, 16), visible[:, :, 2:])


def half(g: Generator) -> Call:
    """Visible scores of exactly -20000 in float16, and -100 under the left padding."""
    q = torch.full((2, 3, 6, 4), 100.0, dtype=torch.float16)
    k = torch.full((2, 3, 6, 4), -100.0, dtype=torch.float16)
    for row, n in enumerate((3, 1)):
        k[row, :, :n] = -0.5
    return call(q, k, normal(g, 2, 3, 6, 4, dtype=torch.float16), causal([3, 1], 6, "left"))


def two_layers(
    function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, visible: Tensor
) -> dict[str, Any]:
    """The real rows of a layer, and those of a layer above that reads its result."""
    first = function(q, k, v, visible)
    real = visible.any(-1)[:, 0]  # (B, T)
    layers = {"layer 1": first, "layer 2": function(q, k, first, visible)}
    return {f"real rows of {name}": y.transpose(1, 2)[real] for name, y in layers.items()}


def not_numbers(
    function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, visible: Tensor
) -> dict[str, Any]:
    """The gradients that hold NaN, by the name of their input."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    y = function(*inputs, visible).float().sum()
    results = torch.autograd.grad(y, inputs, allow_unused=True) if y.requires_grad else (None,) * 3
    holds = [
        name for name, x in zip("qkv", results, strict=True) if x is not None and x.isnan().any()
    ]
    return {"gradients that hold NaN": holds}


# ------------------------------------------------------------------------------- wrong answers

FILL = "scores.masked_fill(hidden, torch.finfo(scores.dtype).min)"
WEIGHTS = "scores.softmax(-1).masked_fill(hidden, 0.0)"
LOWEST = "torch.finfo(scores.dtype).min"
ORDINARY = "ordinary scores"
PADDING = "other tokens under the padding, large scores"
BELOW = "visible scores near -200000"
EMPTY = "queries that see no key"
HALF = "float16, left padding, two layers"


#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found",
     {"    hidden = ~visible":
      "    return masked_attention_as_found(q, k, v, visible)\n    hidden = ~visible"}, PADDING),
    ("-10000 is written, not added, but visible scores lie below it",
     {LOWEST: "-10000.0", WEIGHTS: "scores.softmax(-1)"}, BELOW),
    ("hidden scores are 0, which is a score like any other",
     {LOWEST: "0.0", WEIGHTS: "scores.softmax(-1)"}, ORDINARY),
    ("a row without a key sees all of them",
     {"hidden = ~visible": "hidden = ~visible & visible.any(-1, keepdim=True)"}, EMPTY),
    ("as many keys as queries",
     {"return weights @ v": "return weights[..., : q.shape[2]] @ v[:, :, : q.shape[2]]"}, BELOW),
    ("a very low number is added, not written",
     {FILL: "scores + torch.zeros_like(scores).masked_fill(hidden, torch.finfo(scores.dtype).min)",
      WEIGHTS: "scores.softmax(-1)"}, HALF),
    ("rows without a key are a mean of hidden values, as where the lowest number is written",
     {WEIGHTS: "scores.softmax(-1)"}, EMPTY),
    ("minus infinity is written, so that rows without a key are NaN",
     {LOWEST: "-torch.inf", WEIGHTS: "scores.softmax(-1)"}, EMPTY),
    ("minus infinity is written, and rows without a key are set to 0 at the end, behind their NaN",
     {LOWEST: "-torch.inf", WEIGHTS: "scores.softmax(-1)",
      "return weights @ v":
      "return (weights @ v).masked_fill(hidden.all(-1, keepdim=True), 0.0)"},
     "gradients, with queries that see no key"),
    ("the causal mask is made anew, and the one that is given is not used",
     {"hidden = ~visible":
      "hidden = torch.ones_like(visible).triu(visible.shape[3] - visible.shape[2] + 1)"}, ORDINARY),
    ("minus infinity is added, and NaN is replaced by 0 at the end",
     {FILL: "scores + torch.zeros_like(scores).masked_fill(hidden, -torch.inf)",
      WEIGHTS: "scores.softmax(-1).nan_to_num(0.0)"}, "gradients, with queries that see no key"),
    ("the lowest float16, written in every dtype", {LOWEST: "-65504.0"}, BELOW),
    ("the lowest float32, written in every dtype",
     {LOWEST: "torch.finfo(torch.float32).min"}, HALF),
    ("minus 1e9 is added, which is minus infinity in float16: rows without a key have NaN behind 0",
     {FILL: "scores + torch.where(hidden, -1e9, 0.0).to(scores.dtype)"}, "gradients in float16"),
    ("the future is hidden besides, although the mask shows it",
     {"hidden = ~visible": "T, S = visible.shape[-2:]\n"
      "    hidden = ~visible.tril(S - T)"}, BELOW),
    ("a larger number is added, and a larger score survives it",
     {FILL: "scores.float() - 1e6 * hidden",
      "return weights @ v": "return weights.to(v.dtype) @ v"}, PADDING),
    ("hidden keys get a score just below the lowest one",
     {LOWEST: "scores.amin().item() - 1"}, ORDINARY),
    ("the smallest positive number, for the most negative one",
     {LOWEST: "torch.finfo(scores.dtype).tiny"}, ORDINARY),
    ("weights are set to 0 after the softmax, so that rows do not sum to 1",
     {FILL: "scores"}, ORDINARY),
    ("weights are set to 0, then divided by their sum: the largest may have been hidden",
     {FILL: "scores.float()", "return weights @ v": "weights = weights / weights.sum(-1, "
      "keepdim=True).clamp(min=1e-7)\n    return weights.to(v.dtype) @ v"}, BELOW),
    ("exponentials without a maximum",
     {FILL: "scores.float().exp() * visible",
      WEIGHTS: "(scores / scores.sum(-1, keepdim=True).clamp(min=1e-7)).to(v.dtype)"}, PADDING,
     "where it does not overflow it is the quotient of weights that are set to 0"),
    ("-10000 is written, and what is hidden gets no weight, so that no key has any",
     {LOWEST: "-10000.0"}, BELOW),
    ("hidden keys are seen, and visible ones are not",
     {"hidden = ~visible": "hidden = visible"}, ORDINARY),
    ("scores are cut off at -10000 before the bias",
     {FILL: "scores.clamp(min=-10000.0).masked_fill(hidden, -20000.0)"}, BELOW),
    ("the root of D is lost in the repair", {" / math.sqrt(q.shape[-1])": ""}, ORDINARY),
    ("the result stays float32",
     {"return weights @ v": "return weights.float() @ v.float()"}, HALF),
    ("the weights are detached", {"return weights @ v": "return weights.detach() @ v"}, ORDINARY),
]  # fmt: skip

CASES = (
    Case(ORDINARY, ordinary,
         "scores over the root of D, a softmax over the visible keys, a mean of their values",
         guard=True, gradient=True,
         teaching="the code as found passes it, and so did the tests of its authors"),
    Case(PADDING, large,
         "scores are millions here: what is added to a hidden one does not make it the lowest",
         points=2, use=other_padding),
    Case(BELOW, far_below, "the visible scores lie below -10000, so a key that gets -10000 wins",
         points=2),
    Case(HALF, half,
         "the lowest float16 is -65504, and -65504 - 100 is minus infinity. A row of it is NaN, "
         "and 0 * NaN is NaN in the layer above", points=2, use=two_layers),
    Case(EMPTY, left_padded,
         "where all scores are equal, the softmax is a plain mean, here over hidden keys", points=2,
         teaching="the values alone, which is the shorter report"),
    Case("gradients, with queries that see no key", left_padded,
         "the gradient of a softmax is NaN where its result is, even if a later line hides it",
         points=1, gradient=True,
         teaching="in float32, where gradients can be compared and not only be NaN"),
    Case("gradients in float16", half,
         "what is infinite in float16 alone makes NaN of its gradients, behind results of 0",
         points=1, use=not_numbers),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_mask_fill", function="masked_attention", page="3_attention/2_masks", minutes=25,
    difficulty=2,
    outcome="Hide keys so that no score, no dtype and no row of padding lets them through.",
    reference=reference, hunt="G25, Q23", after=("attention",), cases=CASES, wrong=planted(WRONG),
    hints=(
        "What is left of a hidden score of 12000 after the bias? And which of two hidden keys wins "
        "if their scores differ?",
        "Do not add: *replace*. `masked_fill` forgets the old score. With which number, if no "
        "visible score may lie below it, and it must exist in float16?",
        "The least number of the dtype hides a score and stays finite. A row without any key "
        "is then a plain mean over hidden keys: what has to happen to its weights, and when? "
        "In the wild: a GPT-2 that saw its future, "
        "https://github.com/huggingface/transformers/issues/15199, and the repair, "
        "https://github.com/huggingface/transformers/pull/17306. The page on GPT-2, block by "
        "block, has it as G25, and the page on attention in depth has the second part as Q23.",
    ),
)  # fmt: skip
