"""Other right answers to logit_lens."""

import torch
import torch.nn.functional as F


def by_places(states, weight, eps, head, k=3):
    """Place by place, with torch's own norm."""
    wide = states.dtype if states.dtype == torch.float64 else torch.float32
    probabilities, ids = [], []
    for state in states:
        normed = F.rms_norm(state.to(wide), weight.shape, weight.to(wide), eps)
        p = F.softmax(F.linear(normed, head.to(wide)), dim=-1)
        order = p.argsort(dim=-1, descending=True)[..., :k]
        ids.append(order)
        probabilities.append(p.gather(-1, order))
    return torch.stack(probabilities), torch.stack(ids)


def by_folding(states, weight, eps, head, k=3):
    """The weight belongs to the head as well, and the length can be divided at the end."""
    x, matrix = states.double(), head.double() * weight.double()
    length = (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    logits = torch.einsum("lbtc,vc->lbtv", x, matrix) / length
    values, ids = logits.topk(k)
    p = (values - logits.logsumexp(-1, keepdim=True)).exp()
    return p.to(torch.promote_types(states.dtype, torch.float32)), ids


def by_sorting(states, weight, eps, head, k=3):
    dtype = torch.promote_types(states.dtype, torch.float32)
    x = states.to(dtype)
    x = weight.to(dtype) * (x / torch.sqrt(x.square().mean(-1)[..., None] + eps))
    exponentials = torch.matmul(x, head.to(dtype).T).exp()
    values, ids = (exponentials / exponentials.sum(-1, keepdim=True)).sort(-1, descending=True)
    return [values[..., :k], ids[..., :k]]


def by_tokens(states, weight, eps, head, k=3):
    """One state after the other."""
    dtype = torch.promote_types(states.dtype, torch.float32)
    rows = []
    for state in states.flatten(0, 2).to(dtype):
        normed = state * (state.dot(state) / len(state) + eps) ** -0.5 * weight
        rows.append((head.to(dtype) @ normed.to(dtype)).softmax(0).topk(k))
    shape = *states.shape[:3], k
    values = torch.stack([row.values for row in rows]).view(shape)
    return values, torch.stack([row.indices for row in rows]).view(shape)


RIGHT = [by_places, by_folding, by_sorting, by_tokens]

SURVIVORS = {
    "top = logits.softmax(dim=-1).topk(k, dim=-1): logits.softmax(dim=-1).topk(k, dim=-1) => "
    "logits.softmax(dim=-1).topk(k)": "topk takes the last axis unless it is told another",
    "normed = x * torch.rsqrt(square + eps) * weight.to(work): weight.to(work) => weight": (
        "a product of float32 and half precision is float32"
    ),
}
