r"""Grouped-query attention: several query heads share one key and value head.

Query head ``h`` reads key head ``h // (H / Hkv)``. With Hkv = H every head has its own keys; with
Hkv = 1 it is multi-query attention. A key-value cache holds Hkv heads alone, which is the point.

Shapes: B batch, H query heads, Hkv key and value heads, T queries, S keys, D features of a query
and a key, Dv of a value.

Source: Ainslie et al., *GQA*, 2023, arXiv:2305.13245.
"""

from torch import Tensor


def repeat_kv(x: Tensor, n_head: int) -> Tensor:
    """``x`` (B, Hkv, S, D) to (B, H, S, D): each head ``H / Hkv`` times in a row, as 0 0 0 1 1 1.

    (Tiling, as 0 1 0 1 0 1, would give some query heads the keys of another group.)

    Raises ``ValueError`` where H = ``n_head`` is no multiple of Hkv.
    """
    if n_head % x.shape[1] != 0:
        raise ValueError(f"{n_head} query heads cannot share {x.shape[1]} key heads evenly")
    return x.repeat_interleave(n_head // x.shape[1], dim=1)


def check_widths(kernel: str, k: Tensor, v: Tensor) -> None:
    """Raises ``ValueError`` for values of another width than the keys, for a kernel
    that knows one width alone."""
    if k.shape[-1] != v.shape[-1]:
        raise ValueError(
            f"{kernel}: v has Dv={v.shape[-1]} features, k has D={k.shape[-1]}, and the kernel "
            "takes one width alone: use sdpa_attention"
        )
