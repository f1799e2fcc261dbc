r"""
A process is killed, in depth
=============================

Runs with many processes end early: a machine fails, a job runs out of time. In `one model, two processes
<5_data_parallel.ipynb>`_ all goes well. What is left of a run in which one process dies, and can another number of
processes go on with it?

A run with FSDP
---------------

Two processes train a small model with FSDP, which cuts weights, gradients and moments into shares. Model and data go
into a file, because the processes cannot import what a notebook defines.
"""

# sphinx_gallery_words = ["torchrun", "rdzv_endpoint", "elastic training", "resume FSDP checkpoint", "sharded checkpoint", "distributed checkpoint", "Connection closed by peer"]
import importlib.util
import inspect
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed import TCPStore

from lm_from_scratch.text.corpora import load_corpus
from lm_from_scratch.text.tokenizer import Tokenizer

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
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.runs.distributed import Processes
from lm_from_scratch.runs.checkpoints import with_checkpoints
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.runs.config import TrainConfig, train

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


def whole_run(out, group=Processes()):
    """A run with checkpoints; yields what each step says."""
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
small_run.data()  # writes the tokens before two processes read them


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
    said, errors = zip(*(p.communicate(timeout=300) for p in started))
    failed = any(process.returncode for process in started)
    assert failed != succeeds, "".join(errors)[-3000:]
    return "".join(said)


# %%
# A death without a word
# ----------------------
#
# The script trains and writes a checkpoint every three steps. After step 5, process 1 kills itself.

write(
    "killed.py",
    """
import os
import signal
import sys

from small_run import HERE, whole_run

from lm_from_scratch.runs.distributed import ProcessLost, processes

try:
    with processes("fsdp") as group:
        for step, _ in whole_run(HERE / "run", group):
            if group.rank == 1 and step.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
except ProcessLost as error:
    print("process 0:", error)
    sys.exit(2)
""",
)
heard = start("killed.py", succeeds=False)
print(heard)
assert heard.count("another process of the run has ended") == 1

# %%
# Process 0 was in the middle of an exchange. It learns from the closed connection that the other process is gone. An
# exchange over a GPU's network may not notice; then ``torchrun``, which watches its processes, ends the others.
#
# What is left of the run
# -----------------------

from lm_from_scratch.checkpoint.state import latest_checkpoint
from lm_from_scratch.checkpoint.weights import from_pretrained
from lm_from_scratch.runs.folder import how_to_go_on

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
W = sum(p.nbytes for p in small_run.new_model().parameters())
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
# Stopping gently
# ---------------
#
# Ctrl-C is gentler. All processes have to stop after the *same* step, or some would wait for others forever. So after
# every step they sum up who has heard a signal:

from lm_from_scratch.runs.folder import follow

lines = inspect.getsource(follow).splitlines()
first = next(i for i, line in enumerate(lines) if "group.total" in line)
print("\n".join(line.strip() for line in lines[first : first + 4]))

# %%
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
# Given again after a crash, the line goes on with the run. ``--batch-size`` is of all processes together, and must be
# a multiple of their number. ``--dtype bfloat16`` is autocast: matrix products run in bfloat16, while weights,
# gradients, moments and what is exchanged stay float32.
#
# The lesson says when to choose DDP and when FSDP, and `DDP and FSDP2 <5b_ddp_and_fsdp_in_depth.ipynb>`_ shows why.
#
# .. note::
#
#    This page ran on one CPU with gloo. GPUs, their exchange library NCCL, and a second machine were not used. Speed,
#    the overlap of exchange and computation, and memory on a GPU are therefore not shown here.
#
# Exercises
# ---------
#
# 1. *Hard.* Take out the kill after step 5, and kill process 0 while the checkpoint of step 6 is written. A right
#    answer shows that the run goes on from step 3, and names the line that makes it so. Hint: replace
#    ``lm_from_scratch.checkpoint.folders.replace_folder`` by a function that kills at its second call.
#
# Summary
# -------
#
# * A killed run went on in one process, and ended where it would have ended.
# * A checkpoint gets its name when all agree that its files are complete. So the newest one that has a name is whole.
# * All processes stop after the same step: they sum up who has heard a signal.
#
# Sources
# -------
#
# * `PyTorch FSDP <https://arxiv.org/abs/2304.11277>`_, Zhao et al., 2023.
# * `torchrun <https://docs.pytorch.org/docs/stable/elastic/run.html>`_, its options.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
temporary.cleanup()
