"""The pages of the course: which there are, in which order, and what each says of itself.

A page is called "CHAPTER/NAME", as "1_gpt2/2_gpt2": the number is that of a lesson. A letter after
it, as in "2a_gpt2_in_depth", makes an in-depth page of the lesson with this number.

What a page says (sections, minutes, packages, exercises) is read from its source, where it stands
once: a script, or, of a GPU kernel, a notebook. What is not in its text is in comments of the
gallery, which neither pages nor notebooks show:

    # sphinx_gallery_needs = ["1_tokens", "../2_qwen2/2_rope"]     pages to read before
    # sphinx_gallery_words = ["BPE", "subword"]                    other words, for the search
    # sphinx_gallery_museum = ["G6"]                               mistakes that it mentions

A notebook has them in its metadata, as `"lm_from_scratch": {"needs": ["1_swiglu"]}`.
"""

import json
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Any

from docutils import nodes
from sources import modules
from sources.modules import DOCS as DOCS
from sources.modules import ROOT
from sphinx_gallery import gen_rst, py_source_parser

from gallery import folding

TUTORIALS = ROOT / "tutorials"
GPU = TUTORIALS / "gpu"  # no chapter of the gallery: its pages are executed notebooks
METADATA = "lm_from_scratch"  # what a notebook says of itself
ORIGIN = "origin"  # the last cell of a notebook: where its outputs come from


def chapters() -> list[Path]:
    """Chapter folders in reading order; a folder without a header is no chapter."""
    return sorted((h.parent for h in TUTORIALS.glob("[0-9]*/GALLERY_HEADER.rst")), key=number)


def number(path: Path) -> tuple[int, str]:
    """Of a lesson, and the letter of an in-depth page: (2, "") and (2, "a")."""
    digits, letter = re.match(r"(\d+)([a-z]?)_", path.name).groups()
    return int(digits), letter


def pages(chapter: Path) -> list[Path]:
    """The scripts of one chapter, or its notebooks, in reading order."""
    return sorted(chapter.glob("[0-9]*.ipynb" if chapter == GPU else "[0-9]*.py"), key=number)


def scripts() -> list[Path]:
    """Every tutorial script of the site, in reading order."""
    return [script for chapter in chapters() for script in pages(chapter)]


def notebooks() -> list[Path]:
    """The notebooks that are the pages on GPU kernels, in reading order. See `gpu_notebooks`."""
    return pages(GPU)


def header_text(chapter: Path) -> tuple[str, str]:
    """Title and first paragraph of a chapter's header file, the one .rst of its folder."""
    (header,) = chapter.glob("*.rst")
    heading, first, *_ = header.read_text(encoding="utf-8").strip().split("\n\n")
    return heading.splitlines()[0], " ".join(first.split())


def intro(page: str) -> str:
    """The first paragraph of a page's chapter."""
    return header_text(source(page).parent)[1]


@cache
def by_chapter() -> dict[str, list[str]]:
    """The pages of each chapter by its title, those on GPU kernels last."""
    return {
        header_text(folder)[0]: [f"{folder.name}/{path.stem}" for path in pages(folder)]
        for folder in [*chapters(), GPU]
    }


def in_order() -> list[str]:
    """All pages in reading order."""
    return [page for members in by_chapter().values() for page in members]


def lesson(page: str) -> str:
    """The lesson that a page deepens; of a lesson, itself."""
    return next(name for name in beside(page) if is_lesson(name))


def beside(page: str) -> list[str]:
    """The pages with the number of one: a lesson, and those in depth."""
    path = source(page)
    same = (one for one in pages(path.parent) if number(one)[0] == number(path)[0])
    return [f"{one.parent.name}/{one.stem}" for one in same]


def is_lesson(page: str) -> bool:
    return not number(source(page))[1]


def lessons() -> list[str]:
    """The reading path."""
    return [page for page in in_order() if is_lesson(page)]


