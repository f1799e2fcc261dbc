r"""
Moments in one byte, in depth
=============================

`GaLore in training <3_galore_training.ipynb>`_ makes the moments smaller by keeping fewer of them. They can also be
kept in fewer bits. How can one byte be enough for a number of Adam's, and what does it cost?

Both moments are float32 so far. The published 8-bit variants of AdamW and of GaLore keep them in one byte a number,
and so does ``optim_bits=8`` here. This is the state of the paper's 7B model, in gigabytes:
"""

# sphinx_gallery_words = ["8-bit Adam", "bitsandbytes", "Adam8bit", "paged_adamw_8bit", "block-wise quantization", "optim_bits"]
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.instruments.plot import figure
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.optim.eight_bit import (
    Table,
    decode,
    dynamic_values,
    encode,
    table_for,
)
from lm_from_scratch.optim.galore import GaLore
from lm_from_scratch.text.batches import (
    PackedBatches,
    sequential_batches,
    write_tokens,
)
from lm_from_scratch.text.corpora import load_corpus, split
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.train import (
    Schedule,
    evaluate,
    learning_rate,
    optimizer_step,
)


def groups_of(model):
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    ids = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in ids]


def state_of(optimizer):
    return sum(
        value.nbytes
        for group in optimizer.param_groups
        for p in group["params"]
        for value in optimizer.new_state(p, group).values()
    )


with torch.device("meta"):
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=32000, block_size=256, n_layer=32, n_head=32, n_kv_head=32,
            n_embd=4096, intermediate_size=11008, tie_word_embeddings=False,
            eos_token_id=None,
        )
    )  # fmt: skip
matrices, others = groups_of(model)


def gigabytes(bits):
    groups = [{"params": matrices, "rank": 1024}, {"params": others}]
    adamw = AdamW(model.parameters(), optim_bits=bits)
    galore = GaLore(groups, optim_bits=bits)
    return [state_of(optimizer) / 1e9 for optimizer in (adamw, galore)]


whole, eighth = gigabytes(32), gigabytes(8)
bases = 4 * sum(1024 * min(p.shape) for p in matrices) / 1e9
for name, full, less in zip(("AdamW", "GaLore"), whole, eighth):
    print(f"{name:6} {full:5.2f} GB in 32 bits, {less:5.2f} in 8")
print(f"of which GaLore's bases are {bases:.2f} in both")
assert abs(eighth[0] / whole[0] - 8.125 / 32) < 1e-3
assert abs((eighth[1] - bases) / (whole[1] - bases) - 8.125 / 32) < 1e-3

# %%
# The moments shrink to a quarter and a little: 8.125 bits a number. The bases stay in float32, and are now half of
# what GaLore holds. Moments of fewer than 4096 numbers stay, too: there is little to save.
#
# Values that lie closer near zero
# --------------------------------
#
# How can a byte be enough? A moment is a mean over noisy gradients, so two digits of it will do. But the numbers of
# one matrix differ by many powers of ten. The usual 8 bits, 256 values at equal distances from -1 to 1, round
# everything below 1/256 to 0. So *dynamic* values lie close together where the numbers are small: the leading zeros
# of a byte count the powers of ten, and the bits after them divide one power into equal parts. The figure shows how
# far off the nearest value can be, for a number between 0 and the largest one.

dynamic = dynamic_values(signed=True)
made, (ax,) = figure(6.4, 3.4)
for values, style, name in (
    (torch.linspace(-1, 1, 255), "--", "equal distances"),
    (dynamic, "-", "dynamic"),
):
    values = values[values >= 0]
    middles = (values[1:] + values[:-1]) / 2  # farthest from both neighbours
    error = (values[1:] - values[:-1]) / 2 / middles
    ax.loglog([3e-8, *middles], [1.0, *error], style, label=name)
    worst = [
        error[(middles >= t) & (middles < 10 * t)].max()
        if t > middles[0]
        else 1
        for t in (1e-1, 1e-3, 1e-5)
    ]
    print(f"{name:15}", " ".join(f"{error:6.1%}" for error in worst))
ax.set(xlabel="number / largest", ylabel="worst error / number")
ax.set_title("Rounded to the nearest of 256 values")
ax.legend(frameon=False)
plt.show()
assert worst[0] < 0.08 and worst[1] < 0.4

# %%
# The columns are the worst errors from 0.1 to 1, from 0.001 to 0.01, and from 0.00001 to 0.0001.
#
# A scale for every block
# -----------------------
#
# What "largest" means is the second idea: the largest of a *block* of 256 neighbours. It is kept beside their codes, in
# float32. With one scale for a whole matrix, a single outlier would take the precision from all other numbers:

moment = torch.randn(100, 256, generator=torch.Generator().manual_seed(0))
moment[0, 0] = 1000.0
table = table_for("exp_avg", moment.device)
codes, largest = encode(moment, table)
in_blocks = (decode(codes, largest, table) - moment)[1:].abs().mean()
rounded = (moment[..., None] / 1000 - dynamic).abs().argmin(-1)
together = (1000 * dynamic[rounded] - moment)[1:].abs().mean()
print(f"mean error: in blocks {in_blocks:.3f}, with one scale {together:.3f}")
assert codes.dtype == torch.uint8 and largest.shape == (100,)
assert 5 * in_blocks < together

# %%
# No zero in the second moment
# ----------------------------
#
# A step decodes the moments of one matrix, does what it always does, and encodes them again. Rounding has one trap. A
# gradient 10,000 times smaller than its neighbour has a second moment 100,000,000 times smaller. That is rounded to
# 0, while the first moment is not, and in the next step Adam divides by :math:`\epsilon` alone:

