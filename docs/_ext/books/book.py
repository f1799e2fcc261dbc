"""The lessons as a book, EPUB and PDF, from the results of the built site: `make books`.

A book shows all at once and cannot be clicked. So drawings become files, folded output is open, and
left out are code that the site folds, widgets (the picture in their place stays), downloads and the
strip below a title. A name of a page that is not in the book is a link where SITE_URL says where
the site is, and plain text elsewhere.

    python docs/_ext books.book FILE.log      fails where TeX lacked a glyph, or a place to refer to
"""

import hashlib
import os
import re
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from course import slides
from docutils import nodes
from editions import translation
from gallery import lessons, pages
from live import widgets
from lookup import terms
from sources import templates
from sphinx import addnodes
from sphinx.builders.epub3 import Epub3Builder
from sphinx.locale import _
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx_gallery._doctree_links import CodeLinksTransform

from books import drawings
from lm_from_scratch.drawings.canvas import Canvas
from lm_from_scratch.drawings.colours import BLUE

logger = logging.getLogger(__name__)

ROOT_DOCUMENT = "book"
ABOUT = "index"  # the landing page: what it says of the course is in the book
AFTER = ["questions", "glossary", "symbols"]
#: Stands for the site where its address is not known.
SITE = "https://site.invalid"
#: Where the files of drawings are, seen from `docs`.
DRAWN = "_build/books/figures"


# ------------------------------------------------------------------------------ what is in a book


def chapters() -> dict[str, list[str]]:
    """The lessons of each chapter, by its folder, that the edition has."""
    lessons: dict[str, list[str]] = {}
    for name in pages.lessons():
        chapter = name.partition("/")[0]
        if chapter != pages.GPU.name and translation.has(pages.document(name)[1:]):
            lessons.setdefault(chapter, []).append(name)
    return lessons


def documents() -> list[str]:
    """All documents of a book, in their order."""
    names = [ABOUT]
    for chapter, members in chapters().items():
        names += [f"auto_tutorials/{chapter}/index"]
        names += [pages.document(name)[1:] for name in members]
    return [*names, *filter(translation.has, AFTER)]


def settings() -> dict[str, Any]:
    """What Sphinx does otherwise for a book."""
    title = title_of_the_book()
    chinese = translation.LANGUAGE.startswith("zh")
    return {
        "extensions": [
            *("sphinx.ext.intersphinx", "sphinx_gallery.gen_gallery", "gallery.running"),
            *("editions.translation", "gallery.navigation", "gallery.lessons", "live.widgets"),
            *("lookup.terms", "books.book"),
        ],
        "root_doc": ROOT_DOCUMENT,
        "include_patterns": [f"{name}.rst" for name in [ROOT_DOCUMENT, *documents()]],
        "exclude_patterns": [],
        "intersphinx_mapping": {
            "site": (os.environ.get("SITE_URL") or SITE, "_build/html/objects.inv"),
        },
        "intersphinx_disabled_reftypes": [],
        "suppress_warnings": [
            "sphinx_gallery.space_in_filename",  # of a folder above, as for the site
            *("toc.not_readable", "toc.excluded", "toc.not_included"),
        ],
        "autosummary_generate": [],
        "templates_path": [],
        "html_static_path": ["_static/epub.css"],
        "html_css_files": [],
        "html_js_files": [],
        "html_math_renderer": "mathml",
        "pygments_style": "a11y-high-contrast-light",
        # EPUB
        "epub_title": title,
        "epub_description": title,
        "epub_contributor": AUTHOR,
        "epub_publisher": "lm_from_scratch",
        "epub_identifier": f"lm_from_scratch-{translation.LANGUAGE}",
        "epub_uid": "book",
        "epub_language": translation.LANGUAGE.replace("_", "-"),
        "epub_basename": "lm_from_scratch",
        "epub_css_files": ["epub.css"],
        "epub_cover": (COVER, "epub-cover.html"),
        "epub_tocdepth": 2,
        "epub_show_urls": "no",
        "html_use_index": not chinese,  # it is made of first letters
        "epub_exclude_files": ["search.xhtml"],
        # PDF
        "latex_engine": "xelatex",
        "latex_documents": [
            (ROOT_DOCUMENT, "lm_from_scratch.tex", title, AUTHOR_IN_TEX, "manual", True)
        ],
        "latex_use_xindy": False,
        "latex_show_urls": "no",
        "latex_elements": {
            "papersize": "a4paper",
            "pointsize": "10pt",
            "extraclassoptions": "openany,oneside",
            "fontpkg": tex("fonts") if chinese else tex("fonts", "western"),
            "fvset": r"\fvset{fontsize=\footnotesize}",
            "fncychap": "",
            "sphinxsetup": SETUP,
            "preamble": tex("preamble", "chinese") if chinese else tex("preamble"),
            **({"makeindex": "", "printindex": ""} if chinese else {}),
            "figure_align": "H",
        },
    }


