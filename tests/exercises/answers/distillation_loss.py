"""Other right answers to distillation_loss."""

import torch
import torch.nn.functional as F

from lm_from_scratch.exercises.catalogue.distillation_loss.checks import LOG_P, LOG_Q
from lm_from_scratch.text.targets import IGNORE


def precision(x):
    return x if x.dtype == torch.float64 else x.float()


def by_library(student, teacher, targets, temperature=1.0):
    """torch's divergence, whose arguments are the other way round."""
    counts = targets != IGNORE
    if not counts.any():
        return precision(student)[counts].sum()
    log_q = F.log_softmax(precision(student)[counts] / temperature, -1)
    p = F.softmax(precision(teacher)[counts] / temperature, -1).detach()
    log_q = log_q.masked_fill(p == 0, 0.0)
    return F.kl_div(log_q, p, reduction="batchmean") * temperature**2


def by_entropy(student, teacher, targets, temperature=1.0):
    """The cross-entropy of soft targets, less the teacher's own entropy."""
    counts = targets != IGNORE
    rows, wanted = precision(student[counts]), precision(teacher.detach()[counts])
    p = (wanted / temperature).softmax(-1)
    log_q = rows / temperature
    log_q = log_q - log_q.logsumexp(-1, keepdim=True)
    cross = -torch.where(p > 0, p * log_q, 0.0).sum(-1)
    own = -torch.special.xlogy(p, p).sum(-1)
    return (cross - own).sum() * temperature**2 / max(int(counts.sum()), 1)


def by_loop(student, teacher, targets, temperature=1.0):
    """Place by place, only over tokens that the teacher finds possible."""
    V = student.shape[-1]
    losses = []
    rows = zip(student.reshape(-1, V), teacher.reshape(-1, V), targets.flatten(), strict=True)
    for q, p, target in rows:
        if target == IGNORE:
            continue
        q, p = precision(q) / temperature, precision(p.detach()) / temperature
        possible = p > -torch.inf
        log_p, log_q = p[possible] - p.logsumexp(0), q[possible] - q.logsumexp(0)
        losses.append((log_p.exp() * (log_p - log_q)).sum())
    total = torch.stack(losses).sum() if losses else precision(student.flatten()[:0]).sum()
    return total * temperature * temperature / max(len(losses), 1)


def by_distribution(student, teacher, targets, temperature=1.0):
    """All places, of which those that do not count become two equal rows."""
    counts = (targets != IGNORE)[..., None]
    with torch.no_grad():
        wanted = torch.where(counts, precision(teacher), 0.0)
        log_p = (wanted / temperature).log_softmax(-1).clamp(min=-1e6)
    rows = torch.where(counts, precision(student), 0.0)
    log_q = (rows / temperature).log_softmax(-1).clamp(min=-1e6)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    return temperature**2 * divergence.sum() / counts.sum().clamp(min=1)


LAST = "the rows have two dimensions: the last one is 1"
RIGHT = [by_library, by_entropy, by_loop, by_distribution]

SURVIVORS = {f"{LOG_Q}: -1 => 1": LAST, f"{LOG_P}: -1 => 1": LAST}
