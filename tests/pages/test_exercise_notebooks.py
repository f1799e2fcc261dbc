"""What is built from the exercises: it runs, it is the same twice, and it holds no solution."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import course
import exercise_pages
import exercise_proof
import exercises
import gallery
import nbclient
import nbformat
import pages
import pytest
import teaching
from exercise_leaks import leaks, plain, secrets

from lm_from_scratch.exercises.exercise import Exercise
from lm_from_scratch.exercises.exercise import exercises as catalogue
from lm_from_scratch.exercises.source import load

EXERCISES = catalogue()
each_exercise = pytest.mark.parametrize("found", EXERCISES, ids=lambda found: found.name)


def student(found: Exercise) -> dict[str, Any]:
    return exercises.notebook(found, exercises.as_student)


def code_of(notebook: dict[str, Any]) -> list[str]:
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


def run(notebook: dict[str, Any], found: Exercise) -> tuple[Any, str]:
    """Every code cell in order in one space; the value of the last one, and what was printed."""
    if found.needs and importlib.util.find_spec(found.needs) is None:
        pytest.skip(f"{found.needs} is not installed here")
    *first, last = code_of(notebook)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        # One file, so that Triton finds the source of a kernel; the last line is the value.
        body, _, value = last.rpartition("\n")
        code = "\n\n".join([*first, body, f"points_of_the_cell = {value}\n"])
        space = load(code, f"<notebook of {found.name}>")
    return space["points_of_the_cell"], printed.getvalue()


# -- the notebooks ---------------------------------------------------------------------------


def test_there_are_exercises() -> None:
    assert EXERCISES
    names = {path.stem for path in exercises.SOURCES.glob("*.py")}
    assert names == {found.name for found in EXERCISES}


@each_exercise
def test_the_solution_gets_all_points(found: Exercise) -> None:
    made = exercises.notebook(found, exercises.as_solution)
    points, printed = run(made, found)
    assert isinstance(points, float)
    assert points == found.points
    assert "All checks hold" in printed


@each_exercise
def test_what_nbgrader_runs_gets_all_points(found: Exercise) -> None:
    """With the hidden tests: other numbers in the same cases."""
    points, printed = run(exercises.notebook(found, exercises.as_source), found)
    assert points == found.points
    assert printed.count("All checks hold") == 2


@each_exercise
def test_the_student_notebook_runs_and_gets_nothing(found: Exercise) -> None:
    points, printed = run(student(found), found)
    assert isinstance(points, float)
    assert points == 0.0
    assert "not written yet" in printed


def test_in_a_real_kernel() -> None:
    """The tests above run cells by exec, which is fast; Jupyter says the same."""
    found = next(found for found in EXERCISES if found.name == "rms_norm")
    environment = {**os.environ, "PYTHONPATH": str(gallery.ROOT)}
    for text, points in ((exercises.as_source, float(found.points)), (exercises.as_student, 0.0)):
        made = nbformat.reads(exercises.dump(exercises.notebook(found, text)), as_version=4)
        nbclient.NotebookClient(made, timeout=120, kernel_name="python3").execute(env=environment)
        said, value = made.cells[-1].outputs
        assert said.name == "stdout" and said.text.startswith("rms_norm: ")
        assert value.data["text/plain"] == str(points)


@each_exercise
def test_cells_of_the_source(found: Exercise) -> None:
    """Text first, one solution, one check at the end, and nothing that only Jupyter runs."""
    cells = exercises.source.source(found.name)
    assert cells[0].kind == "markdown" and cells[0].text.startswith("# ")
    assert [cell.is_solution for cell in cells].count(True) == 1
    assert [cell.is_check for cell in cells] == [False] * (len(cells) - 1) + [True]
    for cell in cells:
        assert cell.text.strip()
        assert cell.kind == "markdown" or not re.search(r"^\s*[%!]", cell.text, re.M)


@each_exercise
def test_metadata_of_nbgrader(found: Exercise) -> None:
    for text in (exercises.as_student, exercises.as_source, exercises.as_solution):
        made = exercises.notebook(found, text)
        nbformat.validate(made)
        tags = [cell["metadata"]["nbgrader"] for cell in made["cells"]]
        assert [tag["points"] for tag in tags if tag["grade"]] == [found.points]
        assert [tag["grade_id"] for tag in tags if tag["solution"]] == [f"{found.name}-solution"]
        assert tags[-1]["grade_id"] == f"{found.name}-check" and tags[-1]["grade"]
        assert [tag["locked"] for tag in tags] == [not tag["solution"] for tag in tags]
        assert {tag["schema_version"] for tag in tags} == {3}
        identities = [tag["grade_id"] for tag in tags] + [cell["id"] for cell in made["cells"]]
        assert len(set(identities)) == 2 * len(tags)


def test_the_same_bytes_twice() -> None:
    first = exercises.files()
    exercises.source.source.cache_clear()
    assert exercises.files() == first
    assert exercises.archive(first) == exercises.archive(first)
    assert len(first) == 4 * len(EXERCISES) + 1


@pytest.mark.parametrize("weeks", teaching.PLANS)
def test_an_assignment_may_be_a_week_of_a_plan(weeks: int) -> None:
    """What the plan of the guide puts into a week, and each exercise once."""
    named = exercises.assignments(weeks)
    plan = teaching.plan(*teaching.PLANS[weeks])
    assert len(plan) == weeks and set(named) == {found.name for found in EXERCISES}
    for number, members in enumerate(plan, start=1):
        listed = [name for name, week in named.items() if week == f"week_{number:02d}"]
        assert listed == [found.name for found in members] != []
    texts = exercises.files(weeks)
    for name, folder in named.items():
        assert Path("nbgrader", "source", folder, f"{name}.ipynb") in texts
    assert len(texts) == 4 * len(EXERCISES) + 1


def test_a_plan_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="WEEKS=7: the teacher's guide has plans of 6 and 12"):
        exercises.files(7)


def test_student_notebook_beside_the_tutorials() -> None:
    """`make lab` gives what the site gives."""
    import notebooks

    there = {path: text for path, text in notebooks.texts() if path.parts[0] == "exercises"}
    given = exercises.student_files()
    assert there == {
        Path("exercises") / path: text for path, text in given.items() if path.suffix == ".ipynb"
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

    exec(exercises.CONFIG, {"get_config": lambda: Section("")})
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
    given = exercises.student_files()
    assert leaks(plain(given[Path(f"{found.name}.ipynb")]), found.name) == []
    assert leaks(given[Path(f"{found.name}.py")], found.name) == []
    # The student has asked for a hint that is open.
    assert leaks(exercise_pages.page(found), found.name, "\n".join(found.hints)) == []


@each_exercise
def test_the_solution_is_found_where_it_is(found: Exercise) -> None:
    """The check for leaks can fail."""
    whole = exercises.dump(exercises.notebook(found, exercises.as_source))
    assert set(leaks(plain(whole), found.name)) >= set(secrets(found.name))
    solved = exercises.dump(exercises.notebook(found, exercises.as_solution))
    assert set(leaks(plain(solved), found.name)) == set(secrets(found.name))


def test_no_solution_in_the_archive() -> None:
    with zipfile.ZipFile(io.BytesIO(exercises.archive(exercises.student_files()))) as packed:
        assert packed.testzip() is None
        assert len(packed.namelist()) == 2 * len(EXERCISES)
        for entry in packed.namelist():
            text = packed.read(entry).decode()
            text = plain(text) if entry.endswith(".ipynb") else text
            assert leaks(text, Path(entry).stem) == []


def test_no_page_shows_the_catalogue() -> None:
    """The API pages show the package's whole files; right and wrong answers are not among them."""
    assert not [name for name in pages.modules() if "catalogue" in name]
    assert "lm_from_scratch.exercises.report" in pages.modules()


