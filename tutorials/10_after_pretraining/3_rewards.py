r"""
Rewards: only right or wrong
============================

This model was trained on sums of three digits with careless answers: 40 % of them were wrong. In a moment it will give
eight answers to one sum, and a program will mark them.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["../1_gpt2/5_sampling", "../1_gpt2/4_training", "1_instructions"]
# sphinx_gallery_words = ["GRPO", "REINFORCE", "policy gradient", "RLVR", "verifiable rewards", "reinforcement learning", "RLHF", "PPO", "advantage", "baseline", "reward hacking", "group relative policy optimization", "rollouts", "R1"]

import copy
from itertools import islice
from random import Random

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.drawings.after_pretraining import answer_group
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.text.conversations import Answered, answered, targets_of
from lm_from_scratch.text.tasks import (
    TASKS,
    held_out_questions,
    is_held_out,
    prompt,
)
from lm_from_scratch.training.log_probs import sequence_log_probs
from lm_from_scratch.training.loss import causal_lm_loss

_, tokenizer = load_shipped("tasks")


def sums(seed):  # new ones without end, none of them held out
    rng = Random(seed)
    while True:
        question = f"{rng.randrange(100, 1000)}+{rng.randrange(100, 1000)}"
        if not is_held_out("add", question):
            yield question


def with_mistakes(question, rng):  # four of ten are wrong
    answer = int(TASKS["add"].answer(question))
    off = rng.choice([-100, -10, -2, -1, 1, 2, 10, 100])
    return str(max(0, answer + off) if rng.random() < 0.4 else answer)


# %%
# This is how the careless model was made, in a few seconds, from the model ``tasks``, which can add:


def step(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def careless(seed, steps=50):
    model, _ = load_shipped("tasks")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    rng, asked = Random(seed), sums(seed)
    for n in range(steps):
        rate = 5e-4 * min(1, (n + 1) / 10) * (1 - n / steps)
        optimizer.param_groups[0]["lr"] = rate
        rows = [
            answered(tokenizer, prompt("add", q), with_mistakes(q, rng))
            for q in islice(asked, 64)
        ]
        batch = targets_of(rows)
        logits = model(batch.idx, positions=batch.positions)
        step(model, optimizer, causal_lm_loss(logits, batch.targets))
    return model


# %%
# And this is how we ask. The model writes, and the program marks each answer as right, 1, or wrong, 0. That number is
# the *reward*.


def answers(model, asked, times=1, sampler=None, seed=0):
    prompts = [tokenizer.start(prompt("add", q)) for q in asked]
    steps = generate(model, prompts, 6, sampler, [0], times, seed)
    return [tuple(ids) for ids in complete(steps)]


def text(ids):  # without the end token, which is 0
    return tokenizer.decode([i for i in ids if i != 0])


def right(question, answer):
    return float(TASKS["add"].is_right(question, answer))


model = careless(0)
asked = "512+399"
eight = [text(ids) for ids in answers(model, [asked], 8, seed=9)]
rewards = [right(asked, answer) for answer in eight]
assert 0 < sum(rewards) < 8
answer_group(asked, eight, rewards)

# %%
# The model can add. But it has also learned how people go wrong, and imitates that as well. How could it unlearn the
# mistakes? We have no better text. We have a program that says *right* or *wrong*, and nothing else.
#
# Here is where we begin, on 300 sums that the model has never seen: the share of right answers if they are *sampled*,
# and if the likeliest token is always taken (*greedy*).

unseen = held_out_questions("add", 300, [3])


def score(model, sampler=None):
    said = map(text, answers(model, unseen, 1, sampler))
    return sum(map(right, unseen, said)) / len(unseen)


print(f"sampled {score(model):.2f}, greedy {score(model, GREEDY):.2f}")
assert 0.5 < score(model) < 0.75 and score(model, GREEDY) > 0.9

# %%
# Say it again if it was right
# ----------------------------
#
# Write :math:`\pi(y)` for the probability of an answer y, and R(y) for its reward. We want the *expected reward* to
# grow: the mean over all possible answers, each weighted by its probability. The checker has no gradient, but the
# probability has one. With :math:`\nabla \pi = \pi \, \nabla \log \pi`, the rule for the derivative of a logarithm:
#
# .. math::
#
#    \nabla \sum_y \pi(y) R(y) = \sum_y \pi(y) \, R(y) \, \nabla \log \pi(y)
#
# The right side is an average over answers that the model itself gives. So let it give some, and push up the
# log-probability of each one, by as much as its reward. This is REINFORCE (Williams, 1992), and in code it is one line:
# ``loss = -(rewards * log_probs).mean()``. It is the loss of ordinary training, on the model's own text, with a weight
# for each answer.
#
# Better than what?
# -----------------
#
# With rewards 0 and 1, every right answer is pushed up, and a wrong one is left alone. That works on average, but it is
# noisy: when all eight answers are right, all eight are pushed, though there is nothing to learn. It is better to ask
# whether an answer did better than *expected*. Subtract the mean reward of the eight answers, the *group*. What is left
# is the **advantage**:

rewards = torch.tensor(rewards)
advantages = rewards - rewards.mean()
assert abs(advantages.sum()) < 1e-6
answer_group(asked, eight, rewards.tolist(), advantages.tolist())

# %%
# Now right answers go up and wrong ones go down. On average the gradient still points the same way: only its noise has
# become smaller.
#
# To ask several times and to compare within the group is the idea of **GRPO**, group relative policy optimisation, with
# which DeepSeek trained its models for mathematics. (*Policy* is another word for a model that acts.) Older methods
# needed a second model, as large as the first, to say what reward to expect. The published GRPO has more parts, which
# `rewards in depth <3a_rewards_in_depth.ipynb>`_ takes one by one.
#
# **Predict first.** All eight answers to a question are wrong. What does the model learn from them?
#
# * not to give these answers
# * nothing

wrong = torch.zeros(8)
print((wrong - wrong.mean()).tolist())

# %%
# Nothing: all advantages are 0. Rewards strengthen what a model can do now and then. They cannot start what it never
# does.
#
# The whole run
# -------------
#
# One step is: ask, mark, compare, push. ``sequence_log_probs`` adds up the log-probabilities of an answer's tokens;
# those of the question do not count.


def reward_loss(model, asked, reward, seed):
    said = answers(model, asked, 8, seed=seed)
    questions = [q for q in asked for _ in range(8)]
    R = torch.tensor([*map(reward, questions, map(text, said))])
    groups = R.view(-1, 8)
    advantages = (groups - groups.mean(dim=1, keepdim=True)).flatten()
    rows = []
    for question, ids in zip(questions, said, strict=True):
        start = tokenizer.start(prompt("add", question))
        mask = [False] * len(start) + [True] * len(ids)
        rows.append(Answered([*start, *ids], mask))
    batch = targets_of(rows)
    logits = model(batch.idx, positions=batch.positions)
    log_probs = sequence_log_probs(logits, batch.targets)  # (256,)
    return -(advantages * log_probs).mean(), R.mean().item()


# %%
# A run is twenty such steps, each with 32 new sums:


def learn(model, reward, seed, steps=20, lr=5e-4):
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    new, curve = sums(100 + seed), []
    for n in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - n / steps)
        asked = [*islice(new, 32)]
        loss, mean = reward_loss(model, asked, reward, (seed * 99 + n) * 256)
        step(model, optimizer, loss)
        curve.append(mean)
    return curve


# %%
# We make three runs, each from a careless model of its own.
#
# **Predict first.** The model never sees a right answer, only its own answers with their marks. Before the run, about
# six of ten sampled answers to new sums are right. How many are right after twenty steps?
#
# * as many as before: nothing says *how* an answer was wrong
# * seven of ten
# * more than nine of ten

starts = [careless(seed) for seed in range(3)]
models = copy.deepcopy(starts)
curves = [learn(m, right, seed) for seed, m in enumerate(models)]

fig, (ax,) = figure(4.6, 2.6)
for curve, style, colour in zip(curves, ("-", "--", ":"), COLOURS):
    smooth = torch.tensor(curve).unfold(0, 5, 1).mean(1)
    ax.plot(range(3, len(curve) - 1), smooth, style, color=colour)
ax.set(title="Mean reward of five steps", xlabel="step", ylim=(0, 1))
plt.show()
for then, now in zip(starts, models, strict=True):
    print(f"sampled {score(then):.2f} -> {score(now):.2f}", end=", ")
    print(f"greedy {score(then, GREEDY):.2f} -> {score(now, GREEDY):.2f}")
    assert score(then) < 0.7 and score(now) > 0.9

# %%
# From six of ten to more than nine, on sums that the models have never seen. But look at *greedy*: the likeliest answer
# was nearly always right before. So the models learned nothing new about addition. The reward made them *say* what they
# knew best.
#
# The price
# ---------
#
# Now the models nearly always say the same thing. We ask for eight answers to each of 60 sums, and count how many are
# different:


def different(model):
    said = answers(model, unseen[:60], 8)
    return sum(len({*said[i : i + 8]}) for i in range(0, 480, 8)) / 60


for then, now in zip(starts, models, strict=True):
    few, many = different(now), different(then)
    print(f"before {many:.1f} different answers of 8, after {few:.1f}")
    assert few < 0.6 * many

# %%
# For sums that is what we want. Where many answers are good, such as stories, it is a loss.
#
# You get what you pay for
# ------------------------
#
# **Predict first.** A lazy checker compares the last digit alone. What will the model write when it is trained with
# this checker?
#
# * right sums, because it can add, and right sums are paid, too
# * numbers whose last digit is right, whatever the others are


def lazy(question, answer):
    return float(answer[-1:] == TASKS["add"].answer(question)[-1])


model = starts[0]
curve = learn(model, lazy, 0, steps=25, lr=1e-3)
print(f"paid {sum(curve[-5:]) / 5:.2f}, right {score(model, GREEDY):.2f}")
for question, ids in zip(unseen[:6], answers(model, unseen[:6], 1, GREEDY)):
    print(question, "=", text(ids))
assert score(model, GREEDY) < 0.6 < 0.8 < sum(curve[-5:]) / 5

# %%
# The reward is high, and most sums are wrong: look at their tens and hundreds. Mistakes there cost nothing any more, so
# these digits drift. This is called *reward hacking*, though nobody hacked anything: training optimised what we
# measured. So read what a model writes, and not only what it is paid.
#
# Exercises
# ---------
#
# 1. *Easy.* Do not subtract the mean: weigh each answer by its reward. A right answer compares the scores of three
#    seeds.
# 2. *Medium.* Halve the group and double the number of questions, then the other way round. Which learns faster from
#    the same number of answers?
# 3. *Hard.* Let the model ``tasks`` learn ``countdown``, of which it solves two thirds, from an exact checker:
#    ``python -m lm_from_scratch train --grpo countdown --from tasks --out run``. A right answer explains why the reward
#    grows so slowly there, by counting the groups in which no answer is right, and those in which all are.
#
# Summary
# -------
#
# * A reward needs no example: the model answers, a program marks, and answers that are better than the mean of their
#   group become more probable.
# * Rewards strengthen what a model can do now and then. What it never does cannot be rewarded.
# * A model learns what the checker pays for, including the checker's mistakes.
