r"""
One model, two processes
========================

You have two GPUs and one model. Can both train it, and end with the weights that one would have reached? Here is the plan:
each GPU runs a process, a Python program with its own copy of the model, and takes half of the batch. The processes
exchange nothing but the gradient. Here it is for one weight of our small Qwen2, and four real sentences.
"""

# sphinx_gallery_needs = ["1_adamw", "4_in_backward"]
# sphinx_gallery_words = ["DistributedDataParallel", "DDP", "multi-GPU", "two GPUs", "torchrun", "all-reduce", "NCCL", "DistributedSampler", "set_epoch", "data parallelism", "world_size", "FSDP", "ZeRO", "train on several GPUs", "multiple GPUs", "distributed training", "how many GPUs", "two machines", "split a batch among GPUs", "average gradients", "synchronise gradients", "cluster", "several machines", "nodes", "DataParallel", "DP vs DDP", "DDP vs FSDP", "parallel training", "scale up training", "rank", "local_rank", "effective batch size", "same loss as one GPU", "split the data", "gradient all-reduce", "order of the examples", "shuffle", "shuffling", "DataLoader", "num_workers", "spread training over machines", "many machines", "second GPU", "half the training time"]
# sphinx_gallery_museum = ["M17"]
from lm_from_scratch.drawings import optimizers as drawings

texts = [
    "Return the number of items in a list or a string.",
    "If the file does not exist, an exception is raised.",
    "The function takes the name of a module as a string.",
    "This method must be called before the thread is started.",
]
shown = [[t[:20] + " …" for t in pair] for pair in (texts[:2], texts[2:])]
drawings.two_copies(shown, [0.0007, 0.1377], "the MLP of block 0")

# %%
# The mean of both gradients is the gradient of the whole batch, in every weight of the model. So both copies should take
# the step that one process would have taken. This is **data parallel** training. The exchange is called **all-reduce**:
# afterwards, every process has the sum, or the mean, of what all of them had.
#
# The two numbers are computed here, for a matrix of block 0 (in float64, so that rounding is very small):

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler

from lm_from_scratch.checkpoint.weights import load_shipped

model, tokenizer = load_shipped("qwen2-docs")
rows = torch.tensor([tokenizer.start(text) for text in texts])  # (4, 13)


