"""train.py: the schedule, the step, and a run that is killed and goes on as if it had not been."""

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from model_laws import NEW
from safetensors.torch import load_file
from tiny_models import TINY, tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.checkpoint.state import latest_checkpoint
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.optim import eight_bit
from lm_from_scratch.optim.choose import make_optimizer, parameter_groups, state_bytes
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.optim.muon import Muon
from lm_from_scratch.runs.checkpoints import with_checkpoints
from lm_from_scratch.runs.config import TrainConfig, train
from lm_from_scratch.runs.distributed import Processes
from lm_from_scratch.text.batch import Batch
from lm_from_scratch.text.batches import PackedBatches, TokenFile, write_tokens
from lm_from_scratch.text.corpora import reference
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.dropout import residual_dropout_
from lm_from_scratch.training.in_backward import step_in_backward
from lm_from_scratch.training.loss import causal_lm_loss
from lm_from_scratch.training.objective import NextTokenLoss
from lm_from_scratch.training.train import evaluate, learning_rate, optimizer_step

TEXTS = reference()[:10]
TOKENIZER = Tokenizer.train([d.text for d in TEXTS], 300)
DROPOUT = dict(vocab_size=300, embd_pdrop=0.2, resid_pdrop=0.2, attn_pdrop=0.2)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> TokenFile:
    return write_tokens(TEXTS, TOKENIZER, tmp_path_factory.mktemp("tokens") / "train.bin")


def fresh(**changes: object) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(**{**TINY, **DROPOUT, **changes}))


def batches_of(tokens: TokenFile, seed: int = 0) -> PackedBatches:
    return PackedBatches(tokens, batch_size=3, block_size=32, seed=seed)


def test_the_schedule_ends_where_it_says() -> None:
    config = TrainConfig(steps=30, lr=1e-3, min_lr=1e-5, warmup=5)
    rates = [learning_rate(step, config) for step in range(1, 31)]
    assert rates[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])
    assert rates[-1] == pytest.approx(1e-5)
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert learning_rate(31, config) == learning_rate(10**6, config) == 1e-5  # never back up


def test_the_schedule_equals_torch_after_the_warm_up() -> None:
    config = TrainConfig(steps=25, lr=1e-3, min_lr=1e-4, warmup=5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=1e-4)
    for step in range(5, 26):
        assert learning_rate(step, config) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        theirs.step()


def test_biases_and_norms_do_not_decay() -> None:
    model = tiny_gpt2()
    decay, none = parameter_groups(model, 0.1)
    assert decay["weight_decay"] == 0.1 and none["weight_decay"] == 0.0
    names = {id(p): name for name, p in model.named_parameters()}
    decayed = {names[id(p)] for p in decay["params"]}
    assert len(decayed) + len(none["params"]) == len(names)
    assert all(name.endswith("weight") and "ln_" not in name for name in decayed)
    assert {"transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"} <= decayed


def test_a_step_equals_the_same_step_written_with_torch() -> None:
    config = TrainConfig(steps=10, lr=1e-2, max_grad_norm=0.5, weight_decay=0.1)
    # in float64: the bias of the keys has no gradient but rounding, which Adam would blow up
    ours, theirs = tiny_gpt2().double(), tiny_gpt2().double()
    optimizers = [
        torch.optim.AdamW(parameter_groups(m, 0.1), lr=1e-2, betas=config.betas, fused=fused)
        for m, fused in ((ours, True), (theirs, False))
    ]
    for i in range(4):
        idx = token_ids(2, 9, seed=i)
        targets = token_ids(2, 9, seed=i + 50)
        parts = [Batch(idx, targets)]
        loss, norm = optimizer_step(ours, optimizers[0], parts, config.max_grad_norm)
        optimizers[1].zero_grad()
        want = torch.nn.functional.cross_entropy(theirs(idx).flatten(0, 1), targets.flatten())
        want.backward()
        want_norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizers[1].step()
        assert loss == pytest.approx(want.item(), rel=1e-5)
        assert norm == pytest.approx(want_norm.item(), rel=1e-4)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_accumulated_parts_of_unequal_size_give_the_step_of_the_whole_batch() -> None:
    idx, targets = token_ids(4, 9), token_ids(4, 9, seed=8)
    targets[0, 2:] = IGNORE  # parts with different numbers of targets
    results = []
    for cuts in ([4], [1, 3], [1, 1, 2]):
        model = tiny_gpt2().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts = [Batch(a, b) for a, b in zip(idx.split(cuts), targets.split(cuts), strict=True)]
        results.append((optimizer_step(model, optimizer, parts), model.state_dict()))
    for (loss, norm), state in results[1:]:
        assert loss == pytest.approx(results[0][0][0], rel=1e-6)
        assert norm == pytest.approx(results[0][0][1], rel=1e-6)
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, results[0][1][name], atol=1e-7, rtol=1e-6)


