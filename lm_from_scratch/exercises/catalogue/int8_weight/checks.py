"""A matrix in 8 bits: whose scale, which rounding, and what a stored scale does to the codes."""

from typing import Any

import torch
from torch import Generator, Tensor, nn

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal
from lm_from_scratch.weights.int8 import Int8Weight


class Reference:
    """The package's weight, with one group in a row."""

    def __init__(self, weight: Tensor):
        self.codes = self.scale = torch.empty(0)
        held = Int8Weight.quantize(weight)
        self.codes, self.scale = held.codes, held.scale

    def dequantize(self) -> Tensor:
        parts = {"codes": self.codes, "scale": self.scale}
        return Int8Weight.from_parts(parts).dequantize()


# ------------------------------------------------------------------------------------- arguments


def decided(weight: Tensor) -> Tensor:
    """The same matrix with 0 where a number lies so near to a half that rounding may go both ways.

    Other algebra, as a product with the inverse of the scale, is right as well.
    """
    wide = weight.double()
    scale = (wide.abs().amax(1, keepdim=True) / 127).to(weight.dtype).double()
    steps = torch.where(scale == 0, 0, wide / scale)
    near = ((steps - steps.floor()) - 0.5).abs() < 0.01
    return torch.where(near, 0, weight)


def ordinary(g: Generator) -> Call:
    rows = torch.tensor([[1.0], [0.02], [30.0], [0.5], [4.0]])
    return call(decided(normal(g, 5, 23) * rows))


def ends(g: Generator) -> Call:
    """The largest numbers are negative, and the step is 1 or a power of 2: halves are halves."""
    weight = torch.randint(-100, 100, (3, 14), generator=g) + 0.5
    weight[:, 3] = -127
    weight[:, 8:] += 0.25  # no halves: a cut differs from a half that goes towards 0
    weight[0, :3] = torch.tensor([0.5, 1.5, -2.5])
    return call(weight * torch.tensor([[1.0], [0.25], [8.0]]))


def small_rows(g: Generator) -> Call:
    sizes = torch.tensor([[1.0], [0.0], [1e-4], [1e-9], [1e-13]])
    return call(decided(normal(g, 5, 12) * sizes))


def smallest_float16(g: Generator) -> Call:
    """Scales between the numbers that float16 has near 0: they go up, down and to 0."""
    unit = 2.0**-24  # the smallest number
    signs = 2.0 * torch.randint(0, 2, (3, 9), generator=g) - 1
    most = torch.tensor([[127 * 1.4], [127 * 2.4], [127 * 0.45]])
    weight = most * torch.rand(3, 9, generator=g) * signs
    weight[:, :1], weight[:, 1:2] = most, -most
    return call(decided((weight * unit).half()))


# -------------------------------------------------------------------------------- how it is used


def codes_and_scale(kind: Any, weight: Tensor) -> dict[str, Tensor]:
    held = kind(weight)
    return {"scale": held.scale, "codes": held.codes}


def all_of_it(kind: Any, weight: Tensor) -> dict[str, Tensor]:
    held = kind(weight)
    return {"scale": held.scale, "codes": held.codes, "dequantize()": held.dequantize()}


def back(kind: Any, weight: Tensor) -> dict[str, Tensor]:
    held = kind(weight)
    first = held.dequantize()
    held.scale = held.scale * 2
    return {"dequantize()": first, "dequantize() after scale was doubled": held.dequantize()}


def of_a_model(kind: Any, weight: Tensor) -> dict[str, Any]:
    held = kind(weight)
    back = held.dequantize()
    return {
        "codes": held.codes,
        "dequantize()": back,
        "scale.requires_grad": held.scale.requires_grad,
        "dequantize().requires_grad": back.requires_grad,
        "codes.is_contiguous()": held.codes.is_contiguous(),
    }


# ------------------------------------------------------------------------------- wrong answers

LARGEST = "precise.abs().amax(dim=1, keepdim=True)"
SCALE = "self.scale = (largest / 127).to(weight.dtype)"
STEPS = "steps = torch.where(self.scale == 0, 0, precise / self.scale)"
CODES = "codes = steps.round().clamp(-127, 127)"
BACK = "return self.codes * self.scale"

