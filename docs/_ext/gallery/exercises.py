"""The exercises of the course: by page and chapter, and how a page names one."""

import re

from sources import templates
from sphinx.locale import _

from gallery import pages
from lm_from_scratch.exercises import source
from lm_from_scratch.exercises.exercise import Exercise
from lm_from_scratch.exercises.exercise import exercises as written

TITLE = "12. Exercises"
INTRO = (
    "Write the central functions yourself, and fix bugs that real projects have had. A check says "
    "what is wrong first, and which misconception it looks like."
)
DIFFICULTY = {1: _("easy"), 2: _("medium"), 3: _("hard")}


def of_page(page: str) -> list[Exercise]:
    """The exercises that belong to a page "CHAPTER/NAME"."""
    return [found for found in written() if found.page == page]


def by_chapter() -> dict[str, list[Exercise]]:
    """The exercises by the title of the chapter to whose pages they belong."""
    found = {
        title: [one for one in written() if one.page in names]
        for title, names in pages.by_chapter().items()
    }
    return {title: members for title, members in found.items() if members}


def before(found: Exercise) -> list[Exercise]:
    """The exercises that an exercise builds on."""
    return [other for other in written() if other.name in found.after]


def title(found: Exercise) -> str:
    """The title for links, in which backticks cannot stand."""
    return source.title(found.name).replace("`", "")


def link(found: Exercise) -> str:
    return f"{{doc}}`{title(found)} </exercises/{found.name}>`"


def text(given: str) -> str:
    """A sentence of the catalogue in Markdown: only what stands in backticks is marked up."""
    parts = re.split(r"(`[^`]*`)", given)
    return "".join(
        p if i % 2 else re.sub(r"([\\*_$\[\]<>|])", r"\\\1", p) for i, p in enumerate(parts)
    )


templates.PAGES.filters |= {
    "document": pages.document,
    "in_words": pages.in_words,
    "link": link,
    "minutes": pages.minutes,
    "lower_first": lambda sentence: sentence[:1].lower() + sentence[1:],
    "text": text,
    "title": title,
}
templates.PAGES.tests["lesson"] = pages.is_lesson
