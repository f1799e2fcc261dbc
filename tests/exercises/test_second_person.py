"""A second person's answers: written from the text of an exercise alone, in other code.

``RIGHT`` of a file in `second_person/` lists right ones, ``ANSWERS`` has wrong ones with the label
of the mistake, empty where nobody had planted it. The report names it, but for those in
``SILENT``: they round otherwise, raise, or give NaN.
"""

import runpy
from pathlib import Path
from typing import Any

import pytest
from exercise_bench import bench_of

FILES = sorted(Path(__file__).with_name("second_person").glob("*.py"))
RIGHT_SEEDS, WRONG_SEEDS = 20, 10


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def file(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    return bench_of(request.param.stem), runpy.run_path(str(request.param))


@pytest.mark.slow
def test_right_answers_pass(file: tuple[Any, dict[str, Any]]) -> None:
    bench, given = file
    for function in given["RIGHT"]:
        for seed in range(RIGHT_SEEDS):
            assert not bench.rejected_by(function, seed), f"{function.__name__}, seed {seed}"


@pytest.mark.slow
def test_wrong_answers_fail(file: tuple[Any, dict[str, Any]]) -> None:
    bench, given = file
    for function in given["ANSWERS"]:
        for seed in range(WRONG_SEEDS):
            assert bench.rejected_by(function, seed), f"{function.__name__}, seed {seed}"


@pytest.mark.slow
def test_planted_mistakes_are_named(file: tuple[Any, dict[str, Any]]) -> None:
    bench, given = file
    labels = {wrong.label for wrong in bench.exercise.wrong}
    for function, label in given["ANSWERS"].items():
        if not label:
            continue
        assert label in labels, f"{function.__name__}: no label {label!r}"
        report = bench.examine(function)
        expected = "" if function in given.get("SILENT", ()) else label
        assert (report.wrong.label if report.wrong else "") == expected, function.__name__
