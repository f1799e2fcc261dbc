r"""
Instructions in depth
=====================

Which tokens of a chat should count, exactly, and how do you notice that the wrong ones do? This page deepens `a model
that answers <1_instructions.ipynb>`_.

The mask of transformers
------------------------

A template can itself mark what the assistant says, with ``{% generation %}``. Then ``transformers`` returns the mask
together with the tokens. Like most published templates, ours has no such marks. So ``conversation`` lets the template
write the chat twice for each answer: once up to the answer, once including it. What is new in the second text is the
answer.
"""

# sphinx_gallery_needs = ["1_instructions"]
# sphinx_gallery_words = ["return_assistant_tokens_mask", "DataCollatorForCompletionOnlyLM", "assistant_only_loss", "pad token equals eos token", "double BOS", "add_special_tokens", "packing", "never stops generating"]

import contextlib
import copy
import io
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast

import lm_from_scratch
from lm_from_scratch.__main__ import main
from lm_from_scratch.checkpoint.folders import shipped_folder
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.runs.config import TrainConfig, train
from lm_from_scratch.text.conversations import (
    answered,
    conversation,
    targets_of,
)
from lm_from_scratch.text.examples import AnswerBatches
from lm_from_scratch.text.tasks import (
    TASKS,
    held_out_questions,
    is_held_out,
    prompt,
    questions,
)
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.objective import NextTokenLoss

model, tokenizer = load_shipped("tasks")
folder = shipped_folder("tasks")
theirs = PreTrainedTokenizerFast.from_pretrained(folder)
marked = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)


def talk(*said):
    roles = ["user", "assistant"] * len(said)
    return [{"role": r, "content": s} for r, s in zip(roles, said)]


def random_chat(rng):
    letters = "abc Zé漢😀\n<|>_"
    said = [
        "".join(rng.choices(letters, k=rng.randrange(1, 9))) for _ in "1234"
    ]
    return talk(*said[: rng.choice([2, 4])])


