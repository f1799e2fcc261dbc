"""Linear maps through oneDNN, put into a built model.

In float32 torch hands matrix products on a CPU to Intel's MKL, which can stay far below the limit
of a processor by another maker. torch also carries oneDNN, and uses it for bfloat16 anyway.
:func:`use_onednn_` sends the float32 products of a model's linear maps there: forward, and
both products of the backward pass. Numbers stay float32; only the order of the sums differs.

On an AMD EPYC the products take about half the time. Other processors were not measured: let
``tests/bench_training.py`` say whether it pays. A GPU or another dtype is refused.
"""

from typing import Any

import torch
from torch import Tensor, nn


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` by oneDNN, for float32 on a CPU. Any strides will do."""
    # torch's own compiler emits this operator; it has no public name, so the tests watch over it
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class OneDNNFunction(torch.autograd.Function):
    """A linear map whose three matrix products run in oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)  # (N, out)
        return (
            product(grad, weight.T) if needs_x else None,
            product(rows.T, x.flatten(0, -2).T) if needs_weight else None,  # (out, in)
            rows.sum(dim=0) if needs_bias else None,
        )


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like ``F.linear``, in value and gradient, for float32 tensors on a CPU."""
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}: oneDNN is used for float32 on cpu"
            )
    return OneDNNFunction.apply(x, weight, bias)


class OneDNNLinear(nn.Linear):
    """A linear layer that computes with :func:`onednn_linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return onednn_linear(x, self.weight, self.bias)


def use_onednn_(model: nn.Module) -> None:
    """Make every ``nn.Linear`` and the tied head of a built float32 model compute with oneDNN.

    The layers keep their parameters: an optimizer that was built before goes on working.
    """
    if not torch.backends.mkldnn.is_available():
        raise ValueError("this torch was built without oneDNN")
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
            raise ValueError(
                f"{name} is {parameter.dtype} on {parameter.device}: "
                "oneDNN is used for float32 on cpu"
            )
    modules: list[Any] = list(model.modules())
    for module in modules:
        if type(module) is nn.Linear:
            module.__class__ = OneDNNLinear
        elif hasattr(module, "project"):
            module.project = onednn_linear
