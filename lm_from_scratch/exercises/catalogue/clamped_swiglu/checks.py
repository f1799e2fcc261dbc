"""The gated product of gpt-oss: what is cut off, on which side, and before what."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers, normal
from lm_from_scratch.models.gpt_oss import clamped_swiglu


def reference(both: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """The package's own, of gate and up as they lie in its experts."""
    gate, up = both.unflatten(-1, (-1, 2)).unbind(-1)
    return clamped_swiglu(gate, up, alpha, limit)


# ------------------------------------------------------------------------------------- arguments


def inside(g: Generator) -> Call:
    return call(normal(g, 2, 5, 12).clamp(-5, 5))


def beyond(g: Generator) -> Call:
    """So far apart that of each part a number in ten and more lies beyond each limit."""
    return call(normal(g, 4, 6, 20, scale=6.0))


def narrow(g: Generator) -> Call:
    """A limit near 0, where gates below it still count."""
    return call(normal(g, 3, 4, 16, scale=2.0), 0.6, 1.3)


def low(g: Generator) -> Call:
    both = normal(g, 5, 16)
    both[:, ::4] = integers(g, -1000, -90, 5, 4).float()
    return call(both)


def not_numbers(function: Callable[..., Any], both: Tensor) -> Any:
    """The result, and whether its gradients hold NaN."""
    leaf = both.detach().requires_grad_()
    result = function(leaf)
    if not isinstance(result, Tensor) or not result.requires_grad:
        return result
    (grad,) = torch.autograd.grad(result.sum(), leaf)
    return {"the result": result, "a gradient is NaN": bool(grad.isnan().any())}


def half(g: Generator) -> Call:
    return call(normal(g, 3, 5, 16, scale=5.0, dtype=torch.bfloat16))


def double(g: Generator) -> Call:
    return call(normal(g, 2, 2, 3, 10, scale=3.0, dtype=torch.float64))


# ------------------------------------------------------------------------------- wrong answers

