"""Groups that are cheap and good enough: the package's own weight, in every size on offer."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer, integers, normal
from lm_from_scratch.weights.int8 import Int8Weight

Choice = tuple[int, int, float] | None


def error(weight: Tensor, size: int) -> float:
    """The relative error of the package's weight."""
    held = Int8Weight.quantize(weight, size)
    back = held.codes.double().unflatten(1, (-1, size)) * held.scale.double()[..., None]
    wide = weight.double()
    return float((back.flatten(1) - wide).norm() / wide.norm())


def cheapest_groups(weight: Tensor, sizes: list[int], bound: float) -> Choice:
    good = [size for size in sizes if error(weight, size) <= bound]
    if not good:
        return None
    held = Int8Weight.quantize(weight, max(good))
    return max(good), sum(part.nbytes for part in held.parts().values()), error(weight, max(good))


def between(weight: Tensor, good: int, bad: int) -> float:
    """A bound of few digits that one size meets and another does not."""
    low, high = 1.02 * error(weight, good), error(weight, bad) / 1.02
    middle = (low * high) ** 0.5
    bounds = (float(f"{middle:.{digits}g}") for digits in range(1, 9))
    return next(bound for bound in bounds if low < bound < high)


def outliers(
    g: Generator, N: int, K: int, size: float = 60.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A few large numbers, a third of them in each row's middle: coarse scales for many others."""
    weight = normal(g, N, K)
    for row in range(N):
        weight[row, integer(g, 0, K)] = size
    return weight.to(dtype)


def usual(g: Generator) -> Call:
    weight = outliers(g, 6, 48)
    return call(weight, [4, 8, 16, 48], between(weight, 8, 16))


def rows_will_do(g: Generator) -> Call:
    weight = normal(g, 5, 32)
    return call(weight, [2, 32, 8, 4, 16], 3 * error(weight, 32))


def brain(g: Generator) -> Call:
    weight = outliers(g, 6, 48, dtype=torch.bfloat16)
    return call(weight, [16, 4, 48, 8], between(weight, 4, 48))


def none(g: Generator) -> Call:
    weight = outliers(g, 4, 24)
    sizes, least = [24, 6, 12], error(weight, 6)
    return call(weight, sizes, bounds=(least / 2, least * 1.05))


def each(
    function: Callable[..., Choice], weight: Tensor, sizes: list[int], bounds: tuple[float, ...]
) -> list[Choice]:
    return [function(weight, sizes, bound) for bound in bounds]


def small_rows(g: Generator) -> Call:
    """A matrix with large rows and small ones, and zeros: the error is that of the whole. All of it
    is small."""
    weight = outliers(g, 6, 24) * torch.tensor([[1.0], [1e-3], [5.0], [1e-6], [0.0], [0.5]])
    weight[2, 12:16] = 0
    weight = weight * 1e-8
    return call(weight, [12, 24, 4], between(weight, 4, 12))


def columns(g: Generator) -> Call:
    """Large columns: groups across rows would be far better, and are not what is asked."""
    weight = normal(g, 8, 8) * torch.tensor([60.0, 1, 1, 1, 60, 1, 1, 1])
    return call(weight, [8, 4, 2, 1], between(weight, 2, 4))


def exact(g: Generator) -> Call:
    """Whole numbers up to 127: a row is exact with one scale, and not with several."""
    weight = integers(g, 1, 60, 4, 16).float()
    weight[:, 5] = 127
    return call(weight, [4, 16, 2, 8], 1e-5)


# ------------------------------------------------------------------------------- wrong answers

GROUPS = "wide.unflatten(1, (-1, size))"
LARGEST = "groups.abs().amax(2, keepdim=True)"
EXPAND = ".expand(*groups.shape[:2], 1)"
LOST = "(groups - codes * scale).square().sum() / wide.square().sum()"
PRICE = "weight.numel() + scale.numel() * weight.element_size()"
USUAL, ROWS, BRAIN = "a large number in every row", "whole rows are good enough", "bfloat16"
NONE, SMALL = "none is good enough", "large rows, small rows and zeros"
COLUMNS = "large columns"
EXACT = "whole numbers, which whole rows hold exactly"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the smallest groups, which are the best and the dearest", {"min(found)": "max(found)"}, ROWS),
    ("the first size that is good enough, in the order given", {"min(found)": "found[0]"}, ROWS),
    ("the scales take no bytes", {PRICE: "weight.numel()"}, USUAL),
    ("a scale of four bytes, whatever the dtype",
     {PRICE: "weight.numel() + scale.numel() * 4"}, BRAIN),
    ("a scale of one byte", {PRICE: "weight.numel() + scale.numel()"}, USUAL),
    ("one scale for each row is counted",
     {PRICE: "weight.numel() + len(weight) * weight.element_size()"}, USUAL),
    ("codes of four bits", {PRICE: "weight.numel() // 2 + scale.numel() * weight.element_size()"},
     USUAL),
    ("bits instead of bytes",
     {PRICE: "8 * (weight.numel() + scale.numel() * weight.element_size())"}, USUAL),
    ("the bytes of the matrix as it was", {PRICE: "weight.numel() * weight.element_size()"}, USUAL),
    ("one scale for the whole matrix",
     {LARGEST: f"groups.abs().amax().reshape(1, 1, 1){EXPAND}"}, ROWS),
    ("one scale for each row, whatever the size",
     {LARGEST: f"groups.abs().amax((1, 2), keepdim=True){EXPAND}"}, USUAL),
    ("the groups run down the columns", {GROUPS: "wide.mT.reshape(len(wide), -1, size)"}, COLUMNS),
    ("the square of the error is compared with the bound",
     {"lost.sqrt().item()": "lost.item()"}, USUAL),
    ("the largest error beside the largest number",
     {LOST: "((groups - codes * scale).abs().max() / wide.abs().max()).square()"}, USUAL),
    ("the error is not set beside the size of the matrix",
     {LOST: "(groups - codes * scale).square().mean()"}, USUAL),
    ("the mean of the errors of rows, where small rows weigh as much as large ones",
     {LOST: "((groups - codes * scale).flatten(1).norm(dim=1) / "
            "wide.norm(dim=1).clamp(min=1e-30)).mean().square()"}, SMALL),
    ("a group of zeros makes the error NaN",
     {"torch.where(scale == 0, 0, groups / scale)": "(groups / scale)"}, SMALL),
    ("the first size that is too coarse ends the search",
     {"    for size in sizes:\n": "    for size in sorted(sizes):\n",
      "            found.append((total, size, error))\n":
      "            found.append((total, size, error))\n        else:\n            break\n"}, EXACT),
    ("an error of 0 is taken for none", {"if error <= bound": "if 0 < error <= bound"}, EXACT,
     "its answer is None, as that of a search which ended early"),
    ("the scale is kept above a small number",
     {".to(weight.dtype).double()": ".to(weight.dtype).double().clamp(min=1e-8)"}, SMALL,
     "its answer is None, as that of an error which is NaN"),
    ("the groups follow each other in memory, not in the rows",
     {GROUPS: "torch.as_strided(wide, (wide.numel(),), (1,)).reshape(len(wide), -1, size)"},
     COLUMNS),
    ("cut off, not rounded", {".round()": ".trunc()"}, ROWS),
    ("0 where none is good enough", {"return None": "return 0, 0, 0.0"}, NONE),
    ("the finest groups where none is good enough",
     {"return None": "return min(sizes), 0, bound"}, NONE),
    ("the bytes come first", {"return size, total,": "return total, size,"}, USUAL),
]  # fmt: skip

