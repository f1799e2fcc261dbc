"""Other right answers to sae_step."""

import torch
import torch.nn.functional as F


def by_hand(x, parts, k, lr):
    """The gradient is derived on paper: no graph."""
    W, a, D, b = (parts[name] for name in ("encoder", "threshold", "directions", "centre"))
    centred = x - b
    s = centred @ W + a
    limit = s.sort(-1, descending=True).values[:, k - 1 : k]
    on = (s > 0) & (s >= limit)
    f = s * on
    total = (x - x.mean(0)).square().sum()
    error = f @ D + b - x
    back = 2 * error / total  # of the result
    inner = (back @ D.T) * on  # of the scores
    directions = D - lr * f.T @ back
    return {
        "features": f,
        "loss": error.square().sum() / total,
        "encoder": W - lr * centred.T @ inner,
        "threshold": a - lr * inner.sum(0),
        "directions": F.normalize(directions, dim=-1),
        "centre": b - lr * (back.sum(0) - (inner @ W.T).sum(0)),
    }


def by_modules(x, parts, k, lr):
    """Parameters and an optimizer; the ReLU comes after the k largest, which is the same."""
    p = {name: torch.nn.Parameter(part.clone()) for name, part in parts.items()}
    optimizer = torch.optim.SGD(p.values(), lr=lr)
    scores = torch.addmm(p["threshold"], x - p["centre"], p["encoder"])
    top = scores.topk(k, dim=-1)
    f = torch.zeros_like(scores).scatter(-1, top.indices, F.relu(top.values))
    given = torch.addmm(p["centre"], f, p["directions"])
    loss = F.mse_loss(given, x) / x.var(dim=0, correction=0).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        p["directions"] /= torch.linalg.vector_norm(p["directions"], dim=-1, keepdim=True)
    after = {name: part.detach() for name, part in p.items()}
    return {**after, "loss": loss.detach(), "features": f.detach()}


def by_states(x, parts, k, lr):
    """State by state, with torch.func."""

    def encode(p, state):
        scores = torch.relu((state - p["centre"]) @ p["encoder"] + p["threshold"])
        mask = torch.zeros_like(scores)
        mask[scores.detach().argsort(descending=True)[:k]] = 1
        return scores * mask

    def share(p):
        errors = [encode(p, state) @ p["directions"] + p["centre"] - state for state in x]
        squares = torch.stack([error.dot(error) for error in errors]).sum()
        return squares / torch.stack([(state - x.mean(0)).square().sum() for state in x]).sum()

    gradients = torch.func.grad(share)(parts)
    after = {name: parts[name] - lr * gradients[name] for name in parts}
    rows = [row / row.dot(row).sqrt() for row in after["directions"]]
    return after | {
        "directions": torch.stack(rows),
        "features": torch.stack([encode(parts, state) for state in x]),
        "loss": share(parts),
    }


def by_autograd(x, parts, k, lr):
    """In double precision; gradients are asked for, and put nowhere."""
    names = list(parts)
    own = [parts[name].double().requires_grad_() for name in names]
    p = dict(zip(names, (part.clone() for part in own)))
    wide = x.double()
    scores = ((wide - p["centre"]) @ p["encoder"] + p["threshold"]).clamp(min=0)
    least = scores.topk(k).values[:, -1:]
    f = torch.where(scores >= least, scores, 0.0)
    loss = (f @ p["directions"] + p["centre"] - wide).pow(2).mean()
    loss = loss / (wide - wide.mean(0, keepdim=True)).pow(2).mean()
    gradients = torch.autograd.grad(loss, own)
    result = {n: (q - lr * d).detach() for n, q, d in zip(names, own, gradients)}
    length = result["directions"].pow(2).sum(1).sqrt()
    result["directions"] = (result["directions"].T / length).T
    result |= {"features": f.detach(), "loss": loss.detach()}
    return {name: value.to(x.dtype) for name, value in result.items()}


RIGHT = [by_hand, by_modules, by_states, by_autograd]

TWO_AXES = "states are rows: axis 1 is the last one"
SURVIVORS = {
    "values, which = scores.relu().topk(k, dim=-1): scores.relu().topk(k, dim=-1) => "
    "scores.relu().topk(k)": "topk takes the last axis unless it is told another",
    "values, which = scores.relu().topk(k, dim=-1): -1 => 1": TWO_AXES,
    "features = torch.zeros_like(scores).scatter(-1, which, values): -1 => 1": TWO_AXES,
    "length = new['directions'].norm(dim=-1, keepdim=True): -1 => 1": TWO_AXES,
}
