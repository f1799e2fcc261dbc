"""What the build adds to a page: facts below its title, exercises with checks, where to go on.

The path leads from lesson to lesson; in-depth pages hang below theirs, in the navigation too.
"""

import re
from typing import Any

from docutils import nodes
from editions import translation
from sphinx import addnodes
from sphinx.locale import _
from sphinx.util.docutils import SphinxDirective

from gallery import exercises, pages


def doc(target: str, docname: str) -> addnodes.pending_xref:
    """A link to a document, by its title. No catalogue knows it, nor the texts around it: their
    numbers change more often than a translation should."""
    return addnodes.pending_xref(
        "", nodes.inline("", target), refdomain="std", reftype="doc", refexplicit=False,
        refwarn=True, reftarget=target, refdoc=docname,
    )  # fmt: skip


def joined(*parts: nodes.Node | str) -> nodes.paragraph:
    texts = (part if isinstance(part, nodes.Node) else nodes.Text(str(part)) for part in parts)
    return nodes.paragraph("", "", *texts)


def linked(names: list[str], docname: str) -> list[nodes.Node | str]:
    """Links to pages, with commas between them."""
    parts = [part for name in names for part in (_(", "), doc(pages.document(name), docname))]
    return parts[1:]


def facts(name: str, docname: str) -> nodes.bullet_list:
    """The strip below a title."""
    lesson = pages.lesson(name)
    items = []
    read, follow = pages.minutes(name), pages.minutes_to_follow(name)
    if lesson != name:
        items.append(joined(_("in depth, beside "), *linked([lesson], docname)))
        items.append(joined(_("{minutes} minutes to read").format(minutes=read)))
    else:
        items.append(joined(place(name)))
        time = _("{minutes} minutes to read, {follow} to follow")
        items.append(joined(time.format(minutes=read, follow=follow)))
    if needs := [other for other in pages.needs(name) if other != lesson]:
        items.append(joined(_("read before: "), *linked(needs, docname)))
    if packages := pages.packages(name):
        items.append(joined(_("needs {packages}").format(packages=" + ".join(packages))))
    if count := pages.exercises(name):
        text = _("{count} exercises") if count > 1 else _("{count} exercise")
        checked = len(exercises.of_page(name))
        own = nodes.reference("", text.format(count=count), refuri="#exercises", internal=True)
        more = _(", and {count} with checks").format(count=checked)
        items.append(joined(own, more if checked else ""))
    list_items = (nodes.list_item("", item) for item in items)
    return nodes.bullet_list("", *list_items, classes=["page-facts"])


def place(name: str) -> str:
    """Which lesson of its chapter a page is, or deepens."""
    lesson = pages.lesson(name)
    chapter = [one for one in pages.lessons() if one.partition("/")[0] == name.partition("/")[0]]
    number = chapter.index(lesson) + 1
    return _("Lesson {number} of {count}").format(number=number, count=len(chapter))


class Totals(SphinxDirective):
    """How much there is to read. Its numbers change too often for a catalogue."""

    def run(self) -> list[nodes.Node]:
        lessons = pages.lessons()
        deeper = [name for name in pages.in_order() if not pages.is_lesson(name)]
        text = _(
            "{lessons} lessons in {chapters} chapters: {read} hours to read them, {follow} to "
            "follow them at the keyboard. Pages in depth, for when you need them: {deeper} "
            "hours more."
        ).format(
            lessons=len(lessons),
            chapters=len(pages.by_chapter()),
            read=round(sum(map(pages.minutes, lessons)) / 60),
            follow=round(sum(map(pages.minutes_to_follow, lessons)) / 60),
            deeper=round(sum(map(pages.minutes, deeper)) / 60),
        )
        return [nodes.paragraph("", text, translatable=False)]


def with_checks(name: str, docname: str) -> list[nodes.paragraph]:
    """A line on the exercises with automatic checks that belong to a page, if there are any."""
    parts: list[nodes.Node | str] = []
    for one in exercises.of_page(name):
        what = _("bug hunt") if one.hunt else exercises.DIFFICULTY[one.difficulty]
        about = _(" ({what}, {minutes} minutes)").format(what=what, minutes=one.minutes)
        parts += [_(", ") if parts else " ", doc(f"/exercises/{one.name}", docname), about]
    start = nodes.strong("", _("With automatic checks:"))
    return [joined(start, *parts, _("."))] if parts else []


