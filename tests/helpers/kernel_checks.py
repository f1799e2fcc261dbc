"""How the tests judge a Triton kernel: one check for all, on a CPU (interpreted) and on a GPU.

:func:`check` runs a kernel beside its reference with inputs that stand in NaN-filled memory, with
outputs that PyTorch fills with NaN, and with gradients of several layouts. The error allowed is
twice that of the reference computed in the same dtype: nothing to tune, and nothing to hide in.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here", exc_type=ImportError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

#: bfloat16 is computed wrongly by the interpreter.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
#: Float32, whose bound is tight, in `make test`: what a mistake with tiles does shows in any dtype.
each_dtype_of_which_float16_is_slow = pytest.mark.parametrize(
    "dtype",
    [pytest.param(dtype, marks=[pytest.mark.slow] * (dtype == torch.float16)) for dtype in DTYPES],
    ids=lambda dtype: str(dtype)[6:],
)

#: The errors that :func:`check` measured: (kernel, dtype) -> (ours, PyTorch's), the largest.
MEASURED: dict[tuple[str, torch.dtype], tuple[float, float]] = {}

MARGIN = 8192  # numbers of NaN before and behind a tensor: more than a block writes


@contextmanager
def poisoned() -> Iterator[None]:
    """Results are allocated in NaN (integers: the largest number), between two margins of 77.

    What is not written stays NaN, and a store that is not masked hits a margin: also with the NaN
    that a load without a mask found in a margin of the inputs. exp() may overflow to infinity, as
    on a GPU, where NumPy would warn.
    """
    made: list[Guarded] = []

    def guarding(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*args: Any, **kwargs: Any) -> Tensor:
            made.append(Guarded(allocate(*args, **kwargs).fill_(0), contents=False))
            return made[-1].tensor

        return allocated

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, guarding(getattr(torch, name)))
        patch.setattr(Tensor, "new_empty", guarding(Tensor.new_empty))
        yield
    for result in made:
        result.assert_margins()


class Guarded:
    """A copy of a tensor that lies, with its strides, between two margins of NaN; without
    ``contents`` it holds NaN, between margins of a number."""

    def __init__(self, tensor: Tensor, contents: bool = True) -> None:
        spread = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size = spread if tensor.numel() else 0
        poison: float = torch.nan
        if not tensor.is_floating_point():
            poison = True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max
        self.memory = torch.full(
            (size + 2 * MARGIN,), poison, dtype=tensor.dtype, device=tensor.device
        )
        self.tensor = self.memory.as_strided(tensor.shape, tensor.stride(), MARGIN)
        if contents:
            self.tensor.copy_(tensor)
        elif tensor.dtype != torch.bool:
            self.memory[:MARGIN] = self.memory[-MARGIN:] = 77
        self.before = self.memory.clone()

    def assert_margins(self) -> None:
        """Nothing beside the tensor was written."""
        for margin in (slice(MARGIN), slice(-MARGIN, None)):
            now, before = self.memory[margin], self.before[margin]
            same = (now == before) | (now.isnan() & before.isnan())
            assert same.all(), "memory beside a tensor was written"

    def assert_untouched(self) -> None:
        """Neither the tensor nor what surrounds it was written."""
        self.assert_margins()
        same = self.memory.nan_to_num() == self.before.nan_to_num()
        assert same.all(), "an input was changed"


def strided(x: Tensor) -> Tensor:
    """The same numbers with another layout: the last two dimensions swapped in memory."""
    return x if x.dim() < 2 else x.mT.contiguous().mT


def upstreams(like: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Gradients of a result: of ``sum()``, whose strides are 0, plain and transposed ones."""
    plain = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    plain = plain.to(like.device, like.dtype)
    ones = torch.ones((), dtype=like.dtype, device=like.device)
    return {"plain": plain, "of sum()": ones.expand(like.shape), "transposed": strided(plain)}


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    return float((got.double() - want).abs().max()) if want.numel() else 0.0


def judge(name: str, dtype: torch.dtype, ours: Tensor, theirs: Tensor, want: Tensor) -> None:
    """``ours`` is at most twice as far from ``want`` (float64) as the reference in ``dtype``."""
    assert ours.dtype == theirs.dtype, f"{name}: {ours.dtype}, expected {theirs.dtype}"
    assert want.isfinite().all() and (want.any() or not want.numel()), f"{name}: nothing to compare"
    assert theirs.isfinite().all(), f"{name}: the reference overflows in {dtype}"
    rounded, top = want.to(dtype), float(want.abs().max()) if want.numel() else 0.0
    shift = 0.3 * min(1.0, top)
    slack = 2 * error(rounded + shift - shift, rounded.double())  # what one more rounding may cost
    if dtype == torch.float32 and want.numel():  # a GPU's exp2 and rsqrt are good to 2 units
        slack += 2 * torch.finfo(dtype).eps * top
    mine, reference = error(ours, want), error(theirs, want)
    old = MEASURED.get((name, dtype), (0.0, 0.0))
    MEASURED[name, dtype] = max(old[0], mine), max(old[1], reference)
    limit = 2 * reference + slack
    assert limit < top or not want.numel(), f"{name} in {dtype}: zeros would pass"
    assert mine <= limit, f"{name} in {dtype}: error {mine:.3g}, allowed {limit:.3g}"


