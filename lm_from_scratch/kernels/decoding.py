r"""Attention of one query per row: the keys are cut into splits, and the results merged.

While a model writes, each row has one query and S keys. In 16 bits the keys and values of a row are
:math:`4 S H_{kv} D` bytes, and there are :math:`4 S H D` operations to do with them: :math:`H /
H_{kv}` for each byte, far below what a GPU can do while the byte arrives. Only two things count.
Each key is read once, by one program for the :math:`H / H_{kv}` heads that share it (for 16 of
them, where they are more). And all multiprocessors must read: rows times key heads are few
programs, so each is cut again, into splits of its keys.

A split :math:`i` yields its own attention :math:`y_i`, and the log-sum-exp :math:`L_i` of its
scores, which is the logarithm of its share of the softmax. So the whole is a mean again:

.. math::

   y = \frac{\sum_i e^{L_i} \, y_i}{\sum_i e^{L_i}}

Nothing is kept for a gradient. A key that is hidden is not read.

Shapes: B rows, H query heads, Hkv key and value heads, S keys, D features of a head.

Source: Dao et al., *Flash-Decoding for long-context inference*, 2023,
https://pytorch.org/blog/flash-decoding/.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lm_from_scratch.attention.gqa import check_widths
from lm_from_scratch.attention.layer import check_shapes
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.kernels.device import check_device
from lm_from_scratch.kernels.softmax import LOWEST

BLOCK_G = 16  # query heads of a program: a side of tl.dot is at least 16
MAX_D = 256
MAX_SPLITS = 64  # the merge holds this many results at once


@triton.jit(do_not_specialize=["S", "mask_b", "table_b"])
def decode_kernel(
    q, k, v, mask, table, lengths, parts, lse,
    S, window, scale, q_b, q_h, k_b, k_h, k_s, v_b, v_h, v_s, mask_b, table_b,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One split of the keys of one row and key head, for BLOCK_G of the GROUP query heads that
    share it."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    split, splits = tl.program_id(2), tl.num_programs(2)
    blocks = tl.cdiv(GROUP, BLOCK_G)
    group = head % blocks * BLOCK_G + tl.arange(0, BLOCK_G)[:, None]
    head, d = head // blocks, tl.arange(0, BLOCK_D)[None, :]
    heads = head * GROUP + group  # (G, 1)
    real = (group < GROUP) & (d < D)
    queries = tl.load(q + row * q_b + heads * q_h + d, mask=real, other=0.0)  # (G, D)

    if table is None:
        length = S
    else:
        length = tl.minimum(tl.load(lengths + row), S)  # the table is known to reach S
    first = 0
    if window is not None:  # what is too old belongs to no split
        first = tl.maximum(length - window, 0)
    each = tl.cdiv(tl.cdiv(length - first, BLOCK_S), splits) * BLOCK_S
    start = first + split * each
    stop = tl.minimum(start + each, length)

    m = tl.full((BLOCK_G,), LOWEST, tl.float32)
    l = tl.zeros((BLOCK_G,), tl.float32)
    a = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for s in range(start, stop, BLOCK_S):
        keys = s + tl.arange(0, BLOCK_S)
        visible = keys < stop
        if mask is not None:
            visible &= tl.load(mask + row * mask_b + keys, mask=visible, other=0) != 0
        if table is None:
            slots = keys.to(tl.int64)
        else:
            page = tl.load(table + row * table_b + keys // PAGE, mask=visible, other=0)
            slots = page.to(tl.int64) * PAGE + keys % PAGE
        inside = visible[:, None] & (d < D)
        k_tile = tl.load(
            k + row * k_b + head * k_h + slots[:, None] * k_s + d, mask=inside, other=0.0
        )
        v_tile = tl.load(
            v + row * v_b + head * v_h + slots[:, None] * v_s + d, mask=inside, other=0.0
        )
        scores = tl.dot(queries, tl.trans(k_tile), input_precision="ieee") * scale  # (G, S)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp(scores - new_m[:, None])
        rescale = tl.exp(m - new_m)
        l = l * rescale + tl.sum(p, 1)
        a = a * rescale[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        m = new_m

    # The largest score adds exp(0), so l >= 1; where no key was seen, both l and a are 0.
    l = tl.maximum(l, 1.0)
    H = tl.num_programs(1) // blocks * GROUP
    part = (row * H + heads) * splits + split  # (G, 1)
    tl.store(parts + part * D + d, a / l[:, None], mask=real)
    tl.store(lse + part, (m + tl.log(l))[:, None], mask=group < GROUP)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    parts, lse, out, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, MAX_SPLITS: tl.constexpr
):
    """The mean of the splits of one row and query head, weighted by exp(lse).

    A split without a visible key has LOWEST for a log-sum-exp, and weight 0. Where none has one,
    all weigh the same, and the mean of zeros is 0.
    """
    head = tl.program_id(0).to(tl.int64)
    split, d = tl.arange(0, MAX_SPLITS), tl.arange(0, BLOCK_D)[None, :]
    part = head * splits + split
    L = tl.load(lse + part, mask=split < splits, other=LOWEST)
    weight = tl.exp(L - tl.max(L, 0))
    inside = (split < splits)[:, None] & (d < D)
    y = tl.load(parts + part[:, None] * D + d, mask=inside, other=0.0)  # (splits, D)
    y = tl.sum(weight[:, None] * y, 0) / tl.sum(weight, 0)
    d = tl.arange(0, BLOCK_D)
    tl.store(out + head * D + d, y, mask=d < D)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float = 0.0
) -> Tensor:
    """:func:`lm_from_scratch.attention.sdpa.sdpa_attention` of q (B, H, 1, D), k and v (B,
    Hkv, S, D), no gradient.

    Where the visibility is dense, no position is read, and keys before the window are not visited.
    Otherwise its mask says what is hidden: padding, unused slots, a window, documents, ``allowed``.
    It is made once and serves all layers. Raises ``ValueError`` for dropout, gradients, shapes and
    dtypes that do not fit, and where kernels do not run.
    """
    check_shapes(q, k, v, visibility)
    check_widths("decode_attention", k, v)
    mask = None if visibility.dense else visibility.mask
    check_device("decode_attention", q=q, k=k, v=v, mask=mask)
    check_decoding("decode_attention", q, k, v, dropout)
    # the mask knows the window
    return decode_forward(q, k, v, mask, visibility.window if mask is None else None)


def check_decoding(kernel: str, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    """Raises ``ValueError`` for what the kernel cannot do, whatever the layout of the keys."""
    if q.shape[2] != 1:
        raise ValueError(
            f"{kernel}: q has T={q.shape[2]} queries in a row, the kernel takes 1: use "
            "flash_attention"
        )
    if dropout > 0:
        raise ValueError(f"{kernel} has no dropout, but dropout={dropout}: use sdpa_attention")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{kernel}: q is {q.dtype}, k {k.dtype}, v {v.dtype}; they must agree")
    if q.shape[3] > MAX_D:
        raise ValueError(
            f"{kernel}: heads have D={q.shape[3]} features, the kernel takes at most {MAX_D}: use "
            "sdpa_attention"
        )
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError(
            f"{kernel} keeps nothing for a gradient, which q, k or v require: call it under "
            "torch.no_grad(), or use flash_attention"
        )


@torch.library.custom_op("lm_from_scratch::decode_attention", mutates_args=())
def decode_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: int | None
) -> Tensor:
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    S = k.shape[2]
    if mask is not None:
        mask = mask.contiguous().view(torch.uint8)
    return attend_in_splits(
        q, k, v, k.shape[1], S, window, strides=(*k.stride()[:3], *v.stride()[:3]), mask=mask
    )


@decode_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: int | None) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def attend_in_splits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    n_kv_head: int,
    longest: int,
    window: int | None,
    strides: tuple[int, ...],
    mask: Tensor | None = None,
    table: Tensor | None = None,
    lengths: Tensor | None = None,
    page_size: int = 1,
) -> Tensor:
    """Launch both kernels for ``q`` (B, H, 1, D). ``k`` and ``v`` lie as the ``strides`` say; a
    ``mask`` (B or 1, 1, 1, S) hides keys, a ``table`` (B, pages) and ``lengths`` (B,) say where
    they are. ``strides`` are those of a row, a head and a key, in k and in v."""
    q = q if q.stride(3) == 1 else q.contiguous()
    B, H, _, D = q.shape
    out = torch.empty(B, H, 1, D, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    GROUP, BLOCK_D = H // n_kv_head, max(16, triton.next_power_of_2(D))
    BLOCK_S = min(64, 8192 // BLOCK_D)  # the tiles on their way fit into 99 KiB (sm_86)
    if q.dtype == torch.float32 and BLOCK_D > 64:
        BLOCK_S = 16  # products in float32 hold tiles in registers, and more would spill
    programs = n_kv_head * triton.cdiv(GROUP, BLOCK_G)  # for each row and split
    keys = longest if window is None else min(longest, window)
    splits = number_of_splits(triton.cdiv(keys, BLOCK_S), B * programs, q.device)
    parts = torch.empty(B, H, splits, D, dtype=torch.float32, device=q.device)
    lse = torch.empty(B, H, splits, dtype=torch.float32, device=q.device)
    decode_kernel[(B, programs, splits)](
        q, k, v, mask, table, lengths, parts, lse,
        longest, window, 1 / math.sqrt(D), *q.stride()[:2], *strides,
        0 if mask is None or mask.shape[0] == 1 else mask.stride(0),
        0 if table is None else table.stride(0),
        GROUP=GROUP, D=D, PAGE=page_size, BLOCK_G=BLOCK_G, BLOCK_D=BLOCK_D, BLOCK_S=BLOCK_S,
    )  # fmt: skip
    merge_kernel[(B * H,)](
        parts, lse, out, splits, D=D, BLOCK_D=BLOCK_D, MAX_SPLITS=MAX_SPLITS,
        num_warps=8,  # with 4, a tile of 64 x 128 spills
    )  # fmt: skip
    return out


def number_of_splits(tiles: int, groups: int, device: torch.device) -> int:
    """How many splits of ``tiles`` tiles give every multiprocessor two programs, or as many as can
    be, where there are ``groups`` (rows times key heads) to split. A CPU counts as an H100."""
    processors = 132
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = triton.cdiv(2 * processors, groups)
    return max(1, min(wanted, tiles, MAX_SPLITS))