def in_depth(page: str) -> list[str]:
    """The in-depth pages of a lesson; an in-depth page has none."""
    return [name for name in beside(page) if not is_lesson(name)] if is_lesson(page) else []


def source(page: str) -> Path:
    """The script or notebook in which a page is written."""
    return TUTORIALS / (f"{page}.ipynb" if page.startswith("gpu/") else f"{page}.py")


def document(page: str) -> str:
    """The document of the site that shows a page."""
    return f"/{page}" if page.startswith("gpu/") else f"/auto_tutorials/{page}"


def page_of(docname: str) -> str | None:
    """The page that a document of the site shows, if it is one of the course."""
    page = docname.removeprefix("auto_tutorials/")
    return page if page in in_order() else None


# -- what a page says of itself --------------------------------------------------------------------

#: A link to the notebook of another page, which the site makes a link to that page.
LINK = re.compile(r"`([^`<]+?)\s*<(?:\.\./(\w+)/)?(\d\w*)\.ipynb>`_")
#: The title of a heading and the line below it.
HEADING = re.compile(r"^(\S[^\n]*)\n(=+|-+|~+)$", re.M)
FORMULA = re.compile(r"^\.\. math::.*\n(?:(?: +.*)?\n)*", re.M)
#: How fast a page is read, and how fast it is followed: code run and changed, formulas worked out,
#: exercises done. Nobody has measured it with a class.
WORDS_A_MINUTE = 200
LINES_A_MINUTE, LINES_FOLLOWED = 20, 8
MINUTES_A_FORMULA, FORMULA_FOLLOWED = 0.5, 1
MINUTES_AN_EXERCISE = 5


def blocks(source: Path) -> list[Any]:
    """The text and code blocks of a script, cleaned as the gallery cleans them, or the cells of a
    notebook as such blocks: text in the markup of scripts."""
    if source.suffix == ".ipynb":
        return [
            py_source_parser.Block("text", in_markup_of_scripts("".join(cell["source"])), 1)
            if cell["cell_type"] == "markdown"
            else py_source_parser.Block("code", "".join(cell["source"]).removesuffix(";"), 1)
            for cell in cells(source)
        ]
    _, raw = py_source_parser.split_code_and_text_blocks(str(source))
    conf, outputs = {"remove_config_comments": True}, [""] * len(raw)
    return gen_rst._clean_script_blocks(conf, py_source_parser, raw, outputs)[0]


def cells(notebook: Path) -> list[dict[str, Any]]:
    """What an author writes in a notebook, without the cell that says where outputs come from."""
    written = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in written if cell.get("id") != ORIGIN]


def in_markup_of_scripts(markdown: str) -> str:
    """Headings, links and formulas of a notebook as a script has them; the rest is the same."""
    text = re.sub(
        r"^(#+) (.*)$",
        lambda h: f"{h[2]}\n{'=-~'[len(h[1]) - 1] * len(h[2])}",
        markdown,
        flags=re.M,
    )
    text = re.sub(r"\[([^\]]+)\]\((https?:[^)\s]+|[\w./]+\.ipynb)\)", r"`\1 <\2>`_", text)
    text = re.sub(
        r"\\begin\{align\}(.*?)\\end\{align\}",
        lambda formula: f".. math::\n\n{indent(formula[1], '   ')}",
        text,
        flags=re.S,
    )
    return re.sub(r"\$([^$]+)\$", r":math:`\1`", text)


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


def split(source: Path) -> list[Section]:
    """The sections of a script or notebook."""
    text = "\n\n".join(block.content for block in blocks(source) if block.type == "text")
    parts = HEADING.split(text)[1:]
    headed, inside = [], ""
    for title, rule, below in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        above = inside if rule[0] == "~" else ""
        inside = inside if rule[0] == "~" else title
        name = f"{source.parent.name}/{source.stem}"
        headed.append(Section(name, title, rule[0], above, below.strip()))
    return headed


@cache
def sections(page: str) -> list[Section]:
    return split(source(page))


