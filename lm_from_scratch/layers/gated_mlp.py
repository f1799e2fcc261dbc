r"""The gated MLP.

It has two maps where an MLP has one. The *gate* decides, feature by feature, how much of *up*
passes: :math:`\mathrm{down}(\mathrm{silu}(\mathrm{gate}(x)) \odot \mathrm{up}(x))`, with
:math:`\mathrm{silu}(z) = z / (1 + e^{-z})`. SwiGLU is its name, after *swish*, another for silu.

Source: Shazeer, *GLU Variants Improve Transformer*, 2020, arXiv:2002.05202.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lm_from_scratch.layers.activation import ACTIVATIONS


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    r"""The gated product :math:`\mathrm{silu}(\mathrm{gate}) \odot \mathrm{up}`, elementwise, of
    two tensors of one shape (..., F)."""
    return F.silu(gate) * up


class SwiGLUFunction(torch.autograd.Function):
    """:func:`swiglu` that keeps its two inputs alone for the backward pass.

    Left to itself, autograd keeps ``silu(gate)`` too, a tensor as wide as the MLP in every layer.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


class GatedMLP(nn.Module):
    """Three maps, mostly without biases, of ``x`` (..., C) to (..., F) and back; with ``silu`` as
    ``activation`` the product is :func:`swiglu` (``torch.func`` needs it itself in ``product``, as
    :class:`~lm_from_scratch.layers.norm.RMSNorm` says)."""

    def __init__(
        self, n_embd: int, intermediate_size: int, activation: str = "silu", bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(n_embd, intermediate_size, bias)
        self.up_proj = nn.Linear(n_embd, intermediate_size, bias)
        self.down_proj = nn.Linear(intermediate_size, n_embd, bias)
        self.product = PRODUCTS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.product(self.gate_proj(x), self.up_proj(x)))


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """:func:`swiglu`, through :class:`SwiGLUFunction` where a backward pass may follow; ``gate``
    and ``up`` have one shape (..., F)."""
    return SwiGLUFunction.apply(gate, up) if torch.is_grad_enabled() else swiglu(gate, up)


def gated(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """The gated product with any activation, of ``gate`` and ``up`` of one shape (..., F)."""
    return act(gate) * up


def clamped(
    product: Callable[[Tensor, Tensor], Tensor], limit: float, gate: Tensor, up: Tensor
) -> Tensor:
    """A gated ``product`` of ``gate`` and ``up`` (..., F) cut off at ``limit``, and ``up`` at its
    negative too."""
    return product(gate.clamp(max=limit), up.clamp(-limit, limit))


#: The gated products by the name of their activation.
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: partial(gated, act) for name, act in ACTIVATIONS.items()},
    **dict.fromkeys(["silu", "swish"], gated_silu),
}
