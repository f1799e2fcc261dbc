r"""
What processes exchange, in depth
=================================

In `one model, two processes <5_data_parallel.ipynb>`_ each process sums its gradient with that of the other. When is
the mean of two gradients the gradient of the batch, which other ways to exchange tensors are there, and how many bytes
do they send?

Two halves of a batch
---------------------

The lesson weighs the loss of each half by its share of the targets. Why that is right can be seen in one process. The
rows have unequal numbers of targets, as in fine-tuning, where only answers count. We compute in float64, so that
rounding is very small.
"""

# sphinx_gallery_words = ["all-reduce", "reduce-scatter", "all-gather", "ring all-reduce", "NCCL timeout", "Watchdog caught collective operation timeout", "monitored_barrier", "collective", "DistributedSampler"]
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed import TCPStore

from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.runs.distributed import Processes
from lm_from_scratch.text.batches import PackedBatches, write_tokens
from lm_from_scratch.text.corpora import load_corpus
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.loss import causal_lm_loss
from lm_from_scratch.training.train import accumulate_gradient

temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
folder = Path(temporary.name)


def write(name, text):
    (folder / name).write_text(text.lstrip(), encoding="utf-8")


def new_model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=300,
        block_size=32,
        n_layer=3,
        n_head=4,
        n_kv_head=2,
        n_embd=32,
        intermediate_size=96,
        initializer_range=0.1,
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


documents = load_corpus("reference")[:8]
tokenizer = Tokenizer.train([d.text for d in documents], 300)
file = write_tokens(documents, tokenizer, folder / "tokens.bin")
batches = Answers(file, batch_size=8, block_size=32)

# %%
# A process is an object in this package. It knows its number, its *rank*, and which rows are its own.

print(inspect.getsource(Processes.share))

batch = batches[0]
halves = [Processes("ddp", rank, 2).share(batch) for rank in range(2)]


def n_targets(part):
    return int((part.targets != IGNORE).sum())


counts = [n_targets(half) for half in halves]
print("targets:", n_targets(batch), "=", " + ".join(map(str, counts)))
assert sum(counts) == n_targets(batch) and counts[0] != counts[1]

# %%
# The loss of a batch is a mean over its targets. Let the halves have :math:`n_0` and :math:`n_1` of them, and
# mean losses :math:`L_0` and :math:`L_1`. Then the loss of the batch is
#
# .. math::
#
#    L = \frac{n_0 L_0 + n_1 L_1}{n_0 + n_1}
#      = \frac{1}{2} \left( \frac{2 n_0}{n} L_0 + \frac{2 n_1}{n} L_1 \right), \qquad n = n_0 + n_1
#
# A plain mean of the two is something else, unless both have the same number of targets. With N processes the
# weight of a half becomes :math:`N n_k / n`.


