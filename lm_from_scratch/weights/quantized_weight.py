r"""A weight of 8 or 4 bits that torch takes for a tensor.

A matrix (N, K) is kept as small integers, the *codes*. Each row is cut into groups of numbers, and
each group has a *scale*, the step between two codes; with 4 bits it also has a *zero*, the number
that the code in the middle stands for:

.. math::

   \hat W = s \cdot c \quad (\text{int8}, \; -127 \le c \le 127, \; s = \max|W| / 127)

   \hat W = z + s \, (c - 8) \quad (\text{int4}, \; 0 \le c \le 15, \;
   s = (\max W - \min W) / 15)

Decoding reads every weight once for each token, so a fourth of the bytes can be close to four times
the speed. Activations stay as they are, but in :mod:`~lm_from_scratch.weights.packed_int8`.

:class:`QuantizedWeight` is a tensor: it has the shape and the dtype of the matrix it stands for,
and torch moves, copies, saves and loads it with its own functions. It knows the operators that a
weight meets; every other one is refused by name.

Source for groups with a scale and a zero: Frantar et al., *GPTQ*, 2022, arXiv:2210.17323, which
goes on to choose codes by data; here every number is rounded to its nearest code.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

#: The dtype of activations that torch's kernels are fast for. On x86 all others meet a plain loop,
#: which is slower than decoding the weight.
KERNEL_DTYPES = (torch.bfloat16,)


class QuantizedWeight(Tensor):
    """A matrix (N, K) that is kept as codes, with a scale for each group of ``group_size`` numbers.

    It looks like the matrix it stands for: ``shape``, ``dtype`` (that of its scales, and of its
    products) and ``device``; ``nbytes`` is what it really holds. It has no gradient of its own,
    and hands one on to the activations that it multiplies.
    """

    bits: ClassVar[int]
    held: ClassVar[tuple[str, ...]]  # the names of the tensors that it holds
    few_rows: ClassVar[int]  # of activations: beyond, decoding once is faster than the kernel
    group_size: int

    # ----------------------------------------------------------------- what a subclass provides

    @classmethod
    def quantize(cls, weight: Tensor, group_size: int | None = None) -> Self:
        """Round each number of ``weight`` (N, K) to the nearest code of its group."""
        raise NotImplementedError

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor]) -> Self:
        """The weight whose :meth:`parts` these are."""
        raise NotImplementedError

    def parts(self) -> dict[str, Tensor]:
        """Plain tensors that say all, in a layout for files."""
        raise NotImplementedError

    def dequantize(self) -> Tensor:
        """The matrix (N, K) that the codes stand for, as a plain tensor."""
        raise NotImplementedError

    def look_up(self, idx: Tensor) -> Tensor:
        """The rows ``idx`` (...) of that matrix: (..., K)."""
        raise NotImplementedError

    def kernel(self, x: Tensor) -> Tensor | None:
        """``x @ W.T`` for few rows ``x`` (M, K) by torch's kernel; ``None`` if it cannot."""
        raise NotImplementedError

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ W.T + bias`` of ``x`` (..., K) and ``bias`` (N,); a subclass may have another
        way."""
        return product(x, self, bias)

    # ------------------------------------------------------------------------- being a tensor

    @classmethod
    def wrap(cls, shape: Sequence[int], group_size: int, **held: Any) -> Self:
        """The weight of that shape that holds these tensors, the codes first, the scales last."""
        *_, scale = held.values()
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, device=scale.device)
        self.group_size = group_size
        for name, tensor in held.items():
            setattr(self, name, tensor)
        return self

    def apply_to_held(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The weight that holds the results of ``function``."""
        held = {name: function(getattr(self, name)) for name in self.held}
        return type(self).wrap(self.shape, self.group_size, **held)

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return list(self.held), self.group_size

    @classmethod
    def __tensor_unflatten__(
        cls, held: dict[str, Tensor], group_size: int, shape: Sequence[int], stride: Sequence[int]
    ) -> Self:
        return cls.wrap(shape, group_size, **held)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device='{self.device}', group_size={self.group_size}, nbytes={self.nbytes})"
        )

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of what it holds."""
        return sum(getattr(self, name).nbytes for name in self.held)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Above autograd: what torch would take apart before :meth:`__torch_dispatch__` sees it."""
        with torch._C.DisableTorchFunctionSubclass():
            return FUNCTIONS.get(func, func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Below autograd: torch's own operators."""
        if func not in OPERATORS:
            raise NotImplementedError(
                f"{func} is not implemented for {cls.__name__}; its dequantize() is a plain "
                "tensor, for which it is"
            )
        return OPERATORS[func](*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------ rounding


def check(weight: Tensor, group_size: int | None, longest: int = sys.maxsize) -> int:
    """``group_size``, or by default a row or ``longest``, if it can cut ``weight`` (N, K) into
    groups. Raises ``ValueError`` if it cannot."""
    if isinstance(weight, QuantizedWeight):
        raise ValueError(f"the weight is an Int{weight.bits}Weight already")
    if weight.dim() != 2 or not weight.is_floating_point() or 0 in weight.shape:
        raise ValueError(
            f"a weight of {weight.dtype} and shape {tuple(weight.shape)} cannot be quantised: it "
            "must be a matrix of floating-point numbers"
        )
    if group_size is None:
        group_size = min(longest, weight.shape[1])
    if type(group_size) is not int:
        raise ValueError(f"group_size={group_size!r} must be an integer")
    if group_size < 1 or weight.shape[1] % group_size:
        K = weight.shape[1]
        largest = [K // n for n in range(1, 10_000) if K % n == 0][:6]
        raise ValueError(
            f"rows of {weight.shape[1]} numbers cannot be cut into groups of "
            f"group_size={group_size}; sizes that fit are {largest[::-1]}"
        )
    if not weight.is_meta and not (2 * weight).isfinite().all():  # a range can be twice a number
        raise ValueError("the weight has numbers that are not finite, or too large")
    return group_size


def precise(weight: Tensor) -> Tensor:
    """The ``weight`` (N, K) in float32 at least: bfloat16 would round a number to a wrong code."""
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


def nonzero(scale: Tensor) -> Tensor:
    """``scale`` (N, G) to divide by: a group of equal numbers has no step, and anything but 0
    will do."""
    return torch.where(scale == 0, 1, scale)


# ----------------------------------------------------------------------------------- operators


def product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """``x @ W.T + bias`` of ``x`` (..., K) and ``bias`` (N,): by the kernel for few rows, else
    by decoding the whole weight once."""
    rows = x.reshape(-1, x.shape[-1])
    suits = x.device.type == "cpu" and x.dtype == weight.dtype and x.dtype in KERNEL_DTYPES
    few = 0 < len(rows) <= weight.few_rows
    y = weight.kernel(rows.contiguous()) if suits and few else None
    if y is None:
        return F.linear(x, weight.dequantize().to(x.dtype), bias)
    y = y.view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


class QuantizedLinear(torch.autograd.Function):
    """The product, with the gradients of what is not quantised. It keeps codes, not numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return weight.product(x, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad
        return (
            grad @ weight.dequantize().to(grad.dtype) if needs_x else None,
            None,
            grad.reshape(-1, grad.shape[-1]).sum(dim=0) if needs_bias else None,
        )


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of ``input`` (..., K) with a quantised ``weight`` (N, K) and a ``bias`` (N,),
    in value and gradient. Raises ``ValueError`` where dtypes or shapes do not agree, and for a
    weight that requires a gradient."""
    x = input
    if not isinstance(weight, QuantizedWeight):
        raise NotImplementedError("F.linear is implemented for a quantised weight, not for x")
    # torch's autocast leaves float64 alone; the weight is decoded as it is, and rounded then
    autocast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    if autocast:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, bias = x.to(dtype), bias.to(dtype) if bias is not None else None
    if (x.dtype != weight.dtype and not autocast) or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x is {x.dtype} with {x.shape[-1]} features, the weight {weight.dtype} with "
            f"{weight.shape[1]}: they must agree"
        )
    if bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1]):
        raise ValueError(
            f"bias is {bias.dtype} of shape {tuple(bias.shape)}, x {x.dtype}, and the weight has "
            f"{weight.shape[0]} rows: they must agree"
        )
    if not torch.is_grad_enabled():
        return weight.product(x, bias)
    check_frozen(weight)
    return QuantizedLinear.apply(x, weight, bias)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *_: Any,
    **__: Any,
) -> Tensor:
    """``F.embedding`` of indices ``input`` (any shape) with a quantised ``weight`` (N, K).
    Raises ``ValueError`` for a weight that requires a gradient, and ``IndexError`` for an index
    that is no row. The other arguments matter for a gradient only."""
    idx = input
    if not isinstance(weight, QuantizedWeight):
        raise NotImplementedError("F.embedding is implemented for a quantised weight")
    if idx.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"the indices are {idx.dtype}: they must be int64 or int32")
    if max_norm is not None:
        raise ValueError(f"max_norm={max_norm} would change codes of {type(weight).__name__}")
    check_frozen(weight)
    # reading the indices would break a compiled graph
    readable = idx.numel() and not torch.compiler.is_compiling()
    if readable and not 0 <= int(idx.min()) <= int(idx.max()) < weight.shape[0]:
        raise IndexError(f"an index is not one of the {weight.shape[0]} rows of the weight")
    return weight.look_up(idx)


