"""layout.py: weights lie otherwise, and everything else is as it was."""

import copy
import io
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids
from torch import Tensor, nn

from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.instruments import layout
from lm_from_scratch.instruments.layout import (
    LAYOUTS,
    TRAINING,
    faster_dtype,
    lay_out_,
    least_seconds,
    simplest_fast,
    time_products,
)
from lm_from_scratch.instruments.onednn import Packed, PackedLinear, multiplies, use_onednn_
from lm_from_scratch.text.batch import Batch
from lm_from_scratch.training.train import optimizer_step
from lm_from_scratch.weights.quantize import multiplied, quantize_

IDX = token_ids(2, 9)


def tied_qwen2():
    return tiny_qwen2(tie_word_embeddings=True)


MODELS = pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen2, tied_qwen2])
ONE_LAYOUT = pytest.mark.parametrize("layouts", [["rows"], ["columns"], ["packed"]])


@MODELS
@pytest.mark.parametrize("layouts", [*([way] for way in LAYOUTS), LAYOUTS])
def test_values_names_and_text_stay(make: Callable[[], nn.Module], layouts) -> None:
    plain, model = make(), make()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    said = lay_out_(model, 2, layouts)
    assert sum(said.chosen.values()) == len(multiplied(plain))
    assert torch.equal(torch.get_rng_state(), state)
    for name, p in model.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p, before[name][1])
    with torch.no_grad():
        want = plain(IDX)
        assert (model(IDX) - want).abs().max() <= 1e-6 * want.abs().max()
    prompts = [[5, 6, 7], [8]]
    text = [complete(generate(each, prompts, 20, GREEDY)) for each in (model, plain)]
    assert text[0] == text[1]


@ONE_LAYOUT
def test_a_model_is_saved_copied_moved_and_changed_as_before(layouts, tmp_path) -> None:
    model, other = tied_qwen2(), tiny_qwen2(seed=1, tie_word_embeddings=True)
    lay_out_(model, 2, layouts)
    with torch.no_grad():
        want = model(IDX)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        read = tied_qwen2()
        read.load_state_dict(torch.load(file, weights_only=True))
        save_pretrained(model, tmp_path / "m")
        for same in (read, copy.deepcopy(model), from_pretrained(tmp_path / "m")):
            torch.testing.assert_close(same(IDX), want, atol=5e-5, rtol=0)
        doubled = copy.deepcopy(model).double()
        torch.testing.assert_close(doubled(IDX).float(), want, atol=5e-5, rtol=0)
        model.load_state_dict(other.state_dict())  # no product goes on with the old weights
        torch.testing.assert_close(model(IDX), other(IDX), atol=5e-5, rtol=0)
        lay_out_(model, 2, ["rows"])
        assert torch.equal(model(IDX), other(IDX))
        assert torch.equal(model.double()(IDX), other.double()(IDX))


@ONE_LAYOUT
def test_it_trains_as_before(layouts) -> None:
    steps = []
    for laid_out in (False, True):
        model = tiny_gpt2()
        if laid_out:
            lay_out_(model, 2, layouts)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        batch = Batch(IDX, token_ids(2, 9, seed=2))
        steps.append([optimizer_step(model, optimizer, [batch]) for _ in range(3)])
    assert torch.tensor(steps[0]) == pytest.approx(torch.tensor(steps[1]), rel=1e-4)


@ONE_LAYOUT
def test_gradients_reach_a_model_under_ddp(layouts) -> None:
    import torch.distributed as dist

    plain, model = tiny_gpt2(), tiny_gpt2()
    lay_out_(model, 2, layouts)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        wrapped(IDX).square().mean().backward()
    finally:
        dist.destroy_process_group()
    plain(IDX).square().mean().backward()
    for ours, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, want.grad, atol=1e-5, rtol=1e-4)


def test_what_cannot_be_laid_out_is_left_alone() -> None:
    quantized, mixed = tiny_gpt2(), tiny_gpt2()
    quantize_(quantized)
    quantize_(mixed, select=lambda name: "mlp" in name)
    for model in (quantized, tiny_gpt2().double(), tiny_gpt2().to("meta"), nn.LayerNorm(3)):
        said = lay_out_(model)
        assert not said.chosen and said.speed == 1.0
    assert sum(lay_out_(mixed, 1, ["columns"]).chosen.values()) == 2 * 3 + 1
    with torch.inference_mode():
        assert not lay_out_(nn.Linear(2, 3)).chosen
    other = tiny_gpt2()
    other.head.product = head = lambda x, weight: F.linear(x, weight)
    assert (
        sum(lay_out_(other, 1, ["packed"]).chosen.values()) == 4 * 3 and other.head.product is head
    )
    with torch.no_grad():
        plain = tiny_gpt2()
        quantize_(plain, select=lambda name: "mlp" in name)
        torch.testing.assert_close(mixed(IDX), plain(IDX), atol=5e-5, rtol=0)


def test_wrong_arguments() -> None:
    for bad, words in (
        (dict(rows=0), "rows=0 must be an integer, at least 1"),
        (dict(rows=1.5), "rows=1.5"),
        (dict(layouts=[]), r"layouts=\[\] must be some of \['rows', 'columns', 'packed'\]"),
        (dict(layouts="rows"), "layouts='rows' must be some of"),
        (dict(layouts=["rows", "tiles"]), "tiles"),
    ):
        with pytest.raises(ValueError, match=words):
            lay_out_(tiny_gpt2(), **bad)


