"""Masked lanes of a maximum, and a store without a mask, that tests of the interpreter pass.

Triton is imported when a case runs, not here: it exists for Linux only.
"""

from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal
from lm_from_scratch.exercises.launch import POISON, AsKernel, check_kernel, launch


def by_torch(programs: int, x: Tensor, tops: Tensor, out: Tensor, width: int, BLOCK: int) -> None:
    best = x.amax(1)
    tops.copy_(best)
    out.copy_(x - best[:, None])


REFERENCE: Any = AsKernel(by_torch)


# -------------------------------------------------------------------------------- how it is used


def launched(kernel: Any, x: Tensor, BLOCK: int) -> tuple[dict[str, Any], int]:
    """Both results, and how many numbers around them were written. All lie in a memory of more
    than any slip in an address can reach."""
    device = check_kernel(kernel)
    rows, width = x.shape
    margin = (rows + 2) * 2 * BLOCK

    def memory(*shape: int) -> tuple[Tensor, Tensor]:
        whole = torch.full((2 * margin,), POISON, device=device)
        part = whole[margin // 2 :][: torch.Size(shape).numel()].view(shape)
        return whole, part

    (_, source), (all_tops, tops), (all_out, out) = (
        memory(rows, width),
        memory(rows),
        memory(rows, width),
    )
    source.copy_(x)
    launch(kernel, rows, source, tops, out, width, BLOCK=BLOCK)
    if not torch.equal(source, x.to(device)):
        raise ValueError("your kernel wrote into x")
    outside = int((all_out != POISON).sum() + (all_tops != POISON).sum())
    outside -= out.numel() + tops.numel()
    return {"tops": tops.cpu(), "out": out.cpu()}, outside


def results(kernel: Any, **given: Any) -> dict[str, Any]:
    return launched(kernel, **given)[0]


def around(kernel: Any, **given: Any) -> dict[str, Any]:
    both, outside = launched(kernel, **given)
    return {**both, "numbers written after out or tops": outside}


# ------------------------------------------------------------------------------------- arguments


def both_signs(g: Generator, rows: int, width: int, block: int) -> Call:
    """Random numbers, with one above 2 in each row and one below -4."""
    x = normal(g, rows, width)
    x[:, 1], x[:, 2] = x[:, 1].abs() + 2, -x[:, 2].abs() - 4
    return call(x=x, BLOCK=block)


def short(g: Generator) -> Call:
    return both_signs(g, 2, 11, 16)


def below_zero(g: Generator) -> Call:
    x = -normal(g, 3, 11).abs() - torch.tensor([[1.0], [5.0], [0.5]])
    x[2, 4] = 0
    return call(x=x, BLOCK=16)


def hidden(g: Generator) -> Call:
    x = -normal(g, 2, 13).abs() - 1
    x[0, 8:] = x[1, :5] = -float("inf")
    return call(x=x, BLOCK=16)


OTHER = 'other=-float("inf")'
LOAD = 'value = tl.load(x + place, mask=inside, other=-float("inf"))'
TOP = "top = tl.max(value, axis=0)"
STORE = "tl.store(out + place, value - top, mask=inside)"

BELOW, BEHIND = "rows without a number above 0", "nothing is written after the last row"
LOW = "numbers near -30000"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found", {OTHER: "other=0.0", ", mask=inside)\n": ")\n"}, BELOW),
    ("the padding is repaired, the store still has no mask", {", mask=inside)\n": ")\n"}, BEHIND),
    ("the store is repaired, the padding is still 0", {OTHER: "other=0.0"}, BELOW),
    ("the padding is -10000, which can be the maximum", {OTHER: "other=-10000.0"}, LOW),
    ("what holds minus infinity is not stored, be it padding or a number",
     {STORE: STORE.replace("inside", "value > -float('inf')")}, "places of minus infinity"),
    ("a number that is 0 is taken for padding",
     {OTHER: "other=0.0", TOP: 'top = tl.max(tl.where(value != 0, value, -float("inf")), axis=0)'},
     BELOW),
    ("the load has no mask either: the next row counts",
     {LOAD: "value = tl.load(x + place)"}, BELOW),
    ("the mask lets one lane too many in", {"column < width": "column <= width"}, BEHIND),
    ("at most 64 lanes are used", {"column < width": "column < tl.minimum(width, 64)"}, LOW),
    ("the largest absolute number",
     {TOP: "top = tl.max(tl.where(inside, tl.abs(value), 0.0), axis=0)"}, BELOW),
    ("the smallest number", {OTHER: "other=float('inf')", "tl.max(": "tl.min("}, BELOW),
    ("the first number of the row for the largest", {TOP: "top = tl.load(x + row * width)"}, BELOW),
    ("the distance has the other sign", {"value - top": "top - value"}, BELOW),
    ("rows are BLOCK numbers apart", {"row * width": "row * BLOCK"}, BELOW),
    ("only the first row is computed", {"row = tl.program_id(0)": "row = 0"}, BELOW),
]  # fmt: skip

CASES = (
    Case("rows as long as the block", lambda g: both_signs(g, 3, 16, 16),
         "the largest number of each row, and each number minus that one", use=results, guard=True,
         teaching="one of the tests that the code as found has passed"),
    Case("rows of both signs, shorter than the block", short,
         "row r begins at r * width, in x and in out", use=results, guard=True,
         teaching="one of the tests that the code as found has passed"),
    Case(BELOW, below_zero,
         "print the whole block in the kernel: what is in the lanes after the row?", points=3,
         use=results),
    Case(LOW, lambda g: call(x=100 * normal(g, 2, 100) - 30000, BLOCK=128),
         "no number that is written down in the code is small enough for every row, but one",
         points=2, use=results),
    Case("places of minus infinity", hidden,
         "whether a lane belongs to the row is a matter of its column, not of its number", points=2,
         use=results),
    Case(BEHIND, short,
         "a block has BLOCK lanes, also when it is stored; in the interpreter the next row "
         "repairs what the row before has spoilt, except after the last", points=3, use=around),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_masked_lanes", function="margins", page="gpu/2_softmax", minutes=20, difficulty=1,
    outcome="Write a reduction of a row so that masked lanes change neither its result nor the "
            "memory after it, and say which tests would have shown it.",
    reference=REFERENCE, needs="triton", hunt="masked lanes of the GPU pages", cases=CASES,
    wrong=planted(WRONG),
    hints=(
        "A block has BLOCK lanes, a row has fewer numbers. Follow one lane after the row through "
        "all five lines: what does it hold, and where does it go?",
        "The maximum sees every lane, so a masked one must hold what no maximum can be. Zero is "
        "neutral for a sum.",
        "What is loaded in a lane beyond the row takes part in the maximum and in the sum. "
        "Which number changes neither? And what is stored there, and where? Such faults, and "
        "more, are in the museums of the page on the softmax kernel and of those after it.",
    ),
)  # fmt: skip
