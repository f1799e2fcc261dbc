"""The first mention of each glossary term, and of each letter, on a page becomes a quiet link.

A term leads to the glossary, a letter for an axis, as T, to the tables of `symbols`; what it means
is seen on hovering.

The links are added to the finished page: after the translation, so no catalogue knows them, and in
HTML only, so neither notebooks nor scripts have them. A term is linked once on a page, in prose:
not in headings, code, formulas, links, tables of files, nor in hints that are still closed. An
entry may end with a comment, "linked on: PATTERN": its word is common, or means other things too,
and is a link on the page that explains it and on those whose name has the pattern.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform

GLOSSARY, SYMBOLS = "glossary", "symbols"
CLASS = "glossary-term"
#: Pages whose terms are linked: tutorials, GPU pages, exercises, the teacher's guide.
PAGES = re.compile(r"(auto_tutorials/\d\w*/\d\w*|gpu/\d\w*|exercises/(?!index|proof)\w+|teaching)$")
#: Names of nodes; the gallery makes the last one of a block of code.
NOT_IN = {
    "title", "rubric", "caption", "label", "topic", "comment", "raw", "toctree",
    "reference", "pending_xref", "download_reference", "math", "math_block",
    "literal", "literal_block", "code_links_block",
}  # fmt: skip


@dataclass(frozen=True)
class Term:
    """A term of the glossary: its name there, the id of its place, and what it means. Or a letter,
    which has no plural."""

    name: str
    place: str
    meaning: str
    page: str = ""  # the document that explains it
    pages: str = ""  # a pattern of others on which it is a link
    document: str = GLOSSARY

    @property
    def word(self) -> str:
        return re.sub(r"\s*[(（].*[)）]$", "", self.name)

    def plurals(self) -> list[str]:
        if self.document == SYMBOLS:
            return []
        ies = re.sub(r"(?<=[^aeiou])y$", "ies", self.word)
        return [f"{self.word}s", f"{self.word}es", ies]

    def is_on(self, docname: str) -> bool:
        return self.page == docname or bool(re.search(self.pages, docname))


def read(glossary: nodes.document) -> list[Term]:
    """The terms of the glossary's page, in the language of the build."""
    terms = []
    for item in glossary.findall(nodes.definition_list_item):
        paragraph = next(item.findall(nodes.definition)).next_node(nodes.paragraph)
        links = [x for x in paragraph.findall(addnodes.pending_xref) if "doc" in x["reftype"]]
        page = links[-1]["reftarget"].lstrip("/") if links else ""
        comments = [comment.astext() for comment in item.findall(nodes.comment)]
        pages = "".join(comment.partition("linked on: ")[2] for comment in comments)
        for term in item.findall(nodes.term):
            terms.append(Term(term.astext(), term["ids"][0], summary(paragraph), page, pages))
    return terms


def letters(symbols: nodes.document) -> list[Term]:
    """The letters of axes: those of the first table hold everywhere, those of the second on the
    pages that it names, in the place of the first. (I is a word more often than a width.)"""
    terms = []
    for kind, table in zip(("axis", "letter"), symbols.findall(nodes.table), strict=False):
        for number, row in enumerate(next(table.findall(nodes.tbody)).children):
            letters, meaning, where = row.children
            links = where.findall(addnodes.pending_xref)
            pages = "|".join(f"{link['reftarget'].lstrip('/')}$" for link in links)
            letters["ids"] = [place := f"{kind}-{number}"]
            for letter in {*letters.astext().split(", ")} - {"I"}:
                terms.append(Term(letter, place, meaning.astext(), pages=pages, document=SYMBOLS))
    return terms  # of two of a letter, the last one counts


def summary(paragraph: nodes.paragraph) -> str:
    """A definition as plain text: up to its first formula, and without the page at its end."""
    text = ""
    for node in paragraph.children:
        names_page = isinstance(node, (nodes.reference, addnodes.pending_xref))
        if isinstance(node, nodes.math) or (names_page and text.endswith((": ", "："))):
            if isinstance(node, nodes.math):
                text = re.sub(r"[：，]\s*$", "。", re.sub(r"[:,]\s*$", ".", text))
            complete = re.match(r".*(\.(?=\s|$)|。)", " ".join(text.split()))
            return complete[0] if complete else ""
        text += node.astext()
    return " ".join(text.split())


def is_closed(node: Any) -> bool:
    """Whether no term is linked inside a node."""
    classes = node.get("classes", [])
    # The gallery's boxes; a section has such a class too, for the whole page.
    box = not isinstance(node, nodes.section) and "sphx-glr" in " ".join(classes)
    return type(node).__name__ in NOT_IN or "no-search" in classes or box


def prose(node: nodes.Element) -> Iterator[nodes.Text]:
    """Every piece of text in which a term may be linked."""
    for child in node.children:
        if isinstance(child, nodes.Text):
            yield child
        elif not is_closed(child):
            yield from prose(child)


