"""The kernels in a built model.

A model file does not know of kernels. Its modules hold the functions that they call, and
:func:`use_kernels_` puts others in their place.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.kernels.attention import flash_attention
from lm_from_scratch.kernels.decoding import decode_attention
from lm_from_scratch.kernels.device import check_device
from lm_from_scratch.kernels.int8 import use_int8_kernel_
from lm_from_scratch.kernels.loss import causal_lm_loss, chunked_causal_lm_loss
from lm_from_scratch.kernels.norm import rms_norm
from lm_from_scratch.kernels.paged import Paged, paged_attention
from lm_from_scratch.kernels.rope import apply_rope
from lm_from_scratch.kernels.swiglu import swiglu
from lm_from_scratch.layers.gated_mlp import GatedMLP, gated_silu
from lm_from_scratch.layers.head import Head, TiedHead
from lm_from_scratch.layers.norm import RMSNorm
from lm_from_scratch.layers.rope import apply_partial_rope, unrotated
from lm_from_scratch.models import gpt2, qwen2, qwen3
from lm_from_scratch.training.objective import OwnLosses
from lm_from_scratch.weights.int8 import Int8Weight
from lm_from_scratch.weights.quantize import quantized_weights


def kernel_attention(
    q: Tensor, k: Any, v: Any, visibility: Visibility, dropout: float = 0.0
) -> Tensor:
    """Attention of ``q`` (B, H, T, D) by the kernel that fits: for one query or many, for keys in a
    tensor or in pages.

    Chosen from types and shapes alone; no kernel is tried and then another.
    """
    if isinstance(k, Paged):
        return paged_attention(q, k, v, visibility, dropout)
    if q.shape[2] == 1 and not torch.is_grad_enabled():
        return decode_attention(q, k, v, visibility, dropout)
    return flash_attention(q, k, v, visibility, dropout)


#: What :func:`use_kernels_` can replace: a name, the modules that call the function, the attribute
#: that holds it, the kernel.
REPLACED: dict[str, tuple[tuple[type[nn.Module], ...], str, Any]] = {
    "attention": ((gpt2.Attention, qwen2.Attention, qwen3.Attention), "attend", kernel_attention),
    "rms_norm": ((RMSNorm,), "normalise", rms_norm),
    "rope": ((qwen2.Attention, qwen3.Attention), "rotate", apply_rope),
    "swiglu": ((GatedMLP,), "product", swiglu),
}
INT8, LOSS = "int8", "loss"


class KernelHead(OwnLosses, Head):
    """A head whose loss the kernels compute."""

    losses = causal_lm_loss, chunked_causal_lm_loss


class TiedKernelHead(KernelHead, TiedHead):
    """The same for one that is the token embedding."""


def use_kernels_(model: nn.Module, only: Collection[str] | None = None) -> dict[str, int]:
    """Make a built model compute with kernels, and say how many functions each name replaced.

    A GPT-2 gets ``attention``; a Qwen2 also ``rms_norm``, ``rope`` and, if its activation is silu,
    ``swiglu``; a model with 8-bit weights ``int8``; one with a language-model head the two
    functions of ``loss`` that :class:`~lm_from_scratch.training.objective.NextTokenLoss` will use.
    ``only`` chooses some of them by name. An optimizer that was built before goes on working.

    Raises ``ValueError``, before anything is changed, if the model is not where kernels run (a CUDA
    device), is float64, or has nothing of what ``only`` names. The kernels have no attention
    dropout: a model that asks for it is refused when it is called.
    """
    known = [*REPLACED, INT8, LOSS]
    if isinstance(only, str):
        raise ValueError(f"only={only!r} must be a list of names, like {[only]}")
    if unknown := set(only or ()) - set(known):
        raise ValueError(f"only={sorted(unknown)} must be some of {known}")
    for name, parameter in model.named_parameters():
        check_device("use_kernels_", **{name: parameter})
    replaced: list[tuple[nn.Module, str, Any, str]] = []
    for module in model.modules():
        for name, (callers, attribute, kernel) in REPLACED.items():
            if not isinstance(module, callers) or name not in (only or known):
                continue
            if name == "swiglu" and module.product not in (gated_silu, swiglu):
                continue  # another activation
            if name == "rope" and module.rotate in (apply_partial_rope, unrotated):
                continue  # the kernel turns all features
            replaced.append((module, attribute, kernel, name))
    counts = {name: sum(which == name for *_, which in replaced) for name in known}
    codes = [w for w in quantized_weights(model).values() if isinstance(w, Int8Weight)]
    heads: list[Any] = [module for module in model.modules() if isinstance(module, Head)]
    counts[LOSS] = len(heads) if LOSS in (only or known) else 0
    counts[INT8] = len(codes) if INT8 in (only or known) else 0
    missing = [name for name in only or () if not counts[name]]
    if missing or not any(counts.values()):
        wanted = missing or known
        raise ValueError(
            f"{type(model).__name__} has nothing that {wanted} could replace: kernels are for the "
            "modules of lm_from_scratch"
        )
    if counts[INT8]:
        use_int8_kernel_(model)
    for module, attribute, kernel, _ in replaced:
        setattr(module, attribute, kernel)
    for head in heads if counts[LOSS] else ():
        head.__class__ = TiedKernelHead if isinstance(head, TiedHead) else KernelHead
    return {name: count for name, count in counts.items() if count}
