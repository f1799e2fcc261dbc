"""Caches of every kind that hold something, and three ways to go on from them: each row alone, in
ours, and in a cache of transformers."""

from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import hf_twin, tiny_gpt2, tiny_qwen2, token_ids
from torch import nn

from lm_from_scratch.cache.buffer import BufferCache
from lm_from_scratch.cache.codec import Quantized
from lm_from_scratch.cache.growing import GrowingCache, GrowingTrack
from lm_from_scratch.cache.paged import BlockPool, PagedCache
from lm_from_scratch.cache.slots import SlidingCache, StaticCache, StaticTrack, cache_for
from lm_from_scratch.text.batch import padded_batch

TOLERANCE = dict(atol=5e-5, rtol=0)


MODELS = {
    "gpt2": tiny_gpt2(),
    "qwen2": tiny_qwen2(),
    "qwen2, W = 4": tiny_qwen2(sliding_window=4, max_window_layers=0),
    "qwen2, W = 4 in two layers": tiny_qwen2(sliding_window=4, max_window_layers=1),
}


@cache
def twin_of(name: str) -> nn.Module:
    """The same model in transformers."""
    return hf_twin(MODELS[name])


def paged(model) -> PagedCache:
    c = model.config
    heads = getattr(c, "n_kv_head", c.n_head)
    return PagedCache(BlockPool(c.n_layer, heads, c.head_dim, n_blocks=30, block_size=4))


KINDS = {
    "growing": lambda model: GrowingCache(3, reserve=7),
    "static": lambda model: StaticCache(3, capacity=30),
    "by window": lambda model: cache_for(model.config.windows, slack=2),
    "sliding": lambda model: SlidingCache(3, window=30),  # more than any of the models needs
    "layered": lambda model: BufferCache([StaticTrack(30), GrowingTrack()], [1, 0, 1]),
    "paged": paged,
    "growing, 8 bits": lambda model: GrowingCache(3, Quantized(8)),
    "static, 4 bits": lambda model: StaticCache(3, 30, Quantized(4, group=8)),
}


CASES = [
    (name, kind)
    for name, model in MODELS.items()
    for kind in KINDS
    if not (kind == "sliding" and None in model.config.windows)
    and not (kind == "static, 4 bits" and name == "gpt2")  # 7 features a head
]


EXACT_CASES = [(name, kind) for name, kind in CASES if "bits" not in kind]


HISTORIES = ["dense", "padded", "holes"]


def in_turn(cases: list[tuple[str, str]]) -> list[Any]:
    """Every case with every history. In `make test` a case has one, and a kind another one in each
    model."""
    models, kinds = [*MODELS], [*KINDS]
    return [
        pytest.param(name, kind, history, marks=[pytest.mark.slow] * (turn % 3 > 0))
        for name, kind in cases
        for turn, history in enumerate(HISTORIES, models.index(name) + kinds.index(kind))
    ]


def positions_after(rows: list[list[int]], T: int) -> torch.Tensor:
    return torch.tensor([[len(row)] for row in rows]) + torch.arange(T)


def filled(name: str, kind: str, history: str):
    """A cache of that kind, and the tokens that each of its rows holds."""
    model = MODELS[name]
    cache = KINDS[kind](model)
    if history == "dense":
        idx = token_ids(2, 9)
        for start, end in ((0, 5), (5, 6), (6, 9)):
            model(idx[:, start:end], cache=cache)
        return cache, idx.tolist()
    rows = [token_ids(n, seed=n).tolist() for n in (9, 2, 5)]
    batch = padded_batch(rows, pad_token_id=0, side="left" if history == "padded" else "right")
    for columns in torch.arange(batch.idx.shape[1]).split(4):
        model(batch.idx[:, columns], positions=batch.positions[:, columns], cache=cache)
    if history == "holes":
        lengths = torch.tensor([8, 1, 5])
        cache.crop(lengths)
        cache.reorder(torch.tensor([1, 0, 2]))
        rows = [rows[i][: lengths[i]] for i in (1, 0, 2)]
    new = token_ids(3, 2, seed=7)
    for t in range(2):
        place = positions_after(rows, 1)
        model(new[:, t : t + 1], positions=place, cache=cache)
        rows = [[*row, token] for row, token in zip(rows, new[:, t].tolist(), strict=True)]
    return cache, rows


def go_on_alone(model, rows, new) -> torch.Tensor:
    """The logits (B, T, V) of new tokens, each row in one pass of its own."""
    whole = [torch.tensor([[*row, *more]]) for row, more in zip(rows, new.tolist(), strict=True)]
    return torch.cat([model(idx)[:, -new.shape[1] :] for idx in whole])


def go_on_in_theirs(twin, theirs, rows, new) -> torch.Tensor:
    """The same through a cache of transformers, whose rows stand on the right, in two pieces."""
    longest, logits = max(map(len, rows)), []
    for start, end in ((0, 1), (1, new.shape[1])):
        mask = torch.ones(len(rows), longest + end, dtype=torch.long)
        for i, row in enumerate(rows):
            mask[i, : longest - len(row)] = 0
        logits.append(
            twin(
                new[:, start:end],
                attention_mask=mask,
                position_ids=positions_after(rows, end)[:, start:],
                past_key_values=theirs,
            ).logits
        )
    return torch.cat(logits, dim=1)


def go_on_in_ours(model, cache, rows, new) -> torch.Tensor:
    logits = []
    for start, end in ((0, 1), (1, new.shape[1])):
        place = positions_after(rows, end)[:, start:]
        logits.append(model(new[:, start:end], positions=place, cache=cache))
    return torch.cat(logits, dim=1)
