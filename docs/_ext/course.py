"""What the build adds to a page below its title and to its exercises, and the table of pages."""

from __future__ import annotations

from typing import Any

import exercises
import gallery
import page
import rst
from docutils import nodes
from sphinx import addnodes

#: A text, or a link: its text (empty: the title of the document) and where it leads.
Part = str | tuple[str, str]


def facts(name: str) -> list[list[Part]]:
    """What the strip below a title says, an item each."""
    items: list[list[Part]] = [[f"{page.minutes(name)} minutes to read"]]
    if needs := page.needs(name):
        items.append(["read before: "])
        for other in needs:
            items[-1] += [", "] if other != needs[0] else []
            items[-1].append((page.title(other), gallery.document(other)))
    if packages := page.packages(name):
        items.append([f"needs {' and '.join(packages)}"])
    if count := page.exercises(name):
        checked = len(exercises.of_page(name))
        text = f"{count} exercise{'s' if count > 1 else ''}"
        items.append([(text, "#exercises"), f", and {checked} with checks" if checked else ""])
    return items


def with_checks(name: str) -> list[Part]:
    """The exercises with automatic checks that belong to a page."""
    parts: list[Part] = []
    for found in exercises.of_page(name):
        what = "bug hunt" if found.hunt else exercises.DIFFICULTY[found.difficulty]
        parts += [", " if parts else "", ("", f"/exercises/{found.name}")]
        parts.append(f" ({what}, {found.minutes} minutes)")
    return [*parts, "."] if parts else []


def paragraph(parts: list[Part], docname: str) -> nodes.paragraph:
    """Nodes that no catalogue knows: their numbers change more often than a translation should."""
    made = nodes.paragraph()
    for part in parts:
        if isinstance(part, str):
            made += nodes.Text(part)
        elif part[1].startswith("#"):
            made += nodes.reference("", part[0], refuri=part[1], internal=True)
        else:
            link = addnodes.pending_xref(
                "", refdomain="std", reftype="doc", refexplicit=bool(part[0]), refwarn=True,
                reftarget=part[1], refdoc=docname,
            )  # fmt: skip
            made += link
            link += nodes.inline("", part[0] or part[1])
    return made


def add(app: Any, doctree: nodes.document) -> None:
    docname = app.env.docname
    name = gallery.page_of(docname)
    if name is None:
        return
    strip = nodes.bullet_list(classes=["page-facts"])
    strip += [nodes.list_item("", paragraph(item, docname)) for item in facts(name)]
    section = next(doctree.findall(nodes.section))
    section.insert(section.first_child_matching_class(nodes.title) + 1, strip)
    if parts := with_checks(name):
        line = paragraph(parts, docname)
        line.insert(0, [nodes.strong("", "With automatic checks:"), nodes.Text(" ")])
        own = next(s for s in doctree.findall(nodes.section) if "exercises" in s["ids"])
        own += line


def link_pages(app: Any, docname: str, source: list[str]) -> None:
    """Links between notebooks become links between pages."""
    if docname.startswith("auto_tutorials/") and (name := gallery.page_of(docname)):
        source[0] = page.with_documents(name, source[0], ":doc:`{} <{}>`")


def outdated(app: Any, env: Any, added: set[str], changed: set[str], removed: set[str]) -> set[str]:
    """Pages to which the last build added something else: no file that Sphinx knows says so."""
    now = {
        gallery.document(name)[1:]: (facts(name), with_checks(name)) for name in gallery.in_order()
    }
    before = getattr(env, "page_facts", {})
    env.page_facts = now
    return {name for name in now if now[name] != before.get(name)} & env.found_docs


def table() -> str:
    """Every page with its minutes and what it needs."""
    rows = [["page", "minutes", "read before"]]
    for chapter, members in gallery.by_chapter().items():
        rows.append([f"**{chapter}**", f"**{sum(map(page.minutes, members))}**", ""])
        for name in members:
            before = ", ".join(f":doc:`{gallery.document(other)}`" for other in page.needs(name))
            rows.append([f":doc:`{gallery.document(name)}`", str(page.minutes(name)), before])
    return rst.table(rows, ":widths: 45 10 45")


def totals() -> str:
    """The course in a sentence of numbers."""
    names = gallery.in_order()
    time = page.in_words(sum(map(page.minutes, names)))
    return f"{len(names)} pages in {len(gallery.by_chapter())} chapters: {time} to read.\n"


def setup(app: Any) -> dict[str, bool]:
    app.connect("env-get-outdated", outdated)
    app.connect("source-read", link_pages)
    app.connect("doctree-read", add)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
