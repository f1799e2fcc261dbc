"""The page of the benchmarks, from the stored results. Nothing is measured while the site is built.

`make bench` writes `docs/benchmarks.json`; here every row of it gets a place in a table and in a
figure, those behind their peer too, in the order in which they were measured.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gallery
import pages

sys.path.append(str(gallery.ROOT / "tests"))
import measure
from measure import Row

GALORE_LOSS = gallery.DOCS / "galore_loss.json"
#: Title, and what is measured, beside whom, and why it comes out as it does.
ABOUT: dict[str, tuple[str, str]] = {
    "training": (
        "Training",
        "A whole step, from tokens to updated weights, of GPT-2 beside that of ``transformers``: "
        "the same sizes, batches, fused AdamW and clipping. Most of a step is matrix products, and "
        "both call the same ones; ``ours, oneDNN`` sends the float32 products to torch's other "
        "library. bfloat16 and ``torch.compile`` are switches that ``transformers`` has, too, so "
        "they are compared at equal switches, and once with ``transformers`` as it is shipped.",
    ),
    "qwen2": (
        "Qwen2, forward and backward",
        "One pass forward and back through Qwen2 and its loss, beside ``transformers``, in time "
        "and in memory. Memory is what a process of its own grows by, weights and gradients not "
        "counted. The large vocabulary makes the logits the largest tensor; the chunked loss "
        "never holds them.",
    ),
    "loss": (
        "Loss at the vocabulary of GPT-2",
        "From hidden states to gradients, with the head. The chunked loss takes the vocabulary in "
        "pieces. It computes the logits a second time on the way back, four products instead of "
        "three, and holds none of them.",
    ),
    "layers": (
        "RMSNorm and RoPE",
        "Both do little arithmetic for each number they read, so memory bounds them. In plain "
        "PyTorch each operation reads and writes everything once; a compiler fuses them into one "
        "pass. RoPE turns queries and keys.",
    ),
    "decoding": (
        "Decoding",
        "Greedy decoding from a prompt of 64 tokens, beside ``generate`` of ``transformers`` with "
        "the same weights. Each token reads every weight once, so memory bounds it; "
        "``ours, packed`` lays the weights out as oneDNN reads them fastest. A run includes its "
        "prompt, which the limit does not.",
    ),
    "context": (
        "Cost of a token as the context grows",
        "One token of GPT-2 small after so many others, in float32. Without a cache everything is "
        "computed again; the cache of ``transformers`` copies all it holds for every token; ours "
        "doubles its buffers, or has them from the start (preallocated). The last rows divide the "
        "time of a late token by that of an early one.",
    ),
    "quantize": (
        "Decoding with quantised weights",
        "The same with weights of 8 and 4 bits. A smaller weight has a lower limit, and each row "
        "is measured against its own. The weights are random: what rounding costs a trained model "
        "is on the page :doc:`/auto_tutorials/8_quantized_weights/5_int8_int4`.",
    ),
    "galore": (
        "GaLore",
        "The optimizer beside two published implementations, at the 60M configuration of the "
        "paper: a step between two bases, new bases, and the state. Beside torch's fused AdamW "
        "GaLore is slower: it is there to save memory.",
    ),
    "pages": (
        "This site",
        "Seconds that the pages took in the last complete build of this site, beside what a page "
        "and the whole may take. There is no other implementation to compare with.",
    ),
}
#: Why a row is behind its peer or short of its target: benchmark, pattern of the row, reason.
REASONS: list[tuple[str, str, str]] = [
    (
        "training",
        r"\| ours \|",
        "MKL's float32 products are most of the step, in both; through oneDNN they take less time.",
    ),
    (
        "training",
        r"compiled \| transformers \|",
        "The target was set on a processor whose float32 products are further from bfloat16's.",
    ),
    ("qwen2", "chunked.*ms$", "The logits are computed twice, so that they need not be held."),
    (
        "qwen2",
        r"\| ours \|.*ms$",
        "The products, most of the step, are the same in both.",
    ),
    (
        "loss",
        r"chunked.*ms$",
        "Backward computes the logits again: four products, where theirs has three.",
    ),
    (
        "layers",
        r"RoPE.* ours",
        "Ours turns bfloat16 in float32 and rounds once; theirs rounds the cosines first.",
    ),
    (
        "decoding",
        r"10 M.*packed",
        "A packed product costs some microseconds more, whatever its size: it suits larger models.",
    ),
    ("decoding", r"10 M", "Most of a step of this size is one library's products, in both."),
    (
        "decoding",
        r"float32.* ours \|",
        "Both wait for MKL's products of a matrix and few rows; packed weights do not.",
    ),
    (
        "decoding",
        r"batch 1.*packed",
        "Of the limit, the prompt and the calls of small operators take a part.",
    ),
    (
        "decoding",
        r"bfloat16, batch 8",
        "Beside the products, attention over the cache and small operators remain.",
    ),
    (
        "quantize",
        "int[48]",
        "torch's kernels are bound by decoding the codes, not by memory; the target came from a "
        "machine with less than half of this bandwidth.",
    ),
    ("quantize", "packed", "Beside the products, attention and small operators remain."),
    (
        "context",
        "over token",
        "Attention reads all keys and values, so a token costs more the more there are.",
    ),
    ("context", "batch 8", "The gap is as wide as theirs must copy: the weights cost both alike."),
    ("galore", "AdamW", "GaLore projects each gradient, and back: it saves memory, not time."),
    (
        "galore",
        r"subspace, oneDNN \| galore",
        "With a basis by iteration, the QR decomposition is half of the time.",
    ),
    (
        "galore",
        r"(gram|subspace) \| galore",
        "MKL's products bound the projected part; through oneDNN they take less time.",
    ),
    ("galore", r"svd \|", "The same decomposition by the same library."),
    ("pages", "", "A page that takes longer than its budget is to be shortened."),
]
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


def reason(name: str, row: Row) -> str:
    """Why a row is behind or short: the first that fits."""
    text = f"{row.setting} | {row.kind} | {row.peer} | {row.unit}"
    for benchmark, pattern, why in REASONS:
        if benchmark == name and re.search(pattern, text):
            return why
    return "The reason is not known."


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


def figure_of_budget(rows: list[Row], path: Path) -> None:
    """How much of its budget each row used."""
    import matplotlib
    import matplotlib.pyplot as plt

    from lm_from_scratch.instruments import plot

    with matplotlib.rc_context({**plot.STYLE, "font.size": 8.5, "svg.hashsalt": "budget"}):
        made, ax = plt.subplots(figsize=(4.0, 0.7 + 0.38 * len(rows)))
        for y, row in enumerate(rows):
            colour = plot.COLOURS[3] if row.aim == "missed" else plot.COLOURS[0]
            ax.barh([y], [row.ours / row.theirs], height=0.3, color=colour)
            ax.annotate(f" {row.setting}", (0, y - 0.36), fontsize=7, va="center")
        ax.axvline(1, color=plot.COLOURS[7], linewidth=2)
        ax.set(ylim=(len(rows) - 0.5, -0.75), yticks=[], xlabel="of the budget")
        ax.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
        ax.grid(axis="y", visible=False)
        save(made, path)


TICKS = (0.1, 0.2, 0.33, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10, 20, 50, 100, 200, 500)
WIDE_TICKS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


# ------------------------------------------------------------------------------------ the page


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def cells(row: Row) -> list[str]:
    """A row of the table."""
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
            if re.search(pattern, f"{row.setting} | {row.kind} | {row.peer}")
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


def stored(report: dict[str, Any]) -> str:
    """What kind of run the page shows."""
    found = report["benchmarks"].values()
    days = sorted({report["date"], *(benchmark["date"] for benchmark in found)})
    seconds = sum(benchmark["seconds"] for benchmark in found)
    day = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    text = f"Stored here: a **{report['size']} run** of {day}, "
    text += f"{seconds:,.0f} seconds in all."
    if report["size"] != "full":
        text += " Few rounds, and not every model: a full run decides more."
    return text


def reasons(name: str, rows: list[Row]) -> list[str]:
    """The rows that are behind or short, by their reason."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.beside == "behind" or row.aim == "missed":
            unit = f" ({row.unit})" if row.unit == "MB" else ""
            text = row.setting if name == "pages" else f"{row.kind} / {row.peer}{unit}"
            listed = found.setdefault(reason(name, row), [])
            listed += [text] if text not in listed else []
    title = "over their budget" if name == "pages" else "behind, or short of their target"
    lines = [f"Why some are {title}:", ""] if found else []
    lines += [f"* {'; '.join(listed)}: {why}" for why, listed in found.items()]
    return [*lines, ""]


