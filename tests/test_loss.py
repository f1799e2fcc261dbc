"""loss.py: targets that count, and a loss that is never NaN."""

import math

import pytest
import torch
from conftest import tiny_gpt2, token_ids

from lm_from_scratch.data import padded_batch
from lm_from_scratch.loss import IGNORE, causal_lm_loss, next_token_targets


def test_targets_are_the_next_tokens() -> None:
    assert next_token_targets(torch.tensor([[5, 6, 7]])).tolist() == [[6, 7, IGNORE]]


def test_G7_padding_is_never_a_target() -> None:
    rows = [[5, 6, 7], [8]]
    for side, want in (
        ("left", [[6, 7, IGNORE], [IGNORE, IGNORE, IGNORE]]),
        ("right", [[6, 7, IGNORE], [IGNORE, IGNORE, IGNORE]]),
    ):
        assert padded_batch(rows, 0, side).targets.tolist() == want
    inside = next_token_targets(torch.tensor([[5, 0, 6, 7]]), torch.tensor([[0, -1, 1, 2]]))
    assert inside.tolist() == [[IGNORE, IGNORE, 7, IGNORE]]


def test_G7_the_loss_of_a_padded_batch_is_the_loss_of_its_real_tokens() -> None:
    model = tiny_gpt2()
    rows = [token_ids(9).tolist(), token_ids(4, seed=2).tolist()]
    batch = padded_batch(rows, 0, "right")
    got = causal_lm_loss(model(batch.idx, batch.positions), batch.targets)
    total, n = 0.0, 0
    for row in rows:
        logits = model(torch.tensor([row]))[0, :-1].double().log_softmax(-1)
        total -= sum(logits[t, token].item() for t, token in enumerate(row[1:]))
        n += len(row) - 1
    assert abs(got.item() - total / n) < 1e-5


def test_no_target_crosses_from_one_document_to_the_next() -> None:
    idx = torch.tensor([[5, 6, 7, 8, 9]])
    targets = next_token_targets(idx, torch.tensor([[0, 1, 0, 1, 2]]))
    assert targets.tolist() == [[6, IGNORE, 8, 9, IGNORE]]


def test_G30_no_target_at_all_gives_zero_loss_and_zero_gradient() -> None:
    model = tiny_gpt2()
    for idx, targets in (
        (token_ids(2, 1), torch.full((2, 1), IGNORE)),
        (token_ids(2, 5), torch.full((2, 5), IGNORE)),
    ):
        model.zero_grad()
        loss = causal_lm_loss(model(idx), targets)
        assert loss.item() == 0.0
        loss.backward()
        assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


def test_uniform_logits_cost_log_v() -> None:
    loss = causal_lm_loss(torch.zeros(2, 3, 97), token_ids(2, 3))
    assert abs(loss.item() - math.log(97)) < 1e-6


def test_low_precision_logits_are_summed_in_float32() -> None:
    logits = torch.randn(1, 3000, 50, generator=torch.Generator().manual_seed(0))
    targets = token_ids(1, 3000, low=0, high=50)
    exact = causal_lm_loss(logits.double(), targets).item()
    half = causal_lm_loss(logits.half(), targets)
    assert half.dtype == torch.float32
    assert abs(half.item() - exact) < 1e-3


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3, 9\), targets \(2, 4\)"):
        causal_lm_loss(torch.zeros(2, 3, 9), torch.zeros(2, 4, dtype=torch.long))
