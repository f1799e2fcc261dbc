r"""8-bit weights multiplied in 8 bits, where the processor has a kernel for that.

A processor multiplies bytes faster than it turns bytes into numbers. The product then needs
activations of 8 bits as well, which are rounded on the way, each row with a step of its own:

.. math::

   y_{mn} = s_m \, s_n \sum_k q_{mk} \, c_{nk}, \qquad
   q_{mk} = \mathrm{round}(x_{mk} / s_m), \quad s_m = \max_k |x_{mk}| / 127

The sum is one of integers, which is exact. So a row of a batch is, to the bit, what it is alone.

With ``weight_only`` the activations keep their precision: what rounding left over is rounded again,
with a step that is 254 times finer, and takes part as one more row. Three such digits hold all that
float32 does. One token waits for the weights, and three rows cost it hardly more than one; many
rows cost three times as much.

torch has two kernels. That of its library FBGEMM is the faster one for large matrices. It has a
layout of its own, which fills rows up to a multiple of 512 numbers. Where that costs more than a
third, ``torch._int_mm`` multiplies the codes as they lie. Elsewhere (another processor or device, a
compiled graph, float64) the codes are decoded, and activations stay as they are.

Source: Khudia et al., *FBGEMM: Enabling High-Performance Low-Precision Deep Learning Inference*,
2021, arXiv:2101.05615. The digits: Ootomo et al., *DGEMM on Integer Matrix Multiplication Unit*,
2023, arXiv:2306.11975.
"""

import functools
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from lm_from_scratch.weights.int8 import Int8Weight
from lm_from_scratch.weights.swap import swap_parameters_

#: The smallest step: to divide by a smaller one would not be exact.
TINY = torch.finfo(torch.float32).smallest_normal


class PackedInt8Weight(Int8Weight):
    """An :class:`~lm_from_scratch.weights.int8.Int8Weight`, with one group a row, that is
    multiplied in 8 bits, with its codes as the kernel reads them.

    ``weight_only`` says that activations keep their precision. Files hold the same parts.
    """

    packed: "Packed"
    weight_only: bool = False

    @classmethod
    def of(cls, weight: Int8Weight, weight_only: bool = False, keep: bool = False) -> Self:
        """The same codes and scales, packed; ``keep`` them as they were too, for look-ups."""
        self = cls.wrap(weight.shape, weight.group_size, codes=weight.codes, scale=weight.scale)
        self.weight_only = weight_only
        if keep:
            self.packed.keep()
        return self

    @property
    def codes(self) -> Tensor:
        """(N, K), as they were before they were packed."""
        return self.packed.codes

    @codes.setter
    def codes(self, codes: Tensor) -> None:
        """Pack ``codes`` (N, K)."""
        if "packed" in self.__dict__:
            self.packed.fill(codes)  # others that share them see it
        else:
            self.packed = Packed(codes)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of what it holds."""
        return self.packed.nbytes + self.scale.nbytes

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ W.T + bias`` of ``x`` (..., K) and ``bias`` (N,)."""
        here = self.packed.multiplies and x.device.type == "cpu" and x.dtype != torch.float64
        if torch.compiler.is_compiling():
            self.packed.keep()
        if not here or not x.numel() or torch.compiler.is_compiling():
            return super().product(x, bias)
        rows, top = x.reshape(-1, x.shape[-1]), largest_code()
        longest = rows.abs().amax(1, keepdim=True).float()  # many times faster than a norm along 1
        if self.weight_only:
            step = longest.div_(top).clamp_(min=TINY)  # (M, 1)
            y = sum_of_digits(self.packed, rows / step, digits_of(x.dtype, top), top).mul_(step)
        else:
            y = self.packed.multiply(rows.float(), longest, top)  # (M, N)
        scale = self.scale.T.float()  # (1, N)
        y = y.mul_(scale) if bias is None else torch.addcmul(bias.float(), y, scale)
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    def look_up(self, idx: Tensor) -> Tensor:
        self.packed.keep()
        return super().look_up(idx)

    def apply_to_held(self, function: Callable[[Tensor], Tensor]) -> Self:
        if function is torch.detach:
            new = type(self).wrap(self.shape, self.group_size, packed=self.packed, scale=self.scale)
        else:
            new = super().apply_to_held(function)
            if self.packed.keeps:
                new.packed.keep()
        new.weight_only = self.weight_only
        return new

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        self.packed.keep()  # a compiled graph reads them in every call
        return list(self.held), (self.group_size, self.weight_only)

    @classmethod
    def __tensor_unflatten__(
        cls, held: dict[str, Tensor], context: Any, shape: Sequence[int], stride: Sequence[int]
    ) -> Self:
        self = cls.wrap(shape, context[0], **held)
        self.weight_only = context[1]
        return self


