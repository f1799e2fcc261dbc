r"""
What would it say if it stopped here?
=====================================

"Where is Mia? Mia is in the": the model ``worlds`` has four blocks to find the room. A *lens* asks what it would say after
fewer of them. It turns a state in the middle of the model into words.

Each row below shows the likeliest next words, read off the states before a block. The last row is what the model really
says. Here you find out which of these words to believe.
"""

# sphinx_gallery_needs = ["3_lookup_heads"]
# sphinx_gallery_words = ["logit lens", "tuned lens", "Jacobian lens", "early exit", "intermediate predictions", "what does each layer predict", "unembedding", "latent predictions", "layer by layer", "mechanistic interpretability", "calibration", "confidence of a lens", "read the thoughts of a model", "linear relational embedding", "translator", "decode hidden states", "when does a model know the answer"]
import matplotlib.pyplot as plt
import torch

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.inside.lens import jacobian_lens, logit_lens, tuned_lens
from lm_from_scratch.inside.probe import fit_probe
from lm_from_scratch.inside.sites import activations, stream_sites
from lm_from_scratch.instruments import plot
from lm_from_scratch.instruments.storyteller import new_plots
from lm_from_scratch.text.asked import batch, two_questions
from lm_from_scratch.text.story_grammar import write

model, tokenizer = load_shipped("worlds")
model = model.float().requires_grad_(False)
logit, places = logit_lens(model), range(5)


def states(idx, **positions):  # logits, and the stream at every place
    logits, kept = activations(model, idx, stream_sites(model), **positions)
    return logits, torch.stack(list(kept.values()))  # (5, B, T, C)


story = "Mia is in the hall. Tom is in the attic. Mia goes to the garden."
ids = tokenizer.start(f"{story} Where is Mia? Mia is in the")
logits, h = states(torch.tensor([ids]))
said = torch.stack([logit(l, h[l, 0, -8:]).softmax(-1) for l in places])
likely, words = said.max(-1)  # (5, 8)

fig, (ax,) = plot.figure(4.8, 2.8)
ax.imshow(likely.numpy(), cmap=plot.blues(), vmin=0, vmax=1.5, aspect="auto")
for l, row in enumerate(words.tolist()):
    for t, word in enumerate(tokenizer.pieces(row)):
        ax.text(
            t,
            l,
            word.strip() if word.isascii() else "*",
            ha="center",
            va="center",
            fontsize=8,
        )
ax.set_xticks(range(8), tokenizer.pieces(ids[-8:]), fontsize=8)
ax.set_yticks(places, ["block 0", *"123", "end"], fontsize=8)
ax.set(title="The logit lens", xlabel="after this token", ylabel="before")
ax.grid(False)
plt.show()
assert words[2, -1] == words[4, -1] == tokenizer.encode(" garden")[0]

# %%
# A darker cell is likelier, and a star is a Chinese word or a part of one. In the last column "garden" appears before
# block 2 already. Did the model know the room by then, or is that the lens? Here the right room of every story is
# known, so a lens can be scored.
#
# Three lenses
# ------------
#
# Every block only *adds* to a token's state, the residual stream. So the state has the same shape everywhere, and the
# model's last norm and its *head*, the layer that scores the next word, can be given an earlier one. That is the *logit
# lens* (those scores are the logits). Nothing in it is fitted.
#
# But a state in the middle was not made for the head. The *tuned lens* first applies a matrix and a bias, an affine map.
# There is one for each place, fitted until the lens's words are most like those that the model says in the end.
#
# The *Jacobian lens* applies a matrix that is not fitted. It is measured: how does a small change of the state change what
# the model is about to say, at this token and all later ones, on average? (Such a matrix of effects is called a Jacobian.)

texts = [tokenizer.start(write(story)) for story in new_plots(90)]
rows = torch.tensor([text[:64] for text in texts if len(text) >= 64])
reading, others = rows[:40], rows[40:56]
lenses = {
    "logit": logit,
    "tuned": tuned_lens(model, reading, steps=60),
    "Jacobian": jacobian_lens(model, reading[:3]),
}
assert len(others) == 16

