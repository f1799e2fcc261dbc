"""The chapter of exercises: a page for each, their index, and the links from the tutorials.

Everything is made from the sources and the catalogue. Nothing on these pages is run, and no
solution is on them: what is shown is what `exercises.py` gives to a student.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import exercises
import gallery
import museum
import page as pages
import rst
from exercises import DIFFICULTY
from exercises import title as source_title

from lm_from_scratch.exercises import source
from lm_from_scratch.exercises.exercise import Exercise

TITLE = "10. Exercises"
INTRO = (
    "Write the central functions yourself, and mend bugs that real projects have had. A check says "
    "what is wrong first, and which misconception it looks like."
)
INDEX = "/exercises/index"


# -- what is known about an exercise ---------------------------------------------------------


def kind(found: Exercise) -> str:
    if found.hunt:
        return f"bug hunt ({museum.with_links(found.hunt)})"
    return "kernel" if found.key[0] == 9 else "write"


def by_chapter() -> dict[str, list[Exercise]]:
    """The exercises by the title of the chapter to whose pages they belong."""
    titles = gallery.by_chapter().items()
    found = {
        title: [one for one in exercises.written() if one.page in names] for title, names in titles
    }
    return {title: members for title, members in found.items() if members}


def text(given: str) -> str:
    """A sentence of the catalogue in Markdown: only what stands in backticks is marked up."""
    parts = re.split(r"(`[^`]*`)", given)
    return "".join(
        p if i % 2 else re.sub(r"([\\*_$\[\]<>|])", r"\\\1", p) for i, p in enumerate(parts)
    )


def link(found: Exercise) -> str:
    return f"{{doc}}`{source_title(found)} </exercises/{found.name}>`"


def lower(sentence: str) -> str:
    """A sentence to go on with: "Write ..." becomes "write ..."."""
    return sentence[:1].lower() + sentence[1:]


# -- the pages -------------------------------------------------------------------------------

FILTERS: dict[str, Any] = {
    "as_student": exercises.as_student,
    "document": gallery.document,
    "kind": kind,
    "link": link,
    "mistake": lambda found: text(museum.with_links(found.hunt)),
    "text": text,
    "title": source_title,
    "without_title": lambda markdown: re.sub(r"\A# .*\n+", "", markdown),
}
rst.PAGES.filters |= FILTERS


def page(found: Exercise) -> str:
    head = f"{kind(found)} · {found.minutes} minutes · {DIFFICULTY[found.difficulty]}"
    return rst.render(
        "exercise.md",
        found=found,
        title=source.title(found.name),
        head=text(head[:1].upper() + head[1:]),
        document=gallery.document(found.page),
        outcome=text(lower(found.outcome)),
        before=[link(other) for other in exercises.written() if other.name in found.after],
        cells=source.source(found.name),
        hints=[text(hint) for hint in found.hints],
    )


def index() -> str:
    found = exercises.written()
    return rst.render(
        "exercises.md",
        title=TITLE,
        intro=INTRO,
        found=found,
        hunts=[one for one in found if one.hunt],
        time=pages.in_words(sum(one.minutes for one in found)),
        chapters=by_chapter(),
        difficulty=DIFFICULTY,
    )


# -- the build -------------------------------------------------------------------------------


def path_card() -> list[str]:
    """The lines of the landing page's card."""
    found = exercises.written()
    hunts = sum(bool(one.hunt) for one in found)
    return [
        f"* :doc:`All {len(found)} exercises, {hunts} of them bug hunts <{INDEX}>`",
        "* :doc:`/exercises/proof`",
        "* :doc:`/teaching`",
    ]


def write(app: Any) -> None:
    folder = Path(app.srcdir) / "exercises"
    texts = {folder / f"{found.name}.md": page(found) for found in exercises.written()}
    texts[folder / "index.md"] = index()
    given = exercises.student_files()
    texts |= {folder / "files" / path: content for path, content in given.items()}
    packed = folder / "files" / "exercises.zip"
    kept = {packed: "", folder / "proof.md": ""}
    for old in {*folder.glob("*.*"), *folder.glob("files/*")} - set(texts | kept):
        old.unlink()
    rst.write(texts)
    content = exercises.archive(given)
    if not packed.exists() or packed.read_bytes() != content:
        packed.write_bytes(content)


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", write, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
