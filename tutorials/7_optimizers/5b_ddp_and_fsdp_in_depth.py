r"""
DDP and FSDP2 in depth, and a run that is killed
================================================

In `one model, two processes <5_data_parallel.ipynb>`_ the exchange is written by hand. PyTorch has two engines for it.
What does each of them hold, what does it send, and do they end at the weights of one process? And what is left of a run
in which one process dies?

Everything runs on one CPU: PyTorch's *gloo* moves tensors between processes without a GPU. Two processes on one CPU
make nothing faster; the page compares results and counts bytes.

How much a process holds
------------------------

AdamW in float32 holds 16 bytes for each of M weights: weight, gradient and two moments. With N processes there are two
ways to place them:

.. math::

   \text{DDP: } 16 M \text{ bytes in each process,} \qquad \text{FSDP: } \frac{16 M}{N} \text{ bytes in each process}

*DDP* (distributed data parallel) keeps everything everywhere. *FSDP* (fully sharded data parallel) cuts every weight,
gradient and moment into N pieces, its *shards*, one for each process.

GaLore replaces moments by smaller ones and a basis. Under FSDP the package keeps the basis whole in every process.
The moments of a tall matrix have its rows and are cut like them. Those of a wide matrix have no rows to cut, and stay
whole too.
"""

# sphinx_gallery_needs = ["2_galore"]
# sphinx_gallery_words = ["DistributedDataParallel", "FSDP", "FSDP2", "fully_shard", "ZeRO", "ZeRO-3", "no_sync", "DTensor", "sharded data parallel", "torchrun", "rdzv_endpoint", "elastic training", "resume FSDP checkpoint", "sharded checkpoint", "distributed checkpoint", "Connection closed by peer"]
import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

from lm_from_scratch.checkpoint.state import latest_checkpoint
from lm_from_scratch.checkpoint.weights import from_pretrained
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.models.qwen2 import SIZES, Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.choose import make_optimizer
from lm_from_scratch.runs.config import TrainConfig
from lm_from_scratch.runs.distributed import Processes
from lm_from_scratch.runs.folder import how_to_go_on
from lm_from_scratch.text.corpora import load_corpus
from lm_from_scratch.text.tokenizer import Tokenizer


def elements(model, optimizer, shares):
    """Numbers in the state of one of several processes, without counters."""
    total = 0
    for p in model.parameters():
        for name, shape in optimizer.state_shapes(p).items():
            basis = name in ("left", "right")
            low = "left" in optimizer.state_shapes(p)
            cut = not basis and not low
            total += math.prod(shape) / (shares if cut else 1) * bool(shape)
    return total


def gigabytes(model, kind, shares=1):
    """Weights, gradients, state of one process in float32."""
    M = sum(p.numel() for p in model.parameters())
    rank = model.config.n_embd // 4
    config = TrainConfig(steps=1, optimizer=kind, rank=rank)
    state = elements(model, make_optimizer(model, config), shares)
    return [4e-9 * x for x in (M / shares, M / shares, state)]


with torch.device("meta"):
    large = Qwen2ForCausalLM(Qwen2Config(**SIZES["Qwen2-7B"]))

bars = [
    (f"{name}\n{engine}", kind, N)
    for engine, N in (("DDP", 1), ("FSDP 2", 2), ("FSDP 8", 8))
    for name, kind in (("AdamW", "adamw"), ("GaLore", "galore"))
]
heights = [gigabytes(large, kind, N) for _, kind, N in bars]
_, (ax,) = figure(6.4, 3.8)
bottom = [0.0] * len(bars)
for i, part in enumerate(("weights", "gradients", "optimizer state")):
    own = [height[i] for height in heights]
    look = dict(color=COLOURS[i], hatch=("", "///", "...")[i])
    names = [name for name, *_ in bars]
    ax.bar(names, own, bottom=bottom, label=part, edgecolor="white", **look)
    bottom = [b + h for b, h in zip(bottom, own)]
