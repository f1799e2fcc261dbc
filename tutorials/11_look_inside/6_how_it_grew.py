r"""
How it grew
===========

In three of four short stories ``worlds`` says the right room of the key. It began with random weights. What did it learn
first, what last, and did it come suddenly?

Copies of the model were kept after 50, 100, 200, 400, 1,000 and 2,500 of the 6,000 steps of its training. All of them get
the same test: stories that end just before a room must be said. Each has a *twin*: one word differs, and another room is right.
"""

# sphinx_gallery_needs = ["../10_after_pretraining/6_worlds", "3_lookup_heads"]
# sphinx_gallery_words = ["emergence", "emergent abilities", "phase change", "phase transition", "grokking", "training dynamics", "learning dynamics", "checkpoints", "Pythia", "progress measures", "induction heads", "sudden", "mirage", "when does a model learn", "developmental interpretability", "what is learned first", "order of learning", "loss plateau"]

from random import Random
from textwrap import fill

import torch

from lm_from_scratch.checkpoint.folders import shipped_steps
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.inside.sites import Site, activations, stream_sites
from lm_from_scratch.instruments.record import record_attention
from lm_from_scratch.text.asked import asked, batch, counterfactual
from lm_from_scratch.text.story_grammar import ROOMS, write

steps = [*shipped_steps("worlds")]
models = {n: load_shipped("worlds", n)[0].requires_grad_(False) for n in steps}
_, tokenizer = load_shipped("worlds")

rng = Random(0)
pairs = [(s, counterfactual(s, rng)) for s in asked(100, seed=3)]
pairs = [pair for pair in pairs if pair[1]][:64]  # some have no twin
stories = [story for pair in pairs for story in pair]
test = batch(stories, tokenizer)  # (N, T)
for story in stories[:2]:
    print(fill(f"{story.text} -> {story.room}", 72))

assert len(stories) == 128

# %%

places = stream_sites(models[6000])
places += [Site("attention", 2), Site("attention", 3)]
probs, looks, states = {}, {}, {}
at_end = dict(positions=test.positions, keep=slice(-1, None))
for n, model in models.items():
    with record_attention(model) as maps:
        logits, kept = activations(model, test.idx, places, **at_end)
    probs[n] = logits[:, -1].softmax(-1)  # (N, V), at the last token
    looks[n] = torch.stack([m[0][:, :, -1] for m in maps], 1)  # (N, L, H, T)
    states[n] = {place: x[:, -1] for place, x in kept.items()}  # (N, C)

# %%

import matplotlib.pyplot as plt

from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.instruments.plot import GREY, figure
from lm_from_scratch.text.story_grammar import PEOPLE, cut
from lm_from_scratch.text.worlds import Report, check


def form(model):
    starts = [tokenizer.start(who) for who in [*PEOPLE] * 3]
    ends = [tokenizer.eos_token_id]
    rows = complete(generate(model, starts, 48, Sampler(), ends, seed=0))
    report = Report()
    for start, row in zip(starts, rows):
        told = cut(tokenizer.decode(start[1:] + row))
        report += check(" ".join(told[:-1]))  # the last is unfinished
    return report.readable / report.sentences


texts = [write(story.plot) for story in stories]
named = torch.tensor([[f" {r}" in text for r in ROOMS] for text in texts])
right = test.words[test.rooms]  # (N,)
said = {n: p.argmax(-1)[:, None] == test.words for n, p in probs.items()}


def share(hits):
    return hits.double().mean().item()


grammar = [form(models[n]) for n in steps]
a_room = [share((said[n] & named).any(-1)) for n in steps]
the_room = [share(probs[n].argmax(-1) == right) for n in steps]
guess = share(1 / named.sum(-1))
early, middle, thousand, last = 2, 3, 4, 6  # steps 200, 400, 1,000, 6,000

fig, (ax,) = figure(4.8, 3.4)


def finish(ax, title, ylabel="share", top=1.05):
    ax.set(title=title, xlabel="step", ylabel=ylabel, ylim=(0, top))
    ax.set_xticks(steps, [f"{n:,}" for n in steps], fontsize=8)
    ax.minorticks_off()
    ax.legend(fontsize=8)