# -- the pages -------------------------------------------------------------------------------


@each_exercise
def test_links_lead_both_ways(found: Exercise) -> None:
    assert exercise_pages.script(found.page).is_file(), f"{found.page} is no tutorial"
    assert f"`{exercise_pages.document(found.page)}`" in exercise_pages.page(found)
    assert f"</exercises/{found.name}>`" in exercise_pages.links(found.page, ":doc:", "**")


@each_exercise
def test_a_page_has_all_parts(found: Exercise) -> None:
    text = exercise_pages.page(found)
    for part in ("## Your part", "## Check", "## Hints", f"check {found.name} {found.name}.py"):
        assert part in text
    assert text.count(":class-container: no-search") == len(found.hints)
    assert all(name in {other.name for other in EXERCISES} for name in found.after)


@pytest.mark.parametrize("page", [*gallery.scripts(), *gallery.gpu_scripts()], ids=lambda p: p.stem)
def test_a_tutorial_can_take_its_links(page: Path) -> None:
    """Each has a section of exercises; the paragraph stands at its end, before the next one."""
    text = re.sub(r"^# ?", "", page.read_text(encoding="utf-8"), flags=re.M)
    made = exercise_pages.behind_exercises(text, "LINKS", r"Exercises\n-+\n", r"^.+\n-{3,}\n")
    section = re.search(r"^Exercises\n-+\n(.*?)\nLINKS\n\n(.+)\n-{3,}$", made, re.M | re.S)
    assert section and section[1].strip()
    assert not re.search(r"^.+\n-{3,}$", section[1], re.M)
    assert made.replace("\n\nLINKS\n\n", "").replace("\n", "") == text.replace("\n", "")


