"""Plans of a course in weeks, cut from the course itself: pages in order, and their exercises.

And beside them other courses: which lessons and exercises go with their topics.
"""

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any

from gallery import pages

from course import talks
from lm_from_scratch.exercises.exercise import Exercise, exercises

#: By its number of weeks: where a course leads, as patterns of pages, and the highest difficulty
#: that it takes.
PLANS = {
    6: (("5_caching/4_*", "6_generation/1_*", "8_quantized_weights/2_*"), 2),
    12: (("[0-9]*_*/*", "gpu/[1-4]_*"), 3),
}
#: Minutes of exercises in the meetings of a week, and those before the first lesson: everyone
#: installs the package and runs one check.
IN_CLASS, SET_UP = 50, 75
#: A minute of class weighs more than one at home, for a week has two meetings and no third.
CLASS = 3


@dataclass(frozen=True)
class Week:
    pages: list[str]
    exercises: list[Exercise]

    def in_class(self) -> list[Exercise]:
        """Bug hunts are for pairs, and easy exercises to begin with: both in class, in order, as
        long as there is time. In a week that has neither, it is the shortest exercise."""
        done: list[Exercise] = []
        for one in self.exercises:
            minutes = one.minutes + sum(other.minutes for other in done)
            if (one.hunt or one.difficulty == 1) and minutes <= IN_CLASS:
                done.append(one)
        return done or sorted(self.exercises, key=lambda one: one.minutes)[:1]

    def at_home(self) -> list[Exercise]:
        return [one for one in self.exercises if one not in self.in_class()]

    def chapters(self) -> str:
        """The chapters of a week, without their numbers."""
        titles = [
            title.partition(". ")[2]
            for title, names in pages.by_chapter().items()
            if {*names} & {*self.pages}
        ]
        return "; ".join(titles)


def pages_to(goals: tuple[str, ...]) -> list[str]:
    """The lessons that are goals, and all that come before one."""
    names = [n for n in pages.lessons() if any(fnmatch(n, goal) for goal in goals)]
    wanted = set(names).union(*map(pages.behind, names))
    return [name for name in pages.lessons() if name in wanted]


@cache
def weeks(number: int) -> list[Week]:
    """The pages of a plan in order, cut where about the same work is done; the exercises of each
    week are those of its pages, none before what it builds on.

    An exercise that is harder than the plan is left out, and so is what builds on it.
    """
    goals, hardest = PLANS[number]
    names = pages_to(goals)
    taken = {one.name: one for one in exercises() if one.difficulty <= hardest}
    minutes = {name: pages.minutes(name) + CLASS * talks.minutes(name) for name in names}
    minutes[names[0]] += SET_UP
    for one in taken.values():
        if one.page in minutes:
            minutes[one.page] += one.minutes
    # The start from zero is a week of its own, which a class that knows it can leave out.
    start = [name for name in names if name.startswith("0_")]
    cut = parts(names[len(start) :], number - bool(start), minutes)
    plan = [Week(part, []) for part in ([start] if start else []) + cut]
    week_of = {name: i for i, week in enumerate(plan) for name in week.pages}
    before = {name: [one.page, *one.after] for name, one in taken.items()}
    for name in TopologicalSorter(before).static_order():
        if name in taken and set(before[name]) <= set(week_of):
            week_of[name] = max(week_of[other] for other in before[name])
    for name, one in taken.items():
        if name in week_of:
            plan[week_of[name]].exercises.append(one)
    return plan


def parts(names: list[str], number: int, minutes: dict[str, int]) -> list[list[str]]:
    """A list in so many parts, in order, none of them empty: those whose minutes have the smallest
    sum of squares, so that no part is much longer than another."""

    @cache
    def best(end: int, count: int) -> tuple[int, tuple[int, ...]]:
        """Of the first ``end`` names in ``count`` parts: that sum, and where each part ends."""
        if count == 1:
            return sum(minutes[name] for name in names[:end]) ** 2, (end,)
        found = []
        for start in range(count - 1, end):
            squares, ends = best(start, count - 1)
            here = sum(minutes[name] for name in names[start:end])
            found.append((squares + here**2, (*ends, end)))
        return min(found)

    ends = best(len(names), number)[1]
    return [names[start:end] for start, end in pairwise((0, *ends))]


def table(number: int) -> dict[str, Any]:
    """The weeks of a plan: what to read, what to do in class, what to do at home."""
    plan = weeks(number)
    taken = [one for week in plan for one in week.exercises]
    left = [one for one in exercises() if one not in taken]
    return {"number": number, "weeks": plan, "taken": taken, "left": left}


def courses() -> list[dict[str, Any]]:
    """Other courses, each topic with its exercises."""
    text = (pages.DOCS / "classroom" / "syllabi.toml").read_text(encoding="utf-8")
    others: list[dict[str, Any]] = tomllib.loads(text)["course"]
    for topic in (topic for course in others for topic in course["topics"]):
        topic["exercises"] = [e for name in topic["pages"] for e in exercises() if e.page == name]
    return others
