"""The exercises are whole, and a check says the first thing wrong."""

import ast
import contextlib
import math
import os
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lm_from_scratch.exercises import check, progress
from lm_from_scratch.exercises.card import card
from lm_from_scratch.exercises.compare import compare
from lm_from_scratch.exercises.exercise import (
    Case,
    Exercise,
    Wrong,
    call,
    drafts,
    exercise,
    exercises,
)
from lm_from_scratch.exercises.inputs import normal, refusal
from lm_from_scratch.exercises.report import examine
from lm_from_scratch.exercises.run import OutOfTime, quiet, time_limit
from lm_from_scratch.exercises.source import (
    answer,
    cells,
    load,
    script,
    solution,
    source,
    stub,
    written,
)

ROOT = Path(__file__).parents[3]
NAMES = sorted(found.name for found in exercises())


# --------------------------------------------------------------------------- every exercise


@pytest.mark.parametrize("name", NAMES)
def test_an_exercise_is_complete(name: str) -> None:
    e = exercise(name)
    assert e.name == name and e.reference is not None
    assert [*(ROOT / "tutorials").glob(f"{e.page}.*")], e.page  # a script, or a stored notebook
    assert 5 <= e.minutes <= 60 and e.difficulty in (1, 2, 3) and len(e.hints) >= 2
    assert 6 <= len(e.cases) <= 12 and e.points >= 6
    assert all(other in NAMES and other != name for other in e.after), e.after
    assert bool(e.hunt) == name.startswith("hunt_")
    assert e.outcome.endswith(".")


@pytest.mark.parametrize("name", NAMES)
def test_a_source_has_one_place_to_write_and_one_check(name: str) -> None:
    e, parts = exercise(name), cells(written(name))
    assert source(name)[: len(parts)] == parts  # then a cell that plays it, if it has a place
    assert parts[0].kind == "markdown" and parts[0].text.startswith("# ")
    assert sum(cell.is_solution for cell in parts) == 1
    assert sum(cell.is_check for cell in parts) == 1 and parts[-1].is_check
    lines = [line for cell in parts if cell.kind == "code" for line in cell.text.splitlines()]
    assert [line for line in lines if len(line) > 80 and '"""' not in line] == []  # fits the site
    assert parts[-1].text == (
        "from lm_from_scratch.exercises import check\n\n"
        f'points = check("{name}", {e.function})\n'
        "### BEGIN HIDDEN TESTS\n"
        f'points = min(points, check("{name}", {e.function}, seed=7341))\n'
        "### END HIDDEN TESTS\n"
        "float(points)"
    )
    stubbed = stub(name)
    tree = ast.parse(stubbed)
    defined = [n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    assert e.function in defined
    assert "raise NotImplementedError()" in stubbed and "SOLUTION" not in stubbed
    assert "SOLUTION" not in solution(name) and "HIDDEN" not in script(name)


def test_names_are_there_once() -> None:
    functions = [e.function for e in (*exercises(), *drafts())]
    assert len(set(functions)) == len(functions)


def test_the_course_has_what_it_promises() -> None:
    """At least 24 exercises over all chapters, 8 bug hunts, a kernel."""
    assert len(exercises()) >= 24
    assert sum(bool(e.hunt) for e in exercises()) >= 8
    assert any(e.needs == "triton" for e in exercises())
    chapters = {e.page.partition("/")[0] for e in exercises()}
    there = {path.parent.name for path in (ROOT / "tutorials").glob("[!.]*/[0-9]*.*")}
    assert chapters == there


def test_prerequisites_have_no_circle() -> None:
    after = {e.name: set(e.after) for e in exercises()}
    while after:
        free = [name for name, needs in after.items() if not needs & after.keys()]
        assert free, f"a circle among {sorted(after)}"
        for name in free:
            del after[name]


# --------------------------------------------------------------------------- reports


def norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return answer(exercise("rms_norm"))(x, weight, eps)


def cyclic() -> list[object]:
    found: list[object] = []
    found.append(found)
    return found


def said(function: Callable[..., object], **options: int) -> str:
    return examine(exercise("rms_norm"), function, **options).text()


def test_a_right_answer_gets_all_points(capsys: pytest.CaptureFixture[str]) -> None:
    points = check("rms_norm", norm)
    text = capsys.readouterr().out
    assert type(points) is float and points == exercise("rms_norm").points
    assert "8 of 8 checks" in text and "All checks hold. A grading run repeats them" in text
    assert "passed" not in text.lower()  # a grading run may say otherwise


def test_what_is_not_written_is_no_failure() -> None:
    def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        raise NotImplementedError()

    assert said(rms_norm) == "rms_norm: not written yet (0 of 11 points)"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x, w, e=1e-6: None, "the result is None: is there a return statement?"),
        (lambda x, w, e=1e-6: 3.0, "the result is float 3.0; expected a tensor float32[3,5,16]"),
        (lambda x, w, e=1e-6: norm(x, w, e)[..., :1], "has shape [3, 5, 1], expected [3, 5, 16]"),
        (lambda x, w, e=1e-6: norm(x, w, e).double(), "is float64, expected float32"),
        (lambda x, w, e=1e-6: norm(x, w, e) / 0, "are infinite, the first at"),
        (lambda x, w, e=1e-6: norm(x, w, e) * math.nan, "are NaN, the first at [0, 0, 0]"),
        (lambda x, w, e=1e-6: norm(x, w, e) * 0, "the result is all zeros"),
        (lambda x, w, e=1e-6: norm(x, w, e) + x.zero_(), "wrote into its argument x"),
        (lambda x, w, e=1e-6: norm(x.detach(), w, e), "no gradient reaches x: did you use detach"),
        (lambda x, w, e=1e-6: norm(x, w, e) + x * 0 + (x - x.detach()), "the gradient of x differ"),
        (lambda x: x, "TypeError: "),
        (lambda x, w, e=1e-6: norm(x, w, e).to_sparse(), "a sparse or nested tensor"),
        (lambda x, w, e=1e-6: torch.nested.nested_tensor([x.detach()]), "a sparse or nested"),
        (lambda x, w, e=1e-6: cyclic(), "RecursionError: "),
        (lambda x, w, e=1e-6: breakpoint(), "has no prompt: call your function yourself"),
        (lambda x, w, e=1e-6: sys.exit(0), "SystemExit: 0"),
        (lambda x, w, e=1e-6: mask, "mask is not defined inside the function"),  # type: ignore[name-defined] # noqa: F821
    ],
)
def test_the_first_thing_wrong_is_said_first(function: Callable[..., object], words: str) -> None:
    text = said(function)
    assert words in text, text
    assert "looks like" not in text or "zeros" in words or "NaN" not in words


