r"""Attention over sequences of different lengths, laid end to end without padding.

Padding costs what tokens cost. Here N tokens of all sequences stand in one row, and ``cu_seq``
(*cumulative sequence lengths*: 0, then the sum of the lengths so far) says where each begins:
sequence ``i`` is ``cu_seq[i] : cu_seq[i + 1]``. Attention stays within a sequence and is causal
there. A sequence may have fewer queries than keys, when the earlier tokens come from a cache; its
queries are then the *last* ones: causality is aligned to the bottom right.

:func:`varlen_attention` computes this, and :func:`packed_attention` brings a padded batch to this
form and back.

Shapes: N queries and M keys of all sequences, H query heads, Hkv key and value heads, D
features of a query and a key, Dv of a value.

Source: Zhai et al., *ByteTransformer*, 2022, arXiv:2210.03052, which leaves padding out of
attention.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.attention.layer import check_shapes
from lm_from_scratch.attention.visibility import Visibility


def boundaries(name: str, cu_seq: Tensor, n_tokens: int) -> list[int]:
    """The cumulative lengths ``cu_seq`` (I + 1,) of I sequences as numbers. Raises
    ``ValueError`` unless they rise from 0 to the number of tokens."""
    bounds: list[int] = cu_seq.tolist()
    if bounds[:1] != [0] or bounds[-1] != n_tokens or bounds != sorted(bounds):
        raise ValueError(f"{name}={bounds} must rise from 0 to the number of tokens, {n_tokens}")
    return bounds


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    window: int | None = None,
) -> Tensor:
    """Causal attention (N, H, Dv) of q (N, H, D) to k (M, Hkv, D) and v (M, Hkv, Dv) within each
    sequence; ``cu_seq_q`` and ``cu_seq_k`` (I + 1,) say where each of the I begins.

    Half precision on CUDA, with values as wide as keys, goes through torch's fused ``varlen_attn``;
    that path was not run on a GPU here. Everything else goes through SDPA, one sequence after the
    other. Raises ``ValueError`` for lengths that do not fit, and for a sequence with more
    queries than keys.
    """
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k has shape {tuple(k.shape)}, v {tuple(v.shape)}; they must agree")
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1: a query sees its own key")
    bounds_q = boundaries("cu_seq_q", cu_seq_q, q.shape[0])
    bounds_k = boundaries("cu_seq_k", cu_seq_k, k.shape[0])
    if len(bounds_q) != len(bounds_k):
        raise ValueError(
            f"cu_seq_q is for {len(bounds_q) - 1} sequences, cu_seq_k for {len(bounds_k) - 1}"
        )
    for i, (queries, keys) in enumerate(zip(pairwise(bounds_q), pairwise(bounds_k), strict=True)):
        if queries[1] - queries[0] > keys[1] - keys[0]:
            raise ValueError(
                f"sequence {i} has {queries[1] - queries[0]} queries, but only "
                f"{keys[1] - keys[0]} keys: every query is one of its tokens"
            )
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and k.shape == v.shape:
        return fused_varlen_attention(q, k, v, bounds_q, bounds_k, window)
    results = [q[:0, :, :1].expand(-1, -1, v.shape[2])]  # (0, H, Dv)
    for queries, keys in zip(pairwise(bounds_q), pairwise(bounds_k), strict=True):
        one_q, one_k, one_v = q[slice(*queries)], k[slice(*keys)], v[slice(*keys)]
        results.append(one_sequence(one_q, one_k, one_v, window))
    return torch.cat(results)


def one_sequence(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Attention (T, H, Dv) of one sequence, q (T, H, D), k (S, Hkv, D) and v (S, Hkv, Dv): its T
    queries are the last of its S tokens."""
    T, S = q.shape[0], k.shape[0]
    query_positions = torch.arange(S - T, S, device=q.device)[None]
    key_positions = torch.arange(S, device=q.device)[None]
    visibility = Visibility(query_positions, key_positions, window=window, dense=True)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # (1, H, T, D)
    y = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if visibility.is_causal else visibility.mask,
        is_causal=visibility.is_causal,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return y[0].transpose(0, 1)


