r"""
The KV cache in depth: when is it right?
========================================

The lesson on `the KV cache <1_why_cache.ipynb>`_ tests a cache on one text, cut in one way. Why must it be right for
every text and every cut, for which models is that false, and which mistakes does the test find? This page compares
three caches, among them the ``DynamicCache`` of ``transformers``, and cuts a text in all 64 ways.

The wasteful loop
-----------------

The shipped GPT-2 continues a text greedily. In every round the loop reads all tokens, keeps the logits of the last one,
and forgets everything else that was computed.
"""

# sphinx_gallery_needs = ["../1_gpt2/2_gpt2", "../3_attention/2_masks"]
# sphinx_gallery_words = ["past_key_values", "DynamicCache", "use_cache different results", "KV cache wrong output", "cached logits differ", "cache_position"]
# sphinx_gallery_museum = ["G3", "K13"]

import copy
import inspect
import tempfile
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import transformers

from lm_from_scratch.checkpoint.weights import from_pretrained, load_shipped

torch.set_grad_enabled(False)
transformers.utils.logging.disable_progress_bar()

shipped, tokenizer = load_shipped()
prompt = [tokenizer.eos_token_id, *tokenizer.encode("When the")]

ids = list(prompt)
for _ in range(16):
    logits = shipped(torch.tensor([ids]))  # (1, T, V)
    ids.append(logits[0, -1].argmax().item())
written = ids[len(prompt) :]
tokenizer.decode(ids[1:])

# %%
# The package's ``generate`` writes the same tokens, by `prefill and decode <1_why_cache.ipynb>`_. What passes between the
# rounds is a cache.

from lm_from_scratch.generation.generate import (
    complete,
    decode,
    generate,
    prefill,
)
from lm_from_scratch.generation.sampling import GREEDY

print(inspect.getsource(decode))
assert complete(generate(shipped, [prompt], 16, GREEDY)) == [written]

# %%
# Earlier keys never change
# -------------------------
#
# In layer l, a token makes its key and its value from its own state x, a vector of the residual stream. Its next state
# is made from the same state and from the keys and values that it sees.
#
# .. math::
#
#    k_t^{(l)}, v_t^{(l)} &= f^{(l)} \left( x_t^{(l)}, t \right) \\
#    x_t^{(l+1)} &= g^{(l)} \left( x_t^{(l)}, \; (k_s^{(l)}, v_s^{(l)})_{s \le t} \right)
#
# Go up layer by layer. The first state is the embedding of token t. If the states of a layer depend on no later token,
# nor do its keys and values, and by the second line nor do the states of the next layer.
#
# The condition :math:`s \le t` carries the whole argument. To see it fail, ``transformers`` builds a GPT-2 and a Qwen2
# with large random weights, and the package reads their files.

from lm_from_scratch.attention.kinds import attention_layers
from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import Cache
from lm_from_scratch.models.randomize import randomize_


def pair_of(model):
    """The model of transformers with random weights, and ours with the same."""
    randomize_(model.eval())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return model, from_pretrained(folder)


no_ids = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
gpt2_config = transformers.GPT2Config(
    vocab_size=97, n_positions=64, n_embd=28, n_layer=3, n_head=4, **no_ids
)
qwen2_config = transformers.Qwen2Config(
    vocab_size=97, hidden_size=48, intermediate_size=56, num_hidden_layers=3,
    num_attention_heads=6, num_key_value_heads=2, **no_ids,
)  # fmt: skip
hf_gpt2, gpt2 = pair_of(transformers.GPT2LMHeadModel(gpt2_config))
hf_qwen2, qwen2 = pair_of(transformers.Qwen2ForCausalLM(qwen2_config))
generator = torch.Generator().manual_seed(1)
idx = torch.randint(0, 97, (2, 12), generator=generator)  # (B, N)

# %%
# Seven tokens are read twice: alone, and with five more after them. The table shows how far their keys and values
# move, with the causal mask and, for the same weights, without any.


def everything(q, k, v, visibility, dropout=0.0):
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)


def movement(model):
    short, long = GrowingCache(n_layer=3), GrowingCache(n_layer=3)
    model(idx[:, :7], cache=short)
    model(idx, cache=long)
    moved = []
    for layer in range(3):
        before, after = (
            torch.stack(cache.contents(layer)[:2]) for cache in (short, long)
        )  # (2, B, Hkv, S, D)
        moved.append((after[..., :7, :] - before).abs().max().item())
    return moved


print("                causal  no mask")
for name, model in {"GPT-2": gpt2, "Qwen2": qwen2}.items():
    unmasked = copy.deepcopy(model)
    for attention in attention_layers(unmasked):
        attention.attend = everything
    causal, free = movement(model), movement(unmasked)
    for i in range(3):
        print(f"{name}, layer {i}  {causal[i]:8.0e} {free[i]:8.0e}")
    assert max(*causal, free[0]) < 5e-5 < 0.5 < min(free[1:])

