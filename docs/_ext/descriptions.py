"""What a page is about, for a search engine, and below each result of the site's own search.

A page that does not say it (`.. meta::`) is described by the first sentences of its text; what is
above them, as minutes to read, is no description. `sphinxext.opengraph` says the same to programs
that show a link. Sphinx would show the place that was found, and fetch every page of the list for
it, which a copy opened from disk cannot. So the descriptions of all pages, the meanings of all
terms and the beginnings of other entries are one small file.
"""

import json
import re
from html import escape
from typing import Any

import finding
import rst
import terms
from docutils import nodes

FILE = "descriptions.js"
#: Letters: so many are enough, and so few are not, even if the next sentence is a long one.
LENGTH, SHORT = 200, 60


def described(document: nodes.document) -> str:
    """What the author says of a page, or its first sentences, as many as are short enough."""
    for meta in document.findall(nodes.meta):
        if meta.get("name") == "description":
            return meta["content"]
    for paragraph in document.findall(nodes.paragraph):
        text = terms.summary(paragraph) if isinstance(paragraph.parent, nodes.section) else ""
        said = beginning(text)
        if said and "used-on" not in paragraph["classes"]:
            return said
    return ""


def beginning(text: str) -> str:
    """The first sentences of a text, as many as are short enough."""
    said = ""
    for sentence in re.findall(r".+?(?:[.?!](?=\s|$)|。)", text):
        if said and len(said) >= SHORT and len(said + sentence) > LENGTH:
            break
        said += sentence
    return said


def read(app: Any, document: nodes.document) -> None:
    # The metadata of a page comes back from the process that read it, and stays for later builds.
    app.env.metadata[app.env.docname].setdefault("og:description", described(document))


def add_tag(app: Any, name: str, template: str, context: dict[str, Any], document: Any) -> None:
    text = app.env.metadata.get(name, {}).get("og:description", "")
    if text and 'name="description"' not in context["metatags"]:
        context["metatags"] += f'<meta content="{escape(text)}" name="description" />\n'
    if name == "search" and app.builder.name == "html":
        app.add_js_file(FILE)
        app.add_js_file("search.js")


def write(app: Any, env: Any) -> None:
    """Before the pages: the search page names the file with its checksum."""
    if app.builder.name != "html":
        return
    place = app.builder.get_target_uri
    found = {
        place(name): env.metadata[name].get("og:description", "") for name in sorted(env.found_docs)
    }
    for name in finding.ENTRIES.keys() & env.all_docs:
        for entry in finding.entries(env, name):
            whole = name == terms.GLOSSARY
            found[f"{place(name)}#{entry.anchor}"] = entry.text if whole else beginning(entry.text)
    known = json.dumps({where: text for where, text in found.items() if text}, ensure_ascii=False)
    rst.write({app.outdir / "_static" / FILE: f"const DESCRIPTIONS = {known};\n"})


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-read", read, priority=400)  # before anything is added to a page
    app.connect("html-page-context", add_tag, priority=400)
    app.connect("env-updated", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