ax.set(ylabel="GB in each process", title="Qwen2-7B in float32, rank 896")
ax.tick_params(axis="x", labelsize=9)
ax.legend(frameon=False)
plt.show()

print("GB in each process:", *(f"{total:.1f}" for total in bottom))
M = sum(p.numel() for p in large.parameters())
for total, N in zip(bottom[::2], (1, 2, 8)):
    assert math.isclose(total, 16e-9 * M / N)
assert bottom[1] < bottom[0] and bottom[5] > bottom[4]

# %%
# The last bar is a surprise. At a quarter of the model's width, GaLore saves memory in one process, and costs some in
# eight: AdamW's moments shrink with N, GaLore's bases do not.
#
# The two engines
# ---------------
#
# The model and the data go into a file, because processes started later will need them too, and cannot import what a
# notebook defines. The rows have unequal numbers of targets, as in fine-tuning, where only answers count.

temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
folder = Path(temporary.name)


def write(name, text):
    (folder / name).write_text(text.lstrip(), encoding="utf-8")


write(
    "small_run.py",
    '''
from pathlib import Path

import torch

from lm_from_scratch.text.batches import PackedBatches, write_tokens
from lm_from_scratch.text.corpora import load_corpus
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.models.blocks import blocks
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.runs.checkpoints import with_checkpoints
from lm_from_scratch.runs.distributed import Processes
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.optim.choose import make_optimizer
from lm_from_scratch.runs.config import TrainConfig, train
from lm_from_scratch.training.objective import NextTokenLoss
from lm_from_scratch.training.train import optimizer_step

HERE = Path(__file__).parent


def new_model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=300, block_size=32, n_layer=3, n_head=4, n_kv_head=2,
        n_embd=32, intermediate_size=96, initializer_range=0.1,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config).double()


class Answers(PackedBatches):
    """Of each row the first tokens are targets: more in some than in others."""

    def __getitem__(self, i):
        batch = super().__getitem__(i)
        for row, targets in enumerate(batch.targets):
            targets[1 + (7 * i + 11 * row) % 32 :] = IGNORE
        return batch


def data():
    tokenizer = Tokenizer.load(HERE)
    texts = load_corpus("reference")[:8]
    file = write_tokens(texts, tokenizer, HERE / "tokens.bin")
    return Answers(file, batch_size=8, block_size=32)


def config(optimizer="adamw"):
    return TrainConfig(
        steps=7, lr=0.01, grad_accumulation=2, max_grad_norm=0.5,
        optimizer=optimizer, rank=8, update_proj_gap=3,
    )


def steps(numbers, batches, group=Processes()):
    """The first four steps, of two batches each; yields model and optimizer."""
    model = new_model()
    loss_of = group.wrap(NextTokenLoss(model), blocks(model))
    optimizer = make_optimizer(model, numbers, group.optimizer)
    for step in range(4):
        parts = [batches[2 * step], batches[2 * step + 1]]
        optimizer_step(
            loss_of, optimizer, parts, numbers.max_grad_norm, group
        )
        yield model, optimizer


def whole_run(out, group=Processes()):
    """The same as a run with checkpoints; yields what each step says."""
    model = new_model()
    run = train(model, data(), config(), None, group)
    for step in with_checkpoints(run, out, 3, group.save_training_state):
        yield step, model
''',
)

texts = [document.text for document in load_corpus("reference")[:8]]
Tokenizer.train(texts, 300).save(folder)
spec = importlib.util.spec_from_file_location(
    "small_run", folder / "small_run.py"
)
small_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(small_run)
batches = small_run.data()

# %%
# Two processes run the same script, and environment variables tell each its rank and where all meet. The function
# ``start`` does the work of ``torchrun``, as on the page on `collectives <5a_collectives_in_depth.ipynb>`_.


