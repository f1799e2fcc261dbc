r"""
The bytes of GaLore in depth, and moments of one byte
=====================================================

The lesson on `GaLore in training <3_galore_training.ipynb>`_ saves more than half of the optimizer's state. How many
bytes is that by formula, for the five models of the paper? Where does the saving end? And how can moments also be kept in
fewer bits?

Letters: a weight matrix has shape (m, n); :math:`s` is its shorter side, :math:`l` the longer one, :math:`r` the
rank.

The bytes of one matrix
-----------------------

AdamW keeps two moments of the weight's shape: :math:`2mn` numbers. GaLore keeps one basis and two moments. The type
``std`` puts the basis on the shorter side, ``reverse_std`` on the longer one:

.. math::

   \text{std} &= \underbrace{s \, r}_{\text{basis}} + \underbrace{2 \, r \, l}_{\text{moments}} = r (s + 2l) \\
   \text{reverse} &= r (l + 2s), \qquad \text{AdamW} = 2 \, s \, l

GaLore is smaller as long as :math:`r < 2sl / (s + 2l)`. For a square matrix this is two thirds of its side. For a
long one it approaches the side itself, and at full rank it always costs more.
"""

# sphinx_gallery_needs = ["3_galore_training"]
# sphinx_gallery_words = ["GaLore memory", "optimizer state memory", "GaLore out of memory", "GaLore or LoRA memory", "reverse_std", "8-bit Adam", "bitsandbytes", "Adam8bit", "paged_adamw_8bit", "block-wise quantization", "optim_bits", "GaLore checkpoint", "UnpicklingError"]
import io
import math
import pickle

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.instruments.record import record_saved
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
from lm_from_scratch.text.targets import next_token_targets
from lm_from_scratch.training.loss import causal_lm_loss


def numbers(m, n, r, kind="std"):
    s, l = min(m, n), max(m, n)
    return r * (s + 2 * l) if kind == "std" else r * (l + 2 * s)


for m, n in ((4096, 4096), (4096, 11008), (4096, 32000)):
    break_even = 2 * m * n / (m + 2 * n)
    kinds = ("std", "reverse_std")
    std, reverse = (numbers(m, n, 1024, k) / (2 * m * n) for k in kinds)
    print(
        f"{m} x {n:5}: pays below rank {math.ceil(break_even)}; "
        f"share of AdamW's at 1024: {std:.0%}, reversed {reverse:.0%}"
    )
    assert numbers(m, n, math.ceil(break_even) - 1) < 2 * m * n
    assert numbers(m, n, math.ceil(break_even)) > 2 * m * n
    assert numbers(m, n, m) > 2 * m * n
    assert reverse <= std

# %%
# The last column is a surprise: the reversed type has the *smaller* state, because the basis lies once on the long
# side and the moments twice on the short one. The reason for ``std`` is not bytes: see `new bases in depth
# <3c_galore_bases_in_depth.ipynb>`_.
#
# The bytes of a model
# --------------------
#
# The paper projects the matrices of attention and MLP; embedding, head and norms keep AdamW. Its five models exist
# here on the meta device, as shapes without memory, and ``shapes_in`` says what the optimizers would hold. (A
# Qwen2 is a Llama with three biases more in each block.)

LLAMA = {  # C, MLP, blocks, heads, rank
    "60M": (512, 1376, 8, 8, 128),
    "130M": (768, 2048, 12, 12, 256),
    "350M": (1024, 2736, 24, 16, 256),
    "1B": (2048, 5461, 24, 32, 512),
    "7B": (4096, 11008, 32, 32, 1024),
}


def groups_of(model):
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    ids = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in ids]


