r"""
Masks in depth
==============

The lesson on `masks from positions <2_masks.ipynb>`_ has one rule for every mask, and tests it on one model. Is the
rule right in every layout: padding anywhere, chunks, static buffers, rings, packed rows? Which of twelve wrong masks
would a test have noticed? And when does a mask need not be built at all?

Letters name axes: B rows, T queries, S keys, H query heads, Hkv key heads, D features of a head. L is the number of
blocks, W the number of keys in a window.

A model to look into
--------------------

The masks on this page are not drawn by hand. A model reads a batch, and a wrapper around its attention keeps the
``Visibility`` that the attention received. The model is a Qwen2 of four blocks. Its weights are random with standard
deviation 0.25, large enough that a wrong mask moves the logits. The tokenizer is the shipped one.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["off by one", "receptive field", "attn_mask", "4D mask", "mask shape"]
# sphinx_gallery_museum = ["G25"]

import inspect
import math
import tempfile
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import transformers

from lm_from_scratch.attention.attention import formula_attention
from lm_from_scratch.attention.kinds import attention_layers
from lm_from_scratch.attention.sdpa import sdpa_attention
from lm_from_scratch.checkpoint.folders import SHIPPED
from lm_from_scratch.checkpoint.weights import save_pretrained
from lm_from_scratch.models.qwen2 import (
    FULL,
    SLIDING,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from lm_from_scratch.models.randomize import randomize_
from lm_from_scratch.text.tokenizer import Tokenizer

torch.set_grad_enabled(False)
transformers.utils.logging.disable_progress_bar()
tokenizer = Tokenizer.load(SHIPPED)
tiny = Qwen2Config(
    vocab_size=tokenizer.vocab_size,
    block_size=64,
    n_layer=4,
    n_head=6,
    n_kv_head=2,
    n_embd=48,
    intermediate_size=112,
    eos_token_id=None,
)


def random_model(**changes):
    model = Qwen2ForCausalLM(replace(tiny, **changes)).eval()
    randomize_(model)
    return model


def watch(model, idx, layer=0, **options):
    seen = []

    def attend(q, k, v, visibility, dropout=0.0):
        seen.append(visibility)
        return sdpa_attention(q, k, v, visibility, dropout)

    part = attention_layers(model)[layer]
    part.attend = attend
    model(idx, **options)
    part.attend = sdpa_attention
    return seen[0]


# %%
# A sentence of nine tokens goes in. The ``mask`` of a ``Visibility`` has the shape (B, 1, T, S) and is True where a
# query may see a key.

model = random_model()
nine = tokenizer.encode("Return the number of items in a container.")
five = tokenizer.encode("Return a new list.")
four = tokenizer.encode("Close the file.")
assert [len(nine), len(five), len(four)] == [9, 5, 4]

causal = watch(model, torch.tensor([nine]))
print(causal.mask.shape)
print(causal.query_positions.tolist())
print(causal.mask[0, 0].int())
assert torch.equal(causal.mask[0, 0], torch.ones(9, 9).tril().bool())

# %%
# The rule in the package
# -----------------------
#
# With :math:`p_t` for the position of a query, :math:`p_s` for that of a key, and d for their documents, key s is
# visible to query t if
#
# .. math::
#
#    p_s &\ge 0 \qquad \text{(the key is real)} \\
#    p_s &\le p_t \qquad \text{(it is not after the query)} \\
#    p_s &> p_t - W \qquad \text{(it is within the window, if there is one)} \\
#    d_s &= d_t \qquad \text{(both are in one document, if there are several)}
#
# The first two conditions together leave a padding query nothing to see. The method begins with these four lines.

from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.attention.visibility import Visibility

print(inspect.getsource(Visibility.rule))

# %%
# Fifteen batches
# ---------------
#
# Padding first. Two sentences of unequal length become a batch in three ways. The function ``positions_from_mask``
# counts the real tokens, wherever the padding is.

from lm_from_scratch.text.batch import padded_batch

both_sides = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0], [1] * 9])
inside = torch.tensor([[0, *five[:2], 0, 0, *five[2:], 0], nine])
print(positions_from_mask(both_sides))

left = padded_batch([five, nine], pad_token_id=0, side="left")
right = padded_batch([five, nine], pad_token_id=0, side="right")
pictures = {
    "causal": causal,
    "left padding": watch(model, left.idx, positions=left.positions),
    "right padding": watch(model, right.idx, positions=right.positions),
    "padding on both sides, inside": watch(
        model, inside, positions=positions_from_mask(both_sides)
    ),
}

# %%
# Then windows. A window of W keys includes the query's own: row t sees :math:`\min(t + 1, W)` keys. With W = 1 every
# token sees only itself.

for W in (1, 2, 4):
    slides = random_model(sliding_window=W, layer_types=(SLIDING,) * 4)
    seen = watch(slides, torch.tensor([nine]))
    counts = seen.mask.sum(-1).flatten().tolist()
    assert counts == [min(t + 1, W) for t in range(9)]
    pictures[f"window, W = {W}"] = seen
    print(f"W = {W}: keys per query {counts}")
    if W == 2:
        pictures["left padding, W = 2"] = watch(
            slides, left.idx, positions=left.positions
        )

# %%
# Then two documents in one row. Positions start again, and document numbers keep the two apart. Without the numbers,
# the second document would see every key of the first with a low enough position.

row = torch.tensor([four + five])
restart = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
number = torch.tensor([[0] * 4 + [1] * 5])
pictures["two documents"] = watch(
    model, row, positions=restart, documents=number
)

# %%
# With a cache there are fewer queries than keys. The cache remembers the position of every key that it holds, so
# padding in a row stays padding.

from lm_from_scratch.cache.growing import GrowingCache


def watch_last(model, cache, idx, *pieces, positions=None):
    parts = idx.split(pieces, dim=1)
    if positions is None:
        places = [None] * len(parts)
    else:
        places = positions.split(pieces, dim=1)
    for part, place in zip(parts[:-1], places[:-1]):
        model(part, positions=place, cache=cache)
    return watch(model, parts[-1], positions=places[-1], cache=cache)


idx = torch.tensor([nine])
pictures["3 after a cache of 6"] = watch_last(model, GrowingCache(4), idx, 6, 3)
pictures["the same, left padding"] = watch_last(
    model, GrowingCache(4), left.idx, 6, 3, positions=left.positions
)
pictures["one query after 8"] = watch_last(model, GrowingCache(4), idx, 8, 1)

# %%
# Last comes a cache of fixed size, so that a compiled program always sees tensors of one shape. The key of position p
# goes to slot p mod S. With more slots than tokens this is a *static buffer*, whose unused slots must stay hidden. With
# fewer slots it is a *ring buffer*, which forgets the oldest key and holds the others in a rotated order.
#
# The chapter on caches builds both. Here only their masks matter.

from lm_from_scratch.cache.slots import SlidingCache, StaticCache
from lm_from_scratch.instruments.plot import figure, mask_map

pictures["3 after 6, W = 4"] = watch_last(slides, GrowingCache(4), idx, 6, 3)
static = StaticCache(4, capacity=12)
pictures["static buffer of 12"] = watch_last(model, static, idx, 6, 3)
ring = SlidingCache(4, window=4, slack=2)
pictures["ring of 6, W = 4"] = watch_last(slides, ring, idx, *[1] * 9)
print("slots of the ring hold", ring.tracks[0].positions[0, :6].tolist())

# %%
# Here are all fifteen. The labels are positions, with -1 for padding and for unused slots. Of a batch with two rows,
# the first is drawn.

_, axes = figure(6.4, 9.4, rows=5, columns=3)
axes[0].get_gridspec().set_height_ratios([3, 3, 3, 1.2, 1.2])
for ax, (title, seen) in zip(axes, pictures.items(), strict=True):
    queries, keys = seen.query_positions[0], seen.key_positions[0]
    title = title.replace("both sides,", "both\nsides and")
    mask_map(ax, seen.mask[0, 0], queries.tolist(), keys.tolist(), title)
plt.show()

# %%
# A chunk has the *lower* rows of the triangle. A static buffer is a chunk with grey columns. The ring is one row of a
# band whose columns are rotated. Each of these can be checked without the rule.

full = torch.ones(9, 9).tril().bool()
band = full & ~full.tril(-4)
bottom = torch.zeros(3, 12).bool()
bottom[:, :9] = full[6:]
first_row = {name: seen.mask[0, 0] for name, seen in pictures.items()}
assert torch.equal(first_row["3 after a cache of 6"], full[6:])
assert torch.equal(first_row["one query after 8"], full[8:])
assert torch.equal(first_row["window, W = 4"], band)
assert torch.equal(first_row["static buffer of 12"], bottom)
assert torch.equal(
    first_row["ring of 6, W = 4"], band[8:, ring.tracks[0].positions[0, :6]]
)
assert torch.equal(
    first_row["two documents"],
    torch.block_diag(full[:4, :4], full[:5, :5]).bool(),
)
real = left.positions[0] >= 0
assert torch.equal(first_row["left padding"], full & real & real[:, None])

# %%
# The same text, the same logits
# ------------------------------
#
# The lesson's test has three laws. Here each is checked on a model whose blocks alternate between full attention and a
# window of four. The reference is each text alone, in one pass, without padding and without a cache.

types = (FULL, SLIDING) * 2
mixed = random_model(sliding_window=4, layer_types=types)
a = tokenizer.encode("Read a line from the file and return it as a string")
b = tokenizer.encode("Raise an error if the key is not found")
assert [len(a), len(b)] == [12, 9]
alone_a, alone_b = mixed(torch.tensor([a])), mixed(torch.tensor([b]))


def check(name, ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0.0)
    error = (ours - theirs).abs().max().item()
    print(f"{name:30} largest error {error:.0e}")


print(f"standard deviation of the logits {alone_a.std():.1f}")
assert alone_a.std() > 1

# %%
# *Padded* equals alone, *chunks* (of 5, 1, 3 and 3 tokens, with a cache) equal one pass, and *packed* equals alone.


def in_chunks(model, idx, pieces, cache, positions=None):
    parts = idx.split(pieces, dim=1)
    places = [None] * len(parts)
    if positions is not None:
        places = positions.split(pieces, dim=1)
    return torch.cat(
        [model(x, positions=p, cache=cache) for x, p in zip(parts, places)],
        dim=1,
    )


idx, chunks = torch.tensor([a]), [5, 1, 3, 3]
batch = padded_batch([b, a], pad_token_id=0, side="left")
logits = mixed(batch.idx, positions=batch.positions)
check("padded, short row", logits[0, 3:], alone_b[0])
check("padded, long row", logits[1], alone_a[0])

check("chunks", in_chunks(mixed, idx, chunks, GrowingCache(4)), alone_a)
logits = in_chunks(mixed, batch.idx, chunks, GrowingCache(4), batch.positions)
check("chunks, padded", logits[0, 3:], alone_b[0])

places = torch.tensor([[*range(12), *range(9)]])
numbers = torch.tensor([[0] * 12 + [1] * 9])
logits = mixed(torch.tensor([a + b]), positions=places, documents=numbers)[0]
check("packed, first document", logits[:12], alone_a[0])
check("packed, second document", logits[12:], alone_b[0])

# %%
# These laws compare the model with itself. A window that is too wide everywhere would obey all of them. So one
# comparison is with a model that other people wrote: ``transformers`` reads the same weights and builds its masks in
# its own way.

with tempfile.TemporaryDirectory() as folder:
    save_pretrained(mixed, f"{folder}/mixed")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        f"{folder}/mixed", attn_implementation="eager", dtype="auto"
    )
mask = (batch.positions >= 0).long()
given = dict(attention_mask=mask, position_ids=batch.positions.clamp(min=0))
theirs = oracle(batch.idx, **given).logits
ours = mixed(batch.idx, positions=batch.positions)
check("transformers, left padding", ours[0, 3:], theirs[0, 3:])
check("transformers, full row", ours[1], theirs[1])

# %%
# Twelve wrong masks
# ------------------
#
# Classical code builds a mask from columns: a triangle, cut to size, and a padding mask. Done right, it gives the right
# logits in most batches. Here it is, written as a function of the visibility, beside its mistakes: the lesson's six and
# more. Those with a number, such as G2, were found in real programs.


def columns(seen, first=None):
    T, S = seen.query_length, seen.key_length
    first = S - T if first is None else first
    return torch.arange(first, first + T)[:, None], torch.arange(S)


def hide_more(mask, seen, t, s, padding=True):
    if padding:
        mask = mask & (seen.key_positions >= 0)[:, None, None]
    if seen.window is not None:
        mask = mask & (s > t - seen.window)
    return mask.expand(-1, 1, -1, -1) if mask.dim() == 4 else mask[None, None]


def classical(seen):
    t, s = columns(seen)
    return hide_more(s <= t, seen, t, s)


def wrong_corner(seen):  # G2: the first rows of the triangle
    t, s = columns(seen, first=0)
    return hide_more(s <= t, seen, t, s)


def own_key_hidden(seen):  # >= where > was meant, after a triangle
    t, s = columns(seen)
    hidden = torch.ones(seen.query_length, seen.key_length).bool()
    if seen.query_length > 1:
        hidden = hidden.triu(1)
    return hide_more(~(hidden & (s >= t)), seen, t, s)


def no_padding_mask(seen):
    t, s = columns(seen)
    return hide_more(s <= t, seen, t, s, padding=False)


def padding_inverted(seen):
    real = seen.key_positions >= 0
    if real.all():
        return classical(seen)  # no mask was given
    return no_padding_mask(seen) & ~real[:, None, None]


def one_query_sees_all(seen):
    T, S = seen.query_length, seen.key_length
    return torch.ones(1, 1, 1, S).bool() if T == 1 else seen.mask


def one_key_more(seen):  # Q2
    return seen.within(seen.window and seen.window + 1).mask


def no_window(seen):  # Q1
    return seen.within(None).mask


# %%
# Each of them replaces the rule in a copy of the model. Four more mistakes are not rules: a fill of minus infinity, a
# mask that is added as -10000, and two rotations with other positions than the mask has. The rotations are changed by
# hooks on the module that computes them.


def with_attention(attend, **changes):
    planted = random_model(
        **dict(sliding_window=4, layer_types=types) | changes
    )
    for layer in attention_layers(planted):
        layer.attend = attend
    return planted


def with_rule(rule, **changes):
    def attend(q, k, v, visibility, dropout=0.0):
        other = replace(visibility, dense=False)
        other.rule = lambda: rule(visibility)
        return formula_attention(q, k, v, other)

    return with_attention(attend, **changes)


def with_fill(fill):
    def attend(q, k, v, visibility, dropout=0.0):
        k, v = (x.repeat_interleave(3, dim=1) for x in (k, v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return fill(scores, ~visibility.mask).softmax(-1) @ v

    return with_attention(attend)


def with_rotation(places):
    planted = with_attention(sdpa_attention)
    planted.model.rotary_emb.register_forward_pre_hook(
        lambda module, args: (places(args[0]), *args[1:])
    )
    return planted


def restarting(positions):
    return torch.arange(positions.shape[1]).expand_as(positions)


def counting_padding(positions):
    n_padding = (positions < 0).sum(1, keepdim=True)
    return positions + n_padding * (positions >= 0)


def minus_infinity(scores, hidden):
    return scores.masked_fill(hidden, -torch.inf)


def minus_10000(scores, hidden):
    return scores - 10000.0 * hidden


planted = {
    "the rule": with_rule(lambda seen: seen.mask),
    "columns": with_rule(classical),
    "inverted": with_rule(lambda seen: ~seen.mask),
    "window of W + 1 (Q2)": with_rule(one_key_more),
    "no window (Q1)": with_rule(no_window),
    "no padding mask": with_rule(no_padding_mask),
    "padding mask inverted": with_rule(padding_inverted),
    "filled with -inf": with_fill(minus_infinity),
    "first rows of triangle (G2)": with_rule(wrong_corner),
    "own key hidden, >= for >": with_rule(own_key_hidden),
    "one query sees all": with_rule(one_query_sees_all),
    "rotation restarts": with_rotation(restarting),
    "rotation counts padding": with_rotation(counting_padding),
    "added -10000 (G25)": with_fill(minus_10000),
}

# %%
# Each copy takes three tests: the full pass, the left-padded batch (real tokens only), and pieces of 5, 1, 3 and 3. The
# tests compare with the right model's logits. A dot means that the error is below 5e-5.


def three_tests(model, wanted_a=alone_a, wanted_b=alone_b):
    padded = model(batch.idx, positions=batch.positions)
    pieces = in_chunks(model, idx, chunks, GrowingCache(4))
    errors = [
        (model(idx) - wanted_a).abs().max(),
        torch.cat([padded[0, 3:] - wanted_b[0], padded[1] - wanted_a[0]])
        .abs()
        .max(),
        (pieces - wanted_a).abs().max(),
    ]
    return [error.item() for error in errors]


print(f"{'':29}{'full':>6}{'left':>6}{'cached':>8}")
caught = {}
for name, wrong in planted.items():
    errors = three_tests(wrong)
    caught[name] = "".join("." if error < 5e-5 else "x" for error in errors)
    cells = ["." if error < 5e-5 else f"{error:.1f}" for error in errors]
    print(f"{name:29}{cells[0]:>6}{cells[1]:>6}{cells[2]:>8}")
    assert all(error < 5e-5 or not error < 0.5 for error in errors)

assert caught == {
    "the rule": "...",
    "columns": "...",
    "inverted": "xxx",
    "window of W + 1 (Q2)": "xxx",
    "no window (Q1)": "xxx",
    "no padding mask": ".x.",
    "padding mask inverted": ".x.",
    "filled with -inf": ".x.",
    "first rows of triangle (G2)": "..x",
    "own key hidden, >= for >": "..x",
    "one query sees all": "..x",
    "rotation restarts": "..x",
    "rotation counts padding": "...",
    "added -10000 (G25)": "...",
}

# %%
# Of the twelve wrong copies, the full pass reveals three. The padded batch reveals three more, and the pieces four
# more.
#
# Two copies pass all three tests. A rotation that counts the padding is not a mistake in a Qwen2: rotated scores depend
# on the difference of two positions, and padding does not change a difference. No test should demand more.
#
# The -10000 is a mistake, and these tests are too weak to notice it. It takes scores of thousands, as in
# `GPT-2 in depth <../1_gpt2/2a_gpt2_in_depth.ipynb>`_.
#
# Two copies were noticed only because the right model was there to compare with: those whose window is wrong. Compared
# with themselves, they pass.

for name in ("window of W + 1 (Q2)", "no window (Q1)"):
    wrong = planted[name]
    itself = three_tests(wrong, wrong(idx), wrong(torch.tensor([b])))
    print(f"{name:21} against itself:", *(f"{e:.0e}" for e in itself))
    assert max(itself) < 5e-5

# %%
# How far information travels
# ---------------------------
#
# A block with a window of W keys looks W - 1 tokens back. The states that it reads there already contain what the block
# below saw, so L blocks look :math:`L (W - 1)` tokens back. Together with the token itself, a state depends on
#
# .. math::
#
#    L \, (W - 1) + 1
#
# tokens. This is a claim about derivatives, so it can be measured: take the gradient of the sum of the last state's
# features with respect to the embedding of each token. A token that cannot matter has a gradient of exactly 0.


def reach(L, W, T=24):
    kinds = dict(n_layer=L, layer_types=(SLIDING,) * L, sliding_window=W)
    backbone = random_model(**kinds).model
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, T, 48, generator=generator).requires_grad_()
    with torch.enable_grad():
        backbone(x)[0, -1].sum().backward()
    return x.grad[0].norm(dim=-1)  # (T,)


for W in (1, 2, 3, 4):
    counts = [int((reach(L, W) > 0).sum()) for L in (1, 2, 3, 4)]
    print(f"W = {W}: tokens that matter after 1 to 4 blocks {counts}")
    assert counts == [L * (W - 1) + 1 for L in (1, 2, 3, 4)]

# %%
# In the figure the window has four keys. Each block reaches three tokens further back. White is exactly 0.

norms = torch.stack([reach(L, 4) for L in range(1, 7)])
fig, (ax,) = figure(4.8, 3.4)
image = ax.imshow(
    norms.log10().numpy(), cmap="viridis", aspect="auto", origin="lower"
)
ax.set_yticks(range(6), range(1, 7))
ax.set_xticks(range(2, 24, 3), range(-21, 1, 3))
ax.grid(False)
ax.set(xlabel="token, 0 is the last", ylabel="blocks L")
ax.set_title("Gradient of the last state, W = 4", fontsize=10)
fig.colorbar(image, ax=ax, label="log10 of the norm")
plt.show()
assert [(n > 0).sum().item() for n in norms] == [3 * L + 1 for L in range(1, 7)]

# %%
# Reach is not memory. Generation needs only the last W keys of a windowed block, because what older tokens had to say
# has already moved up into the states of later tokens.
#
# The mask that is never built
# ----------------------------
#
# A mask has T times S entries, so its memory grows with the square of the text. Two cases need none: the plain
# triangle, which the fused kernel knows as ``is_causal``, and a single query at the end, which may see everything.
#
# Both could be found by reading the positions. The attention does not read them. A visibility is ``dense`` if the
# caller gave no positions, so nothing *can* be padding.

print(inspect.getsource(Visibility.hides_only_the_future.fget))
print(inspect.getsource(Visibility.is_causal.fget))
print(inspect.getsource(Visibility.is_full.fget))

fast = {
    "one pass": watch(model, idx),
    "one query": watch_last(model, GrowingCache(4), idx, 11, 1),
    "chunk of 3": watch_last(model, GrowingCache(4), idx, 9, 3),
    "window of 4": watch(slides, idx),
    "padded": watch(model, batch.idx, positions=batch.positions),
}
for name, seen in fast.items():
    built = seen._mask is not None
    print(
        f"{name:11} causal {seen.is_causal!s:6} full {seen.is_full!s:6}", end=""
    )
    print(f"mask built: {built}")
    assert built == (name not in ("one pass", "one query"))
assert fast["one pass"].is_causal and fast["one query"].is_full

# %%
# Why not read them? On a GPU, reading a value makes the program wait until the device has computed it, and a compiler
# splits the program there.
#
# Tensors on the ``meta`` device have a shape but no values. If the model runs there, it has read none. The kind of
# attention called ``packed`` does read the positions, so it fails there.

from lm_from_scratch.attention.kinds import use_attention_

with torch.device("meta"):
    ghost = Qwen2ForCausalLM(mixed.config).eval()
there = dict(device="meta", dtype=torch.long)
ids, places = torch.empty(2, 12, **there), torch.empty(2, 12, **there)
print("sdpa:", ghost(ids, positions=places).shape)
use_attention_(ghost, "packed")
try:
    ghost(ids, positions=places)
    read = False
except (RuntimeError, NotImplementedError) as error:
    read = True
    print("packed:", type(error).__name__)
assert read

# %%
# Bug museum
# ----------
#
# One row reads the other
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# The Qwen2 of ``transformers`` 4.42 took the padding out of a batch before its fused kernel. In a windowed block with a
# cache it cut the *mask* to its last W columns. It cut the keys as well, but into variables that no code used. The
# places of the real tokens were then counted in rows of W columns and looked up in rows of S columns. (Q4)


def unpadded(cut_keys):
    def attend(q, k, v, visibility, dropout=0.0):
        W = visibility.window
        if q.shape[2] > 1 or W is None or k.shape[2] <= W:
            return sdpa_attention(q, k, v, visibility)
        mask = visibility.key_positions[:, -W:] >= 0
        if cut_keys:
            k, v = k[:, :, -W:], v[:, :, -W:]
        flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        at = mask.flatten().nonzero()[:, 0].split(mask.sum(1).tolist())
        rows = []
        for row, mine in enumerate(at):  # one query for each row
            k_row, v_row = (x[mine].transpose(0, 1) for x in (flat_k, flat_v))
            rows.append(
                F.scaled_dot_product_attention(
                    q[row], k_row, v_row, enable_gqa=True
                )
            )
        return torch.stack(rows)

    return with_attention(attend)


# %%
# The last token is decoded after a padded prompt. Then we exchange the prompt of row 0 for another text of the same
# length. Row 1 must not notice.

changed = batch.idx.clone()
changed[0, 3:11] = torch.tensor(nine[:8])
for name, cut_keys in {"Q4": False, "fixed": True}.items():
    exhibit = unpadded(cut_keys)
    steps = [
        in_chunks(exhibit, rows, [11, 1], GrowingCache(4), batch.positions)
        for rows in (batch.idx, changed)
    ]
    error = (steps[0][1, -1] - alone_a[0, -1]).abs().max().item()
    leak = (steps[0][1, -1] - steps[1][1, -1]).abs().max().item()
    print(f"{name:7} row 1 is off by {error:.0e}, follows row 0 by {leak:.0e}")
    if cut_keys:
        assert error < 5e-5 and leak == 0.0
    else:
        assert error > 0.5 and leak > 0.5

# %%
# In a service, row 0 and row 1 belong to two people. The fixed line cuts keys, values and mask together. The check that
# finds the mistake changes one row and looks at the other, so it needs a batch of two different rows.
#
# A ring without positions
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# Slots are compared as if they were positions, which is right until the buffer becomes a ring. (M5)
#
# In a static buffer, slot and position are the same number, so code can get away with comparing the positions of
# queries with the numbers of slots. ``litgpt`` met this in `issue 2182
# <https://github.com/Lightning-AI/litgpt/issues/2182>`_.


def slots_as_positions(seen):
    slots = torch.arange(seen.key_length)
    filled = seen.key_positions >= 0
    return replace(seen, key_positions=torch.where(filled, slots, -1)).mask


ring_model = dict(sliding_window=4, layer_types=(SLIDING,) * 4)
wanted = random_model(**ring_model)(idx)
rules = {"slots": slots_as_positions, "positions": lambda seen: seen.mask}
for name, rule in rules.items():
    exhibit = with_rule(rule, **ring_model)
    answer = in_chunks(
        exhibit, idx, [1] * 12, SlidingCache(4, window=4, slack=2)
    )
    errors = (answer - wanted).abs().amax((0, 2))  # (T,)
    right_at = [t for t in range(12) if errors[t] < 5e-5]
    print(f"mask from {name:9} right at tokens {right_at}")
    assert right_at == list(range(6 if name == "slots" else 12))

# %%
# The first round is right, so a test must be longer than the ring. In the fixed line the keys bring their own
# positions, and the rule does not care where keys are stored.
#
# Exercises
# ---------
#
# 1. *Medium.* A ring gets chunks of n tokens, and every block has a window of W. How many slots does it need? Hint: the
#    first query of a chunk is asked after the last key of the chunk was written. A good answer is a formula;
#    ``in_chunks`` with ``SlotCache`` agrees with it for W = 4 and n = 1, 2, 3, and fails with one slot less.
# 2. *Hard.* Let a prompt see itself in both directions, and the answer the prompt and its own past. Hint: the rule
#    needs no fifth condition. Give the queries of the prompt the position of its last token, and leave the keys as they
#    are. Call the blocks yourself, as the model's ``forward`` does, with a ``Visibility`` of your own. A good answer
#    shows by a gradient that the first state depends on the last token of the prompt, and on none of the answer.
#
# Summary
# -------
#
# * Positions, document numbers and four conditions make all fifteen masks, from the triangle to a ring of six slots.
# * Padded, in chunks, and packed, a text gets the same logits as alone, within 5e-5.
#   ``transformers``, with its own masks, gets them too.
# * Of twelve planted mistakes the full pass reveals three, the left-padded batch six, and the pieces seven. Two pass
#   all tests, and one of these is not a mistake.
# * L blocks with a window of W keys see :math:`L(W - 1) + 1` tokens.
# * The plain triangle and the single last query need no mask. The package knows them without reading a value.
#
# Sources
# -------
#
# * Vaswani et al.: `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, 2017.
# * Beltagy et al.: `Longformer <https://arxiv.org/abs/2004.05150>`_, 2020. Windows, and what stacked blocks of them
#   see.
# * Jiang et al.: `Mistral 7B <https://arxiv.org/abs/2310.06825>`_, 2023. A window, and a ring buffer for its keys.
# * PyTorch: `scaled_dot_product_attention
#   <https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html>`_, where
#   ``is_causal`` is defined.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
