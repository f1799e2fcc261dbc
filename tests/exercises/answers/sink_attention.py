"""Other right answers to sink_attention."""

import torch
import torch.nn.functional as F


def seen_by(T, S, window):
    """Which keys each of the last T queries sees."""
    seen = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    return seen if window is None else seen.triu(S - T - window + 1)


def by_a_gate(q, k, v, sinks, window=None):
    """Plain attention, times a sigmoid of how large all scores are beside the sink."""
    B, H, T, D = q.shape
    shape = (B, k.shape[1], H // k.shape[1], T, D)
    scores = torch.einsum("bgntd,bgsd->bgnts", q.reshape(shape), k).reshape(B, H, T, -1) / D**0.5
    scores = torch.where(seen_by(T, k.shape[2], window), scores, -torch.inf)
    total = scores.logsumexp(-1, keepdim=True)
    weights = scores.softmax(-1) * torch.sigmoid(total - sinks[:, None, None])
    weights = weights.reshape(*shape[:4], -1)
    return torch.einsum("bgnts,bgsd->bgntd", weights, v).reshape(q.shape)


def one_more_key(q, k, v, sinks, window=None):
    """A key in front whose value is 0, and whose score is the sink by way of the mask."""
    H, T, S = q.shape[1], q.shape[2], k.shape[2]
    n = H // k.shape[1]
    bias = torch.zeros(T, S, dtype=q.dtype).masked_fill(~seen_by(T, S, window), -torch.inf)
    bias = torch.cat([sinks[:, None, None].expand(H, T, 1), bias.expand(H, T, S)], dim=-1)
    k, v = (F.pad(x.repeat_interleave(n, dim=1), (0, 0, 1, 0)) for x in (k, v))
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) / q.shape[-1] ** 0.5 + bias
    return scores.softmax(-1) @ v


def head_by_head(q, k, v, sinks, window=None):
    """One head after the other, the maximum subtracted by hand."""
    (H, T, D), (Hkv, S) = q.shape[1:], k.shape[1:3]
    results = []
    for h in range(H):
        own = h * Hkv // H
        scores = q[:, h] @ k[:, own].mT * D**-0.5
        scores = scores.masked_fill(~seen_by(T, S, window), -torch.inf)
        top = torch.maximum(scores.amax(-1, keepdim=True), sinks[h]).detach()
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True) + (sinks[h] - top).exp()
        results.append(weights / total @ v[:, own])
    return torch.stack(results, dim=1)


def by_double(q, k, v, sinks, window=None):
    """All in float64."""
    return one_more_key(q.double(), k.double(), v.double(), sinks.double(), window).to(q.dtype)


RIGHT = [by_a_gate, one_more_key, head_by_head, by_double]
