"""Other right answers to grpo_loss."""

import torch

from lm_from_scratch.exercises.catalogue.grpo_loss.checks import FREE


def by_numbers(log_probs, old, reference, rewards, mask, clip=0.2, kl=0.04):
    """Answer by answer, token by token."""
    P, G, T = mask.shape
    total, count = torch.zeros((), dtype=log_probs.dtype), 0
    teaches: list[bool] = []
    for p in range(P):
        row = rewards[p].tolist()
        mean = sum(row) / G
        std = (sum((r - mean) ** 2 for r in row) / (G - 1)) ** 0.5
        free = False
        for i in range(G):
            a = (row[i] - mean) / (std + 1e-4)
            for t in range(T):
                if not mask[p, i, t]:
                    continue
                now = log_probs[p, i, t]
                ratio = (now - float(old[p, i, t])).exp()
                stop = ratio > 1 + clip if a > 0 else ratio < 1 - clip
                clipped = ratio.detach().clamp(1 - clip, 1 + clip) if stop else ratio
                behind = float(reference[p, i, t]) - now
                total = total - clipped * a + kl * (behind.exp() - behind - 1)
                count += 1
                free = free or bool(a != 0 and not stop)
        teaches.append(free)
    return {"loss": total / count, "teaches": torch.tensor(teaches)}


def by_choice(log_probs, old, reference, rewards, mask, clip=0.2, kl=0.04):
    """Only the tokens that count, in one row; a ratio that has gone too far is a constant."""
    with torch.no_grad():
        std, mean = torch.std_mean(rewards, dim=1, keepdim=True)
        A = ((rewards - mean) / (std + 1e-4))[..., None].expand(mask.shape)[mask]
        group = torch.arange(len(mask))[:, None, None].expand(mask.shape)[mask]
        old, base = old[mask], reference[mask]
    now = log_probs[mask]
    ratio = torch.exp(now - old)
    stopped = ((A > 0) & (ratio > 1 + clip)) | ((A < 0) & (ratio < 1 - clip))
    limit = 1 + clip * A.sign()
    clipped = torch.where(stopped, limit, ratio)
    penalty = torch.expm1(base - now) - (base - now)
    busy = group[(A != 0) & ~stopped]
    teaches = torch.zeros(len(mask), dtype=torch.bool)
    teaches[busy] = True
    return {"loss": (kl * penalty - clipped * A).mean(), "teaches": teaches}


def by_maximum(log_probs, old, reference, rewards, mask, clip=0.2, kl=0.04):
    """The larger of two losses; a group teaches if its rewards differ and something is free."""
    G = rewards.shape[1]
    rewards = rewards.detach().double()
    centred = rewards - rewards.sum(1, keepdim=True) / G
    deviation = (centred.square().sum(1, keepdim=True) / (G - 1)).sqrt()
    A = (centred / (deviation + 1e-4)).to(log_probs.dtype).unsqueeze(2)
    now, before, base = (x.masked_fill(~mask, 0.0) for x in (log_probs, old.data, reference.data))
    ratio = (now - before).exp()
    losses = torch.maximum(-A * ratio, -A * ratio.clip(1 - clip, 1 + clip))
    ahead = now - base
    losses = losses + kl * (torch.exp(-ahead) - 1 + ahead)
    loss = losses.masked_fill(~mask, 0.0).sum() / mask.count_nonzero()
    upwards = (A > 0) & (ratio < 1 + clip) & mask
    downwards = (A < 0) & (ratio > 1 - clip) & mask
    return {"loss": loss, "teaches": (upwards | downwards).flatten(1).sum(1) > 0}


def by_gradient(log_probs, old, reference, rewards, mask, clip=0.2, kl=0.04):
    """The loss group by group, each weighed by its tokens."""
    losses, counts, teaches = [], [], []
    for p in range(len(mask)):
        part = slice(p, p + 1)
        if not mask[p].any():
            continue
        now = by_choice(
            log_probs[part], old[part], reference[part], rewards[part], mask[part], clip, kl
        )
        losses.append(now["loss"])
        counts.append(mask[p].sum().to(log_probs.dtype))
        teaches.append(now["teaches"])
    weights = torch.stack(counts) / torch.stack(counts).sum()
    return {"loss": (torch.stack(losses) * weights).sum(), "teaches": torch.cat(teaches)}


OUTSIDE = "outside the answers nothing counts, whatever stands there"
BORDER = "no ratio lies on the border"
RIGHT = [by_numbers, by_choice, by_maximum, by_gradient]

SURVIVORS = {
    "gain = torch.where(mask, log_probs - reference.detach(), 0.0): 0.0 => 1.0": OUTSIDE,
    "ratio = torch.where(mask, log_probs - old.detach(), 0.0).exp(): 0.0 => 1.0": OUTSIDE,
    f"{FREE}: A > 0 => A >= 0": "an advantage of 0 teaches nothing, whatever its ratio is",
    f"{FREE}: ratio < 1 + clip => ratio <= 1 + clip": BORDER,
    f"{FREE}: ratio > 1 - clip => ratio >= 1 - clip": BORDER,
    "return {'loss': loss, 'teaches': (free & mask & (A != 0)).any(2).any(1)}: 2 => 1": (
        "one token of one answer: the order of the two questions does not matter"
    ),
}
