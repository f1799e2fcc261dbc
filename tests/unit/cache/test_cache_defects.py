"""The mistakes of an earlier cache module, K1 to K13: no kind of cache makes them again.

K1 and K11 of the growing cache are in ``test_cache.py``.
"""

import ast
import ctypes
import importlib
import inspect
import typing
from pathlib import Path

import pytest
import torch
from tiny_models import hf_twin, tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch import cache as package
from lm_from_scratch.cache.buffer import BufferCache
from lm_from_scratch.cache.codec import Quantized
from lm_from_scratch.cache.growing import GrowingCache, GrowingTrack
from lm_from_scratch.cache.interface import Cache
from lm_from_scratch.cache.kv import KVCache, Layer
from lm_from_scratch.cache.paged import BlockPool, PagedCache
from lm_from_scratch.cache.slots import SlidingCache, SlidingTrack, StaticCache, cache_for
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.interop import caches
from lm_from_scratch.interop.caches import to_legacy, to_transformers

#: Empty caches of three layers; those that slide keep more than these tests feed.
KINDS = {
    "growing": lambda: GrowingCache(3),
    "static": lambda: StaticCache(3, capacity=40),
    "sliding": lambda: SlidingCache(3, window=40),
    "layered": lambda: BufferCache([SlidingTrack(40), GrowingTrack()], [0, 1, 0]),
    "paged": lambda: PagedCache(BlockPool(3, n_kv_head=2, head_dim=8, n_blocks=40, block_size=3)),
    "quantised": lambda: GrowingCache(3, Quantized(8, group=4)),
}
kinds = pytest.mark.parametrize("kind", list(KINDS))
exact_kinds = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "quantised"])
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
def test_K1_every_kind_takes_and_returns_one_layout(kind) -> None:
    cache = KINDS[kind]()
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
def test_K2_an_exporter_that_drops_strides_gets_the_right_numbers(kind) -> None:
    cache, fed = KINDS[kind](), [tensors(T, seed=T) for T in (3, 1, 1, 4)]
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


@pytest.mark.parametrize("window", [2, 3, 4])
def test_K3_the_config_says_which_layers_slide(window: int) -> None:
    """Window 4, ten tokens: the historic cache kept 10. A layer of ours keeps 4; theirs keeps 3."""
    words = ("full_attention", "sliding_attention", "sliding_attention")
    model = tiny_qwen2(sliding_window=window, layer_types=words)
    cache, idx = cache_for(model.config.windows), token_ids(2, 14)
    with torch.no_grad():
        for part in (idx[:, :6], idx[:, 6:9], idx[:, 9:10]):
            model(part, cache=cache)
        assert [k.shape[2] for k, _ in to_legacy(cache)[0]] == [10, window, window]
        theirs = to_transformers(cache)
        oracle = hf_twin(model)(idx[:, :10]).past_key_values
        for layer, other in zip(theirs.layers, oracle.layers, strict=True):
            assert type(layer) is type(other) and layer.keys.shape == other.keys.shape
            assert layer.get_seq_length() == other.get_seq_length() == 10
        sliding = cache.keys[1].nbytes
        got = model(idx[:, 10:], cache=cache)
    assert cache.keys[1].nbytes == sliding
    torch.testing.assert_close(got, model(idx)[:, 10:], atol=5e-5, rtol=0)


def test_K3_what_a_ring_has_lost_is_not_taken_back_in_two_steps() -> None:
    model, idx = tiny_qwen2(sliding_window=3, max_window_layers=0), token_ids(2, 20)
    cache = SlidingCache(3, window=3, slack=2)
    with torch.no_grad():
        model(idx, cache=cache)
        cache.crop(18)
        with pytest.raises(ValueError, match="only slack=2 in all"):
            cache.crop(16)
        got = model(idx[:, 18:], cache=cache)
    torch.testing.assert_close(got, model(idx)[:, 18:], atol=5e-5, rtol=0)


@kinds
def test_K4_every_kind_has_all_that_a_model_and_a_search_need(kind) -> None:
    cache, idx = KINDS[kind](), token_ids(2, 8)
    assert isinstance(cache, Cache) and (cache.length, cache.batch) == (0, None)
    with torch.no_grad():
        got = torch.cat([MODEL(idx[:, :5], cache=cache), MODEL(idx[:, 5:], cache=cache)], dim=1)
    bound = 0.5 if kind == "quantised" else 5e-5  # of logits up to 6; 0.07 was seen
    torch.testing.assert_close(got, MODEL(idx), atol=bound, rtol=0)
    assert (cache.length, cache.batch, cache.lengths.tolist()) == (8, 2, [8, 8])
    assert cache.nbytes > 0 and len(list(cache.layers)) == 3
    cache.repeat(2)
    assert cache.batch == 4
    cache.reorder(torch.tensor([3, 2, 1, 0]))
    cache.select(torch.tensor([0, 3]))
    cache.crop(6)
    assert (cache.length, cache.batch) == (6, 2)
    with torch.no_grad():
        got = MODEL(idx.flip(0)[:, 6:], cache=cache)  # the rows are the other way round now
    torch.testing.assert_close(got, MODEL(idx.flip(0))[:, 6:], atol=bound, rtol=0)
    cache.crop(torch.tensor([3, 5]))
    assert cache.lengths.tolist() == [3, 5]
    cache.reset()
    assert cache.length == 0


