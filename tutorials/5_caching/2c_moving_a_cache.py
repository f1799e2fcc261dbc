r"""
Moving a cache to another library, in depth
===========================================

A cache has read a long text. Can another program go on from there? This page deepens
`kinds of cache <2_kinds_of_cache.ipynb>`_. It compares the caches of ``transformers`` with ours, moves a cache between
the two, to a file, and to NumPy, and shows two mistakes: a slice that keeps everything, and a bridge that loses the
order of axes.

What transformers keeps
-----------------------

``transformers`` has the same kinds. Its dynamic layers that slide keep the last W - 1 keys, which is all that the *next*
token needs; its static ones keep W. Twelve tokens go through both in pieces of 5, 1, 3 and 3.

Our model is a Qwen2 of three layers with large random weights. The first layer sees everything, the others slide with
W = 4.
"""

# sphinx_gallery_needs = ["2_kinds_of_cache"]
# sphinx_gallery_words = ["DynamicCache", "StaticCache", "past_key_values to file", "save KV cache", "DLPack", "JAX", "BSHD BHSD", "contiguous"]
# sphinx_gallery_museum = ["K2"]

import copy
import tempfile
from dataclasses import replace

import torch
import transformers

from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.checkpoint.weights import save_pretrained
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


mixed = random_model(sliding_window=W, max_window_layers=1)
text = random_ids(2, 24, seed=2)


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

from lm_from_scratch.interop.cache_file import load_cache, save_cache
from lm_from_scratch.interop.caches import to_transformers

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
cache = cache_for(narrow.config.windows)
steps = [narrow(one, cache=cache) for one in text[:, :10].split(1, dim=1)]
off = error(torch.cat(steps, 1), narrow(text[:, :10]))
held = [cache.contents(layer)[2][0] for layer in range(3)]  # positions
kept = [int((places >= 0).sum()) for places in held]
print(f"ours:         error {off:.0e}, keys per layer {kept}")
assert off < 1e-9 and kept == [10, 1, 1]

# %%
# The first line says what your version does. If it keeps twelve keys in each layer, then layers that should see one key
# see them all. The fixed slice counts from the front. The check that catches it is a window of one, fed token by token.
#
# Sources
# -------
#
# * ``transformers``: `cache strategies <https://huggingface.co/docs/transformers/kv_cache>`_. Its kinds of cache.
# * `DLPack <https://dmlc.github.io/dlpack/latest/>`_: how libraries pass tensors on without a copy.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
