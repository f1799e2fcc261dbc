"""The logit lens: every state has its own norm, then the head, then a softmax over the words."""

from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal
from lm_from_scratch.layers.norm import rms_norm


def reference(
    states: Tensor, weight: Tensor, eps: float, head: Tensor, k: int = 3
) -> tuple[Tensor, Tensor]:
    """The package's norm, and a linear head."""
    work = torch.promote_types(states.dtype, torch.float32)
    normed = rms_norm(states.to(work), weight.to(work), eps)
    probabilities, ids = torch.nn.functional.linear(normed, head.to(work)).softmax(-1).topk(k)
    return probabilities, ids


# ------------------------------------------------------------------------------------- arguments


def given(
    g: Generator,
    shape: tuple[int, int, int, int] = (4, 2, 3, 8),
    V: int = 11,
    k: int | None = None,
    eps: float = 1e-5,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Call:
    """States that grow from place to place, as in a model, and have a mean that is not 0. Drawn
    until no two words are so near each other that rounding could exchange them."""
    more = {} if k is None else {"k": k}
    grows = scale * torch.arange(1, shape[0] + 1)[:, None, None, None]
    while True:
        states = ((normal(g, *shape, dtype=torch.float64) + 0.7) * grows).to(dtype)
        weight = normal(g, shape[-1], dtype=dtype).abs() + 0.3
        head = normal(g, V, shape[-1], scale=0.7, dtype=dtype)
        exact, row, rows = states.double(), weight.double(), head.double()
        several, _ = reference(exact, row, eps, rows, min((k or 3) + 1, V))
        if bool((several[..., 1:] < several[..., :-1] * (1 - 2e-4)).all()):
            return call(states, weight, eps, head, **more)


def small(g: Generator) -> Call:
    """States around 0.01, and an eps as large as their squares."""
    return given(g, scale=3e-3, eps=1e-3)


def large(g: Generator) -> Call:
    """One feature is far larger than all others, as models have it: its square is no float16."""
    made = given(g, dtype=torch.float16)
    made.args[0][..., 1] = 300.0
    made.args[3][:, 1] *= 0.05
    return made


def probabilities_only(function: Any, *args: Any, **more: int) -> Any:
    """Without the words: of rounded numbers two may be equally probable."""
    return function(*args, **more)[0]


# ------------------------------------------------------------------------------- wrong answers

PLAIN, ONE, SQUARE, MANY = "places, rows, tokens", "the first word", "as many words as features", \
    "all words"  # fmt: skip
SMALL, HALF, BRAIN, DOUBLE = "small states", "float16, a large feature", "bfloat16", "float64"

WIDE = "work = torch.float64 if states.dtype == torch.float64 else torch.float32"
X, MEAN = "x = states.to(work)", "square = x.square().mean(dim=-1, keepdim=True)"
NORM, NORMED = "x * torch.rsqrt(square + eps) * weight.to(work)", "normed = "
HEAD, TOP = "normed @ head.to(work).mT", "logits.softmax(dim=-1).topk(k, dim=-1)"
RETURN = "return top.values, top.indices"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("no norm: the head gets the state as it is", {NORM: "x"}, PLAIN),
    ("the weight of the norm without the norm", {NORM: "x * weight.to(work)"}, PLAIN),
    ("the weight of the norm is left out", {" * weight.to(work)": ""}, PLAIN),
    ("every state is divided by the root of the last place's mean square",
     {MEAN: "square = x[-1:].square().mean(dim=-1, keepdim=True)"}, PLAIN),
    ("a state is divided by that of the place after it",
     {MEAN: "square = torch.cat([x[1:], x[-1:]]).square().mean(dim=-1, keepdim=True)"}, PLAIN),
    ("one mean square for all tokens of a place",
     {MEAN: "square = x.square().mean(dim=(1, 2, 3), keepdim=True)"}, PLAIN),
    ("one mean square for all places of a token",
     {MEAN: "square = x.square().mean(dim=(0, 3), keepdim=True)"}, PLAIN),
    ("the last place is taken as normed already",
     {HEAD: "torch.cat([normed[:-1], x[-1:]]) @ head.to(work).mT"}, PLAIN),
    ("the last place goes through the norm twice",
     {HEAD: "torch.cat([normed[:-1], normed[-1:] * (normed[-1:].square().mean(-1, keepdim=True) + "
      "eps).rsqrt() * weight.to(work)]) @ head.to(work).mT"}, PLAIN),
    ("the norm comes after the head, over the words",
     {HEAD: "x * weight.to(work) @ head.to(work).mT\n    logits = logits * torch.rsqrt("
      "logits.square().mean(-1, keepdim=True) + eps)"}, PLAIN),
    ("the mean is subtracted, as in LayerNorm",
     {X: "x = states.to(work)\n    x = x - x.mean(dim=-1, keepdim=True)"}, PLAIN),
    ("the sum of the squares instead of their mean", {"mean(dim=-1": "sum(dim=-1"}, PLAIN),
    ("the square root is missing", {"torch.rsqrt(square + eps)": "1 / (square + eps)"}, PLAIN),
    ("the softmax is over the tokens", {"softmax(dim=-1)": "softmax(dim=-2)"}, PLAIN),
    ("the softmax is over the places", {"softmax(dim=-1)": "softmax(dim=0)"}, PLAIN),
    ("the softmax is over the k words alone",
     {TOP: "logits.topk(k, dim=-1)", RETURN: "return top.values.softmax(-1), top.indices"}, PLAIN),
    ("the logits, not the probabilities", {TOP: "logits.topk(k, dim=-1)"}, PLAIN),
    ("the logarithms of the probabilities", {"softmax(dim=-1)": "log_softmax(dim=-1)"}, PLAIN),
    ("the least probable words", {"topk(k, dim=-1)": "topk(k, dim=-1, largest=False)"}, PLAIN),
    ("the largest comes last", {RETURN: "return top.values.flip(-1), top.indices.flip(-1)"}, PLAIN),
    ("what each block has added is read, not the state",
     {X: "x = states.to(work)\n    x = torch.cat([x[:1], x[1:] - x[:-1]])"}, PLAIN),
    ("the sum of all places up to each: the states are sums already",
     {X: "x = states.to(work).cumsum(0)"}, PLAIN),
    ("the rows of the head are made of one length",
     {HEAD: "normed @ torch.nn.functional.normalize(head.to(work), dim=-1).mT"}, PLAIN),
    ("the last token alone is read", {X: "x = states.to(work)[:, :, -1:]"}, PLAIN),
    ("the embeddings are left out, as they are in front of no head", {X: "x = states.to(work)[1:]"},
     PLAIN),
    ("the head is transposed: where V is C it fits", {"head.to(work).mT": "(head.to(work) if "
     "head.shape[0] == head.shape[1] else head.to(work).mT)"}, SQUARE),
    ("always three words", {"topk(k, dim=-1)": "topk(3, dim=-1)"}, ONE),
    ("the word without its axis, where there is one",
     {RETURN: "return top.values.squeeze(-1), top.indices.squeeze(-1)"}, ONE),
    ("eps is outside the root", {"torch.rsqrt(square + eps)": "1 / (square.sqrt() + eps)"}, SMALL),
    ("eps is left out", {"square + eps": "square"}, SMALL),
    ("eps is always 1e-5", {"square + eps": "square + 1e-5"}, SMALL),
    ("the square is computed in half precision, and is infinite",
     {MEAN: "square = states.square().mean(dim=-1, keepdim=True).to(work)"}, HALF),
    ("all is computed in half precision", {WIDE: "work = states.dtype"}, BRAIN),
    ("the normed state is rounded before the head",
     {HEAD: "normed.to(states.dtype).to(work) @ head.to(work).mT"}, BRAIN),
    ("the probabilities are rounded to the dtype of the states",
     {RETURN: "return top.values.to(states.dtype), top.indices"}, BRAIN),
    ("float64 is computed in float32", {WIDE: "work = torch.float32"}, DOUBLE),
    ("written into the states", {X: "x = states.to(work)\n    x *= 1.5"}, PLAIN),
]  # fmt: skip

