"""The course as data: what a page needs, how long it takes, and what the site draws from that.

`NEEDS` is the one place that says which page comes before which. Minutes to read are computed from
the text, seconds to run are measured: `python docs/course.py REPORT` stores those of a build, whose
report is `docs/_build/gallery_junit.xml`.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import textwrap
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import exercise_pages
import gallery
import notebooks
import pages
from docutils import nodes
from sphinx import addnodes

#: For each page the pages that its "Before you start" names, in reading order.
NEEDS: dict[str, list[str]] = {
    "1_gpt2/1_tokens": [],
    "1_gpt2/2_gpt2": ["1_gpt2/1_tokens"],
    "1_gpt2/3_training": ["1_gpt2/1_tokens", "1_gpt2/2_gpt2"],
    "1_gpt2/4_sampling": ["1_gpt2/1_tokens"],
    "1_gpt2/5_attention_maps": ["1_gpt2/2_gpt2", "1_gpt2/3_training"],
    "2_qwen2/1_rms_norm": ["1_gpt2/2_gpt2"],
    "2_qwen2/2_rope": ["1_gpt2/2_gpt2", "2_qwen2/1_rms_norm"],
    "2_qwen2/3_swiglu": ["2_qwen2/1_rms_norm", "2_qwen2/2_rope"],
    "2_qwen2/4_qwen2": [
        "1_gpt2/2_gpt2", "2_qwen2/1_rms_norm", "2_qwen2/2_rope", "2_qwen2/3_swiglu",
    ],
    "2_qwen2/5_conventions": ["1_gpt2/2_gpt2", "2_qwen2/2_rope", "2_qwen2/4_qwen2"],
    "3_attention/1_attention": ["1_gpt2/2_gpt2"],
    "3_attention/2_masks": ["2_qwen2/4_qwen2", "3_attention/1_attention"],
    "3_attention/3_flex_and_packing": ["3_attention/2_masks"],
    "3_attention/4_conformance": ["3_attention/1_attention", "3_attention/2_masks"],
    "4_classification/1_sequences": ["1_gpt2/2_gpt2", "1_gpt2/3_training"],
    "4_classification/2_tokens": ["4_classification/1_sequences"],
    "5_caching/1_why_cache": ["1_gpt2/2_gpt2", "3_attention/2_masks"],
    "5_caching/2_kinds_of_cache": ["3_attention/2_masks", "5_caching/1_why_cache"],
    "5_caching/3_quantized_cache": ["5_caching/2_kinds_of_cache"],
    "5_caching/4_padded_batches": [
        "3_attention/2_masks", "5_caching/1_why_cache", "5_caching/2_kinds_of_cache",
    ],
    "6_generation/1_beam_search": ["1_gpt2/4_sampling", "5_caching/2_kinds_of_cache"],
    "6_generation/2_speculative_decoding": ["1_gpt2/4_sampling", "5_caching/1_why_cache"],
    "6_generation/3_continuous_batching": ["5_caching/1_why_cache", "5_caching/4_padded_batches"],
    "7_optimizers/1_adamw": ["1_gpt2/3_training"],
    "7_optimizers/2_galore": ["7_optimizers/1_adamw"],
    "7_optimizers/3_galore_training": ["7_optimizers/2_galore"],
    "7_optimizers/4_in_backward": ["7_optimizers/1_adamw", "7_optimizers/2_galore"],
    "7_optimizers/5_data_parallel": [
        "7_optimizers/1_adamw", "7_optimizers/2_galore", "7_optimizers/4_in_backward",
    ],
    "8_quantized_weights/1_swapping_tensors": ["1_gpt2/2_gpt2", "7_optimizers/4_in_backward"],
    "8_quantized_weights/2_conversions": ["8_quantized_weights/1_swapping_tensors"],
    "8_quantized_weights/3_quantized_weight": [
        "8_quantized_weights/1_swapping_tensors", "8_quantized_weights/2_conversions",
    ],
    "8_quantized_weights/4_loading": [
        "8_quantized_weights/1_swapping_tensors", "8_quantized_weights/2_conversions",
        "8_quantized_weights/3_quantized_weight",
    ],
    "8_quantized_weights/5_int8_int4": [
        "8_quantized_weights/3_quantized_weight", "8_quantized_weights/4_loading",
    ],
    "8_quantized_weights/6_lora": [
        "7_optimizers/1_adamw", "8_quantized_weights/3_quantized_weight",
        "8_quantized_weights/5_int8_int4",
    ],
    "gpu/1_swiglu": ["2_qwen2/3_swiglu"],
    "gpu/2_softmax": ["3_attention/1_attention", "gpu/1_swiglu"],
    "gpu/3_rms_norm": ["2_qwen2/1_rms_norm", "gpu/2_softmax"],
    "gpu/4_rope": ["2_qwen2/2_rope", "gpu/1_swiglu", "gpu/3_rms_norm"],
    "gpu/5_adamw": ["7_optimizers/1_adamw", "gpu/1_swiglu"],
    "gpu/6_matmul": ["gpu/1_swiglu", "gpu/2_softmax"],
    "gpu/7_gpu_code": ["gpu/6_matmul"],
    "gpu/8_galore": ["7_optimizers/2_galore", "gpu/5_adamw", "gpu/6_matmul"],
    "gpu/9_cross_entropy": ["gpu/2_softmax", "gpu/6_matmul"],
    "gpu/10_flash_attention": ["3_attention/2_masks", "gpu/2_softmax", "gpu/6_matmul"],
    "gpu/11_decoding": ["6_generation/3_continuous_batching", "gpu/10_flash_attention"],
    "gpu/12_flash_backward": ["gpu/10_flash_attention"],
}  # fmt: skip

#: How fast a page is read. Rounded to five minutes: nobody has measured it with a class.
WORDS_A_MINUTE = 200
LINES_A_MINUTE = 20
MINUTES_A_FORMULA = 0.5

RUN_SECONDS = Path(__file__).resolve().parent / "run_seconds.json"
#: What is stored and shown; a new measurement within a half of the old one changes nothing.
STEPS = (5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300)
#: The names by which packages are imported, where they differ.
IMPORTED = {"huggingface-hub": "huggingface_hub"}


# -- what is known about a page --------------------------------------------------------------


def in_order() -> list[str]:
    """All pages of chapters 1 to 9, "CHAPTER/PAGE", in reading order."""
    scripts = [*gallery.scripts(), *gallery.gpu_scripts()]
    return [f"{script.parent.name}/{script.stem}" for script in scripts]


def needs(page: str) -> list[str]:
    """Pages to read before a page. A new one that is not in `NEEDS` yet is shown without them; the
    tests ask for its entry."""
    return NEEDS.get(page, [])


def page_of(docname: str) -> str | None:
    """The page that a document of the site shows, if it is one of the course."""
    page = docname.removeprefix("auto_tutorials/")
    return page if page in in_order() else None


@cache
def title(page: str) -> str:
    """The title in the page's own words, without marks of code."""
    return (pages.summary(exercise_pages.script(page)) or page).replace("`", "")


