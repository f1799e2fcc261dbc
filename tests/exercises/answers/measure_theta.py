"""Other right answers to measure_theta."""

import math

import torch


def by_need(thetas, head_dim, trained, length, theta=10000.0):
    """The theta that each slow pair needs, solved for."""
    least, slow = 1.0, 0
    for i in range(0, head_dim, 2):
        if (trained - 1) / theta ** (i / head_dim) >= 2 * math.pi:
            continue
        slow += 1
        if i == 0:
            least = math.inf if length > trained else least
        else:
            least = max(least, theta * ((length - 1) / (trained - 1)) ** (head_dim / i))
    for new in sorted(thetas):
        if new >= least:
            return slow, new
    return slow, None


def by_tensors(thetas, head_dim, trained, length, theta=10000.0):
    """All thetas and all pairs in one table."""
    powers = -torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    known = (trained - 1) * theta**powers
    new = (length - 1) * torch.tensor(thetas, dtype=torch.float64)[:, None] ** powers
    fine = ((new <= known) | (known >= 2 * math.pi)).all(1)
    return int((known < 2 * math.pi).sum()), min(
        (one for one, good in zip(thetas, fine.tolist(), strict=True) if good), default=None
    )


def by_wavelengths(thetas, head_dim, trained, length, theta=10000.0):
    """In wavelengths: turns in training beside turns in the text to read."""

    def turns(base, tokens):
        waves = [2 * math.pi * base ** (2 * i / head_dim) for i in range(head_dim // 2)]
        return [(tokens - 1) / wave for wave in waves]

    before = turns(theta, trained)
    best = None
    for new in thetas:
        pairs = zip(before, turns(new, length), strict=True)
        if any(old < 1 and now > old for old, now in pairs):
            continue
        best = new if best is None else min(best, new)
    return sum(old < 1 for old in before), best


def by_float32(thetas, head_dim, trained, length, theta=10000.0):
    """Speeds in float32, and the largest distance that each pair may have."""
    i = torch.arange(head_dim // 2) / (head_dim // 2)
    known = (trained - 1) * torch.pow(torch.tensor(theta), -i)
    slow = known < 2 * torch.pi
    safe = []
    for new in thetas:
        reach = known[slow] * torch.pow(torch.tensor(new), i[slow])
        if reach.numel() == 0 or float(reach.min()) > length - 1.001:
            safe.append(new)
    return int(slow.sum()), (sorted(safe)[0] if safe else None)


RIGHT = [by_need, by_tensors, by_wavelengths, by_float32]

SURVIVORS = {
    "slow = [i for i in range(half) if known[i] < 2 * math.pi]: "
    "known[i] < 2 * math.pi => known[i] <= 2 * math.pi": "no angle is a whole turn",
    "if all((largest[i] <= known[i] for i in slow)):: "
    "largest[i] <= known[i] => largest[i] < known[i]": "no angle is equal to its border",
}
