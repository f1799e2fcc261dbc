r"""
What does it know, and where?
=============================

The model ``worlds`` has read nothing but stories of a small world. Ask it for a room:

.. live:: next
   :model: worlds
   :prompt: Mia is in the hall. Tom is in the study. Mia has the key. Where is the key? Mia has the key, in the

It says "hall", though no sentence says that the key is in the hall. So the room must come up somewhere inside the model,
between the words and the answer. Where?

A *probe* looks for it: a small classifier that is fitted to name the room from the numbers inside the model. No tool is
simpler, and none fools you so easily. Here you learn what to compare its score with.

On real text nobody can say for sure what a model ought to know. Here a program follows each story, so every claim gets a
score.
"""

# sphinx_gallery_needs = ["../10_after_pretraining/6_worlds", "../1_gpt2/6_attention_maps"]
# sphinx_gallery_words = ["linear probe", "probing", "inner state", "internal representation", "what is inside the vectors", "read the mind", "probing classifier", "diagnostic classifier", "control task", "selectivity", "random baseline", "mechanistic interpretability", "latent knowledge", "eliciting latent knowledge", "does it know more than it says", "where is information stored", "hidden knowledge", "representation", "TransformerLens", "ARENA", "run_with_cache", "Alain and Bengio", "Hewitt and Liang"]
import torch

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.inside.probe import fit_probe
from lm_from_scratch.inside.sites import activations, stream_sites
from lm_from_scratch.text.asked import asked, batch
from lm_from_scratch.text.story_grammar import PEOPLE, ROOMS

model, tokenizer = load_shipped("worlds")
model = model.float().requires_grad_(False)

stories = asked(750, seed=1)
print(stories[0].text)
print(stories[0].chain)

# %%
# ``asked`` makes stories that stop one token before a room must be said. ``chain`` says where the key is, from inside
# out; its last word is the right answer.
#
# Let the model read all 750. At four tokens of each story we keep its *state* after each of its four blocks: the 128
# numbers that the block hands on. The tokens are the full stop that ends the story, the question mark, and the last two
# before the room.

MARKS = [tokenizer.encode(mark)[-1] for mark in (".", "?")]


def read(model):
    states, said = [], []
    for start in range(0, len(stories), 15):
        b = batch(stories[start : start + 15], tokenizer)
        sites = stream_sites(model)[1:]  # after each block
        places = dict(positions=b.positions, keep=slice(-1, None))
        logits, found = activations(model, b.idx, sites, **places)
        N, T = b.idx.shape
        step = torch.arange(T)
        at = [((b.idx == mark) * step).argmax(1) for mark in MARKS]
        at = torch.stack([*at, torch.full((N,), T - 2), step[-1:].expand(N)], 1)
        rows = torch.arange(N)[:, None]
        states.append(torch.stack([x[rows, at] for x in found.values()]))
        said.append(b.said(logits))
    return torch.cat(states, 1), torch.cat(said)


states, said = read(model)  # (L, N, 4, C), (N,)
names = list(ROOMS)
rooms = torch.tensor([names.index(story.room) for story in stories])
print(states.shape)

assert states.shape == (4, 750, 4, 128)

# %%
# How good is the model? And how good is a rule that knows nothing of keys and just says the room that was named last?

right = said == rooms
named = [
    [w for s in story.plot for w in s.words if w in ROOMS] for story in stories
]
last = torch.tensor([names.index(words[-1]) for words in named])
print(f"the model names the right room     {right.float().mean():.0%}")
print(
    f"the last room named is the right   {(last == rooms).float().mean():.0%}"
)

assert 0.75 < right.float().mean() < 0.95
assert 0.5 < (last == rooms).float().mean() < 0.72