def text_of(page: str, title: str) -> str:
    """The text of the section with this title; empty where there is none."""
    return next((section.text for section in sections(page) if section.title == title), "")


def target(page: str, link: re.Match[str]) -> str:
    """The page to which a link of `LINK` leads."""
    return f"{link[2] or page.partition('/')[0]}/{link[3]}"


@cache
def settings(page: str) -> dict[str, Any]:
    """What is in comments of the gallery, or in the metadata of a notebook."""
    path = source(page)
    if path.suffix == ".ipynb":
        return dict(json.loads(path.read_text(encoding="utf-8"))["metadata"][METADATA])
    return dict(py_source_parser.split_code_and_text_blocks(str(path))[0])


def listed(page: str, name: str) -> list[str]:
    """A list of these settings; empty without it."""
    return list(settings(page).get(name, []))


@cache
def needs(page: str) -> list[str]:
    """Pages to read before a page, in reading order. An in-depth page needs its lesson."""
    chapter = page.partition("/")[0]
    names = {
        name.removeprefix("../") if name.startswith("../") else f"{chapter}/{name}"
        for name in listed(page, "needs")
    } | {lesson(page)}
    if unknown := names - {*in_order()}:
        raise ValueError(f"{page} needs pages that do not exist: {sorted(unknown)}")
    return [name for name in in_order() if name in names - {page}]


@cache
def behind(page: str) -> frozenset[str]:
    """All pages that come before a page, directly or not."""
    return frozenset(needs(page)).union(*map(behind, needs(page)))


def minutes(page: str) -> int:
    """Minutes to read a page: words, lines of code and formulas, each at the pace stated above.
    Blank lines, comments and what is folded do not count, addresses are no words."""
    return round(both_minutes(page)[0])


def minutes_to_follow(page: str) -> int:
    """Minutes for somebody who runs the code and does the exercises, rounded to five."""
    exercised = MINUTES_AN_EXERCISE * exercises(page)
    return 5 * round((both_minutes(page)[1] + exercised) / 5)


@cache
def both_minutes(page: str) -> tuple[float, float]:
    """To read and to follow, without the exercises."""
    return minutes_of(blocks(source(page)))


def words(text: str) -> int:
    """Those of a text in markup: formulas are none, nor are addresses."""
    text = FORMULA.sub("", LINK.sub(r"\1", text))
    return len(re.findall(r"\w[\w'-]*", re.sub(r"https?://\S+", "", text)))


def minutes_of(blocks: list[Any]) -> tuple[float, float]:
    """To read, and to follow."""
    text = "".join(f"{block.content}\n" for block in blocks if block.type == "text")
    code = folding.parts(tuple(block.content for block in blocks if block.type == "code"))
    lines = sum(folding.lines(part) for parts in code for part in parts if not part.kinds)
    formulas, read = len(FORMULA.findall(text)), words(text) / WORDS_A_MINUTE
    return (
        read + lines / LINES_A_MINUTE + formulas * MINUTES_A_FORMULA,
        read + lines / LINES_FOLLOWED + formulas * FORMULA_FOLLOWED,
    )


def in_words(minutes: int) -> str:
    return f"{minutes} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"


@cache
def packages(page: str) -> list[str]:
    """Packages that a page imports beyond those that the package itself requires."""
    required = modules.project()["project"]["dependencies"]
    core = {re.split(r"[^\w.-]", one)[0].replace("-", "_") for one in required}
    imported = {module.partition(".")[0] for module, _ in modules.imported(source(page))}
    return sorted(imported - core - {modules.PACKAGE} - sys.stdlib_module_names)


def exercises(page: str) -> int:
    """The numbered items of the page's section of exercises."""
    return len(re.findall(r"^\d+\. ", text_of(page, "Exercises"), re.M))


def with_documents(page: str, text: str, link: str) -> str:
    """A text whose links to notebooks lead to documents, in the form of `link`."""
    return LINK.sub(lambda old: link.format(old[1], document(target(page, old))), text)
