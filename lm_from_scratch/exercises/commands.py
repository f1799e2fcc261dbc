"""The commands around an exercise: list, next, start, hint, solution. They run without torch."""

import shlex
from itertools import groupby
from pathlib import Path
from typing import Any

from lm_from_scratch.exercises import progress
from lm_from_scratch.exercises.card import Card, card, course, following, waiting
from lm_from_scratch.exercises.options import (
    HintOptions,
    NoOptions,
    SolutionOptions,
    StartOptions,
)
from lm_from_scratch.exercises.source import RULES, plain_title, rules, script, solution
from lm_from_scratch.program import PROGRAM


def hint_command(options: HintOptions) -> int:
    """The next hint; each request shows one more."""
    wanted = card(options.name)
    hints = wanted.hints
    seen = int(progress.number(progress.load().get(wanted.name, {}).get("hints")))
    seen = len(hints) if options.all else min(max(seen, 0) + 1, len(hints))
    everything = options.all
    if trouble := progress.update(wanted.name, hints=seen):  # this would be the first for ever
        print(f"{trouble}: here are all hints.")
        everything, seen = True, len(hints)
    for number in range(1 if everything else seen, seen + 1):
        print(f"hint {number} of {len(hints)}: {hints[number - 1]}")
    if seen == len(hints):
        print(f"This was the last one. Then: {PROGRAM} solution {wanted.name}")
    return 0


def solution_command(options: SolutionOptions) -> int:
    """The solution: after the exercise is solved, or when it is asked for again."""
    wanted = card(options.name)
    known = progress.load().get(wanted.name, {})
    first = not known.get("passed") and not progress.number(known.get("asked"))
    if first and not progress.update(wanted.name, asked=1):
        left = len(wanted.hints) - int(progress.number(known.get("hints")))
        hints = f"Hints left: {left} ({PROGRAM} hint {wanted.name}). "
        print(f"{wanted.name} is not solved yet. {hints if left > 0 else ''}Ask again to see it.")
        return 1
    print(solution(wanted.name), end="")
    return 0


def list_command(options: NoOptions) -> int:
    """All exercises with what is done."""
    known, path = progress.load(), course()
    for chapter, cards in groupby(path, lambda card: card.page.partition("/")[0]):
        print(chapter)
        print("\n".join(row(card, known) for card in cards))
    if drafts := waiting():
        print("drafts, whose checks are not proved and may be wrong")
        print("\n".join(row(card, known) for card in drafts))
    done = sum(bool(known.get(card.name, {}).get("passed")) for card in path)
    place = f"Kept in {progress.path()}" if progress.path().is_file() else "Nothing is kept yet"
    print(f"{done} of {len(path)} done; * is easy, *** is hard. {place}.")
    return 0


def row(card: Card, known: dict[str, dict[str, Any]]) -> str:
    """An exercise in a line, with what is done of it."""
    entry = known.get(card.name, {})
    points = progress.number(entry.get("points"))
    mark = "done" if entry.get("passed") else f"{points:g}/{points_of(card)}" if points else "-"
    stars = "*" * card.difficulty
    return (
        f"  {mark:>5}  {card.name:<24} {stars:<3} {card.minutes:>3} min  {plain_title(card.name)}"
    )


def points_of(card: Card) -> int:
    """The points that there are, which its cases say; with them comes torch."""
    from lm_from_scratch.exercises.exercise import exercise

    return exercise(card.name).points


def next_command(options: NoOptions) -> int:
    """What to do now."""
    card = following()
    if card is None:
        print("All exercises are done.")
        return 0
    title = plain_title(card.name)
    print(f"{card.name}: {title} ({card.minutes} minutes, after the page {card.page})")
    print(f"{PROGRAM} start {card.name}")
    return 0


def start_command(options: StartOptions) -> int:
    """Write the exercise as a script or a notebook to work in, and the rules for AI helpers beside
    it.

    Raises ``ValueError`` for a file that is there already.
    """
    wanted = card(options.name)
    path = Path(options.file or f"{wanted.name}.py")
    texts = {".py": script, ".ipynb": notebook_text}
    if path.suffix not in texts:
        raise ValueError(f"{path} must end in .py or .ipynb")
    if path.exists():
        raise ValueError(f"{path} exists already; remove it, or name another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    progress.write_text(path, texts[path.suffix](wanted.name))
    named = shlex.quote(str(path))
    print(f"Write in {path}, then: {PROGRAM} check {wanted.name} {named}")
    helper = path.with_name(RULES)
    if not helper.exists():
        progress.write_text(helper, rules())
        print(f"{helper} says to AI helpers: explain, and do not write the answer")
    return 0


def notebook_text(name: str) -> str:
    """An exercise as a notebook, which says the points: with them comes torch."""
    from lm_from_scratch.exercises.exercise import exercise
    from lm_from_scratch.exercises.notebook import dump, notebook

    return dump(notebook(exercise(name)))
