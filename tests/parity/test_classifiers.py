"""The classifiers of every published family are those of transformers, under any padding."""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from model_families import CLASSIFIERS, Pair, drawn, in_float64, near, near_gradients
from tiny_models import PADDINGS, enlarge_, padded_ids, token_ids
from torch import Tensor, nn

from lm_from_scratch.checkpoint.weights import classifier_from_pretrained
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.classification_loss import (
    classification_loss,
    token_classification_loss,
)

of_sequences, of_tokens = (
    pytest.mark.parametrize("family", [family for family, task in CLASSIFIERS if task == wanted])
    for wanted in ("Sequence", "Token")
)


@cache
def pair(family: str, task: str, n_labels: int) -> Pair:
    """Theirs, written to a folder, and ours that read it."""
    import tempfile

    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers import AutoModelForTokenClassification as ForToken

    config = AutoConfig.for_model(
        **drawn(family, 1) | dict(num_labels=n_labels, pad_token_id=0, classifier_dropout=0.0)
    )
    config._attn_implementation = config._experts_implementation = "eager"
    with in_float64(), tempfile.TemporaryDirectory() as folder:
        auto = ForToken if task == "Token" else AutoModelForSequenceClassification
        twin = auto.from_config(config).eval()
        enlarge_(twin)
        twin.save_pretrained(folder)
        return Pair(classifier_from_pretrained(folder).double(), twin.double())


@pytest.mark.parametrize(("family", "task"), CLASSIFIERS)
@pytest.mark.parametrize("padding", PADDINGS)
@torch.no_grad()
def test_logits(family: str, task: str, padding: str) -> None:
    both, (idx, positions, real) = pair(family, task, 3), padded_ids(PADDINGS[padding])
    if padding == "inside" and any(both.ours.backbone.config.windows):
        return  # a state of transformers goes on through padding, a window counts it
    logits, want = both.ours(idx, positions=positions), both.theirs(idx, positions).logits
    near(logits if task == "Sequence" else logits[real], want if task == "Sequence" else want[real])


@of_sequences
@torch.no_grad()
def test_the_token_that_pads_may_end_a_text(family: str) -> None:
    """GPT-2 is usually padded with its end-of-text token: a config that names a pad_token_id says
    that the token before it counts. In a config without one, positions alone say what is real."""
    both, (idx, positions, _) = pair(family, "Sequence", 3), padded_ids(PADDINGS["right"])
    idx[:, 4] = 0  # the last real token of row 0; row 1 goes on
    want = both.theirs(idx, positions).logits
    near(both.ours(idx, positions=positions), want)
    near(both.ours(idx[:1, :5]), want[:1])
    without = copy.deepcopy(both.ours)
    without.backbone.config = replace(without.backbone.config, pad_token_id=None)
    logits = without(idx, positions=positions)
    near(logits[:1], without(idx[:1, :5]))
    near(logits[1], want[1])
    assert (logits[0] - want[0]).abs().max() > 0.01  # column 4, not 3


@of_sequences
@pytest.mark.parametrize(
    ("n_labels", "labels"),
    [
        (1, torch.tensor([0.5, -2.0])),
        (1, torch.tensor([[0.5], [-2.0]])),
        (3, torch.tensor([2, 0])),
        (3, torch.tensor([1, 2], dtype=torch.int32)),
        (3, torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.25, 1.0]])),
    ],
)
def test_losses_and_gradients_of_a_sequence(family: str, n_labels: int, labels: Tensor) -> None:
    both, (idx, positions, _) = pair(family, "Sequence", n_labels), padded_ids(PADDINGS["both"])
    both.twin.config.problem_type = None  # which the batch before has decided
    if labels.dtype == torch.int32:
        wide: Any = labels.long()  # int32 fails in their loss
    else:
        wide = labels.double() if labels.is_floating_point() else labels
    want = both.theirs(idx, positions, labels=wide).loss
    near_gradients(both, classification_loss(both.ours(idx, positions=positions), labels), want)


