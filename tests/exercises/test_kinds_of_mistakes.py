"""Mistakes that are possible in every exercise, each around its reference: none of them passes.

    pytest tests/exercises/test_kinds_of_mistakes.py -k NAME

A new exercise is tried as all others are. Where a kind can do no harm, `HARMLESS` says why.
"""

from collections.abc import Callable
from functools import lru_cache, partial, wraps
from typing import Any

import pytest
import torch
from exercise_bench import bench_of
from torch import Tensor

from lm_from_scratch.exercises.exercise import drafts, exercises
from lm_from_scratch.exercises.launch import AsKernel
from lm_from_scratch.exercises.run import signature

Function = Callable[..., Any]
PLAIN = (Tensor, list, tuple, dict, bool, int, float, str, type(None))


class Kind:
    """A way to spoil calls.

    * ``acted``: whether any call had arguments that it could spoil
    """

    def __init__(self) -> None:
        self.acted = False

    def __call__(self, function: Function, args: Any, kwargs: Any) -> Any:
        changed = {name: self.change(value) for name, value in kwargs.items()}
        return function(*map(self.change, args), **changed)

    def change(self, value: Any, listed: bool = False) -> Any:
        """An argument as the mistake sees it, and what is in it."""
        if type(value) in (list, tuple):
            parts = [self.change(part, True) for part in value]
            same = all(a is b for a, b in zip(parts, value, strict=True))
            return value if same else type(value)(parts)
        if type(value) is dict:
            changed = {key: self.change(part) for key, part in value.items()}
            return value if all(changed[key] is value[key] for key in value) else changed
        if type(value) is Tensor:
            return self.tensor(value)
        return self.number(value) if listed and type(value) is int else value

    def tensor(self, x: Tensor) -> Tensor:
        return x

    def number(self, n: int) -> int:
        return n


class Float32(Kind):
    """Arguments are rounded to float32."""

    def tensor(self, x: Tensor) -> Tensor:
        self.acted |= x.dtype == torch.float64 and x.numel() > 0
        return x.float().double() if x.dtype == torch.float64 else x


class Int16(Kind):
    """Whole numbers are kept in 16 bits, those in lists too."""

    def tensor(self, x: Tensor) -> Tensor:
        wide = x.dtype in (torch.int64, torch.int32) and x.numel() > 0
        self.acted |= wide
        return x.to(torch.int16).to(x.dtype) if wide else x

    def number(self, n: int) -> int:
        self.acted = True
        return n if -(2**15) <= n < 2**15 else (n + 2**15) % 2**16 - 2**15


class Contiguous(Kind):
    """Numbers are read row by row from memory, in whatever order they are there."""

    def tensor(self, x: Tensor) -> Tensor:
        if x.layout != torch.strided or x.numel() < 2:
            return x
        self.acted = True
        return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


class Shortens(Kind):
    """The lists and dicts of the caller lose their last part."""

    def __call__(self, function: Function, args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        for value in [*args, *kwargs.values()]:
            if type(value) in (list, dict) and value:
                self.acted = True
                value.pop() if isinstance(value, list) else value.popitem()
        return result


class Remembers(Kind):
    """What came of arguments of the same shapes comes again. An object that is used as another one
    was gives what that one gave."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[Any, Any] = {}
        self.used: dict[int, tuple[Any, list[Any]]] = {}

    def __call__(self, function: Function, args: Any, kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        key = [getattr(function, "__name__", ""), [*map(signature, given)], [*kwargs]]
        if isinstance(function, partial):
            key[0] = function.func.__name__
            owner, key_of_all = self.used.setdefault(id(function.args[0]), (function.args[0], []))
            if not isinstance(owner, type):
                key_of_all.append(key)
                key = key_of_all
        result = function(*args, **kwargs)
        if result is None or not isinstance(result, PLAIN):
            return result
        self.acted |= any(word in repr(key) for word in ("torch.Size", "<class"))
        return self.memory.setdefault(repr(key), result)


KINDS = {
    "float32": Float32,
    "int16": Int16,
    "contiguous": Contiguous,
    "shortens": Shortens,
    "remembers": Remembers,
}
#: Kinds that pass, and why that is right.
HARMLESS = {
    ("contiguous", "hunt_masked_lanes"): "a kernel gets its rows in memory of the check's own",
    ("contiguous", "league_project"): "states come from the model itself, row by row",
    ("contiguous", "softmax_kernel"): "a kernel gets its rows in memory of the check's own",
    ("contiguous", "measure_rate"): "a symmetric matrix is its own transpose",
    ("float32", "measure_rate"): "whether 500 steps diverge is no matter of digits",
    ("int16", "distillation_loss"): "targets only say which places count",
    ("int16", "growing_cache"): "rows of a batch are few",
    ("int16", "hunt_beam_reorder"): "beams are few",
    ("int16", "hunt_no_gradient"): "a model of so many tokens is too slow for a check",
    ("int16", "league_project"): "there are eight rooms",
    ("int16", "left_padding"): "a mask holds 0 and 1",
    ("int16", "measure_groups"): "a group is shorter than any row",
    ("int16", "packed_attention"): "a right answer may make a mask of all pairs of tokens",
}


def spoilt(reference: Any, kind: Kind) -> Any:
    """The reference whose calls, and those of its methods, are spoilt."""
    if isinstance(reference, AsKernel):
        return AsKernel(spoilt(reference.function, kind))
    if isinstance(reference, type):
        return type(reference.__name__, (reference,), methods(reference, kind))

    @wraps(reference)
    def function(*args: Any, **kwargs: Any) -> Any:
        made = kind(reference, args, kwargs)
        if not isinstance(made, PLAIN) and not any(made is x for x in args):
            object.__setattr__(made, "__class__", spoilt(type(made), kind))  # it makes an object
        return made

    return function


def methods(cls: type, kind: Kind) -> dict[str, Any]:
    """What a class of ours defines for others to call, spoilt."""

    def spoil(method: Any) -> Any:
        if isinstance(method, (classmethod, staticmethod)):
            return type(method)(spoil(method.__func__))
        return wraps(method)(lambda self, *a, **k: kind(partial(method, self), a, k))

    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("lm_from_scratch"):
            found |= vars(base)
    return {
        name: spoil(value)
        for name, value in found.items()
        if (callable(value) or isinstance(value, classmethod))
        and not isinstance(value, type)
        and (name == "__init__" or not name.startswith("_"))
    }


#: Kinds follow one another on the same exercise: its reference runs once for all.
last_bench = lru_cache(maxsize=1)(bench_of)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [one.name for one in (*exercises(), *drafts())])
def test_no_exercise_accepts_it(name: str, kind: str) -> None:
    bench, spoiling = last_bench(name), KINDS[kind]()
    function = spoilt(bench.exercise.reference, spoiling)
    rejected = any(bench.rejects(number, function) for number in bench.numbers)
    assert rejected == (spoiling.acted and (kind, name) not in HARMLESS)