def test_a_gradient_that_is_not_finite_stops_before_the_weights() -> None:
    model = tiny_gpt2()
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = math.inf
    before = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = Batch(token_ids(2, 9), token_ids(2, 9))
    with pytest.raises(FloatingPointError, match="gradient norm is"):
        optimizer_step(model, optimizer, [batch])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_step_without_targets_changes_nothing() -> None:
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    batch = Batch(token_ids(2, 9), torch.full((2, 9), IGNORE))
    assert optimizer_step(model, optimizer, [batch]) == (0.0, 0.0)
    assert torch.equal(model.transformer.wte.weight, tiny_gpt2().transformer.wte.weight)


def test_evaluate_is_the_mean_over_tokens_without_dropout(tokens) -> None:
    model = fresh().train()
    batches = [batches_of(tokens)[i] for i in range(3)]
    batches[1].targets[:, 5:] = IGNORE
    got = evaluate(model, batches)
    assert model.training and got == evaluate(model, batches)
    model.eval()
    logits = [model(b.idx, positions=b.positions, documents=b.documents) for b in batches]
    want = causal_lm_loss(torch.cat(logits), torch.cat([b.targets for b in batches]))
    assert got == pytest.approx(want.item(), rel=1e-5)
    with pytest.raises(ValueError, match="no target"):
        evaluate(model, [])


def test_training_learns(tokens) -> None:
    model = fresh(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    config = TrainConfig(steps=60, lr=1e-2, warmup=5, eval_every=30)
    batches = batches_of(tokens)
    steps = list(train(model, batches, config, held_out=[batches[999]]))
    assert [s.step for s in steps] == list(range(1, 61))
    assert abs(steps[0].loss - math.log(300)) < 0.1
    assert steps[-1].loss < steps[0].loss - 0.7
    assert [s.step for s in steps if s.held_out_loss is not None] == [30, 60]
    assert all(s.tokens_per_second > 0 and s.grad_norm > 0 for s in steps)


def test_bfloat16_autocast_keeps_float32_weights_and_learns(tokens) -> None:
    model = fresh()
    config = TrainConfig(steps=30, lr=1e-2, warmup=2, dtype="bfloat16")
    losses = [s.loss for s in train(model, batches_of(tokens), config)]
    assert losses[-1] < losses[0] - 0.5
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def run(tokens: TokenFile, folder: Path | None, stop_after: int = 0, **changes) -> GPT2LMHeadModel:
    model = fresh()
    config = TrainConfig(
        **{**dict(steps=12, lr=1e-2, min_lr=1e-3, warmup=2, grad_accumulation=2), **changes}
    )
    steps = train(model, batches_of(tokens), config)
    if folder is not None:
        steps = with_checkpoints(steps, folder, every=4)
    for step in steps:
        if step.step == stop_after:
            steps.close()
            break
    return model


def same_weights(a: GPT2LMHeadModel, b: GPT2LMHeadModel) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(
    "stop_after", [4, 7, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 11))]
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tokens, tmp_path, stop_after) -> None:
    whole = run(tokens, None)
    stopped = run(tokens, tmp_path, stop_after)
    assert latest_checkpoint(tmp_path).name == f"step-{stop_after:08}"
    assert not same_weights(stopped, whole)
    torch.manual_seed(999)  # the random state at the restart must not matter
    assert same_weights(run(tokens, tmp_path), whole)
    assert same_weights(run(tokens, tmp_path), whole)  # a finished run stays as it is


def test_training_leaves_the_callers_random_state_alone(tokens) -> None:
    model = fresh()
    state = torch.get_rng_state()
    list(train(model, batches_of(tokens), TrainConfig(steps=2)))
    assert torch.equal(torch.get_rng_state(), state)


