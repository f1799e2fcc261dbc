r"""
A model that answers
====================

Our small model ``tasks`` was trained on lines such as ``sort:dbac=abcd``. It sorts letters if you ask in exactly this
form. Ask in words, as in a chat, and it babbles. On this page it takes a few seconds to learn to answer.
"""

# sphinx_gallery_needs = ["../1_gpt2/4_training", "../2_qwen2/4_qwen2"]
# sphinx_gallery_words = ["SFT", "instruction tuning", "supervised fine-tuning", "chat template", "ChatML", "apply_chat_template", "assistant mask", "completion only loss", "train on responses only", "prompt masking", "labels -100", "catastrophic forgetting"]

import copy
from random import Random

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings.after_pretraining import learned_parts
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.runs.config import TrainConfig, train
from lm_from_scratch.text.conversations import (
    Answered,
    conversation,
    targets_of,
)
from lm_from_scratch.text.examples import AnswerBatches
from lm_from_scratch.text.tasks import (
    DOCUMENTS,
    TASKS,
    held_out_questions,
    is_held_out,
    prompt,
    questions,
)
from lm_from_scratch.training.objective import NextTokenLoss

base, tokenizer = load_shipped("tasks")
END = tokenizer.encode("<|im_end|>", special=True)[0]


def answers(model, prompts, stop=(END, 0), new=10):  # 0 ends a document
    rows = complete(generate(model, prompts, new, GREEDY, stop))
    return [tokenizer.decode(row) for row in rows]


def talk(*said):  # user and assistant take turns
    roles = ["user", "assistant"] * len(said)
    return [{"role": r, "content": s} for r, s in zip(roles, said)]


asked = ["sort:qwerty=", "Please sort qwerty"]
prompts = [tokenizer.start(asked[0]), tokenizer.chat(talk(asked[1]))]
before = answers(base, prompts)
for question, said in zip(asked, before):
    print(f"{question:20} {said!r}")
assert before[0] == "eqrtwy<|endoftext|>" and "eqrtwy" not in before[1]

# %%
# A chat is one text
# ------------------
#
# The model still does nothing but continue a text. So a chat must become one text. A small program that is published
# with the tokenizer, the *chat template*, does this. Ours writes ChatML, the form of Qwen2: every message begins with
# ``<|im_start|>`` and a role, *user* or *assistant*, and ends with ``<|im_end|>``. Each of these two marks is a single
# token.

messages = talk("Please sort dbac", "abcd", "And the last letter", "d")
one = conversation(tokenizer, messages)
pieces = tokenizer.pieces(one.ids)
turns = [pieces[: i + 1].count("<|im_start|>") for i in range(len(pieces))]
parts = ["user" if turn % 2 else "assistant" for turn in turns]
learned_parts(pieces, parts, one.answer)

# %%
# Only what the assistant says is underlined. In training only that counts: the model reads the question, but never has
# to predict it. The assistant's ``<|im_end|>`` counts too. It is how the model will say that it has finished.
#
# Training on such examples is called *supervised fine-tuning*, or SFT. (*Fine-tuning* means that a trained model is
# trained further, for something more special.)
#
# What counts
# -----------
#
# As always, the target of a token is the next one. Where the next token is not part of an answer, we set the target to
# -100, which cross-entropy ignores. That is all that is new: the model, the loss and the optimizer are those of
# `pretraining <../1_gpt2/4_training.ipynb>`_, the long first training on plain text.


def targets(ids, counts):
    hidden = ~torch.tensor(counts[1:])  # of the target, not of the token
    return torch.tensor(ids[1:]).masked_fill(hidden, -100)


logits = base(torch.tensor([one.ids[:-1]]))[0]
loss = F.cross_entropy(logits, targets(one.ids, one.answer), ignore_index=-100)
print(f"loss of {sum(one.answer)} tokens: {loss:.2f}")

batch = targets_of([one])
assert batch.targets[0, :-1].equal(targets(one.ids, one.answer))
same = NextTokenLoss(base)(batch.idx, batch.targets, positions=batch.positions)
torch.testing.assert_close(same, loss)

# %%
# A guess at random among all tokens would do better. The base model has never seen the token that ends an answer, and
# is sure that it does not come.
#
# Two thousand questions
# ----------------------
#
# Published models learn from answers that people wrote. Ours come from a program, which can also check them. Some words
# are held out: no question in the training has them.

SAY = ["Sort {}", "In order: {}", "Please sort {}"]
THEN = {"And the first letter": 0, "And the last letter": -1}


def chat(rng, held_out=False):
    drawn = questions("sort", rng, range(3, 6))  # words of 3 to 5 letters
    word = next(w for w in drawn if is_held_out("sort", w) == held_out)
    answer, then = TASKS["sort"].answer(word), rng.choice([*THEN])
    return talk(rng.choice(SAY).format(word), answer, then, answer[THEN[then]])


