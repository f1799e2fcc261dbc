r"""
A model that answers
====================

Our small model ``tasks`` was trained on lines such as ``sort:dbac=abcd``. It sorts letters if you ask in exactly this
form. Ask in words, as in a chat, and it babbles:
"""

# sphinx_gallery_needs = ["../1_gpt2/4_training", "../2_qwen2/4_qwen2"]
# sphinx_gallery_words = ["SFT", "instruction tuning", "supervised fine-tuning", "chat template", "ChatML", "apply_chat_template", "assistant mask", "completion only loss", "train on responses only", "prompt masking", "labels -100", "catastrophic forgetting", "pretraining vs fine-tuning", "base model vs instruct model", "base vs chat model", "how does a model learn to answer", "make a chatbot", "forgets after fine-tuning", "ask a question", "fine-tune on question and answer pairs", "chat with the model", "base model does not answer", "how to chat with it", "system prompt", "roles", "user and assistant", "from GPT to ChatGPT", "how was ChatGPT made", "ChatGPT training", "instruct model", "chat model", "follow instructions", "instruction following", "assistant", "question answering", "dialogue", "conversation", "im_start", "Alpaca", "reply", "make a model obey", "one task", "examples of good answers", "good examples", "train on examples"]

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
# On this page it takes a few seconds to learn to answer.
#
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
# A chat can have several turns. *And the last letter* makes sense only if you have read what was said before, so the
# program that you chat with keeps all messages, and makes one text of them again for each turn. The model remembers
# nothing else.
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
# A few hundred questions
# -----------------------
#
# Published models learn from answers that people wrote. Ours come from a program, which can also check them. Some words
# are held out: no question in the training has them.


def chat(rng, held_out=False):
    drawn = questions("sort", rng, [3])  # words of three letters
    word = next(w for w in drawn if is_held_out("sort", w) == held_out)
    return talk(f"Please sort {word}", TASKS["sort"].answer(word))


def examples(seed, count):
    rng = Random(seed)
    return [conversation(tokenizer, chat(rng)) for _ in range(count)]


# %%
# Training takes 110 steps of 8 questions. An answer is right if every letter is right and the answer ends there.


def tuned(examples, seed, steps=110):
    model = copy.deepcopy(base)
    batches = AnswerBatches(examples, tokenizer, 8, 128, seed)
    config = TrainConfig(steps=steps, lr=3e-3, warmup=5, weight_decay=0.0)
    list(train(model, batches, config))  # every step
    return model.eval()


unseen = [chat(Random(n), held_out=True) for n in range(50)]
first = [tokenizer.chat(one[:1]) for one in unseen]  # up to the answer


def right(model):  # the share of right answers
    wanted = [one[1]["content"] + "<|im_end|>" for one in unseen]
    said = answers(model, first)
    return sum(a == w for a, w in zip(said, wanted)) / len(unseen)


models = [tuned(examples(seed, 110 * 8), seed) for seed in range(2)]
shares = [right(model) for model in models]
print(f"before: {right(base):.0%}, after:", *(f"{s:.0%}" for s in shares))
assert right(base) == 0 and min(shares) > 0.5
assert DOCUMENTS["sort"] == 30_000

# %%
# Two models from two seeds answer most of the 50 held-out questions. Each has seen 880 questions, while the base
# model learned to sort from 30,000 lines. So this is not where it learned to sort. It learned where the word is now,
# and where the answer goes.
#
# **Predict first.** What does the first of the two models answer to *What is 47+38*?
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
# Something sorted. In its examples a question in a chat always meant sorting, so it tries to sort letters of your
# sentence.
#
# No example says "I cannot do that". What a model should do with other questions must be in its examples, too.
#
# If the mask is wrong
# --------------------
#
# Which tokens count is a list of booleans, the *mask*. Here is what counts with four masks, the right one first. They
# are made of the same chat.


MASKS = {
    "right": lambda mask: mask,
    "all tokens": lambda mask: [True] * len(mask),
    "one to the right": lambda mask: [False, *mask[:-1]],
    "one to the left": lambda mask: [*mask[1:], False],
}
one = conversation(tokenizer, chat(Random(0)))
for name, change in MASKS.items():
    counted = [i for i, c in zip(one.ids, change(one.answer)) if c]
    print(f"{name:17}{tokenizer.decode(counted)!r}")

# %%
# With all tokens, the model spends its steps on guessing words that the user will choose, and learns to ask its own
# questions. With the mask one to the right, it never learns how an answer begins. None of them raises an error: the
# model trains, and the loss falls.
#
# **Predict first.** Two models are trained with the last mask, which is moved one place to the left. What will they
# do?
#
# * answer as well as the others
# * never begin to answer
# * never stop


def moved(seed, steps=25):
    left = [
        Answered(e.ids, MASKS["one to the left"](e.answer))
        for e in examples(seed, steps * 8)
    ]
    return tuned(left, seed, steps)


for seed in range(2):
    said = answers(moved(seed), first, stop=(0,), new=28)
    print(repr(said[0]), sum("<|im_end|>" in a for a in said), "ends of 50")
    assert not any("<|im_end|>" in a for a in said)

# %%
# Never stop. The last target of each answer, ``<|im_end|>``, is lost, so the models write until they have no more room.
#
# A short look would have shown the mistake. Before you train, print the tokens that count, as above.
#
# What is forgotten
# -----------------
#
# **Predict first.** In the form of its first training, such as ``add:47+38=``, the base model could do six tasks. What
# is left of them after the 110 steps on chats?
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


plain = [known(base, name) for name in TASKS]
later = [[known(model, name) for name in TASKS] for model in models]

_, (ax,) = figure(4.6, 2.8)
ax.bar(range(6), plain, 0.3, color=COLOURS[0], label="before")
for i, (row, hatch) in enumerate(zip(later, ("//", ".."))):
    places = [x + 0.3 + 0.2 * i for x in range(6)]
    ax.bar(places, row, 0.18, color=COLOURS[1], hatch=hatch, label=f"seed {i}")
ax.set(title="Right answers in the plain form", ylim=(0, 1.25))
ax.set_xticks(range(6), [*TASKS])
ax.legend(frameon=False, ncols=3, loc="upper center", fontsize=8)
plt.show()
assert min(plain[:3]) > 0.8
assert sum(map(sum, later)) < 0.3 * 2 * sum(plain)

# %%
# Next to nothing. This is *catastrophic forgetting*: all weights took large steps for a single purpose, and nothing in the
# loss asked to keep the rest.
#
# You can take smaller steps or fewer of them, or freeze the old weights (`LoRA <../8_quantized_weights/6_lora.ipynb>`_).
# Above all, mix in examples of what the model should keep. This is why published models are taught many tasks in one
# run.
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
#    ``answered`` from the same file as ``conversation``. A good answer shows all six tasks before and after, over
#    three seeds.
# 3. *Medium.* Let the chats have a second turn, *And the last letter*, and let both answers count. Why is the second
#    answer easier to learn? A good answer has the share of right answers in each turn, over three seeds.
# 4. *Medium.* Train at a third of the learning rate, with three times as many steps. A good answer has the share of
#    right answers in chats and in the plain form for both, and says whether less is forgotten.
# 5. *Medium.* Train on 30, 100, 300 and 880 different examples, with the same number of steps each. From which
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
