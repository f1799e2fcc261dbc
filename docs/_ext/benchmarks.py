"""The numbers of the page on benchmarks. Nothing is measured while the site is built.

`make bench` writes `docs/benchmarks.json`; here every row of it gets a place in a table and in a
figure, those behind their peer too, in the order in which they were measured. The page itself is
`_pages/benchmarks.rst`.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import gallery
import rst

sys.path += {str(path.parent) for path in (gallery.ROOT / "tests").rglob("measure.py")}
import measure
from measure import Row

GALORE_LOSS = gallery.DOCS / "galore_loss.json"
BESIDE = {"ahead": "ahead", "behind": "**behind**", "undecided": "not decided", "": ""}
AIM = {"met": "target met", "missed": "**short of its target**", "undecided": "target not decided",
       "": ""}  # fmt: skip
#: The headline: what is done, benchmark, and which rows, as a pattern of setting, kind and peer.
ANSWER: list[tuple[str, str, str]] = [
    ("in training, both with the same switches", "training", r"\| ours(.*) \| transformers\1$"),
    ("in decoding in float32", "decoding", r"float32.* \| ours \| transformers$"),
    (
        "in decoding in bfloat16 with packed weights",
        "decoding",
        r"bfloat16.* \| ours, packed \| transformers$",
    ),
    (
        "for a token after 2048 others",
        "context",
        r"token 2049, .* \| (growing|preallocated) \| transformers$",
    ),
]


# ----------------------------------------------------------------------------------- the figure


def figure(name: str, rows: list[Row], path: Path) -> None:
    """Ratio with its spread on a logarithmic axis, and the share of the limit where there is one.

    A row's name stands above it, so that the figure is narrow enough for a phone.
    """
    import matplotlib
    import matplotlib.pyplot as plt

    from lm_from_scratch.instruments import plot

    marks = {
        "ahead": (plot.COLOURS[0], "o"),
        "met": (plot.COLOURS[0], "o"),
        "missed": (plot.COLOURS[1], "s"),
        "undecided": (plot.GREY, "D"),
        "behind": (plot.COLOURS[3], "v"),
    }
    limited = any(row.share for row in rows)
    new = [i == 0 or rows[i - 1].setting != row.setting for i, row in enumerate(rows)]
    places = [i + 0.45 * sum(new[: i + 1]) for i in range(len(rows))]  # a setting has its own line
    height = 0.7 + 0.38 * (places[-1] + 1)
    with matplotlib.rc_context({**plot.STYLE, "font.size": 8.5, "svg.hashsalt": name}):
        made, axes = plt.subplots(
            1, 2 if limited else 1, figsize=(4.0, height), sharey=True, squeeze=False,
            width_ratios=[3, 1] if limited else None,
        )  # fmt: skip
        ax, *others = axes.flat
        for y, first, row in zip(places, new, rows, strict=True):
            colour, marker = marks[row.verdict]
            middle, low, high = row.ratio
            ax.plot([low, high], [y, y], color=colour, linewidth=2)
            ax.plot([middle], [y], marker=marker, markersize=6, color=colour)
            if row.target:
                ax.plot([row.target] * 2, [y - 0.24, y + 0.24], color=plot.COLOURS[7], linewidth=2)
            label = f"{row.kind} / {row.peer}{', MB' if row.unit == 'MB' else ''}"
            labels = [(label, 0.36, "normal"), (row.setting, 0.81, "bold")]
            for label, above, weight in labels[: 1 + first]:
                ax.annotate(
                    label, (0, y - above), xycoords=ax.get_yaxis_transform(), fontsize=7,
                    weight=weight, va="center",
                    bbox=dict(facecolor="white", edgecolor="none", pad=0.5),
                ).set_in_layout(False)  # fmt: skip
            for other in others:
                if row.share:
                    other.barh([y], [min(row.share[0], 1.2)], height=0.3, color=colour)
                if row.above_limit and row.share:
                    other.annotate(
                        f"{row.share[0]:.0%}", (0.5, y), ha="center", va="center", fontsize=7.2,
                        bbox=dict(facecolor="white", edgecolor="none", pad=0.5),
                    )  # fmt: skip
                if row.target_share:
                    where = [row.target_share] * 2
                    other.plot(where, [y - 0.24, y + 0.24], color=plot.COLOURS[7], linewidth=2)
        ax.axvline(1, color="#666666", linewidth=1)
        ax.set(
            xscale="log", ylim=(places[-1] + 0.5, -0.6), yticks=[], xlabel="ratio, over the peer"
        )
        ends = [end for row in rows for end in (*row.ratio, row.target or 1)]
        ax.set_xlim(min(ends) / 1.15, max(ends) * 1.15)
        wide = max(ends) > 20 * min(ends)
        ticks = [
            t for t in (WIDE_TICKS if wide else TICKS) if min(ends) / 1.15 <= t <= max(ends) * 1.15
        ]
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
        ax.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        ax.grid(axis="y", visible=False)
        for other in others:
            other.patch.set_visible(False)  # a long label goes on behind
            other.set(xlim=(0, 1.05), xticks=[0, 0.5, 1], xlabel="of the limit")
            other.set_xticklabels(["0", "50 %", "100 %"])
            other.grid(axis="y", visible=False)
        save(made, path)


def save(made: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, metadata={"Date": None})
    plt.close(made)


TICKS = (0.1, 0.2, 0.33, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10, 20, 50, 100, 200, 500)
WIDE_TICKS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


# ------------------------------------------------------------------------------------ the page


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def cells(row: Row) -> list[str]:
    """A row of the table."""
    if not row.rounds:
        return [row.setting, row.kind, row.peer, *[NOTHING] * 4, row.note]
    ratio = f"{row.ratio[0]:.2f}"
    if row.rounds > 1:
        ratio += " ({1:.2f} to {2:.2f}, {0} rounds)".format(row.rounds, *row.ratio[1:])
    limit = (
        f"{row.share[0]:.0%} of {number(row.at_limit or 0)} ({row.limit})" if row.share else NOTHING
    )
    limit += ", **above the limit**" if row.above_limit else ""
    aims = [f"{row.target:g}"] if row.target else []
    aims += [f"{row.target_share:.0%} of the limit"] if row.target_share else []
    return [
        row.setting,
        f"{row.kind}: {number(row.ours)} {row.unit}",
        f"{row.peer}: {number(row.theirs)} {row.unit}",
        ratio,
        verdict(row),
        " and ".join(aims) or NOTHING,
        limit,
        row.note or NOTHING,
    ]


def verdict(row: Row) -> str:
    """What every round says beside the peer and of the target."""
    if row.beside == row.aim == "undecided":
        return "not decided"
    return ", ".join(filter(None, [BESIDE[row.beside], AIM[row.aim]]))


NOTHING = "–"
HEADER = ["what", "ours", "peer", "ratio", "verdict", "target", "share of the limit", "note"]
BUDGET = ["what", "took", "budget", "share of the budget used", "verdict"]


def budget_cells(row: Row) -> list[str]:
    """A row of a table that has no peer."""
    return [
        row.setting,
        f"{number(row.ours)} {row.unit}",
        f"{number(row.theirs)} {row.unit}",
        f"{row.ours / row.theirs:.0%}",
        "**over its budget**" if row.aim == "missed" else "within",
    ]


def without_empty_columns(rows: list[list[str]]) -> list[list[str]]:
    """The rows, the first of them the header, without the columns that say nothing in any row."""
    columns = [column for column in zip(*rows, strict=True) if set(column[1:]) - {"", NOTHING}]
    return [list(row) for row in zip(*columns, strict=True)]


def count(rows: list[Row]) -> str:
    """How many are ahead and behind, how many targets are met and missed, and what is open."""
    beside = [row.beside for row in rows if row.beside]
    aims = [row.aim for row in rows if row.aim]
    text = []
    if beside:
        found = (beside.count(kind) for kind in ("ahead", "behind", "undecided"))
        text += ["Beside a peer, of {}: {} ahead, {} behind, {} not decided.".format(
            some(len(beside), "row"), *found)]  # fmt: skip
    if aims:
        found = (aims.count(kind) for kind in ("met", "missed", "undecided"))
        text += ["Of {}: {} met, {} missed, {} not decided.".format(
            some(len(aims), "target"), *found)]  # fmt: skip
    return " ".join(text)


def some(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def budget_count(rows: list[Row]) -> str:
    over = sum(1 for row in rows if row.aim == "missed")
    return f"Over the budget: {over} of {some(len(rows), 'row')}."


def answer(report: dict[str, Any]) -> str:
    """How fast it is, in a sentence: medians of the rows, each beside ``transformers``."""
    parts = []
    for what, name, pattern in ANSWER:
        rows = [Row(**row) for row in report["benchmarks"].get(name, {"rows": []})["rows"]]
        found = [
            row.ratio[0]
            for row in rows
            if row.rounds and re.search(pattern, f"{row.setting} | {row.kind} | {row.peer}")
        ]
        if found:
            spread = f", {min(found):.2f} to {max(found):.2f}" if len(found) > 1 else ""
            text = f"**{statistics.median(found):.2f}** {what} ({some(len(found), 'row')}{spread})"
        else:
            text = f"not measured {what}"
        parts.append(text)
    return (
        "How fast is it? Speed over that of ``transformers``, the median of the rows on "
        f"{some(report['threads'], 'thread')} of this machine: {', '.join(parts)}."
    )


ABOVE = (
    "A share above 100 % means that the limit came out too low for this row. The limit is measured "
    "in the same run, a moment before: other programs may have kept the machine busy just then, or "
    "the data of the row came from the processor's cache, which is faster than memory. Such a "
    "share does not tell how far the row is from the limit, and no target counts as met by it."
)


def section(name: str, benchmark: dict[str, Any], folder: Path) -> str:
    """Counts, figure and table of a benchmark."""
    rows = [Row(**row) for row in benchmark["rows"]]
    if not rows:
        return "Not measured in this run.\n"
    if name == "pages":  # which have no peer
        lines = [budget_count(rows), ""]
        listed = [BUDGET, *map(budget_cells, rows)]
    else:
        figure(name, [row for row in rows if row.rounds], folder / f"{name}.svg")
        alt = f"{name}: ratio of ours to the peer for each row of the table below, with its spread"
        alt += ", and the share of the limit" if any(row.share for row in rows) else ""
        lines = [count(rows), "", f".. image:: {folder.name}/{name}.svg",
                 f"   :alt: {alt}. {count(rows)}", "   :class: benchmark", ""]  # fmt: skip
        listed = without_empty_columns([HEADER, *map(cells, rows)])
    lines += rst.table(listed, ":class: benchmark")
    lines += [ABOVE, ""] if any(row.above_limit for row in rows) else []
    lines += [f"Measured on {benchmark['date']}. To repeat it:", ""]
    command = "make docs bench" if name == "pages" else "make bench"
    return "\n".join(
        [*lines, ".. code-block:: console", "", f'   $ {command} BENCH="--only {name}"', ""]
    )


def page(report: dict[str, Any], folder: Path) -> str:
    """The page; a benchmark that it does not show is an error that names it."""
    left = dict(report["benchmarks"])

    def rows(name: str) -> str:
        return section(name, left.pop(name, {"rows": []}), folder)

    found = report["benchmarks"].values()
    days = sorted({report["date"], *(benchmark["date"] for benchmark in found)})
    machine, versions = report["machine"], report["versions"]
    cores = f"{machine['processor']}, {machine['cores']} cores, {report['threads']} used"
    about = [
        ["what", "used here"],
        ["processor", cores],
        ["memory", f"{machine['memory_gb']} GB"],
        ["system", f"{machine['system']}, {machine['architecture']}"],
        *([package, version or "not installed"] for package, version in versions.items()),
    ]
    compared = [
        Row(**row)
        for name, benchmark in report["benchmarks"].items()
        for row in benchmark["rows"]
        if name != "pages"
    ]
    text = rst.render(
        "benchmarks.rst",
        report=report,
        answer=answer(report),
        day=" to ".join(dict.fromkeys([days[0], days[-1]])),
        seconds=f"{sum(benchmark['seconds'] for benchmark in found):,.0f}",
        count=count(compared),
        machine="\n".join(rst.table(about)),
        rows=rows,
        gpu=(gallery.GPU / "measurements.json").is_file(),
        losses="\n".join(rst.table([["optimizer", "loss"], *losses()])) if losses() else "",
    )
    if left:
        raise ValueError(f"docs/_pages/benchmarks.rst says nothing about {sorted(left)}")
    return text


def losses() -> list[list[str]]:
    """Kind, and the mean loss of the seeds that were not used to find the learning rates."""
    found: dict[str, list[float]] = {}
    stored = json.loads(GALORE_LOSS.read_text("utf-8")) if GALORE_LOSS.is_file() else {}
    for key, loss in stored.items():
        if "| seed 0 |" not in key:
            found.setdefault(key.partition(" | ")[0], []).append(loss)
    return [
        [kind, f"{statistics.mean(all_):.4f} ({min(all_):.4f} to {max(all_):.4f})"]
        for kind, all_ in found.items()
    ]


def write(app: Any) -> None:
    folder = Path(app.srcdir) / "generated"
    path = Path(app.srcdir) / "benchmarks.rst"
    rst.write({path: page(measure.read(), folder)})


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", write, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