#: Of an index, as Sphinx writes it.
Entry = tuple[str, str, str, str, None]


def entries(env: Any, docname: str) -> list[Entry]:
    """The terms that a page explains, as entries of an index."""
    explained = [term for term in all_terms(env) if term.page == docname]
    return [("single", term.word, "", "main", None) for term in explained]


class LinkTerms(SphinxPostTransform):
    default_priority = 700  # behind the one that resolves the page's own links
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        docname = self.env.docname
        if GLOSSARY not in self.env.found_docs:
            return
        # The search finds a page by the terms that it explains, as by an entry of an index.
        if explained := entries(self.env, docname):
            self.document.insert(0, addnodes.index(entries=explained))
        if docname == SYMBOLS:
            letters(self.document)  # gives each its place
        if PAGES.match(docname):
            known = [*all_terms(self.env), *all_letters(self.env)]
            relative = self.app.builder.get_relative_uri
            places = {name: relative(docname, name) for name in (GLOSSARY, SYMBOLS)}
            link_terms(self.document, known, docname, places)


def link_terms(
    document: nodes.document, terms: list[Term], docname: str, places: dict[str, str]
) -> None:
    """Link the first mention of each term, whose document is at one of the ``places``. A small
    first letter may be a capital."""
    # A term that is not linked here still holds its words: "block table" is no "block". A word
    # itself goes before the plural of another, and a term that is linked before one that is not.
    known: dict[str, Term] = {}
    for plural in (True, False):
        for term in sorted(terms, key=lambda term: term.is_on(docname)):
            for form in term.plurals() if plural else [term.word]:
                known[form] = term
                if form == form.lower():
                    known[form[0].upper() + form[1:]] = term
    # (All pages have one pattern, so it is compiled once.)
    longest_first = sorted(known, key=lambda form: (-len(form), form))
    any_word = "|".join(r"\s+".join(map(re.escape, form.split())) for form in longest_first)
    linked = set()
    for node in list(prose(document)):
        text, pieces, end = node.astext(), [], 0
        # Letters of scripts without spaces are no border: a word may touch them.
        for word in re.finditer(rf"(?<![\w-])(?:{any_word})(?![\w+-])", text, re.A):
            term = known[" ".join(word[0].split())]
            no_axis = term.document == SYMBOLS and not is_axis(text, word)
            is_here = term.is_on(docname) and term.name not in linked
            if not is_here or no_axis or is_syllable(text, word):
                continue
            linked.add(term.name)
            uri = f"{places[term.document]}#{term.place}"
            link = nodes.reference("", word[0], internal=True, refuri=uri, classes=[CLASS])
            if term.meaning:
                link["reftitle"] = term.meaning
            pieces += [nodes.Text(text[end : word.start()]), link]
            end = word.end()
        if pieces:
            pieces.append(nodes.Text(text[end:]))
            node.parent.replace(node, [piece for piece in pieces if piece.astext()])


def is_syllable(text: str, term: re.Match[str]) -> bool:
    """Whether a term of one Chinese character may be a part of a word: there are no spaces."""
    around = text[max(term.start() - 1, 0) : term.start()] + text[term.end() : term.end() + 1]
    return len(term[0]) == 1 and is_chinese(term[0]) and any(map(is_chinese, around))


def is_chinese(letter: str) -> bool:
    return unicodedata.name(letter, "").startswith("CJK UNIFIED")


def is_axis(text: str, letter: re.Match[str]) -> bool:
    """Whether a letter names an axis: in a shape, beside a sign of equality, or before what it
    counts. Not "the W of AdamW" or "C++"."""
    before, after = text[: letter.start()], text[letter.end() :]
    shape = re.search(r"(\(|, )$", before) and re.match(r",|\)", after)
    equal = before.endswith("= ") or after.startswith(" =")
    counts = not before.lower().endswith("the ") and re.match(r" [a-z]+s\b(?! for)", after)
    return bool(shape or equal or counts)


@cache
def all_terms(env: Any) -> list[Term]:
    """Those of the glossary as it was read; an environment is made anew for each build."""
    return read(env.get_doctree(GLOSSARY))


@cache
def all_letters(env: Any) -> list[Term]:
    return letters(env.get_doctree(SYMBOLS)) if SYMBOLS in env.found_docs else []


def depend(app: Any, document: nodes.document) -> None:
    """Another glossary makes other links: the page is read again then."""
    if PAGES.match(app.env.docname):
        for name in (GLOSSARY, SYMBOLS):
            app.env.note_dependency(app.env.doc2path(name))


def setup(app: Any) -> dict[str, bool]:
    app.add_post_transform(LinkTerms)
    app.connect("doctree-read", depend)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
