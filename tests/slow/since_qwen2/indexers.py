"""The indexer: scores, choice, attention to what is chosen, and its loss."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from since_qwen2.whole_models import (
    DOUBLE,
    ROWS,
    Ideas,
    Laws,
    Rows,
    exact,
    first,
    near,
    noise,
)
from tiny_models import enlarge_, tiny_qwen2, token_ids
from torch import Tensor

from lm_from_scratch.attention import indexer as indexing
from lm_from_scratch.attention.gqa import repeat_kv
from lm_from_scratch.attention.visibility import Visibility, positions_from_mask
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.layers.norm import rms_norm
from lm_from_scratch.layers.rope import (
    RotaryEmbedding,
    apply_rope,
    apply_rope_interleaved,
)
from lm_from_scratch.models.indexed_attention import IndexedAttention, Indexer, choosing

# --------------------------------------------------------------------------------------------- laws

SIZES = dict(
    hidden_size=20,
    q_lora_rank=12,
    index_n_heads=8,
    index_head_dim=10,
    qk_rope_head_dim=4,
    index_topk=4,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},
)
PLACES = torch.arange(13)[None]
PADDED = positions_from_mask(torch.tensor([[1] * 13, [0] * 4 + [1] * 9]))


@cache
def of_indexer() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Weights, and the scores and columns of DeepSeek-V3.2's module."""
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as hf

    twin = hf.DeepseekV32Indexer(hf.DeepseekV32Config(**SIZES), 0).eval()
    enlarge_(twin)
    cos, sin = (
        torch.cat([x, x], -1)[:, 0] for x in RotaryEmbedding(4, 100.0)(PLACES, torch.float32)
    )
    caught, topk = [], torch.Tensor.topk
    torch.Tensor.topk = lambda self, *a, **k: caught.append(self) or topk(self, *a, **k)  # type: ignore
    try:
        mask = Visibility(PLACES, PLACES).mask[:, 0]
        columns = twin(*indexed_inputs(), (cos, sin), mask, None)
    finally:
        torch.Tensor.topk = topk  # type: ignore[method-assign]
    return copy.deepcopy(twin.state_dict()), caught[0], columns


def indexed_inputs() -> tuple[Tensor, Tensor]:
    return noise(2, 13, 20, seed=1), noise(2, 13, 12, seed=2)


def an_indexer(count: int = 4) -> Any:
    indexer = Indexer(20, 8, 10, count, 12)
    indexer.load_state_dict(of_indexer()[0])
    return indexer


def turn(positions: Tensor, dtype: torch.dtype = torch.float32) -> Any:
    return RotaryEmbedding(4, 100.0)(positions, dtype)


@torch.no_grad()
def scores_and_choice() -> None:
    x, latent = indexed_inputs()
    _, want, columns = of_indexer()
    seen = Visibility(PLACES, PLACES)
    visible = seen.mask[:, 0].expand_as(want)
    scores = an_indexer().scores(x, turn(PLACES), latent=latent)
    near(scores[visible], want[visible], 5e-5)
    chosen = an_indexer()(x, turn(PLACES), seen, latent=latent)
    for t in range(3, 13):
        for mine, hers in zip(chosen[:, t].tolist(), columns[:, t].tolist(), strict=True):
            assert set(mine) == set(hers)
    assert chosen[0, :3].tolist() == [
        [0, -1, -1, -1],
        *(
            [*sorted(range(t + 1), key=lambda s: -float(scores[0, t, s])), *[-1] * (3 - t)]
            for t in (1, 2)
        ),
    ]


@torch.no_grad()
def padded_choice() -> None:
    (x, latent), indexer = indexed_inputs(), an_indexer()
    chosen = indexer(x, turn(PADDED), Visibility(PADDED, PADDED), latent=latent)[1, 4:]
    at = PLACES[:, :9]
    alone = indexer(x[1:, 4:], turn(at), Visibility(at, at), latent=latent[1:, 4:])[0]
    assert torch.equal(chosen, torch.where(alone >= 0, alone + 4, -1))


