"""Answers to beam_step: other right ones, and wrong ones of a second person."""

import heapq
import math
from typing import Any

import torch


def by_sort(scores, log_probs, stop):
    """One sort of all candidates, and a pass over them."""
    B, n, V = log_probs.shape
    totals = scores[..., None] + log_probs
    order = totals.reshape(B, -1).argsort(dim=-1, descending=True)
    parents, tokens = torch.div(order, V, rounding_mode="floor"), order.remainder(V)
    ended = torch.full_like(scores, -math.inf)
    places = torch.zeros(B, n, dtype=torch.long)
    for i in range(B):
        for rank in range(n):
            if tokens[i, rank] == stop:
                beam = parents[i, rank]
                ended[i, beam] = totals[i, beam, stop]
        places[i] = (tokens[i] != stop).nonzero()[:n, 0]
    best = totals.reshape(B, -1).gather(1, order.gather(1, places))
    return best, parents.gather(1, places), tokens.gather(1, places), ended


def by_heap(scores, log_probs, stop):
    """Lists of triples, prompt by prompt, in float64."""
    n, V = log_probs.shape[1:]
    rows: list[tuple[Any, ...]] = []
    for own, after in zip(scores.double().tolist(), log_probs.double()):
        triples = [(own[b] + float(after[b, v]), b, v) for b in range(n) for v in range(V)]
        best = heapq.nlargest(n, [t for t in triples if t[2] != stop])
        first = {t[1]: t[0] for t in heapq.nlargest(n, triples) if t[2] == stop}
        rows.append((*zip(*best), [first.get(b, -math.inf) for b in range(n)]))
    best_scores, parents, tokens, ended = zip(*rows)
    best_scores, ended = (torch.tensor(x, dtype=scores.dtype) for x in (best_scores, ended))
    return best_scores, torch.tensor(parents), torch.tensor(tokens), ended


def by_beam(scores, log_probs, stop):
    """First the best of each beam, then the best of these."""
    B, n, V = log_probs.shape
    others = [token for token in range(V) if token != stop]
    width = min(n, V - 1)
    own, at = log_probs[:, :, others].topk(width, dim=-1)  # (B, n, width)
    totals = (own + scores.unsqueeze(-1)).reshape(B, -1)
    best, place = totals.topk(n, dim=1)
    tokens = torch.tensor(others)[at.reshape(B, -1).gather(1, place)]
    ends = scores + log_probs[:, :, stop]
    better = (totals[:, :, None] > ends[:, None, :]).sum(1)
    better = better + (ends[:, :, None] > ends[:, None, :]).sum(1)
    return best, place // width, tokens, ends.where(better < n, torch.tensor(-math.inf))


def by_twice(scores, log_probs, stop):
    """The 2n best: at most n of them end, so n go on."""
    B, n, V = log_probs.shape
    totals = (scores.unsqueeze(2) + log_probs).reshape(B, n * V)
    values, place = totals.topk(min(2 * n, n * V), dim=1)
    ends = place % V == stop
    rank = torch.arange(values.shape[1])
    order = (ends * 1000 + rank).argsort(dim=1)[:, :n]
    ended = torch.full((B, n + 1), -math.inf, dtype=scores.dtype)
    target = torch.where(ends & (rank < n), place // V, n)
    ended.scatter_(1, target, values)
    return (
        values.gather(1, order), (place // V).gather(1, order), (place % V).gather(1, order),
        ended[:, :n],
    )  # fmt: skip


RIGHT = [by_sort, by_heap, by_beam, by_twice]

TOTALS = "scores[:, :, None] + log_probs"

WRONG = [
    ("every beam goes on with its own best token",
     {"best, place = totals.flatten(1).topk(n)\n    return best, place // V, place % V, ended":
      "best, tokens = totals.max(-1)\n    order = best.argsort(descending=True)\n"
      "    return best.gather(1, order), order, tokens.gather(1, order), ended"}),
    ("the mean of both scores", {TOTALS: f"({TOTALS}) / 2"}),
    ("ends are flags", {"place % V, ended": "place % V, ended > -math.inf"}),
    ("the candidates are normalised again",
     {TOTALS: f"({TOTALS}).flatten(1).log_softmax(1).view_as(log_probs)"}),
    ("the stop token is taken out before the softmax",
     {"totals[:, :, stop] = -math.inf":
      "others = log_probs.index_fill(2, torch.tensor(stop), -math.inf)\n"
      "    totals = scores[:, :, None] + others.log_softmax(-1)"}),
]  # fmt: skip
