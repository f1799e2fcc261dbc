r"""
Kinds of cache in depth: slots, graphs, files
=============================================

The lesson on `kinds of cache <2_kinds_of_cache.ipynb>`_ puts one text into three caches. Do they stay right for padded
rows, for pieces of any size, and after tokens were taken back? When does a compiled program run faster with a static
cache? And can another library, or another day, go on from a cache of ours?

Two rows in four caches
-----------------------

The model is a Qwen2 of three blocks with large random weights, in float64, so that a mistake cannot pass for rounding.
It comes in three versions with equal weights: all layers see everything; all layers slide with W = 4; the first sees
everything and the others slide.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["2_kinds_of_cache"]
# sphinx_gallery_words = ["cache_position", "SlidingWindowCache", "crop", "left padding cache", "rolling buffer", "DynamicCache", "StaticCache", "StaticCache slow", "static cache torch.compile", "recompiles", "recompilation limit", "CUDA graphs", "past_key_values to file", "save KV cache", "DLPack", "JAX", "BSHD BHSD", "contiguous", "list index out of range"]
# sphinx_gallery_museum = ["K2"]

import copy
import tempfile
import time
import warnings
from dataclasses import replace
from statistics import median

import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers

from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.buffer import BufferCache
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.slots import (
    SlidingCache,
    SlidingTrack,
    StaticCache,
    cache_for,
)
from lm_from_scratch.checkpoint.weights import save_pretrained
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.interop.cache_file import load_cache, save_cache
from lm_from_scratch.interop.caches import (
    from_arrays,
    to_arrays,
    to_transformers,
)
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.models.randomize import randomize_

torch.set_grad_enabled(False)
transformers.utils.logging.disable_progress_bar()
W = 4
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
    print(f"{name:8} errors against each row alone {short:.0e} {long:.0e}")
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
        predicted = predict(home, positions[row].tolist(), held.shape[1])
        assert predicted == held[row].tolist()
    print(f"{name:8}", held[0].tolist())

layered = runs["layered"][1]
for number, name in enumerate(("growing", "sliding")):
    held = layered.contents(layered.owner.index(number))[2]
    assert torch.equal(held, runs[name][1].contents(0)[2])

# %%
# In the growing cache a position may lie in a different column in each row, after the padding. In the static cache it is
# the same slot in all rows. In the ring, positions 6, 7 and 8 lie over 0, 1 and 2. A layered cache is a growing cache
# for the layers that see everything, and a ring for those that slide.
#
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
# Rows move as well: beam search reorders them, and one prompt may get several continuations. The package's tests drive
# every kind of cache through padding, moved rows, failed passes and tokens taken back, in random order, and compare each
# row with the row alone.
#
# Constant shapes are not enough
# ------------------------------
#
# ``torch.compile`` builds a graph of operations for the shapes that it meets, and another one when they change. (With
# ``dynamic=False`` it may not make a graph for all sizes.) So a static cache should need a single graph, and a growing
# one a graph for every token. Three tokens follow a prompt of five, with positions in a tensor and without; the backend
# of the compiler only counts the graphs.

one_layer = random_model(n_layer=1)


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


counts = {}
for name, cache, given in (
    ("growing, with positions", GrowingCache(1, reserve=20), True),
    ("static, with positions", StaticCache(1, 20), True),
    ("static, without", StaticCache(1, 20), False),
):
    with warnings.catch_warnings():  # the tracer makes a deprecated call
        warnings.simplefilter("ignore", DeprecationWarning)
        counts[name] = count_graphs(cache, given)
    print(f"{name}: {counts[name]} graphs")
torch.compiler.reset()
growing, static, without = counts.values()
assert static == 1 < min(growing, without)

# %%
# With positions, the static cache needs one graph. Without them it needs several, although no shape changes. What
# changes is a Python number, the length from which the cache counts on, and the compiler takes it for a constant of the
# program.
#
# So two things must stay the same: the shapes, and everything that is not in a tensor. ``generate`` gives positions to
# a static cache for that reason. The price: a compiled pass does not read the positions, so it cannot say which of them
# is beyond the capacity. It fails where the slot does not exist.
#
# Without a compiler, a static cache is slower, because attention reads its unused slots too. A growing cache with a
# reserve takes the same memory, and returns the used part alone. Here is one step at two lengths of the text, with room
# for 8,192 tokens. The unit is the growing cache with the short text.

N, lengths = 8192, (64, 8000)
wide = dict(n_layer=2, n_head=8, n_kv_head=4, n_embd=128, head_dim=64)
wide = Qwen2ForCausalLM(replace(tiny, intermediate_size=128, **wide)).eval()
rivals = {"static": StaticCache(2, N), "growing": GrowingCache(2, reserve=N)}
one, like = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 4, 1, 64)
took = {name: [[] for _ in lengths] for name in rivals}
for at, n in enumerate(lengths):
    for cache in rivals.values():
        cache.reset()
        k = like.expand(-1, -1, n, -1)
        cache.see(k[:, 0], None, None, [None] * 2)
        for layer in cache.layers:
            layer.update(k, k)
    for _ in range(10):
        for name, cache in rivals.items():
            start = time.perf_counter()
            wide(one, cache=cache)
            took[name][at].append(time.perf_counter() - start)
            cache.crop(n)

middle = {name: [median(t) for t in times] for name, times in took.items()}
unit = middle["growing"][0]
_, (ax,) = figure(4.6, 2.8)
for i, (name, times) in enumerate(middle.items()):
    places = [x + 0.4 * i - 0.2 for x in range(2)]
    heights = [t / unit for t in times]
    print(f"{name:8}", *(f"{height:5.1f}" for height in heights))
    ax.bar(places, heights, 0.38, color=COLOURS[i], label=name)
ax.set_xticks(range(2), [f"{n:,} tokens held" for n in lengths])
ax.set(title="Time of a step, room for 8,192 tokens", ylabel="relative")
ax.legend(frameon=False)
plt.show()
assert middle["static"][0] > 1.5 * unit < middle["growing"][1]

# %%
# While the text is short, a step with the static cache takes much longer. At the end the two read almost the same number
# of keys. Use a static cache where one compiled graph pays for it, with a capacity close to the length of the run.
#
# What transformers keeps
# -----------------------
#
# ``transformers`` has the same kinds. Its dynamic layers that slide keep the last W - 1 keys, which is all that the *next*
# token needs; its static ones keep W. Twelve tokens go through both in pieces of 5, 1, 3 and 3.


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
# To another library, and to a file
# ---------------------------------
#
# Eleven tokens are read by our model. The cache is saved, loaded, and converted; ``transformers`` reads the twelfth
# token. Positions are in the file. The caches of ``transformers`` do not know them, so padded rows need its
# ``attention_mask`` and ``position_ids`` again.

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
# Other tensor libraries read the same numbers through DLPack: a pointer, a shape, and strides, without a copy. Their
# models may want the axes in another order. Ours is rows, heads, keys, features (*BHSD*); JAX code often has keys before
# heads (*BSHD*). ``to_arrays`` hands over keys, values and positions, and ``from_arrays`` takes them back. Here the
# other library is NumPy.

arrays, places = to_arrays(cache, np.from_dlpack, order="BSHD")
k, v = arrays[0]
print(f"{type(k).__name__} {k.shape}, strides {k.strides}")
back = from_arrays(
    arrays, places, order="BSHD", into=cache_for(ours.config.windows)
)
last = ours(text[:, 11:12], positions=back.lengths[:, None], cache=back)
off = error(last, ours(text[:, 11:12], cache=cache))
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
# A window of one
# ~~~~~~~~~~~~~~~
#
# "The last W - 1 keys" is the slice ``[-W + 1:]``, and ``transformers`` writes it so. With W = 1 nothing should be kept.
# But then the slice is ``[0:]``, and keeps everything. (M8)

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
# The first line says what your version does. If it keeps twelve keys in each layer, then layers that should see one key
# see them all. The fixed slice counts from the front. The check that catches it is a window of one, fed token by token.
#
# Exercises
# ---------
#
# 1. *Easy.* Move the padding of row 0 to the right end, then into the middle. Which of the three lists of slots change?
#    Hint: only ``attention_mask`` must change. A good answer predicts the slots before it prints them.
# 2. *Medium.* Keep the window in order instead: shift the slots to the left, and write at the end. Old ``transformers``
#    first cut the position to W - 1 and then asked whether it was at least W - 1, so it shifted one token early
#    (`issue 37574 <https://github.com/huggingface/transformers/issues/37574>`_). Plant that in your cache, and feed one
#    token at a time. Hint: which slot is empty after position W - 1? A good answer is wrong at positions 3 to 11 for
#    this page's three layers, and right again from 12 on.
# 3. *Hard.* S slots hold what the next query needs even after :math:`\text{slack} + 1` tokens are taken back, one more than
#    ``crop`` allows. Why is the last one refused? Hint: ``ring._crop`` does not ask; let a pass of one token fail in the
#    last layer before you crop. A good answer shows two runs, one exact and one wrong.
#
# Summary
# -------
#
# * The column, p, and p modulo S predicted every slot of the package. Up to :math:`1 + \text{slack}` tokens may be
#   written to a ring before it is read, and ``slack`` tokens can be taken back.
# * For one compiled graph, shapes and Python numbers must stay the same, so positions belong in a tensor. While the text
#   is short, a static cache costs time: attention reads its empty slots.
# * A cache moves to ``transformers``, to a file and through DLPack. Lay permuted tensors out anew before you hand them
#   over.
#
# Sources
# -------
#
# * Jiang et al.: `Mistral 7B <https://arxiv.org/abs/2310.06825>`_, 2023. A rolling buffer of the size of the window.
# * PyTorch: `Dealing with recompilations <https://docs.pytorch.org/docs/main/user_guide/torch_compiler/compile/programming_model.recompilation.html>`_. Shapes, numbers and guards.
# * ``transformers``: `cache strategies <https://huggingface.co/docs/transformers/kv_cache>`_. Its kinds of cache.
# * `DLPack <https://dmlc.github.io/dlpack/latest/>`_: how libraries pass tensors on without a copy.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
