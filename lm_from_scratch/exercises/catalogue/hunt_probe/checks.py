"""Bug hunt: the state is read where the answer has been read, and the probe is always right."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer, integers, normal
from lm_from_scratch.inside.probe import Probe

PAD, ASK = 0, 1
Model = Callable[[Tensor], Tensor]
Stories = list[list[int]]


def reference(model: Model, stories: Stories) -> tuple[Tensor, Tensor]:
    """What is meant: for each question the model reads the story up to it, and no further."""
    asked = [(s, i) for s in stories for i, token in enumerate(s) if token == ASK]
    states = [model(torch.tensor([s[: i + 1]]))[0, -1] for s, i in asked]
    return torch.stack(states), torch.tensor([s[i + 1] for s, i in asked])


# ------------------------------------------------------------------------------------- arguments


def reader(g: Generator, C: int = 12, fades: float = 0.6) -> Model:
    """A model of random weights: each token's own vector, and what came before it, which fades."""
    waves = normal(g, C, scale=3.0, dtype=torch.float64)
    mix = normal(g, C, C, dtype=torch.float64)

    def model(ids: Tensor) -> Tensor:
        x = torch.sin(ids[..., None] * waves + 1)
        states = [x[:, 0]]
        for t in range(1, ids.shape[1]):
            states.append(x[:, t] + fades * (states[-1] @ mix).tanh())
        return torch.stack(states, dim=1)

    return model


def told(g: Generator, questions: int, words: int = 60_000) -> list[int]:
    """A story: some words, a question, its answer, and so on."""
    story = integers(g, 20, words, integer(g, 2, 5)).tolist()
    for _ in range(questions):
        said = integers(g, 20, words, integer(g, 1, 4)).tolist()
        story += [*said, ASK, integer(g, 20, words)]
    return story + integers(g, 20, words, integer(g, 0, 3)).tolist()


def one(g: Generator) -> Call:
    return call(reader(g), [[*told(g, 0), ASK, integer(g, 20, 60_000)]])


def several(g: Generator) -> Call:
    """Of other lengths; one asks twice, one three times, one never."""
    return call(reader(g), [told(g, 2), told(g, 1), told(g, 0), told(g, 3)])


def short(g: Generator) -> Call:
    """A story that ends with its answer, beside a long one."""
    return call(reader(g), [[*told(g, 0), ASK, integer(g, 20, 60_000)], told(g, 3), told(g, 1)])


def twice(g: Generator) -> Call:
    """One story, and its beginning is the same as that of another."""
    story = told(g, 2)
    return call(reader(g), [story, list(story), [*story, *told(g, 1)]])


def bare(g: Generator) -> Call:
    """A question without a word in front of it, and one right after an answer."""
    a, b, c = integers(g, 20, 60_000, 3).tolist()
    return call(reader(g), [[ASK, a], [ASK, b, ASK, c, 7]])


def guessing(g: Generator) -> Call:
    """240 stories of words that say nothing: five answers, drawn by chance."""
    stories = [[*integers(g, 20, 300, 4).tolist(), ASK, integer(g, 2, 7)] for _ in range(240)]
    return call(reader(g), stories)


def answers_only(function: Any, model: Model, stories: Stories) -> dict[str, Tensor]:
    return {"answers": function(model, stories)[1]}


def probed(function: Any, model: Model, stories: Stories) -> dict[str, float]:
    """What a probe of the nearest mean scores on the second half; with a rest that is no class."""
    x, y = function(model, stories)
    half = len(x) // 2
    classes, index = y.unique(return_inverse=True)
    means = [x[:half][index[:half] == c].mean(0) for c in range(len(classes))]
    centres = torch.stack(means).nan_to_num(1e6)
    none, ones = torch.zeros_like(x[0]), torch.ones_like(x[0])
    probe = Probe(none, ones, centres.T, -centres.square().sum(-1) / 2)
    return {"accuracy of a probe": probe.accuracy(x[half:], index[half:])}


