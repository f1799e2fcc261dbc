"""Answers to attention: other right ones, and wrong ones of a second person."""

import math

import torch
import torch.nn.functional as F


def by_groups(q, k, v):
    """An axis for the group, no repeated key, all in float64."""
    B, H, T, D = q.shape
    Hkv, S = k.shape[1:3]
    parts = q.double().reshape(B, Hkv, H // Hkv, T, D)
    scores = torch.einsum("bhgtd,bhsd->bhgts", parts, k.double()) * D**-0.5
    later = torch.arange(S)[None, :] - torch.arange(T)[:, None] > S - T
    weights = torch.where(later, -math.inf, scores).softmax(-1)
    y = torch.einsum("bhgts,bhsd->bhgtd", weights, v.double())
    return y.reshape(B, H, T, v.shape[-1]).to(q.dtype)


def by_torch(q, k, v):
    """The library's kernel with a mask, which is aligned to the end."""
    T, S = q.shape[2], k.shape[2]
    visible = torch.arange(S) <= torch.arange(S - T, S)[:, None]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, enable_gqa=q.shape[1] != k.shape[1]
    )


def by_loop(q, k, v):
    """One query and one head at a time, which only gets the keys that it may see."""
    (H, T, D), (Hkv, S) = q.shape[1:], k.shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = []
    for h in range(H):
        head = h * Hkv // H
        rows = []
        for t in range(T):
            end = S - T + t + 1
            past, values = k[:, head, :end].to(wide), v[:, head, :end].to(wide)
            scores = (past * q[:, h, t].to(wide)[:, None]).sum(-1) / D**0.5
            rows.append((scores.softmax(-1)[..., None] * values).sum(1))
        heads.append(torch.stack(rows, dim=1))
    return torch.stack(heads, dim=1).to(q.dtype)


def by_hand(q, k, v):
    """A fill with the most negative number, and the maximum subtracted by hand."""
    B, H, T, D = q.shape
    Hkv, S = k.shape[1:3]
    k, v = (x[:, :, None].expand(B, Hkv, H // Hkv, S, -1).flatten(1, 2) for x in (k, v))
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    scores = (q.to(wide) / math.sqrt(D)) @ k.to(wide).transpose(-1, -2)
    visible = torch.ones(S, S).tril()[-T:].bool()
    scores = scores.masked_fill(~visible, torch.finfo(wide).min)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights @ v.to(wide) / weights.sum(-1, keepdim=True)).to(q.dtype)


RIGHT = [by_torch, by_loop, by_groups, by_hand]

WRONG = [
    ("heads and tokens change places",
     {"return weights.to(q.dtype) @ v": "return (weights.to(q.dtype) @ v).transpose(1, 2)"}),
    ("q is scaled in place",
     {"    group = ": "    q.data.mul_(q.shape[-1] ** -0.5)\n    group = ",
      " / math.sqrt(q.shape[-1])": ""}),
    ("keys and values are detached, as those of a cache",
     {"k.repeat_interleave": "k.detach().repeat_interleave",
      "v.repeat_interleave": "v.detach().repeat_interleave"}),
]  # fmt: skip
