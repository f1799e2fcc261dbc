"""Other right answers to measure_loss."""

import math

import torch


def by_loop(losses, texts):
    """Number by number, with the exact sum of the standard library."""
    size, best = sum(len(t.encode()) for t in texts), ("", math.inf)
    for name, tensors in losses.items():
        rate = math.fsum(x for t in tensors for x in t.tolist()) / size / math.log(2)
        best = (name, rate) if rate < best[1] else best
    return best


def by_log2(losses, texts):
    """Nats times log2(e)."""
    size = len(b"".join(t.encode() for t in texts))
    rates = []
    for place, (name, tensors) in enumerate(losses.items()):
        nats = sum(t.to(torch.float64).sum() for t in tensors)
        rates.append((float(nats) * math.log2(math.e) / size, place, name))
    rate, _, name = min(one for one in rates if one[0] == one[0])
    return name, rate


def by_tensor(losses, texts):
    """A tensor with a number for each model, and its least one."""
    nats = torch.stack([torch.cat([x.double() for x in t]).sum() for t in losses.values()])
    nats = nats.nan_to_num(nan=math.inf)
    place = nats.tolist().index(nats.min())
    size = sum(len(t.encode()) for t in texts)
    return list(losses)[place], float(nats[place] / size) / math.log(2)


def by_means(losses, texts):
    """The mean of each text, weighted by its tokens."""
    size = sum(len(t.encode()) for t in texts)
    rates = {}
    for name, tensors in losses.items():
        nats = sum(float(t.double().mean()) * len(t) for t in tensors if len(t))
        if nats == nats:
            rates[name] = nats / size / math.log(2)
    return min(rates.items(), key=lambda item: item[1])


RIGHT = [by_loop, by_log2, by_tensor, by_means]
