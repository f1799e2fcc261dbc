"""Your merges in a run: the tokenizer learns them from a text, and the model learns from its
tokens. Those of single characters come first; each merge has the next id."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lm_from_scratch.exercises.parts import Machine, Part

MERGES = 100


def put(machine: Machine, merge_step: Callable[..., Any]) -> None:
    embedding = machine.model.model.embed_tokens
    first, width = embedding.weight.shape
    more = torch.randn(MERGES, width, generator=torch.Generator().manual_seed(0)) * 0.02
    embedding.weight = nn.Parameter(torch.cat([embedding.weight.detach(), more.double()]))

    def spell(text: str) -> list[int]:
        words = re.findall(r"\s*\S+", text)
        counts = Counter(words)
        pieces = [machine.tokenizer.encode(word) for word in counts]
        for new in range(first, first + MERGES):
            _, pieces = merge_step(pieces, [*counts.values()], new)
        spelled = dict(zip(counts, pieces, strict=True))
        return [token for word in words for token in spelled[word]]

    machine.spell = spell


PART = Part("the merges of the tokenizer", put, loop="learn")
