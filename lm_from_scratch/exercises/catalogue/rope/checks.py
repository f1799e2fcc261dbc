"""RoPE: pairs in halves, positions as they are given, and angles that need float32."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers, normal
from lm_from_scratch.layers.rope import RotaryEmbedding, apply_rope


def rope(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """The package's own rotation in one call."""
    cos, sin = RotaryEmbedding(x.shape[-1], theta)(positions, x.dtype)
    return apply_rope(x, cos, sin)


def in_order(g: Generator) -> Call:
    return call(normal(g, 2, 3, 5, 8), torch.arange(5).repeat(2, 1))


def per_row(g: Generator) -> Call:
    gaps = integers(g, 2, 9, 3, 5).cumsum(1) + 11 * torch.arange(1, 4)[:, None]
    mixed = torch.stack([row[torch.randperm(5, generator=g)] for row in gaps])
    return call(normal(g, 3, 2, 5, 8), mixed)


def very_far(g: Generator) -> Call:
    """Beyond any table, and beyond int16. There is one pair, which turns by the position itself:
    slower ones would have few digits left in float32."""
    positions = torch.tensor([[3, 40_000, 200_000, 8_000_003]]).repeat(2, 1)
    return call(normal(g, 2, 3, 4, 2), positions)


def bfloat16(g: Generator) -> Call:
    x = normal(g, 2, 3, 9, 16, dtype=torch.bfloat16)
    positions = torch.arange(257, 266) + integers(g, 0, 60, 1) * 4
    return call(x, positions.repeat(2, 1))


def double(g: Generator) -> Call:
    """One token, as when a text is continued, in heads as wide as those of large models."""
    x = normal(g, 2, 4, 1, 130, dtype=torch.float64)
    return call(x, integers(g, 50, 200, 1, 1).repeat(2, 1))


def after_other_positions(function: Callable[..., Tensor], x: Tensor, positions: Tensor) -> Tensor:
    """The second of two calls with the same shapes."""
    function(x, positions.flip(-1) + 1)
    return function(x, positions)


# ------------------------------------------------------------------------------- wrong answers

