"""What is read at a site is what the model computes, and an edit changes that and nothing else."""

import pytest
import torch
from model_families import FAMILIES, pair
from tiny_models import tiny_deepseek_v3, tiny_gpt2, tiny_qwen2, token_ids
from torch import nn

from lm_from_scratch.attention.layer import AttentionLayer
from lm_from_scratch.inside.sites import Site, activations, edited, stream_sites
from lm_from_scratch.instruments.record import record_hidden_states
from lm_from_scratch.models.blocks import blocks, has
from lm_from_scratch.models.interface import CausalLM

MODELS = [tiny_gpt2, tiny_qwen2, tiny_deepseek_v3]


def every_site(model: CausalLM) -> list[Site]:
    L = model.config.n_layer
    parts = [Site(part, l) for part in ("attention", "mlp", "heads") for l in range(L)]
    return stream_sites(model) + parts


@pytest.mark.parametrize("make", MODELS)
@torch.no_grad()
def test_reading_changes_nothing_and_leaves_nothing(make) -> None:
    model, idx = make(), token_ids(2, 9)
    before = [dict(vars(module)) for module in model.modules()]
    logits, kept = activations(model, idx, every_site(model))
    torch.testing.assert_close(logits, model(idx), atol=0, rtol=0)
    assert [dict(vars(module)) for module in model.modules()] == before
    assert set(kept) == set(every_site(model))


@pytest.mark.parametrize("make", MODELS)
@torch.no_grad()
def test_a_block_adds_what_its_parts_make(make) -> None:
    model, idx = make(), token_ids(2, 9)
    _, kept = activations(model, idx, every_site(model))
    for l in range(model.config.n_layer):
        total = kept["stream", l] + kept["attention", l] + kept["mlp", l]
        torch.testing.assert_close(total, kept["stream", l + 1])


@torch.no_grad()
def test_the_stream_is_what_hooks_record() -> None:
    model, idx = tiny_qwen2(), token_ids(2, 9)
    _, kept = activations(model, idx, stream_sites(model))
    with record_hidden_states(model) as states:
        model(idx)
    for number, site in enumerate(stream_sites(model)):
        torch.testing.assert_close(kept[site], states[number][0], atol=0, rtol=0)


@torch.no_grad()
def test_heads_are_what_the_output_matrix_mixes() -> None:
    model, idx = tiny_qwen2(), token_ids(2, 9)
    _, kept = activations(model, idx, [Site("heads", 1), Site("attention", 1)])
    heads = kept["heads", 1]
    assert heads.shape == (2, 6, 9, 8)
    mixed = model.model.layers[1].self_attn.o_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(mixed, kept["attention", 1])


@pytest.mark.parametrize("part", ["stream", "attention", "mlp", "heads"])
@torch.no_grad()
def test_an_edit_reaches_what_comes_after_and_nothing_before(part: str) -> None:
    model, idx = tiny_gpt2(), token_ids(1, 9)
    logits, own = activations(model, idx, every_site(model))
    with edited(model, {Site(part, 1): lambda x: 2 * x}):
        changed, new = activations(model, idx, every_site(model))
    assert not torch.allclose(changed, logits)
    for site in [Site("stream", 0), Site("stream", 1), Site("attention", 0), Site("mlp", 0)]:
        assert torch.equal(own[site], new[site])
    assert not torch.equal(own["stream", 2], new["stream", 2])


@torch.no_grad()
def test_edits_may_be_nested() -> None:
    model, idx = tiny_qwen2(), token_ids(1, 5)
    stream, mlp = Site("stream", 1), Site("mlp", 1)
    _, own = activations(model, idx, [stream, mlp])
    with edited(model, {stream: lambda x: x * 3, mlp: lambda x: x + 1}):
        _, new = activations(model, idx, [stream, mlp])
    torch.testing.assert_close(new[stream], own[stream])
    with edited(model, {mlp: lambda x: x + 1}):
        _, new = activations(model, idx, [mlp])
    torch.testing.assert_close(new[mlp], own[mlp] + 1)


def test_an_exception_leaves_the_model_as_it_was() -> None:
    model, idx = tiny_qwen2(), token_ids(1, 5)
    expected = model(idx)
    with pytest.raises(RuntimeError), edited(model, {Site("mlp", 0): lambda x: x[..., :3]}):
        model(idx)
    torch.testing.assert_close(model(idx), expected, atol=0, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_sites(family: str) -> None:
    model = pair(family, 3).ours
    idx = token_ids(1, 9, high=model.config.vocab_size)
    sites = []
    for site in every_site(model):
        if site.part == "heads" and not has(blocks(model)[site.layer], AttentionLayer):
            with pytest.raises(ValueError, match=f"block {site.layer} has no heads"):
                activations(model, idx, [site])
        else:
            sites.append(site)
    logits, kept = activations(model, idx, sites)
    assert kept.keys() == set(sites)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(idx), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("site", "message"),
    [
        (Site("value", 0), "part='value' must be one of stream, attention, mlp, heads"),
        (Site("stream", 4), "layer=4 of 'stream' must be an integer from 0 to 3"),
        (Site("mlp", 3), "layer=3 of 'mlp' must be an integer from 0 to 2"),
        (Site("mlp", -1), "layer=-1 of 'mlp'"),
        (Site("mlp", True), "layer=True of 'mlp'"),
    ],
)
def test_a_site_that_is_not_there_is_refused(site: Site, message: str) -> None:
    with pytest.raises(ValueError, match=message), edited(tiny_gpt2(), {site: nn.Identity()}):
        pass
