"""Patching everything is the other run, patching nothing this one, and a path carries its part."""

import pytest
import torch
from model_families import pair as pair_of
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.inside.patching import (
    add,
    difference,
    patch_heads,
    patch_path,
    patch_tokens,
    put,
    run,
    silence,
)
from lm_from_scratch.inside.sites import Site, activations, edited, stream_sites

MODELS = [tiny_gpt2, tiny_qwen2]
MEASURE = difference(3, 5)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    idx = token_ids(1, 9)
    other = idx.clone()
    other[0, 3] += 1
    return idx, other


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_every_token_of_a_stream_is_the_other_run(make, layer: int) -> None:
    model, (idx, other) = make(), pair()
    site = Site("stream", layer)
    logits, values = activations(model, other, [site])
    patched = run(model, idx, {site: put(values[site], torch.ones(1, 9, dtype=torch.bool))})
    torch.testing.assert_close(patched, logits)


@pytest.mark.parametrize("make", MODELS)
def test_own_numbers_change_nothing(make) -> None:
    model, (idx, _) = make(), pair()
    own = MEASURE(model(idx).detach())
    for part in ("stream", "attention", "mlp", "heads"):
        found = patch_tokens(model, idx, idx, MEASURE, part)
        torch.testing.assert_close(found, own.expand(3, 9))
    heads = patch_heads(model, idx, idx, MEASURE)
    torch.testing.assert_close(heads, own.expand(3, model.config.n_head))


@pytest.mark.parametrize("make", MODELS)
def test_the_token_that_differs_is_all_there_is_before_the_first_block(make) -> None:
    model, (idx, other) = make(), pair()
    found = patch_tokens(model, idx, other, MEASURE)
    own, others = MEASURE(model(idx).detach()), MEASURE(model(other).detach())
    expected = torch.where(torch.arange(9) == 3, others, own)
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[:, :3], own.expand(3, 3))  # tokens that are equal


def test_a_head_is_patched_alone() -> None:
    model, (idx, other) = tiny_qwen2(), pair()
    site = Site("heads", 1)
    _, values = activations(model, other, [site])

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, 4] = values[site][:, 4]
        return x

    expected = MEASURE(run(model, idx, {site: by_hand}))
    torch.testing.assert_close(patch_heads(model, idx, other, MEASURE)[1, 4], expected[0])


@pytest.mark.parametrize("make", MODELS)
def test_the_paths_to_the_end_of_a_last_block_are_all_of_its_heads(make) -> None:
    """After the last block's attention there is its MLP and the end: the news of all heads, sent to
    the MLP and to the end together, is the whole of what they fetched."""
    model, (idx, other) = make(), pair()
    model = model.double()
    heads, attention, end = Site("heads", 2), Site("attention", 2), Site("stream", 3)
    _, values = activations(model, other, [heads])
    everything = torch.ones(1, 9, dtype=torch.bool)
    whole = run(model, idx, {heads: put(values[heads], everything)})
    # by hand, from the parts of the block
    _, own = activations(model, idx, [attention, end])
    news = torch.zeros_like(own[end])
    for head in range(model.config.n_head):
        one = torch.arange(model.config.n_head) == head
        which = one[None, :, None].expand(1, -1, 9)
        edit = {heads: put(values[heads], which)}
        with edited(model, edit):
            _, new = activations(model, idx, [attention])
        news += new[attention] - own[attention]
        direct = run(model, idx, {end: lambda x, n=new: x + n[attention] - own[attention]})
        torch.testing.assert_close(patch_path(model, idx, other, (2, head), end), direct)
    both = run(model, idx, {attention: lambda x: x + news})
    torch.testing.assert_close(both, whole)


def test_a_path_to_a_later_attention_does_not_touch_the_stream_between() -> None:
    model, (idx, other) = tiny_gpt2(), pair()
    sites = [*stream_sites(model), Site("attention", 2), Site("mlp", 2)]
    _, own = activations(model, idx, sites)
    logits = patch_path(model, idx, other, (0, 1), Site("attention", 2))
    assert not torch.allclose(logits, model(idx))
    # the receiver's change is the only one: put it there by hand
    head = torch.arange(4)[None, :, None].expand(1, 4, 9) == 1
    _, values = activations(model, other, [Site("heads", 0)])
    _, a = activations(model, idx, [Site("attention", 0)])
    with edited(model, {Site("heads", 0): put(values["heads", 0], head)}):
        _, b = activations(model, idx, [Site("attention", 0)])
    block = model.transformer.h[2]
    heard = own["stream", 2] + b["attention", 0] - a["attention", 0]
    with edited(model, {Site("stream", 2): lambda x: heard}):
        _, made = activations(model, idx, [Site("attention", 2)])
    x = own["stream", 2] + made["attention", 2]
    end = x + block.mlp(block.ln_2(x))
    torch.testing.assert_close(logits, model.lm_head(model.transformer.ln_f(end)))


