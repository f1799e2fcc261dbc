"""The chapter of exercises: a page for each, their index, and the links from the tutorials.

Everything is made from the sources and the catalogue. Nothing on these pages is run, and no
solution is on them: what is shown is what `exercises.py` gives to a student.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import exercises
import gallery
import museum
import page as pages
import rst
from exercises import DIFFICULTY
from exercises import title as source_title

from lm_from_scratch.exercises import source
from lm_from_scratch.exercises.exercise import Exercise

TITLE = "10. Exercises"
INTRO = (
    "Write the central functions yourself, and mend bugs that real projects have had. A check says "
    "what is wrong first, and which misconception it looks like."
)
INDEX = "/exercises/index"


# -- what is known about an exercise ---------------------------------------------------------


def kind(found: Exercise) -> str:
    if found.hunt:
        return f"bug hunt ({museum.with_links(found.hunt)})"
    return "kernel" if found.key[0] == 9 else "write"


def by_chapter() -> dict[str, list[Exercise]]:
    """The exercises by the title of the chapter to whose pages they belong."""
    titles = gallery.by_chapter().items()
    found = {
        title: [one for one in exercises.written() if one.page in names] for title, names in titles
    }
    return {title: members for title, members in found.items() if members}


def text(given: str) -> str:
    """A sentence of the catalogue in Markdown: only what stands in backticks is marked up."""
    parts = re.split(r"(`[^`]*`)", given)
    return "".join(
        p if i % 2 else re.sub(r"([\\*_$\[\]<>|])", r"\\\1", p) for i, p in enumerate(parts)
    )


def link(found: Exercise) -> str:
    return f"{{doc}}`{source_title(found)} </exercises/{found.name}>`"


def lower(sentence: str) -> str:
    """A sentence to go on with: "Write ..." becomes "write ..."."""
    return sentence[:1].lower() + sentence[1:]


# -- the page of an exercise -----------------------------------------------------------------


def page(found: Exercise) -> str:
    head = f"{kind(found)} · {found.minutes} minutes · {DIFFICULTY[found.difficulty]}"
    lines = [f"# {source.title(found.name)}", "", f"{text(head[:1].upper() + head[1:])} · "
             f"belongs to {{doc}}`{gallery.document(found.page)}`", ""]  # fmt: skip
    lines += [f"**What you can do afterwards:** {text(lower(found.outcome))}", ""]
    before = [link(other) for other in exercises.written() if other.name in found.after]
    if before:
        lines += [f"**Do before:** {', '.join(before)}", ""]
    if found.needs:
        lines += [f"**Needs** the package `{found.needs}`.", ""]
    given = []
    for cell in source.source(found.name):
        if cell.kind == "markdown":
            given += [re.sub(r"\A# .*\n+", "", cell.text), ""]
        elif cell.is_solution:
            given += ["## Your part", "", *fence(exercises.as_student(cell)), ""]
        elif cell.is_check:
            given += ["## Check", "", *how_to_check(found, exercises.as_student(cell))]
        else:
            given += [*fence(exercises.as_student(cell)), ""]
    lines += given
    lines += ["## Hints", ""]
    for number, hint in enumerate(found.hints, start=1):
        lines += [f"::::{{dropdown}} Hint {number} of {len(found.hints)}"]
        lines += [":class-container: no-search", "", text(hint), "::::", ""]
    lines += [
        f"The next hint in a terminal: `python -m lm_from_scratch hint {found.name}`. "
        "The solution, beside your own code: "
        f"`python -m lm_from_scratch solution {found.name}`.",
        "",
    ]
    return "\n".join(lines) + "\n"


def fence(code: str) -> list[str]:
    return ["```python", code, "```"]


def how_to_check(found: Exercise, cell: str) -> list[str]:
    files = {"notebook": f"{found.name}.ipynb", "script": f"{found.name}.py"}
    downloads = [f"{{download}}`{label} <files/{file}>`" for label, file in files.items()]
    return [
        f"Download: {', '.join(downloads)}.",
        "",
        "In a notebook the last cell is the check, worth "
        f"{found.points} points. Interrupt it like any other cell if a loop never ends.",
        "",
        *fence(cell),
        "",
        "In a terminal:",
        "",
        "```console",
        f"$ python -m lm_from_scratch check {found.name} {found.name}.py",
        "```",
        "",
    ]


# -- the index -------------------------------------------------------------------------------


def index() -> str:
    found = exercises.written()
    hunts = sum(bool(one.hunt) for one in found)
    lines = [f"# {TITLE}", "", INTRO, ""]
    lines += [
        f"{len(found)} exercises, {hunts} of them bug hunts; "
        f"{pages.in_words(sum(one.minutes for one in found))} in all.",
        "",
        "## How it works",
        "",
        "1. Take a notebook, or a script: `python -m lm_from_scratch start NAME`, or `make lab` "
        "for all of them.",
        "2. Replace `raise NotImplementedError()` by your code. Only that.",
        "3. Check: the last cell of the notebook, or `python -m lm_from_scratch check NAME FILE`. "
        "It names the first thing that is wrong, the call that shows it, and what it looks like.",
        "4. Stuck? `hint` gives the next hint, `solution` the solution. `watch` checks each time "
        "you save, `next` names the next exercise, `list` what you have done.",
        "5. Nothing leaves your machine, and nothing is secret: the package is the answer key.",
        "",
        "In a **bug hunt** you get code with a mistake that a real project has had. The code in "
        "brackets is its number in the {doc}`/museum`. Find the mistake, and mend "
        "it without breaking the rest.",
        "",
        "All files: {download}`notebooks and scripts <files/exercises.zip>`. How the checks are "
        "proved: {doc}`/exercises/proof`. For teachers: {doc}`/teaching`.",
        "",
    ]
    for title, members in by_chapter().items():
        lines += [f"## Chapter {title}", ""]
        lines += ["| exercise | kind | minutes | difficulty | page |", "|---|---|---|---|---|"]
        for one in members:
            lines.append(
                f"| {link(one)} | {kind(one)} | {one.minutes} | {DIFFICULTY[one.difficulty]} | "
                f"{{doc}}`{gallery.document(one.page)}` |"
            )
        lines.append("")
    lines += ["## By difficulty", ""]
    for difficulty, name in DIFFICULTY.items():
        members = sorted(
            (one for one in found if one.difficulty == difficulty), key=lambda one: one.minutes
        )
        listed = ", ".join(f"{link(one)} ({one.minutes})" for one in members)
        lines += [f"* **{name.capitalize()}**, the shortest first, with minutes: {listed}."]
    lines += ["", "## Bug hunts", "", "| hunt | mistake | minutes | difficulty |"]
    lines += ["|---|---|---|---|"]
    for one in found:
        if one.hunt:
            mistake = text(museum.with_links(one.hunt))
            lines.append(
                f"| {link(one)} | {mistake} | {one.minutes} | {DIFFICULTY[one.difficulty]} |"
            )
    lines.append("")
    lines += ["```{toctree}", ":hidden:", "", *(f"/exercises/{one.name}" for one in found)]
    lines += ["/exercises/proof", "/teaching", "```", ""]
    return "\n".join(lines)


# -- the build -------------------------------------------------------------------------------


def path_card() -> list[str]:
    """The lines of the landing page's card."""
    found = exercises.written()
    hunts = sum(bool(one.hunt) for one in found)
    return [
        f"* :doc:`All {len(found)} exercises, {hunts} of them bug hunts <{INDEX}>`",
        "* :doc:`/exercises/proof`",
        "* :doc:`/teaching`",
    ]


def write(app: Any) -> None:
    folder = Path(app.srcdir) / "exercises"
    texts = {folder / f"{found.name}.md": page(found) for found in exercises.written()}
    texts[folder / "index.md"] = index()
    given = exercises.student_files()
    texts |= {folder / "files" / path: content for path, content in given.items()}
    packed = folder / "files" / "exercises.zip"
    kept = {packed: "", folder / "proof.md": ""}
    for old in {*folder.glob("*.*"), *folder.glob("files/*")} - set(texts | kept):
        old.unlink()
    rst.write(texts)
    content = exercises.archive(given)
    if not packed.exists() or packed.read_bytes() != content:
        packed.write_bytes(content)


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", write, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
