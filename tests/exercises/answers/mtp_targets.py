"""Other right answers to mtp_targets."""

import torch

NONE = -100


def by_definition(idx, positions, n_depth):
    """Documents as lists of columns."""
    B, T = idx.shape
    targets = torch.full((n_depth, B, T), NONE)
    for b in range(B):
        documents: list[list[int]] = []
        for t in range(T):
            if positions[b, t] == 0:
                documents.append([])
            if positions[b, t] >= 0:
                documents[-1].append(t)
        for columns in documents:
            for d in range(n_depth):
                for here, ahead in zip(columns, columns[d + 1 :], strict=False):
                    targets[d, b, here] = idx[b, ahead]
    return targets


def by_numbers(idx, positions, n_depth):
    """Each document gets a number."""
    T = idx.shape[1]
    number = (positions == 0).cumsum(1).masked_fill(positions < 0, -1)
    depths = []
    for d in range(1, n_depth + 1):
        ahead = torch.nn.functional.pad(idx[:, d:], (0, min(d, T)), value=NONE)
        theirs = torch.nn.functional.pad(number[:, d:], (0, min(d, T)), value=-2)
        depths.append(torch.where((theirs == number) & (number >= 0), ahead, NONE))
    return torch.stack(depths)


def step_by_step(idx, positions, n_depth):
    """The target of a depth is the target, one depth before, of the token that follows."""
    follows = torch.zeros_like(idx, dtype=torch.bool)
    follows[:, :-1] = (positions[:, 1:] == positions[:, :-1] + 1) & (positions[:, :-1] >= 0)
    now, depths = idx, []
    for _ in range(n_depth):
        now = torch.cat([now[:, 1:], now[:, :1]], dim=1).masked_fill(~follows, NONE)
        depths.append(now)
    return torch.stack(depths)


def by_gather(idx, positions, n_depth):
    """All depths at once: where each target stands, and whether it may be taken."""
    T = idx.shape[1]
    where = torch.arange(T) + torch.arange(1, n_depth + 1)[:, None]  # (n_depth, T)
    inside = where.clamp(max=T - 1)
    steps = positions[:, inside] - positions[:, None]  # (B, n_depth, T)
    right = (where < T) & (steps == where - torch.arange(T)) & (positions[:, None] >= 0)
    return torch.where(right, idx[:, inside], NONE).transpose(0, 1)


RIGHT = [by_definition, by_numbers, step_by_step, by_gather]

SURVIVORS = {
    "for d in range(min(n_depth, T)):: min(n_depth, T) => min(T, n_depth)": (
        "the smaller of two numbers is the same in either order"
    )
}