def what_was_read(function: Any, model: Model, stories: Stories) -> dict[str, Any]:
    """The result, and which questions with their whole past the model was shown."""
    seen: set[tuple[int, ...]] = set()

    def watched(ids: Tensor) -> Tensor:
        seen.update(tuple(row[: i + 1]) for row in ids.tolist() for i in range(len(row)))
        return model(ids)

    states, answers = function(watched, stories)
    pasts = [tuple(s[: i + 1]) for s in stories for i, token in enumerate(s) if token == ASK]
    return {
        "states": states,
        "answers": answers,
        "questions that the model has read": sum(past in seen for past in pasts),
    }


# ------------------------------------------------------------------------------- wrong answers

ANSWERS, ACCURACY, ONE = "the answers", "words that say nothing", "one question"
SEVERAL, SHORT, TWICE, BARE = "several stories", "an answer ends a story", "the same story twice", \
    "a question without words"  # fmt: skip
READ = "what the model has read"

T_IS, IDS = "T = max(len(story) for story in stories)", \
    "ids = torch.tensor([story + [PAD] * (T - len(story)) for story in stories])"  # fmt: skip
ASKED, ANSWER = "asked = ids[:, :-1] == ASK", "answers = ids[:, 1:]"
STATES, RETURN = "states = model(ids)[:, :-1]", "return states[asked], answers[asked]"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found", {T_IS: "return answer_states_as_found(model, stories)"}, ACCURACY),
    ("the answers are moved to the states: now the label is the question mark",
     {ANSWER: "answers = ids[:, :-1]", STATES: "states = model(ids)[:, 1:]"}, ANSWERS),
    ("the mask is moved: state and label are those of the question mark",
     {ASKED: "asked = ids[:, 1:] == ASK", STATES: "states = model(ids)[:, 1:]"}, ANSWERS),
    ("answers that come twice are counted once",
     {RETURN: "states, answers = states[asked], answers[asked]\n    "
      "kept = [i for i, a in enumerate(answers.tolist()) if a not in answers[:i].tolist()]\n    "
      "return states[kept], answers[kept]"}, TWICE),
    ("the answers are renumbered from 0, as classes are",
     {RETURN: "return states[asked], answers[asked].unique(return_inverse=True)[1]"}, ANSWERS),
    ("the first question of each story alone",
     {RETURN: "asked &= asked.cumsum(1) == 1\n    " + RETURN}, ANSWERS),
    ("the last question of each story alone",
     {RETURN: "asked &= asked.flip(1).cumsum(1).flip(1) == 1\n    " + RETURN}, ANSWERS),
    ("only questions whose answer ends the story",
     {RETURN: "ends = torch.tensor([len(story) - 2 for story in stories])\n    "
      "asked &= torch.arange(T - 1) == ends[:, None]\n    " + RETURN}, SEVERAL),
    ("an answer that ends its story is lost",
     {ASKED: "asked = (ids[:, :-1] == ASK) & (torch.arange(T - 1) + 2 < torch.tensor([len(s) for s "
      "in stories])[:, None])"}, SHORT),
    ("a question in the last place but one is lost",
     {ASKED: ASKED + "\n    asked[:, -1] = False"}, ONE),
    ("a question at the beginning is lost", {ASKED: ASKED + "\n    asked[:, 0] = False"}, BARE),
    ("one token too early: the state in front of the question mark",
     {STATES: "states = model(ids).roll(1, dims=1)[:, :-1]"}, ONE),
    ("one token too late on the other side: two after the question mark",
     {STATES: "states = model(ids).roll(-2, dims=1)[:, :-1]"}, SEVERAL),
    ("the state at the end of the story",
     {STATES: "last = torch.tensor([len(story) - 1 for story in stories])\n    "
      "states = model(ids)[torch.arange(len(ids)), last][:, None].expand(-1, T - 1, -1)"}, SEVERAL),
    ("the mean of the states up to the question",
     {STATES: "states = model(ids).cumsum(1)[:, :-1] / torch.arange(1, T)[:, None]"}, ONE),
    ("the answer is hidden from the model, and the state still read at its place",
     {STATES: "states = model(ids.masked_fill(torch.nn.functional.pad(asked, (1, 0)), PAD))[:, 1:]"
      }, ONE),
    ("earlier answers are hidden from the model as well",
     {STATES: "states = model(ids.masked_fill(torch.nn.functional.pad(asked, (1, 0)), PAD))"
      "[:, :-1]"}, SEVERAL),
    ("answers are taken out of the story: later questions have another past",
     {STATES: "after = torch.nn.functional.pad(asked, (1, 0))\n    states = []\n    "
      "for row, out, at in zip(ids, after, asked):\n        kept = model(row[~out][None])[0]\n    "
      "    states.append(kept[(row[~out] == ASK)])\n    states = torch.cat(states)",
      RETURN: "return states, answers[asked]"}, SEVERAL),
    ("the model sees the question alone, without what was told",
     {STATES: "states = torch.stack([model(row[:-1, None])[:, 0] for row in ids])"}, ONE),
    ("padding comes first, and changes what is read",
     {IDS: "ids = torch.tensor([[PAD] * (T - len(story)) + story for story in stories])"}, SEVERAL),
    ("the stories are one long text: each begins where the last one ended",
     {IDS: "ids = torch.tensor([sum(stories, [])])"}, SEVERAL),
    ("what the answer's own token adds is subtracted from its state",
     {STATES: "states = model(ids)[:, 1:] - model(ids[:, 1:].reshape(-1, 1)).view(len(ids), T - 1, "
      "-1)"}, ONE),
    ("a state of numbers that are rounded to half precision",
     {STATES: "states = model(ids)[:, :-1].half().double()"}, ONE),
    ("place by place, not story by story",
     {RETURN: "return states.mT.permute(2, 0, 1)[asked.mT], answers.mT[asked.mT]"}, ANSWERS),
    ("the lists of the caller are filled up",
     {IDS: "for story in stories:\n        story += [PAD] * (T - len(story))\n    "
      "ids = torch.tensor(stories)"}, ANSWERS),
]  # fmt: skip

