"""The teacher's guide, `teaching.md`: its tables, and plans of a course in weeks.

    python docs/_ext/teaching.py     writes the tables again, after a change of pages or exercises

The guide is whole in the repository: what is computed stands in it, between two comments. Its links
lead to files of the repository, and on the site to the pages made from these files.

A plan is cut from the course itself: pages in order, and their exercises.
"""

import re
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import exercise_pages  # noqa: F401 - its filters
import exercises
import gallery
import page
import rst

from lm_from_scratch.exercises.exercise import Exercise

GUIDE = gallery.DOCS / "teaching.md"
#: A table of the guide, between its comments.
COMPUTED = re.compile(r"(<!-- computed: (\w+) -->\n).*?(\n<!-- end -->\n)", re.S)
COMMENT = re.compile(r"^<!-- (computed: \w+|end) -->\n", re.M)
LINK = re.compile(r"\[([^\[\]]+)\]\(([^()#:]+)\)")
#: Where links of the guide lead: a file beside `docs/teaching.md`, and its document on the site.
PLACES = {
    r"\.\./tutorials/(\w+/\w+)\.py": lambda found: gallery.document(found[1]),
    r"\.\./lm_from_scratch/exercises/catalogue/(\w+)/text\.py": r"/exercises/\1",
    r"\.\./lm_from_scratch/exercises/catalogue": "/exercises/index",
    r"\.\./tests/slow/exercise_proof/prove\.py": "/exercises/proof",
    r"\.\./lm_from_scratch": "/api/index",
    r"(\w+)\.rst": r"/\1",
}

#: By its number of weeks: where a course leads, as patterns of pages, and the highest difficulty
#: that it takes.
PLANS = {
    6: (("5_caching/4_*", "6_generation/1_*", "8_quantized_weights/2_*"), 2),
    12: (("[1-9]_*/*", "gpu/[1-4]_*"), 3),
}


@dataclass(frozen=True)
class Week:
    pages: list[str]
    exercises: list[Exercise]

    def in_class(self) -> list[Exercise]:
        """Bug hunts are for pairs, and easy exercises to begin with: both in class. In a week that
        has neither, it is the shortest exercise."""
        there = [one for one in self.exercises if one.hunt or one.difficulty == 1]
        return there or sorted(self.exercises, key=lambda one: one.minutes)[:1]

    def at_home(self) -> list[Exercise]:
        return [one for one in self.exercises if one not in self.in_class()]

    def chapters(self) -> str:
        """The chapters of a week, without their numbers."""
        titles = [
            title.partition(". ")[2]
            for title, names in gallery.by_chapter().items()
            if {*names} & {*self.pages}
        ]
        return "; ".join(titles)


def pages_to(goals: tuple[str, ...]) -> list[str]:
    """The lessons that are goals, and all that come before one."""
    names = [n for n in gallery.lessons() if any(fnmatch(n, goal) for goal in goals)]
    wanted = set(names).union(*map(page.behind, names))
    return [name for name in gallery.lessons() if name in wanted]


def weeks(number: int) -> list[Week]:
    """The pages of a plan in order, cut where about the same work is done; the exercises of each
    week are those of its pages, none before what it builds on.

    An exercise that is harder than the plan is left out, and so is what builds on it.
    """
    goals, hardest = PLANS[number]
    names = pages_to(goals)
    taken = {one.name: one for one in exercises.written() if one.difficulty <= hardest}
    work = [
        page.minutes(n) + sum(one.minutes for one in taken.values() if one.page == n) for n in names
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


def plan_table(number: int) -> str:
    """The weeks of a plan: what to read, what to do in class, what to do at home."""
    found = weeks(number)
    taken = [one for week in found for one in week.exercises]
    left = [one for one in exercises.written() if one not in taken]
    return rst.render("teaching/plan.md", weeks=found, taken=taken, left=left)


# -- the guide ---------------------------------------------------------------------------------


def page_link(name: str) -> str:
    """A link to the script of a page."""
    return f"[{page.sections(name)[0].plain}](../tutorials/{name}.py)"


def source_link(one: Exercise) -> str:
    """A link to the text of an exercise."""
    place = f"../lm_from_scratch/exercises/catalogue/{one.name}/text.py"
    return f"[{exercises.title(one)}]({place})"


rst.PAGES.filters |= {"page_link": page_link, "source_link": source_link}


def computed(name: str) -> str:
    """What stands between two comments of the guide: a table, a list or a sentence."""
    if weeks_of := re.fullmatch(r"weeks_(\d+)", name):
        return plan_table(int(weeks_of[1])).strip()
    made = rst.render(f"teaching/{name}.md", gallery=gallery, page=page, exercises=exercises)
    return made.strip()


def written(text: str) -> str:
    """The guide with its computed parts written again."""
    return COMPUTED.sub(lambda found: f"{found[1]}\n{computed(found[2])}\n{found[3]}", text)


def document(place: str) -> str | None:
    """The document that the site has of a linked file; none if it has none."""
    for pattern, target in PLACES.items():
        if found := re.fullmatch(pattern, place):
            return target(found) if callable(target) else found.expand(target)
    return None


def for_site(text: str) -> str:
    """The guide as the site reads it: links lead to documents, and comments are gone."""

    def link(found: re.Match[str]) -> str:
        target = document(found[2])
        return f"{{doc}}`{found[1]} <{target}>`" if target else found[0]

    return LINK.sub(link, COMMENT.sub("", text))


def read(app: Any, docname: str, source: list[str]) -> None:
    if docname == GUIDE.stem:
        source[0] = for_site(source[0])


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    before = GUIDE.read_text(encoding="utf-8")
    after = written(before)
    GUIDE.write_text(after, encoding="utf-8")
    print(f"{GUIDE.name}: {'as it was' if before == after else 'written again'}")
