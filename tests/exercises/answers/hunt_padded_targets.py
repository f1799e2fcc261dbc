"""Answers to hunt_padded_targets: other right ones, and wrong ones of a second person."""

import torch

from lm_from_scratch.exercises.catalogue.hunt_padded_targets.checks import PAD
from lm_from_scratch.text.targets import IGNORE


def by_assignment(ids, length):
    """Full tensors, into which the text is written."""
    n = min(len(ids), length)
    row, mask, labels = (torch.full((length,), fill) for fill in (PAD, 0, IGNORE))
    row[:n], mask[:n], labels[:n] = torch.tensor(ids[:n]), 1, torch.tensor(ids[:n])
    return {"input_ids": row, "attention_mask": mask, "labels": labels}


def by_mask(ids, length):
    """The mask from the true length first, then the labels from the mask."""
    n = len(ids)
    row = torch.tensor((ids + [PAD] * length)[:length])
    mask = (torch.arange(length) < n).long()
    return {"input_ids": row, "attention_mask": mask, "labels": row.masked_fill(mask == 0, IGNORE)}


def by_pad(ids, length):
    """torch's own padding, with a number for each tensor."""
    x = torch.tensor(ids)[:length]
    fill = (0, length - len(x))
    pad = torch.nn.functional.pad
    return {
        "attention_mask": pad(torch.ones_like(x), fill),
        "labels": pad(x, fill, value=IGNORE),
        "input_ids": pad(x, fill, value=PAD),
    }


def by_loop(ids, length):
    """Column by column."""
    rows = []
    for column in range(length):
        real = column < len(ids)
        rows.append([ids[column], 1, ids[column]] if real else [PAD, 0, IGNORE])
    row, mask, labels = torch.tensor(rows).unbind(1)
    return {"input_ids": row, "attention_mask": mask, "labels": labels}


RIGHT = [by_assignment, by_mask, by_pad, by_loop]


def counted_before_the_cut(ids, length):
    row, excess = by_pad(ids, length), len(ids) - length
    row["labels"][excess:], row["attention_mask"][excess:] = IGNORE, 0
    return row


WRONG = [
    ("padding begins where the uncut text ends, counted from the end", counted_before_the_cut),
    ("lists are returned",
     {"torch.tensor(ids + [PAD] * padding)": "ids + [PAD] * padding",
      "torch.tensor([1] * len(ids) + [0] * padding)": "[1] * len(ids) + [0] * padding",
      "torch.tensor(ids + [IGNORE] * padding)": "ids + [IGNORE] * padding"}),
]  # fmt: skip
