"""Answers to top_p: other right ones, and wrong ones of a second person."""

import math

import torch


def above_zero(top_p):
    if top_p <= 0.0:
        raise ValueError(top_p)


def by_loop(logits, top_k=0, top_p=1.0):
    """Row by row: take the most likely tokens until the sum reaches p."""
    above_zero(top_p)
    enough = top_p - 1e-12 if top_p < 1 else math.inf
    result = torch.full_like(logits, -math.inf)
    for row, out in zip(logits.double(), result):
        ordered = sorted(row.tolist(), reverse=True)
        kth = ordered[min(top_k or len(row), len(row)) - 1]
        row = row.where(row >= kth, -math.inf)
        probability = row.softmax(-1)
        total = 0.0
        for token in probability.argsort(descending=True).tolist():
            if total >= enough:
                break
            total += float(probability[token])
            if row[token] > -math.inf:
                out[token] = row[token]
    return result


def by_rank(logits, top_k=0, top_p=1.0):
    """Ranks instead of a scatter: how many tokens are needed, and which rank has each."""
    above_zero(top_p)
    keep = torch.ones_like(logits, dtype=torch.bool)
    if 0 < top_k < logits.shape[-1]:
        keep = logits >= logits.kthvalue(logits.shape[-1] - top_k + 1, dim=-1, keepdim=True).values
    if top_p < 1:
        probability = logits.double().masked_fill(~keep, -math.inf).softmax(-1)
        order = probability.argsort(dim=-1, descending=True, stable=True)
        total = probability.gather(-1, order).cumsum(-1)
        needed = (total < top_p).sum(-1, keepdim=True) + 1
        keep &= order.argsort(dim=-1) < needed
    return torch.where(keep, logits, -math.inf)


def by_undoing(logits, top_k=0, top_p=1.0):
    """Cut in sorted order, then bring the logits back into their places."""
    above_zero(top_p)
    values, order = logits.double().sort(dim=-1, descending=True, stable=True)
    if top_k:
        kth = values[:, :top_k][:, -1:]
        values = values.masked_fill(values < kth, -math.inf)
    if top_p < 1:
        weight = (values - values[:, :1]).exp()
        before = weight.cumsum(-1).roll(1, dims=-1)
        before[:, 0] = 0.0
        values = values.masked_fill(before >= top_p * weight.sum(-1, keepdim=True), -math.inf)
    return torch.empty_like(values).scatter(-1, order, values).to(logits.dtype)


def by_pairs(logits, top_k=0, top_p=1.0):
    """Every token against every other: what stands before it, by value and then by place."""
    above_zero(top_p)
    z = logits.double()
    larger = z[:, None, :] > z[:, :, None]  # (B, V, V)
    if top_k:
        z = z.masked_fill(larger.sum(-1) >= top_k, -math.inf)
    if top_p < 1:
        place = torch.arange(z.shape[-1])
        first = larger | ((z[:, None, :] == z[:, :, None]) & (place < place[:, None]))
        before = (first * z.softmax(-1)[:, None, :]).sum(-1)
        z = z.masked_fill(before >= top_p - 1e-12, -math.inf)
    return logits.masked_fill(z == -math.inf, -math.inf)


RIGHT = [by_loop, by_rank, by_undoing, by_pairs]

SUM, SMALLEST = "probability.cumsum(dim=1) - probability", "logits.topk(k, dim=1).values[:, -1:]"
REMOVED = "removed.scatter(1, order, before >= top_p)"

WRONG = [
    ("the token that reaches p is cut, too",
     {SUM: "probability.cumsum(dim=1).index_fill(1, torch.tensor(0), 0.0)",
      "before >= top_p": "before > top_p"}),
    ("the token that reaches p is cut, too",
     {SUM: "probability.cumsum(dim=1)", "before >= top_p": "before > top_p"}),
    ("all tokens that equal the last one kept by top-p stay",
     {REMOVED: "logits.float().softmax(1) < probability.gather("
      "1, (before < top_p).sum(1, keepdim=True) - 1)"},
     "its sorted probabilities are rounded otherwise, so that it cuts more"),
    ("tokens less likely than 1 - p are cut",
     {REMOVED: "((p := logits.float().softmax(1)) < 1 - top_p) & (p < p.amax(1, keepdim=True))"},
     "but the likeliest stays"),
    ("the k-th token of the first row for all rows", {SMALLEST: "logits[0].topk(k).values[-1]"}),
    ("the k best of all rows", {SMALLEST: "logits.flatten().topk(k).values[-1]",
      "if top_k:": "if 0 < top_k < logits.shape[1]:"}),
]  # fmt: skip

SURVIVORS = {
    "def cut_tail(logits: Tensor, top_k: int=0, top_p: float=1.0) -> Tensor:"
    ": 1.0 => 2.0": "top-p is off at 2.0 as well",
    "ordered, order = logits.float().sort(dim=1, descending=True): "
    "logits.float().sort(dim=1, descending=True) => logits.float().sort(descending=True)": (
        "dimension 1 is the last one, which is the default"
    ),
    "smallest = logits.topk(k, dim=1).values[:, -1:]: logits.topk(k, dim=1) => logits.topk(k)": (
        "dimension 1 is the last one, which is the default"
    ),
}
