"""The masks that other programs give: of padding, as positions, and of scores, as what a
:class:`~lm_from_scratch.attention.visibility.Visibility` allows."""

import torch
from torch import Tensor

from lm_from_scratch.attention.visibility import PADDING


def positions_from_mask(attention_mask: Tensor) -> Tensor:
    """The positions (B, T) of an ``attention_mask`` (B, T) of 1 (or True) for tokens and 0 (or
    False) for padding.

    Real tokens count 0, 1, 2, ... wherever the padding stands; padding gets -1. Raises
    ``ValueError`` for other shapes and numbers.
    """
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; it must be (batch, tokens)"
        )
    real = attention_mask != 0
    if not torch.equal(real.to(attention_mask.dtype), attention_mask):
        raise ValueError("attention_mask may hold 0 and 1 (or False and True) alone")
    return torch.where(real, real.long().cumsum(dim=1) - 1, PADDING)


def allowed_from_additive_mask(mask: Tensor) -> Tensor:
    """What a ``mask`` (B, 1, T, S) of numbers that are added to the scores lets through, as bool.

    It holds 0 where a key may be seen, and the most negative number or minus infinity elsewhere.
    """
    if mask.dim() != 4 or mask.shape[1] != 1 or not mask.is_floating_point():
        raise ValueError(
            f"the mask is {mask.dtype} of shape {tuple(mask.shape)}; it must be floating point, "
            "(batch, 1, queries, keys)"
        )
    allowed = mask == 0
    if not (allowed | (mask <= torch.finfo(mask.dtype).min)).all():
        raise ValueError("an additive mask holds 0 and the most negative number alone")
    return allowed
