"""Slides of each lesson: `_static/slides/CHAPTER/NAME.html` of the site. A file needs no other.

A slide is a section as tall as the screen, and CSS alone stops the scrolling at each. So the keys
that scroll a page go through the slides in every browser, with scripts or without, and printing
gives a page for each. They are taken from the page that the build has in its hands: headings, the
first picture of a section, questions with folded answers, the lines to keep.
"""

import base64
import mimetypes
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from gallery import lessons, pages
from live import widgets

from lm_from_scratch.exercises import source
from lm_from_scratch.exercises.exercise import exercises

FOLDER = Path("_static", "slides")
#: What a slide takes of what a block has drawn.
DRAWN = re.compile(r"<svg\b|class=\"diagram")
Render = Callable[[Any], str]  # of a node or a list of them


@dataclass
class Slide:
    """A heading and what stands below it, as HTML."""

    title: str
    body: str
    kind: str = ""  # title, ask, keep


def slides(name: str, document: nodes.document, render: Render) -> list[Slide]:
    """Those of a lesson: its title, one for each section and question, the lines to keep."""
    (first,) = sections(document)
    above = [node for node in first.children if not isinstance(node, nodes.section)]
    shown = picture(above, render) or beginning(first, render)
    deck = [Slide(title(first, render), shown, "title")]
    deck += questions(first, render)
    for section in sections(first):
        if section["ids"][0] == "summary":
            lines = next(section.findall(nodes.bullet_list))
            deck.append(Slide("Three lines to keep", render(lines), "keep"))
        elif section["ids"][0] != "exercises":
            below = sections(section)
            headings = bullets(title(one, render) for one in below)
            body = headings + picture([section], render) or beginning(section, render)
            asked = [slide for part in (section, *below) for slide in questions(part, render)]
            if body.strip() or not asked:  # a section that begins with its question needs no more
                deck.append(Slide(title(section, render), body))
            deck += asked
    todo = bullets(
        f"{escape(source.title(one.name).replace('`', ''))}: <code>{one.name}</code>, "
        f"{one.minutes} min"
        for one in exercises()
        if one.page == name
    )
    return [*deck, Slide("Exercises", todo)] if todo else deck


def sections(node: nodes.Element) -> list[nodes.section]:
    return [child for child in node.children if isinstance(child, nodes.section)]


def bullets(lines: Iterable[str]) -> str:
    """A list as HTML; nothing, if nothing is in it."""
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def title(section: nodes.section, render: Render) -> str:
    return inline(render(next(section.findall(nodes.title)).children))


def inline(html: str) -> str:
    """HTML without the paragraph around it."""
    return re.sub(r"^\s*<p>|</p>\s*$", "", html.strip())


def picture(given: list[nodes.Node], render: Render) -> str:
    """The first picture of some nodes that answers no question, or the invitation of a widget."""
    for node in (inner for one in given for inner in one.findall()):
        if isinstance(node, nodes.Node) and is_picture(node) and not answers(node):
            return render(node)
        if isinstance(node, widgets.live):
            text = escape(str(widgets.INVITATIONS[node["widget"]]))
            return f'<p class="live">In the page: {text}</p>'
    return ""


def beginning(section: nodes.section, render: Render) -> str:
    """The first paragraph of a section without a picture, and the formula, or whatever else, that
    it leads to; nothing that comes after a question."""
    at = section.first_child_matching_class((nodes.paragraph, lessons.choices))
    if at is None or isinstance(section[at], lessons.choices):
        return ""
    return "".join(map(render, [section[at], *led_to(section[at], section.children[at + 1 :])]))


def led_to(words: nodes.Node, after: list[nodes.Node]) -> list[nodes.Node]:
    """What a text announces by a colon, or the formula after it; nothing, if it does neither."""
    shown = [node for one in after for node in announced(one)][:1]
    colon = words.astext().rstrip().endswith(":")
    return [node for node in shown if colon or isinstance(node, nodes.math_block)]


def announced(node: nodes.Node) -> list[nodes.Node]:
    """What a colon before a node can mean: the node itself, or what is in a cell of a notebook, but
    nothing that is folded."""
    if isinstance(node, (lessons.fold, lessons.choices)) or lessons.is_ignored(node):
        return []
    if isinstance(node, nodes.container):
        return [inner for child in node.children for inner in announced(child)]
    return [node]


def is_picture(node: nodes.Node) -> bool:
    if isinstance(node, nodes.image):
        return True
    return isinstance(node, nodes.raw) and DRAWN.search(node.astext()) is not None