# %%
# With a causal mask nothing moves beyond rounding. Without one, everything above layer 0 moves: an encoder such as BERT
# has to read a longer text again. Layer 0 is safe in both, because it reads embeddings.
#
# The smallest cache
# ------------------
#
# A model of the package asks its cache for three things: how long it is, what the new tokens may see, and, in every
# layer, for all keys and values in exchange for the new ones. Concatenation is enough for that.


class PlainCache(Cache):
    def __init__(self):
        self.held = {}  # layer: keys and values, each (B, Hkv, S, D)

    @property
    def length(self):
        return self.held[0][0].shape[2] if self.held else 0

    def see(self, x, positions, documents, windows):
        T = x.shape[1]
        keys = torch.arange(self.length + T)[None]  # (1, S)
        return [Visibility(keys[:, -T:], keys, dense=True)] * len(windows)

    def __getitem__(self, layer):
        return SimpleNamespace(update=partial(self.update, layer))

    def update(self, layer, *new):
        old = self.held.get(layer, [part[:, :, :0] for part in new])
        self.held[layer] = [torch.cat(pair, dim=2) for pair in zip(old, new)]
        return self.held[layer]


# %%
# The new tokens are the *last* T of S positions. A text comes in pieces of 5, 1, 3 and 3 tokens. Three caches are
# compared with one pass over the whole text: this one, the package's ``GrowingCache``, and the ``DynamicCache`` of
# ``transformers`` in its own model.


def in_pieces(model, idx, sizes, cache):
    return torch.cat([model(x, cache=cache) for x in idx.split(sizes, 1)], 1)


def check(name, ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0.0)
    print(f"{name:19} largest error {(ours - theirs).abs().max():.0e}")


def run_hf(hf, x, cache):
    return hf(x, past_key_values=cache, use_cache=True).logits


sizes = [5, 1, 3, 3]
for name, hf, model in (("GPT-2", hf_gpt2, gpt2), ("Qwen2", hf_qwen2, qwen2)):
    full, theirs = model(idx), partial(run_hf, hf)  # (B, N, V)
    plain, growing = PlainCache(), GrowingCache(n_layer=3)
    dynamic = transformers.DynamicCache()
    check(f"{name} PlainCache", in_pieces(model, idx, sizes, plain), full)
    check(f"{name} GrowingCache", in_pieces(model, idx, sizes, growing), full)
    check(f"{name} DynamicCache", in_pieces(theirs, idx, sizes, dynamic), full)
    for layer, other in enumerate(dynamic.layers):
        for ours in (growing.contents(layer)[:2], plain.held[layer]):
            both = torch.stack([*ours]), torch.stack([other.keys, other.values])
            torch.testing.assert_close(*both, atol=5e-5, rtol=0.0)
        held_at = growing.contents(layer)[2]
        assert torch.equal(held_at, torch.arange(12).expand(2, -1))

# %%
# Logits agree, and so does every stored number. Qwen2 stores its keys *after* their rotation, which depends on the
# key's own position alone and is done once.
#
# Every key needs its position, too. In ``PlainCache`` it is the index along S. ``GrowingCache`` writes it down, so that
# rows with padding work as well.
#
# The law of caches
# -----------------
#
# *The logits of one full pass equal those of prefill and decode, and those of any other way to cut the text.* Seven
# tokens can be cut in 64 ways. Here are all of them, in float64, where the tolerance can be tight.


def ways_to_cut(n):
    """All lists of positive numbers with sum n."""
    cuts = range(1, n + 1)
    return [[i, *rest] for i in cuts for rest in ways_to_cut(n - i)] or [[]]


ways, seven = ways_to_cut(7), idx[:, :7]
assert len(ways) == 2**6 == 64
kinds = {"PlainCache": PlainCache, "GrowingCache": partial(GrowingCache, 3)}
for name, model in {"GPT-2": gpt2.double(), "Qwen2": qwen2.double()}.items():
    full = model(seven)
    for kind, make in kinds.items():
        pieces = [in_pieces(model, seven, sizes, make()) for sizes in ways]
        worst = (torch.stack(pieces) - full).abs().max().item()
        cache = make()
        steps = [prefill(model, seven[:, :4], cache, chunk=3)]
        steps += [decode(model, seven[:, t], cache) for t in (4, 5, 6)]
        torch.testing.assert_close(torch.stack(steps, 1), full[:, 3:])
        print(f"{name} {kind:12} {len(ways)} ways, largest error {worst:.0e}")
        assert worst < 1e-10 < 1 < full.abs().max()

# %%
# What remains is rounding.
#
# Bug museum
# ----------
#
# Defects of an old GPT-2 script are numbered G1, G2, ... on these pages, those of an old cache module K1, K2, ...
#
# A chain of repairs
# ~~~~~~~~~~~~~~~~~~
#
# The script had three faults at once. In every round it fed the *whole* text to a model with a cache (G1), it cut the
# mask from the wrong corner of the triangle (G2), and it counted positions from 0 in every pass (G4). Here they are
# repaired one after the other. (G1, G2, G4)


