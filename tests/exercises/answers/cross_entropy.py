"""Answers to cross_entropy: other right ones, and wrong ones of a second person."""

import torch

from lm_from_scratch.exercises.catalogue.cross_entropy.checks import agree
from lm_from_scratch.text.targets import IGNORE


def by_where(logits, targets):
    """Log-softmax of everything, and zeros where nothing counts."""
    log_p = agree(logits, targets).log_softmax(-1)
    real = targets.ne(IGNORE)
    picked = log_p.gather(-1, targets.where(real, 0).unsqueeze(-1)).squeeze(-1)
    return -torch.where(real, picked, 0.0).sum() / max(int(real.sum()), 1)


def by_distances(logits, targets):
    """How far every logit is above that of the target: no logit is left to overflow."""
    logits, real = agree(logits, targets), targets.ne(IGNORE)
    rows, wanted = logits[real], targets[real]
    return torch.logsumexp(rows - rows.gather(1, wanted[:, None]), 1).sum() / max(len(rows), 1)


def by_one_hot(logits, targets):
    """The largest logit subtracted by hand, the target chosen by a comparison, in float64."""
    dtype = agree(logits, targets).dtype
    x = logits[targets != IGNORE].double()
    y = targets[targets != IGNORE]
    if not len(x):
        return x.sum().to(dtype)
    x = x - x.max(-1, keepdim=True).values
    hit = torch.arange(x.shape[-1]) == y[:, None]
    return (x.exp().sum(-1).log() - x[hit]).mean().to(dtype)


def by_loop(logits, targets):
    """Token by token, the logarithm of the sum in an online form."""
    rows = agree(logits, targets).flatten(0, -2)
    total, n = rows[:0].sum(), 0
    for row, target in zip(rows, targets.flatten().tolist(), strict=True):
        if target != IGNORE:
            total, n = total + torch.logaddexp(row[:4].logsumexp(0), row[4:].logsumexp(0)), n + 1
            total = total - row[target]
    return total / max(n, 1)


RIGHT = [by_where, by_distances, by_one_hot, by_loop]

WRONG = [
    ("-1 is ignored", {"targets != IGNORE": "targets != -1"}),
    ("-100 is taken as an index from the end of the vocabulary",
     {"logits[counts], targets[counts]": "logits.flatten(0, -2), targets.flatten()",
      "rows.gather(1, wanted[:, None])[:, 0]": "rows[torch.arange(len(rows)), wanted]",
      "losses.sum()": "losses[counts.flatten()].sum()"}, "a small vocabulary has no such index"),
    ("a number without a gradient", {".clamp(min=1)": ".clamp(min=1).item()",
                                     "losses.sum()": "losses.sum().item()"}),
]  # fmt: skip
