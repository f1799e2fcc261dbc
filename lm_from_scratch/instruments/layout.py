"""How the weights of a model lie in memory, chosen by measuring.

Generating a token reads every weight once, so it is as fast as memory delivers them, and that
depends on the order in which they lie. Three orders of a matrix (out, in):

=========== ====================================================================================
``rows``    row after row, as ``nn.Linear`` makes it
``columns`` column after column: often the fastest for one token in float32
``packed``  in the tiles of oneDNN, beside the weight itself, so it is held twice: often the
            fastest in bfloat16, and for several rows at once
=========== ====================================================================================

Which one wins changes with the processor, the dtype, the threads, and how many rows are computed at
once. No rule is right everywhere, so :func:`lay_out_` tries all of them, on the model's weights,
where it runs. :func:`time_products` does the same for training: by which library, in which dtype.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.instruments.onednn import (
    OneDNNLinear,
    Packed,
    PackedLinear,
    multiplies,
    onednn_linear,
)
from lm_from_scratch.layers.head import Head
from lm_from_scratch.limits import Count, require

#: The simplest first.
LAYOUTS = ("rows", "columns", "packed")
#: How training can multiply: a dtype, and the library, torch's own choice or oneDNN.
Way = tuple[Literal["float32", "bfloat16"], Literal["torch", "onednn"]]
TRAINING: tuple[Way, ...] = (("float32", "torch"), ("float32", "onednn"), ("bfloat16", "torch"))
#: What must be gained to leave a simpler way: less is chance.
WORTH = 1.05
#: Bytes of weights that are tried, more than a processor keeps in its cache; and of one weight.
ENOUGH, ENOUGH_OF_ONE = 2**28, 2**25

# ------------------------------------------------------------------------------ measuring


def least_seconds(
    tries: Sequence[Mapping[Any, Callable[[], object]]], seconds: float = 0.5, most: int = 30
) -> list[dict[Any, float]]:
    """The seconds that each call takes, for calls that do the same thing in several ways.

    Way after way, each goes through the whole list in its order, so that what it reads is as cold
    in the cache as in a model. What else a machine does only adds to a time, so the least of
    several rounds counts: of three, of more while ``seconds`` last, of ``most`` at most. After
    three, a way that takes twice as long as another is given up.
    """
    least = [dict.fromkeys(calls, math.inf) for calls in tries]
    start = time.perf_counter()
    for number in range(most):
        if number >= 3 and time.perf_counter() - start > seconds:
            break
        for way in dict.fromkeys(way for calls in tries for way in calls):
            for calls, times in zip(tries, least, strict=True):
                if way in calls and (number < 3 or times[way] <= 2 * min(times.values())):
                    before = time.perf_counter()
                    calls[way]()
                    times[way] = min(times[way], time.perf_counter() - before)
    return least


def numbers(*shape: int) -> Tensor:
    """Random numbers to multiply. The random state of the program is left alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def simplest_fast(seconds: Mapping[Any, float], worth: float = WORTH) -> Any:
    """The fastest way, or the first one from which there is less than ``worth`` to be gained."""
    best = min(seconds.values())
    return next(way for way, took in seconds.items() if took <= worth * best)


# --------------------------------------------------------------------- where weights stand


@dataclass
class Place:
    """Where a model multiplies with a weight: a linear layer, or the head of a language model."""

    module: Any

    @property
    def weight(self) -> Any:
        """The matrix (out, in)."""
        return self.module.weight

    @property
    def kind(self) -> tuple[torch.Size, torch.dtype]:
        """What decides which layout is the fastest."""
        return self.weight.shape, self.weight.dtype

    @torch.no_grad()
    def lay_out(self, layout: str, rows: int) -> None:
        """Put the weight into a layout, and the product that reads it there into the module."""
        product: Any = F.linear
        if layout == "packed":
            product = Packed(self.weight, rows)
        else:
            self.weight.data = ordered(self.weight.data, layout)
        if isinstance(self.module, Head):
            self.module.product = product
        elif layout == "packed":
            self.module.__class__, self.module.packed = PackedLinear, product
        else:
            self.module.__class__ = nn.Linear
            vars(self.module).pop("packed", None)


def ordered(weight: Tensor, layout: str) -> Tensor:
    """``weight`` (out, in) by rows or by columns; the same tensor if it lies so already."""
    return weight.mT.contiguous().mT if layout == "columns" else weight.contiguous()