AUTHOR = "The lm_from_scratch authors"
AUTHOR_IN_TEX = AUTHOR.replace("_", r"\_")
COVER = "_static/cover.svg"
SETUP = ",".join([
    "hmargin={22mm,22mm}", "vmargin={24mm,24mm}", "verbatimforcewraps=true",
    "VerbatimColor={RGB}{246,247,249}", "VerbatimBorderColor={RGB}{214,220,226}",
    "InnerLinkColor={RGB}{0,82,130}", "OuterLinkColor={RGB}{0,82,130}",
    "TitleColor={RGB}{20,40,60}",
])  # fmt: skip


def tex(*names: str) -> str:
    """Parts of what TeX reads first, from `_pages/book`."""
    files = (pages.DOCS / "_pages" / "book" / f"{name}.tex" for name in names)
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def title_of_the_book() -> str:
    """What the landing page is called, in the language of the edition."""
    text = (pages.DOCS / f"{ABOUT}.rst").read_text(encoding="utf-8")
    title = re.search(r"^=+\n(.+)\n=+$", text, re.M)[1]
    return translation.words(translation.LANGUAGE, ABOUT).get(title, title)


def write_root(app: Any) -> None:
    """The document above all others, and the cover."""
    title = app.config.epub_title
    listed = [name for name in documents() if name.count("/") < 2 or name.endswith("/index")]
    lines = ["", ".. toctree::", "   :maxdepth: 2", "", *(f"   /{name}" for name in listed), ""]
    text = templates.heading(title, "=") + "\n".join(lines)
    Path(app.srcdir, f"{ROOT_DOCUMENT}.rst").write_text(text, encoding="utf-8")
    if app.builder.format == "html":
        path = Path(app.outdir, COVER)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(cover(title), encoding="utf-8")


def cover(title: str) -> str:
    """Who sees whom: the title above a triangle of attention weights."""
    comma = re.search(r"[,，] ?", title)
    rows = [title[: comma.end()], title[comma.end() :]] if comma else [title]
    return templates.render("book/cover.svg", rows=[row.strip() for row in rows], colour=BLUE)


# ----------------------------------------------------------------------- texts that differ in it


def read(app: Any, docname: str, source: list[str]) -> None:
    """Of the landing page, what it says of the course; of a chapter, its introduction."""
    if docname == ABOUT:
        source[0] = about(source[0])
    elif chapter := re.match(r"auto_tutorials/(\w+)/index$", docname):
        (header,) = (pages.TUTORIALS / chapter[1]).glob("*.rst")
        listed = "".join(f"   {pages.document(name)}\n" for name in chapters()[chapter[1]])
        text = header.read_text(encoding="utf-8").strip()
        source[0] = f"{text}\n\n.. toctree::\n   :maxdepth: 1\n\n{listed}"
    elif pages.page_of(docname):
        source[0] = DOWNLOADS.sub("", source[0])


#: What the gallery writes around a page: a note above it, and all below its text.
DOWNLOADS = re.compile(
    r"^\.\. only:: html\n\n    \.\. note::\n(?:(?: +.*)?\n)*|^\.\. _sphx_glr_download_[\s\S]*",
    re.M,
)
#: The landing page marks what the book takes.
TAKEN = re.compile(r"^\.\. for the book\n(.*?)^\.\. to here\n", re.M | re.S)
LEAD = re.compile(r"^\.\. div:: lead\n\n((?:   .*\n)+)", re.M)


def about(landing: str) -> str:
    title = templates.heading(str(_("About this book")), "=")
    lead = re.sub(r"^   ", "", LEAD.search(landing)[1], flags=re.M)
    parts = [
        title.splitlines()[1] + f"\n{title}",
        lead,
        TAKEN.search(landing)[1],
        templates.heading(str(_("The book and the site")), "="),
        _(
            "This book has the lessons, the questions that people ask, the glossary and the "
            "symbols. The site has more: pages in depth, exercises with automatic checks, GPU "
            "kernels, and models that run in the page. Where a lesson says press or click, it "
            "means such a model: here is a picture of what it shows first."
        ),
        _(
            "Below the code is what it printed. Lines that only check a result, print a table or "
            "draw a figure are left out here. The script and the notebook of each lesson have "
            "every line."
        ),
    ]
    return "\n\n".join(map(str, parts)) + "\n"


