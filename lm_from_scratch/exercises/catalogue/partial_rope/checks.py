"""Partial RoPE: which features turn, how fast, and what is left as it is."""

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer, integers, normal
from lm_from_scratch.layers.rope import RotaryEmbedding, apply_partial_rope


def reference(x: Tensor, positions: Tensor, share: float, theta: float = 10000.0) -> Tensor:
    """The package's own rotation in one call."""
    cos, sin = RotaryEmbedding(int(share * x.shape[-1]), theta)(positions, x.dtype)
    return apply_partial_rope(x, cos, sin)


def half(g: Generator) -> Call:
    return call(normal(g, 2, 3, 5, 8), torch.arange(5).repeat(2, 1), 0.5)


def odd_share(g: Generator) -> Call:
    """0.38 of 12 features are 4.56, and 0.48 of 14 are 6.72: both are nearer to the next number."""
    D, share = [(12, 0.38), (14, 0.48)][integer(g, 0, 2)]
    return call(normal(g, 2, 3, 5, D), integers(g, 3, 60, 1, 5).repeat(2, 1), share)


def most(g: Generator) -> Call:
    return call(normal(g, 2, 3, 5, 16), integers(g, 3, 60, 1, 5).repeat(2, 1), 0.75, 500000.0)


def per_row(g: Generator) -> Call:
    starts = integers(g, 5, 90, 3, 1)
    return call(normal(g, 3, 2, 5, 8), starts + 7 * torch.randperm(5, generator=g), 0.5)


def bfloat16(g: Generator) -> Call:
    x = normal(g, 2, 4, 9, 32, dtype=torch.bfloat16)
    positions = torch.arange(257, 266) + integers(g, 0, 60, 1) * 4
    return call(x, positions.repeat(2, 1), 0.5)


def double(g: Generator) -> Call:
    x = normal(g, 2, 4, 3, 12, dtype=torch.float64)
    return call(x, integers(g, 50, 200, 1, 3).repeat(2, 1), 0.5)


def late(g: Generator) -> Call:
    """Beyond any table, beyond 16 bits and beyond the whole numbers of float32, in float64."""
    positions = torch.tensor([[3, 40_000, 200_000, 17_000_003]]).repeat(2, 1)
    return call(normal(g, 2, 3, 4, 8, dtype=torch.float64), positions, 0.5)


# ------------------------------------------------------------------------------- wrong answers


