"""Blocks in MXFP4: whose scale, which magnitude is nearest, where the sign is."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers, normal
from lm_from_scratch.weights.float4 import decode_mxfp4, encode_mxfp4, unpack


def reference(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The package's codes, one in a byte."""
    packed = encode_mxfp4(x)
    return unpack(packed.codes), packed.scales[:, 0], decode_mxfp4(packed)


# ------------------------------------------------------------------------------------- arguments

BORDERS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def decided(x: Tensor, scale: Tensor) -> Tensor:
    """The same blocks, with 1 scale where a number lies next to a border of two magnitudes."""
    near = ((x.abs() / scale)[..., None] - BORDERS).abs().amin(-1) < 0.02
    return torch.where(near, scale * x.sign(), x)


def ordinary(g: Generator) -> Call:
    scale = torch.tensor([[1.0], [2.0**-9], [2.0**6], [0.25]])
    x = normal(g, 4, 32).clamp(-3.9, 3.9) * scale
    x[:, 5:6] = torch.tensor([[4.0], [-5.6], [5.9], [-4.6]]) * scale
    return call(decided(x, scale))


def ties(g: Generator) -> Call:
    """Numbers in the middle between two magnitudes, of both signs."""
    x = BORDERS[integers(g, 0, 7, 3, 32)]
    x[:, :7] = BORDERS
    signs = 2.0 * integers(g, 0, 2, 3, 32) - 1
    return call(x * signs * torch.tensor([[1.0], [2.0**-5], [8.0]]))


def cut_off(g: Generator) -> Call:
    """The largest numbers are 6.4 to 7.8 scales, and negative in a block."""
    scale = torch.tensor([[1.0], [2.0**-4], [32.0]])
    x = normal(g, 3, 32).clamp(-3.9, 3.9) * scale
    x[:, 3:4], x[:, 9:10] = 6.4 * scale, -7.8 * scale
    return call(decided(x, scale))


