"""Every lens ends where the model does."""

import pytest
import torch
from model_families import pair as pair_of
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.inside.lens import jacobian_lens, logit_lens, tuned_lens
from lm_from_scratch.inside.sites import activations, edited, stream_sites

MODELS = [tiny_gpt2, tiny_qwen2]


def test_at_the_end_the_logit_lens_is_the_model() -> None:
    for make in MODELS:
        model, idx = make(), token_ids(2, 9)
        logits, kept = activations(model, idx, stream_sites(model))
        torch.testing.assert_close(logit_lens(model)(3, kept["stream", 3]), logits)


def test_a_tuned_lens_comes_closer_and_repeats() -> None:
    model, idx = tiny_qwen2(std=0.1), token_ids(16, 9)
    lens, plain = tuned_lens(model, idx[:12], steps=60, lr=1e-2), logit_lens(model)
    logits, kept = activations(model, idx[12:], stream_sites(model))

    def distance(some) -> list[float]:
        said = [some(l, kept["stream", l]).log_softmax(-1) for l in range(4)]
        words = logits.log_softmax(-1)
        return [(words.exp() * (words - s)).sum(-1).mean().item() for s in said]

    assert all(a < b for a, b in zip(distance(lens)[:3], distance(plain)[:3]))
    assert abs(distance(lens)[3]) < 1e-6
    again = tuned_lens(model, idx[:12], steps=60, lr=1e-2)
    assert torch.equal(again.maps, lens.maps)
    assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("make", MODELS)
def test_the_jacobian_is_the_mean_effect_of_a_small_change(make) -> None:
    """Against differences: a state moved by a little in one direction, and what comes of it in the
    last states of that token and all later ones."""
    model, idx = make(std=0.1).double(), token_ids(2, 5)
    lens = jacobian_lens(model, idx)
    sites = stream_sites(model)
    torch.testing.assert_close(lens.maps[-1], torch.eye(lens.maps.shape[-1], dtype=torch.float64))
    _, own = activations(model, idx, sites)
    direction = torch.randn(lens.maps.shape[-1], dtype=torch.float64)
    for site in sites[:-1]:
        effects = []
        for t in range(5):
            last = []
            for sign in (1, -1):
                step = torch.zeros_like(own[site])
                step[:, t] = sign * 1e-4 * direction
                with edited(model, {site: lambda x, step=step: x + step}):
                    _, new = activations(model, idx, sites[-1:])
                last.append(new[sites[-1]].sum(1).mean(0))
            effects.append((last[0] - last[1]) / 2e-4)
        torch.testing.assert_close(
            direction @ lens.maps[site.layer], sum(effects) / 5, atol=1e-3, rtol=1e-3
        )


def test_gradients_may_be_off_and_a_state_of_another_dtype_is_read() -> None:
    model, idx = tiny_qwen2(std=0.1), token_ids(4, 9)
    lens = tuned_lens(model, idx, steps=3), jacobian_lens(model, idx[:1])
    with torch.no_grad():
        again = tuned_lens(model, idx, steps=3), jacobian_lens(model, idx[:1])
    for a, b in zip(lens, again):
        assert torch.equal(a.maps, b.maps) and not b.maps.requires_grad
    state = torch.randn(2, model.config.n_embd, dtype=torch.float64)
    assert torch.equal(again[0](1, state), again[0](1, state.float()))


@pytest.mark.parametrize("fit", [logit_lens, tuned_lens, jacobian_lens])
def test_a_model_of_several_streams_is_refused(fit) -> None:
    texts = () if fit is logit_lens else (token_ids(1, 9),)
    with pytest.raises(ValueError, match="has several residual streams, not one"):
        fit(pair_of("deepseek_v4", 3).ours, *texts)
