"""What a build computes for teachers: the tables of the guide `docs/teaching.md`, a sheet for each
week of each plan, and the lessons that go with the topics of other courses."""

import tomllib
from typing import Any

from gallery import exercises, pages
from sources import templates

from course import plans, sheets

#: The parts of the guide that are no plan.
PARTS = ("figures", "order", "outcomes")


def plan_table(number: int) -> str:
    """The weeks of a plan: what to read, what to do in class, what to do at home."""
    found = plans.weeks(number)
    taken = [one for week in found for one in week.exercises]
    left = [one for one in exercises.written() if one not in taken]
    return templates.render(
        "teaching/plan.md", number=number, weeks=found, taken=taken, left=left, sheet=sheets.place
    )


def courses() -> list[dict[str, Any]]:
    """Other courses, each topic with its exercises."""
    with open(pages.DOCS / "classroom" / "syllabi.toml", "rb") as file:
        found: list[dict[str, Any]] = tomllib.load(file)["course"]
    for row in (row for course in found for row in course["topics"]):
        if unknown := {*row["pages"]} - {*pages.lessons()}:
            raise ValueError(f"{row['topic']}: no lessons: {sorted(unknown)}")
        row["exercises"] = [one for name in row["pages"] for one in exercises.of_page(name)]
    return found


def texts() -> dict[str, str]:
    """By their place in `docs`."""
    values = {"pages": pages, "exercises": exercises}
    made = {
        f"generated/teaching/{name}.md": templates.render(f"teaching/{name}.md", **values)
        for name in PARTS
    }
    made["classroom/syllabi.md"] = templates.render("teaching/syllabi.md", courses=courses())
    for number in plans.PLANS:
        made[f"generated/teaching/weeks_{number}.md"] = plan_table(number)
        for week in range(1, number + 1):
            made[f"{sheets.place(number, week)}.md"] = sheets.sheet(number, week)
    return made