ax.semilogx(steps, grammar, "^:", label="proper sentences")
ax.semilogx(steps, a_room, "s--", label="a room of the story is said")
ax.semilogx(steps, the_room, "o-", label="the right room is said")
ax.axhline(guess, color=GREY, linewidth=1)
finish(ax, "Form, then any room, then the right one")
plt.show()
print("grammar  ", *(f"{x:5.0%}" for x in grammar))
print("a room   ", *(f"{x:5.0%}" for x in a_room))
print("the right", *(f"{x:5.0%}" for x in the_room), f"  guess {guess:4.0%}")

assert [steps[i] for i in (early, middle, thousand, last)] == [
    200,
    400,
    1000,
    6000,
]
assert grammar[0] < 0.5 and grammar[early] > 0.93
assert a_room[0] < 0.3 and a_room[early] > 0.6
assert the_room[early] < guess and abs(the_room[middle] - guess) < 0.12
assert the_room[last] > the_room[middle] + 0.25 and the_room[last] > 0.65

# %%
# Every model read all 128 stories once. Is its likeliest next word a room of the story, and is it the right one? It also
# told 30 stories of its own, and a program counted the proper sentences. (Its states, and where its heads look, are kept
# for later.)
#
# Form comes first. By step 200 nearly all sentences are proper, and three of four answers are rooms of the story. But the
# model only guesses which: with about three rooms in a story, a guess is right in one of three (the grey line).
#
# The right room takes far longer. At step 400 the model still guesses; it gets better up to the end, 5,600 steps later.
#
# What the loss says
# ------------------
#
# Somebody who trains this model sees none of that. They see the loss.
#
# **Predict first.** How much of the fall of the loss, from step 1 to step 6,000, is over by step 400, while the model
# still guesses?
#
# * about a third
# * about two thirds
# * nearly all

import json
from itertools import pairwise

from lm_from_scratch.checkpoint.folders import PRETRAINED

lines = (PRETRAINED / "worlds" / "log.jsonl").read_text().splitlines()
log = [json.loads(line) for line in lines]
at, loss = zip(*[(line["step"], line["loss"]) for line in log])
held = [(x["step"], x["held_out_loss"]) for x in log if x["held_out_loss"]]


def near(n):  # the mean of some steps
    return torch.tensor(
        [y for x, y in zip(at, loss) if abs(x - n) <= 20]
    ).mean()


over = (loss[0] - near(400)) / (loss[0] - near(6000))
print(f"over by step 400: {over:4.0%}")
print("held out", *(f"{n}: {y:5.3f}" for n, y in held[::2]), sep="   ")

fig, (ax,) = figure(4.8, 2.8)
ax.semilogx(at, loss, linewidth=0.8, label="training")
ax.semilogx(*zip(*held), "s", markersize=4, label="held out")
finish(ax, "The loss of the run", "nats a token", top=7)
plt.show()
assert over > 0.93 and all(a[1] > b[1] for a, b in pairwise(held))

# %%
# Nearly all. Most words of a story follow from its form. The room of an answer is one of the few that need the world.
# Learning to look it up hides in the last few hundredths of the fall, where you would call the curve flat.
#
# Where the heads look
# --------------------
#
# A model that looks a room up has heads that look at rooms. At the last token, where the room is said: how much of the
# weight of a head lies on rooms of the story, and how much on the right one, where it was last named?
#
# **Predict first.** At step 400 the answer is a guess. Where does the best of the heads look?
#
# * Everywhere: it has not yet learned to look.
# * At rooms, with nearly all of its weight.
# * At the right room, with nearly all of its weight.

T = test.idx.shape[1]  # as many tokens as the longest story has
is_room = torch.isin(test.idx, test.words)  # (N, T)
source = ((test.idx == right[:, None]) * torch.arange(T)).argmax(-1)  # (N,)
N = torch.arange(len(stories))
on_rooms = [(looks[n] * is_room[:, None, None]).sum(-1).mean(0) for n in steps]
on_right = [looks[n][N, :, :, source].mean(0) for n in steps]  # (L, H) each

fig, axes = figure(4.8, 5.6, rows=2)
for (l, h), style in {(2, 1): "s--", (3, 0): "o-", (0, 0): "^:"}.items():
    for ax, on in zip(axes, (on_rooms, on_right)):
        weight = [x[l, h] for x in on]
        ax.semilogx(steps, weight, style, label=f"head {l}.{h}")
finish(axes[0], "Weight on rooms", "weight")
finish(axes[1], "Weight on the right room", "weight")
plt.show()
print("most on rooms", *(f"{x.max():5.2f}" for x in on_rooms))

