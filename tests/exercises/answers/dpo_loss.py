"""Other right answers to dpo_loss."""

import torch
import torch.nn.functional as F


def result(losses, wins):
    loss = losses.mean()
    start = -torch.tensor(0.5, dtype=torch.float64).log()
    return {
        "loss": loss,
        "gain": (start - loss.detach()).to(loss.dtype),
        "wins": wins.to(loss.dtype).mean(),
    }


def by_softplus(log_probs, reference, mask, beta=0.1):
    """log(1 + exp(-margin)), and zeros in both models before they are subtracted."""
    now = torch.where(mask, log_probs, 0.0).sum(-1)
    old = torch.where(mask, reference, 0.0).sum(-1).detach()
    margins = beta * ((now[0] - now[1]) - (old[0] - old[1]))
    return result(F.softplus(-margins), margins > 0)


def by_loop(log_probs, reference, mask, beta=0.1):
    """Pair by pair."""
    losses, wins = [], []
    for b in range(log_probs.shape[1]):
        rewards = []
        for a in range(2):
            answer = mask[a, b]
            with torch.no_grad():
                old = reference[a, b][answer].sum()
            rewards.append(beta * (log_probs[a, b][answer].sum() - old))
        losses.append(torch.logaddexp(rewards[0], rewards[1]) - rewards[0])
        wins.append(rewards[0] > rewards[1])
    return result(torch.stack(losses), torch.stack(wins))


def by_entropy(log_probs, reference, mask, beta=0.1):
    """The cross-entropy of two classes, of which the first is right; in float64."""
    ratios = torch.where(mask, log_probs.double() - reference.detach().double(), 0.0)
    rewards = (beta * ratios.sum(2)).T  # (B, 2)
    losses = F.cross_entropy(rewards, torch.zeros(len(rewards), dtype=torch.long), reduction="none")
    return result(losses.to(log_probs.dtype), rewards[:, 0] > rewards[:, 1])


def by_binary(log_probs, reference, mask, beta=0.1):
    """The binary loss of logits; the sign of each answer in one product."""
    ratios = (log_probs - reference.clone().detach()).masked_fill(mask.logical_not(), 0.0)
    sign = torch.tensor([beta, -beta], dtype=ratios.dtype)[:, None, None]
    margins = (ratios * sign).sum((0, 2))
    ones = torch.ones_like(margins)
    losses = F.binary_cross_entropy_with_logits(margins, ones, reduction="none")
    return result(losses, margins.sign() == 1)


RIGHT = [
    by_softplus, by_loop, by_entropy, by_binary,
    # the keys in another order
    {'return {"loss": loss, "gain": math.log(2) - loss.detach(), "wins": wins}':
      'return {"wins": wins, "gain": math.log(2) - loss.detach(), "loss": loss}'},
]  # fmt: skip
