"""Answers to adamw_step: other right ones, and wrong ones of a second person."""

import math

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from lm_from_scratch.exercises.catalogue.adamw_step.checks import BETAS

Step = tuple[Tensor, Tensor, Tensor]


def by_torch(
    param, grad, exp_avg, exp_avg_sq, step, lr=0.001, betas=BETAS, eps=1e-8, weight_decay=0.01
):
    """The library's own step, in place, on copies."""
    param, exp_avg, exp_avg_sq = (x.clone() for x in (param, exp_avg, exp_avg_sq))
    torch_adamw(
        [param], [grad], [exp_avg], [exp_avg_sq], [], [torch.tensor(step - 1.0)], foreach=False,
        amsgrad=False, beta1=betas[0], beta2=betas[1], lr=lr, weight_decay=weight_decay, eps=eps,
        maximize=False,
    )  # fmt: skip
    return param, exp_avg, exp_avg_sq


def folded(
    param, grad, exp_avg, exp_avg_sq, step, lr=0.001, betas=BETAS, eps=1e-8, weight_decay=0.01
):
    """Both corrections in the learning rate, and eps scaled by what they leave out."""
    exp_avg = torch.lerp(exp_avg, grad, 1 - betas[0])
    exp_avg_sq = torch.lerp(exp_avg_sq, grad * grad, 1 - betas[1])
    root = math.sqrt(1 - betas[1] ** step)
    rate = lr * root / (1 - betas[0] ** step)
    move = rate * exp_avg / (exp_avg_sq.sqrt() + eps * root)
    return param - lr * weight_decay * param - move, exp_avg, exp_avg_sq


def in_double(
    param, grad, exp_avg, exp_avg_sq, step, lr=0.001, betas=BETAS, eps=1e-8, weight_decay=0.01
):
    """Decay and direction as one sum, computed in float64."""
    p, g, m, v = (x.double() for x in (param, grad, exp_avg, exp_avg_sq))
    m = m + (1 - betas[0]) * (g - m)
    v = v + (1 - betas[1]) * (g**2 - v)
    d = m / (1 - betas[0] ** step) / ((v / (1 - betas[1] ** step)) ** 0.5 + eps)
    new = p - lr * (d + weight_decay * p)
    return new.to(param.dtype), m.to(param.dtype), v.to(param.dtype)


def by_number(
    param, grad, exp_avg, exp_avg_sq, step, lr=0.001, betas=BETAS, eps=1e-8, weight_decay=0.01
):
    """Number by number."""
    new = []
    lists = (x.flatten().tolist() for x in (param, grad, exp_avg, exp_avg_sq))
    for p, g, m, v in zip(*lists, strict=True):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        d = m / (1 - betas[0] ** step) / (math.sqrt(v / (1 - betas[1] ** step)) + eps)
        new.append((p - lr * weight_decay * p - lr * d, m, v))
    p, m, v = (
        torch.tensor(column, dtype=param.dtype).view(param.shape)
        for column in zip(*new, strict=True)
    )
    return p, m, v


RIGHT = [by_torch, folded, in_double, by_number]

WRONG = [
    ("the betas change places in the mean square",
     {"beta2 * exp_avg_sq + (1 - beta2) *": "(1 - beta2) * exp_avg_sq + beta2 *"}),
]  # fmt: skip
