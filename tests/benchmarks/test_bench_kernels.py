"""bench_kernels.py: every row runs and agrees with PyTorch; what it stores is what pages read."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed here", exc_type=ImportError)

import bench_kernels
import torch
import triton
from bench_kernels import ROWS, Row, Setting
from compile_kernels import kernels_in_the_package
from gallery import pages
from sources import modules
from tiny_models import tiny_qwen2, token_ids

from lm_from_scratch.instruments.roofline import GPU, Cost, measurements

#: Kernels of which a part of another row is timed, or nothing: one number is written for each key.
NOT_TIMED = {"write_kernel"}


def launches(monkeypatch: pytest.MonkeyPatch, instead: Callable[[str], bool]) -> set[str]:
    """The names of the kernels that are launched from now on; ``instead`` of some, nothing is."""
    launched: set[str] = set()
    plain = triton.KernelInterface.__getitem__

    def listed(kernel: Any, grid: Any) -> Any:
        launched.add(kernel.fn.__name__)
        return (lambda *_, **__: None) if instead(kernel.fn.__name__) else plain(kernel, grid)

    monkeypatch.setattr(triton.KernelInterface, "__getitem__", listed)
    return launched


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_every_kernel_is_in_a_row_that_agrees_with_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: torch.dtype | None
) -> None:
    """In half precision, too, which is what a GPU computes with."""
    launched = launches(monkeypatch, instead=lambda name: False)
    if dtype is None:
        bench_kernels.main(["--smoke"])
    else:
        bench_kernels.smoke(Setting(smoke=True, dtype=dtype), list(ROWS))
    assert re.search(r"\d+ rows agree with torch, 4 models decode", capsys.readouterr().out)
    assert kernels_in_the_package() - launched <= NOT_TIMED


def fails(row: Row) -> bool:
    try:
        bench_kernels.check_agreement(row)
    except AssertionError as error:
        return "differs from torch by" in str(error)
    return False


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n == "flash_attention")) for n in ROWS],
)
def test_a_kernel_that_does_nothing_is_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """None of them at all: every row fails. All but one: a row fails."""
    setting = Setting(smoke=True)
    with monkeypatch.context() as patch:
        launched = launches(patch, instead=lambda _: True)
        for row in ROWS[name](setting):
            assert fails(row), row.kernel
    for kernel in launched if len(launched) > 1 else ():
        with monkeypatch.context() as patch:
            launches(patch, instead=lambda one, kernel=kernel: one == kernel)
            assert any(fails(row) for row in ROWS[name](setting)), kernel


def test_a_step_of_half_precision_that_does_nothing_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches(monkeypatch, instead=lambda _: True)
    (row,) = ROWS["galore_step"](Setting(smoke=True, dtype=torch.float16))
    assert fails(row)


def test_a_number_is_moved_once() -> None:
    """Of tensors of one size there are, with the gradient, twice as many: none is read again."""
    setting = Setting(smoke=True)
    for name in ("swiglu", "softmax", "rms_norm", "matmul", "linear_cross_entropy"):
        forward, both, *_ = ROWS[name](setting)
        assert both.kernel == f"{forward.kernel} with gradient"
        targets = 5 * 8 if "entropy" in name else 0  # have no gradient
        assert both.cost.bytes == 2 * forward.cost.bytes - targets
    products = [row.cost.operations for row in ROWS["linear_cross_entropy"](setting)]
    assert products == [2 * 5 * 300 * 32, 3 * 2 * 5 * 300 * 32]


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_losses_of_the_wrong_tokens_are_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Their mean is right."""
    from lm_from_scratch.kernels import loss

    plain = getattr(loss, name)
    monkeypatch.setattr(loss, name, lambda *given: [plain(*given)[0].roll(1, -1)])
    assert fails(next(iter(ROWS[name](Setting(smoke=True)))))


def test_a_small_change_is_seen() -> None:
    x = torch.ones(3)
    runs = {"kernel": lambda: x, "torch": lambda: 1.001 * x}
    assert not fails(Row("a step", "3", torch.float16, Cost(12, 3), runs))
    assert fails(Row("a step", "3", torch.float16, Cost(12, 3), runs, before=[x]))


def test_rows_that_look_at_positions_count_what_is_visible() -> None:
    rows = [row for name in ("flash_attention", "decoding") for row in ROWS[name](Setting(True))]
    for name in ("flash_attention, documents", "decode_attention, left-padded"):
        (row,) = (row for row in rows if row.kernel == name)
        function, (q, *_) = row.runs["kernel"].args
        visibility = function.keywords["visibility"]
        B, H, _, D = q.shape
        assert not visibility.dense and len(visibility.mask) == B
        assert row.cost.operations == 4 * H * D * int(visibility.mask.sum())


