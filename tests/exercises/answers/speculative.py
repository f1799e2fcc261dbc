"""Answers to speculative: other right ones, and wrong ones of a second person."""

import torch
import torch.nn.functional as F

from lm_from_scratch.generation.sampling import draw
from lm_from_scratch.generation.speculative import accept


def pick(weights, u):
    """As the function that is given."""
    line = weights.double().cumsum(-1)
    point = u.double()[:, None] * line[:, -1:]
    token = torch.searchsorted(line, point, right=True)[:, 0]
    return token.clamp(max=weights.shape[-1] - 1)


def by_loop(p, q, draft, u):
    """Row by row, draft by draft."""
    counts, tokens = [], []
    for i, row in enumerate(draft.tolist()):
        row = [x for x in row if x >= 0]
        weights = p[i, len(row)]
        n = len(row)
        for k, x in enumerate(row):
            if u[i, 1 + k] * q[i, k, x] >= p[i, k, x]:
                weights, n = (p[i, k] - q[i, k]).clamp(min=0), k
                if not weights.any():
                    weights = p[i, k]
                break
        counts.append(n)
        tokens.append(pick(weights[None], u[i, :1]))
    return torch.tensor(counts), torch.cat(tokens)


def by_ratio(p, q, draft, u):
    """The quotient, the first place that fails by argmax, and weights p - min(p, q)."""
    B, K = draft.shape
    V = p.shape[2]
    p, q = p.double(), q.double()
    chosen = F.one_hot(draft.clamp(min=0), V).bool()
    ratio = (p[:, :K].where(chosen, 0.0)).sum(2) / q.where(chosen, 0.0).sum(2)
    fails = (u[:, 1:] >= ratio) | (draft < 0)
    fails = torch.cat([fails, torch.ones(B, 1, dtype=torch.bool)], dim=1)
    n = fails.long().argmax(dim=1)
    rows = torch.arange(B)
    proposed = torch.cat([draft, draft.new_full((B, 1), -1)], dim=1)[rows, n] >= 0
    weights = p[rows, n]
    q_there = torch.cat([q, torch.zeros(B, 1, V).double()], dim=1)[rows, n]
    left = weights - torch.minimum(weights, q_there)
    left = left.where(left.amax(1, keepdim=True) > 0, weights)
    return n, pick(torch.where(proposed[:, None], left, weights), u[:, 0])


def by_line(p, q, draft, u):
    """Every place gets a token; the one at the first rejection is taken."""
    B, K = draft.shape
    tokens, stands = [], []
    for k in range(K + 1):
        here = p[:, k]
        if k == K:
            tokens.append(pick(here, u[:, 0]))
            break
        proposed = (draft[:, k] >= 0)[:, None]
        left = F.relu(here - q[:, k])
        left = torch.where(proposed & (left.sum(-1, keepdim=True) > 0), left, here)
        line = left.double().cumsum(-1)
        tokens.append((line <= u[:, :1].double() * line[:, -1:]).sum(-1).clamp(max=p.shape[2] - 1))
        x = draft[:, k : k + 1].clamp(min=0)
        coin = u[:, 1 + k, None] * q[:, k].gather(1, x) < here.gather(1, x)
        stands.append((coin & proposed)[:, 0])
    n = torch.zeros(B, dtype=torch.long)
    still = torch.ones(B, dtype=torch.bool)
    for stand in stands:
        still = still & stand
        n = n + still
    return n, torch.stack(tokens, dim=1).gather(1, n[:, None])[:, 0]


def by_draw(p, q, draft, u):
    """The rule of the package, one draft at a time, with its own way to draw."""
    B, K = draft.shape
    n = torch.zeros(B, dtype=torch.long)
    token = draw(p[:, 0].log(), u[:, 0]) if K == 0 else torch.zeros(B, dtype=torch.long)
    for k in range(K):
        part = torch.cat([u[:, :1], u[:, 1 + k : 2 + k]], dim=1)
        one, following = accept(p[:, k : k + 2], q[:, k : k + 1], draft[:, k : k + 1], part)
        going = n == k
        token = torch.where(going, following, token)
        n = torch.where(going, n + one, n)
    return n, token


RIGHT = [by_loop, by_ratio, by_line, by_draw]

COIN, RESULT = "u[:, 1:] * q_x < p_x", "return n, pick(rest, u[:, 0])"

WRONG = [
    ("only drafts that p prefers are accepted, without a coin", {COIN: "p_x >= q_x"}),
    ("only the likeliest token is accepted", {COIN: "p[:, :-1].argmax(2) == x[:, :, 0]"}),
    ("-1 is the last token", {"real = draft": "draft = draft % p.shape[-1]\n    real = draft"}),
    ("no token follows where all drafts stand",
     {RESULT: f"{RESULT}.masked_fill(n == draft.shape[1], -1)"}),
    ("all rows stop with the shortest", {RESULT: f"n[:], token = n.min(), {RESULT[10:]}\n"
                                        "    return n, token"}),
    ("all drafts of a row stand, or none",
     {RESULT: f"n, token = n * (n == real.sum(1)), {RESULT[10:]}\n    return n, token"}),
    ("written into the caller's q", {"    q = q.masked": "    q[~real] = 0\n    q = q.masked"}),
]  # fmt: skip

SURVIVORS = {
    "q = F.pad(q, (0, 0, 0, 1)): 1 => 2": "a second place of zeros is never looked at",
    "q = q.masked_fill(~real[:, :, None], 0): 0 => 1": "nothing is left over then, so the "
    "token is drawn from p all the same",
    "p_x, q_x = (p[:, :-1].gather(2, x)[:, :, 0], q.gather(2, x)[:, :, 0]): :-1 => :": (
        "gather reads no more places than x has"
    ),
}
