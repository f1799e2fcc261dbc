"""pairs.py: the loss of a batch is DPO in closed form, of answers that are read one by one."""

import math

import pytest
import torch
from tiny_models import chat_tokenizer, enlarge_, tiny_gpt2, tiny_qwen2

from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.runs.config import TrainConfig, train
from lm_from_scratch.runs.distributed import Processes
from lm_from_scratch.text.conversations import Answered
from lm_from_scratch.text.examples import pair
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.dropout import residual_dropout_
from lm_from_scratch.training.pairs import PairBatch, PairBatches, preferred
from lm_from_scratch.training.train import evaluate

ROWS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "no idea" if a % 2 else str(a)}
    for a in range(3)
    for b in (7, 900)
] + [
    {
        "prompt": [{"role": "user", "content": "Hi"}],
        "chosen": [{"role": "assistant", "content": "Good day, 世界!"}],
        "rejected": [{"role": "assistant", "content": ""}],
    }
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def pairs(tokenizer) -> list[tuple[Answered, Answered]]:
    return [pair(tokenizer, row) for row in ROWS]


MODELS = {
    "gpt2": lambda **more: tiny_gpt2(vocab_size=259, std=0.1, **more),
    "qwen2": lambda **more: tiny_qwen2(vocab_size=259, std=0.1, **more),
}


def log_prob(model: CausalLM, one: Answered) -> float:
    """Of the answer alone, after its question."""
    with torch.no_grad():
        logs = model(torch.tensor([one.ids]))[0].log_softmax(-1)
    return sum(logs[n - 1, one.ids[n]].item() for n in range(1, len(one.ids)) if one.answer[n])


def moved(model: CausalLM) -> CausalLM:
    """Other weights, in place."""
    enlarge_(model, seed=1, std=0.12)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_dpo_in_closed_form(name: str, tokenizer, pairs) -> None:
    model, beta = MODELS[name]().double(), 0.3
    batches = PairBatches(pairs, tokenizer, model, 3, 64, beta=beta, seed=5)
    before = [[log_prob(model, one) for one in both] for both in pairs]
    assert torch.allclose(batches.reference, torch.tensor(before).double(), atol=1e-9)
    loss_of = batches.loss(moved(model), "float32")
    losses = []
    for (chosen, rejected), (ref_chosen, ref_rejected) in zip(pairs, before, strict=True):
        margin = log_prob(model, chosen) - ref_chosen - log_prob(model, rejected) + ref_rejected
        losses.append(-math.log(1 / (1 + math.exp(-beta * margin))))
    for i in range(4):
        rows = batches.order[i]
        with torch.no_grad():
            loss = loss_of(**vars(batches[i])).item()
        assert loss == pytest.approx(sum(losses[row] for row in rows) / 3, abs=1e-9)
    every = evaluate(loss_of, batches.each_once())
    assert every == pytest.approx(sum(losses) / len(losses), abs=1e-9)
    assert preferred(model, batches) == sum(loss < math.log(2) for loss in losses)


def test_a_batch_is_a_function_of_the_seed_and_its_number(tokenizer, pairs) -> None:
    first, again = (PairBatches(pairs, tokenizer, MODELS["gpt2"](), 3, 64, seed=1) for _ in "12")
    wanted = {i: first[i] for i in range(5)}
    for i in (4, 0, 2, 1, 3):
        for name, tensor in vars(again[i]).items():
            assert tensor is None or torch.equal(tensor, vars(wanted[i])[name])
    assert wanted[0].idx.shape[:2] == (3, 2) and wanted[0].reference.shape == (3, 2)
    assert isinstance(wanted[0], PairBatch) and wanted[0].count == 3


def test_a_pair_without_targets_does_not_count(tokenizer, pairs) -> None:
    batch = PairBatches(pairs, tokenizer, MODELS["gpt2"](), 3, 64)[0]
    batch.targets[1] = IGNORE
    assert batch.count == 2


@pytest.mark.parametrize("name", MODELS)
def test_it_begins_at_ln_2_and_the_reference_stays(name: str, tokenizer, pairs) -> None:
    model = MODELS[name]()
    batches = PairBatches(pairs, tokenizer, model, 3, 64)
    reference = batches.reference.clone()
    config = TrainConfig(steps=8, lr=1e-3, eval_every=8)
    steps = list(train(model, batches, config, [*batches.each_once()], loss=batches.loss))
    assert steps[0].loss == pytest.approx(math.log(2), abs=1e-5)
    assert steps[-1].held_out_loss < 0.6
    assert torch.equal(batches.reference, reference)
    assert preferred(model, batches) == len(pairs)


@pytest.mark.parametrize("name", MODELS)
def test_in_bfloat16_it_begins_at_ln_2_too(name: str, tokenizer, pairs) -> None:
    model = MODELS[name]()
    batches = PairBatches(pairs, tokenizer, model, len(pairs), 64, beta=1.0, dtype="bfloat16")
    exact = PairBatches(pairs, tokenizer, model, len(pairs), 64, beta=1.0)
    assert (batches.reference - exact.reference).abs().max() > 1e-2
    assert not any(key == "dtype" for key in batches.recipe())  # a number of the run
    for learner in (batches, exact):
        loss = evaluate(learner.loss(model, "bfloat16"), learner.each_once())
        assert (abs(loss - math.log(2)) < 1e-5) == (learner is batches)
    assert preferred(model, batches) == 0


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_speaks_without_dropout(name: str, tokenizer, pairs) -> None:
    shares = dict(embd_pdrop=0.5, resid_pdrop=0.5) if name == "gpt2" else {}
    model = MODELS[name](**shares).train()
    if name == "qwen2":
        residual_dropout_(model, 0.5)
    batches = PairBatches(pairs, tokenizer, model, 3, 64)
    assert model.training
    plain = PairBatches(pairs, tokenizer, MODELS[name](), 3, 64)
    assert torch.equal(batches.reference, plain.reference)
    loss = next(train(model, batches, TrainConfig(steps=1), loss=batches.loss)).loss
    assert abs(loss - math.log(2)) > 1e-3  # the dropout acts in training


def gradient(model: CausalLM, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_rows_that_are_shared_out_make_the_same_gradient(size: int, tokenizer, pairs) -> None:
    model = MODELS["qwen2"]()
    batch = PairBatches(pairs, tokenizer, model, 4, 64)[0]
    loss_of = PairBatches(pairs, tokenizer, model, 4, 64).loss(moved(model), "float32")
    whole = gradient(model, loss_of(**vars(batch)))
    shares = [Processes("ddp", rank, size).share(batch) for rank in range(size)]
    assert sum(share.count for share in shares) == 4  # one of five is idle
    parts = [loss_of(**vars(share)) * share.count / 4 for share in shares]
    bound = 1e-5 * float(whole.abs().max())
    torch.testing.assert_close(gradient(model, sum(parts)), whole, atol=bound, rtol=1e-4)


def test_parts_of_a_batch_take_the_same_step(tokenizer, pairs) -> None:
    weights = []
    for batch_size, parts in ((6, 1), (2, 3)):
        model = MODELS["qwen2"]()
        batches = PairBatches(pairs, tokenizer, model, batch_size, 64, beta=1.0)
        config = TrainConfig(steps=2, lr=1e-3, grad_accumulation=parts)
        loss = [step.loss for step in train(model, batches, config, loss=batches.loss)]
        weights.append([*model.parameters(), torch.tensor(loss)])
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_another_reference_is_another_run(tokenizer, pairs) -> None:
    model = MODELS["gpt2"]()
    one, same = (PairBatches(pairs, tokenizer, model, 3, 64).recipe() for _ in range(2))
    assert one == same and {"text", "beta", "reference", "seed"} < one.keys()
    with torch.no_grad():
        model.backbone.wte.weight[3, 5] += 1e-3
    other = PairBatches(pairs, tokenizer, model, 3, 64).recipe()
    assert {name for name in one if one[name] != other[name]} == {"reference"}


def test_what_does_not_fit_is_refused(tokenizer, pairs) -> None:
    model = MODELS["gpt2"]()
    for changes, message in (
        (dict(batch_size=8), "7 pairs are fewer than batch_size=8"),
        (dict(block_size=9), "more than block_size=9"),
        (dict(beta=0.0), "beta=0.0 must be a positive number"),
        (dict(beta=math.nan), "beta=nan must be a positive number"),
        (dict(batch_size=0), "batch_size=0 must be an integer, at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            PairBatches(pairs, tokenizer, model, **{**dict(batch_size=3, block_size=64), **changes})
    batches = PairBatches(pairs, tokenizer, model, 3, 64)
    with pytest.raises(ValueError, match="chunked_loss=True is for the loss of the next token"):
        train(model, batches, TrainConfig(steps=1, chunked_loss=True), loss=batches.loss)