HALF, QUARTER, ODD, MOST = "half of 8 features", "a quarter of 32", "a share between", "three of 4"
ROWS, WHOLE = "each row has positions of its own", "all features"
BRAIN = "bfloat16 at positions beyond 256"
LATE, GRADIENTS = "positions up to 17 million", "gradients"
SPEEDS = "theta ** (-i / R)"
PAIRS = "wide[..., : R // 2], wide[..., R // 2 : R]"
TURNED = "torch.cat([a * cos - b * sin, a * sin + b * cos], 3).to(x.dtype)"
JOINED = "torch.cat([turned, x[..., R:]], 3)"
SIZE = "int(share * x.shape[3])"
COSINES, PLACES = "angles.cos(), angles.sin()", "positions[:, None, :, None]"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("speeds are those of a head of D features, cut after R/2 of them",
     {SPEEDS: "theta ** (-i / x.shape[3])"}, HALF),
    ("pair i has the exponent -i/R, not -2i/R", {SPEEDS: "theta ** (-i / (2 * R))"}, QUARTER),
    ("all features turn", {SIZE: "x.shape[3]"}, HALF),
    ("positions are kept in 16 bits, where 40000 becomes negative",
     {PLACES: "positions.short()[:, None, :, None]"}, LATE),
    ("a table of 131072 positions, the longest context of today",
     {PLACES: "positions.clamp(max=131071)[:, None, :, None]"}, LATE),
    ("pairs are D/2 apart, not R/2",
     {PAIRS: "wide[..., : R // 2], wide[..., x.shape[3] // 2 : x.shape[3] // 2 + R // 2]",
      JOINED: "torch.cat([turned[..., : R // 2], x[..., R // 2 : x.shape[3] // 2], "
      "turned[..., R // 2 :], x[..., x.shape[3] // 2 + R // 2 :]], 3)"}, HALF),
    ("neighbours 2i and 2i + 1 are the pairs",
     {PAIRS: "wide[..., 0:R:2], wide[..., 1:R:2]",
      TURNED: "torch.stack([a * cos - b * sin, a * sin + b * cos], 4).flatten(3).to(x.dtype)"},
     HALF),
    ("the last features turn, and the first stay",
     {"wide = x if x.dtype == torch.float64 else x.float()":
          "x = x.roll(R, 3)\n    wide = x if x.dtype == torch.float64 else x.float()",
      JOINED: "torch.cat([x[..., R:], turned], 3)"}, HALF),
    ("what turns is put behind what stays", {JOINED: "torch.cat([x[..., R:], turned], 3)"}, HALF),
    ("what does not turn is dropped", {JOINED: "turned"}, HALF),
    ("what does not turn becomes 0", {JOINED: "torch.cat([turned, 0 * x[..., R:]], 3)"}, HALF),
    ("the share is of the pairs that stay", {SIZE: "int((1 - share) * x.shape[3])"}, QUARTER),
    ("the share is taken for a number of pairs", {SIZE: "2 * int(share * x.shape[3])"}, QUARTER),
    ("the number of features is rounded up", {SIZE: "-int(-share * x.shape[3] // 2) * 2"}, ODD),
    ("the number of features is rounded to the nearest whole number",
     {SIZE: "round(share * x.shape[3])"}, ODD),
    ("always half of the features turn", {SIZE: "x.shape[3] // 2"}, QUARTER),
    ("turned the other way, by minus the angle", {"angles.sin()": "-angles.sin()"}, HALF),
    ("the halves are swapped without a minus",
     {TURNED: "torch.cat([a * cos + b * sin, a * sin + b * cos], 3).to(x.dtype)"}, HALF),
    ("theta is always 10000", {SPEEDS: "10000.0 ** (-i / R)"}, MOST),
    ("the speeds are turned round", {SPEEDS: "theta ** (i / R)"}, HALF),
    ("every pair has the speed of the next", {"arange(0, R, 2,": "arange(2, R + 2, 2,"}, HALF),
    ("tokens are counted from 0, whatever their positions",
     {"positions[:, None, :, None]": "torch.arange(x.shape[2])[None, None, :, None]"}, QUARTER),
    ("all rows have the positions of the first",
     {"positions[:, None, :, None]": "positions[:1, None, :, None]"}, ROWS),
    ("angles are rounded to the dtype of x",
     {COSINES: "angles.to(x.dtype).float().cos(), angles.to(x.dtype).float().sin()"}, BRAIN),
    ("positions are in the dtype of x, where 257 becomes 256",
     {"positions[:, None, :, None]": "positions.to(x.dtype)[:, None, :, None]"}, BRAIN),
    ("cosines and sines are rounded to the dtype of x",
     {COSINES: "angles.cos().to(x.dtype), angles.sin().to(x.dtype)"}, BRAIN),
    ("cosines, sines and products are in the dtype of x",
     {COSINES: "angles.cos().to(x.dtype), angles.sin().to(x.dtype)",
      PAIRS: "x[..., : R // 2], x[..., R // 2 : R]"}, BRAIN),
    ("the result stays float32", {TURNED: TURNED.removesuffix(".to(x.dtype)")}, BRAIN),
    ("a table of 4096 positions, which further ones are outside of",
     {f"{PLACES} * {SPEEDS}": f"(torch.arange(4096)[:, None] * {SPEEDS})[positions][:, None]"},
     LATE),
    ("positions above 4095 are given the last row of a table",
     {PLACES: "positions.clamp(max=4095)[:, None, :, None]"}, LATE),
    ("a view of inputs that are not contiguous",
     {"    R =": "    x.view(-1, 1, *x.shape[2:])\n    R ="}, HALF),
    ("a table of a million positions", {PLACES: "positions.clamp(max=2**20)[:, None, :, None]"},
     LATE),
    ("a table as long as the text, which later positions are outside of",
     {f"{PLACES} * {SPEEDS}":
      f"(torch.arange(x.shape[2])[:, None] * {SPEEDS})[positions % x.shape[2]][:, None]"}, QUARTER),
    ("what does not turn is detached",
     {JOINED: "torch.cat([turned, x[..., R:].detach()], 3)"}, GRADIENTS),
    ("the features of the caller are overwritten",
     {f"return {JOINED}": "x.data[..., :R] = turned.detach()\n    return x + 0"}, HALF),
    ("float64 is computed in float32",
     {"x if x.dtype == torch.float64 else x.float()": "x.float()"}, "float64 keeps its digits"),
]  # fmt: skip

CASES = (
    Case(HALF, half, "R = 4: features 0 and 2 are a pair, 1 and 3 are one, and 4 to 7 stay",
         points=3, teaching="small enough to write down"),
    Case(QUARTER,
         lambda g: call(normal(g, 2, 3, 5, 32), integers(g, 3, 60, 1, 5).repeat(2, 1), 0.25),
         "R = 8, and 8 divides the exponents: -2i/8", points=2, teaching="Qwen3-Next's share"),
    Case(MOST, most, "R = 12 of 16, and theta is 500000"),
    Case(ODD, odd_share, "4.56 features are 4, and 6.72 are 6", points=2),
    Case(WHOLE, lambda g: call(normal(g, 2, 3, 5, 8), integers(g, 3, 60, 1, 5).repeat(2, 1), 1.0),
         "with a share of 1 this is plain RoPE", teaching="the case that one knows"),
    Case(ROWS, per_row, "positions are (B, T): each row has its own"),
    Case(BRAIN, bfloat16,
         "bfloat16 has no 257, and keeps a cosine to three digits: round the result only", points=2,
         tolerance=(8e-3, 1e-3)),
    Case(LATE, late, "a text may be longer than a table: compute the angle of each position",
         tolerance=(1e-7, 1e-7)),
    Case("float64 keeps its digits", double, "nothing becomes float32",
         teaching="digits alone, at positions below 200"),
    Case(GRADIENTS, half, "what stays has a gradient too", gradient=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="partial_rope", function="partial_rope", page="9_since_qwen2/5_positions_today",
    minutes=20, difficulty=1,
    outcome="Turn a part of each head by the angles of a head of that size.",
    reference=reference, after=("rope",), cases=CASES, wrong=planted(WRONG),
    hints=(
        "Cut each head at R first. What would you write for the first part alone?",
        "The first part is a head of R features: its pairs are R/2 apart, and R divides the "
        "exponents. D has no place in it.",
        "Cut the head into R features and the rest, turn the first part as if it were a whole "
        "head of that width, and put both together again. What is D in the formula for the "
        "speeds now?",
    ),
)  # fmt: skip