# %%
# The model is right in more than four of five stories, and the rule in more than six of ten. So six of ten can be reached
# without knowing anything about the key.
#
# Fit a probe
# -----------
#
# A *linear probe* is one matrix and a bias. It gets a state of C numbers and gives each of the eight rooms a score. It is
# fitted on stories whose room is known, then tried on others.
#
# We cut the stories into thirds, fit on two of them, and let the probe name the room in the third. After three turns
# every story has been a new one once.


def probed(x, y, K=8):  # (N, C), (N,): the guesses for stories not fitted on
    third, guess = torch.arange(len(y)) % 3, torch.empty_like(y)
    for i in range(3):
        old, new = third != i, third == i
        probe = fit_probe(x[old], y[old], K, decay=0.1, steps=20)
        guess[new] = probe(x[new]).argmax(-1)
    return guess


def share(guess, y):
    return (guess == y).float().mean().item()


end = states[3, :, 3]  # after the last block, where the room is due
print(f"room found in new stories: {share(probed(end, rooms), rooms):.0%}")

# %%
# Could the probe have learned this by itself, from any 128 numbers? Take its task away: shuffle the rooms among the
# stories. Now each story has the room of another, of which its states say nothing.
#
# **Predict first.** A probe is fitted on 250 shuffled stories. How many of the rooms does it get right?
#
# * One in eight, on the stories that it was fitted on and on new ones.
# * About half of those it was fitted on, and one in eight of new ones.
# * About half of both.

torch.manual_seed(0)
shuffled = rooms[torch.randperm(len(rooms))]
probe = fit_probe(end[:250], shuffled[:250], 8, decay=0.1, steps=20)
print(f"fitted on: {probe.accuracy(end[:250], shuffled[:250]):.0%}")
print(f"new:       {probe.accuracy(end[250:], shuffled[250:]):.0%}")

assert probe.accuracy(end[:250], shuffled[:250]) > 0.35
assert probe.accuracy(end[250:], shuffled[250:]) < 0.22
assert share(probed(end, rooms), rooms) > 0.7

# %%
# About half of those it was fitted on: with 128 numbers for each of 250 stories it can learn many by heart. On new ones
# it guesses. So only a probe's score on new stories counts.
#
# Hewitt and Liang call such a test a `control task <https://arxiv.org/abs/1909.03368>`_. They draw a random answer for
# each *word*, so that new sentences can be scored too.
#
# Compared with what?
# -------------------
#
# Now probe all four tokens after all four blocks, and do the same with a model of the same shape whose weights are
# random: it was never trained.
#
# **Predict first.** One room in eight is a guess. How many rooms does the best probe of the *random* model find?
#
# * One in eight: it knows nothing.
# * Two in five or so.
# * Nearly as many as that of the trained model.

import matplotlib.pyplot as plt

from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.instruments import plot

torch.manual_seed(0)
untrained = build(model.config).requires_grad_(False)


def scores(states):
    L, _, P, _ = states.shape
    found = [
        share(probed(states[l, :, p], rooms), rooms)
        for l in range(L)
        for p in range(P)
    ]
    return torch.tensor(found).view(L, P)


random_states = read(untrained)[0]
trained, random = scores(states), scores(random_states)
fig, axes = plot.figure(4.8, 5.6, 2, 1)
for ax, found, title in zip(
    axes, (trained, random), ("worlds", "random weights")
):
    plot.number_map(ax, 100 * found, largest=100)
    ax.set(title=f"{title}: rooms found, in %", ylabel="after block")
    ax.set_xticks(
        range(4),
        [
            "end of\nstory",
            "question\nmark",
            "one token\nbefore",
            "room\nis due",
        ],
    )
    ax.set_yticks(range(4))
plt.show()

assert trained[3, 3] > random.max() + 0.2
assert trained[2, 3] > 0.42 and trained[3, 2] > 0.4
assert trained[3, 3] > (last == rooms).float().mean() + 0.08
assert trained.flatten()[:-1].max() < (last == rooms).float().mean()
assert 0.28 < random.max() < 0.6
assert trained[:, 0].max() < random[:, 0].min() - 0.1

