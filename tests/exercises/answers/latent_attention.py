"""Other right answers to latent_attention."""

import math

import torch


def two_scores(q, latent, shared, weight):
    """The two parts of a score apart, by named axes."""
    (H, T, D), (S, R), Dr = q.shape[1:], latent.shape[1:], shared.shape[2]
    w_k, w_v = weight.reshape(H, -1, R).split([D - Dr, weight.shape[0] // H - D + Dr], dim=1)
    content = torch.einsum("bhtd,hdr->bhtr", q[..., : D - Dr], w_k)
    scores = torch.einsum("bhtr,bsr->bhts", content, latent)
    scores = scores + torch.einsum("bhtd,bsd->bhts", q[..., D - Dr :], shared)
    seen = torch.arange(S) <= torch.arange(S - T, S)[:, None]
    weights = torch.where(seen, scores / D**0.5, -torch.inf).softmax(-1)
    return torch.einsum("bhtr,hdr->bhtd", torch.einsum("bhts,bsr->bhtr", weights, latent), w_v)


def head_by_head(q, latent, shared, weight):
    """One head after the other, the maximum subtracted by hand."""
    (H, T, D), S, Dr = q.shape[1:], latent.shape[1], shared.shape[2]
    rows = weight.shape[0] // H
    heads = []
    for h in range(H):
        w = weight[h * rows : (h + 1) * rows]
        scores = q[:, h, :, : D - Dr] @ w[: D - Dr] @ latent.mT
        scores = (scores + q[:, h, :, D - Dr :] @ shared.mT) * D**-0.5
        scores = scores.masked_fill(~torch.ones(T, S).tril(S - T).bool(), -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        heads.append(weights / weights.sum(-1, keepdim=True) @ latent @ w[D - Dr :].T)
    return torch.stack(heads, dim=1)


def query_by_query(q, latent, shared, weight):
    """Each query gets the tokens that it may see."""
    (H, T, D), S, Dr = q.shape[1:], latent.shape[1], shared.shape[2]
    w = weight.unflatten(0, (H, -1))
    results = []
    for t in range(T):
        c, r = latent[:, : S - T + t + 1], shared[:, : S - T + t + 1]
        content = (q[:, :, t, None, : D - Dr] @ w[:, : D - Dr])[:, :, 0]  # (B, H, R)
        scores = (content @ c.mT + q[:, :, t, D - Dr :] @ r.mT) / math.sqrt(D)
        mean = scores.softmax(-1) @ c
        results.append((mean[:, :, None] @ w[:, D - Dr :].mT)[:, :, 0])
    return torch.stack(results, dim=2)


def by_double(q, latent, shared, weight):
    """All in float64."""
    return two_scores(*(x.double() for x in (q, latent, shared, weight))).to(q.dtype)


RIGHT = [two_scores, head_by_head, query_by_query, by_double]
