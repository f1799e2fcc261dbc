"""Which planted answers show when they run a model: ``tests/exercises/plays.json``.

    python tests/exercises/plays.py [NAME ...]

Every right answer must do the same as the package's own function. Of every wrong one it is recorded
which token, or which step's loss, is the first that differs: 1 for the first. It may also be "not
visible", or what it raised. Each part is stored when it is done, so a run can be stopped; without
names, all are run.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from exercise_bench import right_answers

from lm_from_scratch.exercises import playing
from lm_from_scratch.exercises.card import has_part
from lm_from_scratch.exercises.exercise import exercise, exercises
from lm_from_scratch.exercises.source import answer

PATH = Path(__file__).resolve().parent / "plays.json"
HIDDEN = "not visible"


def parts() -> list[str]:
    return [e.name for e in exercises() if has_part(e.name)]


def measured(name: str) -> dict[str, Any]:
    """What one part shows. Raises ``AssertionError`` for a right answer that does another thing."""
    wanted, place = exercise(name), playing.place_of(name)
    for label, function in right_answers(wanted).items():
        result = playing.alone(name, function)
        assert result.complete, f"{name}, a right answer ({label}): {result}"
    return {
        "loop": place.loop,
        "of": len(playing.with_references(place.loop, (name,)).values),
        "wrong": {w.label: seen(name, answer(wanted, w.answer)) for w in wanted.wrong},
    }


def seen(name: str, function: Any) -> int | str:
    """Where a wrong answer shows."""
    result = playing.alone(name, function)
    if result.error:
        return result.error
    return HIDDEN if result.complete else result.same + 1


def stored() -> dict[str, dict[str, Any]]:
    """By exercise, as far as they were run."""
    known = json.loads(PATH.read_text(encoding="utf-8")) if PATH.is_file() else {}
    return {name: known[name] for name in parts() if name in known}


def store(name: str, result: dict[str, Any]) -> None:
    known = stored() | {name: result}
    text = json.dumps({n: known[n] for n in parts() if n in known}, indent=1, ensure_ascii=False)
    PATH.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all that have a part")
    for name in parser.parse_args().names or parts():
        start = time.perf_counter()
        result = measured(name)
        store(name, result)
        wrong = [*result["wrong"].values()]
        hidden, raised = wrong.count(HIDDEN), sum(isinstance(w, str) for w in wrong)
        print(
            f"{name}: of {len(wrong)} wrong answers {len(wrong) - hidden} show, "
            f"{raised - hidden} of them by an error; {time.perf_counter() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
