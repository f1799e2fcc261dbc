"""What ``train`` trains after pretraining: answers to questions (``--sft``), the better of two
answers (``--dpo``), and answers that are judged (``--grpo``).

Each is prepared from a file of examples, or from one of the tasks that the package can judge. The
model comes from a folder (``--from``), or is a new one.
"""

import hashlib
import json
import random
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from lm_from_scratch.checkpoint.published import Published, end_tokens
from lm_from_scratch.commands.loading import about
from lm_from_scratch.commands.setups import (
    Setup,
    batches_of,
    model_of,
    refuse_other_text,
    tokenizer_for,
)
from lm_from_scratch.commands.train_options import Dpo, Grpo, Sft, TrainOptions
from lm_from_scratch.generation.sampling import GREEDY, Sampler
from lm_from_scratch.limits import shown
from lm_from_scratch.models.heads import Classifier
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.runs.distributed import Processes
from lm_from_scratch.text import tasks
from lm_from_scratch.text.conversations import Answered
from lm_from_scratch.text.examples import (
    AnswerBatches,
    check_lengths,
    example,
    pair,
    read_rows,
    split_rows,
)
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.pairs import PairBatches, preferred
from lm_from_scratch.training.rollouts import Question, Rollouts, mean_reward

#: So many questions of a task are asked in turn, and so many held-out ones at the end.
ASKED, HELD_OUT = 10_000, 500
#: How these are asked: what is learned shows in answers that are drawn, more than in the likeliest.
SAMPLERS = Sampler(), GREEDY

T = TypeVar("T")
Row = Mapping[str, Any]


def instructions(out: Path, options: TrainOptions, way: Sft, group: Processes) -> Setup:
    """A model that learns answers from a file of examples."""
    tokenizer, model, published = tokenizer_and_model(out, options, group)

    def learned(row: Row) -> Answered:
        one = example(tokenizer, row)
        check_lengths([one], options.steps.block_size)
        return one

    rows = read_rows(way.sft)
    sides = sides_of(way.sft, rows, options, learned)
    make = partial(AnswerBatches, tokenizer=tokenizer)
    batches, held_out = batches_of(way.sft, sides, options, make)
    published = ending_turns(model, tokenizer, published, sides[0])
    refuse_other_text(out, batches.key)
    summary = f"{len(sides[0])} answers to learn from, {len(sides[1])} held out"
    evaluated, ask = list(held_out.each_once()), asking(rows[0])
    return Setup(tokenizer, model, published, batches, evaluated, summary, ask=ask)


def preferences(out: Path, options: TrainOptions, way: Dpo, group: Processes) -> Setup:
    """A model that learns from pairs of answers; its reference is the model of ``--from``."""
    tokenizer, model, published = tokenizer_and_model(out, options, group)

    def learned(row: Row) -> tuple[Answered, Answered]:
        both = pair(tokenizer, row)
        check_lengths(both, options.steps.block_size)
        return both

    rows = read_rows(way.dpo)
    sides = sides_of(way.dpo, rows, options, learned)
    numbers: dict[str, Any] = {"beta": way.beta, "dtype": options.steps.dtype}
    make = partial(PairBatches, tokenizer=tokenizer, model=model, **numbers)
    batches, held_out = batches_of(way.dpo, sides, options, make)
    refuse_other_text(out, batches.key)

    def result(trained: CausalLM) -> str:
        won = preferred(trained, held_out)
        return f"of {len(sides[1])} held-out pairs, {won} are judged as the file judges them"

    summary = f"{len(sides[0])} pairs to learn from, {len(sides[1])} held out"
    evaluated, ask = list(held_out.each_once()), asking(rows[0])
    return Setup(
        tokenizer, model, published, batches, evaluated, summary, batches.loss, result, ask
    )


def rewards(out: Path, options: TrainOptions, way: Grpo, group: Processes) -> Setup:
    """A model that learns from the rewards of its own answers."""
    tokenizer, model, published = tokenizer_and_model(out, options, group)
    asked: list[Question] = []
    held_out: list[Question] = []
    for name in way.grpo:
        if name in tasks.TASKS:
            sides = task_questions(name, tokenizer, options)
            ids = sides[1][-1].ids[len(tokenizer.around[0]) :]
            ask = asking({"prompt": tokenizer.decode(ids)})
        else:
            if not Path(name).exists():
                raise ValueError(
                    f"there is no file {shown(name)}; the tasks are {', '.join(tasks.TASKS)}"
                )
            rows = read_rows(name)
            sides = sides_of(name, rows, options, partial(question_of, tokenizer))
            examples = [example(tokenizer, row) for row in rows]
            published = ending_turns(model, tokenizer, published, examples)
            ask = asking(rows[0])
        asked += sides[0]
        held_out += sides[1]
    prompts = json.dumps([question.ids for question in asked])
    key = hashlib.sha256(f"{tokenizer.backend.to_str()}{[*way.grpo]}{prompts}".encode()).hexdigest()
    batches = Rollouts(
        asked,
        tokenizer,
        model,
        key,
        options.steps.batch_size,
        stop_tokens=end_tokens(model, tokenizer, published),
        seed=options.run.seed,
        dtype=options.steps.dtype,
        group_size=way.group_size,
        kl=way.kl,
        max_new_tokens=way.max_new_tokens,
    )
    refuse_other_text(out, key)
    before = [mean_reward(batches, held_out, sampler) for sampler in SAMPLERS]

    def result(trained: CausalLM) -> str:
        batches.model = trained
        after = [mean_reward(batches, held_out, sampler) for sampler in SAMPLERS]
        return (
            f"mean reward of answers to {len(held_out)} held-out questions, before and after: "
            f"sampled {before[0]:.2f} and {after[0]:.2f}, the likeliest {before[1]:.2f} and "
            f"{after[1]:.2f}"
        )

    summary = f"{len(asked)} questions to learn from, {len(held_out)} held out"
    return Setup(tokenizer, model, published, batches, [], summary, batches.loss, result, ask)


