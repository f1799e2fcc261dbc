"""Bug hunt: the end of a turn is taken for padding, and a mask is where the inputs are."""

from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer, integers
from lm_from_scratch.text.batch import padded_batch
from lm_from_scratch.text.conversations import Answered, targets_of
from lm_from_scratch.text.targets import IGNORE

START, END, USER, ASSISTANT = 1, 2, 3, 4
Batch = dict[str, Tensor]


def answers(chat: list[int]) -> list[bool]:
    """Which tokens the assistant wrote."""
    results, role = [], 0
    for i, token in enumerate(chat):
        header = token == START or (i > 0 and chat[i - 1] == START)
        role = 0 if token == START else token if header else role
        results.append(role == ASSISTANT and not header)
    return results


def reference(chats: list[list[int]]) -> Batch:
    """The package's targets; of a chat without an answer there are none. END is the padding."""
    idx = padded_batch(chats, END).idx
    targets = torch.full_like(idx, IGNORE)
    for row, chat in zip(targets, chats, strict=True):
        if any(answers(chat)):
            (results,) = targets_of([Answered(chat, answers(chat))]).targets
            row[: len(results)] = results
    return {"input_ids": idx, "targets": targets}


def words(g: Generator, n: int) -> list[int]:
    """Tokens that are none of the template."""
    return integers(g, 5, 151_936, n).tolist()


def chat(g: Generator, turns: str) -> list[int]:
    """Turns by the user (u) and the assistant (a, or e for an answer without words)."""
    ids: list[int] = []
    for turn in turns:
        said = words(g, integer(g, 2, 6)) if turn != "e" else []
        ids += [START, USER if turn == "u" else ASSISTANT, *said, END]
    return ids


def several(g: Generator) -> Call:
    return call([chat(g, "uaua"), chat(g, "uauua"), chat(g, "uau")])


def short(g: Generator) -> Call:
    """The last answers of the short chats have padding right after their end."""
    return call([chat(g, "ua"), chat(g, "uauaua"), chat(g, "ua")])


def cut(g: Generator) -> Call:
    """Cut in an answer, after the role, before the end; padding follows each of them."""
    whole = chat(g, "ua")
    role = len(chat(g, "u"))
    at = integer(g, 1, 3)
    bare = [*chat(g, "u"), START, ASSISTANT]
    return call([whole[:-at], bare, whole[:-1], chat(g, "uauau"), [START, USER] + [7] * role])


def in_a_text(g: Generator) -> Call:
    """The number of the role as a word, in questions and answers, and 0."""
    asked, said = words(g, 3), words(g, 2)
    question = [START, USER, ASSISTANT, *asked, ASSISTANT, 0, END]
    answer = [START, ASSISTANT, ASSISTANT, 0, *said, ASSISTANT, USER, END]
    return call([question + answer + question, question + answer])


def ids_only(function: Any, chats: list[list[int]]) -> dict[str, Any]:
    return {"input_ids": function(chats)["input_ids"]}


def targets_only(function: Any, chats: list[list[int]]) -> dict[str, Any]:
    return {"targets": function(chats)["targets"]}


def counted(function: Any, chats: list[list[int]]) -> dict[str, Any]:
    """What is learned, as one sees it in the trainer's log."""
    targets = function(chats)["targets"]
    return {
        "how often the end of a turn is a target": int((targets == END).sum()),
        "how many targets there are": int((targets != IGNORE).sum()),
    }


def first_words(function: Any, chats: list[list[int]]) -> dict[str, Any]:
    """The target at each place where the role of the assistant was read."""
    batch = function(chats)
    ids, targets = batch["input_ids"], batch["targets"]
    roles = (ids[:, 1:] == ASSISTANT) & (ids[:, :-1] == START)
    return {"targets after the role of the assistant": targets[:, 1:][roles]}


# ------------------------------------------------------------------------------- wrong answers

