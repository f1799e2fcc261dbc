"""How a page of the course teaches: code that can wait is folded, and an answer until it is wanted.

A paragraph that begins with "**Predict first.**" asks; a list below it are the choices. The answer
is what the next block of code prints or draws, and the first paragraph after it. It is folded until
its reader opens it; `predict.js` opens it at a choice, and says whether that was the right one,
which the notes for teachers know. A page begins with its picture: what its first block draws is
above the code. All of it works by the keyboard, most of it without scripts; it is in HTML alone.
"""

import re
import tomllib
from functools import cache
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.locale import _
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

from gallery import folding, pages

logger = logging.getLogger(__name__)

PREDICT, ASKS = "Predict first.", "asks"
NOTES = pages.DOCS / "classroom" / "notes"
#: The place of the right choice where there is none.
NONE = -1


def answer() -> str:
    return _("Choose, then open the answer")


class fold(nodes.General, nodes.Element):
    """A line, and what opens below it."""


class choices(nodes.General, nodes.Element):
    """A question, of which a reader chooses one answer."""


class Mark(SphinxTransform):
    """Questions and right choices are known by their English, so before a translation."""

    default_priority = 10

    def apply(self, **kwargs: Any) -> None:
        name = pages.page_of(self.env.docname)
        questions = [p for p in self.document.findall(nodes.paragraph) if is_question(p)]
        if not questions or name is None:
            return
        path = NOTES / f"{name.partition('/')[0]}.toml"
        self.env.note_dependency(str(path))
        answers = notes(path).get(name.partition("/")[2], {}).get("answers", [])
        if answers and len(answers) != len(questions):
            logger.warning("%s: %d answers to %d questions", path, len(answers), len(questions))
        for question in questions:
            question["classes"].append(ASKS)
        for question, right in zip(questions, answers, strict=False):
            question["right"] = place_of(right, question)


def is_question(paragraph: nodes.paragraph) -> bool:
    first = next((node for node in paragraph.children if node.astext()), None)
    return isinstance(first, nodes.strong) and first.astext() == PREDICT


