"""Other right answers to pooled_keys."""

import torch


def by_loop(values, gates, m):
    """A block after the other."""
    T = values.shape[1]
    entries, ends = [], []
    for end in range(m, T + 1, m):
        c, z = values[:, end - m : end], gates[:, end - m : end]
        weights = torch.softmax(z.double(), dim=1)
        entries.append((weights * c.double()).sum(1).to(values.dtype))
        ends.append(end - 1)
    pooled = torch.stack(entries, 1) if entries else values[:, :0] * gates[:, :0]
    seen = [[t >= end for end in ends] for t in range(T)]
    return pooled, torch.tensor(seen, dtype=torch.bool).view(T, len(ends))


def by_einsum(values, gates, m):
    """Exponentials, each below 1."""
    B, T, D = values.shape
    N = T // m
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    c = values[:, : m * N].reshape(B, N, m, D).to(wide)
    z = gates[:, : m * N].reshape(B, N, m, D).to(wide)
    powers = torch.exp(z - z.detach().amax(2, keepdim=True))
    entries = torch.einsum("bnmd,bnmd->bnd", powers, c) / powers.sum(2)
    t = torch.arange(T)
    return entries.to(values.dtype), (t[:, None] + 1) // m > torch.arange(N)


def by_logarithms(values, gates, m):
    """Weights from a logsumexp, and the mask from a triangle."""
    T = values.shape[1]
    N = T // m
    z = gates[:, : N * m].double().unflatten(1, (N, m))
    weights = (z - z.logsumexp(2, keepdim=True)).exp()
    c = values[:, : N * m].double().unflatten(1, (N, m))
    seen = torch.ones(T, T, dtype=torch.bool).tril()[:, m - 1 :: m]
    return (c * weights).sum(-2).to(values.dtype), seen


def by_unfold(values, gates, m):
    """Windows that do not overlap: (B, N, D, m)."""
    T = values.shape[1]
    if m > T:
        empty = values[:, :0] + gates[:, :0].to(values.dtype)
        return empty, torch.zeros(T, 0, dtype=torch.bool)
    c, z = (x.unfold(1, m, m).double() for x in (values, gates))
    entries = (z.softmax(-1) * c).sum(-1).to(values.dtype)
    last = m * torch.arange(1, T // m + 1) - 1
    return entries, torch.arange(T).unsqueeze(1) >= last


RIGHT = [by_loop, by_einsum, by_logarithms, by_unfold]

SURVIVORS = {
    "c = values[:, :N * m].to(work).unflatten(1, (N, m)): "
    "values[:, :N * m].to(work) => values[:, :N * m]": (
        "the product with weights in float32 is float32 all the same"
    ),
}
