r"""
Does the model know where the key is?
=====================================

A story: Mia puts the key in the box, and Tom takes the box to the kitchen. From then on no sentence mentions the key,
yet you know where it is. What does a model that has read nothing but such stories say? Ask it:

.. live:: next
   :model: worlds
   :prompt: Mia is in the hall. Mia goes to the kitchen. Where is Mia?

Below are the lines of a story: the room of everyone, and of the key, after each sentence.
"""

# sphinx_gallery_needs = ["../1_gpt2/5_sampling", "../2_qwen2/4_qwen2"]
# sphinx_gallery_words = ["world model", "state tracking", "bAbI", "TinyStories", "interpretability", "hallucination", "consistency", "does a language model understand", "does it think", "what does a model know", "common sense", "just statistics", "stochastic parrot", "parrot", "reason", "can it reason", "mind of a model", "thoughts", "knowledge stored in the weights", "meaning", "comprehension", "understanding", "Othello"]
import matplotlib.pyplot as plt

from lm_from_scratch.instruments.plot import GREY, figure
from lm_from_scratch.text.story_grammar import cut, read
from lm_from_scratch.text.worlds import World

story = (
    "Mia is in the hall. Tom is in the hall. The box is in the hall. "
    "Mia has the key. Mia puts the key in the box. "
    "Tom takes the box to the kitchen. Mia runs to the garden."
)
world, rooms = World(), []
for sentence in cut(story):
    world.follow(read(sentence))
    rooms.append({what: world.chain(what)[-1] for what in world.place})
print(world.chain("key"))

fig, (ax,) = figure(4.8, 2.4)
names = ["garden", "hall", "kitchen"]
for i, what in enumerate(("Mia", "Tom", "key")):
    known = [(n, r[what]) for n, r in enumerate(rooms, 1) if what in r]
    steps, places = zip(*known)
    heights = [names.index(place) + 0.12 * (i - 1) for place in places]
    style = ("o-", "s--", "D:")[i]
    ax.plot(steps, heights, style, label=what, drawstyle="steps-mid")
ax.set_yticks(range(3), names)
ax.set(xlabel="sentence", title="Where everything is, after each sentence")
ax.legend(ncols=3, loc="upper left", fontsize=9)
ax.set_ylim(-0.4, 2.9)
plt.show()
assert world.chain("key") == ["box", "Tom", "kitchen"]

# %%
# The key is in the box, which Tom has, in the kitchen. It was a small program that said so: it follows a story sentence
# by sentence and knows the place of everything. Another program makes such stories up.
#
# Now ask a model. ``worlds``, which comes with the package, is a Qwen2 of about a million weights. It has read 60,000 of
# these stories, half in English and half in Chinese, and nothing else.
#
# We ask it three questions at the moment when Tom has reached the kitchen.

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.storyteller import answers

model, tokenizer = load_shipped("worlds")
model = model.float().requires_grad_(False)


def ask(text, questions):
    said = answers(model, tokenizer, [f"{text} {q}" for q in questions])
    for question, answer in zip(questions, said):
        print(question, answer)
    return said


questions = ["Where is the key?", "Who has the key?", "Where is Mia?"]
said = ask(story.removesuffix(" Mia runs to the garden."), questions)

assert said == [
    "The key is in the box, in the kitchen.",
    "Tom has the key.",
    "Mia is in the hall.",
]
assert 1.0e6 < sum(p.numel() for p in model.parameters()) < 1.2e6

# %%
# All three are right. It has carried the key into the kitchen, although no sentence says so, and it says that Tom has
# it, because he has the box.
#
# **Predict first.** Now the last sentence: Mia runs to the garden. It changes nothing about the key. What does the
# model say of it?
#
# * It is in the kitchen, as before.
# * It is in the garden, and Mia has it.
# * It is in the hall, where it was put into the box.

said = ask(story, questions)

assert said[0] == "The key is in the box, in the garden."
assert said[1] == "Mia has the key."

# %%
# It is in the garden, and Mia has it. One sentence about Mia, and the key is with her: the model looks back, and the last
# sentence weighs too much, whomever it is about.
#
# So the model has not worked out where things are. How often does that go wrong?
#
# Catch it
# --------
#
# Next the model tells stories of its own, drawing token after token. Nothing keeps it from writing that Tom takes a key
# that is not there. The program reads along and reports what cannot be:

from lm_from_scratch.instruments.storyteller import told

stories, report, whole = told(model, tokenizer, "english", 40, 1.0)
print(stories[0], "", *report.faults[:4], sep="\n")

# %%
# **Predict first.** Of all its sentences, how many are proper English of this little grammar? And of its events, how
# many could happen?
#
# * Nearly all, and nearly all.
# * Nearly all, and about six of ten.
# * About six of ten, and about six of ten.


print(f"sentences of the grammar {report.readable / report.sentences:.0%}")
print(f"events that can happen   {report.possible / report.events:.0%}")
print(f"answers that are right   {report.right / report.questions:.0%}")
print(f"stories without a fault  {whole / len(stories):.0%}")

assert report.readable / report.sentences > 0.985
assert 0.45 < report.possible / report.events < 0.8