gradient = torch.tensor([1.0, 1e-4])
first, second = 0.1 * gradient, 0.05 * gradient**2
moments = {}
for name, table in (
    ("with 0", Table.of(dynamic_values(signed=False))),
    ("without", table_for("exp_avg_sq", gradient.device)),
):
    kept = decode(*encode(second, table), table)
    moments[name] = (first / (kept.sqrt() + 1e-8)).tolist()
    print("values {:7}: directions {:.2f}, {:.2f}".format(name, *moments[name]))
assert moments["with 0"][1] > 100 and moments["without"][1] < 1

# %%
# Without rounding the second direction would be as large as the first. So the values for second moments lack the 0:
# the smallest are rounded up, and their weights move less than they should instead of a thousand times more.
# `Li, Chen and Zhu <https://arxiv.org/abs/2309.01507>`_ found this for 4 bits.
#
# What it does to the loss
# ------------------------
#
# Three seeds, for the weights and for the order of the text, with both optimizers. The runs are smaller
# than those of the lesson: a model with one transformer block, and 40 steps of 256 tokens.

documents, held_out_documents = split(load_corpus("reference"))
documents = documents[:40]
tokenizer = Tokenizer.train([d.text for d in documents], 512)
folder = tempfile.TemporaryDirectory()
train_file = write_tokens(documents, tokenizer, Path(folder.name) / "train.bin")
test_file = write_tokens(
    held_out_documents, tokenizer, Path(folder.name) / "test.bin"
)
held_out = list(sequential_batches(test_file, 16, 64))[:4]
config = Qwen2Config(
    vocab_size=tokenizer.vocab_size, block_size=64, n_layer=1, n_head=4,
    n_kv_head=2, n_embd=128, intermediate_size=344, rope_theta=10000.0,
    eos_token_id=None,
)  # fmt: skip
schedule = Schedule(steps=40, lr=1.0, min_lr=0.1, warmup=10)


def held(optimizer):
    storages = {}
    for state in optimizer.state.values():
        for value in state.values():
            assert isinstance(value, torch.Tensor)
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def with_bits(bits, seed, lr, **kind):
    rows = PackedBatches(train_file, batch_size=4, block_size=64, seed=seed)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    matrices, others = groups_of(model)
    groups = [{"params": matrices, **kind}, {"params": others}]
    options = dict(betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    make = GaLore if kind else AdamW
    optimizer = make(groups, optim_bits=bits, **options)
    for step in range(1, 41):
        for group, peak in zip(optimizer.param_groups, (lr, 0.128)):
            group["lr"] = peak * learning_rate(step, schedule)
        optimizer_step(model, optimizer, [rows[step - 1]])
    return evaluate(model, held_out), held(optimizer)


galore = dict(lr=0.008, rank=32, scale=1.0, update_proj_gap=20)
differences, spreads = [], []
for name, kind in (("AdamW", dict(lr=0.004)), ("GaLore", galore)):
    ends = {
        bits: [with_bits(bits, seed, **kind) for seed in (1, 2, 3)]
        for bits in (32, 8)
    }
    for bits, found in ends.items():
        losses = "  ".join(f"{loss:.4f}" for loss, _ in found)
        print(
            f"{name:6} {bits:2} bits {losses}  state {found[0][1] / 1e3:.0f} kB"
        )
    losses = [loss for loss, _ in ends[32]]
    spreads.append(max(losses) - min(losses))
    pairs = zip(ends[32], ends[8])
    differences += [abs(eight - full) for (full, _), (eight, _) in pairs]
    assert ends[8][0][1] < 0.4 * ends[32][0][1]
print(
    f"largest difference by bits {max(differences):.4f}, "
    f"by seeds {max(spreads):.4f}"
)
assert max(differences) < min(0.02, max(spreads) / 2)

# %%
# Each column is one seed. What 8 bits change is less than half of what another seed changes. Dettmers and his
# co-authors report no loss in long runs. It is not free, though:
#
# * **Your model decides.** Where gradients of very different sizes share a block, the small ones are known less well.
#   So compare before a long run: ``python -m lm_from_scratch train`` takes ``--optim-bits 8`` for both optimizers.
# * **Time.** Decoding and encoding go over the moments several times. The command
#   ``python tests/benchmarks/bench_galore.py`` times it.
# * **Small changes** of a moment, less than half the distance to the next value, are lost. So a moment that should fall
#   to 0 stops on its way. At :math:`\beta_2 = 0.999`, where it falls by at most 0.1 per cent in a step, it may not even
#   begin: exercise 1.
#
# Exercises
# ---------
#
# 1. *Medium.* Give AdamW 4000 gradients of noise for a 64 x 64 matrix, and after the first 2000 make those of every
#    second row ten times smaller. Their second moments should fall to a hundredth. A right answer says how far they
#    fall in 32 and in 8 bits, with :math:`\beta_2` of 0.95 and of 0.999, and why. Hint: a block is four rows, and its
#    largest number is kept exactly.
#
# Summary
# -------
#
# * Moments of one byte a number take a quarter of the memory, with one scale for every 256 of them and values that
#   lie closer together near 0. Over three seeds the loss changed by less than half of what the seed changes.
# * The largest number of a block is exact, and values for second moments have no 0: Adam divides by their root.
#
# Sources
# -------
#
# * `8-bit Optimizers via Block-wise Quantization <https://arxiv.org/abs/2110.02861>`_, Dettmers et al., 2022: moments
#   in one byte a number; `bitsandbytes <https://github.com/bitsandbytes-foundation/bitsandbytes>`_ is their code.
# * `Memory Efficient Optimizers with 4-bit States <https://arxiv.org/abs/2309.01507>`_, Li, Chen and Zhu, 2023: the
#   trap of zero.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
folder.cleanup()