# %%
# Do they sound like the model?
# -----------------------------
#
# The usual score of a lens compares its probabilities with those of the model's end, on new texts. The numbers below are
# Kullback-Leibler divergences: 0 is no difference, and the larger, the farther apart. The figure counts how often both have
# the same likeliest word.
#
# **Predict first.** The tuned lens is fitted for this score. Before block 3, one block before the end, how often is its
# likeliest word that of the model?
#
# * in about half of the places
# * in about four of five
# * in nearly all

logits, h = states(others)
end = logits.log_softmax(-1)
far, agrees = {}, {}
for name, lens in lenses.items():
    said = [lens(l, h[l]).log_softmax(-1) for l in places]
    far[name] = [(end.exp() * (end - s)).sum(-1).mean().item() for s in said]
    same = [(s.argmax(-1) == end.argmax(-1)).float().mean() for s in said]
    agrees[name] = [share.item() for share in same]
    print(f"{name:9}", *(f"{d:6.2f}" for d in far[name]))

fig, (ax,) = plot.figure(4.8, 2.8)
for name, style in zip(far, ("o-", "s--", "D:")):
    ax.plot(places, agrees[name], style, label=name)
ax.set_xticks(places, [*"0123", "end"])
ax.set(xlabel="before block", ylabel="same word as the end", ylim=(0, 1.05))
ax.set_title("The likeliest word is that of the end")
ax.legend(fontsize=9)
plt.show()
for l in range(4):
    assert far["tuned"][l] < 0.6 * min(far["logit"][l], far["Jacobian"][l])
    assert agrees["tuned"][l] > max(agrees["logit"][l], agrees["Jacobian"][l])
assert 0.75 < agrees["tuned"][3] < 0.92

# %%
# In about four of five. Everywhere the tuned lens is by far the nearest to the end, as it should be: it was fitted to do just
# that.
#
# Do they know the room?
# ----------------------
#
# Now the score that needs the truth. Each story is asked about two people who are in different rooms, as in
# `heads that look things up <3_lookup_heads.ipynb>`_. For comparison there is a probe, fitted to the right rooms of other
# stories.
#
# **Predict first.** The model names the right room in about 78 % of the stories. In how many does the tuned lens name it
# before block 3?
#
# * in about 80 %, like the model
# * in about 40 %, like a guess among the rooms of the story
# * in about 12 %, like a guess among all eight rooms


def last_states(n, seed):
    pairs = two_questions(n, seed=seed)
    q = batch([story for pair in pairs for story in pair], tokenizer)
    return q, states(q.idx, positions=q.positions)[1][:, :, -1]  # (5, B, C)


q, h = last_states(60, seed=1)
other, other_h = last_states(100, seed=101)
found = {
    name: torch.stack([q.said(lens(l, h[l])) for l in places])
    for name, lens in lenses.items()
}
probes = [fit_probe(x, other.rooms, 8, decay=1e-2) for x in other_h]
found["probe"] = torch.stack([probes[l](h[l]).argmax(-1) for l in places])
right = {name: (said == q.rooms).float() for name, said in found.items()}
both = {name: r.view(5, -1, 2).amin(-1).mean(1) for name, r in right.items()}
for name in right:
    print(f"{name:9}", *(f"{x:4.0%}" for x in right[name].mean(1)), end="   ")
    print("both:", *(f"{x:4.0%}" for x in both[name]))

named = torch.stack([(q.idx == word).any(1) for word in q.words], 1)
guess = (1 / named.sum(1)).mean().item()
fig, (ax,) = plot.figure(4.8, 2.8)
for name, style in zip(right, ("o-", "s--", "D:", "^-")):
    ax.plot(places, right[name].mean(1), style, label=name)
ax.axhline(guess, color=plot.GREY, linewidth=1)
ax.set_xticks(places, [*"0123", "end"])
ax.set(xlabel="before block", ylabel="right rooms", ylim=(0, 1))
ax.set_title("The right room; grey: a guess in the story")
ax.legend(fontsize=9)
plt.show()
for name in right:
    assert right[name][3].mean() < guess + 0.15
    assert right[name][4].mean() > right[name][3].mean() + 0.2
    assert both[name][3] < 0.25 and both[name][4] > 0.4
assert right["logit"][2].mean() < guess + 0.08

