"""The numbers of the page on benchmarks. Nothing is measured while the site is built.

`make bench` writes `docs/benchmarks.json`; here every row of it gets a place in a table and in a
figure, those behind their peer too, in the order in which they were measured. The page itself is
`_pages/benchmarks.rst`.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

import gallery
import rst

sys.path += {str(path.parent) for path in (gallery.ROOT / "tests").rglob("measure.py")}
from measure import Row

BESIDE = {"ahead": "ahead", "behind": "**behind**", "undecided": "not decided", "": ""}
AIM = {"met": "target met", "missed": "**short of its target**", "undecided": "target not decided",
       "": ""}  # fmt: skip
NOTHING = "–"
HEADER = ["what", "ours", "peer", "ratio", "verdict", "target", "share of the limit", "note"]
BUDGET = ["what", "took", "budget", "share of the budget used", "verdict"]


# ----------------------------------------------------------------------------------- the figure


def figure(name: str, rows: list[Row], path: Path) -> None:
    """Each ratio with its spread on a logarithmic axis. A row's name stands above it, so that the
    figure is narrow enough for a phone."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    from lm_from_scratch.instruments.plot import COLOURS, GREY, STYLE

    marks = {"ahead": (COLOURS[0], "o"), "met": (COLOURS[0], "o"), "missed": (COLOURS[1], "s"),
             "undecided": (GREY, "D"), "behind": (COLOURS[3], "v")}  # fmt: skip
    ends = [end for row in rows for end in (*row.ratio, row.target or 1)]
    with plt.rc_context({**STYLE, "font.size": 8.5, "svg.hashsalt": name}):
        made, ax = plt.subplots(figsize=(4, 0.7))
        behind = dict(facecolor="white", edgecolor="none", pad=0.5)
        left = dict(transform=ax.get_yaxis_transform(), fontsize=7, va="center", bbox=behind)
        y, setting = 0.0, ""
        for row in rows:
            if row.setting != setting:  # a line of its own
                setting, y = row.setting, y + 0.45
                ax.text(0, y - 0.81, setting, weight="bold", **left).set_in_layout(False)
            label = f"{row.kind} / {row.peer}{', MB' if row.unit == 'MB' else ''}"
            ax.text(0, y - 0.36, label, **left).set_in_layout(False)
            colour, marker = marks[row.verdict]
            middle, low, high = row.ratio
            ax.plot([low, high], [y, y], color=colour, linewidth=2)
            ax.plot([middle], [y], marker=marker, markersize=6, color=colour)
            if row.target:
                ax.plot([row.target] * 2, [y - 0.24, y + 0.24], color=COLOURS[7], linewidth=2)
            y += 1
        made.set_figheight(0.7 + 0.38 * y)
        ax.axvline(1, color="#666666", linewidth=1)
        ax.set(xscale="log", xlim=(min(ends) / 1.15, max(ends) * 1.15), ylim=(y - 0.5, -0.6))
        ax.set(yticks=[], xlabel="ratio, over the peer")
        wide = max(ends) > 20 * min(ends)
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 3) if wide else (1, 1.4, 2, 3, 5, 7)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.grid(axis="y", visible=False)
        save(made, path)


def save(made: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, metadata={"Date": None})
    plt.close(made)


