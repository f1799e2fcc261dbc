"""A matrix in 8 bits: whose scale, which rounding, and what a stored scale does to the codes."""

from typing import Any

import torch
from torch import Generator, Tensor, nn

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal, strided
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

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("one scale for the whole matrix",
     {LARGEST: "precise.abs().amax().expand(len(weight), 1)"}, "scale and codes"),
    ("a scale for each column, not for each row",
     {"amax(dim=1,": "amax(dim=0,"}, "scale and codes"),
    ("a quotient by 128 in the place of 127",
     {"largest / 127": "largest / 128"}, "scale and codes"),
    ("the largest number, not the largest absolute one",
     {"precise.abs()": "precise"}, "negative ends and halves"),
    ("the range from smallest to largest in 255 steps, with no zero kept",
     {LARGEST: "precise.amax(dim=1, keepdim=True) - precise.amin(dim=1, keepdim=True)",
      "largest / 127": "largest / 255"},
     "scale and codes"),
    ("a small number is added to the divisor",
     {"precise / self.scale": "precise / (self.scale + 1e-6)"},
     "a row of zeros and very small rows"),
    ("cut off instead of rounded", {"steps.round()": "steps.trunc()"}, "scale and codes"),
    ("rounded down", {"steps.round()": "steps.floor()"}, "scale and codes"),
    ("a half always goes up",
     {"steps.round()": "(steps + 0.5).floor()"}, "negative ends and halves"),
    ("a half goes away from zero",
     {"steps.round()": "(steps.sign() * (steps.abs() + 0.5).floor())"}, "negative ends and halves"),
    ("the scale has no second axis",
     {CODES: f"{CODES}\n        self.scale = self.scale[:, 0]"}, "scale and codes"),
    ("the codes stay floating point", {"codes.to(torch.int8)": "codes"}, "scale and codes"),
    ("the codes come back without the scale",
     {BACK: "return self.codes.to(self.scale.dtype)"}, "back again, with the scale"),
    ("the weight itself is kept, and the scale never used",
     {SCALE: f"self.kept = weight.clone()\n        {SCALE}", BACK: "return self.kept"},
     "back again, with the scale"),
    ("the matrix is computed once and kept, beside the codes",
     {"self.codes = codes.to(torch.int8).contiguous()":
          "self.codes = codes.to("
          "torch.int8).contiguous()\n        self.kept = self.codes * self.scale",
      BACK: "return self.kept"},
     "back again, with the scale"),
    ("the way back divides by the scale",
     {BACK: "return self.codes / self.scale"}, "back again, with the scale"),
    ("a smallest scale, which is too large for small rows",
     {SCALE: "self.scale = (largest / 127).clamp(min=1e-8).to(weight.dtype)"},
     "a row of zeros and very small rows"),
    ("a small number added to every scale",
     {SCALE: "self.scale = (largest / 127 + 1e-8).to(weight.dtype)"},
     "a row of zeros and very small rows"),
    ("a row of zeros gets a scale of 1",
     {STEPS:
          "self.scale = torch.where(self.scale == 0, 1, self.scale)\n"
          "        steps = precise / self.scale"},
     "a row of zeros and very small rows"),
    ("the codes are those of a scale that was not yet rounded",
     {"precise / self.scale)": "precise / (largest / 127))"}, "bfloat16"),
    ("the quotient in half precision",
     {"precise / self.scale)": "weight / self.scale)"}, "bfloat16"),
    ("the scale stays float32", {".to(weight.dtype)": ""}, "bfloat16"),
    ("the result is float32",
     {BACK: "return self.codes * self.scale.to(self.scale.dtype).double().float()"}, "bfloat16"),
    ("no clamp: a code above 127 becomes a negative one",
     {".clamp(-127, 127)": ""}, "float16 at its smallest numbers"),
    ("codes down to -128", {"clamp(-127": "clamp(-128"}, "float16 at its smallest numbers"),
    ("a quotient by a scale of 0",
     {STEPS: "steps = precise / self.scale"}, "float16 at its smallest numbers"),
    ("float64 is computed in float32",
     {"weight if weight.dtype == torch.float64 else weight.float()": "weight.float()"},
     "float64 keeps its digits"),
    ("the scale is a part of the model's graph",
     {"weight = weight.detach()": ""}, "a parameter, transposed in memory"),
    ("the codes have the weight's order in memory",
     {".contiguous()": ""}, "a parameter, transposed in memory"),
]  # fmt: skip


CASES = (
    Case("scale and codes", ordinary,
         "the largest absolute number of each row gets the code 127 or -127; keepdim=True keeps "
         "the scale (N, 1)", points=2, use=codes_and_scale,
         teaching="the plain formula, before the way back"),
    Case("back again, with the scale", ordinary,
         "a number is its code times the scale of its row; nothing else is kept", points=2,
         use=back),
    Case("negative ends and halves", ends,
         "the largest number may be negative; the code is the nearest whole number",
         use=codes_and_scale),
    Case("a row of zeros and very small rows", small_rows,
         "the largest number of a row has the code 127 even if it is 1e-13; only a scale of 0 "
         "needs care", points=1, use=all_of_it),
    Case("bfloat16", lambda g: call(decided(normal(g, 6, 64, dtype=torch.bfloat16))),
         "store the scale in the dtype of weight first; divide by that one, in float32", points=2,
         use=all_of_it),
    Case("float16 at its smallest numbers", smallest_float16,
         "a scale that float16 has rounded down makes quotients above 127, one that has become 0 "
         "makes infinity", use=all_of_it),
    Case("float64 keeps its digits",
         lambda g: call(decided(normal(g, 4, 11).double() + 1e-9 * normal(g, 4, 11).double())),
         "convert to float32 only what has fewer digits", use=all_of_it),
    Case("a parameter, transposed in memory",
         lambda g: call(nn.Parameter(strided(decided(normal(g, 7, 10))))),
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
