"""Other right answers to delta_rule."""

import torch


def by_names(q, k, v, g, beta, state):
    """Axes by name."""
    read = []
    for t in range(q.shape[2]):
        state = torch.einsum("bhkv,bh->bhkv", state, g[:, :, t].exp())
        old = torch.einsum("bhkv,bhk->bhv", state, k[:, :, t])
        new = torch.einsum("bhv,bh->bhv", v[:, :, t] - old, beta[:, :, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, :, t], new)
        read.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    return torch.stack(read, dim=2), state


def by_a_matrix(q, k, v, g, beta, state):
    """The state is multiplied by (1 - beta k kᵀ), then beta k vᵀ is added."""
    one = torch.eye(k.shape[3], dtype=k.dtype)
    read = []
    for t in range(q.shape[2]):
        key, rate = k[:, :, t], beta[:, :, t, None, None]
        turn = one - rate * key[..., :, None] * key[..., None, :]
        state = turn @ (state * g[:, :, t, None, None].exp())
        state = state + rate * key[..., :, None] * v[:, :, t, None, :]
        read.append((state.mT @ q[:, :, t, :, None])[..., 0])
    return torch.stack(read, dim=2), state


def head_by_head(q, k, v, g, beta, state):
    """One row and one head after the other, the state transposed."""
    B, H, T, _ = q.shape
    ys, states = [], []
    for b in range(B):
        for h in range(H):
            S, rows = state[b, h].T, []
            for t in range(T):
                S = S * torch.exp(g[b, h, t])
                S = S + beta[b, h, t] * torch.outer(v[b, h, t] - S @ k[b, h, t], k[b, h, t])
                rows.append(S @ q[b, h, t])
            ys.append(torch.stack(rows))
            states.append(S.T)
    return torch.stack(ys).unflatten(0, (B, H)), torch.stack(states).unflatten(0, (B, H))


def by_double(q, k, v, g, beta, state):
    """All in float64."""
    y, after = by_names(*(x.double() for x in (q, k, v, g, beta, state)))
    return y.to(v.dtype), after.to(state.dtype)


RIGHT = [by_names, by_a_matrix, head_by_head, by_double]
