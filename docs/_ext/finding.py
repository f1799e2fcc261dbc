"""What the site's own search knows of each place besides Sphinx's index; `_static/search.js` ranks.

A place is a page, or an entry of a page that people look things up in: a question, a term, a thing
that is not here. A page is found by words of the outside world too, which stand in the page: in the
gallery's comment `# sphinx_gallery_words`, in its `.. meta:: :keywords:`, or below the heading of a
question as `.. words:`. It is also found by the terms of the glossary that it explains.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import gallery
import page
import rst
import terms
from docutils import nodes

FILE = "places.js"
#: Pages whose entries are places of their own, and what an entry weighs beside a lesson.
ENTRIES = {"questions": 1.0, terms.GLOSSARY: 0.8, "not_here": 0.8}
#: What a page weighs beside a lesson: the first beginning that fits.
WEIGHTS = {
    "gpu/index": 0.5,
    "gpu/": 0.9,
    "exercises/": 0.65,
    "symbols": 0.6,
    "museum": 0.5,
    "stories/": 0.7,
    "api/": 0.4,
    "": 0.5,
}
IN_DEPTH = 0.9


def weight(docname: str) -> float:
    shown = gallery.page_of(docname)
    if shown and not shown.startswith("gpu/"):
        return 1 if gallery.is_lesson(shown) else IN_DEPTH
    return next(value for start, value in WEIGHTS.items() if docname.startswith(start))


def read(app: Any, document: nodes.document) -> None:
    """The keywords of a page. Its metadata comes back from the process that read it."""
    found = [
        meta["content"] for meta in document.findall(nodes.meta) if meta.get("name") == "keywords"
    ]
    app.env.metadata[app.env.docname]["keywords"] = one_line(", ".join(found))


class Entry(NamedTuple):
    """An entry of a page: its place there, its heading, its text, and other words for it."""

    anchor: str
    title: str
    text: str
    words: str = ""


def entries(env: Any, docname: str) -> Iterator[Entry]:
    if docname == terms.GLOSSARY:
        yield from (Entry(term.place, term.name, term.meaning) for term in terms.all_terms(env))
        return
    for section in env.get_doctree(docname).findall(nodes.section):
        title, *below = section.children
        if any(isinstance(node, nodes.section) for node in below):
            continue
        hidden = [node.astext() for node in below if isinstance(node, nodes.comment)]
        words = [text.partition("words: ")[2] for text in hidden]
        text = " ".join(node.astext() for node in below if not isinstance(node, nodes.comment))
        yield Entry(section["ids"][0], title.astext(), one_line(text), one_line(" ".join(words)))


def one_line(text: str) -> str:
    return " ".join(text.split())


def places(env: Any) -> dict[str, Any]:
    explained: dict[str, list[str]] = {}
    for term in terms.all_terms(env) if terms.GLOSSARY in env.all_docs else []:
        explained.setdefault(term.page, []).append(term.word)
    found: dict[str, Any] = {}
    for name in sorted(env.all_docs):
        shown = gallery.page_of(name)
        words = [env.metadata[name].get("keywords", ""), *explained.get(name, [])]
        words += page.comment(shown, "words") if shown else []
        found[name] = {"weight": weight(name), "words": ", ".join(filter(None, words))}
        if name in ENTRIES:
            found[name]["entries"] = [[ENTRIES[name], *entry] for entry in entries(env, name)]
    return found


def write(app: Any, env: Any) -> None:
    """Before the pages: the search page names the file with its checksum."""
    if app.builder.name == "html":
        known = json.dumps(places(env), ensure_ascii=False)
        rst.write({app.outdir / "_static" / FILE: f"const PLACES = {known};\n"})


def add_file(app: Any, name: str, template: str, context: dict[str, Any], document: Any) -> None:
    if name == "search" and app.builder.name == "html":
        app.add_js_file(FILE)


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-read", read)
    app.connect("html-page-context", add_file, priority=300)  # before search.js, which reads it
    app.connect("env-updated", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
