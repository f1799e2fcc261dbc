"""Other right answers to sinkhorn."""

import torch


def by_logarithms(scores, rounds=20):
    """All in logarithms: dividing is subtracting a logsumexp."""
    work = torch.promote_types(scores.dtype, torch.float32)
    z = scores.to(work)
    z = z - z.logsumexp(-2, keepdim=True)
    for _ in range(rounds - 1):
        z = z - z.logsumexp(-1, keepdim=True)
        z = z - z.logsumexp(-2, keepdim=True)
    return z.exp().to(scores.dtype)


def by_factors(scores, rounds=20):
    """One factor for each row and each column, and the matrix at the end."""
    wide = scores.double()
    matrix = (wide - wide.amax((-1, -2), keepdim=True)).exp()
    rows = torch.ones_like(matrix[..., :1])
    columns = 1 / (rows * matrix).sum(-2, keepdim=True)
    for _ in range(rounds - 1):
        rows = 1 / (matrix * columns).sum(-1, keepdim=True)
        columns = 1 / (rows * matrix).sum(-2, keepdim=True)
    return (rows * matrix * columns).to(scores.dtype)


def by_turns(scores, rounds=20):
    """2 * rounds - 1 divisions, of columns and rows in turn."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    mix = torch.exp(wide - wide.flatten(-2).max(-1).values[..., None, None])
    for step in range(2 * rounds - 1):
        mix = mix / mix.sum(-2 + step % 2, keepdim=True)
    return mix.to(scores.dtype)


def by_softmax(scores, rounds=20):
    """A softmax is an exponential and a division; a logarithm takes it back."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    mix = wide.softmax(-2)
    for _ in range(1, rounds):
        mix = mix.log().softmax(-1).log().softmax(-2)
    return mix.to(scores.dtype)


RIGHT = [by_logarithms, by_factors, by_turns, by_softmax]

SURVIVORS = {
    "even = mix / mix.sum(dim=-1, keepdim=True): mix.sum => mix.mean": (
        "rows sum to n, and the columns after it take that back"
    ),
    "top = wide.amax(dim=(-2, -1), keepdim=True): wide.amax => wide.amin": (
        "scores of one matrix lie within 20 of each other: exponentials up to e^20 fit"
    ),
}
