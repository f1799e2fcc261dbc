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
from course import exercise_pages, hand_out, plans, sheets
from exercise_leaks import leaks, plain, secrets
from gallery import exercises, navigation, pages
from sources.templates import render
from sphinx.addnodes import pending_xref

from lm_from_scratch.exercises import notebooks_command, source
from lm_from_scratch.exercises.exercise import Exercise
from lm_from_scratch.exercises.exercise import exercises as catalogue
from lm_from_scratch.exercises.notebook import as_solution, as_source, as_student, dump, notebook
from lm_from_scratch.exercises.source import load

EXERCISES = catalogue()
each_exercise = pytest.mark.parametrize("found", EXERCISES, ids=lambda found: found.name)
#: One in six in `make test`.
each_exercise_most_slow = pytest.mark.parametrize(
    "found",
    [
        pytest.param(found, marks=[pytest.mark.slow] * (i % 6 > 0), id=found.name)
        for i, found in enumerate(EXERCISES)
    ],
)


def page(found: Exercise) -> str:
    return render("exercise.md", **exercise_pages.values(found))


def code_of(notebook: dict[str, Any]) -> list[str]:
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


def run(notebook: dict[str, Any], found: Exercise) -> tuple[Any, str]:
    """Every code cell in order in one space; the value of the check, and what was printed. What
    plays an answer is tested in test_play.py."""
    if found.needs and importlib.util.find_spec(found.needs) is None:
        pytest.skip(f"{found.needs} is not installed here")
    *first, last = (code for code in code_of(notebook) if "import play" not in code)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        # One file, so that Triton finds the source of a kernel; the last line is the value.
        body, _, value = last.rpartition("\n")
        code = "\n\n".join([*first, body, f"points_of_the_cell = {value}\n"])
        space = load(code, f"<notebook of {found.name}>")
    return space["points_of_the_cell"], printed.getvalue()


# -- the notebooks ---------------------------------------------------------------------------


@each_exercise
def test_the_solution_gets_all_points(found: Exercise) -> None:
    made = notebook(found, as_solution)
    points, printed = run(made, found)
    assert isinstance(points, float)
    assert points == found.points
    assert "All checks hold" in printed


@each_exercise_most_slow
def test_what_nbgrader_runs_gets_all_points(found: Exercise) -> None:
    """With the hidden tests: other numbers in the same cases."""
    points, printed = run(notebook(found, as_source), found)
    assert points == found.points
    assert printed.count("All checks hold") == 2


@each_exercise
def test_the_student_notebook_runs_and_gets_nothing(found: Exercise) -> None:
    points, printed = run(notebook(found), found)
    assert isinstance(points, float)
    assert points == 0.0
    assert "not written yet" in printed


@pytest.mark.slow
def test_in_a_real_kernel() -> None:
    """The tests above run cells by exec, which is fast; Jupyter says the same."""
    found = next(found for found in EXERCISES if found.name == "rms_norm")
    environment = {**os.environ, "PYTHONPATH": str(pages.ROOT)}
    for text, points in ((as_source, float(found.points)), (as_student, 0.0)):
        made = nbformat.reads(dump(notebook(found, text)), as_version=4)
        nbclient.NotebookClient(made, timeout=120, kernel_name="python3").execute(env=environment)
        *_, check, played = made.cells
        said, value = check.outputs
        assert played.outputs[0].text.startswith("rms_norm: every norm")
        assert said.name == "stdout" and said.text.startswith("rms_norm: ")
        assert value.data["text/plain"] == str(points)


@each_exercise
def test_cells_of_the_source(found: Exercise) -> None:
    """Text first, one solution, one check at the end, and nothing that only Jupyter runs."""
    cells = exercises.source.cells(exercises.source.written(found.name))
    assert cells[0].kind == "markdown" and cells[0].text.startswith("# ")
    assert [cell.is_solution for cell in cells].count(True) == 1
    assert [cell.is_check for cell in cells] == [False] * (len(cells) - 1) + [True]
    for cell in cells:
        assert cell.text.strip()
        assert cell.kind == "markdown" or not re.search(r"^\s*[%!]", cell.text, re.M)


@each_exercise
def test_metadata_of_nbgrader(found: Exercise) -> None:
    for text in (as_student, as_source, as_solution):
        made = notebook(found, text)
        nbformat.validate(made)
        tags = [cell["metadata"]["nbgrader"] for cell in made["cells"]]
        assert [tag["points"] for tag in tags if tag["grade"]] == [found.points]
        assert [tag["grade_id"] for tag in tags if tag["solution"]] == [f"{found.name}-solution"]
        (check,) = (tag for tag in tags if tag["grade"])
        assert check["grade_id"] == f"{found.name}-check" and tags.index(check) >= len(tags) - 2
        assert [tag["locked"] for tag in tags] == [not tag["solution"] for tag in tags]
        assert {tag["schema_version"] for tag in tags} == {3}
        identities = [tag["grade_id"] for tag in tags] + [cell["id"] for cell in made["cells"]]
        assert len(set(identities)) == 2 * len(tags)