ANGLES = "positions[:, None, :, None] * speeds"
COSINES = "angles.cos(), angles.sin()"
HALVES = "wide[..., :half], wide[..., half:]"
TURNED = "torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)"
SPEEDS = "1.0 / theta ** (i / half)"
WIDE = "wide = x if x.dtype == torch.float64 else x.float()"
IN_ORDER, ROWS = "positions 0, 1, 2, ...", "other positions in each row, in any order"
BFLOAT, DOUBLE = "bfloat16, positions above 256", "float64 keeps its digits"
MILLION = "positions up to eight million"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("neighbours 2i and 2i + 1 are the pairs, not i and i + D/2",
     {HALVES: "wide[..., 0::2], wide[..., 1::2]",
      TURNED: "torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)"}, IN_ORDER),
    ("turned the other way, by minus the angle", {ANGLES: f"-{ANGLES}"}, IN_ORDER),
    ("the halves are not swapped for the sine: each is multiplied by itself",
     {TURNED: "torch.cat([a * cos - a * sin, b * cos + b * sin], dim=-1)"}, IN_ORDER),
    ("the halves are swapped without a minus",
     {TURNED: "torch.cat([a * cos + b * sin, a * sin + b * cos], dim=-1)"}, IN_ORDER),
    ("one sign is wrong: the second half must add the sine",
     {"a * sin + b * cos": "b * cos - a * sin"}, IN_ORDER),
    ("positions are counted from 1",
     {ANGLES: "(positions + 1)[:, None, :, None] * speeds"}, IN_ORDER),
    ("positions are ignored: every row is taken to begin at 0",
     {ANGLES: "torch.arange(x.shape[2])[:, None] * speeds"}, ROWS),
    ("positions are counted from the first of each row",
     {ANGLES: "(positions - positions[:, :1])[:, None, :, None] * speeds"}, ROWS),
    ("every row counts on from its first position",
     {ANGLES: "(positions[:, :1] + torch.arange(x.shape[2]))[:, None, :, None] * speeds"}, ROWS),
    ("all rows are given the positions of the first",
     {ANGLES: "positions[:1, None, :, None] * speeds"}, ROWS),
    ("the exponent is i / D instead of 2i / D", {"(i / half)": "(i / half / 2)"}, IN_ORDER),
    ("the exponent runs to 1: divided by D/2 - 1",
     {"(i / half)": "(i / max(half - 1, 1))"}, IN_ORDER),
    ("the speeds grow from pair to pair: the exponent has no minus",
     {SPEEDS: "theta ** (i / half)"}, IN_ORDER),
    ("the angles are taken for degrees", {ANGLES: f"torch.deg2rad({ANGLES})"}, IN_ORDER),
    ("theta is always 10000", {SPEEDS: "1.0 / 10000.0 ** (i / half)"}, "theta as given"),
    ("another theta than 10000 by default",
     {"theta: float = 10000.0": "theta: float = 1000000.0"}, IN_ORDER),
    ("the second half is made from the first half already turned",
     {TURNED: "torch.cat([a * cos - b * sin, (a * cos - b * sin) * sin + b * cos], dim=-1)"},
     IN_ORDER),
    ("the halves come back alternating, not one after the other",
     {TURNED: "torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)"}, IN_ORDER),
    ("everything is computed in the dtype of x, positions too: 257 becomes 256",
     {WIDE: "wide = x"}, BFLOAT),
    ("the angles are rounded to the dtype of x",
     {COSINES: "angles.to(x.dtype).cos(), angles.to(x.dtype).sin()"}, BFLOAT),
    ("positions are in the dtype of x, where 257 becomes 256",
     {ANGLES: "positions.to(x.dtype)[:, None, :, None] * speeds"}, BFLOAT),
    ("cosines, sines and products are in the dtype of x",
     {COSINES: "angles.cos().to(x.dtype), angles.sin().to(x.dtype)", HALVES: "x.chunk(2, -1)"},
     BFLOAT),
    ("cosines and sines are rounded to the dtype of x",
     {COSINES: "angles.cos().to(x.dtype), angles.sin().to(x.dtype)"}, BFLOAT),
    ("the result stays float32", {"turned.to(x.dtype)": "turned"}, BFLOAT),
    ("float64 is computed in float32", {WIDE: "wide = x.float()"}, DOUBLE),
    ("positions above 4095 are given the last row of a table",
     {ANGLES: "positions.clamp(max=4095)[:, None, :, None] * speeds"}, MILLION),
    ("a table of 4096 positions, which further ones are outside of",
     {ANGLES: "(torch.arange(4096)[:, None] * speeds)[positions][:, None]"}, MILLION),
    ("a table of 131072 positions, the longest context of today",
     {ANGLES: "positions.clamp(max=131071)[:, None, :, None] * speeds"}, MILLION),
    ("a table of a million positions",
     {ANGLES: "positions.clamp(max=2**20)[:, None, :, None] * speeds"}, MILLION),
    ("positions are kept in 16 bits, where 40000 becomes negative",
     {ANGLES: "positions.to(torch.int16)[:, None, :, None] * speeds"}, MILLION),
    ("angles are kept from one call to the next, by the shape of x",
     {COSINES: "rope.__dict__.setdefault((x.shape, theta), (angles.cos(), angles.sin()))"}, ROWS),
    ("a single token is left as it is",
     {"return turned.to(x.dtype)": "return turned.to(x.dtype) if x.shape[2] > 1 else x.clone()"},
     DOUBLE),
    ("x is detached",
     {HALVES: "wide.detach()[..., :half], wide.detach()[..., half:]"}, "the gradient of x"),
    ("written into x itself", {"return turned.to(x.dtype)": "return x.copy_(turned)"}, IN_ORDER),
    ("a view of a tensor that is not contiguous",
     {"    half =": "    x.view(-1, *x.shape[-2:])\n    half ="},
     IN_ORDER),
]  # fmt: skip

CASES = (
    Case(IN_ORDER, in_order,
         "position 0 changes nothing; at position 1 the first pair, features 0 and D/2, turns by "
         "1 radian", points=3, teaching="the plain formula, and the first thing to read"),
    Case(ROWS, per_row,
         "use the positions as they are: they begin above 0, leave gaps, differ by row, and are "
         "others in every call", points=2, use=after_other_positions),
    Case("theta as given",
         lambda g: call(normal(g, 2, 3, 5, 8), integers(g, 5, 90, 1, 5).repeat(2, 1), 500000.0),
         "with theta = 500000 the second of four pairs turns by 500000**(-1/4) = 0.038 a token"),
    Case(BFLOAT, bfloat16,
         "bfloat16 has no 257 (it becomes 256), and keeps a cosine to three digits only: stay in "
         "float32 until the end", points=2, tolerance=(8e-3, 1e-3)),
    Case(MILLION, very_far,
         "positions have no largest value: compute the angle of each, or make the table as long "
         "as it has to be"),
    Case(DOUBLE, double,
         "the speeds too are float64 where x is; here a single token has heads of 130 features"),
    Case("the gradient of x", in_order, "x must stay in the graph: nothing may be detached",
         gradient=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="rope", function="rope", page="2_qwen2/2_rope", minutes=25, difficulty=2,
    outcome="Write the rotation of RoPE so that it holds for any positions and for half precision.",
    reference=rope, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Four steps: a speed for each pair, an angle for each token and pair, cosines and sines, "
        "two products for each half. Which shapes must the angles have to meet (B, H, T, D/2)?",
        "`positions[:, None, :, None] * speeds` has shape (B, 1, T, D/2), and the head axis is "
        "broadcast. The halves are `x[..., :half]` and `x[..., half:]`.",
        "The exponents of theta are 0, -1/(D/2), -2/(D/2), ...: one for each pair. Choose a dtype "
        "at the top, float32 or, for a float64 x, float64; make speeds, angles and both halves in "
        "it, join the turned halves, and round once, at the end.",
    ),
)  # fmt: skip
