"""GaLore's projection: which side, which directions, back again, and what stays in memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal
from lm_from_scratch.optim.galore_basis import project, project_back, sides, singular_basis


class PackageProjection:
    """The package's functions in the shape of the exercise."""

    method = "svd"

    def __init__(self, grad: Tensor, rank: int, projection_type: str = "std") -> None:
        self.left, self.right = singular_basis(
            grad, rank, *sides((grad.shape[0], grad.shape[1]), projection_type), self.method
        )
        self.basis = self.right if self.left is None else self.left

    def project(self, grad: Tensor) -> Tensor:
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return project(wide, self.left, self.right)

    def project_back(self, low: Tensor) -> Tensor:
        return project_back(low, self.left, self.right)


def there_and_back(
    function: Callable[..., Any], grad: Tensor, following: Tensor, **options: Any
) -> dict[str, Any]:
    """A basis from one gradient, and what it makes of the next one."""
    made = function(grad, **options)
    low = made.project(following)
    before = low.clone()
    back = made.project_back(low)
    basis = made.basis
    seen: dict[str, Any] = {}
    for name, tensor in (("basis", basis), ("coordinates", low)):
        for word, size in zip(("rows", "columns"), tensor.shape, strict=True):
            seen[f"the number of {word} of the {name}"] = size
    seen["the dtypes of basis and coordinates"] = f"{basis.dtype}, {low.dtype}"
    seen["project_back leaves the coordinates as they are"] = bool(torch.equal(low, before))
    seen["the gradient, projected back"] = back
    seen["B times its own transpose"] = basis @ basis.mT
    return seen


def kept(function: Callable[..., Any], grad: Tensor, **options: Any) -> dict[str, int]:
    """The memory that stays because of the object, after it was used once."""
    made = function(grad, **options)
    made.project_back(made.project(grad))
    sizes: dict[int, int] = {}
    look(made, sizes, set())
    return {
        "the bytes that the basis needs": made.basis.numel() * made.basis.element_size(),
        "the bytes that the object keeps in memory": sum(sizes.values()),
    }


