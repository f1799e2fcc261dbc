"""Slides: what they take of a page, and that a file of them needs no other."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from course import slides
from docutils import nodes
from docutils.core import publish_doctree
from gallery import lessons
from sources.templates import render

SVG = '<div class="figure"><svg><path/></svg></div>'
PAGE = f"""
A page
======

Why.

.. raw:: html

   {SVG.replace("path", "rect")}

First part
----------

.. raw:: html

   {SVG.replace("path", "circle")}

.. raw:: html

   {SVG}

Smaller
~~~~~~~

**Predict first.** How many?

* one
* two *or* more

.. raw:: html

   {SVG.replace("path", "line")}

Two, because.

And more.

Second part
-----------

No picture, and a sentence.

A list
------

Two things:

* the first,
* the second.

And more.

Code
----

One call:

.. code-block:: Python

   import this

.. code-block:: Python

   call()

Exercises
---------

1. Do it.

Summary
-------

* One.
* Two, :math:`x_i`.
* Three.
"""


def document() -> nodes.document:
    """The page as the site has it: a question offers its choices and folds its answer."""
    made = publish_doctree(PAGE, settings_overrides={"doctitle_xform": False})
    question = next(p for p in made.findall(nodes.paragraph) if "Predict" in p.astext())
    after = lessons.below(question)
    _, answer, why = after[:3]
    why.parent.remove(why)
    fold = lessons.fold(label=lessons.answer(), classes=["answer"])
    answer.replace_self(fold)
    fold += [answer, why]
    lessons.offer_choices(question, "choice-0")
    imports = next(made.findall(nodes.literal_block))
    imports.replace_self(lessons.fold("", imports.deepcopy(), label="imports", classes=["code"]))
    return made


def text(given: Any) -> str:
    """A simple renderer: raw HTML as it is, all else as text."""
    many = given if isinstance(given, list) else [given]
    return "".join(one.astext() for one in many)


@pytest.fixture
def found() -> list[slides.Slide]:
    return slides.slides("1_gpt2/1_tokens", document(), text)


def test_headings_first_pictures_and_lines_to_keep(found: list[slides.Slide]) -> None:
    assert [slide.title for slide in found] == [
        "A page", "First part", "How many?", "Second part", "A list", "Code", "Three lines to keep",
        "Exercises",
    ]  # fmt: skip
    first, part, _, second, _, _, keep, exercises = found
    assert second.body == "No picture, and a sentence."
    assert "<rect" in first.body and first.kind == "title"
    assert "<li>Smaller</li>" in part.body and "<circle" in part.body
    assert "<path" not in part.body and "<line" not in part.body
    assert keep.kind == "keep" and "Two" in keep.body
    assert "merge_pair" in exercises.body


def test_what_a_colon_announces_is_on_the_slide(found: list[slides.Slide]) -> None:
    list_, code = (slide.body for slide in found if slide.title in ("A list", "Code"))
    assert "the first," in list_ and "the second." in list_ and "And more" not in list_
    assert "call()" in code and "import" not in code


def test_so_is_what_an_answer_announces() -> None:
    more = [nodes.paragraph("", "this")]
    assert slides.led_to(nodes.paragraph("", "Because of:"), more) == more
    assert slides.led_to(nodes.paragraph("", "Because."), more) == []


def test_a_question_folds_its_answer(found: list[slides.Slide]) -> None:
    (ask,) = (slide for slide in found if slide.kind == "ask")
    before, _, folded = ask.body.partition("<details>")
    assert re.findall(r"<li>(.*?)</li>", before) == ["one", "two or more"]
    assert "<line" in folded and "Two, because." in folded and "And more" not in folded


def test_a_file_needs_no_other(found: list[slides.Slide]) -> None:
    made = render("slides.html", title="A <page>", slides=found, language="en")
    assert "<title>A &lt;page&gt;</title>" in made and made.count("<section") == len(found)
    assert not re.search(r"<link|<script src|<img(?![^>]*data:)|url\(|@import|https?:", made)
    assert made.index("<h1>") < made.index("<h2>") and made.count("<h1>") == 1


def test_formulas_links_and_images(tmp_path: Any) -> None:
    """As the page has them, they would need a script, another page and a file."""
    (tmp_path / "a.png").write_bytes(b"picture")
    rendered = []
    builder = SimpleNamespace(
        images={"a.png": "a.png"},
        render_partial=lambda node: rendered.append(node) or {"fragment": node.astext()},
    )
    render = slides.renderer(SimpleNamespace(srcdir=tmp_path, builder=builder))
    link = nodes.reference("", "", nodes.Text("a page"), refuri="there.html")
    image = nodes.image(uri="../_images/a.png", alt="A figure")
    formula = nodes.math("", "\\frac{1}{V}")
    whole = nodes.paragraph("", "", link, formula)
    html = render([whole]) + render(image)
    assert "there.html" not in html and "a page" in html
    assert "<math" in html and "<mfrac>" in html
    assert '<img alt="A figure" src="data:image/png;base64,cGljdHVyZQ==">' in html