def fused_varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds_q: list[int],
    bounds_k: list[int],
    window: int | None,
) -> Tensor:
    """The same of q (N, H, D), k and v (M, Hkv, D) in one kernel for all sequences, on CUDA."""
    from torch.nn.attention.varlen import varlen_attn

    def longest(bounds: list[int]) -> int:
        return max(stop - start for start, stop in pairwise(bounds))

    y: Any = varlen_attn(
        q,
        k,
        v,
        torch.tensor(bounds_q, dtype=torch.int32, device=q.device),
        torch.tensor(bounds_k, dtype=torch.int32, device=q.device),
        longest(bounds_q),
        longest(bounds_k),
        # keys to the left of the query's own, and to its right; -1 is no limit
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return y


def sequences(visibility: Visibility, B: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The columns of queries and of keys of each sequence, as indices into the flattened batch.

    A sequence is what stands in one row and one document; padding is in none. One without queries
    or without keys is left out: no result depends on it. Raises ``ValueError`` where the order of
    the tokens does not say what they see.
    """
    T, S = visibility.query_length, visibility.key_length
    query_positions = visibility.query_positions.expand(B, -1)
    key_positions = visibility.key_positions.expand(B, -1)
    if visibility.query_documents is None or visibility.key_documents is None:
        query_documents, key_documents = query_positions * 0, key_positions * 0
    else:
        query_documents = visibility.query_documents.expand(B, -1)
        key_documents = visibility.key_documents.expand(B, -1)
    for row in range(B):
        for document in query_documents[row].unique():
            its_queries = (query_documents[row] == document) & (query_positions[row] >= 0)
            its_keys = (key_documents[row] == document) & (key_positions[row] >= 0)
            if its_queries.any() and its_keys.any():
                queries, keys = its_queries.nonzero()[:, 0], its_keys.nonzero()[:, 0]
                check_order(row, query_positions[row, queries], key_positions[row, keys])
                yield row * T + queries, row * S + keys


def check_order(row: int, queries: Tensor, keys: Tensor) -> None:
    """Raises ``ValueError`` for positions of a sequence from which its place alone would give the
    wrong keys."""
    for places, needed, rule in (
        (keys, keys[0], "the keys of a sequence must stand in order, without gaps"),
        (queries, keys[-1] - len(queries) + 1, "the queries must be the last of a sequence"),
    ):
        expected = torch.arange(len(places), device=places.device) + needed
        wrong = (places != expected).nonzero().flatten()
        if len(wrong):
            raise ValueError(
                f"row {row}: position {places[wrong[0]]} stands where packed attention needs "
                f"{expected[wrong[0]]}: {rule}"
            )


def cumulative(parts: Iterable[Tensor]) -> Tensor:
    """0, and the sum of the lengths so far."""
    return torch.tensor([0, *accumulate(len(part) for part in parts)])


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, visibility: Visibility, dropout: float = 0.0
) -> Tensor:
    """Attention of a batch with its padding taken out: :func:`varlen_attention` on the real tokens
    of q (B, H, T, D), k (B, Hkv, S, D) and v (B, Hkv, S, Dv).

    The sequences are read from the positions, which makes a GPU wait. Their tokens must stand in
    order, and the queries be the last ones; a ``ValueError`` names the row where they do not. No
    dropout: the fused kernel has none. Raises ``ValueError`` for dropout, for shapes that do not
    fit, and for a mask.
    """
    if dropout > 0:
        raise ValueError(f"packed attention has no dropout, but dropout={dropout}: use sdpa")
    check_shapes(q, k, v, visibility)
    if visibility.allowed is not None:
        raise ValueError("packed attention knows sequences, but no mask of its own: use sdpa")
    B, H, T, _ = q.shape
    spans = list(sequences(visibility, B))
    if not spans:
        nothing = torch.ones_like(q[..., :1], dtype=torch.bool)  # is seen by anything
        return q[..., :1].masked_fill(nothing, 0.0).expand(-1, -1, -1, v.shape[3])
    queries, keys = zip(*spans, strict=True)
    at, source = torch.cat(queries), torch.cat(keys)  # (N,), (M,)
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B * T, H, D)
    y = varlen_attention(
        flat_q[at],
        flat_k[source],
        flat_v[source],
        cumulative(queries),
        cumulative(keys),
        visibility.window,
    )
    y = flat_q.new_zeros(B * T, H, v.shape[3]).index_copy(0, at, y.to(q.dtype))
    return y.view(B, T, H, -1).transpose(1, 2)