def number(app: Any, doctree: nodes.document) -> None:
    """A lesson has its number in its title, so in contents and links too."""
    if name := pages.page_of(app.env.docname):
        path = pages.source(name)
        title = next(doctree.findall(nodes.title))
        title.insert(0, nodes.Text(f"{pages.number(path.parent)[0]}.{pages.number(path)[0]} "))


def index(app: Any, env: Any) -> None:
    """A term is in the index with the lesson that explains it. (TeX gets it in `ForBook`.)"""
    for docname in documents():
        entries = env.domains.index_domain.entries.setdefault(docname, [])
        entries += [entry for entry in terms.entries(env, docname) if entry not in entries]


# ------------------------------------------------------------------------------ the form of a page


class ForBook(SphinxPostTransform):
    """A page of the site in the form of a book."""

    default_priority = 600  # links of the page lead somewhere at 10, terms are linked at 700

    def run(self, **kwargs: Any) -> None:
        is_tex = self.app.builder.format == "latex"
        for node in list(self.document.findall(is_site_only)):
            if node.parent is not None:
                node.parent.remove(node)
        for link in list(self.document.findall(nodes.reference)):
            if link.get("refuri", "").startswith(SITE):
                link.replace_self(link.children)
        for docname, page in self.pages():
            if pages.page_of(docname):
                lessons.leave_out(page)
            if is_tex:
                put_in_index(page, terms.entries(self.env, docname))
        if is_tex:
            for_tex(self.document)
        for widget in list(self.document.findall(widgets.live)):
            widget.replace_self(self.picture(widget))
        for raw in list(self.document.findall(nodes.raw)):
            if raw["format"] == "html":
                raw.replace_self(self.drawn(drawings.parts_of(raw.astext()), raw))

    def pages(self) -> list[tuple[str, nodes.Element]]:
        """Each document with its name: for TeX all are one."""
        files = [(one["docname"], one) for one in self.document.findall(addnodes.start_of_file)]
        return files or [(self.env.docname, self.document)]

    def picture(self, widget: widgets.live) -> list[nodes.Node]:
        """What stands in the place of a widget: bars."""
        caption, rows = widgets.picture(widget)
        canvas = Canvas(343, 24 * len(rows) + 4, "; ".join(f"{row[0]} {row[2]}" for row in rows))
        for i, (label, share, amount) in enumerate(rows):
            canvas.text(112, 24 * i + 14, label, 12, "end")
            canvas.box(120, 24 * i + 5, max(160 * share, 1), 18, BLUE, 0.6, "none", 2)
            canvas.text(338, 24 * i + 14, amount, 12, "end")
        bars = self.drawn(drawings.parts_of(canvas.drawing().html), widget)
        return [nodes.paragraph("", caption), *bars]

    def drawn(self, parts: Iterable[tuple[str, Any]], place: nodes.Node) -> list[nodes.Node]:
        """Drawings and figures in the form of a book. Frames stand side by side."""
        is_tex = self.app.builder.format == "latex"
        drawn: list[nodes.Node] = []
        for kind, part in parts:
            if kind == "svg":
                drawn.append(self.image(part))
            elif kind == "text":
                drawn.append(
                    raw_tex(drawings.tex_drawing(part))
                    if is_tex
                    else nodes.raw("", drawings.xhtml(part), format="html")
                )
            elif kind == "frame":
                label, inside = part
                frame = [nodes.paragraph("", label), *self.drawn(inside, place)]
                drawn.append(nodes.container("", *frame, classes=["bookframe"]))
            else:
                logger.warning("HTML without a form in a book: %s", part, location=place)
        return side_by_side(drawn) if is_tex else drawn

    def image(self, svg: ElementTree.Element) -> nodes.image:
        text = drawings.standing_alone(svg)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        path = Path(self.app.srcdir, DRAWN, f"{name}.svg")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if self.app.builder.format == "latex":
            path = drawings.as_pdf(path)
        uri = f"{DRAWN}/{path.name}"
        self.env.images.add_file(self.env.docname, uri)
        alt = svg.get("aria-label", "")
        image = nodes.image(uri=uri, candidates={"*": uri}, alt=alt, align="center")
        if self.app.builder.format == "html":
            image["width"] = f"{float(svg.get('width', '343')):.0f}px"
        return image


def for_tex(book: nodes.Element) -> None:
    """Output is set apart from code, and a table may go on on the next page."""
    for table in book.findall(nodes.table):
        table["classes"] = [*table.get("classes", []), "longtable"]
    for block in list(book.findall(nodes.literal_block)):
        if "sphx-glr-script-out" in block.get("classes", []):
            begin, end = (raw_tex(rf"\{word}{{bookoutput}}") for word in ("begin", "end"))
            block.replace_self([begin, block.deepcopy(), end])