def test_another_run_in_the_same_folder_is_refused(tokens, tmp_path) -> None:
    run(tokens, tmp_path, stop_after=2)
    with pytest.raises(ValueError, match=r"lr was 0\.01, now it is 0\.02"):
        run(tokens, tmp_path, lr=0.02)
    with pytest.raises(ValueError, match="n_layer was 3, now it is 2"):
        config = TrainConfig(steps=12, lr=1e-2, warmup=2)
        with_checkpoints(train(fresh(n_layer=2), batches_of(tokens), config), tmp_path)


def test_an_error_inside_a_step_writes_no_checkpoint(tokens, tmp_path) -> None:
    model = fresh()
    steps = with_checkpoints(train(model, batches_of(tokens), TrainConfig(steps=5)), tmp_path)
    next(steps)
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError):
        next(steps)
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"lr": 0.0}, r"lr=0\.0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"min_lr": 1.0}, r"min_lr=1\.0 must not exceed lr=0\.001"),
        ({"warmup": 10}, "warmup=10 must be shorter than steps=10"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"grad_accumulation": 0}, "grad_accumulation=0"),
        ({"max_grad_norm": -1.0}, r"max_grad_norm=-1\.0"),
        ({"weight_decay": -0.1}, r"weight_decay=-0\.1"),
        ({"lr": math.inf}, "lr=inf"),
        ({"weight_decay": math.nan}, "weight_decay=nan"),
        ({"min_lr": math.nan}, "min_lr=nan"),
        ({"betas": (1.5, 0.9)}, r"betas=\(1\.5, 0\.9\)"),
        ({"max_grad_norm": math.nan}, "max_grad_norm=nan"),
        ({"optimizer": "sgd"}, "optimizer='sgd' must be 'adamw' or 'galore' or 'muon'"),
        ({"rank": 0}, "rank=0"),
        ({"update_proj_gap": 0}, "update_proj_gap=0"),
        ({"scale": math.nan}, "scale=nan"),
        ({"projection_type": "diagonal"}, "projection_type='diagonal'"),
        ({"moments": "forget"}, "moments='forget'"),
        ({"basis": "lu"}, "basis='lu'"),
        ({"optim_bits": 4}, "optim_bits=4 must be 8 or 32"),
        ({"optimizer": "muon", "optim_bits": 8}, "optim_bits=8 is for AdamW and GaLore"),
        ({"muon_scale": 0.0}, "muon_scale=0.0 must be"),
        ({"update_in_backward": True}, r"max_grad_norm=1\.0 must be inf with update_in_backward"),
        ({"steps": 2.5}, r"steps=2\.5 must be an integer"),
        ({"warmup": 0.5}, r"warmup=0\.5 must be an integer"),
    ],
)
def test_bad_configs_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{**dict(steps=10), **arguments})


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen2])
def test_galore_projects_the_matrices_of_the_blocks_alone(make) -> None:
    model = make()
    config = TrainConfig(steps=1, optimizer="galore", rank=5, scale=0.5, weight_decay=0.2)
    galore, matrices, others = make_optimizer(model, config).param_groups
    assert (galore["rank"], galore["scale"], galore["weight_decay"]) == (5, 0.5, 0.2)
    assert (matrices["rank"], matrices["weight_decay"]) == (None, 0.2)
    assert (others["rank"], others["weight_decay"]) == (None, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    projected = {names[id(p)] for p in galore["params"]}
    of_blocks = re.compile(r"(attn|mlp)\.(c|[a-z]+)_[a-z]+\.weight$")
    assert projected == {name for name in names.values() if of_blocks.search(name)}
    embeddings = {names[id(p)] for p in matrices["params"]}
    assert embeddings <= {
        "transformer.wte.weight", "transformer.wpe.weight",
        "model.embed_tokens.weight", "lm_head.weight",
    }  # fmt: skip
    assert len(embeddings) == 2
    assert len(projected) + 2 + len(others["params"]) == len(names)
    adamw = make_optimizer(model, TrainConfig(steps=1))
    assert not isinstance(adamw, GaLore) and len(adamw.param_groups) == 2


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen2])
def test_muon_moves_the_matrices_that_galore_projects(make) -> None:
    model = make()
    config = TrainConfig(steps=1, optimizer="muon", muon_scale=2.0, weight_decay=0.2)
    optimizer = make_optimizer(model, config)
    muon, matrices, others = optimizer.param_groups
    assert isinstance(optimizer, Muon)
    chosen = ("momentum", "scale", "weight_decay", "adjust_lr_fn")
    assert [muon[name] for name in chosen] == [0.95, 2.0, 0.2, "match_rms_adamw"]
    assert matrices["momentum"] is others["momentum"] is None
    galore = make_optimizer(model, TrainConfig(steps=1, optimizer="galore", rank=5))
    for ours, theirs in zip(optimizer.param_groups, galore.param_groups, strict=True):
        assert [id(p) for p in ours["params"]] == [id(p) for p in theirs["params"]]


