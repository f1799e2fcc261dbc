"""Drawings of chapter 10: which tokens count in training, and rewards of answers."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby

from lm_from_scratch.drawings.canvas import (
    BLUE,
    COLOURS,
    GREEN,
    INK,
    ORANGE,
    RED,
    Canvas,
    Drawing,
    printable,
    tint,
)

LINE = "3px solid currentColor"


def learned_parts(pieces: Sequence[str], parts: Sequence[str], counts: Sequence[bool]) -> Drawing:
    """The pieces of a text, each in the colour of its part, whose names are below. Those that count
    in training are underlined."""
    colours = {name: COLOURS[i % 5] for i, name in enumerate(dict.fromkeys(parts))}
    boxes = [
        _box(printable(piece), tint(colours[part], 0.25), LINE if counted else "none")
        for piece, part, counted in zip(pieces, parts, counts, strict=True)
    ]
    names = [_box(name, tint(colour, 0.25), "none") for name, colour in colours.items()]
    names.append(_box("counts in training", "none", LINE))
    runs = groupby(zip(pieces, parts, counts, strict=True), key=lambda one: one[1:])
    says = " ".join(
        f"[{part}{', counts' if counted else ''}] {''.join(one[0] for one in run)!r}"
        for (part, counted), run in runs
    )
    gap = '<span style="display: inline-block; width: 8px"></span>'
    return Drawing(
        f'<div class="diagram tokens">{"".join(boxes)}'
        f'<div style="margin-top: 8px"><small>{gap.join(names)}</small></div></div>',
        says,
    )


def _box(text: str, colour: str, line: str) -> str:
    return (
        f'<span style="display: inline-block; margin: 0 1px 4px 0; padding: 1px 2px; '
        f"border-radius: 3px; white-space: pre; background: {colour}; border-bottom: {line}"
        f'">{escape(text)}</span>'
    )


def answer_group(
    question: str,
    answers: Sequence[str],
    rewards: Sequence[float],
    advantages: Sequence[float] = (),
    word: str = "right",
) -> Drawing:
    """The ``answers`` to one ``question``, each with its reward: green and ticked where it is above
    0, for which ``word`` is the name. With ``advantages``, a bar for each: to the right it is to
    become more probable, to the left less."""
    row, top, middle = 24, 34, 258
    right = sum(reward > 0 for reward in rewards)
    says = [f"{question}: {right} of {len(answers)} answers are {word}"]
    canvas = Canvas(343, top + row * len(answers) + 4, "")
    canvas.text(8, 14, question, 14, "start", bold=True)
    if len(advantages):
        canvas.text(middle, 14, "advantage", 11, opacity=0.8)
        canvas.line(middle, top - 6, middle, top + row * len(answers), 1, INK, 0.5)
    most = max((abs(a) for a in advantages), default=0) or 1
    for i, (answer, reward) in enumerate(zip(answers, rewards, strict=True)):
        y, good = top + row * i + row / 2 - 4, reward > 0
        colour = GREEN if good else RED
        canvas.box(8, y - 10, 150, 20, colour, 0.25 if good else 0.08, colour)
        canvas.text(16, y, printable(answer), 13, "start")
        canvas.text(148, y, "✓" if good else "✗", 13, "end", bold=True)
        if len(advantages):
            length = 46 * advantages[i] / most
            left = min(middle, middle + length)
            bar = BLUE if length > 0 else ORANGE
            canvas.box(left, y - 6, max(abs(length), 0.5), 12, bar, 0.6, bar, radius=1)
            end, anchor = (middle + length + 5, "start") if length > 0 else (
                middle + length - 5, "end")  # fmt: skip
            canvas.text(end, y, f"{advantages[i]:+.2f}", 11, anchor)
            says.append(f"{answer} {advantages[i]:+.2f}")
        else:
            says.append(answer)
    canvas.says = says[0] + (": " if answers else "") + ", ".join(says[1:])
    return canvas.drawing()


def answer_pair(
    question: str, chosen: str, rejected: str, rewards: Mapping[str, tuple[float, float]]
) -> Drawing:
    """The rewards of two answers to one ``question``, as bars from 0, under each of several names:
    before and after training, for example. The margin is written beside them."""
    row, top, left, right, zero = 74, 36, 104, 290, 200
    most = max((abs(r) for two in rewards.values() for r in two), default=0) or 1
    canvas = Canvas(343, top + row * len(rewards), "")
    canvas.text(8, 14, question, 14, "start", bold=True)
    says = []
    for r, (name, two) in enumerate(rewards.items()):
        y = top + row * r
        canvas.text(8, y + 4, name, 12, "start", opacity=0.8)
        canvas.line(zero, y + 12, zero, y + 62, 1, INK, 0.5)
        answers = ((chosen, GREEN, "✓"), (rejected, RED, "✗"))
        for i, ((text, colour, mark), reward) in enumerate(zip(answers, two, strict=True)):
            at = y + 26 + 24 * i
            canvas.text(left - 6, at, f"{printable(text)} {mark}", 13, "end")
            length = (right - zero - 34) * reward / most
            canvas.box(min(zero, zero + length), at - 8, max(abs(length), 1), 16, colour, 0.5,
                       colour, radius=1)  # fmt: skip
            end, anchor = (zero + length + 5, "start") if reward >= 0 else (
                zero + length - 5, "end")  # fmt: skip
            canvas.text(end, at, f"{reward:+.2f}", 11, anchor)
        canvas.text(337, y + 38, f"margin {two[0] - two[1]:.2f}", 11, "end", bold=True)
        says.append(f"{name}: {chosen} {two[0]:+.2f}, {rejected} {two[1]:+.2f}")
    canvas.says = f"{question}: " + "; ".join(says)
    return canvas.drawing()
