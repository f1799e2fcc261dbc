"""Answers to packed_attention, written from its text by a second person."""

import torch
import torch.nn.functional as F


def refuse(q, k, cu_seq_q, cu_seq_k):
    if len(cu_seq_q) != len(cu_seq_k):
        raise ValueError("two numbers of sequences")
    if cu_seq_q[-1] != len(q) or cu_seq_k[-1] != len(k):
        raise ValueError("bounds do not end with the tokens")
    if (cu_seq_q.diff() > cu_seq_k.diff()).any():
        raise ValueError("more queries than keys")


def one_large_mask(q, k, v, cu_seq_q, cu_seq_k):
    """Right: one mask over all tokens, by sequence and distance from its end."""
    refuse(q, k, cu_seq_q, cu_seq_k)
    if len(q) == 0:
        return (q.sum() + k.sum() + v.sum()) * 0 + q
    a, b = cu_seq_q.diff().long(), cu_seq_k.diff().long()
    index = torch.arange(len(a))
    query, key = index.repeat_interleave(a), index.repeat_interleave(b)
    left_q = cu_seq_q[1:][query] - torch.arange(len(q))
    left_k = cu_seq_k[1:][key] - torch.arange(len(k))
    seen = (query[:, None] == key) & (left_k >= left_q[:, None])
    g = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    s = torch.einsum("nhd,mhd->hnm", q, k) / q.shape[2] ** 0.5
    p = s.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", p, v)


def looped(q, k, v, cu_seq_q, cu_seq_k, mask=None, scale=None, repeat=None, join=torch.cat):
    """Right with its defaults, but for a batch without sequences and its refusals."""
    g = q.shape[1] // k.shape[1]
    repeat = repeat or (lambda x: x.repeat_interleave(g, dim=1))
    k, v, out = repeat(k), repeat(v), [q[:0]]
    ends = zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], cu_seq_k.tolist(), cu_seq_k.tolist()[1:],
               strict=False)  # fmt: skip
    for a, b, c, d in ends:
        T, S = b - a, d - c
        seen = mask(T, S) if mask else torch.ones(T, S, dtype=torch.bool).tril(S - T)
        one = [x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])]
        got = F.scaled_dot_product_attention(*one, attn_mask=seen, scale=scale)
        out.append(got[0].transpose(0, 1))
    return join(out)


