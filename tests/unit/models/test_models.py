"""What all models share: what a token may not see, and large random weights, with which mistakes
show."""

import pytest
import torch
from model_families import FAMILIES, near, pair
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.models.randomize import randomize_

families = pytest.mark.parametrize("family", FAMILIES)


@families
@torch.no_grad()
def test_what_comes_later_and_other_rows_do_not_leak(family: str) -> None:
    model, idx = pair(family, 4).ours, token_ids(2, 9)
    logits, other = model(idx), idx.clone()
    other[1, 6:] = token_ids(3, seed=5)
    changed = model(other)
    near(changed[0], logits[0])
    near(changed[1, :6], logits[1, :6])
    assert (changed[1, 6:] - logits[1, 6:]).abs().max() > 0.1


@families
@torch.no_grad()
def test_what_stands_in_padding_does_not_matter(family: str) -> None:
    model, idx = pair(family, 4).ours, token_ids(2, 12)
    positions = positions_from_mask(torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0], [1] * 12]))
    real, other = positions >= 0, torch.where(positions < 0, 50, idx)
    near(model(idx, positions=positions)[real], model(other, positions=positions)[real])
    near(model(idx, positions=positions)[1], model(idx[1:])[0])


@families
@torch.no_grad()
def test_logits_may_be_asked_for_at_some_places_alone(family: str) -> None:
    model, idx = pair(family, 4).ours, token_ids(2, 9)
    logits = model(idx)
    for places in (slice(-1, None), slice(2, 5), torch.tensor([0, 7])):
        near(model(idx, keep=places), logits[:, places])


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen2])
def test_randomize_is_large_repeatable_and_keeps_norms_around_one(make):
    model, twin, other = make(), make(), make()
    for each, seed in ((model, 0), (twin, 0), (other, 1)):
        randomize_(each, seed)
    for (name, p), q, r in zip(
        model.named_parameters(), twin.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(p, q) and not torch.equal(p, r)
        norm = p.dim() == 1 and name.endswith("weight")
        assert abs(p.mean() - float(norm)) < 5 * 0.25 / p.numel() ** 0.5
        assert 0.1 < p.std() < 0.4
    assert all(p.requires_grad for p in model.parameters())
    assert model(torch.arange(9)[None]).std() > 1


def test_randomize_takes_a_deviation():
    model = tiny_gpt2()
    randomize_(model, std=0.02)
    assert abs(model.head.weight.std() / 0.02 - 1) < 0.1
