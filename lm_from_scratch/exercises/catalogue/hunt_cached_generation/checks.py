"""Three faults of a generation loop with a cache, each hidden by the one before (G1, G2, G4)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers, normal


class Model:
    """The model of the exercise, which also notes how many tokens every round reads."""

    def __init__(self, tokens: Tensor, positions: Tensor, weight: Tensor, head: Tensor) -> None:
        self.tokens, self.positions, self.weight, self.head = tokens, positions, weight, head
        self.read: list[int] = []

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        self.read.append(ids.shape[1])
        return self.tokens[ids] + self.positions[positions]

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x @ self.weight).chunk(3, dim=-1)

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.head


def reference(model: Model, prompt: Tensor, n: int, chunk: int) -> Tensor:
    """The package's cache and attention."""
    cache, pieces = GrowingCache(1), prompt.split(chunk, dim=1)
    logits: list[Tensor] = []
    for step in range(len(pieces) + n - 1):
        new = pieces[step] if step < len(pieces) else logits[-1][:, -1:].argmax(-1)
        (seen,) = cache.see(new)
        x = model.embed(new, seen.query_positions[0])
        q, k, v = (part[:, None] for part in model.qkv(x))  # one head
        k, v = cache[0].update(k, v)
        logits.append(model.logits(x + formula_attention(q, k, v, seen)[:, 0]))
    return torch.cat(logits, dim=1)


# -------------------------------------------------------------------------------- how it is used

Write = Callable[[Model, Tensor, int, int], Any]
Weights = tuple[Tensor, ...]


def by_round(write: Write, weights: Weights, prompt: Tensor, n: int, chunk: int) -> Any:
    """The logits under the name of the round that read the tokens."""
    logits = write(Model(*weights), prompt, n, chunk)
    T = prompt.shape[1]
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        return logits
    results: dict[str, Any] = {"the number of tokens with logits": logits.shape[1]}
    at = 0
    sizes = [len(part) for part in torch.arange(T).split(chunk)] + [1] * (n - 1)
    for number, size in enumerate(sizes):
        results[f"the logits of round {number + 1}"] = logits[:, at : at + size]
        at += size
    return results


def tokens_read(write: Write, weights: Weights, prompt: Tensor, n: int, chunk: int) -> Any:
    model = Model(*weights)
    logits = write(model, prompt, n, chunk)
    if not isinstance(logits, Tensor):
        return logits
    return {"tokens read in each round": model.read, "logits of the first token": logits[:, 0]}


def read_and_logits(write: Write, weights: Weights, prompt: Tensor, n: int, chunk: int) -> Any:
    model = Model(*weights)
    logits = write(model, prompt, n, chunk)
    return {"tokens read in each round": model.read, "the logits": logits}


def twice(write: Write, weights: Weights, prompt: Tensor, n: int, chunk: int) -> Any:
    model = Model(*weights)
    first, second = write(model, prompt, n, chunk), write(model, prompt.flip(1), n, chunk)
    return {"the logits of the first call": first, "the logits of the second call": second}


# ------------------------------------------------------------------------------------- arguments


def arguments(g: Generator, T: int, n: int, chunk: int, B: int = 3, vocabulary: int = 29) -> Call:
    """The model reads any token of the vocabulary, and writes the first 29."""
    V, C, P = vocabulary, 6, max(16, T + n)
    double = partial(normal, g, dtype=torch.float64)
    weights = double(V, C), double(P, C), double(C, 3 * C, scale=0.6), double(C, 29)
    return call(weights=weights, prompt=integers(g, V - 29, V, B, T), n=n, chunk=chunk)


def in_one_piece(g: Generator) -> Call:
    return arguments(g, T=5, n=5, chunk=8)


# ------------------------------------------------------------------------------- wrong answers

POSITIONS = "torch.arange(past, past + new.shape[1])"
EMBED = f"x = model.embed(new, {POSITIONS})"
MASK = "~triangle[past:]"
LOGITS = "model.logits(x)"
NEW = "new = pieces.pop(0) if pieces else logits[-1][:, -1:].argmax(-1)"
START = "held, logits = None, []"
HELD = "held = k, v\n"

#: feeds the whole text, as the script did
WHOLE = {
    START: f"{START}\n    ids = prompt[:, :0]",
    EMBED: "ids = torch.cat([ids, new], dim=1)\n        "
    "x = model.embed(ids, torch.arange(ids.shape[1]))",
    LOGITS: "model.logits(x[:, -new.shape[1] :])",
}

