"""distributed.py: several processes take the steps of one, and end and go on like one."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from processes import in_processes, torchrun_environment
from safetensors.torch import load_file, save_file
from small_run import SMALL
from tiny_models import enlarge_, tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.__main__ import main
from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.state import latest_checkpoint
from lm_from_scratch.checkpoint.weights import from_pretrained
from lm_from_scratch.models.deepseek_v3 import DeepseekV3Config
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.optim.galore_basis import PROJECTION_TYPES
from lm_from_scratch.optim.muon import Muon
from lm_from_scratch.runs.checkpoints import with_checkpoints
from lm_from_scratch.runs.config import TrainConfig, train
from lm_from_scratch.runs.distributed import (
    Processes,
    check_environment,
    processes,
    watching_signals,
)
from lm_from_scratch.runs.sharded import ShardedAdamW, ShardedGaLore, gathered, sharded
from lm_from_scratch.text.batch import Batch
from lm_from_scratch.text.batches import PackedBatches, TokenFile, write_tokens
from lm_from_scratch.text.corpora import reference
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.processes import SINGLE_PROCESS

ONE = Processes()
EXPERTS = DeepseekV3Config(
    vocab_size=300, n_layer=2, n_head=2, n_kv_head=2, n_embd=16, intermediate_size=24,
    q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=6, head_dim=4, v_head_dim=6, n_expert=8,
    top_k=2, expert_size=12, n_group=2, top_group=1, first_k_dense_replace=1,
)  # fmt: skip


def tiny_experts() -> CausalLM:
    model = build(EXPERTS)
    enlarge_(model, 0)
    return model


MODELS = {
    "gpt2": lambda: tiny_gpt2(
        vocab_size=300, n_layer=2, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0
    ),
    "qwen2": lambda: tiny_qwen2(vocab_size=300, n_layer=2),
    "experts": tiny_experts,
}
OPTIMIZERS = ("adamw", "galore", "muon")
STEPS = 20
STOP = 7  # in the middle of an update_proj_gap, and not at a due checkpoint
SHORT = dict(steps=3, warmup=1, eval_every=0)
#: Who began a run, who goes on with it, its optimizer and model. "1" is one process, the others are
#: two.
RESUMED = [
    ("1", "ddp", "adamw", "gpt2"), ("ddp", "ddp", "adamw", "gpt2"),
    ("ddp", "fsdp", "adamw", "gpt2"), ("1", "fsdp", "galore", "gpt2"),
    ("ddp", "ddp", "galore", "gpt2"), ("fsdp", "fsdp", "galore", "gpt2"),
    ("fsdp", "fsdp", "adamw", "gpt2"),
    ("ddp", "1", "adamw", "gpt2"), ("fsdp", "1", "galore", "gpt2"),
    ("1", "fsdp", "adamw", "experts"), ("fsdp", "1", "adamw", "experts"),
    ("1", "fsdp", "muon", "gpt2"), ("fsdp", "fsdp", "muon", "gpt2"),
]  # fmt: skip
#: What is stopped: an optimizer and a model.
STOPPED = sorted({resumed[2:] for resumed in RESUMED})


class RaggedBatches(PackedBatches):
    """Rows with unequal numbers of targets, some with none."""

    def __getitem__(self, i: int) -> Batch:
        batch = super().__getitem__(i)
        for row in range(len(batch.targets)):
            batch.targets[row, (7 * i + 11 * row) % 33 :] = IGNORE
        if i % 5 == 0:
            batch.targets[0] = IGNORE
        return batch


def run(
    tokens: TokenFile,
    model_name: str,
    optimizer: str,
    group: Processes = ONE,
    folder: Path | None = None,
    stop_after: int = 0,
    **changes: object,
) -> dict[str, torch.Tensor]:
    """The weights after a run, in float64: GPT-2's key bias has no gradient but rounding, which
    Adam would blow up. Beside them, what the steps reported."""
    model = MODELS[model_name]().double()
    if changes.get("dtype") == "bfloat16":
        model.float()  # autocast leaves float64 alone
    batches = RaggedBatches(tokens, batch_size=4, block_size=32)
    config = TrainConfig(
        **{
            **dict(
                steps=STEPS, lr=1e-2, warmup=2, grad_accumulation=2, max_grad_norm=0.5,
                optimizer=optimizer, rank=8, update_proj_gap=6, moments="rotate",
                eval_every=10,
            ),
            **changes,
        }
    )  # fmt: skip
    held_out = [batches[100], batches[101]]
    held_out[1] = Batch(*(t[:1] for t in vars(held_out[1]).values()))  # fewer rows than processes
    steps = train(model, batches, config, held_out, group)
    if folder is not None:
        steps = with_checkpoints(steps, folder, 5, group.save_training_state)
    reported = []
    for step in steps:
        reported.append((step.loss, step.grad_norm, step.held_out_loss or 0.0))
        if step.step == stop_after:
            steps.close()
    state = {name: gathered(tensor).detach().clone() for name, tensor in model.state_dict().items()}
    return {**state, "reported": torch.tensor(reported, dtype=torch.float64)}


def runs_in_two_processes(tokens: TokenFile, root: Path) -> None:
    """Everything that needs two processes, so that they start once."""
    results = {}
    with processes("ddp") as joined:
        for engine in ("ddp", "fsdp"):
            group = replace(joined, parallel=engine)
            for model, optimizer in product(MODELS, OPTIMIZERS):
                results[f"{engine} {model} {optimizer}"] = run(tokens, model, optimizer, group)
            for optimizer, model in STOPPED:
                stopped = root / f"{engine} {optimizer} {model} stopped"
                run(tokens, model, optimizer, group, stopped, stop_after=STOP)
            results[f"chunked {engine}"] = run(
                tokens, "gpt2", "adamw", group, chunked_loss=True, **SHORT
            )
            results[f"bfloat16 {engine}"] = run(
                tokens, "qwen2", "adamw", group, dtype="bfloat16", **SHORT
            )
        for begun, engine, optimizer, model in RESUMED:
            folder = root / f"{begun} -> {engine} {optimizer} {model}"
            if joined.rank == 0:
                shutil.copytree(root / f"{begun} {optimizer} {model} stopped", folder)
            joined.meet()
            if engine != "1":
                group = replace(joined, parallel=engine)
                results[folder.name] = run(tokens, model, optimizer, group, folder)
    if joined.rank == 0:
        for name, tensors in results.items():
            save_file(tensors, root / f"{name}.safetensors")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> TokenFile:
    texts = reference()[:10]
    tokenizer = Tokenizer.train([d.text for d in texts], 300)
    return write_tokens(texts, tokenizer, tmp_path_factory.mktemp("tokens") / "train.bin")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def results(tokens, root) -> dict[str, dict[str, torch.Tensor]]:
    alone = {}
    for optimizer in OPTIMIZERS:
        for model in MODELS:
            alone[f"1 {model} {optimizer}"] = run(tokens, model, optimizer)
    for optimizer, model in STOPPED:
        folder = root / f"1 {optimizer} {model} stopped"
        run(tokens, model, optimizer, folder=folder, stop_after=STOP)
    alone["chunked 1"] = run(tokens, "gpt2", "adamw", chunked_loss=True, **SHORT)
    alone["bfloat16 1"] = run(tokens, "qwen2", "adamw", dtype="bfloat16", **SHORT)
    in_processes(2, runs_in_two_processes, tokens, root)
    for begun, engine, optimizer, model in RESUMED:
        if engine == "1":
            name = f"{begun} -> {engine} {optimizer} {model}"
            alone[name] = run(tokens, model, optimizer, folder=root / name)
    return alone | {path.stem: load_file(path) for path in root.glob("*.safetensors")}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a if name != "reported")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_processes_take_the_steps_of_one(results, engine, model, optimizer) -> None:
    """Loss, held-out loss, gradient norm, clipping, accumulation, unequal numbers of targets."""
    one, two = results[f"1 {model} {optimizer}"], results[f"{engine} {model} {optimizer}"]
    torch.testing.assert_close(two["reported"], one["reported"], rtol=1e-9, atol=1e-9)
    assert largest_difference(one, two) < 1e-8
    start = MODELS[model]().double().state_dict()
    assert all((one[name] - start[name]).abs().max() > 1e-3 for name in start if "bias" not in name)


@pytest.mark.slow
def test_the_optimizers_differ(results) -> None:
    assert largest_difference(results["1 gpt2 adamw"], results["1 gpt2 galore"]) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(("begun", "ended", "optimizer", "model"), RESUMED)
def test_a_run_goes_on_in_another_number_of_processes(
    results, begun, ended, optimizer, model
) -> None:
    resumed = results[f"{begun} -> {ended} {optimizer} {model}"]
    of_one_engine = begun if begun == ended else "1"
    whole_run = results[f"{of_one_engine} {model} {optimizer}"]
    assert len(resumed["reported"]) == STEPS - STOP
    difference = largest_difference(resumed, whole_run)
    assert difference == 0.0 if begun == ended else difference < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_chunked_loss_and_bfloat16_reach_every_process(results, engine) -> None:
    assert largest_difference(results["chunked 1"], results[f"chunked {engine}"]) < 1e-8
    one, two = results["bfloat16 1"], results[f"bfloat16 {engine}"]
    torch.testing.assert_close(two["reported"], one["reported"], rtol=0.01, atol=0.01)
    assert one["reported"][0, 0] != results["1 qwen2 adamw"]["reported"][0, 0]


@pytest.mark.slow
def test_every_process_writes_its_share_and_the_whole_is_a_model_folder(results, root) -> None:
    step = latest_checkpoint(root / "fsdp -> fsdp adamw gpt2")
    files = sorted(path.name for path in step.iterdir())
    assert files == [
        "config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json",
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors", "training.json",
    ]  # fmt: skip
    sizes = [(step / file).stat().st_size for file in files if file.startswith("shard")]
    assert 0.9 < sizes[0] / sizes[1] < 1.1
    got = from_pretrained(step).state_dict()
    assert all(torch.equal(t, results["fsdp -> fsdp adamw gpt2"][name]) for name, t in got.items())


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_share_that_is_missing_or_cut_is_refused(
    results, root, tokens, tmp_path, number, damage
) -> None:
    shutil.copytree(root / "fsdp -> fsdp adamw gpt2", tmp_path / "run")
    newest = latest_checkpoint(tmp_path / "run")
    for older in {*(tmp_path / "run").glob("step-*")} - {newest}:
        shutil.rmtree(older)
    (file,) = newest.glob(f"shard-0000{number}-*.safetensors")
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-8])
    message = {"missing": "is missing", "cut": "damaged or incomplete"}
    with pytest.raises(ValueError, match=message[damage]):
        run(tokens, "gpt2", "adamw", folder=tmp_path / "run")


# ------------------------------------------------------------------------- the small functions


def test_every_row_of_a_batch_is_in_one_share_and_no_process_is_left_without() -> None:
    idx = token_ids(5, 7)
    batch = Batch(idx, idx + 1, idx + 2, None)
    shares = [Processes("ddp", rank, 3).share(batch) for rank in range(3)]
    rows = [row.tolist() for share in shares for row in share.idx]
    assert sorted(rows) == sorted(idx.tolist())
    for share in shares:
        assert torch.equal(share.targets, share.idx + 1)
        assert torch.equal(share.positions, share.idx + 2) and share.documents is None
    shares = [Processes("fsdp", rank, 8).share(batch) for rank in range(8)]
    assert all(len(share.idx) == 1 for share in shares)
    assert [int((share.targets != IGNORE).any()) for share in shares] == [1] * 5 + [0] * 3
    assert (batch.targets != IGNORE).all()
    assert SINGLE_PROCESS.share(batch) is batch


def test_alone_everything_is_the_trivial_answer() -> None:
    module = torch.nn.Linear(2, 2)
    with processes(None) as group:
        assert (group.parallel, group.rank, group.size) == (None, 0, 1)
        for alone in (SINGLE_PROCESS, group):
            assert alone.wrap(module, torch.nn.ModuleList()) is module
            assert alone.total(1.0, 2) == [1.0, 2]
            with alone.accumulating(module, last=False):
                pass
        with group.first_alone():
            group.meet()


def test_a_process_that_is_stuck_after_a_signal_says_so() -> None:
    said: list[str] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        for seconds in (0.1, 60.0):  # too late, and in time
            with watching_signals(lambda: said.append("stuck"), seconds):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.5 if seconds < 1 else 0.1)
        with watching_signals(lambda: said.append("no signal"), 0.0):
            time.sleep(0.1)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert said == ["stuck"]


TORCHRUN = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="here", MASTER_PORT="1")


@pytest.mark.parametrize(
    ("parallel", "device", "environment", "message"),
    [
        ("fsdp", "cpu", {}, r"--parallel fsdp needs processes, which torchrun.*RANK is missing"),
        ("ddp", "cpu", {**TORCHRUN, "MASTER_PORT": None}, "MASTER_PORT is missing"),
        (None, "cpu", TORCHRUN, "2 processes were started"),
        ("dp", "cpu", TORCHRUN, "parallel='dp' must be one of"),
        ("ddp", "cuda", {**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "9 processes on this machine"),
    ],
)
def test_an_environment_that_does_not_fit_is_named(
    monkeypatch, parallel, device, environment, message
) -> None:
    for name in (*TORCHRUN, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(ValueError, match=message):
        check_environment(parallel, device)
    monkeypatch.setenv("RANK", "1")  # the first process says it, the others leave
    if "RANK" in environment:
        with pytest.raises(SystemExit), processes(parallel, device):
            pass


def test_what_cannot_be_shared_is_refused(tokens) -> None:
    model = MODELS["gpt2"]()
    batches = PackedBatches(tokens, batch_size=4, block_size=32)
    with pytest.raises(ValueError, match="batch_size=4 cannot be shared evenly by 3 processes"):
        train(model, batches, TrainConfig(steps=1), processes=Processes("ddp", 0, 3))
    config = TrainConfig(steps=1, update_in_backward=True, max_grad_norm=math.inf)
    with pytest.raises(ValueError, match="update_in_backward is for one process, not for fsdp"):
        train(model, batches, config, processes=Processes("fsdp", 0, 2))


# --------------------------------------------------------------------------------- the command

TRAIN = [
    "-m", "lm_from_scratch", "train", "--library", "torch",
    "--vocab-size", "300", "--n-layer", "1", "--n-head", "2",
    "--n-embd", "16", "--block-size", "32", "--batch-size", "4", "--grad-accumulation", "2",
    "--steps", "150", "--warmup", "5", "--eval-every", "0", "--checkpoint-every", "4", "--quiet",
    "--dropout", "0.1", "--held-out", "0.3", "--optimizer", "galore", "--rank", "4",
]  # fmt: skip


def torchrun(*arguments: object, engine: str = "ddp") -> subprocess.Popen[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*run, *TRAIN, "--parallel", engine, *map(str, arguments)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(command, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)


def lines(log: Path) -> int:
    return log.read_text().count("\n") if log.is_file() else 0


def wait_for_lines(log: Path, goal: int, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and lines(log) < goal:
        time.sleep(0.002)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i, document in enumerate(reference()[:10]):
        (folder / f"{i}.txt").write_text(document.text, encoding="utf-8")
    return folder


def two_processes(*arguments: object) -> tuple[int, str, str]:
    """The command in two processes without the launcher, which takes seconds to start."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, *TRAIN, "--parallel", "ddp", *map(str, arguments)]
    started = []
    for rank in range(2):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **torchrun_environment(rank, 2, store.port),
        }
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(subprocess.Popen(command, text=True, env=environment, **pipes))
    ended = [process.communicate(timeout=300) for process in started]
    said, errors = ("".join(texts) for texts in zip(*ended, strict=True))
    return max(process.returncode for process in started), said, errors