@torch.no_grad()
def choice_in_pieces() -> None:
    x, latent = (part.double() for part in indexed_inputs())
    indexer, cache, start = an_indexer().double(), GrowingCache(1), 0
    want = indexer(x, turn(PLACES, DOUBLE), Visibility(PLACES, PLACES), latent=latent)
    for size in (5, 1, 4, 3):
        now = slice(start, start := start + size)
        (seen,) = cache.see(x[:, now])
        where = turn(seen.query_positions, DOUBLE)
        assert torch.equal(indexer(x[:, now], where, seen, cache[0], latent[:, now]), want[:, now])


@torch.no_grad()
def equal_scores() -> None:
    """The latest of equal scores wins, wherever keys lie; and a longer text chooses the same for
    its beginning."""
    chosen = indexing.choose(torch.zeros(1, 13, 13), Visibility(PLACES, PLACES), 3)
    assert chosen[0, 5:].tolist() == [[t, t - 1, t - 2] for t in range(5, 13)]
    moved = PLACES.flip(1)
    chosen = indexing.choose(torch.zeros(1, 13, 13), Visibility(PLACES, moved), 3)
    assert chosen[0, 12].tolist() == [0, 1, 2]
    scores = noise(2, 60, 60).relu() * (noise(2, 60, 60, seed=1) > 1)  # most are exactly 0
    long, short = torch.arange(60)[None], torch.arange(30)[None]
    want = indexing.choose(scores, Visibility(long, long), 5)[:, :30]
    some = indexing.choose(scores[:, :30, :30], Visibility(short, short), 5)
    assert torch.equal(some, want)


