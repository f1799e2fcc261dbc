"""Every exercise as files: `python docs/_ext/hand_out.py FOLDER [WEEKS]`.

    FOLDER/student/NAME.ipynb, NAME.py   with a hole where the solution was
    FOLDER/solution/NAME.ipynb           with the solution
    FOLDER/nbgrader/                     a course folder for nbgrader's own command line

An assignment of nbgrader is a chapter, or with WEEKS a week of the teacher's plan of that length.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import rst
from exercises import as_solution, as_source, dump, notebook, student_files, written
from teaching import PLANS, weeks

#: nbgrader gives 0 to a cell that wrote to stderr, unless what it wrote contains this pattern.
CONFIG = """c = get_config()

c.CourseDirectory.course_id = "lm_from_scratch"
c.Execute.timeout = 60  # seconds a cell may take; the default is 30

# A warning on stderr is not a wrong answer. Both lines are needed.
c.IgnorePattern.enabled = True
c.IgnorePattern.pattern = ".*([Ww]arning|NNPACK|cpuinfo).*"
"""


def assignments(number: int | None = None) -> dict[str, str]:
    """The assignment of nbgrader that an exercise is in: its chapter, or its week of a plan.

    `number` is the length of the plan. What the plan leaves out is in the assignment `more`.
    Raises `ValueError` for a length that no plan has.
    """
    if number is None:
        return {found.name: f"chapter_{found.key[0]}" for found in written()}
    if number not in PLANS:
        known = " and ".join(map(str, PLANS))
        raise ValueError(f"WEEKS={number}: the teacher's guide has plans of {known} weeks")
    named = {found.name: "more" for found in written()}
    for i, week in enumerate(weeks(number, PLANS[number]), start=1):
        named |= {found.name: f"week_{i:02d}" for found in week.exercises}
    return named


def files(number: int | None = None) -> dict[Path, str]:
    """Everything that the command writes."""
    assignment = assignments(number)
    texts = {"student" / path: text for path, text in student_files().items()}
    for found in written():
        texts[Path("solution") / f"{found.name}.ipynb"] = dump(notebook(found, as_solution))
        folder = Path("nbgrader") / "source" / assignment[found.name]
        texts[folder / f"{found.name}.ipynb"] = dump(notebook(found, as_source))
    texts[Path("nbgrader") / "nbgrader_config.py"] = CONFIG
    return texts


def main() -> None:
    if len(sys.argv) not in (2, 3) or not all(text.isdecimal() for text in sys.argv[2:]):
        sys.exit("usage: python docs/_ext/hand_out.py FOLDER [WEEKS]")
    folder = Path(sys.argv[1])
    try:
        texts = files(int(sys.argv[2]) if len(sys.argv) == 3 else None)
    except ValueError as error:
        sys.exit(str(error))
    rst.write({folder / path: text for path, text in texts.items()})
    print(f"{len(written())} exercises, {len(texts)} files in {folder}")
    for kind in ("student", "solution", "nbgrader"):
        print(f"  {folder / kind}: {sum(path.parts[0] == kind for path in texts)} files")


if __name__ == "__main__":
    main()