def put_in_index(page: nodes.Element, entries: list[terms.Entry]) -> None:
    section = next(page.findall(nodes.section), None)
    if entries and section is not None:
        section.insert(1, addnodes.index(entries=entries, inline=False))


def raw_tex(text: str) -> nodes.raw:
    return nodes.raw("", text, format="latex")


def side_by_side(drawn: list[nodes.Node]) -> list[nodes.Node]:
    """Frames as TeX sets them side by side: with no paragraph between them."""
    begin, end = r"\begin{bookframe}", r"\end{bookframe}"
    between = rf"{end}\hspace{{0.02\linewidth}}{begin}"
    result: list[nodes.Node] = []
    for is_frame, group in groupby(drawn, lambda node: isinstance(node, nodes.container)):
        if not is_frame:
            result += group
            continue
        for number, frame in enumerate(group):
            result += [raw_tex(between if number else begin), *frame.children]
        result.append(raw_tex(end))
    return result


def is_site_only(node: nodes.Node) -> bool:
    if isinstance(node, nodes.paragraph) and node.children:
        first = node.children[0]
        return isinstance(first, nodes.strong) and first.astext() == _("Next:")
    is_facts = isinstance(node, nodes.Element) and "page-facts" in node.get("classes", [])
    return is_facts or isinstance(node, nodes.meta)


# ------------------------------------------------------------------------------------------ EPUB


def mathml(self: Any, node: nodes.Node) -> None:
    try:
        formula = slides.to_mathml(node)
    except Exception as error:
        logger.warning("no MathML for %r: %s", node.astext(), error, location=node)
        raise nodes.SkipNode from error
    is_block = isinstance(node, nodes.math_block)
    self.body.append(f'<div class="math">{formula}</div>\n' if is_block else formula)
    raise nodes.SkipNode


STYLES = ("basic.css", "pygments.css", "epub.css")


def style(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Without the styles of the gallery's pages."""
    files = context["css_files"]
    context["css_files"] = [file for file in files if Path(file.filename).name in STYLES]


class Epub(Epub3Builder):
    """EPUB 3 says of each file whether it has formulas or is the cover."""

    def toc_metadata(self, level: int, navpoints: list[Any]) -> dict[str, Any]:
        return {**super().toc_metadata(level, navpoints), "uid": self.config.epub_identifier}

    def build_content(self) -> None:
        for file in Path(self.outdir, "_static").rglob("*.*"):
            if file.name not in (*STYLES, Path(COVER).name):
                file.unlink()  # of the gallery's pages
        super().build_content()
        path = Path(self.outdir, "content.opf")
        text = path.read_text(encoding="utf-8")

        def properties(item: re.Match[str]) -> str:
            file = Path(self.outdir, item[1])
            with_math = file.suffix == ".xhtml" and "<math" in file.read_text(encoding="utf-8")
            what = "mathml" if with_math else "cover-image" if item[1] == COVER else ""
            return f'{item[0][:-2]}properties="{what}" />' if what else item[0]

        text = re.sub(r'<item id="[^"]+" href="([^"]+)" media-type="[^"]+" />', properties, text)
        path.write_text(text, encoding="utf-8")


# ------------------------------------------------------------------------------------------- PDF

LOST = re.compile(
    r"^(?:Missing character: .*|.*[Rr]eference .* undefined.*|.*has been referenced but does not "
    r"exist.*|! .*)$",
    re.M,
)
CUT = re.compile(r"^Overfull \\[hv]box \((\d+)\.\d+pt too (?:wide|high)\).*$", re.M)


def faults(log: str) -> list[str]:
    """What TeX says that a reader would miss: glyphs, places, ends of lines and pages."""
    cut = [line[0] for line in CUT.finditer(log) if int(line[1]) > 20]
    return [*dict.fromkeys(LOST.findall(log)), *cut]


def setup(app: Any) -> dict[str, bool]:
    CodeLinksTransform.formats = ("none",)  # names in code lead to the API, which is not in it
    app.add_builder(Epub, override=True)
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
    app.add_post_transform(ForBook)
    app.connect("builder-inited", write_root, priority=100)
    app.connect("source-read", read, priority=900)  # after the course has added to pages
    app.connect("doctree-read", number, priority=400)  # before titles are collected
    app.connect("env-updated", index)
    app.connect("html-page-context", style, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    sys.exit(
        "\n".join(faults(Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace"))) or 0
    )
