r"""
A tool that calculates
======================

Our small model ``tasks`` has learned to add numbers of up to three digits. How does it do with longer ones? Try it:

.. live:: next
   :model: tasks
   :prompt: add:47+38=
"""

# sphinx_gallery_needs = ["1_instructions", "../5_caching/1_why_cache"]
# sphinx_gallery_words = ["tool use", "function calling", "tool calling", "tool_calls", "Toolformer", "calculator", "agent loop", "code interpreter", "hallucinated results", "can a language model do arithmetic", "can a language model calculate", "bad at maths", "agent", "external tools", "addition of long numbers", "multiply", "multiplication", "large numbers", "counting", "wrong sums", "bad at arithmetic", "bad at counting", "run code", "model runs code", "call an API", "API calls", "Python interpreter", "agents", "tool tokens", "use a search engine"]

import copy
from random import Random

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings.after_pretraining import learned_parts
from lm_from_scratch.generation.generate import complete, generate, prefill
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.generation.tool_loop import generate_with_tool
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.runs.config import TrainConfig, train
from lm_from_scratch.text.conversations import Answered
from lm_from_scratch.text.examples import AnswerBatches
from lm_from_scratch.text.tasks import (
    TASKS,
    held_out_questions,
    is_held_out,
    prompt,
)

base, tokenizer = load_shipped("tasks")
add = TASKS["add"]
digits = range(1, 9)
tests = {n: held_out_questions("add", 20, [n]) for n in digits}


def write(model, prompts, stop, new=24):
    rows = complete(generate(model, prompts, new, GREEDY, stop))
    return [tokenizer.decode(row) for row in rows]


def right(said):  # the share for each number of digits
    texts = iter(said)
    return [
        sum(next(texts) == add.answer(q) + "<|endoftext|>" for q in asked)
        / len(asked)
        for asked in tests.values()
    ]


starts = [tokenizer.start(prompt("add", q)) for t in tests.values() for q in t]
alone = right(write(base, starts, [0]))

_, (ax,) = figure(4.6, 2.4)
ax.bar(digits, alone, color=COLOURS[0])
ax.set(title="Right sums of the model alone", xlabel="digits of a number")
ax.set_ylim(0, 1.05)
plt.show()
assert min(alone[:3]) > 0.8 and max(alone[3:]) < 0.1

# %%
# It gets to three digits, and no further. (There are few held-out sums of one digit.) It did not learn what a sum
# is, but how to write sums of this length. We could train it on longer ones, and then it would fail a little later. But
# the computer that it runs on can add! It is enough if the model knows *when to ask*.
#
# An exchange
# -----------
#
# The tokenizer has two special tokens that the model has never read. ``<|tool_call|>`` begins a call of the *tool*,
# here a calculator, and ``<|tool_result|>`` ends the call. There the program that runs the model stops it, reads the
# call, computes, and writes the result and a line end into the text. Then the model goes on.

CALL, RESULT = tokenizer.encode("<|tool_call|><|tool_result|>", special=True)


def exchange(question, result_counts=False):
    answer = add.answer(question)
    parts = [
        ("question", tokenizer.start(prompt("add", question))),
        ("model", [CALL, *tokenizer.encode(question), RESULT]),
        ("tool", tokenizer.encode(answer + "\n")),
        ("model", [*tokenizer.encode(answer), 0]),
    ]
    names = [name for name, ids in parts for _ in ids]
    counts = {"question": False, "model": True, "tool": result_counts}
    ids = [i for _, part in parts for i in part]
    return Answered(ids, [counts[name] for name in names]), names


one, names = exchange("2718+3141")
learned_parts(tokenizer.pieces(one.ids), names, one.answer)

# %%
# What is underlined counts in training, as in `the lesson on instructions <1_instructions.ipynb>`_. The result does not
# count: the tool writes it, not the model.
#
# Teach it to call
# ----------------
#
# A program writes a thousand such exchanges, with numbers of four or five digits. We train two models, from two seeds.


