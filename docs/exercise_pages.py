"""The chapter of exercises: a page for each, the proof of their checks, and the teacher's tables.

Everything is made from the sources, the catalogue and the stored proofs. Nothing on these pages is
run, and no solution is on them: what is shown is what `exercises.py` gives to a student.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import exercises
import gallery
import pages

from lm_from_scratch.exercises import source
from lm_from_scratch.exercises.exercise import Exercise
from lm_from_scratch.exercises.prove import proofs

TITLE = "10. Exercises"
INTRO = (
    "Write the central functions yourself, and mend bugs that real projects have had. A check says "
    "what is wrong first, and which misconception it looks like."
)
DIFFICULTY = {1: "easy", 2: "medium", 3: "hard"}
INDEX = "/exercises/index"
#: Of every page that says nothing else under "Before you start".
READING_MINUTES = 30


# -- what is known about an exercise ---------------------------------------------------------


def kind(found: Exercise) -> str:
    if found.hunt:
        return f"bug hunt ({found.hunt})"
    return "kernel" if found.key[0] == 9 else "write"


def document(page: str) -> str:
    """The document of a tutorial "CHAPTER/PAGE"."""
    return f"/{page}" if page.startswith("gpu/") else f"/auto_tutorials/{page}"


def script(page: str) -> Path:
    return gallery.TUTORIALS / f"{page}.py"


def of_page(page: str) -> list[Exercise]:
    """The exercises that belong to a tutorial "CHAPTER/PAGE"."""
    return [found for found in exercises.written() if found.page == page]


@cache
def chapter_titles() -> dict[int, str]:
    """Titles of the chapters by number."""
    titles = [gallery.header_text(folder)[0] for folder in [*gallery.chapters(), gallery.GPU]]
    return {int(title.partition(".")[0]): title for title in titles}


def by_chapter() -> dict[str, list[Exercise]]:
    chapters: dict[str, list[Exercise]] = {}
    for found in exercises.written():
        chapters.setdefault(chapter_titles()[found.key[0]], []).append(found)
    return chapters


def text(given: str) -> str:
    """A sentence of the catalogue in Markdown: only what stands in backticks is marked up."""
    parts = re.split(r"(`[^`]*`)", given)
    return "".join(
        p if i % 2 else re.sub(r"([\\*_$\[\]<>|])", r"\\\1", p) for i, p in enumerate(parts)
    )


def link(found: Exercise) -> str:
    return f"{{doc}}`{source_title(found)} </exercises/{found.name}>`"


def source_title(found: Exercise) -> str:
    """The title for links, in which backticks cannot stand."""
    return source.title(found.name).replace("`", "")


def lower(sentence: str) -> str:
    """A sentence to go on with: "Write ..." becomes "write ..."."""
    return sentence[:1].lower() + sentence[1:]


def reading_minutes(page: str) -> int:
    """What a page says under "Before you start": "about thirty minutes", "half an hour"."""
    said = re.search(r"Before you start\n#? ?-+\n(.*?)\n#? ?-{3,}", script(page).read_text(), re.S)
    words = " ".join((said[1] if said else "").replace("#", " ").split())
    if "half an hour" in words.lower():
        return 30
    numbers = {"twenty-five": 25, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60}
    found = re.search(rf"\b({'|'.join(numbers)}) minutes", words)
    return numbers[found[1]] if found else READING_MINUTES


# -- the page of an exercise -----------------------------------------------------------------


def page(found: Exercise) -> str:
    head = f"{kind(found)} · {found.minutes} minutes · {DIFFICULTY[found.difficulty]}"
    lines = [f"# {source.title(found.name)}", "", f"{text(head[:1].upper() + head[1:])} · "
             f"belongs to {{doc}}`{document(found.page)}`", ""]  # fmt: skip
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
        f"{hours(one.minutes for one in found)} in all.",
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
        "brackets is its number in the project's list of such defects. Find the mistake, and mend "
        "it without breaking the rest.",
        "",
        "All files: {download}`notebooks and scripts <files/exercises.zip>`. How the checks are "
        "proved: {doc}`/exercises/proof`. For teachers: {doc}`/teaching`.",
        "",
    ]
    for title, members in by_chapter().items():
        lines += [f"## Chapter {title}", ""]
        lines += ["| exercise | kind | work | page |", "|---|---|---|---|"]
        for one in members:
            lines.append(
                f"| {link(one)} | {kind(one)} | {one.minutes} min, {DIFFICULTY[one.difficulty]} | "
                f"{{doc}}`{document(one.page)}` |"
            )
        lines.append("")
    lines += ["```{toctree}", ":hidden:", "", *(f"/exercises/{one.name}" for one in found)]
    lines += ["/exercises/proof", "/teaching", "```", ""]
    return "\n".join(lines)


def hours(minutes: Iterable[int]) -> str:
    total = sum(minutes)
    return f"{total} minutes" if total < 120 else f"{total / 60:.0f} hours"


# -- links from the tutorials ----------------------------------------------------------------


def links(page: str, role: str, mark: str) -> str:
    """One paragraph that leads from a tutorial to its exercises; empty if it has none."""
    items = []
    for found in of_page(page):
        title = f"{source_title(found)} </exercises/{found.name}>"
        what = "bug hunt" if found.hunt else DIFFICULTY[found.difficulty]
        items.append(f"{role}`{title}` ({what}, {found.minutes} minutes)")
    return f"{mark}With automatic checks:{mark} {', '.join(items)}." if items else ""


def add_links(app: Any, docname: str, source: list[str]) -> None:
    """Put the links of a tutorial at the end of its section of exercises."""
    folder, _, page = docname.partition("/")
    if folder != "auto_tutorials" or not script(page).is_file():
        return
    if paragraph := links(page, ":doc:", "**"):
        source[0] = behind_exercises(source[0], paragraph, r"Exercises\n-+\n", r"^.+\n-{3,}\n")


def behind_exercises(whole: str, paragraph: str, heading: str, following: str) -> str:
    """Insert a paragraph before the heading that follows the section of exercises."""
    start = re.search(rf"^{heading}", whole, re.M)
    if start is None:
        raise ValueError("the page has no section of exercises to put its links in")
    end = re.compile(following, re.M).search(whole, start.end())
    at = end.start() if end else len(whole)
    return f"{whole[:at].rstrip()}\n\n{paragraph}\n\n{whole[at:]}"


def add_links_to_notebook(cells: list[dict[str, Any]], page: str) -> None:
    """The same on a GPU page, which is a notebook."""
    paragraph = links(page, "{doc}", "**")
    for cell in cells if paragraph else ():
        whole = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and re.search(r"^## Exercises\n", whole, re.M):
            cell["source"] = behind_exercises(whole, paragraph, r"## Exercises\n", r"^## ")
            return


def outdated(app: Any, env: Any, added: set[str], changed: set[str], removed: set[str]) -> set[str]:
    """Tutorials whose links are not those of the last build: no file that Sphinx knows says so."""
    names = [f"{path.parent.name}/{path.stem}" for path in gallery.scripts()]
    now = {f"auto_tutorials/{name}": links(name, ":doc:", "**") for name in names}
    before = getattr(env, "exercise_links", {})
    env.exercise_links = now
    return {name for name in now if now[name] != before.get(name, "")} & env.found_docs


# -- the proof -------------------------------------------------------------------------------


def stored() -> dict[str, dict[str, Any]]:
    """The stored proofs by exercise, in the order of the learning path."""
    found = {}
    for one in exercises.written():
        path = proofs() / f"{one.name}.json"
        if path.is_file():
            found[one.name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def totals(tables: Iterable[dict[str, Any]]) -> dict[str, int]:
    """The sums over all exercises."""
    tables = list(tables)
    named = [wrong["named"] for table in tables for wrong in table["wrong"]]
    return {
        "exercises": len(tables),
        "cases": sum(len(table["cases"]) for table in tables),
        "wrong": len(named),
        "named": named.count("named"),
        "errors": named.count("error"),
        "alike": len(named) - named.count("named") - named.count("error"),
        "right": sum(len(table["right"]) for table in tables),
        "mutants": sum(table["mutants"] for table in tables),
        "killed": sum(table["killed"] for table in tables),
        "explained": sum(len(table["explained"]) for table in tables),
        "wrong runs": sum(len(table["wrong"]) * table["wrong seeds"] for table in tables),
        "right runs": sum(len(table["right"]) * table["right seeds"] for table in tables),
    }


def proof() -> str:
    tables = stored()
    known = {found.name: found for found in exercises.written()}
    n = totals(tables.values())
    right_seeds = sorted({table["right seeds"] for table in tables.values()})
    wrong_seeds = sorted({table["wrong seeds"] for table in tables.values()})
    lines = ["---", "no-search: true", "---", "", "# The proof of the checks", ""]
    lines += [
        "A check that nobody tried to deceive is a draft. So each exercise holds answers that are "
        "known to be wrong and answers that are known to be right, and its checks must tell them "
        "apart, with any numbers.",
        "",
        "| what | number |",
        "|---|---|",
        f"| exercises, with {n['cases']} checks | {n['exercises']} |",
        f"| wrong answers, written by hand | {n['wrong']} |",
        f"| seeds at which each wrong answer is rejected | {spans(wrong_seeds)} of "
        f"{spans(wrong_seeds)} |",
        f"| right answers, the solutions among them | {n['right']} |",
        f"| false rejections, at {spans(right_seeds)} seeds each | 0 of {n['right runs']} |",
        f"| automatic mutants of the solutions | {n['mutants']} |",
        f"| mutants rejected | {n['killed']} |",
        f"| mutants that survive, with a written reason | {n['explained']} |",
        f"| wrong answers that the report names | {n['named']} |",
        f"| wrong answers that raise an error in each check they fail | {n['errors']} |",
        f"| wrong answers that look like another one | {n['alike']} |",
        "",
        "`python -m lm_from_scratch.exercises.prove` computes these numbers again and says what "
        "does not hold. `make test` compares them with what is stored in "
        "`tests/exercise_proofs/`, from which this page is made.",
        "",
        "## Every exercise",
        "",
        '"Alone" counts checks that are the only one to reject some answer. The last column is '
        "the largest share of the points that a wrong answer still gets: points are for teachers, "
        "done means that every check holds.",
        "",
        "| exercise | checks (alone) | wrong | right | mutants killed | points for wrong |",
        "|---|---|--:|--:|---|--:|",
    ]
    for name, table in tables.items():
        alone = sum(case["alone"] > 0 for case in table["cases"])
        share = table["highest share of points for a wrong answer"]
        lines.append(
            f"| {link(known[name])} | {len(table['cases'])} ({alone}) | {len(table['wrong'])} | "
            f"{len(table['right'])} | {table['killed']} of {table['mutants']} | {share:.0%} |"
        )
    lines += [
        "",
        "## Which check rejects what",
        "",
        "**Spoilers.** The wrong answers of an exercise tell what to look for, those of a bug hunt "
        "tell where. A row shows the numbers of the checks that reject an answer (a is 10, b is "
        "11), and a dot for each that accepts it. The check in brackets must reject it at every "
        "seed; the others are those of seed 0. The report names each of these answers when a "
        "student gives it, unless the row says otherwise.",
        "",
    ]
    for name, table in tables.items():
        lines += matrix(known[name], table)
    return "\n".join(lines) + "\n"


def spans(numbers: list[int]) -> str:
    return (
        " to ".join(str(number) for number in sorted({numbers[0], numbers[-1]})) if numbers else "0"
    )


def matrix(found: Exercise, table: dict[str, Any]) -> list[str]:
    """A dropdown with the checks of an exercise and what each wrong answer meets."""
    lines = [f":::::{{dropdown}} {source_title(found)}", ":class-container: proof", ""]
    for number, case in enumerate(table["cases"], start=1):
        worth = "must hold" if case["guard"] else f"{case['points']} of {found.points} points"
        note = f"alone for {case['alone']}" if case["alone"] else f"kept: {case['teaching']}"
        lines.append(
            f"{number}. {text(case['name'])} ({worth}; rejects {case['kills']}, {text(note)})"
        )
    lines += ["", "| wrong answer | rejected by |", "|---|---|"]
    for wrong in table["wrong"]:
        told = {"named": "", "error": "raises an error"}.get(wrong["named"], wrong["named"])
        note = f" *({text(told)})*" if told else ""
        lines.append(f"| {text(wrong['label'])}{note} | `{strip(table, wrong)}` |")
    lines += ["", "Right: " + "; ".join(text(label) for label in table["right"]) + ".", ""]
    if table["explained"]:
        lines += ["Mutants that survive:", ""]
        lines += [f"* `{code.replace('`', chr(39))}`: {text(why)}"
                  for code, why in table["explained"].items()] + [""]  # fmt: skip
    return [*lines, ":::::", ""]


def strip(table: dict[str, Any], wrong: dict[str, Any]) -> str:
    """The checks in a row: the number of each that rejects, a dot for each that accepts."""
    marks = []
    for number in range(1, len(table["cases"]) + 1):
        mark = str(number) if number < 10 else chr(ord("a") + number - 10)
        mark = mark if number in wrong["rejected by"] else "·"
        marks.append(f"[{mark}]" if number == wrong["case"] else mark)
    return "".join(marks)


# -- tables of the teacher's guide -----------------------------------------------------------

#: Weeks of a course: a name, and the pages to read. The exercises are those of these pages.
TWELVE_WEEKS = {
    "Tokens and the model": ["1_gpt2/1_tokens", "1_gpt2/2_gpt2"],
    "Training and sampling": ["1_gpt2/3_training", "1_gpt2/4_sampling", "1_gpt2/5_attention_maps"],
    "The blocks of Qwen2": ["2_qwen2/1_rms_norm", "2_qwen2/2_rope", "2_qwen2/3_swiglu"],
    "Qwen2, and attention": ["2_qwen2/4_qwen2", "2_qwen2/5_conventions", "3_attention/1_attention"],
    "Who sees whom": [
        "3_attention/2_masks", "3_attention/3_flex_and_packing", "3_attention/4_conformance",
    ],
    "Labels, and a first cache": [
        "4_classification/1_sequences", "4_classification/2_tokens", "5_caching/1_why_cache",
    ],
    "Caches": [
        "5_caching/2_kinds_of_cache", "5_caching/3_quantized_cache", "5_caching/4_padded_batches",
    ],
    "Generation": [
        "6_generation/1_beam_search", "6_generation/2_speculative_decoding",
        "6_generation/3_continuous_batching",
    ],
    "Optimizers": [
        "7_optimizers/1_adamw", "7_optimizers/2_galore", "7_optimizers/3_galore_training",
    ],
    "Memory of a step, and tensors that are swapped": [
        "7_optimizers/4_in_backward", "7_optimizers/5_data_parallel",
        "8_quantized_weights/1_swapping_tensors", "8_quantized_weights/2_conversions",
    ],
    "Quantised weights": [
        "8_quantized_weights/3_quantized_weight", "8_quantized_weights/4_loading",
        "8_quantized_weights/5_int8_int4", "8_quantized_weights/6_lora",
    ],
    "Kernels": ["gpu/1_swiglu", "gpu/2_softmax", "gpu/3_rms_norm", "gpu/4_rope"],
}  # fmt: skip
SIX_WEEKS = {
    "Tokens and the model": ["1_gpt2/1_tokens", "1_gpt2/2_gpt2", "1_gpt2/4_sampling"],
    "The blocks of Qwen2": ["2_qwen2/1_rms_norm", "2_qwen2/2_rope", "2_qwen2/3_swiglu"],
    "Attention": ["3_attention/1_attention", "3_attention/2_masks"],
    "Caches": ["5_caching/1_why_cache", "5_caching/2_kinds_of_cache", "5_caching/4_padded_batches"],
    "Training": ["1_gpt2/3_training", "7_optimizers/1_adamw", "7_optimizers/2_galore"],
    "Generation, and tensors that are swapped": [
        "6_generation/1_beam_search", "8_quantized_weights/1_swapping_tensors",
        "8_quantized_weights/2_conversions",
    ],
}  # fmt: skip


def plan(weeks: dict[str, list[str]], hardest: int = 3) -> list[list[Exercise]]:
    """The exercises of each week: those of its pages, none before what it builds on.

    hardest  the highest difficulty that the course takes; what builds on an exercise that is left
             out is left out too
    """
    week_of: dict[str, int] = {}
    lists: list[list[Exercise]] = [[] for _ in weeks]
    waiting = [found for found in exercises.written() if found.difficulty <= hardest]
    pages_of = {page: number for number, listed in enumerate(weeks.values()) for page in listed}
    while True:
        ready = [
            found
            for found in waiting
            if found.page in pages_of and set(found.after) <= set(week_of)
        ]
        if not ready:
            break
        for found in ready:
            week = max([pages_of[found.page], *(week_of[name] for name in found.after)])
            week_of[found.name] = week
            lists[week].append(found)
        waiting = [found for found in waiting if found.name not in week_of]
    order = exercises.written()
    return [sorted(members, key=order.index) for members in lists]


def split(members: list[Exercise]) -> tuple[list[Exercise], list[Exercise]]:
    """In class and at home. Bug hunts are for pairs, and easy exercises to begin with: both in
    class. In a week that has neither, it is the shortest exercise."""
    there = [found for found in members if found.hunt or found.difficulty == 1]
    there = there or sorted(members, key=lambda found: found.minutes)[:1]
    return there, [found for found in members if found not in there]


def plan_table(weeks: dict[str, list[str]], hardest: int = 3) -> str:
    lines = ["| week, and pages to read | in class | at home |", "|---|---|---|"]
    sums, points, taken = [0, 0], 0, plan(weeks, hardest)
    for number, (title, listed) in enumerate(weeks.items()):
        members = taken[number]
        there, home = split(members)
        reading = sum(reading_minutes(page) for page in listed)
        minutes = [sum(found.minutes for found in part) for part in (there, home)]
        minutes[1] += reading
        sums = [a + b for a, b in zip(sums, minutes, strict=True)]
        points += sum(found.points for found in members)
        read = ", ".join(f"{{doc}}`{document(page)}`" for page in listed)
        cells = [
            f"**{number + 1}. {title}.** {read}",
            " ".join([f"**{minutes[0]} min.**", ", ".join(map(link, there))]),
            " ".join([f"**{minutes[1]} min,** {reading} of them to read.",
                      ", ".join(map(link, home))]),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cell.strip() for cell in cells)} |")
    count = sum(map(len, taken))
    lines.append(f"| **All: {count} exercises, {points} points** | **{sums[0]} min** | "
                 f"**{sums[1]} min** |")  # fmt: skip
    left = [found for found in exercises.written() if not any(found in week for week in taken)]
    lines += [
        "",
        f"Left out: {', '.join(map(link, left))}." if left else "All exercises are in it.",
    ]
    return "\n".join(lines) + "\n"


def outcomes() -> str:
    lines = []
    for title, members in by_chapter().items():
        lines += [f"**Chapter {title}** ({hours(f.minutes for f in members)}). "
                  "After it a student can:", ""]  # fmt: skip
        lines += [f"* {text(lower(found.outcome))} ({link(found)})" for found in members]
        lines.append("")
    return "\n".join(lines)


def figures() -> str:
    """The course in one sentence of numbers."""
    found = exercises.written()
    pages_read = [f"{path.parent.name}/{path.stem}" for path in gallery.scripts()]
    return (
        f"There are {len(found)} exercises, {sum(bool(one.hunt) for one in found)} of them bug "
        f"hunts: {hours(one.minutes for one in found)} of work for somebody who has read the "
        f"pages, {sum(one.points for one in found)} points in all. Reading the {len(pages_read)} "
        f"pages of chapters 1 to 8 takes {hours(map(reading_minutes, pages_read))}.\n"
    )


ROW, LEFT, WIDTH = 22, 92, 360


def graph() -> str:
    """What builds on what: the exercises in a column, arcs from each to those that build on it.

    One column, so that a phone shows it at full size; the colours are those of the page's text.
    """
    lines, at, y = [], {}, 6
    for title, members in by_chapter().items():
        for part in textwrap.wrap(title, 32):
            y += ROW
            lines.append(f'<text x="{LEFT}" y="{y}" class="chapter">{escape(part)}</text>')
        for found in members:
            y += ROW
            at[found.name] = y
            mark = "hunt" if found.hunt else f"d{found.difficulty}"
            lines.append(f'<circle cx="{LEFT + 5}" cy="{y - 5}" r="4" class="{mark}"/>')
            lines.append(f'<text x="{LEFT + 16}" y="{y}">{escape(found.name)}</text>')
        y += 6
    arcs = []
    known = exercises.written()
    for found in known:
        for before in found.after:
            start, end = at[before] - 5, at[found.name] - 5
            reach = min(LEFT - 8, 10 + abs(end - start) ** 0.5 * 3.4)
            x = LEFT - 2
            arcs.append(
                f'<path d="M {x} {start} C {x - reach:.0f} {start} {x - reach:.0f} {end} '
                f'{x} {end}" marker-end="url(#to)"/>'
            )
    count = sum(len(found.after) for found in known)
    label = (
        f"{len(known)} exercises by chapter, with {count} arcs from an exercise to one that builds "
        "on it. The list below the figure says the same."
    )
    return "\n".join([
        "```{raw} html",
        f'<svg class="prerequisites" viewBox="0 0 {WIDTH} {y + 8}" role="img" '
        f'aria-label="{escape(label)}">',
        '<defs><marker id="to" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" '
        'markerHeight="6" orient="auto"><path d="M 0 0 L 6 3 L 0 6 z"/></marker></defs>',
        *arcs,
        *lines,
        "</svg>",
        "```",
        "",
        "::::{dropdown} The same as a list",
        "",
        *(
            f"* {link(found)} builds on "
            + ", ".join(link(other) for other in known if other.name in found.after)
            for found in known
            if found.after
        ),
        "",
        "::::",
        "",
    ])  # fmt: skip


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


def add_chapter(app: Any, docname: str, source: list[str]) -> None:
    """Put the chapter behind the last one of the gallery's own index page."""
    if docname == pages.ALL_CHAPTERS:
        source[0] = pages.with_chapter(source[0], TITLE, INTRO, path_card(), INDEX)


def write(app: Any) -> None:
    folder, generated = Path(app.srcdir) / "exercises", Path(app.srcdir) / "generated"
    texts = {folder / f"{found.name}.md": page(found) for found in exercises.written()}
    texts[folder / "index.md"] = index()
    texts[folder / "proof.md"] = proof()
    given = exercises.student_files()
    texts |= {folder / "files" / path: content for path, content in given.items()}
    packed = folder / "files" / "exercises.zip"
    for old in [*folder.glob("*.*"), *folder.glob("files/*")]:
        if old not in texts and old != packed:
            old.unlink()
    for name, content in {
        "figures": figures(),
        "outcomes": outcomes(),
        "graph": graph(),
        "six_weeks": plan_table(SIX_WEEKS, hardest=2),
        "twelve_weeks": plan_table(TWELVE_WEEKS),
    }.items():
        texts[generated / f"teaching_{name}.md"] = content
    pages.write_texts(texts)
    content = exercises.archive(given)
    if not packed.exists() or packed.read_bytes() != content:
        packed.write_bytes(content)