def test_a_report_names_the_line_the_call_and_the_way_back() -> None:
    code = "def rms_norm(x, w, eps=1e-6):\n    print('here', x.shape)\n    return x.view(7)\n"
    text = said(load(code, "mine.py")["rms_norm"])
    assert "line 3: return x.view(7)" in text
    assert "call: x float32[3,5,16], weight float32[16], eps=1e-05" in text
    assert 'again: check("rms_norm", rms_norm, case=1)' in text
    assert text.count("this case is about:") == 1 and "printed: here torch.Size([3, 5, 16])" in text
    alone = said(load(code, "mine.py")["rms_norm"], case=3, seed=5)
    beside = f"{ROOT / 'lm_from_scratch'}_of_mine/a.py"  # no part of the package
    assert "line 3: return x.view(7)" in said(load(code, beside)["rms_norm"], case=1)
    assert "0 of 1 checks" in alone and "case=3, seed=5" in alone


def test_a_misconception_is_named() -> None:
    def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)  # other code than that of the planted answer
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, None, eps) + 0 * centred

    assert "looks like: the mean is subtracted, as in LayerNorm" in said(rms_norm)
    assert "looks like" not in said(lambda x, w, e=1e-6: norm(x, w, e) * 1.1)
    assert "looks like" not in said(lambda x, w, e=1e-6: norm(x, w, e) * math.nan)


def test_one_case_of_many_is_no_misconception() -> None:
    """Where 40 x 40 saturates the softmax, any wrong scale looks like a missing root."""
    e = exercise("attention")
    code = solution(e.name).replace("math.sqrt(q.shape[-1])", "math.sqrt(q.shape[0])")
    report = examine(e, load(code, "mine.py")[e.function])
    assert len(report.failed) >= 10 and not report.wrong


