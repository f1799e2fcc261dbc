"""RMSNorm: the mean square, where eps is, and which numbers may be rounded."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal
from lm_from_scratch.layers.norm import rms_norm


def shifted(g: Generator) -> Call:
    x = normal(g, 3, 5, 16) + 2  # a mean that is not 0
    return call(x, normal(g, 16), 1e-5)


def large_half(g: Generator) -> Call:
    x = normal(g, 2, 5, 16, scale=300, dtype=torch.float16)
    return call(x, normal(g, 16, dtype=torch.float16))


def bfloat16(g: Generator) -> Call:
    return call(normal(g, 8, 32, dtype=torch.bfloat16), normal(g, 32, dtype=torch.bfloat16))


def two_weights(function: Callable[..., Tensor], x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """With a weight of the dtype of x, and with one in float32."""
    results = {f"with a {weight.dtype} weight": function(x, weight)}
    return results | {"with a float32 weight": function(x, weight.float())}


def double(g: Generator) -> Call:
    x = normal(g, 3, 7, dtype=torch.float64)
    return call(x, normal(g, 7, dtype=torch.float64), 1e-8)


# ------------------------------------------------------------------------------- wrong answers

SQUARE = "precise.pow(2).mean(-1, keepdim=True)"
RESULT = "(precise * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight"
WIDE = "precise = x if x.dtype == torch.float64 else x.float()"
PLAIN, EPS, HALF = "shape and values", "eps as given", "float16, large values"
BFLOAT = "bfloat16, rounded before the weight"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the mean is subtracted, as in LayerNorm",
     {WIDE: f"{WIDE}\n    precise = precise - precise.mean(-1, keepdim=True)"}, PLAIN),
    ("the sum of the squares instead of their mean", {".mean(-1": ".sum(-1"}, PLAIN),
    ("sqrt for rsqrt: a product instead of a quotient", {"torch.rsqrt": "torch.sqrt"}, PLAIN),
    ("the square root is missing",
     {"torch.rsqrt(mean_square + eps)": "(mean_square + eps).reciprocal()"}, PLAIN),
    ("the mean of the sizes, not of the squares",
     {"precise.pow(2)": "precise.abs().pow(2).sqrt()",
      "torch.rsqrt(mean_square + eps)": "1 / (mean_square + eps)"}, PLAIN),
    ("the weight is missing", {".to(x.dtype) * weight": ".to(x.dtype)"}, PLAIN),
    ("the weight is taken as 1 + weight", {"* weight": "* (1 + weight)"}, PLAIN),
    ("the mean over the whole tensor", {SQUARE: "precise.pow(2).mean()"}, PLAIN),
    ("the mean over another axis", {"mean(-1,": "mean(0,"}, PLAIN),
    ("the mean over the tokens, not over the features", {"mean(-1,": "mean(1,"}, PLAIN),
    ("the standard deviation, which has the mean subtracted",
     {SQUARE: "precise.var(-1, keepdim=True)"}, PLAIN),
    ("the weight is in x before the norm",
     {WIDE: f"{WIDE}\n    precise = precise * weight", RESULT: RESULT.removesuffix(" * weight")},
     PLAIN),
    ("eps outside the root",
     {"torch.rsqrt(mean_square + eps)": "1 / (mean_square.sqrt() + eps)"}, EPS),
    ("eps is not used", {"mean_square + eps": "mean_square"}, EPS),
    ("another eps than 1e-6 by default",
     {"eps: float = 1e-6": "eps: float = 1e-5"}, "eps by default, inputs near 0.001"),
    ("always the same eps", {"mean_square + eps": "mean_square + 1e-6"}, EPS),
    ("no float32 for the square", {WIDE: "precise = x"}, HALF),
    ("rounded after the weight, not before",
     {RESULT: "(precise * torch.rsqrt(mean_square + eps) * weight).to(x.dtype)"}, BFLOAT),
    ("the result stays float32", {".to(x.dtype)": ""}, HALF),
    ("the product with a float32 weight is rounded to the dtype of x",
     {RESULT: "((precise * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight).to(x.dtype)"},
     BFLOAT),
    ("float64 is computed in float32", {WIDE: "precise = x.float()"}, "float64 keeps its digits"),
    ("the root is detached",
     {"mean_square + eps": "mean_square.detach() + eps"}, "gradients of x and weight"),
    ("a view of a tensor that is not contiguous",
     {WIDE: f"x.view(-1, x.shape[-1])\n    {WIDE}"}, PLAIN),
    ("written into x itself",
     {f"return {RESULT}": f"x.copy_({RESULT.removesuffix(' * weight')})\n    return x * weight"},
     PLAIN),
    ("only for three axes", {"mean(-1,": "mean(2,"}, "one vector, an axis alone"),
]  # fmt: skip

CASES = (
    Case(PLAIN, shifted,
         "square, then the mean over the last axis with keepdim=True; nothing is subtracted",
         points=3, teaching="the plain formula, and the first thing to read"),
    Case("one vector, an axis alone", lambda g: call(normal(g, 10), normal(g, 10), 1e-6),
         "use -1 for the axis, not its number", teaching="the error it shows is short"),
    Case(EPS, lambda g: call(normal(g, 2, 3, 2, 12, scale=0.1), normal(g, 12), 1e-2),
         "eps is added to the mean square, inside the root",
         teaching="eps alone, large enough to see"),
    Case("eps by default, inputs near 0.001",
         lambda g: call(normal(g, 4, 12, scale=1e-3), normal(g, 12)),
         "eps is 1e-6 unless another is given"),
    Case(HALF, large_half, "300**2 = 90000 is above the largest float16, 65504: square in float32",
         points=2, teaching="the overflow, which bfloat16 does not have"),
    Case(BFLOAT, bfloat16,
         "convert to the dtype of x first, then multiply by the weight: with one in float32 the "
         "product is float32", use=two_weights, tolerance=(4e-3, 0.0)),
    Case("float64 keeps its digits", double, "convert to float32 only what has fewer digits"),
    Case("gradients of x and weight", shifted, "the root depends on x too: nothing may be detached",
         gradient=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="rms_norm", function="rms_norm", page="2_qwen2/1_rms_norm", minutes=15, difficulty=1,
    outcome="Write RMSNorm so that it also holds for half precision and for inputs near zero.",
    reference=rms_norm, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Three steps: the mean of the squares, one division, one product. Which axis stays?",
        "`x.pow(2).mean(-1, keepdim=True)` has shape (..., 1) and is divided out by broadcasting.",
        "Two roundings are yours to place: into float32 before the squares, unless x is float64, "
        "and back to the dtype of x. Does the weight come before the second or after it?",
    ),
)  # fmt: skip
