"""What a page says of itself: sections, pages to read before, minutes, packages, exercises.

Everything is read from its script, where it stands once. What is not in its text is in comments of
the gallery, which neither pages nor notebooks show:

    # sphinx_gallery_needs = ["1_tokens", "../2_qwen2/2_rope"]     pages to read before
    # sphinx_gallery_words = ["BPE", "subword"]                    other words, for the search
    # sphinx_gallery_museum = ["G6"]                               mistakes that it mentions
"""

import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import folding
import gallery
import modules
from docutils import nodes
from sphinx_gallery import gen_gallery, gen_rst, py_source_parser

#: A link to the notebook of another page, which the site makes a link to that page.
LINK = re.compile(r"`([^`<]+?)\s*<(?:\.\./(\w+)/)?(\d\w*)\.ipynb>`_")
#: The title of a heading and the line below it.
HEADING = re.compile(r"^(\S[^\n]*)\n(=+|-+|~+)$", re.M)
FORMULA = re.compile(r"^\.\. math::.*\n(?:(?: +.*)?\n)*", re.M)
#: How fast a page is read. Rounded to five minutes: nobody has measured it with a class.
WORDS_A_MINUTE = 200
LINES_A_MINUTE = 20
MINUTES_A_FORMULA = 0.5


def settings() -> dict[str, Any]:
    """Those of the gallery, as its own converters want them."""
    own = gallery.sphinx_gallery_conf()
    return {**gen_gallery.DEFAULT_GALLERY_CONF, **own, "src_dir": str(gallery.DOCS)}


def blocks(script: Path) -> list[Any]:
    """The text and code blocks of a script, cleaned as the gallery cleans them."""
    _, found = py_source_parser.split_code_and_text_blocks(str(script))
    cleaned, _ = gen_rst._clean_script_blocks(
        settings(), py_source_parser, found, [""] * len(found)
    )
    return cleaned


@dataclass(frozen=True)
class Section:
    """A piece of a page under one heading, with the text directly below it."""

    page: str
    title: str
    mark: str  # the sign that underlines it: = for the page, - for a section, ~ below one
    inside: str  # the title of the section in which it stands
    text: str

    @property
    def plain(self) -> str:
        return self.title.replace("``", "")

    @property
    def anchor(self) -> str:
        return nodes.make_id(self.plain)


def split(script: Path) -> list[Section]:
    """The sections of a script."""
    text = "\n\n".join(block.content for block in blocks(script) if block.type == "text")
    parts = HEADING.split(text)[1:]
    found, inside = [], ""
    for title, rule, below in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        above = inside if rule[0] == "~" else ""
        inside = inside if rule[0] == "~" else title
        name = f"{script.parent.name}/{script.stem}"
        found.append(Section(name, title, rule[0], above, below.strip()))
    return found


@cache
def sections(page: str) -> list[Section]:
    return split(gallery.script(page))


def said(page: str, title: str) -> str:
    """The text of the section with this title; empty where there is none."""
    return next((section.text for section in sections(page) if section.title == title), "")


def target(page: str, link: re.Match[str]) -> str:
    """The page to which a link of `LINK` leads."""
    return f"{link[2] or page.partition('/')[0]}/{link[3]}"


@cache
def comment(page: str, name: str) -> list[str]:
    """A list in a comment of the gallery; empty where there is none."""
    found, _ = py_source_parser.split_code_and_text_blocks(str(gallery.script(page)))
    return list(found.get(name, []))


@cache
def needs(page: str) -> list[str]:
    """Pages to read before a page, in reading order. An in-depth page needs its lesson."""
    found = set()
    chapter = page.partition("/")[0]
    for name in comment(page, "needs"):
        found.add(name.removeprefix("../") if name.startswith("../") else f"{chapter}/{name}")
    if not gallery.is_lesson(page):
        found.add(gallery.lesson(page))
    if unknown := found - set(gallery.in_order()):
        raise ValueError(f"{page} needs pages that do not exist: {sorted(unknown)}")
    return [name for name in gallery.in_order() if name in found]


@cache
def behind(page: str) -> frozenset[str]:
    """All pages that come before a page, directly or not."""
    return frozenset(needs(page)).union(*map(behind, needs(page)))


@cache
def minutes(page: str) -> int:
    """Minutes to read a page, rounded to five: words, lines of code and formulas, each at the pace
    stated above. Blank lines, comments and what is folded do not count, addresses are no words."""
    return read_in(blocks(gallery.script(page)))


def words(text: str) -> int:
    """Those of a text in markup: formulas are none, nor are addresses."""
    text = FORMULA.sub("", LINK.sub(r"\1", text))
    return len(re.findall(r"\w[\w'-]*", re.sub(r"https?://\S+", "", text)))


def read_in(found: list[Any]) -> int:
    text = "".join(f"{block.content}\n" for block in found if block.type == "text")
    code = folding.parts([block.content for block in found if block.type == "code"])
    lines = sum(folding.lines(part) for parts in code for part in parts if not part.kinds)
    formulas = len(FORMULA.findall(text))
    time = words(text) / WORDS_A_MINUTE + lines / LINES_A_MINUTE + formulas * MINUTES_A_FORMULA
    return max(5, 5 * round(time / 5))


def in_words(minutes: int) -> str:
    return f"{minutes} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"


@cache
def packages(page: str) -> list[str]:
    """Packages that a page imports beyond those that the package itself requires."""
    given = modules.project()["project"]["dependencies"]
    core = {re.split(r"[^\w.-]", requirement)[0].replace("-", "_") for requirement in given}
    found = {module.partition(".")[0] for module, _ in modules.imported(gallery.script(page))}
    return sorted(found - core - {modules.PACKAGE} - sys.stdlib_module_names)


def exercises(page: str) -> int:
    """The numbered items of the page's section of exercises."""
    return len(re.findall(r"^\d+\. ", said(page, "Exercises"), re.M))


def with_documents(page: str, text: str, link: str) -> str:
    """A text whose links to notebooks lead to documents, in the form of `link`."""
    return LINK.sub(
        lambda found: link.format(found[1], gallery.document(target(page, found))), text
    )
