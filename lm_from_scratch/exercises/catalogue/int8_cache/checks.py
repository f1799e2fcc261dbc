"""Eight bits a number: whose ruler, which marks, and what is rounded when."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.cache.codec import Quantized
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers, normal, refusal

Make = Callable[..., Any]  # what the student writes


def reference(group: int = 32) -> Quantized:
    """The package's codec."""
    return Quantized(bits=8, group=group)


# -------------------------------------------------------------------------------- how it is used


def named(parts: Any) -> Any:
    if isinstance(parts, (tuple, list)) and len(parts) == 3:
        names = ("the tensor of codes", "the tensor of smallest numbers", "the tensor of steps")
        return dict(zip(names, parts, strict=True))
    return parts


def encode(make: Make, x: Tensor, **group: int) -> Any:
    return named(make(**group).encode(x))


def decode(make: Make, parts: list[Tensor]) -> Any:
    return make().decode(parts)


def and_back(make: Make, x: Tensor, **group: int) -> Any:
    codec = make(**group)
    parts = codec.encode(x)
    found = named(parts)
    return found | {"what decode gives": codec.decode(parts)} if isinstance(found, dict) else found


def two_tensors(make: Make, small: Tensor, large: Tensor, group: int) -> Any:
    return {
        "encode, a small range": encode(make, small, group=group),
        "encode, a large range": encode(make, large, group=group),
    }


def two_heads(make: Make, wide: Tensor, narrow: Tensor) -> Any:
    codec = make()
    return {
        "encode, heads of 6": named(codec.encode(narrow)),
        "encode, heads of 64": named(codec.encode(wide)),
        "decode, heads of 6": codec.decode(codec.encode(narrow)),
    }


def refuse(make: Make, x: Tensor, group: int) -> Any:
    codec = make(group=group)
    found = {"a head that is cut into whole groups": named(codec.encode(x[..., :-2].contiguous()))}
    return found | {"a head with two features more": refusal()(codec.encode, x)}


# ------------------------------------------------------------------------------------- arguments


def on_rulers(
    g: Generator, *shape: int, dtype: torch.dtype = torch.float32, off: float = 0.35
) -> Tensor:
    """Numbers (B, H, T, G N) near the marks of rulers of the step 2^e, others for each group of N.

    Each group reaches from its first mark to its last. No number is half-way between two marks, so
    that every right answer finds the same codes.
    """
    B, H, T, G, _ = shape
    marks = integers(g, 1, 255, *shape).double()
    marks += (torch.rand(shape, generator=g) * 2 - 1) * off
    marks[..., 0], marks[..., 1] = 0, 255
    order = torch.rand(shape, generator=g).argsort(-1)
    step = 2.0 ** integers(g, -6, 1, B, H, T, G, 1).double()
    low = integers(g, -250, 0, B, H, T, G, 1)
    return ((low + marks.gather(-1, order)) * step).to(dtype).flatten(-2)


def parts(g: Generator) -> Call:
    codes = integers(g, 0, 256, 2, 3, 4, 2, 5).to(torch.uint8)
    return call(parts=[codes, normal(g, 2, 3, 4, 2, 1), normal(g, 2, 3, 4, 2, 1).abs()])


def outlier(g: Generator) -> Call:
    x = on_rulers(g, 2, 3, 5, 3, 4)
    x[..., 6] += 2.0**14  # beside it the other groups must keep their fine rulers
    x[..., 4], x[..., 5], x[..., 7] = 0.0, 2.0**7, 2.0**8
    return call(x=x, group=4)


def equal_numbers(g: Generator) -> Call:
    x = normal(g, 2, 3, 4, 1).expand(2, 3, 4, 8).clone()
    x[0, 0] = 0.0
    return call(x=x, group=4)


def half_ranges(g: Generator) -> Call:
    """Groups with a step below half of the smallest float16, and with a range above the largest."""
    small = integers(g, 0, 127, 1, 2, 3, 8) * 2.0**-24
    marks = integers(g, 1, 255, 2, 3, 4, 8)
    marks[..., 2], marks[..., 5] = 0, 255
    large = ((marks - 127) * 512.0).clamp(max=65024)
    return call(small=small.half(), large=large.half(), group=8)


def kept_step(g: Generator) -> Call:
    """The step is 1.0108; bfloat16 keeps 1.0078, so that the last mark would be 256."""
    step = torch.tensor(257.75 / 255).bfloat16().float()
    marks = integers(g, 1, 250, 2, 3, 4, 8)
    x = -30.75 + step * marks
    x[..., 1], x[..., 6] = -30.75, 227.0
    scale = 2.0 ** integers(g, -4, 3, 2, 3, 4, 1)
    return call(x=(x * scale).bfloat16(), group=8)


