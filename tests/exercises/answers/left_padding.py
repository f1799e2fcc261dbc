"""Answers to left_padding: other right ones, and wrong ones of a second person."""

import torch

from lm_from_scratch.attention.visibility import PADDING


def checked(attention_mask):
    """What is real, as bool; ValueError for anything else than 0 and 1 on two axes."""
    if attention_mask.dim() != 2 or not set(attention_mask.unique().tolist()) <= {0, 1}:
        raise ValueError("mask")
    return attention_mask.bool()


def by_loop(attention_mask):
    """Token by token."""
    real = checked(attention_mask)
    positions = torch.full(real.shape, PADDING)
    following = torch.zeros(len(real), dtype=torch.int64)
    for row in range(len(real)):
        for column in range(real.shape[1]):
            if real[row, column]:
                positions[row, column] = following[row]
                following[row] += 1
    return positions, following


def by_product(attention_mask):
    """A triangular matrix counts, in float64; padding is subtracted by arithmetic."""
    real = checked(attention_mask).double()
    counts = real @ torch.ones(real.shape[1], real.shape[1], dtype=torch.float64).triu()
    return (counts * real).long() - 1, counts[:, -1].long()


def by_assignment(attention_mask):
    """A range is written into the real columns of each row."""
    real = checked(attention_mask)
    positions = torch.full_like(attention_mask, PADDING, dtype=torch.int64)
    for row, these in enumerate(real):
        positions[row, these] = torch.arange(int(these.sum()))
    return positions, torch.count_nonzero(real, dim=1)


def by_columns(attention_mask):
    """The column, minus the padding so far."""
    real = checked(attention_mask)
    padding = (~real).cumsum(1)
    positions = (torch.arange(real.shape[1]) - padding).masked_fill(~real, PADDING)
    return positions, real.shape[1] - padding[:, -1]


RIGHT = [by_loop, by_product, by_assignment, by_columns]

WRONG = [
    ("positions in int32",
     {"return positions, real.sum(1)": "return positions.int(), real.sum(1).int()"}),
    ("both numbers must occur",
     {"(real | (attention_mask == 0)).all()": "attention_mask.unique().tolist() == [0, 1]"}),
    ("the next positions are left out", {"return positions, real.sum(1)": "return positions"}),
]  # fmt: skip
