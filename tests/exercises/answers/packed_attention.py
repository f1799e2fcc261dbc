"""Answers to packed_attention: other right ones, and wrong ones of a second person."""

import torch
import torch.nn.functional as F

from lm_from_scratch.exercises.catalogue.packed_attention.checks import spans


def block_mask(q, k, cu_seq_q, cu_seq_k):
    """What may be seen, for all tokens at once: (N, M)."""
    mask = torch.zeros(len(q), len(k), dtype=torch.bool)
    for queries, keys in spans(q, k, cu_seq_q, cu_seq_k):
        T, S = queries.stop - queries.start, keys.stop - keys.start
        mask[queries, keys] = torch.arange(S - T, S)[:, None] >= torch.arange(S)
    return mask


def by_block_mask(q, k, v, cu_seq_q, cu_seq_k):
    """All scores of the row at once, under one mask, by SDPA."""
    mask = block_mask(q, k, cu_seq_q, cu_seq_k)
    if not len(q):
        return q
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return y[0].transpose(0, 1)


def by_sequence(q, k, v, cu_seq_q, cu_seq_k):
    """SDPA for each sequence; rows are put in front of the queries, so that is_causal is right."""
    y = torch.zeros_like(q)
    for queries, keys in spans(q, k, cu_seq_q, cu_seq_k):
        T, S = queries.stop - queries.start, keys.stop - keys.start
        if T:
            one = F.pad(q[queries], (0, 0, 0, 0, S - T, 0)).transpose(0, 1)[None]
            one_k, one_v = (x[keys].transpose(0, 1)[None] for x in (k, v))
            done = F.scaled_dot_product_attention(
                one, one_k, one_v, is_causal=True, enable_gqa=True
            )
            y[queries] = done[0, :, S - T :].transpose(0, 1)
    return y


def by_token(q, k, v, cu_seq_q, cu_seq_k):
    """Query by query and head by head, without a mask, in float64."""
    H, D = q.shape[1:]
    rows = [q.new_zeros(0, H, D)]
    for queries, keys in spans(q, k, cu_seq_q, cu_seq_k):
        for t in range(queries.start, queries.stop):
            stop = keys.stop - (queries.stop - 1 - t)
            heads = []
            for h in range(H):
                group = h * k.shape[1] // H
                seen_k, seen_v = (x[keys.start : stop, group].double() for x in (k, v))
                scores = seen_k @ q[t, h].double() * D**-0.5
                heads.append(scores.softmax(0) @ seen_v)
            rows.append(torch.stack(heads)[None].to(q.dtype))
    return torch.cat(rows)


def online(q, k, v, cu_seq_q, cu_seq_k):
    """Key by key, with a running maximum and a running sum for each query."""
    H, D = q.shape[1:]
    k, v = (x.unsqueeze(2).expand(-1, -1, H // x.shape[1], -1).flatten(1, 2) for x in (k, v))
    mask = block_mask(q, k, cu_seq_q, cu_seq_k)
    most = torch.full_like(q[..., :1], -torch.inf)
    total, y = torch.zeros_like(most), torch.zeros_like(q)
    for key in range(len(k)):
        scores = (q * k[key]).sum(-1, keepdim=True) / D**0.5
        seen = mask[:, key, None, None]
        new = torch.where(seen, torch.maximum(most, scores), most)
        safe = new.masked_fill(new == -torch.inf, 0.0)
        decay = torch.exp(most - safe)
        gain = torch.exp(torch.where(seen, scores - safe, -torch.inf))
        total, y, most = total * decay + gain, y * decay + gain * v[key], new
    return y / total


RIGHT = [by_block_mask, by_sequence, by_token, online]

WRONG = [
    ("the bounds of the queries are used for the keys too",
     {"scores = torch": "c, d, S = a, b, T\n        scores = torch"},
     "the table's fails more cases"),
    ("the last sequence is left out",
     {"pairwise(bounds_q), pairwise(bounds_k)": "pairwise(bounds_q[:-1]), pairwise(bounds_k[:-1])",
      "return torch.cat(results)":
      "done = torch.cat(results)\n    return torch.cat([done, 0 * q[len(done) :]])"}),
    ("keys and values are detached, as those of a cache",
     {"k.repeat_interleave": "k.detach().repeat_interleave",
      "v.repeat_interleave": "v.detach().repeat_interleave"}),
]  # fmt: skip