def places(model: nn.Module) -> list[Place]:
    """Where a built model multiplies with a plain weight in float32 or bfloat16 on a CPU."""
    layers = (nn.Linear, OneDNNLinear, PackedLinear)
    multiplying = [m for m in model.modules() if type(m) in layers or computes_plainly(m)]
    return [Place(module) for module in multiplying if can_lie_anywhere(module.weight)]


def computes_plainly(module: nn.Module) -> bool:
    """Whether this is a head that no kernel computes, which would keep its own product."""
    return isinstance(module, Head) and (
        module.product in (F.linear, onednn_linear) or isinstance(module.product, Packed)
    )


def can_lie_anywhere(weight: Any) -> bool:
    """Whether this is a plain parameter, neither quantised nor cut into shares, that
    :func:`lay_out_` can lay out."""
    plain = type(weight) is nn.Parameter and not weight.is_inference()
    dtypes = (torch.float32, torch.bfloat16)
    return plain and weight.device.type == "cpu" and weight.dtype in dtypes


# ------------------------------------------------------------------------------- inference


@dataclass
class Layout:
    """What :func:`lay_out_` has done: how many weights lie in which order, how much faster all
    products are than before, and for what that was measured."""

    chosen: Counter[str] = field(default_factory=Counter)
    speed: float = 1.0
    conditions: str = ""

    def __str__(self) -> str:
        chosen = self.chosen.most_common()
        parts = ", ".join(f"{n} {name if name == 'packed' else f'in {name}'}" for name, n in chosen)
        order = f"memory: {parts}" if parts else "no new order"
        return f"weights in {order}; {self.speed:.2f}x as fast, {self.conditions}"


def lay_out_(model: nn.Module, rows: int = 1, layouts: Collection[str] = LAYOUTS) -> Layout:
    """Lay out the weights of a built model for inference, each as it is multiplied fastest here.

    ``rows`` says for how many rows at once: those of a batch that generates. Measured with the
    model's own weights, and with as many threads as torch has now, in about a second; weights of
    one shape lie alike. A single layout is taken as it is said.

    Values, names and gradients stay, and only the order of sums changes: logits in float32 move by
    1e-6 of their size at most. (Where another library wants its tensors contiguous, as FSDP does,
    ``layouts=["rows"]`` is the way back.) What is quantised, on a GPU, or of another dtype than
    float32 and bfloat16 is left alone. Raises ``ValueError`` for ``rows`` below 1, and for layouts
    that do not exist or cannot be made here.
    """
    require(Count, rows=rows)
    if isinstance(layouts, str) or not layouts or not set(layouts) <= set(LAYOUTS):
        raise ValueError(f"layouts={layouts!r} must be some of {list(LAYOUTS)}")
    weights = places(model)
    layouts_of = {place.kind: possible(place.weight.dtype, layouts) for place in weights}
    seconds = time_layouts(weights, rows, layouts_of)
    layout, before, after = Layout(), 0.0, 0.0
    for place in weights:
        times = seconds[place.kind]
        now, new = lies_in(place.weight), simplest_fast(times)
        place.lay_out(new, rows)
        layout.chosen[new] += 1
        before, after = before + times.get(now, times[new]), after + times[new]
    if after:
        layout.speed = before / after
    dtypes = sorted({str(place.weight.dtype).removeprefix("torch.") for place in weights})
    layout.conditions = f"{' and '.join(dtypes)}, {rows=}, threads={torch.get_num_threads()}"
    return layout


def lies_in(weight: Tensor) -> str:
    """``rows`` or ``columns``: how a weight lies now."""
    return "rows" if weight.is_contiguous() else "columns"


def possible(dtype: torch.dtype, layouts: Collection[str]) -> list[str]:
    """Those of the ``layouts`` that weights of a dtype can have here, the simplest first. Raises
    ``ValueError`` if there is none."""
    able = [way for way in LAYOUTS if way in layouts]
    if "packed" in able and not multiplies(dtype):
        able.remove("packed")
    if not able:
        raise ValueError(f"oneDNN does not multiply {dtype} on this processor: not packed")
    return able