def check(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    *args: Any,
    dtype: torch.dtype,
    name: str | None = None,
    gradients: bool = True,
    layout: Callable[[Tensor], Tensor] | None = None,
    upstreams: Callable[[Tensor, torch.Generator], dict[str, Tensor]] = upstreams,
) -> None:
    """Compare ``kernel(*args)`` with ``reference(*args)``, in value and in every gradient.

    Tensors of floating point among the arguments are given in float64 and rounded to ``dtype``;
    those with ``requires_grad`` get a gradient. The reference in float64, on the same rounded
    numbers, is the truth. Results may be one tensor or several. Gradients come in every layout
    where the layout of the inputs is asked about, elsewhere as a transposed one alone.
    """
    name = name or kernel.__name__
    given = [x.detach().to(dtype).to(DEVICE) if is_float(x) else on_device(x) for x in args]
    wants_gradient = [gradients and is_float(x) and x.requires_grad for x in args]
    guards = {
        i: Guarded(layout(x) if layout else x) for i, x in enumerate(given) if isinstance(x, Tensor)
    }

    def leaves(of: Callable[[Any], Any]) -> list[Any]:
        made = [of(x).detach() if isinstance(x, Tensor) else x for x in given]
        return [
            x.requires_grad_() if wanted else x
            for x, wanted in zip(made, wants_gradient, strict=True)
        ]

    ours_in = leaves(lambda x: x)
    for i, guard in guards.items():
        ours_in[i] = guard.tensor.detach().requires_grad_(wants_gradient[i])
    theirs_in = leaves(lambda x: x.clone())
    truth_in = leaves(lambda x: x.double() if x.is_floating_point() else x)

    with poisoned():
        ours = several(kernel(*ours_in))
    theirs, truth = several(reference(*theirs_in)), several(reference(*truth_in))
    for i, (mine, their, want) in enumerate(zip(ours, theirs, truth, strict=True)):
        judge(f"{name}[{i}]" if len(ours) > 1 else name, dtype, mine.detach(), their.detach(),
              want.detach())  # fmt: skip
    if any(wants_gradient):
        generator = torch.Generator().manual_seed(1)
        incoming = upstreams(ours[0], generator)
        for kind in incoming if layout else ["transposed"]:
            upstream = incoming[kind]
            guard = Guarded(upstream) if 0 not in upstream.stride() else None
            received = upstream if guard is None else guard.tensor
            with poisoned():
                got = gradients_of(ours[0], ours_in, wants_gradient, received)
            their = gradients_of(theirs[0], theirs_in, wants_gradient, upstream)
            want = gradients_of(truth[0], truth_in, wants_gradient, upstream.double())
            for i, (g, t, w) in enumerate(zip(got, their, want, strict=True)):
                judge(f"{name} gradient {i} ({kind})", dtype, g, t, w)
            if guard is not None:
                guard.assert_untouched()
    for guard in guards.values():
        guard.assert_untouched()


def several(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def on_device(x: Any) -> Any:
    return x.to(DEVICE) if isinstance(x, Tensor) else x


def gradients_of(
    result: Tensor, inputs: list[Any], wanted: list[bool], upstream: Tensor
) -> list[Tensor]:
    leaves = [x for x, want in zip(inputs, wanted, strict=True) if want]
    return list(torch.autograd.grad(result, leaves, upstream, retain_graph=True))


def numbers(*shape: int, seed: int = 0, scale: float = 1.0, grad: bool = True) -> Tensor:
    """Normal numbers in float64, the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return x.requires_grad_(grad)


def check_operator(operator: Any, *args: Any) -> None:
    """torch's own checks of a custom operator: schema, fake results, autograd, compilation."""
    leaves = [x.detach().requires_grad_(x.requires_grad) if is_float(x) else x for x in args]
    with warnings.catch_warnings():
        # torch 2.15 looks at its own intermediate results, and warns itself.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        torch.library.opcheck(operator, tuple(leaves))


def check_compiled(kernel: Callable[..., Tensor], *args: Any) -> None:
    """``torch.compile`` takes the kernel as one operator, without a graph break, and the gradient
    that it gives is the uncompiled one."""
    torch.compiler.reset()
    compiled = torch.compile(kernel, backend="aot_eager", fullgraph=True)
    results = []
    for function in (kernel, compiled):
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) if is_float(x) else x
                  for x in args]  # fmt: skip
        result = function(*leaves)
        wanted = [is_float(x) and x.requires_grad for x in leaves]
        upstream = torch.ones_like(result)
        gradients = gradients_of(result, leaves, wanted, upstream) if any(wanted) else []
        results.append([result.detach(), *gradients])
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)
