"""Targets of a chat: what the assistant says, the end of its turn, and nothing else."""

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integer, integers
from lm_from_scratch.text.conversations import Answered, targets_of
from lm_from_scratch.text.targets import IGNORE

Spans = list[list[tuple[int, int]]]
START, END, USER, ASSISTANT = 1, 2, 3, 4


def reference(chats: list[list[int]], spans: Spans, length: int) -> Tensor:
    """The package's targets, in rows of this length; of a chat without an answer there are none."""
    targets = torch.full((len(chats), length), IGNORE)
    for row, ids, pairs in zip(targets, chats, spans, strict=True):
        answer = [any(start <= i <= end for start, end in pairs) for i in range(len(ids))]
        if any(answer[1:length]):
            (labels,) = targets_of([Answered(ids[:length], answer[:length])]).targets
            row[: len(labels)] = labels
    return targets


Chat = tuple[list[int], list[tuple[int, int]]]


def words(g: Generator, n: int) -> list[int]:
    """Tokens that are none of the template."""
    return integers(g, 5, 151_936, n).tolist()


def chat(g: Generator, turns: str) -> Chat:
    """A chat of turns by the user (u) and the assistant (a, or e for an answer without words)."""
    ids: list[int] = []
    spans = []
    for turn in turns:
        ids += [START, USER if turn == "u" else ASSISTANT]
        start = len(ids)
        if turn != "e":
            ids += words(g, integer(g, 2, 6))
        if turn != "u":
            spans.append((start, len(ids)))
        ids.append(END)
    return ids, spans


def given(chats: list[Chat], length: int | None = None) -> Call:
    """The arguments for these chats, by default as long as the longest of them."""
    longest = max(len(ids) for ids, _ in chats)
    return call([ids for ids, _ in chats], [pairs for _, pairs in chats], length or longest)


def padded(g: Generator) -> Call:
    chats = [chat(g, "ua") for _ in range(3)]
    return given(chats, max(len(ids) for ids, _ in chats) + 3)


def any_token(g: Generator) -> Call:
    """0, which padding may be, the tokens of the template, its end too, and repeats."""
    ids, spans = chat(g, "uaua")
    (start, _), (other, _) = spans
    ids[start : start + 2] = [0, START]
    ids[other], ids[other + 1] = ids[2], END
    return given([(ids, spans), chat(g, "ua")], len(ids) + 2)


def begins(g: Generator) -> Call:
    """The assistant's first words have no template before them."""
    ids = [*words(g, 4), END, START, USER, *words(g, 2), END]
    return given([(ids, [(0, 4)]), ([END, START, USER, 9, END], [(0, 0)])])


def cut_within(g: Generator) -> Call:
    """The row ends in an answer, before the end of a turn, and after it."""
    length = integer(g, 14, 18)
    chats = []
    for left in (2, 1, 0):  # what is cut off
        body = [START, USER, *words(g, length - 8 + left), END, START, ASSISTANT]
        chats.append(([*body, *words(g, 2), END], [(len(body), len(body) + 2)]))
    chats[2][0].extend([START, USER, END])
    return given(chats, length)


def cut_early(g: Generator) -> Call:
    """The row ends before the answer begins, and right before its first word."""
    ids, spans = chat(g, "uaua")
    return given([(ids, spans), chat(g, "uuua")], spans[1][0] - integer(g, 0, 3))


# ------------------------------------------------------------------------------- wrong answers

ONE, PAD, TURNS, EMPTY = "one turn", "chats of other lengths", "several turns", "an empty answer"
ANY, BEGINS, CUT = "any token in an answer", "a chat that begins with an answer", "cut in an answer"
EARLY, SILENT = "cut before an answer", "a chat without an answer"

SAID = "said = ids[first : end + 1]"
PLACE = "row[first - 1 : first - 1 + len(said)]"
RESULT = "return targets"
LOOP = "for start, end in answers:"
INNER = f"{LOOP}\n            first = max(start, 1)"


