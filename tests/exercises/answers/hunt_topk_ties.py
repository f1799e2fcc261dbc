"""Other right answers to hunt_topk_ties."""

import torch


def by_sorted(scores, query_positions, key_positions, k):
    """Python's sort, by two numbers."""
    out = torch.zeros(scores.shape, dtype=torch.bool)
    places = key_positions.tolist()
    for t, at in enumerate(query_positions.tolist()):
        seen = [s for s, place in enumerate(places) if 0 <= place <= at]
        row = scores[t].tolist()
        out[t, sorted(seen, key=lambda s: (row[s], places[s]))[-k:]] = True
    return out


def by_counting(scores, query_positions, key_positions, k):
    """A key is read if fewer than k keys that the query sees are better."""
    visible = (key_positions >= 0) & (key_positions <= query_positions[:, None])
    mine, other = scores[:, :, None], scores[:, None, :]
    later = key_positions[None, :] > key_positions[:, None]
    better = (other > mine) | ((other == mine) & later)
    return visible & ((better & visible[:, None]).sum(-1) < k)


def by_border(scores, query_positions, key_positions, k):
    """The k-th score is the border: all above it, and the latest of those that are equal to it."""
    visible = (key_positions >= 0) & (key_positions <= query_positions[:, None])
    scores = scores.masked_fill(~visible, -torch.inf)
    border = scores.topk(min(k, scores.shape[1])).values[:, -1:]
    above, equal = scores > border, scores == border
    left = k - above.sum(-1, keepdim=True)
    order = key_positions.argsort(descending=True)
    rank = torch.empty_like(equal, dtype=torch.long)
    rank[:, order] = equal[:, order].long().cumsum(-1)
    return (above | (equal & (rank <= left))) & visible


def by_turns(scores, query_positions, key_positions, k):
    """The best key, then the best of the others, k times."""
    left = (key_positions >= 0) & (key_positions <= query_positions[:, None])
    out = torch.zeros_like(left)
    rows = torch.arange(len(scores))
    for _ in range(min(k, scores.shape[1])):
        now = scores.masked_fill(~left, -torch.inf)
        top = left & (now == now.amax(-1, keepdim=True))
        best = torch.where(top, key_positions, -1).argmax(-1)
        out[rows, best] |= top.any(-1)
        left[rows, best] = False
    return out


LAST_IS_1 = "scores have two dimensions: the last one is 1"
BEST = "best = ordered.sort(dim=-1, descending=True, stable=True).indices[:, :k]"
RIGHT = [by_sorted, by_counting, by_border, by_turns]

SURVIVORS = {
    "chosen = torch.zeros_like(visible).scatter(-1, latest[best], True): -1 => 1": LAST_IS_1,
    f"{BEST}: -1 => 1": LAST_IS_1,
    f"{BEST}: ordered.sort(dim=-1, descending=True, stable=True) => "
    "ordered.sort(descending=True, stable=True)": "the last dimension is sort's default",
}
