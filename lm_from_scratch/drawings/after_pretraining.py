"""Drawings of chapter 10: which tokens count in training, and rewards of answers."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from lm_from_scratch.drawings.canvas import WIDTH, Canvas, Drawing
from lm_from_scratch.drawings.colours import BLUE, COLOURS, GREEN, INK, ORANGE, RED, tint
from lm_from_scratch.drawings.labels import printable, span


def learned_parts(pieces: Sequence[str], parts: Sequence[str], counts: Sequence[bool]) -> Drawing:
    """The pieces of a text, each in the colour of its part, whose names are below. Those that count
    in training are underlined."""

    def box(text: str, colour: str, counted: bool = False) -> str:
        return span(
            text, "display: inline-block; margin: 0 1px 4px 0; padding: 1px 2px; border-radius: "
            f"3px; white-space: pre; background: {colour}; border-bottom: "
            + ("3px solid currentColor" if counted else "none"),
        )  # fmt: skip

    tints = {name: tint(COLOURS[i % 5], 0.25) for i, name in enumerate(dict.fromkeys(parts))}
    boxes = [
        box(printable(piece), tints[part], counted)
        for piece, part, counted in zip(pieces, parts, counts, strict=True)
    ]
    names = [*map(box, tints, tints.values()), box("counts in training", "none", True)]
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


def answer_group(
    question: str, answers: Sequence[str], rewards: Sequence[float],
    advantages: Sequence[float] = (), word: str = "right",
) -> Drawing:  # fmt: skip
    """The ``answers`` to one ``question``, each with its reward: green and ticked where it is above
    0, for which ``word`` is the name. With ``advantages``, a bar for each: to the right it is to
    become more probable, to the left less."""
    row, top, middle = 24, 34, 258
    right = sum(reward > 0 for reward in rewards)
    canvas, says = Canvas(WIDTH, top + row * len(answers) + 4), []
    canvas.text(8, 14, question, 14, "start", bold=True)
    if len(advantages):
        canvas.note(middle, 14, "advantage", "middle")
        canvas.line(middle, top - 6, middle, top + row * len(answers), 1, INK, 0.5)
    most = max((abs(a) for a in advantages), default=0) or 1
    for i, (answer, reward) in enumerate(zip(answers, rewards, strict=True)):
        y, good = top + row * i + row / 2 - 4, reward > 0
        colour = GREEN if good else RED
        canvas.box(8, y - 10, 150, 20, colour, 0.25 if good else 0.08, colour)
        canvas.text(16, y, printable(answer), 13, "start")
        canvas.text(148, y, "✓" if good else "✗", 13, "end", bold=True)
        says.append(answer)
        if len(advantages):
            number = f"{advantages[i]:+.2f}"
            _bar(canvas, middle, y, 46 * advantages[i] / most, 12, number)
            says[-1] += f" {number}"
    summary = f"{question}: {right} of {len(answers)} answers are {word}"
    return canvas.drawing(summary + (": " if answers else "") + ", ".join(says))


def _bar(
    canvas: Canvas, zero: float, y: float, length: float, high: float, number: str, colour: str = ""
) -> None:
    """A bar from ``zero`` to the right or, below 0, to the left, and its number beyond it."""
    colour = colour or (BLUE if length > 0 else ORANGE)
    left, width = min(zero, zero + length), max(abs(length), 1)
    canvas.box(left, y - high / 2, width, high, colour, 0.55, colour, radius=1)
    away, anchor = (-5, "end") if length < 0 else (5, "start")
    canvas.text(zero + length + away, y, number, 11, anchor)


def answer_pair(
    question: str, chosen: str, rejected: str, rewards: Mapping[str, tuple[float, float]]
) -> Drawing:
    """The rewards of two answers to one ``question``, as bars from 0, under each of several names:
    before and after training, for example. The margin is written beside them."""
    row, top, zero = 74, 36, 200
    most = max((abs(r) for two in rewards.values() for r in two), default=0) or 1
    canvas, says = Canvas(WIDTH, top + row * len(rewards)), []
    canvas.text(8, 14, question, 14, "start", bold=True)
    for r, (name, two) in enumerate(rewards.items()):
        y = top + row * r
        canvas.note(8, y + 4, name, size=12)
        canvas.line(zero, y + 12, zero, y + 62, 1, INK, 0.5)
        answers = (chosen, GREEN, "✓"), (rejected, RED, "✗")
        for i, ((text, colour, mark), reward) in enumerate(zip(answers, two, strict=True)):
            at = y + 26 + 24 * i
            canvas.text(98, at, f"{printable(text)} {mark}", 13, "end")
            _bar(canvas, zero, at, 56 * reward / most, 16, f"{reward:+.2f}", colour)
        canvas.text(337, y + 38, f"margin {two[0] - two[1]:.2f}", 11, "end", bold=True)
        says.append(f"{name}: {chosen} {two[0]:+.2f}, {rejected} {two[1]:+.2f}")
    return canvas.drawing(f"{question}: " + "; ".join(says))