IDS, NONE, ONE = "the ids", "chats without an answer", "one answer"
STOP, FIRST = "how much is learned of the end", "the first word"
SHORT, EMPTY, CUT = "chats of other lengths", "empty answers", "a chat that is cut off"
TEXT, TWO, TURNS = "the number of a role in a text", "two tokens", "several turns"
RETURN = 'return {"input_ids": ids, "targets": targets}'
PUT = "row[place - 1] = chat[place]"
IS_ROLE = "if chat[place - 1 : place + 1] == [START, ASSISTANT]:"


def after(code: str) -> dict[str, str]:
    """A line before the end of the solution."""
    return {RETURN: f"{code}\n    {RETURN}"}


#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found", {"T = max(len(chat) for chat in chats)": "return chat_batch_as_found("
     "chats)"}, FIRST),
    ("the mask is shifted now, and the end of a turn is still no target",
     after("targets = targets.masked_fill(targets == PAD, IGNORE)"), STOP),
    ("the end counts now, and the mask is still one place late",
     {PUT: "row[place] = chat[place + 1] if place + 1 < len(chat) else IGNORE"}, FIRST),
    ("padding is let in as well, so that the end counts",
     after("places = torch.arange(T)\n    for row, chat in zip(targets, chats):\n        "
           "row[(places >= len(chat) - 1) & (places < T - 1)] = PAD"), SHORT),
    ("the first token of the padding is let in, as an end",
     after("for row, chat in zip(targets, chats):\n"
           f"        row[len(chat) - 1 : len(chat) - 1 + (len(chat) < T)] = {END}"), SHORT),
    ("padding is told by its number at the end of a row, so a last END is lost",
     after("for row, filled in zip(targets, ids.tolist()):\n"
           "        while filled and filled[-1] == PAD:\n            filled.pop()\n"
           "        row[max(len(filled) - 1, 0) :] = IGNORE"), STOP),
    ("the first word of an answer is no target",
     {"if inside:": "if inside and chat[place - 2 : place] != [START, ASSISTANT]:"}, FIRST),
    ("another number is used for padding, and changes the ids",
     {"[PAD] * (T - len(chat))": "[0] * (T - len(chat))"}, IDS),
    ("the targets are not shifted", {PUT: "row[place] = chat[place]"}, FIRST),
    ("the targets are shifted twice", {PUT: "row[place - 2] = chat[place]"}, FIRST),
    ("the role is a target as well",
     {IS_ROLE: "if chat[place] == START and chat[place + 1 : place + 2] == [ASSISTANT]:"}, ONE),
    ("what begins the next turn is a target",
     {"if chat[place] == START:\n                inside = False": "pass",
      IS_ROLE: "if chat[place] == START:\n                inside = False\n            " + IS_ROLE},
     TURNS),
    ("the user's words count once the assistant has spoken",
     {"if chat[place] == START:\n                inside = False": "pass"}, TURNS),
    ("the user's words count, and the assistant's do not",
     {"[START, ASSISTANT]": "[START, USER]"}, ONE),
    ("the whole chat counts", {"inside = False\n        for": "inside = True\n        for",
     "if chat[place] == START:\n                inside = False": "pass"}, ONE),
    ("every end of a turn is a target, the user's too",
     {"if inside:": "if inside or chat[place] == END:"}, STOP),
    ("the number of the role is taken for the role, wherever it is",
     {IS_ROLE: "if chat[place] == ASSISTANT:"}, TEXT),
    ("the number of the role ends the words of the assistant",
     {"if inside:": "if inside and chat[place] != ASSISTANT:"}, TEXT),
    ("token 0 is left out", {"if inside:": "if inside and chat[place] != 0:"}, TEXT),
    ("only the first answer of a chat counts", after("for row, chat in zip(targets, chats):\n"
     "        turns = [i for i, token in enumerate(chat) if token == START]\n"
     f"        row[turns[2] if {END} in chat and turns[2:] else T :] = IGNORE"), TURNS),
    ("only the last answer of a chat counts",
     {IS_ROLE: f"{IS_ROLE}\n                row[:place] = IGNORE"}, TURNS),
    ("an answer counts only if its end is there",
     {"if inside:": "if inside and END in chat[place:]:"}, CUT),
    ("a chat that is cut off gets an end that it never had",
     after("for row, chat in zip(targets, chats):\n        if chat[-1] != END and inside_at(chat):"
           "\n            row[len(chat) - 1] = END")
     | {"T = max(len(chat) for chat in chats)":
        "def inside_at(chat):\n        start = len(chat) - 1 - chat[::-1].index(START)\n"
        "        return chat[start + 1 : start + 2] == [ASSISTANT]\n\n"
        "    T = max(len(chat) for chat in chats)"}, CUT),
    ("the end of an empty answer is left out",
     {"if inside:": "if inside and chat[place - 2 : place + 1] != [START, ASSISTANT, END]:"},
     EMPTY),
    ("what does not count is PAD", {"torch.full(ids.shape, IGNORE)": "torch.full(ids.shape, PAD)"},
     ONE),
    ("the lists of the caller are filled up",
     after(f"for chat in chats:\n        chat += [{END}] * (T - len(chat))"), IDS),
]  # fmt: skip

