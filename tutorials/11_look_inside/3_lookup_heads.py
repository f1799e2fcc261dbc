r"""
Heads that look things up
=========================

A story ends with "Where is Mia? Mia is in the", and the model ``worlds`` mostly says the right room. The question names no
room, so the model must look it up in the story. Which of its attention heads do that?

Each row below is one of its 16 heads, and shows where that head looks at the moment when the room must be said. 3.0 is
head 0 of block 3.
"""

# sphinx_gallery_needs = ["2_patching", "../1_gpt2/6_attention_maps"]
# sphinx_gallery_words = ["circuit", "circuits", "circuit discovery", "mechanistic interpretability", "induction head", "copying head", "name mover head", "retrieval head", "path patching", "mean ablation", "ablate a head", "which head does what", "direct logit attribution", "backup heads", "redundant heads", "OV circuit", "QK circuit", "query composition", "Q-composition", "TransformerLens", "ARENA", "IOI", "indirect object identification", "reverse engineer a model"]
import matplotlib.pyplot as plt
import torch

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.inside.patching import patch_path, run, silence
from lm_from_scratch.inside.sites import Site, activations
from lm_from_scratch.instruments import plot
from lm_from_scratch.instruments.record import record_attention
from lm_from_scratch.models.blocks import final_norm
from lm_from_scratch.models.modes import evaluating

model, tokenizer = load_shipped("worlds")
model = model.float().requires_grad_(False)
L, H = 4, 4


def look(idx, positions=None):  # where the last token looks
    with evaluating(model), record_attention(model) as recorded:
        model(idx, positions=positions)
    maps = [layer[0][:, :, -1] for layer in recorded]
    return torch.stack(maps, 1)  # (B, L, H, T)


story = "Mia is in the hall. Tom is in the attic. Mia goes to the garden."
ids = tokenizer.start(f"{story} Where is Mia? Mia is in the")
one = look(torch.tensor([ids]))[0].flatten(0, 1)  # (L * H, T)

words = ["⊢", *tokenizer.pieces(ids[1:])]
heads = [f"{l}.{h}" for l in range(L) for h in range(H)]
fig, (ax,) = plot.figure(4.8, 4.2)
ax.imshow(one.numpy(), cmap=plot.blues(), vmin=0, vmax=1, aspect="auto")
ax.set_xticks(range(len(words)), words, rotation=90, fontsize=7)
ax.set_yticks(range(16), heads, fontsize=8)
ax.set(title="Where each head looks before the room", ylabel="head")
ax.grid(False)
plt.show()
assert {words[one[i].argmax()] for i in (12, 13, 15)} == {" garden"}
assert words[one[1].argmax()] == " in" and words[one[10].argmax()] == " Mia"

# %%
# ⊢ is the start of the text. In the last block, 3.0, 3.1 and 3.3 look at "garden", the right room. Others have jobs of
# their own: 0.1 looks at the token before, 2.2 at the name in the question.
#
# One story proves nothing. The lesson on `attention maps <../1_gpt2/6_attention_maps.ipynb>`_ gave each habit a
# score, and could only say *that* a head looks there. Here a program knows which room is right.
#
# Do they look at the right room?
# -------------------------------
#
# ``two_questions`` makes stories and asks each about two people who are in different rooms. The two texts differ only in the
# name, so a head that looks at the right room in both must depend on the name.

from lm_from_scratch.text.asked import batch, two_questions

pairs = two_questions(60, seed=1)
q = batch([story for pair in pairs for story in pair], tokenizer)
for story in pairs[0]:
    print(story.text[-60:], "->", story.room)

maps = look(q.idx, q.positions)  # (B, L, H, T)
right = q.idx == q.words[q.rooms][:, None]  # (B, T)
room = torch.isin(q.idx, q.words)


def weight_on(marked):
    return (maps * marked[:, None, None]).sum(-1).mean(0)  # (L, H)


# %%
# **Predict first.** Five heads give most of their weight to rooms. How many of them give the right room more than all
# other rooms together?
#
# * none
# * three
# * all five

on_right, on_rooms = weight_on(right), weight_on(room)
share = on_right / on_rooms
blind = (right.sum(1) / room.sum(1)).mean().item()
even = (right.sum(1) / (q.positions >= 0).sum(1)).mean().item()
LOOKUPS = (0, 1, 3)  # of block 3
for l, h in [(1, 2), (2, 1), *((3, h) for h in LOOKUPS)]:
    print(f"{l}.{h}: of the weight on rooms, {share[l, h]:.0%} on the right")
print(f"a head that looks at all rooms alike: {blind:.0%}")
print(f"weight on the right room of an even head: {even:.0%}")


def show(left, right, titles, largest=1.0):
    _, axes = plot.figure(4.8, 2.6, 1, 2)
    for ax, found in zip(axes, (left, right)):
        plot.number_map(ax, found, largest, decimals=1)
        ax.set(xticks=range(4), yticks=range(4), xlabel="head", ylabel="block")
    for ax, title in zip(axes, titles):
        ax.set_title(title, fontsize=10)
    plt.show()


