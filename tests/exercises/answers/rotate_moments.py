"""Answers to rotate_moments: other right ones, and wrong ones of a second person."""

from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.optim.galore_basis import project

Basis = tuple[Tensor | None, Tensor | None]


def by_einsum(exp_avg, exp_avg_sq, old, new, corrections=(1.0, 1.0)):  # fmt: skip
    """The matrices C of the text, with the identity where there is no basis."""
    turns = []
    sides: Any = zip(old, new, exp_avg.shape, strict=True)
    for a, b, size in sides:
        alone = a is None or b is None
        turns.append(torch.eye(size, dtype=exp_avg.dtype) if alone else b.T @ a)
    m, v = exp_avg / corrections[0], exp_avg_sq / corrections[1]
    turned = torch.einsum("ai,bj,ij->ab", *turns, m)
    variance = torch.einsum("ai,bj,ij->ab", *(c**2 for c in turns), torch.relu(v - m * m))
    return turned * corrections[0], (variance + turned**2) * corrections[1]


def by_whole_matrix(exp_avg, exp_avg_sq, old, new, corrections=(1.0, 1.0)):  # fmt: skip
    """The first moment by way of the whole matrix, in float64."""
    kind = exp_avg.dtype
    olds: list[Any] = [None if x is None else x.double() for x in old]
    news: list[Any] = [None if x is None else x.double() for x in new]
    m, v = exp_avg.double(), exp_avg_sq.double() / corrections[1]
    full = m if olds[0] is None else olds[0] @ m
    full = full if olds[1] is None else full @ olds[1].T
    turned = project(full, *news)
    variance = torch.maximum(v, (m / corrections[0]) ** 2) - (m / corrections[0]) ** 2
    pairs = zip(olds, news, strict=True)
    squares = [None if a is None or b is None else (a.T @ b) ** 2 for a, b in pairs]
    mean_square = project(variance, *squares) + (turned / corrections[0]) ** 2
    return turned.to(kind), (mean_square * corrections[1]).to(kind)


def by_kronecker(exp_avg, exp_avg_sq, old, new, corrections=(1.0, 1.0)):  # fmt: skip
    """One matrix for all numbers of a moment, which are put in one row."""
    turns = [
        torch.eye(size, dtype=exp_avg.dtype) if a is None or b is None else b.mT @ a
        for a, b, size in zip(old, new, exp_avg.shape, strict=True)
    ]
    whole = torch.kron(*turns)
    shape = turns[0].shape[0], turns[1].shape[0]
    m, v = exp_avg.flatten() / corrections[0], exp_avg_sq.flatten() / corrections[1]
    mean = whole @ m
    mean_square = whole**2 @ (v - m**2).clamp(min=0) + mean**2
    return (mean * corrections[0]).view(shape), (mean_square * corrections[1]).view(shape)


def by_side(exp_avg, exp_avg_sq, old, new, corrections=(1.0, 1.0)):  # fmt: skip
    """Variances instead of mean squares, one side after the other, coordinate by coordinate."""
    mean = exp_avg / corrections[0]
    variance = exp_avg_sq / corrections[1] - mean**2
    variance = torch.where(variance > 0, variance, torch.zeros_like(variance))
    for side in (0, 1):
        a, b = old[side], new[side]
        if a is None or b is None:
            continue
        x, y = (mean, variance) if side == 0 else (mean.T, variance.T)
        turn = b.T @ a
        rows = [(c @ x, (c * c) @ y) for c in turn]
        mean, variance = (torch.stack(part) for part in zip(*rows, strict=True))
        if side == 1:
            mean, variance = mean.T, variance.T
    return mean * corrections[0], (variance + mean**2) * corrections[1]


RIGHT = [by_einsum, by_whole_matrix, by_kronecker, by_side]

MEAN, SQUARE = "exp_avg / corrections[0]", "exp_avg_sq / corrections[1]"
RESULT = "return mean * corrections[0], mean_square * corrections[1]"
BACK = "project(variance, *squares) + mean.square()"

WRONG = [
    ("one correction for both",
     {SQUARE: "exp_avg_sq / corrections[0]",
      "mean_square * corrections[1]": "mean_square * corrections[0]"}),
    ("multiplied where it is divided",
     {MEAN: MEAN.replace("/", "*"), SQUARE: SQUARE.replace("/", "*"),
      RESULT: RESULT.replace("*", "/")}),
    ("clamped at the end",
     {"variance = torch.clamp(variance, min=0.0)": "", BACK: f"({BACK}).clamp(min=0)"}),
    ("the squares of the bases, not of their product",
     {"turn.square()": "before.square().mT @ after.square()"}),
    ("the moments are divided in place",
     {MEAN: "exp_avg.div_(corrections[0])", SQUARE: "exp_avg_sq.div_(corrections[1])"}),
    ("in float32",
     {"turns, squares = [], []": "exp_avg, exp_avg_sq = exp_avg.float(), exp_avg_sq.float()\n"
      "    old, new = ([b if b is None else b.float() for b in pair] for pair in (old, new))\n"
      "    turns, squares = [], []"}),
]  # fmt: skip