@of_sequences
def test_losses_and_gradients_of_several_values(family: str) -> None:
    both, (idx, positions, _) = pair(family, "Sequence", 3), padded_ids(PADDINGS["left"])
    both.twin.config.problem_type = "regression"
    values = torch.tensor([[0.5, -1.0, 2.0], [0.0, 3.0, 1.0]]).double()
    want = both.theirs(idx, positions, labels=values).loss
    logits = both.ours(idx, positions=positions)
    near_gradients(both, classification_loss(logits, values, "regression"), want)


@of_tokens
def test_losses_and_gradients_of_tokens_whose_padding_is_labelled_minus_100(family: str) -> None:
    both, (idx, positions, real) = pair(family, "Token", 3), padded_ids(PADDINGS["both"])
    labels = token_ids(*idx.shape, low=0, high=3)
    want = both.theirs(idx, positions, labels=labels.masked_fill(~real, IGNORE)).loss
    logits = both.ours(idx, positions=positions)
    near_gradients(both, token_classification_loss(logits, labels, positions=positions), want)


# --------------------------------------------------------- where transformers does it otherwise


@torch.no_grad()
def test_difference_a_row_that_is_all_padding() -> None:
    """Both take column 0. What stands there is attention over nothing: 0 here and in SDPA, the mean
    of the padding in transformers' eager attention. Nothing is NaN, and no other row is touched."""
    both = pair("qwen2", "Sequence", 3)
    idx, positions, _ = padded_ids([[0] * 8, PADDINGS["left"][0]])
    logits, eager = both.ours(idx, positions=positions), both.theirs(idx, positions).logits
    near(logits[0], both.ours.score(both.ours.backbone(idx, positions=positions)[0, 0]))
    near(logits[1], eager[1])
    assert (logits[0] - eager[0]).abs().max() > 0.5
    both.twin.set_attn_implementation("sdpa")
    near(logits, both.theirs(idx, positions).logits)
    both.twin.set_attn_implementation("eager")


@torch.no_grad()
def test_difference_padding_has_no_label() -> None:
    both, (idx, positions, real) = pair("qwen2", "Token", 3), padded_ids(PADDINGS["both"])
    labels = token_ids(*idx.shape, low=0, high=3)
    want, logits = (
        both.theirs(idx, positions, labels=labels).loss,
        both.ours(idx, positions=positions),
    )
    by_hand = nn.functional.cross_entropy(logits[real], labels[real])
    near(token_classification_loss(logits, labels, positions=positions), by_hand)
    assert (by_hand - want).abs() > 0.05  # transformers count every labelled token
    odd = labels.masked_fill(~real, 77)  # what a padding token is labelled is never looked at
    near(token_classification_loss(logits, odd, positions=positions), by_hand)


def test_one_batch_does_not_decide_for_the_next() -> None:
    both, (idx, positions, _) = pair("qwen2", "Sequence", 3), padded_ids(PADDINGS["left"])
    classes, marks = torch.tensor([2, 0]), torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    both.twin.config.problem_type = None
    both.theirs(idx, positions, labels=classes)
    assert both.twin.config.problem_type == "single_label_classification"  # by the first batch
    with pytest.raises(ValueError, match="batch_size"):
        both.theirs(idx, positions, labels=marks)
    logits = both.ours(idx, positions=positions)
    fresh = classification_loss(logits, marks)
    classification_loss(logits, classes)
    assert classification_loss(logits, marks) == fresh
    near(fresh, nn.functional.binary_cross_entropy_with_logits(logits, marks.double()))


def test_transformers_takes_int8_for_marks() -> None:
    both, (idx, positions, _) = pair("qwen2", "Sequence", 3), padded_ids(PADDINGS["none"])
    both.twin.config.problem_type = None
    with pytest.raises(ValueError, match="Target size"):
        both.theirs(idx, positions, labels=torch.tensor([2, 0], dtype=torch.int8))
