"""Other right answers to moe_layer."""

import torch
import torch.nn.functional as F


def by_expert(x, router, gate_up, down, k, normalize):
    """Weights and experts (N, k), the order (N k) of visits by expert, what is said in it."""
    E = len(down)
    best = (x @ router.T).sort(1, descending=True).indices[:, :k]
    p = torch.softmax(x @ router.T, 1).gather(1, best)
    if normalize:
        p = p / p.sum(1, keepdim=True)
    order = best.flatten().argsort(stable=True)
    counts = torch.bincount(best.flatten(), minlength=E).tolist()
    outputs = [
        (F.silu(rows @ gate_up[e].chunk(2)[0].T) * (rows @ gate_up[e].chunk(2)[1].T)) @ down[e].T
        for e, rows in enumerate(x[order // k].split(counts))
        if len(rows)
    ]
    return p, best, order, torch.cat(outputs)


def gathered(x, router, gate_up, down, k, normalize):
    """The matrices of the chosen experts are copied to each token."""
    logits = torch.nn.functional.linear(x, router)
    top, best = logits.topk(k, dim=1)
    weights = top.softmax(1) if normalize else logits.softmax(1).gather(1, best)
    gate, up = torch.einsum("nc,nkfc->nkf", x, gate_up[best]).chunk(2, dim=2)
    return torch.einsum("nkf,nkcf,nk->nc", F.silu(gate) * up, down[best], weights)


def token_by_token(x, router, gate_up, down, k, normalize):
    """One token, one expert after the other."""
    rows = []
    for row in x:
        p = (router @ row).softmax(0)
        chosen = p.argsort(descending=True)[:k].tolist()
        total = p[chosen].sum() if normalize else 1.0
        y = torch.zeros_like(row)
        for e in chosen:
            gate, up = (gate_up[e] @ row).tensor_split(2)
            y = y + p[e] / total * (down[e] @ (gate * gate.sigmoid() * up))
        rows.append(y)
    return torch.stack(rows)


def sorted_by_expert(x, router, gate_up, down, k, normalize):
    """All visits in the order of their experts, and back."""
    weights, best, order, outputs = by_expert(x, router, gate_up, down, k, normalize)
    back = torch.empty_like(order).scatter(0, order, torch.arange(len(order)))
    return (outputs[back].unflatten(0, best.shape) * weights[..., None]).sum(1)


def by_double(x, router, gate_up, down, k, normalize):
    """All in float64."""
    weights = router.double(), gate_up.double(), down.double()
    return gathered(x.double(), *weights, k, normalize).to(x.dtype)


RIGHT = [token_by_token, sorted_by_expert, gathered, by_double]