def onward(name: str, docname: str) -> list[nodes.paragraph]:
    """Below the summary of a lesson: what goes deeper, and the next one."""
    after = beside(name)[1]
    lines = [(_("In depth:"), pages.in_depth(name)), (_("Next:"), [after] if after else [])]
    return [
        joined(nodes.strong("", start), " ", *linked(names, docname), _("."))
        for start, names in lines
        if names
    ]


def lessons_of_edition() -> list[str]:
    """The reading path of an edition: the lessons that it has."""
    return [one for one in pages.lessons() if translation.has(pages.document(one)[1:])]


def beside(name: str) -> tuple[str | None, str | None]:
    """The pages before and after one on the reading path; those of an in-depth page are its lesson
    and the lesson after it."""
    lesson = pages.lesson(name)
    path = lessons_of_edition()
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
    page, *sections = doctree.findall(nodes.section)
    page.insert(page.first_child_matching_class(nodes.title) + 1, facts(name, docname))
    for section in sections:
        if "exercises" in section["ids"]:
            section += with_checks(name, docname)
        if "summary" in section["ids"] and pages.is_lesson(name):
            section += onward(name, docname)
    app.env.note_dependency("exercises/index.md")  # which changes when one of them does


TOCTREE = "\n\n.. toctree::\n   :hidden:\n\n"


def link_pages(app: Any, docname: str, source: list[str]) -> None:
    """Links between notebooks become links between pages; a lesson gets its in-depth pages."""
    if docname.startswith("auto_tutorials/") and (name := pages.page_of(docname)):
        source[0] = pages.with_documents(name, source[0], ":doc:`{} <{}>`")
        if deeper := pages.in_depth(name):
            source[0] += TOCTREE + "".join(f"   {pages.document(one)}\n" for one in deeper)


#: The card of a page in an index of the gallery.
CARD = re.compile(
    r'\.\. raw:: html\n\n    <div class="sphx-glr-thumbcontainer".*?\n    </div>\n', re.S
)


def show_lessons(app: Any, docname: str, source: list[str]) -> None:
    """The indexes of the gallery show lessons, from which their in-depth pages are reached."""
    if not re.fullmatch(r"auto_tutorials/(\w+/)?index", docname):
        return
    deeper = {pages.document(name) for name in pages.in_order() if not pages.is_lesson(name)}
    source[0] = CARD.sub(
        lambda card: "" if re.search(":doc:`(.*?)`", card[0])[1] in deeper else card[0], source[0]
    )
    for document in deeper:  # nor does the menu
        source[0] = source[0].replace(f"   {document}\n", "")


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
    names: set[str] = set()
    for docname in added | changed | removed:
        if name := pages.page_of(docname):
            lesson = pages.lesson(name)
            names |= {lesson, *pages.in_depth(lesson), *filter(None, beside(lesson))}
        elif docname.startswith("auto_tutorials/") and docname.count("/") == 2:  # is no more
            chapter = docname.split("/")[1]
            names |= {one for one in pages.in_order() if one.startswith(f"{chapter}/")}
    return {pages.document(name)[1:] for name in names} & env.found_docs


#: What comes before the first lesson, and after the last.
START, END = "tour", "exercises/index"


def turn_pages(app: Any, docname: str, template: str, context: Any, doctree: Any) -> None:
    """The buttons at the end of a page follow the path."""
    name = pages.page_of(docname)
    if app.builder.name != "html" or (name is None and docname not in (START, END)):
        return
    path = lessons_of_edition()
    before, after = (
        beside(name) if name else (None, path[0]) if docname == START else (path[-1], None)
    )
    start, end = (one if name and translation.has(one) else None for one in (START, END))
    context["place"] = place(name) if name else ""
    ends = {
        "prev": pages.document(before)[1:] if before else start,
        "next": pages.document(after)[1:] if after else end,
    }
    for button, target in ends.items():
        if target:
            title = app.builder.render_partial(app.env.titles[target])["title"]
            link = app.builder.get_relative_uri(docname, target)
            context[button] = {"link": link, "title": title}


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("course-totals", Totals)
    app.connect("env-get-outdated", read_again)
    app.connect("source-read", link_pages)
    app.connect("source-read", show_lessons)
    app.connect("source-read", add_chapters)
    app.connect("doctree-read", add)
    app.connect("html-page-context", turn_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
