"""What the record of a shipped model says, for people: the README of its folder."""

from typing import Any

from lm_from_scratch.pretrained.coherence import SIZES
from lm_from_scratch.text.tasks import TASKS


def readme(record: dict[str, Any]) -> str:
    """The text of the file."""
    rows = [
        f"| {name} | {value.get('nats_per_token', '')} | {value['bits_per_byte']} |"
        for name, value in [
            *((f"this model, {name}", v) for name, v in record["held_out"].items()),
            *record["baselines"].items(),
        ]
    ]
    kind = {"gpt2": "GPT-2", "qwen2": "Qwen2"}[record["arguments"]["architecture"]]
    every = stride(record["steps"])
    often = "every step" if every == 1 else f"one step in {every}"
    about, licence = ABOUT.get(record["name"], ABOUT["docs"])
    measured = answers_of(record.get("exact_match", {})) + stories_of(record.get("worlds", {}))
    return f"""# {record["name"]}

A {kind} of {record["parameters"]} parameters, {about.format_map(record)}
Made with torch {record["torch"]}, seed {record["seed"]}, on one CPU core, by

    {record["command"]}
    python -m lm_from_scratch.pretrained.make RUN {record["name"]}

in {record["steps"]} steps and {record["tokens_trained_on"]} tokens. `record.json` holds every
argument, `log.jsonl` {often}. The weights are stored in float16.

{steps_of(record)}{measured}Loss on held-out documents (none of their longer paragraphs \
stands in the training text), and what
simpler means reach on the same text:

| | nats per token | bits per byte |
|---|---|---|
{chr(10).join(rows)}

{licence}
"""


#: What a model was trained on, and who wrote that.
ABOUT = {
    "docs": (
        """trained on the language reference and the docstrings
of Python {python}'s standard library. It is here so that pages can show a model that has
learned something. It knows the tone of documentation, not its content: do not believe what it says.
""",
        "The text it learned from is (c) Python Software Foundation, under the PSF licence.",
    ),
    "tasks": (
        """trained on questions that a program can check: sums,
letters to sort and to reverse, brackets to close, the largest of several numbers, and numbers from
which a target is to be made. It is here so that pages can teach it more, and see what it learns.

    python -m lm_from_scratch generate --model tasks --prompt "add:47+38=" --temperature 0
""",
        "The text is drawn by `lm_from_scratch/text/tasks.py`.",
    ),
    "worlds": (
        """trained on stories of people, rooms, boxes and things, in
English and Chinese. It tells such stories, and answers questions about them. What it knows is this
one small world.

    python -m lm_from_scratch generate --model worlds --prompt "Mia is in the hall."
""",
        "The stories that it learned from are drawn by `lm_from_scratch/text/plots.py`.",
    ),
}


def stride(n_steps: int) -> int:
    """Every how many steps of a run have a line in the log that ships."""
    return -(-n_steps // 4000)


def steps_of(record: dict[str, Any]) -> str:
    """What earlier steps are stored; empty for a model without any."""
    if not (steps := record.get("earlier_steps")):
        return ""
    listed = ", ".join(map(str, steps))
    return f"""The folders `step-...` hold the weights after {listed} steps of the
same run, with 4 bits for the matrices of an MLP and 8 for all others:

    load_shipped("{record["name"]}", step={steps[-1]})

A run keeps its last two checkpoints, and each into which you have put a file. To make these folders
again, add `--checkpoint-every 50` to the first command, which changes no weight; put an empty file
into each of these checkpoints while the run has it; then give the second command.

"""


def answers_of(exact_match: dict[str, Any]) -> str:
    """The answers that are right; empty for a model of other text."""
    if not exact_match:
        return ""
    lines = ["Answers that are right, of questions that do not stand in the training text:", ""]
    lines += ["| | questions | greedy | sampled |", "|---|---|---|---|"]
    for name, result in exact_match.items():
        share = result["held_out"]
        lines += [
            f"| {name} | {share['questions']} | {share['greedy']:.1%} | {share['sampled']:.1%} |"
        ]
    lines += ["", "Greedy, by size, of 200 questions or as many as there are;"]
    lines += ["sizes in brackets do not occur in the training text:", ""]
    for name, result in exact_match.items():
        seen = TASKS[name].sizes
        shares = (
            f"{size if int(size) in seen else f'({size})'} {one['greedy']:.1%}"
            for size, one in result["sizes"].items()
        )
        lines += [f"* {name}: {', '.join(shares)}"]
    return "\n".join(lines) + "\n\n"


def stories_of(languages: dict[str, Any]) -> str:
    """Whether stories hold together; empty for a model of other text."""
    if not languages:
        return ""
    results = [*languages.values()]
    rows = {
        f"answers right: {size}": [f["questions"][size]["share"] for f in results] for size in SIZES
    }
    rows |= {
        w: [f["told"][w]["share"] for f in results] for w in results[0]["told"] if w != "stories"
    }
    lines = ["On plots that it was not trained on, both languages of which are new to it:", ""]
    lines += [f"| | {' | '.join(languages)} |", f"|---|{'---|' * len(results)}"]
    for what, shares in rows.items():
        lines += [f"| {what} | {' | '.join(f'{one:.1%}' for one in shares)} |"]
    return "\n".join(lines) + AFTER_STORIES


AFTER_STORIES = """

The first lines are of greedy answers to the generator's questions, in worlds as large as those it
was trained on and larger; the others are of stories that it tells by itself, at temperature 1.

"""