@cache
def notes(path: Path) -> dict[str, Any]:
    """What a teacher adds to the lessons of a chapter."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def place_of(right: str, question: nodes.paragraph) -> int:
    """Which choice is, or begins with, the right answer of a note; "" says that none is right."""
    offered = next((n for n in below(question)[:1] if isinstance(n, nodes.bullet_list)), [])
    texts = [" ".join(item.astext().split()) for item in offered]
    start = re.sub("[`$*]", "", right)
    found = [text for text in texts if text == start]
    found = found or [text for text in texts if text.startswith(start)]
    if right and len(found) != 1:
        logger.warning("no choice begins with %r, or several do", right, location=question)
    return texts.index(found[0]) if right and found else NONE


class Fold(SphinxPostTransform):
    default_priority = 750  # terms are linked at 700, the gallery cuts code into words at 800
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        if pages.page_of(self.env.docname) is None or self.app.tags.has("book"):
            return
        questions = [p for p in self.document.findall(nodes.paragraph) if ASKS in p["classes"]]
        outputs = {"sphx-glr-script-out", "cell_output"}
        ran = any(outputs & {*node["classes"]} for node in self.document.findall(nodes.Element))
        for question in questions:
            if not hide_answer(question) and ran:
                logger.warning("nothing answers: %s", question.astext(), location=question)
        for number, question in enumerate(questions):
            offer_choices(question, f"choice-{number}")
        show_picture_first(self.document)
        fold_code(self.document)


def is_code(node: nodes.Node) -> bool:
    """Whether a node is a block of the script: not what it printed, nor an example in its text."""
    if not isinstance(node, nodes.literal_block):
        return False
    return node.get("language") == "Python" or "cell_input" in node.parent.get("classes", [])


def is_output(node: nodes.Node) -> bool:
    """Whether a node is what a block printed or drew."""
    if isinstance(node, nodes.raw):
        return True
    return isinstance(node, nodes.Element) and any("sphx-glr" in c for c in node.get("classes", []))


def show_picture_first(document: nodes.document) -> None:
    """A page begins with its picture: what its first code draws stands above the code, which may be
    several blocks up to the next text."""
    block = next(iter(document.findall(is_code)), None)
    first = [block, *below(block)] if block else []
    nodes_of_code = takewhile(lambda n: is_code(n) or is_output(n) or is_ignored(n), first)
    outputs = [node for node in nodes_of_code if is_output(node)]
    if any(isinstance(node, nodes.raw) for node in outputs):
        for node in outputs:
            block.parent.remove(node)
        place = block.parent.index(block)
        block.parent.insert(place, outputs)


def below(node: nodes.Node) -> list[nodes.Node]:
    """What follows a node under the same heading."""
    beside = node.parent.children
    return list(beside[beside.index(node) + 1 :])


def hide_answer(question: nodes.paragraph) -> bool:
    """Fold what the next block printed and drew, with the paragraph after it that explains it, and
    say whether there was anything to fold."""
    outputs, code, after = answered(below(question))
    if outputs:
        hidden = fold(label=answer(), classes=["answer"])
        if is_cell(code[-1]):  # below the last, which checks
            code[-1] += hidden
        else:
            outputs[0].parent.insert(outputs[0].parent.index(outputs[0]), hidden)
        explains = isinstance(after, nodes.paragraph) and ASKS not in after["classes"]
        for node in [*outputs, after] if explains else outputs:
            node.parent.remove(node)
            hidden += node
    return bool(outputs)


def answered(
    after: list[nodes.Node],
) -> tuple[list[nodes.Node], list[nodes.Node], nodes.Node | None]:
    """The outputs of the next code, the nodes of that, and what comes after it. That code ends
    where its first outputs end; in a stored notebook it is all cells up to the next text."""
    begun = list(dropwhile(lambda node: not (is_cell(node) or is_code(node)), after))
    code = cells = list(takewhile(is_cell, begun))
    if not cells:
        silent = list(takewhile(lambda node: is_code(node) or is_ignored(node), begun))
        beside = takewhile(lambda node: is_output(node) or is_ignored(node), begun[len(silent) :])
        code = [*silent, *beside]
    inside = [node for cell in cells for node in cell.children if "cell_output" in node["classes"]]
    outputs = inside or [node for node in code if is_output(node)]
    return outputs, code, next(iter(begun[len(code) :]), None)


def is_cell(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Element) and "cell" in node.get("classes", [])


def is_ignored(node: nodes.Node) -> bool:
    return isinstance(node, (nodes.comment, nodes.target))


def offer_choices(question: nodes.paragraph, name: str) -> None:
    """The list below a question becomes buttons of which one is chosen."""
    after = below(question)
    if after and isinstance(after[0], nodes.bullet_list):
        if any(len(item) != 1 for item in after[0]):
            logger.warning("a choice is one paragraph: %s", question.astext(), location=question)
            return
        offered = choices(name=name)
        question.replace_self(offered)
        after[0].parent.remove(after[0])
        offered += [question, after[0]]


def code_of(document: nodes.Element) -> list[tuple[nodes.literal_block, list[folding.Part]]]:
    """Each block of code, and its parts."""
    blocks = list(document.findall(is_code))
    return list(zip(blocks, folding.parts(tuple(block.astext() for block in blocks)), strict=True))


def with_text(block: nodes.literal_block, code: str) -> nodes.literal_block:
    copy = block.copy()
    copy.rawsource = code
    copy += nodes.Text(code)
    return copy


def fold_code(document: nodes.Element) -> None:
    """Put the parts of each block in its place."""
    for block, parts in code_of(document):
        copies = [with_text(block, part.text) for part in parts]
        for copy in copies[1:]:
            copy["ids"] = []
        block.replace_self([
            fold("", copy, label=part.label, classes=["code"]) if part.kinds else copy
            for part, copy in zip(parts, copies, strict=True)
        ])  # fmt: skip


def leave_out(page: nodes.Element) -> None:
    """In a book: leave out the code that only checks, prints a table or draws."""
    for block, parts in code_of(page):
        if all(part.kinds for part in parts):
            block.parent.remove(block)
            continue
        shown = [part.text for part in parts if not part.kinds or {*part.kinds} == {"import"}]
        block.replace_self(with_text(block, "\n\n".join(shown)))


# ------------------------------------------------------------------------------------ in HTML


def visit_fold(self: Any, node: fold) -> None:
    self.body.append(self.starttag(node, "details", CLASS="fold"))
    self.body.append(f"<summary>{self.encode(node['label'])}</summary>\n")


def depart_fold(self: Any, node: fold) -> None:
    self.body.append("</details>\n")


def visit_choices(self: Any, node: choices) -> None:
    question, answers = node.children
    right = {"data-right": question["right"]} if "right" in question else {}
    self.body.append(self.starttag(node, "fieldset", CLASS="predict", **right) + "<legend>")
    for child in question.children:
        child.walkabout(self)
    self.body.append("</legend>\n")
    for item in answers.children:
        self.body.append(f'<label><input type="radio" name="{node["name"]}"><span>')
        for child in item.children[0].children:
            child.walkabout(self)
        self.body.append("</span></label>\n")
    self.body.append("</fieldset>\n")
    raise nodes.SkipNode


def add_script(app: Any, docname: str, template: str, context: Any, doctree: Any) -> None:
    if doctree is not None and any(doctree.findall(choices)):
        app.add_js_file("predict.js", loading_method="defer")


def setup(app: Any) -> dict[str, bool]:
    app.add_node(fold, html=(visit_fold, depart_fold))
    app.add_node(choices, html=(visit_choices, None))
    app.add_transform(Mark)
    app.add_post_transform(Fold)
    app.connect("html-page-context", add_script)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
