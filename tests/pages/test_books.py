"""Books: what becomes of a drawing, of words with coloured grounds, of what TeX says."""

from __future__ import annotations

from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pytest
from books import book, drawings
from course.slides import to_mathml
from docutils import nodes
from docutils.core import publish_doctree
from gallery import figures, lessons
from gallery.pages import DOCS
from sphinx import addnodes
from sphinx.util import texescape

from lm_from_scratch.drawings.canvas import slides
from lm_from_scratch.drawings.gpt2 import gpt2_blocks, lines, tokens
from lm_from_scratch.instruments.plot import figure


def test_a_figure_becomes_a_file_in_black_on_white() -> None:
    made, (ax,) = figure(4.8, 2.4)
    ax.plot([1.0, 2.0], [0.0, 1.0], color="black", label="$x^2$ < 1")
    ax.set_title("a & b")
    drawn = figures.themed(made, "one")
    plt.close("all")
    ((kind, svg),) = drawings.parts_of(f'<div class="output">{drawn}</div>\n<br />')
    text = drawings.standing_alone(svg)
    assert kind == "svg" and "var(" not in text and "currentColor" not in text
    root = ElementTree.fromstring(text)
    assert root.tag == f"{drawings.SVG}svg" and root.get("aria-label") == "a & b"
    assert "a & b" in "".join(root.itertext())


def test_a_link_in_a_drawing_is_none_in_its_file() -> None:
    links = dict.fromkeys(("lookups", "norm", "attention", "mlp", "stream", "logits"), "#there")
    ((_, svg),) = drawings.parts_of(gpt2_blocks(4, links).html)
    text = drawings.standing_alone(svg)
    assert "there" not in text and 'role="img"' in text


def test_the_frames_of_a_drawing_are_all_shown() -> None:
    frames = [lines(["a"], ["b"], [[1.0]]), tokens(["a"])]
    found = list(drawings.parts_of(slides("round", frames, ["1", "2"]).html))
    assert [kind for kind, _ in found] == ["frame", "frame"]
    assert [label for _, (label, _) in found] == ["round 1", "round 2"]
    assert [part[0][0] for _, (_, part) in found] == ["svg", "text"]


@pytest.mark.parametrize(
    "html",
    [
        *("<p>words</p>", '<div class="x">words</div>', "<div>"),
        '<div class="diagram">words<img src="x.png"/></div>',
    ],
)
def test_html_of_another_kind_is_reported(html: str) -> None:
    assert [kind for kind, _ in drawings.parts_of(html)] == ["unknown"]


def test_words_on_coloured_grounds_in_tex() -> None:
    texescape.init()
    ((kind, element),) = drawings.parts_of(tokens(["a_b", "中"], [1, 22]).html)
    made = drawings.tex_drawing(element)
    assert kind == "text"
    assert made.count(r"\bookbox{") == 2 and r"\bookbox{BFDCEC}" in made  # a quarter of #0072B2
    assert r"a\_b" in made and "中" in made and r"\booksmall{22}" in made


def test_blanks_and_lines_are_kept_in_tex() -> None:
    made = drawings.set_words("a  b\n c", [r"\textbf"])
    assert made.count(r"\ ") == 3 and made.count("\\\\") == 1
    assert made.count(r"\textbf{") == 3


PAGE = """\
.. only:: html

    .. note::
        :class: sphx-glr-download-link-note

        Go to the end.

Title
=====

Text.

.. _sphx_glr_download_1_gpt2_1_tokens.py:

.. include:: 1_tokens.recommendations
"""


def test_what_the_gallery_writes_around_a_page_is_left_out() -> None:
    assert book.DOWNLOADS.sub("", PAGE).strip() == "Title\n=====\n\nText."


def test_code_that_only_checks_or_draws_is_left_out() -> None:
    blocks = ["x = 1\nprint(x)\nassert x == 1", "assert x", "import a\nimport b\nimport c\ny = 2"]
    page = nodes.section()
    page += [nodes.literal_block(code, code, language="Python") for code in blocks]
    lessons.leave_out(page)
    shown = [block.astext() for block in page.findall(nodes.literal_block)]
    assert shown == ["x = 1\nprint(x)", "import a\nimport b\nimport c\n\ny = 2"]


def test_an_output_in_a_chapter_is_set_apart_once() -> None:
    output = nodes.literal_block("1", "1", classes=["sphx-glr-script-out"])
    lesson = addnodes.start_of_file("", nodes.section("", output), docname="1_gpt2/1_tokens")
    document = nodes.document(None, None)
    document += addnodes.start_of_file("", nodes.section("", lesson), docname="1_gpt2/index")
    book.for_tex(document)
    commands = [node.astext() for node in document.findall(nodes.raw)]
    assert commands == [r"\begin{bookoutput}", r"\end{bookoutput}"]


def test_the_landing_page_has_what_the_book_takes() -> None:
    text = book.about((DOCS / "index.rst").read_text(encoding="utf-8"))
    titles = [node.astext() for node in publish_doctree(text).findall(nodes.title)]
    assert titles == ["About this book", "Set up", "The book and the site"]
    assert ".. grid" not in text and ".. live" not in text


@pytest.mark.parametrize("formula", [r"1 + \dots + S", r"\textstyle\sum_s a_s", r"\tfrac{1}{2}"])
def test_commands_that_docutils_does_not_know(formula: str) -> None:
    ElementTree.fromstring(to_mathml(nodes.math("", formula)))


def test_what_tex_says() -> None:
    log = """
Missing character: There is no \u21b5 (U+21B5) in font FreeSerif Bold/OT:script=latn
LaTeX Warning: Reference `x' on page 3 undefined on input line 12.
LaTeX Warning: Hyper reference `a/b:x' on page 3 undefined on input line 12.
Overfull \\hbox (3.2pt too wide) in paragraph at lines 1--2
Overfull \\hbox (52.9395pt too wide) in paragraph at lines 4--5
Overfull \\vbox (99.5pt too high) has occurred while \\output is active
Underfull \\vbox (badness 10000)
"""
    found = book.faults(log)
    assert len(found) == 5 and "U+21B5" in found[0] and "`x'" in found[1] and "52.9" in found[3]
    assert "`a/b:x'" in found[2] and "99.5" in found[4]
