"""heads.py: the last real token under any padding, and the losses. That classifiers compute
what those of transformers do: tests/parity."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import PADDINGS, TINY, enlarge_, padded_ids, tiny_gpt2, token_ids
from torch import Tensor, nn

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2Model
from lm_from_scratch.models.heads import SequenceClassifier, TokenClassifier, last_token
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2Model
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.classification_loss import (
    LOSSES,
    classification_loss,
    token_classification_loss,
)

KINDS = ("gpt2", "qwen2")
CLOSE = dict(rtol=0.0, atol=5e-5)


def large_(model: nn.Module) -> nn.Module:
    """Large weights, and norms around 1 by whatever name."""
    enlarge_(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                parameter.add_(1.0)
    return model.eval()


def backbone(kind: str) -> GPT2Model | Qwen2Model:
    if kind == "gpt2":
        return GPT2Model(GPT2Config(**TINY))
    return Qwen2Model(
        Qwen2Config(
            vocab_size=97, block_size=64, n_layer=3, n_head=6, n_kv_head=2, n_embd=48,
            intermediate_size=112, rope_theta=1e4, eos_token_id=2,
        )
    )  # fmt: skip


def classifier(kind: str, n_labels: int = 3) -> SequenceClassifier:
    return large_(SequenceClassifier(backbone(kind), n_labels))


# ------------------------------------------------------------------------------ laws of padding


def some_mask() -> st.SearchStrategy[list[list[int]]]:
    """Any 3 rows of 7 tokens, at least one of them real in each row."""
    row = st.lists(st.integers(0, 1), min_size=7, max_size=7).filter(any)
    return st.lists(row, min_size=3, max_size=3)


@pytest.mark.parametrize("kind", KINDS)
@given(mask=some_mask())
def test_a_padded_row_is_classified_as_it_is_alone(kind: str, mask: list[list[int]]) -> None:
    model = classifier(kind)
    idx, positions, real = padded_ids(mask)
    got = model(idx, positions=positions)
    for row in range(3):
        alone = model(idx[row][real[row]][None])
        torch.testing.assert_close(got[row : row + 1], alone, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@given(mask=some_mask(), fill=st.integers(1, 96))
def test_what_the_padding_holds_changes_nothing(
    kind: str, mask: list[list[int]], fill: int
) -> None:
    model = classifier(kind)
    tokens = large_(TokenClassifier(backbone(kind), 4))
    idx, positions, real = padded_ids(mask)
    other = padded_ids(mask, fill)[0]
    torch.testing.assert_close(
        model(idx, positions=positions), model(other, positions=positions), **CLOSE
    )
    torch.testing.assert_close(
        tokens(idx, positions=positions)[real], tokens(other, positions=positions)[real], **CLOSE
    )


def test_last_token_by_hand() -> None:
    x = torch.arange(4 * 5.0).view(4, 5, 1)
    positions = torch.tensor(
        [[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2], [0, 1, -1, -1, -1], [-1, 0, -1, 1, -1]]
    )
    assert last_token(x, positions=positions).squeeze(1).tolist() == [4.0, 9.0, 11.0, 18.0]
    assert last_token(x).squeeze(1).tolist() == [4.0, 9.0, 14.0, 19.0]
    all_padding = torch.full((4, 5), -1)
    assert last_token(x, positions=all_padding).squeeze(1).tolist() == [0.0, 5.0, 10.0, 15.0]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_may_come_in_parts(kind: str) -> None:
    model = classifier(kind)
    idx = token_ids(2, 9)
    cache = GrowingCache(3)
    model(idx[:, :5], cache=cache)
    torch.testing.assert_close(model(idx[:, 5:], cache=cache), model(idx), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_labelled_as_they_are_alone(kind: str) -> None:
    model = large_(TokenClassifier(backbone(kind), 4))
    idx = token_ids(1, 7)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    got = model(idx, positions=positions, documents=documents)
    torch.testing.assert_close(got[:, :3], model(idx[:, :3]), **CLOSE)
    torch.testing.assert_close(got[:, 3:], model(idx[:, 3:]), **CLOSE)


# ------------------------------------------------------------------------------------ the museum


def test_the_last_token_is_not_the_one_before_the_first_padding_id() -> None:
    def historic(idx: Tensor) -> list[int]:
        """(first padding id - 1) modulo length."""
        return (((idx == 0).int().argmax(dim=1) - 1) % idx.shape[1]).tolist()

    inside, _, _ = padded_ids([[1] * 8])
    inside[0, 3] = 0  # a token of the text that happens to be the padding token
    both, positions, _ = padded_ids([[0, 0, 1, 1, 1, 1, 0, 0]])
    assert historic(inside) == [2]
    assert historic(both) == [7]  # a padding token
    columns = torch.arange(8.0).view(1, 8, 1)
    assert last_token(columns).item() == 7.0
    assert last_token(columns, positions=positions).item() == 5.0


def test_embeddings_are_pooled_like_ids() -> None:
    model = classifier("qwen2")
    idx, positions, _ = padded_ids(PADDINGS["right"])
    embeddings = model.backbone.embed_tokens(idx)
    x = model.backbone(embeddings, positions=positions)
    torch.testing.assert_close(
        model.classify(x, positions=positions), model(idx, positions=positions), **CLOSE
    )
    historic = model.score(x[:, -1])
    assert (historic[0] - model(idx, positions=positions)[0]).abs().max() > 1.0


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]
)
def test_whole_numbers_of_any_dtype_are_classes(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([1, 0, 0, 1])
    want = nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(classification_loss(logits, labels.to(dtype)), want)


def test_the_hidden_states_of_a_token_classifier_are_at_hand() -> None:
    """The historic result was a tuple cut at a fixed place, and the states fell off."""
    model = large_(TokenClassifier(backbone("qwen2"), 3))
    idx, positions, _ = padded_ids(PADDINGS["left"])
    x = model.backbone(idx, positions=positions)
    assert x.shape == (2, 8, 48)
    torch.testing.assert_close(model.classify(x), model(idx, positions=positions))


# ---------------------------------------------------------------------------------- the modules


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_head_is_trained_when_the_backbone_is_frozen(kind: str) -> None:
    model = classifier(kind)
    model.backbone.requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    idx, positions, _ = padded_ids(PADDINGS["both"])
    labels = torch.tensor([2, 0])
    losses = []
    for _ in range(20):
        loss = classification_loss(model(idx, positions=positions), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert changed == ["score.weight"]


def test_dropout_acts_in_training_alone(seeded: Callable[[int], None]) -> None:
    model = large_(TokenClassifier(backbone("gpt2"), 3, dropout=0.5))
    x = torch.ones(1, 400, 28)
    assert torch.equal(model.classify(x), model.score(x))
    model.train()
    kept = model.dropout(x)
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(model.classify(x), model.score(x))


@pytest.mark.parametrize("head", [SequenceClassifier, TokenClassifier])
def test_the_head_starts_small_and_where_the_backbone_is(
    head: type[nn.Module], seeded: Callable[[int], None]
) -> None:
    model = head(GPT2Model(GPT2Config(**{**TINY, "initializer_range": 0.05})).bfloat16(), 500)
    assert model.score.weight.dtype == torch.bfloat16
    assert abs(model.score.weight.float().std().item() - 0.05) < 0.002
    if model.score.bias is not None:
        assert (model.score.bias == 0).all()
    assert (model.score.bias is None) == (head is SequenceClassifier)
    assert model(token_ids(2, 5)).dtype == torch.bfloat16


# ----------------------------------------------------------------------------- laws of the losses


@pytest.mark.parametrize("kind", KINDS)
def test_no_label_gives_zero_loss_and_zero_gradient(kind: str) -> None:
    model = classifier(kind)
    idx, positions, _ = padded_ids(PADDINGS["left"])
    nothing = torch.full((2,), IGNORE)
    loss = classification_loss(model(idx, positions=positions), nothing)
    loss.backward()
    assert loss.item() == 0.0
    assert all((p.grad == 0).all() for p in model.parameters())


def test_an_empty_batch_costs_nothing() -> None:
    for problem_type in LOSSES:
        logits = torch.zeros(0, 3, requires_grad=True)
        labels = torch.zeros(0).long() if problem_type.startswith("single") else torch.zeros(0, 3)
        loss = classification_loss(logits, labels, problem_type)
        loss.backward()
        assert loss.item() == 0.0
    logits = torch.randn(1, 2, 3, requires_grad=True)
    loss = token_classification_loss(
        logits, torch.ones(1, 2).long(), positions=torch.full((1, 2), -1)
    )
    loss.backward()
    assert loss.item() == 0.0 and (logits.grad == 0).all()


def test_minus_100_is_left_out_of_the_mean() -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([2, IGNORE, 0, IGNORE], dtype=torch.int8)
    want = classification_loss(logits[::2], labels[::2])
    torch.testing.assert_close(classification_loss(logits, labels), want)


def test_low_precision_is_cast_up_and_float64_is_kept() -> None:
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    labels = {
        "regression": torch.linspace(-1, 1, 18).view(6, 3),
        "single_label_classification": torch.tensor([0, 1, 2, 2, 1, 0]),
        "multi_label_classification": torch.linspace(0, 1, 18).view(6, 3),
    }
    for name, want in labels.items():
        for dtype in (torch.bfloat16, torch.float16):
            low = classification_loss(logits.to(dtype), want, name)
            exact = classification_loss(logits.to(dtype).double(), want, name)
            assert low.dtype == torch.float32 and exact.dtype == torch.float64
            assert abs(low.item() - exact.item()) < 1e-6


def test_stars_may_be_whole_numbers() -> None:
    logits = torch.tensor([[3.0], [1.0]], requires_grad=True)
    loss = classification_loss(logits, torch.tensor([5, 1]))
    loss.backward()
    assert loss.item() == 2.0
    assert logits.grad.tolist() == [[-2.0], [0.0]]


def test_marks_may_be_whole_numbers_too() -> None:
    logits = torch.tensor([[3.0, -1.0], [1.0, 0.5]])
    marks = torch.tensor([[1, 0], [1, 1]])
    want = classification_loss(logits, marks.float())
    for dtype in (torch.int64, torch.bool):
        torch.testing.assert_close(classification_loss(logits, marks.to(dtype)), want)


@pytest.mark.parametrize(
    ("labels", "problem_type", "message"),
    [
        (torch.zeros(2).long(), "ranking", r"problem_type='ranking' is not one of .*'regression'"),
        (torch.zeros(2).long(), "", r"problem_type='' is not one of"),
        (torch.tensor([0, 3]), None, r"from 0 to 3; they must be from 0 to 2"),
        (torch.tensor([-1, 2]), None, r"from -1 to 2; they must be from 0 to 2"),
        (torch.tensor([0, 156], dtype=torch.uint8), None, r"from 0 to 156"),
        (torch.zeros(2), "single_label_classification", r"dtype torch.float32; .* integers"),
        (torch.zeros(3).long(), "single_label_classification", r"\(3,\); it must be \(2,\)"),
        (torch.zeros(2), None, r"labels have shape \(2,\); it must be \(2, 3\)"),
        (torch.zeros(2, 1).long(), None, r"labels have shape \(2, 1\); it must be \(2, 3\)"),
        (torch.full((2, 3), 1.5), None, r"from 1.5 to 1.5; they must be from 0 to 1"),
        (torch.full((2, 3), torch.nan), None, r"from nan to nan"),
        (torch.full((2, 3), -100), None, r"from -100 to -100; they must be from 0 to 1"),
        (torch.zeros(2), "regression", r"labels have shape \(2,\); it must be \(2, 3\)"),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    labels: Tensor, problem_type: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        classification_loss(torch.zeros(2, 3), labels, problem_type)


def test_other_errors() -> None:
    with pytest.raises(ValueError, match=r"n_labels=0 must be an integer, at least 1"):
        SequenceClassifier(backbone("gpt2"), 0)
    with pytest.raises(ValueError, match=r"positions have shape \(2, 4\), the tokens \(2, 5\)"):
        last_token(torch.zeros(2, 5, 3), positions=torch.zeros(2, 4).long())
    logits, labels = torch.zeros(2, 5, 3), torch.zeros(2, 5).long()
    with pytest.raises(ValueError, match=r"positions have shape \(2, 4\), the tokens \(2, 5\)"):
        token_classification_loss(logits, labels, positions=labels[:, :4])
    with pytest.raises(ValueError, match=r"labels have shape \(2, 4\); it must be \(2, 5\)"):
        token_classification_loss(logits, labels[:, :4], positions=labels[:, :4])
    with pytest.raises(ValueError, match=r"dtype torch.float32; class numbers"):
        token_classification_loss(logits, labels.float(), positions=labels)


def test_a_mask_is_not_taken_for_positions_and_a_language_model_not_for_a_backbone() -> None:
    model, idx = tiny_gpt2(), token_ids(2, 5)
    mask = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    x = model.backbone(idx)
    for bad in (mask, mask.float()):
        with pytest.raises(ValueError, match="must be integers"):
            last_token(x, positions=bad)
        with pytest.raises(ValueError, match="must be integers"):
            token_classification_loss(x, idx % 3, positions=bad)
    with pytest.raises(ValueError, match="GPT2LMHeadModel is no backbone"):
        SequenceClassifier(model, 2)
