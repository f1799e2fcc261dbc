"""Answers to hunt_step_count: other right ones, and wrong ones of a second person."""

from typing import Any

import torch
from torch import nn

from lm_from_scratch.optim.adamw import adam_direction


def by_torch(params, grads, state, lr, betas, eps, weight_decay):  # fmt: skip
    """An optimizer of torch for each parameter."""
    if any(grad is not None and grad.layout != torch.strided for grad in grads):
        raise ValueError("sparse")
    for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
        if i not in state:
            single = nn.Parameter(p.clone())
            options: dict[str, Any] = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
            state[i] = single, torch.optim.AdamW([single], **options)
        single, optimizer = state[i]
        single.data.copy_(p)
        single.grad = None if grad is None else grad.clone()
        optimizer.step()
        p.copy_(single.detach())


def by_all_gradients(params, grads, state, lr, betas, eps, weight_decay):  # fmt: skip
    """Nothing but the gradients is kept: the means are sums over all of them."""
    for grad in grads:
        if grad is not None and grad.is_sparse:
            raise ValueError("sparse")
    for i, grad in enumerate(grads):
        if grad is None:
            continue
        past_grads = state.setdefault(i, [])
        past_grads.append(grad.double())
        past = torch.stack(past_grads).flatten(1)  # (t, numbers)
        age = torch.arange(len(past_grads) - 1, -1, -1, dtype=torch.float64)
        weights = [beta**age / (beta**age).sum() for beta in betas]
        direction = (weights[0] @ past) / ((weights[1] @ past**2).sqrt() + eps)
        p = params[i]
        p.copy_(p.double() * (1 - lr * weight_decay) - lr * direction.view(p.shape))


def by_products(params, grads, state, lr, betas, eps, weight_decay):  # fmt: skip
    """The powers of beta are kept as products instead of a count."""
    dense = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
    if any(grad.is_sparse for _, grad in dense):
        raise ValueError("sparse")
    for i, grad in dense:
        power1, power2, m, v = state.get(i, (1.0, 1.0, 0.0, 0.0))
        power1, power2 = power1 * betas[0], power2 * betas[1]
        m, v = betas[0] * m + (1 - betas[0]) * grad, betas[1] * v + (1 - betas[1]) * grad**2
        state[i] = power1, power2, m, v
        rate = lr * (1 - power2) ** 0.5 / (1 - power1)
        move = rate * m / (v.sqrt() + eps * (1 - power2) ** 0.5)
        params[i] -= lr * weight_decay * params[i] + move


def by_the_package(params, grads, state, lr, betas, eps, weight_decay):  # fmt: skip
    """Counts in a list, and everything computed before anything is written."""
    counts = list(state.get("counts", [0] * len(params)))
    new = []
    for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
        if grad is None:
            continue
        if grad.is_sparse:
            raise ValueError("sparse")
        counts[i] += 1
        m, v = state.get(i, (torch.zeros_like(p), torch.zeros_like(p)))
        direction, *means = adam_direction(grad, m, v, counts[i], betas, eps)
        new.append((i, p * (1 - lr * weight_decay) - lr * direction, means))
    for i, value, means in new:
        params[i].copy_(value)
        state[i] = means
    state["counts"] = counts


RIGHT = [by_torch, by_all_gradients, by_products, by_the_package]

SPARSE = "    if any(grad is not None and grad.is_sparse"
EVERY = "    for i, p in enumerate(params):\n"
PRESENT = f"{EVERY}        grad = grads[i]\n        if grad is None:\n            continue\n"

WRONG = [
    ("nothing is done where one gradient is missing",
     {SPARSE: f"    if any(grad is None for grad in grads):\n        return\n{SPARSE}"}),
    ("the state goes by the place among the gradients that are there",
     {PRESENT: "    pairs = [(p, grad) for p, grad in zip(params, grads) if grad is not None]\n"
      "    for i, (p, grad) in enumerate(pairs):\n",
      "if i not in state:": "if i not in state or state[i]['m'].shape != p.shape:"}),
    ("the means are kept in float32",
     {"torch.zeros_like(p)": "torch.zeros_like(p, dtype=torch.float32)"}),
]  # fmt: skip
