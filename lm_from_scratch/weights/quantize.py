r"""Weights of 8 or 4 bits, in a built model.

A matrix (N, K) is kept as small integers, the *codes*. Each row is cut into groups of numbers, and
each group has a *scale*, the step between two codes; with 4 bits it also has a *zero*, the number
that the code in the middle stands for:

.. math::

   \hat W = s \cdot c \quad (\text{int8}, \; -127 \le c \le 127, \; s = \max|W| / 127)

   \hat W = z + s \, (c - 8) \quad (\text{int4}, \; 0 \le c \le 15, \;
   s = (\max W - \min W) / 15)

Only weights are quantised; activations stay as they are. Decoding reads every weight once for each
token, so a fourth of the bytes can be close to four times the speed.

:class:`QuantizedWeight` is a tensor: it has the shape and the dtype of the matrix it stands for,
and torch moves, copies, saves and loads it with its own functions. :func:`quantize_` swaps it into
a built model. It knows the operators that a weight meets; every other one is refused by name.

Source for groups with a scale and a zero: Frantar et al., *GPTQ*, 2022, arXiv:2210.17323, which
goes on to choose codes by data; here every number is rounded to its nearest code.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.weights import int4
from lm_from_scratch.weights.swap import swap_parameters_

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
    def wrap(cls, shape: Sequence[int], group_size: int, **held: Tensor) -> Self:
        """The weight of that shape that holds these tensors, the codes first, the scales last."""
        codes, *_, scale = held.values()
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, device=codes.device)
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


class Int8Weight(QuantizedWeight):
    """8 bits a number. ``codes`` (N, K) are int8, ``scale`` is (N, G) for G groups in a row.

    Without a ``group_size`` a row is one group, and torch has a kernel for that.
    """

    bits = 8
    held = ("codes", "scale")
    few_rows = 32
    codes: Tensor
    scale: Tensor

    @classmethod
    def quantize(cls, weight: Tensor, group_size: int | None = None) -> Self:
        """Round each number of ``weight`` (N, K) to the nearest code of its group. Raises
        ``ValueError`` as :func:`check`."""
        group_size = check(weight, group_size)
        groups = precise(weight).unflatten(1, (-1, group_size))  # (N, G, K / G)
        scale = (groups.abs().amax(dim=2) / 127).to(weight.dtype)  # (N, G)
        codes = (groups / nonzero(scale)[..., None]).round().clamp(-127, 127)
        codes = codes.flatten(1).to(torch.int8).contiguous()  # (N, K)
        return cls.wrap(weight.shape, group_size, codes=codes, scale=scale)

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor]) -> Self:
        codes, scale = parts["codes"].clone(), parts["scale"]  # aligned: in a file it may not be
        return cls.wrap(codes.shape, codes.shape[1] // scale.shape[1], codes=codes, scale=scale)

    def parts(self) -> dict[str, Tensor]:
        return {"codes": self.codes, "scale": self.scale}

    def dequantize(self) -> Tensor:
        groups = self.codes.to(self.dtype).unflatten(1, (-1, self.group_size))  # (N, G, K / G)
        return groups.mul_(self.scale[..., None]).flatten(1)

    def look_up(self, idx: Tensor) -> Tensor:
        groups = self.codes[idx].unflatten(-1, (-1, self.group_size))
        return (groups * self.scale[idx][..., None]).flatten(-2)

    def kernel(self, x: Tensor) -> Tensor | None:
        if self.scale.shape[1] != 1 or self.shape[1] % 16:  # it reads 16 aligned codes at once
            return None
        # a file or a compiled graph may have put them where it would crash
        if torch.compiler.is_compiling() or self.codes.data_ptr() % 16:
            return None
        x = x.clone() if x.data_ptr() % 32 else x
        return torch._weight_int8pack_mm(x, self.codes, self.scale.view(-1))


class Int4Weight(QuantizedWeight):
    """4 bits a number. ``codes`` (N / R, K, R / 2) are bytes, ``scale_and_zero`` is (G, N, 2).

    The rows lie in blocks of R, as :mod:`~lm_from_scratch.weights.int4` says.
    """

    bits = 4
    held = ("codes", "scale_and_zero")
    few_rows = 96
    codes: Tensor
    scale_and_zero: Tensor

    @classmethod
    def quantize(cls, weight: Tensor, group_size: int | None = None) -> Self:
        """Round each number of ``weight`` (N, K) to the nearest code of its group. Raises
        ``ValueError`` as :func:`check`, and for an odd K."""
        group_size = check(weight, group_size, longest=64)
        if weight.shape[1] % 2:
            raise ValueError(
                f"rows of {weight.shape[1]} numbers cannot be kept in 4 bits: two codes share a "
                "byte, so the number must be even"
            )
        groups = precise(weight).unflatten(1, (-1, group_size))  # (N, G, K / G)
        low, high = groups.amin(dim=2), groups.amax(dim=2)  # (N, G)
        scale = ((high - low) / 15).to(weight.dtype)
        zero = (low + 8 * scale).to(weight.dtype)
        codes = (groups - zero[..., None]) / nonzero(scale)[..., None]
        codes = (codes.round() + 8).clamp(0, 15).flatten(1).to(torch.uint8)  # (N, K)
        return cls._pack(codes, scale, zero)

    @classmethod
    def _pack(cls, codes: Tensor, scale: Tensor, zero: Tensor) -> Self:
        """From codes (N, K), one in a byte, and scale and zero (N, G)."""
        packed, both = int4.pack(codes, scale, zero)
        group_size = codes.shape[1] // scale.shape[1]
        return cls.wrap(codes.shape, group_size, codes=packed, scale_and_zero=both)

    def _unpack(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes (N, K), one in a byte, and scale and zero (N, G)."""
        return int4.unpack(self.codes, self.scale_and_zero, self.shape[0])

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor]) -> Self:
        pairs = parts["codes"]  # (N, K / 2): two neighbours in a byte
        codes = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1)
        return cls._pack(codes, parts["scale"], parts["zero"])

    def parts(self) -> dict[str, Tensor]:
        codes, scale, zero = self._unpack()
        return {
            "codes": codes[:, ::2] | codes[:, 1::2] << 4,
            "scale": scale.contiguous(),
            "zero": zero.contiguous(),
        }

    def dequantize(self) -> Tensor:
        return self._decode(*self._unpack())

    def _decode(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """From codes (..., K) and scale and zero (..., G) to numbers (..., K)."""
        groups = codes.to(scale.dtype).unflatten(-1, (-1, self.group_size)).sub_(8)
        return groups.mul_(scale[..., None]).add_(zero[..., None]).flatten(-2)

    def look_up(self, idx: Tensor) -> Tensor:
        return self._decode(*int4.unpack_rows(self.codes, self.scale_and_zero, idx))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A file of another processor has its blocks: the codes are laid out again for this one."""
        self.__dict__.update(state)
        if self.codes.shape[2] != int4.BLOCK // 2:
            here = self.from_parts(self.parts())
            self.codes, self.scale_and_zero = here.codes, here.scale_and_zero

    def kernel(self, x: Tensor) -> Tensor | None:
        half = self.codes.shape[2]
        if self.group_size not in (32, 64, 128, 256) or half not in int4.KERNEL_HALVES:
            return None
        codes = self.codes.view(-1, self.shape[1] // 2)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, codes, self.group_size, self.scale_and_zero
        )
        return y[:, : self.shape[0]].contiguous()


#: The classes by their number of bits.
WEIGHTS: dict[int, type[QuantizedWeight]] = {8: Int8Weight, 4: Int4Weight}


def check(weight: Tensor, group_size: int | None, longest: int = sys.maxsize) -> int:
    """``group_size``, or by default a row or ``longest``, if it can cut ``weight`` (N, K) into
    groups. Raises ``ValueError`` if it cannot."""
    if isinstance(weight, QuantizedWeight):
        raise ValueError(f"the weight is an {type(weight).__name__} already")
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
        divisors = [n for n in range(1, weight.shape[1] + 1) if weight.shape[1] % n == 0]
        raise ValueError(
            f"rows of {weight.shape[1]} numbers cannot be cut into groups of "
            f"group_size={group_size}; sizes that fit are {divisors[-6:]}"
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
        raise ValueError(f"max_norm={max_norm} would change an {type(weight).__name__}")
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
            f"an {type(weight).__name__} has no gradient: give it requires_grad_(False), and train "
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
        raise ValueError(f"an {type(weight).__name__} cannot stand for a matrix of {dtype}")
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
        getattr(target, name).copy_(getattr(source, name))
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
    for name in weight.held:
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

torch.serialization.add_safe_globals([Int8Weight, Int4Weight])  # for weights_only=True


# ------------------------------------------------------------------------------- a built model


def quantize_(
    model: nn.Module,
    bits: int = 8,
    group_size: int | None = None,
    select: Callable[[str], bool] = lambda name: True,
) -> None:
    """Quantise the weights of a built model that a token is multiplied with, in place.

    These are the weights of every ``nn.Linear`` and of the head, tied or not; ``select`` says by
    name which of them. An embedding that is only looked up, norms and biases stay as they are. The
    quantised weights are swapped in: an optimizer that holds a weight, or a module that shares it,
    goes on holding it. They need no gradient. All are quantised, or none.

    ``group_size`` is the length of a group; by default a row with 8 bits and 64 with 4 bits.

    A result of the model that still has a graph holds the weights: free it first, or compute it
    under ``torch.no_grad()``. Raises ``ValueError``, and changes nothing, for other ``bits``, a
    ``group_size`` that does not fit, and a layer that is no plain one.
    """
    if type(bits) is not int or bits not in WEIGHTS:
        raise ValueError(f"bits={bits!r} must be one of {sorted(WEIGHTS, reverse=True)}")
    for name, module in model.named_modules():
        odd = isinstance(module, nn.Linear) and type(module) is not nn.Linear
        if odd and select(f"{name}.weight".lstrip(".")):
            raise ValueError(
                f"{name} is a {type(module).__name__}: what else reads its weight may not know "
                "codes. Quantise before you change a layer, or leave it out with select"
            )
    found = multiplied(model)
    weights = {name: p for name, p in found.items() if select(name)}
    if not weights:
        raise ValueError(f"select chose none of the weights {list(found)}")
    new: dict[str, Tensor] = {}
    for name, weight in weights.items():
        try:
            new[name] = WEIGHTS[bits].quantize(weight.detach(), group_size)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    swap_parameters_(model, new)


def dequantize_(model: nn.Module) -> None:
    """Swap each quantised weight for the plain matrix that it stands for, which stays frozen."""
    found = quantized_weights(model)
    swap_parameters_(model, {name: weight.dequantize() for name, weight in found.items()})


def multiplied(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of every ``nn.Linear`` and of the head, by name. Raises ``ValueError`` for a head
    that computes with another function."""
    found = set()
    for module in model.modules():
        project = getattr(module, "project", F.linear)
        if project is not F.linear:
            raise ValueError(f"the head computes with {project}: quantise before you change that")
        if hasattr(module, "head_weight"):
            found.add(id(module.head_weight))
        elif isinstance(module, nn.Linear):
            found.add(id(module.weight))
    return {name: p for name, p in model.named_parameters() if id(p) in found}


def quantized_weights(model: nn.Module) -> dict[str, QuantizedWeight]:
    """The parameters that are quantised, by name."""
    return {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedWeight)}