ABOVE = (
    "A share above 100 % means that the limit came out too low for this row. The limit is measured "
    "in the same run, a moment before: other programs may have kept the machine busy just then, or "
    "the data of the row came from the processor's cache, which is faster than memory. Such a "
    "share does not tell how far the row is from the limit, and no target counts as met by it."
)


def section(name: str, report: dict[str, Any], folder: Path) -> list[str]:
    title, text = ABOUT[name]
    lines = [title, "-" * len(title), "", text, ""]
    benchmark = report["benchmarks"].get(name, {"rows": []})
    rows = [Row(**row) for row in benchmark["rows"]]
    if not rows:
        return [*lines, "Not measured in this run.", ""]
    shown = rows[:12] if name == "pages" else rows
    if name == "pages":
        figure_of_budget(shown, folder / f"{name}.svg")
        counted, alt = budget_count(rows), f"{title}: share of its budget that each row used"
        listed = [BUDGET, *map(budget_cells, rows)]
    else:
        figure(name, shown, folder / f"{name}.svg")
        counted = count(rows)
        alt = f"{title}: ratio of ours to the peer for each row of the table below, with its spread"
        alt += ", and the share of the limit" if any(row.share for row in rows) else ""
        listed = without_empty_columns([HEADER, *map(cells, rows)])
    lines += [counted, "", f".. image:: {folder.name}/{name}.svg", f"   :alt: {alt}. {counted}",
              "   :class: benchmark", ""]  # fmt: skip
    if len(shown) < len(rows):
        lines += ["The figure shows those that take longest, the table all.", ""]
    lines += pages.table(listed, ":class: benchmark")
    lines += [ABOVE, ""] if any(row.above_limit for row in rows) else []
    lines += reasons(name, rows)
    lines += [f"Measured on {benchmark['date']}. To repeat it:", ""]
    command = "make docs bench" if name == "pages" else "make bench"
    lines += [".. code-block:: console", "", f'   $ {command} BENCH="--only {name}"', ""]
    return lines


