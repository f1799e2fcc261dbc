"""The tables and the figure of the teacher's guide, `teaching.md`, from the catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import course
import exercises
import gallery
import pages
from exercise_pages import by_chapter, document, hours, link, lower, text

from lm_from_scratch.exercises.exercise import Exercise

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
    "Tokens, the model, training": ["1_gpt2/1_tokens", "1_gpt2/2_gpt2", "1_gpt2/3_training"],
    "The blocks of Qwen2": ["2_qwen2/1_rms_norm", "2_qwen2/2_rope", "2_qwen2/3_swiglu"],
    "Attention": ["3_attention/1_attention", "3_attention/2_masks"],
    "Caches": ["5_caching/1_why_cache", "5_caching/2_kinds_of_cache", "5_caching/4_padded_batches"],
    "Sampling, and optimizers": [
        "1_gpt2/4_sampling", "7_optimizers/1_adamw", "7_optimizers/2_galore",
    ],
    "Generation, and tensors that are swapped": [
        "6_generation/1_beam_search", "8_quantized_weights/1_swapping_tensors",
        "8_quantized_weights/2_conversions",
    ],
}  # fmt: skip
#: The plans of the guide by their length, each with the highest difficulty that it takes.
PLANS = {6: (SIX_WEEKS, 2), 12: (TWELVE_WEEKS, 3)}


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


def named(found: Exercise) -> str:
    """A link, and the name that commands and files have."""
    return f"{link(found)} (`{found.name}`)"


def plan_table(weeks: dict[str, list[str]], hardest: int = 3) -> str:
    lines = ["| week, and pages to read | in class | at home |", "|---|---|---|"]
    sums, points, taken = [0, 0], 0, plan(weeks, hardest)
    for number, (title, listed) in enumerate(weeks.items()):
        members = taken[number]
        there, home = split(members)
        reading = sum(course.minutes(page) for page in listed)
        minutes = [sum(found.minutes for found in part) for part in (there, home)]
        minutes[1] += reading
        sums = [a + b for a, b in zip(sums, minutes, strict=True)]
        points += sum(found.points for found in members)
        read = ", ".join(f"{{doc}}`{document(page)}`" for page in listed)
        cells = [
            f"**{number + 1}. {title}.** {read}",
            " ".join([f"**{minutes[0]} min.**", ", ".join(map(named, there))]),
            " ".join([f"**{minutes[1]} min,** {reading} of them to read.",
                      ", ".join(map(named, home))]) if home else f"**{reading} min** to read.",
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
        f"pages of chapters 1 to 8 takes {hours(map(course.minutes, pages_read))}.\n"
    )


def graph() -> str:
    """What builds on what, as a figure and as a list."""
    groups = {
        title: [
            course.Node(
                found.name,
                found.name,
                f"exercises/{found.name}.html",
                "hunt" if found.hunt else f"d{found.difficulty}",
            )
            for found in members
        ]
        for title, members in by_chapter().items()
    }
    known = exercises.written()
    label = (
        f"{len(known)} exercises by chapter, with {sum(len(found.after) for found in known)} arcs "
        "from an exercise to one that builds on it. The list below the figure says the same."
    )
    return "\n".join([
        "```{raw} html",
        course.column(groups, {found.name: found.after for found in known}, label),
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


def write(app: Any) -> None:
    texts = {
        "figures": figures(),
        "outcomes": outcomes(),
        "graph": graph(),
        "six_weeks": plan_table(*PLANS[6]),
        "twelve_weeks": plan_table(*PLANS[12]),
    }
    folder = Path(app.srcdir) / "generated"
    pages.write_texts({folder / f"teaching_{name}.md": made for name, made in texts.items()})