def drawn(seed, count=1100):
    rng = Random(seed)
    asked = (add.question(rng, rng.choice((4, 5))) for _ in range(count))
    return [q for q in asked if not is_held_out("add", q)]


def tuned(model, examples, seed, steps):
    model = copy.deepcopy(model)
    batches = AnswerBatches(examples, tokenizer, 8, 128, seed)
    config = TrainConfig(steps=steps, lr=3e-3, warmup=5, weight_decay=0.0)
    for _ in train(model, batches, config):
        pass
    return model.eval()


models = []
for seed in range(2):
    examples = [exchange(q)[0] for q in drawn(seed)]
    models.append(tuned(base, examples, seed, steps=120))

# %%
# The loop
# --------
#
# The tool is a function: the text of the call goes in, the text of the result comes out.


def calculator(text):
    a, b = text.split("+")
    return str(int(a) + int(b))


# %%
# The loop around the model is that of every generation: the likeliest token is added to the text, again and again. Only
# one case is new, where the token is ``<|tool_result|>``.


def loop(model, question, tool=calculator):
    ids = tokenizer.start(prompt("add", question))
    new, cache = ids, GrowingCache(3)  # for 3 blocks
    while len(ids) < 100:
        logits = prefill(model, torch.tensor([new]), cache)  # 1
        new = [logits[0].argmax().item()]
        if new == [RESULT] and CALL in ids:
            call = tokenizer.decode(ids[ids.index(CALL) + 1 :])  # 2
            new += tokenizer.encode(tool(call) + "\n")  # 3
        ids = ids + new
        if new == [0]:
            break
    return tokenizer.decode(ids)


said = loop(models[0], "2718+3141")
print(said)

start = tokenizer.start("add:2718+3141=")
steps = generate_with_tool(
    models[0], tokenizer, start, 60, calculator, GREEDY, [0]
)
assert tokenizer.decode([*start, *(token.id for token in steps)]) == said

# %%
# The first number after the call is the tool's, the second is the model's copy.
#
# 1. The model reads only new tokens. What it knows of the old ones is in the `cache <../5_caching/1_why_cache.ipynb>`_,
#    so a call does not make it read the text again.
# 2. The text between the two special tokens is the call. The calculator takes it apart itself and never gives it to
#    ``eval``, because a model may write anything.
# 3. The result joins the token that asked for it, and the model reads both next. ``encode`` makes plain characters of
#    it, so no tool can write a special token.
#
# In the package, ``generation/tool_loop.py`` does the same with sampling, a limit on calls, and errors that become
# text.
#
# **Predict first.** In training the calls had numbers of four or five digits. What about sums of numbers with four
# digits, with five, and with seven?
#
# * all of them come out right
# * four and five work, seven does not
# * none works, because the model cannot add


def with_tool(model):  # all at once: to the call, and after it
    calls = write(model, starts, [RESULT, 0])
    full = []
    for begun, call in zip(starts, calls):
        try:
            result = calculator(call.split("<|tool_call|>")[1][:-15])
        except (ValueError, IndexError):
            result = "error"
        said = tokenizer.encode(call, special=True)
        full.append(begun + said + tokenizer.encode(result + "\n"))
    return right(write(model, full, [0]))


after = [with_tool(model) for model in models]

_, (ax,) = figure(4.6, 2.8)
ax.plot(digits, alone, "o-", color=COLOURS[0], label="alone")
for seed, (shares, style) in enumerate(zip(after, ("s--", "^--"))):
    ax.plot(digits, shares, style, color=COLOURS[1], label=f"tool, seed {seed}")
ax.set(title="Right sums, alone and with a tool", xlabel="digits of a number")
ax.legend(frameon=False)
plt.show()
for shares in after:
    print(" ".join(f"{share:4.0%}" for share in shares))
assert min(min(shares[3:5]) for shares in after) > 0.5
assert max(max(shares[6:]) for shares in after) < 0.2
assert max(max(shares[:3]) for shares in after) < 0.3

