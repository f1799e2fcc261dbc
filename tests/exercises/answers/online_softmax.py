"""Answers to online_softmax: other right ones, and wrong ones of a second person."""

import math

import torch


def by_key(q, k, v, visible, tile):
    """One key at a time, in float64; a query that does not see it keeps its state."""
    m = torch.full((len(q),), -torch.inf, dtype=torch.float64)
    total, a = torch.zeros_like(m), torch.zeros(q.shape, dtype=torch.float64)
    for s in range(len(k)):
        at = visible[:, s].nonzero()[:, 0]
        score = q[at].double() @ k[s].double() / math.sqrt(q.shape[1])
        best = torch.maximum(m[at], score)
        factor, p = (m[at] - best).exp(), (score - best).exp()
        total[at] = total[at] * factor + p
        a[at] = a[at] * factor[:, None] + p[:, None] * v[s].double()
        m[at] = best
    return (a / total.clamp(min=1)[:, None]).to(q.dtype)


def by_logaddexp(q, k, v, visible, tile):
    """A mean that is always divided already, and the log of the sum."""
    wide = q.float() * q.shape[1] ** -0.5
    y = torch.zeros(q.shape)
    lse = torch.full((len(q), 1), -1e30)
    for keys, values, seen in zip(
        k.split(tile), v.split(tile), visible.split(tile, dim=1), strict=True
    ):
        scores = torch.where(seen, wide @ keys.float().mT, -torch.inf)
        empty = ~seen.any(1, keepdim=True)
        part = scores.masked_fill(empty, 0.0).softmax(1) @ values.float()
        mine = torch.where(empty, -math.inf, scores.logsumexp(1, keepdim=True))
        total = torch.logaddexp(lse, mine)
        y = y * (lse - total).exp() + torch.where(empty, 0.0, part) * (mine - total).exp()
        lse = total
    return y.to(q.dtype)


def by_two_passes(q, k, v, visible, tile):
    """First the maximum of all tiles, then the sums: nothing needs repair."""
    parts = [slice(i, i + tile) for i in range(0, len(k), tile)]

    def scores(part):
        return (q.double() @ k[part].double().T) / math.sqrt(q.shape[1])

    m = torch.full((len(q),), -1e30, dtype=torch.float64)
    for part in parts:
        m = torch.maximum(m, scores(part).masked_fill(~visible[:, part], -1e30).amax(1))
    l, a = torch.zeros(len(q), 1), torch.zeros(q.shape, dtype=torch.float64)
    for part in parts:
        p = (scores(part) - m[:, None]).masked_fill(~visible[:, part], -torch.inf).exp()
        l, a = l + p.sum(1, keepdim=True), a + p @ v[part].double()
    return torch.where(l > 0, a / l, 0.0).to(q.dtype)


def by_merging(q, k, v, visible, tile):
    """A state for each tile; the states are merged from the last to the first."""
    m = torch.full((len(q), 1), -torch.inf)
    l, a = torch.zeros(len(q), 1), torch.zeros(q.shape)
    for start in reversed(range(0, len(k), tile)):
        part = slice(start, start + tile)
        scores = q.float() @ k[part].float().T / q.shape[1] ** 0.5
        scores[~visible[:, part]] = -torch.inf
        own = scores.amax(1, keepdim=True)
        p = torch.exp(scores - own).nan_to_num(0.0)
        best = torch.maximum(m, own)
        f, h = (torch.exp(x - best).nan_to_num(0.0) for x in (m, own))
        l = f * l + h * p.sum(1, keepdim=True)
        a = f * a + h * (p @ v[part].float())
        m = best
    return (a / l).nan_to_num(0.0).to(q.dtype)


RIGHT = [by_key, by_logaddexp, by_two_passes, by_merging]

WRONG = [
    ("one maximum for all queries, far above some of them",
     {"scores.amax(1, keepdim=True)": "scores.max()",
      "(a / l.clamp(min=1))": "torch.where(l > 0, a / l, 0.0)"}),
    ("the shorter last tile is left out", {"len(k), tile": "len(k) // tile * tile, tile"}),
]  # fmt: skip

SURVIVORS = {
    "l = torch.zeros(T, 1): torch.zeros => torch.ones": "the first visible key multiplies it "
    "by exp(-inf) = 0, and without one it divides a sum of 0"
}
