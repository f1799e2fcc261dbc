"""What is built from the exercises: it runs, it is the same twice, and it holds no solution."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from course import hand_out, plans, sheets
from exercise_leaks import leaks, plain, secrets
from gallery import exercises, navigation, pages
from output import generated
from sources.templates import render
from sphinx.addnodes import pending_xref

from lm_from_scratch.exercises import notebooks_command, source
from lm_from_scratch.exercises.exercise import Exercise
from lm_from_scratch.exercises.exercise import exercises as all_exercises
from lm_from_scratch.exercises.notebook import as_solution, as_source, as_student, dump, notebook
from lm_from_scratch.exercises.source import load

EXERCISES = all_exercises()
each_exercise = pytest.mark.parametrize("one", EXERCISES, ids=lambda one: one.name)


def one_in_six(first: int) -> Any:
    """In `make test`; of the others, tests/exercises checks the solution and the stub."""
    return pytest.mark.parametrize(
        "one",
        [
            pytest.param(one, marks=[pytest.mark.slow] * (i % 6 != first), id=one.name)
            for i, one in enumerate(EXERCISES)
        ],
    )


def code_of(notebook: dict[str, Any]) -> list[str]:
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


def run(notebook: dict[str, Any], one: Exercise) -> tuple[Any, str]:
    """Run the code cells in order in one namespace: the value of the check, and what was printed.
    Cells that run `play` are skipped; test_play.py tests them."""
    if one.needs and importlib.util.find_spec(one.needs) is None:
        pytest.skip(f"{one.needs} is not installed here")
    *first, last = (code for code in code_of(notebook) if "import play" not in code)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        # One file, so that Triton finds the source of a kernel; the last line is the value.
        body, _, value = last.rpartition("\n")
        code = "\n\n".join([*first, body, f"points_of_the_cell = {value}\n"])
        space = load(code, f"<notebook of {one.name}>")
    return space["points_of_the_cell"], printed.getvalue()


# -- the notebooks ---------------------------------------------------------------------------


@one_in_six(3)
def test_the_solution_gets_all_points(one: Exercise) -> None:
    made = notebook(one, as_solution)
    points, printed = run(made, one)
    assert isinstance(points, float)
    assert points == one.points
    assert "All checks hold" in printed


@one_in_six(0)
def test_what_nbgrader_runs_gets_all_points(one: Exercise) -> None:
    """With the hidden tests: other numbers in the same cases."""
    points, printed = run(notebook(one, as_source), one)
    assert points == one.points
    assert printed.count("All checks hold") == 2


@one_in_six(1)
def test_the_student_notebook_runs_and_gets_nothing(one: Exercise) -> None:
    points, printed = run(notebook(one), one)
    assert isinstance(points, float)
    assert points == 0.0
    assert "not written yet" in printed


@pytest.mark.slow
def test_in_a_real_kernel() -> None:
    """The tests above run cells by exec, which is fast; Jupyter says the same."""
    one = next(one for one in EXERCISES if one.name == "rms_norm")
    environment = {**os.environ, "PYTHONPATH": str(pages.ROOT)}
    for text, points in ((as_source, float(one.points)), (as_student, 0.0)):
        made = nbformat.reads(dump(notebook(one, text)), as_version=4)
        nbclient.NotebookClient(made, timeout=120, kernel_name="python3").execute(env=environment)
        *_, check, played = made.cells
        said, value = check.outputs
        assert played.outputs[0].text.startswith("rms_norm: every norm")
        assert said.name == "stdout" and said.text.startswith("rms_norm: ")
        assert value.data["text/plain"] == str(points)


@each_exercise
def test_cells_of_the_source(one: Exercise) -> None:
    """Text first, one solution, one check at the end, and nothing that only Jupyter runs."""
    cells = exercises.source.cells(exercises.source.written(one.name))
    assert cells[0].kind == "markdown" and cells[0].text.startswith("# ")
    assert [cell.is_solution for cell in cells].count(True) == 1
    assert [cell.is_check for cell in cells] == [False] * (len(cells) - 1) + [True]
    for cell in cells:
        assert cell.text.strip()
        assert cell.kind == "markdown" or not re.search(r"^\s*[%!]", cell.text, re.M)


@each_exercise
def test_metadata_of_nbgrader(one: Exercise) -> None:
    for text in (as_student, as_source, as_solution):
        made = notebook(one, text)
        nbformat.validate(made)
        tags = [cell["metadata"]["nbgrader"] for cell in made["cells"]]
        assert [tag["points"] for tag in tags if tag["grade"]] == [one.points]
        assert [tag["grade_id"] for tag in tags if tag["solution"]] == [f"{one.name}-solution"]
        (check,) = (tag for tag in tags if tag["grade"])
        assert check["grade_id"] == f"{one.name}-check" and tags.index(check) >= len(tags) - 2
        assert [tag["locked"] for tag in tags] == [not tag["solution"] for tag in tags]
        assert {tag["schema_version"] for tag in tags} == {3}
        identities = [tag["grade_id"] for tag in tags] + [cell["id"] for cell in made["cells"]]
        assert len(set(identities)) == 2 * len(tags)


def count(texts: dict[Path, str]) -> int:
    """Four files an exercise, the configuration, wrong answers, rules for AI helpers, sheets."""
    wrong = sum(len(sheets.votes(one)) for one in EXERCISES)
    rules = [path for path in texts if path.name == "AGENTS.md"]
    assert Path("student", "AGENTS.md") in rules
    assert {texts[path] for path in rules} == {source.rules()}
    of_weeks = [path for path in texts if path.parts[0] == "sheets"]
    return 4 * len(EXERCISES) + 1 + wrong + len(rules) + len(of_weeks)


@pytest.mark.slow
def test_the_same_bytes_twice() -> None:
    first = hand_out.files()
    exercises.source.source.cache_clear()
    assert hand_out.files() == first
    assert hand_out.archive(first) == hand_out.archive(first)
    assert len(first) == count(first)


@pytest.mark.parametrize("weeks", plans.PLANS)
def test_an_assignment_may_be_a_week_of_a_plan(weeks: int) -> None:
    """What the plan of the guide puts into a week, and each exercise once."""
    named = hand_out.assignments(weeks)
    plan = plans.weeks(weeks)
    assert len(plan) == weeks and set(named) == {one.name for one in EXERCISES}
    for number, week_ in enumerate(plan, start=1):
        listed = [name for name, week in named.items() if week == f"week_{number:02d}"]
        assert listed == [one.name for one in week_.exercises]


@pytest.mark.slow
@pytest.mark.parametrize("weeks", plans.PLANS)
def test_a_plan_in_weeks_has_its_sheets_and_assignments(weeks: int) -> None:
    named, texts = hand_out.assignments(weeks), hand_out.files(weeks)
    assert (
        f"# {sheets.WORDS[weeks]} weeks, week 2" in texts[Path(f"sheets/weeks_{weeks}/week_02.md")]
    )
    for name, folder in named.items():
        assert Path("nbgrader", "source", folder, f"{name}.ipynb") in texts
    assert len(texts) == count(texts)


def test_a_plan_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["hand_out.py", str(tmp_path), "7"])
    with pytest.raises(SystemExit):
        hand_out.main()
    assert "invalid choice: 7 (choose from 6, 12)" in capsys.readouterr().err


def test_student_notebook_beside_the_tutorials() -> None:
    """`make lab` gives what the site gives."""
    there = dict(notebooks_command.exercise_files())
    given = hand_out.student_files()
    assert there == {
        Path("exercises") / path: text for path, text in given.items() if path.suffix != ".py"
    }


def test_configuration_of_nbgrader() -> None:
    """The pattern has no effect unless it is enabled."""
    settings: dict[str, Any] = {}

    class Section:
        def __init__(self, name: str) -> None:
            self.__dict__["name"] = name

        def __getattr__(self, name: str) -> Any:
            return Section(f"{self.name}{name}.")

        def __setattr__(self, name: str, value: Any) -> None:
            settings[f"{self.name}{name}"] = value

    exec(hand_out.CONFIG, {"get_config": lambda: Section("")})
    assert settings["IgnorePattern.enabled"] is True
    for noise in ("UserWarning: old", "[W NNPACK.cpp:64] Could not initialize NNPACK!"):
        assert re.search(settings["IgnorePattern.pattern"], noise)
    assert not re.search(settings["IgnorePattern.pattern"], "RuntimeError: shape")


# -- nothing leaks ---------------------------------------------------------------------------


def test_solutions_have_lines_to_look_for() -> None:
    without = [one.name for one in EXERCISES if not secrets(one.name)]
    assert without == []


@pytest.fixture(scope="module")
def given() -> dict[Path, str]:
    """The files of a student."""
    return hand_out.student_files()


@each_exercise
def test_no_solution_in_what_a_student_gets(one: Exercise, given: dict[Path, str]) -> None:
    assert leaks(plain(given[Path(f"{one.name}.ipynb")]), one.name) == []
    assert leaks(given[Path(f"{one.name}.py")], one.name) == []
    # The student has asked for a hint that is open.
    assert leaks(generated.exercise(one), one.name, "\n".join(one.hints)) == []


@each_exercise
def test_the_solution_is_found_where_it_is(one: Exercise) -> None:
    """The check for leaks can fail."""
    whole = dump(notebook(one, as_source))
    assert set(leaks(plain(whole), one.name)) >= set(secrets(one.name))
    solved = dump(notebook(one, as_solution))
    assert set(leaks(plain(solved), one.name)) == set(secrets(one.name))


def test_no_solution_in_the_archive() -> None:
    with zipfile.ZipFile(io.BytesIO(hand_out.archive(hand_out.student_files()))) as packed:
        assert packed.testzip() is None
        assert len(packed.namelist()) == 2 * len(EXERCISES) + 1
        for entry in packed.namelist():
            text = packed.read(entry).decode()
            text = plain(text) if entry.endswith(".ipynb") else text
            name = Path(entry).stem
            assert text == source.rules() if entry == "AGENTS.md" else leaks(text, name) == []


# -- the pages -------------------------------------------------------------------------------


@each_exercise
def test_links_lead_both_ways(one: Exercise) -> None:
    assert pages.source(one.page).is_file(), f"{one.page} is no tutorial"
    assert f"`{pages.document(one.page)}`" in generated.exercise(one)
    (line,) = navigation.with_checks(one.page, "gpu/1_swiglu")
    assert f"/exercises/{one.name}" in [x["reftarget"] for x in line.findall(pending_xref)]


@each_exercise
def test_a_page_has_all_parts(one: Exercise) -> None:
    text = generated.exercise(one)
    for part in ("## Your part", "## Check", "## Hints", f"check {one.name} {one.name}.py"):
        assert part in text
    assert text.count(":class-container: no-search") == len(one.hints)
    assert all(name in {other.name for other in EXERCISES} for name in one.after)


def test_markup_in_the_catalogue_is_text() -> None:
    given = "a * b * c, `x_i * y`, <b>, $5, [1]"
    assert exercises.text(given) == r"a \* b \* c, `x_i * y`, \<b\>, \$5, \[1\]"


# -- the table of checks ---------------------------------------------------------------------


def test_the_table_of_checks_shows_every_wrong_answer() -> None:
    text = render("checks.md", exercises=EXERCISES)
    assert text.startswith("---\nno-search: true\n---\n")
    before, _, _ = text.partition(":::::{dropdown}")
    for one in EXERCISES:
        for wrong in one.wrong:
            assert f"| {exercises.text(wrong.label)} " in text
        # Spoilers only behind a dropdown.
        assert not any(len(w.label) > 12 and w.label in before for w in one.wrong)


# -- the teacher's tables --------------------------------------------------------------------


@pytest.mark.parametrize("number", plans.PLANS)
def test_a_plan_adds_up(number: int) -> None:
    weeks = plans.weeks(number)
    text = render("teaching/plan.md", **plans.table(number), sheet=sheets.place)
    taken = [one for week in weeks for one in week.exercises]
    assert all(f"{exercises.link(one)} (`{one.name}`)" in text for one in taken)
    total = re.search(r"\| \*\*(\d+) min\*\* \| \*\*(\d+) min\*\* \|", text)
    reading = sum(pages.minutes(name) for week in weeks for name in week.pages)
    work = sum(one.minutes for one in taken)
    assert total and int(total[1]) + int(total[2]) == reading + work


def test_pages_are_in_an_order_that_can_be_followed() -> None:
    """Within a chapter, nothing comes before what it builds on."""
    place = {one.name: number for number, one in enumerate(EXERCISES)}
    chapter = {one.name: one.key[0] for one in EXERCISES}
    assert list(chapter.values()) == sorted(chapter.values())
    for one in EXERCISES:
        for name in one.after:
            assert place[name] < place[one.name] or chapter[name] != chapter[one.name]


def test_the_exercise_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works as it stands there: as a draft, since it has five wrong answers."""
    from lm_from_scratch.exercises import catalogue
    from lm_from_scratch.exercises.exercise import drafts
    from lm_from_scratch.exercises.report import examine

    guide = (pages.DOCS / "classroom" / "appendix.md").read_text(encoding="utf-8")
    text, module, right = re.findall(r"^```python\n(.*?)^```$", guide, re.M | re.S)
    (tmp_path / "softcap").mkdir()
    for file, code in (("text.py", text), ("checks.py", module)):
        (tmp_path / "softcap" / file).write_text(code, encoding="utf-8")
    monkeypatch.setattr(catalogue, "__path__", [str(tmp_path)])
    (one,) = drafts()
    for given in load(right, "<right>")["RIGHT"]:
        assert examine(one, source.answer(one, given)).passed
    for wrong in one.wrong:
        report = examine(one, source.answer(one, wrong.answer))
        assert wrong.case in [result.case.name for result in report.failed]
        assert report.wrong == [wrong]
    points, _ = run(notebook(one, as_source), one)
    assert points == one.points
    assert leaks(plain(dump(notebook(one))), "softcap") == []
