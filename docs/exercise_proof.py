"""The page that proves the checks of the exercises, from the stored proofs.

A proof is in the folder of its exercise, the answers of a second person are in
`tests/slow/exercise_proof`. Tests compute both again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import exercises
import gallery
import pages
from exercise_pages import link, source_title, text

from lm_from_scratch.exercises.exercise import Exercise, folder


def stored() -> dict[str, dict[str, Any]]:
    """The stored proofs by exercise, in the order of the learning path."""
    return {
        one.name: json.loads((folder(one.name) / "proof.json").read_text(encoding="utf-8"))
        for one in exercises.written()
    }


def totals(tables: Iterable[dict[str, Any]]) -> dict[str, int]:
    """The sums over all exercises."""
    tables = list(tables)
    named = [wrong["named"] for table in tables for wrong in table["wrong"]]
    return {
        "exercises": len(tables),
        "cases": sum(len(table["cases"]) for table in tables),
        "wrong": len(named),
        "named": named.count("named"),
        "errors": named.count("error"),
        "alike": len(named) - named.count("named") - named.count("error"),
        "right": sum(len(table["right"]) for table in tables),
        "mutants": sum(table["mutants"] for table in tables),
        "killed": sum(table["killed"] for table in tables),
        "explained": sum(len(table["explained"]) for table in tables),
        "wrong runs": sum(len(table["wrong"]) * table["wrong seeds"] for table in tables),
        "right runs": sum(len(table["right"]) * table["right seeds"] for table in tables),
    }


def proof() -> str:
    tables = stored()
    known = {found.name: found for found in exercises.written()}
    n = totals(tables.values())
    right_seeds = sorted({table["right seeds"] for table in tables.values()})
    wrong_seeds = sorted({table["wrong seeds"] for table in tables.values()})
    lines = ["---", "no-search: true", "---", "", "# The proof of the checks", ""]
    lines += [
        "A check that nobody tried to deceive is a draft. So each exercise holds answers that are "
        "known to be wrong and answers that are known to be right, and its checks must tell them "
        "apart, with any numbers.",
        "",
        "| what | number |",
        "|---|---|",
        f"| exercises, with {n['cases']} checks | {n['exercises']} |",
        f"| wrong answers, written by hand | {n['wrong']} |",
        f"| seeds at which each wrong answer is rejected | {spans(wrong_seeds)} of "
        f"{spans(wrong_seeds)} |",
        f"| right answers, the solutions among them | {n['right']} |",
        f"| false rejections, at {spans(right_seeds)} seeds each | 0 of {n['right runs']} |",
        f"| automatic mutants of the solutions | {n['mutants']} |",
        f"| mutants rejected | {n['killed']} |",
        f"| mutants that survive, with a written reason | {n['explained']} |",
        f"| wrong answers that the report names | {n['named']} |",
        f"| wrong answers that raise an error in each check they fail | {n['errors']} |",
        f"| wrong answers without a name: a NaN, or as another one | {n['alike']} |",
        "",
        "`python tests/slow/exercise_proof/prove.py` computes these numbers again and says what "
        "does not hold. The tests compare them with the `proof.json` of each exercise, from which "
        "this page is made.",
        "",
        *second_person(),
        "## Every exercise",
        "",
        '"Alone" counts checks that are the only one to reject some answer. The last column is '
        "the largest share of the points that a wrong answer still gets: points are for teachers, "
        "done means that every check holds.",
        "",
        "| exercise | checks (alone) | wrong | right | mutants killed | points for wrong |",
        "|---|---|--:|--:|---|--:|",
    ]
    for name, table in tables.items():
        alone = sum(case["alone"] > 0 for case in table["cases"])
        share = table["highest share of points for a wrong answer"]
        lines.append(
            f"| {link(known[name])} | {len(table['cases'])} ({alone}) | {len(table['wrong'])} | "
            f"{len(table['right'])} | {table['killed']} of {table['mutants']} | {share:.0%} |"
        )
    lines += [
        "",
        "## Which check rejects what",
        "",
        "**Spoilers.** The wrong answers of an exercise tell what to look for, those of a bug hunt "
        "tell where. A row shows the numbers of the checks that reject an answer (a is 10, b is "
        "11), and a dot for each that accepts it. The check in brackets must reject it at every "
        "seed; the others are those of seed 0. The report names each of these answers when a "
        "student gives it, unless the row says otherwise.",
        "",
    ]
    for name, table in tables.items():
        lines += matrix(known[name], table)
    return "\n".join(lines) + "\n"


def spans(numbers: list[int]) -> str:
    return (
        " to ".join(str(number) for number in sorted({numbers[0], numbers[-1]})) if numbers else "0"
    )


def matrix(found: Exercise, table: dict[str, Any]) -> list[str]:
    """A dropdown with the checks of an exercise and what each wrong answer meets."""
    lines = [f":::::{{dropdown}} {source_title(found)}", ":class-container: proof", ""]
    for number, case in enumerate(table["cases"], start=1):
        worth = "must hold" if case["guard"] else f"{case['points']} of {found.points} points"
        note = f"alone for {case['alone']}" if case["alone"] else f"kept: {case['teaching']}"
        lines.append(
            f"{number}. {text(case['name'])} ({worth}; rejects {case['kills']}, {text(note)})"
        )
    lines += ["", "| wrong answer | rejected by |", "|---|---|"]
    for wrong in table["wrong"]:
        told = {"named": "", "error": "raises an error"}.get(wrong["named"], wrong["named"])
        note = f" *({text(told)})*" if told else ""
        lines.append(f"| {text(wrong['label'])}{note} | `{strip(table, wrong)}` |")
    lines += ["", "Right: " + "; ".join(text(label) for label in table["right"]) + ".", ""]
    if table["explained"]:
        lines += ["Mutants that survive:", ""]
        lines += [f"* `{code.replace('`', chr(39))}`: {text(why)}"
                  for code, why in table["explained"].items()] + [""]  # fmt: skip
    return [*lines, ":::::", ""]


def strip(table: dict[str, Any], wrong: dict[str, Any]) -> str:
    """The checks in a row: the number of each that rejects, a dot for each that accepts."""
    marks = []
    for number in range(1, len(table["cases"]) + 1):
        mark = str(number) if number < 10 else chr(ord("a") + number - 10)
        mark = mark if number in wrong["rejected by"] else "·"
        marks.append(f"[{mark}]" if number == wrong["case"] else mark)
    return "".join(marks)


def second_person() -> list[str]:
    """What the reports said to somebody who had not seen the planted answers."""
    path = gallery.ROOT / "tests/slow/exercise_proof/second_person/diagnosis.json"
    kinds = [
        kind
        for answers in json.loads(path.read_text(encoding="utf-8")).values()
        for kind in answers.values()
    ]
    planted = len(kinds) - kinds.count("unplanted")
    return [
        "## A second person",
        "",
        f"A second person read the texts of the exercises, wrote {len(kinds)} other wrong answers "
        "in code of their own, and only then looked at the planted ones. Answers that passed, and "
        "mistakes that got a wrong name, became new checks and new planted answers. So the numbers "
        "below are those after the repair, and better than what a new class will see.",
        "",
        "| wrong answers of the second person | number |",
        "|---|--:|",
        f"| whose mistake is a planted one | {planted} |",
        f"| named by the report | {kinds.count('named')} ({kinds.count('named') / planted:.0%}) |",
        f"| not named: rounded otherwise, an error, a NaN | {kinds.count('silent')} |",
        f"| named as another mistake | {kinds.count('other')} |",
        f"| whose mistake nobody had planted | {kinds.count('unplanted')} |",
        "",
    ]


def write(app: Any) -> None:
    pages.write_texts({Path(app.srcdir) / "exercises" / "proof.md": proof()})