assert on_rooms[1].max() < 0.4 and on_rooms[middle].max() > 0.85
assert on_rooms[early][3, 0] < 0.3 and on_rooms[thousand][3, 0] > 0.8
assert max(x[l, h] for x in on_right for l in range(4) for h in range(4)) < 0.7
assert on_rooms[early][0, 0] > 3 * on_rooms[last][0, 0]

# %%
# At rooms, with nearly all of its weight. Head 2.1 (block 2, head 1) turns to rooms between steps 100 and 400, and head
# 3.0 follows. *Looking* is learned early and fast, *choosing* is not: no head puts much more than half of its weight on the
# right room.
#
# Head 0.0 is the first to look at rooms, and gives it up again while other heads take to it.
#
# Why does choosing take so long? As the lesson on `lookup heads <3_lookup_heads.ipynb>`_ found, head 1.1 tells the others
# whose room is wanted. In stories in which somebody or something holds the key, does it look at "key", or at the holder?


carried = [i for i, story in enumerate(stories) if story.chain[1:]]


def weight_on(names, l, h):  # the words that count, of each story
    marked = []
    for i, words in zip(carried, names):
        tokens = [tokenizer.encode(f" {word}")[0] for word in words]
        marked.append(torch.isin(test.idx[i], torch.tensor(tokens)))
    weights = (looks[n][carried, l, h] * torch.stack(marked) for n in steps)
    return [weight.sum(-1).mean() for weight in weights]


on_key = weight_on([["key"] for _ in carried], 1, 1)
on_holder = weight_on([stories[i].chain[:-1] for i in carried], 1, 1)

fig, (ax,) = figure(4.8, 2.8)
ax.semilogx(steps, on_key, "s--", label='on "key"')
ax.semilogx(steps, on_holder, "o-", label="on the holder")
finish(ax, "Head 1.1: whose room is wanted?", "weight")
plt.show()
print("key   ", *(f"{x:5.2f}" for x in on_key))
print("holder", *(f"{x:5.2f}" for x in on_holder))

assert on_key[1] < 0.2 and on_key[early] > 0.45 and on_key[last] < 0.15
assert on_holder[early] < 0.35 and on_holder[5] > 0.75

# %%
# First at "key", the word in the question. But the key is where its holder is, and by step 2,500 most of the weight is on
# the holder, whom the model has just named in its answer: "Tom has the key, in the". This change is as slow as that of the
# answers.
#
# Heads that find something in the text come suddenly in large models, too. `Olsson et al. (2022)
# <https://arxiv.org/abs/2209.11895>`_ saw *induction heads*, which copy what followed last time, appear within a short
# stretch of training, and the loss bends there. Here the looking comes as fast, and the loss shows no bend.
#
# Is it sudden?
# -------------
#
# The share of right answers rises slowly. Now be strict: a model passes only if it answers five questions in a row correctly.
#
# **Predict first.** What does the curve of the strict measure look like?
#
# * Like that of the right answers, only lower.
# * Zero until step 400 or so, and then it rises.

p_right = [share(probs[n][N, right]) for n in steps]
five = [x**5 for x in the_room]  # five independent questions

fig, (ax,) = figure(4.8, 3.0)
ax.semilogx(steps, p_right, "s--", label="probability of the right room")
ax.semilogx(steps, the_room, "o-", label="right answers")
ax.semilogx(steps, five, "^:", label="five right in a row")
finish(ax, "One model, three measures")
plt.show()
print("probability", *(f"{x:5.2f}" for x in p_right))
print("five right ", *(f"{x:5.2f}" for x in five))

assert the_room[thousand] > 0.6 * the_room[last]
assert five[thousand] < 0.45 * five[last] and five[middle] < 0.03
assert max(abs(a - b) for a, b in zip(the_room, p_right)) < 0.15

# %%
# Zero until step 400, and then it rises, as if something had begun there. Nothing has: probability and right answers had
# been growing all the time. Five in a row is the fifth power of a share, and that of one third is 0.004. `Schaeffer et al. (2023)
# <https://arxiv.org/abs/2304.15004>`_ argue that many "emergent abilities" of large models are of this kind. Before you call
# something sudden, plot a smooth measure beside it.
#
# The looking passes that test: weight is a smooth measure, and it jumps. `Nanda et al. (2023)
# <https://arxiv.org/abs/2301.05217>`_ call a number that moves while the answers are still a guess a *progress measure*.
#
# Does it use what it finds?
# --------------------------
#
# A patch can tell. A model reads the first story, but at its last token the attention of one block hands on what it
# fetched in the twin. Does it now say what it said in the twin?
#
# Only pairs count in which it says two different words, right or not: to ask for right ones would score its answers
# again.

