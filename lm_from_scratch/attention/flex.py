r"""Attention through FlexAttention: the rule as a function of indices, compiled into the kernel.

``torch.nn.attention.flex_attention`` takes a function ``(b, h, t, s) -> visible`` in place of a
mask. Compiled for a GPU, the function becomes part of one fused kernel, and a *block mask* lists
the blocks of 128 x 128 scores that hold anything visible, so that the others are never computed.

On a CPU torch has the forward pass only. Here it runs uncompiled, and every score exists in memory,
as in the formula: it shows that the rule is right, not how fast it can be. The compiled path for a
GPU was not run here.

Source: Dong et al., *Flex Attention*, 2024, arXiv:2412.05496.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.attention.layer import check_shapes
from lm_from_scratch.attention.visibility import Visibility


def mask_function(visibility: Visibility, B: int) -> Callable[..., Tensor]:
    """The rule of :class:`~lm_from_scratch.attention.visibility.Visibility`, written for four
    indices."""
    query_positions = visibility.query_positions.expand(B, -1)
    key_positions = visibility.key_positions.expand(B, -1)
    query_documents, key_documents = visibility.query_documents, visibility.key_documents
    if query_documents is not None and key_documents is not None:
        query_documents, key_documents = query_documents.expand(B, -1), key_documents.expand(B, -1)
    window = visibility.window
    allowed_too = None if visibility.allowed is None else visibility.allowed.expand(B, -1, -1, -1)

    def visible(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        query, key = query_positions[b, t], key_positions[b, s]
        allowed = (key >= 0) & (key <= query)
        if window is not None:
            allowed = allowed & (key > query - window)
        if query_documents is not None and key_documents is not None:
            allowed = allowed & (query_documents[b, t] == key_documents[b, s])
        if allowed_too is not None:
            allowed = allowed & allowed_too[b, 0, t, s]
        return allowed

    return visible


@cache
def compiled_flex_attention() -> Callable[..., Any]:
    """torch's function, compiled once for the process."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run a ``flex_attention`` that is not compiled as it is.

    Otherwise torch traces it anyway, 0.1 s for each new shape, and warns that this is slow; the
    warning names the switch used here. Torch says that gradients are wrong with it: on a CPU there
    are none.
    """
    from torch.nn.attention import flex_attention as module

    before = module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float = 0.0
) -> Tensor:
    """Attention of q (B, H, T, D), k (B, Hkv, S, D) and v (B, Hkv, S, Dv) by torch's
    ``flex_attention``. Raises ``ValueError`` for dropout, for gradients on a CPU, and for shapes
    that do not fit."""
    from torch.nn.attention import flex_attention as module

    if dropout > 0:
        raise ValueError(f"flex attention has no dropout, but dropout={dropout}: use sdpa")
    check_shapes(q, k, v, visibility)
    on_cpu = q.device.type == "cpu"
    if on_cpu and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("flex attention has no backward pass on a CPU: use it under no_grad()")
    B, T, S = q.shape[0], q.shape[2], k.shape[2]
    blocks = module.create_block_mask(mask_function(visibility, B), B, None, T, S, device=q.device)
    if not on_cpu:
        return compiled_flex_attention()(q, k, v, block_mask=blocks, enable_gqa=True)
    q, k, v = q.detach(), k.detach(), v.detach()  # what requires a gradient is refused in any case
    with uncompiled(), torch.autocast("cpu", enabled=False):
        return module.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