class Packed:
    """Codes (N, K) in FBGEMM's layout; and as they are, where that does not pay, or if kept."""

    def __init__(self, codes: Tensor, keep: bool = False) -> None:
        self.shape, self.keeps = codes.shape, keep
        self.fill(codes)

    def fill(self, codes: Tensor) -> None:
        """Hold other ``codes`` (N, K)."""
        # of a matrix with one column torch._int_mm computes another product
        plain = type(codes) is Tensor and codes.device.type == "cpu" and codes.shape[1] > 1
        self.multiplies = plain and not torch.compiler.is_compiling() and largest_code() > 0
        packs = self.multiplies and 3 * filled_up(codes.shape[1]) <= 4 * codes.shape[1]
        self.kernel: Any = pack(codes) if packs else None
        self.kept = codes if self.kernel is None or self.keeps else None

    def multiply(self, x: Tensor, longest: Tensor, top: int) -> Tensor:
        """``x`` (M, K) times the codes: (M, N). Each row is rounded to codes up to ``top``, which
        stands for the ``longest`` (M, 1) of its numbers."""
        if self.kernel is not None and len(x) == 1:
            step = max(longest.item() / top, TINY)
            if math.isfinite(step):
                return by_fbgemm(self.kernel, x, top, step)
        steps = (longest / top).clamp_(min=TINY)
        if self.kernel is None:
            return by_int_mm(self.codes, x / steps).mul_(steps)
        # rounded as the kernel rounds a row alone: x / step + zero, with no rounding before
        zero = x.new_full(x.shape[1:], top + 1.0)
        codes = torch.addcmul(zero, x, 1 / steps).round_().sub_(zero)
        return by_fbgemm(self.kernel, codes, top).mul_(steps)

    def sums(self, x: Tensor, top: int) -> Tensor:
        """Integers ``x`` (M, K) from -top to top times the codes: (M, N)."""
        return by_int_mm(self.codes, x) if self.kernel is None else by_fbgemm(self.kernel, x, top)

    @property
    def codes(self) -> Tensor:
        if self.kept is not None:
            return self.kept
        return torch.ops.quantized.linear_unpack(self.kernel)[0].int_repr()

    def keep(self) -> None:
        """Have the codes at hand: to unpack them takes as long as many products."""
        self.keeps, self.kept = True, self.codes

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        N, K = self.shape
        packed = 0 if self.kernel is None else N * filled_up(K)
        return packed + (0 if self.kept is None else self.kept.nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and files take the codes; the kernel lays them out again where they arrive."""
        return Packed, (self.codes, self.keeps)


torch.serialization.add_safe_globals([PackedInt8Weight, Packed])  # for weights_only=True


def use_packed_int8_(
    model: nn.Module, weight_only: bool = False, names: Collection[str] | None = None
) -> None:
    """Pack the 8-bit weights of a built model that have one group a row: all, or those of these
    ``names``.

    What else holds a weight, a tied embedding or an optimizer, follows. A weight that an embedding
    looks up is held twice.
    """
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    named: dict[str, Any] = dict(model.named_parameters())
    new: dict[str, Tensor] = {
        name: PackedInt8Weight.of(weight, weight_only, keep=id(weight) in looked_up)
        for name, weight in named.items()
        if type(weight) in (Int8Weight, PackedInt8Weight)
        and weight.scale.shape[1] == 1
        and (names is None or name in names)
    }
    swap_parameters_(model, new)


# ----------------------------------------------------------------------------------- the kernel


def pack(codes: Tensor) -> Any:
    """``codes`` (N, K) as FBGEMM lays them out: no tensor, but what its product takes."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():  # torch is about to retire this type of tensor
            warnings.simplefilter("ignore", UserWarning)
            quantized = torch._make_per_tensor_quantized_tensor(codes, 1.0, 0)
            return torch.ops.quantized.linear_prepack(quantized, None)
    finally:
        torch.backends.quantized.engine = before


def filled_up(K: int) -> int:
    """The length of a row of K numbers in that layout, on most processors."""
    return K + -K % 512


def by_fbgemm(kernel: Any, x: Tensor, top: int, step: float = 1.0) -> Tensor:
    """``x`` (M, K), rounded here to multiples of ``step`` of at most top, times packed codes:
    (M, N)."""
    # bytes of x have no sign there: the kernel adds top + 1, and takes it off the sum
    linear = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    return linear(x, step, top + 1, kernel)


def by_int_mm(codes: Tensor, x: Tensor) -> Tensor:
    """The same, of ``codes`` (N, K) as they lie: (M, N)."""
    # the codes first: with them second, sums are wrong on processors without AVX-512
    return torch._int_mm(codes, x.round().to(torch.int8).T).T.float().contiguous()


@functools.cache
def largest_code() -> int:
    """127 where the sums of the kernels are exact; 63 on a processor whose sum of two products has
    16 bits only (AVX2); 0 where there is no such kernel."""
    cpu: Any = dict(device="cpu", dtype=torch.float32)  # whatever is the default when this is asked
    codes = torch.tensor([[127], [-127]], device="cpu", dtype=torch.int8).expand(2, 64).contiguous()
    for top in (127, 63):
        x = torch.tensor([[1.0], [-1.0], [1.0]], **cpu).expand(3, 64) * top
        right = torch.tensor([[1.0, -1.0], [-1.0, 1.0], [1.0, -1.0]], **cpu) * (64 * 127 * top)
        try:
            products = [by_fbgemm(pack(codes), x, top), by_int_mm(codes, x)]
        except (AttributeError, RuntimeError):
            return 0
        if all(torch.equal(y, right) for y in products):
            return top
    return 0


def digits_of(dtype: torch.dtype, top: int) -> int:
    """How many digits of at most ``top`` hold what numbers of ``dtype`` say: of 127, two for 16
    bits and three for float32."""
    return dtype.itemsize // 2 + (1 if top == 127 else 2)


def sum_of_digits(packed: Packed, x: Tensor, count: int, top: int) -> Tensor:
    """``x`` (M, K), numbers from -top to top, times packed codes: (M, N), by ``count`` digits."""
    finer, rows = 2 * top, []
    for _ in range(count):
        rows.append(x.round())
        x = (x - rows[-1]) * finer
    y, *others = packed.sums(torch.cat(rows), top).chunk(count)[::-1]
    for other in others:
        y = y / finer + other
    return y