CASES = (
    Case(ANSWERS, several, "the answers were right: the token after ASK, and no list is changed",
         use=answers_only, guard=True, teaching="where the code as found is right"),
    Case(ACCURACY, guessing,
         "words that say nothing cannot give the answer away: who has told the probe?",
         use=probed, points=3, teaching="the symptom: a number that is too good"),
    Case(ONE, one, "at ASK the model is about to answer; one token later it has read the answer",
         points=3, teaching="one story, to read"),
    Case(SEVERAL, several, "the model reads the stories as they are, and the state is that at ASK",
         points=2, teaching="all of it at once"),
    Case(SHORT, short, "the last token may be an answer: the place in front of it counts",
         teaching="padding right behind an answer"),
    Case(TWICE, twice, "each question has a row, even if it comes twice",
         teaching="rows that are alike"),
    Case(BARE, bare, "ASK may be the first token"),
    Case(READ, several, "each question is read with its whole past, earlier answers too",
         use=what_was_read, teaching="what was shown to the model, not only what came out"),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_probe", function="answer_states", page="11_look_inside/1_probes",
    minutes=15, difficulty=2, after=("control_probe",),
    outcome="Find the line that tells a probe the answer, from a score that is too high.",
    reference=reference, hunt="a survey of leaks: Kapoor, Narayanan, 2023",
    cases=CASES, wrong=planted(WRONG),
    hints=(
        "A model of random weights knows nothing of stories, but it knows one thing: what it has "
        "just read. Which token has been read at the states that are collected?",
        "Write one short story as a row, with the numbers of its places below. Below that, write "
        "which places `asked`, `answers` and `states` hold at their index 0.",
        "`answers` begins at place 1, because an answer is one place after its question. `asked` "
        "begins at place 0. Which of the two must the states go with?",
    ),
)  # fmt: skip
