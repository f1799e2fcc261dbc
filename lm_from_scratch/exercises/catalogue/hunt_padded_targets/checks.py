"""Bug hunt: padding that counts as text, in the mask and in the loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers
from lm_from_scratch.text.batch import padded_batch
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.loss import causal_lm_loss

PAD = 0
Row = dict[str, Tensor]


def reference(ids: list[int], length: int) -> Row:
    """The package's padded batch; a second text fills the row."""
    batch = padded_batch([ids, [PAD] * length], PAD, block_size=length)
    assert batch.positions is not None
    real = batch.positions[0] >= 0
    row = batch.idx[0]
    return {"input_ids": row, "attention_mask": real.long(), "labels": row.where(real, IGNORE)}


def text(g: Generator, n: int, vocabulary: int = 151_936) -> list[int]:
    """Tokens from 1 on: none of them is the padding token."""
    ids: list[int] = integers(g, 1, vocabulary, n).tolist()
    return ids


def short(g: Generator) -> Call:
    return call(text(g, 5), 12)


def with_padding_token(g: Generator) -> Call:
    """The padding token first, inside and last."""
    return call([PAD, *text(g, 3), PAD, PAD, *text(g, 2), PAD], 13)


def part(key: str) -> Callable[..., Any]:
    """One of the three tensors."""

    def use(function: Any, ids: list[int], length: int) -> Any:
        row = function(ids, length)
        if not isinstance(row, dict):
            raise TypeError("the function must return a dict")
        return {key: row[key]}

    return use


def reported(function: Any, ids: list[int], length: int) -> Any:
    """The loss of a model that says padding, whatever it reads: with a lead of 10 logits."""
    logits = torch.zeros(length, 97)
    logits[:, PAD] = 10.0
    labels = function(ids, length)["labels"]
    return {"the loss": causal_lm_loss(logits[:-1], labels[1:])}


# ------------------------------------------------------------------------------- wrong answers

CUT = "ids = ids[:length]"
IDS = "torch.tensor(ids + [PAD] * padding)"
MASK = "[1] * len(ids) + [0] * padding"
MASK_BY_ID = "torch.tensor(ids + [PAD] * padding).ne(PAD).long()"
LABELS = "torch.tensor(ids + [IGNORE] * padding)"
LABELS_BY_ID = "torch.tensor([i if i != PAD else IGNORE for i in ids + [PAD] * padding])"


def extended(ids: list[int], length: int) -> Row:
    row = reference(ids, length)
    ids.extend([PAD] * (length - len(ids)))
    return row