show(on_rooms, on_right, ("weight on all rooms", "on the right room"))

assert sorted(on_rooms.flatten().topk(5).indices.tolist()) == [6, 9, 12, 13, 15]
assert on_rooms.flatten().topk(5).values.min() > 0.5
assert share[3, LOOKUPS].min() > 0.5 > share[1, 2]
assert share[3, LOOKUPS].min() > share[2, 1] + 0.05
assert abs(share[1, 2] - blind) < 0.1
assert on_right[3, LOOKUPS].min() > 10 * even

# %%
# Three: those of the first figure. 1.2 looks at rooms, but at the right one no more than a head that looks at all rooms
# alike. 2.1 is in between.
#
# An *even* head, which looks at every token alike, would have a thirtieth of its weight on the right room. By that yardstick
# 1.2 would have passed as well. Compare with what a head could do *without* understanding the question.
#
# Do they copy?
# -------------
#
# Looking is one thing, passing on what is seen another. What a head adds to the residual stream is a vector, so give it
# alone to the model's last norm and output layer. Which room has the highest score? That is the room that the head *speaks
# for*. Compare it with the room that the head looked at most, right or wrong.

sites = [Site("heads", l) for l in range(L)]
logits, fetched = activations(model, q.idx, sites, positions=q.positions)
each = q.idx[:, :, None] == q.words  # (B, T, 8)
seen = torch.einsum("blht,btr->blhr", maps, each.float()).argmax(-1)
copies, speaks = torch.zeros(L, H), torch.zeros(L, H)
for l in range(L):
    mix = model.model.layers[l].self_attn.o_proj.weight.unflatten(1, (H, -1))
    last = fetched["heads", l][:, :, -1]  # (B, H, D)
    written = torch.einsum("bhd,chd->bhc", last, mix)  # (B, H, C)
    said = q.said(model.head(final_norm(model)(written)).flatten(0, 1))
    said = said.unflatten(0, (-1, H))
    copies[l] = (said == seen[:, l]).float().mean(0)
    speaks[l] = (said == q.rooms[:, None]).float().mean(0)

truth = (q.said(logits) == q.rooms).float().mean().item()
print(f"the model names the right room in {truth:.0%} of the stories")

show(copies, speaks, ("speaks for what it sees", "for the right room"))

assert copies[3, LOOKUPS].min() > 0.75 and copies[2, 1] > 0.75
assert speaks[3, 3] > 0.6 > speaks[1, 2] + 0.1
assert truth > 0.65

# %%
# They copy: 3.0, 3.1 and 3.3 speak for the room that they look at in about nine of ten stories. 2.1 copies as well, but
# often a wrong room. 3.3 by itself speaks for the right room nearly as often as the whole model.
#
# Is that induction?
# ------------------
#
# An *induction head* looks at what came after an earlier copy of the last words. After "the", it would look at keys, boxes
# and all rooms alike. After "in the", it would find no room in "Mia goes to the garden". So take the stories in which the
# right room only ever follows "to the":

to = tokenizer.encode("goes to")[-1]
after_to = right & (q.idx.roll(2, 1) == to)
only = right.sum(1) == after_to.sum(1)  # (B,)
shares = (maps * right[:, None, None]).sum(-1)
shares = shares / (maps * room[:, None, None]).sum(-1)  # (B, L, H)
for l, h in [(3, 0), (3, 1), (3, 3)]:
    print(f"{l}.{h}: {shares[only, l, h].mean():.0%} on the right room")

assert only.sum() > 20
assert shares[only][:, 3, LOOKUPS].mean(0).min() > 0.5
assert (right.sum(1) / room.sum(1))[only].mean() < 0.35

# %%
# The three heads find it there, too. So they copy, but repeated words alone do not lead them: they must go by
# whose room is asked for as well.
#
# Silence one
# -----------
#
# ``silence`` replaces what a head writes by its mean over other stories (a *mean ablation*): it still writes, but always the
# same, whatever it reads.
#
# **Predict first.** Each of the three lookup heads is silenced alone. What becomes of the answers?
#
# * a third of them go wrong, because a third of the lookup is missing
# * most stay right
# * all go wrong

texts = batch([story for story, _ in two_questions(20, seed=2)], tokenizer)
n, end = 48, slice(-1, None)  # 48 texts, and logits of the last token alone


def silent(layer, heads):
    return silence(model, texts.idx, layer, heads, positions=texts.positions)


def rights(edits):
    parts = zip(*(x[:n].split(16) for x in (q.idx, q.positions, q.rooms)))
    hits = [
        q.said(run(model, idx, edits, positions=at, keep=end)) == rooms
        for idx, at, rooms in parts
    ]
    return torch.cat(hits).float().mean().item()


whole = rights({})
without = [
    [rights({Site("heads", l): silent(l, h)}) for h in range(H)]
    for l in range(L)
]
without = torch.tensor(without)
three = rights({Site("heads", 3): silent(3, LOOKUPS)})
print(f"all heads: {whole:.0%}, without the three together: {three:.0%}")

