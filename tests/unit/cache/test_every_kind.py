"""What every kind of cache promises: one layout, no graph, no mixed dtypes, rows that can be
moved, and errors that leave it as it was."""

import ctypes
import importlib
import inspect
import typing
from itertools import chain
from pathlib import Path

import pytest
import torch
from caches import KINDS, MODELS
from tiny_models import tiny_qwen2, token_ids

from lm_from_scratch import cache as package
from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.cache.buffer import BufferCache
from lm_from_scratch.cache.codec import Quantized
from lm_from_scratch.cache.growing import GrowingCache, GrowingTrack
from lm_from_scratch.cache.interface import Cache
from lm_from_scratch.cache.kv import Layer
from lm_from_scratch.cache.paged import BlockPool, PagedCache
from lm_from_scratch.cache.slots import SlidingCache, SlidingTrack, StaticCache, cache_for
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.interop import caches
from lm_from_scratch.interop.caches import to_legacy, to_transformers

#: Empty caches of three layers; those that slide keep more than these tests feed.
EMPTY = {
    "growing": lambda: GrowingCache(3),
    "static": lambda: StaticCache(3, capacity=40),
    "sliding": lambda: SlidingCache(3, window=40),
    "layered": lambda: BufferCache([SlidingTrack(40), GrowingTrack()], [0, 1, 0]),
    "paged": lambda: PagedCache(BlockPool(3, n_kv_head=2, head_dim=8, n_blocks=40, block_size=3)),
    "quantised": lambda: GrowingCache(3, Quantized(8, group=4)),
}


kinds = pytest.mark.parametrize("kind", list(EMPTY))


exact_kinds = pytest.mark.parametrize("kind", [kind for kind in EMPTY if kind != "quantised"])


MODEL = tiny_qwen2(sliding_window=30, layer_types=("sliding_attention",) * 3)  # 2 heads of 8


def one_pass(cache, k: torch.Tensor, v: torch.Tensor, positions=None) -> list:
    """A pass without a model: the same keys and values for every layer."""
    cache.see(k[:, 0], positions, None, [30] * 3)
    return [cache[layer].update(k, v) for layer in range(3)]


def tensors(T: int, seed: int = 0, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, batch, 2, T, 8, generator=generator)
    return k, v


def held(cache) -> list[torch.Tensor]:
    return [x.clone() for pair in to_legacy(cache)[0] for x in pair]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@exact_kinds
def test_every_kind_takes_and_returns_one_layout(kind) -> None:
    cache = EMPTY[kind]()
    k, v = tensors(4)
    one_pass(cache, k, v)
    more = tensors(1, seed=1)
    for keys, values in one_pass(cache, *more):
        assert keys.shape[:2] == (2, 2) and keys.shape[3] == 8
        assert torch.equal(keys[:, :, :5], torch.cat([k, more[0]], dim=2))
        assert torch.equal(values[:, :, :5], torch.cat([v, more[1]], dim=2))


def without_strides(x: torch.Tensor) -> torch.Tensor:
    """What an exporter reads that knows the address and the shape, and nothing else."""
    assert x.dtype == torch.float32
    memory = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
    return torch.tensor(list(memory)).reshape(x.shape)


@kinds
def test_an_exporter_that_drops_strides_gets_the_right_numbers(kind) -> None:
    cache, fed = EMPTY[kind](), [tensors(T, seed=T) for T in (3, 1, 1, 4)]
    for k, v in fed:
        # transposed, as a model gives them: contiguous is not what comes in
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
        one_pass(cache, k, v)
    bound = 0.02 if kind == "quantised" else 0.0
    for k, v in to_legacy(cache)[0]:
        assert k.is_contiguous() and v.is_contiguous()
        for exported, parts in ((k, [k for k, _ in fed]), (v, [v for _, v in fed])):
            want = torch.cat(parts, dim=2)
            torch.testing.assert_close(without_strides(exported), want, atol=bound, rtol=0)
    for k, v, *_ in to_transformers(cache):
        assert torch.equal(without_strides(k), k) and torch.equal(without_strides(v), v)