def muon_run(tokens, folder=None, stop_after=0, **changes) -> GPT2LMHeadModel:
    return run(tokens, folder, stop_after, **{"optimizer": "muon", **changes})


def test_muon_trains_and_a_stopped_run_goes_on_bit_for_bit(tokens, tmp_path) -> None:
    whole = muon_run(tokens)
    muon_run(tokens, tmp_path, stop_after=5)
    assert same_weights(muon_run(tokens, tmp_path), whole)
    assert not same_weights(run(tokens, None), whole)
    with pytest.raises(ValueError, match=r"muon_scale was 1\.0, now it is 0\.5"):
        muon_run(tokens, tmp_path, muon_scale=0.5)


def galore_run(tokens, folder=None, stop_after=0, **changes) -> GPT2LMHeadModel:
    few = dict(optimizer="galore", rank=4, update_proj_gap=3)
    return run(tokens, folder, stop_after, **{**few, **changes})


def test_galore_trains_and_a_stopped_run_goes_on_bit_for_bit(tokens, tmp_path) -> None:
    whole = galore_run(tokens)
    galore_run(tokens, tmp_path, stop_after=5)
    assert same_weights(galore_run(tokens, tmp_path), whole)
    assert not same_weights(run(tokens, None), whole)
    assert not same_weights(galore_run(tokens, rank=5), whole)
    with pytest.raises(ValueError, match="rank was 4, now it is 5"):
        galore_run(tokens, tmp_path, rank=5)


@pytest.mark.parametrize("make", [pytest.param(run, marks=pytest.mark.slow), galore_run])
def test_a_run_with_moments_in_8_bits_goes_on_bit_for_bit(
    tokens, tmp_path, monkeypatch, make
) -> None:
    monkeypatch.setattr(eight_bit, "SMALLEST", 64)  # the model is small
    whole = make(tokens, None, optim_bits=8)
    make(tokens, tmp_path, stop_after=5, optim_bits=8)
    state = load_file(latest_checkpoint(tmp_path) / "optimizer.safetensors")
    coded = [name for name, value in state.items() if value.dtype == torch.uint8]
    assert coded and all(name.replace("/", "_absmax/") in state for name in coded)
    assert same_weights(make(tokens, tmp_path, optim_bits=8), whole)
    assert not same_weights(make(tokens, None), whole)
    with pytest.raises(ValueError, match="optim_bits was 8, now it is 32"):
        make(tokens, tmp_path)


def test_bytes_of_the_state_are_those_that_are_held(monkeypatch) -> None:
    monkeypatch.setattr(eight_bit, "SMALLEST", 64)
    sizes = []
    eight = {"optim_bits": 8}
    for changes in ({}, {"optimizer": "muon"}, eight, {"optimizer": "galore", "rank": 4, **eight}):
        model, config = fresh(), TrainConfig(steps=1, **changes)
        optimizer = make_optimizer(model, config)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        held = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
        assert state_bytes(model, config) == held
        sizes.append(held)
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    "make", [run, *(pytest.param(m, marks=pytest.mark.slow) for m in (galore_run, muon_run))]
)
def test_updates_in_backward_are_the_same_steps_without_clipping(tokens, tmp_path, make) -> None:
    free = dict(max_grad_norm=math.inf, grad_accumulation=1 if make is galore_run else 2)
    whole = make(tokens, None, **free)
    inside = make(tokens, None, update_in_backward=True, **free)
    assert same_weights(inside, whole)
    assert all(p.grad is None for p in inside.parameters())
    make(tokens, tmp_path, stop_after=5, update_in_backward=True, **free)
    assert same_weights(make(tokens, tmp_path, update_in_backward=True, **free), whole)
    config = TrainConfig(steps=2, update_in_backward=True, max_grad_norm=math.inf)
    steps = list(train(fresh(), batches_of(tokens), config))
    assert all(math.isnan(step.grad_norm) and step.loss > 0 for step in steps)


def test_evaluation_without_text_is_refused(tokens) -> None:
    with pytest.raises(ValueError, match="eval_every=5 needs held-out"):
        train(fresh(), batches_of(tokens), TrainConfig(steps=10, eval_every=5))