@torch.no_grad()
def sparse_by_hand() -> None:
    """Attention to the chosen keys, query by query, in float64; by hiding the others and by reading
    few. Empty places and hidden keys are not read."""
    q, k, v = (noise(2, h, 13, 6, seed=h, dtype=DOUBLE) for h in (6, 2, 3))
    k, v = k, v[:, :2]
    seen = Visibility(PADDED, PADDED)
    chosen = indexing.choose(noise(2, 13, 13, seed=8), seen, 4)
    chosen[0, 12] = torch.tensor([indexing.NO_KEY, 3, 5, 7])  # an empty place
    chosen[1, 12, 1] = 0  # a hidden key
    want = torch.zeros(2, 6, 13, 6, dtype=DOUBLE)
    for b in range(2):
        for t in range(4 * b, 13):
            at = [s for s in chosen[b, t].tolist() if s >= 0 and PADDED[b, s] >= 0]
            for h in range(6):
                w = (k[b, h // 3, at] @ q[b, h, t] / math.sqrt(6)).softmax(0)
                want[b, h, t] = w @ v[b, h // 3, at]
    for name in ("sparse_attention", "gathered_attention"):
        found = getattr(indexing, name)(q, k, v, seen, chosen)
        exact(found[0], want[0])
        exact(found[1, :, 4:], want[1, :, 4:])


def divergence() -> None:
    """The loss is a sum of KL by hand, and its gradient the difference of both distributions."""
    seen = Visibility(PADDED, PADDED)
    scores = noise(2, 13, 13, dtype=DOUBLE).requires_grad_()
    weights = noise(2, 3, 13, 13, seed=1, dtype=DOUBLE).exp().requires_grad_()
    visible = seen.mask[:, 0]
    loss, terms = indexing.indexer_loss(scores, weights, seen), []
    want = torch.zeros_like(scores)
    for b in range(2):
        for t in range(4 * b, 13):
            p = weights[b, :, t, visible[b, t]].sum(0)
            p, q = p / p.sum(), scores[b, t, visible[b, t]].softmax(0)
            terms.append((p * (p / q).log()).sum())
            want[b, t, visible[b, t]] = q - p
    exact(loss, sum(terms) / len(terms))
    loss.backward()
    exact(scores.grad, want / len(terms))
    assert weights.grad is None


def indexed(count: int) -> Any:
    model = tiny_qwen2()
    for block in model.model.layers:
        indexer = Indexer(48, 2, 8, count)
        enlarge_(indexer)
        block.self_attn = IndexedAttention(block.self_attn, indexer)
    return model


def apart() -> None:
    """The loss of the language model leaves the indexers alone, theirs the model."""
    model = indexed(3)
    model(torch.tensor(ROWS[:1])).sum().backward()
    assert all((p.grad is None) == (".indexer." in n) for n, p in model.named_parameters())
    x = noise(1, 13, 20).requires_grad_()
    an_indexer().scores(x, turn(PLACES), latent=noise(1, 13, 12).requires_grad_()).sum().backward()
    assert x.grad is None


@torch.no_grad()
def choosing_all_is_the_model() -> None:
    idx = token_ids(2, 12)
    near(indexed(12)(idx), tiny_qwen2()(idx), 5e-5)


@torch.no_grad()
def the_latest_are_a_window() -> None:
    """An indexer that always chooses the latest 3 keys is a sliding window."""

    def latest(x: Tensor, rotation: Any, seen: Visibility) -> Tensor:
        columns = torch.arange(12)[:, None] - torch.arange(3)
        return columns.clamp(min=indexing.NO_KEY).expand(len(x), -1, -1)

    model, idx = tiny_qwen2(), token_ids(2, 12)
    slides = tiny_qwen2(sliding_window=3, max_window_layers=0)
    with choosing(model, [latest] * 3):
        near(model(idx), slides(idx), 5e-5)


@torch.no_grad()
def nothing_later() -> None:
    """A longer text, padding and another document change nothing, in float64."""
    model, rows = indexed(3).double(), token_ids(2, 20)
    want = model(rows)
    exact(model(rows[:, :11]), want[:, :11])
    row = torch.cat([torch.zeros(1, 4, dtype=torch.long), rows[:1, :9]], dim=1)
    exact(model(row, positions=torch.tensor([[-1] * 4 + [*range(9)]]))[:, 4:], want[:1, :9])
    two = torch.cat([rows[:1, :9], rows[1:, :7]], dim=1)
    found = model(
        two,
        positions=torch.tensor([[*range(9), *range(7)]]),
        documents=torch.tensor([[0] * 9 + [1] * 7]),
    )
    exact(found, torch.cat([want[:1, :9], want[1:, :7]], dim=1))


LAWS: Laws = {
    "scores and choice": scores_and_choice,
    "padded": padded_choice,
    "pieces": choice_in_pieces,
    "equal scores": equal_scores,
    "by hand": sparse_by_hand,
    "loss": divergence,
    "apart": apart,
    "all": choosing_all_is_the_model,
    "the latest": the_latest_are_a_window,
    "nothing later": nothing_later,
}

# ----------------------------------------------------------------------------------------- mistakes


def scored(
    heads: Callable[[Tensor], Tensor] = torch.relu,
    total: Callable[[Tensor], Tensor] = lambda scores: scores,
    scale: Callable[[int, int], float] = lambda D, J: 1 / math.sqrt(D * J),
    weigh: Callable[[Tensor], Tensor] = lambda w: w,
) -> Any:
    """The scores, given what is done to the product of each head, to their sum and to weights."""

    def scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        weights = weigh(weights) * scale(q.shape[3], q.shape[1])
        return total(torch.einsum("btj,bjts->bts", weights, heads(q @ k.mT)))

    return scores


def chosen(
    order: Callable[[Tensor], Tensor] = lambda positions: positions.argsort(-1, descending=True),
    sort: Callable[[Tensor], Tensor] = lambda s: (
        s.sort(dim=-1, descending=True, stable=True).indices
    ),
    hide: bool = True,
    empty: bool = True,
) -> Any:
    """The choice, given the order of equal scores, the sort, and what hides keys."""

    def choose(scores: Tensor, visibility: Any, count: int) -> Tensor:
        seen = visibility.mask[:, 0].expand_as(scores)
        latest = order(visibility.key_positions)[:, None].expand_as(scores)
        visible = scores.masked_fill(~seen, -math.inf) if hide else scores
        best = sort(visible.gather(-1, latest))[..., :count]
        columns = latest.gather(-1, best)
        hidden = ~seen.gather(-1, columns)
        return columns.masked_fill(hidden, indexing.NO_KEY) if empty else columns

    return choose


def columns(positions: Tensor) -> Tensor:
    return torch.arange(positions.shape[1]).expand_as(positions)


def marked(more: int = 1, allowed: bool = True) -> Any:
    """The mask of the chosen columns, given how many columns more there are for empty places."""

    def restrict(visibility: Any, chosen: Tensor) -> Any:
        marks = torch.zeros(*chosen.shape[:2], visibility.key_length + more, dtype=torch.bool)
        marks.scatter_(-1, chosen % marks.shape[-1], True)
        marks = marks[:, None, :, : visibility.key_length]
        if allowed and visibility.allowed is not None:
            marks = marks & visibility.allowed
        return replace(visibility, allowed=marks)

    return restrict


def indexed_heads(
    attached: bool = False,
    norm: Callable[..., Tensor] = lambda self, k: self.k_norm(k),
    turn: Callable[..., Tensor] = lambda self, x, rotation: self._turned(x, rotation),
    latent_of: Callable[..., Tensor] = lambda x, latent: latent,
    late: bool = False,
) -> Any:
    """Queries, keys and weights of the indexer, given the norm of keys and what is turned."""

    def heads(self: Any, x: Tensor, rotation: Any, cache: Any, latent: Any = None) -> Any:
        x = x if attached else x.detach()
        latent = x if latent is None else latent if attached else latent.detach()
        q = self.wq_b(latent_of(x, latent)).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
        k = norm(self, self.wk(x))[:, None]
        k = k if late else turn(self, k, rotation)
        k, _ = cache.update(k, k[..., :0])
        if late:  # by the places of what came out of the cache, as they lie
            places = torch.arange(k.shape[2])[None]
            k = turn(self, k, RotaryEmbedding(2 * rotation[0].shape[-1], 1e4)(places, k.dtype))
        return turn(self, q, rotation), k, self.weights_proj(x)

    return heads


def turned_last(self: Any, x: Tensor, rotation: Any) -> Tensor:
    R = 2 * rotation[0].shape[-1]
    return torch.cat([x[..., :-R], apply_rope(x[..., -R:], *rotation)], dim=-1)


def interleaved(self: Any, x: Tensor, rotation: Any) -> Tensor:
    R = 2 * rotation[0].shape[-1]
    return torch.cat([apply_rope_interleaved(x[..., :R], *rotation), x[..., R:]], dim=-1)


def read_whatever_is_chosen(
    q: Tensor, k: Tensor, v: Tensor, visibility: Any, chosen: Tensor
) -> Tensor:
    at = chosen.clamp(min=0)[:, None, ..., None].expand(-1, q.shape[1], -1, -1, k.shape[3])
    k, v = (
        repeat_kv(x, q.shape[1])[:, :, None].expand(-1, -1, at.shape[2], -1, -1).gather(3, at)
        for x in (k, v)
    )
    weights = (q[..., None, :] @ k.mT / math.sqrt(q.shape[3])).softmax(-1)
    return (weights @ v)[..., 0, :]


def diverged(
    way: Callable[[Tensor, Tensor], Tensor] = lambda p, log_q: torch.xlogy(p, p) - p * log_q,
    attached: bool = False,
    every: bool = False,
    whole: bool = False,
) -> Any:
    """The loss, given its terms, and which queries and keys count."""

    def loss(scores: Tensor, weights: Tensor, visibility: Any) -> Tensor:
        hidden = ~visibility.mask[:, 0].expand_as(scores)
        p = indexing.mean_weights(weights if attached else weights.detach(), visibility)
        low = torch.finfo(scores.dtype).min
        log_q = (scores if whole else scores.masked_fill(hidden, low)).log_softmax(-1)
        terms = way(p, log_q.masked_fill(hidden, 0.0)).sum(-1)
        real = torch.ones_like(terms) if every else ~hidden.all(-1)
        return (terms * real).sum() / real.sum()

    return loss


SCORES, CHOOSE = "models.indexed_attention:index_scores", "attention.indexer:choose"
IN_MODEL, RESTRICT = "models.indexed_attention:choose", "attention.indexer:restrict"
INDEX, INDEX_LOSS = "models.indexed_attention:Indexer.heads", "attention.indexer:indexer_loss"
SAME: Rows = [
    ("the scores", SCORES, scored()),
    ("the choice", CHOOSE, chosen()),
    ("the choice in a model", IN_MODEL, chosen()),
    ("twice the scores, chosen alike", IN_MODEL, lambda s, *how: indexing.choose(2 * s, *how)),
    ("the mask", RESTRICT, marked()),
    ("queries and keys", INDEX, indexed_heads()),
    ("the loss", INDEX_LOSS, diverged()),
]
MUTANTS: Rows = [
    ("no relu", SCORES, scored(first)),
    ("relu of the sum", SCORES, scored(first, torch.relu)),
    ("weights of heads made positive", SCORES, scored(weigh=torch.abs)),
    ("weights of heads by softmax", SCORES, scored(weigh=lambda w: w.softmax(-1))),
    ("not divided by the root of J", SCORES, scored(scale=lambda D, J: D**-0.5)),
    ("the earliest of equal scores", CHOOSE, chosen(columns)),
    ("topk, which leaves ties open", CHOOSE, chosen(sort=lambda s: s.topk(s.shape[-1]).indices)),
    (
        "the last column of equal scores, not the last position",
        CHOOSE,
        chosen(lambda p: columns(p).flip(1)),
    ),
    ("the lowest scores", IN_MODEL, chosen(sort=lambda s: s.sort(dim=-1, stable=True).indices)),
    ("chosen before keys are hidden", IN_MODEL, chosen(hide=False)),
    ("hidden keys fill empty places", CHOOSE, chosen(empty=False)),
    ("an empty place is the last key", RESTRICT, marked(more=0)),
    ("the choice is not used", "models.indexed_attention:restrict", first),
    (
        "queries of the token, not of its latent",
        INDEX,
        indexed_heads(latent_of=lambda x, latent: x[..., : latent.shape[2]]),
    ),
    ("keys not normed", INDEX, indexed_heads(norm=lambda self, k: k)),
    (
        "keys normed without their mean",
        INDEX,
        indexed_heads(norm=lambda self, k: rms_norm(k, self.k_norm.weight) + self.k_norm.bias),
    ),
    ("the last features turn", INDEX, indexed_heads(turn=turned_last)),
    ("pairs 2i and 2i + 1", INDEX, indexed_heads(turn=interleaved)),
    ("queries and keys not turned", INDEX, indexed_heads(turn=lambda self, x, rotation: x)),
    ("keys turned by their columns", INDEX, indexed_heads(late=True)),
    ("the indexer's loss reaches the model", INDEX, indexed_heads(attached=True)),
    (
        "a chosen key that is hidden is read",
        "attention.indexer:gathered_attention",
        read_whatever_is_chosen,
    ),
    (
        "the divergence the other way",
        INDEX_LOSS,
        diverged(lambda p, log_q: log_q.exp() * (log_q - p.clamp(min=1e-9).log()) * (p > 0)),
    ),
    ("cross-entropy alone", INDEX_LOSS, diverged(lambda p, log_q: -p * log_q)),
    ("padding counts", INDEX_LOSS, diverged(every=True)),
    ("hidden keys count", INDEX_LOSS, diverged(whole=True)),
    ("the loss reaches the weights", INDEX_LOSS, diverged(attached=True)),
]


IDEAS: Ideas = {"indexer": (LAWS, SAME, MUTANTS)}
