"""The tables of the teacher's guide, `teaching.md`, from the course and its exercises."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import exercises
import gallery
import page
import rst
from exercise_pages import by_chapter, link, lower, text
from plans import PLANS, Plan, weeks

from lm_from_scratch.exercises.exercise import Exercise


def split(members: list[Exercise]) -> tuple[list[Exercise], list[Exercise]]:
    """In class and at home. Bug hunts are for pairs, and easy exercises to begin with: both in
    class. In a week that has neither, it is the shortest exercise."""
    there = [found for found in members if found.hunt or found.difficulty == 1]
    there = there or sorted(members, key=lambda found: found.minutes)[:1]
    return there, [found for found in members if found not in there]


def named(members: list[Exercise]) -> str:
    """Links, each with the name that commands and files have."""
    return ", ".join(f"{link(found)} (`{found.name}`)" for found in members)


def chapters(pages: list[str]) -> str:
    """The chapters of a week, without their numbers."""
    of = {name: title for title, names in gallery.by_chapter().items() for name in names}
    titles = dict.fromkeys(of[name].partition(". ")[2] for name in pages)
    return "; ".join(titles)


def plan_table(number: int, plan: Plan) -> str:
    """The weeks of a plan: what to read, what to do in class, what to do at home."""
    lines = ["| week, and pages to read | in class | at home |", "|---|---|---|"]
    in_class = at_home = 0
    found = weeks(number, plan)
    for i, week in enumerate(found, start=1):
        there, home = split(week.exercises)
        reading = sum(map(page.minutes, week.pages))
        now = sum(one.minutes for one in there)
        later = reading + sum(one.minutes for one in home)
        in_class, at_home = in_class + now, at_home + later
        read = ", ".join(f"{{doc}}`{gallery.document(name)}`" for name in week.pages)
        cells = [
            f"**{i}. {chapters(week.pages)}.** {read}",
            f"**{now} min.** {named(there)}".strip(),
            f"**{later} min,** {reading} of them to read. {named(home)}".strip(),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    taken = list(itertools.chain.from_iterable(week.exercises for week in found))
    points = sum(one.points for one in taken)
    lines.append(
        f"| **All: {len(taken)} exercises, {points} points** | **{in_class} min** | "
        f"**{at_home} min** |"
    )
    left = [one for one in exercises.written() if one not in taken]
    lines += [
        "",
        f"Left out: {', '.join(map(link, left))}." if left else "All exercises are in it.",
    ]
    return "\n".join(lines) + "\n"


def outcomes() -> str:
    """What a student can do after each chapter."""
    lines = []
    for title, members in by_chapter().items():
        time = page.in_words(sum(found.minutes for found in members))
        lines += [f"**Chapter {title}** ({time}). After it a student can:", ""]
        lines += [f"* {text(lower(found.outcome))} ({link(found)})" for found in members]
        lines.append("")
    return "\n".join(lines)


def figures() -> str:
    """The course in one sentence of numbers."""
    found = exercises.written()
    names = [f"{path.parent.name}/{path.stem}" for path in gallery.scripts()]
    return (
        f"There are {len(found)} exercises, {sum(bool(one.hunt) for one in found)} of them bug "
        f"hunts: {page.in_words(sum(one.minutes for one in found))} of work for somebody who has "
        f"read the pages, {sum(one.points for one in found)} points in all. Reading the "
        f"{len(names)} pages of chapters 1 to 8 takes "
        f"{page.in_words(sum(map(page.minutes, names)))}.\n"
    )


def order() -> str:
    """What builds on what."""
    known = exercises.written()
    lines = []
    for found in known:
        if before := [link(other) for other in known if other.name in found.after]:
            lines.append(f"* {link(found)} builds on {', '.join(before)}")
    return "\n".join(lines) + "\n"


def write(app: Any) -> None:
    """One file for each table; `teaching.md` includes them by these names."""
    texts = {
        "figures": figures(),
        "outcomes": outcomes(),
        "order": order(),
        **{f"{number}_weeks": plan_table(number, plan) for number, plan in PLANS.items()},
    }
    folder = Path(app.srcdir) / "generated"
    rst.write({folder / f"teaching_{name}.md": made for name, made in texts.items()})


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", write, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
