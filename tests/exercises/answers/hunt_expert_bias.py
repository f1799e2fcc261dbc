"""Other right answers to hunt_expert_bias."""

import torch

from lm_from_scratch.exercises.catalogue.hunt_expert_bias.checks import WORTH


def token_by_token(logits, bias, k, n_group, top_group, scale):
    """Python's sort, one token after the other."""
    E = logits.shape[1]
    size = E // n_group
    rows = []
    for row in logits:
        score = row.sigmoid()
        total = [float(s) + float(b) for s, b in zip(score, bias, strict=True)]
        worth = [sum(sorted(total[n * size : (n + 1) * size])[-2:]) for n in range(n_group)]
        doors = sorted(range(n_group), key=lambda n: worth[n])[-top_group:]
        inside = [e for e in range(E) if e // size in doors]
        chosen = sorted(inside, key=lambda e: total[e])[-k:]
        selected = torch.zeros(E, dtype=logits.dtype)
        selected[chosen] = 1.0
        rows.append(scale * score * selected / (score * selected).sum())
    return torch.stack(rows)


def by_border(logits, bias, k, n_group, top_group, scale):
    """The k-th largest sum is the border, first of groups, then of experts."""
    scores = 1 / (1 + (-logits).exp())
    sums = (scores + bias).detach().view(len(logits), n_group, -1)
    worth = sums.sort(-1).values[..., -2:].sum(-1)
    border = worth.sort(-1).values[:, -top_group, None]
    sums = torch.where((worth >= border)[..., None], sums, -torch.inf).view_as(logits)
    selected = sums >= sums.sort(-1).values[:, -k, None]
    scores = torch.where(selected, scores, 0.0)
    return scores / scores.sum(-1, keepdim=True) * scale


def by_mask(logits, bias, k, n_group, top_group, scale):
    """A mask of ones that multiplies."""
    scores = torch.sigmoid(logits)
    with torch.no_grad():
        groups = (scores + bias).unflatten(1, (n_group, -1))
        best = groups.topk(2).values.sum(-1).topk(top_group).indices
        away = torch.full(groups.shape[:2], -torch.inf, dtype=logits.dtype).scatter(1, best, 0.0)
        experts = (groups + away[..., None]).flatten(1).topk(k).indices
        mask = torch.zeros_like(logits).scatter(1, experts, 1.0)
    return scale * (scores * mask) / (scores * mask).sum(1, keepdim=True)


def by_logs(logits, bias, k, n_group, top_group, scale):
    """Weights as a softmax of the logarithms of the scores."""
    mask = by_mask(logits.detach(), bias, k, n_group, top_group, 1.0) > 0
    logs = torch.nn.functional.logsigmoid(logits).masked_fill(~mask, -torch.inf)
    return logs.softmax(-1) * scale


RIGHT = [token_by_token, by_border, by_mask, by_logs]

SURVIVORS = {
    f"{WORTH}: groups.topk(2).values.sum => groups.topk(2).values.mean": (
        "a mean of two is half their sum: the order is the same"
    )
}
