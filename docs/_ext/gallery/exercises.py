"""The exercises of the course: by page and chapter, and the files that a student gets.

`hand_out.py` writes the files, `exercise_pages.py` the pages of the site.
"""

import io
import zipfile
from pathlib import Path

from sources import templates
from sphinx.locale import _

from gallery import pages
from lm_from_scratch.exercises import source
from lm_from_scratch.exercises.exercise import Exercise
from lm_from_scratch.exercises.exercise import exercises as written
from lm_from_scratch.exercises.notebook import dump, notebook

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


templates.PAGES.filters |= {
    "document": pages.document,
    "in_words": pages.in_words,
    "link": link,
    "minutes": pages.minutes,
    "title": title,
}
templates.PAGES.tests["lesson"] = pages.is_lesson


# -- the files -------------------------------------------------------------------------------


def student_files() -> dict[Path, str]:
    """What a student gets: a notebook and a script of each exercise, and rules for AI helpers."""
    texts = {Path(source.RULES): source.rules()}
    for found in written():
        texts[Path(f"{found.name}.ipynb")] = dump(notebook(found))
        texts[Path(f"{found.name}.py")] = source.script(found.name)
    return texts


def archive(texts: dict[Path, str]) -> bytes:
    """A zip of files, the same bytes for the same texts."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for path, text in sorted(texts.items()):
            entry = zipfile.ZipInfo(path.as_posix(), (2026, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(entry, text)
    return stream.getvalue()