@kinds
def test_an_empty_cache_is_not_taken_for_no_cache(kind) -> None:
    cache = EMPTY[kind]()
    for _ in range(2):
        assert bool(cache) is True
        with pytest.raises(TypeError):
            len(cache)
        with torch.no_grad():
            MODEL(token_ids(1, 3), cache=cache)
    cache.reset()
    assert bool(cache) is True
    complete(generate(MODEL, token_ids(2, 4), max_new_tokens=3, cache=cache))
    assert cache.length == 6  # it was used; the last token is never fed


@kinds
def test_a_skipped_layer_is_an_error_and_nothing_is_kept(kind) -> None:
    cache, (k, v) = EMPTY[kind](), tensors(3)
    with pytest.raises(ValueError, match="layer 0 was updated, but see is next"):
        cache[0].update(k, v)
    see = [30] * 3
    cache.see(k[:, 0], None, None, see)
    with pytest.raises(ValueError, match=r"layer \d was updated, but layer 0 is next"):
        cache[2].update(k, v)
    cache[0].update(k, v)
    with pytest.raises(ValueError, match=r"layer 0 was updated, but (layer 1|see) is next"):
        cache[0].update(k, v)
    assert cache.batch is None and cache.length == 0  # the pass was not completed
    one_pass(cache, k, v)
    before = held(cache)
    cache.see(k[:, 0], None, None, see)
    cache[0].update(v, k)
    assert cache.length == 3 and same(held(cache), before)
    one_pass(cache, *tensors(2))
    assert cache.length == 5 and len(cache.layers) == 3


def test_no_layers_are_not_taken_for_any_number_of_layers() -> None:
    for make in (
        lambda: GrowingCache(0),
        lambda: StaticCache(0, 4),
        lambda: SlidingCache(0, 4),
        lambda: PagedCache(BlockPool(0, 1, 1, 1)),
        lambda: cache_for([]),
        lambda: BufferCache([], []),
    ):
        with pytest.raises(ValueError, match="n_layer=0 must be an integer, at least 1"):
            make()


@kinds
def test_a_cache_never_gets_more_layers_than_it_was_made_with(kind) -> None:
    cache = EMPTY[kind]()
    for windows in ([30] * 2, [30] * 8):
        with pytest.raises(ValueError, match=f"3 layers, the model {len(windows)}"):
            cache.see(token_ids(1, 2), None, None, windows)
    assert len(cache.layers) == 3


@kinds
def test_dtypes_are_not_mixed(kind) -> None:
    """Neither keys with values nor what is held with what comes."""
    cache, (k, v) = EMPTY[kind](), tensors(3)
    for pair in ((k, v.bfloat16()), (k.bfloat16(), v)):
        with pytest.raises(ValueError, match=r"the keys are .* the values .* they must agree"):
            one_pass(cache, *pair)
    one_pass(cache, k, v)
    before = held(cache)
    for dtype in (torch.bfloat16, torch.float64):
        with pytest.raises(ValueError, match=r"holds .* in torch.float32, the new tensor has"):
            one_pass(cache, k.to(dtype), v.to(dtype))
    assert same(held(cache), before) and before[0].dtype == torch.float32
    one_pass(cache, k, v)
    assert cache.length == 6


@kinds
def test_no_graph_is_kept(kind) -> None:
    cache, (k, v) = EMPTY[kind](), tensors(3)
    for pair in ((k.clone().requires_grad_(), v), (k, v.clone().requires_grad_())):
        with pytest.raises(ValueError, match="a cache keeps no gradients"):
            one_pass(cache, *pair)
    with torch.no_grad():
        one_pass(cache, k.clone().requires_grad_(), v.clone().requires_grad_())
        one_pass(cache, k[:, :, :1].clone().requires_grad_(), v[:, :, :1])
    for layer in range(3):
        assert not any(x.requires_grad for x in cache.contents(layer))
    assert not any(x.requires_grad for x in held(cache))
    with pytest.raises(ValueError, match=r"no gradients: call the model under torch.no_grad"):
        MODEL(token_ids(2, 1), cache=EMPTY[kind]())