fig, (ax,) = plot.figure(3.4, 2.8)
plot.number_map(ax, without, largest=1.0, decimals=2)
ax.set(xticks=range(H), yticks=range(L), xlabel="silenced", ylabel="block")
ax.set_title("Right rooms with one head silenced", fontsize=10)
plt.show()

assert (without[3, LOOKUPS] > whole - 0.25).all()
assert three < without[3, LOOKUPS].min() - 0.08
assert without[0, :2].max() < without[3, LOOKUPS].min()

# %%
# Most stay right. What one of the three no longer says, the other two still say; without all three together about half
# of the right answers are gone. Silence one head at a time, and you would think that none of the three matters much.
#
# The largest losses are in block 0, at heads that look at no room from the last token. What they write at other tokens is
# needed by everything that follows. So an ablation shows what is needed, not where the answer is found.
#
# Who tells them where to look?
# -----------------------------
#
# Ask for another name, and the lookup heads look at another room. Who told them? ``patch_path`` tests one path at a time,
# from one head to a later part of the model. The model reads the first question, but along this path it gets what the head
# fetched for the second. If the answer changes, news of the name takes this path.
#
# We take 8 stories in which the model answers both questions correctly. 0 is its own answer, 1 the other one.

both = (q.said(logits) == q.rooms).view(-1, 2).all(1)
first, second = (2 * both.nonzero()[:8, 0] + i for i in (0, 1))
idx, source, positions = q.idx[first], q.idx[second], q.positions[first]


def margin(logits):
    last = logits[:, -1, q.words]
    a, b = (last.gather(1, q.rooms[i, None]) for i in (first, second))
    return (b - a).mean()


# %%
# **Predict first.** Heads 1.1 and 2.2 look at the name in the question, 1.2 and 2.1 look at rooms. From which of them does
# the news go into the attention of block 3?
#
# * from 1.1 and 2.2: block 3 needs the name
# * from 1.2 and 2.1: block 3 needs the rooms
# * from all four

name = weight_on(q.idx == q.idx[:, [-4]])  # the name in the answer, anywhere
own, other = (margin(logits[i]) for i in (first, second))
receivers = {"attention 3": Site("attention", 3), "the end": Site("stream", 4)}
news = {}
for receiver, site in receivers.items():
    found = torch.zeros(L, H)
    for l in range(site.layer):
        for h in range(H):
            heard = patch_path(
                model, idx, source, (l, h), site, positions=positions
            )
            found[l, h] = (margin(heard) - own) / (other - own)
    news[receiver] = found

titles = ("to the attention of block 3", "to the end")
show(*news.values(), titles, 0.5)

assert name[1, 1] > 0.8 and name[2, 2] > 0.8
to_lookups, to_end = news["attention 3"], news["the end"]
assert min(to_lookups[1, 1], to_lookups[2, 2]) > 0.08
assert max(to_lookups[1, 2], to_lookups[2, 1]) < 0.05
assert to_end[3, LOOKUPS].min() > 0.08
assert to_end[:3].max() < to_end[3, LOOKUPS].min()

# %%
# From 1.1 and 2.2. They bring the name to the last token, and with it the heads of block 3 look at the room of that person.
# What the heads of block 3 find goes straight to the end. Together these five are a *circuit*: name, room, answer.
#
# It is not the whole circuit. The shares do not add up to 1. And how the token "garden" learns that it is Mia's room is
# another path, for which stories must differ in their facts (exercise 3).
#
# What others do
# --------------
#
# The best known circuit is that of Wang et al. (2022, `Interpretability in the Wild <https://arxiv.org/abs/2211.00593>`_).
# GPT-2 small reads "When Mary and John went to the store, John gave a drink to". *Name movers* copy "Mary", and other
# heads step in when these are silenced. (On their paths the MLPs between answer to the news as well; ours is the stream
# alone.) Olsson et al. (2022, `on induction heads <https://arxiv.org/abs/2209.11895>`_) score
# looking and copying separately, as above.
#
# The ARENA course rebuilds Wang's circuit with TransformerLens, for 144 heads. The right name is known there as well, because a template made the sentence. Here it is known for every story,
# in whatever order things happened.
#
# The room is found in block 3. Could you have read it off the state earlier? `A lens <4_lens.ipynb>`_ tries.
#
# Exercises
# ---------
#
# 1. *Easy.* Ask for the key: ``asked(60)`` of ``text/asked.py``, in place of ``two_questions``. A good answer says
#    which of the five heads keep their jobs, and what 1.1 looks at now.
# 2. *Easy.* Silence 1.1 and 2.2 together. A good answer compares the loss with that of the three lookup heads.
# 3. *Hard.* Make pairs that differ in a fact, with ``counterfactual``, and send news along ``Site("mlp", 0)``. A good answer
#    names the head of block 0 through which the room itself travels.
#
# Summary
# -------
#
# * Where the right token is known, score a head against heads that could not know it: one that looks everywhere, and one
#   that looks at all rooms alike.
# * Looking, copying and being needed are three questions. When you silence one of several heads that do the same work,
#   the others hide the loss.
# * Path patching shows who tells whom: name heads tell the lookup heads where to look.