# %%
# In about 40 %, like a guess among the rooms of the story. The probe does no better, although it was fitted to the right
# rooms: the room is not yet there in a form that a matrix could read. It is looked up in block 3, by the three heads
# of the last lesson.
#
# So the early "garden" of the first figure was luck: before block 2 the logit lens is right no more often than a guess.
# A lens that always names the same room of a story is never right for both questions. The column "both" counts the
# stories in which both answers are right: hardly any before block 3, half of them and more at the end.
#
# Many words of a story follow from its grammar, and there the tuned lens is good. That it agrees with the model in four of
# five words says nothing about the fifth.
#
# How sure are they?
# ------------------
#
# A lens gives probabilities. It *claims* a room if its likeliest word is one. Where nothing can be known, a lens
# should at least be unsure.
#
# **Predict first.** Before block 0 the state is the last token, "the", and nothing else. What does the tuned lens say
# there?
#
# * no room at all, because it cannot know one
# * the same room for all stories
# * one of the rooms of each story

claims = {}
for name, lens in lenses.items():
    for l in (0, 3):
        sure, word = lens(l, h[l]).softmax(-1).max(-1)
        room = torch.isin(word, q.words)
        true = word == q.words[q.rooms]
        claims[name, l] = room, sure[room], true[room].float(), word[room]

for (name, l), (room, sure, true, _) in claims.items():
    print(f"{name:9} block {l}: a room in {room.float().mean():4.0%}", end="  ")
    print(f"sure {sure.mean():4.0%}  right {true.mean():4.0%}")
_, sure, _, word = claims["tuned", 0]
print(tokenizer.pieces(word.unique().tolist()))

assert len(word.unique()) == 1 and sure.mean() < 0.2
gap = {
    name: claims[name, 3][1].mean() - claims[name, 3][2].mean()
    for name in lenses
}
assert all(
    claims[name, 3][0].float().mean() > 0.9 for name in ("logit", "tuned")
)
assert gap["logit"] > 0.08 and gap["tuned"] < gap["logit"] - 0.06
assert abs(gap["tuned"]) < 0.15
assert max(claims[name, 3][2].mean() for name in lenses) < 0.55

# %%
# The same room for all stories: the state is the same in all of them. You might have seen the model "think of the
# bathroom" before it had read the story. But the lens is only 10 % sure: it says what usually follows "the". ("nan" means
# that a lens claimed no room.)
#
# Before block 3 the logit lens and the tuned lens claim a room in nearly every story, and more than half of these
# claims are false. The tuned lens is as sure as it is often right, or nearly: it is *calibrated*. The logit lens is
# surer than that: it gives the head a state that the head was not made for, and nothing keeps its probabilities honest.
#
# So a word in a lens is not yet a thought of the model. Read its probability, and ask what can be known at that place.
#
# What others do
# --------------
#
# The logit lens comes from `a blog post of 2020
# <https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru/interpreting-gpt-the-logit-lens>`_ on GPT-2. With TransformerLens,
# which the ARENA course uses, it is short, too. Belrose et al. (2023, `the tuned lens
# <https://arxiv.org/abs/2303.08112>`_) publish fitted lenses for well-known models. Hernandez et al. (2023, `on mean Jacobians
# <https://arxiv.org/abs/2308.09124>`_) use the mean Jacobian for one relation at a time, from a name to its answer.
#
# Belrose et al. score a lens by its distance from the model's end, and by whether what moves the lens moves the model, too.
# Whether the lens is *right* can be scored only where the answer is known: here, in every story.
#
# A lens translates a state into words that the model could say. A `dictionary of features <5_dictionary.ipynb>`_ takes the
# state apart instead, without asking for words.
#
# Exercises
# ---------
#
# 1. *Easy.* Fit the tuned lens for 10 steps and for 200. A good answer says which scores of this page improve, and which
#    do not.
# 2. *Easy.* Take the stories of ``asked(100)``, about the key, in place of ``two_questions``. A good answer says whether
#    the probe still does no better than the lenses before block 3.
# 3. *Hard.* Silence the three lookup heads with ``silence`` and ``edited``. A good answer shows what the last row of the first
#    figure becomes, and whether the lens before block 3 notices.
#
# Summary
# -------
#
# * A lens reads words off a state: directly, through a fitted map, or through the mean Jacobian.
# * A lens that agrees with the model nearly everywhere can still be wrong at the one word that matters.
# * Judge what a lens says by what can be known at that place, and by how sure it is. Before the lookup every room is a
#   guess.
