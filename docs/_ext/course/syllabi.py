"""The table of other courses, `classroom/syllabi.toml`, and the lessons that go with each topic."""

import tomllib
from pathlib import Path

from gallery import exercises, pages

from course import links


def text(path: Path) -> str:
    with open(path.with_suffix(".toml"), "rb") as file:
        courses = tomllib.load(file)["course"]
    known = {*pages.lessons()}
    for course in courses:
        for row in course["topics"]:
            if unknown := {*row["pages"]} - known:
                raise ValueError(f"{course['name']}: no lessons: {sorted(unknown)}")
            row["exercises"] = [one for name in row["pages"] for one in exercises.of_page(name)]
    return links.render(path, "teaching/syllabi.md", courses=courses)