rng = Random(0)
chats = [random_chat(rng) for _ in range(200)]
for messages in chats:
    ours = conversation(tokenizer, messages)
    encoded = theirs.apply_chat_template(
        messages,
        chat_template=marked,
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    assert ours.ids == encoded["input_ids"]
    assert ours.answer == [bool(m) for m in encoded["assistant_masks"]]
print(f"{len(chats)} chats: the same tokens, the same masks")

# %%
# The chats are made of letters, accents, Chinese characters and pieces of special tokens, and both ways agree in every
# token. The line end after ``<|im_end|>`` belongs to the template, and counts in neither.
#
# A token that is no token
# ------------------------
#
# A template writes nothing but text. Whether ``<|im_end|>`` becomes *one token* or ten characters is up to the
# tokenizer. Without the special token everything still seems to work, only with more tokens:

plain = Tokenizer.train([], 257)
plain.files = tokenizer.files
spelled = conversation(plain, talk("Sort dbac", "abcd"))
single = conversation(tokenizer, talk("Sort dbac", "abcd"))
print(f"{len(single.ids)} tokens, or {len(spelled.ids)} without special ones")
assert len(spelled.ids) == len(single.ids) + 9 + 11 + 9 + 11
assert sum(spelled.answer) == sum(single.answer) + 9

# %%
# But now a user who types ``<|im_end|>`` ends the turn. With a special token this cannot happen, as long as the words
# of users are encoded without special tokens. ``conversation`` and ``apply_chat_template`` encode the rendered chat as
# one text, so there ``<|im_end|>`` in a user's words still ends the turn: remove such names from what users write.
#
# A special token also needs a *trained row* in the embedding. Before instruction tuning, no text has these tokens.
# Their rows began at random, and training moved them for one reason only: to make the token less likely, as a wrong
# answer.

w = model.model.embed_tokens.weight.detach()
names = ["<|im_start|>", "<|im_end|>", "<|tool_call|>", "<|tool_result|>"]
never = [tokenizer.encode(name, special=True)[0] for name in names]
seen = [
    tokenizer.encode(c)[0] for c in "0123456789abcdefghijklmnopqrstuvwxyz:="
]
alike = F.cosine_similarity(w[never][:, None], w[never][None], dim=-1)
apart = F.cosine_similarity(w[seen][:, None], w[seen][None], dim=-1)
off = ~torch.eye(4, dtype=torch.bool)
others = ~torch.eye(len(seen), dtype=torch.bool)
print(f"cosine of two rows: never seen {alike[off].mean():.2f}", end=", ")
print(f"seen {apart[others].mean():.2f}")
assert alike[off].min() > 0.9 and apart[others].mean() < 0.3

# %%
# All rows that were never seen ended up pointing the same way: to the model they are nearly one token. So if you freeze
# the embedding in fine-tuning, as LoRA often does, ``<|im_start|>`` and ``<|im_end|>`` stay alike. In `nanochat
# <https://github.com/karpathy/nanochat/issues/459>`_ a reader noticed special tokens for a tool that the program waits
# for, while no text in the training data had them.
#
# Padded or packed
# ----------------
#
# Chats have different lengths. In a *padded* batch the short rows are filled up. In a *packed* one several chats share
# a row: each sees only itself, and its positions begin at 0. The loss is the same.

several = [conversation(tokenizer, messages) for messages in chats[:6]]
padded = targets_of(several)
alone = [targets_of([one]) for one in several]
idx, targets = (
    torch.cat([getattr(b, n) for b in alone], 1) for n in ("idx", "targets")
)
positions = torch.cat([b.positions for b in alone], 1)
documents = torch.cat(
    [torch.full_like(b.idx, i) for i, b in enumerate(alone)], 1
)
loss = NextTokenLoss(model)
with torch.no_grad():
    one = loss(padded.idx, padded.targets, positions=padded.positions)
    other = loss(idx, targets, positions=positions, documents=documents)
torch.testing.assert_close(one, other)
waste = 1 - idx.numel() / padded.idx.numel()
print(
    f"loss {one:.4f} and {other:.4f}; {waste:.0%} of the padded batch is filler"
)
assert 0.1 < waste < 0.7

# %%
# Both are means over *all* answer tokens of the batch. If you took the mean of each chat first, and then the mean of
# those, a chat with a short answer would count as much as one with a long answer. That is another objective.
#
# What is forgotten
# -----------------
#
# The lesson took large steps, and the model forgot nearly all it knew. Do plain lines of all six tasks among the chats
# help? Here are 40 steps on sorting in chats, without such lines and with them, for two seeds each.


def sorting(rng):
    drawn = questions("sort", rng, [3])
    word = next(w for w in drawn if not is_held_out("sort", w))
    return talk(f"Sort {word}", TASKS["sort"].answer(word))


def line(name, rng):
    drawn = questions(name, rng)
    question = next(q for q in drawn if not is_held_out(name, q))
    start, answer = prompt(name, question), TASKS[name].answer(question)
    return answered(tokenizer, start, answer)


def tuned(examples, seed, rows):
    learner = copy.deepcopy(model)
    batches = AnswerBatches(examples, tokenizer, rows, 128, seed)
    config = TrainConfig(steps=40, lr=3e-3, warmup=5, weight_decay=0.0)
    list(train(learner, batches, config))
    return learner.eval()


def said(learner, prompts):  # without the end token
    stop = (0, tokenizer.encode("<|im_end|>", special=True)[0])
    rows = complete(generate(learner, prompts, 16, GREEDY, stop))
    return [tokenizer.decode(row[:-1]) for row in rows]


def kept(learner):  # the share of right answers in plain lines
    asked = [(n, q) for n in TASKS for q in held_out_questions(n, 10)]
    given = said(learner, [tokenizer.start(prompt(*one)) for one in asked])
    right = [TASKS[n].is_right(q, g) for (n, q), g in zip(asked, given)]
    return sum(right) / len(asked)


measured = {"chats": [], "chats and lines": []}
for seed in range(2):
    rng = Random(seed)
    chats_only = [conversation(tokenizer, sorting(rng)) for _ in range(320)]
    lines = [line(name, rng) for name in TASKS for _ in range(40)]
    for name, examples in zip(measured, (chats_only, chats_only + lines)):
        rows = len(examples) // 40  # as many chats in each batch
        measured[name].append(kept(tuned(examples, seed, rows)))
print(f"right in plain lines before: {kept(model):.0%}")
for name, shares in measured.items():
    print(f"after {name:16}", *(f"{share:4.0%}" for share in shares))
assert all(a < b for a, b in zip(*measured.values(), strict=True))

# %%
# The mixture keeps a part of the old tasks on every seed. What a model should still be able to do must be among its
# examples.
#
# By the command
# --------------
#
# ``train --sft`` reads a file with a chat in each line, and holds some of them out.

with tempfile.TemporaryDirectory() as place:
    rows = [
        json.dumps(
            {"messages": talk(f"Sort {a}{b}c", "".join(sorted(f"{a}{b}c")))}
        )
        for a in "defghi"
        for b in "klmnop"
    ]
    data, out = Path(place) / "chats.jsonl", Path(place) / "run"
    data.write_text("\n".join(rows))
    command = ["train", "--sft", str(data), "--from", str(folder)]
    command += ["--out", str(out), "--steps", "3", "--batch-size", "8"]
    command += ["--warmup", "1", "--eval-every", "3", "--quiet"]
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(command)
    found = sorted(path.name for path in (out / "model").iterdir())
print(code, found)
assert code == 0 and "model.safetensors" in found

# %%
# Bug museum
# ----------
#
# With each of these mistakes the model trains, and the loss falls. You find them by printing the tokens that count, as
# text. For a correct chat:


def counted(one):
    batch = targets_of([one])
    kept = batch.targets[batch.targets != -100]
    return tokenizer.decode(kept.tolist())


right = conversation(tokenizer, talk("Sort dbac", "abcd"))
print(repr(counted(right)))
assert counted(right) == "abcd<|im_end|>"

# %%
# The first token of every answer is wrong
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The mask was made for the *tokens* but used for the *targets*, which are one place further on (M100). So the first
# token of an answer is never learned. It happened in `torchtitan <https://github.com/pytorch/torchtitan/pull/2755>`_,
# `verl <https://github.com/verl-project/verl/pull/3287>`_ and `NeMo
# <https://github.com/NVIDIA-NeMo/Speech/pull/6409>`_.

late = replace(right, answer=[False, *right.answer[:-1]])
print(repr(counted(late)))
assert counted(late) == "bcd<|im_end|>\n"

# %%
# The model does not stop
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# The padding token is the end token, and all padding is ignored. So every true end is ignored, too (M101). It is
# described in threads of `trl <https://github.com/huggingface/trl/pull/3091>`_ and of the `alignment handbook
# <https://github.com/huggingface/alignment-handbook/issues/127>`_.

PAD = END = tokenizer.encode("<|im_end|>", special=True)[0]
batch = targets_of([right])
ignored = batch.targets.masked_fill(batch.targets == PAD, -100)
kept = ignored[ignored != -100].tolist()
print(repr(tokenizer.decode(kept)))
assert tokenizer.decode(kept) == "abcd" and END not in kept

# %%
# The model asks its own questions
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# All tokens are targets, as in pretraining, the question included (M102). Most of the loss is then about words that the
# user will choose.

everything = replace(right, answer=[True] * len(right.ids))
share = sum(right.answer) / (len(right.ids) - 1)
print(repr(counted(everything)), f"{share:.0%} of it is the answer")
assert counted(everything).startswith("user\nSort dbac") and share < 0.2

# %%
# Two first tokens
# ~~~~~~~~~~~~~~~~
#
# The template has written the first token, and the tokenizer adds another one (M103). It happened with `DeepSeek-R1
# <https://github.com/deepseek-ai/DeepSeek-R1/issues/151>`_ and in `OpenRLHF
# <https://github.com/OpenRLHF/OpenRLHF/issues/393>`_. Training and use then differ by a token that no error names.

with_first = "{{ '<|endoftext|>' }}" + marked
text = theirs.apply_chat_template(
    talk("Sort dbac", "abcd"), chat_template=with_first, tokenize=False
)
twice = tokenizer.start(text, special=True)  # its own rule adds one
once = tokenizer.encode(text, special=True)
print(twice[:3], once[:3])
assert twice[:2] == [0, 0] and once[:2] != [0, 0] and twice[1:] == once

# %%
# A chat inside a chat
# ~~~~~~~~~~~~~~~~~~~~
#
# The texts of a data set have been through the template already, and the trainer applies it again, as if each text were
# a message (M104). To find it, count ``<|im_start|>``: there should be one for each message. Here 2 are right, one for
# the question and one that opens the answer.

inner = theirs.apply_chat_template(
    talk("Sort dbac"), chat_template=marked, tokenize=False
)
nested = tokenizer.chat(talk(inner))
start = tokenizer.encode("<|im_start|>", special=True)[0]
print(nested.count(start), tokenizer.chat(talk("Sort dbac")).count(start))
assert (
    nested.count(start) == 3 and tokenizer.chat(talk("dbac")).count(start) == 2
)

# %%
# Exercises
# ---------
#
# 1. *Easy.* Write a template that puts a system message first. Which tokens of it count?
# 2. *Medium.* Some templates drop the assistant's earlier thoughts when another turn follows. What does
#    ``conversation`` say to such a template, and why is it right to refuse? A good answer has a template of at most
#    five lines.
# 3. *Hard.* Write ``pack``, which fills rows of 128 tokens with whole chats. A good answer has the same loss as the
#    padded batch, and the share of filler for 1,000 chats of the lesson.
#
# Sources
# -------
#
# * `Training language models to follow instructions with human feedback <https://arxiv.org/abs/2203.02155>`_
# * `LIMA: less is more for alignment <https://arxiv.org/abs/2305.11206>`_
# * `Chat templates <https://huggingface.co/docs/transformers/chat_templating>`_ of ``transformers``

print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
