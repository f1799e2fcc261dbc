"""What every kind of attention is: a function of one signature, and a layer that calls it.

Shapes: B batch, H query heads, Hkv key and value heads, T queries, S keys, D features of a query
and a key, Dv of a value.
"""

from collections.abc import Callable

from torch import Tensor, nn

from lm_from_scratch.attention.visibility import Visibility

#: Of q (B, H, T, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv), who sees whom, and the share of weights
#: to drop, the result (B, H, T, Dv).
AttentionFunction = Callable[[Tensor, Tensor, Tensor, Visibility, float], Tensor]


class AttentionLayer(nn.Module):
    """A module that hands queries, keys and values to ``attend``: an attribute, so that a built
    model can be given another function."""

    attend: AttentionFunction


def check_shapes(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> None:
    """Raises ``ValueError`` for q (B, H, T, D), k (B, Hkv, S, D) and v (B, Hkv, S, Dv) that do not
    fit together, or to the visibility."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: q must be (B, H, T, D), "
            "k (B, Hkv, S, D) and v (B, Hkv, S, Dv)"
        )
    (B, H, T, D), (rows, Hkv, S, features) = q.shape, k.shape
    if rows != B or features != D:
        raise ValueError(f"q has (B, D) = {(B, D)}, k has {(rows, features)}")
    if H % Hkv != 0:
        raise ValueError(f"{H} query heads cannot share {Hkv} key heads evenly")
    if (visibility.query_length, visibility.key_length) != (T, S):
        raise ValueError(
            f"there are {T} queries and {S} keys, but the visibility is for "
            f"{visibility.query_length} and {visibility.key_length}"
        )
    for part in (visibility.query_positions, visibility.key_positions, visibility.allowed):
        if part is not None and part.shape[0] not in (1, B):
            raise ValueError(f"q has {B} rows, but the visibility has {part.shape[0]}")
