"""The benchmarks: every line runs, neighbours are compared, and the page hides no bad row."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import time
from pathlib import Path
from typing import Any

import bench
import bench_pages
import measure
import pytest
import torch
from measure import SMOKE, Row, Size, rows_of
from output import benchmarks
from sources.templates import render

from lm_from_scratch.instruments.onednn import multiplies

ROOT = Path(__file__).parents[2]
REPORTS = measure.all_stored()
#: A row that is ahead, of a benchmark that exists.
ROW = measure.compare("a model", "ours", "a peer", "ms", [1.0, 1.0, 1.0], [2.0, 3.0, 1.5])


def report(rows: list[Row] | None = None, name: str = "training") -> dict[str, Any]:
    made = measure.new_report(SMOKE)
    measure.add(made, name, [ROW] if rows is None else rows, 1.0)
    return made


def stored(made: dict[str, Any], folder: Path) -> Path:
    measure.write(made, folder / "benchmarks.json")
    return folder / "benchmarks.json"


# ------------------------------------------------------------------------------- how it measures


def test_a_ratio_compares_neighbours() -> None:
    """Not medians of each: a slow moment that meets both leaves the ratio as it is."""
    row = measure.compare("", "", "", "ms", [1.0, 10.0, 2.0], [2.0, 30.0, 4.0])
    assert row.ratio == [2.0, 2.0, 3.0] and row.rounds == 3
    assert (row.ours, row.theirs) == (2.0, 4.0)


def test_runs_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def limit() -> float:
        order.append("limit")
        return 10.0

    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    times = measure.in_turns(runs, 2, {"limit": limit})
    assert order == ["a", "b", "limit", "a", "b", "limit", "a", "b"]
    assert [len(seconds) for seconds in times.seconds.values()] == [2, 2]
    order.clear()
    measure.in_turns(runs, 1, warm_up=False)
    assert order == ["a", "b"]


def test_a_share_is_of_the_limit_of_the_same_round() -> None:
    times = measure.Times({"a": [4.0, 2.0], "b": [4.0, 4.0]}, {"memory": [25.0, 100.0]})
    row = times.row("", "a", "b", limit="memory", work=100.0)
    assert row.share == [0.75, 0.5, 1.0]  # 4 s of 4, and 1 s of 2
    assert (row.unit, row.ours, row.at_limit) == ("ms", 2000 * 1.5, 1000 * 2.5)
    row = times.row("", "a", "b", tokens=12, limit="memory", work=100.0)
    assert (row.unit, row.ours, row.theirs) == ("tokens/s", 4.0, 3.0)
    assert row.ratio == [1.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("ratio", "beside", "text"),
    [
        ([1.1, 0.9, 1.3], "undecided", "no clear difference"),
        ([0.9, 0.8, 1.1], "undecided", "no clear difference"),
        ([0.9, 0.8, 0.99], "behind", "**slower**"),
        ([1.0, 0.995, 1.1], "ahead", "faster"),
        ([1.0, 1.0, 1.0], "ahead", "faster"),
    ],
)
def test_what_crosses_is_not_decided(ratio: list[float], beside: str, text: str) -> None:
    row = dataclasses.replace(ROW, ratio=ratio)
    assert row.beside == beside and benchmarks.BESIDE[beside] == text
    assert f": {text}\n" in benchmarks.cell(row)


def test_memory_on_huge_pages_is_memory() -> None:
    """Wherever it lies: what the system gives is stored beside the results."""
    ones = measure.on_huge_pages(2**20)
    assert ones.dtype == torch.float32 and ones.sum() == 2**20
    assert measure.huge_pages() in (None, "always", "madvise", "never")
    assert measure.huge_megabytes() >= 0


def test_both_libraries_are_asked_for_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_from_scratch.instruments import onednn

    rate = measure.multiplying(torch.float32, SMOKE)
    assert rate() > 1e6
    monkeypatch.setattr(onednn, "product", lambda a, b: time.sleep(0.01))
    assert measure.multiplying(torch.float32, SMOKE)() > 1e8  # the slow one does not count


def test_memory_is_that_of_a_process_of_its_own() -> None:
    if not measure.has_peak():
        pytest.skip("no /proc here")
    held = torch.ones(2**24)  # 64 MB, which the other process does not have
    peak = measure.in_a_process("measure", "peak_megabytes")
    assert 20 < peak < measure.peak_megabytes()
    assert held[0] == 1


@pytest.mark.slow
def test_a_process_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"measure.seconds_of\(1,\) failed"):
        measure.in_a_process("measure", "seconds_of", 1)


# ----------------------------------------------------------------------------------- the results


def test_a_report_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(report(), tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        measure.write({"seconds": float("nan")}, path)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        measure.write({}, path)
    assert path.read_bytes() == before


def test_a_stopped_run_keeps_what_is_finished_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def rows(name: str, stops: bool) -> Any:
        def one(size: Size) -> Any:
            ran.append(name)
            yield ROW
            if stops:
                raise KeyboardInterrupt

        return one

    monkeypatch.setattr(bench, "BENCHMARKS", {"a": "test_bench.a", "b": "test_bench.b"})
    module = importlib.import_module("test_bench")
    monkeypatch.setattr(module, "a", rows("a", False), raising=False)
    monkeypatch.setattr(module, "b", rows("b", True), raising=False)
    out = tmp_path / "results.json"
    options = ["--smoke", "--out", str(out)]
    bench.main(options)
    assert list(measure.read(out)["benchmarks"]) == ["a"]
    assert "--resume" in capsys.readouterr().out
    monkeypatch.setattr(module, "b", rows("b", False))
    bench.main([*options, "--resume"])
    assert list(measure.read(out)["benchmarks"]) == ["a", "b"] and ran == ["a", "b", "b"]
    bench.main([*options, "--only", "a"])
    assert list(measure.read(out)["benchmarks"]) == ["a", "b"] and ran == ["a", "b", "b", "a"]
    # results of another machine are not mixed with these
    monkeypatch.setattr(measure, "processor", lambda: "another")
    bench.main([*options, "--only", "b"])
    assert list(measure.read(out)["benchmarks"]) == ["b"]


def test_results_say_nothing_about_who_measured() -> None:
    text = json.dumps(measure.new_report(SMOKE))
    import getpass
    import platform

    for private in (platform.node(), str(Path.home()), str(ROOT)):
        assert private not in text
    assert f'"{getpass.getuser()}"' not in text


def test_the_stored_results_cover_every_benchmark() -> None:
    for made in REPORTS:
        results = made["benchmarks"]
        assert set(results) <= set(bench.BENCHMARKS)
        assert all(results[name]["rows"] for name in results if name != "pages")
        assert made["size"] == "full"
    assert set().union(*(made["benchmarks"] for made in REPORTS)) == set(bench.BENCHMARKS)


def test_a_file_is_named_after_its_processor() -> None:
    assert {measure.stored(made) for made in REPORTS} == {*measure.STORED.glob("*.json")}
    names = [measure.name_of(made) for made in REPORTS]
    assert len(names) == len(set(names)) >= 1


def test_every_file_is_run_by_the_command_or_by_hand() -> None:
    files = {path.stem for path in Path(__file__).parent.glob("bench_*.py")}
    run = {where.partition(".")[0] for where in bench.BENCHMARKS.values()}
    assert run | set(bench.BY_HAND) == files


# -------------------------------------------------------------------------------------- the page


def page_of(reports: list[dict[str, Any]], folder: Path) -> str:
    return render("benchmarks.rst", **benchmarks.values(reports, folder))


def test_a_bad_row_appears_as_bad(tmp_path: Path) -> None:
    bad = dataclasses.replace(ROW, kind="slow one", ratio=[0.5, 0.4, 0.6])
    fair = dataclasses.replace(ROW, kind="fair one")
    noisy = dataclasses.replace(ROW, kind="noisy one", ratio=[1.5, 0.9, 2.0], target=4.0)
    page = page_of([report([bad, fair, noisy])], tmp_path)
    said = "In the middle of 3 comparisons ours is **1.50 times as fast** as its peer, or as small "
    said += "(0.50 to 2.00). Slower in every round:\n\n* a model: slow one / a peer, 0.50\n"
    assert page.count(said) == 1
    cells = page[page.index("- slow one\n") :]
    assert "- 0.50 (0.40 to 0.60, 3 rounds): **slower**\n" in cells[: cells.index("- fair one")]
    assert "rounds): no clear difference\n" in cells[cells.index("- noisy one") :]
    order = [page.index(f"- {kind}\n") for kind in ("slow one", "fair one", "noisy one")]
    assert order == sorted(order)  # as measured, not by result


def test_nothing_slower_is_said(tmp_path: Path) -> None:
    page = page_of([report([ROW])], tmp_path)
    assert "Nothing here is slower than its peer in every round." in page
    assert "Slower in every round:" not in page


def test_the_figure_shows_the_bad_row_in_its_colour(tmp_path: Path) -> None:
    from lm_from_scratch.instruments.plot import COLOURS, GREY

    cases = ([0.5] * 3, COLOURS[3]), ([2.0] * 3, COLOURS[0]), ([1.5, 0.5, 2.0], GREY)
    for ratio, colour in cases:
        row = dataclasses.replace(ROW, ratio=ratio)
        benchmarks.figure([[row]], ["a processor"], tmp_path / "figure.svg")
        drawn = (tmp_path / "figure.svg").read_text().lower()
        assert [c for _, c in cases if c.lower() in drawn] == [colour]


def test_a_long_label_leaves_the_figure_its_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = dataclasses.replace(ROW, setting="a long name " * 6, share=[0.5] * 3, limit="copy")
    made: list[Any] = []
    monkeypatch.setattr(benchmarks, "save", lambda figure, path: made.append(figure))
    for ratio in ([1.5, 1.0, 2.0], [1.0, 0.02, 30.0]):
        line = [dataclasses.replace(row, ratio=ratio)]
        benchmarks.figure([line, line], ["a processor"], tmp_path / "a.svg")
        made[-1].canvas.draw()
        ax = made[-1].axes[0]
        assert ax.get_position().width > 0.6
        ticks = [label.get_window_extent() for label in ax.get_xticklabels()]
        assert len(ticks) > 1 and all(a.x1 < b.x0 for a, b in itertools.pairwise(ticks))


def test_seconds_of_pages_have_no_peer(tmp_path: Path) -> None:
    made = report()
    rows = [
        measure.compare(page, "ours", measure.BUDGET, "s", [took], [60.0], target=1.0)
        for page, took in {"short": 15.0, "long": 90.0}.items()
    ]
    measure.add(made, "pages", rows, 1.0)
    page = page_of([made], tmp_path)
    site = page.partition(benchmarks.QUESTIONS["pages"])[2].partition("How it was measured")[0]
    assert "slower" not in site and "ratio" not in site and "60" not in site
    for name, took in (("short", 15), ("long", 90)):
        cells = (name, "ours", benchmarks.NOTHING, f"{took} s")
        assert "\n        - ".join(cells) + "\n" in site


ABOVE = "A share above 100 % means"


def test_a_share_above_the_limit_is_never_silent(tmp_path: Path) -> None:
    above = dataclasses.replace(ROW, limit="copy", at_limit=2.0, share=[2.47, 0.4, 4.5])
    below = dataclasses.replace(above, share=[1.004, 0.9, 1.1])  # shown as 100 %
    page = page_of([report([below])], tmp_path)
    assert "100% of 2 (copy)\n" in page and ABOVE not in page
    page = page_of([report([below, above])], tmp_path)
    assert "247% of 2 (copy), **above the limit**\n" in page
    assert page.count(ABOVE) == 1


def test_the_page_says_how_fast_it_is(tmp_path: Path) -> None:
    """Medians of the rows that are part of the headline, whatever the others are."""

    def row(ratio: float, headline: str = "", rounds: int = 3) -> Row:
        return dataclasses.replace(ROW, ratio=[ratio] * 3, headline=headline, rounds=rounds)

    made = report([row(1.2, "in training"), row(50.0), row(1.1, "in training")])
    measure.add(made, "decoding", [row(1.9, "in decoding"), row(0.0, "in decoding", 0)], 1.0)
    made["threads"] = 1
    expected = (
        f"* **{measure.name_of(made)}**, 1 thread: **1.15** in training (2 rows, 1.10 to 1.20), "
        "**1.90** in decoding (1 row)."
    )
    assert any(line.startswith(expected) for line in page_of([made], tmp_path).splitlines()[:25])


def test_a_headline_is_a_result_beside_transformers() -> None:
    rows = [row for made in REPORTS for name in made["benchmarks"] for row in rows_of(made, name)]
    told = [row for row in rows if row.headline]
    assert told and all(row.peer.startswith("transformers") and row.beside for row in told)


@pytest.mark.parametrize("size", [measure.FULL, measure.QUICK])
def test_the_page_says_what_kind_of_run_is_stored(size: Size, tmp_path: Path) -> None:
    made = measure.new_report(size)
    made["date"] = "2026-01-02"
    measure.add(made, "training", [ROW], 1200.4)
    measure.add(made, "loss", [ROW], 34.0)
    for benchmark in made["benchmarks"].values():
        benchmark["date"] = "2026-01-02"
    text = page_of([made], tmp_path)
    line = f"A {size.name} run of 2026-01-02, 1,234 seconds for 2 of "
    line += f"{len(benchmarks.QUESTIONS)} questions."
    assert any(line in said for said in text.splitlines()[:25])
    assert ("Few rounds" in text) == (size.name == "quick")
    made["benchmarks"]["loss"]["date"] = "2026-01-04"
    assert "of 2026-01-02 to 2026-01-04, 1,234 s" in page_of([made], tmp_path)


def test_a_quick_run_is_written_where_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    monkeypatch.setattr(bench, "run", lambda names, size, report, out: written.append(out))
    bench.main(["--quick"])
    bench.main([])
    assert written == [ROOT / "build/bench/quick.json", measure.stored(report())]
    page = page_of([report()], tmp_path)
    assert "``build/bench/quick.json``" in page
    assert written[1].parent == ROOT / "docs/benchmarks" and "``docs/benchmarks``" in page


def test_processors_stand_side_by_side(tmp_path: Path) -> None:
    """Each has a column, also where one of them has not measured a row, or a benchmark."""
    one, other = report([ROW, dataclasses.replace(ROW, kind="only here")]), report()
    measure.add(other, "loss", [dataclasses.replace(ROW, kind="only there")], 1.0)
    for number, made in enumerate([one, other]):
        made["machine"] |= {"processor": "P", "capability": f"C{number}"}
    page = page_of([one, other], tmp_path)
    told = "- 2.00 (1.50 to 3.00, 3 rounds): faster\n\n          1 and 2 ms\n"
    line = f"      * - a model\n        - ours\n        - a peer\n        {told}        {told}"
    assert line.count(told) == 2 and line in page
    assert f"- only here\n        - a peer\n        {told}        - –\n" in page
    assert page.count("- P, C0\n") == page.count("- P, C1\n") - 1 == 2  # machine, training, loss
    assert page.count("(P, C1)") == 0 and "* **P, C1**, " in page


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    page = page_of([report()], tmp_path)
    assert page.count("Not measured in this run.") == len(bench.BENCHMARKS) - 1
    assert "A smoke run of" in page and "Its result is not stored here." in page


def test_an_unknown_benchmark_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"says nothing about \['poetry'\]"):
        page_of([report(name="poetry")], tmp_path)


# ---------------------------------------------------------------------------------- what it runs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the peers, and of torch.compile
@pytest.mark.parametrize("name", [name for name in bench.BENCHMARKS if name != "pages"])
def test_every_benchmark_runs_at_a_tiny_size(name: str) -> None:
    made = bench.run([name], SMOKE, measure.new_report(SMOKE), out=None)
    rows = [Row(**row) for row in made["benchmarks"][name]["rows"]]
    assert rows and len({(row.setting, row.kind, row.peer, row.unit) for row in rows}) == len(rows)
    measured = [row for row in rows if row.rounds]
    assert all(row.ours > 0 and row.theirs > 0 and row.ratio[1] > 0 for row in measured)
    absent = [row for row in rows if not row.rounds and row.note != "not installed"]
    assert not absent or not multiplies(torch.bfloat16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the peers, and of torch.compile
@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("training", {"ours bf16", "ours bf16, compiled"}),
        ("qwen2", {"ours", "ours, chunked loss"}),
        ("loss", {"ours", "ours, chunked"}),
        ("decoding", {"ours", "ours, packed"}),
        ("quantize", {"bf16, packed"}),
    ],
)
def test_without_bfloat16_a_benchmark_goes_on_and_its_row_says_so(
    name: str, absent: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a processor whose oneDNN refuses bfloat16, in products and in packing."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    # torchao looks at every operator of torch, and these are no longer any
    monkeypatch.setattr(measure, "APART", tmp_path)
    for refusing in ("_linear_pointwise", "_reorder_linear_weight"):
        plain = getattr(torch.ops.mkldnn, refusing)

        def refuse(x: torch.Tensor, *rest: Any, plain: Any = plain) -> torch.Tensor:
            if x.dtype == torch.bfloat16:
                raise RuntimeError("could not create a primitive descriptor")
            return plain(x, *rest)

        monkeypatch.setattr(torch.ops.mkldnn, refusing, refuse)
    made = bench.run([name], SMOKE, measure.new_report(SMOKE), out=None)
    rows = list(measure.rows_of(made, name))
    not_measured = [row for row in rows if not row.rounds and row.note != "not installed"]
    assert {row.kind for row in not_measured} == absent
    for row in not_measured:
        assert "bf16" in row.kind or "bfloat16" in row.setting
        assert (row.note, row.beside) == ("not on this processor", "")
    assert any(row.ours > 0 for row in rows)
    page = page_of([measure.read(stored(made, tmp_path))], tmp_path)
    assert page.count("- not on this processor\n") == len(not_measured)
    found = sum(1 for row in rows if row.rounds and row.beside)
    assert f"In the middle of {found} comparison" in page


def test_pages_are_those_of_a_whole_build(tmp_path: Path) -> None:
    assert list(bench_pages.rows(SMOKE, tmp_path)) == []
    case = '<testcase file="../tutorials/1_gpt2/{}.py" time="{}"/>'
    cases = [case.format("1_tokens", 90.0), case.format("2_gpt2", 20.0)]
    (tmp_path / "gallery_junit.xml").write_text(f"<testsuite>{''.join(cases)}</testsuite>")
    found = {row.setting: row.ours for row in bench_pages.rows(SMOKE, tmp_path)}
    pages = {"1_gpt2/1_tokens": 90.0, "1_gpt2/2_gpt2": 20.0}
    assert found == {"the scripts of all pages": 110.0, **pages}
    cases.append(case.format("3_training", 0))  # which did not run: the times are of two builds
    (tmp_path / "gallery_junit.xml").write_text(f"<testsuite>{''.join(cases)}</testsuite>")
    assert list(bench_pages.rows(SMOKE, tmp_path)) == []