@kinds
def test_what_was_handed_over_may_be_overwritten(kind) -> None:
    cache, fed = EMPTY[kind](), []
    for start, T in ((0, 3), (3, 1), (4, 2)):
        k, v = tensors(T, seed=T)
        places = torch.arange(start, start + T).repeat(2, 1)
        fed.append((k.clone(), v.clone()))
        one_pass(cache, k, v, places)
        for x in (k, v, places):
            x.zero_()
    assert cache.lengths.tolist() == [6, 6]
    bound = 0.02 if kind == "quantised" else 0.0
    pairs, positions = to_legacy(cache)
    assert positions.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    for k, v in pairs:
        for x, parts in ((k, [k for k, _ in fed]), (v, [v for _, v in fed])):
            torch.testing.assert_close(x, torch.cat(parts, dim=2), atol=bound, rtol=0)


@kinds
def test_what_is_returned_may_be_a_view_and_says_so_but_copies_can_be_had(kind) -> None:
    assert "may be a view of the cache: do not write" in Layer.update.__doc__
    cache = EMPTY[kind]()
    one_pass(cache, *tensors(3))
    before = held(cache)
    pairs, positions = to_legacy(cache)
    for x in (*chain(*pairs), positions):
        x.fill_(3)
    assert not torch.equal(to_legacy(cache)[1], positions)
    for layer in to_transformers(cache).layers:
        layer.keys.zero_(), layer.values.zero_()
    assert same(held(cache), before)


@pytest.mark.parametrize("kind", ["static", "sliding", "paged"])
def test_a_fixed_size_is_never_moved(kind) -> None:
    cache, addresses = EMPTY[kind](), set()
    for _ in range(40):
        one_pass(cache, *tensors(1))
        memory = [cache.pool.keys] if kind == "paged" else cache.keys[1].parts
        addresses.add(tuple(x.data_ptr() for x in memory))
    assert cache.length == 40 and len(addresses) == 1


@kinds
def test_a_layer_that_is_not_there_is_named(kind) -> None:
    cache = EMPTY[kind]()
    for layer in (3, 7, -1):
        with pytest.raises(ValueError, match=f"layer {layer} is not below the cache's 3 layers"):
            cache[layer]
    with pytest.raises(ValueError, match=r"owner=\[0, 1\] must name each of the 1 tracks"):
        BufferCache([GrowingTrack()], [0, 1])


# ------------------------------------------------------- rows are moved, and input is refused


EVERY_KIND = [kind for kind in KINDS if "4 bits" not in kind]


