"""What a teacher needs, in Markdown that is whole in the repository: the guide `teaching.md`, a
sheet for each week of each plan, and the table of other courses.

    python docs/_ext course.guide     writes all of it again, after a change of pages or exercises

In the guide, what is computed stands between two comments; sheets and table are computed whole.
Links lead to files of the repository, and on the site to the pages made from these files.
"""

import re
from pathlib import Path
from typing import Any

from gallery import exercises, pages
from sources import templates

from course import (
    exercise_pages,  # noqa: F401  (filters of the templates)
    links,
    plans,
    sheets,
    syllabi,
)

GUIDE = pages.DOCS / "teaching.md"
CLASSROOM = pages.DOCS / "classroom"
#: A table of the guide, between its comments.
COMPUTED = re.compile(r"(<!-- computed: (\w+) -->\n).*?(\n<!-- end -->\n)", re.S)
COMMENT = re.compile(r"^<!-- (computed: \w+|end) -->\n", re.M)


def plan_table(number: int) -> str:
    """The weeks of a plan: what to read, what to do in class, what to do at home."""
    found = plans.weeks(number)
    taken = [one for week in found for one in week.exercises]
    left = [one for one in exercises.written() if one not in taken]
    return links.render(
        GUIDE,
        "teaching/plan.md",
        weeks=found,
        taken=taken,
        left=left,
        sheet=lambda week: f"/{sheet_path(number, week).relative_to(pages.ROOT)}",
    )


def computed(name: str) -> str:
    """What stands between two comments of the guide: a table, a list or a sentence."""
    if weeks_of := re.fullmatch(r"weeks_(\d+)", name):
        return plan_table(int(weeks_of[1])).strip()
    values = {"pages": pages, "exercises": exercises}
    return links.render(GUIDE, f"teaching/{name}.md", **values).strip()


def written(text: str) -> str:
    """The guide with its computed parts written again."""
    return COMPUTED.sub(lambda found: f"{found[1]}\n{computed(found[2])}\n{found[3]}", text)


def sheet_path(number: int, week: int) -> Path:
    """Where the sheet of a week lies; weeks are counted from 1."""
    return CLASSROOM / f"weeks_{number}" / f"week_{week:02d}.md"


def files() -> dict[Path, str]:
    """All that the command writes."""
    texts = {
        GUIDE: written(GUIDE.read_text(encoding="utf-8")),
        CLASSROOM / "syllabi.md": syllabi.text(CLASSROOM / "syllabi.md"),
    }
    for number in plans.PLANS:
        for week in range(1, number + 1):
            path = sheet_path(number, week)
            texts[path] = sheets.sheet(number, week, path)
    return texts


# -- on the site -------------------------------------------------------------------------------

#: Pages below the guide, which its readers reach through it.
BELOW = "\n\n```{{toctree}}\n:hidden:\n\n{}\n```\n"
#: Answers are on a sheet: the search passes over it.
SHEET = re.compile(r"classroom/weeks_\d+/")


def for_site(text: str, docname: str = GUIDE.stem) -> str:
    """A text as the site reads it: links lead to documents, and comments are gone."""
    place = pages.DOCS / f"{docname}.md"
    return links.for_site(COMMENT.sub("", text), place)


def read(app: Any, docname: str, source: list[str]) -> None:
    if docname == GUIDE.stem:
        below = [path.relative_to(pages.DOCS).with_suffix("") for path in files_below()]
        listed = "\n".join(f"/{path.as_posix()}" for path in below)
        source[0] = for_site(source[0]) + BELOW.format(listed)
    elif docname.startswith("classroom/"):
        hidden = "---\nno-search: true\n---\n" if SHEET.match(docname) else ""
        source[0] = hidden + for_site(source[0], docname)


def files_below() -> list[Path]:
    """The pages below the guide: those written by hand, and the sheets in the order of weeks."""
    return [*sorted(CLASSROOM.glob("*.md")), *sorted(CLASSROOM.glob("weeks_*/*.md"), key=in_weeks)]


def in_weeks(path: Path) -> tuple[int, str]:
    return int(path.parent.name.partition("_")[2]), path.name


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def main() -> None:
    texts = files()
    for old in {*CLASSROOM.glob("weeks_*/*.md")} - texts.keys():
        old.unlink()
    changed = [
        path.relative_to(pages.DOCS).as_posix()
        for path, text in texts.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    templates.write(texts)
    print(f"written again: {', '.join(changed)}" if changed else "all as it was")


if __name__ == "__main__":
    main()
