"""The first mention of each glossary term on a page becomes a quiet link to the glossary.

The links are added to the finished page: after the translation, so no catalogue knows them, and in
HTML only, so neither notebooks nor scripts have them. A term is linked once on a page, in prose:
not in headings, code, formulas, links, tables of files, nor in hints that are still closed. An
entry may end with a comment, "linked on: PATTERN": its word is common, or means other things too,
and is a link on the page that explains it and on those whose name has the pattern.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform

GLOSSARY = "glossary"
CLASS = "glossary-term"
#: Pages whose terms are linked: tutorials, GPU pages, exercises, the teacher's guide.
PAGES = re.compile(r"(auto_tutorials/\d\w*/\d\w*|gpu/\d\w*|exercises/(?!index|proof)\w+|teaching)$")
#: Names of nodes; the gallery makes the last one of a block of code.
NOT_IN = {
    "title", "rubric", "caption", "label", "topic", "comment", "raw", "toctree",
    "reference", "pending_xref", "download_reference", "math", "math_block",
    "literal", "literal_block", "code_links_block",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Term:
    """A term of the glossary: its name there, the id of its place, and what it means."""

    name: str
    place: str
    meaning: str
    page: str = ""  # the document that explains it
    pages: str = ""  # a pattern of others on which it is a link

    @property
    def word(self) -> str:
        return re.sub(r"\s*[(（].*[)）]$", "", self.name)

    def plurals(self) -> list[str]:
        word = self.word
        ies = [f"{word[:-1]}ies"] if re.search(r"[^aeiou]y$", word) else []
        return [f"{word}s", f"{word}es", *ies]

    def is_on(self, docname: str) -> bool:
        return self.page == docname or bool(re.search(self.pages, docname))


def read(glossary: nodes.document) -> list[Term]:
    """The terms of the glossary's page, in the language of the build."""
    found = []
    for item in glossary.findall(nodes.definition_list_item):
        paragraph = next(item.findall(nodes.definition)).next_node(nodes.paragraph)
        links = [x for x in paragraph.findall(addnodes.pending_xref) if "doc" in x["reftype"]]
        page = links[-1]["reftarget"].lstrip("/") if links else ""
        comments = [comment.astext() for comment in item.findall(nodes.comment)]
        pages = "".join(comment.partition("linked on: ")[2] for comment in comments)
        for term in item.findall(nodes.term):
            found.append(Term(term.astext(), term["ids"][0], summary(paragraph), page, pages))
    return found


def summary(paragraph: nodes.paragraph) -> str:
    """A definition as plain text: up to its first formula, and without the page at its end."""
    text = ""
    for node in paragraph.children:
        if isinstance(node, nodes.math):
            text = re.sub(r"[:,：，]\s*$", ".", text)
            return sentences(text)
        if isinstance(node, (nodes.reference, addnodes.pending_xref)) and text.endswith(": "):
            return sentences(text)
        text += node.astext()
    return " ".join(text.split())


def sentences(text: str) -> str:
    """What is complete of a text."""
    complete = re.match(r".*(\.(?=\s|$)|。)", " ".join(text.split()))
    return complete[0] if complete else ""


def pattern(words: list[str]) -> re.Pattern[str]:
    """Any of the words, the longest first. A small first letter may be a capital.

    Letters of scripts without spaces are no border: a word may touch them.
    """
    parts = []
    for word in sorted(words, key=len, reverse=True):
        first = re.escape(word[0])
        if word[0].islower() and not re.search(r"[A-Z]", word[1:]):
            first = f"[{first}{word[0].upper()}]"
        parts.append(first + re.sub(r"(\\ |\s)+", r"\\s+", re.escape(word[1:])))
    return re.compile(rf"(?<![A-Za-z0-9_-])(?:{'|'.join(parts)})(?![A-Za-z0-9_-])", re.A)


def is_closed(node: Any) -> bool:
    """Whether no term is linked inside a node."""
    classes = node.get("classes", [])
    # The gallery's boxes; a section has such a class too, for the whole page.
    box = not isinstance(node, nodes.section) and "sphx-glr" in " ".join(classes)
    return type(node).__name__ in NOT_IN or "no-search" in classes or box


