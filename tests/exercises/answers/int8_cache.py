"""Answers to int8_cache: other right ones, and wrong ones of a second person."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lm_from_scratch.exercises.catalogue.int8_cache.checks import CODES, FINE, GUARD

Parts = Sequence[Tensor]


class Nearest:
    """The index of the nearest of all 256 marks."""

    def __init__(self, group=32):
        self.group = group

    def encode(self, x):
        D = x.shape[-1]
        size = D if self.group > D else self.group
        if D // size * size != D:
            raise ValueError(D)
        x = x.reshape(*x.shape[:-1], D // size, size)
        low, high = torch.aminmax(x, dim=-1, keepdim=True)
        step = ((high.double() - low.double()) / 255).to(x.dtype)
        marks = low.double() + step.double() * torch.arange(256)  # (..., 256)
        away = (x.double()[..., None] - marks[..., None, :]).abs()
        return away.argmin(-1).to(torch.uint8), low, step

    def decode(self, parts):
        codes, low, step = (part.double() for part in parts)
        x = torch.addcmul(low, step, codes)
        return x.to(parts[1].dtype).reshape(*x.shape[:-2], -1)


class ByLoop:
    """Group by group."""

    def __init__(self, group=32):
        self.group = group

    def encode(self, x):
        size = min(self.group, x.size(-1))
        columns: list[list[Tensor]] = [[], [], []]
        if x.size(-1) % size != 0:
            raise ValueError(size)
        for part in x.split(size, dim=-1):
            fine = part if part.dtype == torch.float64 else part.float()
            low = fine.min(-1, keepdim=True).values
            step = ((fine.max(-1, keepdim=True).values - low) / 255).to(x.dtype)
            inverse = (1 / step.to(fine.dtype)).nan_to_num(posinf=0.0)
            codes = torch.floor((fine - low) * inverse + 0.5)
            columns[0].append(codes.clamp(0, 255).to(torch.uint8))
            columns[1].append(low.to(x.dtype))
            columns[2].append(step)
        return [torch.stack(parts, -2) for parts in columns]

    def decode(self, parts):
        codes, low, step = parts
        fine = torch.float64 if low.dtype == torch.float64 else torch.float32
        groups = codes.to(fine) * step.to(fine) + low.to(fine)
        return torch.cat(groups.to(low.dtype).unbind(-2), -1)


RIGHT = [
    Nearest, ByLoop,
    # equal numbers as a case of their own
    {CODES: "((fine - low) / step.masked_fill(step == 0, torch.inf)).add(0.5).floor()"
      ".minimum(torch.tensor(255.0))", GUARD: ""},
    # float64 inside
    {FINE: "fine = x.double()",
     "fine = torch.promote_types(low.dtype, torch.float32)": "fine = torch.float64"},
]  # fmt: skip

STEP = "((high - low) / 255).to(x.dtype)"
GROUPS, RESULT = "x.unflatten(-1, (-1, group))", "return x.to(low.dtype).flatten(-2)"

WRONG = [
    ("the step is never below 1e-8", {STEP: f"{STEP}.clamp(min=1e-8)"}),
    ("a small constant is added to the step",
     {CODES: CODES.replace("/ step", "/ (step.to(fine) + 1e-8)"), GUARD: ""}),
    ("a range that is symmetric around 0",
     {STEP: "(fine.abs().amax(-1, keepdim=True) / 127).to(x.dtype)\n        low = -128 * step"}),
    ("every fourth feature is a group, not four neighbours",
     {GROUPS: "x.unflatten(-1, (group, -1)).mT", RESULT: "return x.to(low.dtype).mT.flatten(-2)"}),
    ("groups across tokens", {GROUPS: f"x.mT.reshape({GROUPS}.shape)"}),
    ("decode returns float32", {RESULT: "return x.float().flatten(-2)"}),
    ("codes are int8",
     {"codes.to(torch.uint8)": "(codes - 128).to(torch.int8)",
      "step.to(fine) * codes": "step.to(fine) * (codes.to(fine) + 128)"}),
    ("the minimum is subtracted in place",
     {"codes = ((fine - low)": "fine -= low\n        codes = (fine"}),
]  # fmt: skip
