"""Say what is wrong with a result, and say the first thing first: type, shape, dtype, values.

Nothing is broadcast: a result of shape [1, 4] is not one of shape [3, 4]. The functions of torch
that decide are taken when this file is imported, so that code which replaces them later does not
change a verdict.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# (relative, absolute) tolerance of results, by dtype; gradients are sums of many rounded terms.
TOLERANCES = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}
GRADIENT_TOLERANCE = (1e-4, 1e-5)

#: The kind of a fault that another order of the arguments in memory alone brings out.
MEMORY = "memory"

Tolerance = tuple[float, float]

_isnan, _isinf, _where, _abs = torch.isnan, torch.isinf, torch.where, torch.abs
_allclose = torch.allclose


@dataclass(frozen=True)
class Fault:
    """The first thing wrong with a result, in words for the student."""

    kind: str  # stub, raised, time, type, shape, dtype, values, changed, gradient, memory
    text: str


def compare(
    got: Any, want: Any, tolerance: Tolerance | None = None, name: str = "the result"
) -> Fault | None:
    """The first difference between a result and the expected one, or None.

    Tensors are compared within the tolerance of the expected dtype, or the one given; whole
    numbers, booleans and texts exactly; lists, tuples and dicts part by part.
    """
    if got is None and want is not None and name == "the result":
        return Fault("type", f"{name} is None: is there a return statement?")
    if type(got) is np.float64:  # it is a float, with operators of its own
        got = float(got)
    if isinstance(want, Tensor):
        return _compare_tensors(got, want, tolerance, name)
    if isinstance(want, dict):
        if not isinstance(got, dict) or got.keys() != want.keys():
            return Fault("type", f"{name} is {_brief(got)}; expected {_brief(want)}")
        parts = [(key, got[key], want[key]) for key in want]
    elif isinstance(want, (list, tuple)):
        if not isinstance(got, (list, tuple)):
            return Fault("type", f"{name} is {_brief(got)}; expected {_brief(want)}")
        if len(got) != len(want):
            text = f"{name} has {len(got)} parts, expected {len(want)}: {_brief(got)}"
            return Fault("shape", text)
        parts = [(i, g, w) for i, (g, w) in enumerate(zip(got, want, strict=True))]
    elif isinstance(want, float) and type(got) in (int, float):
        relative, absolute = tolerance or TOLERANCES[torch.float64]
        if isinstance(got, int) and abs(got) > 2**1000:  # no float holds it
            return Fault("values", f"{name} is {describe(got)}, expected {want:.8g}")
        near = math.isfinite(want) and abs(got - want) <= absolute + relative * abs(want)
        if near or got == want:
            return None
        if math.isnan(got) and math.isnan(want):
            return None
        a, b = _unlike(got, want)
        text = f"{name} is {a}, expected {b}"
        two = torch.tensor([[float(got)], [want]], dtype=torch.float64)
        return Fault("values", text + _why(two[0], two[1], relative))
    else:
        if type(got) is type(want) and bool(got == want):
            return None
        if type(got) is type(want):
            return Fault("values", f"{name} is {describe(got)}, expected {describe(want)}")
        return Fault("values", f"{name} is {_brief(got)}, expected {_brief(want)}")
    for key, g, w in parts:
        label = str(key) if isinstance(key, str) else f"{name}[{key}]"
        if fault := compare(g, w, tolerance, label):
            return fault
    return None


def _compare_tensors(
    got: Any, want: Tensor, tolerance: Tolerance | None, name: str
) -> Fault | None:
    if not isinstance(got, Tensor):
        return Fault("type", f"{name} is {_brief(got)}; expected a tensor {describe(want)}")
    if got.shape != want.shape:
        return Fault("shape", f"{name} has shape {list(got.shape)}, expected {list(want.shape)}")
    if got.dtype != want.dtype:
        return Fault("dtype", f"{name} is {_dtype(got)}, expected {_dtype(want)}")
    if got.device != want.device:
        return Fault("type", f"{name} is on {got.device}, expected on {want.device}")
    if got.numel() == 0:
        return None
    got, want = got.detach(), want.detach()
    if not want.is_floating_point():
        wrong = got != want
        if not bool(wrong.any()):
            return None
        at = _index(wrong.flatten().to(torch.uint8).argmax(), want)
        return Fault(
            "values", f"{_how_many(wrong, got, want, name)}; the first at {list(at)}: "
            f"got {got[at].item()}, expected {want[at].item()}"
        )  # fmt: skip
    relative, absolute = tolerance or TOLERANCES[want.dtype]
    g, w = got.double(), want.double()
    if _allclose(g, w, relative, absolute, equal_nan=True):
        return None
    for word, bad in (("NaN", _isnan(g) & ~_isnan(w)), ("infinite", _isinf(g) & (g != w))):
        if bool(bad.any()):
            return Fault("values", _special(word, bad, name, want))
    equal = (g == w) | (_isnan(g) & _isnan(w))
    distance = _where(equal, torch.zeros_like(w), _abs(g - w))
    wrong = ~equal & (~(distance <= absolute + relative * _abs(w)) | _isinf(w))
    if not bool(wrong.any()):
        return None
    at = _index(_where(wrong, distance.nan_to_num(nan=math.inf), -1.0).argmax(), want)
    a, b = _unlike(got[at].item(), want[at].item())
    text = f"{_how_many(wrong, got, want, name)}; largest error {distance[at].item():.3g} at "
    text += f"{list(at)}: got {a}, expected {b}"
    text += f" (allowed {absolute:.0e} + {relative:.0e}*|expected|)"
    fine = want.dtype == torch.float64
    return Fault("values", text + (_why(g[wrong], w[wrong], relative) if fine else ""))


def _why(got: Tensor, want: Tensor, relative: float) -> str:
    """A question, where numbers of float64 differ as float32 makes them differ: by its rounding,
    and either float32 holds what was found, or it was rounded up and down."""
    error = (got - want) * want.sign()
    if relative > 1e-8 or not bool((error.abs() <= 1e-5 * want.abs().max()).all()):
        return ""
    both_ways = bool((error > 0).any()) and bool((error < 0).any())
    held = bool(got.any()) and bool((got == got.float().double()).all())
    return "; is anything computed in float32?" if both_ways or held else ""


def _how_many(wrong: Tensor, got: Tensor, want: Tensor, name: str) -> str:
    text = f"{int(wrong.sum())} of {want.numel()} values of {name} differ"
    if want.numel() > 1 and not bool(got.any()) and bool(want.any()):
        text += f"; {name} is all {'False' if got.dtype == torch.bool else 'zeros'}"
    return text


def _unlike(got: float, want: float) -> tuple[str, str]:
    """Two numbers with as many digits as it takes to see that they differ, five at least."""
    for digits in (5, 9, 12):
        a, b = f"{got:.{digits}g}", f"{want:.{digits}g}"
        if a != b:
            return a, b
    return repr(got), repr(want)


def _special(word: str, bad: Tensor, name: str, want: Tensor) -> str:
    at = _index(bad.flatten().to(torch.uint8).argmax(), want)
    return (
        f"{int(bad.sum())} of {want.numel()} values of {name} are {word}, the first at {list(at)}, "
        f"where {want[at].item():.5g} is expected"
    )


def _index(flat: Tensor, like: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(flat, like.shape))


def has_nan(value: Any) -> bool:
    """Whether any number in a result is NaN."""
    if isinstance(value, Tensor):
        return value.is_floating_point() and bool(_isnan(value).any())
    if isinstance(value, dict):
        return any(has_nan(part) for part in value.values())
    if isinstance(value, (list, tuple)):
        return any(has_nan(part) for part in value)
    return isinstance(value, float) and math.isnan(value)


def describe(value: Any) -> str:
    """A value in a few characters: a tensor by dtype and shape, a small number as it is."""
    if isinstance(value, Tensor):
        if value.dim() == 0:
            return f"{_dtype(value)}[]"
        strange = "" if value.is_contiguous() else " (not contiguous)"
        return f"{_dtype(value)}[{','.join(map(str, value.shape))}]{strange}"
    if isinstance(value, (list, tuple)) and _holds_tensors(value):
        return f"[{', '.join(describe(part) for part in value[:3])}{', ...' * (len(value) > 3)}]"
    if isinstance(value, dict) and _holds_tensors(value):
        shown = [f"{key!r}: {describe(part)}" for key, part in list(value.items())[:3]]
        return f"{{{', '.join(shown)}{', ...' * (len(value) > 3)}}}"
    try:
        text = repr(value)
    except Exception:  # a student's class
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _holds_tensors(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, (list, tuple, dict)):
        return any(_holds_tensors(part) for part in parts)
    return isinstance(value, Tensor)


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {describe(value)}"
    return f"{type(value).__name__} {describe(value)}" if value is not None else "None"


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
