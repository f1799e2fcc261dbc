"""What the build adds to a page: facts below its title, exercises with checks, where to go on.

The path leads from lesson to lesson; in-depth pages hang below theirs, in the navigation too.
"""

import re
from typing import Any

from docutils import nodes
from editions import translation
from sphinx import addnodes
from sphinx.locale import _

from gallery import exercises, pages


def doc(target: str, docname: str) -> addnodes.pending_xref:
    """A link to a document, by its title. No catalogue knows it, nor the texts around it: their
    numbers change more often than a translation should."""
    return addnodes.pending_xref(
        "", nodes.inline("", target), refdomain="std", reftype="doc", refexplicit=False,
        refwarn=True, reftarget=target, refdoc=docname,
    )  # fmt: skip


def joined(parts: list[nodes.Node | str]) -> nodes.paragraph:
    made = nodes.paragraph()
    made += [part if isinstance(part, nodes.Node) else nodes.Text(str(part)) for part in parts]
    return made


def linked(names: list[str], docname: str) -> list[nodes.Node | str]:
    """Links to pages, with commas between them."""
    parts = [part for name in names for part in (_(", "), doc(pages.document(name), docname))]
    return parts[1:]


def facts(name: str, docname: str) -> nodes.bullet_list:
    """The strip below a title."""
    items: list[list[nodes.Node | str]] = [
        [_("{minutes} minutes to read").format(minutes=pages.minutes(name))]
    ]
    if not pages.is_lesson(name):
        items.insert(0, [_("in depth, beside "), *linked([pages.lesson(name)], docname)])
    needs = [other for other in pages.needs(name) if pages.lesson(name) != other]
    if needs:
        items.append([_("read before: "), *linked(needs, docname)])
    if packages := pages.packages(name):
        items.append([_("needs {packages}").format(packages=" + ".join(packages))])
    if count := pages.exercises(name):
        text = _("{count} exercises") if count > 1 else _("{count} exercise")
        checked = len(exercises.of_page(name))
        own = nodes.reference("", text.format(count=count), refuri="#exercises", internal=True)
        more = _(", and {count} with checks").format(count=checked)
        items.append([own, more if checked else ""])
    strip = nodes.bullet_list(classes=["page-facts"])
    strip += [nodes.list_item("", joined(item)) for item in items]
    return strip


def with_checks(name: str, docname: str) -> list[nodes.paragraph]:
    """A line on the exercises with automatic checks that belong to a page, if there are any."""
    parts = []
    for found in exercises.of_page(name):
        what = _("bug hunt") if found.hunt else exercises.DIFFICULTY[found.difficulty]
        link = doc(f"/exercises/{found.name}", docname)
        parts += [
            _(", ") if parts else " ",
            link,
            _(" ({what}, {minutes} minutes)").format(what=what, minutes=found.minutes),
        ]
    start = nodes.strong("", _("With automatic checks:"))
    return [joined([start, *parts, _(".")])] if parts else []


def onward(name: str, docname: str) -> list[nodes.paragraph]:
    """Below the summary of a lesson: what goes deeper, and the next one."""
    made = []
    if deeper := pages.in_depth(name):
        made.append(
            joined([nodes.strong("", _("In depth:")), " ", *linked(deeper, docname), _(".")])
        )
    if after := beside(name)[1]:
        made.append(joined([nodes.strong("", _("Next:")), " ", *linked([after], docname), _(".")]))
    return made


def beside(name: str) -> tuple[str | None, str | None]:
    """The pages before and after one on the reading path; those of an in-depth page are its lesson
    and the lesson after it."""
    lesson = pages.lesson(name)
    path = [one for one in pages.lessons() if translation.has(pages.document(one)[1:])]
    at = path.index(lesson)
    after = path[at + 1] if at + 1 < len(path) else None
    if lesson != name:
        return lesson, after
    return path[at - 1] if at else None, after


def add(app: Any, doctree: nodes.document) -> None:
    docname = app.env.docname
    name = pages.page_of(docname)
    if name is None:
        return
    section = next(doctree.findall(nodes.section))
    at = section.first_child_matching_class(nodes.title) + 1
    section.insert(at, facts(name, docname))
    found = {identity: s for s in doctree.findall(nodes.section) for identity in s["ids"]}
    if "exercises" in found:
        found["exercises"] += with_checks(name, docname)
    if pages.is_lesson(name) and "summary" in found:
        found["summary"] += onward(name, docname)
    app.env.note_dependency("exercises/index.md")  # which changes when one of them does


