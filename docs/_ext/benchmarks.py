"""The numbers of the page on benchmarks. Nothing is measured while the site is built.

`make bench` writes a file for each processor into `docs/benchmarks`; here every row of them gets a
place in a table and in a figure, those behind their peer too, in the order in which they were
measured, and each processor gets a column. The page itself is `_pages/benchmarks.rst`.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

import gallery
import rst

sys.path += {str(path.parent) for path in (gallery.ROOT / "tests").rglob("measure.py")}
import measure
from measure import Row

BESIDE = {"ahead": "ahead", "behind": "**behind**", "undecided": "not decided", "": ""}
AIM = {"met": "target met", "missed": "**short of its target**", "undecided": "target not decided",
       "": ""}  # fmt: skip
NOTHING = "–"
Report = dict[str, Any]


def side_by_side(name: str, reports: list[Report]) -> list[list[Row | None]]:
    """The rows of a benchmark, each as every processor has measured it."""
    found: list[dict[Any, Row]] = []
    for report in reports:
        rows = measure.rows_of(report, name) if name in report["benchmarks"] else ()
        found.append({(row.setting, row.kind, row.peer, row.unit): row for row in rows})
    keys = dict.fromkeys(key for rows in found for key in rows)
    return [[rows.get(key) for rows in found] for key in keys]


# ----------------------------------------------------------------------------------- the figure


def figure(table: list[list[Row | None]], names: list[str], path: Path) -> None:
    """Each ratio with its spread on a logarithmic axis, a panel for each processor. A row's name
    stands above it, so that the figure is narrow enough for a phone."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    from lm_from_scratch.instruments.plot import COLOURS, GREY, STYLE

    marks = {"ahead": (COLOURS[0], "o"), "met": (COLOURS[0], "o"), "missed": (COLOURS[1], "s"),
             "undecided": (GREY, "D"), "behind": (COLOURS[3], "v")}  # fmt: skip
    measured = [[row if row and row.rounds else None for row in line] for line in table]
    ends = [
        end for line in measured for row in line if row for end in (*row.ratio, row.target or 1)
    ]
    n = len(names)
    with plt.rc_context({**STYLE, "font.size": 8.5, "svg.hashsalt": path.stem}):
        made, axes = plt.subplots(1, n, sharey=True, squeeze=False, figsize=(2.5 + 1.5 * n, 0.7))
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
                if row is None:
                    continue
                colour, marker = marks[row.verdict]
                middle, low, high = row.ratio
                ax.plot([low, high], [y, y], color=colour, linewidth=2)
                ax.plot([middle], [y], marker=marker, markersize=6, color=colour)
                if row.target:
                    ax.plot([row.target] * 2, [y - 0.24, y + 0.24], color=COLOURS[7], linewidth=2)
            y += 1
        made.set_figheight(0.7 + 0.38 * y)
        wide = max(ends) > 20 * min(ends)
        for ax, name in zip(axes[0], names, strict=True):
            ax.axvline(1, color="#666666", linewidth=1)
            ax.set(xscale="log", xlim=(min(ends) / 1.15, max(ends) * 1.15), ylim=(y - 0.5, -0.6))
            ax.set(yticks=[], xlabel="ratio, over the peer", title=name if n > 1 else "")
            few = (1,) if n > 1 else (1, 3)
            ax.xaxis.set_major_locator(LogLocator(subs=few if wide else (1, 1.4, 2, 3, 5, 7)))
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


def cell(row: Row | None) -> str:
    """What one processor says of a row, in short paragraphs."""
    if row is None or not row.rounds:
        return row.note if row else NOTHING
    joint = "of" if row.peer == measure.BUDGET else "and"
    numbers = f"{number(row.ours)} {joint} {number(row.theirs)} {row.unit}"
    if row.peer == measure.BUDGET:
        said = "within" if row.aim == "met" else "**over its budget**"
        return f"{numbers}, {row.ours / row.theirs:.0%}: {said}"
    ratio = f"{row.ratio[0]:.2f}"
    if row.rounds > 1:
        ratio += f" ({row.ratio[1]:.2f} to {row.ratio[2]:.2f}, {row.rounds} rounds)"
    limit = ""
    if row.share:
        limit = f"{row.share[0]:.0%} of {number(row.at_limit or 0)} ({row.limit})"
        limit += ", **above the limit**" if row.above_limit else ""
    return "\n\n".join(filter(None, [f"{ratio}: {verdict(row)}", numbers, limit, row.note]))


def cells(line: list[Row | None]) -> list[str]:
    """A row of the table: what is compared, and what each processor says of it."""
    row = next(filter(None, line))
    aims = [f"{row.target:g}"] if row.target and row.peer != measure.BUDGET else []
    if row.target_share:
        aims.append(f"{row.target_share:.0%} of the limit")
    return [row.setting, row.kind, row.peer, " and ".join(aims) or NOTHING, *map(cell, line)]


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


def counted(reports: list[Report], table: list[list[Row | None]]) -> str:
    """What the rows of each processor count up to, with its name if there are several."""
    columns = zip(*table, strict=True)
    found = [count([row for row in column if row]) for column in columns]
    names = [f"{measure.name_of(report)}: " if len(reports) > 1 else "" for report in reports]
    return " ".join(name + text for name, text in zip(names, found, strict=True) if text)


def section(name: str, reports: list[Report], folder: Path) -> str:
    """Counts, figure and table of a benchmark."""
    reports = [report for report in reports if name in report["benchmarks"]]
    names = [measure.name_of(report) for report in reports]
    table = side_by_side(name, reports)
    header = ["what", "ours", "peer", "target", *names]
    rows = [row for line in table for row in line if row]
    if name != "pages" and any(row.rounds for row in rows):
        figure(table, names, folder / f"{name}.svg")
    return rst.render(
        "benchmark.rst",
        name=name,
        days=" and ".join(dict.fromkeys(report["benchmarks"][name]["date"] for report in reports)),
        rows=rows,
        count=counted(reports, table) if rows else "",
        cells=[header, *map(cells, table)],
        above=any(row.above_limit for row in rows),
    )


def run_of(report: Report) -> dict[str, Any]:
    """A report, with what the page says of it: how fast, and when and how long it was measured."""
    found = report["benchmarks"]
    days = sorted({report["date"], *(benchmark["date"] for benchmark in found.values())})
    rows = [row for name in found if name != "pages" for row in measure.rows_of(report, name)]
    return report | {
        "name": measure.name_of(report),
        "answer": answer(rows),
        "count": count(rows),
        "day": " to ".join(dict.fromkeys([days[0], days[-1]])),
        "seconds": f"{sum(benchmark['seconds'] for benchmark in found.values()):,.0f}",
    }


def page(reports: list[Report], folder: Path) -> str:
    """The page; a benchmark that it does not show is an error that names it."""
    left = {name for report in reports for name in report["benchmarks"]}

    def rows(name: str) -> str:
        left.discard(name)
        return section(name, reports, folder)

    runs = [run_of(report) for report in reports]
    gpu = (gallery.GPU / "measurements.json").is_file()
    text = rst.render("benchmarks.rst", runs=runs, rows=rows, gpu=gpu, some=some)
    if left:
        raise ValueError(f"docs/_pages/benchmarks.rst says nothing about {sorted(left)}")
    return text
