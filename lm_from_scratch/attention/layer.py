"""A layer of attention, as whoever changes a built model finds it."""

from collections.abc import Callable

from torch import Tensor, nn

from lm_from_scratch.attention.visibility import Visibility

#: Of q (B, H, T, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv), who sees whom, and a share of weights to
#: drop, the result (B, H, T, Dv).
AttentionFunction = Callable[[Tensor, Tensor, Tensor, Visibility, float], Tensor]


class AttentionLayer(nn.Module):
    """A module that hands queries, keys and values to ``attend``: an attribute, so that a built
    model can be given another function."""

    attend: AttentionFunction