def gradient(rows):
    model = load_shipped("qwen2-docs")[0].double()
    logits = model(rows[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
    return model.model.layers[0].mlp.down_proj.weight.grad


found = [gradient(half) for half in rows.chunk(2)]  # two rows each
print(*(f"{one[53, 103]:.4f}" for one in found))

torch.testing.assert_close(sum(found) / 2, gradient(rows))
assert [round(one[53, 103].item(), 4) for one in found] == [0.0007, 0.1377]

# %%
# Now for real
# ------------
#
# Every process runs the same script. Each gets a number, its *rank*, and all meet through a file. (This rank has
# nothing to do with that of a matrix.) ``world_size`` is the number of processes, and *gloo* is the part of PyTorch
# that exchanges tensors between CPUs. The script begins like this:

temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
folder = Path(temporary.name)
beginning = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lm_from_scratch.checkpoint.weights import load_shipped

folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.FileStore(f"{folder}/meeting", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
"""

# %%
# The training loop has one addition, the line with ``all_reduce``.

loop = """
model = load_shipped("qwen2-docs")[0].double()
optimizer = torch.optim.AdamW(model.parameters())
for batch in torch.load(f"{folder}/batches.pt"):
    half = batch.chunk(2)[rank]
    logits = model(half[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), half[:, 1:].flatten()).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)  # in place: the sum over both
        p.grad /= 2
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), f"{folder}/weights-{rank}.pt")
"""
# %%
# We start it twice, on three batches of 8 rows of Python's language reference.

from lm_from_scratch.text.corpora import load_corpus

text = "\n".join(document.text for document in load_corpus("reference")[:3])
ids = torch.tensor(tokenizer.encode(text)[: 3 * 8 * 33])
batches = ids.view(3, 8, 33)
torch.save(list(batches), folder / "batches.pt")
(folder / "train.py").write_text(beginning + loop, encoding="utf-8")


def start(rank):
    command = [sys.executable, folder / "train.py", folder, str(rank)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


running = [start(rank) for rank in (0, 1)]
ended = [process.wait(timeout=120) for process in running]

assert ended == [0, 0]

# %%
# And now the same three steps in one process, with whole batches and without any exchange.

alone = load_shipped("qwen2-docs")[0].double()
optimizer = torch.optim.AdamW(alone.parameters())
for batch in batches:
    logits = alone(batch[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()

# %%
# **Predict first.** How do the weights compare?
#
# * The two processes differ a little from each other, and both differ from the single process.
# * The two processes are equal, and differ from the single process by rounding.
# * The two processes are equal, and differ from the single process as much as two halves of a batch differ.

zero, one = (torch.load(folder / f"weights-{rank}.pt") for rank in (0, 1))


def apart(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


temporary.cleanup()
before = model.double().state_dict()

print(f"training moved them by     {apart(zero, before):8.0e}")
print(f"process 0 and process 1    {apart(zero, one):8.0e}")
print(f"process 0 and one process  {apart(zero, alone.state_dict()):8.0e}")

assert apart(zero, one) == 0.0
assert apart(zero, alone.state_dict()) < 1e-9
assert apart(zero, before) > 1e-3

# %%
# The two processes are equal, and differ from the single process by rounding alone: sums are taken in another order. So
# two processes do what one does with the whole batch.
#
# As long as that batch keeps its size, nothing else needs to change, neither the learning rate nor the number of steps.
# The copies stay equal because they start equal, see the same mean, and take the same step. Our script never sends
# weights.
#
# Halves that are not equal
# -------------------------
#
# When a model is trained to answer questions, only the tokens of the answers are targets, and some answers are short.
# Say one process gets a long answer, and the other a short one.
#
# **Predict first.** Each process computes its mean loss, and the two are averaged. Is this the mean loss of the batch?
#
# * Yes, a mean of means is a mean.
# * No, it is too large or too small.

question = "What does len() return?"
long = " The number of items in an object, such as a string, a list or a range."


def loss_of_answer(answer):
    ids = tokenizer.start(question + answer)
    n = len(ids) - len(tokenizer.start(question))
    logits = model(torch.tensor([ids[:-1]]))[0, -n:]
    return n, F.cross_entropy(logits, torch.tensor(ids[-n:])).item()


(n0, L0), (n1, L1) = loss_of_answer(long), loss_of_answer(" A banana.")
whole = (n0 * L0 + n1 * L1) / (n0 + n1)

print(f"process 0: {n0:2} targets, loss {L0:.2f}")
print(f"process 1: {n1:2} targets, loss {L1:.2f}")
print(f"mean of means {(L0 + L1) / 2:5.2f}, of the whole batch {whole:.2f}")

assert n0 > 2 * n1 and whole + 1 < (L0 + L1) / 2
for n in [n0 + n1]:
    assert abs((2 * n0 / n * L0 + 2 * n1 / n * L1) / 2 - whole) < 1e-9

# %%
# No, it is too large here. The few tokens of the banana count as much as all tokens of the long answer, in the loss and
# in the gradient.
#
# There is no error, and the loss falls: the model is only trained on something other than you think. So let each
# process multiply its loss by :math:`N n_k / n` before the backward pass. N is the number of processes, :math:`n_k` the
# number of its own targets, and n that of all processes. The mean of *these* is the loss of the whole batch.
#
# Two GPUs that learn no faster than one
# --------------------------------------
#
# Somebody's script works on one GPU. It shuffles its data with a fixed seed, so that every run is the same. Started on
# two GPUs it works at once: both are busy, the losses look right, the copies stay equal. But the model learns no faster
# than on one. Here are the first rows that each process sees, of eight. (A ``DataLoader`` is PyTorch's way to cut data
# into batches, here of four rows.)

for rank in (0, 1):
    seed = torch.Generator().manual_seed(0)
    shuffled = DataLoader(range(8), 4, shuffle=True, generator=seed)
    sampler = DistributedSampler(range(8), num_replicas=2, rank=rank)
    shared = DataLoader(range(8), 4, sampler=sampler)
    first = [next(iter(loader)).tolist() for loader in (shuffled, shared)]
    print(f"process {rank}: shuffled {first[0]}, with a sampler {first[1]}")

# %%
# The same seed gives both the same four rows. Both compute the same gradient, and the mean of two equal gradients is
# that gradient. The second GPU repeats the first one's work.
#
# A *distributed sampler* knows the rank, and gives each process other rows. It has a trap of its own: without a call of
# ``sampler.set_epoch(epoch)``, every *epoch*, a pass through all rows, has the same order. To be safe, collect the rows
# of all processes, and check that each is there once.

orders = {}
for rank in (0, 1):
    sampler = DistributedSampler(range(8), num_replicas=2, rank=rank)
    orders[rank] = list(sampler)
    assert list(sampler) == orders[rank]  # the same in the next epoch
    sampler.set_epoch(1)
    assert list(sampler) != orders[rank]
assert sorted(orders[0] + orders[1]) == list(range(8))

# %%
# When the copy does not fit
# --------------------------
#
# What the script does by hand is *DDP* in PyTorch, distributed data parallel. It sends gradients in groups, called
# buckets, while the backward pass still runs. And it copies everything: 16 bytes for each weight with AdamW, in every
# process. *FSDP*, fully sharded data parallel (or ZeRO), cuts weights, gradients and moments into N *shards*, and
# gathers a block's weights just before it runs.

from lm_from_scratch.models.qwen2 import SIZES, Qwen2Config, Qwen2ForCausalLM

with torch.device("meta"):  # shapes without memory
    large = Qwen2ForCausalLM(Qwen2Config(**SIZES["Qwen2-7B"]))
GB = 16 * sum(p.numel() for p in large.parameters()) / 1e9

for N in (1, 2, 8):
    print(f"N = {N}, in each: DDP {GB:5.0f} GB, FSDP {GB / N:5.0f} GB")

assert GB > 120 and GB / 8 < 16

# %%
# A model of seven billion weights needs more than 120 GB in each process with DDP, however many GPUs there are, and
# less than 16 GB on each of eight with FSDP. Activations come on top. Choose DDP if everything fits into one GPU,
# because it sends less, and FSDP otherwise.
#
# Two in-depth pages go on from here: what `collectives <5a_collectives_in_depth.ipynb>`_ send, and `DDP and FSDP
# <5b_ddp_and_fsdp_in_depth.ipynb>`_, byte by byte, with a run in which a process is killed.
#
# Exercises
# ---------
#
# 1. *Easy.* Leave out the line with ``all_reduce`` and the next one. A good answer says how far the two copies are
#    apart after three steps, and which of the two a careless script would save.
# 2. *Easy.* Leave out only ``p.grad /= 2``. A good answer finds that the weights move nearly as before, and says why
#    AdamW hides the mistake. Hint: what would SGD do?
# 3. *Medium.* Let the halves have 6 and 2 rows. A good answer multiplies each loss by its weight, and is equal to one
#    process again.
#
# Summary
# -------
#
# * Every process has a copy and takes its share of the batch. The mean of their gradients is the gradient of the
#   whole batch, so the copies stay equal and are what one process would have made.
# * A mean of means is the mean only if all have equally many targets. Weight each loss by its token count.
# * Each process needs its own rows. Check it: with the same rows everything looks right, and half of the hardware is
#   wasted.
