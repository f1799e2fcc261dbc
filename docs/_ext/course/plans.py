"""Plans of a course in weeks, cut from the course itself: pages in order, and their exercises."""

from dataclasses import dataclass
from fnmatch import fnmatch
from graphlib import TopologicalSorter

from gallery import pages

from lm_from_scratch.exercises.exercise import Exercise, exercises

#: By its number of weeks: where a course leads, as patterns of pages, and the highest difficulty
#: that it takes.
PLANS = {
    6: (("5_caching/4_*", "6_generation/1_*", "8_quantized_weights/2_*"), 2),
    12: (("[0-9]*_*/*", "gpu/[1-4]_*"), 3),
}


#: Minutes of exercises in the meetings of a week.
IN_CLASS = 75


@dataclass(frozen=True)
class Week:
    pages: list[str]
    exercises: list[Exercise]

    def in_class(self) -> list[Exercise]:
        """Bug hunts are for pairs, and easy exercises to begin with: both in class, in order, as
        long as there is time. In a week that has neither, it is the shortest exercise."""
        there: list[Exercise] = []
        for one in self.exercises:
            minutes = one.minutes + sum(other.minutes for other in there)
            if (one.hunt or one.difficulty == 1) and minutes <= IN_CLASS:
                there.append(one)
        return there or sorted(self.exercises, key=lambda one: one.minutes)[:1]

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


def weeks(number: int) -> list[Week]:
    """The pages of a plan in order, cut where about the same work is done; the exercises of each
    week are those of its pages, none before what it builds on.

    An exercise that is harder than the plan is left out, and so is what builds on it.
    """
    goals, hardest = PLANS[number]
    names = pages_to(goals)
    taken = {one.name: one for one in exercises() if one.difficulty <= hardest}
    work = [
        pages.minutes(n) + sum(one.minutes for one in taken.values() if one.page == n)
        for n in names
    ]
    found = [Week([], []) for _ in range(number)]
    week_of: dict[str, int] = {}
    for i, name in enumerate(names):
        week_of[name] = int((sum(work[:i]) + work[i] / 2) / sum(work) * number)
        found[week_of[name]].pages.append(name)
    before = {name: [one.page, *one.after] for name, one in taken.items()}
    for name in TopologicalSorter(before).static_order():
        if name in taken and set(before[name]) <= set(week_of):
            week_of[name] = max(week_of[other] for other in before[name])
    for name, one in taken.items():
        if name in week_of:
            found[week_of[name]].exercises.append(one)
    return found