@pytest.fixture(scope="module")
def whole_run(text, tmp_path_factory) -> dict[str, torch.Tensor]:
    """An uninterrupted run of two processes."""
    out = tmp_path_factory.mktemp("whole") / "run"
    code, said, errors = two_processes("--corpus", text, "--out", out)
    assert code == 0, errors
    assert said.count("2 processes, 2 rows each: ddp") == said.count("model written to") == 1
    assert lines(out / "log.jsonl") == 150
    assert not [p for p in out.rglob("*") if p.suffix in (".pt", ".bin", ".metadata")
                and p.parent.name != "data"]  # fmt: skip
    step = from_pretrained(latest_checkpoint(out)).state_dict()
    model = from_pretrained(out / "model").state_dict()
    assert all(torch.equal(step[name], model[name]) for name in model)
    return model


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_a_killed_process_ends_the_run_which_goes_on_bit_for_bit(text, whole_run, tmp_path) -> None:
    out = tmp_path / "run"
    process = torchrun("--corpus", text, "--out", out)
    wait_for_lines(out / "log.jsonl", 10, process)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    killed = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and time.monotonic() - killed < 30
    message = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(message) == 1, errors
    assert "another process of the run has ended; the last checkpoint is" in message[0]
    assert str(latest_checkpoint(out)) in message[0]
    assert "The same command goes on from there" in message[0]
    assert "Exception ignored" not in errors and "train.py" not in errors
    code, said, errors = two_processes("--corpus", text, "--out", out)
    assert code == 0, errors
    assert said.count("going on after step") == 1
    got = from_pretrained(out / "model").state_dict()
    assert all(torch.equal(got[name], whole_run[name]) for name in whole_run)
    steps = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 151))


