r"""Activation functions of the MLP, and the gated MLP.

GELU weighs its input by the probability that a standard normal variable is smaller:
:math:`x \, \Phi(x)`. GPT-2 was trained with an approximation of it by a hyperbolic tangent; the
two differ by up to about 5e-4, which is enough to move a logit in the third decimal.

A gated MLP has two maps where an MLP has one. The *gate* decides, feature by feature, how much of
*up* passes: :math:`\mathrm{down}(\mathrm{silu}(\mathrm{gate}(x)) \odot \mathrm{up}(x))`, with
:math:`\mathrm{silu}(z) = z / (1 + e^{-z})`. SwiGLU is its name, after *swish*, another for silu.

Sources: Hendrycks, Gimpel, *Gaussian Error Linear Units*, 2016, arXiv:1606.08415; Shazeer, *GLU
Variants Improve Transformer*, 2020, arXiv:2002.05202.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lm_from_scratch.limits import one_of


def gelu(x: Tensor) -> Tensor:
    r"""The exact GELU of ``x`` (any shape), :math:`x \cdot \tfrac{1}{2} (1 + \mathrm{erf}(x /
    \sqrt{2}))`."""
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_new(x: Tensor) -> Tensor:
    r"""GPT-2's GELU of ``x`` (any shape), :math:`\tfrac{x}{2} (1 + \tanh(\sqrt{2/\pi} (x + 0.044715
    x^3)))`."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def quick_gelu(x: Tensor) -> Tensor:
    r"""A GELU of ``x`` (any shape) by a sigmoid, :math:`x / (1 + e^{-1.702 x})`."""
    return x * torch.sigmoid(1.702 * x)


_tanh_gelu = partial(F.gelu, approximate="tanh")

#: The names that a checkpoint's config may give, and the fused kernel that computes each.
#: The formulas above are for reading; the tests hold kernel and formula equal.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(["gelu", "gelu_python"], F.gelu),
    **dict.fromkeys(["gelu_new", "gelu_fast", "gelu_accurate"], _tanh_gelu),
    **dict.fromkeys(["gelu_pytorch_tanh", "gelu_python_tanh"], _tanh_gelu),
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    **dict.fromkeys(["silu", "swish"], F.silu),
    "tanh": torch.tanh,
}

#: The type of a config's field that names one.
Activation = Annotated[str, one_of(ACTIVATIONS)]


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
    """Three maps without biases, of ``x`` (..., C) to (..., F) and back; with ``silu`` as
    ``activation`` the product is :func:`swiglu` (``torch.func`` needs it itself in ``product``, as
    :class:`~lm_from_scratch.layers.norm.RMSNorm` says)."""

    def __init__(self, n_embd: int, intermediate_size: int, activation: str = "silu") -> None:
        super().__init__()
        self.gate_proj = nn.Linear(n_embd, intermediate_size, bias=False)
        self.up_proj = nn.Linear(n_embd, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, n_embd, bias=False)
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


#: The gated products by the name of their activation.
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: partial(gated, act) for name, act in ACTIVATIONS.items()},
    **dict.fromkeys(["silu", "swish"], gated_silu),
}
