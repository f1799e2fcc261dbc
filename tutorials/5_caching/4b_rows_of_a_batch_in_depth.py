r"""
A batch equals its rows, in depth
=================================

The lesson on `batches of unequal prompts <4_padded_batches.ipynb>`_ compares five padded rows with the same rows alone.
Does the law hold with padding on any side and anywhere, in every kind of cache, through rounding, and beside
``transformers``? And how much of a batch is wasted when its rows end at different times?

How a row is compared
---------------------

Two small models have random weights that are large enough to show every mistake, in float64. ``read`` is the prefill
and ``speak`` goes on from there, one token after another. The reference is each row alone, without padding and without
a cache.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["4a_padding_mistakes"]
# sphinx_gallery_words = ["left or right padding", "batch invariance", "bfloat16 batch differs", "ragged batch"]
import copy

import matplotlib.pyplot as plt
import torch
import transformers

from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.attention.visibility import PADDING
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.folders import PRETRAINED
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.generation.generate import (
    complete,
    decode,
    generate,
    prefill,
)
from lm_from_scratch.generation.sampling import GREEDY, Sampler
from lm_from_scratch.instruments.plot import COLOURS, LIGHT_GREY, figure
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.models.qwen2 import Qwen2Config
from lm_from_scratch.models.randomize import randomize_
from lm_from_scratch.text.batch import padded_batch

torch.set_grad_enabled(False)
transformers.utils.logging.disable_progress_bar()
model, tokenizer = load_shipped()
end = tokenizer.eos_token_id


def read(model, prompts):
    batch = padded_batch(prompts, pad_token_id=end, side="left")
    cache = GrowingCache(model.config.n_layer)
    logits = prefill(model, batch.idx, cache, positions=batch.positions)
    return logits, batch.positions[:, -1], cache  # logits (B, V)


def speak(model, start, prompts, n, choose=lambda logits: logits.argmax(-1)):
    logits, last, cache = start(model, prompts)
    said, scores = [], []
    for step in range(n):
        if step > 0:
            last = last + 1
            logits = decode(model, said[-1], cache, positions=last)
        scores.append(logits)
        said.append(choose(logits))
    return torch.stack(said, 1), torch.stack(scores, 1)  # (B, n), (B, n, V)


def random_model(config):
    model = build(config).eval()
    randomize_(model)
    return model.double()


sizes = dict(vocab_size=97, block_size=64, n_layer=3, n_head=4)
sizes |= dict(eos_token_id=None, bos_token_id=None)
qwen2 = sizes | dict(n_embd=40, n_kv_head=2, intermediate_size=56)
tiny = {
    "GPT-2": random_model(GPT2Config(**sizes, n_embd=36)),
    "Qwen2": random_model(Qwen2Config(**qwen2)),
}
generator = torch.Generator().manual_seed(0)
few = [torch.randint(1, 97, (n,), generator=generator) for n in (4, 9, 17)]
few = [[end, *ids.tolist()] for ids in few]
fed = torch.randint(1, 97, (3, 2), generator=generator)


def logit_errors(model, start):
    feed = iter(fed.T)
    _, got = speak(model, start, few, 2, lambda logits: next(feed))
    for row, prompt in enumerate(few):
        for step in range(2):
            ids = torch.tensor([prompt + fed[row, :step].tolist()])
            got[row, step] -= model(ids)[0, -1]
    return got.abs().amax((0, 2)).tolist()  # by step


for m in tiny.values():
    assert max(logit_errors(m, read)) < 1e-12

# %%
# The shipped models are used further down. Texts that GPT-2 wrote itself are cut after 3 to 24 tokens, and sixteen such
# prompts are one batch.

shipped = {"GPT-2": model, "Qwen2": load_shipped("qwen2-docs")[0]}
exact = {name: copy.deepcopy(m).double() for name, m in shipped.items()}
sampler = Sampler(top_p=0.95)
texts = generate(model, [[end]], 60, sampler, num_return_sequences=40)
texts = complete(texts)
cuts = torch.randint(3, 25, (40,), generator=generator).tolist()
prompts = [[end, *text[:cut]] for text, cut in zip(texts, cuts)][:16]

# %%
# One integer for each token
# --------------------------
#
# ``read`` is right because of the positions alone. A key at -1 is hidden from all queries, at every later step too, because
# the cache keeps the position beside the key. Real tokens count from 0 in their own row. The id of the padding is never
# looked at.
#
# The side does not matter to the model. But on the left, one column holds the last token of every row.

lengths = torch.tensor([len(prompt) for prompt in few])
sides = {s: padded_batch(few, end, side=s) for s in ("left", "right")}
print("last column, left: ", sides["left"].positions[:, -1].tolist())
print("last column, right:", sides["right"].positions[:, -1].tolist())
assert torch.equal(sides["left"].positions[:, -1], lengths - 1)

# %%
# That is why generation pads on the left: one slice gives the B states whose logits are needed. On the right, each row
# has its own last column. This is how to read them, and all that follows stays the same.


def read_right(model, prompts):
    batch = padded_batch(prompts, pad_token_id=end, side="right")
    cache = GrowingCache(model.config.n_layer)
    hidden = model.backbone(batch.idx, positions=batch.positions, cache=cache)
    last = batch.positions.amax(dim=1)  # (B,)
    hidden = hidden[torch.arange(len(prompts)), last]  # (B, C)
    return model.head(hidden), last, cache


for kind, m in tiny.items():
    worst = max(logit_errors(m, read_right))
    print(f"{kind}, padded on the right: largest error {worst:.0e}")
    assert worst < 1e-12

# %%
# In a growing cache, left padding stays in front of the row, and right padding stays inside it as a hole. Both take the
# same number of columns.
#
# To a static cache the side makes no difference: position p is in slot p, whatever column the token came from. Below,
# the batch *left* has padding on the left in two rows, and before, inside and after the tokens of the third.

from lm_from_scratch.cache.slots import StaticCache

ids = [[1, 2, 3], [11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26, 27, 28]]
new = torch.tensor([[31, 32], [33, 34], [35, 36]])
scattered = torch.tensor([[0, 1, 0, 0, 1, 1, 0, 0]])
m = tiny["Qwen2"]


def filled(cache, side):
    batch = padded_batch(ids, end, side=side)
    if side == "left":
        batch.idx[0, scattered[0] == 1] = torch.tensor(ids[0])
        batch.positions[:1] = positions_from_mask(scattered)
    m(batch.idx, positions=batch.positions, cache=cache)
    for tokens in new.T:
        decode(m, tokens, cache, positions=cache.lengths)
    return cache


one, two = (filled(StaticCache(3, 12), s).contents(2) for s in sides)
assert torch.equal(one[2], two[2])  # the positions
held = (one[2] >= 0)[:, None, :, None]
for a, b in zip(one[:2], two[:2]):  # keys, values
    torch.testing.assert_close(a * held, b * held, atol=1e-12, rtol=0.0)

# %%
# Left and right leave equal keys and values. The figure shows where they are, for prompts of 3, 6 and 8 tokens and two
# new ones. A number is the position of a key, and what is grey is hidden.

panels = {
    "growing cache, batch left": filled(GrowingCache(3), "left"),
    "growing cache, batch right": filled(GrowingCache(3), "right"),
    "static cache of 12 slots and a spare one, both": filled(
        StaticCache(3, 12), "left"
    ),
}
_, axes = figure(6.0, 5.2, rows=3)
for ax, (title, cache) in zip(axes, panels.items()):
    table = cache.contents(0)[2]
    for row, line in enumerate(table.tolist()):
        for slot, position in enumerate(line):
            fresh = position >= len(ids[row])
            colour = COLOURS[1] if fresh else COLOURS[5]
            colour = colour if position >= 0 else LIGHT_GREY
            ax.add_patch(plt.Rectangle((slot, row), 0.92, 0.92, color=colour))
            text = "" if position < 0 else f"{'+' * fresh}{position}"
            ax.text(slot + 0.46, row + 0.5, text, ha="center", va="center")
    ax.set(xlim=(-0.1, 13), ylim=(3, -0.1), ylabel="row", title=title)
    ax.set_xticks([s + 0.46 for s in range(13)], range(13))
    ax.set_yticks([0.5, 1.5, 2.5], range(3))
    ax.grid(False)
    ax.tick_params(length=0)
axes[-1].set_xlabel("column or slot (blue: prompt; orange with +: new)")
plt.show()

places = [cache.contents(0)[2].numel() for cache in panels.values()]
print(f"23 keys take {places[0]} or {places[1]} columns, {places[2]} slots")
assert sum(len(row) for row in ids) + new.numel() == 23
assert places == [30, 30, 39]

# %%
# How positions travel
# --------------------
#
# A cache that was filled with positions knows where each row ends: ``cache.lengths`` is the position of the next token,
# and no other count has to be carried from step to step. ``filled`` above uses it. Without positions the cache refuses,
# because rows of unequal length have no common next place.

cache = panels["growing cache, batch left"]
print("next positions:", cache.lengths.tolist())
try:
    decode(m, new[:, 0], cache)
except ValueError as error:
    print(error)
assert cache.lengths.tolist() == [5, 8, 10]

# %%
# A batch equals each row alone
# -----------------------------
#
# Each trial of the law feeds three rows in passes of 9, 4, 1 and 1 columns. Every column of every row is
# real or padding at random, so a row may sit out a whole pass. The reference is the row's own tokens in one pass,
# without padding and without a cache. *Smallest* is the cache that the package chooses for the windows of the layers;
# the kinds of its tracks are at the end of the line.

from lm_from_scratch.cache.slots import cache_for

for name, first in {"Qwen2, W = 4": 0, "Qwen2, both": 1}.items():
    slides = dict(sliding_window=4, max_window_layers=first)
    tiny[name] = random_model(Qwen2Config(**qwen2, **slides))
kinds = {
    "growing": lambda m: GrowingCache(3),
    "static": lambda m: StaticCache(3, capacity=15),
    "smallest": lambda m: cache_for(m.config.windows),
}


def trial(model, cache, generator):
    rows, worst = [[], [], []], 0.0
    for T in (9, 4, 1, 1):
        real = torch.rand(3, T, generator=generator) < 0.6
        held = torch.tensor([len(row) for row in rows])[:, None]
        real[:, :1] |= held == 0  # no row stays empty
        idx = torch.randint(97, (3, T), generator=generator)
        positions = (real.long().cumsum(1) - 1 + held).where(real, PADDING)
        logits = model(idx, positions=positions, cache=cache)
        for row, mine, out, keep in zip(rows, idx, logits, real):
            row += mine[keep].tolist()
            if keep.any():
                alone = model(torch.tensor([row]))[0, -keep.sum() :]
                worst = max(worst, (out[keep] - alone).abs().max().item())
    return worst


print(f"{'':14}" + "".join(f"{kind:>10}" for kind in kinds))
for name, m in tiny.items():
    line = f"{name:14}"
    for make in kinds.values():
        worst = max(trial(m, cache := make(m), generator) for _ in range(5))
        assert worst < 1e-11
        line += f"{worst:10.0e}"
    print(line, *(type(track).__name__ for track in cache.tracks))

# %%
# What rounding can still change
# ------------------------------
#
# A larger matrix product may add its terms in another order, and then the errors of batch and row differ. Where two
# tokens are nearly equally likely, that can decide. Qwen2 writes 20 greedy texts of 20 tokens. How many differ between
# *batch* and row alone, and how many differ between the row alone in this *dtype* and in float64? The *gap* is how far
# apart the two best logits are at the first difference between batch and row, and *median* is that of all steps.

many = [[end, *text[:cut]] for text, cut in zip(texts, cuts)][:20]
truth, _ = speak(exact["Qwen2"], read, many, 20)
print(f"{'':8}{'batch':>8}{'dtype':>8}{'largest gap':>14}{'median':>9}")
for dtype in (torch.float32, torch.bfloat16):
    m = copy.deepcopy(shipped["Qwen2"]).to(dtype)
    together, _ = speak(m, read, many, 20)
    alone = [speak(m, read, [prompt], 20) for prompt in many]
    said = torch.cat([tokens for tokens, _ in alone])
    best = torch.cat([logits for _, logits in alone]).topk(2).values
    gap = (best[..., 0] - best[..., 1]).float()  # (B, n)
    other = said != together
    rows = other.any(1)
    ties = gap[rows, other.long().argmax(1)[rows]]  # at the first difference
    largest = f"{ties.max():.3f}" if len(ties) else "-"
    rounded = (said != truth).any(1).sum()
    name = str(dtype).removeprefix("torch.")
    print(f"{name:8}{len(ties):8}{rounded:8}{largest:>14}{gap.median():9.2f}")
    assert ties.le(gap.median() / 3).all() and len(ties) < 10
assert rounded > 0  # in bfloat16

# %%
# Every text that changed did so at a near tie, whose gap is less than a third of the median. Rounding to bfloat16
# changes texts without any batch. If a batch in bfloat16 says something else than a row alone, compare in float64
# before you look for a mistake in the mask.
#
# Beside transformers
# -------------------
#
# The library reads the same weights. With left padding and a mask, its ``generate`` writes the same tokens as ours. (A
# forward pass of its GPT-2 with a mask alone does not: see
# `seven ways to get padding wrong <4a_padding_mistakes.ipynb>`_.)

load = transformers.AutoModelForCausalLM.from_pretrained
batch = padded_batch(prompts, end, side="left")
given = dict(attention_mask=(batch.positions >= 0).long())
options = dict(do_sample=False, pad_token_id=end, max_new_tokens=12)
for kind, name in {"GPT-2": "gpt2-docs", "Qwen2": "qwen2-docs"}.items():
    twin = load(PRETRAINED / name, dtype=torch.float32).eval()
    theirs = twin.generate(batch.idx, **given, **options, eos_token_id=None)
    ours = complete(generate(shipped[kind], prompts, 12, GREEDY))
    assert theirs[:, batch.idx.shape[1] :].tolist() == ours
    print(f"{kind}: {len(ours)} rows of {len(ours[0])} tokens are equal")

# %%
# Rows that finish early
# ----------------------
#
# A row that has said end-of-text is finished, but the batch goes on until its last row is. ``generate`` yields
# ``None`` for a finished row. With :math:`n_i` tokens in row i, the share of row-steps that produce nothing is
#
# .. math::
#
#    1 - \frac{\operatorname{mean}_i n_i}{\max_i n_i}

steps = list(generate(model, prompts, 100, Sampler(top_p=0.9), [end]))
n = [sum(step[row] is not None for step in steps) for row in range(16)]
nothing = sum(step.count(None) for step in steps) / (16 * len(steps))
assert abs(nothing - (1 - sum(n) / 16 / max(n))) < 1e-12
pads = (batch.positions < 0).double().mean()
print("tokens of each row:", n)
print(f"{nothing:.0%} of the row-steps produce nothing,", end=" ")
print(f"{pads:.0%} of the prompt columns are padding")
assert nothing > 0.1

# %%
# No mask gets this back: the rows are computed and thrown away. A row has to *leave* when it is finished, and another
# one has to take its place. That is continuous batching, a lesson of the next chapter.
#
# Which sentence is false?
# ------------------------
#
# 1. In one column of a batch, tokens may be at unequal positions.
# 2. A row that has said end-of-text costs nothing from then on.
# 3. A row may have nothing but padding in a pass, and goes on in the next as if it had not been there.
#
# Decide before you look at the numbers.

print("1.", sides["left"].positions[:, -2].tolist())
assert len(sides["left"].positions[:, -2].unique()) == 3

rows_run = []
hook = model.register_forward_pre_hook(
    lambda _, args: rows_run.append(args[0].shape[0])
)
steps = list(generate(model, prompts, 40, Sampler(top_p=0.9), [end]))
hook.remove()
speak_last = sum(token is not None for token in steps[-1])
print(f"2. at last {speak_last} of {rows_run[-1]} rows say something")
assert speak_last < rows_run[-1] == 16

m, cache = tiny["Qwen2"], GrowingCache(3)
m(sides["left"].idx, positions=sides["left"].positions, cache=cache)
places = cache.lengths.clone()
places[0] = PADDING  # row 0 sits out
decode(m, fed[:, 0], cache, positions=places)
got = decode(m, fed[:, 1], cache, positions=cache.lengths)[0]
wanted = m(torch.tensor([few[0] + fed[:1, 1].tolist()]))[0, -1]
print(f"3. largest error {(got - wanted).abs().max():.0e}")
assert (got - wanted).abs().max() < 1e-12

# %%
# The second sentence is false. ``None`` says that nothing came out, and the row was computed all the same.
#
# Exercises
# ---------
#
# 1. *Easy.* Make forty prompts from ``texts`` and ``cuts``, sort them by length, and cut them into batches of eight.
#    How many padding tokens are left? Hint: ``(padded_batch(...).positions < 0).sum()``. A right answer gives the count
#    with and without sorting, and shows that no greedy text changes.
# 2. *Medium.* How does the number of texts that change in bfloat16 grow with their length n? Hint: if one step in k
#    flips, a text stays with probability :math:`(1 - 1/k)^n`. A right answer estimates k from ``many`` and compares the
#    curve with counts for n = 5, 10, 20 and 40.
# 3. *Hard.* Let finished rows leave. Hint: in ``speak``, ``cache.select(rows)`` keeps the given rows; the tokens and
#    ``last`` need the same selection. A right answer gives the texts of ``generate`` and runs no row-step that produces
#    nothing.
#
# Summary
# -------
#
# * In every cache, with padding anywhere, a batch equals its rows within 1e-11 in float64.
# * On the left, one column holds every last token. A static cache holds equal keys for padding on any side.
# * Rounding can flip near ties. All texts that changed between batch and row did so at one.
# * ``generate`` of ``transformers`` writes the same tokens.
#
# Sources
# -------
#
# * Rounding: `logits differ in a batch in bfloat16 <https://github.com/huggingface/transformers/issues/26869>`_.
# * Positions from the mask, in the library: `logits of generate and of forward differ <https://github.com/huggingface/transformers/issues/18388>`_.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