def tokenizer_and_model(
    out: Path, options: TrainOptions, group: Processes
) -> tuple[Tokenizer, CausalLM, Published]:
    """Those of ``--from``, and what is published with them."""
    with group.first_alone():  # it may have to be fetched
        tokenizer = tokenizer_for(out, options, group, [])
        checkpoint = model_of(options, tokenizer, group)
    assert not isinstance(checkpoint.model, Classifier)
    return tokenizer, checkpoint.model, checkpoint.published


def sides_of(
    file: str, rows: Sequence[Row], options: TrainOptions, make: Callable[[Row], T]
) -> tuple[list[T], list[T]]:
    """What the rows of a file become: those to learn from, and those that are held out. Raises
    ``ValueError`` with the number of a row that is wrong, and the row."""
    examples = {}
    for number, row in enumerate(rows, start=1):
        with about(f"{file}, example {number}", f": {shown(row)}"):
            examples[id(row)] = make(row)
    with about(file):
        learn, held_out = split_rows(rows, options.run.held_out)
    return [examples[id(row)] for row in learn], [examples[id(row)] for row in held_out]


def task_questions(
    name: str, tokenizer: Tokenizer, options: TrainOptions
) -> tuple[list[Question], list[Question]]:
    """Questions of a task, of the sizes of its training text: some to learn from, some held out."""
    drawn = tasks.questions(name, random.Random(f"rewards of {name}, {options.run.seed}"))
    sides: tuple[dict[str, None], dict[str, None]] = ({}, {})
    for question in islice(drawn, 30 * ASKED):  # of few different ones, all are found
        held_out = tasks.is_held_out(name, question, options.run.held_out)
        if len(sides[held_out]) < (HELD_OUT if held_out else ASKED):
            sides[held_out][question] = None
        if len(sides[0]) == ASKED and len(sides[1]) == HELD_OUT:
            break
    if not all(sides):
        raise ValueError(
            f"--held-out {options.run.held_out} leaves {len(sides[0])} questions of {name} to "
            f"learn from, and {len(sides[1])} held out"
        )

    def ask(question: str) -> Question:
        ids = tokenizer.start(tasks.prompt(name, question))
        return Question(ids, partial(tasks.TASKS[name].is_right, question))

    return [ask(q) for q in sides[0]], [ask(q) for q in sides[1]]


def question_of(tokenizer: Tokenizer, row: Row) -> Question:
    """The question of an example, and whether an answer is its own, but for spaces around it."""
    example(tokenizer, row)  # refuses what is none
    if isinstance(row.get("messages"), list):
        messages = row["messages"]
    elif isinstance(row["prompt"], list):
        messages = [*row["prompt"], *row["completion"]]
    else:
        return Question(tokenizer.start(row["prompt"]), partial(is_same, row["completion"]))
    *messages, last = messages
    if last["role"] != "assistant" or not isinstance(last.get("content"), str):
        raise ValueError("the last message must be what the assistant says")
    return Question(tokenizer.chat(messages), partial(is_same, last["content"]))


def asking(row: Row) -> str:
    """The options of ``generate`` that ask the question of an example."""
    prompt = row.get("prompt")
    if not isinstance(prompt, str):
        return "--chat"
    if len(prompt) > 200:
        return "--prompt The"
    sign = "=" if prompt.startswith("-") else " "  # as an option of its own it would be refused
    return f"--prompt{sign}{shlex.quote(prompt)}"


def is_same(right: str, text: str) -> bool:
    """Whether a text is the right one, but for spaces around it."""
    return text.strip() == right.strip()


def ending_turns(
    model: CausalLM, tokenizer: Tokenizer, published: Published, answers: Sequence[Answered]
) -> Published:
    """What is published with the model, with the special tokens that end the ``answers`` in its
    ``generation_config.json``, so that texts end there as well."""
    special = {
        token
        for token, added in tokenizer.backend.get_added_tokens_decoder().items()
        if added.special
    }
    last = {[i for i, own in zip(a.ids, a.answer, strict=True) if own][-1] for a in answers}
    ends = end_tokens(model, tokenizer, published)
    if more := sorted((last & special) - {*ends}):
        generation = {**published.generation_config, "eos_token_id": [*ends, *more]}
        return replace(published, generation_config=generation)
    return published
