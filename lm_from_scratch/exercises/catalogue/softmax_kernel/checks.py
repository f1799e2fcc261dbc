"""A softmax kernel: what is in masked lanes, whose stride it is, and what is never written.

Triton is imported when a case runs, not here: it exists for Linux only.
"""

from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers, normal
from lm_from_scratch.exercises.launch import POISON, AsKernel, check_kernel, launch

INF = float("inf")


def by_torch(
    programs: int, x: Tensor, out: Tensor, x_stride: int, out_stride: int, width: int, BLOCK: int
) -> None:
    rows = x.as_strided((programs, width), (x_stride, 1)).float()
    out.as_strided((programs, width), (out_stride, 1)).copy_(rows.softmax(-1))


REFERENCE: Any = AsKernel(by_torch)


# -------------------------------------------------------------------------------- how it is used


def launched(
    kernel: Any, x: Tensor, x_stride: int, out_stride: int, BLOCK: int
) -> tuple[Tensor, Tensor]:
    """The rows of `out`, and all of its memory. Both matrices lie in a memory of more than any
    slip in a stride or a mask can reach."""
    device = check_kernel(kernel)
    rows, width = x.shape
    margin = (rows + 1) * (x_stride + out_stride + BLOCK)

    def matrix(stride: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        memory = torch.full((2 * margin,), POISON, dtype=dtype, device=device)
        return memory, memory.as_strided((rows, width), (stride, 1), margin // 2)

    (_, source), (memory, out) = matrix(x_stride, x.dtype), matrix(out_stride, torch.float32)
    source.copy_(x)
    launch(kernel, rows, source, out, x_stride, out_stride, width, BLOCK=BLOCK)
    if not bool(((source == x.to(device)) | source.isnan()).all()):
        raise ValueError("your kernel wrote into x")
    return out.cpu(), memory.cpu()


def rows_of_out(kernel: Any, **given: Any) -> Tensor:
    return launched(kernel, **given)[0]


def around(kernel: Any, **given: Any) -> dict[str, Any]:
    """The rows, and how many numbers outside of them were written."""
    out, memory = launched(kernel, **given)
    return {
        "out": out,
        "numbers written outside the rows of out": int((memory != POISON).sum()) - out.numel(),
    }


# ------------------------------------------------------------------------------------- arguments


def short(g: Generator) -> Call:
    """Some rows of negative numbers only; the next row begins where one ends."""
    x = normal(g, 2, 11, scale=2) - torch.tensor([[0.0], [6.0]])
    return call(x=x, x_stride=11, out_stride=11, BLOCK=16)


def near_the_ends(g: Generator) -> Call:
    """The exponentials are so small that float32 keeps few digits, or their sum is too large."""
    x = torch.stack([normal(g, 8) - 96, 88 + 0.5 * torch.rand(8, generator=g)])
    return call(x=x, x_stride=8, out_stride=8, BLOCK=8)


def large(g: Generator) -> Call:
    x = normal(g, 2, 700) + torch.tensor([[1000.0], [-30000.0]])
    return call(x=x, x_stride=700, out_stride=700, BLOCK=1024)


def hidden(g: Generator) -> Call:
    x = normal(g, 2, 40, scale=2)
    x[0, :35] = x[1] = -INF
    return call(x=x, x_stride=40, out_stride=40, BLOCK=64)


def apart(g: Generator) -> Call:
    x_stride, out_stride = (int(n) for n in (integers(g, 9, 13, 1), integers(g, 13, 16, 1)))
    return call(x=normal(g, 2, 8, scale=2), x_stride=x_stride, out_stride=out_stride, BLOCK=8)


def half(g: Generator) -> Call:
    x = normal(g, 2, 16, scale=3, dtype=torch.float16)
    return call(x=x, x_stride=16, out_stride=16, BLOCK=16)


# ------------------------------------------------------------------------------- wrong answers

OTHER = 'other=-float("inf")'
E = "e = tl.exp(value - tl.max(value, axis=0))"
P = "p = e / tl.sum(e, axis=0)"

SHORTER, RANGE = "rows shorter than the block", "numbers near -96 and 88"
BETWEEN, INFINITE = "nothing is written between the rows", "places of minus infinity"
LARGE, FULL = "numbers near 1000 and -30000", "rows as long as the block"
APART, HALF = "rows apart in memory", "float16"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the padding of the row is 0", {OTHER: "other=0.0"}, SHORTER),
    ("the maximum is not subtracted", {E: "e = tl.exp(value)"}, RANGE),
    ("the load has no mask: what lies after the row counts",
     {f"place, mask=inside, {OTHER}": "place"}, SHORTER),
    ("the store has no mask", {"p, mask=inside)": "p)"}, BETWEEN),
    ("numbers of x count up to its stride", {"mask=inside, other": "mask=column < x_stride, other"},
     BETWEEN),
    ("the padding is -1e30, so that a row of minus infinity is 0",
     {OTHER: "other=-1e30"}, INFINITE),
    ("at most 512 lanes are used",
     {"inside = column < width": "inside = column < tl.minimum(width, 512)"}, LARGE),
    ("the mask lets one number too many in", {"column < width": "column <= width"}, SHORTER),
    ("the padding is -10000, which can be the maximum", {OTHER: "other=-1e4"}, LARGE),
    ("the maximum is never below 0",
     {"tl.max(value, axis=0)": "tl.maximum(tl.max(value, axis=0), 0.0)"}, RANGE),
    ("only the first row is computed", {"row = tl.program_id(0)": "row = 0"}, FULL),
    ("rows are BLOCK numbers apart, as in a kernel without rows",
     {"row * x_stride": "row * BLOCK", "row * out_stride": "row * BLOCK"}, SHORTER),
    ("the rows of x are width numbers apart", {"row * x_stride": "row * width"}, APART),
    ("the rows of out are width numbers apart", {"row * out_stride": "row * width"}, APART),
    ("the stride of x is used for out", {"row * out_stride": "row * x_stride"}, APART),
    ("the two strides have changed places",
     {"row * out_stride": "row * x_stride", "x + row * x_stride": "x + row * out_stride"}, APART),
    ("nothing is divided", {P: "p = e"}, FULL),
    ("divided by the sum of the numbers, not of their exponentials",
     {"tl.sum(e, axis=0)": "tl.sum(value, axis=0)"}, FULL),
    ("the maximum is subtracted above the line only",
     {"tl.sum(e, axis=0)": "tl.sum(tl.exp(value), axis=0)"}, FULL),
    ("the mean instead of the sum", {P: "p = e / (tl.sum(e, axis=0) / width)"}, FULL),
    ("the logarithm of the softmax", {P: "p = tl.log(e / tl.sum(e, axis=0))"}, FULL),
    ("powers of 2", {"tl.exp(": "tl.exp2("}, FULL),
    ("a small number is added to the sum",
     {P: "p = e / (tl.sum(tl.where(value > -float('inf'), e, 0.0), axis=0) + 1e-9)\n"
      "    p = tl.where(value > -float('inf'), p, 0.0)"}, INFINITE,
     "a row of zeros is what a padding of -1e30 gives, too"),
    ("the exponentials are rounded to the dtype of x",
     {E: E.replace("axis=0))", "axis=0)).to(x.dtype.element_ty)")}, HALF),
    ("the result is rounded to the dtype of x",
     {"p, mask": "p.to(x.dtype.element_ty), mask"}, HALF),
]  # fmt: skip

CASES = (
    Case(FULL, lambda g: call(x=normal(g, 2, 16, scale=2), x_stride=16, out_stride=16, BLOCK=16),
         "one program, one row: the exponentials of the row over their sum", use=rows_of_out,
         teaching="the formula, with nothing to mask"),
    Case(SHORTER, short,
         "a masked lane must change neither the maximum nor the sum: which number does that?",
         points=2, use=rows_of_out, teaching="the padding, seen with numbers of the usual size"),
    Case(RANGE, near_the_ends,
         "e**-96 is below the normal numbers of float32, and a sum of several e**88 above its "
         "largest: subtract the row's own maximum first", use=rows_of_out,
         teaching="without the maximum, larger numbers give NaN; here one can look at the rest"),
    Case(LARGE, large,
         "subtract the largest number of the row, and let no masked lane be larger than it",
         use=rows_of_out),
    Case(INFINITE, hidden,
         "a hidden place has the probability 0; where all are hidden, 0 / 0 is NaN",
         use=rows_of_out),
    Case(APART, apart, "row r of x begins at r * x_stride, that of out at r * out_stride", points=2,
         use=rows_of_out, teaching="the strides alone, with nothing to mask"),
    Case(BETWEEN, lambda g: call(x=normal(g, 2, 9, scale=2), x_stride=12, out_stride=21, BLOCK=16),
         "the store needs a mask as well", points=2, use=around),
    Case(HALF, half,
         "nothing between load and store is rounded to float16, and the store converts to the "
         "dtype of out by itself", use=rows_of_out),
)  # fmt: skip

EXERCISE = Exercise(
    name="softmax_kernel", function="softmax_kernel", page="gpu/2_softmax", minutes=35,
    difficulty=2,
    outcome="Write a Triton kernel that reduces each row in one program so that masked lanes, "
            "strides and large numbers do no harm.",
    reference=REFERENCE, needs="triton", after=("online_softmax",), cases=CASES,
    wrong=planted(WRONG),
    hints=(
        "`tl.program_id(0)` is the row, `tl.arange(0, BLOCK)` the columns. A pointer plus both, "
        "with the row times its stride, is a block of addresses.",
        "`tl.load(address, mask=column < width, other=...)` fills masked lanes with `other`. "
        "Minus infinity is neutral for the maximum, and its exponential is neutral for the sum.",
        "Three lines after the load: subtract, exponential, divide, each over the lanes of one "
        "row. The store needs the mask as well, and an address built from the strides of "
        "`out`, which need not be those of x.",
    ),
)  # fmt: skip