def aligned_to_the_first_key(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    return looped(q, k, v, cu_seq_q, cu_seq_k, lambda T, S: torch.ones(T, S).tril() > 0)


def sdpa_is_causal(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    out = torch.empty_like(q)
    g = q.shape[1] // k.shape[1]
    for i in range(len(cu_seq_q) - 1):
        a, b, c, d = *cu_seq_q[i : i + 2].tolist(), *cu_seq_k[i : i + 2].tolist()
        keys, values = (x[c:d].repeat_interleave(g, 1) for x in (k, v))
        one = [x.transpose(0, 1) for x in (q[a:b], keys, values)]
        out[a:b] = F.scaled_dot_product_attention(*one, is_causal=True).transpose(0, 1)
    return out


def one_long_text(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    ends = [torch.tensor([0, len(x)]) for x in (q, k)]
    return looped(q, k, v, *ends)


def not_causal(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    return looped(q, k, v, cu_seq_q, cu_seq_k, lambda T, S: torch.ones(T, S) > 0)


def own_key_hidden(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    return looped(q, k, v, cu_seq_q, cu_seq_k, lambda T, S: torch.ones(T, S).tril(S - T - 1) > 0)


def next_key_seen(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    return looped(q, k, v, cu_seq_q, cu_seq_k, lambda T, S: torch.ones(T, S).tril(S - T + 1) > 0)


def heads_repeated_as_a_block(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    g = q.shape[1] // k.shape[1]
    return looped(q, k, v, cu_seq_q, cu_seq_k, repeat=lambda x: x.repeat(1, g, 1))


def scale_forgotten(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    return looped(q, k, v, cu_seq_q, cu_seq_k, scale=1.0)


def bounds_of_queries_for_keys(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    return looped(q, k, v, cu_seq_q, cu_seq_q)


def last_sequence_left_out(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    out = torch.zeros_like(q)
    done = looped(q, k, v, cu_seq_q[:-1], cu_seq_k[:-1]) if len(cu_seq_q) > 1 else q[:0]
    return torch.cat([done, out[len(done) :]])


def nothing_refused(q, k, v, cu_seq_q, cu_seq_k):
    return looped(q, k, v, cu_seq_q, cu_seq_k)


def end_of_the_keys_not_refused(q, k, v, cu_seq_q, cu_seq_k):
    if len(cu_seq_q) != len(cu_seq_k) or cu_seq_q[-1] != len(q):
        raise ValueError
    if (cu_seq_q.diff() > cu_seq_k.diff()).any():
        raise ValueError
    return looped(q, k, v, cu_seq_q, cu_seq_k)


def end_of_the_queries_not_refused(q, k, v, cu_seq_q, cu_seq_k):
    if len(cu_seq_q) != len(cu_seq_k) or cu_seq_k[-1] != len(k):
        raise ValueError
    if (cu_seq_q.diff() > cu_seq_k.diff()).any():
        raise ValueError
    return looped(q, k, v, cu_seq_q, cu_seq_k)


def more_queries_in_all_refused(q, k, v, cu_seq_q, cu_seq_k):
    if len(cu_seq_q) != len(cu_seq_k) or len(q) > len(k):
        raise ValueError
    if cu_seq_q[-1] != len(q) or cu_seq_k[-1] != len(k):
        raise ValueError
    return looped(q, k, v, cu_seq_q, cu_seq_k)


def number_of_sequences_not_refused(q, k, v, cu_seq_q, cu_seq_k):
    if cu_seq_q[-1] != len(q) or cu_seq_k[-1] != len(k):
        raise ValueError
    n = min(len(cu_seq_q), len(cu_seq_k))
    if (cu_seq_q[:n].diff() > cu_seq_k[:n].diff()).any():
        raise ValueError
    return looped(q, k, v, cu_seq_q, cu_seq_k)


def no_sequence_crashes(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    return looped(q, k, v, cu_seq_q, cu_seq_k, join=lambda parts: torch.cat(list(parts[1:])))


def empty_sequence_refused(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    if (cu_seq_q.diff() <= 0).any():
        raise ValueError("an empty sequence")
    return looped(q, k, v, cu_seq_q, cu_seq_k)


def hidden_at_minus_ten_thousand(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    g, out = q.shape[1] // k.shape[1], [q[:0]]
    for i in range(len(cu_seq_q) - 1):
        a, b, c, d = *cu_seq_q[i : i + 2], *cu_seq_k[i : i + 2]
        K, V = (x[c:d].repeat_interleave(g, 1) for x in (k, v))
        s = torch.einsum("thd,shd->hts", q[a:b], K) / q.shape[-1] ** 0.5
        hidden = torch.ones(b - a, d - c).triu(int(d - c - (b - a)) + 1).bool()
        s = torch.where(hidden, -1e4, s)
        out.append(torch.einsum("hts,shd->thd", s.softmax(-1), V))
    return torch.cat(out)


def float32_always(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    return looped(q.float(), k.float(), v.float(), cu_seq_q, cu_seq_k).to(q.dtype)


def heads_before_tokens(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    return looped(q, k, v, cu_seq_q, cu_seq_k).transpose(0, 1)


def heads_taken_for_tokens(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    g, out = q.shape[1] // k.shape[1], [q[:0]]
    for a, b, c, d in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:], strict=False):
        K, V = (x[c:d].repeat_interleave(g, 1) for x in (k, v))
        out.append(F.scaled_dot_product_attention(q[a:b], K, V))
    return torch.cat(out)


def values_detached(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k, cu_seq_q, cu_seq_k)
    return looped(q, k.detach(), v.detach(), cu_seq_q, cu_seq_k)


def end_of_the_keys_may_come_early(q, k, v, cu_seq_q, cu_seq_k):
    refuse(q, k[: int(cu_seq_k[-1])], cu_seq_q, cu_seq_k)
    return looped(q, k, v, cu_seq_q, cu_seq_k)


ANSWERS = {
    aligned_to_the_first_key: "the mask is aligned to the first key, not to the last",
    sdpa_is_causal: "the mask is aligned to the first key, not to the last",
    one_long_text: "one long sequence: tokens see the sequences before theirs",
    not_causal: "nothing hides the future within a sequence",
    own_key_hidden: "a token does not see itself",
    next_key_seen: "a token sees the one after it",
    heads_repeated_as_a_block: (
        "the row of key heads is repeated, so that head 0 goes with query heads 0, 2, 4"
    ),
    scale_forgotten: "the scores are not scaled",
    bounds_of_queries_for_keys: "the bounds of the queries are used for the keys too",
    last_sequence_left_out: "",
    nothing_refused: "nothing is refused",
    end_of_the_keys_not_refused: "the last bound of the keys is not compared with M",
    end_of_the_queries_not_refused: "the last bound of the queries is not compared with N",
    more_queries_in_all_refused: "a sequence with more queries than keys is accepted",
    number_of_sequences_not_refused: "the numbers of sequences are not compared",
    no_sequence_crashes: "without a sequence there is nothing to put together",
    empty_sequence_refused: "",
    hidden_at_minus_ten_thousand: "hidden scores of -10000, above the visible ones",
    float32_always: "float64 is computed in float32",
    heads_before_tokens: "heads come before tokens in the result",
    heads_taken_for_tokens: "heads are taken for tokens: SDPA wants them first",
    values_detached: "",
    end_of_the_keys_may_come_early: "the last bound of the keys is not compared with M",
}
RIGHT = [one_large_mask]
SILENT = [
    own_key_hidden,
    nothing_refused,
    end_of_the_queries_not_refused,
    no_sequence_crashes,
    float32_always,
]
