"""The gated MLP: which map goes through silu, and how weights of nn.Linear are used."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal
from lm_from_scratch.layers.gated_mlp import swiglu


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The package's own product between three linear maps."""
    return F.linear(swiglu(F.linear(x, gate), F.linear(x, up)), down)


def weights(
    g: Generator, size: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down; each map keeps the size of numbers."""
    gate, up = (normal(g, width, size, scale=size**-0.5, dtype=dtype) for _ in range(2))
    return gate, up, normal(g, size, width, scale=width**-0.5, dtype=dtype)


def plain(g: Generator) -> Call:
    return call(normal(g, 2, 5, 6, scale=2), *weights(g, 6, 16))


def large_gate(g: Generator) -> Call:
    """Gates of 100 to 1000, of both signs, while up and down are of usual size."""
    x = normal(g, 4, 6)
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    gate, up, down = weights(g, 6, 10)
    gate[:, 0] = 150.0 + 80.0 * torch.arange(10)
    return call(x, gate, up, down)


def not_numbers(function: Callable[..., Any], *args: Tensor) -> Any:
    """The result, and which gradients hold NaN."""
    leaves = [x.detach().requires_grad_() for x in args]
    result = function(*leaves)
    if not isinstance(result, Tensor) or not result.requires_grad:
        return result
    reached = torch.autograd.grad(result.sum(), leaves, allow_unused=True)
    names = zip(("x", "gate", "up", "down"), reached, strict=True)
    found = [name for name, x in names if x is not None and x.isnan().any()]
    return {"the result": result, "the list of gradients that hold NaN": found}


def bfloat16(g: Generator) -> Call:
    x = normal(g, 2, 3, 6, dtype=torch.bfloat16)
    return call(x, *weights(g, 6, 16, dtype=torch.bfloat16))


def double(g: Generator) -> Call:
    x = normal(g, 2, 2, 3, 6, dtype=torch.float64)
    return call(x, *weights(g, 6, 10, dtype=torch.float64))


# ------------------------------------------------------------------------------- wrong answers

SILU, PRODUCT = "z * torch.sigmoid(z)", "(passed * (x @ up.T)) @ down.T"
PLAIN, SQUARE, LARGE = "three maps and a gate", "as wide as the state, I = C", "a large gate"
HALF, DOUBLE, GRADIENT = "bfloat16", "float64, four axes", "gradients of all arguments"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("gate and up are swapped: silu is applied to up",
     {"x @ gate.T": "x @ up.T", "(x @ up.T))": "(x @ gate.T))"}, PLAIN),
    ("no silu: the gate itself is multiplied", {SILU: "z"}, PLAIN),
    ("the sigmoid of the gate alone, without the gate: GLU, not SwiGLU",
     {SILU: "torch.sigmoid(z)"}, PLAIN),
    ("GELU instead of silu", {SILU: "torch.nn.functional.gelu(z)"}, PLAIN),
    ("1.702 in the sigmoid, which is a form of GELU",
     {SILU: "z * torch.sigmoid(1.702 * z)"}, PLAIN),
    ("ReLU instead of silu", {SILU: "torch.relu(z)"}, PLAIN),
    ("tanh instead of the sigmoid", {SILU: "z * torch.tanh(z)"}, PLAIN),
    ("softmax instead of silu", {SILU: "torch.softmax(z, -1)"}, PLAIN),
    ("softmax instead of the sigmoid", {SILU: "z * torch.softmax(z, -1)"}, PLAIN),
    ("up goes through silu too", {"(x @ up.T)": "torch.nn.functional.silu(x @ up.T)"}, PLAIN),
    ("silu after the product, not before",
     {PRODUCT: "torch.nn.functional.silu(z * (x @ up.T)) @ down.T", SILU: "z"}, PLAIN),
    ("gate and up are added, not multiplied", {"passed * (x": "passed + (x"}, PLAIN),
    ("up is left out", {"passed * (x @ up.T)": "passed"}, PLAIN),
    ("x itself is added: the sum belongs to the block, not to the MLP",
     {"return (": "return x + ("}, PLAIN),
    ("no weight is transposed, as if the inputs came first",
     {"gate.T": "gate", "up.T": "up", "down.T": "down"}, SQUARE),
    ("down is not transposed", {"down.T": "down"}, SQUARE),
    ("weights are transposed until the shapes fit",
     {"z = x @ gate.T": "def fit(y, w):\n"
      "        return y @ w if y.shape[-1] == w.shape[0] else y @ w.T\n"
      "    z = fit(x, gate)", PRODUCT: "fit(passed * fit(x, up), down)"}, SQUARE),
    ("up is mapped from the gate, one after the other", {"x @ up.T": "z @ up"}, PLAIN),
    ("z * exp(z) / (1 + exp(z)), where a large exponential is infinite",
     {SILU: "z * torch.exp(z) / (1 + torch.exp(z))"}, LARGE, "a result with NaN is never named"),
    ("z / (1 + exp(-z)): infinite / infinite in its gradient where the gate is far below 0",
     {SILU: "z / (1 + torch.exp(-z))"}, LARGE),
    ("the gate is limited to 20", {SILU: "z.clamp(-20, 20) * torch.sigmoid(z)"}, LARGE),
    ("the result is float32",
     {PRODUCT: f"({PRODUCT}).to(torch.promote_types(x.dtype, torch.float32))"}, HALF),
    ("float64 is computed in float32",
     {SILU: "z.float() * torch.sigmoid(z.float())",
      PRODUCT: "(passed.to(x.dtype) * (x @ up.T)) @ down.T"}, DOUBLE),
    ("only for three axes", {"z = x": "b, t, c = x.shape\n    z = x"}, DOUBLE),
    ("a view of a tensor that is not contiguous",
     {"    z =": "    x.view(-1, x.shape[-1])\n    z ="}, PLAIN),
    ("the gate is detached", {SILU: "(z * torch.sigmoid(z)).detach()"}, GRADIENT),
    ("the sigmoid is detached", {SILU: "z * torch.sigmoid(z).detach()"}, GRADIENT),
    ("written into x itself",
     {"return (passed * (x @ up.T)) @ down.T": "return x.copy_((passed * (x @ up.T)) @ down.T)"},
     PLAIN),
]  # fmt: skip

CASES = (
    Case(PLAIN, plain,
         "silu of the gate's map, times the other map, then back to C. Weights are stored "
         "(outputs, inputs), so a map is x @ weight.T", points=3,
         teaching="the plain formula, and the first thing to read"),
    Case(SQUARE, lambda g: call(normal(g, 3, 2, 7, scale=2), *weights(g, 7, 7)),
         "nn.Linear stores the outputs first: x @ weight.T. Where I = C, a missing .T raises no "
         "error", points=2),
    Case(LARGE, large_gate,
         "exp(100) is infinite in float32, and infinite / infinite is NaN, in the result or in a "
         "gradient. torch.sigmoid is safe", use=not_numbers, tolerance=(1e-4, 1e-2)),
    Case(HALF, bfloat16, "the result has the dtype of x", tolerance=(3e-2, 3e-2)),
    Case(DOUBLE, double,
         "float64 must not pass through float32; all axes of x but the last are alike", points=2),
    Case(GRADIENT, plain, "the gate is learned too: nothing may be detached", gradient=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="swiglu", function="gated_mlp", page="2_qwen2/3_swiglu", minutes=15, difficulty=1,
    outcome="Write the gated MLP from three weights, so that gate and up are not confused.",
    reference=gated_mlp, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Draw the shapes: (..., C) to (..., I), twice; one product; (..., I) to (..., C).",
        "`x @ gate.T` is what `nn.Linear` computes, also `F.linear(x, gate)`.",
        "Three products: two from the width of the model to that of the MLP, one back. Each "
        "matrix is stored as (out, in), so which of them has to be transposed? Only one of the "
        "two branches goes through SiLU.",
    ),
)  # fmt: skip