def test_a_check_leaves_the_process_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    def noisy(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        torch.manual_seed(5)
        random.seed(5)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        print("on stdout")
        print("on stderr", file=sys.stderr)
        os.write(2, b"on the descriptor")
        warnings.warn("a warning", stacklevel=1)
        return norm(x, weight, eps)

    torch.manual_seed(1)
    random.seed(1)
    want = (torch.rand(3), random.random())
    torch.manual_seed(1)
    random.seed(1)
    report = examine(exercise("rms_norm"), noisy)
    got = (torch.rand(3), random.random())
    assert torch.equal(got[0], want[0]) and got[1] == want[1]
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    out, err = capfd.readouterr()
    assert not err and not out
    assert [r.case.name for r in report.failed] == ["gradients of x and weight"]


def test_defaults_of_a_notebook_do_not_matter() -> None:
    """A default device or dtype set in an early cell reaches neither the arguments nor the code."""
    e = exercise("hunt_mask_fill")
    right = answer(e)
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        assert examine(e, right).passed
        assert torch.get_default_device().type == "meta"
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)

    def moves(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        torch.set_default_device("meta")
        return norm(x, weight, eps)

    try:
        assert examine(exercise("rms_norm"), moves).points
        assert torch.get_default_device().type == "cpu"
    finally:
        torch.set_default_device(None)


def test_a_list_that_grows_or_shrinks_is_changed() -> None:
    def make(g: torch.Generator) -> object:
        return call([normal(g, 2), normal(g, 2)])

    def total(parts: list[Tensor]) -> Tensor:
        return parts[0] + parts[1]

    def grow(parts: list[Tensor]) -> Tensor:
        parts.append(parts[0])
        return total(parts)

    def shrink(parts: list[Tensor]) -> Tensor:
        return parts[0] + parts.pop()

    e = toy(cases=(Case("sum", make, "add"),), reference=total, wrong=())
    for function, name in ((grow, "parts[2]"), (shrink, "parts[1]")):
        assert f"wrote into its argument {name}" in examine(e, function).text()


def test_a_check_holds_under_inference_mode_and_autocast() -> None:
    for name in ("rms_norm", "attention", "hunt_tied_weights"):
        e = exercise(name)
        with torch.inference_mode():
            assert examine(e, answer(e)).passed, name
            assert torch.is_inference_mode_enabled()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert examine(e, answer(e)).passed, name
            assert torch.is_autocast_enabled("cpu")


def test_a_case_and_a_seed_make_the_same_numbers() -> None:
    seen: list[Tensor] = []

    def keep(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        seen.append(x.detach().clone())
        return norm(x, weight, eps)

    for seed in (0, 0, 1):
        examine(exercise("rms_norm"), keep, seed, case=1)
    first, second = seen[0::2], seen[1::2]  # it is called twice
    for calls in (first, second):
        assert torch.equal(calls[0], calls[1]) and not torch.equal(calls[0], calls[2])
    assert first[0].shape == second[0].shape and not torch.equal(first[0], second[0])
    examine(exercise("rms_norm"), keep, 0)
    assert torch.equal(seen[0], seen[6])  # alone or among the others


def test_bad_names_and_cases_are_refused() -> None:
    with pytest.raises(ValueError, match="no exercise 'rms_nrom'; do you mean rms_norm"):
        check("rms_nrom", norm)
    with pytest.raises(ValueError, match="has cases 1 to 8, not 9"):
        check("rms_norm", norm, case=9)
    with pytest.raises(ValueError, match="no exercise"):
        exercise("../rms_norm")


def test_an_exercise_that_contradicts_itself_is_refused() -> None:
    e = exercise("rms_norm")
    with pytest.raises(ValueError, match="two cases have one name"):
        replace(e, cases=(*e.cases, e.cases[0]))
    with pytest.raises(ValueError, match="names no case"):
        replace(e, wrong=(Wrong("a label", norm, "nowhere"),))
    with pytest.raises(ValueError, match="hints"):
        replace(e, hints=())


def test_a_loop_that_never_ends_is_stopped() -> None:
    def forever(*args: object) -> None:
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    with pytest.raises(OutOfTime), time_limit(0.1):
        forever()
    report = examine(exercise("rms_norm"), forever, seconds=0.4)
    assert not report.points and "Is there a loop that never ends?" in report.text()


# --------------------------------------------------------------------------- guards, refusals


def toy(**changes: object) -> Exercise:
    """Doubling, with a guard."""

    def make(g: torch.Generator) -> object:
        return call(normal(g, 3))

    def double(x: Tensor) -> Tensor:
        if x.dim() == 0:
            raise ValueError("a number")
        return 2 * x

    cases = (
        Case("keeps the shape", make, "shape", use=lambda f, x: list(f(x).shape), guard=True),
        Case("doubles", make, "twice", points=3),
        Case("refuses", lambda g: call(torch.tensor(1.0)), "ValueError", use=refusal()),
    )
    options = dict(
        name="toy", function="double", page="p", minutes=1, difficulty=1,
        outcome="Double.", reference=double, cases=cases, hints=("times two",),
        wrong=(Wrong("adds two", lambda x: x + 2, "doubles"),),
    )  # fmt: skip
    return Exercise(**{**options, **changes})  # type: ignore[arg-type]


def test_no_points_while_a_guard_fails() -> None:
    report = examine(toy(), lambda x: torch.cat([2 * x, x]))
    assert report.points == 0 and 'a check that "must hold" fails' in report.text()
    assert examine(toy(), lambda x: 2 * x).points == 3
    assert "looks like: adds two" in examine(toy(), lambda x: 2 + x).text()


def test_a_reference_that_fails_is_our_fault() -> None:
    with pytest.raises(RuntimeError, match="toy: the reference fails: ZeroDivisionError"):
        examine(toy(reference=lambda x: 1 / 0), lambda x: x)


# --------------------------------------------------------------------------- compare


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("got", "want", "words"),
    [
        (torch.ones(1, 4), torch.ones(3, 4), "has shape [1, 4], expected [3, 4]"),
        (torch.ones(3), torch.ones(3, dtype=torch.int64), "is float32, expected int64"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "the first at [1]: got 2, expected 3"),
        (torch.tensor([1.0]), torch.tensor([-math.inf]), "largest error inf"),
        (torch.tensor([1.0]), torch.tensor([math.nan]), "1 of 1 values"),
        ((1, 2), (1, 2, 3), "has 2 parts, expected 3"),
        ([torch.ones(2)], [torch.zeros(2)], "the result[0]"),
        ({"length": 3}, {"length": 4}, "length is 3, expected 4"),
        ({"a": 1}, {"b": 1}, "the result is dict"),
        (1, True, "is int 1, expected bool True"),
        (0.5, 0.25, "the result is 0.5, expected 0.25"),
        ("no", "yes", "expected 'yes'"),
        (1.0, math.inf, "the result is 1, expected inf"),
        (-math.inf, math.inf, "the result is -inf, expected inf"),
        (10**400, 1.0, "expected 1"),
        (Unspeakable(), torch.ones(2), "the result is Unspeakable <Unspeakable>"),
    ],
)
def test_a_difference_is_seen(got: object, want: object, words: str) -> None:
    fault = compare(got, want)
    assert fault is not None and words in fault.text, fault


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.0, -math.inf, math.nan]), torch.tensor([True]), torch.ones(0, 3), 1, "a",
        None, 0.1, [1, (torch.ones(2), "b")], {"a": torch.ones(1)}, math.inf,
    ],
)  # fmt: skip
def test_a_value_equals_itself(value: object) -> None:
    assert compare(value, value) is None


