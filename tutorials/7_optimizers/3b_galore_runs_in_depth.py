r"""
What a run with GaLore learns, in depth
=======================================

The lesson on `GaLore in training <3_galore_training.ipynb>`_ compares losses. Which differences does a run support,
and which not? And does a run that was stopped in the middle of a gap go on as if nothing had happened?

Five rules, one run each
------------------------

A Qwen2 of 0.4 M parameters reads Python's language reference. All runs see the same tokens in the same order and
start from the same weights. Only the rule for the blocks' matrices differs; embedding, norms and biases get AdamW
with one learning rate in all runs.

The rates come from a search of 100 steps that the page does not repeat: the best held-out loss on the grid 0.001,
0.002, 0.004, 0.008, ..., from other starting weights. For the matrices it gave 0.004 with AdamW and 0.008 with
GaLore at rank 32 and scale 1, whose variants take the same. For the others it gave 0.128 with both: the embedding has
to move far in few steps, as the lesson measures.

A comparison without such a search shows which optimizer was lucky with its default rate. The story of the lesson is
such a case, and exercise 2 does a part of the search.
"""

# sphinx_gallery_words = ["GaLore loss curve", "GaLore checkpoint", "weights_only", "resume training", "UnpicklingError"]
import io
import math
import pickle
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.text.batches import (
    PackedBatches,
    sequential_batches,
    write_tokens,
)
from lm_from_scratch.text.corpora import load_corpus, split
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.loss import causal_lm_loss
from lm_from_scratch.training.train import Schedule, evaluate, learning_rate


def groups_of(model):
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    ids = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in ids]


def held(optimizer):
    storages = {}
    for state in optimizer.state.values():
        for value in state.values():
            assert isinstance(value, torch.Tensor)
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


documents, held_out_documents = split(load_corpus("reference"))
documents = documents[:40]
tokenizer = Tokenizer.train([d.text for d in documents], 512)
folder = tempfile.TemporaryDirectory()
train_file = write_tokens(documents, tokenizer, Path(folder.name) / "train.bin")
test_file = write_tokens(
    held_out_documents, tokenizer, Path(folder.name) / "test.bin"
)
T, STEPS, GAP = 64, 60, 20
held_out = list(sequential_batches(test_file, 16, T))[:4]
batches = PackedBatches(train_file, batch_size=8, block_size=T)
config = Qwen2Config(
    vocab_size=tokenizer.vocab_size,
    block_size=T,
    n_layer=2,
    n_head=4,
    n_kv_head=2,
    n_embd=128,
    intermediate_size=344,
    rope_theta=10000.0,
    eos_token_id=None,
)


def loss_of(model, batch):
    logits = model(
        batch.idx, positions=batch.positions, documents=batch.documents
    )
    return causal_lm_loss(logits, batch.targets)