@pytest.mark.slow
def test_ctrl_c_stops_all_processes_after_the_same_step(text, tmp_path) -> None:
    out = tmp_path / "run"
    process = torchrun("--corpus", text, "--out", out, engine="fsdp")
    wait_for_lines(out / "log.jsonl", 5, process)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert said.count("the same command goes on from there") == 1, errors
    assert "error:" not in errors
    stopped = int(said.split("stopped after step ")[1].split(";")[0])
    assert (
        latest_checkpoint(out).name == f"step-{stopped:08}" and lines(out / "log.jsonl") == stopped
    )
    assert main([*TRAIN[2:], "--corpus", str(text), "--out", str(out)]) == 0  # one may go on
    assert lines(out / "log.jsonl") == 150


@pytest.mark.slow
def test_a_bad_value_is_one_line_of_one_process(text, tmp_path) -> None:
    code, _, errors = two_processes("--corpus", text, "--out", tmp_path / "run", "--batch-size", 3)
    assert code == 2
    # without a network torch warns that this machine's name is not known
    ours = [line for line in errors.splitlines() if "hostname of the client socket" not in line]
    assert ours == ["error: --batch-size 3 cannot be shared evenly by 2 processes"]


def test_the_command_names_what_is_missing(tmp_path, capsys, monkeypatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "run"
    assert main(["train", "--out", str(out), *SMALL, "--parallel", "fsdp"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "torchrun --nproc-per-node 2 -m lm_from_scratch" in error
    assert not out.exists()


# ------------------------------------------------------ GaLore and Muon on sharded parameters

# uneven, or fewer rows than two
SHARDED = ((1, 4), (4, 1), (5, 3), (3, 5), (3, 2, 4), (3, 2, 2, 2), (7,))


def galore_steps(options: dict[str, object], mesh: object = None) -> list[torch.Tensor]:
    """Weights after seven steps past two new bases, sharded by rows if there is a mesh."""
    return some_steps(GaLore, {"rank": 2, "update_proj_gap": 3, **options}, mesh)


def some_steps(base: type, options: dict[str, object], mesh: object = None) -> list[torch.Tensor]:
    """Weights after seven steps of an optimizer, sharded by rows if there is a mesh."""
    from torch.distributed.tensor import Shard, distribute_tensor

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])

    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).double() for shape in SHARDED]
    params = [torch.nn.Parameter(spread(tensor)) for tensor in made]
    kind = base if mesh is None else sharded(base)
    optimizer = kind(params, lr=0.01, **options)
    if mesh is not None:  # as if it came from a file
        for p in params:
            optimizer.state[p].update(optimizer.new_state(p, optimizer.param_groups[0]))
    for step in range(7):
        for p in params:
            grad = torch.randn(p.shape, generator=generator).double()
            p.grad = spread(grad * (step != 3 or p.dim() < 4))  # a gradient of zeros, too
        optimizer.step()
    return [gathered(p).detach() for p in params]