def page(report: dict[str, Any], folder: Path) -> str:
    """The page; a benchmark that it does not know is an error that names it."""
    if unknown := set(report["benchmarks"]) - set(ABOUT):
        raise ValueError(f"docs/benchmarks.py says nothing about {sorted(unknown)}")
    machine, versions = report["machine"], report["versions"]
    rows = [
        Row(**row)
        for name, found in report["benchmarks"].items()
        for row in found["rows"]
        if name != "pages"  # which have no peer
    ]
    lines = [
        ".. meta::",
        "   :description: How fast the package is, beside other libraries and beside the limits of "
        "a machine", "",
        "Benchmarks", "==========", "", answer(report), "", stored(report), "",
        "How fast this package is, beside the implementations that people use, and beside what the "
        "machine could do. Every comparison was made in one run: ours and the peer take turns, a "
        "ratio compares neighbours, and the table gives the median of the rounds with the smallest "
        "and the largest. A ratio above 1 means that ours is better: faster, or smaller.", "",
        "Absolute times do not carry over to another machine; ratios in one run and shares of a "
        "limit do so better. The limit is measured in the same rounds: a large matrix product "
        "bounds training, reading memory bounds decoding.", "",
        f"{count(rows)} A verdict needs every round: where the range from the smallest to the "
        "largest crosses 1, or the target, it is *not decided*. (A row of one round has no range: "
        "its value decides.) Targets come from prototypes on "
        "another machine. Rows stand in the order in which they were measured.", "",
        "In the figures a blue circle is ahead of the peer, and meets its target if it has one. An "
        "orange square is short of its target and not behind. A vermilion triangle is behind the "
        "peer. A grey diamond is not decided. "
        "The grey line is the peer, a black bar the target, and a line through a mark is the "
        "spread.", "",
        "The machine", "-----------", "",
    ]  # fmt: skip
    about = [
        [
            "processor",
            f"{machine['processor']}, {machine['cores']} cores, {report['threads']} used",
        ],
        ["memory", f"{machine['memory_gb']} GB"],
        ["system", f"{machine['system']}, {machine['architecture']}"],
        *([package, version or "not installed"] for package, version in versions.items()),
    ]
    lines += pages.table([["what", "used here"], *about])
    lines += [
        "``make bench`` measures everything again and stores it in ``docs/benchmarks.json``, from "
        "which this page is made. With ``BENCH=--quick`` it takes fewer rounds and models and "
        "writes to ``build/bench/quick.json``, which this page does not read"
        + ("; the run shown here was stored with ``--out``. " if report["size"] != "full" else ". ")
        + "A stopped run goes on with ``BENCH=--resume``. The two peers of "
        "GaLore are installed into ``build/bench/peers`` by ``pip install --no-deps``: "
        "galore-torch asks for a library of CUDA that these rows do not need.", "",
    ]  # fmt: skip
    for name in ABOUT:
        lines += section(name, report, folder)
    return "\n".join([*lines, *by_hand()]) + "\n"