def answers(node: nodes.Node) -> bool:
    """Whether a node is in what is folded until a reader has chosen."""
    while (node := node.parent) is not None:
        if is_answer(node):
            return True
    return False


def questions(section: nodes.section, render: Render) -> Iterator[Slide]:
    """A slide for each question directly in a section. It folds what the page folds, and what the
    last words of that announce."""
    inside = list(section.children)
    for i, node in enumerate(inside):
        if not isinstance(node, lessons.choices):
            continue
        question, offered = node.children
        asked = [n for n in question.children if n.astext() != lessons.PREDICT]
        choices = "".join(f"<li>{inline(render(item.children))}</li>" for item in offered.children)
        after = inside[i + 1 :]
        folds = ((at, fold) for at, one in enumerate(after, 1) for fold in one.findall(is_answer))
        at, folded = next(folds, (0, []))
        shown = list(folded)
        if shown:
            shown += led_to(shown[-1], after[at:])
        answer = [render(part) for part in shown]
        body = f'<ol type="a">{choices}</ol>'
        if answer:
            body += f"<details><summary>Answer</summary>{''.join(answer)}</details>"
        yield Slide(inline(render(asked)), body, "ask")


def is_answer(node: nodes.Node) -> bool:
    return isinstance(node, lessons.fold) and "answer" in node["classes"]


# -- as HTML -----------------------------------------------------------------------------------


def renderer(app: Any) -> Render:
    """Renders nodes for a file of its own: links are their text, formulas MathML, images data."""

    def render(given: Any) -> str:
        copies = [one.deepcopy() for one in (given if isinstance(given, list) else [given])]
        if all(map(is_words, copies)):
            copies = [nodes.paragraph("", "", *copies)]
        box = nodes.container("", *copies)
        for link in list(box.findall(nodes.reference)):
            at = link.parent.index(link)
            link.parent[at : at + 1] = link.children
        for formula in list(box.findall(lambda n: isinstance(n, (nodes.math, nodes.math_block)))):
            formula.replace_self(nodes.raw("", mathml(formula), format="html"))
        for image in list(box.findall(nodes.image)):
            image.replace_self(nodes.raw("", embedded(app, image), format="html"))
        return "".join(app.builder.render_partial(one)["fragment"] for one in box.children)

    return render


def is_words(node: nodes.Node) -> bool:
    pictures = nodes.raw, nodes.image
    return isinstance(node, (nodes.Text, nodes.Inline)) and not isinstance(node, pictures)


#: Entities of HTML, which XML does not know.
ENTITY = re.compile(r"&(?!amp;|lt;|gt;|quot;)\w+;")
#: What docutils does not know, and what stands for it there.
OTHERWISE = {r"\dots": r"\ldots", r"\textstyle": "", r"\tfrac": r"\frac"}


def to_mathml(formula: nodes.Node) -> str:
    """A formula as MathML; an error where docutils does not know a command."""
    text = re.sub(r"\\[a-z]+", lambda name: OTHERWISE.get(name[0], name[0]), formula.astext())
    xml = tex2mathml(text, as_block=isinstance(formula, nodes.math_block))
    return ENTITY.sub(lambda entity: unescape(entity[0]), xml)


def mathml(formula: nodes.Node) -> str:
    try:
        return to_mathml(formula)
    except Exception:
        return f"<code>{escape(formula.astext())}</code>"


def embedded(app: Any, image: nodes.image) -> str:
    name = Path(image["uri"]).name  # as the page has it, which is written already
    uri = next(uri for uri, copy in app.builder.images.items() if name in (copy, Path(uri).name))
    path = Path(app.srcdir, uri)
    kind = mimetypes.guess_type(path)[0] or "image/png"
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(image.get("alt", ""))}" src="data:{kind};base64,{data}">'


def write(app: Any, docname: str, template: str, context: Any, document: Any) -> None:
    """In the first edition alone: a class has the language of the teacher's guide."""
    name = pages.page_of(docname)
    if app.builder.name != "html" or not app.tags.has("first_edition"):
        return
    if document is not None and name is not None and pages.is_lesson(name):
        values = {
            "title": pages.sections(name)[0].plain,
            "slides": slides(name, document, renderer(app)),
            "language": app.config.language,
        }
        path = Path(app.outdir, FOLDER, f"{name}.html")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(app.builder.templates.render("slides.html", values), encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("html-page-context", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
