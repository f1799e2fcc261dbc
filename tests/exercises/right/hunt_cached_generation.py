"""Other right answers to hunt_cached_generation."""

import torch
import torch.nn.functional as F

from lm_from_scratch.exercises.catalogue.hunt_cached_generation.checks import MASK


def by_torch(model, prompt, n, chunk):
    """The library's attention, with an explicit mask."""
    keys = values = torch.empty(len(prompt), 0, model.tokens.shape[1], dtype=torch.float64)
    new, found = prompt[:, :chunk], []
    while True:
        positions = torch.arange(keys.shape[1], keys.shape[1] + new.shape[1])
        x = model.embed(new, positions)
        q, k, v = model.qkv(x)
        keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        mask = torch.arange(keys.shape[1]) <= positions[:, None]
        found.append(model.logits(x + F.scaled_dot_product_attention(q, keys, values, mask)))
        end = keys.shape[1]
        if end == prompt.shape[1] + n - 1:
            return torch.cat(found, dim=1)
        last = found[-1][:, -1:].argmax(-1)
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
    {
        f"{TRIANGLE}.tril()": "torch.ones(new.shape[1], k.shape[1]).bool().tril(past)",
        MASK: "~triangle",
    },
    # minus infinity is added, and the queries are scaled
    {
        SCORES: "(q / math.sqrt(q.shape[-1])) @ k.mT",
        f"scores.masked_fill({MASK}, -math.inf)": "scores + torch.full_like(scores[0], "
        "-math.inf).triu(past + 1)",
    },
]  # fmt: skip

# Automatic mutants of the solution that no case rejects, and why.
SURVIVORS = {
    "past = 0 if held is None else held[0].shape[1]: 0 => 1 (2)": "keys and values hold "
    "equally many tokens"
}