# ------------------------------------------------------------------------------- wrong answers

FINE = "fine = x.to(torch.promote_types(x.dtype, torch.float32))"
ENDS = "low, high = fine.amin(-1, keepdim=True), fine.amax(-1, keepdim=True)"
STEP = "((high - low) / 255).to(x.dtype)"
CODES = "((fine - low) / step).round().clamp(max=255)"
GUARD = "codes = torch.where(step == 0, 0.0, codes)"
CUT = "x = x.unflatten(-1, (-1, group))"
GROUP = "group = min(self.group, x.shape[-1])"
RETURN = "return codes.to(torch.uint8), low.to(x.dtype), step"
CHECK = "if x.shape[-1] % group:"
BACK = "x = step.to(fine) * codes + low"
RESULT = "return x.to(low.dtype).flatten(-2)"


def over(axes: str) -> str:
    return (
        f"low, high = (e.expand_as(fine[..., :1]) for e in (fine.amin({axes}, keepdim=True), "
        f"fine.amax({axes}, keepdim=True)))"
    )


ENCODE, OUTLIER = "encode, one group a head", "groups of four, one with an outlier"
DECODE, DEFAULT = "decode", "group by default, heads of 64 and of 6"
HALF, TINY = "float16, a small and a large range", "numbers around 1e-9"
BFLOAT = "bfloat16, a step that is rounded"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("codes are cut off, not rounded", {CODES: CODES.replace(".round()", "")}, ENCODE),
    ("256 steps from the smallest to the largest number, not 255",
     {STEP: STEP.replace("255", "256")}, ENCODE),
    ("a symmetric ruler: the largest size over 127, and no smallest number",
     {STEP: "(fine.abs().amax(-1, keepdim=True) / 127).to(x.dtype)",
      CODES: "(fine / step).round().clamp(-127, 127)",
      RETURN: "return codes.to(torch.int8), torch.zeros_like(step), step"}, ENCODE),
    ("codes are counted from 0, not from the smallest number",
     {CODES: "(fine / step).round().clamp(0, 255)"}, ENCODE),
    ("a ruler from minus the largest size to the largest size",
     {STEP: "(2 * fine.abs().amax(-1, keepdim=True) / 255).to(x.dtype)",
      "codes = ((fine - low)": "low = -fine.abs().amax(-1, keepdim=True)\n"
      "        codes = ((fine - low)"}, ENCODE),
    ("groups go across the tokens, not along the features",
     {CUT: "x = x.mT.reshape(*x.shape[:3], -1, group)"}, ENCODE),
    ("one ruler for the whole tensor", {ENDS: over("(0, 1, 2, 3, 4)")}, ENCODE),
    ("one ruler for all groups of a head", {ENDS: over("(3, 4)")}, OUTLIER),
    ("one ruler for all tokens of a head", {ENDS: over("(2, 4)")}, ENCODE),
    ("a ruler for each channel, over the tokens",
     {ENDS: "low, high = fine.amin(2, keepdim=True), fine.amax(2, keepdim=True)"}, ENCODE),
    ("codes in int8, where 128 becomes -128",
     {RETURN: "return codes.to(torch.int8), low.to(x.dtype), step"}, ENCODE),
    ("the largest number is kept instead of the step",
     {RETURN: "return codes.to(torch.uint8), low.to(x.dtype), high.to(x.dtype)"}, ENCODE),
    ("decode adds half a step", {BACK: "x = step.to(fine) * (codes + 0.5) + low"}, DECODE),
    ("decode multiplies and adds in uint8",
     {BACK: "x = (step.to(fine) * codes).to(torch.uint8) + low"}, DECODE),
    ("decode leaves the groups apart", {RESULT: "return x.to(low.dtype)"}, DECODE),
    ("every fourth feature is a group, not four neighbours",
     {CUT: "x = x.unflatten(-1, (group, -1)).mT"}, OUTLIER),
    ("a head is one group, whatever `group` says", {GROUP: "group = x.shape[-1]"}, OUTLIER),
    ("a view of a tensor that is not contiguous",
     {CUT: "x = x.view(-1, group).view(*x.shape[:3], -1, group)"}, OUTLIER),
    ("another group than 32 by default",
     {GROUP: "group = min(self.group * 2 if self.group == 32 else self.group, x.shape[-1])"},
     DEFAULT),
    ("a head smaller than a group is refused", {GROUP: "group = self.group"}, DEFAULT),
    ("a small head makes the groups of later heads small",
     {GROUP: "group = self.group = min(self.group, x.shape[-1])"}, DEFAULT),
    ("a step of 0 is kept as 1",
     {GUARD: GUARD + "\n        step = step.masked_fill(step == 0, 1.0)"},
     "groups of equal numbers"),
    ("where the step is 0, or rounded to 0, the codes are not 0", {GUARD: ""}, HALF),
    ("a small constant is added to the step",
     {CODES: CODES.replace("/ step", "/ (step + 1e-8)")}, TINY),
    ("the step is at least 1e-8", {CODES: CODES.replace("/ step", "/ step.clamp(min=1e-8)")}, TINY),
    ("the range is computed in half precision",
     {STEP: "(high.to(x.dtype) - low.to(x.dtype)) / 255"}, HALF),
    ("no float32 at all", {FINE: "fine = x"}, HALF),
    ("codes are counted in the step before it is rounded",
     {CODES: CODES.replace("/ step", "/ ((high - low) / 255)")}, BFLOAT),
    ("a code of 256 becomes 0", {CODES: CODES.replace(".clamp(max=255)", "")}, BFLOAT),
    ("minimum and step are kept in float32",
     {RETURN: "return codes.to(torch.uint8), low, step.to(low.dtype)"}, BFLOAT),
    ("decode computes in half precision", {BACK: "x = step * codes + low"}, BFLOAT),
    ("decode returns float32", {RESULT: "return x.flatten(-2)"}, BFLOAT),
    ("float64 is computed in float32",
     {FINE: "fine = x.float()",
      "fine = torch.promote_types(low.dtype, torch.float32)": "fine = torch.float32",
      "codes + low": "codes + low.float()"}, "float64 keeps its digits"),
    ("features that do not fit into whole groups are not refused",
     {CHECK: "x = x[..., : x.shape[-1] // group * group]\n        if False:"},
     "features that do not fit into groups"),
]  # fmt: skip

