r"""
What processes exchange, in depth
=================================

In `one model, two processes <5_data_parallel.ipynb>`_ each process sums its gradient with that of the other. Which other
ways to exchange tensors are there, how many bytes do they send, and what happens when a process leaves one out?

Three ways to exchange tensors
------------------------------

Two processes run the same script, and environment variables tell each its rank and where all meet. The place to meet is
a *store*, a small dictionary behind a port. To set this up is the work of ``torchrun``; the function ``start`` below does
the same in a few lines. An exchange in which all take part is a *collective*.
"""

# sphinx_gallery_words = ["all-reduce", "reduce-scatter", "all-gather", "ring all-reduce", "NCCL timeout", "Watchdog caught collective operation timeout", "monitored_barrier", "collective", "DistributedSampler"]
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed import TCPStore
from torch.utils.data import DistributedSampler

temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
folder = Path(temporary.name)


def write(name, text):
    (folder / name).write_text(text.lstrip(), encoding="utf-8")


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
report = {"mine": mine.tolist()}

summed = mine.clone()
dist.all_reduce(summed)  # in place: the sum, everywhere
report["all-reduce"] = summed.tolist()

part = torch.empty(2)
dist.reduce_scatter(part, list(mine.chunk(size)))  # a piece of the sum
report["reduce-scatter"] = part.tolist()

pieces = [torch.empty(2) for _ in range(size)]
dist.all_gather(pieces, part)  # all pieces, everywhere
report["all-gather of that"] = torch.cat(pieces).tolist()

# for the museum: which rows of 8 does each process see?
seed = torch.Generator().manual_seed(0)
shuffled = DataLoader(range(8), 4, shuffle=True, generator=seed)
report["shuffled"] = next(iter(shuffled)).tolist()
sampler = DistributedSampler(range(8))
report["sampler"] = next(iter(DataLoader(range(8), 4, sampler=sampler))).tolist()

# for the museum: process 1 leaves out one collective
if rank == 0:
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5))
    except RuntimeError as error:
        report["error"] = str(error).splitlines()[0]
(HERE / f"collectives-{rank}.json").write_text(json.dumps(report))
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
    outputs, errors = zip(*(p.communicate(timeout=300) for p in started))
    failed = any(process.returncode for process in started)
    assert failed != succeeds, "".join(errors)[-3000:]
    return "".join(outputs)


def results(name):
    files = [folder / f"{name}-{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text()) for file in files]


start("collectives.py")
report = results("collectives")
for name in list(report[0])[:4]:
    zero, one = ([round(x) for x in process[name]] for process in report)
    print(f"{name:18}  process 0 {zero!s:18} 1 {one}")

# %%
# Reduce-scatter leaves each process with a piece of the sum, and all-gather gives all pieces to all. One after the
# other, they are an all-reduce:
#
# .. math::
#
#    \text{all-reduce} = \text{all-gather} \circ \text{reduce-scatter}

for one in report:
    assert one["all-gather of that"] == one["all-reduce"]
    assert one["all-reduce"] == [10, 12, 14, 16]
assert report[0]["reduce-scatter"] + report[1]["reduce-scatter"] == [
    10,
    12,
    14,
    16,
]

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
    seen = sorted({*report[0][name], *report[1][name]})
    print(
        f"{name:8}  {report[0][name]}  {report[1][name]}  rows seen: {len(seen)}"
    )
assert report[0]["shuffled"] == report[1]["shuffled"]
assert sorted(report[0]["sampler"] + report[1]["sampler"]) == list(range(8))

# %%
# This is the story of the lesson: the batch of eight is a batch of four, computed twice.
#
# The check: collect the rows of all processes, and demand that each is there once.

rows = [*DistributedSampler(range(8), num_replicas=2, rank=0)]
rows += DistributedSampler(range(8), num_replicas=2, rank=1)
assert sorted(rows) == list(range(8))

# %%
# One process skips a collective
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# A collective inside ``if rank == 0``: the other processes wait. (M18)
#
# ``if rank == 0: evaluate(model)`` looks harmless. If the model is sharded, evaluating gathers weights, which takes all
# processes. Process 0 waits for an answer that never comes, without a message, until a timeout of many minutes.
# A barrier with a short timeout says which process is missing. Process 1 skipped this one:

print(report[0]["error"])
assert "Rank 1 failed to pass monitoredBarrier" in report[0]["error"]

# %%
# The rule: all processes take the same collectives in the same order. What may depend on the rank is printing and
# writing.
#
# Summary
# -------
#
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
