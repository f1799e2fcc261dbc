"""Every exercise as files: `python docs/_ext course.hand_out FOLDER [WEEKS]`.

    FOLDER/student/NAME.ipynb, NAME.py   with a hole where the solution was
    FOLDER/solution/NAME.ipynb           with the solution
    FOLDER/wrong/NAME_1.py               wrong answers to vote on in class, up to three
    FOLDER/sheets/weeks_6/week_01.md     for the teacher: minutes, talk, votes, quiz, model answers
    FOLDER/nbgrader/                     a course folder for nbgrader's own command line

An assignment of nbgrader is a chapter, or with WEEKS a week of the teacher's plan of that length.
"""

import argparse
import io
import re
import zipfile
from pathlib import Path

from course import sheets
from course.plans import PLANS, weeks
from lm_from_scratch.exercises import source
from lm_from_scratch.exercises.exercise import exercises
from lm_from_scratch.exercises.notebook import as_solution, as_source, dump, notebook

#: nbgrader gives 0 to a cell that wrote to stderr, unless what it wrote contains this pattern.
CONFIG = """c = get_config()

c.CourseDirectory.course_id = "lm_from_scratch"
c.Execute.timeout = 60  # seconds a cell may take; the default is 30

# A warning on stderr is not a wrong answer. Both lines are needed.
c.IgnorePattern.enabled = True
c.IgnorePattern.pattern = ".*([Ww]arning|NNPACK|cpuinfo).*"
"""


def student_files() -> dict[Path, str]:
    """What a student gets: a notebook and a script of each exercise, and rules for AI helpers."""
    texts = {Path(source.RULES): source.rules()}
    for one in exercises():
        texts[Path(f"{one.name}.ipynb")] = dump(notebook(one))
        texts[Path(f"{one.name}.py")] = source.script(one.name)
    return texts


def archive(texts: dict[Path, str]) -> bytes:
    """A zip of files, the same bytes for the same texts."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for path, text in sorted(texts.items()):
            entry = zipfile.ZipInfo(path.as_posix(), (2026, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(entry, text)
    return stream.getvalue()


def assignments(number: int | None = None) -> dict[str, str]:
    """The assignment of nbgrader that an exercise is in: its chapter, or its week of the plan of
    `number` weeks. What the plan leaves out is in the assignment `more`."""
    if number is None:
        return {one.name: f"chapter_{one.key[0]}" for one in exercises()}
    named = {one.name: "more" for one in exercises()}
    for i, week in enumerate(weeks(number), start=1):
        named |= {one.name: f"week_{i:02d}" for one in week.exercises}
    return named


def without_links(text: str) -> str:
    """A document of the site as a file that stands alone."""
    text = re.sub(r"\A---\n.*?\n---\s+", "", text, flags=re.S)
    return re.sub(r"\{doc\}`([^`]+?) <[^`>]+>`|<a [^>]*>(.*?)</a>", r"\1\2", text)


def files(number: int | None = None) -> dict[Path, str]:
    """Everything that the command writes."""
    assignment = assignments(number)
    texts = {"student" / path: text for path, text in student_files().items()}
    for one in exercises():
        texts[Path("solution") / f"{one.name}.ipynb"] = dump(notebook(one, as_solution))
        folder = Path("nbgrader") / "source" / assignment[one.name]
        texts[folder / f"{one.name}.ipynb"] = dump(notebook(one, as_source))
        texts[folder / source.RULES] = source.rules()
        for vote in sheets.votes(one):
            texts[Path("wrong") / f"{one.name}_{vote.number}.py"] = sheets.wrong_file(vote)
    texts[Path("nbgrader") / "nbgrader_config.py"] = CONFIG
    for length in [number] if number else PLANS:
        for week in range(1, length + 1):
            path = Path("sheets", *Path(sheets.place(length, week)).parts[1:]).with_suffix(".md")
            texts[path] = without_links(sheets.sheet(length, week))
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("weeks", type=int, nargs="?", choices=PLANS, help="length of a plan")
    options = parser.parse_args()
    texts = files(options.weeks)
    for path, text in texts.items():
        target = options.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    print(f"{len(exercises())} exercises, {len(texts)} files in {options.folder}")


if __name__ == "__main__":
    main()
