"""What a machine does, each in a loop of one screen: write, write several texts at once, search,
write from drafts, learn.

All numbers that are drawn come from seeds, so that a run with another function can be compared with
it token by token. What a loop yields belongs to one of its texts: (number of the text, tokens).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.exercises.parts import Machine
from lm_from_scratch.text.corpora import load_corpus
from lm_from_scratch.text.targets import IGNORE

TEMPERATURE = 0.8
DRAFTS = "gpt2-docs"  # a shipped model with the same tokens, which proposes
#: What the loops begin with; the first two have equally many tokens, the third has fewer.
PROMPTS = ("The function returns", "If the value", "This module")


def probabilities(machine: Machine, logits: Tensor) -> Tensor:
    """What tokens are drawn from, (B, V)."""
    return machine.cut(logits / TEMPERATURE).softmax(-1)


@torch.no_grad()
def write(machine: Machine, prompt: str, n: int, seed: int = 0) -> Iterator[tuple[int, list[int]]]:
    """``n`` tokens that the model draws after the prompt, one by one."""
    generator, cache = Generator().manual_seed(seed), machine.cache(machine.layers)
    new = torch.tensor([machine.tokenizer.start(prompt)])  # (1, T)
    for _ in range(n):
        logits = machine.model(new, cache=cache, keep=slice(-1, None))[:, -1]  # (1, V)
        new = torch.multinomial(probabilities(machine, logits), 1, generator=generator)  # (1, 1)
        yield 0, [int(new)]


@torch.no_grad()
def batch(
    machine: Machine, prompts: Sequence[str], n: int, seed: int = 0
) -> Iterator[tuple[int, list[int]]]:
    """``n`` tokens after each prompt, in one batch that is padded on the left. Each text is the one
    that :func:`write` gives alone."""
    rows = [machine.tokenizer.start(prompt) for prompt in prompts]
    longest = max(map(len, rows))
    new = torch.tensor([[0] * (longest - len(row)) + row for row in rows])  # (B, T)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    positions, following = machine.place(mask)  # (B, T), (B,)
    generators = [Generator().manual_seed(seed) for _ in rows]
    cache = machine.cache(machine.layers)
    for _ in range(n):
        logits = machine.model(new, positions=positions, cache=cache, keep=slice(-1, None))[:, -1]
        drawn = zip(probabilities(machine, logits), generators, strict=True)
        new = torch.stack([torch.multinomial(p, 1, generator=own) for p, own in drawn])  # (B, 1)
        yield from ((i, [int(token)]) for i, token in enumerate(new[:, 0]))
        positions, following = following[:, None], following + 1


@torch.no_grad()
def search(
    machine: Machine, prompts: Sequence[str], n: int, width: int = 4, best: int = 3
) -> Iterator[tuple[int, list[int]]]:
    """The ``best`` sentences of at most ``n`` tokens after each prompt, among those that beam
    search finds with ``width`` beams. The prompts have equally many tokens."""
    B, stop, cache = len(prompts), machine.tokenizer.encode(".")[0], machine.cache(machine.layers)
    new = torch.tensor([machine.tokenizer.start(prompt) for prompt in prompts])  # (B, T)
    logits = machine.model(new, cache=cache, keep=slice(-1, None))[:, -1]  # (B, V)
    first = torch.arange(B)[:, None] * width  # rows of the beams: those of a prompt side by side
    scores = torch.tensor([[0.0] + [-math.inf] * (width - 1)] * B)  # only one beam exists
    cache.select(torch.arange(B).repeat_interleave(width))
    logits = logits.repeat_interleave(width, dim=0)  # (B width, V)
    texts: list[list[list[int]]] = [[[]] * width for _ in prompts]
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in prompts]  # by mean log-probability
    for _ in range(n):
        log_probs = logits.log_softmax(-1).unflatten(0, (B, width))  # (B, width, V)
        scores, parents, tokens, ended = machine.choose(scores, log_probs, stop)  # (B, width)
        for i, own in enumerate(texts):
            ends = zip(ended[i].tolist(), own, strict=True)
            finished[i] += [(s / (len(b) + 1), [*b, stop]) for s, b in ends if s > -math.inf]
            added = zip(parents[i].tolist(), tokens[i].tolist(), strict=True)
            texts[i] = [[*own[parent], token] for parent, token in added]
        cache.select((first + parents).flatten())
        logits = machine.model(tokens.reshape(-1, 1), cache=cache)[:, -1]
    for i, own in enumerate(texts):
        left = [(s / n, beam) for s, beam in zip(scores[i].tolist(), own, strict=True)]
        yield from ((i, beam) for _, beam in sorted(finished[i] + left, reverse=True)[:best])


@torch.no_grad()
def draft(
    machine: Machine, prompts: Sequence[str], n: int, most: int = 4, seed: int = 3
) -> Iterator[tuple[int, list[int]]]:
    """At least ``n`` tokens after each prompt: another model proposes, and this one accepts. Yields
    what each pass gives. The first text gets ``most`` drafts a pass, the next ones fewer."""
    other, generator = load_shipped(DRAFTS)[0].eval(), Generator().manual_seed(seed)
    rows = [machine.tokenizer.start(prompt) for prompt in prompts]
    caches = [machine.cache(machine.layers) for _ in rows]
    ends = [len(row) + n for row in rows]
    V = machine.model.config.vocab_size
    while any(len(row) < end for row, end in zip(rows, ends, strict=True)):
        drafts = torch.full((len(rows), most), -1)  # (B, K); a row with fewer is filled with -1
        p = torch.full((len(rows), most + 1, V), 1 / V)
        q = torch.full((len(rows), most, V), 1 / V)
        for i, (row, cache) in enumerate(zip(rows, caches, strict=True)):
            text = list(row)
            for k in range(most - i):
                logits = other(torch.tensor([text]), keep=slice(-1, None))[0, -1]
                q[i, k] = probabilities(machine, logits[None])[0]
                drafts[i, k] = torch.multinomial(q[i, k], 1, generator=generator)
                text.append(int(drafts[i, k]))
            logits = machine.model(torch.tensor([text[cache.length :]]), cache=cache)[0]
            p[i, : most - i + 1] = probabilities(machine, logits[-(most - i + 1) :])
        u = torch.rand(len(rows), most + 1, generator=generator)
        accepted, following = machine.accept(p, q, drafts, u)
        for i, (row, cache) in enumerate(zip(rows, caches, strict=True)):
            tokens = [*drafts[i, : int(accepted[i])].tolist(), int(following[i])]
            cache.crop(len(row) + len(tokens) - 1)  # the token that follows was not fed
            row += tokens
            yield i, tokens


def learn(
    machine: Machine, steps: int, rows: int = 8, length: int = 64
) -> Iterator[tuple[int, list[float]]]:
    """The loss of each step of a run on a piece of Python's language reference. The last row of a
    batch ends early: half of its targets do not count."""
    text = "\n\n".join(document.text for document in load_corpus("reference")[:5])
    tokens = torch.tensor(machine.spell(text))
    states: dict[nn.Parameter, dict[str, Any]] = {p: {} for p in machine.model.parameters()}
    generator = Generator().manual_seed(0)
    for step in range(1, steps + 1):
        starts = torch.randint(len(tokens) - length, (rows,), generator=generator)
        chosen = torch.stack([tokens[start : start + length + 1] for start in starts])
        targets = chosen[:, 1:].clone()
        targets[-1, length // 2 :] = IGNORE
        loss = machine.loss(machine.model(chosen[:, :-1]), targets)
        machine.model.zero_grad()
        loss.backward()
        for parameter, state in states.items():
            machine.update(parameter, state, step, machine.rate(step, steps))
        yield 0, [float(loss.detach())]


@dataclass(frozen=True)
class Loop:
    """A loop by its name.

    * ``does``: what the model does, as "writes"
    * ``run``: (machine, tokens or steps) -> what the loop yields
    """

    does: str
    run: Callable[[Machine, int], Iterator[tuple[int, Sequence[float]]]]


LOOPS = {
    "write": Loop("writes", lambda machine, n: write(machine, PROMPTS[0], n)),
    "batch": Loop("writes several texts at once", lambda machine, n: batch(machine, PROMPTS, n)),
    "search": Loop("searches", lambda machine, n: search(machine, PROMPTS[:2], n)),
    "draft": Loop("writes from drafts", lambda machine, n: draft(machine, PROMPTS[:2], n)),
    "learn": Loop("learns", learn),
}