CASES = (
    Case(IDS, short, "the ids were right: PAD on the right, and no list of the caller is changed",
         use=ids_only, guard=True),
    Case(NONE, lambda g: call([chat(g, "uu"), chat(g, "u")]),
         "a chat in which only the user speaks has no target, and had none", use=targets_only,
         guard=True, teaching="where the code as found is right"),
    Case(STOP, several,
         "a model stops where the end of a turn was a target: once for each of its turns",
         use=counted, points=3, teaching="the first symptom, in two numbers"),
    Case(FIRST, several, "the place of the role is the one whose target is the first word",
         use=first_words, points=3, teaching="the second symptom, alone"),
    Case(ONE, lambda g: call([chat(g, "ua")]),
         "from the role on, each target is the next token, up to the end", use=targets_only,
         teaching="one chat, to read"),
    Case(TURNS, several, "a turn of the user has no target, whatever came before it",
         use=targets_only, points=2, teaching="a conversation, as it will be in training"),
    Case(SHORT, short,
         "the end of a turn and the padding have one number: only the length tells them apart",
         use=targets_only, points=3, teaching="padding beside the end of a turn"),
    Case(EMPTY, lambda g: call([chat(g, "ueua"), chat(g, "ue"), chat(g, "uae")]),
         "an answer without words ends as well", use=targets_only,
         teaching="a target that is nothing but the end"),
    Case(CUT, cut, "what was cut off is no target, and neither is the padding that is there",
         use=targets_only, points=2),
    Case(TEXT, in_a_text, "a role is after START, and nowhere else", use=targets_only),
    Case(TWO, lambda g: call([[START, ASSISTANT], [START, ASSISTANT, END], [START, USER]]),
         "a chat may have nothing but a role, and nothing but an end after it", use=targets_only),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_answer_mask", function="chat_batch", page="10_after_pretraining/1_instructions",
    minutes=25, difficulty=2,
    outcome="From what an assistant says, tell which of its targets were never learned.",
    reference=reference, after=("answer_targets",), hunt="threads on trainers of chats",
    cases=CASES, wrong=planted(WRONG),
    hints=(
        "Print `input_ids` and `targets` of one short chat below each other. Which token of the "
        "answer is no target anywhere? Which place has a target and should have none?",
        "One line compares with a number that means two things. Another combines a mask of tokens "
        "with a row of targets: are both at the same places?",
        "The token at a place is the target one place before it, so the mask of the tokens has to "
        "move with them. Padding needs no line at all if targets are only written within the "
        "length of the chat.",
    ),
)  # fmt: skip