def test_rows_have_names_that_pages_ask_for() -> None:
    """`roofline.show("swiglu", ...)` finds the results of the row of that name."""
    names = {row.kernel for make in ROWS.values() for row in make(Setting(smoke=True))}
    for page in pages.notebooks():
        for asked in re.findall(r"\bshow\(\s*\"([^\"]+)\"", modules.code(page)):
            assert asked in names, f"{page.name} shows {asked!r}"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "REPETITIONS", 3)


@pytest.mark.slow
def test_what_is_stored_is_what_pages_read(
    few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a clock that says 2 ms of everything."""
    setting = Setting(smoke=True)
    calls = []

    def clock(run: bench_kernels.Run) -> float:
        calls.append(run())
        return 0.002

    roof = GPU("a chip", 1e9, 1e12, 1e12)
    results: list[dict[str, Any]] = []
    assert bench_kernels.run_rows(setting, clock, ["swiglu", "matmul"], roof, results) == []
    assert {result["kernel"] for result in results} == {
        "swiglu", "swiglu with gradient", "matmul", "matmul with gradient"
    }  # fmt: skip
    assert len(calls) == 2 * len(results) * (3 + 3)
    assert "2000.0 us (+0% +0%)" in capsys.readouterr().out
    ceilings = bench_kernels.ceilings(lambda run: (run(), 0.5)[1], setting)
    assert ceilings == {"copy": 4 * 2**10, "matmul": 4 * 16**3}
    about = bench_kernels.provenance()
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", about["commit"])
    path = tmp_path / "gpu" / "measurements.json"
    rates: list[dict[str, Any]] = []
    assert bench_kernels.decode_rates(setting, rates) == []
    assert bench_kernels.decode_rates(setting, rates) == []  # nothing is left to do
    assert len(rates) == 4
    report = dict(provenance=about, ceilings=ceilings, results=results, decoding=rates)
    bench_kernels.store(path, report)
    assert [p.name for p in path.parent.iterdir()] == ["measurements.json"]
    stored = measurements(path)
    assert stored is not None and stored.provenance == about
    assert stored.of("swiglu")[0].seconds == {"kernel": [0.002] * 3, "torch": [0.002] * 3}
    assert {entry["implementation"] for entry in stored.decoding} == {"eager", "kernels"}


def test_a_static_cache_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that a GPU captures, uncompiled: its tokens are those of the growing cache."""
    from lm_from_scratch.generation.generate import generate
    from lm_from_scratch.generation.sampling import Sampler

    spoken = []

    def watched(model: Any, **_: Any) -> Any:
        def step(tokens: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
            spoken.append(tokens[:, 0].tolist())
            return model(tokens, *given, **named)

        return step

    monkeypatch.setattr(torch, "compile", watched)
    model = tiny_qwen2()
    idx = token_ids(2, 5)
    assert len(bench_kernels.static(model, idx, n=11, repetitions=2)) == 2
    greedy = list(generate(model, idx, 11, Sampler(temperature=0)))
    assert spoken == greedy[:8] + greedy + greedy


def row(**runs: Any) -> Row:
    return Row("a kernel", "3", torch.float32, Cost(12, 3), runs)


def test_a_kernel_that_differs_is_not_timed(few: None) -> None:
    x = torch.ones(3)
    runs = dict(kernel=lambda: x + 0.001, torch=lambda: x)
    result, problems = bench_kernels.measure(row(**runs), lambda run: (run(), 1.0)[1])
    assert list(result["seconds"]) == ["torch"]
    assert problems == [
        "a kernel 3, kernel: AssertionError: a kernel 3 differs from torch by 0.001"
    ]
    assert "not measured" in bench_kernels.line_of(result, GPU("a chip", 1.0, 1.0, 1.0))
    runs["kernel"] = lambda: x * torch.nan
    with pytest.raises(AssertionError, match="differs from torch by nan"):
        bench_kernels.check_agreement(row(**runs))


def test_one_that_fails_does_not_stop_the_others(few: None) -> None:
    def fails() -> None:
        raise RuntimeError("no such feature\nand a long trace")

    x = torch.ones(3)
    runs = dict(kernel=lambda: x, torch=lambda: x, compiled=fails)
    result, problems = bench_kernels.measure(row(**runs), lambda run: (run(), 1.0)[1])
    assert list(result["seconds"]) == ["kernel", "torch"]
    assert problems == ["a kernel 3, compiled: RuntimeError: no such feature"]


def test_a_row_that_cannot_be_made_does_not_stop_the_others(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(3)
    good = row(kernel=lambda: x, torch=lambda: x)

    def rows(setting: Setting) -> Iterator[Row]:
        yield good
        raise torch.OutOfMemoryError("CUDA out of memory\nand how much")

    other = dataclasses.replace(good, kernel="another")
    monkeypatch.setattr(bench_kernels, "ROWS", {"large": rows, "small": lambda _: [other]})
    results: list[dict[str, Any]] = []
    problems = bench_kernels.run_rows(
        Setting(smoke=True), lambda run: (run(), 1.0)[1], ["large", "small"],
        GPU("", 1.0, 1.0, 1.0), results,
    )  # fmt: skip
    assert [result["kernel"] for result in results] == ["a kernel", "another"]
    assert problems == ["large, kernel: OutOfMemoryError: CUDA out of memory"]
    assert bench_kernels.failed(problems)


@pytest.fixture
def timed(
    few: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, list[str]]]:
    """Times three rows and two models into ``tmp_path``, with a clock that says 1 s; gives how many
    were run, and what could not be measured."""
    x = torch.ones(3)
    ran: list[str] = []

    def made(kernel: str) -> Row:
        def run() -> torch.Tensor:
            ran.append(kernel)
            return x

        return dataclasses.replace(row(kernel=run, torch=lambda: x), kernel=kernel)

    def rates(setting: Setting, found: list[dict[str, Any]], keep: Callable[[], None]) -> list[str]:
        for name in ("eager", "kernels"):
            if name not in [rate["implementation"] for rate in found]:
                ran.append(name)
                entry = {"model": "m", "batch": 1, "implementation": name}
                found.append({**entry, "tokens_per_second": [1.0]})
                keep()
        return []

    two = {"two": lambda _: map(made, "ab"), "one": lambda _: [made("c")]}
    monkeypatch.setattr(bench_kernels, "ROWS", two)
    monkeypatch.setattr(bench_kernels, "decode_rates", rates)

    def table(at: str = "", **options: Any) -> tuple[int, list[str]]:
        """Stopped ``at`` a row, if one is named."""

        def clock(run: bench_kernels.Run) -> float:
            run()
            if ran and ran[-1] == at:
                raise KeyboardInterrupt
            return 1.0

        given = dict(only=None, uncompiled=False, resume=False) | options
        paths = dict(kept=tmp_path / "build" / "times.json", out=tmp_path / "measurements.json")
        ran.clear()
        problems = bench_kernels.table(
            Setting(smoke=True), clock, list(two), argparse.Namespace(**given, **paths)
        )
        return len(set(ran)), problems

    return table


def test_a_stopped_table_goes_on(timed: Any, tmp_path: Path) -> None:
    """Where it was, to the row; without ``resume``, or of another device, it begins anew."""
    kept, out = tmp_path / "build" / "times.json", tmp_path / "measurements.json"
    with pytest.raises(KeyboardInterrupt):
        timed(at="b")
    assert [result["kernel"] for result in json.loads(kept.read_text())["results"]] == ["a"]
    assert not out.exists()
    assert timed(resume=True) == (4, [])  # b, c and the models
    assert out.read_text() == kept.read_text()
    stored = measurements(out)
    assert stored is not None and [result.kernel for result in stored.results] == ["a", "b", "c"]
    assert [p.name for p in kept.parent.iterdir()] == ["times.json"]
    assert timed(resume=True) == (0, [])
    assert timed() == (5, [])
    report = json.loads(kept.read_text())
    later = {"date": "1970", "commit": "of its outputs"}
    bench_kernels.store(kept, report | {"provenance": report["provenance"] | later})
    assert timed(resume=True) == (0, [])
    bench_kernels.store(kept, report | {"provenance": report["provenance"] | {"device": "other"}})
    assert timed(resume=True) == (5, [])


def test_a_part_of_a_table_does_not_replace_a_whole_one(
    timed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "measurements.json"
    assert timed(only=["one"]) == (3, []) and timed(uncompiled=True) == (5, [])
    assert not out.exists() and "kept in" in capsys.readouterr().out
    missing = ["swiglu 3, Liger-Kernel: RuntimeError: no"]
    monkeypatch.setattr(bench_kernels, "run_rows", lambda *_: list(missing))
    timed()
    assert json.loads(out.read_text())["results"] == []
    out.write_text("whole")
    missing[0] = "swiglu 3, kernel: RuntimeError: no"
    assert timed() == (2, missing)
    assert out.read_text() == "whole"


def test_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Setting(smoke=False, device="cpu").compiled(torch.relu) is not None
    assert Setting(smoke=False, device="cpu", compiles=False).compiled(torch.relu) is None


def test_the_line_says_the_share_and_the_spread() -> None:
    result = dict(
        kernel="x", shape="3", dtype="float32", bytes=100, operations=1,
        seconds=dict(kernel=[2.0, 1.0, 4.0], torch=[3.0]),
    )  # fmt: skip
    line = bench_kernels.line_of(result, GPU("a chip", 100.0, 1e9, 1e9))
    assert "2000000.0 us (-50% +100%),  50% of the roof, torch 1.50 x" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench_kernels.main(["--out", str(tmp_path / "m.json")])
    assert capsys.readouterr().out.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