# %%
# Two in five or so, at any token and after any block. A model with random weights mixes the words that it reads. Its
# states say which words were in the story, and a story names three rooms at most: choose one, and you are right in one of
# three, or better. *Random weights are the floor here, not one in eight.*
#
# Remember the other floor as well, the room named last. Only one cell of the upper map is above both: the last token, after
# the last block. There, and nowhere else on this map, the state surely holds the room of the *key*.
#
# No map at the full stop
# -----------------------
#
# The first column is the surprise. When the story ends, the trained model's state says *less* about the key's room than
# a random model's. Is something wrong with the probe there? Ask it for something else: who acted in the last sentence?

who = torch.tensor([list(PEOPLE).index(s.plot[-1].words[0]) for s in stories])
for name, x in (("worlds", states), ("random", random_states)):
    stop = x[0, :, 0]  # after block 0, at the last full stop
    actor = share(probed(stop, who, K=10), who)
    room = share(probed(stop, rooms), rooms)
    print(f"{name}   who acted {actor:.0%}   room of the key {room:.0%}")
    assert actor > 0.5
    assert name == "random" or (actor > 0.7 and room < 0.25)

# %%
# The probe works there, and it finds the actor. But the room is not in the state in a form that a matrix could read. You
# would keep track while you read. This model takes notes, the states of all its tokens, and attention brings them
# together when it is asked.
#
# That is no defect. At a full stop nobody needs the room of the key: the next word is a name, "The" or "Where".
#
# Does it know better than it says?
# ---------------------------------
#
# In about one story of six the model names a wrong room. Was the right one inside all the same, and got lost on the way
# out?
#
# **Predict first.** Take only the stories with wrong answers. What does the probe read off the state after block 2,
# one block before the end?
#
# * The truth in most of them.
# * The mistake in most of them.
# * The truth in a third of them, the mistake a little more often.

wrong = ~right
for block in (1, 2, 3):
    guess = probed(states[block, :, 3], rooms)[wrong]
    truth, mistake = share(guess, rooms[wrong]), share(guess, said[wrong])
    print(f"after block {block}: truth {truth:3.0%}   mistake {mistake:3.0%}")
    assert truth < 0.45 and (block == 1 or truth < mistake)
print(f"{wrong.sum()} stories")

assert mistake > truth + 0.2

# %%
# The truth in a third, the mistake a little more often. Naming any of three rooms gives a third. After the last block the
# mistake wins. (After block 1 the truth is a few stories ahead: too few to build on.)
#
# The probe was fitted on right rooms, so the truth had every chance to show up. At this token no linear probe finds that the
# model knows better.
#
# What others do
# --------------
#
# Probes were introduced by `Alain and Bengio <https://arxiv.org/abs/1610.01644>`_. With TransformerLens, ``model.run_with_cache(tokens)`` returns the
# same states in one line, for many published models, and any logistic regression is a probe. The course ARENA does this with a
# model of the board game Othello, where the board is known, as our rooms are.
#
# A probe says what *could* be read. Whether the model itself reads it, no probe can say. To find out, `change the state
# <2_patching.ipynb>`_ and see whether the answer changes: the next lesson.
#
# Exercises
# ---------
#
# 1. *Easy.* Take other stories (``asked(750, seed=2)``) and another untrained model. A good answer says which claims hold.
# 2. *Easy.* Probe for the room that was named *last*, in place of the right one. A good answer says where it is found better
#    than the right one.
# 3. *Hard.* Give the probe the counts of the story's words instead of a state (``torch.bincount`` of its tokens). A
#    good answer explains its score, beside that of the random weights.
#
# Summary
# -------
#
# * A linear probe says what one matrix can read off a state. Only its score on new examples counts, because it can learn
#   many of the old ones by heart.
# * Compare with random weights, not with chance: the words alone are worth a great deal.
# * This model has no map at its full stops. The room comes up in the last blocks, where it must be said.
