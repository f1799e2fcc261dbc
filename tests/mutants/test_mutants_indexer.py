"""The indexer: scores, choice, attention to what is chosen, and its loss."""

import copy
import math
from functools import cache
from typing import Any

import pytest
import torch
from model_laws import DOUBLE, ROWS, exact, near, noise
from mutation import Mutant, killer, mutants
from tiny_models import enlarge_, tiny_qwen2, token_ids
from torch import Tensor

from lm_from_scratch.attention import indexer as indexing
from lm_from_scratch.attention.visibility import Visibility, positions_from_mask
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.layers.rope import RotaryEmbedding
from lm_from_scratch.models.indexed_attention import IndexedAttention, Indexer, choosing

SIZES = dict(
    hidden_size=20, q_lora_rank=12, index_n_heads=8, index_head_dim=10, qk_rope_head_dim=4,
    index_topk=4, rope_parameters={"rope_type": "default", "rope_theta": 100.0},
)  # fmt: skip
PLACES = torch.arange(13)[None]
PADDED = positions_from_mask(torch.tensor([[1] * 13, [0] * 4 + [1] * 9]))
X, LATENT = noise(2, 13, 20, seed=1), noise(2, 13, 12, seed=2)


def rotation(positions: Tensor, dtype: torch.dtype = torch.float32) -> Any:
    return RotaryEmbedding(4, 100.0)(positions, dtype)


@cache
def of_indexer() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Weights, and the scores and columns of DeepSeek-V3.2's module."""
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as hf

    twin = hf.DeepseekV32Indexer(hf.DeepseekV32Config(**SIZES), 0).eval()
    enlarge_(twin)
    angles = tuple(torch.cat([x, x], -1)[:, 0] for x in rotation(PLACES))
    scores, topk = [], torch.Tensor.topk
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", lambda x, *a, **k: scores.append(x) or topk(x, *a, **k))
        columns = twin(X, LATENT, angles, Visibility(PLACES, PLACES).mask[:, 0], None)
    return copy.deepcopy(twin.state_dict()), scores[0], columns


def new_indexer() -> Indexer:
    indexer = Indexer(20, 8, 10, 4, 12)
    indexer.load_state_dict(of_indexer()[0])
    return indexer


@torch.no_grad()
def scores_and_choice() -> None:
    _, expected, columns = of_indexer()
    visibility = Visibility(PLACES, PLACES)
    visible = visibility.mask[:, 0].expand_as(expected)
    scores = new_indexer().scores(X, rotation(PLACES), latent=LATENT)
    near(scores[visible], expected[visible], 5e-5)
    chosen = new_indexer()(X, rotation(PLACES), visibility, latent=LATENT)
    assert torch.equal(chosen[:, 3:].sort().values, columns[:, 3:].sort().values)
    for t in range(3):
        best = sorted(range(t + 1), key=lambda s: -float(scores[0, t, s]))
        assert chosen[0, t].tolist() == [*best, *[-1] * (3 - t)]


@torch.no_grad()
def padded_choice() -> None:
    indexer, at = new_indexer(), PLACES[:, :9]
    chosen = indexer(X, rotation(PADDED), Visibility(PADDED, PADDED), latent=LATENT)[1, 4:]
    alone = indexer(X[1:, 4:], rotation(at), Visibility(at, at), latent=LATENT[1:, 4:])[0]
    assert torch.equal(chosen, torch.where(alone >= 0, alone + 4, -1))


@torch.no_grad()
def choice_in_pieces() -> None:
    x, latent, indexer = X.double(), LATENT.double(), new_indexer().double()
    at, cache, start = rotation(PLACES, DOUBLE), GrowingCache(1), 0
    expected = indexer(x, at, Visibility(PLACES, PLACES), latent=latent)
    for size in (5, 1, 4, 3):
        now = slice(start, start := start + size)
        (visibility,) = cache.see(x[:, now])
        at = rotation(visibility.query_positions, DOUBLE)
        chosen = indexer(x[:, now], at, visibility, cache[0], latent[:, now])
        assert torch.equal(chosen, expected[:, now])