def directives(text: str, name: str) -> list[str]:
    """The directives of one name in a text block, each with its content."""
    return re.findall(rf"^\.\. {name}::.*\n(?:(?: +.*)?\n)*", text + "\n", re.M)


@cache
def minutes(page: str) -> int:
    """Minutes to read a page, rounded to five: words, lines of code and formulas, each at the pace
    stated above. Blank lines and comment lines of code do not count, addresses are no words."""
    words = lines = formulas = 0
    for block in notebooks.blocks(exercise_pages.script(page)):
        text = block.content
        if block.type == "code":
            code = [line for line in text.splitlines() if line.strip()]
            lines += sum(not line.lstrip().startswith("#") for line in code)
            continue
        for formula in directives(text, "math"):
            formulas += 1
            text = text.replace(formula, "")
        for shown in directives(text, "code-block"):
            lines += sum(bool(line.strip()) for line in shown.splitlines()[1:])
            text = text.replace(shown, "")
        words += len(re.findall(r"\w[\w'-]*", re.sub(r"https?://\S+", "", text)))
    found = words / WORDS_A_MINUTE + lines / LINES_A_MINUTE + formulas * MINUTES_A_FORMULA
    return max(5, 5 * round(found / 5))


@cache
def core() -> frozenset[str]:
    """What the package itself requires: nothing to mention on a page."""
    with open(gallery.ROOT / "pyproject.toml", "rb") as file:
        given = tomllib.load(file)["project"]["dependencies"]
    names = {re.split(r"[^\w.-]", requirement)[0] for requirement in given}
    return frozenset(IMPORTED.get(name, name) for name in names) | {pages.PACKAGE}