def test_a_path_to_the_mlp_of_its_own_block_is_what_that_mlp_makes_of_the_news() -> None:
    model, (idx, other) = tiny_gpt2(), pair()
    idx, other = torch.cat([idx, other]), torch.cat([other, idx])  # rows are pairs of their own
    _, values = activations(model, other, [Site("heads", 1)])
    head = torch.arange(4)[None, :, None].expand(2, 4, 9) == 2
    _, a = activations(model, idx, [Site("stream", 1), Site("attention", 1), Site("mlp", 1)])
    with edited(model, {Site("heads", 1): put(values["heads", 1], head)}):
        _, b = activations(model, idx, [Site("attention", 1)])
    block = model.transformer.h[1]
    made = block.mlp(block.ln_2(a["stream", 1] + b["attention", 1]))
    expected = run(model, idx, {Site("mlp", 1): lambda x: made})
    found = patch_path(model, idx, other, (1, 2), Site("mlp", 1))
    torch.testing.assert_close(found, expected)
    nothing = torch.zeros(2, 9, dtype=torch.bool)
    found = patch_path(model, idx, other, (1, 2), Site("mlp", 1), nothing)
    torch.testing.assert_close(found, run(model, idx, {}))


def test_silence_says_the_mean_everywhere() -> None:
    model, texts = tiny_qwen2(), token_ids(4, 9)
    site = Site("heads", 0)
    _, values = activations(model, texts, [site])
    x = torch.randn(2, 6, 5, 8)
    y = silence(model, texts, 0, 2)(x)
    torch.testing.assert_close(y[:, 2], values[site][:, 2].mean((0, 1)).expand(2, 5, 8))
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(y[:, others], x[:, others])


def test_padding_has_no_say_in_what_silent_heads_say() -> None:
    model, texts = tiny_qwen2(), token_ids(2, 9)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), texts], 1)
    positions = torch.cat([torch.full((2, 3), -1), torch.arange(9).expand(2, 9)], 1)
    x = torch.randn(2, 6, 5, 8)
    found = silence(model, padded, 1, (0, 4), positions=positions)(x)
    torch.testing.assert_close(found, silence(model, texts, 1, (0, 4))(x))
    assert torch.equal(found[:, 1], x[:, 1]) and not torch.equal(found[:, 0], x[:, 0])


def test_add_moves_the_chosen_tokens() -> None:
    x, where = torch.zeros(2, 3, 4), torch.tensor([[True, False, False], [False, False, True]])
    one = add(torch.arange(4.0), where)(x)
    assert torch.equal(one[where], torch.arange(4.0).expand(2, 4)) and one[~where].sum() == 0
    each = add(torch.tensor([[1.0] * 4, [2.0] * 4]), where)(x)
    assert each[0, 0, 0] == 1 and each[1, 2, 0] == 2 and each.sum() == 12


def test_texts_of_unlike_shapes_and_paths_backwards_are_refused() -> None:
    model, (idx, other) = tiny_gpt2(), pair()
    with pytest.raises(ValueError, match=r"shapes \(1, 9\) and \(1, 8\); both must be \(1, T\)"):
        patch_tokens(model, idx, other[:, :8], MEASURE)
    with pytest.raises(ValueError, match="is no receiver after the attention of block 1"):
        patch_path(model, idx, other, (1, 0), Site("attention", 1))


def test_a_head_that_is_not_there_and_several_streams_are_refused() -> None:
    model, (idx, other) = tiny_gpt2(), pair()
    for head in (4, -1):
        with pytest.raises(ValueError, match=f"heads={head} must be from 0 to 3"):
            patch_path(model, idx, other, (0, head), Site("stream", 3))
        with pytest.raises(ValueError, match="must be from 0 to 3"):
            silence(model, idx, 0, [0, head])
    several = pair_of("deepseek_v4", 3).ours
    for patch in (
        lambda: patch_tokens(several, idx, other, MEASURE),
        lambda: patch_path(several, idx, other, (0, 1), Site("stream", 3)),
    ):
        with pytest.raises(ValueError, match="has several residual streams"):
            patch()


def test_every_tensor_is_made_where_the_texts_are() -> None:
    """Texts and model are on the CPU while another device is the default: what is made without a
    device would not fit."""
    model, (idx, other) = tiny_qwen2(), pair()
    where = torch.ones_like(idx, dtype=torch.bool)
    with torch.device("meta"):
        found = [
            patch_tokens(model, idx, other, MEASURE),
            patch_heads(model, idx, other, MEASURE),
            patch_path(model, idx, other, (0, 1), Site("mlp", 1), where),
            run(model, idx, {Site("heads", 0): silence(model, idx, 0, 2)}),
        ]
    assert all(x.isfinite().all() for x in found)