@torch.no_grad()
def equal_scores() -> None:
    """The latest of equal scores wins, wherever keys lie; and a longer text chooses the same for
    its beginning."""
    chosen = indexing.choose(torch.zeros(1, 13, 13), Visibility(PLACES, PLACES), 3)
    assert chosen[0, 5:].tolist() == [[t, t - 1, t - 2] for t in range(5, 13)]
    chosen = indexing.choose(torch.zeros(1, 13, 13), Visibility(PLACES, PLACES.flip(1)), 3)
    assert chosen[0, 12].tolist() == [0, 1, 2]
    scores = noise(2, 60, 60).relu() * (noise(2, 60, 60, seed=1) > 1)  # most are exactly 0
    long, short = torch.arange(60)[None], torch.arange(30)[None]
    expected = indexing.choose(scores, Visibility(long, long), 5)[:, :30]
    chosen = indexing.choose(scores[:, :30, :30], Visibility(short, short), 5)
    assert torch.equal(chosen, expected)


@torch.no_grad()
def sparse_by_hand() -> None:
    """Attention to the chosen keys, query by query, in float64; by hiding the others and by reading
    few. Empty places and hidden keys are not read."""
    q, k, v = (noise(2, h, 13, 6, seed=h, dtype=DOUBLE) for h in (6, 2, 3))
    v, visibility = v[:, :2], Visibility(PADDED, PADDED)
    chosen = indexing.choose(noise(2, 13, 13, seed=8), visibility, 4)
    chosen[0, 12] = torch.tensor([indexing.NO_KEY, 3, 5, 7])  # an empty place
    chosen[1, 12, 1] = 0  # a hidden key
    expected = torch.zeros(2, 6, 13, 6, dtype=DOUBLE)
    for b in range(2):
        for t in range(4 * b, 13):
            at = [s for s in chosen[b, t].tolist() if s >= 0 and PADDED[b, s] >= 0]
            for h in range(6):
                weights = (k[b, h // 3, at] @ q[b, h, t] / math.sqrt(6)).softmax(0)
                expected[b, h, t] = weights @ v[b, h // 3, at]
    for attention in (indexing.sparse_attention, indexing.gathered_attention):
        y = attention(q, k, v, visibility, chosen)
        exact((y[0], y[1, :, 4:]), (expected[0], expected[1, :, 4:]))


def divergence() -> None:
    """The loss is a sum of KL by hand, and its gradient the difference of both distributions."""
    visibility = Visibility(PADDED, PADDED)
    scores = noise(2, 13, 13, dtype=DOUBLE).requires_grad_()
    weights = noise(2, 3, 13, 13, seed=1, dtype=DOUBLE).exp().requires_grad_()
    visible, grad, terms = visibility.mask[:, 0], torch.zeros_like(scores), []
    for b in range(2):
        for t in range(4 * b, 13):
            p = weights[b, :, t, visible[b, t]].sum(0)
            p, q = p / p.sum(), scores[b, t, visible[b, t]].softmax(0)
            terms.append((p * (p / q).log()).sum())
            grad[b, t, visible[b, t]] = q - p
    loss = indexing.indexer_loss(scores, weights, visibility)
    exact(loss, sum(terms) / len(terms))
    loss.backward()
    exact(scores.grad, grad / len(terms))
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
    latent = noise(1, 13, 12).requires_grad_()
    new_indexer().scores(x, rotation(PLACES), latent=latent).sum().backward()
    assert x.grad is None and latent.grad is None


@torch.no_grad()
def choosing_all_is_the_model() -> None:
    idx = token_ids(2, 12)
    near(indexed(12)(idx), tiny_qwen2()(idx), 5e-5)


@torch.no_grad()
def the_latest_are_a_window() -> None:
    """An indexer that always chooses the latest 3 keys is a sliding window."""

    def latest(x: Tensor, rotation: Any, visibility: Visibility) -> Tensor:
        columns = torch.arange(12)[:, None] - torch.arange(3)
        return columns.clamp(min=indexing.NO_KEY).expand(len(x), -1, -1)

    model, idx = tiny_qwen2(), token_ids(2, 12)
    sliding = tiny_qwen2(sliding_window=3, max_window_layers=0)
    with choosing(model, [latest] * 3):
        near(model(idx), sliding(idx), 5e-5)


@torch.no_grad()
def nothing_later() -> None:
    """A longer text, padding and another document change nothing, in float64."""
    model, rows = indexed(3).double(), token_ids(2, 20)
    logits = model(rows)
    exact(model(rows[:, :11]), logits[:, :11])
    row = torch.cat([torch.zeros(1, 4, dtype=torch.long), rows[:1, :9]], dim=1)
    exact(model(row, positions=torch.tensor([[-1] * 4 + [*range(9)]]))[:, 4:], logits[:1, :9])
    packed = model(
        torch.cat([rows[:1, :9], rows[1:, :7]], dim=1),
        positions=torch.tensor([[*range(9), *range(7)]]),
        documents=torch.tensor([[0] * 9 + [1] * 7]),
    )
    exact(packed, torch.cat([logits[:1, :9], logits[1:, :7]], dim=1))


LAWS = {
    law.__name__: law
    for law in (
        scores_and_choice, padded_choice, choice_in_pieces, equal_scores, sparse_by_hand,
        divergence, apart, choosing_all_is_the_model, the_latest_are_a_window, nothing_later,
    )
}  # fmt: skip

LATEST = "visibility.key_positions.argsort(dim=-1, descending=True)"
KL = "torch.xlogy(p, p) - p * log_q.masked_fill(hidden, 0.0)"
INTERLEAVED = "from lm_from_scratch.layers.rope import apply_rope_interleaved as apply_rope"
TURNED = "apply_rope(x[..., :turning], *rotation), x[..., turning:]"

MISTAKES = {
    "attention.indexer:index_scores": [
        ("no relu", ".relu()", ""),
        ("relu of the sum", ", products)", ", q.to(work) @ k.to(work).mT).relu()"),
        ("weights of heads made positive", "weights.to(work)", "weights.to(work).abs()"),
        ("weights of heads by softmax", "weights.to(work)", "weights.to(work).softmax(-1)"),
        ("not divided by the root of J", "math.sqrt(D * J)", "math.sqrt(D)"),
    ],
    "attention.indexer:choose": [
        ("the earliest of equal scores", LATEST, "visibility.key_positions.argsort(dim=-1)"),
        ("topk, which leaves ties open", "ordered.sort(dim=-1, descending=True, stable=True)",
         "ordered.topk(ordered.shape[-1])"),
        ("the last column of equal scores, not the last position", LATEST,
         "torch.arange(visibility.key_length).flip(0).expand_as(visibility.key_positions)"),
        ("the lowest scores", "ordered.sort(", "(-ordered).sort("),
        ("chosen before keys are hidden", "scores.masked_fill(~seen, -math.inf)", "scores"),
        ("hidden keys fill empty places",
         "chosen.masked_fill(~seen.gather(-1, chosen), NO_KEY)", "chosen"),
    ],
    "attention.indexer:restrict": [
        ("an empty place is the last key", "% marks.shape[-1]", "% (marks.shape[-1] - 1)"),
    ],
    "models.indexed_attention:IndexedAttention.forward": [
        ("the choice is not used", "restrict(visibility, chosen)", "visibility"),
    ],
    "models.indexed_attention:Indexer.heads": [
        ("queries of the token, not of its latent",
         "self.wq_b(latent)", "self.wq_b(x[..., : latent.shape[2]])"),
        ("keys not normed", "self.k_norm(self.wk(x))", "self.wk(x)"),
        ("keys normed without their mean", "self.k_norm(self.wk(x))",
         "(nn.functional.rms_norm(self.wk(x), (self.head_dim,), self.k_norm.weight, 1e-6)"
         " + self.k_norm.bias)"),
        ("keys turned by their columns",  # which are the positions of the first row
         "self._turned(k, rotation)", "self._turned(k, tuple(angle[:1] for angle in rotation))"),
        ("the indexer's loss reaches the model", ".detach()", "", 2),
    ],
    "models.indexed_attention:Indexer._turned": [
        ("the last features turn",
         TURNED, "x[..., :-turning], apply_rope(x[..., -turning:], *rotation)"),
        ("pairs 2i and 2i + 1", "return torch.cat", f"{INTERLEAVED}\n        return torch.cat"),
        ("queries and keys not turned", TURNED, "x"),
    ],
    "attention.indexer:gathered_attention": [
        ("a chosen key that is hidden is read",
         "visibility.mask[:, 0].expand(B, T, -1).gather(-1, columns) & ", ""),
    ],
    "attention.indexer:indexer_loss": [
        ("the divergence the other way",
         KL, "log_q.exp() * (log_q - p.clamp(min=1e-9).log()) * (p > 0)"),
        ("cross-entropy alone", "torch.xlogy(p, p) - p", "-p"),
        ("padding counts", "~hidden.all(-1)", "torch.ones_like(divergence)"),
        ("hidden keys count",
         "scores.masked_fill(hidden, torch.finfo(scores.dtype).min)", "scores"),
        ("the loss reaches the weights", "weights.detach()", "weights"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(MISTAKES))
def test_a_law_finds_the_mistake(mutant: Mutant) -> None:
    assert killer(mutant, LAWS)