def by_hand() -> list[str]:
    """What ``make bench`` does not measure: results that are stored, and what nobody measured."""
    title = "Measured by hand, and not measured"
    lines = [title, "-" * len(title), ""]
    lines += ["**Kernels on a GPU** are measured by ``make gpu``. " + (
        "Results are on the :doc:`page of the chapter </gpu/index>`."
        if measure.ROOT.joinpath("tutorials", "gpu", "measurements.json").is_file()
        else "No GPU has measured them yet."
    ), ""]  # fmt: skip
    lines += ["**What GaLore learns** beside AdamW takes an hour: ``python "
              "tests/benchmarks/bench_galore_loss.py``. "]  # fmt: skip
    if GALORE_LOSS.is_file():
        lines[-1] += "Held-out loss in nats per token, mean and range of its seeds:"
        lines += ["", *pages.table([["optimizer", "loss"], *losses()])]
    else:
        lines[-1] += "Its result is not stored here."
    lines += [
        "",
        "**Not measured**: nanoGPT and LLMs-from-scratch, which are no packages of the tests; more "
        "than one thread; other processors; other systems than the one above; peers of other "
        "versions.", "",
    ]  # fmt: skip
    return lines


def losses() -> list[list[str]]:
    """Kind, and the mean loss of the seeds that were not used to find the learning rates."""
    found: dict[str, list[float]] = {}
    for key, loss in json.loads(GALORE_LOSS.read_text(encoding="utf-8")).items():
        if "| seed 0 |" not in key:
            found.setdefault(key.partition(" | ")[0], []).append(loss)
    return [
        [kind, f"{statistics.mean(all_):.4f} ({min(all_):.4f} to {max(all_):.4f})"]
        for kind, all_ in found.items()
    ]


def write(app: Any) -> None:
    folder = Path(app.srcdir) / "generated"
    path = Path(app.srcdir) / "benchmarks.rst"
    pages.write_texts({path: page(measure.read(), folder)})


# --------------------------------------------------------------------- how long a build takes


def begin(app: Any, config: Any) -> None:
    app.began = time.monotonic()


def finish(app: Any, exception: Exception | None) -> None:
    """Store the seconds of a build for the next benchmark."""
    if exception is None and app.builder.format == "html":
        seconds = {"seconds": round(time.monotonic() - app.began, 1)}
        Path(app.outdir).with_name("seconds.json").write_text(json.dumps(seconds) + "\n")