def test_train_equals_the_loop_written_by_hand(tokens) -> None:
    """Schedule, groups, betas, decay, clipping, accumulation and data order, all at once."""
    config = TrainConfig(
        steps=5, lr=3e-2, min_lr=1e-3, warmup=2, betas=(0.8, 0.9), weight_decay=0.3,
        max_grad_norm=0.4, grad_accumulation=2,
    )  # fmt: skip
    no_dropout = dict(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    ours, theirs = (fresh(**no_dropout).double() for _ in range(2))
    reported = list(train(ours, batches_of(tokens), config))
    decayed = [p for p in theirs.parameters() if p.dim() > 1]
    others = [p for p in theirs.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}],
        betas=(0.8, 0.9), fused=False,
    )  # fmt: skip
    data = batches_of(tokens)
    rates = [1.5e-2, 3e-2]
    rates += [1e-3 + (3e-2 - 1e-3) * (1 + math.cos(math.pi * t / 3)) / 2 for t in (1, 2, 3)]
    for i, lr in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        parts = [data[2 * i], data[2 * i + 1]]
        logits = torch.cat(
            [theirs(b.idx, positions=b.positions, documents=b.documents) for b in parts]
        )
        targets = torch.cat([b.targets for b in parts])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.4)
        optimizer.step()
        assert reported[i].loss == pytest.approx(loss.item(), rel=1e-9)
        assert reported[i].grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert reported[i].lr == pytest.approx(lr)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_dropout_is_on_and_new_in_every_step(tokens) -> None:
    class OneBatch(PackedBatches):
        def __getitem__(self, i: int) -> Batch:
            return super().__getitem__(0)

    batches = OneBatch(tokens, batch_size=3, block_size=32)
    still = TrainConfig(steps=5, lr=1e-30, weight_decay=0.0)  # the weights stay as they are
    model = fresh().eval()
    losses = {step.loss for step in train(model, batches, still)}
    assert len(losses) == 5
    again = {step.loss for step in train(fresh(), batches, still)}
    other = {s.loss for s in train(fresh(), batches, TrainConfig(steps=5, lr=1e-30, seed=1))}
    assert losses == again and not losses & other


