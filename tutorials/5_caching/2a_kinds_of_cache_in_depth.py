r"""
Slots and laws of caches, in depth
==================================

The lesson on `kinds of cache <2_kinds_of_cache.ipynb>`_ puts one text into three caches. Do they stay right for padded
rows, for pieces of any size, and after tokens were taken back, rows copied, or a pass has failed? This page looks into
the buffers, and then puts four kinds of cache to six laws.

Two rows in four caches
-----------------------

The model is a Qwen2 of three layers with large random weights, in float64, so that a mistake cannot pass for rounding.
It comes in three versions with equal weights: all layers see everything; all layers slide with W = 4; the first sees
everything and the others slide.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["2_kinds_of_cache"]
# sphinx_gallery_words = ["cache_position", "SlidingWindowCache", "crop", "left padding cache", "beam search cache reorder", "rolling buffer"]

import inspect
import random
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.buffer import BufferCache
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.slots import (
    SlidingCache,
    SlidingTrack,
    StaticCache,
    StaticTrack,
    cache_for,
)
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.models.randomize import randomize_

torch.set_grad_enabled(False)
sizes = dict(n_layer=3, n_head=6, n_kv_head=2, n_embd=48, intermediate_size=57)
tiny = Qwen2Config(vocab_size=97, eos_token_id=None, **sizes)


def random_model(**changes):
    model = Qwen2ForCausalLM(replace(tiny, **changes)).eval()
    randomize_(model)
    return model.double()


def random_ids(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, shape, generator=generator)


def error(ours, theirs):
    return (ours - theirs).abs().max().item()


W = 4
everything = random_model()
slides = random_model(sliding_window=W, max_window_layers=0)
mixed = random_model(sliding_window=W, max_window_layers=1)
for model in (everything, slides, mixed):
    print(model.config.windows)

# %%
# Two texts of 9 and 11 tokens are fed: first 4 columns, then 3, then one at a time. The shorter text has two columns of
# padding on its left. The ring gets S = W + 2 slots.

idx, attention_mask = random_ids(2, 11), torch.ones(2, 11, dtype=torch.long)
attention_mask[0, :2] = 0
positions = positions_from_mask(attention_mask)


def feed(model, cache, idx, pieces, positions=None):
    parts = idx.split(pieces, dim=1)
    places = [None] * len(parts)
    if positions is not None:
        places = positions.split(pieces, dim=1)
    steps = zip(parts, places, strict=True)
    return torch.cat(
        [model(x, positions=p, cache=cache) for x, p in steps], dim=1
    )


runs = {
    "growing": (everything, GrowingCache(3)),
    "static": (everything, StaticCache(3, capacity=14)),
    "sliding": (slides, SlidingCache(3, window=W, slack=2)),
    "layered": (mixed, cache_for(mixed.config.windows, slack=2)),
}
for name, (model, cache) in runs.items():
    logits = feed(model, cache, idx, (4, 3, 1, 1, 1, 1), positions)
    short = error(logits[0, 2:], model(idx[:1, 2:])[0])
    long = error(logits[1], model(idx[1:])[0])
    print(f"{name:8} lengths {cache.lengths.tolist()}, errors against", end=" ")
    print(f"each row alone {short:.0e} {long:.0e}")
    assert max(short, long) < 1e-9 and cache.lengths.tolist() == [9, 11]

# %%
# Where did the tokens go? In its smallest form, a cache is a list of slots and a function that chooses one. Later tokens
# overwrite earlier ones. Three functions and one loop predict the slots of the package, with -1 for an empty one.

homes = {
    "growing": lambda p, column: column,
    "static": lambda p, column: p,
    "sliding": lambda p, column: p % (W + 2),
}


def predict(home, places, slots):
    table = [-1] * slots
    for column, p in enumerate(places):
        if p >= 0:  # padding has no position, so there is nothing to keep
            table[home(p, column)] = p
    return table


for name, home in homes.items():
    held = runs[name][1].contents(layer=0)[2]  # positions, (B, slots)
    for row in range(2):
        mine = predict(home, positions[row].tolist(), held.shape[1])
        assert mine == held[row].tolist()
    print(f"{name:8}", held[0].tolist())

# %%
# The figure shows the buffers as they lie in memory. A number is a position, *pad* is padding that takes a column, and
# hatched slots hold nothing that is used. The growing buffer doubles when it is full. The cross marks a bin: static and
# sliding caches write what need not be kept, like padding, to one more slot that nobody reads.

from lm_from_scratch.instruments.plot import COLOURS, figure

_, axes = figure(6.4, 4.2, rows=3)
for ax, name in zip(axes, homes):
    cache = runs[name][1]
    slots, fed = cache.keys[0].slots, 11 if name == "growing" else 0
    for row, places in enumerate(cache.contents(0)[2].tolist()):
        places += [-1] * (slots - len(places))
        for slot, p in enumerate(places):
            style = dict(facecolor="#F4F4F4", edgecolor="#999999")
            if p >= 0:
                style["facecolor"] = plt.cm.Blues(0.1 + 0.05 * p)
            elif slot >= fed:
                style["hatch"] = "///"
            ax.add_patch(plt.Rectangle((slot, row), 1, 1, **style))
            text = str(p) if p >= 0 else "pad" if slot < fed else ""
            ax.text(slot + 0.5, row + 0.5, text, ha="center", va="center")
    if name != "growing":
        ax.text(slots - 0.5, 1, "✕", ha="center", va="center", fontsize=14)
    ax.set(xlim=(0, 16), ylim=(2, 0), ylabel="row", title=name)
    ax.set_xticks([s + 0.5 for s in range(slots)], range(slots), fontsize=8)
    ax.set_yticks([0.5, 1.5], ["0", "1"])
    ax.spines["bottom"].set_visible(False)
    ax.grid(False)
axes[-1].set_xlabel("slot")
plt.show()
sizes = [runs[name][1].keys[0].slots for name in homes]
assert sizes == [16, 14 + 1, W + 2 + 1]

# %%
# In the growing cache a position may lie in a different column in each row. In the static cache it is the same slot in
# all rows. In the ring, positions 6, 7 and 8 lie over 0, 1 and 2.
#
# The layered cache needs no function of its own. It is a growing cache for the layers that see everything, and a ring for
# those that slide.

layered = runs["layered"][1]
for number, name in enumerate(("growing", "sliding")):
    print(f"{name}: {layered.owner.count(number)} of the layers")
    held = layered.contents(layered.owner.index(number))[2]
    assert torch.equal(held, runs[name][1].contents(0)[2])

# %%
# One rule over any slots
# -----------------------
#
# Each slot carries the position of its key, so the rule of the lesson on `masks <../3_attention/2_masks.ipynb>`_
# applies as it is, and the slots may be in any order.
#
# ``see`` plans a pass and changes nothing that is held. Here it plans three more tokens for each cache, and one more for
# the ring.

from matplotlib.colors import ListedColormap

planned = {}
for name, T in (("growing", 3), ("static", 3), ("sliding", 3), ("sliding", 1)):
    model, cache = runs[name]
    new = cache.lengths[:, None] + torch.arange(T)
    seen = cache.see(random_ids(2, T), new, None, model.config.windows)
    planned[f"{name}, T = {T}"] = seen[0]

_, axes = figure(6.4, 6.0, rows=4)
axes[0].get_gridspec().set_height_ratios([3, 3, 3, 1.2])
two = ListedColormap(["#E4E4E4", COLOURS[0]])
for ax, (title, seen) in zip(axes, planned.items()):
    keys, queries = seen.key_positions[0], seen.query_positions[0]
    shown = seen.mask[0, 0].numpy()
    ax.pcolormesh(shown, cmap=two, vmin=0, vmax=1, edgecolors="white", lw=1.5)
    ax.set_xticks([s + 0.5 for s in range(len(keys))], keys.tolist())
    ax.set_yticks([t + 0.5 for t in range(len(queries))], queries.tolist())
    ax.set(ylabel="query", title=f"{title}, row 0")
    ax.invert_yaxis()
    ax.grid(False)
    window = W if "sliding" in title else 99
    for p, mask in zip(queries.tolist(), seen.mask[0, 0]):
        visible = sorted(keys[mask].tolist())
        assert visible == list(range(max(0, p - window + 1), p + 1))
axes[-1].set_xlabel("position of the key in each slot, -1 is padding or unused")
plt.show()
shapes = [tuple(seen.mask.shape[2:]) for seen in planned.values()]
assert shapes == [(3, 14), (3, 14), (3, 6 + 3), (1, 6)]
assert keys.tolist() == [6, 7, 8, 9, 4, 5]

# %%
# Blue is visible. Growing and static caches show a query the same keys, and the ring the last W of them. They
# differ in the grey that they carry along: all 14 slots of the static cache are in every mask.
#
# The last two pictures differ in a detail. For three tokens, the six slots of the ring are beside the new keys. For one
# token there are only the six slots, and position 9 is already where 3 was.
#
# A plan for each pass
# --------------------
#
# All layers of a pass keep their keys in the same slots. So ``plan`` runs once, and each layer follows the plan. In the
# static cache, ``self.slots`` is the number of the bin; rows that are alike go to a plain slice.

print(inspect.getsource(StaticTrack.plan))

# %%
# In the ring the home of a token is ``new % slots``. Of a long piece only the last S tokens are kept.

print(inspect.getsource(SlidingTrack.plan))

# %%
# Read first, or write first
# --------------------------
#
# Why do several tokens read the slots before they are written? Let a piece end at position e. Once it is written, the
# ring holds the positions :math:`e - S + 1, \dots, e`. A query at position p of the piece needs
# :math:`p - W + 1, \dots, p`. Nothing that it needs is gone if
#
# .. math::
#
#    e - S + 1 \le p - W + 1 \quad\Leftrightarrow\quad e - p \le S - W
#
# The first of T tokens has :math:`e - p = T - 1`. So a ring with :math:`S = W + \text{slack}` slots may be written first by
# at most :math:`1 + \text{slack}` tokens. Without slack that is one token. Here is the wrong order as a class.


class WritesFirst(SlidingTrack):
    def plan(self, new, start, windows):
        plan = super().plan(new, start, windows)
        plan.read_first, plan.read = False, slice(0, self.slots)
        plan.visibility = Visibility(new, plan.table[:, plan.read])
        return plan


def ring_of(track):
    return BufferCache([track], [0, 0, 0])


text = random_ids(2, 24, seed=2)
expected = slides(text)
print("largest error when written first, T = 1 to 5")
for slack in range(4):
    worst = []
    for T in range(1, 6):
        logits = feed(slides, ring_of(WritesFirst(W, slack)), text, T)
        worst.append(error(logits, expected))
        right = feed(slides, SlidingCache(3, W, slack), text, T)
        assert error(right, expected) < 1e-9
    print("slack", slack, *(f"{e:7.0e}" for e in worst))
    assert [e < 1e-9 for e in worst] == [slack >= T - 1 for T in range(1, 6)]

# %%
# The figure shows where the error begins, for pieces of three and no slack. The first piece is right, because the ring
# had room for it.

_, (ax,) = figure(6.4, 3.2)
for kind, marker in ((WritesFirst, "s"), (SlidingTrack, "o")):
    errors = feed(slides, ring_of(kind(W)), text, 3) - expected
    errors = errors.abs().amax((0, 2))  # of each position
    label = "written first" if kind is WritesFirst else "read first"
    ax.semilogy(errors.clamp(min=1e-17), marker=marker, label=label)
    if kind is WritesFirst:
        assert errors[:3].max() < 1e-9 and errors[3:].min() > 0.1
ax.set(xlabel="position", ylabel="largest error of a logit")
ax.set_title("A ring of four slots, pieces of three tokens")
ax.legend(frameon=False)
plt.show()

# %%
# What can be taken back
# ----------------------
#
# `Speculative decoding <../6_generation/2_speculative_decoding.ipynb>`_ takes tokens back. ``crop`` hides every
# position from a length on. A growing or static cache can go back to any length, because it has overwritten nothing. In
# a ring, the key that a new one pushed out is gone. Every slot of slack lets one more token be taken back.

ring = SlidingCache(3, W, slack=2)
feed(slides, ring, text[:, :12], 4)
before = ring.tracks[0].positions[0, :6].tolist()
try:
    ring.crop(9)
    refused = ""
except ValueError as exception:
    refused = str(exception)
ring.crop(10)
print(refused)
print(before, "->", ring.tracks[0].positions[0, :6].tolist())
again = feed(slides, ring, text[:, 10:], 5)
assert error(again, expected[:, 10:]) < 1e-9
assert "only slack=2" in refused and before == [6, 7, 8, 9, 10, 11]

# %%
# The laws
# --------
#
# Rows move as well. ``select`` keeps some of them, ``reorder`` follows a beam search, ``repeat`` makes several
# continuations of one prompt. ``reset`` forgets everything, and a pass that fails half-way must leave the cache as it
# was.
#
# All of these obey one sentence: afterwards, the logits are those of each row alone, in one full pass. A ``Twin``
# drives the cache and keeps the plain tokens beside it. Lengths, padding and rows are drawn at random. This is a short
# form of the package's own test.

kinds = {  # a model, a cache, and how many tokens it must give back
    "growing": (mixed, lambda: GrowingCache(3), 99),
    "static": (mixed, lambda: StaticCache(3, capacity=40), 99),
    "sliding": (slides, lambda: SlidingCache(3, W, slack=3), 3),
    "layered": (mixed, lambda: cache_for(mixed.config.windows, slack=3), 3),
}


class Twin:
    def __init__(self, kind, law, seed):
        self.model, make, self.back = kinds[kind]
        self.cache, self.rows = make(), [[], [], []]
        self.padded, self.error = law != "pieces", 0.0
        self.draw = random.Random(seed)

    def feed(self, T):
        real = torch.ones(len(self.rows), T, dtype=torch.long)
        if self.padded:  # left, right and inside, but no row stays empty
            drawn = self.draw.choices((0, 1), k=real.numel())
            real = torch.tensor(drawn).view_as(real)
            real[:, T // 2] = 1
        idx = random_ids(*real.shape, seed=self.draw.randrange(10**6))
        held = torch.tensor([len(row) for row in self.rows])[:, None]
        places = torch.where(real > 0, positions_from_mask(real) + held, -1)
        places = places if self.padded else None
        logits = self.model(idx, positions=places, cache=self.cache)
        for i, row in enumerate(self.rows):
            row += idx[i, real[i] > 0].tolist()
            alone = self.model(torch.tensor([row]))[0, -int(real[i].sum()) :]
            self.error = max(self.error, error(logits[i, real[i] > 0], alone))


def crop(twin):
    most = [min(len(row), twin.back) for row in twin.rows]
    keep = [len(r) - twin.draw.randint(0, n) for r, n in zip(twin.rows, most)]
    twin.cache.crop(torch.tensor(keep))
    twin.rows = [row[:n] for row, n in zip(twin.rows, keep)]


def rows(twin):
    chosen = twin.draw.choices(range(3), k=2)
    twin.cache.select(torch.tensor(chosen))
    twin.cache.reorder(torch.tensor([1, 0]))
    twin.cache.repeat(2)
    twin.rows = [list(twin.rows[i]) for i in chosen[::-1] for _ in range(2)]


def fail(twin):
    layer = twin.draw.choice(twin.model.model.layers)
    hook = layer.register_forward_pre_hook(lambda *_: 1 / 0)
    for T in (1, 5):
        try:
            twin.feed(T)
            raise AssertionError("the pass did not fail")
        except ZeroDivisionError:
            assert twin.cache.lengths.tolist() == [len(r) for r in twin.rows]
    hook.remove()


def reset(twin):
    twin.cache.reset()
    twin.rows = [[], []]


laws = dict.fromkeys(("pieces", "padding"), lambda twin: None)
laws |= {"crop": crop, "rows": rows, "failed pass": fail, "reset": reset}
print(f"{'':8}", *(f"{law:>11}" for law in laws))
for kind in kinds:
    worst = []
    for law, step in laws.items():
        twins = [Twin(kind, law, seed) for seed in range(3)]
        for twin in twins:
            for number in range(4):
                twin.feed(twin.draw.randint(1, 6))
                if number == 1:
                    step(twin)
        worst.append(max(twin.error for twin in twins))
    print(f"{kind:8}", *(f"{e:11.0e}" for e in worst))
    assert max(worst) < 1e-9

# %%
# How does a ring survive a failed pass? A single token overwrites the key S positions before it, and no query from here
# on may see that one. Several tokens wait in a list until the last layer is done.
#
# Bug museum
# ----------
#
# The sliding layers that were never built
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The documentation of an old cache module promised sliding layers. Its code had a place for them, which was never
# reached. (K3)


def cache_k3(config):
    layer_types = None
    if layer_types is None:
        return GrowingCache(config.n_layer)
    return cache_for(config.windows)


def run_and_count(cache, model, n=10):
    off = error(feed(model, cache, text[:, :n], 1), model(text[:, :n]))
    places = [cache.contents(layer)[2] for layer in range(len(cache.layers))]
    return off, [int((p[0] >= 0).sum()) for p in places]


for name, cache, wanted in (
    ("K3", cache_k3(mixed.config), [10, 10, 10]),
    ("fixed", cache_for(mixed.config.windows), [10, W, W]),
):
    off, kept = run_and_count(cache, mixed)
    print(f"{name:6} error {off:.0e}, keys per layer {kept}")
    assert off < 1e-9 and kept == wanted

# %%
# The logits are right, because the mask hides what should not be there. No test of logits finds this mistake. One that
# counts the keys of each layer does, if it feeds more tokens than the window has keys.
#
# Which sentence is false?
# ------------------------
#
# 1. A ring that read 24 tokens one by one holds the same keys in the same slots as one that read them at once.
# 2. A cache from which tokens were taken back holds fewer bytes.
# 3. With a static cache that is not full, even one new token needs a mask.
#
# Decide first; the code tries all three.

rings = [SlidingCache(3, W, slack=1) for _ in range(2)]
for ring, step in zip(rings, (1, 24)):
    feed(slides, ring, text, step)
held = [ring.contents(0)[0][:, :, :5] for ring in rings]  # not the bin
places = [ring.tracks[0].positions for ring in rings]
print("1.", places[0][0].tolist(), places[1][0].tolist())
sizes = []
for cache in (GrowingCache(3), StaticCache(3, 40)):
    feed(everything, cache, text, 24)
    before = cache.nbytes
    cache.crop(2)
    sizes.append((before, cache.nbytes))
print("2. bytes before and after:", *sizes)
cache = StaticCache(3, 40)
feed(everything, cache, text[:, :6], 6)
mask = cache.see(text[:, 6:7], windows=everything.config.windows)[0].mask
print("3.", int(mask.sum()), "of", mask.numel(), "slots may be seen")
assert torch.equal(*places) and error(*held) < 1e-9
assert all(before == after for before, after in sizes)
assert int(mask.sum()) == 7 and mask.numel() == 40

# %%
# The second is false. ``crop`` forgets positions; the slots stay, and the next tokens use them.
#
# Exercises
# ---------
#
# 1. *Easy.* Move the padding of row 0 to the right end, then into the middle. Which of the three pictures change? Hint:
#    only ``attention_mask`` must change. A right answer predicts the slots before it draws them.
# 2. *Medium.* Keep the window in order instead: shift the slots to the left, and write at the end. Old ``transformers``
#    first cut the position to W - 1 and then asked whether it was at least W - 1, so it shifted one token early
#    (`issue 37574 <https://github.com/huggingface/transformers/issues/37574>`_). Plant that in your cache, and feed one
#    token at a time. Hint: which slot is empty after position W - 1? A right answer is wrong at positions 3 to 11 for
#    this page's three layers, and right again from 12 on.
# 3. *Hard.* S slots hold what the next query needs even after :math:`\text{slack} + 1` tokens are taken back, one more than
#    ``crop`` allows. Why is the last one refused? Hint: ``ring._crop`` does not ask; let a pass of one token fail in the
#    last layer before you crop. A right answer shows two runs, one exact and one wrong.
#
# Summary
# -------
#
# * The column, p, and p modulo S predicted every slot of the package. A layered cache chooses a kind for each layer.
# * One rule made the masks over all slots. Every kind obeyed six laws within 1e-9, in float64.
# * Up to :math:`1 + \text{slack}` tokens may be written to a ring before it is read. ``slack`` tokens can be taken back.
#
# Sources
# -------
#
# * Jiang et al.: `Mistral 7B <https://arxiv.org/abs/2310.06825>`_, 2023. A rolling buffer of the size of the window.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