@cache
def packages(page: str) -> list[str]:
    """Packages beyond the core that a page imports."""
    imported = pages.imported(exercise_pages.script(page))
    found = {module.partition(".")[0] for module, _ in imported}
    return sorted(found - core() - sys.stdlib_module_names)


# -- seconds to run --------------------------------------------------------------------------


def reported(report: Path) -> dict[str, float]:
    """Seconds of each page by the report of a build that ran it."""
    cases = ET.parse(report).getroot().iter("testcase")
    found = {}
    for case in cases:
        path = Path(case.get("file") or "")
        found[f"{path.parent.name}/{path.stem}"] = float(case.get("time") or 0)
    return {page: found[page] for page in in_order() if page in found}


def rounded(seconds: float, before: int | None = None) -> int:
    """The nearest step, by ratio; the stored number where it is still a fair one."""
    if before is not None and before / 1.5 <= seconds <= 1.5 * before:
        return before
    return min(STEPS, key=lambda step: max(step, seconds) / max(min(step, seconds), 1e-9))


def stored_seconds() -> dict[str, int]:
    if not RUN_SECONDS.is_file():
        return {}
    return {page: int(number) for page, number in json.loads(RUN_SECONDS.read_text()).items()}


def seconds(page: str) -> int | None:
    """Seconds that a page takes to run, as somebody has measured; None where nobody has.

    A GPU page's are in its notebook: those of the machine that executed it.
    """
    if not page.startswith("gpu/"):
        return stored_seconds().get(page)
    return rounded(executed(page)["seconds"]) if executed(page) else None


@cache
def executed(page: str) -> dict[str, Any]:
    """When and where the notebook of a GPU page was executed, as gpu_notebooks.py wrote it; nothing
    where it was not."""
    path = exercise_pages.script(page).with_suffix(".ipynb")
    if not path.is_file():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))["metadata"][pages.PACKAGE]


def store(report: Path) -> dict[str, int]:
    """Keep the seconds of the pages that a build ran; forget those of pages that are gone."""
    before, now = stored_seconds(), reported(report)
    known = [page for page in in_order() if page in before or page in now]
    made = {
        page: rounded(now[page], before.get(page)) if page in now else before[page]
        for page in known
    }
    RUN_SECONDS.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return made


def check_seconds(report: Path) -> list[str]:
    """What is stored beside what a build took: within a factor of three and ten seconds, after the
    pace of this machine, the median over all pages, has been taken out."""
    stored, now = stored_seconds(), reported(report)
    pace = statistics.median([now[page] / stored[page] for page in stored if page in now] or [1])
    problems = [f"{path}: no seconds in {RUN_SECONDS.name}" for path in now if path not in stored]
    for page in stored:
        if page not in now:
            problems.append(f"{page}: in {RUN_SECONDS.name}, but it did not run")
        elif not stored[page] / 3 - 10 <= now[page] / pace <= 3 * stored[page] + 10:
            problems.append(f"{page} took {now[page]:.0f} s, {stored[page]} s are stored")
    return problems


def duration(number: int) -> str:
    if number < 60:
        return f"{number} seconds"
    return f"{number / 60:g} minute{'s' if number > 60 else ''}"


# -- the strip below the title ---------------------------------------------------------------