def test_a_page_without_the_section_is_refused() -> None:
    with pytest.raises(ValueError, match="no section"):
        exercise_pages.behind_exercises("Title\n=====\n", "LINKS", "Exercises\n-+\n", "^x")


def test_links_on_a_gpu_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those pages are notebooks: the paragraph goes into the cell with the section."""
    monkeypatch.setattr(exercise_pages, "of_page", lambda page: list(EXERCISES[:1]))
    cells = [
        {"cell_type": "code", "source": "## Exercises\n"},
        {"cell_type": "markdown", "source": "## A\n\n## Exercises\n\n1. One.\n\n## Summary\n\nx"},
    ]
    exercise_pages.add_links_to_notebook(cells, "gpu/2_softmax")
    assert cells[0]["source"] == "## Exercises\n"
    before, _, after = cells[1]["source"].partition("**With automatic checks:** {doc}`")
    assert before == "## A\n\n## Exercises\n\n1. One.\n\n"
    assert after.endswith("\n\n## Summary\n\nx")


def test_a_tutorial_is_read_again_when_its_links_change() -> None:
    name = f"auto_tutorials/{EXERCISES[0].page}"
    env = SimpleNamespace(found_docs={name, "index"}, exercise_links={})
    assert name in exercise_pages.outdated(None, env, set(), set(), set())
    assert exercise_pages.outdated(None, env, set(), set(), set()) == set()
    env.exercise_links[name] = "other"
    assert exercise_pages.outdated(None, env, set(), set(), set()) == {name}


def test_markup_in_the_catalogue_is_text() -> None:
    given = "a * b * c, `x_i * y`, <b>, $5, [1]"
    assert exercise_pages.text(given) == r"a \* b \* c, `x_i * y`, \<b\>, \$5, \[1\]"


# -- the proof page --------------------------------------------------------------------------


def test_the_proof_page_says_what_is_stored() -> None:
    tables = exercise_proof.stored()
    assert list(tables) == [found.name for found in EXERCISES]
    totals = exercise_proof.totals(tables.values())
    assert totals["mutants"] == totals["killed"] + totals["explained"]
    assert totals["wrong"] == totals["named"] + totals["errors"] + totals["alike"]
    assert totals["wrong"] >= 12 * totals["exercises"]
    text = exercise_proof.proof()
    assert text.startswith("---\nno-search: true\n---\n")
    assert f"| wrong answers, written by hand | {totals['wrong']} |" in text
    for found in EXERCISES:
        for wrong in found.wrong:
            assert f"| {exercise_pages.text(wrong.label)} " in text
        # Spoilers only behind a dropdown.
        before, _, _ = text.partition(":::::{dropdown}")
        assert not any(len(w.label) > 12 and w.label in before for w in found.wrong)


def test_a_row_of_the_matrix() -> None:
    table = {"cases": [{}] * 5}
    assert exercise_proof.strip(table, {"case": 3, "rejected by": [1, 3, 5]}) == "1·[3]·5"
    table = {"cases": [{}] * 11}
    row = {"case": 10, "rejected by": [2, 10, 11]}
    assert exercise_proof.strip(table, row) == "·2·······[a]b"


# -- the teacher's tables --------------------------------------------------------------------

PLANS = [(teaching.SIX_WEEKS, 2), (teaching.TWELVE_WEEKS, 3)]


@pytest.mark.parametrize(("weeks", "hardest"), PLANS, ids=["6", "12"])
def test_plans(weeks: dict[str, list[str]], hardest: int) -> None:
    assert len(weeks) in (6, 12)
    listed = [page for pages_read in weeks.values() for page in pages_read]
    assert len(set(listed)) == len(listed)
    assert all(exercise_pages.script(page).is_file() for page in listed)
    taken = teaching.plan(weeks, hardest)
    week_of = {found.name: week for week, members in enumerate(taken) for found in members}
    assert len(week_of) == sum(map(len, taken))
    for members in taken:
        for found in members:
            assert found.difficulty <= hardest
            assert found.page in listed
            assert any(
                found.page in part for part in list(weeks.values())[: week_of[found.name] + 1]
            )
            assert all(week_of[name] <= week_of[found.name] for name in found.after)
    text = teaching.plan_table(weeks, hardest)
    assert all(f"</exercises/{name}>` (`{name}`)" in text for name in week_of)
    total = re.search(r"\| \*\*(\d+) min\*\* \| \*\*(\d+) min\*\* \|", text)
    reading = sum(course.minutes(page) for page in listed)
    work = sum(found.minutes for members in taken for found in members)
    assert total and int(total[1]) + int(total[2]) == reading + work


def test_the_long_plan_has_every_page_and_exercise() -> None:
    weeks = teaching.TWELVE_WEEKS
    listed = {page for pages_read in weeks.values() for page in pages_read}
    assert {f"{path.parent.name}/{path.stem}" for path in gallery.scripts()} <= listed
    left = {f"gpu/{path.stem}" for path in gallery.gpu_scripts()} - listed
    taken = {found.name for members in teaching.plan(weeks) for found in members}
    assert {found.page for found in EXERCISES if found.name not in taken} <= left


def test_pages_are_in_an_order_that_can_be_followed() -> None:
    """Within a chapter, nothing comes before what it builds on."""
    place = {found.name: number for number, found in enumerate(EXERCISES)}
    chapter = {found.name: found.key[0] for found in EXERCISES}
    assert list(chapter.values()) == sorted(chapter.values())
    for found in EXERCISES:
        for name in found.after:
            assert place[name] < place[found.name] or chapter[name] != chapter[found.name]


def test_outcomes_and_graph_name_every_exercise() -> None:
    outcomes, graph = teaching.outcomes(), teaching.graph()
    for found in EXERCISES:
        assert f"</exercises/{found.name}>" in outcomes
        assert f'href="exercises/{found.name}.html"' in graph
        assert f">{found.name}</tspan>" in graph
    assert graph.count("marker-end") == sum(len(found.after) for found in EXERCISES)


def test_the_guide_names_what_exists() -> None:
    """Its commands, its files and its numbers."""
    text = (gallery.DOCS / "teaching.md").read_text(encoding="utf-8")
    for part in ("figures", "outcomes", "graph", "six_weeks", "twelve_weeks"):
        assert f"generated/teaching_{part}.md" in text
    parser = commands()
    for command in re.findall(r"python -m lm_from_scratch (\w+)", text):
        assert command in parser, f"the guide names a command {command}"


def commands() -> set[str]:
    from lm_from_scratch.exercises import commands

    text = Path(commands.__file__).read_text(encoding="utf-8")
    return set(re.findall(r'"(check|hint|solution|list|next|start|watch|grade)"', text))


def test_the_exercise_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works as it stands there, and the proof says what the guide says."""
    from lm_from_scratch.exercises import catalogue, source
    from lm_from_scratch.exercises.exercise import exercise
    from lm_from_scratch.exercises.prove import Proof

    guide = (gallery.DOCS / "teaching.md").read_text(encoding="utf-8")
    text, module = re.findall(r"^```python\n(.*?)^```$", guide, re.M | re.S)
    for folder, code in (("sources", text), ("catalogue", module)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "softcap.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(catalogue, "__path__", [str(tmp_path / "catalogue")])
    monkeypatch.setattr(source, "sources", lambda: tmp_path / "sources")
    monkeypatch.setattr(exercises, "SOURCES", tmp_path / "sources")
    found = exercise("softcap")
    proof = Proof(found, right_seeds=10, wrong_seeds=5)
    table = proof.run()
    said = re.search(r"^softcap: .*?\n((?:  .*\n)+)", guide, re.M)
    assert said and proof.problems == [line.strip() for line in said[1].splitlines()]
    line = f"softcap: {len(table['wrong'])} wrong and {len(table['right'])} right answers, "
    assert f"{line}{table['killed']} of {table['mutants']} mutants, " in guide
    points, _ = run(exercises.notebook(found, exercises.as_source), found)
    assert points == found.points
    assert leaks(plain(exercises.dump(student(found))), "softcap") == []
