"""The numbers of the page on benchmarks. Nothing is measured while the site is built.

`make bench` writes a file for each processor into `docs/benchmarks`. Each benchmark answers a
question: in a sentence, which also names what is slower than its peer; as a row of marks in the
first figure; in a figure of its own, and in a table, where each processor has a column. The page
itself is `_pages/benchmarks.rst`.
"""

import statistics
import textwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import measure
from matplotlib.ticker import LogLocator, NullFormatter
from measure import Row

from lm_from_scratch.instruments.plot import COLOURS, GREY, STYLE

ROOT = Path(__file__).resolve().parents[3]

BESIDE = {"ahead": "faster", "behind": "**slower**", "undecided": "no clear difference"}
NOTHING = "–"
#: What a reader asks, and the benchmark that answers it, in the order of the page.
QUESTIONS = {
    "decoding": "How fast does it write?",
    "first_token": "How long until the first token?",
    "training": "How fast does it train?",
    "engine": "How fast are many requests at a time?",
    "quantize": "What do 8 and 4 bits bring?",
    "context": "Does it slow down as the text grows?",
    "qwen2": "What does a pass through Qwen2 cost?",
    "loss": "What does the loss cost at a large vocabulary?",
    "layers": "How fast are RMSNorm and RoPE?",
    "galore": "What does GaLore cost in time?",
    "experts": "How fast is a layer of experts?",
    "latent": "What does a latent cache cost in time?",
    "delta_rule": "How fast is the delta rule?",
    "pages": "How long does this site take to build?",
}
Report = dict[str, Any]


def side_by_side(name: str, reports: list[Report]) -> list[list[Row | None]]:
    """The rows of a benchmark, each as every processor has measured it."""
    columns: list[dict[Any, Row]] = []
    for report in reports:
        rows = measure.rows_of(report, name)
        columns.append({(row.setting, row.kind, row.peer, row.unit): row for row in rows})
    keys = dict.fromkeys(key for rows in columns for key in rows)
    return [[rows.get(key) for rows in columns] for key in keys]


# ---------------------------------------------------------------------------------- the figures

#: Colour and marker by what every round says.
MARKS = {"ahead": (0, "o"), "undecided": (None, "D"), "behind": (3, "v")}


def mark(row: Row) -> tuple[str, str]:
    colour, marker = MARKS[row.beside or "undecided"]
    return GREY if colour is None else COLOURS[colour], marker


def overview(reports: list[Report], path: Path) -> None:
    """Every comparison as a mark, by question, on one logarithmic axis."""
    asked = {name: compared(name, reports) for name in QUESTIONS}
    asked = {name: rows for name, rows in asked.items() if rows}
    with plt.rc_context({**STYLE, "font.size": 9, "svg.hashsalt": path.stem}):
        drawn, ax = plt.subplots(figsize=(4.8, 0.8 + 0.62 * len(asked)))
        for y, (name, rows) in enumerate(asked.items()):
            ax.text(0, y - 0.33, QUESTIONS[name], transform=ax.get_yaxis_transform(), va="center")
            for row in rows:
                colour, marker = mark(row)
                ax.plot(row.ratio[0], y, marker, color=colour, alpha=0.5, markersize=6)
        ratio_axis(ax, "times as fast as the peer, or as small", "Every comparison is a mark")
        ax.set_ylim(len(asked) - 0.6, -0.7)
        ticks = [0.1, 0.3, 1, 3, 10, 30, 100]
        low, high = ax.get_xlim()
        ax.set_xticks([tick for tick in ticks if low < tick < high])
        ax.xaxis.set_major_formatter("{x:g}")
        save(drawn, path)


def ratio_axis(ax: Any, label: str, title: str) -> None:
    """A logarithmic axis with a line at 1."""
    ax.axvline(1, color="#666666", linewidth=1)
    ax.set(xscale="log", yticks=[], xlabel=label, title=title)
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.grid(axis="y", visible=False)


def compared(name: str, reports: list[Report]) -> list[Row]:
    """The rows of a benchmark that have a peer, of all processors."""
    measured = [report for report in reports if name in report["benchmarks"]]
    return [row for report in measured for row in measure.rows_of(report, name) if row.beside]


def figure(table: list[list[Row | None]], names: list[str], path: Path) -> None:
    """Each ratio with its spread on a logarithmic axis, a panel for each processor. A row's name
    stands above it, so that the figure is narrow enough for a phone."""
    measured = [[row if row and row.rounds else None for row in line] for line in table]
    ends = [end for line in measured for row in line if row for end in (*row.ratio, 1)]
    n = len(names)
    with plt.rc_context({**STYLE, "font.size": 8.5, "svg.hashsalt": path.stem}):
        drawn, axes = plt.subplots(1, n, sharey=True, squeeze=False, figsize=(2.5 + 1.5 * n, 0.7))
        first = axes[0, 0]
        behind = dict(facecolor="white", edgecolor="none", pad=0.5)
        left = dict(transform=first.get_yaxis_transform(), fontsize=7, va="center", bbox=behind)
        y, setting = 0.0, ""
        for line in filter(any, measured):
            row = next(filter(None, line))
            if row.setting != setting:  # a line of its own
                setting, y = row.setting, y + 0.45
                first.text(0, y - 0.81, setting, weight="bold", **left).set_in_layout(False)
            label = f"{row.kind} / {row.peer}{', MB' if row.unit == 'MB' else ''}"
            first.text(0, y - 0.36, label, **left).set_in_layout(False)
            for ax, row in zip(axes[0], line, strict=True):
                if row:
                    colour, marker = mark(row)
                    middle, low, high = row.ratio
                    ax.plot([low, high], [y, y], color=colour, linewidth=2)
                    ax.plot([middle], [y], marker=marker, markersize=6, color=colour)
            y += 1
        drawn.set_figheight(0.7 + 0.38 * y)
        wide = max(ends) > 20 * min(ends)
        for ax, name in zip(axes[0], names, strict=True):
            ratio_axis(ax, "ratio, over the peer", textwrap.fill(name, 26) if n > 1 else "")
            ax.title.set_fontsize(7)
            ax.patch.set_visible(False)  # a long label goes on into the next panel
            ax.set(xlim=(min(ends) / 1.15, max(ends) * 1.15), ylim=(y - 0.5, -0.6))
            few = (1,) if n > 1 else (1, 3)
            ax.xaxis.set_major_locator(LogLocator(subs=few if wide else (1, 1.4, 2, 3, 5, 7)))
            ax.xaxis.set_major_formatter("{x:g}")
        save(drawn, path)


