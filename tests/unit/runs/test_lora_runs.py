"""Training adapters: whole runs, killed ones, several processes, and what is refused."""

import copy
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from processes import in_processes
from safetensors.torch import load_file, save_file
from tiny_models import tiny_gpt2, tiny_qwen2
from torch import Tensor, nn

from lm_from_scratch.checkpoint.state import latest_checkpoint
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.runs.checkpoints import frozen_digest, with_checkpoints
from lm_from_scratch.runs.config import TrainConfig, train
from lm_from_scratch.runs.distributed import Processes, processes
from lm_from_scratch.runs.sharded import gathered
from lm_from_scratch.text.batches import PackedBatches, TokenFile, write_tokens
from lm_from_scratch.text.corpora import reference
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.weights import int4
from lm_from_scratch.weights.lora import add_lora_
from lm_from_scratch.weights.quantize import quantize_

MODELS: dict[str, Callable[..., CausalLM]] = {"gpt2": tiny_gpt2, "qwen2": tiny_qwen2}
GROUP = {"gpt2": 28, "qwen2": 8}
ONE = Processes()


def is_norm(name: str) -> bool:
    return "ln_" in name or "norm" in name


STEPS = 12
KILLED = 8  # two steps after a checkpoint
OPTIONS = dict(
    steps=STEPS, lr=2e-2, warmup=2, grad_accumulation=2, max_grad_norm=0.5, eval_every=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> TokenFile:
    texts = reference()[:10]
    tokenizer = Tokenizer.train([d.text for d in texts], 300)
    return write_tokens(texts, tokenizer, tmp_path_factory.mktemp("tokens") / "train.bin")


def small(name: str, bits: int, seed: int = 0) -> CausalLM:
    model = MODELS[name](seed, vocab_size=300, n_layer=2)
    if bits:
        # rounding activations would turn the last bit of a sum into a step of a code
        quantize_(model, bits, GROUP[name] if bits == 4 else None, weight_only=bits == 8)
    return model


def run(
    model: CausalLM,
    tokens: TokenFile,
    folder: Path | None = None,
    group: Processes = ONE,
    killed: int = 0,
    stop_after: int = 0,
    dropout: float = 0.1,
    every: int = 6,
    **changes: object,
) -> dict[str, Tensor]:
    """What is trained after a run, and what its steps reported."""
    add_lora_(model, rank=4, dropout=dropout, also_train=is_norm)
    batches = PackedBatches(tokens, batch_size=4, block_size=32)
    config = TrainConfig(**{**OPTIONS, **changes})
    reported = []
    steps = train(model, batches, config, [batches[100]], group)
    if folder is not None:
        steps = with_checkpoints(steps, folder, every, group.save_training_state)
    for step in steps:
        reported.append((step.loss, step.grad_norm, step.held_out_loss or 0.0))
        if step.step == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if step.step == stop_after:
            steps.close()
    trained = {
        n: gathered(p).detach().clone() for n, p in model.named_parameters() if p.requires_grad
    }
    return {**trained, "reported": torch.tensor(reported, dtype=torch.float64)}


def in_a_fresh_process(root: Path, tokens: TokenFile, killed: int = 0) -> int:
    """Load the quantised base on the meta device, add the adapters, and start or resume the run."""
    program = (
        "import sys, pathlib, torch; sys.path[:0] = sys.argv[1].split(':')\n"
        "import test_lora_runs as t\n"
        "from lm_from_scratch.text.batches import TokenFile\n"
        "from safetensors.torch import save_file\n"
        "root = pathlib.Path(sys.argv[2]); torch.set_num_threads(1)\n"
        "model = t.from_pretrained(root / 'base')\n"
        "result = t.run(model, eval(sys.argv[3], {**vars(pathlib), **vars(t)}), root / 'run',"
        " killed=int(sys.argv[4]))\n"
        "save_file(result, root / 'result.safetensors')\n"
    )
    here = f"{Path(__file__).parent}:{Path(tiny_models.__file__).parent}"
    arguments = [here, str(root), repr(tokens), str(killed)]
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(
        command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ).returncode


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits"), [("gpt2", 4), ("qwen2", 8)])
def test_killed_and_resumed_in_a_fresh_process(tmp_path, tokens, name, bits) -> None:
    save_pretrained(small(name, bits), tmp_path / "base")
    expected = run(from_pretrained(tmp_path / "base"), tokens)
    assert in_a_fresh_process(tmp_path, tokens, killed=KILLED) == -signal.SIGKILL
    assert latest_checkpoint(tmp_path / "run").name == "step-00000006"
    assert in_a_fresh_process(tmp_path, tokens) == 0
    result = load_file(tmp_path / "result.safetensors")
    reported = result.pop("reported")
    assert torch.equal(reported, expected["reported"][6:])
    assert result.keys() | {"reported"} == expected.keys()
    assert all(torch.equal(t, expected[n]) for n, t in result.items())
    held_out = expected["reported"][:, 2]
    assert held_out[-1] < held_out[3] - 0.05  # the corpus is that of this Python


def test_a_checkpoint_holds_what_is_trained(tmp_path, tokens) -> None:
    model = small("qwen2", 8)
    trained = run(model, tokens, tmp_path / "run", steps=3, eval_every=0)
    del trained["reported"]
    (folder,) = (tmp_path / "run").iterdir()
    assert sorted(p.name for p in folder.iterdir()) == ["optimizer.safetensors", "training.json"]
    state = load_file(folder / "optimizer.safetensors")
    keys = {f"{key}/{n}" for n in trained for key in ("exp_avg", "exp_avg_sq", "step")}
    assert state.keys() == keys | trained.keys()
    assert all(torch.equal(state[n], t) for n, t in trained.items())


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_a_run_does_not_go_on_with_other_frozen_weights(tmp_path, tokens, bits) -> None:
    short = dict(folder=tmp_path / "run", steps=4, eval_every=0, every=2)
    run(small("gpt2", bits), tokens, **short, stop_after=2)
    for other in (small("gpt2", bits, seed=1), small("gpt2", {0: 8, 8: 4, 4: 0}[bits])):
        with pytest.raises(ValueError, match="made by another run: frozen was"):
            run(other, tokens, **short)
    assert len(run(small("gpt2", bits), tokens, **short)["reported"]) == 2


def test_a_run_does_not_go_on_with_other_adapters(tmp_path, tokens) -> None:
    short = dict(folder=tmp_path / "run", steps=4, eval_every=0, every=2)
    run(small("gpt2", 8), tokens, **short, stop_after=2)
    with pytest.raises(ValueError, match=r"c_attn was \[4, 16.0, 0.1\], now it is"):
        run(small("gpt2", 8), tokens, **short, dropout=0.0)


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_the_digest_sees_every_number_name_and_shape(bits) -> None:
    model = small("gpt2", bits).requires_grad_(False)
    digest = frozen_digest(model)
    assert digest == frozen_digest(copy.deepcopy(model))
    weight = model.transformer.h[1].mlp.c_proj.weight
    if bits:
        parts = {name: part.clone() for name, part in weight.parts().items()}
        parts["codes"][-1, -1] += 1
        weight.copy_(type(weight).from_parts(parts))
    else:
        weight.detach()[-1, -1:] += 1
    assert frozen_digest(model) != digest
    wide, high = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
    for layer in (wide, high):
        nn.init.ones_(layer.weight).requires_grad_(False)
    assert frozen_digest(wide) != frozen_digest(high)
    model.scalar = nn.Parameter(torch.ones(()), requires_grad=False)
    assert frozen_digest(model)


def test_the_digest_is_the_same_on_every_processor(monkeypatch) -> None:
    digests = set()
    for block in (32, 64):  # rows in a block of 4-bit weights
        monkeypatch.setattr(int4, "block_rows", lambda block=block: block)
        model = small("gpt2", 4).requires_grad_(False)
        assert model.transformer.h[1].mlp.c_proj.weight.codes.shape[2] == block // 2
        digests.add(frozen_digest(model))
    assert len(digests) == 1


def test_a_model_without_anything_to_train_is_refused(tmp_path, tokens) -> None:
    model = small("gpt2", 8).requires_grad_(False)
    batches = PackedBatches(tokens, batch_size=4, block_size=32)
    with pytest.raises(ValueError, match="all parameters are frozen"):
        with_checkpoints(train(model, batches, TrainConfig(steps=1)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("optimizer", ["adamw", "galore"])
def test_updates_in_backward_and_galore(tokens, optimizer) -> None:
    """Frozen weights are nobody's business: GaLore projects the adapters."""
    options = dict(
        steps=6, eval_every=0, max_grad_norm=math.inf, optimizer=optimizer, rank=2, lr=5e-3,
        update_proj_gap=10, grad_accumulation=1, dropout=0.0,
    )  # fmt: skip
    results = [
        run(small("qwen2", 4), tokens, update_in_backward=inside, **options)
        for inside in (False, True)
    ]
    assert all(torch.equal(t, results[1][n]) for n, t in results[0].items() if n != "reported")
    assert torch.equal(results[0]["reported"][:, 0], results[1]["reported"][:, 0])


def two_processes(tokens: TokenFile, root: Path) -> None:
    with processes("ddp") as joined:
        results = {"ddp 8": run(small("gpt2", 8), tokens, group=joined, dropout=0.0)}
        fsdp = replace(joined, parallel="fsdp")
        results["fsdp 0"] = run(small("gpt2", 0), tokens, root / "fsdp", fsdp, dropout=0.0)
        try:
            run(small("gpt2", 8), tokens, group=fsdp)
        except ValueError as error:
            (root / f"refused {joined.rank}").write_text(str(error))
    if joined.rank == 0:
        for name, tensors in results.items():
            save_file(tensors, root / f"{name}.safetensors")


@pytest.mark.slow
def test_two_processes(tmp_path, tokens) -> None:
    in_processes(2, two_processes, tokens, tmp_path)
    for name, bits in (("ddp 8", 8), ("fsdp 0", 0)):
        result = load_file(tmp_path / f"{name}.safetensors")
        expected = run(small("gpt2", bits), tokens, dropout=0.0)
        torch.testing.assert_close(result["reported"], expected["reported"], rtol=1e-4, atol=1e-4)
        for n, t in result.items():
            torch.testing.assert_close(t, expected[n], rtol=1e-3, atol=2e-3)
    for rank in range(2):
        assert "'fsdp' cannot cut quantised weights" in (tmp_path / f"refused {rank}").read_text()
    # what two processes wrote, one resumes: it is the last step already
    done = run(small("gpt2", 0), tokens, tmp_path / "fsdp", dropout=0.0)
    assert done["reported"].numel() == 0
    last = load_file(tmp_path / "fsdp 0.safetensors")
    assert all(torch.equal(done[n], t) for n, t in last.items() if n != "reported")