def gradient(part, weight=1.0):
    model = new_model()
    logits = model(part.idx, positions=part.positions, documents=part.documents)
    (weight * causal_lm_loss(logits, part.targets)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


expected = gradient(batch)
plain = sum(gradient(half) for half in halves) / 2
weights = [2 * count / sum(counts) for count in counts]
right = sum(gradient(h, w) for h, w in zip(halves, weights)) / 2
for name, g in (("mean of means", plain), ("weighted", right)):
    error = (g - expected).norm() / expected.norm()
    print(f"{name:13} is off by {error.item():.1e} of the gradient")
torch.testing.assert_close(right, expected, rtol=1e-9, atol=1e-12)
assert (plain - expected).norm() > 0.02 * expected.norm()

# %%
# The plain mean counts a target more, the fewer others its process has. The package does the weighting in one place.
# ``part.count`` is the number of targets of this process and this part; ``count`` is that of all processes and all parts.
# No exchange is needed to find ``count``, because every process can make the whole batch.

source = inspect.getsource(accumulate_gradient)
print(
    source[source.index("    count = sum") : source.index("    return total")]
)

# %%
# Three ways to exchange tensors
# ------------------------------
#
# Now two processes. They run the same script, and environment variables tell each its rank and where all meet. The
# place to meet is a *store*, a small dictionary behind a port. To set this up is the work of ``torchrun``; the function
# ``start`` below does the same in a few lines. An exchange in which all take part is a *collective*.

write(
    "collectives.py",
    """
import json
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

HERE = Path(__file__).parent
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mine = torch.arange(4.0) + 10 * rank  # (4,)
said = {"mine": mine.tolist()}

summed = mine.clone()
dist.all_reduce(summed)  # in place: the sum, everywhere
said["all-reduce"] = summed.tolist()

part = torch.empty(2)
dist.reduce_scatter(part, list(mine.chunk(size)))  # a piece of the sum
said["reduce-scatter"] = part.tolist()

pieces = [torch.empty(2) for _ in range(size)]
dist.all_gather(pieces, part)  # all pieces, everywhere
said["all-gather of that"] = torch.cat(pieces).tolist()

# for the museum: which rows of 8 does each process see?
seed = torch.Generator().manual_seed(0)
shuffled = DataLoader(range(8), 4, shuffle=True, generator=seed)
said["shuffled"] = next(iter(shuffled)).tolist()
sampler = DistributedSampler(range(8))
said["sampler"] = next(iter(DataLoader(range(8), 4, sampler=sampler))).tolist()

# for the museum: process 1 leaves out one collective
if rank == 0:
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5))
    except RuntimeError as error:
        said["error"] = str(error).splitlines()[0]
(HERE / f"collectives-{rank}.json").write_text(json.dumps(said))
while not (HERE / "collectives-0.json").exists():
    time.sleep(0.05)
dist.destroy_process_group()
""",
)


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


def results(name):
    files = [folder / f"{name}-{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text()) for file in files]


start("collectives.py")
said = results("collectives")
for name in list(said[0])[:4]:
    zero, one = ([round(x) for x in process[name]] for process in said)
    print(f"{name:18}  process 0 {zero!s:18} 1 {one}")

# %%
# Reduce-scatter leaves each process with a piece of the sum, and all-gather gives all pieces to all. One after the
# other, they are an all-reduce:
#
# .. math::
#
#    \text{all-reduce} = \text{all-gather} \circ \text{reduce-scatter}

for one in said:
    assert one["all-gather of that"] == one["all-reduce"]
    assert one["all-reduce"] == [10, 12, 14, 16]
assert said[0]["reduce-scatter"] + said[1]["reduce-scatter"] == [10, 12, 14, 16]

# %%
# This is also how it can be done. The processes form a ring, and each cuts its tensor into N pieces. In every round,
# each sends one piece to its right neighbour. In N - 1 rounds the sums collect, in another N - 1 they go round. Here is
# the ring in one process:


def ring_all_reduce(tensors):
    N = len(tensors)
    piece = [list(x.chunk(N)) for x in tensors]
    sent = 0  # by each process
    for r in range(2 * (N - 1)):
        moving = [piece[k][(k - r) % N] for k in range(N)]
        for k in range(N):
            right, i = (k + 1) % N, (k - r) % N
            collecting = r < N - 1  # the sums; then they are only copied
            old = piece[right][i] if collecting else 0.0
            piece[right][i] = moving[k] + old
        sent += moving[0].nbytes
    return [torch.cat(pieces) for pieces in piece], sent


for N in (2, 8, 64):
    tensors = list(torch.randn(N, 640, generator=torch.manual_seed(0)).double())
    reduced, sent = ring_all_reduce(tensors)
    for x in reduced:
        torch.testing.assert_close(x, sum(tensors))
    share = sent / tensors[0].nbytes
    print(f"{N:2} processes: each sends {share:.2f} times the tensor")
    assert math.isclose(share, 2 * (N - 1) / N)

# %%
# For G bytes each process sends :math:`2 G (N - 1) / N`, never more than 2 G, however many they are. Half of it is
# the reduce-scatter, half the all-gather. Which algorithm runs is up to the backend.
#
# Bug museum
# ----------
#
# The same rows for everybody
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Every process draws the same batch: a run of many is a run of one. (M17)
#
# A script for one process shuffles its data with a fixed seed. Under ``torchrun`` it works at once. Here is the first
# batch of 4 of the 8 rows in both processes, shuffled, and with a sampler that knows the rank:

for name in ("shuffled", "sampler"):
    seen = sorted({*said[0][name], *said[1][name]})
    print(f"{name:8}  {said[0][name]}  {said[1][name]}  rows seen: {len(seen)}")
assert said[0]["shuffled"] == said[1]["shuffled"]
assert sorted(said[0]["sampler"] + said[1]["sampler"]) == list(range(8))

# %%
# This is the story of the lesson: the batch of eight is a batch of four, computed twice.
#
# The check: collect the rows of all processes, and demand that each is there once. With this package:

shares = [Processes("ddp", rank, 4).share(batch).idx for rank in range(4)]
rows = torch.cat(shares).tolist()
assert sorted(rows) == sorted(batch.idx.tolist())

# %%
# One leaves out a collective
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A collective inside ``if rank == 0``: the other processes wait. (M18)
#
# ``if rank == 0: evaluate(model)`` looks harmless. If the model is sharded, evaluating gathers weights, which takes all
# processes. Process 0 waits for an answer that never comes, without a message, until a timeout of many minutes.
# A barrier with a short timeout says who is missing. Process 1 left this one out:

print(said[0]["error"])
assert "Rank 1 failed to pass monitoredBarrier" in said[0]["error"]

# %%
# The rule: all processes take the same collectives in the same order. What may depend on the rank is printing and
# writing.
#
# Summary
# -------
#
# * The mean of gradients is the gradient of the batch if each loss is weighted by its share of the targets.
# * All-reduce is reduce-scatter and all-gather. In a ring each process sends less than twice the tensor.
# * All processes take the same collectives in the same order, or the others wait.
#
# Sources
# -------
#
# * `PyTorch Distributed <https://arxiv.org/abs/2006.15704>`_, Li et al., 2020: DDP, its hooks and buckets.
# * `ZeRO <https://arxiv.org/abs/1910.02054>`_, Rajbhandari et al., 2020: shards of state, gradients and weights, and
#   what they cost in bytes sent.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
temporary.cleanup()