# %%
# Four and five digits work, seven do not. A model must still *copy* the question into the call and the result into the
# answer. It has never seen a call with seven digits, and copies such numbers wrongly.
#
# The short sums may surprise you. The base model could add them, but now the models call the tool for these as well,
# and get the call wrong: no call in training had numbers of one, two or three digits.
#
# So the models get sums right that they cannot add, but only where they have practised the call. A tool is only as good
# as the call.
#
# If the result counts
# --------------------
#
# It is easy to forget to mask the result. So we train each model for another 25 steps in which the result counts. Then
# we let it write *without* the loop: nothing stops it at ``<|tool_result|>``.
#
# **Predict first.** What does it write after ``<|tool_result|>`` now?
#
# * nothing: it waits
# * the right sum, since it has now learned results
# * a number that looks like a result


def invented(model, questions):  # shares: a number is there, it is right
    starts = [tokenizer.start(prompt("add", q)) for q in questions]
    said = write(model, starts, [0], new=40)
    results = [s.partition("<|tool_result|>")[2].partition("\n") for s in said]
    numbers = [r[0] if r[0].isdigit() and r[1] else "" for r in results]
    rightly = [n == add.answer(q) for n, q in zip(numbers, questions)]
    return sum(map(bool, numbers)) / len(said), sum(rightly) / len(said)


for seed, model in enumerate(models):
    examples = [exchange(q, result_counts=True)[0] for q in drawn(9 + seed)]
    wrong = tuned(model, examples, seed, steps=25)
    masked, counted = invented(model, tests[5]), invented(wrong, tests[5])
    print(f"masked: {masked[0]:4.0%} numbers, {masked[1]:4.0%} right;", end=" ")
    print(f"counted: {counted[0]:4.0%} numbers, {counted[1]:4.0%} right")
    assert counted[0] > 0.4 and counted[1] < 0.2

# %%
# A number that looks like a result. Without the mask, a model was asked to know the result before the tool says it, which
# it cannot; what it can learn is to write something that looks like one. With the mask, the models write no number there.
#
# If a program ever fails to stop it there, the model takes its own invention for a result, and nobody sees that no tool
# was called.
#
# Tokens that were never trained
# ------------------------------
#
# The loop alone is not enough, either. The base model has both special tokens in its vocabulary, but not one text of
# its training has them. How likely does it find a call?

logits = base(torch.tensor([tokenizer.start("add:2718+3141=")]))[0, -1]
chance = logits.softmax(-1)[CALL].item()
print(f"a call after '=': {chance:.0e}")
chance_after = models[0](torch.tensor([start]))[0, -1].softmax(-1)[CALL]
print(f"after training:   {chance_after:.3f}")
assert chance < 1e-3 and chance_after > 0.9

# %%
# It will practically never call. In training these tokens were always a wrong next token, so their probability sank
# from step to step. In `nanochat <https://github.com/karpathy/nanochat/issues/459>`_ a reader noticed a program that
# waits for tool tokens, while no training text that the reader looked at had them.
#
# Exercises
# ---------
#
# 1. *Easy.* Give the loop a tool that always says ``7``. Does the model believe it? Ask for sums of two digits, which
#    the base model can add, and of five.
# 2. *Medium.* Teach two models to add numbers of one to six digits *without* a tool, in as many steps. A good answer
#    shows both kinds of model in one plot.
# 3. *Medium.* Let half of the examples with up to three digits have no call. A good answer says for each length how
#    often the model calls, and how often it is right.
# 4. *Hard.* Teach a second tool, which sorts letters: the call is then ``sort:`` or ``add:`` with the question. A good
#    answer has the share of right answers for both over three seeds, and one case in which the model confused the
#    tools.
#
# Summary
# -------
#
# * A tool call is text: the model writes it, and a program stops at a special token, computes, and writes the result
#   into the text.
# * The model reads the result, and is not trained on it. If it counts in training, the model learns to invent results.
# * The tool does what the model cannot. The model must still know when to call, and copy without a mistake.
