"""Answers to attention, written from its text by a second person."""

import torch


def head_by_head(q, k, v):
    """Right: one query head and one query at a time, over the keys that it sees."""
    H, T, D = q.shape[1:]
    Hkv, S = k.shape[1], k.shape[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads = []
    for h in range(H):
        K, V = k[:, h * Hkv // H].to(wide), v[:, h * Hkv // H].to(wide)
        rows = []
        for t in range(T):
            n = S - T + t + 1
            p = torch.softmax((K[:, :n] @ q[:, h, t, :, None].to(wide))[..., 0] / D**0.5, dim=-1)
            rows.append((p[:, None] @ V[:, :n])[:, 0])
        heads.append(torch.stack(rows, 1))
    return torch.stack(heads, 1).to(q.dtype)


def usual(q, k, v, scale=None, diagonal=None, fill=float("-inf"), dim=-1):
    """Right with its defaults: keys repeated, a triangle of ones."""
    g = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    s = torch.einsum("bhtd,bhsd->bhts", q.to(wide), k.to(wide))
    s = s / q.size(-1) ** 0.5 if scale is None else s * scale
    T, S = s.shape[-2:]
    seen = torch.ones(T, S).tril(S - T if diagonal is None else diagonal).bool()
    p = s.masked_fill(~seen, fill).softmax(dim)
    return (p @ v.to(wide)).to(q.dtype)


def scale_forgotten(q, k, v):
    return usual(q, k, v, scale=1.0)


def divided_by_d(q, k, v):
    return usual(q, k, v, scale=1 / q.shape[-1])


def root_of_the_value_width(q, k, v):
    return usual(q, k, v, scale=v.shape[-1] ** -0.5)


def triangle_from_the_first_key(q, k, v):
    return usual(q, k, v, diagonal=0)


def own_key_hidden(q, k, v):
    return usual(q, k, v, diagonal=k.size(2) - q.size(2) - 1)


def next_key_seen(q, k, v):
    return usual(q, k, v, diagonal=k.size(2) - q.size(2) + 1)


def everything_seen(q, k, v):
    return usual(q, k, v, diagonal=k.size(2))


def hidden_scores_zero(q, k, v):
    return usual(q, k, v, fill=0.0)


def hidden_at_minus_ten_thousand(q, k, v):
    return usual(q, k, v, fill=-1e4)


def softmax_over_queries(q, k, v):
    return usual(q, k, v, dim=-2)


def heads_repeated_as_a_block(q, k, v):
    g = q.size(1) // k.size(1)
    return usual(q, torch.cat([k] * g, 1), torch.cat([v] * g, 1))


def values_repeated_as_a_block(q, k, v):
    g = q.size(1) // k.size(1)
    return usual(q, k.repeat_interleave(g, 1), v.repeat(1, g, 1, 1))


def masked_after_softmax(q, k, v):
    g = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    p = (q.to(wide) @ k.to(wide).mT / q.size(-1) ** 0.5).softmax(-1)
    return (p.tril(k.size(2) - q.size(2)) @ v.to(wide)).to(q.dtype)


def scores_in_half(q, k, v):
    g = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    s = q @ k.mT / q.size(-1) ** 0.5
    seen = torch.ones_like(s, dtype=torch.bool).tril(k.size(2) - q.size(2))
    wide = torch.promote_types(q.dtype, torch.float32)
    return s.masked_fill(~seen, -torch.inf).softmax(-1, dtype=wide).to(v.dtype) @ v


def exponentials_by_hand(q, k, v):
    g = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    e = (q.to(wide) @ k.to(wide).mT / q.size(-1) ** 0.5).exp().tril(k.size(2) - q.size(2))
    return (e / e.sum(-1, keepdim=True) @ v.to(wide)).to(q.dtype)


def float32_always(q, k, v):
    return usual(q.float(), k.float(), v.float()).to(q.dtype)


def float32_returned(q, k, v):
    wide = torch.promote_types(q.dtype, torch.float32)
    return usual(q.to(wide), k.to(wide), v.to(wide))


def heads_and_tokens_swapped(q, k, v):
    return usual(q, k, v).transpose(1, 2)


def query_scaled_in_place(q, k, v):
    with torch.no_grad():
        q.mul_(q.size(-1) ** -0.5)
    return usual(q, k, v, scale=1.0)


def cache_detached(q, k, v):
    return usual(q, k.detach(), v.detach())


def only_float16_widened(q, k, v):
    if q.dtype == torch.float16:
        return usual(q, k, v)
    g = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    s = q @ k.mT / q.size(-1) ** 0.5
    seen = torch.ones_like(s, dtype=torch.bool).tril(k.size(2) - q.size(2))
    return s.masked_fill(~seen, -torch.inf).softmax(-1) @ v


ANSWERS = {
    scale_forgotten: "the root of D is missing",
    divided_by_d: "divided by D, not by its root",
    root_of_the_value_width: "the root is of the width of v",
    triangle_from_the_first_key: "the triangle starts at the first key, as if there were no cache",
    own_key_hidden: "a query does not see its own key",
    next_key_seen: "a query sees one key of the future",
    everything_seen: "nothing hides the future",
    hidden_scores_zero: "hidden scores are 0, which is a score like any other",
    hidden_at_minus_ten_thousand: "hidden scores are -10000, which is above a visible score",
    softmax_over_queries: "the softmax runs over the queries, not over the keys",
    heads_repeated_as_a_block: (
        "key heads are repeated as 0 1 2 0 1 2, so that a head reads another group's keys"
    ),
    values_repeated_as_a_block: "keys are repeated as 0 0 1 1 2 2, and values as 0 1 2 0 1 2",
    masked_after_softmax: "weights are set to 0 after the softmax, so that rows do not sum to 1",
    scores_in_half: "float32 only after the product, which has overflowed by then",
    exponentials_by_hand: "exponentials without the maximum subtracted",
    float32_always: "float64 is computed in float32",
    float32_returned: "the result stays float32",
    heads_and_tokens_swapped: "",
    query_scaled_in_place: "",
    cache_detached: "",
    only_float16_widened: "float16 becomes float32, and bfloat16 is forgotten",
}
RIGHT = [head_by_head, usual]
SILENT = [scores_in_half, exponentials_by_hand, float32_always]
