"""Answers to pooling: other right ones, and wrong ones of a second person."""

import torch


def checked(x, positions):
    """What is real, (B, T); ValueError for another shape."""
    if positions is None:
        return torch.ones(x.shape[:2], dtype=torch.bool)
    if positions.shape != x.shape[:2]:
        raise ValueError("shape")
    return positions >= 0


def by_loop(x, positions=None):
    """Row by row, from the right."""
    real, states = checked(x, positions), []
    for row in range(len(x)):
        column = x.shape[1] - 1
        while column and not real[row, column]:
            column -= 1
        states.append(x[row, column])
    return torch.stack(states)


def by_gather(x, positions=None):
    """The first real token of the row reversed, taken out by gather."""
    real = checked(x, positions)
    last = x.shape[1] - 1 - real.flip(1).int().argmax(1)
    return x.gather(1, last[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)


def by_count(x, positions=None):
    """The column where the running count reaches its end for the first time."""
    counts = checked(x, positions).cumsum(1)
    last = (counts < counts[:, -1:]).sum(1)
    return torch.take_along_dim(x, last[:, None, None], 1)[:, 0]


def by_flat_index(x, positions=None):
    """An index into all tokens of the batch, from weights that grow to the right."""
    real = checked(x, positions)
    B, T, C = x.shape
    last = (real * torch.linspace(1, 2, T)).argmax(1)
    return x.reshape(B * T, C).index_select(0, torch.arange(B) * T + last)


RIGHT = [by_loop, by_gather, by_count, by_flat_index]

LAST = "x[torch.arange(B), last]"
COLUMN = "last = torch.where(positions >= 0, torch.arange(T), 0).amax(1)"

WRONG = [
    ("without positions the first column", {"x[:, -1]": "x[:, 0]"}),
    ("the mean of all real tokens",
     {"x[:, -1]": "x.mean(1)", COLUMN: "real = (positions >= 0)[..., None]",
      LAST: "torch.where(real, x, 0).sum(1) / real.sum(1).clamp(min=1).to(x.dtype)"}),
    ("the axis of the tokens is kept", {"x[:, -1]": "x[:, -1:]", LAST: f"{LAST}[:, None]"}),
    ("the result is float32", {"x[:, -1]": "x[:, -1].float()", LAST: f"{LAST}.float()"}),
    ("the states of padding are overwritten in x itself",
     {f"return {LAST}": f"state = {LAST}\n    x.data.nan_to_num_(0.0)\n    return state"},
     "the table's fails more cases"),
]  # fmt: skip