TOCTREE = "\n\n.. toctree::\n   :hidden:\n\n"


def link_pages(app: Any, docname: str, source: list[str]) -> None:
    """Links between notebooks become links between pages; a lesson gets its in-depth pages."""
    if docname.startswith("auto_tutorials/") and (name := pages.page_of(docname)):
        source[0] = pages.with_documents(name, source[0], ":doc:`{} <{}>`")
        if deeper := pages.in_depth(name):
            source[0] += TOCTREE + "".join(f"   {pages.document(one)}\n" for one in deeper)


GROUP = """
In depth
~~~~~~~~

.. raw:: html

    <div class="sphx-glr-thumbnails">

{}

.. raw:: html

    </div>

"""
#: The card of a page in the index of its chapter.
CARD = re.compile(
    r'\.\. raw:: html\n\n    <div class="sphx-glr-thumbcontainer".*?\n    </div>\n', re.S
)


def sort_cards(app: Any, docname: str, source: list[str]) -> None:
    """In the index of a chapter, cards of in-depth pages come after those of the lessons, and are
    no pages of the path."""
    found = re.match(r"auto_tutorials/(\d\w*)/index$", docname)
    names = [name for name in pages.in_order() if found and name.startswith(found[1] + "/")]
    deeper = [pages.document(name) for name in names if not pages.is_lesson(name)]
    if not deeper:
        return
    cards = {re.search(r":doc:`(.*?)`", card)[1]: card for card in CARD.findall(source[0])}
    text = source[0]
    for name in deeper:
        text = text.replace(cards[name], "").replace(f"   {name}\n", "")
    lessons, toctree, path = text.rpartition(".. toctree::")
    group = GROUP.format("\n\n".join(cards[name] for name in deeper))
    source[0] = f"{lessons}{group}{toctree}{path}"


def add_chapters(app: Any, docname: str, source: list[str]) -> None:
    """In the index of the gallery, the chapters outside it come behind its own: a section, and a
    place in the table of contents."""
    if docname == "auto_tutorials/index":
        head, toctree, tail = source[0].rpartition(".. toctree::")
        own = f"{toctree}\n   :hidden:\n\n   /gpu/index\n   /exercises/index\n"
        more = ".. include:: /generated/more_chapters.rst\n\n"
        source[0] = f"{head}{more}{toctree}{tail}\n{own}"


def read_again(
    app: Any, env: Any, added: set[str], changed: set[str], removed: set[str]
) -> set[str]:
    """Pages that name one that has changed, or whose place in the path has."""
    found: set[str] = set()
    for docname in added | changed | removed:
        if name := pages.page_of(docname):
            lesson = pages.lesson(name)
            found |= {lesson, *pages.in_depth(lesson), *filter(None, beside(lesson))}
        elif docname.startswith("auto_tutorials/") and docname.count("/") == 2:  # is no more
            chapter = docname.split("/")[1]
            found |= {one for one in pages.in_order() if one.startswith(f"{chapter}/")}
    return {pages.document(name)[1:] for name in found} & env.found_docs


#: What comes after the last lesson.
END = "exercises/index"


def turn_pages(app: Any, docname: str, template: str, context: Any, doctree: Any) -> None:
    """The buttons at the end of a page follow the path."""
    if app.builder.name != "html":
        return
    if docname == END:
        ends = {"prev": pages.document(pages.lessons()[-1])[1:]}
    elif name := pages.page_of(docname):
        before, after = beside(name)
        last = {"next": END} if translation.has(END) else {}
        ends = {"next": pages.document(after)[1:]} if after else last
        if before:
            ends["prev"] = pages.document(before)[1:]
    else:
        return
    for button, target in ends.items():
        title = app.builder.render_partial(app.env.titles[target])["title"]
        context[button] = {
            "link": app.builder.get_relative_uri(docname, target),
            "title": title,
        }


def setup(app: Any) -> dict[str, bool]:
    app.connect("env-get-outdated", read_again)
    app.connect("source-read", link_pages)
    app.connect("source-read", sort_cards)
    app.connect("source-read", add_chapters)
    app.connect("doctree-read", add)
    app.connect("html-page-context", turn_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
