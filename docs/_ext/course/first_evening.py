"""Minutes beside the lessons of a list with the class `first-evening`, and below it their sum."""

from typing import Any

from docutils import nodes
from gallery import pages
from sphinx import addnodes
from sphinx.locale import _

CLASS = "first-evening"


def minutes(docname: str) -> int:
    """Those of a lesson; of the tour, those of its text."""
    if name := pages.page_of(docname):
        return pages.minutes(name)
    text = (pages.DOCS / "_pages" / f"{docname}.rst").read_text(encoding="utf-8")
    return round(pages.words(text) / pages.WORDS_A_MINUTE)


def add(app: Any, document: nodes.document) -> None:
    for group in document.findall(nodes.enumerated_list):
        if CLASS not in group["classes"]:
            continue
        links = [next(item.findall(addnodes.pending_xref)) for item in group.children]
        each = [minutes(link["reftarget"].removeprefix("/")) for link in links]
        for item, number in zip(group.children, each, strict=True):
            time = _("{number} min").format(number=number)
            item.children[0] += nodes.inline("", f" ({time})")
        total = _("All seven: {minutes} minutes to read.").format(minutes=sum(each))
        at = group.parent.index(group) + 1
        group.parent.insert(at, nodes.paragraph("", total, translatable=False))


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-read", add)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
