"""Linear maps through oneDNN, put into a built model.

In float32 torch hands matrix products on a CPU to Intel's MKL, which can stay far below the limit
of a processor by another maker. torch also carries oneDNN, and uses it for bfloat16 anyway.
:func:`use_onednn_` sends the float32 products of a model's linear maps there: forward, and
both products of the backward pass. Numbers stay float32; only the order of the sums differs.

On one processor the products take half the time, on another they take longer:
:mod:`~lm_from_scratch.instruments.layout` measures. A GPU or another dtype is refused.

For inference :class:`Packed` goes one step further: oneDNN lays a weight out for itself once,
instead of reading it as it is in every step.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.layers.head import Head
from lm_from_scratch.weights.quantize import quantized_weights


def multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies ``dtype`` here: float32 where torch carries it, and bfloat16 on a
    processor with AVX-512 or with conversions of its own."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` by oneDNN, for ``x`` (..., in), ``weight`` (out, in) and ``bias``
    (out,) on a CPU, with strides that it can :func:`follow`, of a dtype that it
    :func:`multiplies`."""
    # torch's own compiler emits this operator; it has no public name, so the tests watch over it
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def follow(x: Tensor) -> Tensor:
    """``x`` (..., m, n), copied where no two of its numbers are neighbours: there are strides, like
    (1376, 7), that oneDNN refuses."""
    return x if 1 in x.stride()[-2:] else x.contiguous()


def onednn_matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` by oneDNN for float32 matrices ``a`` (m, k) and ``b`` (k, n) on a CPU, by torch's
    default for all others.

    An optimizer multiplies with it when told so: ``optimizer.matmul = onednn_matmul``, for
    :class:`~lm_from_scratch.optim.galore.GaLore`.
    """
    suits = a.dtype == b.dtype == torch.float32 and a.device.type == "cpu" and a.dim() == 2
    plain = not hasattr(a, "full_tensor") and not hasattr(b, "full_tensor")
    return product(follow(a), follow(b.mT)) if suits and plain else a @ b


class OneDNNFunction(torch.autograd.Function):
    """A linear map whose three matrix products run in oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(follow(x), follow(weight), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, grad = (follow(tensor) for tensor in (*ctx.saved_tensors, grad))
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)  # (N, out)
        return (
            product(grad, weight.T) if needs_x else None,
            product(rows.T, x.flatten(0, -2).T) if needs_weight else None,  # (out, in)
            rows.sum(dim=0) if needs_bias else None,
        )


def check_float32(tensors: Mapping[str, Tensor]) -> None:
    """Raises ``ValueError`` for the first of some tensors that is not float32 on a CPU."""
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}: oneDNN is used for float32 on cpu"
            )


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like ``F.linear`` of ``x`` (..., in), ``weight`` (out, in) and ``bias`` (out,), in value and
    gradient. Raises ``ValueError`` for what is not float32 on a CPU."""
    check_float32({"x": x, "weight": weight})
    return OneDNNFunction.apply(x, weight, bias)


class OneDNNLinear(nn.Linear):
    """A linear layer for ``x`` (..., in) that computes with :func:`onednn_linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return onednn_linear(x, self.weight, self.bias)


def use_onednn_(model: nn.Module) -> None:
    """Make every ``nn.Linear`` and the head of a built float32 model compute with oneDNN.

    The layers keep their parameters: an optimizer that was built before goes on working. Raises
    ``ValueError`` for quantised weights, and for what is not float32 on a CPU.
    """
    if not torch.backends.mkldnn.is_available():
        raise ValueError("this torch was built without oneDNN")
    refuse_quantized(model)
    check_float32(dict(model.named_parameters()))
    modules: list[Any] = list(model.modules())
    for module in modules:
        if type(module) in (nn.Linear, PackedLinear):
            module.__class__ = OneDNNLinear
            vars(module).pop("packed", None)
        elif isinstance(module, Head):
            module.product = onednn_linear


def refuse_quantized(model: nn.Module) -> None:
    """Raises ``ValueError`` for a model with quantised weights."""
    for name in quantized_weights(model):
        raise ValueError(f"{name} is quantised: it has products of its own, not oneDNN's")


# ------------------------------------------------------------------------------ packed weights


class Packed:
    """The product with a weight (out, in) that oneDNN has laid out for itself, for inference.

    The layout is made for a number of ``rows`` of ``x``; others work, too. The weight stays beside
    it: when that has changed, under autocast, and where gradients are wanted, the product is
    ``F.linear``, and so it is in a copy. (torch does not count a change through ``weight.data``,
    and neither does this.) Raises ``ValueError`` for a dtype that oneDNN does not
    :func:`multiply <multiplies>`.
    """

    def __init__(self, weight: Tensor, rows: int) -> None:
        if not multiplies(weight.dtype):
            raise ValueError(f"oneDNN does not multiply {weight.dtype} here: it packs no such one")
        self.layout = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
        self.source = weight.detach()  # held, so that no other weight can get its address
        self.version = weight._version

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        same = weight.data_ptr() == self.source.data_ptr() and weight._version == self.version
        as_packed = x.dtype == self.source.dtype and not torch.is_autocast_enabled("cpu")
        if not same or not as_packed or torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        return product(x, self.layout, bias)

    def __reduce__(self) -> Any:
        return plain, ()  # a copy has weights of its own


def plain() -> Any:
    """What a :class:`Packed` weight is in a copy."""
    return F.linear


class PackedLinear(nn.Linear):
    """A linear layer for ``x`` (..., in) that computes with a :class:`Packed` weight."""

    packed: Packed

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x, self.weight, self.bias)
