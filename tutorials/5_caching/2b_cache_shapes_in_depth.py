r"""
Graphs, bytes and time of each cache, in depth
==============================================

The lesson on `kinds of cache <2_kinds_of_cache.ipynb>`_ says when to take which kind. What does each cost? This page
counts compiled graphs and bytes, and measures time. One result may surprise you: constant shapes alone do not make a
compiled graph last.

Constant shapes are not enough
------------------------------

``torch.compile`` builds a graph of operations for the shapes that it meets, and another one when they change. (With
``dynamic=False`` it may not make a graph for all sizes.) So a static cache should need a single graph, and a growing one
a graph for every token.

The code counts both. ``advance`` drives a cache without a model and gives the shapes that attention would get. The
backend of the compiler only counts the graphs. Three tokens follow a prompt of five, with positions in a tensor and
without.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["2_kinds_of_cache"]
# sphinx_gallery_words = ["torch.compile", "recompiles", "recompilation limit", "CUDA graphs", "StaticCache", "StaticCache slow", "static cache torch.compile", "dynamic shapes"]

import time
import warnings
from dataclasses import replace
from statistics import median, quantiles

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.slots import SlidingCache, StaticCache, cache_for
from lm_from_scratch.instruments.plot import figure
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.models.randomize import randomize_

torch.set_grad_enabled(False)
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


text = random_ids(2, 24, seed=2)


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
# So two things must stay the same: the shapes, and everything that is not in a tensor. ``generate`` gives positions to
# a static cache for that reason. This has a price, as the source in `slots and laws
# <2a_kinds_of_cache_in_depth.ipynb>`_ shows: a compiled pass does not read the positions, so it cannot say which of
# them is beyond the capacity. It fails where the slot does not exist.
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
_, (ax,) = figure(6.4, 3.6)
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
# Every point is measured, and equal to the formula. Doubling leaves less than half of the slots unused. A reserve of
# exactly the length of the run leaves none.
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
_, (ax,) = figure(6.4, 3.4)
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
# Summary
# -------
#
# * A static cache and a full ring return one shape. With positions in a tensor they needed one graph, without them
#   several.
# * In the shape of Qwen2-7B, 32,768 tokens take 1.75 GiB. They take 0.98 GiB if half of the layers slide with a window of
#   4096, and 0.22 GiB if all do.
# * With a capacity of 16,384 and a short text, a step with a static cache took more than twice as long as with a growing
#   one.
#
# Sources
# -------
#
# * Pope et al.: `Efficiently Scaling Transformer Inference <https://arxiv.org/abs/2211.05102>`_, 2022. What the cache costs in memory and time.
# * PyTorch: `Dealing with recompilations <https://docs.pytorch.org/docs/main/user_guide/torch_compiler/compile/programming_model.recompilation.html>`_. Shapes, numbers and guards.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