CLOSE = (1e-4, 0.0)  # of the error: float32 is enough

CASES = (
    Case(USUAL, usual,
         "larger groups take fewer bytes and lose more: which is the last one within the bound?",
         points=3, tolerance=CLOSE, teaching="the question itself"),
    Case(ROWS, rows_will_do, "all are good enough here, and the longest takes the fewest bytes",
         tolerance=CLOSE, teaching="the price alone decides"),
    Case(BRAIN, brain, "a scale has the dtype of the weight, two bytes here", tolerance=CLOSE),
    Case(NONE, none, "no size meets the first bound: None", use=each, tolerance=CLOSE),
    Case(SMALL, small_rows,
         "one sum over the whole matrix, above and below; where the scale is 0, the codes are 0",
         tolerance=CLOSE),
    Case(COLUMNS, columns, "a group is a stretch of a row", tolerance=CLOSE,
         teaching="columns so unlike that groups across rows would be far better"),
    Case(EXACT, exact, "a larger group may lose less: try all sizes", tolerance=(1e-4, 1e-7)),
)  # fmt: skip

EXERCISE = Exercise(
    name="measure_groups", function="cheapest_groups", page="8_quantized_weights/1_int8_int4",
    minutes=20, difficulty=2,
    outcome="Choose the groups of a quantised weight by what each choice loses and costs.",
    after=("int8_weight",), reference=cheapest_groups, cases=CASES, wrong=planted(WRONG),
    hints=(
        "One function for one size gives an error and a number of bytes. The decision comes last.",
        "`unflatten` or `view` makes the groups an axis of their own; then a scale is a maximum "
        "over the last axis, and everything else is as for a whole row.",
        "How many scales are there? Their number and their dtype are all that the price depends "
        "on, since the codes take the same room in every size.",
    ),
)  # fmt: skip