# ------------------------------------------------------------------------------------ the page


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def some(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def verdict(row: Row) -> str:
    """What every round says beside the peer and of the target."""
    if row.beside == row.aim == "undecided":
        return "not decided"
    return ", ".join(filter(None, [BESIDE[row.beside], AIM[row.aim]]))


def cells(row: Row) -> list[str]:
    """A row of the table."""
    if not row.rounds:
        return [row.setting, row.kind, row.peer, *[NOTHING] * 4, row.note]
    ratio, limit, aims = f"{row.ratio[0]:.2f}", "", []
    if row.rounds > 1:
        ratio += f" ({row.ratio[1]:.2f} to {row.ratio[2]:.2f}, {row.rounds} rounds)"
    if row.share:
        limit = f"{row.share[0]:.0%} of {number(row.at_limit or 0)} ({row.limit})"
        limit += ", **above the limit**" if row.above_limit else ""
    if row.target:
        aims.append(f"{row.target:g}")
    if row.target_share:
        aims.append(f"{row.target_share:.0%} of the limit")
    ours = f"{row.kind}: {number(row.ours)} {row.unit}"
    theirs = f"{row.peer}: {number(row.theirs)} {row.unit}"
    more = [" and ".join(aims), limit, row.note]
    return [row.setting, ours, theirs, ratio, verdict(row), *(text or NOTHING for text in more)]


def without_empty_columns(rows: list[list[str]]) -> list[list[str]]:
    """The rows, the first of them the header, without the columns that say nothing in any row."""
    columns = [column for column in zip(*rows, strict=True) if set(column[1:]) - {"", NOTHING}]
    return [list(row) for row in zip(*columns, strict=True)]


def count(rows: list[Row]) -> str:
    """How many are ahead and behind, how many targets are met and missed, and what is open."""
    said = []
    if found := [row.beside for row in rows if row.beside]:
        said.append(f"Beside a peer, of {some(len(found), 'row')}: {counts(found, 'ahead behind')}")
    if found := [row.aim for row in rows if row.aim]:
        said.append(f"Of {some(len(found), 'target')}: {counts(found, 'met missed')}")
    return " ".join(said)


def counts(found: list[str], kinds: str) -> str:
    each = "".join(f"{found.count(kind)} {kind}, " for kind in kinds.split())
    return f"{each}{found.count('undecided')} not decided."


def answer(rows: list[Row]) -> str:
    """How fast it is: medians of the rows that say that they are part of the headline."""
    parts = []
    for what in dict.fromkeys(row.headline for row in rows if row.headline and row.rounds):
        found = [row.ratio[0] for row in rows if row.headline == what and row.rounds]
        spread = f", {min(found):.2f} to {max(found):.2f}" if len(found) > 1 else ""
        median = f"**{statistics.median(found):.2f}** {what}"
        parts.append(f"{median} ({some(len(found), 'row')}{spread})")
    return ", ".join(parts)


def section(name: str, benchmark: dict[str, Any], folder: Path) -> str:
    """Counts, figure and table of a benchmark."""
    rows = [Row(**row) for row in benchmark["rows"]]
    if name == "pages":  # which have no peer
        over = sum(row.aim == "missed" for row in rows)
        counted = f"Over the budget: {over} of {some(len(rows), 'row')}."
        table = [BUDGET]
        for row in rows:
            took, budget = (f"{number(value)} {row.unit}" for value in (row.ours, row.theirs))
            said = "**over its budget**" if row.aim == "missed" else "within"
            table.append([row.setting, took, budget, f"{row.ours / row.theirs:.0%}", said])
    else:
        counted = count(rows)
        table = [HEADER, *map(cells, rows)]
        if measured := [row for row in rows if row.rounds]:
            figure(name, measured, folder / f"{name}.svg")
    return rst.render(
        "benchmark.rst",
        name=name,
        benchmark=benchmark,
        rows=rows,
        count=counted,
        cells=without_empty_columns(table),
        above=any(row.above_limit for row in rows),
    )


def page(report: dict[str, Any], folder: Path) -> str:
    """The page; a benchmark that it does not show is an error that names it."""
    found = report["benchmarks"]
    left = dict(found)
    days = sorted({report["date"], *(benchmark["date"] for benchmark in found.values())})
    rows = [Row(**row) for name in found if name != "pages" for row in found[name]["rows"]]
    text = rst.render(
        "benchmarks.rst",
        report=report,
        answer=answer(rows),
        threads=some(report["threads"], "thread"),
        day=" to ".join(dict.fromkeys([days[0], days[-1]])),
        seconds=f"{sum(benchmark['seconds'] for benchmark in found.values()):,.0f}",
        count=count(rows),
        rows=lambda name: section(name, left.pop(name, {"rows": []}), folder),
        gpu=(gallery.GPU / "measurements.json").is_file(),
    )
    if left:
        raise ValueError(f"docs/_pages/benchmarks.rst says nothing about {sorted(left)}")
    return text