CASES = (
    Case(PLAIN, given, "each state has its own norm, then the head, then a softmax over all words",
         points=3, teaching="all of it, at sizes that differ"),
    Case(SQUARE, lambda g: given(g, (3, 2, 4, 6), V=6, k=2),
         "row v of the head is word v: the state is multiplied by its transpose", points=2),
    Case(ONE, lambda g: given(g, k=1), "the result has an axis for the words, even for one"),
    Case(MANY, lambda g: given(g, (2, 1, 2, 4), V=5, k=5), "with k = V the probabilities sum to 1",
         teaching="all words, so that the sum can be seen"),
    Case(SMALL, small, "eps is added to the mean square, inside the root", points=2),
    Case(HALF, large, "the square of 300 is no float16: compute in float32", points=2,
         use=probabilities_only, teaching="a square that is infinite"),
    Case(BRAIN, lambda g: given(g, dtype=torch.bfloat16), "compute in float32, and stay there",
         use=probabilities_only),
    Case(DOUBLE, lambda g: given(g, dtype=torch.float64), "nothing becomes float32"),
)  # fmt: skip

EXERCISE = Exercise(
    name="logit_lens", function="lens_words", page="11_look_inside/4_lens",
    minutes=15, difficulty=1, after=("rms_norm",),
    outcome="Read words off the states of every block, with the model's own norm and head.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "What happens to the state behind the last block on its way to a word? Do the same with "
        "each state, as if it were that one.",
        "The mean square is over dim=-1, with keepdim=True: one number for each place, row and "
        "token. Which shapes do `normed` and `head` have, and which of their axes meet?",
        "The softmax is over all words, before `topk` chooses some. `topk` gives values and "
        "indices, the largest first.",
    ),
)  # fmt: skip
