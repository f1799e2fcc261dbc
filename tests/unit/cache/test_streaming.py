"""streaming.py: a window that keeps the first tokens is what a mask of its rule computes."""

import pytest
import torch
from caches import MODELS, pool
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_cache_laws import BOUND, LAWS, Twin
from tiny_models import token_ids

from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache import interface
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.paged import PagedCache
from lm_from_scratch.cache.restricted import Restricted
from lm_from_scratch.cache.slots import SlidingCache, StaticCache
from lm_from_scratch.cache.streaming import Streaming, StreamingCache, keep_first

SIZES = [(1, 0), (1, 1), (3, 1), (4, 2), (2, 5)]  # window, first


class StreamingTwin(Twin):
    """A twin whose oracle is one full pass through the rule."""

    def __init__(self, window: int, first: int, slack: int, model, batch: int, seed: int) -> None:
        super().__init__("growing", model, batch, seed)
        self.cache = StreamingCache(3, window, first, slack)
        self.oracle = Streaming(NO_CACHE, window, first)


@pytest.mark.parametrize("law", LAWS)
@examples(5, 10)
@given(st.data())
def test_it_obeys_the_laws_of_caches(law: str, data) -> None:
    """Any pieces, unequal rows, crop, select, failed passes, resets: always one full pass through
    the rule. Also for models whose layers slide themselves."""
    model = MODELS[data.draw(st.sampled_from(list(MODELS)))]
    window, first = data.draw(st.sampled_from(SIZES))
    slack = data.draw(st.sampled_from([0, 0, 3]))
    batch, seed = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 10**6))
    twin = StreamingTwin(window, first, slack, model, batch, seed)
    LAWS[law](twin, data)
    twin.feed(1)
    twin.feed(1)
    assert twin.error < BOUND


@torch.no_grad()
@pytest.mark.parametrize(("window", "first"), SIZES)
def test_the_rule_is_the_mask_that_one_would_write_by_hand(window: int, first: int) -> None:
    model, idx = MODELS["qwen2"], token_ids(2, 12)
    t, s = torch.arange(12)[:, None], torch.arange(12)
    by_hand = (s <= t) & ((t - s < window) | (s < first))
    want = model(idx, cache=Restricted(NO_CACHE, by_hand[None, None]))
    for cache in (
        Streaming(NO_CACHE, window, first),
        Streaming(GrowingCache(3), window, first),
        Streaming(StaticCache(3, 20), window, first),
        Streaming(PagedCache(pool(model, 4)), window, first),
        StreamingCache(3, window, first),
    ):
        torch.testing.assert_close(model(idx, cache=cache), want, atol=1e-10, rtol=0)
        assert cache.length == (0 if getattr(cache, "cache", 1) is NO_CACHE else 12)


@torch.no_grad()
def test_the_rule_is_for_each_document_and_hides_padding() -> None:
    model, rows = MODELS["qwen2"], [token_ids(9).tolist(), token_ids(7, seed=2).tolist()]
    rule = Streaming(NO_CACHE, 3, 1)
    packed = model(
        torch.tensor([rows[0] + rows[1]]),
        positions=torch.tensor([[*range(9), *range(7)]]),
        documents=torch.tensor([[0] * 9 + [1] * 7]),
        cache=rule,
    )
    for part, row in zip(packed[0].split([9, 7]), rows, strict=True):
        alone = model(torch.tensor([row]), cache=rule)[0]
        torch.testing.assert_close(part, alone, atol=1e-10, rtol=0)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :2] = 0
    idx = torch.tensor([rows[0], [5, 5, *rows[1]]])
    padded = model(idx, positions=positions_from_mask(mask), cache=rule)
    torch.testing.assert_close(padded[1, 2:], packed[0, 9:], atol=1e-10, rtol=0)


@torch.no_grad()
def test_without_first_tokens_it_is_a_sliding_cache() -> None:
    """For a model all of whose layers have that window."""
    model, idx = MODELS["qwen2, W = 3"], token_ids(2, 14)
    caches = SlidingCache(3, 3), StreamingCache(3, 3, 0)
    for n in (5, 1, 1, 4, 1, 1, 1):
        part, idx = idx[:, :n], idx[:, n:]
        one, other = (model(part, cache=cache) for cache in caches)
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)
    assert caches[0].nbytes == caches[1].nbytes


@torch.no_grad()
def test_its_bytes_do_not_grow_and_its_first_tokens_stay() -> None:
    model, cache, sizes = MODELS["gpt2"], StreamingCache(3, 4, 2), []
    for piece in token_ids(2, 40).split([9, 1, 1, 14, 1, 14], dim=1):
        model(piece, cache=cache)
        sizes.append(cache.nbytes)
        held = cache.contents(0)[2][0]
        assert held[:2].tolist() == [0, 1]
        assert sorted(held[held >= 2].tolist()) == list(range(cache.length - 4, cache.length))
    assert len(set(sizes)) == 1


def test_one_token_that_sees_all_that_is_kept_needs_no_mask() -> None:
    model, cache = MODELS["gpt2"], StreamingCache(3, 4, 2)
    with torch.no_grad():
        model(token_ids(1, 9), cache=cache)
        (seen, *_) = cache.see(token_ids(1, 1), windows=[None] * 3)
    assert seen.is_full and seen.key_length == 6


def test_layers_that_are_alike_share_a_mask() -> None:
    seen = Streaming(NO_CACHE, 3, 1).see(token_ids(2, 9), windows=[None, 5, None])
    assert seen[0] is seen[2] and seen[0] is not seen[1]
    both = keep_first(keep_first(seen[0], 2, 0), 5, 1)
    assert torch.equal(both.mask, keep_first(Visibility(*[torch.arange(9)[None]] * 2), 2, 0).mask)
    assert isinstance(Streaming(NO_CACHE, 3, 1)[0], interface.NoCache)


def test_sizes_that_mean_nothing_are_refused() -> None:
    for window, first, name in [(0, 1, "window=0"), (3, -1, "first=-1"), (3, 1.5, "first=1.5")]:
        for make in (lambda w, f: StreamingCache(2, w, f), lambda w, f: Streaming(NO_CACHE, w, f)):
            with pytest.raises(ValueError, match=name):
                make(window, first)
    cache = StreamingCache(3, 3, 1)
    with torch.no_grad():
        MODELS["gpt2"](token_ids(1, 9), cache=cache)
    with pytest.raises(ValueError, match="cannot be taken back, only slack=0"):
        cache.crop(-1)
