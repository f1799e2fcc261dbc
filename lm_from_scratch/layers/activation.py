r"""Activation functions of the MLP.

GELU weighs its input by the probability that a standard normal variable is smaller:
:math:`x \, \Phi(x)`. GPT-2 was trained with an approximation of it by a hyperbolic tangent; the
two differ by up to about 5e-4, which is enough to move a logit in the third decimal.

Source: Hendrycks, Gimpel, *Gaussian Error Linear Units*, 2016, arXiv:1606.08415.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.limits import Limit


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
Activation = Annotated[
    str, Limit(f"is not one of {sorted(ACTIVATIONS)}", [*ACTIVATIONS].__contains__)
]