CASES = (
    Case(ENCODE, lambda g: call(x=on_rulers(g, 2, 3, 4, 1, 8), group=8),
         "the smallest number has code 0, the largest 255, the others the nearest mark", points=2,
         use=encode, teaching="the three parts in their plain form"),
    Case(DECODE, parts,
         "the smallest number plus code times step; the groups of a head side by side", points=2,
         use=decode, teaching="decode alone: what encode does wrong cannot disturb it"),
    Case(OUTLIER, outlier,
         "each group of 4 neighbours has its own smallest number and step", points=2, use=encode,
         teaching="a ruler of its own for each group, where a common one would be useless"),
    Case(DEFAULT,
         lambda g: call(wide=on_rulers(g, 1, 2, 3, 2, 32), narrow=on_rulers(g, 2, 1, 3, 1, 6)),
         "64 features are two groups of 32, and 6 are one group of 6", use=two_heads),
    Case("groups of equal numbers", equal_numbers, "the step is 0, and 0 / 0 is not a number",
         use=and_back, teaching="zeros and equal numbers, which every cache meets"),
    Case(HALF, half_ranges,
         "the range of a group may be above 65504, the largest float16; and its step may be 0 "
         "though its numbers differ: then all codes are 0", points=2, use=two_tensors),
    Case(TINY, lambda g: call(x=on_rulers(g, 1, 2, 3, 2, 4) * 2.0**-30, group=4),
         "a constant that is added to the step, or a lower limit, is too large here",
         tolerance=(1e-5, 0.0), use=and_back),
    Case(BFLOAT, kept_step,
         "257.75 / 255 is not a bfloat16: count in the step that you keep, stop at 255, and go "
         "back in float32", points=2, tolerance=(1e-3, 0.0), use=and_back),
    Case("float64 keeps its digits",
         lambda g: call(x=on_rulers(g, 2, 1, 3, 2, 5, dtype=torch.float64) / 3, group=5),
         "convert to float32 only what has fewer digits", use=and_back),
    Case("features that do not fit into groups",
         lambda g: call(x=on_rulers(g, 1, 2, 3, 1, 10), group=4),
         "10 features are not cut into groups of 4: refuse them", use=refuse),
)  # fmt: skip

EXERCISE = Exercise(
    name="int8_cache", function="EightBits", page="5_caching/3_quantized_cache", minutes=30,
    difficulty=2,
    outcome="Write a codec of eight bits a number so that its error is at most half a step, in "
            "every dtype and for groups of equal numbers.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Give the groups an axis of their own first: `x.unflatten(-1, (-1, N))` is "
        "(B, H, T, G, N). Then minimum and maximum over the last axis.",
        "`keepdim=True` leaves (B, H, T, G, 1), which is what you keep and what broadcasts. Which "
        "of your numbers are rounded to the dtype of x, and at which moment?",
        "Round the step to the dtype of x before you count in it, and count in float32: a code may "
        "then come out as 256. Where the step is 0, the division gives no number.",
    ),
)  # fmt: skip
