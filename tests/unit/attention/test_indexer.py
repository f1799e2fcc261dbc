"""Sparse attention: the score, a choice that ties cannot move, what is read, what is learned."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lm_from_scratch.attention.attention import attention_weights, formula_attention
from lm_from_scratch.attention.indexer import (
    choose,
    gathered_attention,
    index_scores,
    indexer_loss,
    mean_weights,
    recalled,
    restrict,
    sparse_attention,
)
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.attention.visibility import Visibility


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tied(*shape: int, seed: int = 0) -> torch.Tensor:
    """Scores of which most are equal, as those of an indexer with few heads."""
    return drawn(*shape, seed=seed).mul(1.5).round().clamp(min=0.0)


def causal(T: int, S: int | None = None) -> Visibility:
    places = torch.arange(S or T)[None]
    return Visibility(places[:, -T:], places, dense=True)


PADDED = torch.tensor([[-1, -1, -1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1, 1]])
SEEN = {
    "causal": causal(9),
    "after a cache": causal(3, 9),
    "one query": causal(1, 9),
    "window": causal(9).within(4),
    "left padding": Visibility(PADDED, PADDED),
    "documents": Visibility(PACKED, PACKED, DOCUMENTS, DOCUMENTS),
    "something else hidden": replace(
        causal(9), allowed=torch.arange(9).remainder(3).ne(1).expand(1, 1, 9, 9)
    ),
}
each_visibility = pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)


# ----------------------------------------------------------------------------------- the score


def test_the_score_is_a_weighted_sum_of_what_is_left_of_each_product() -> None:
    q, k, w = drawn(2, 3, 4, 5), drawn(2, 1, 6, 5, seed=1), drawn(2, 4, 3, seed=2)
    scores = index_scores(q, k, w)
    assert scores.shape == (2, 4, 6)
    for b, t, s in ((0, 0, 0), (1, 3, 5), (0, 2, 4)):
        want = sum(
            w[b, t, j] * max(0.0, float(q[b, j, t] @ k[b, 0, s])) / math.sqrt(5 * 3)
            for j in range(3)
        )
        torch.testing.assert_close(scores[b, t, s], torch.as_tensor(want))
    assert (index_scores(q, k, w) < 0).any()  # a weight may be negative


def test_scores_of_half_precision_are_float32() -> None:
    q, k, w = (drawn(*shape).bfloat16() for shape in ((1, 2, 3, 8), (1, 1, 4, 8), (1, 3, 2)))
    assert index_scores(q, k, w).dtype == torch.float32


def test_a_score_needs_a_weight_for_each_query_and_head() -> None:
    q, k = drawn(2, 3, 4, 5), drawn(2, 1, 6, 5)
    for weights in (drawn(2, 1, 3), drawn(2, 3, 4), drawn(3)):
        with pytest.raises(ValueError, match=r"weights .*: they must be \(B, J, T, D\)"):
            index_scores(q, k, weights)
    with pytest.raises(ValueError, match="they must be"):
        index_scores(q, k.expand(2, 3, 6, 5), drawn(2, 4, 3))


# ---------------------------------------------------------------------------------- the choice


def test_the_latest_of_equal_scores_wins() -> None:
    chosen = choose(torch.zeros(1, 6, 6), causal(6), 3)
    assert chosen[0].tolist() == [
        [0, -1, -1], [1, 0, -1], [2, 1, 0], [3, 2, 1], [4, 3, 2], [5, 4, 3],
    ]  # fmt: skip


def test_zero_and_minus_zero_are_equal() -> None:
    scores = torch.tensor([[[0.0, -0.0, 0.0, -0.0]]])
    assert choose(scores, causal(1, 4), 2).tolist() == [[[3, 2]]]


@pytest.mark.parametrize("count", [1, 3, 9, 50])
@each_visibility
def test_chosen_keys_are_the_best_that_are_visible(seen: Visibility, count: int) -> None:
    T, S = seen.query_length, seen.key_length
    scores = tied(2, T, S)
    chosen = choose(scores, seen, count)
    assert chosen.shape == (2, T, min(count, S))
    for b in range(2):
        positions = seen.key_positions.expand(2, -1)[b]
        for t in range(T):
            visible = seen.mask.expand(2, 1, T, S)[b, 0, t].nonzero().flatten().tolist()
            best = sorted(visible, key=lambda s: (-scores[b, t, s], -positions[s]))[:count]
            wanted = best + [-1] * (chosen.shape[-1] - len(best))
            assert chosen[b, t].tolist() == wanted


@pytest.mark.parametrize("seed", range(5))
def test_where_a_key_lies_does_not_matter(seed: int) -> None:
    """Columns in another order, as in a ring buffer: the same positions are chosen, ties or not."""
    scores, seen = tied(2, 4, 11, seed=seed), causal(4, 11)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(seed))
    moved = Visibility(seen.query_positions, seen.key_positions[:, order])
    there = choose(scores[..., order], moved, 4)
    back = torch.where(there >= 0, order[there], -1)
    assert torch.equal(back, choose(scores, seen, 4))


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_a_longer_text_chooses_the_same_for_its_beginning(heads: int) -> None:
    """With one head half of all scores are 0. The rule for ties keeps the law of causality."""
    q, k, w = drawn(1, heads, 40, 6), drawn(1, 1, 40, 6, seed=1), drawn(1, 40, heads, seed=2)
    long = choose(index_scores(q, k, w), causal(40), 5)
    short = choose(index_scores(q[:, :, :30], k[:, :, :30], w[:, :30]), causal(30), 5)
    assert torch.equal(long[:, :30], short)


def test_a_choice_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="count=0 must be an integer, at least 1"):
        choose(torch.zeros(1, 3, 3), causal(3), 0)
    with pytest.raises(ValueError, match=r"scores are \(1, 3, 4\).*3 queries and 3 keys"):
        choose(torch.zeros(1, 3, 4), causal(3), 2)


# ------------------------------------------------------------------------------ what is read


def qkv(seen: Visibility, H: int = 6, Hkv: int = 2, dtype: torch.dtype = torch.float64):
    T, S = seen.query_length, seen.key_length
    return [
        drawn(2, heads, length, 8, seed=seed, dtype=dtype)
        for seed, (heads, length) in enumerate([(H, T), (Hkv, S), (Hkv, S)])
    ]


@each_visibility
def test_as_many_keys_as_there_are_is_full_attention(seen: Visibility) -> None:
    q, k, v = qkv(seen)
    chosen = choose(tied(2, seen.query_length, 9), seen, 9)
    want = formula_attention(q, k, v, seen)
    torch.testing.assert_close(sparse_attention(q, k, v, seen, chosen), want)
    torch.testing.assert_close(gathered_attention(q, k, v, seen, chosen), want)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (5, 1)])
@each_visibility
def test_hiding_keys_and_reading_few_agree(
    seen: Visibility, heads: tuple[int, int], count: int
) -> None:
    """In value and gradient; and a query of padding gets zeros."""
    results = []
    chosen = choose(tied(2, seen.query_length, 9, seed=count), seen, count)
    for attend in (sparse_attention, gathered_attention):
        q, k, v = (x.requires_grad_() for x in qkv(seen, *heads))
        y = attend(q, k, v, seen, chosen)
        (y * drawn(*y.shape, seed=7)).sum().backward()
        results.append([y, q.grad, k.grad, v.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    blind = (chosen < 0).all(-1)
    assert (results[1][0].transpose(1, 2)[blind] == 0).all()


def test_half_precision_comes_back() -> None:
    q, k, v = qkv(causal(9), dtype=torch.float32)
    chosen = choose(tied(2, 9, 9), causal(9), 3)
    want = sparse_attention(q, k, v, causal(9), chosen)
    got = gathered_attention(*(x.bfloat16() for x in (q, k, v)), causal(9), chosen)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, atol=0.05, rtol=0.05)


@each_visibility
def test_a_chosen_key_that_is_hidden_is_not_read(seen: Visibility) -> None:
    q, k, v = qkv(seen)
    every = torch.arange(9).expand(2, seen.query_length, 9)
    want = sdpa_attention(q, k, v, seen)
    torch.testing.assert_close(sparse_attention(q, k, v, seen, every), want)
    torch.testing.assert_close(gathered_attention(q, k, v, seen, every), want)


def test_an_empty_place_is_no_key() -> None:
    """Also where the query sees more: -1 is neither the first column nor the last."""
    q, k, v = qkv(causal(9))
    some = torch.tensor([3, 1]).expand(2, 9, 2)
    padded = torch.tensor([-1, 3, -1, 1]).expand(2, 9, 4)
    for attend in (sparse_attention, gathered_attention):
        want = attend(q, k, v, causal(9), some)
        torch.testing.assert_close(attend(q, k, v, causal(9), padded), want)
        assert (want[:, :, 0] == 0).all()  # the first query sees neither


@torch.no_grad()
def test_what_comes_later_changes_nothing() -> None:
    q, k, v = qkv(causal(9))
    w, results = drawn(2, 9, 6), []
    for change in (0.0, 5.0):
        later = torch.cat([torch.zeros(6), torch.full((3,), change)])[:, None]
        q2, k2, v2 = q + later, k + later, v + later
        chosen = choose(index_scores(q2, k2[:, :1], w), causal(9), 3)
        results.append((chosen[:, :6], sparse_attention(q2, k2, v2, causal(9), chosen)[:, :, :6]))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


# --------------------------------------------------------------------------- what is learned


@each_visibility
def test_the_loss_is_the_divergence_from_the_mean_of_all_heads(seen: Visibility) -> None:
    q, k, _ = qkv(seen)
    T, weights = seen.query_length, attention_weights(q, k, seen)
    scores = drawn(2, T, 9, seed=5)
    hidden = ~seen.mask[:, 0].expand(2, T, 9)
    p = weights.mean(1)
    log_q = scores.masked_fill(hidden, -math.inf).log_softmax(-1)
    rows = F.kl_div(log_q, p, reduction="none").masked_fill(hidden, 0.0).sum(-1)
    want = rows[~hidden.all(-1)].mean()
    torch.testing.assert_close(indexer_loss(scores, weights, seen), want)
    assert want > 0.1
    perfect = p.clamp(min=1e-300).log() + 3.0
    assert abs(float(indexer_loss(perfect, weights, seen))) < 1e-12


def test_the_gradient_is_the_difference_of_the_two() -> None:
    q, k, _ = qkv(causal(9))
    weights = attention_weights(q, k, causal(9)).requires_grad_()
    scores = drawn(2, 9, 9, seed=5).requires_grad_()
    indexer_loss(scores, weights, causal(9)).backward()
    log_q = scores.detach().masked_fill(~causal(9).mask[0], -math.inf)
    want = (log_q.softmax(-1) - weights.detach().mean(1)) / 18
    torch.testing.assert_close(scores.grad, want)
    assert weights.grad is None


def test_the_second_stage_counts_chosen_keys_alone() -> None:
    q, k, _ = qkv(causal(9))
    weights, scores = attention_weights(q, k, causal(9)), drawn(2, 9, 9, seed=5)
    few = restrict(causal(9), choose(scores, causal(9), 3))
    kept = few.mask[:, 0]
    p = (weights.mean(1) * kept) / (weights.mean(1) * kept).sum(-1, keepdim=True)
    log_q = scores.masked_fill(~kept, -math.inf).log_softmax(-1)
    want = (torch.xlogy(p, p) - p * log_q.masked_fill(~kept, 0.0)).sum(-1).mean()
    torch.testing.assert_close(indexer_loss(scores, weights, few), want)
    assert not torch.allclose(want, indexer_loss(scores, weights, causal(9)))


@each_visibility
def test_no_choice_recalls_more_than_that_of_the_weights_themselves(seen: Visibility) -> None:
    q, k, _ = qkv(seen)
    T, weights = seen.query_length, attention_weights(q, k, seen)
    mass, real = mean_weights(weights, seen), seen.mask.any(-1)[:, 0].expand(2, T)
    torch.testing.assert_close(mass.sum(-1), real.double())
    everything = recalled(weights, seen, choose(mass, seen, 9))
    torch.testing.assert_close(everything, real.double())
    best = recalled(weights, seen, choose(mass, seen, 3))
    for seed in range(10):
        other = recalled(weights, seen, choose(drawn(2, T, 9, seed=seed), seen, 3))
        assert (other <= best + 1e-12).all()