def one_step(model, optimizer, step):
    optimizer.zero_grad()
    loss_of(model, batches[step - 1]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def run(lr, **kind):
    schedule = Schedule(steps=STEPS, lr=1.0, min_lr=0.1, warmup=10)
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(config).train()
    matrices, others = groups_of(model)
    groups = [{"params": matrices, **kind}, {"params": others}]
    make = GaLore if kind else AdamW
    optimizer = make(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    result = {"model": model, "optimizer": optimizer, "curve": {}}
    for step in range(1, STEPS + 1):
        for group, peak in zip(optimizer.param_groups, (lr, 0.128)):
            group["lr"] = peak * learning_rate(step, schedule)
        one_step(model, optimizer, step)
        if step % GAP == 0:
            result["curve"][step] = evaluate(model, held_out)
    return result


galore = dict(lr=0.008, rank=32, scale=1.0, update_proj_gap=GAP)
kinds = {
    "AdamW": dict(lr=0.004),
    "GaLore, rank 32": galore,
    "rank 32, rotated moments": {**galore, "moments": "rotate"},
    "GaLore, rank 8": {**galore, "rank": 8},
    "matrices not trained": dict(lr=0.0),
}
runs = {name: run(**kind) for name, kind in kinds.items()}
size = sum(p.numel() for p in runs["AdamW"]["model"].parameters())
assert round(size / 1e6, 1) == 0.4
ends = {name: result["curve"][STEPS] for name, result in runs.items()}
untrained = ends["matrices not trained"]
gain = {
    name: (untrained - end) / (untrained - ends["AdamW"])
    for name, end in ends.items()
}
states = {name: held(result["optimizer"]) for name, result in runs.items()}
for name in runs:
    print(
        f"{name:25} held-out loss {ends[name]:.3f}, gain {gain[name]:4.0%}, "
        f"state {states[name] / 1e3:.0f} kB"
    )

made, (ax,) = figure(6.4, 4.2)
styles = ("o-", "s--", "^-.", "D-", "x--")
for i, ((name, result), style) in enumerate(zip(runs.items(), styles)):
    colour = COLOURS[i if i < 4 else 7]
    steps, losses = zip(*result["curve"].items())
    ax.plot(steps, losses, style, color=colour, markersize=5, label=name)
ax.set(xlabel="step (of 512 tokens)", ylabel="held-out loss (nats per token)")
ax.set_title("Equal tokens, tuned rates, one seed")
ax.legend(frameon=False, fontsize=9)
plt.show()

# %%
# The last run is the lesson's control, with random matrices. The gain is what training the matrices adds to it, as a
# share of what it adds with AdamW.

rank_32 = [gain[name] for name in gain if "rank 32" in name]
assert untrained - ends["AdamW"] > 0.2 and min(rank_32) > 0.55
assert gain["GaLore, rank 8"] < min(0.8, min(rank_32))
assert states["GaLore, rank 8"] < states["GaLore, rank 32"]
assert states["GaLore, rank 32"] < states["AdamW"] / 2

# %%
# What one seed supports: rank 32 of 128 keeps more than half of the gain with less than half of the state, and rank 8
# keeps a smaller part, at a rate that was tuned for rank 32. What it does not support is an order between the two
# ways to treat the moments; exercise 1 adds two seeds. (In the lesson rank 8 has a rate of its own, and keeps more.)
#
# The command ``python tests/benchmarks/bench_galore_loss.py`` does the whole experiment on a larger model: it finds
# both rates by the same rule, and then runs eight kinds with three seeds. The paper has the large scale: GaLore's
# perplexity is 34.88 against 34.06 of full rank for its 60M model, and 15.64 against 15.56 for 1B.
#
# What is in a checkpoint
# -----------------------
#
# The basis is part of the state: without it the moments have no meaning. Take the run at rank 32, go on for 15
# steps, save in the middle of a gap, and go on twice: with the objects in memory, and with what the file says.

trained = runs["GaLore, rank 32"]
model, optimizer = trained["model"], trained["optimizer"]
for step in range(STEPS + 1, STEPS + 16):
    one_step(model, optimizer, step)
file = io.BytesIO()
torch.save((model.state_dict(), optimizer.state_dict()), file)
file.seek(0)
weights, state = torch.load(file, weights_only=True)
for name, value in state["state"][0].items():
    print(f"{name:10} {value.dtype} {tuple(value.shape)}")
    assert isinstance(value, torch.Tensor)
entry = state["state"][0]
assert entry["age"] == 15 and entry["bases"] == STEPS // GAP + 1

twin = Qwen2ForCausalLM(config).train()
twin.load_state_dict(weights)
matrices, others = groups_of(twin)
twin_optimizer = GaLore(
    [{"params": matrices, "rank": 32}, {"params": others}], fused=True
)
twin_optimizer.load_state_dict(state)
for step in range(STEPS + 16, STEPS + 24):  # past the end of the gap
    one_step(model, optimizer, step)
    one_step(twin, twin_optimizer, step)
pairs = list(zip(model.parameters(), twin.parameters()))
assert all(torch.equal(p, q) for p, q in pairs)
assert twin_optimizer.state[matrices[0]]["bases"] == STEPS // GAP + 2

# %%
# Bit for bit, over the end of the gap. The file holds tensors and plain values alone, so ``weights_only=True`` reads it
# without running any code from it.
#
# Bug museum
# ----------
#
# An object in the state
# ~~~~~~~~~~~~~~~~~~~~~~
#
# The code published with GaLore, and ``pytorch_optimizer`` 4.1, keep a projector object in the state. Saving works.
# The run that wants to resume fails; a
# `fix for ms-swift <https://github.com/modelscope/ms-swift/pull/10161>`_ describes it. (L10)


class Projector:
    def __init__(self, basis):
        self.basis = basis


state = {"exp_avg": torch.zeros(3, 2), "projector": Projector(torch.eye(3)[:2])}
file = io.BytesIO()
torch.save(state, file)
file.seek(0)
try:
    torch.load(file, weights_only=True)
    failed = False
except pickle.UnpicklingError as error:
    failed = True
    print(type(error).__name__, "Unsupported global" in str(error))
assert failed

# %%
# With ``weights_only=False`` the file loads, and so would any program that someone hid in it. The fixed line stores
# the basis itself: ``state["left"] = basis``. The check saves, loads with ``weights_only=True`` and goes on, for every
# option.
#
# When is a basis due?
# ~~~~~~~~~~~~~~~~~~~~
#
# The step was counted from 1, and the basis renewed if ``step % gap == 0``. The first basis then serves one step less
# than all others. The authors' code counts from 0, as we do. Here both run on the same gradients, with a gap of 5. (L5)


class FromOne(GaLore):
    def low_gradient(self, p, group, may_renew=True):
        state = self.state[p]
        if "age" in state:
            due = (state["step"] + 1) % group["update_proj_gap"] == 0
            state["age"].fill_(math.inf if due else 0.0)
        return super().low_gradient(p, group, may_renew)


def trace(make, steps=12):
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(6, 9))
    group = dict(params=[p], rank=2, update_proj_gap=5, scale=1.0)
    optimizer = make([group], lr=0.1)
    bases, weights = [], []
    for _ in range(steps):
        p.grad = torch.randn(6, 9, generator=generator)
        optimizer.step()
        bases.append(int(optimizer.state[p]["bases"]))
        weights.append(p.detach().clone())
    renewed = [t + 1 for t in range(steps) if t == 0 or bases[t] > bases[t - 1]]
    return renewed, weights


(wrong, wrong_weights), (right, right_weights) = trace(FromOne), trace(GaLore)
gaps = [
    (a - b).abs().max().item() for a, b in zip(wrong_weights, right_weights)
]
print(f"renewed at {wrong}, and at {right}")
print(f"largest difference: step 4 {gaps[3]:.0e}, step 5 {gaps[4]:.0e}")
assert wrong == [1, 5, 10] and right == [1, 6, 11]
assert gaps[3] == 0.0 and gaps[4] > 1e-3

# %%
# Both conventions train. But a comparison of two libraries agrees for four steps and then does not, and a test
# shorter than the gap finds nothing. The check writes the list 1, 6, 11 down.
#
# Exercises
# ---------
#
# 1. *Easy.* Repeat the runs with seeds 2 and 3. A right answer says which differences exceed the spread between seeds.
#    Hint: the weights and the order of the text should both change; ``PackedBatches`` takes a seed, too.
# 2. *Medium.* Find the best of three rates for rank 8. A right answer says how much of its distance to AdamW was the
#    rate. Hint: GaLore's rate is one step of the grid above AdamW's; is that of rank 8 higher still?
#
# Summary
# -------
#
# * At equal tokens, rank 32 of 128 kept more than half of what training the matrices gives. Rank 8 kept a
#   smaller part than rank 32. One seed supports no finer order.
# * The state is tensors alone, so that a checkpoint is safe to load. A run that is stopped in a gap goes on bit for
#   bit.
#
# Sources
# -------
#
# * `GaLore <https://arxiv.org/abs/2403.03507>`_, Zhao et al., 2024: the losses of its table;
#   its `code <https://github.com/jiaweizzhao/GaLore>`_ counts steps from 0.
# * `LDAdam <https://arxiv.org/abs/2410.16103>`_, Robert et al., 2025: moments turned into the new basis.
# * `weights_only <https://docs.pytorch.org/docs/stable/notes/serialization.html>`_, PyTorch's notes on what a file may
#   hold.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
folder.cleanup()