def prose(document: nodes.document) -> Iterator[nodes.Text]:
    """Every piece of text in which a term may be linked."""
    for text in list(document.findall(nodes.Text)):
        above: Any = text.parent
        while above is not None and not is_closed(above):
            above = above.parent
        if above is None:
            yield text


class LinkTerms(SphinxPostTransform):
    default_priority = 700  # behind the one that resolves the page's own links
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        docname = self.env.docname
        if GLOSSARY not in self.env.found_docs:
            return
        # The search finds a page by the terms that it explains, as by an entry of an index.
        explained = [term for term in all_terms(self.env) if term.page == docname]
        entries = [("single", term.word, "", "main", None) for term in explained]
        if entries:
            self.document.insert(0, addnodes.index(entries=entries))
        if docname == GLOSSARY:
            add_letters(self.document)
        if PAGES.match(docname):
            place = self.app.builder.get_relative_uri(docname, GLOSSARY)
            link_terms(self.document, all_terms(self.env), docname, place)


def add_letters(document: nodes.document) -> None:
    """Before the terms, a link to the first term of each letter."""
    for glossary in list(document.findall(addnodes.glossary)):
        first: dict[str, str] = {}
        for term in glossary.findall(nodes.term):
            letter = term.astext()[0].upper()[0]
            if letter.isalnum():
                first.setdefault(letter, term["ids"][0])
        if len(first) > 40:  # a script of words, not of letters
            continue
        row = nodes.paragraph(classes=["first-letters"])
        for letter, place in first.items():
            row += [nodes.reference("", letter, refid=place, internal=True), nodes.Text(" ")]
        glossary.parent.insert(glossary.parent.index(glossary), row)


def link_terms(document: nodes.document, terms: list[Term], docname: str, place: str) -> list[str]:
    """Link the first mention of each term, and return their names in the order of the page."""
    # A term that is not linked here still holds its words: "block table" is no "block". A word
    # itself goes before the plural of another, and a term that is linked before one that is not.
    ordered = sorted(terms, key=lambda term: term.is_on(docname))
    known = {form: term for term in ordered for form in term.plurals()}
    known |= {term.word: term for term in ordered}
    if not known:
        return []
    words = pattern(list(known))
    linked: list[str] = []
    for text in prose(document):
        whole, made, end = text.astext(), [], 0
        for found in words.finditer(whole):
            word = re.sub(r"\s+", " ", found[0])
            term = known.get(word) or known[word[0].lower() + word[1:]]
            if term.place in linked or not term.is_on(docname):
                continue
            linked.append(term.place)
            link = nodes.reference("", "", internal=True, refuri=f"{place}#{term.place}")
            link["classes"] = [CLASS]
            if term.meaning:
                link["reftitle"] = term.meaning
            link += nodes.Text(found[0])
            made += [nodes.Text(whole[end : found.start()]), link]
            end = found.end()
        if made:
            made.append(nodes.Text(whole[end:]))
            text.parent.replace(text, [node for node in made if node.astext()])
    return linked


def all_terms(env: Any) -> list[Term]:
    """Those of the glossary as it was read, once for each process that writes pages."""
    if getattr(env, "_glossary_terms", None) is None:
        document = env.get_doctree(GLOSSARY)
        env._glossary_terms = read(document)
    return env._glossary_terms


def changed(app: Any, env: Any) -> list[str]:
    """Pages to write again: all whose terms are linked, if the glossary is another one."""
    env._glossary_terms = None
    now = [dataclasses.astuple(term) for term in all_terms(env)] if GLOSSARY in env.all_docs else []
    before, env.glossary_of_last_build = getattr(env, "glossary_of_last_build", None), now
    return [] if now == before else [name for name in env.all_docs if PAGES.match(name)]


def setup(app: Any) -> dict[str, bool]:
    app.add_post_transform(LinkTerms)
    app.connect("env-updated", changed)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
