"""Other right answers to hunt_no_gradient."""

import torch


def picked(model, ids):
    logits = model(ids)[:, :-1]
    rows = torch.arange(len(ids))[:, None], torch.arange(ids.shape[1] - 1)
    return logits[*rows, ids[:, 1:]] - logits.logsumexp(-1)


def by_tokens(model, ids, noted, advantages, mask, clip=0.2):
    """Only the tokens that were written, in one row."""
    with torch.no_grad():
        A = advantages[:, None].expand(mask.shape)[mask]
        old = noted[mask]
    ratio = torch.exp(picked(model, ids)[mask] - old)
    return torch.maximum(-A * ratio, -A * torch.clip(ratio, 1 - clip, 1 + clip)).mean()


def by_loop(model, ids, noted, advantages, mask, clip=0.2):
    """Token by token."""
    now, losses = picked(model, ids), []
    for b, t in mask.nonzero().tolist():
        a, old = float(advantages[b]), float(noted[b, t])
        ratio = (now[b, t] - old).exp()
        losses.append(-min(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a))
    return torch.stack(losses).mean()


def by_stop(model, ids, noted, advantages, mask, clip=0.2):
    """A token that has gone too far keeps a constant ratio."""
    now = torch.where(mask, picked(model, ids), 0.0)
    old = torch.where(mask, noted, 0.0).data
    A = advantages.data[:, None]
    ratio = (now - old).exp()
    limit = 1 + clip * A.sign()
    far = torch.where(A > 0, ratio > limit, ratio < limit)
    losses = -A * torch.where(far, limit, ratio)
    return (losses * mask).sum() / mask.count_nonzero()


def by_weight(model, ids, noted, advantages, mask, clip=0.2):
    """The sum over answers, each a part of all tokens."""
    now = picked(model, ids)
    total = now.flatten()[:0].sum()
    n = int(mask.sum())
    for row, old, a, answer in zip(now, noted.detach(), advantages.detach(), mask, strict=True):
        if answer.any():
            ratio = (row[answer] - old[answer]).exp()
            total = total - torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a).sum() / n
    return total


RIGHT = [by_tokens, by_loop, by_stop, by_weight]

SURVIVORS = {
    "ratio = torch.where(mask, now - noted.detach(), 0.0).exp(): 0.0 => 1.0": (
        "outside the answers nothing counts, whatever the ratio is there"
    )
}
