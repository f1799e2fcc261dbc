"""The site in other languages. `python docs/_ext editions.translation` lists what stands around it.

The first edition is the whole site. Another one is the pages that ``docs/locale`` has a catalogue
of; a link to any other page leads into the first edition, beside it. Code and results are those of
the first edition: nothing runs again. ``sphinx.po`` has what stands around the text of a page: its
strip, folds, widgets, in Python as ``_("...")`` and in JavaScript as ``lm.t("...")``.
"""

import json
import os
import re
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from babel.messages.extract import extract_from_dir
from babel.messages.pofile import read_po
from docutils import nodes
from sphinx import addnodes
from sphinx.locale import _
from sphinx.transforms import SphinxTransform
from sphinx.util import docname_join

DOCS = Path(__file__).resolve().parents[2]
#: Code of a language, and its name as its readers write it. The first edition is built into the
#: site's own folder, every other one into a folder of its code inside it.
EDITIONS = {"en": "English", "zh_CN": "简体中文"}
FIRST = next(iter(EDITIONS))
LANGUAGE = os.environ.get("SITE_LANGUAGE", FIRST)
AROUND = "sphinx"  # the catalogue of all that is not in a page's own text
WORDS = "words.js"
CARD = '<div class="sphx-glr-thumbnail-title">'
SUFFIX = {"python": "py", "javascript": "js", "jinja2": "html"}
KEYWORDS = {"_": None, "t": None, "lm.t": None}


def catalogues(language: str) -> Path:
    return DOCS / "locale" / language / "LC_MESSAGES"


@cache
def pages(language: str) -> frozenset[str] | None:
    """The documents of an edition; None stands for all."""
    if language == FIRST:
        return None
    folder = catalogues(language)
    names = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.po")}
    return frozenset(names - {AROUND})


def has(docname: str, language: str = LANGUAGE) -> bool:
    """Whether an edition has a page. Each has a search of its own."""
    known = pages(language)
    return known is None or docname in known or docname == "search"


def settings() -> dict[str, Any]:
    """What Sphinx does otherwise in an edition that is not the first."""
    if LANGUAGE == FIRST:
        return {}
    return {
        "include_patterns": [f"{name}.*" for name in sorted(pages(LANGUAGE) or ())],
        # The first edition is built already: its list of pages, with their titles, is at hand.
        "intersphinx_mapping": {FIRST: ("..", "_build/html/objects.inv")},
        "intersphinx_disabled_reftypes": [],
        "suppress_warnings": ["toc.not_readable", "toc.excluded", "sphinx_gallery"],
        "autosummary_generate": [],
    }


# -------------------------------------------------------------------- what stands around the text


def around() -> set[str]:
    """Every text of the frame, as the files of the site have it."""
    folders = [("_ext", "python"), ("_static", "javascript"), ("_templates", "jinja2")]
    folders += [("_pages", "jinja2")]
    messages = [
        message
        for name, method in folders
        for _, _, message, _, _ in extract_from_dir(
            DOCS / name, [(f"**.{SUFFIX[method]}", method)], keywords=KEYWORDS
        )
    ]
    return {message for message in messages if isinstance(message, str)}


def words(language: str, name: str = AROUND) -> dict[str, str]:
    """What a catalogue has for each text; nothing, where an edition has none of that name."""
    path = catalogues(language) / f"{name}.po"
    if not path.exists():
        return {}
    with open(path, "rb") as file:
        return {str(m.id): str(m.string) for m in read_po(file) if m.id and m.string}


def add_words(app: Any, page: str, template: str, context: Any, doctree: Any) -> None:
    context["editions"] = EDITIONS
    context["edition"] = LANGUAGE
    context["has_page"] = has
    context["theme_search_bar_text"] = _("Search the site")
    if words(LANGUAGE):
        app.add_js_file(WORDS, priority=100)


def write(app: Any, env: Any) -> None:
    translated = words(LANGUAGE)
    if app.builder.name == "html" and translated:
        text = f"const lmWords = {json.dumps(translated, ensure_ascii=False)};\n"
        path = Path(app.outdir, "_static", WORDS)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def name(app: Any, env: Any, node: nodes.Element, shown: nodes.Element) -> None:
    """A page that this edition does not have, by the name that the first edition's list has."""
    if node.get("reftype") == "doc":
        node["reftarget"] = docname_join(node["refdoc"], node["reftarget"])


def mark(app: Any, doctree: nodes.document, docname: str) -> None:
    """A link that leads to another edition says so, and is no link to another site. A card has the
    title of its page, which the gallery wrote beside the link."""
    if LANGUAGE == FIRST:
        return
    out = "../" * (docname.count("/") + 1)
    for link in doctree.findall(nodes.reference):
        if link.get("refuri", "").startswith("../") and not link.get("internal"):
            # In code it is one "../".
            link["refuri"] = out + re.sub(r"^(\.\./)+", "", link["refuri"])
            link["reftitle"] = EDITIONS[FIRST]
            link["classes"] = [*link.get("classes", []), "other-edition"]
    for card in list(doctree.findall(nodes.raw)):
        beside = card.parent.children[card.parent.index(card) - 1]
        if isinstance(beside, nodes.paragraph) and CARD in card.astext():
            before, _title, after = card.astext().partition(CARD)
            text = before + CARD + escape(beside.astext()) + after[after.index("<") :]
            card.replace_self(nodes.raw("", text, format="html"))


class Wordless(SphinxTransform):
    """Numbers, and links with the titles of their pages, are the same in every language, and change
    more often than a catalogue."""

    default_priority = 10

    def apply(self, **kwargs: Any) -> None:
        for paragraph in self.document.findall(nodes.paragraph):
            own = (node.astext() for node in paragraph.children if not is_title(node))
            if not re.search(r"[^\W\d_]", "".join(own)):
                paragraph["translatable"] = False


def is_title(node: nodes.Node) -> bool:
    return isinstance(node, addnodes.pending_xref) and not node.get("refexplicit")


def setup(app: Any) -> dict[str, bool]:
    app.add_transform(Wordless)
    app.connect("html-page-context", add_words)
    app.connect("env-updated", write)
    app.connect("missing-reference", name, priority=400)  # before that list is read
    app.connect("doctree-resolved", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    for text in sorted(around()):
        print(text)