def test_without_oneDNN_nothing_is_packed(monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = tiny_gpt2()
    assert not lay_out_(model, 2).chosen["packed"]
    with pytest.raises(ValueError, match=r"oneDNN does not multiply torch\.float32"):
        lay_out_(model, 2, ["packed"])
    assert ("float32", "onednn") not in time_products(model, 8)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


# ------------------------------------------------------------------------------ the choice


@pytest.fixture
def sleep(monkeypatch) -> Callable[[float], None]:
    """Moves the clock of the instrument, and nothing else does: a busy machine decides nothing."""
    now = [0.0]
    monkeypatch.setattr(layout, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return lambda seconds: now.append(now.pop() + seconds)


def test_the_fastest_wins_and_of_equals_the_simplest() -> None:
    assert simplest_fast({"rows": 1.0, "columns": 0.97, "packed": 0.99}) == "rows"
    assert simplest_fast({"rows": 1.0, "columns": 0.8, "packed": 0.78}) == "columns"
    assert simplest_fast({"rows": 1.0, "columns": 0.8, "packed": 0.5}) == "packed"


def test_a_disturbance_does_not_count(sleep) -> None:
    calls = 0

    def disturbed() -> None:  # the faster way, in two rounds of three
        nonlocal calls
        calls += 1
        sleep(0.05 if calls % 3 else 0.001)

    tries = [{"slow": partial(sleep, 0.004), "fast": disturbed}]
    assert simplest_fast(least_seconds(tries)[0]) == "fast"


def test_a_way_that_is_far_behind_costs_three_rounds(sleep) -> None:
    calls = 0

    def slow() -> None:
        nonlocal calls
        calls += 1
        sleep(0.02)

    least_seconds([{"fast": partial(sleep, 0.001), "slow": slow}, {"fast": partial(sleep, 0.001)}])
    assert calls == 3


@pytest.mark.parametrize("best", LAYOUTS)
def test_what_is_fast_is_chosen(best: str, sleep, monkeypatch) -> None:
    """On processors of three kinds, which delay all layouts but one."""
    linear, packed = F.linear, Packed.__call__

    def delayed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if best != ("rows" if weight.is_contiguous() else "columns"):
            sleep(0.003)
        sleep(0.001)
        return linear(x, weight, bias)

    def delayed_packed(self: Packed, *tensors: Tensor) -> Tensor:
        if best != "packed":
            sleep(0.003)
        sleep(0.001)
        return packed(self, *tensors)

    monkeypatch.setattr(F, "linear", delayed_linear)
    monkeypatch.setattr(Packed, "__call__", delayed_packed)
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))
    assert lay_out_(model).chosen == {best: 2}


def test_weights_of_one_shape_lie_alike_and_a_large_one_is_tried_in_part(monkeypatch) -> None:
    monkeypatch.setattr(layout, "ENOUGH", 2**16)
    monkeypatch.setattr(layout, "ENOUGH_OF_ONE", 2**14)
    model = nn.Sequential(*(nn.Linear(64, 512) for _ in range(5)), nn.Linear(64, 7))
    said = lay_out_(model, 3)
    assert sum(said.chosen.values()) == 6 and said.speed > 0
    lies = [(type(layer), layer.weight.is_contiguous()) for layer in model[:5]]
    assert len(set(lies)) == 1


def test_products_of_training_are_timed_by_dtype_and_library() -> None:
    model = tiny_gpt2()
    ways = [way for way in TRAINING if way[0] == "float32" or multiplies(torch.bfloat16)]
    state = torch.get_rng_state()
    times = time_products(model, 8)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(times) == ways and all(took > 0 for took in times.values())
    use_onednn_(model)
    assert list(time_products(model, 8)) == ways
    assert time_products(model.double(), 8) == {} == time_products(nn.LayerNorm(2), 8)
    assert faster_dtype(tiny_gpt2().bfloat16()) in (torch.float32, torch.bfloat16)
    assert faster_dtype(nn.LayerNorm(2)) == torch.float32


def test_the_faster_dtype_is_that_of_all_products(monkeypatch) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(10)), nn.Linear(64, 4096)).bfloat16()
    seconds = {64: (1.0, 2.0), 4096: (4.0, 3.0)}  # a product in float32, and in bfloat16

    def timed(tries):
        both = (torch.float32, torch.bfloat16)
        return [
            {way: seconds[rows][both.index(way[0])] for way in calls}
            for rows, calls in zip((64, 4096), tries, strict=True)
        ]

    monkeypatch.setattr(layout, "least_seconds", timed)
    assert faster_dtype(model) == torch.float32  # 14 seconds against 23
    seconds[64] = (1.0, 0.5)
    assert faster_dtype(model) == torch.bfloat16


def test_the_way_back_gives_the_memory_back() -> None:
    model = tiny_gpt2()
    lay_out_(model, 1, ["packed"])
    lay_out_(model, 1, ["rows"])
    assert not any("packed" in vars(module) for module in model.modules())
