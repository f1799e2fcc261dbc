"""What the build adds to a page below its title and to its exercises."""

from typing import Any

import exercises
import gallery
import page
from docutils import nodes
from sphinx import addnodes


def doc(target: str, docname: str) -> addnodes.pending_xref:
    """A link to a document, by its title. No catalogue knows it, nor the texts around it: their
    numbers change more often than a translation should."""
    return addnodes.pending_xref(
        "", nodes.inline("", target), refdomain="std", reftype="doc", refexplicit=False,
        refwarn=True, reftarget=target, refdoc=docname,
    )  # fmt: skip


def joined(parts: list[nodes.Node | str]) -> nodes.paragraph:
    made = nodes.paragraph()
    made += [nodes.Text(part) if isinstance(part, str) else part for part in parts]
    return made


def facts(name: str, docname: str) -> nodes.bullet_list:
    """The strip below a title."""
    items = [[f"{page.minutes(name)} minutes to read"]]
    if needs := page.needs(name):
        links = [part for other in needs for part in (", ", doc(gallery.document(other), docname))]
        items.append(["read before: ", *links[1:]])
    if packages := page.packages(name):
        items.append([f"needs {' and '.join(packages)}"])
    if count := page.exercises(name):
        text = f"{count} exercise{'s' if count > 1 else ''}"
        checked = len(exercises.of_page(name))
        own = nodes.reference("", text, refuri="#exercises", internal=True)
        items.append([own, f", and {checked} with checks" if checked else ""])
    strip = nodes.bullet_list(classes=["page-facts"])
    strip += [nodes.list_item("", joined(item)) for item in items]
    return strip


def with_checks(name: str, docname: str) -> list[nodes.paragraph]:
    """A line on the exercises with automatic checks that belong to a page, if there are any."""
    parts = []
    for found in exercises.of_page(name):
        what = "bug hunt" if found.hunt else exercises.DIFFICULTY[found.difficulty]
        link = doc(f"/exercises/{found.name}", docname)
        parts += [", " if parts else " ", link, f" ({what}, {found.minutes} minutes)"]
    start = nodes.strong("", "With automatic checks:")
    return [joined([start, *parts, "."])] if parts else []


def add(app: Any, doctree: nodes.document) -> None:
    docname = app.env.docname
    name = gallery.page_of(docname)
    if name is None:
        return
    section = next(doctree.findall(nodes.section))
    at = section.first_child_matching_class(nodes.title) + 1
    section.insert(at, facts(name, docname))
    own = next(s for s in doctree.findall(nodes.section) if "exercises" in s["ids"])
    own += with_checks(name, docname)
    app.env.note_dependency("exercises/index.md")  # which changes when one of them does


def link_pages(app: Any, docname: str, source: list[str]) -> None:
    """Links between notebooks become links between pages."""
    if docname.startswith("auto_tutorials/") and (name := gallery.page_of(docname)):
        source[0] = page.with_documents(name, source[0], ":doc:`{} <{}>`")


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", link_pages)
    app.connect("doctree-read", add)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