def test_autocast_reaches_training_and_evaluation(tokens) -> None:
    no_dropout = dict(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    batches = batches_of(tokens)
    first = {
        dtype: next(train(fresh(**no_dropout), batches, TrainConfig(steps=2, dtype=dtype))).loss
        for dtype in ("float32", "bfloat16")
    }
    assert first["float32"] != first["bfloat16"] == pytest.approx(first["float32"], abs=0.02)
    model = fresh(**no_dropout)
    losses = [evaluate(model, [batches[0]], dtype) for dtype in ("float32", "bfloat16")]
    assert losses[0] != losses[1] == pytest.approx(losses[0], abs=0.02)


def test_the_held_out_loss_is_of_all_batches_after_the_step(tokens) -> None:
    model, batches = fresh(), batches_of(tokens)
    held_out = [batches[100], batches[101]]
    (step,) = train(model, batches, TrainConfig(steps=1, eval_every=1), held_out)
    assert step.held_out_loss == evaluate(model, held_out)
    assert step.held_out_loss != evaluate(model, held_out[:1])


def test_a_due_checkpoint_is_written_after_the_caller_has_seen_the_step(tokens, tmp_path) -> None:
    """A run killed in between is resumed before that step, and logs it then."""
    steps = with_checkpoints(
        train(fresh(), batches_of(tokens), TrainConfig(steps=3)), tmp_path, every=1
    )
    next(steps)
    assert latest_checkpoint(tmp_path) is None
    next(steps)
    assert latest_checkpoint(tmp_path).name == "step-00000001"


def test_a_negative_number_of_steps_between_checkpoints_is_refused(tokens, tmp_path) -> None:
    with pytest.raises(ValueError, match="every=-1 must not be negative"):
        with_checkpoints(
            train(fresh(), batches_of(tokens), TrainConfig(steps=1)), tmp_path, every=-1
        )


def test_several_processes_do_not_write_as_one(tokens, tmp_path) -> None:
    run = train(fresh(), batches_of(tokens), TrainConfig(steps=1))
    run.processes = Processes("ddp", 0, 2)
    with pytest.raises(ValueError, match="2 processes would write the same files"):
        with_checkpoints(run, tmp_path)
    assert list(tmp_path.glob("step-*")) == []


def test_other_text_is_another_run(tokens, tmp_path) -> None:
    run(tokens, tmp_path / "run", stop_after=2)
    texts = [replace(d, text=d.text.replace("e", "a")) for d in TEXTS]
    other = write_tokens(texts, TOKENIZER, tmp_path / "other.bin")
    with pytest.raises(ValueError, match="the text, or its tokenizer, has changed"):
        run(other, tmp_path / "run")


def test_residual_dropout_is_where_gpt2_has_it_and_acts_in_training_alone() -> None:
    model, idx = tiny_qwen2(), token_ids(2, 9)
    want = model(idx)
    residual_dropout_(model, 0.5)
    assert torch.equal(model(idx), want)
    shares = {}
    block = model.model.layers[0]
    parts = {"embedding": model.model.embed_tokens, "attention": block.self_attn, "mlp": block.mlp}
    for name, part in parts.items():
        part.register_forward_hook(
            lambda module, args, out, name=name: shares.update({name: (out == 0).float().mean()})
        )
    model.train()(idx)
    assert all(0.4 < share < 0.6 for share in shares.values()), shares
    assert len(block.input_layernorm._forward_hooks) == len(model.model.norm._forward_hooks) == 0
    with pytest.raises(ValueError, match=r"dropout=1\.0"):
        residual_dropout_(model, 1.0)


def test_residual_dropout_leaves_the_norms_of_every_architecture() -> None:
    model = NEW["hybrid"]()
    residual_dropout_(model, 0.5)
    hooked = {name for name, module in model.named_modules() if module._forward_hooks}
    kinds = {name.split(".")[-1] for name in hooked}
    assert kinds == {"embed_tokens", "self_attn", "linear_attn", "mlp"}


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_qwen2])
def test_the_chunked_loss_takes_the_same_step(make) -> None:
    idx = token_ids(4, 17)
    part = Batch(idx[:, :-1].contiguous(), idx[:, 1:].contiguous())
    results = []
    for chunked in (False, True):
        model = make()
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        reported = optimizer_step(NextTokenLoss(model, chunked=chunked), sgd, [part])
        results.append((reported, model.state_dict()))
    (loss, norm), plain = results[0]
    assert results[1][0] == pytest.approx((loss, norm), rel=1e-5)
    for name, tensor in results[1][1].items():
        torch.testing.assert_close(tensor, plain[name], atol=2e-5, rtol=0, msg=name)


def test_every_process_draws_its_own_dropout(tokens) -> None:
    losses = []
    for rank in (0, 0, 1):
        config = TrainConfig(steps=2)
        (first, *_) = train(fresh(), batches_of(tokens), config, processes=Processes(rank=rank))
        losses.append(first.loss)
    assert losses[0] == losses[1] != losses[2]


def test_update_in_backward_ends_with_the_optimizer_s_own_step() -> None:
    model, calls = tiny_gpt2(), []
    config = TrainConfig(
        steps=2, optimizer="galore", rank=4, update_in_backward=True, max_grad_norm=math.inf
    )
    optimizer = make_optimizer(model, config)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    parts = [Batch(token_ids(2, 9, seed=i), token_ids(2, 9, seed=i + 9)) for i in range(2)]
    step_in_backward(model, optimizer, parts)
    assert calls == [1]


def test_a_checkpoint_of_a_run_without_a_target_so_far_can_be_resumed(tokens, tmp_path) -> None:
    class NoTargetAtFirst(PackedBatches):
        def __getitem__(self, i: int) -> Batch:
            batch = super().__getitem__(i)
            if i == 0:
                batch = replace(batch, targets=torch.full_like(batch.targets, IGNORE))
            return batch

    for optimizer in ("adamw", "galore", "muon"):
        ends = []
        for stops in (False, True):
            config = TrainConfig(steps=3, optimizer=optimizer, rank=4)
            folder = tmp_path / f"{optimizer}-{stops}"
            batches = NoTargetAtFirst(tokens, batch_size=3, block_size=32, seed=0)
            model = fresh()
            steps = with_checkpoints(train(model, batches, config), folder, every=1)
            if stops:
                next(steps)
                steps.close()
                model = fresh()
                steps = with_checkpoints(train(model, batches, config), folder, every=1)
            list(steps)
            ends.append(model.state_dict())
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0]), optimizer