def test_tolerance_is_that_of_the_dtype() -> None:
    x = torch.ones(3)
    assert compare(x + 1e-6, x) is None and compare(x + 1e-4, x) is not None
    assert compare(x.double() + 1e-6, x.double()) is not None
    assert compare(x.half() + 1e-3, x.half()) is None
    assert compare(x + 1e-4, x, (0.0, 1e-3)) is None


# --------------------------------------------------------------------------- sources


def test_a_source_is_cut_into_cells() -> None:
    parts = cells("# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nx = 1\n")
    assert [(c.kind, c.text) for c in parts] == [
        ("markdown", "# Title\n\nText."),
        ("code", "x = 1"),
    ]


# --------------------------------------------------------------------------- progress


def test_progress_keeps_the_best_and_survives_a_broken_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a" / "progress.json"
    monkeypatch.setenv("LM_FROM_SCRATCH_PROGRESS", str(file))
    with quiet():
        check("rms_norm", norm, seed=3)
        check("rms_norm", lambda x, w, e=1e-6: x)
    assert progress.load() == {}  # a lambda is not the student's function
    progress.keep("rms_norm", 5.0, False, 0)
    progress.keep("rms_norm", 3.0, False, 1)
    progress.update("rms_norm", hints=2)
    assert progress.load()["rms_norm"] == {"points": 5.0, "passed": False, "seed": 0, "hints": 2}
    file.write_text("{ broken")
    assert progress.load() == {}
    progress.keep("rms_norm", 11.0, True, 0)
    assert progress.load()["rms_norm"]["passed"]
    files = ["progress-damaged-1.json", "progress.json"]
    assert sorted(path.name for path in file.parent.glob("[!.]*")) == files
    monkeypatch.setenv("LM_FROM_SCRATCH_PROGRESS", "/proc/no/such/place.json")
    progress.keep("rms_norm", 11.0, True, 0)  # nowhere to write: no error


def test_a_card_says_what_its_exercise_says() -> None:
    """It is read from the source, so that a list needs no torch."""
    for one in (*exercises(), *drafts()):
        own = card(one.name)
        assert {name: vars(one)[name] for name in vars(own)} == vars(own)