def llama(C, inner, layers, heads):
    config = Qwen2Config(
        vocab_size=32000, block_size=256, n_layer=layers, n_head=heads,
        n_kv_head=heads, n_embd=C, intermediate_size=inner,
        tie_word_embeddings=False, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        return Qwen2ForCausalLM(config)


def elements(optimizer):
    return sum(
        shape.numel()
        for group in optimizer.param_groups
        for p in group["params"]
        for shape in optimizer.shapes_in(group, p).values()
        if shape  # without counters
    )


parts, counts = {}, {}
for name, (*shape, rank) in LLAMA.items():
    model = llama(*shape)
    matrices, others = groups_of(model)
    weights = sum(p.numel() for p in model.parameters())
    adamw = elements(AdamW(model.parameters()))
    galore = elements(
        GaLore([{"params": matrices, "rank": rank}, {"params": others}])
    )
    moments = sum(2 * rank * max(p.shape) for p in matrices)
    bases = sum(rank * min(p.shape) for p in matrices)
    parts[name] = moments, bases, sum(2 * p.numel() for p in others)
    assert galore == sum(parts[name]) and adamw == 2 * weights
    counts[name] = (weights, adamw, galore)
    print(
        f"{name:>4}: float32 state {4 * adamw / 1e9:5.2f} GB with AdamW, "
        f"{4 * galore / 1e9:5.2f} with GaLore, {1 - galore / adamw:.1%} less"
    )
savings = [1 - galore / adamw for _, adamw, galore in counts.values()]
assert savings == sorted(savings) and savings[0] < 0.32 and savings[-1] > 0.64

# %%
# The saving grows with the model. The reason is the part that is not projected.

_, (ax,) = figure(4.8, 3.6)
bottom = [0.0] * len(parts)
for i, label in enumerate(("moments", "bases", "not projected")):
    heights = [part[i] / counts[name][1] for name, part in parts.items()]
    look = dict(color=COLOURS[i], hatch=("", "///", "...")[i])
    ax.bar(
        [*parts], heights, bottom=bottom, label=label, edgecolor="white", **look
    )
    bottom = [b + h for b, h in zip(bottom, heights)]
ax.set(ylabel="share of AdamW's state", ylim=(0, 1.0))
ax.set_title("GaLore's state at the ranks of the paper")
ax.legend(frameon=False)
plt.show()

assert parts["60M"][2] / counts["60M"][1] > 0.5

# %%
# The paper's abstract says "up to 65.5 %" for 1B and 7B; our count for 7B lies within one percentage point. Its
# table of totals, weights plus state in bfloat16, is lower than our count. A count that projects the head as well
# fits it, while the code published with the paper projects attention and MLP alone, as we do. Our gigabytes are of
# float32, twice those of bfloat16; the shares are the same.

assert abs(savings[-1] - 0.655) < 0.01
published = {  # gigabytes: full rank, GaLore (Zhao et al., table 2)
    "60M": (0.36, 0.24),
    "130M": (0.76, 0.52),
    "350M": (2.06, 1.22),
    "1B": (7.80, 4.38),
}
for name, (full, low) in published.items():
    C, *_, rank = LLAMA[name]
    weights, adamw, galore = counts[name]
    head = 2 * 32000 * C - numbers(32000, C, rank)  # what projecting it saves
    ours = (weights + galore) / (weights + adamw)
    with_head = (weights + galore - head) / (weights + adamw)
    print(
        f"{name:>4}: published {low / full:.2f} of full rank, our count {ours:.2f}, "
        f"with the head {with_head:.2f}"
    )
    assert abs(with_head - low / full) < 0.02 < ours - low / full

# %%
# Where the saving ends
# ---------------------
#
# **A small model, or a large vocabulary.** Over half of the 60M model's state is outside the projection.
#
# **A large rank.** Above two thirds of the side the state is larger than AdamW's.
#
# **Many tokens.** Activations grow with the batch, and GaLore does not touch them. Nor does it touch the gradient,
# which is still full when it is projected. Here is what a small Qwen2, twice as wide as the lesson's, holds for one
# batch of 512 tokens.

config = Qwen2Config(
    vocab_size=512, block_size=64, n_layer=2, n_head=4, n_kv_head=2, n_embd=128,
    intermediate_size=344, rope_theta=10000.0, eos_token_id=None,
)  # fmt: skip
model = Qwen2ForCausalLM(config)
matrices, others = groups_of(model)
idx = torch.randint(512, (8, 64))  # (B, T)
with record_saved(model) as saved:
    causal_lm_loss(model(idx), next_token_targets(idx))
activations = sum(saved.values())
gradients = sum(p.nbytes for p in model.parameters())
small = GaLore([{"params": matrices, "rank": 32}, {"params": others}])
print(
    f"kB: activations {activations / 1e3:.0f}, gradients {gradients / 1e3:.0f}, "
    f"AdamW's state {2 * gradients / 1e3:.0f}, GaLore's {elements(small) / 250:.0f}"
)
assert activations > 2 * 2 * gradients

# %%
# Users met this. In `GaLore issue 6 <https://github.com/jiaweizzhao/GaLore/issues/6>`_ somebody trains TinyLlama, and
# 8-bit GaLore takes slightly more memory than 8-bit AdamW. In
# `transformers issue 29822 <https://github.com/huggingface/transformers/issues/29822>`_ a large card still runs out of
# memory.
#
# **Fine-tuning with a frozen model.** `LoRA <../8_quantized_weights/6_lora.ipynb>`_ trains two thin factors beside each
# frozen matrix. It needs no gradient of the matrix, and may store it in few bits. Per matrix:

m = n = 4096
r = 128
table = {  # numbers: weights, gradient, state
    "AdamW": (m * n, m * n, 2 * m * n),
    "GaLore": (m * n, m * n, numbers(m, n, r)),
    "LoRA": (m * n + r * (m + n), r * (m + n), 2 * r * (m + n)),
}
for name, row in table.items():
    weight, gradient, state = (x / 1e6 for x in row)
    print(
        f"{name:6} weights {weight:.1f} M, gradient {gradient:4.1f} M, state {state:4.1f} M"
    )
assert table["GaLore"][2] < table["LoRA"][2]
assert sum(table["LoRA"]) < sum(table["GaLore"])

# %%
# GaLore has the smaller state, LoRA the smaller sum, because of the gradient. If the gradients of all matrices never
# exist at the same time, this changes: that is the next lesson, `one gradient at a time <4_in_backward.ipynb>`_.
#
# Moments of one byte
# -------------------
#
# Both moments are float32 so far. The published 8-bit variants of AdamW and of GaLore keep them in one byte a number,
# and so does ``optim_bits=8`` here. This is the state of the paper's 7B model, in gigabytes:


def state_of(optimizer):
    return sum(
        value.nbytes
        for group in optimizer.param_groups
        for p in group["params"]
        for value in optimizer.new_state(p, group).values()
    )


model = llama(*LLAMA["7B"][:4])
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
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# How can a byte be enough? A moment is a mean over noisy gradients, so two digits of it will do. But the numbers of
# one matrix differ by many powers of ten. The usual 8 bits, 256 values at equal distances from -1 to 1, round
# everything below 1/256 to 0. So *dynamic* values lie close together where the numbers are small: the leading zeros
# of a byte count the powers of ten, and the bits after them divide one power into equal parts. The figure shows how
# far off the nearest value can be, for a number between 0 and the largest one.

dynamic = dynamic_values(signed=True)
_, (ax,) = figure(4.8, 3.2)
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
# ~~~~~~~~~~~~~~~~~~~~~~~
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
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
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
# Dettmers and his co-authors report no loss of quality in long runs. One byte is not free, though: decoding and
# encoding take time in every step, and where gradients of very different sizes share a block of 256, the small ones are
# known less well. So compare before a long run: ``python -m lm_from_scratch train`` takes ``--optim-bits 8``.
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
# Exercises
# ---------
#
# 1. *Easy.* At which rank does GaLore's state of the 7B model equal half of AdamW's? A good answer solves for
#    :math:`r` with embedding and head included, and checks it with ``elements``. Hint: only two sums over the
#    matrices matter.
# 2. *Medium.* Give AdamW 4000 gradients of noise for a 64 x 64 matrix, and after the first 2000 make those of every
#    second row ten times smaller. Their second moments should fall to a hundredth. A good answer says how far they
#    fall in 32 and in 8 bits, with :math:`\beta_2` of 0.95 and of 0.999, and why. Hint: a block is four rows, and its
#    largest number is kept exactly.
#
# Summary
# -------
#
# * ``std`` keeps :math:`r (s + 2l)` numbers instead of :math:`2sl`: it pays below two thirds of the side of a square
#   matrix. The state of the 7B model shrinks by more than 64 per cent, that of the 60M model by less than 32.
# * GaLore has the smallest state, and LoRA the smallest sum of weights, gradient and state. Gradient and activations stay
#   as large as they were.
# * Moments of one byte a number take a quarter of the memory, with one scale for every 256 of them and values that
#   lie closer together near 0. Values for second moments have no 0: Adam divides by their root.
#
# Sources
# -------
#
# * `GaLore <https://arxiv.org/abs/2403.03507>`_, Zhao et al., 2024: ranks, published figures; its
#   `code <https://github.com/jiaweizzhao/GaLore>`_ has the five shapes.
# * `LoRA <https://arxiv.org/abs/2106.09685>`_, Hu et al., 2021.
# * `8-bit Optimizers via Block-wise Quantization <https://arxiv.org/abs/2110.02861>`_, Dettmers et al., 2022: moments
#   in one byte a number; `bitsandbytes <https://github.com/bitsandbytes-foundation/bitsandbytes>`_ is their code.
# * `Memory Efficient Optimizers with 4-bit States <https://arxiv.org/abs/2309.01507>`_, Li, Chen and Zhu, 2023: the
#   trap of zero.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
