"""Answers to hunt_cached_generation: other right ones, and wrong ones of a second person."""

import torch
import torch.nn.functional as F

from lm_from_scratch.exercises.catalogue.hunt_cached_generation.checks import MASK


def by_torch(model, prompt, n, chunk):
    """The library's attention, with an explicit mask."""
    keys = values = torch.empty(len(prompt), 0, model.tokens.shape[1], dtype=torch.float64)
    new, logits = prompt[:, :chunk], []
    while True:
        positions = torch.arange(keys.shape[1], keys.shape[1] + new.shape[1])
        x = model.embed(new, positions)
        q, k, v = model.qkv(x)
        keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        mask = torch.arange(keys.shape[1]) <= positions[:, None]
        logits.append(model.logits(x + F.scaled_dot_product_attention(q, keys, values, mask)))
        end = keys.shape[1]
        if end == prompt.shape[1] + n - 1:
            return torch.cat(logits, dim=1)
        last = logits[-1][:, -1:].argmax(-1)
        new = prompt[:, end : end + chunk] if end < prompt.shape[1] else last


def by_token(model, prompt, n, chunk):
    """A buffer for the whole text, and one query after the other."""
    B, T, total = *prompt.shape, prompt.shape[1] + n - 1
    keys = torch.zeros(B, total, model.tokens.shape[1], dtype=torch.float64)
    values, logits, start = keys.clone(), torch.Tensor(), 0
    result = []
    while start < total:
        new = prompt[:, start : start + chunk] if start < T else logits.argmax(-1)[:, None]
        end = start + new.shape[1]
        x = model.embed(new, torch.arange(total)[start:end])
        q, keys[:, start:end], values[:, start:end] = model.qkv(x)
        for i in range(end - start):
            seen = slice(0, start + i + 1)
            scores = torch.einsum("bc,bsc->bs", q[:, i], keys[:, seen]) / q.shape[-1] ** 0.5
            mixed = torch.einsum("bs,bsc->bc", scores.softmax(-1), values[:, seen])
            logits = model.logits(x[:, i] + mixed)
            result.append(logits)
        start = end
    return torch.stack(result, dim=1)


TRIANGLE = "torch.ones(k.shape[1], k.shape[1], dtype=torch.bool)"
SCORES = "q @ k.mT / math.sqrt(q.shape[-1])"

RIGHT = [
    by_torch, by_token,
    # a triangle that begins later
    {f"{TRIANGLE}.tril()": "torch.ones(new.shape[1], k.shape[1]).bool().tril(past)",
     MASK: "~triangle"},
    # minus infinity is added, and the queries are scaled
    {SCORES: "(q / math.sqrt(q.shape[-1])) @ k.mT",
     f"scores.masked_fill({MASK}, -math.inf)": "scores + torch.full_like(scores[0], "
      "-math.inf).triu(past + 1)"},
]  # fmt: skip

NEXT, RESULT = "logits[-1][:, -1:].argmax(-1)", "return torch.cat(logits, dim=1)"

WRONG = [
    ("the keys of older pieces are hidden",
     {MASK: f"({MASK}) | (torch.arange(k.shape[1]) < past)"}),
    ("the token of the first row for all rows", {NEXT: f"{NEXT}[:1].expand(len(prompt), 1)"}),
    ("one round more", {"(pieces) + n - 1": "(pieces) + n"}),
    ("one round less", {"(pieces) + n - 1": "(pieces) + n - 2"}),
    ("new keys and values stand in front",
     {"[held[0], k]": "[k, held[0]]", "[held[1], v]": "[v, held[1]]"}),
    ("the prompt is read in one piece", {"prompt.split(chunk, dim=1)": "[prompt]"}),
    ("only the last logits", {RESULT: f"{RESULT}[:, -n:]"}),
    ("only the keys of the prompt are held",
     {"past = 0 if held is None else held[0].shape[1]": "past = sum(x.shape[1] for x in logits)",
      "held = k, v": "held = k[:, : prompt.shape[1]], v[:, : prompt.shape[1]]",
      MASK: "~triangle[k.shape[1] - new.shape[1] :]"}),
    ("the likeliest token of the whole batch",
     {NEXT: "logits[-1][:, -1:].mean(0, True).argmax(-1).expand(len(prompt), 1)"}),
    ("the prompt is the buffer", {RESULT: f"prompt[:, -1:] = {NEXT}\n    {RESULT}"}),
]  # fmt: skip

SURVIVORS = {
    "past = 0 if held is None else held[0].shape[1]: 0 => 1 (2)": "keys and values hold "
    "equally many tokens"
}