ONCE, ROUNDS = "each token is read once", "five rounds after a prompt in one piece"
PIECES = "a prompt in pieces of three"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found", {**WHOLE, MASK: "~triangle[: ids.shape[1], : ids.shape[1]]"}, ONCE),
    ("the whole text is fed again in every round, beside the cache",
     {**WHOLE, MASK: "~triangle[past:]"}, ONCE),
    ("the positions of every round start at 0", {POSITIONS: "torch.arange(new.shape[1])"}, ROUNDS),
    ("the square at the top left of the triangle is kept",
     {MASK: "~triangle[: new.shape[1], : new.shape[1]]"}, PIECES),
    ("the first rows of the triangle are taken, not the last",
     {MASK: "~triangle[: new.shape[1]]"}, ROUNDS),
    ("positions start at 0, and the first rows of the triangle are taken",
     {POSITIONS: "torch.arange(new.shape[1])", MASK: "~triangle[: new.shape[1]]"}, ROUNDS),
    ("the whole text is read again in every round, as without a cache",
     {**WHOLE, HELD: "held = None\n", MASK: "~triangle"}, ONCE),
    ("nothing is hidden at all",
     {MASK: "torch.zeros_like(triangle[past:])"}, "a prompt in one piece, no past yet"),
    ("nothing is hidden once there is a past",
     {MASK: "~triangle[past:] if past == 0 else torch.zeros_like(triangle[past:])"}, PIECES),
    ("the past counts rounds, not tokens",
     {POSITIONS: "torch.arange(len(logits), len(logits) + new.shape[1])"}, ROUNDS),
    ("positions go on one too far after the prompt",
     {POSITIONS: "torch.arange(past, past + new.shape[1]) + int(past > 0)"}, ROUNDS),
    ("a new token gets the position of the last one before it",
     {POSITIONS: "torch.arange(past, past + new.shape[1]) - int(past > 0)"}, ROUNDS),
    ("all tokens of a piece are at one position",
     {POSITIONS: "torch.full((new.shape[1],), past) if past else torch.arange(new.shape[1])"},
     PIECES),
    ("only the first piece is kept",
     {HELD: "held = held or (k, v)\n", MASK: "~triangle[-new.shape[1] :]"}, ROUNDS),
    ("only the newest piece is kept",
     {HELD: "held = k[:, -new.shape[1] :], v[:, -new.shape[1] :]\n",
      MASK: "~triangle[-new.shape[1] :]"}, ROUNDS),
    ("only the last 256 keys are kept",
     {HELD: "held = k[:, -256:], v[:, -256:]\n", MASK: "~triangle[-new.shape[1] :]"},
     "a prompt of 300 tokens"),
    ("new values are before the old ones",
     {"torch.cat([held[1], v], dim=1)": "torch.cat([v, held[1]], dim=1)"}, ROUNDS),
    ("after the prompt its last token is fed again",
     {NEW: "new = pieces.pop(0) if pieces else (prompt[:, -1:] if "
      "sum(x.shape[1] for x in logits) == prompt.shape[1] "
      "else logits[-1][:, -1:].argmax(-1))"}, ROUNDS),
    ("the next token is chosen by the first new logits, not the last",
     {"[:, -1:]": "[:, :1]"}, ROUNDS),
    ("a query sees one key too few", {MASK: "~triangle[max(past - 1, 0) :][: new.shape[1]]"},
     ROUNDS),
    ("the cache stays with the model, for the next call too",
     {START: "held, logits = getattr(model, 'held', None), []", HELD: "model.held = held = k, v\n"},
     "two calls"),
]  # fmt: skip

CASES = (
    Case("a prompt in one piece, no past yet", lambda g: arguments(g, T=5, n=1, chunk=8),
         "without a past the code as found was right: do not change what it did there",
         use=by_round, guard=True, teaching="what the code as found did right"),
    Case(ONCE, in_one_piece, "after the prompt a round reads one token: the cache has the others",
         points=2, use=tokens_read, teaching="the first repair alone, seen in counts"),
    Case(ROUNDS, in_one_piece,
         "in round 2 one token is new, and it is not the first of the text: at which position?",
         points=3, use=by_round,
         teaching="the script's own use, where one new token sees all keys"),
    Case("a prompt of one token", lambda g: arguments(g, T=1, n=4, chunk=8, B=2),
         "the second token is at position 1, and sees two keys", use=by_round,
         teaching="the smallest text with a past, which can be followed by hand"),
    Case(PIECES, lambda g: arguments(g, T=8, n=3, chunk=3),
         "the new tokens are the last of the keys: which rows of the triangle are theirs?",
         points=3, use=by_round, teaching="a second piece, in a text that can be followed by hand"),
    Case("a prompt token by token", lambda g: arguments(g, T=4, n=2, chunk=1, B=1),
         "the past counts tokens, whoever chose them; a piece has `chunk` of them",
         use=read_and_logits),
    Case("a prompt of 300 tokens",
         lambda g: arguments(g, T=300, n=2, chunk=150, B=1, vocabulary=33_000),
         "a token sees all tokens before it, however many there are", use=by_round),
    Case("two calls", in_one_piece, "each call begins with an empty cache", use=twice),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_cached_generation", function="write", page="5_caching/1_why_cache", minutes=30,
    difficulty=2,
    outcome="Fix a generation loop with a cache so that its logits are those of one pass without "
            "a cache, and judge repairs by logits, not by fluent text.",
    after=("growing_cache",), reference=reference, hunt="G1, G2, G3, G4", cases=CASES,
    wrong=planted(WRONG),
    hints=(
        "Write down for the first three rounds: how many tokens are fed, at which positions, and "
        "how many keys there are. A cache that works holds 5, 6, 7 keys after a prompt of 5.",
        "There are three faults: what is fed, where it is, and which rows of the triangle "
        "belong to it. With the first alone fixed, one new token gets position 0.",
        "Where the new tokens are, and which rows of the triangle are theirs, follows from one "
        "number: how many keys are held before the round. The story is in the bug museum of the "
        "page 5_caching/1a_why_cache_in_depth: G1, G2, G4. A cache proposed for nanoGPT wrote "
        "coherent texts that were not those without it: https://github.com/karpathy/nanoGPT/pull/613",
    ),
)  # fmt: skip
