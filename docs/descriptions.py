"""What a page is about, for a search engine, and below each result of the site's own search.

A page that does not say it (`.. meta::`) is described by the first sentences of its text. Sphinx
would show the place that was found, and fetch every page of the list for it, which a copy opened
from disk cannot. So the descriptions of all pages, and the meanings of all terms, are one small
file.
"""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

import terms
from docutils import nodes

FILE = "descriptions.js"
LENGTH = 200


def described(document: nodes.document) -> str:
    """What the author says of a page, or its first sentences, as many as are short enough."""
    for meta in document.findall(nodes.meta):
        if meta.get("name") == "description":
            return meta["content"]
    for paragraph in document.findall(nodes.paragraph):
        text = terms.summary(paragraph) if isinstance(paragraph.parent, nodes.section) else ""
        short = re.match(rf".{{1,{LENGTH - 1}}}[.?!。](?=\s|$)|.*?[.?!。](?=\s|$)", text)
        if short and "used-on" not in paragraph["classes"]:
            return short[0]
    return ""


def read(app: Any, document: nodes.document) -> None:
    # The metadata of a page comes back from the process that read it, and stays for later builds.
    app.env.metadata[app.env.docname]["description"] = described(document)


def add_tag(app: Any, name: str, template: str, context: dict[str, Any], document: Any) -> None:
    text = app.env.metadata.get(name, {}).get("description", "")
    if text and 'name="description"' not in context["metatags"]:
        context["metatags"] += f'<meta content="{escape(text)}" name="description" />\n'
    if name == "search":
        app.add_js_file(FILE)
        app.add_js_file("search.js")


def write(app: Any, exception: Exception | None) -> None:
    if exception or app.builder.name != "html":
        return
    place = app.builder.get_target_uri
    found = {
        place(name): app.env.metadata[name].get("description", "")
        for name in sorted(app.env.found_docs)
    }
    if terms.GLOSSARY in app.env.found_docs:
        for term in terms.all_terms(app.env):
            found[f"{place(terms.GLOSSARY)}#{term.place}"] = term.meaning
    known = json.dumps({where: text for where, text in found.items() if text}, ensure_ascii=False)
    (app.outdir / "_static" / FILE).write_text(f"const DESCRIPTIONS = {known};\n", encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-read", read)
    app.connect("html-page-context", add_tag)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