def powers(g: Generator) -> Call:
    """Magnitudes themselves, of which the largest is 4 or 6."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
    x = table[integers(g, 0, 7, 4, 32)]
    x[:, 7] = torch.tensor([4.0, -4.0, 6.0, -6.0])
    return call(x * torch.tensor([[1.0], [2.0**-20], [2.0**20], [2.0**-3]]))


def small(g: Generator) -> Call:
    scale = torch.tensor([[1.0], [1.0], [2.0**-100], [2.0**-127]])
    x = normal(g, 4, 32).clamp(-4.3, 4.3).double()
    x[:, 2] = 4.5
    x = decided(x, torch.ones(4, 1)) * scale.double()
    x[1] = 0.0
    return call(x.float())


def bfloat16(g: Generator) -> Call:
    scale = torch.tensor([[1.0], [2.0**-6], [16.0]])
    x = normal(g, 3, 32).clamp(-4.3, 4.3)
    x[:, 11] = torch.tensor([4.75, -7.96875, 5.5])  # whose logarithm bfloat16 rounds to 3
    return call((decided(x, torch.ones(3, 1)) * scale).bfloat16())


# -------------------------------------------------------------------------------- how it is used


def parts(function: Callable[..., Any], x: Tensor) -> dict[str, Any]:
    codes, scales, numbers = function(x)
    return {"scales": scales, "codes": codes, "numbers": numbers}


# ------------------------------------------------------------------------------- wrong answers

LARGEST = "size.amax(dim=1, keepdim=True)"
EXPONENT = "(largest.log2().floor() - 2).clamp(min=-127)"
STEP = "step = 0.5 + 0.5 * (scaled >= 2) + 1.0 * (scaled >= 4)"
ROUNDED = "(step * (scaled / step).round()).clamp(max=6)"
CODES = "torch.searchsorted(magnitudes, rounded) + 8 * (x < 0)"
NUMBERS = "torch.where(x < 0, -rounded, rounded) * 2.0**exponent"

PLAIN, TIES, CUT = "scales, codes and numbers", "in the middle of two", "above 6 scales"
SMALL, HALF = "zeros and very small blocks", "bfloat16"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("one scale for all blocks", {LARGEST: "size.amax().expand(len(x), 1)"}, PLAIN),
    ("a scale for each column", {"amax(dim=1,": "amax(dim=0,"}, PLAIN),
    ("the largest number, not the largest absolute one",
     {LARGEST: "x.float().amax(dim=1, keepdim=True)"}, PLAIN),
    ("the logarithm rounded up, not down", {".floor()": ".ceil()"}, PLAIN),
    ("the logarithm rounded to the nearest", {".floor()": ".round()"}, PLAIN),
    ("the largest number becomes 1 to 2: nothing subtracted",
     {".floor() - 2)": ".floor())"}, PLAIN),
    ("the largest number becomes 2 to 4", {".floor() - 2)": ".floor() - 1)"}, PLAIN),
    ("the power of two above a sixth of the largest, so that nothing is cut off",
     {"largest.log2().floor() - 2": "(largest / 6).log2().ceil()"}, CUT),
    ("a scale that is no power of two: the largest becomes 6",
     {"scaled = size / 2.0**exponent": "scaled = size * 6 / largest.clamp(min=1e-30)"}, PLAIN),
    ("even levels, half a scale apart", {STEP: "step = torch.tensor(0.5)"}, PLAIN),
    ("one step for all numbers above 2", {" + 1.0 * (scaled >= 4)": ""}, PLAIN),
    ("cut to the magnitude below", {".round())": ".floor())"}, PLAIN),
    ("in the middle always up", {"(scaled / step).round()": "(scaled / step + 0.5).floor()"}, TIES),
    ("in the middle always down",
     {"(scaled / step).round()": "(scaled / step - 0.5).ceil()"}, TIES),
    ("nothing is cut off at 6", {".clamp(max=6)": ""}, CUT),
    ("the sign is the lowest bit",
     {CODES: "2 * torch.searchsorted(magnitudes, rounded) + 1 * (x < 0)"},
     PLAIN),
    ("the sign is set for positive numbers", {"8 * (x < 0)": "8 * (x >= 0)"}, PLAIN),
    ("two's complement: a negative code is 16 less its magnitude",
     {CODES: "torch.searchsorted(magnitudes, rounded) * (1 - 2 * (x < 0)) % 16"}, PLAIN),
    ("no sign where the magnitude is 0", {"8 * (x < 0)": "8 * ((x < 0) & (rounded > 0))"}, PLAIN),
    ("a power of two goes into the next block of magnitudes",
     {"torch.searchsorted(magnitudes, rounded)":
      "torch.searchsorted(magnitudes, rounded, right=True).clamp(max=7)"}, PLAIN),
    ("the scale is the exponent itself",
     {"(exponent + 127).to(torch.uint8)": "exponent.to(torch.int8)"},
     PLAIN),
    ("128 is added to the exponent", {"exponent + 127": "exponent + 128"}, PLAIN),
    ("the scales keep their second axis", {"[:, 0]": ""}, PLAIN),
    ("the numbers without the scale", {NUMBERS: "torch.where(x < 0, -rounded, rounded)"}, PLAIN),
    ("the numbers without their signs", {NUMBERS: "rounded * 2.0**exponent"}, PLAIN),
    ("the numbers as they were", {NUMBERS: "x.float()"}, PLAIN),
    ("a block of zeros has a scale of 1",
     {EXPONENT: "torch.where(largest > 0, largest.log2().floor() - 2, 0.0)"}, SMALL),
    ("a smallest scale that is too large", {"min=-127": "min=-64"}, SMALL),
    ("the numbers in the dtype of x", {NUMBERS: f"({NUMBERS}).to(x.dtype)"}, HALF),
]  # fmt: skip

CASES = (
    Case(PLAIN, ordinary,
         "the largest of a block gives its exponent; divide by the power of two, then find the "
         "nearest of the eight magnitudes", points=3, use=parts,
         teaching="the plain rule, at blocks of four sizes"),
    Case("magnitudes themselves", powers,
         "a magnitude times a power of two stays what it is", use=parts,
         teaching="numbers that are exact: every difference is a mistake"),
    Case(TIES, ties, "2.5 goes to 2 and 3.5 to 4: the magnitudes with an even number", points=2,
         use=parts),
    Case(CUT, cut_off, "the largest number may lie above 6 scales: it becomes 6", points=2,
         use=parts, teaching="what is cut off, before half precision"),
    Case(SMALL, small, "the logarithm of 0 is minus infinity, and the exponent ends at -127",
         use=parts),
    Case(HALF, bfloat16, "compute in float32, and return the numbers in it", use=parts),
)  # fmt: skip

EXERCISE = Exercise(
    name="mxfp4_block", function="mxfp4_block", page="8_quantized_weights/7_four_bit_floats",
    minutes=25, difficulty=2,
    outcome="Round blocks of 32 numbers to four-bit floats with a power of two as their scale: "
            "codes, scales, and back.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Per block: the largest absolute number, the exponent, the quotient. `keepdim=True` keeps "
        "a column that divides each row.",
        "Between 0 and 2 the magnitudes are 0.5 apart, between 2 and 4 they are 1 apart, between 4 "
        "and 6 they are 2 apart. `torch.round` goes to the even number of steps.",
        "`torch.searchsorted` finds the number of a magnitude. Add 8 where x is negative. "
        "`log2(0)` is minus infinity, which `clamp(min=-127)` turns into the smallest exponent.",
    ),
)  # fmt: skip