def look(value: Any, found: dict[int, int], seen: set[int]) -> None:
    """Sizes of all tensors' memory below an object, each counted once, by its address."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        memory = value.untyped_storage()
        found[memory.data_ptr()] = memory.nbytes()
    elif isinstance(value, dict):
        for part in value.values():
            look(part, found, seen)
    elif isinstance(value, (list, tuple)):
        for part in value:
            look(part, found, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        look(vars(value), found, seen)


# ------------------------------------------------------------------------------------- arguments


def gradient(g: Generator, m: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A matrix whose singular values are 4, 2, 1, ...: no two of them can be taken for each other,
    and no basis depends on rounding."""
    small = min(m, n)
    U = torch.linalg.qr(torch.randn(m, small, generator=g, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(n, small, generator=g, dtype=torch.float64)).Q
    sizes = 4 * 0.5 ** torch.arange(small, dtype=torch.float64)
    return ((U * sizes) @ V.mT).to(dtype)


def used(grad: Tensor, following: Tensor, rank: int, projection_type: str = "") -> Call:
    """A gradient for the basis, the next one, and the options, by their names."""
    options = {"projection_type": projection_type} if projection_type else {}
    return call(grad=grad, following=following, rank=rank, **options)


def held(g: Generator) -> Call:
    """One column of U, which is contiguous as it is, and still a view."""
    return call(grad=gradient(g, 9, 12), rank=1)


def double(g: Generator) -> Call:
    x = gradient(g, 4, 6, torch.float64)
    return used(x, normal(g, 4, 6, dtype=torch.float64) / 3, 2)


def brain(g: Generator) -> Call:
    x = gradient(g, 8, 5, torch.bfloat16)
    return used(x, normal(g, 8, 5, dtype=torch.bfloat16), 2)


# ------------------------------------------------------------------------------- wrong answers

LEFT = 'is_wide if projection_type == "std" else not is_wide'
SVD = "torch.linalg.svd(wide(grad), full_matrices=False)"
LEADING = "U[:, :rank] if self.left else Vh[:rank].mT"
THERE = "self.basis.mT @ grad if self.left else grad @ self.basis\n"
BACK = "self.basis @ low if self.left else low @ self.basis.mT"
SQUARE, REVERSE = "a square matrix", "reverse_std, a wide matrix with square coordinates"
WIDE, TALL = "a wide matrix", "a tall matrix"
REVERSE_TALL = "reverse_std, a tall matrix, a rank above its smaller side"
MEMORY, BFLOAT = "what stays in memory", "a bfloat16 gradient"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("a square matrix is taken for a wide one",
     {"grad.shape[0] < grad.shape[1]": "grad.shape[0] <= grad.shape[1]"}, SQUARE),
    ("reverse_std is taken for std", {LEFT: "is_wide"}, REVERSE),
    ("reverse_std is taken for std, and a square matrix for a wide one",
     {LEFT: "is_wide", "grad.shape[0] < grad": "grad.shape[0] <= grad"}, SQUARE),
    ("always a right basis", {LEFT: "False"}, WIDE),
    ("always a left basis", {LEFT: "True"}, TALL),
    ("std and reverse_std are exchanged", {'== "std"': '!= "std"'}, TALL),
    ("reverse_std is the default",
     {'projection_type: str = "std"': 'projection_type: str = "reverse_std"'}, TALL),
    ("random directions, not the leading ones",
     {LEADING: "torch.linalg.qr(torch.randn_like(U if self.left else Vh.mT)).Q[:, :rank]"}, TALL),
    ("the columns of Vh, not its rows", {"Vh[:rank].mT": "Vh[:, :rank]"}, TALL),
    ("the rows of U, not its columns", {"U[:, :rank]": "U[:rank].mT"}, WIDE),
    ("the weakest directions, not the leading ones",
     {LEADING: "U[:, -rank:] if self.left else Vh[-rank:].mT"}, TALL),
    ("the basis is scaled by the singular values",
     {"U, _, Vh": "U, S, Vh",
      LEADING: "U[:, :rank] * S[:rank] if self.left else Vh[:rank].mT * S[:rank]"}, TALL),
    ("the first columns of a QR: orthonormal, but not the leading directions",
     {LEADING: "torch.linalg.qr(wide(grad) if self.left else wide(grad).mT).Q[:, :rank]"}, TALL),
    ("the way back with B where its transpose belongs",
     {"low @ self.basis.mT": "low @ self.basis"}, TALL),
    ("the way back guesses the side from the shape of the coordinates",
     {f"return {BACK}": "left = low.shape[0] <= low.shape[1]\n        "
      + f"return {BACK}".replace("self.left", "left")}, REVERSE),
    ("the way back guesses the side from the shape of the coordinates, a square is tall",
     {f"return {BACK}": "left = low.shape[0] < low.shape[1]\n        "
      + f"return {BACK}".replace("self.left", "left")}, REVERSE_TALL),
    ("the projection gives the approximation, not the coordinates",
     {THERE:
      "self.basis @ self.basis.mT @ grad if self.left else grad @ self.basis @ self.basis.mT\n",
      BACK: "low"}, TALL),
    ("a new basis from every gradient",
     {"grad = wide(grad)\n": "grad = wide(grad)\n"
      "        U, _, Vh = torch.linalg.svd(grad, full_matrices=False)\n"
      "        rank = self.basis.shape[1]\n"
      f"        self.basis = ({LEADING}).clone()\n"}, TALL),
    ("one direction too few",
     {LEADING: "U[:, :rank - 1] if self.left else Vh[:rank - 1].mT"}, TALL),
    ("all singular vectors, beyond the smaller side too",
     {"full_matrices=False": "full_matrices=True"}, REVERSE_TALL),
    ("the basis is a view that keeps the whole factor in memory",
     {"leading.clone()": "leading"}, MEMORY),
    ("the basis is made contiguous, which need not copy it",
     {"leading.clone()": "leading.contiguous()"}, MEMORY,
     "the same memory stays alive as with any view"),
    ("the way back takes the side whose height the coordinates have",
     {f"return {BACK}": "left = low.shape[0] != self.height\n        "
      + f"return {BACK}".replace("self.left", "left"),
      "self.basis = leading": "self.height = grad.shape[0]\n        self.basis = leading"},
     "a wide matrix, a rank above its height"),
    ("the way back takes the side whose width the coordinates have",
     {f"return {BACK}": "left = low.shape[1] == self.width\n        "
      + f"return {BACK}".replace("self.left", "left"),
      "self.basis = leading": "self.width = grad.shape[1]\n        self.basis = leading"},
     "a tall matrix, a rank above its width"),
    ("a square matrix has a right basis, with reverse_std too",
     {LEFT: 'is_wide if projection_type == "std" else grad.shape[0] > grad.shape[1]'},
     "reverse_std, a square matrix"),
    ("a square matrix has a left basis, with reverse_std too",
     {LEFT: 'grad.shape[0] <= grad.shape[1] if projection_type == "std" else not is_wide'}, SQUARE),
    ("the way back overwrites the coordinates",
     {f"return {BACK}": f"back = {BACK}\n        low.zero_()\n        return back"}, TALL),
    ("the gradient stays in the object",
     {"self.basis = leading": "self.grad = grad\n        self.basis = leading"}, MEMORY),
    ("the whole factors stay in the object",
     {"self.basis = leading": "self.U, self.Vh = U, Vh\n        self.basis = leading"}, MEMORY),
    ("the SVD of float64 is done in float32",
     {SVD: f"[x.to(wide(grad).dtype) for x in {SVD.replace('wide(grad)', 'grad.float()')}]"},
     "float64 keeps its digits"),
    ("the basis is rounded to bfloat16",
     {"leading.clone()": "wide(leading.to(grad.dtype, copy=True))"}, BFLOAT),
    ("the coordinates are rounded to bfloat16",
     {"        grad = wide(grad)\n": "        given, grad = grad.dtype, wide(grad)\n",
      f"return {THERE}": f"return wide(({THERE[:-1]}).to(given))\n"}, BFLOAT),
]  # fmt: skip

