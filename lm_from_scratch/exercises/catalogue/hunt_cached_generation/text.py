# %% [markdown]
# # Bug hunt: the text that changed with the cache
#
# A GPT-2 script got a cache, so that it need not read the whole text again for
# every token. For every prompt, also for one of a single token, it stopped in
# the second round:
#
# > The size of tensor a (20) must match the size of tensor b (39)
#
# Somebody changed one line, and it ran. But the text began with the tokens 15,
# 15, 74, 84, where the model without a cache writes 15, 15, 15, 74; and the
# script held 6, 13, 21, 30 keys after its first rounds. Somebody changed another
# line: 15, 74, 26, 74. All these texts were fluent.
#
# Below is the script, cut down to one layer with one head. Find what is wrong,
# and write the fixed function `write(model, prompt, n, chunk)`. What holds for it:
#
# - `prompt` has shape `(B, T)`. It is read in pieces of `chunk` tokens, the last
#   of which may be shorter. Then the likeliest next token follows, row by row,
#   until the prompt has been continued by `n` tokens; `n` is at least 1.
# - The result is the logits of every token that was read, `(B, T + n - 1, V)`.
#   They are those of one pass over the whole text without a cache: a token sees
#   itself and all tokens before it, and the first token of a text is at
#   position 0.
# - Every token is read once: each round calls `model.embed` once, with the tokens
#   that are new in this round and no others. That is what the cache is for.
# - `prompt` stays as it is, and nothing stays behind for the next call.

# %%
import math

import torch
from torch import Tensor


class TinyModel:
    """One layer of attention with one head, and no more."""

    def __init__(
        self, tokens: Tensor, positions: Tensor, weight: Tensor, head: Tensor
    ) -> None:
        self.tokens = tokens  # (V, C)
        self.positions = positions  # (P, C)
        self.weight = weight  # (C, 3 C)
        self.head = head  # (C, V)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Vectors (B, T, C) of the tokens (B, T) at the positions (T,)."""
        return self.tokens[ids] + self.positions[positions]

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each (B, T, C)."""
        return (x @ self.weight).chunk(3, dim=-1)

    def logits(self, x: Tensor) -> Tensor:
        """Scores (B, T, V) of the next token."""
        return x @ self.head


# %%
def write_as_found(
    model: TinyModel, prompt: Tensor, n: int, chunk: int
) -> Tensor:
    pieces = list(prompt.split(chunk, dim=1))
    ids, held, logits = prompt[:, :0], None, []
    for _ in range(len(pieces) + n - 1):
        new = pieces.pop(0) if pieces else logits[-1][:, -1:].argmax(-1)
        ids = torch.cat([ids, new], dim=1)
        T = ids.shape[1]
        x = model.embed(ids, torch.arange(T))
        q, k, v = model.qkv(x)
        if held is not None:
            k = torch.cat([held[0], k], dim=1)
            v = torch.cat([held[1], v], dim=1)
        held = k, v
        triangle = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool).tril()
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~triangle[:T, :T], -math.inf)
        x = x + scores.softmax(-1) @ v
        logits.append(model.logits(x[:, -new.shape[1] :]))
    return torch.cat(logits, dim=1)


# %%
from lm_from_scratch.exercises import check

check("hunt_cached_generation", write_as_found)

# %% [markdown]
# Now write the fixed function. Copy what is right. After each repair check
# again: the next thing wrong becomes visible only when the one before is fixed.


# %%
def write(model: TinyModel, prompt: Tensor, n: int, chunk: int) -> Tensor:
    """Continue prompt (B, T) greedily; logits (B, T + n - 1, V) of all that was read."""
    ### BEGIN SOLUTION
    pieces = list(prompt.split(chunk, dim=1))
    held, logits = None, []
    for _ in range(len(pieces) + n - 1):
        new = pieces.pop(0) if pieces else logits[-1][:, -1:].argmax(-1)
        past = 0 if held is None else held[0].shape[1]
        x = model.embed(new, torch.arange(past, past + new.shape[1]))
        q, k, v = model.qkv(x)
        if held is not None:
            k = torch.cat([held[0], k], dim=1)
            v = torch.cat([held[1], v], dim=1)
        held = k, v
        triangle = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool).tril()
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~triangle[past:], -math.inf)
        x = x + scores.softmax(-1) @ v
        logits.append(model.logits(x))
    return torch.cat(logits, dim=1)
    ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("hunt_cached_generation", write)
### BEGIN HIDDEN TESTS
points = min(points, check("hunt_cached_generation", write, seed=7341))
### END HIDDEN TESTS
float(points)