def rows_of(weight: Tensor, rows: Any) -> Tensor:
    """``weight[rows]`` of a quantised ``weight`` (N, K) for a slice: its rows as plain numbers."""
    if not isinstance(weight, QuantizedWeight) or not isinstance(rows, slice):
        return weight[rows]
    return weight.look_up(torch.arange(len(weight), device=weight.device)[rows])


def check_frozen(weight: QuantizedWeight) -> None:
    """Raises ``ValueError`` for a weight that requires a gradient."""
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{type(weight).__name__} has no gradient: give it requires_grad_(False), and train "
            "adapters (lm_from_scratch.weights.lora)"
        )


def module_load(self: Tensor, other: Tensor, assign: bool = False) -> Tensor:
    """What ``load_state_dict`` swaps into a module, if either of ``self`` and ``other``, of one
    shape (N, K), is quantised.

    Without ``assign`` the module's tensor keeps its class, dtype and device, and takes the values.
    With it the checkpoint's dtype and device win, and its class if it is quantised; a plain tensor
    becomes what the module has.
    """
    if assign and isinstance(self, QuantizedWeight) and not isinstance(other, QuantizedWeight):
        return type(self).quantize(other, self.group_size)
    return Tensor.module_load(self, other, assign=assign)


def to_copy(
    weight: QuantizedWeight,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> QuantizedWeight:
    """Another device moves all; another dtype changes the scales, not the codes.

    Raises ``ValueError`` for an integer dtype.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"{type(weight).__name__} cannot stand for a matrix of {dtype}")
    return weight.apply_to_held(
        lambda t: t.to(device, dtype if t.is_floating_point() else None, copy=True)
    )


def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Values only, of ``source`` (N, K): the class, dtype and device of ``target`` (N, K) stay.
    Raises ``ValueError`` for another shape."""
    if target.shape != source.shape:
        raise ValueError(f"shape {tuple(source.shape)} does not fit into {tuple(target.shape)}")
    if not isinstance(target, QuantizedWeight):
        assert isinstance(source, QuantizedWeight)
        return target.copy_(source.dequantize())
    if isinstance(source, QuantizedWeight) and (
        source.held != target.held or source.group_size != target.group_size
    ):
        source = source.dequantize()
    if not isinstance(source, QuantizedWeight):
        source = type(target).quantize(source.to(target.device, target.dtype), target.group_size)
    elif any(getattr(source, name).shape != getattr(target, name).shape for name in target.held):
        source = type(target).from_parts(source.parts())  # it had another processor's blocks
    for name in target.held:
        setattr(target, name, getattr(target, name).copy_(getattr(source, name)))
    return target


def empty_like(
    weight: QuantizedWeight,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> QuantizedWeight:
    """A weight of the same sizes, with any numbers."""
    return weight.apply_to_held(
        lambda t: torch.empty_like(t, dtype=dtype if t.is_floating_point() else None, device=device)
    )


def share_memory_(weight: QuantizedWeight) -> QuantizedWeight:
    """With other processes. torch's own would look for the memory of the wrapper, and crash."""
    for name in weight.__tensor_flatten__()[0]:
        getattr(weight, name).share_memory_()
    return weight


def set_data(weight: Tensor, data: Tensor) -> None:
    """Raises ``ValueError``: ``data`` (any shape) is no way to change a quantised ``weight``
    (N, K)."""
    raise ValueError(
        "weight.data = ... would change the dtype that a quantised weight shows, not what it "
        "holds: use weight.copy_(), or swap_parameters_ of lm_from_scratch.weights.swap"
    )


#: Functions of torch that a quantised weight answers itself.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.linear: linear,
    F.embedding: embedding,
    Tensor.__getitem__: rows_of,
    Tensor.module_load: module_load,
    Tensor.share_memory_: share_memory_,
    Tensor.data.__set__: set_data,  # type: ignore[attr-defined]
}

aten = torch.ops.aten
#: Operators of torch that a quantised weight has.
OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: lambda weight: weight.apply_to_held(torch.detach),
    aten.alias.default: lambda weight: weight.apply_to_held(torch.detach),
    aten.clone.default: lambda weight, **_: weight.apply_to_held(torch.clone),
    aten._to_copy.default: to_copy,
    aten.copy_.default: copy_,
    aten.empty_like.default: empty_like,
}