def facts(page: str) -> list[list[str | tuple[str, str]]]:
    """What the strip says, an item each: texts, and links as (text, document or place)."""
    items: list[list[str | tuple[str, str]]] = [[f"{minutes(page)} minutes to read"]]
    if (number := seconds(page)) is not None:
        where = ""
        if page.startswith("gpu/"):
            device = executed(page)["device"]
            where = " without a GPU" if device.startswith("CPU") else f" on {device}"
        items.append([f"runs in about {duration(number)}{where}"])
    if needs(page):
        before: list[str | tuple[str, str]] = ["read before: "]
        for i, name in enumerate(needs(page)):
            before += [", "] * bool(i)
            before.append((title(name), exercise_pages.document(name)))
        items.append(before)
    if packages(page):
        items.append([f"needs {' and '.join(packages(page))}"])
    checked = len(exercise_pages.of_page(page))
    if count := own_exercises(page):
        text = f"{count} exercises" if count > 1 else "1 exercise"
        items.append([(text, "#exercises"), f", and {checked} with checks" if checked else ""])
    return items


@cache
def own_exercises(page: str) -> int:
    """The numbered items of the page's section of exercises."""
    text = "\n\n".join(
        block.content
        for block in notebooks.blocks(exercise_pages.script(page))
        if block.type == "text"
    )
    section = re.search(r"^Exercises\n-+\n(.*?)(?=^[^\n]+\n-{3,}\n|\Z)", text, re.M | re.S)
    return len(re.findall(r"^\d+\. ", section[1], re.M)) if section else 0


def add_strip(app: Any, doctree: nodes.document) -> None:
    """Put the strip below the title. It is made of nodes, so it is in no catalogue: its numbers
    change more often than a translation should."""
    page = page_of(app.env.docname)
    if page is None:
        return
    strip = nodes.bullet_list(classes=["page-facts"])
    for item in facts(page):
        line = nodes.paragraph()
        for part in item:
            if isinstance(part, str):
                line += nodes.Text(part)
            elif part[1].startswith("#"):
                line += nodes.reference("", part[0], refuri=part[1], internal=True)
            else:
                target = dict(refdomain="std", reftype="doc", refexplicit=False, refwarn=True)
                name = nodes.inline("", part[0])
                line += addnodes.pending_xref(
                    "", name, reftarget=part[1], refdoc=app.env.docname, **target
                )
        strip += nodes.list_item("", line)
    section = next(doctree.findall(nodes.section))
    section.insert(section.first_child_matching_class(nodes.title) + 1, strip)


def outdated(app: Any, env: Any, added: set[str], changed: set[str], removed: set[str]) -> set[str]:
    """Pages whose strip is not that of the last build: their source does not say so."""
    now = {exercise_pages.document(page)[1:]: facts(page) for page in in_order()}
    before = getattr(env, "page_facts", {})
    env.page_facts = now
    return {name for name in now if now[name] != before.get(name)} & env.found_docs


# -- what builds on what ---------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A line of the figure: its key, its text, where it leads, and the class of its mark."""

    key: str
    text: str
    href: str
    mark: str = ""


ROW, LEFT, WIDTH, LETTERS = 22, 92, 360, 33
ARROW = (
    '<defs><marker id="to" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" '
    'orient="auto"><path d="M 0 0 L 6 3 L 0 6 z"/></marker></defs>'
)


def arc(x: float, start: float, end: float, reach: float) -> str:
    """An arrow that leaves a column to the left and comes back to it; needs ARROW in its SVG."""
    return (
        f'<path d="M {x} {start} C {x - reach:.0f} {start} {x - reach:.0f} {end} {x} {end}" '
        'marker-end="url(#to)"/>'
    )