SPLIT = "both[..., ::2], both[..., 1::2]"
GATE, UP = "gate.clamp(max=limit)", "up.clamp(min=-limit, max=limit)"
SIGMOID = "torch.sigmoid(alpha * gate)"
RESULT = f"(up + 1) * gate * {SIGMOID}"
INSIDE, BEYOND, NARROW = "nothing cut off", "beyond the limit", "another alpha and limit"
LOW, HALF, DOUBLE, GRADIENT = "gates of -1000", "bfloat16", "float64, four axes", "gradients"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the gates are the first half of the columns, not every other one",
     {SPLIT: "both.chunk(2, dim=-1)"}, INSIDE),
    ("gate and up are swapped", {SPLIT: "both[..., 1::2], both[..., ::2]"}, INSIDE),
    ("nothing is added to up: a plain gated product", {"(up + 1)": "up"}, INSIDE),
    ("1 is added to the gate, not to up",
     {RESULT: f"up * (gate + 1) * {SIGMOID}"}, INSIDE),
    ("1 is added to the product", {RESULT: f"up * gate * {SIGMOID} + 1"}, INSIDE),
    ("silu, without alpha", {SIGMOID: "torch.sigmoid(gate)"}, INSIDE),
    ("alpha multiplies the gate outside the sigmoid, too",
     {SIGMOID: "alpha * torch.sigmoid(alpha * gate)"}, INSIDE),
    ("alpha multiplies the result, not what is in the sigmoid",
     {SIGMOID: "alpha * torch.sigmoid(gate)"}, INSIDE),
    ("the sigmoid alone, without the gate: GLU",
     {RESULT: f"(up + 1) * {SIGMOID}"}, INSIDE),
    ("GELU itself, which the sigmoid with 1.702 only comes near",
     {RESULT: "(up + 1) * torch.nn.functional.gelu(gate)"}, INSIDE),
    ("the sigmoid is taken of up", {SIGMOID: "torch.sigmoid(alpha * up)"}, INSIDE),
    ("gate and up are added, not multiplied",
     {RESULT: f"(up + 1) + gate * {SIGMOID}"}, INSIDE),
    ("a soft limit by tanh, which changes every number",
     {GATE: "limit * torch.tanh(gate / limit)", UP: "limit * torch.tanh(up / limit)"}, INSIDE),
    ("the gate is not cut off", {GATE: "gate"}, BEYOND),
    ("up is not cut off", {UP: "up"}, BEYOND),
    ("up is cut off from above alone, as the gate is", {UP: "up.clamp(max=limit)"}, BEYOND),
    ("up is cut off at 0 from below", {UP: "up.clamp(min=0.0, max=limit)"}, BEYOND),
    ("the gate is cut off from below, too", {GATE: "gate.clamp(-limit, limit)"}, NARROW),
    ("the gate is cut off from below at 0", {GATE: "gate.clamp(0.0, limit)"}, INSIDE),
    ("1 is added to up before it is cut off",
     {UP: "(up + 1).clamp(min=-limit, max=limit)", "(up + 1) *": "up *"}, BEYOND),
    ("the sigmoid is taken of the gate as it was",
     {GATE: "gate", RESULT: f"(up + 1) * gate.clamp(max=limit) * {SIGMOID}"}, NARROW),
    ("the product is cut off, not its parts",
     {GATE: "gate", UP: "up", RESULT: f"({RESULT}).clamp(-limit, limit)"}, BEYOND),
    ("the gate is cut off after the sigmoid",
     {GATE: "gate", RESULT: f"(up + 1) * (gate * {SIGMOID}).clamp(max=limit)"}, NARROW),
    ("always a limit of 7", {GATE: "gate.clamp(max=7.0)", UP: "up.clamp(min=-7.0, max=7.0)"},
     NARROW),
    ("always an alpha of 1.702", {SIGMOID: "torch.sigmoid(1.702 * gate)"}, NARROW),
    ("another limit by default", {"limit: float = 7.0": "limit: float = 10.0"}, BEYOND),
    ("gate / (1 + exp(-alpha gate)): infinite / infinite in its gradient",
     {RESULT: "(up + 1) * gate / (1 + torch.exp(-alpha * gate))"}, LOW),
    ("the sigmoid falls with the gate: a minus sign too many",
     {SIGMOID: "torch.sigmoid(-alpha * gate)"}, INSIDE),
    ("the result is float32",
     {RESULT: f"({RESULT}).to(torch.promote_types(both.dtype, torch.float32))"}, HALF),
    ("float64 is computed in float32",
     {RESULT: f"({RESULT}).float().to(both.dtype)"}, DOUBLE),
    ("only for three axes", {"gate, up = both": "_, _, _ = both.shape\n    gate, up = both"},
     DOUBLE),
    ("what is cut off keeps its gradient",
     {GATE: "gate + (gate.clamp(max=limit) - gate).detach()"}, GRADIENT),
    ("the sigmoid is detached", {SIGMOID: SIGMOID + ".detach()"}, GRADIENT),
    ("the limit is written into both", {GATE: "gate.clamp_(max=limit)"}, BEYOND),
]  # fmt: skip

CASES = (
    Case(INSIDE, inside,
         "every other column is a gate; the factor alpha stands in the sigmoid; 1 is added to up",
         points=3, teaching="the plain formula, and the first thing to read"),
    Case(BEYOND, beyond,
         "cut off gate and up first, then add 1 to up; up has a limit on both sides", points=3,
         teaching="the limits of the published model, before any others"),
    Case(NARROW, narrow,
         "use alpha and limit as they are given; a gate has no lower limit, and the sigmoid reads "
         "the gate that was cut off", points=2),
    Case(LOW, low, "exp(1702) is infinite, and infinite / infinite is NaN. torch.sigmoid is safe",
         use=not_numbers),
    Case(HALF, half, "the result has the dtype of both", tolerance=(3e-2, 3e-2)),
    Case(DOUBLE, double, "float64 must not pass through float32; all axes but the last are alike"),
    Case(GRADIENT, beyond, "what is cut off has a gradient of 0, and all else has its own",
         gradient=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="clamped_swiglu", function="clamped_swiglu", page="9_since_qwen2/13_model_of_the_year",
    minutes=10, difficulty=1,
    outcome="Write the clamped gated product of gpt-oss: which side is cut off, and before what.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Take one gate of 9 and one up of -9, and compute by hand. What is left of each after the "
        "limit of 7?",
        "`both[..., ::2]` takes every other column, beginning with the first. "
        "`x.clamp(max=7.0)` has no lower limit.",
        "Three steps: take the two parts apart, cut each off, and multiply. The 1 comes after the "
        "limit, and everything later reads the gate that was cut off.",
    ),
)  # fmt: skip