def count(texts: dict[Path, str]) -> int:
    """Four files an exercise, the configuration, wrong answers, rules for AI helpers, sheets."""
    wrong = sum(len(sheets.votes(found)) for found in EXERCISES)
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
    assert len(plan) == weeks and set(named) == {found.name for found in EXERCISES}
    for number, week_ in enumerate(plan, start=1):
        listed = [name for name, week in named.items() if week == f"week_{number:02d}"]
        assert listed == [found.name for found in week_.exercises]
    texts = hand_out.files(weeks)
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
    """The pattern alone does nothing."""
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
    without = [found.name for found in EXERCISES if not secrets(found.name)]
    assert without == []


@each_exercise
def test_no_solution_in_what_a_student_gets(found: Exercise) -> None:
    given = hand_out.student_files()
    assert leaks(plain(given[Path(f"{found.name}.ipynb")]), found.name) == []
    assert leaks(given[Path(f"{found.name}.py")], found.name) == []
    # The student has asked for a hint that is open.
    assert leaks(page(found), found.name, "\n".join(found.hints)) == []


@each_exercise
def test_the_solution_is_found_where_it_is(found: Exercise) -> None:
    """The check for leaks can fail."""
    whole = dump(notebook(found, as_source))
    assert set(leaks(plain(whole), found.name)) >= set(secrets(found.name))
    solved = dump(notebook(found, as_solution))
    assert set(leaks(plain(solved), found.name)) == set(secrets(found.name))


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
def test_links_lead_both_ways(found: Exercise) -> None:
    assert pages.source(found.page).is_file(), f"{found.page} is no tutorial"
    assert f"`{pages.document(found.page)}`" in page(found)
    (line,) = navigation.with_checks(found.page, "gpu/1_swiglu")
    assert f"/exercises/{found.name}" in [x["reftarget"] for x in line.findall(pending_xref)]


@each_exercise
def test_a_page_has_all_parts(found: Exercise) -> None:
    text = page(found)
    for part in ("## Your part", "## Check", "## Hints", f"check {found.name} {found.name}.py"):
        assert part in text
    assert text.count(":class-container: no-search") == len(found.hints)
    assert all(name in {other.name for other in EXERCISES} for name in found.after)


def test_markup_in_the_catalogue_is_text() -> None:
    given = "a * b * c, `x_i * y`, <b>, $5, [1]"
    assert exercises.text(given) == r"a \* b \* c, `x_i * y`, \<b\>, \$5, \[1\]"


# -- the table of checks ---------------------------------------------------------------------


def test_the_table_of_checks_shows_every_wrong_answer() -> None:
    text = render("checks.md", exercises=EXERCISES)
    assert text.startswith("---\nno-search: true\n---\n")
    before, _, _ = text.partition(":::::{dropdown}")
    for found in EXERCISES:
        for wrong in found.wrong:
            assert f"| {exercises.text(wrong.label)} " in text
        # Spoilers only behind a dropdown.
        assert not any(len(w.label) > 12 and w.label in before for w in found.wrong)


# -- the teacher's tables --------------------------------------------------------------------


@pytest.mark.parametrize("number", plans.PLANS)
def test_a_plan_adds_up(number: int) -> None:
    weeks = plans.weeks(number)
    text = render("teaching/plan.md", **plans.table(number), sheet=sheets.place)
    taken = [found for week in weeks for found in week.exercises]
    assert all(f"{exercises.link(found)} (`{found.name}`)" in text for found in taken)
    total = re.search(r"\| \*\*(\d+) min\*\* \| \*\*(\d+) min\*\* \|", text)
    reading = sum(pages.minutes(name) for week in weeks for name in week.pages)
    work = sum(found.minutes for found in taken)
    assert total and int(total[1]) + int(total[2]) == reading + work


def test_pages_are_in_an_order_that_can_be_followed() -> None:
    """Within a chapter, nothing comes before what it builds on."""
    place = {found.name: number for number, found in enumerate(EXERCISES)}
    chapter = {found.name: found.key[0] for found in EXERCISES}
    assert list(chapter.values()) == sorted(chapter.values())
    for found in EXERCISES:
        for name in found.after:
            assert place[name] < place[found.name] or chapter[name] != chapter[found.name]


def test_the_exercise_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works as it stands there: as a draft, since it has five wrong answers."""
    from lm_from_scratch.exercises import catalogue
    from lm_from_scratch.exercises.exercise import drafts
    from lm_from_scratch.exercises.report import examine

    guide = (pages.DOCS / "teaching.md").read_text(encoding="utf-8")
    text, module, right = re.findall(r"^```python\n(.*?)^```$", guide, re.M | re.S)
    (tmp_path / "softcap").mkdir()
    for file, code in (("text.py", text), ("checks.py", module)):
        (tmp_path / "softcap" / file).write_text(code, encoding="utf-8")
    monkeypatch.setattr(catalogue, "__path__", [str(tmp_path)])
    (found,) = drafts()
    for given in load(right, "<right>")["RIGHT"]:
        assert examine(found, source.answer(found, given)).passed
    for wrong in found.wrong:
        report = examine(found, source.answer(found, wrong.answer))
        assert wrong.case in [result.case.name for result in report.failed]
        assert report.wrong == wrong
    points, _ = run(notebook(found, as_source), found)
    assert points == found.points
    assert leaks(plain(dump(notebook(found))), "softcap") == []
