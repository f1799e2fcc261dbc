r"""Attention that reads queries, keys and values, and keeps no scores.

The scores of one head are T times S numbers. As operations of PyTorch they are written and read
again several times, and they are most of the traffic. Here a program takes one tile of queries, and
the tiles of keys pass by: the scores of two tiles fit beside the core that computes them. That it
is exact is the subject of :mod:`~lm_from_scratch.attention.online_softmax`: each query keeps a
running maximum, a running sum and an accumulator, and one number remains of all its scores, the
log-sum-exp. The memory sees (2T + 2S) D numbers per head and T more.

What the :mod:`~lm_from_scratch.attention.visibility` hides costs nothing where it hides whole
tiles: they are not read, which for causal attention is half of them. Tiles that are seen as a whole
need no mask. Query heads that share a key head find it by its index, and nothing is repeated.

The backward pass computes the scores again, in two kernels, because there are two sums: a program
of the first adds up dQ over the keys, a program of the second dK and dV over the queries, and over
the query heads of its key head. Every number has one program that writes it, so that the result
does not depend on which program comes first. The price is that both compute the scores and dP:
7 products of tiles. One kernel, to whose dQ many programs add, would do 5; the forward pass does 2.

Exponentials are powers of 2, which the hardware has: scores are multiplied by :math:`\log_2 e`.

Shapes: B batch, H query heads, Hkv key and value heads, T queries, S keys, D features of a head.

Sources: Dao et al., *FlashAttention*, 2022, arXiv:2205.14135; Dao, *FlashAttention-2*, 2023,
arXiv:2307.08691, where a program takes queries and the keys pass by.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lm_from_scratch.attention.gqa import check_widths
from lm_from_scratch.attention.layer import check_shapes
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.kernels.device import check_device
from lm_from_scratch.kernels.softmax import LOWEST

NO_WINDOW = 2**31 - 1  # keys
LOG2E = tl.constexpr(math.log2(math.e))
LENGTHS = ["T", "S", "window"]  # a new length is no reason to compile again


@triton.jit
def load_rows(x, strides, b, h, start, n, D: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Rows ``start``, ``start + 1``, ... of x[b, h] (n, D) as (ROWS, WIDE), 0 outside."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDE)
    x += b * strides[0] + h.to(tl.int64) * strides[1] + start.to(tl.int64) * strides[2]
    inside = (row < n - start)[:, None] & (column < D)
    return tl.load(x + (row[:, None] * strides[2] + column), mask=inside, other=0.0)


@triton.jit
def store_rows(tile, x, strides, b, h, start, n, D: tl.constexpr):
    """The inverse: ``tile`` into the rows of x[b, h]."""
    row, column = start + tl.arange(0, tile.shape[0]), tl.arange(0, tile.shape[1])
    at = x + b * strides[0] + h.to(tl.int64) * strides[1] + row.to(tl.int64)[:, None] * strides[2]
    tl.store(at + column, tile, mask=(row < n)[:, None] & (column < D))


@triton.jit
def sees(rule, b, t, s, T, S, window):
    """Which queries ``t`` see which keys ``s``; the two broadcast against each other."""
    query_positions, key_positions, query_documents, key_documents, allowed, strides = rule
    if query_positions is None:  # dense: the queries are the last T of the S keys
        query, key = S - T + t, s
    else:
        query = tl.load(query_positions + b * T + t, mask=t < T, other=-1).to(tl.int32)
        key = tl.load(key_positions + b * S + s, mask=s < S, other=-1).to(tl.int32)
    seen = (key >= 0) & (key <= query) & (key > query - window)
    if query_documents is not None:
        document = tl.load(query_documents + b * T + t, mask=t < T, other=0)
        seen = seen & (document == tl.load(key_documents + b * S + s, mask=s < S, other=0))
    if allowed is not None:
        at = allowed + b * strides[0] + t.to(tl.int64) * strides[2] + s
        seen = seen & tl.load(at, mask=seen, other=False)
    return seen


@triton.jit
def key_tiles(rule, ranges, b, tile, T, S, window, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):
    """The keys of a tile of queries: tiles ``first`` to ``end``, seen as a whole from ``whole`` to
    ``whole_end``. As long as positions are arithmetic, so is this; otherwise it is in ``ranges``.
    """
    if rule[0] is None:
        oldest = S - T + tile * BLOCK_T  # the positions of the first and the last query
        latest = S - T + tl.minimum((tile + 1) * BLOCK_T, T) - 1
        first = tl.maximum(oldest - window + 1, 0) // BLOCK_S
        whole = tl.cdiv(tl.maximum(latest - window + 1, 0), BLOCK_S)
        whole_end = tl.maximum((oldest + 1) // BLOCK_S, whole)
        end = tl.cdiv(latest + 1, BLOCK_S)
    else:
        at = ranges + (b * tl.cdiv(T, BLOCK_T) + tile) * 2
        first, end = tl.load(at), tl.load(at + 1)
        whole, whole_end = first, first
    return first, whole, whole_end, end


@triton.jit
def query_tiles(rule, ranges, b, tile, T, S, window, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):
    """The same from the other side: the queries of a tile of keys."""
    if rule[0] is None:
        oldest = tile * BLOCK_S + T - S  # the queries that stand where the keys do
        latest = tl.minimum((tile + 1) * BLOCK_S, S) - 1 + T - S
        first = tl.maximum(oldest, 0) // BLOCK_T
        whole = tl.cdiv(tl.maximum(latest, 0), BLOCK_T)
        end = tl.cdiv(tl.maximum(tl.minimum(latest + window, T), 0), BLOCK_T)
        whole_end = tl.minimum(tl.maximum(oldest + window, 0) // BLOCK_T, tl.cdiv(T, BLOCK_T))
        whole_end = tl.maximum(whole_end, whole)
    else:
        at = ranges + (b * tl.cdiv(S, BLOCK_S) + tile) * 2
        first, end = tl.load(at), tl.load(at + 1)
        whole, whole_end = first, first
    return first, whole, whole_end, end


@triton.jit(do_not_specialize=LENGTHS)
def flash_forward_kernel(
    q, q_strides, k, k_strides, v, v_strides, out, out_strides, lse,
    rule, ranges, T, S, window, group, scale,
    D: tl.constexpr, WIDE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries see most, so they start
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    first, whole, whole_end, end = key_tiles(rule, ranges, b, tile, T, S, window, BLOCK_T, BLOCK_S)
    q_tile = load_rows(q, q_strides, b, h, tile * BLOCK_T, T, D, BLOCK_T, WIDE)
    m = tl.full((BLOCK_T,), LOWEST, tl.float32)
    l = tl.zeros((BLOCK_T,), tl.float32)
    a = tl.zeros((BLOCK_T, WIDE), tl.float32)
    for MASKED in tl.static_range(0 if rule[0] is None else 1, 2):
        if MASKED:  # all but the whole tiles
            start, stop = first, end - (whole_end - whole)
        else:
            start, stop = whole, whole_end
        for i in range(start, stop):
            s = i * BLOCK_S
            if MASKED:
                s += tl.where(i < whole, 0, (whole_end - whole) * BLOCK_S)
            k_tile = load_rows(k, k_strides, b, h // group, s, S, D, BLOCK_S, WIDE)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * (scale * LOG2E)
            if MASKED:
                keys = s + tl.arange(0, BLOCK_S)
                seen = sees(rule, b, t[:, None], keys[None, :], T, S, window)
                scores = tl.where(seen, scores, -float("inf"))  # (BLOCK_T, BLOCK_S)
            new_m = tl.maximum(m, tl.max(scores, 1))
            p = tl.exp2(scores - new_m[:, None])
            rescale = tl.exp2(m - new_m)
            l = l * rescale + tl.sum(p, 1)
            v_tile = load_rows(v, v_strides, b, h // group, s, S, D, BLOCK_S, WIDE)
            a = a * rescale[:, None]
            a = tl.dot(p.to(v_tile.dtype), v_tile, a, input_precision="ieee")
            m = new_m
    l = tl.where(l == 0, 1.0, l)  # a query that sees no key: a is 0
    store_rows(a / l[:, None], out, out_strides, b, h, tile * BLOCK_T, T, D)
    tl.store(lse + (b * tl.num_programs(1) + h) * T + t, m + tl.log2(l), mask=t < T)


@triton.jit(do_not_specialize=LENGTHS)
def flash_dq_kernel(
    q, q_strides, k, k_strides, v, v_strides, out, out_strides, grad, grad_strides, lse,
    delta, dq, dq_strides, rule, ranges, T, S, window, group, scale,
    D: tl.constexpr, WIDE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """dQ, and the delta (B, H, T) that the other kernel needs too."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    first, whole, whole_end, end = key_tiles(rule, ranges, b, tile, T, S, window, BLOCK_T, BLOCK_S)
    out_tile = load_rows(out, out_strides, b, h, tile * BLOCK_T, T, D, BLOCK_T, WIDE)
    do_tile = load_rows(grad, grad_strides, b, h, tile * BLOCK_T, T, D, BLOCK_T, WIDE)
    at = (b * tl.num_programs(1) + h) * T + t
    delta_tile = tl.sum(do_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + at, delta_tile, mask=t < T)
    lse_tile = tl.load(lse + at, mask=t < T, other=0.0)
    q_tile = load_rows(q, q_strides, b, h, tile * BLOCK_T, T, D, BLOCK_T, WIDE)
    dq_tile = tl.zeros((BLOCK_T, WIDE), tl.float32)
    for MASKED in tl.static_range(0 if rule[0] is None else 1, 2):
        if MASKED:
            start, stop = first, end - (whole_end - whole)
        else:
            start, stop = whole, whole_end
        for i in range(start, stop):
            s = i * BLOCK_S
            if MASKED:
                s += tl.where(i < whole, 0, (whole_end - whole) * BLOCK_S)
            k_tile = load_rows(k, k_strides, b, h // group, s, S, D, BLOCK_S, WIDE)
            v_tile = load_rows(v, v_strides, b, h // group, s, S, D, BLOCK_S, WIDE)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * (scale * LOG2E)
            if MASKED:
                keys = s + tl.arange(0, BLOCK_S)
                seen = sees(rule, b, t[:, None], keys[None, :], T, S, window)
                scores = tl.where(seen, scores, -float("inf"))
            p = tl.exp2(scores - lse_tile[:, None])  # the weights, once more
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
            ds = p * (dp - delta_tile[:, None])  # (BLOCK_T, BLOCK_S)
            dq_tile = tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile, input_precision="ieee")
    store_rows(dq_tile * scale, dq, dq_strides, b, h, tile * BLOCK_T, T, D)


@triton.jit(do_not_specialize=LENGTHS)
def flash_dk_dv_kernel(
    q, q_strides, k, k_strides, v, v_strides, grad, grad_strides, lse,
    delta, dk, dk_strides, dv, dv_strides, rule, ranges, T, S, window, group, scale,
    D: tl.constexpr, WIDE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys; its scores stand transposed, keys by queries."""
    tile, shared, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    s = tile * BLOCK_S + tl.arange(0, BLOCK_S)
    first, whole, whole_end, end = query_tiles(
        rule, ranges, b, tile, T, S, window, BLOCK_T, BLOCK_S
    )
    k_tile = load_rows(k, k_strides, b, shared, tile * BLOCK_S, S, D, BLOCK_S, WIDE)
    v_tile = load_rows(v, v_strides, b, shared, tile * BLOCK_S, S, D, BLOCK_S, WIDE)
    dk_tile = tl.zeros((BLOCK_S, WIDE), tl.float32)
    dv_tile = tl.zeros((BLOCK_S, WIDE), tl.float32)
    for MASKED in tl.static_range(0 if rule[0] is None else 1, 2):
        if MASKED:
            start, stop = first, end - (whole_end - whole)
        else:
            start, stop = whole, whole_end
        for i in range(0, group * (stop - start)):  # the tiles of one query head after the other
            h, i = shared * group + i // (stop - start), start + i % (stop - start)
            rows = (b * tl.num_programs(1) * group + h) * T  # of lse and delta
            t0 = i * BLOCK_T
            if MASKED:
                t0 += tl.where(i < whole, 0, (whole_end - whole) * BLOCK_T)
            t = t0 + tl.arange(0, BLOCK_T)
            q_tile = load_rows(q, q_strides, b, h, t0, T, D, BLOCK_T, WIDE)
            do_tile = load_rows(grad, grad_strides, b, h, t0, T, D, BLOCK_T, WIDE)
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee") * (scale * LOG2E)
            if MASKED:
                seen = sees(rule, b, t[None, :], s[:, None], T, S, window)
                scores = tl.where(seen, scores, -float("inf"))  # (BLOCK_S, BLOCK_T)
            lse_tile = tl.load(lse + rows + t, mask=t < T, other=0.0)
            p = tl.exp2(scores - lse_tile[None, :])
            dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, dv_tile, input_precision="ieee")
            delta_tile = tl.load(delta + rows + t, mask=t < T, other=0.0)
            dp = tl.dot(v_tile, tl.trans(do_tile), input_precision="ieee")
            ds = p * (dp - delta_tile[None, :])
            dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision="ieee")
    store_rows(dk_tile * scale, dk, dk_strides, b, shared, tile * BLOCK_S, S, D)
    store_rows(dv_tile, dv, dv_strides, b, shared, tile * BLOCK_S, S, D)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float = 0.0
) -> Tensor:
    """:func:`lm_from_scratch.attention.online_softmax.tiled_attention` of q (B, H, T, D), k and v
    (B, Hkv, S, D), D up to 256.

    Half-precision weights are rounded before they meet the values, as in the formula. The result
    (B, H, T, D) lies in memory as (B, T, H, D), the order in which a model reads it. Raises
    ``ValueError`` for dropout, for shapes and dtypes that do not fit, and where kernels do not run.
    """
    if dropout > 0:
        raise ValueError(f"flash attention has no dropout, but dropout={dropout}: use sdpa")
    check_shapes(q, k, v, visibility)
    check_widths("flash_attention", k, v)
    rule = rule_tensors(visibility)
    check_device("flash_attention", q=q, k=k, v=v, **rule)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"flash_attention: q is {q.dtype}, k {k.dtype}, v {v.dtype}; they must agree"
        )
    if q.shape[3] > 256:
        raise ValueError(f"flash_attention: heads have {q.shape[3]} features, above 256: use sdpa")
    window = NO_WINDOW if visibility.window is None else min(visibility.window, NO_WINDOW)
    return flash_forward(q, k, v, list(rule.values()), window)[0]


def rule_tensors(visibility: Visibility) -> dict[str, Tensor | None]:
    """What the rule is computed from, by name: nothing where it is known without looking."""
    rule: dict[str, Tensor | None] = dict(
        query_positions=visibility.query_positions,
        key_positions=visibility.key_positions,
        query_documents=visibility.query_documents,
        key_documents=visibility.key_documents,
        allowed=visibility.allowed,
    )
    return dict.fromkeys(rule) if visibility.dense else rule


def tile_sizes(
    D: int, dtype: torch.dtype, accumulators: int, rule: list[Tensor | None]
) -> tuple[int, int]:
    """Rows of the tile that a program owns, and of the tiles that pass by.

    They are the larger the less a program holds in registers, of which a thread has 255 at most:
    an accumulator of 64 x 128 numbers is 64 of them. What the rule loads takes some, too.
    """
    if dtype == torch.float32:  # whose products need registers: no matrix units
        own, passing = (32, 32 // accumulators) if D <= 64 else (16, 16)
    elif D <= 128:
        own, passing = 64, 64 if D <= 64 and accumulators == 1 else 32
    else:
        own, passing = 32, 32 // accumulators
    documents, allowed = rule[2], rule[4]
    crowded = allowed is not None or (documents is not None and accumulators * D > 128)
    return own, max(16, passing // 2) if crowded else passing


def rows_together(x: Tensor) -> Tensor:
    """``x`` (..., D) with a last stride of 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def by_tokens(like: Tensor) -> Tensor:
    """An empty tensor like ``like`` (B, H, T, D) that lies in memory as (B, T, H, D)."""
    B, H, T, D = like.shape
    return like.new_empty(B, T, H, D).transpose(1, 2)


def indexed(rule: list[Tensor | None], B: int) -> tuple[Any, ...]:
    """The rule as ``sees`` reads it: a row of each tensor for each of the B rows."""
    *tokens, allowed = (None if x is None else x.expand(B, *x.shape[1:]) for x in rule)
    rows = [None if x is None else x.contiguous() for x in tokens]
    if allowed is None:
        return *rows, None, None
    allowed = rows_together(allowed)
    return *rows, allowed, allowed.stride()


def extremes(x: Tensor, positions: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """The smallest and the largest ``x`` (B, tiles) among the real tokens of each tile, by their
    ``positions`` (B, T)."""
    x, real = torch.broadcast_tensors(x.long(), positions >= 0)
    tiles = max(1, triton.cdiv(x.shape[1], tile))
    fill = (0, tiles * tile - x.shape[1])
    x, real = (F.pad(y, fill).view(-1, tiles, tile) for y in (x, real))
    limits = torch.iinfo(x.dtype)
    return x.where(real, limits.max).amin(-1), x.where(real, limits.min).amax(-1)


def tiles_needed(rule: list[Tensor | None], window: int, BLOCK_T: int, BLOCK_S: int) -> Tensor:
    """(B, tiles of queries, tiles of keys), False where no query sees a key of the other.

    The extremes of each tile are enough to know it, and no GPU has to wait for the answer.
    """
    query_positions, key_positions, query_documents, key_documents, _ = rule
    assert query_positions is not None and key_positions is not None
    oldest, latest = (x[:, :, None] for x in extremes(query_positions, query_positions, BLOCK_T))
    low, high = (x[:, None] for x in extremes(key_positions, key_positions, BLOCK_S))
    needed = (low <= latest) & (high > oldest - window)
    if query_documents is not None and key_documents is not None:
        least, most = (x[:, :, None] for x in extremes(query_documents, query_positions, BLOCK_T))
        low, high = (x[:, None] for x in extremes(key_documents, key_positions, BLOCK_S))
        needed = needed & (low <= most) & (high >= least)
    return needed


def ranges_of(needed: Tensor, B: int) -> Tensor:
    """(B, tiles, 2): the first tile of the last dimension that is ``needed`` (B, tiles, tiles),
    and one after the last."""
    tile = torch.arange(needed.shape[-1], device=needed.device)
    first = tile.where(needed, needed.shape[-1]).amin(-1)
    end = (tile + 1).where(needed, 0).amax(-1)
    return torch.stack([first, end], dim=-1).int().expand(B, -1, -1).contiguous()


@torch.library.custom_op("lm_from_scratch::flash_attention", mutates_args=())
def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, rule: list[Tensor | None], window: int
) -> tuple[Tensor, Tensor]:
    """The result (B, H, T, D), and the log-sum-exp (B, H, T) to the base 2.

    ``rule`` holds the tensors of a visibility, or nothing where it is dense.
    """
    q, k, v = (rows_together(x) for x in (q, k, v))
    (B, H, T, D), (Hkv, S) = q.shape, k.shape[1:3]
    out, lse = by_tokens(q), q.new_empty(B, H, T, dtype=torch.float32)
    dense = rule[0] is None
    BLOCK_T, BLOCK_S = tile_sizes(D, q.dtype, 1, rule)
    ranges = None if dense else ranges_of(tiles_needed(rule, window, BLOCK_T, BLOCK_S), B)
    flash_forward_kernel[(triton.cdiv(T, BLOCK_T), H, B)](
        q, q.stride(), k, k.stride(), v, v.stride(), out, out.stride(), lse,
        indexed(rule, B), ranges, T, S, min(window, S) if dense else window, H // Hkv, D**-0.5,
        D=D, WIDE=max(16, triton.next_power_of_2(D)), BLOCK_T=BLOCK_T, BLOCK_S=BLOCK_S,
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("lm_from_scratch::flash_attention_backward", mutates_args=())
def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    rule: list[Tensor | None], window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad, q, k, v = (rows_together(x) for x in (grad, q, k, v))
    (B, H, T, D), (Hkv, S) = q.shape, k.shape[1:3]
    dq, delta = by_tokens(q), torch.empty_like(lse)
    dk, dv = by_tokens(k), by_tokens(v)
    dense = rule[0] is None
    seen = indexed(rule, B)
    rest = T, S, min(window, S) if dense else window, H // Hkv, D**-0.5
    widths = dict(D=D, WIDE=max(16, triton.next_power_of_2(D)))

    BLOCK_T, BLOCK_S = tile_sizes(D, q.dtype, 1, rule)
    ranges = None if dense else ranges_of(tiles_needed(rule, window, BLOCK_T, BLOCK_S), B)
    flash_dq_kernel[(triton.cdiv(T, BLOCK_T), H, B)](
        q, q.stride(), k, k.stride(), v, v.stride(), out, out.stride(), grad, grad.stride(), lse,
        delta, dq, dq.stride(), seen, ranges, *rest, **widths, BLOCK_T=BLOCK_T, BLOCK_S=BLOCK_S,
    )  # fmt: skip

    BLOCK_S, BLOCK_T = tile_sizes(D, q.dtype, 2, rule)
    ranges = None if dense else ranges_of(tiles_needed(rule, window, BLOCK_T, BLOCK_S).mT, B)
    flash_dk_dv_kernel[(triton.cdiv(S, BLOCK_S), Hkv, B)](
        q, q.stride(), k, k.stride(), v, v.stride(), grad, grad.stride(), lse, delta, dk,
        dk.stride(), dv, dv.stride(), seen, ranges, *rest, **widths, BLOCK_T=BLOCK_T,
        BLOCK_S=BLOCK_S, num_stages=2,
    )  # fmt: skip
    return dq, dk, dv


@flash_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, rule: list[Tensor | None], window: int
) -> tuple[Tensor, Tensor]:
    return by_tokens(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@flash_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    rule: list[Tensor | None], window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return by_tokens(q), by_tokens(k), by_tokens(v)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, rule, ctx.window = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, *rule)


def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, *rule = ctx.saved_tensors
    gradients = flash_backward(grad, q, k, v, out, lse, rule, ctx.window)
    # a list of nothing but tensors wants a gradient for each, any other list one for all
    of_rule = None if any(x is None for x in rule) else [None] * len(rule)
    return *gradients, of_rule, None


flash_forward.register_autograd(backward, setup_context=keep)