def old_script(repaired):
    class OldCache(PlainCache):
        def see(self, x, *rest):
            seen = super().see(x, *rest)
            if "G4" not in repaired:
                seen[0].query_positions = torch.arange(x.shape[1])[None]
            return seen

    def attend(q, k, v, visibility, dropout=0.0):
        T, S = q.shape[2], k.shape[2]
        past = S - T if "G2" in repaired else 0
        triangle = torch.ones(S, S, dtype=torch.bool).tril()
        mask = triangle[past : past + T, : past + T]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    model, cache = copy.deepcopy(shipped), OldCache()
    for attention in attention_layers(model):
        attention.attend = attend
    ids, lengths = list(prompt), []
    while len(ids) < len(prompt) + 16:
        new = ids[-1:] if lengths and "G1" in repaired else ids
        logits = model(torch.tensor([new]), cache=cache)
        lengths.append(cache.length)
        ids.append(logits[0, -1].argmax().item())
    return ids[len(prompt) :], lengths[:4]


found, grown = {}, {}
for repaired in ("nothing", "G2", "G2 G1", "G2 G1 G4"):
    try:
        found[repaired], grown[repaired] = old_script(repaired)
        story = tokenizer.decode(found[repaired])
        print(f"{repaired}: {grown[repaired]} keys\n   {story!r}")
    except RuntimeError as error:
        print(f"{repaired}: {error}")
assert list(found) == ["G2", "G2 G1", "G2 G1 G4"]
right = [repaired for repaired in found if found[repaired] == written]
assert right == ["G2 G1 G4"]
assert tokenizer.decode(found["G2 G1"]).endswith(5 * "\n")
assert grown["G2"] == [3, 7, 12, 18] and grown["G2 G1"] == [3, 4, 5, 6]

# %%
# The crash did the least harm. With the first repair the cache grows by the whole text in every round (G3). The text is
# fluent, and it is the wrong text. After the next repair it begins as well as the right one, and runs out into empty
# lines. The fixed lines are those of ``PlainCache.see``: new tokens are the last T of S positions, for mask and
# embedding.
#
# The check that finds all three is the law, on logits, after every repair. Fluent text proves nothing. In 2025 `a cache
# for nanoGPT <https://github.com/karpathy/nanoGPT/pull/613>`_ was proposed whose texts were coherent, but not quite
# those without it. Its author asked whether that is a bug.
#
# Which sentence is false?
# ------------------------
#
# 1. The last token of a written text never enters the cache.
# 2. ``DynamicCache.update`` of ``transformers`` works in place: it adds the new keys to the tensor that it holds.
# 3. After a cropped cache has read other tokens, it is as if it had never seen the first ones.
#
# Decide first; the code tries all three.

cache = GrowingCache(8)
complete(generate(shipped, [prompt], 16, GREEDY, cache=cache))
print(f"1. {cache.length} tokens of {len(prompt) + 16} are held")
assert cache.length == len(prompt) + 16 - 1

dynamic, three, fourth = (
    transformers.DynamicCache(),
    *torch.zeros(2, 1, 2, 3, 4),
)
before, _ = dynamic.update(three, three, 0)
after, _ = dynamic.update(fourth[:, :, :1], fourth[:, :, :1], 0)
same = before.data_ptr() == after.data_ptr()
print(f"2. {before.shape[2]} keys, {after.shape[2]} keys, same memory: {same}")
assert (before.shape[2], after.shape[2], same) == (3, 4, False)

cache, other = GrowingCache(3), idx.flip(1)[:, :5]
gpt2(idx, cache=cache)
cache.crop(4)
never = gpt2(torch.cat([idx[:, :4], other], 1))[:, 4:]
error = (gpt2(other, cache=cache) - never).abs().max()
print(f"3. logits differ by {error:.0e}")
assert error < 1e-10

# %%
# The second is false (K13). The old tensor still has three keys, and the four keys are in another place.
#
# Exercises
# ---------
#
# 1. *Medium.* Give ``PlainCache`` a method ``crop(length)``, and test it as the third sentence was tested, for both
#    models. Hint: cut all layers along S. A good answer has an error below 1e-10 for every length from 0 to 12.
#
# Summary
# -------
#
# * With a causal mask, keys and values of a token depend on no later token. Without one, this is true of layer 0 alone.
# * A cache is right if the logits of one full pass are those of every way to cut the text. All 64 ways to cut seven
#   tokens agree to 1e-10.
#
# Sources
# -------
#
# * Vaswani et al.: `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, 2017. The causal mask, in section
#   3.2.3.
# * Pope et al.: `Efficiently Scaling Transformer Inference <https://arxiv.org/abs/2211.05102>`_, 2022. Prefill and
#   decode.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