def filled(kind: str):
    """A model that slides in every layer, and a cache of that kind with two rows of 7 tokens."""
    model = MODELS["qwen2, W = 3"]
    cache = KINDS[kind](model)
    with torch.no_grad():
        model(token_ids(2, 7), cache=cache)
    return model, cache


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_bad_input_is_refused_and_changes_nothing(kind: str) -> None:
    model, cache = filled(kind)
    other = tiny_qwen2(n_layer=2, sliding_window=3, max_window_layers=0).double()
    wide = tiny_qwen2(n_kv_head=3, sliding_window=3, max_window_layers=0).double()
    one, two = token_ids(1, 1), token_ids(2, 1)
    with torch.no_grad():
        for bad, message in (
            (lambda: model(one, cache=cache), "holds 2 rows, the tokens 1"),
            (lambda: other(two, cache=cache), "3 layers, the model 2"),
            (lambda: model.float()(two, cache=cache), r"float64.* in torch.float32"),
            (lambda: wide(two, cache=cache), r"heads, D\) = "),
            (lambda: cache.crop(8), r"length=8 is not in 0 ... 7"),
            (lambda: cache.crop(-8), r"length=-1 is not in 0 ... 7"),
            (lambda: cache.crop(torch.tensor([7])), r"an integer for each of the 2 rows"),
            (lambda: cache.crop(torch.tensor([7, 9])), r"length=\[7, 9\] is not in 0 ... \[7, 7\]"),
            (lambda: cache.select(torch.tensor([0, 2])), r"rows=\[0, 2\]"),
            (lambda: cache.select(torch.tensor([])), r"rows=\[\] must be a list"),
            (lambda: cache.reorder(torch.tensor([0])), r"must name 2 rows"),
            (lambda: cache.repeat(0), "times=0 must be an integer, at least 1"),
            (lambda: cache[3], "layer 3 is not below the cache's 3 layers"),
            (lambda: cache[-1], "layer -1"),
        ):
            with pytest.raises(ValueError, match=message):
                bad()
            model.double()
        want = model(token_ids(2, 9, seed=1))
        cache.reset()
        first = model(token_ids(2, 9, seed=1)[:, :7], cache=cache)
        got = model(token_ids(2, 9, seed=1)[:, 7:], cache=cache)
    if "bits" not in kind:
        torch.testing.assert_close(torch.cat([first, got], 1), want, atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_an_empty_cache_has_no_rows_to_move(kind: str) -> None:
    cache = KINDS[kind](MODELS["qwen2, W = 3"])
    for bad in (lambda: cache.select(torch.tensor([0])), lambda: cache.repeat(2)):
        with pytest.raises(ValueError, match="the cache is empty"):
            bad()
    cache.crop(0)
    assert cache.length == 0 and cache.batch is None and cache.lengths.tolist() == []


@torch.no_grad()
@pytest.mark.parametrize("kind", ["growing", "static", "sliding"])
def test_reset_clears_what_was_not_a_number(kind: str) -> None:
    model = MODELS["qwen2, W = 3"]
    cache, idx = KINDS[kind](model), token_ids(1, 5)
    model(idx, cache=cache)
    for buffer in (*cache.keys, *cache.values):
        buffer.parts[0].fill_(torch.nan)
    cache.reset()
    positions = torch.arange(5)[None]
    torch.testing.assert_close(
        model(idx, positions=positions, cache=cache), model(idx), atol=1e-9, rtol=0
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_only_whole_numbers_say_where_to_crop_and_what_to_select(kind: str) -> None:
    _, cache = filled(kind)
    for length in (2.5, True, 7 / 2, torch.tensor([1.0, 2.0])):
        with pytest.raises(ValueError, match="integer"):
            cache.crop(length)
    for rows in ([True, False], torch.tensor([1, 0], dtype=torch.uint8), [0.5]):
        with pytest.raises(ValueError, match="must be a list of rows below 2"):
            cache.select(torch.as_tensor(rows))
    cache.select([1, 0])  # a list will do
    assert cache.length == 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_inference_mode_filled_goes_on_outside(kind) -> None:
    model, idx = MODELS["qwen2, W = 3" if "sliding" in kind else "qwen2"], token_ids(2, 9)
    cache, swapped = KINDS[kind](model), idx[[1, 0]]
    with torch.inference_mode():
        model(idx[:, :4], cache=cache)
        cache.select(torch.tensor([1, 0]))
        model(swapped[:, 4:6], cache=cache)
    with torch.no_grad():
        if cache.slack != 0:
            cache.crop(5)
        got = model(swapped[:, cache.length :], cache=cache)
        tolerance = 2.0 if "bits" in kind else 1e-10
        assert (got - model(swapped)[:, -got.shape[1] :]).abs().max() < tolerance
        cache.reset()
        model(idx, cache=cache)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_negative_length_takes_tokens_back_from_the_end_of_each_row(kind) -> None:
    model = MODELS["qwen2, W = 3" if "sliding" in kind else "qwen2"]
    idx, mask = token_ids(2, 7), torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    for positions in (None, positions_from_mask(mask)):
        cache = KINDS[kind](model)
        with torch.no_grad():
            model(idx, positions=positions, cache=cache)
            before = cache.lengths
            if cache.slack is not None and cache.slack < 2:
                continue
            cache.crop(-2)
            assert torch.equal(cache.lengths, before - 2)
            assert (cache.dense_length is None) == (positions is not None)
            with pytest.raises(ValueError, match="is not in 0"):
                cache.crop(-6)


# ---------------------------------------------------------------------------------- type hints


def test_type_hints_of_everything_public_can_be_evaluated() -> None:
    """A name that was never imported raises. And the package's docstring names every cache."""
    names = [path.stem for path in Path(package.__file__).parent.glob("[a-z]*.py")]
    modules = [*(importlib.import_module(f"{package.__name__}.{name}") for name in names), caches]
    for module in modules:
        for name, x in vars(module).items():
            if getattr(x, "__module__", "") != module.__name__:
                continue
            if inspect.isclass(x) or inspect.isfunction(x):
                typing.get_type_hints(x)
            for member in vars(x).values() if inspect.isclass(x) else ():
                member = getattr(member, "fget", None) or member
                if inspect.isfunction(member):
                    typing.get_type_hints(member)
            if inspect.isclass(x) and issubclass(x, Cache) and not inspect.isabstract(x):
                assert name in package.__doc__ or name == "Restricted"
