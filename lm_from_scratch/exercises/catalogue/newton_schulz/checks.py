"""Muon's step: an odd polynomial of a matrix, on the smaller side, after the right norm."""

import math
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.optim.muon import orthogonalize, scale_of


def reference(G: Tensor, steps: int = 5) -> Tensor:
    """The package's direction, with the scale that matches AdamW's."""
    m, n = G.shape
    return orthogonalize(G, steps) * scale_of(m, n)


# ------------------------------------------------------------------------------------- arguments


def gradient(g: Generator, m: int, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A matrix with singular values from 1 to about a hundredth, times 3 million: a small number
    that is added to its norm does not show."""
    small = min(m, n)
    U = torch.linalg.qr(torch.randn(m, small, generator=g, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(n, small, generator=g, dtype=torch.float64)).Q
    sizes = torch.rand(small, generator=g, dtype=torch.float64) * 4
    sizes[0] = 0
    return (3e6 * (U * (-sizes).exp()) @ V.mT).to(dtype)


def tall(g: Generator) -> Call:
    return call(gradient(g, 10, 3))


def faint(g: Generator) -> Call:
    """A gradient of norm 1e-5, and more below 1 in every entry."""
    return call(gradient(g, 7, 4) * 1e-12)


def below(g: Generator) -> Call:
    """A norm of about 1e-9: it is not brought to 1."""
    return call(gradient(g, 4, 6) * 1e-16, 1)


def single(g: Generator) -> Call:
    return call(gradient(g, 12, 7, torch.float32))


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that is made; views are not made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not out._is_view():
            self.numbers = max(self.numbers, out.numel())
        return out


def sizes(function: Any, G: Tensor) -> dict[str, Any]:
    """The result for a matrix and for its transpose, and whether a tensor was larger."""
    results: dict[str, Any] = {}
    for name, given in (("tall", G), ("wide", G.mT.contiguous())):
        with torch.no_grad(), Largest() as largest:
            results[name] = function(given)
        results[f"{name}: a tensor had more than m * n numbers"] = largest.numbers > G.numel()
    return results


def beside_one(function: Any, G: Tensor) -> dict[str, Tensor]:
    """The step of zeros, and that of a matrix with a single 1."""
    single = G.clone()
    single[0, 0] = 1.0
    return {"the step of zeros": function(G), "the step of a single 1": function(single)}


def strength(function: Any, G: Tensor, steps: int) -> dict[str, Tensor]:
    """The singular values of the result, as a part of the scale."""
    step = function(G, steps)
    finite = bool(step.isfinite().all())  # or LAPACK complains on the terminal
    values = torch.linalg.svdvals(step) if finite else step.new_full((min(G.shape),), torch.nan)
    return {"singular values, by 0.2 sqrt(max(m, n))": values / (0.2 * math.sqrt(max(G.shape)))}


# ------------------------------------------------------------------------------- wrong answers

WIDE, TALL, SQUARE = "a wide matrix", "a tall matrix", "a square matrix"
FEW, NONE, MANY = "two steps", "no step", "nine steps"
FAINT, BELOW, ZERO = "a faint gradient", "a norm below 1e-7", "zeros"
SIZES, SINGLE = "no tensor larger than the matrix", "float32"
NORM = "torch.linalg.matrix_norm(X)"
FLIP = "X = G.mT if m > n else G"
BACK = "return X.mT if m > n else X"
STEP = "X = a * X + (b * A + c * A @ A) @ X"
SCALE = "0.2 * math.sqrt(max(m, n))"
COEFFICIENTS_LINE = "a, b, c = COEFFICIENTS"


#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the exact orthogonal matrix: the usual coefficients do not converge to it",
     {"for _ in range(steps)":
      "U, _, Vh = torch.linalg.svd(X, full_matrices=False)\n    X = U @ Vh\n    for _ in range(0)"},
     WIDE),
    ("the square of each entry of the product, not of the matrix",
     {"c * A @ A": "c * A * A"}, WIDE),
    ("nothing is divided by the norm, and the powers overflow",
     {f" / {NORM}.clamp(min=1e-7)": " * 1.0"}, WIDE),
    ("divided by the largest singular value", {NORM: "torch.linalg.matrix_norm(X, 2)"}, WIDE),
    ("divided by the largest entry", {NORM: "X.abs().max()"}, MANY),
    ("every row is divided by its own norm", {NORM: "X.norm(dim=1, keepdim=True)"}, WIDE),
    ("the norm is not rooted", {NORM: "X.square().sum()"}, WIDE),
    ("zeros by zero are NaN", {".clamp(min=1e-7)": ""}, ZERO),
    ("something small is added to every norm", {".clamp(min=1e-7)": ".add(1e-7)"}, FAINT),
    ("a norm below 1 counts as 1", {"min=1e-7": "min=1.0"}, FAINT),
    ("another smallest norm", {"min=1e-7": "min=1e-12"}, BELOW),
    ("the norm is taken again in each step",
     {"A = X @ X.mT": "X = X / torch.linalg.matrix_norm(X).clamp(min=1e-7)\n        A = X @ X.mT"},
     WIDE),
    ("a tall matrix is not turned back", {BACK: "return X"}, TALL),
    ("a tall matrix is multiplied on its long side", {FLIP: "X = G", BACK: "return X"}, SIZES),
    ("a wide matrix is multiplied on its long side",
     {FLIP: "X = G.mT if m < n else G", BACK: "return X.mT if m < n else X"}, SIZES),
    ("the cubic polynomial that converges to 1",
     {COEFFICIENTS_LINE: "a, b, c = 1.5, -0.5, 0.0"}, WIDE),
    ("the polynomial of degree 5 that converges to 1",
     {COEFFICIENTS_LINE: "a, b, c = 1.875, -1.25, 0.375"}, WIDE),
    ("b and c are exchanged", {COEFFICIENTS_LINE: "a, c, b = COEFFICIENTS"}, FEW),
    ("the sign of b is lost", {STEP: "X = a * X + (-b * A + c * A @ A) @ X"}, FEW),
    ("powers of the entries, not of the matrix", {STEP: "X = a * X + b * X**3 + c * X**5"}, WIDE),
    ("the fifth power is left out", {" + c * A @ A": ""}, FEW),
    ("the first power is left out", {"a * X + (": "("}, FEW),
    ("always five steps", {"range(steps)": "range(5)"}, FEW),
    ("one step too many", {"range(steps)": "range(steps + 1)"}, NONE),
    ("one step too few", {"range(steps)": "range(steps - 1)"}, FEW),
    ("the scale is left out", {f" * {SCALE}": ""}, WIDE),
    ("the scale of the smaller side", {"max(m, n)": "min(m, n)"}, WIDE),
    ("the scale is not rooted", {SCALE: "0.2 * max(m, n)"}, WIDE),
    ("the scale of Muon's first version: tall matrices alone",
     {SCALE: "math.sqrt(max(1, m / n))"}, WIDE),
    ("the scale without 0.2", {"0.2 * math": "math"}, WIDE),
    ("float64 is computed in float32",
     {FLIP: "X = G.mT.float() if m > n else G.float()",
      BACK: "X = X.to(G.dtype)\n    return X.mT if m > n else X"}, WIDE),
    ("computed in bfloat16", {FLIP: "X = G.mT.bfloat16() if m > n else G.bfloat16()",
      BACK: "X = X.to(G.dtype)\n    return X.mT if m > n else X"}, SINGLE),
    ("the gradient of the caller is divided by its norm",
     {f"X = X / {NORM}.clamp(min=1e-7)": f"X /= {NORM}.clamp(min=1e-7)"}, WIDE),
]  # fmt: skip

CASES = (
    Case(WIDE, lambda g: call(gradient(g, 4, 9)),
         "divide by the Frobenius norm, then five times a X + (b A + c A A) X with A = X Xᵀ",
         points=3, teaching="the formula, on the side that needs no transpose"),
    Case(TALL, tall, "transpose a tall matrix first, and the result back", points=2,
         teaching="the other side"),
    Case(SQUARE, lambda g: call(gradient(g, 6, 6)), "m = n needs no transpose", points=2),
    Case(FEW, lambda g: call(gradient(g, 3, 7), 2), "steps is an argument",
         teaching="before the values are alike"),
    Case(NONE, lambda g: call(gradient(g, 8, 5), 0), "only the division and the scale are left",
         teaching="what is around the repetitions"),
    Case(MANY, lambda g: call(gradient(g, 5, 6), 9),
         "the values stay near 1, however often: none of them settles there", use=strength,
         teaching="what the polynomial does to values"),
    Case(FAINT, faint, "the size of the gradient does not matter", points=2,
         teaching="a late gradient"),
    Case(BELOW, below, "a norm of 1e-9 is divided by 1e-7"),
    Case(ZERO, lambda g: call(torch.zeros(3, 5)), "0 by 1e-7 is 0", use=beside_one,
         teaching="a weight that nothing has used"),
    Case(SIZES, tall, "A has as many rows as X: for a tall matrix transpose first", use=sizes,
         points=3),
    Case(SINGLE, single, "the dtype of the gradient", tolerance=(1e-3, 1e-3),
         teaching="the usual dtype"),
)  # fmt: skip

EXERCISE = Exercise(
    name="newton_schulz", function="newton_schulz", page="7_optimizers/6_muon", minutes=20,
    difficulty=2,
    outcome="Make the singular values of a matrix nearly equal with a few products, on its small "
            "side.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Try one number first: what does a σ + b σ³ + c σ⁵ make of 0.01, five times? And of 1?",
        "X Xᵀ X is (X Xᵀ) X: one product A = X Xᵀ serves both powers. Which of X Xᵀ and Xᵀ X is "
        "the smaller one?",
        "The order matters: which side lies down, when is the norm taken, and what keeps it "
        "from being 0? The factor for the shape comes after the last round, and the matrix "
        "must come back as it was lying.",
    ),
)  # fmt: skip