from lm_from_scratch.inside.patching import put, run

own = test.idx[::2]
last_token = torch.arange(T).expand(len(own), T) == T - 1


def flips(n, block):
    place = Site("attention", block)
    edit = {place: put(states[n][place][1::2, None], last_token)}
    at = dict(positions=test.positions[::2], keep=slice(-1, None))
    logits = run(models[n], own, edit, **at)
    here, there = probs[n].argmax(-1).view(-1, 2).T  # without an exchange
    return share((logits[:, -1].argmax(-1) == there)[here != there])


flipped = {b: [flips(n, b) for n in steps[early:]] for b in (2, 3)}

# %%
# A *probe* reads the right room off the state after each block. It is fitted on one half of the pairs and tried on the
# other.

from lm_from_scratch.inside.probe import fit_probe

first_half = N.lt(len(stories) // 2)


def probed(n, place):
    x, y, found = states[n][place], test.rooms, []
    for fit in (first_half, ~first_half):
        probe = fit_probe(x[fit], y[fit], len(ROOMS), steps=30)
        found.append(probe.accuracy(x[~fit], y[~fit]))
    return sum(found) / 2


after = {b: [probed(n, places[b + 1]) for n in steps] for b in range(4)}

fig, axes = figure(4.8, 6.0, rows=2)
axes[0].semilogx(steps, the_room, "o-", label="right answers")
for block, style in {3: "s--", 2: "^:"}.items():
    name = f"flipped by the attention of block {block}"
    axes[0].semilogx(steps[early:], flipped[block], style, label=name)
for block, style in {3: "o-", 2: "s--", 1: "D-.", 0: "^:"}.items():
    axes[1].semilogx(steps, after[block], style, label=f"after block {block}")
finish(axes[0], "Answers that follow the twin")
finish(axes[1], "What a probe finds")
plt.show()
for block in (2, 3):
    print("flipped by block", block, *(f"{x:4.0%}" for x in flipped[block]))
print("probe after block 3", *(f"{x:4.0%}" for x in after[3]))

# from step 200: 1 is 400, 2 is 1,000
assert flipped[3][1] < 0.5 and flipped[3][2] < 0.6 and flipped[3][-1] > 0.65
assert flipped[2][-1] < 0.15 < flipped[2][2]
assert after[3][last] > after[3][middle] + 0.15
assert after[0][last] < after[0][early] - 0.05

# %%
# At step 400 fewer than half of the answers follow block 3, though heads look at rooms: to look is not to use. At the
# end it is four of five. Block 2 turns some answers at step 1,000, hardly any later: the work moves to block 3.
#
# The probe agrees. Only after block 3 does it find the room more and more often, in step with the answers. After block 0
# it finds the room less often at the end than at step 200: head 0.0 no longer gathers rooms there.
#
# All this is one run of one small model, whose earlier copies are stored with 4 and 8 bits a weight; another run may go
# another way. `Pythia
# <https://arxiv.org/abs/2304.01373>`_ is a family of larger models, each published with 154 checkpoints for such questions.
#
# You have now used every tool on one model. `The league <7_league.ipynb>`_ compares them.
#
# Exercises
# ---------
#
# 1. *Easy.* Which heads look at rooms at step 200, and which at step 6,000? A good answer lists both from ``on_rooms``, and
#    says in which blocks they are.
# 2. *Medium.* Head 2.2 brings a name as well. Draw its two curves with ``weight_on``. A good answer says whether it moves
#    to the holder at the same time as head 1.1.
# 3. *Hard.* Train again with another seed: ``python -m lm_from_scratch train --preset worlds --seed 1 --out build/worlds``.
#    Copy its checkpoints away as they come. A good answer says which of the curves moved, and by how much.
#
# Summary
# -------
#
# * Form is learned first, then any room of the story, then the right one. The loss has nearly
#   stopped falling when answers begin to be right.
# * Heads learn to look at rooms early and suddenly. To choose the right one, and to act on it, takes the rest of the training.
# * A strict measure can make slow progress look sudden. Plot a smooth one beside it.