@kinds
def test_K5_an_empty_cache_is_not_taken_for_no_cache(kind) -> None:
    cache = KINDS[kind]()
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
def test_K6_a_skipped_layer_is_an_error_and_nothing_is_kept(kind) -> None:
    cache, (k, v) = KINDS[kind](), tensors(3)
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


def test_K7_no_layers_are_not_taken_for_any_number_of_layers() -> None:
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
def test_K7_a_cache_never_gets_more_layers_than_it_was_made_with(kind) -> None:
    cache = KINDS[kind]()
    for windows in ([30] * 2, [30] * 8):
        with pytest.raises(ValueError, match=f"3 layers, the model {len(windows)}"):
            cache.see(token_ids(1, 2), None, None, windows)
    assert len(cache.layers) == 3


@kinds
def test_K8_dtypes_are_not_mixed(kind) -> None:
    """Neither keys with values nor what is held with what comes."""
    cache, (k, v) = KINDS[kind](), tensors(3)
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
def test_K9_no_graph_is_kept(kind) -> None:
    cache, (k, v) = KINDS[kind](), tensors(3)
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
        MODEL(token_ids(2, 1), cache=KINDS[kind]())


@kinds
def test_K10_what_was_handed_over_may_be_overwritten(kind) -> None:
    cache, fed = KINDS[kind](), []
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
def test_K10_what_is_returned_may_be_a_view_and_says_so_but_copies_can_be_had(kind) -> None:
    assert "may be a view of the cache: do not write" in Layer.update.__doc__
    cache = KINDS[kind]()
    one_pass(cache, *tensors(3))
    before = held(cache)
    for k, v in to_legacy(cache)[0]:
        k.zero_(), v.zero_()
    for layer in to_transformers(cache).layers:
        layer.keys.zero_(), layer.values.zero_()
    assert same(held(cache), before)


@pytest.mark.parametrize("kind", ["static", "sliding", "paged"])
def test_K11_a_fixed_size_is_never_moved(kind) -> None:
    cache, addresses = KINDS[kind](), set()
    for _ in range(40):
        one_pass(cache, *tensors(1))
        memory = [cache.pool.keys] if kind == "paged" else cache.keys[1].parts
        addresses.add(tuple(x.data_ptr() for x in memory))
    assert cache.length == 40 and len(addresses) == 1


@kinds
def test_K12_a_layer_that_is_not_there_is_named(kind) -> None:
    cache = KINDS[kind]()
    for layer in (3, 7, -1):
        with pytest.raises(ValueError, match=f"layer {layer} is not below the cache's 3 layers"):
            cache[layer]
    with pytest.raises(ValueError, match=r"owner=\[0, 1\] must name each of the 1 tracks"):
        BufferCache([GrowingTrack()], [0, 1])


def test_K12_a_model_of_another_depth_is_refused() -> None:
    with torch.no_grad(), pytest.raises(ValueError, match="the cache has 3 layers, the model 2"):
        tiny_gpt2(n_layer=2)(token_ids(1, 3), cache=GrowingCache(3))


FILES = [path.stem for path in Path(package.__file__).parent.glob("*.py") if path.stem[0] != "_"]
MODULES = [*(importlib.import_module(f"{package.__name__}.{name}") for name in FILES), caches]
NAMES = {name: x for module in MODULES for name, x in vars(module).items()}
PUBLIC = [
    (name, x)
    for module in MODULES
    for name, x in vars(module).items()
    if not name.startswith("_") and getattr(x, "__module__", "") == module.__name__
]
CLASSES = [(name, x) for name, x in PUBLIC if inspect.isclass(x)]
FUNCTIONS = [(name, x) for name, x in PUBLIC if inspect.isfunction(x)]


def members(cls: type) -> list[tuple[str, object]]:
    """The functions that a class or its parents in the package define, properties included."""
    found = []
    for parent in cls.__mro__:
        if parent.__module__.startswith("lm_from_scratch"):
            for name, member in vars(parent).items():
                member = getattr(member, "fget", None) or member
                if inspect.isfunction(member):
                    found.append((f"{cls.__name__}.{name}", member))
    return found


def test_K13_type_hints_of_everything_public_can_be_evaluated() -> None:
    functions = [pair for _, cls in CLASSES for pair in members(cls)] + FUNCTIONS
    assert len(functions) > 150
    for _, cls in CLASSES:
        typing.get_type_hints(cls)
    for name, function in functions:
        hints = typing.get_type_hints(function)  # a name that was never imported: NameError
        if not name.endswith("__"):  # what dataclasses write has none
            wanted = set(inspect.signature(function).parameters) - {"self"}
            assert wanted | {"return"} <= set(hints), name


def test_K13_every_cache_is_documented_and_complete() -> None:
    """That links in docstrings lead somewhere, the build of the site checks."""
    for name, x in [("package", package), *CLASSES, *FUNCTIONS]:
        assert x.__doc__ and len(x.__doc__) > 20, name
    for name, cls in CLASSES:
        if issubclass(cls, Cache) and not inspect.isabstract(cls) and name != "Restricted":
            assert name in package.__doc__, name
        if issubclass(cls, KVCache) and cls is not KVCache:
            assert not inspect.isabstract(cls)


def test_K13_no_other_library_is_imported_with_the_package() -> None:
    for file in map(Path, (package.__file__, *(module.__file__ for module in MODULES))):
        for node in ast.parse(file.read_text()).body:
            modules = [alias.name for alias in getattr(node, "names", [])]
            modules += [getattr(node, "module", None) or ""]
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not any(m.split(".")[0] in ("transformers", "logging") for m in modules)