def examples(seed, count=2200, messages=2):
    rng = Random(seed)
    chats = [chat(rng)[:messages] for _ in range(count)]
    return [conversation(tokenizer, one) for one in chats]


# %%
# Training takes 90 steps. An answer is right if every letter is right and the answer ends there.


def taught(examples, seed, steps=90, rows=24, model=base, lr=3e-3):
    model = copy.deepcopy(model)
    batches = AnswerBatches(examples, tokenizer, rows, 128, seed)
    config = TrainConfig(steps=steps, lr=lr, warmup=10, weight_decay=0.0)
    list(train(model, batches, config))  # every step
    return model.eval()


unseen = [chat(Random(n), held_out=True) for n in range(50)]


def right(model, turn=1):  # the share of right answers in this turn
    wanted = [c[2 * turn - 1]["content"] + "<|im_end|>" for c in unseen]
    said = answers(model, [tokenizer.chat(c[: 2 * turn - 1]) for c in unseen])
    return sum(a == w for a, w in zip(said, wanted)) / len(unseen)


made = [examples(seed) for seed in range(3)]
models = [taught(made[seed], seed) for seed in range(3)]
shares = [right(model) for model in models]
print(f"before: {right(base):.0%}, after:", *(f"{s:.0%}" for s in shares))
assert right(base) == 0 and min(shares) > 0.6
assert DOCUMENTS["sort"] == 30_000 and 90 * 24 < 2_200

# %%
# Three models from three seeds answer most of the 50 held-out questions. Each has seen fewer than 2,200 questions,
# while the base model learned to sort from 30,000 lines. So this is not where it learned to sort. It learned where the
# word is now, and where the answer goes.
#
# **Predict first.** What does the first of the three models answer to *What is 47+38*?
#
# * 85, since it could add before
# * that it does not know
# * something sorted

odd = ["What is 47+38", "And the first letter"]
prompts = [tokenizer.chat(talk(one)) for one in odd]
for asked, said in zip(odd, answers(models[0], prompts)):
    print(f"{asked:22} {said!r}")
    assert said != "85<|im_end|>"

# %%
# In its examples a question in a chat always meant sorting. So it sorts letters of your sentence. None of them says "I
# cannot do that". What a model should do with other questions must be in the examples, too.
#
# If the mask is wrong
# --------------------
#
# Which tokens count is a list of booleans, the *mask*. With a wrong mask the model still trains, and the loss still
# falls. Here are four masks on the same examples, for a shorter run: 50 steps of 16 rows.


MASKS = {
    "right": lambda m: m,
    "all tokens": lambda m: [True] * len(m),
    "one to the left": lambda m: [*m[1:], False],
    "one to the right": lambda m: [False, *m[:-1]],
}


def habits(model):  # shares that are correct, that end, that open a turn
    prompts = [tokenizer.chat(c[:1]) for c in unseen]
    said = answers(model, prompts, stop=(0,), new=28)
    correct = [a.startswith(c[1]["content"]) for a, c in zip(said, unseen)]
    ends = ["<|im_end|>" in a for a in said]
    opens = ["<|im_start|>" in a for a in said]
    return said[0], [sum(column) / 50 for column in (correct, ends, opens)]


# %%
# Each mask gets three runs. This time the program does not stop a model at ``<|im_end|>``, so that we see how it goes
# on. We count how often an answer begins with the right letters, how often it ends, and how often the model then opens
# a new turn.
#
# **Predict first.** One mask is moved to the left by one place, so that each ``True`` marks the token before the one
# that it should mark. What will that model do?
#
# * answer as well as the others
# * answer wrongly
# * never stop

shown, found = {}, {name: [] for name in MASKS}
for name, change in MASKS.items():
    for seed in range(3):
        batch = [Answered(e.ids, change(e.answer)) for e in examples(seed, 900)]
        model = taught(batch, seed, steps=50, rows=16)
        shown[name], shares_of = habits(model)
        found[name].append(shares_of)


def three(shares):
    return " ".join(f"{share:4.0%}" for share in shares)


table = {name: [*zip(*rows)] for name, rows in found.items()}
print(f"{'':18}{'correct':17}{'ends':17}opens a turn")
for name, columns in table.items():
    print(f"{name:18}", "   ".join(map(three, columns)), sep="")
for name, said in shown.items():
    print(f"{name:18}{said!r}")
assert max(table["one to the left"][1] + table["one to the right"][1]) == 0
assert min(table["right"][1]) > 0.8 and max(table["right"][2]) < 0.1
assert sum(table["right"][0]) > sum(table["all tokens"][0]) + 0.1
assert sum(table["all tokens"][2]) > 0.6