PLAIN, NEGATIVE = "scale and codes", "negative ends and halves"
ZEROS, AGAIN = "a row of zeros and very small rows", "back again, with the scale"
BFLOAT, HALF = "bfloat16", "float16 at its smallest numbers"
PARAMETER = "a parameter of a model"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("one scale for the whole matrix",
     {LARGEST: "precise.abs().amax().expand(len(weight), 1)"}, PLAIN),
    ("a scale for each column, not for each row", {"amax(dim=1,": "amax(dim=0,"}, PLAIN),
    ("a quotient by 128 instead of 127", {"largest / 127": "largest / 128"}, PLAIN),
    ("the largest number, not the largest absolute one", {"precise.abs()": "precise"}, NEGATIVE),
    ("the range from smallest to largest in 255 steps, with no zero kept",
     {LARGEST: "precise.amax(dim=1, keepdim=True) - precise.amin(dim=1, keepdim=True)",
      "largest / 127": "largest / 255"}, PLAIN),
    ("a small number is added to the divisor",
     {"precise / self.scale": "precise / (self.scale + 1e-6)"}, ZEROS),
    ("cut off instead of rounded", {"steps.round()": "steps.trunc()"}, PLAIN),
    ("rounded down", {"steps.round()": "steps.floor()"}, PLAIN),
    ("a half always goes up", {"steps.round()": "(steps + 0.5).floor()"}, NEGATIVE),
    ("a half goes away from zero",
     {"steps.round()": "(steps.sign() * (steps.abs() + 0.5).floor())"}, NEGATIVE),
    ("the scale has no second axis",
     {CODES: f"{CODES}\n        self.scale = self.scale[:, 0]"}, PLAIN),
    ("the codes stay floating point", {"codes.to(torch.int8)": "codes"}, PLAIN),
    ("the codes come back without the scale",
     {BACK: "return self.codes.to(self.scale.dtype)"}, AGAIN),
    ("the weight itself is kept, and the scale never used",
     {SCALE: f"self.kept = weight.clone()\n        {SCALE}", BACK: "return self.kept"}, AGAIN),
    ("the matrix is computed once and kept, beside the codes",
     {"self.codes = codes.to(torch.int8).contiguous()": "self.codes = codes.to("
      "torch.int8).contiguous()\n        self.kept = self.codes * self.scale",
      BACK: "return self.kept"}, AGAIN),
    ("the way back divides by the scale", {BACK: "return self.codes / self.scale"}, AGAIN),
    ("a smallest scale, which is too large for small rows",
     {SCALE: "self.scale = (largest / 127).clamp(min=1e-8).to(weight.dtype)"}, ZEROS),
    ("a small number added to every scale",
     {SCALE: "self.scale = (largest / 127 + 1e-8).to(weight.dtype)"}, ZEROS),
    ("a row of zeros gets a scale of 1",
     {STEPS: "self.scale = torch.where(self.scale == 0, 1, self.scale)\n"
      "        steps = precise / self.scale"}, ZEROS),
    ("the codes are those of a scale that was not yet rounded",
     {"precise / self.scale)": "precise / (largest / 127))"}, BFLOAT),
    ("the quotient in half precision", {"precise / self.scale)": "weight / self.scale)"}, BFLOAT),
    ("the scale stays float32", {".to(weight.dtype)": ""}, BFLOAT),
    ("the result is float32",
     {BACK: "return self.codes * self.scale.to(self.scale.dtype).double().float()"}, BFLOAT),
    ("no clamp: a code above 127 becomes a negative one", {".clamp(-127, 127)": ""}, HALF),
    ("codes down to -128", {"clamp(-127": "clamp(-128"}, HALF),
    ("a quotient by a scale of 0", {STEPS: "steps = precise / self.scale"}, HALF),
    ("float64 is computed in float32",
     {"weight if weight.dtype == torch.float64 else weight.float()": "weight.float()"},
     "float64 keeps its digits"),
    ("the scale is a part of the model's graph", {"weight = weight.detach()": ""}, PARAMETER),
    ("the codes have the weight's order in memory", {".contiguous()": ""}, PARAMETER),
]  # fmt: skip

CASES = (
    Case(PLAIN, ordinary,
         "the largest absolute number of each row gets the code 127 or -127; keepdim=True keeps "
         "the scale (N, 1)", points=2, use=codes_and_scale,
         teaching="the plain formula, before the way back"),
    Case(AGAIN, ordinary, "a number is its code times the scale of its row; nothing else is kept",
         points=2, use=back),
    Case(NEGATIVE, ends, "the largest number may be negative; the code is the nearest whole number",
         use=codes_and_scale),
    Case(ZEROS, small_rows,
         "the largest number of a row has the code 127 even if it is 1e-13; only a scale of 0 "
         "needs care", points=1, use=all_of_it),
    Case(BFLOAT, lambda g: call(decided(normal(g, 6, 64, dtype=torch.bfloat16))),
         "store the scale in the dtype of weight first; divide by that one, in float32", points=2,
         use=all_of_it),
    Case(HALF, smallest_float16,
         "a scale that float16 has rounded down makes quotients above 127, one that has become 0 "
         "makes infinity", use=all_of_it),
    Case("float64 keeps its digits",
         lambda g: call(decided(normal(g, 4, 11, dtype=torch.float64))),
         "convert to float32 only what has fewer digits", use=all_of_it),
    Case(PARAMETER, lambda g: call(nn.Parameter(decided(normal(g, 7, 10)))),
         "detach the parameter, and give the codes a row-by-row order", use=of_a_model),
)  # fmt: skip

EXERCISE = Exercise(
    name="int8_weight", function="Int8Rows", page="8_quantized_weights/1_int8_int4", minutes=25,
    difficulty=2,
    outcome="Write an int8 weight with a scale for each row so that it holds in half precision, "
            "for rows of zeros and for a parameter of a model.",
    reference=Reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Four steps: the largest absolute number of each row, the scale, the quotient, the nearest "
        "whole number. Which of them keeps the shape (N, 1)?",
        "Compute with `weight.detach().float()`, unless it is float64. Store the scale with "
        "`.to(weight.dtype)` before you divide by it.",
        "A scale of 0 must not divide, and its codes are 0. A scale that was rounded down can "
        "give a code beyond 127. And a result that was computed from a transposed tensor may "
        "lie in memory in another order.",
    ),
)  # fmt: skip
