r"""
Where a key lives
=================

A cache keeps the key and the value of every token that attention may still ask for. Each kind of cache answers one
question: where does the token at position p live? In the column in which it was fed, in slot p, or in slot p modulo S?

The rest follows from the answer: the memory, the shapes that attention is given, what can be taken back, and which
mistakes are possible. This page asks four kinds of cache, and measures what each answer costs.

You will learn
--------------

* where growing, static, sliding and layered caches keep a token, and which mask lies over their slots,
* why several tokens must read a ring before they write into it, while one token may write first,
* what a ring cannot take back, and the laws that every kind obeys,
* why constant shapes alone do not make a compiled graph last,
* what each kind costs in bytes and in time.

Before you start
----------------

Read the pages on `masks <../3_attention/2_masks.ipynb>`_ and on `why a cache <1_why_cache.ipynb>`_.
A CPU is enough; ``transformers`` must be installed.

Two rows in four caches
-----------------------

The model is a Qwen2 of three layers with large random weights, in float64, so that a mistake cannot pass for rounding.
It comes in three versions with equal weights: all layers see everything; all layers slide with W = 4; the first sees
everything and the others slide.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["DynamicCache", "StaticCache", "cache_position", "SlidingWindowCache", "torch.compile", "recompiles", "CUDA graphs", "crop"]

import copy
import inspect
import random
import tempfile
import time
import warnings
from dataclasses import replace
from statistics import median, quantiles

import matplotlib.pyplot as plt
import torch
import transformers

from lm_from_scratch.attention.visibility import Visibility, positions_from_mask
from lm_from_scratch.cache.buffer import BufferCache
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.slots import (
    SlidingCache,
    SlidingTrack,
    StaticCache,
    StaticTrack,
    cache_for,
)
from lm_from_scratch.models.causal_lm import randomize_
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM

torch.set_grad_enabled(False)
transformers.utils.logging.disable_progress_bar()
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
# Where did the tokens go? The mini version of a cache is a list of slots and a function that chooses one. Later tokens
# overwrite earlier ones. Three functions and one loop predict the slots of the package, -1 for an empty one.

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

made, axes = figure(6.4, 4.2, rows=3)
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
# The layered cache has no answer of its own. It is a growing cache for the layers that see everything, and a ring for
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
# Each slot carries the position of its key, so the rule of the page on masks applies as it is: a key is visible if it is
# real, not after the query, and within the window. The slots may stand in any order.
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

made, axes = figure(6.4, 6.0, rows=4)
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
# The last two pictures differ in a detail. For three tokens, the six slots of the ring stand beside the new keys. For one
# token there are only the six slots, and position 9 stands already where 3 was.
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
# The mask of the wrong order is honest: it shows what is still there, so nothing looks broken. The figure shows where the
# error begins, for pieces of three and no slack. The first piece is right, because the ring had room for it.

made, (ax,) = figure(6.4, 3.2)
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
# A draft that is rejected must leave the cache. ``crop`` hides every position from a length on. A growing or static
# cache can go back to any length, because it has overwritten nothing. A ring has: the key that a new one pushed
# out is gone. Every slot of slack makes one more token revocable.

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
# All of these obey one sentence: afterwards, the logits are those of each row alone, in one full pass. A twin drives the
# cache and keeps the plain tokens beside it. Lengths, padding and rows are drawn at random. This is a short form of the
# package's own test.

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
# How does a ring survive a failed pass? A single token overwrites the key that stands S positions before it, and no query
# from here on may see that one. Several tokens wait in a list until the last layer is done.
#
# Constant shapes are not enough
# ------------------------------
#
# A compiler builds a graph for the shapes that it meets, and another one when they change; ``dynamic=False`` keeps it from
# trying symbols instead. So a static cache should need a single graph, and a growing one a graph for every token.
#
# The code counts both. ``advance`` drives a cache without a model and gives the shapes that attention would get. The
# backend of the compiler only counts the graphs. Three tokens follow a prompt of five, with positions in a tensor and
# without.


def advance(cache, windows, like, T=1):
    k = like.expand(-1, -1, T, -1)  # (B, Hkv, T, D)
    cache.see(k[:, 0], None, None, windows)
    return {layer.update(k, k)[0].shape for layer in cache.layers}


def count_graphs(cache, with_positions):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(one_layer, backend=backend, dynamic=False)
    places = torch.arange(8).expand(2, -1)
    for t in (0, 5, 6, 7):
        piece = slice(t, t + 1) if t else slice(0, 5)
        step = compiled if t else one_layer  # the prompt is not compiled
        place = places[:, piece] if with_positions else None
        logits = step(text[:, piece], positions=place, cache=cache)
    assert error(logits[:, -1], one_layer(text[:, :8])[:, -1]) < 1e-9
    return len(graphs)


one_layer = random_model(n_layer=1, sliding_window=W, max_window_layers=0)
like, counts = torch.zeros(2, 2, 1, 8), {}
for name, make in {
    "growing": lambda: GrowingCache(1, reserve=20),
    "static": lambda: StaticCache(1, 20),
    "sliding": lambda: SlidingCache(1, W),
}.items():
    cache = make()
    advance(cache, [W], like, T=5)
    shapes = set.union(*(advance(cache, [W], like) for _ in range(3)))
    with warnings.catch_warnings():  # the tracer makes a deprecated call
        warnings.simplefilter("ignore", DeprecationWarning)
        graphs = [count_graphs(make(), given) for given in (True, False)]
    counts[name] = len(shapes), *graphs
    print(f"{name}: {len(shapes)} shapes;", end=" ")
    print(f"{graphs[0]} graphs with positions, {graphs[1]} without")
torch.compiler.reset()
assert counts["static"][:2] == counts["sliding"][:2] == (1, 1)
assert counts["growing"][0] == 3 and min(counts["growing"][1:]) > 1
assert counts["static"][2] > 1 and counts["sliding"][2] > 1

# %%
# With positions, the static cache and the full ring need one graph. Without them they need several, although no
# shape changes. What changes is a Python number, the length from which the cache counts on, and the compiler takes it for a
# constant of the program.
#
# So two things must stay the same: the shapes, and everything that is not in a tensor. ``generate`` gives positions to a
# static cache for that reason. This has a price, which the source above shows: a compiled pass does not read the positions,
# so it cannot say which of them is beyond the capacity. It fails where the slot does not exist.
#
# Memory
# ------
#
# A slot takes :math:`2 \cdot B \cdot H_{kv} \cdot D \cdot b` bytes in each layer, for a key and a value with b bytes a
# number. After n tokens, fed one at a time, a layer has this many slots:
#
# .. math::
#
#    \text{growing} &: \; 2^{\lceil \log_2 n \rceil} \\
#    \text{growing with a reserve } R \ge n &: \; R \\
#    \text{static} &: \; \text{capacity} + 1 \\
#    \text{sliding} &: \; W + \text{slack} + 1
#
# A layered cache has the sum over its layers. The config below has eight layers, of which the last six slide.

config = replace(tiny, n_layer=8, sliding_window=16, max_window_layers=2)
N, windows, all_slide = 100, config.windows, [16] * 8
like = torch.zeros(3, config.n_kv_head, 1, config.head_dim)  # B = 3


def doubled(n):
    return 2 ** (n - 1).bit_length()


caches = {
    "growing": (GrowingCache(8), lambda n: 8 * doubled(n)),
    "growing, R = 100": (GrowingCache(8, reserve=N), lambda n: 8 * N),
    "static, 100": (StaticCache(8, N), lambda n: 8 * (N + 1)),
    "layered": (cache_for(windows), lambda n: 2 * doubled(n) + 6 * 17),
    "sliding, all": (SlidingCache(8, 16), lambda n: 8 * 17),
}
made, (ax,) = figure(6.4, 3.6)
styles = ("-", "--", "-.", "-", ":")
for (name, (cache, slots)), style in zip(caches.items(), styles):
    held = []
    for n in range(1, N + 1):
        advance(cache, all_slide if "all" in name else windows, like)
        held.append(cache.nbytes)
        assert held[-1] == slots(n) * 2 * like.nbytes
    width = 3.2 if name == "layered" else 1.8
    kib = [bytes_held / 1024 for bytes_held in held]
    ax.step(range(1, N + 1), kib, style, lw=width, where="mid", label=name)
ax.set(xlabel="tokens", ylabel="KiB", title="Bytes held by five caches")
ax.legend(frameon=False, fontsize=8)
plt.show()

# %%
# Every point is measured, and equal to the formula. Doubling leaves less than half of the slots unused. A reserve leaves
# none unused if the length of the run is known.
#
# Now the shape of Qwen2-7B: 32,768 tokens, one row, bfloat16. The tensors lie on the ``meta`` device, where they have
# sizes and no memory. The window of 4096 is an assumption of this page, not a property of that model.

from lm_from_scratch.models.qwen2 import SIZES

big = Qwen2Config(**SIZES["Qwen2-7B"])
n, L, meta = 32768, big.n_layer, dict(dtype=torch.bfloat16, device="meta")
like = torch.empty(1, big.n_kv_head, 1, big.head_dim, **meta)
half, gib = [None] * 14 + [4096] * 14, {}
for name, cache, windows, slots in (
    ("growing, R = n", GrowingCache(L, reserve=n), [None] * L, L * n),
    ("static", StaticCache(L, n), [None] * L, L * (n + 1)),
    ("14 layers slide", cache_for(half, reserve=n), half, 14 * (n + 4097)),
    ("all slide", SlidingCache(L, 4096), [4096] * L, L * 4097),
):
    advance(cache, windows, like)
    assert cache.nbytes == slots * 2 * like.nbytes
    gib[name] = round(cache.nbytes / 2**30, 2)
print("GiB:", gib)
assert list(gib.values()) == [1.75, 1.75, 0.98, 0.22]

# %%
# If all layers slide, 0.22 GiB are enough for a text of any length.
#
# Time
# ----
#
# A static cache returns all its slots, and attention reads the unused ones too. A growing cache with a reserve takes the
# same memory, and returns the used part alone.
#
# Here is one step of a small float32 model at four lengths of the text. The capacity is 16,384. The caches take turns,
# ten times, and the middle time counts; the unit is the growing cache at the shortest text. The ratio of the static
# cache to the growing one is printed with its quartiles.

N, lengths = 16384, (64, 1024, 4096, 16000)
wide = dict(n_layer=2, n_head=8, n_kv_head=4, n_embd=128, head_dim=64)
wide = Qwen2ForCausalLM(replace(tiny, intermediate_size=128, **wide)).eval()
narrow = replace(wide.config, sliding_window=256, max_window_layers=0)
narrow = Qwen2ForCausalLM(narrow).eval()
rivals = {
    "static": (wide, StaticCache(2, N)),
    "growing, reserve": (wide, GrowingCache(2, reserve=N)),
    "sliding, W = 256": (narrow, SlidingCache(2, 256, slack=1)),
}
one, like = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 4, 1, 64)
took = {name: [[] for _ in lengths] for name in rivals}
for at, n in enumerate(lengths):
    for model, cache in rivals.values():
        cache.reset()
        advance(cache, model.config.windows, like, T=n)
    for _ in range(10):
        for name, (model, cache) in rivals.items():
            start = time.perf_counter()
            model(one, cache=cache)
            took[name][at].append(time.perf_counter() - start)
            cache.crop(n)

middle = {name: [median(t) for t in times] for name, times in took.items()}
unit = middle["growing, reserve"][0]
made, (ax,) = figure(6.4, 3.4)
for (name, times), marker in zip(middle.items(), "so^"):
    relative = [t / unit for t in times]
    print(f"{name:16}", *(f"{r:5.1f}" for r in relative))
    ax.loglog(lengths, relative, marker=marker, label=name)
ax.set(xlabel="tokens held", ylabel="time of a step, relative")
ax.set_title("One new token, capacity 16,384")
ax.legend(frameon=False)
plt.show()
over = {}
for n, a, b in zip(lengths, took["static"], took["growing, reserve"]):
    low, over[n], high = quantiles([x / y for x, y in zip(a, b)], n=4)
    print(f"{n:6} tokens, static / growing: {over[n]:.1f}", end=" ")
    print(f"({low:.1f} to {high:.1f})")
assert over[64] > 2 and middle["growing, reserve"][-1] > unit
assert middle["static"][-1] > 2 * middle["sliding, W = 256"][-1]

# %%
# While the text is short, a step with the static cache takes more than twice as long as with the growing one. At the
# end the two read almost the same number of keys. Use a static cache where one compiled graph pays for it, with a
# capacity close to the length of the run.
#
# What transformers keeps
# -----------------------
#
# ``transformers`` has the same kinds. Its dynamic layers that slide keep the last W - 1 keys, which is all that the *next*
# token needs; its static ones keep W. Twelve tokens go through both in pieces of 5, 1, 3 and 3.

from lm_from_scratch.checkpoint.weights import save_pretrained


def in_float32(model):
    ours = copy.deepcopy(model).float()
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(ours, f"{folder}/model")
        load = transformers.AutoModelForCausalLM.from_pretrained
        return ours, load(f"{folder}/model").eval()


def through(oracle, cache, pieces):
    parts = text[:, :12].split(pieces, dim=1)
    steps = [oracle(part, past_key_values=cache).logits for part in parts]
    kept = [layer.keys.shape[2] for layer in cache.layers]
    return torch.cat(steps, dim=1), kept


ours, oracle = in_float32(mixed)
config = oracle.config
for cache, wanted in (
    (transformers.DynamicCache(config=config), [12, W - 1, W - 1]),
    (transformers.StaticCache(config=config, max_cache_len=14), [14, W, W]),
):
    logits, kept = through(oracle, cache, (5, 1, 3, 3))
    off = error(logits, ours(text[:, :12]))
    print(f"{type(cache).__name__:12} slots per layer {kept}, error {off:.0e}")
    assert off < 5e-5 and kept == wanted

# %%
# Both agree with our model in one pass within 5e-5, in float32.
#
# A cache can move between the two, and to a file. Eleven tokens are read by our model. The cache is saved, loaded, and
# converted; ``transformers`` reads the twelfth token.

from lm_from_scratch.interop.caches import (
    load_cache,
    save_cache,
    to_transformers,
)

cache = cache_for(ours.config.windows)
ours(text[:, :11], cache=cache)
with tempfile.TemporaryDirectory() as folder:
    save_cache(cache, f"{folder}/eleven.safetensors")
    loaded = load_cache(f"{folder}/eleven.safetensors")
theirs = to_transformers(loaded)
last = oracle(text[:, 11:12], past_key_values=theirs).logits
off = error(last, ours(text[:, :12])[:, 11:])
print(f"{type(loaded).__name__} -> {type(theirs).__name__}, error {off:.0e}")
assert off < 5e-5 and loaded.nbytes == cache.nbytes

# %%
# Positions are in the file. The caches of ``transformers`` do not know them, so padded rows need its ``attention_mask`` and
# ``position_ids`` again.
#
# The order of axes
# -----------------
#
# Other tensor libraries read the same numbers through DLPack: a pointer, a shape, and strides, without a copy. Their models
# may want the axes in another order. Ours is rows, heads, keys, features (*BHSD*); JAX code often has keys before heads
# (*BSHD*). ``to_arrays`` hands over keys, values and positions, and ``from_arrays`` takes them back. Here the other library
# is NumPy.

import numpy as np

from lm_from_scratch.interop.caches import from_arrays, to_arrays

arrays, places = to_arrays(cache, np.from_dlpack, order="BSHD")
k, v = arrays[0]
print(f"{type(k).__name__} {k.shape}, strides {k.strides}")
back = from_arrays(
    arrays, places, order="BSHD", into=cache_for(ours.config.windows)
)
last = ours(text[:, 11:12], positions=back.lengths[:, None], cache=back)
off = error(last, ours(text[:, 11:12], cache=cache))
print(f"NumPy and back, error {off:.0e}")
assert k.shape == v.shape and k.shape[1] == 11 and off == 0

# %%
# A permuted tensor is a view: its numbers stay where they were, and only the strides are new. Some bridges pass on the
# pointer and the shape alone, and then read the old order under the new shape. An old module (K2) permuted the keys after
# the bridge and the values before it. Through such a bridge its keys were right and its values were not, and nothing
# complained. The next lines are that bridge.


def without_strides(x):
    return np.from_dlpack(x.as_strided(x.shape, torch.empty(x.shape).stride()))


keys, values, _ = cache.contents(0)
right = values.transpose(1, 2).numpy()
wrong = without_strides(values.transpose(1, 2))
laid_out = without_strides(values.transpose(1, 2).contiguous())
print(f"{(wrong != right).mean():.0%} of the values are wrong")
assert (wrong != right).mean() > 0.5 and (laid_out == right).all()

# %%
# So the order is: permute, lay out anew (``contiguous``), hand over; the same for keys and values. ``to_arrays`` does that,
# and a bridge without strides reads what NumPy reads.
#
# Bug museum
# ----------
#
# K3: the sliding layers that were never built
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The documentation of an old cache module promised sliding layers. Its code had a place for them, which was never
# reached.


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
# A window of one
# ~~~~~~~~~~~~~~~
#
# The last W - 1 keys as a slice from the end: with W = 1 it keeps everything.
#
# "The last W - 1 keys" is the slice ``[-W + 1:]``, and ``transformers`` writes it so. With W = 1 nothing should be kept.
# But then the slice is ``[0:]``, and keeps everything.

columns = list(range(12))
assert columns[-W + 1 :] == [9, 10, 11] and columns[-1 + 1 :] == columns
fixed = [columns[max(0, 12 - (W - 1)) :] for W in (4, 1)]
assert fixed == [[9, 10, 11], []]

narrow = random_model(sliding_window=1, max_window_layers=1)
ours, oracle = in_float32(narrow)
cache = transformers.DynamicCache(config=oracle.config)
logits, kept = through(oracle, cache, 1)
off = error(logits, ours(text[:, :12]))
print(f"transformers: error {off:.0e}, keys per layer {kept}")
off, kept = run_and_count(cache_for(narrow.config.windows), narrow)
print(f"ours:         error {off:.0e}, keys per layer {kept}")
assert off < 1e-9 and kept == [10, 1, 1]

# %%
# The first line tells what your version does. If it keeps twelve keys in each layer, layers that should see one key saw
# them all. The repaired slice counts from the front. The check that catches it is a window of one, fed token by token.
#
# Which sentence is false?
# ------------------------
#
# 1. A ring that read 24 tokens one by one holds the same keys in the same slots as one that read them at once.
# 2. A cache from which tokens were taken back holds fewer bytes.
# 3. With a static cache that is not full, even one new token needs a mask.
#
# One of them is. Decide first; the code tries all three.

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
# 2. *Easy.* A full ring without slack is fed T tokens. How many keys does attention get? Hint: ``advance`` returns shapes.
#    A right answer is W + T, or W for T = 1, and says up to which T a piece costs at most 2 W keys.
# 3. *Medium.* Keep the window in order instead: shift the slots to the left, and write at the end. Old ``transformers``
#    first cut the position to W - 1 and then asked whether it was at least W - 1, so it shifted one token early
#    (`issue 37574 <https://github.com/huggingface/transformers/issues/37574>`_). Plant that in your cache, and feed one
#    token at a time. Hint: which slot is empty after position W - 1? A right answer is wrong at positions 3 to 11 for
#    this page's three layers, and right again from 12 on.
# 4. *Hard.* S slots hold what the next query needs even after :math:`\text{slack} + 1` tokens are taken back, one more than
#    ``crop`` allows. Why is the last one refused? Hint: ``ring._crop`` does not ask; let a pass of one token fail in the
#    last layer before you crop. A right answer shows two runs, one exact and one wrong.
#
# Summary
# -------
#
# * The column, p, and p modulo S predicted every slot of the package. A layered cache chooses a kind for each layer.
# * One rule made the masks over all slots. Every kind obeyed six laws within 1e-9, in float64.
# * Up to :math:`1 + \text{slack}` tokens may be written to a ring before it is read. ``slack`` tokens can be taken back.
# * A static cache and a full ring return one shape. With positions in a tensor they needed one graph, without them
#   several.
# * In the shape of Qwen2-7B, 32,768 tokens take 1.75 GiB. They take 0.98 GiB if half of the layers slide with a window of
#   4096, and 0.22 GiB if all do.
# * With a capacity of 16,384 and a short text, a step with a static cache took more than twice as long as with a growing
#   one.
#
# So far every key keeps all its bits. The next page rounds them to 8 and 4.
#
# Sources
# -------
#
# * Jiang et al.: `Mistral 7B <https://arxiv.org/abs/2310.06825>`_, 2023. A rolling buffer of the size of the window.
# * Pope et al.: `Efficiently Scaling Transformer Inference <https://arxiv.org/abs/2211.05102>`_, 2022. What the cache costs in memory and time.
# * PyTorch: `Dealing with recompilations <https://docs.pytorch.org/docs/main/user_guide/torch_compiler/compile/programming_model.recompilation.html>`_. Shapes, numbers and guards.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