def time_layouts(
    weights: Iterable[Place], rows: int, layouts_of: dict[Any, list[str]]
) -> dict[Any, dict[str, float]]:
    """The seconds that a product with a weight of each kind takes in each of its layouts; nothing
    is measured where there is one alone."""
    kinds, tries, size = [], [], 0
    for place in weights:
        layouts = layouts_of[place.kind]
        if len(layouts) > 1 and (size < ENOUGH or place.kind not in kinds):
            weight = place.weight.detach()
            weight = weight[: max(1, ENOUGH_OF_ONE * len(weight) // weight.nbytes)]
            kinds.append(place.kind)
            tries.append(tries_of(weight, rows, layouts))
            size += weight.nbytes
    with torch.no_grad():
        least = least_seconds(tries)
    seconds = {kind: dict.fromkeys(layouts, 0.0) for kind, layouts in layouts_of.items()}
    for kind, times in zip(kinds, least, strict=True):
        part = min(1.0, ENOUGH_OF_ONE / (math.prod(kind[0]) * kind[1].itemsize))
        for way, took in times.items():
            seconds[kind][way] += took / part / kinds.count(kind)
    return seconds


def tries_of(weight: Tensor, rows: int, layouts: Collection[str]) -> dict[str, Callable[[], Any]]:
    """A product of ``weight`` (out, in) with ``rows`` rows in each of the layouts."""
    x = numbers(rows, weight.shape[1]).to(weight.dtype)
    tries: dict[str, Callable[[], Any]] = {}
    for way in layouts:
        if way == "packed":
            tries[way] = partial(Packed(weight, rows), x, weight)
        else:
            tries[way] = partial(F.linear, x, ordered(weight, way))
    return tries


def faster_dtype(model: nn.Module, rows: int = 1) -> torch.dtype:
    """float32 or bfloat16: in which one a built model's products are faster here, each weight in
    its best layout. A model of no weights that :func:`lay_out_` can lay out: float32."""
    kinds = Counter(place.kind[0] for place in places(model))
    tries: list[dict[tuple[torch.dtype, str], Callable[[], Any]]] = []
    parts = []
    for shape, count in kinds.items():
        weight = numbers(min(shape[0], max(1, ENOUGH_OF_ONE // (4 * shape[1]))), shape[1])
        parts.append(count * shape[0] / len(weight))
        tries.append({})
        for dtype in (torch.float32, torch.bfloat16):
            calls = tries_of(weight.to(dtype), rows, possible(dtype, LAYOUTS))
            tries[-1] |= {(dtype, layout): call for layout, call in calls.items()}
    seconds = {torch.float32: 0.0, torch.bfloat16: 0.0}
    with torch.no_grad():
        for part, times in zip(parts, least_seconds(tries), strict=True):
            for dtype in seconds:
                seconds[dtype] += part * min(t for (of, _), t in times.items() if of == dtype)
    return simplest_fast(seconds, worth=1.2)  # as long as it is clear, the next run says the same


# -------------------------------------------------------------------------------- training


def time_products(model: nn.Module, rows: int) -> dict[Way, float]:
    """How many seconds the products of a training step take, forward and backward, for ``rows``
    rows of activations, by each way of ``TRAINING`` that this processor has.

    A float32 weight of each shape is tried, with as many rows as a billion operations allow, and
    128 at least. Without such weights on a CPU there are no ways.
    """
    kinds = Counter(place.kind for place in places(model) if place.kind[1] == torch.float32)
    has_onednn, has_bfloat16 = multiplies(torch.float32), multiplies(torch.bfloat16)
    able = [TRAINING[0], *TRAINING[1:2] * has_onednn, *TRAINING[2:] * has_bfloat16]
    tries, parts = [], []
    for (shape, _), count in kinds.items():
        weight = numbers(min(shape[0], 4096), shape[1]).requires_grad_()
        few = min(rows, max(128, 10**9 // (6 * weight.numel())))
        x = numbers(few, shape[1]).requires_grad_()
        tries.append({way: partial(there_and_back, way, x, weight) for way in able})
        parts.append(count * shape[0] / len(weight) * rows / few)
    seconds = dict.fromkeys(able if tries else [], 0.0)
    for part, times in zip(parts, least_seconds(tries), strict=True):
        for way, took in times.items():
            seconds[way] += part * took
    return seconds


def there_and_back(way: Way, x: Tensor, weight: Tensor) -> None:
    """The three products of a linear map in a training step: ``x`` (rows, in), ``weight``
    (out, in)."""
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=way[0] == "bfloat16"):
        y = onednn_linear(x, weight) if way[1] == "onednn" else F.linear(x, weight)
    torch.autograd.grad(y, (x, weight), torch.ones_like(y))
