"""What the site's own search knows besides Sphinx's index; `_static/search.js` ranks and shows it.

A place is a page, or an entry of a page that people look things up in: a question, a term, a thing
that is not here. A page is found by words of the outside world too, which stand in the page: in the
gallery's comment `# sphinx_gallery_words`, in its `.. meta:: :keywords:`, or below the heading of a
question as `.. words:`. It is also found by the terms of the glossary that it explains.

A page is described, also to search engines and (by `sphinxext.opengraph`) to programs that show a
link, by its `.. meta:: :description:` or by the first sentences of its text. Sphinx would fetch
every page of a list of results to show the place that was found, which a copy opened from disk
cannot do: so all descriptions are in one small file.
"""

import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from gallery import pages

from lookup import terms

FILE = "places.js"
#: Letters of a description: so many are enough, and so few are not, even if the next sentence is a
#: long one.
LENGTH, SHORT = 200, 60
DESCRIPTION = "og:description"  # the name that the extension opengraph reads, too
#: Pages whose entries are places of their own, and what an entry weighs beside a lesson.
ENTRIES = {"questions": 1.0, terms.GLOSSARY: 0.8, "not_here": 0.8}
#: What a page weighs beside a lesson: the first beginning that fits.
WEIGHTS = {
    "gpu/index": 0.5,
    "gpu/": 0.9,
    "exercises/index": 0.65,
    "exercises/": 0.45,
    "symbols": 0.6,
    "museum": 0.8,
    "glossary": 0.8,
    "benchmarks": 0.8,
    "stories/": 0.7,
    "api/": 0.4,
    "index": 1.0,
    "classroom/install": 1.0,
    "tour": 1.0,
    "teaching": 0.9,
    "": 0.5,
}
IN_DEPTH = 0.9


def weight(docname: str) -> float:
    shown = pages.page_of(docname)
    if shown and not shown.startswith("gpu/"):
        return 1 if pages.is_lesson(shown) else IN_DEPTH
    return next(value for start, value in WEIGHTS.items() if docname.startswith(start))


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
    result: dict[str, Any] = {}
    for name in sorted(env.all_docs):
        shown = pages.page_of(name)
        words = [env.metadata[name].get("keywords", ""), *explained.get(name, [])]
        words += pages.listed(shown, "words") if shown else []
        result[name] = {"weight": weight(name), "words": ", ".join(filter(None, words))}
        if name in ENTRIES:
            result[name]["entries"] = [[ENTRIES[name], *entry] for entry in entries(env, name)]
    return result


def described(document: nodes.document) -> str:
    """What the author says of a page, or its first sentences, as many as are short enough."""
    for meta in document.findall(nodes.meta):
        if meta.get("name") == "description":
            return meta["content"]
    for paragraph in document.findall(nodes.paragraph):
        text = terms.summary(paragraph) if isinstance(paragraph.parent, nodes.section) else ""
        sentences = beginning(text)
        if sentences and "used-on" not in paragraph["classes"]:
            return sentences
    return ""


def beginning(text: str) -> str:
    """The first sentences of a text, as many as are short enough."""
    sentences = ""
    for sentence in re.findall(r".+?(?:[.?!](?=\s|$)|。)", text):
        if len(sentences) >= SHORT and len(sentences + sentence) > LENGTH:
            break
        sentences += sentence
    return sentences


def known_texts(env: Any, place: Any) -> dict[str, str]:
    """The description of each address: of pages, and of entries, of which a term has its whole
    meaning."""
    texts = {name: env.metadata[name].get(DESCRIPTION, "") for name in sorted(env.found_docs)}
    texts = {place(name): text for name, text in texts.items()}
    for name in [page for page in ENTRIES if page in env.all_docs]:
        for entry in entries(env, name):
            text = entry.text if name == terms.GLOSSARY else beginning(entry.text)
            texts[f"{place(name)}#{entry.anchor}"] = text
    return {address: text for address, text in texts.items() if text}


def read(app: Any, document: nodes.document) -> None:
    """The metadata of a page comes back from the process that read it, and stays for later
    builds."""
    meta = [node for node in document.findall(nodes.meta) if node.get("name") == "keywords"]
    metadata = app.env.metadata[app.env.docname]
    metadata["keywords"] = one_line(", ".join(node["content"] for node in meta))
    metadata.setdefault(DESCRIPTION, described(document))


def write(app: Any, env: Any) -> None:
    """Before the pages: the search page names the file with its checksum."""
    if app.builder.name == "html":
        descriptions = known_texts(env, app.builder.get_target_uri)
        tables = {"PLACES": places(env), "DESCRIPTIONS": descriptions}
        lines = [f"const {k} = {json.dumps(v, ensure_ascii=False)};\n" for k, v in tables.items()]
        path = Path(app.outdir, "_static", FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")


def add(app: Any, name: str, template: str, context: dict[str, Any], document: Any) -> None:
    text = app.env.metadata.get(name, {}).get(DESCRIPTION, "")
    if text and 'name="description"' not in context["metatags"]:
        context["metatags"] += f'<meta content="{escape(text)}" name="description" />\n'
    if name == "search" and app.builder.name == "html":
        app.add_js_file(FILE)
        app.add_js_file("search.js")


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-read", read, priority=400)  # before anything is added to a page
    app.connect("html-page-context", add, priority=400)
    app.connect("env-updated", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