SHORT_MASK, SHORT_LABELS = "the mask of a short text", "the labels of a short text"
HOLDS_PAD, SHORT_IDS = "a text that contains the padding token", "the ids of a short text"
LONGER = "a text longer than the row"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found", {CUT: "return padded_example_as_found(ids, length)"}, SHORT_MASK),
    ("the mask is repaired, and padding is still a label",
     {"[IGNORE] * padding": "[PAD] * padding"}, SHORT_LABELS),
    ("the labels are repaired, and the mask is still all ones", {MASK: "[1] * length"}, SHORT_MASK),
    ("padding is recognised by its id, which the text may contain too",
     {f"torch.tensor({MASK})": MASK_BY_ID, LABELS: LABELS_BY_ID}, HOLDS_PAD),
    ("the mask is made from the ids, and hides a real token",
     {f"torch.tensor({MASK})": MASK_BY_ID}, HOLDS_PAD),
    ("the labels are made from the ids, and leave out a real token",
     {LABELS: LABELS_BY_ID}, HOLDS_PAD),
    ("the text is taken to end at the first padding token",
     {"padding = length - len(ids)": "n = (ids + [PAD]).index(PAD)\n    padding = length - n",
      "[1] * len(ids)": "[1] * n", LABELS: "torch.tensor(ids[:n] + [IGNORE] * padding)",
      IDS: "torch.tensor(ids + [PAD] * (length - len(ids)))"}, HOLDS_PAD),
    ("the first padding token is still a label, as an end of the text",
     {LABELS: "torch.tensor((ids + [PAD] + [IGNORE] * padding)[:length])"}, SHORT_LABELS),
    ("the last token of the text is left out",
     {LABELS: "torch.tensor(ids[:-1] + [IGNORE] * (padding + 1))"}, SHORT_LABELS),
    ("the labels are shifted here, and once more in the loss",
     {LABELS: "torch.tensor(ids[1:] + [IGNORE] * (padding + 1))"}, SHORT_LABELS),
    ("the labels of padding are -1, which the loss does not know",
     {"[IGNORE] * padding": "[-1] * padding"}, SHORT_LABELS),
    ("the mask is 1 for padding", {MASK: "[0] * len(ids) + [1] * padding"}, SHORT_MASK),
    ("the mask is bool", {f"torch.tensor({MASK})": f"torch.tensor({MASK}).bool()"}, SHORT_MASK),
    ("input_ids and labels are one tensor: -100 is in both",
     {"ids + [PAD] * padding": "ids + [IGNORE] * padding"}, SHORT_IDS),
    ("the length is taken before the text is cut",
     {CUT: "n = len(ids)\n    ids = ids[:length]", MASK: "[1] * n + [0] * (length - n)"}, LONGER),
    ("a long text keeps its last tokens", {CUT: "ids = ids[-length:]"}, LONGER),
    ("a long text is not cut", {CUT: "pass"}, LONGER),
    ("the padding is on the left",
     {IDS: "torch.tensor([PAD] * padding + ids)", MASK: "[0] * padding + [1] * len(ids)",
      LABELS: "torch.tensor([IGNORE] * padding + ids)"}, SHORT_IDS),
    ("the list of the caller is filled up", extended, SHORT_IDS),
]  # fmt: skip

CASES = (
    Case(SHORT_IDS, short,
         "input_ids hold the text and then PAD, never -100; make a new list by +, as += and "
         "extend write into the caller's", use=part("input_ids"), guard=True,
         teaching="what a repair of the labels must not touch"),
    Case("a text that fills the row", lambda g: call(text(g, 9), 9),
         "every token is real here: the mask is all ones, the labels are the ids",
         guard=True, teaching="a row without padding, where the code as found is right"),
    Case(LONGER, lambda g: call(text(g, 14), 10),
         "the text is cut to its first tokens before anything is counted", guard=True),
    Case(SHORT_MASK, short, "how many ones does the mask have, and how many tokens the text?",
         points=2, use=part("attention_mask"), teaching="the first defect alone"),
    Case(SHORT_LABELS, short,
         "which labels does the loss leave out, and which of these do you see?", points=3,
         use=part("labels"), teaching="the second defect alone"),
    Case("the loss that is reported for two tokens in a row of 32",
         lambda g: call(text(g, 2, 97), 32),
         "this model says nothing but padding; it pays 10 for each real token, and should pay "
         "nothing for the rest", use=reported, teaching="the symptom that the user saw"),
    Case(HOLDS_PAD, with_padding_token,
         "the ids do not say what is padding: only the length of the text does", points=4),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_padded_targets", function="padded_example", page="1_gpt2/4_training", minutes=15,
    difficulty=1,
    outcome="Find out why a reported loss is too low, and fix mask and labels so that padding "
            "never counts.",
    reference=reference, after=("cross_entropy",), hunt="G6, G7", cases=CASES, wrong=planted(WRONG),
    hints=(
        "Call the function as found with two ids and a length of 6, and print the three tensors. "
        "Which numbers say that something is not text?",
        "Two lines ask for something that is already lost when they run. When is the length of the "
        "text still known?",
        "How many places are padding is known before the list is filled up, from two lengths. "
        "After that it cannot be told from the ids: 94.5 % of the labels of this trainer were "
        "padding, and its tokenizer made padding out of real characters as well. The story "
        "goes on in the bug museum of the page on training.",
    ),
)  # fmt: skip