def save(drawn: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, metadata={"Date": None})
    plt.close(drawn)


# ------------------------------------------------------------------------------------ the page


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def some(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def cell(row: Row | None) -> str:
    """What one processor says of a row, in short paragraphs."""
    if row is None or not row.rounds:
        return row.note if row else NOTHING
    if not row.beside:  # there is no peer
        return f"{number(row.ours)} {row.unit}"
    ratio = f"{row.ratio[0]:.2f}"
    if row.rounds > 1:
        ratio += f" ({row.ratio[1]:.2f} to {row.ratio[2]:.2f}, {row.rounds} rounds)"
    numbers = f"{number(row.ours)} and {number(row.theirs)} {row.unit}"
    limit = ""
    if row.share:
        limit = f"{row.share[0]:.0%} of {number(row.at_limit or 0)} ({row.limit})"
        limit += ", **above the limit**" if row.above_limit else ""
    return "\n\n".join(filter(None, [f"{ratio}: {BESIDE[row.beside]}", numbers, limit, row.note]))


def cells(line: list[Row | None]) -> list[str]:
    """A row of the table: what is compared, and what each processor says of it."""
    row = next(filter(None, line))
    peer = NOTHING if row.peer in (measure.BUDGET, measure.AIM) else row.peer
    return [row.setting, row.kind, peer, *map(cell, line)]


def summary(rows: list[Row]) -> str:
    """The answer in a sentence or two: the median with its range, and all that is slower."""
    if not rows:
        return ""
    ratios = [row.ratio[0] for row in rows]
    middle = f"**{statistics.median(ratios):.2f} times as fast** as its peer, or as small"
    text = f"In the middle of {some(len(ratios), 'comparison')} ours is {middle} "
    text += f"({min(ratios):.2f} to {max(ratios):.2f})."
    behind: dict[str, list[str]] = {}
    for row in rows:
        if row.beside == "behind":
            name = f"{row.setting}: {row.kind} / {row.peer}"
            behind.setdefault(name, []).append(f"{row.ratio[0]:.2f}")
    if not behind:
        return text + " Nothing here is slower than its peer in every round."
    slower = [f"* {name}, {' and '.join(ratios)}" for name, ratios in behind.items()]
    return "\n".join([text + " Slower in every round:", "", *slower, ""])


def answer(rows: list[Row]) -> str:
    """How fast it is: medians of the rows that say that they are part of the headline."""
    parts = []
    for what in dict.fromkeys(row.headline for row in rows if row.headline and row.rounds):
        ratios = [row.ratio[0] for row in rows if row.headline == what and row.rounds]
        spread = f", {min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else ""
        median = f"**{statistics.median(ratios):.2f}** {what}"
        parts.append(f"{median} ({some(len(ratios), 'row')}{spread})")
    return ", ".join(parts)


def section(name: str, reports: list[Report], folder: Path) -> dict[str, Any]:
    """What is computed of a benchmark: its answer with a figure, and its table."""
    reports = [report for report in reports if name in report["benchmarks"]]
    names = [measure.name_of(report) for report in reports]
    table = side_by_side(name, reports)
    rows = [row for line in table for row in line if row]
    if any(row.beside for row in rows):
        figure(table, names, folder / f"{name}.svg")
    return {
        "rows": rows,
        "answer": summary(compared(name, reports)),
        "days": " and ".join(dict.fromkeys(r["benchmarks"][name]["date"] for r in reports)),
        "cells": [["what", "ours", "peer", *names], *map(cells, table)],
        "above": any(row.above_limit for row in rows),
    }


def run_of(report: Report) -> dict[str, Any]:
    """A report, with what the page says of it: how fast, and when and how long it was measured."""
    parts = report["benchmarks"]
    days = sorted({report["date"], *(part["date"] for part in parts.values())})
    rows = [row for name in parts if name != "pages" for row in measure.rows_of(report, name)]
    return report | {
        "name": measure.name_of(report),
        "answer": answer(rows),
        "day": " to ".join(dict.fromkeys([days[0], days[-1]])),
        "seconds": f"{sum(part['seconds'] for part in parts.values()):,.0f}",
    }


def values(reports: list[Report], folder: Path) -> dict[str, Any]:
    """What the page shows, with its figures in a folder."""
    if left := {name for report in reports for name in report["benchmarks"]} - {*QUESTIONS}:
        raise ValueError(f"docs/_pages/benchmarks.rst says nothing about {sorted(left)}")
    overview(reports, folder / "overview.svg")
    return {
        "runs": [run_of(report) for report in reports],
        "packages": list(dict.fromkeys(name for report in reports for name in report["versions"])),
        "questions": QUESTIONS,
        "sections": {name: section(name, reports, folder) for name in QUESTIONS},
        "gpu": (ROOT / "tutorials" / "gpu" / "measurements.json").is_file(),
        "some": some,
    }