def start(script, succeeds=True):
    """Run a script in two processes; return what they printed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = dict(
        WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is there already
    )  # fmt: skip
    command, started = [sys.executable, str(folder / script)], []
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for rank in ("0", "1"):
        env = {**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank}
        started.append(subprocess.Popen(command, env=env, **pipes))
    outputs, errors = zip(*(p.communicate(timeout=300) for p in started))
    failed = any(process.returncode for process in started)
    assert failed != succeeds, "".join(errors)[-3000:]
    return "".join(outputs)


def results(name):
    files = [folder / f"{name}-{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text()) for file in files]


# %%
# What does training exchange? The next script takes four steps with DDP and four with FSDP, with AdamW and with
# GaLore, and counts every collective. A dispatch mode sees them, as it sees `every operation of a step
# <4a_training_memory_in_depth.ipynb>`_.
#
# It also looks where FSDP keeps which weights, and repeats a mistake for the museum. At the end it trains once more,
# with a checkpoint every three steps, and after step 5 process 1 kills itself: for the last section.

write(
    "engines.py",
    '''
import json
import math
import os
import signal
import sys
from collections import Counter
from dataclasses import replace

import torch
from safetensors.torch import save_file
from small_run import HERE, NextTokenLoss, blocks, config, data, new_model
from small_run import steps, whole_run
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lm_from_scratch.runs.distributed import ProcessLost, processes
from lm_from_scratch.runs.sharded import gathered

KINDS = {
    "all_reduce": "all-reduce", "allreduce": "all-reduce",
    "all_gather": "all-gather", "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter", "broadcast": "broadcast",
}


class Traffic(TorchDispatchMode):
    """Calls of each collective, and the bytes of their whole tensors."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        space, name, *_ = str(function).split(".")
        if space in ("c10d", "_c10d_functional") and "wait" not in name:
            for part, kind in KINDS.items():
                if part in name:
                    tensors = tree_leaves((args, out))
                    sizes = [x.nbytes for x in tensors if hasattr(x, "nbytes")]
                    self.calls[kind] += 1
                    self.bytes[kind] += max(sizes)  # what all have together
        return out


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def run(group, optimizer):
    report = {"calls": [], "bytes": []}
    taken = steps(config(optimizer), batches, group)
    for _ in range(4):
        with Traffic() as traffic:
            model, used = next(taken)
        report["calls"].append(traffic.calls)
        report["bytes"].append(traffic.bytes)
    report["weights"] = sum(local(p).nbytes for p in model.parameters())
    state = [x for values in used.state.values() for x in values.values()]
    report["state"] = sum(local(x).nbytes for x in state)
    tensors = {name: gathered(p) for name, p in model.state_dict().items()}
    if group.rank == 0:
        file = f"{group.parallel}-{optimizer}.safetensors"
        save_file({n: x.contiguous() for n, x in tensors.items()}, HERE / file)
    return report


def one_pass(group):
    """Which weights are whole when an MLP runs, forward and backward?"""
    model = new_model()
    loss_of = group.wrap(NextTokenLoss(model), blocks(model))
    layers, rows = blocks(model), []

    def look(*_):
        parts = [*layers, model.model.embed_tokens]
        rows.append([
            not any(isinstance(p, DTensor) for p in part.parameters())
            for part in parts
        ])

    loss_of.register_forward_pre_hook(look)
    for layer in layers:
        layer.mlp.register_forward_pre_hook(look)
        layer.mlp.register_full_backward_pre_hook(look)
    part = group.share(batches[0])
    loss_of(
        part.idx, part.targets,
        positions=part.positions, documents=part.documents,
    ).backward()  # fmt: skip
    look()
    return model, rows


def between_passes(group):
    """Bytes of gradients after a pass that exchanges none, and after one."""
    model = new_model()
    loss_of = group.wrap(NextTokenLoss(model), blocks(model))
    part, held = group.share(batches[0]), []
    for last in (False, True):
        with group.accumulating(loss_of, last):
            loss = loss_of(
                part.idx, part.targets,
                positions=part.positions, documents=part.documents,
            )  # fmt: skip
            loss.backward()
        units = [] if last else [loss_of, *blocks(model)]
        for unit in units:
            unit.unshard()  # shows what belongs to the whole weights
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        held.append(sum(local(grad).nbytes for grad in grads))
        for unit in units:
            unit.reshard()
    return held