# %%
# * **Right.** So short a run teaches it to end, and only a part of the sorting. What follows the end is noise, which
#   nobody will see: the program stops there.
# * **All tokens.** The model spends its steps on guessing words that the user will choose, so it answers worse. Then it
#   writes the next turn itself.
# * **One to the left.** The last target of each answer, ``<|im_end|>``, is lost. The model never learns to stop, and
#   writes until it has no more room. It begins well even more often, for it never has to decide where to end.
# * **One to the right.** The first letter is lost, and the line end after the turn counts. So the model has never been
#   taught how an answer begins, and writes line ends.
#
# None of them raises an error. So look at a batch before you train: print the tokens that count, as in the picture
# above.
#
# Several turns
# -------------
#
# *And the last letter* makes sense only if you have read what was said before. Our three models have seen chats of one
# turn only, so they sort this sentence, too. We now train them on chats with two turns, in which both answers count.

second = [right(model, turn=2) for model in models]
longer = [
    taught(examples(10 + n, 1400, 4), n, 80, 16, models[n], lr=2.5e-3)
    for n in range(3)
]
then = [right(model, turn=2) for model in longer]
print(f"second turn before: {three(second)}, after: {three(then)}")
print(
    f"first turn before:  {three(shares)}, after: {three(map(right, longer))}"
)
assert max(second) < 0.1 and min(then) > 0.15

# %%
# The second answer is one letter of the first, so the model reads what it said itself. In use, a program keeps the
# messages, and for each turn it makes one text of all of them again. The model remembers nothing else.
#
# What is forgotten
# -----------------
#
# **Predict first.** In the form of its first training, such as ``add:47+38=``, the base model could do six tasks. What
# is left of them after the 90 steps on chats?
#
# * all of them: nothing in the chats contradicts them
# * all but sorting
# * next to nothing


def known(model, name):  # in the plain form; a turn may end it, too
    asked = held_out_questions(name, 20)
    prompts = [tokenizer.start(prompt(name, q)) for q in asked]
    said = answers(model, prompts, new=16)
    said = [
        s.removesuffix("<|endoftext|>").removesuffix("<|im_end|>") for s in said
    ]
    return sum(map(TASKS[name].is_right, asked, said)) / len(asked)


first = [known(base, name) for name in TASKS]
later = [[known(model, name) for name in TASKS] for model in models]

_, (ax,) = figure(4.6, 2.8)
ax.bar(range(6), first, 0.3, color=COLOURS[0], label="before")
for i, (row, hatch) in enumerate(zip(later, ("//", "..", "xx"))):
    places = [x + 0.25 + 0.15 * i for x in range(6)]
    ax.bar(places, row, 0.13, color=COLOURS[1], hatch=hatch, label=f"seed {i}")
ax.set(title="Right answers in the plain form", ylim=(0, 1.25))
ax.set_xticks(range(6), [*TASKS])
ax.legend(frameon=False, ncols=4, loc="upper center", fontsize=8)
plt.show()
assert min(first[:3]) > 0.8 and max(map(max, later)) < 0.6
assert sum(map(sum, later)) < 0.15 * 3 * sum(first)

# %%
# Next to nothing, except for a part of the maxima. This is *catastrophic forgetting*: all weights took large steps for
# a single purpose, and nothing in the loss asked to keep the rest. You can take smaller steps or fewer of them, or
# freeze the old weights (`LoRA <../8_quantized_weights/6_lora.ipynb>`_). Above all, mix in examples of what the model
# should keep. This is why published models are taught many tasks in one run.
#
# To do the same with chats of your own, use
# ``python -m lm_from_scratch train --sft chats.jsonl --from MODEL --out RUN``, and talk to the result with
# ``generate --chat``.
#
# Exercises
# ---------
#
# 1. *Easy.* Print the targets of the chat in the picture as text, with a dot for each -100. How many count, and which
#    token has the first of them as its target?
# 2. *Medium.* Mix plain lines into the training: every fourth example is ``sort:dbac=abcd`` or a sum, made by
#    ``answered`` from the same file as ``conversation``. A right answer shows all six tasks before and after, over
#    three seeds.
# 3. *Medium.* Train at a third of the learning rate, with three times as many steps. A right answer has the share of
#    right answers in chats and in the plain form for both, and says whether less is forgotten.
# 4. *Medium.* Train on 100, 300, 1,000 and 2,000 different examples, with the same number of steps each. From which
#    number on do more examples no longer help?
#
# Summary
# -------
#
# * A chat is one text, written by a template. The model continues it, and its end token says that it has finished.
# * Only the answers count, each with its end token; all other targets are -100. A wrong mask trains without an error,
#   so print it.
# * Fine-tuning shows the model what is wanted. It brings little new ability, and the model forgets what is not asked
#   for.