CASES = (
    Case(TALL, lambda g: used(gradient(g, 9, 5), normal(g, 9, 5), 2),
         "tall (9, 5) and std: a right basis of shape (5, 2), from the rows of Vh, and "
         "coordinates of shape (9, 2)", points=2, use=there_and_back, tolerance=(1e-4, 1e-5),
         teaching="the usual case, and the first thing to read"),
    Case(WIDE, lambda g: used(gradient(g, 4, 7), normal(g, 4, 7), 3),
         "wide (4, 7) and std: a left basis of shape (4, 3), from the columns of U", points=2,
         use=there_and_back, tolerance=(1e-4, 1e-5),
         teaching="the other side, before reverse_std mixes in"),
    Case(SQUARE, lambda g: used(gradient(g, 6, 6), normal(g, 6, 6), 2, "std"),
         "a square matrix counts as tall: nothing but the numbers shows the side",
         use=there_and_back, tolerance=(1e-4, 1e-5)),
    Case(REVERSE, lambda g: used(gradient(g, 5, 8), normal(g, 5, 8), 5, "reverse_std"),
         "reverse_std takes the longer side: (5, 8) has a right basis here. At rank 5 the "
         "coordinates have shape (5, 5), which does not tell the side: remember it",
         use=there_and_back, tolerance=(1e-4, 1e-5)),
    Case(REVERSE_TALL, lambda g: used(gradient(g, 7, 4), normal(g, 7, 4), 6, "reverse_std"),
         "there are only min(m, n) leading directions, here 4. Coordinates of shape (4, 4) do not "
         "tell the side", use=there_and_back, tolerance=(1e-4, 1e-5)),
    Case("a wide matrix, a rank above its height",
         lambda g: used(gradient(g, 3, 7), normal(g, 3, 7), 6),
         "three directions on the left: coordinates of shape (3, 7) look like a gradient, and are "
         "to be multiplied by the basis all the same", use=there_and_back, tolerance=(1e-4, 1e-5)),
    Case("a tall matrix, a rank above its width",
         lambda g: used(gradient(g, 7, 3), normal(g, 7, 3), 6),
         "three directions on the right: coordinates of shape (7, 3) look like a gradient, and "
         "are to be multiplied by the transposed basis all the same", use=there_and_back,
         tolerance=(1e-4, 1e-5)),
    Case("reverse_std, a square matrix",
         lambda g: used(gradient(g, 6, 6), normal(g, 6, 6), 2, "reverse_std"),
         "a square matrix counts as tall, so that reverse_std takes the left side",
         use=there_and_back, tolerance=(1e-4, 1e-5)),
    Case(MEMORY, held,
         "a slice is a view, and keeps the whole factor alive: copy it. .contiguous() need not "
         "copy, .clone() does. Keep neither gradient nor factors in the object", points=2,
         use=kept),
    Case("float64 keeps its digits", double, "convert to float32 only what has fewer digits",
         use=there_and_back),
    Case(BFLOAT, brain,
         "there is no SVD in bfloat16: convert, and keep float32 for basis and coordinates",
         use=there_and_back, tolerance=(1e-4, 1e-5)),
)  # fmt: skip

EXERCISE = Exercise(
    name="galore_project", function="GradientProjection", page="7_optimizers/2_galore", minutes=25,
    difficulty=2,
    outcome="Write GaLore's projection so that it takes the right side, finds the way back, and "
            "keeps nothing but its basis.",
    after=("adamw_step",), reference=PackageProjection, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Decide the side once, in `__init__`, and remember it: no shape that comes later tells it "
        "for sure.",
        "`torch.linalg.svd(..., full_matrices=False)` returns U, S and Vh. The columns of U are "
        "directions on the left, the rows of Vh are directions on the right.",
        "Coordinates of a vector are its products with the columns of the basis; the way back sums "
        "the columns, each times its coordinate. On the right the vectors are the rows of the "
        "gradient, on the left its columns. A slice of U or Vh is a view: make a copy.",
    ),
)  # fmt: skip