def clipped_by_shards(params, limit):
    """The mistake: every process clips its shards by their own norm."""
    mine = [torch.nn.Parameter(p.to_local()) for p in params]
    for p, q in zip(mine, params):
        p.grad = q.grad.to_local()  # the same memory
    true = gathered(clip_grad_norm_(params, math.inf)).item()
    own = clip_grad_norm_(mine, limit).item()
    after = gathered(clip_grad_norm_(params, math.inf)).item()
    return {"true": true, "own": own, "after": after}


try:
    with processes("ddp") as joined:
        batches, report = data(), {}
        for engine in ("ddp", "fsdp"):
            group = replace(joined, parallel=engine)
            for optimizer in ("adamw", "galore"):
                report[f"{engine} {optimizer}"] = run(group, optimizer)
        model, report["gathered"] = one_pass(group)
        report["between"] = between_passes(group)
        report["clip"] = clipped_by_shards(list(model.parameters()), 0.01)
        file = HERE / f"engines-{joined.rank}.json"
        file.write_text(json.dumps(report))
        for step, _ in whole_run(HERE / "run", group):
            if joined.rank == 1 and step.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
except ProcessLost as error:
    print("process 0:", error)
    sys.exit(2)
''',
)
heard = start("engines.py", succeeds=False)
both = results("engines")
one = both[0]

# %%
# The same weights
# ~~~~~~~~~~~~~~~~
#
# One process takes the same four steps of two batches each, by the same function.

alone = {}
for optimizer in ("adamw", "galore"):
    numbers = small_run.config(optimizer)
    *_, (alone[optimizer], _) = small_run.steps(numbers, batches)
start_of = small_run.new_model().state_dict()
differences = []
for engine in ("ddp", "fsdp"):
    for optimizer, model in alone.items():
        theirs = load_file(folder / f"{engine}-{optimizer}.safetensors")
        ours = model.state_dict()
        apart = max((ours[n] - theirs[n]).abs().max().item() for n in ours)
        moved = max((ours[n] - start_of[n]).abs().max().item() for n in ours)
        print(
            f"{engine:4} {optimizer:6}: moved {moved:.2f}, "
            f"differ from one process by at most {apart:.0e}"
        )
        assert moved > 0.02 and apart < 1e-9
        differences.append(apart)

# %%
# Twice the processes, the same run: same batch, same learning rate, same clipping. The difference is the rounding of
# float64, because sums are taken in another order. With dropout it would be larger: each process draws its own random
# numbers.
#
# What the engines wrap is the model together with its loss. This is all:

print(inspect.getsource(Processes.wrap))

# %%
# DDP
# ~~~
#
# DDP hangs a hook on every weight. When a *bucket* of gradients is complete, its all-reduce begins, while the backward
# pass goes on. When it first gets the model, it copies the weights of process 0 to all others, so that they start
# equal.


def table(name):
    calls, size = one[name]["calls"][2], one[name]["bytes"][2]  # of step 3
    for kind in calls:
        print(
            f"{name:12} {kind:15} {calls[kind]:3} calls {size[kind]:8,} bytes"
        )


W = sum(p.nbytes for p in small_run.new_model().parameters())
print(f"weights: {W:,} bytes")
table("ddp adamw")
for rank in both:
    assert rank["ddp adamw"]["bytes"][2] == {"all-reduce": W + 8}
    assert rank["ddp adamw"]["weights"] == W
    assert rank["ddp adamw"]["bytes"][0]["broadcast"] >= W  # at the start

# %%
# The gradients of a step, and 8 bytes for the loss. Each step has two batches, but only one exchange: in all passes but
# the last, ``no_sync`` lets the gradients add up where they are. The optimizer step exchanges nothing. All processes
# have the same gradient, so they take the same step.
#
# FSDP2
# ~~~~~
#
# ``fully_shard`` turns each weight into a *DTensor*: a tensor with its full shape, of which a process has some rows.
# Gradients and moments are cut in the same way. AdamW changes each number by itself, so a process can update its rows
# without the others.

print("bytes of a process       weights  optimizer state")
for name in ("ddp adamw", "fsdp adamw", "ddp galore", "fsdp galore"):
    print(f"{name:22} {one[name]['weights']:9,} {one[name]['state']:16,}")
n_params = len(list(small_run.new_model().parameters()))
counters = 4 * n_params  # a step number for each, in float32
for rank in both:
    assert rank["fsdp adamw"]["weights"] == W / 2
    assert rank["ddp adamw"]["state"] == 2 * W + counters
    assert rank["fsdp adamw"]["state"] == W + counters

# %%
# To compute, a block needs its weights whole. FSDP2 gathers them just before it runs. We looked from inside each MLP:

rows = torch.tensor(one["gathered"]).float()  # (events, blocks + 1)
L = rows.shape[1] - 1
events = ["model starts", *(f"forward {i}" for i in range(L))]
events += [*(f"backward {i}" for i in reversed(range(L))), "end"]
_, (ax,) = figure(5.6, 4.0)
ax.imshow(rows.numpy(), cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
for y, row in enumerate(rows):
    for x, is_whole in enumerate(row):
        text = "whole" if is_whole else "share"
        ax.text(x, y, text, ha="center", va="center", fontsize=8)
ax.set_xticks(range(L + 1), [*(f"block {i}" for i in range(L)), "embedding"])
ax.set_yticks(range(len(events)), events)
ax.set_title("Which weights are whole, and when")
ax.grid(False)
plt.show()
forward = torch.cat([torch.eye(L), torch.ones(L, 1)], dim=1)
assert torch.equal(rows[1 : L + 1], forward)
assert torch.equal(rows[L + 1 : -1], forward.flip(0))
assert rows[-1].sum() == 0

# %%
# One block at a time is whole. It is dropped after its forward pass, and gathered again for its backward pass. After
# that a reduce-scatter sums its gradients, and leaves each process the rows that it owns. What lies outside the
# blocks, the embedding, the head and the last norm, stays whole from the first use to the end.
#
# So the peak of a process is its shards, its activations, the part outside the blocks, and one block, weights and
# gradient. A GPU gathers the next block while one computes, and then holds two. Without the loop over ``blocks`` in
# ``wrap`` everything would be one unit, whole from the start of the forward to the end of the backward pass.

table("fsdp adamw")
params = small_run.new_model().model.layers.parameters()
of_blocks = sum(p.nbytes for p in params)
for rank in both:
    sent = rank["fsdp adamw"]["bytes"][2]
    assert sent["all-gather"] == 2 * (W + of_blocks)  # two batches
    assert sent["reduce-scatter"] == W
    assert 8 < sent["all-reduce"] < 0.01 * W

# %%
# Each of the two batches gathers all weights forward, and those of the blocks again backward. The gradients are
# scattered once. The small all-reduces are the loss, the norm for clipping, and the check for numbers that are not
# finite.
#
# How much is that, compared with DDP? Take a step of one batch, and rings. The all-reduce of DDP sends 2 W (N - 1) / N
# bytes. FSDP makes two gathers and a reduce-scatter, and each of them is half an all-reduce: at most 3 W (N - 1) / N,
# 1.5 times as much. Each further batch of the step costs more gathers, and with DDP nothing.
#
# Accumulation has another price under FSDP. A pass that exchanges nothing leaves its gradients as they are: whole.

for rank, (first, last) in enumerate(one["between"] for one in both):
    print(
        f"process {rank}: bytes of gradients between two passes {first:,}, "
        f"after the last {last:,}"
    )
    assert first == W and last == W / 2

# %%
# So with accumulation a process holds 4 M bytes of gradients between passes, not 4 M / N. If memory is what you lack,
# take fewer rows in each process and more processes before you accumulate.
#
# GaLore under FSDP2
# ~~~~~~~~~~~~~~~~~~
#
# GaLore mixes the rows of a matrix, so a process cannot work alone. Two cases, with the rows cut:
#
# .. math::
#
#    \begin{pmatrix} G_0 \\ G_1 \end{pmatrix} Q = \begin{pmatrix} G_0 Q \\ G_1 Q \end{pmatrix}, \qquad
#    \begin{pmatrix} P_0^\top & P_1^\top \end{pmatrix} \begin{pmatrix} G_0 \\ G_1 \end{pmatrix} = P_0^\top G_0 + P_1^\top G_1
#
# A tall matrix has a right basis Q, and each process projects its rows. A wide one has a left basis P, and the
# projected gradient is a sum over processes: an all-reduce of a small tensor. Only a new basis needs the whole
# gradient. Here one is made in steps 1 and 4.

table("fsdp galore")
gathers = [calls["all-gather"] for calls in one["fsdp galore"]["calls"]]
usual = one["fsdp adamw"]["calls"][2]["all-gather"]
extra = [count - usual for count in gathers]
print("gathers beside those of the weights:", extra)
matrices = [
    p for p in small_run.new_model().model.layers.parameters() if p.dim() == 2
]
assert extra == [len(matrices) if step % 3 == 0 else 0 for step in range(4)]

# %%
# Every process computes the same basis from the same whole gradient, and that of process 0 is broadcast, so that all
# agree to the last bit.
#
# A process is killed
# -------------------
#
# Runs with many processes end early: a machine fails, a job runs out of time. In the last run of the script, process 1
# killed itself after step 5. Process 0 was in the middle of an exchange:

print(heard)
assert heard.count("another process of the run has ended") == 1

# %%
# It learns from the closed connection that the other process is gone. An exchange over a GPU's network may not notice;
# then ``torchrun``, which watches its processes, ends the others. What is left of the run?

step_folder = latest_checkpoint(folder / "run")
print(how_to_go_on(folder / "run").replace(str(folder), "..."))
for file in sorted(step_folder.iterdir()):
    print(f"{file.stat().st_size:8,} bytes  {file.name}")
assert step_folder.name == "step-00000003"
assert len(list(step_folder.glob("shard-*"))) == 2

# %%
# Each process has written the pieces that it holds, in a file of its own, as *safetensors*: numbers, and nothing that
# runs when it is opened. Process 0 makes one more file of the weights, so that the folder is a model like any other.
# All agree that the files are complete before the folder gets its name.

model = from_pretrained(step_folder)
assert sum(p.numel() for p in model.parameters()) * 8 == W

# %%
# One process goes on where two stopped. It reads the pieces of both.

taken = list(small_run.whole_run(folder / "run"))
numbers = [step.step for step, _ in taken]
resumed = taken[-1][1].state_dict()
*_, (_, model) = small_run.whole_run(folder / "uninterrupted")
expected = model.state_dict()
apart = max((x - resumed[n]).abs().max().item() for n, x in expected.items())
print(f"steps {numbers}; from a run without a break: {apart:.0e}")
assert numbers == [4, 5, 6, 7] and apart < 1e-9

# %%
# Steps 4 and 5 were lost and done again. A batch and a learning rate are functions of the step number, so nothing
# else had to be saved. With the same number of processes the result is the same bit for bit, to which
# ``tests/unit/runs/test_distributed.py`` holds the package.
#
# What to type
# ------------
#
# Write ``torchrun`` instead of ``python``. On one machine with eight GPUs:
#
# .. code-block:: text
#
#    torchrun --nproc-per-node 8 -m lm_from_scratch train --out run \
#        --parallel fsdp --device cuda --dtype bfloat16
#
# On two such machines, the same line on each. Both see the folder of the run, and HOST is one of them:
#
# .. code-block:: text
#
#    torchrun --nnodes 2 --nproc-per-node 8 \
#        --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
#        -m lm_from_scratch train --out /shared/run \
#        --parallel fsdp --device cuda --dtype bfloat16
#
# Given again after a crash, the line goes on with the run. After Ctrl-C all processes stop after the *same* step.
# ``--batch-size`` is of all processes together, and must be a multiple of their number. ``--dtype bfloat16`` is
# autocast: matrix products run in bfloat16, while weights, gradients, moments and what is exchanged stay float32.
#
# .. note::
#
#    This page ran on one CPU with gloo. GPUs, their exchange library NCCL, and a second machine were not used. Speed,
#    the overlap of exchange and computation, and memory on a GPU are therefore not shown here.
#
# Bug museum
# ----------
#
# The norm of a share
# ~~~~~~~~~~~~~~~~~~~
#
# Each process clips by the norm of its own piece (M43).
#
# Clipping needs the norm of all gradients. Under FSDP each process has a piece, and a hand-written loop over
# ``to_local`` takes the norm of that.

for rank, clip in enumerate(one["clip"] for one in both):
    print(
        f"process {rank}: own norm {clip['own']:.3f}, norm of all "
        f"{clip['true']:.3f}, clipped to 0.010: {clip['after']:.4f}"
    )
own = [rank["clip"]["own"] for rank in both]
assert math.isclose(math.hypot(*own), both[0]["clip"]["true"])
assert own[0] != own[1]
for rank in both:
    assert math.isclose(rank["clip"]["after"], 0.01 * 2**0.5, rel_tol=1e-3)

# %%
# Each process brings its own piece to the limit c, so the whole has :math:`c \sqrt{N}`. And each uses a factor of its
# own, so the direction changes with the number of processes. The fixed line hands the DTensors themselves to
# ``clip_grad_norm_``, which sums the squares over all processes, as ``optimizer_step`` does. The check is the table
# above: two processes, clipped, equal one.
#
# Exercises
# ---------
#
# 1. *Easy.* At which rank does GaLore under FSDP with eight processes hold as much state as AdamW, for Qwen2-7B? A
#    good answer lies below the 896 of the figure, and rises with fewer processes. Hint: ``elements`` with other ranks.
# 2. *Easy.* Forget ``no_sync``: let ``Processes.accumulating`` return ``nullcontext()``. A good answer has equal
#    weights, and twice the bytes of all-reduce in a step. Hint: a subclass in ``engines.py``.
# 3. *Medium.* Wrap the whole model as one unit, without the blocks. A good answer shows a figure with all blocks whole
#    in every row but the last, and one gather for each batch. Hint: give ``wrap`` an empty ``ModuleList``.
#
# Summary
# -------
#
# * AdamW in float32 holds 16 bytes per weight in each process with DDP, and 16 / N with FSDP. GaLore's bases stay whole
#   in every process.
# * Two processes, with DDP or FSDP2, AdamW or GaLore, end at the weights of one, up to the rounding of float64.
# * FSDP2 keeps half of the weights and of AdamW's state in each of two processes, and one block at a time is whole.
#   Accumulation keeps whole gradients between passes.
# * A killed run went on in one process, and ended where it would have ended.
#
# Sources
# -------
#
# * `PyTorch Distributed <https://arxiv.org/abs/2006.15704>`_, Li et al., 2020: DDP, its hooks and buckets.
# * `ZeRO <https://arxiv.org/abs/1910.02054>`_, Rajbhandari et al., 2020: shards of state, gradients and weights, and
#   what they cost in bytes sent.
# * `PyTorch FSDP <https://arxiv.org/abs/2304.11277>`_, Zhao et al., 2023.
# * `GaLore's paper <https://arxiv.org/abs/2403.03507>`_, Zhao et al., 2024.
# * `torchrun <https://docs.pytorch.org/docs/stable/elastic/run.html>`_, its options.
# * `torch.distributed.fsdp.fully_shard <https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html>`_, the
#   reference of FSDP2.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
temporary.cleanup()