def bad_step(mesh: object) -> None:
    """A step of AdamW where the last number of the last process's rows is not finite."""
    from torch.distributed.tensor import Shard, distribute_tensor

    params = []
    for last in (1.0, math.nan):
        grad = torch.ones(4, 3)
        grad[-1, -1] = last
        params.append(torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])))
        params[-1].grad = distribute_tensor(grad, mesh, [Shard(0)])
    for kind in (ShardedAdamW, ShardedGaLore):
        with pytest.raises(ValueError, match="optim_bits=8 is for whole parameters"):
            kind(params, optim_bits=8)
    ShardedAdamW(params).step()


def galore_on_shards(folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh, worst = init_device_mesh("cpu", (2,)), {}
    for projection_type, fused in product(PROJECTION_TYPES, (False, True)):
        options = dict(projection_type=projection_type, moments="rotate", fused=fused)
        pairs = zip(galore_steps(options, mesh), galore_steps(options), strict=True)
        worst[f"{projection_type} {fused}"] = max((a - b).abs().max().item() for a, b in pairs)
    pairs = zip(
        galore_steps({"max_drift": 0.1}, mesh), galore_steps({"max_drift": 0.1}), strict=True
    )
    worst["drift"] = max((a - b).abs().max().item() for a, b in pairs)
    for nesterov, ns_dtype in product((False, True), (None, "bfloat16")):
        options = dict(momentum=0.9, nesterov=nesterov, ns_dtype=ns_dtype)
        pairs = zip(some_steps(Muon, options, mesh), some_steps(Muon, options), strict=True)
        worst[f"muon {nesterov} {ns_dtype}"] = max((a - b).abs().max().item() for a, b in pairs)
    with pytest.raises(FloatingPointError, match=r"parameter 1, shape \(4, 3\), is not finite"):
        bad_step(mesh)  # in every process, although the rows of one are bad
    if dist.get_rank() == 0:
        (folder / "worst.json").write_text(json.dumps(worst))
    dist.destroy_process_group()


@pytest.mark.slow
def test_galore_and_muon_take_the_same_steps_on_sharded_parameters(tmp_path) -> None:
    in_processes(2, galore_on_shards, tmp_path)
    worst = json.loads((tmp_path / "worst.json").read_text())
    assert len(worst) == 17 and max(worst.values()) < 1e-8, worst
