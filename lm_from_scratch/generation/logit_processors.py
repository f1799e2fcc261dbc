"""Rules for what may be said next, as functions that compose.

A processor takes the logits (B, V) of the next token and the tokens of every row so far, prompt
included, and returns new logits. ``generate`` applies a list of them, in order, before the sampler
bends and draws. Each function here makes one::

    generate(model, prompts, 100, processors=[no_repeat_ngram(3), forbid([end])])

Sources: Paulus, Xiong, Socher, *A Deep Reinforced Model for Abstractive Summarization*, 2017,
arXiv:1705.04304 (no trigram twice).
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.limits import Count, Whole, require, shown

#: Changes the logits (B, V) of the next token, given the tokens of every row so far.
LogitProcessor = Callable[[Tensor, Sequence[Sequence[int]]], Tensor]


def sequence(name: str, given: Any) -> list[Any]:
    """What was ``given``, as a list. Raises ``ValueError`` where it is no collection."""
    if not isinstance(given, Collection) or isinstance(given, str):
        raise ValueError(f"{name}={given!r} must be a list, as {[given]!r} is")
    return list(given)


def processed(
    processors: Sequence[LogitProcessor], logits: Tensor, rows: Sequence[Sequence[int]]
) -> Tensor:
    """The ``logits`` (B, V) after ``rows``, through all ``processors`` in their order. Raises
    ``ValueError`` for one that gives anything else than such logits."""
    for process in processors:
        if not callable(process):
            raise ValueError(f"{shown(process)} is no processor: it must be a function")
        given = logits.shape
        logits = process(logits, [list(row) for row in rows])  # what it does to them is its own
        if not isinstance(logits, Tensor):
            raise ValueError(
                f"a processor gave {shown(logits)}: it must give logits {tuple(given)}"
            )
        if logits.shape != given or not logits.is_floating_point():
            raise ValueError(
                f"a processor gave {tuple(logits.shape)} in {logits.dtype}: it must give logits "
                f"{tuple(given)}"
            )
    return logits


def forbid(tokens: Collection[int]) -> LogitProcessor:
    """These tokens are never said."""
    return add_bias(dict.fromkeys(sequence("tokens", tokens), -math.inf))


def add_bias(bias: Mapping[int, float]) -> LogitProcessor:
    """Add a number to the logits of some tokens: positive makes them likelier."""
    ids = list(bias)
    if any(token < 0 for token in ids):
        raise ValueError(f"token id {min(ids)} must not be negative")

    def process(logits: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        if ids and max(ids) >= logits.shape[-1]:
            raise ValueError(f"token id {max(ids)} is not below vocab_size={logits.shape[-1]}")
        added = torch.zeros_like(logits)
        added[:, ids] = torch.tensor(list(bias.values())).to(logits)
        return logits + added

    return process


def min_length(n: int, stop_tokens: Collection[int]) -> LogitProcessor:
    """No stop token while a row, prompt included, has fewer than ``n`` tokens."""
    require(Whole, n=n)
    never = forbid(stop_tokens)

    def process(logits: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        short = torch.tensor([len(row) < n for row in rows], device=logits.device)[:, None]
        return torch.where(short, never(logits, rows), logits)

    return process


def no_repeat_ngram(n: int) -> LogitProcessor:
    """No ``n`` tokens stand in a row twice: what would complete them again is forbidden.

    Raises ``ValueError`` for ``n`` below 1.
    """
    require(Count, n=n)

    def process(logits: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        logits = logits.clone()
        for line, row in zip(logits, rows, strict=True):
            last = tuple(row[len(row) - n + 1 :])  # the n - 1 tokens that the new one would end
            if len(row) >= n:
                starts = range(len(row) - n + 1)
                line[
                    [row[i + n - 1] for i in starts if tuple(row[i : i + n - 1]) == last]
                ] = -math.inf
        return logits

    return process
