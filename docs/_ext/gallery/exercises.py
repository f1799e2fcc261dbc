"""The exercises of the course: by page and chapter, and how a page names one."""

import re
from typing import Any

from sphinx.locale import _

from gallery import pages
from lm_from_scratch.exercises import source
from lm_from_scratch.exercises.exercise import Exercise
from lm_from_scratch.exercises.exercise import exercises as written

TITLE = "13. Exercises"
INTRO = (
    "Write the central functions yourself, and fix bugs that real projects have had. A check says "
    "what is wrong first, and which misconception it looks like."
)
DIFFICULTY = {1: _("easy"), 2: _("medium"), 3: _("hard")}


def of_page(page: str) -> list[Exercise]:
    """The exercises that belong to a page "CHAPTER/NAME"."""
    return [one for one in written() if one.page == page]


def by_chapter() -> dict[str, list[Exercise]]:
    """The exercises by the title of the chapter to whose pages they belong."""
    chapters = pages.by_chapter().items()
    by_title = {title: [one for one in written() if one.page in names] for title, names in chapters}
    return {title: members for title, members in by_title.items() if members}


def before(one: Exercise) -> list[Exercise]:
    """The exercises that an exercise builds on."""
    return [other for other in written() if other.name in one.after]


def title(one: Exercise) -> str:
    """The title for links, in which backticks cannot stand."""
    return source.title(one.name).replace("`", "")


def link(one: Exercise) -> str:
    return f"{{doc}}`{title(one)} </exercises/{one.name}>`"


def text(given: str) -> str:
    """A sentence of the catalogue in Markdown: only what stands in backticks is marked up."""
    return re.sub(r"(`[^`]*`)|([\\*_$\[\]<>|])", lambda m: m[1] or f"\\{m[2]}", given)


#: What templates call these functions, and those of pages.
FILTERS: dict[str, Any] = {
    "document": pages.document,
    "in_words": pages.in_words,
    "link": link,
    "minutes": pages.minutes,
    "minutes_to_follow": pages.minutes_to_follow,
    "lower_first": lambda sentence: sentence[:1].lower() + sentence[1:],
    "upper_first": lambda sentence: sentence[:1].upper() + sentence[1:],
    "text": text,
    "title": title,
}