#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the end of the turn is left out, and the model never stops", {SAID: "said = ids[first:end]"},
     ONE),
    ("the target of a token is the token itself: nothing is shifted",
     {PLACE: "row[first : first + len(said)]"}, ONE),
    ("shifted here, as if the spans were of targets already",
     {RESULT: f"{RESULT[:-7]}torch.cat([targets[:, 1:], torch.full((len(chats), 1), IGNORE)], 1)"},
     ONE),
    ("the target of a token is the one before it",
     {"first = max(start, 1)": "first = start + 2",
      SAID: "said = ids[start : min(end + 1, len(ids) - 1)]"}, ONE),
    ("the first word of each answer is left out, as if the shift came on top",
     {"first = max(start, 1)": "first = max(start + 1, 1)"}, ONE),
    ("the role that announces the answer counts as well",
     {"first = max(start, 1)": "first = max(start - 1, 1)"}, ONE),
    ("the token after the end of the turn counts as well", {"end + 1": "end + 2"}, TURNS),
    ("the question counts, and the answer does not",
     {LOOP: f"row[: len(ids) - 1] = ids[1:]\n        {LOOP}",
      f"{PLACE} = said": f"{PLACE} = IGNORE"}, ONE),
    ("the whole chat counts", {LOOP: "for start, end in [(0, len(ids) - 1)]:"}, ONE),
    ("all that follows the first answer counts, the user's words too",
     {LOOP: "for start, end in [(answers[0][0], len(ids) - 1)] if answers else []:"}, TURNS),
    ("the end of the user's turns counts as well",
     {LOOP: f"row[: len(ids) - 1] = torch.where(ids[1:] == {END}, {END}, IGNORE)\n        {LOOP}"},
     ONE),
    ("only the last turn of the assistant counts", {"in answers:": "in answers[-1:]:"}, TURNS),
    ("only the first turn of the assistant counts", {"in answers:": "in answers[:1]:"}, TURNS),
    ("an empty answer is passed over, and its end with it",
     {LOOP: "for start, end in (pair for pair in answers if pair[0] < pair[1]):"}, EMPTY),
    ("token 0 does not count, as if it were padding",
     {RESULT: f"{RESULT}.masked_fill(targets == 0, IGNORE)"}, ANY),
    ("a token of the template is no target, though an answer may hold it",
     {RESULT: f"{RESULT}.masked_fill(targets == {START}, IGNORE)"}, ANY),
    ("what the question holds is no target in an answer either",
     {LOOP: "asked = {i for t, i in enumerate(chat) if not any(a <= t <= b for a, b in answers)}\n"
      f"        {LOOP}", SAID: "said = torch.tensor([IGNORE if i in asked and "
      f"i != {END} else i for i in chat[first : min(end + 1, length)]])"}, ANY),
    ("what does not count is 0", {"length), IGNORE)": "length), 0)"}, ONE),
    ("what does not count is -1", {"length), IGNORE)": "length), -1)"}, ONE),
    ("the first token of a chat is the target of the last",
     {"first = max(start, 1)": "first = start", SAID: "said = ids[first : end + 1]\n"
      "            if first == 0:\n                row[-1], first, said = said[0], 1, said[1:]"},
     BEGINS),
    ("what was cut off is still the target of the last token",
     {"chat[:length]": "chat[: length + 1]"}, CUT),
    ("a span that was cut off in part is left out as a whole",
     {INNER: f"{LOOP}\n            if end >= len(ids):\n                continue\n"
      "            first = max(start, 1)"}, CUT),
    ("as long as the longest chat, whatever length says",
     {RESULT: f"{RESULT}[:, : max(len(chat) for chat in chats)]"}, PAD),
    ("the lists of the caller are filled up",
     {RESULT: f"for ids in chats:\n        ids.extend([0] * (length - len(ids)))\n    {RESULT}"},
     PAD),
    ("the lists of the caller are cut",
     {RESULT: f"for ids in chats:\n        del ids[length:]\n    {RESULT}"}, CUT),
    ("an answer is taken to end with the first token that ends a turn",
     {LOOP: f"for start, end in [(start, chat.index({END}, start)) for start, _ in answers]:"},
     ANY),
]  # fmt: skip

CASES = (
    Case(ONE, lambda g: given([chat(g, "ua")]),
         "the target before the first word of the answer is that word; the last target is the "
         "token that ends the turn", points=2,
         teaching="the plain rule, and the first thing to read"),
    Case(PAD, padded,
         "padding is -100 up to `length`; make new lists instead of filling those of the caller",
         teaching="padding, in the shape in which everybody meets it"),
    Case(TURNS, lambda g: given([chat(g, "uaua"), chat(g, "uuaua"), chat(g, "uau")]),
         "each span counts, and what the user says between them does not", points=2,
         teaching="a conversation, as it will be in training"),
    Case(EMPTY, lambda g: given([chat(g, "ueua"), chat(g, "ue")]),
         "an empty answer has one target: the token that ends the turn"),
    Case(ANY, any_token, "the spans say what counts, the tokens do not: an answer may hold 0",
         points=2),
    Case(BEGINS, begins,
         "the first token of a row is nobody's target; place -1 is the end of the row", points=2),
    Case(CUT, cut_within,
         "of the answer that is cut, the words that are left count; none that was cut off does; "
         "the lists of the caller keep it", points=2),
    Case(EARLY, cut_early, "a span may begin after the row ends: it has no target then",
         teaching="nothing of an answer is left"),
    Case(SILENT, lambda g: given([chat(g, "uu"), chat(g, "ua")]),
         "a chat with an empty list of spans is -100 everywhere",
         teaching="a row without a target"),
)  # fmt: skip

EXERCISE = Exercise(
    name="answer_targets", function="answer_targets", page="10_after_pretraining/1_instructions",
    minutes=20, difficulty=1,
    outcome="Write the targets of a chat, so that a model learns its answers and where they end.",
    reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Take the table of the text: its answer is at places 7 and 8, the end at 9. At which "
        "places are these three tokens targets?",
        "The token at place t is the target at place t - 1. So a span fills the places from "
        "`start - 1` to `end - 1`, which is one more than its answer has words.",
        "Cut the chat first; then a slice of it ends by itself where nothing is left. What is "
        "`start - 1` for a span that begins at 0, and where would that write?",
    ),
)  # fmt: skip