# %%
# Nearly all, and about six of ten. Form is local: a look at the last few tokens is enough to go on. Sense is not, and a
# story that has slipped once goes on from the slip.
#
# Large models are fluent for the same reason, but no program can check their world.
#
# Ask it about new stories
# ------------------------
#
# A fairer test keeps the story sound. The program makes new plots and tells each in both languages. At every question
# about the place of a thing or a person the model answers, and we compare the room that it names. Here are the questions:

from statistics import mean

from lm_from_scratch.instruments.storyteller import new_plots
from lm_from_scratch.text.story_grammar import ROOMS, write

cases = []  # a plot up to a question, the right room, the rooms named, the links
for plot in new_plots(120):
    world = World()
    for n, sentence in enumerate(plot):
        world.follow(sentence)
        if sentence.kind in ("where", "where is"):
            chain = world.chain(sentence.words[0])
            named = {w for s in plot[:n] for w in s.words if w in ROOMS}
            cases.append((plot[: n + 1], chain[-1], named, len(chain)))


# %%
# **Predict first.** We sort the questions by the number of rooms that the story has named so far. What if there are
# three?
#
# * Always right: it looks up the right one.
# * Right in one of three: it names any room of the story.
# * Between the two.


def room_in(answer):  # None if it is no sentence of the grammar
    try:
        return next((w for w in read(answer).words if w in ROOMS), None)
    except ValueError:
        return None


found, chains = {}, {}
for language in ("english", "chinese"):
    texts = [write(plot, language) for plot, *_ in cases]
    said = [room_in(a) for a in answers(model, tokenizer, texts)]
    both = [*zip(said, cases)]
    for n in (1, 2, 3):  # four are rare
        right = (room == c[1] for room, c in both if len(c[2]) == n)
        found[language, n] = mean(right)
    for n in (1, 2, 3):  # "box, Tom, kitchen" has three links
        chains[language, n] = mean(
            room == c[1] for room, c in both if c[3] == n
        )
    assert mean(room in c[2] for room, c in both) > 0.97

fig, (ax,) = figure(4.8, 2.8)
for language, style in (("english", "o-"), ("chinese", "s--")):
    shares = [found[language, n] for n in range(1, 4)]
    ax.plot(range(1, 4), shares, style, label=language)
ax.plot((1, 2, 3), (1, 1 / 2, 1 / 3), ":", color=GREY, label="a guess")
ax.set(xlabel="rooms named so far", ylabel="right rooms", ylim=(0, 1.05))
ax.set_xticks(range(1, 4))
ax.set_title("Where is it?")
ax.legend(fontsize=9)
plt.show()
for language in ("english", "chinese"):
    assert found[language, 2] > 0.7 and 0.5 < found[language, 3] < 0.95
assert abs(found["english", 3] - found["chinese", 3]) < 0.15

# %%
# Between the two. The model nearly always names a room of the story, and picks the right one far more often than a guess
# would. With more rooms it gets worse: it knows which rooms there are, but not always which is right.
#
# English and Chinese are about equal, although no sentence says that they belong together.
#
# **Predict first.** Some answers need one look ("Mia is in the hall"), some need three: the key is in the box, Tom has
# the box, Tom is in the kitchen. How much worse is the model with three links than with one?
#
# * Half as good, or worse: every link can fail.
# * About as good.

for links in (1, 2, 3):
    line = (
        f"{name} {chains[name, links]:.0%}" for name in ("english", "chinese")
    )
    print(f"{links} links:", *line)

for language in ("english", "chinese"):
    assert chains[language, 3] > chains[language, 1] - 0.25

# %%
# About as good, and the answers show why. "The key is in the box, in the kitchen": the model writes the first link, and
# when it comes to the room, it can look up "box" in its own words.
#
# An answer that is said step by step needs only one look for each step. That is the idea of a *chain of thought*.
#
# Look inside
# -----------
#
# When the answer is right, where was it kept? Perhaps the model has a map, and brings it up to date after every sentence.
# Perhaps it looks the room up when it has to say it.
#
# Whoever knows the world can tell. `What does it know, and where? <../11_look_inside/1_probes.ipynb>`_ reads the room off the
# model's states, and finds no map at its full stops. `Change one thought <../11_look_inside/2_patching.ipynb>`_ gives the key to somebody
# else, inside the model alone.
#
# Exercises
# ---------
#
# 1. *Easy.* Ask with ``PlotConfig(people=6, rooms=6, events=16)`` of ``text/plots.py`` in ``new_plots``. Does the curve go on as 1/n does? A
#    good answer compares both at five and six rooms.
# 2. *Easy.* Write a story with one mistake in Chinese and let ``check`` of ``text/worlds.py`` find it.
# 3. *Hard.* Train for longer: ``python -m lm_from_scratch train --preset worlds --steps 18000 --out build/worlds``. When
#    does the model know who has the key?
#
# Summary
# -------
#
# * Fluency comes first: nearly all sentences are grammatical, and many of the events in them could not happen. A program
#   that knows the world can count that.
# * An answer that spells out its steps needs only one look for each.
# * Where the truth is known, whatever is claimed of a model can be scored: its stories, its answers, its states.