def column(
    groups: Mapping[str, Iterable[Node]], before: Mapping[str, Iterable[str]], label: str
) -> str:
    """An SVG of what builds on what: a column of links by group, with an arc to each of them from
    those that are `before` it, which come earlier in the column or later.

    One column, so that a phone shows it at full size; the colours are those of the page's text. The
    arcs that lead to a link are in its group, so that the style sheet can show them with it.
    """
    lines: list[str] = []
    at: dict[str, int] = {}
    drawn: dict[str, list[str]] = {}
    y = 6
    for title, members in groups.items():
        for part in textwrap.wrap(title, LETTERS):
            y += ROW
            lines.append(f'<text x="{LEFT}" y="{y}" class="chapter">{escape(part)}</text>')
        for node in members:
            y += ROW
            at[node.key] = y - 5
            text = []
            parts = textwrap.wrap(node.text, LETTERS)
            for i, part in enumerate(parts):
                y += 16 * bool(i)
                space = " " * (i + 1 < len(parts))
                text.append(f'<tspan x="{LEFT + 16}" y="{y}">{escape(part)}{space}</tspan>')
            drawn[node.key] = [
                f'<a href="{escape(node.href)}">',
                f'<circle cx="{LEFT + 5}" cy="{at[node.key]}" r="4" class="{node.mark}"/>',
                f"<text>{''.join(text)}</text></a>",
            ]
        y += 6
    farthest = max(abs(at[name] - at[key]) for key in before for name in before[key])
    for key, link in drawn.items():
        lines.append('<g class="node">')
        for name in before.get(key, ()):
            start, end = at[name], at[key]
            # The farther, the wider: arcs of unequal length lie apart.
            reach = 10 + (LEFT - 18) * (abs(end - start) / farthest) ** 0.5
            lines.append(arc(LEFT - 2, start, end, reach))
        lines += [*link, "</g>"]
    head = (
        f'<svg class="prerequisites" viewBox="0 0 {WIDTH} {y + 8}" role="group" '
        f'aria-label="{escape(label)}">'
    )
    return "\n".join([head, ARROW, *lines, "</svg>"])


def behind(page: str) -> set[str]:
    """All pages that come before a page, directly or not."""
    return set(needs(page)).union(*(behind(name) for name in needs(page)))


def direct(page: str) -> list[str]:
    """The needed pages that no other needed page needs: those to which an arc is drawn."""
    return [name for name in needs(page) if not any(name in behind(other) for other in needs(page))]


def by_chapter() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for folder, scripts in [
        *((chapter, gallery.pages(chapter)) for chapter in gallery.chapters()),
        (gallery.GPU, gallery.gpu_scripts()),
    ]:
        found[gallery.header_text(folder)[0]] = [f"{folder.name}/{path.stem}" for path in scripts]
    return found


def graph() -> str:
    """The figure of all pages, for a page at the root of the site."""
    groups = {
        chapter: [
            Node(page, title(page), f"{exercise_pages.document(page)[1:]}.html") for page in members
        ]
        for chapter, members in by_chapter().items()
    }
    arcs = {page: direct(page) for page in in_order()}
    label = (
        f"{len(arcs)} pages by chapter, with {sum(map(len, arcs.values()))} arcs from a page to "
        "one that needs it. The table below the figure says the same."
    )
    return column(groups, arcs, label) + "\n"


def table() -> str:
    """Every page with its minutes and what it needs."""
    rows = [["page", "minutes", "read before"]]
    for chapter, members in by_chapter().items():
        total = sum(map(minutes, members))
        rows.append([f"**{chapter}**", f"**{total}**", ""])
        for page in members:
            before = ", ".join(f":doc:`{exercise_pages.document(name)}`" for name in needs(page))
            rows.append([f":doc:`{exercise_pages.document(page)}`", str(minutes(page)), before])
    return "\n".join(pages.table(rows, ":widths: 45 10 45"))


def time_to_read(folder: Path) -> str:
    members = by_chapter()[gallery.header_text(folder)[0]]
    return f"{exercise_pages.hours(map(minutes, members))} to read"


def totals() -> str:
    """The course in a sentence of numbers."""
    return (
        f"{len(in_order())} pages in {len(by_chapter())} chapters: "
        f"{exercise_pages.hours(map(minutes, in_order()))} to read."
    )


def write(app: Any) -> None:
    folder = Path(app.srcdir) / "generated"
    texts = {"graph.html": graph(), "table.rst": table(), "totals.rst": totals() + "\n"}
    pages.write_texts({folder / f"course_{name}": text for name, text in texts.items()})


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/course.py docs/_build/gallery_junit.xml")
    for page, number in store(Path(sys.argv[1])).items():
        print(f"{page}: {number} s")


if __name__ == "__main__":
    main()
