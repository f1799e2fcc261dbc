"""Markdown that is read twice: in the repository, where links lead to files, and on the site, where
they lead to the documents made from these files.

A template of `docs/_pages/teaching` names a file from the root of the repository, as
`/docs/course.rst`.
"""

import os
import re
from pathlib import Path
from typing import Any

from gallery import exercises, pages
from sources import templates

from lm_from_scratch.exercises.exercise import Exercise

#: A link to a file, without a place on it.
LINK = re.compile(r"\[([^\[\]]+)\]\(([^()#:\s]+)\)")
#: The document that shows a file of the repository.
PLACES = {
    r"tutorials/(\w+/\w+)\.py": lambda found: pages.document(found[1]),
    r"lm_from_scratch/exercises/catalogue/(\w+)/text\.py": r"/exercises/\1",
    r"lm_from_scratch/exercises/catalogue": "/exercises/index",
    r"tests/exercises/test_exercises_hold\.py": "/exercises/proof",
    r"lm_from_scratch": "/api/index",
    r"docs/([\w/]+)\.(?:rst|md)": r"/\1",
}
#: A file of the built site, which is no document; one that readers download.
BUILT = re.compile(r"docs/_build/html/(.+)")
DOWNLOADED = re.compile(r"lm_from_scratch/exercises/(AGENTS\.md)")


def page_link(name: str) -> str:
    """A link to the script of a page."""
    return f"[{pages.sections(name)[0].plain}](/tutorials/{name}.py)"


def source_link(one: Exercise) -> str:
    """A link to the text of an exercise."""
    place = f"/lm_from_scratch/exercises/catalogue/{one.name}/text.py"
    return f"[{exercises.title(one)}]({place})"


templates.PAGES.filters |= {"page_link": page_link, "source_link": source_link}


def render(path: Path, template: str, /, **values: Any) -> str:
    """A template as the text of the file ``path``, from which its links lead."""
    folder = path.parent.relative_to(pages.ROOT)

    def link(found: re.Match[str]) -> str:
        if not found[2].startswith("/"):
            return found[0]
        return f"[{found[1]}]({os.path.relpath(found[2][1:], folder)})"

    return LINK.sub(link, templates.render(template, **values))


def target(place: str, path: Path) -> str:
    """The file, seen from the root of the repository, to which a link of ``path`` leads."""
    return os.path.relpath(path.parent / place, pages.ROOT)


def document(place: str, path: Path) -> str | None:
    """The document that the site has of a linked file; none if it has none."""
    for pattern, name in PLACES.items():
        if found := re.fullmatch(pattern, target(place, path)):
            return name(found) if callable(name) else found.expand(name)
    return None


def for_site(text: str, path: Path) -> str:
    """The text of the file ``path`` as the site reads it."""

    def link(found: re.Match[str]) -> str:
        if name := document(found[2], path):
            return f"{{doc}}`{found[1]} <{name}>`"
        if given := DOWNLOADED.fullmatch(target(found[2], path)):
            return f"{{download}}`{found[1]} </exercises/files/{given[1]}>`"
        if built := BUILT.fullmatch(target(found[2], path)):
            up = os.path.relpath(pages.DOCS / built[1], path.parent)
            return f'<a href="{up}">{found[1]}</a>'
        return found[0]

    return LINK.sub(link, text)


# -- from the markup of pages --------------------------------------------------------------------


def from_page(text: str, name: str) -> str:
    """A text of the page ``name`` in Markdown."""
    text = pages.LINK.sub(lambda f: f"[{plain(f[1])}](/tutorials/{pages.target(name, f)}.py)", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    text = re.sub(r"`([^`<]+?)\s*<(https?://[^>`]+)>`_+", r"[\1](\2)", text)
    return " ".join(text.split())


def from_document(text: str) -> str:
    """A text of a document of `docs` in Markdown, whose links to documents lead to files."""

    def link(found: re.Match[str]) -> str:
        place = found[2].removeprefix("/")
        if name := pages.page_of(place):
            return f"[{plain(found[1])}](/tutorials/{name}.py)"
        is_file = (pages.DOCS / f"{place}.rst").exists()
        return f"[{plain(found[1])}](/docs/{place}.rst)" if is_file else plain(found[1])

    return from_page(re.sub(r":doc:`([^`<]+?)\s*<([^>`]+)>`", link, text), "")


def plain(text: str) -> str:
    return text.replace("`", "")
