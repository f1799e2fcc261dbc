r"""
Rewards: only right or wrong
============================

A small model could add. Then it learned from careless answers, four in ten of them wrong. Here it answers one sum eight
times. A program marks each answer as right, 1, or wrong, 0. That number is the *reward*.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_needs = ["../1_gpt2/5_sampling", "../1_gpt2/4_training", "1_instructions"]
# sphinx_gallery_words = ["GRPO", "REINFORCE", "policy gradient", "RLVR", "verifiable rewards", "reinforcement learning", "RLHF", "PPO", "advantage", "baseline", "reward hacking", "group relative policy optimization", "rollouts", "R1", "reasoning model training", "DeepSeek R1 training", "how does GRPO work", "PPO vs GRPO", "reinforcement learning for language models", "teach a model arithmetic", "reward function", "reward for math", "learn from right and wrong", "advantage explained", "RLVR vs RLHF", "RL", "RL fine-tuning", "cheating the reward", "model cheats", "gaming the reward", "trial and error", "learn by trying", "teach a model maths", "teach a model to reason", "reasoning", "thinking model", "o1", "entropy collapse", "exploration", "mode collapse", "all rewards equal", "score", "grader", "self-improvement", "train on math problems", "maths problems", "GSM8K", "train a model on maths"]

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
from lm_from_scratch.runs.config import TrainConfig, train
from lm_from_scratch.text.conversations import answered, targets_of
from lm_from_scratch.text.examples import AnswerBatches
from lm_from_scratch.text.tasks import (
    TASKS,
    held_out_questions,
    is_held_out,
    prompt,
    questions,
)
from lm_from_scratch.training.log_probs import sequence_log_probs

model, tokenizer = load_shipped("tasks")  # it can add
add, rng = TASKS["add"], Random(0)


def sums(rng):  # of three digits, without end, none of them held out
    return (q for q in questions("add", rng, [3]) if not is_held_out("add", q))


def careless(question):
    off = rng.choice([-100, -10, -1, 1, 10, 100]) if rng.random() < 0.4 else 0
    answer = str(int(add.answer(question)) + off)
    return answered(tokenizer, prompt("add", question), answer)


examples = [careless(q) for q in islice(sums(rng), 40 * 32)]
batches = AnswerBatches(examples, tokenizer, 32, 32, seed=0)
list(train(model, batches, TrainConfig(steps=40, lr=4e-4, warmup=5)))


def answers(model, asked, times=1, sampler=None, seed=0):
    prompts = [tokenizer.start(prompt("add", q)) for q in asked]
    tokens = complete(generate(model, prompts, 6, sampler, [0], times, seed))
    return [tokenizer.decode(ids).split("<|")[0] for ids in tokens]


def right(question, answer):
    return float(add.is_right(question, answer))


asked = "512+399"
eight = answers(model, [asked], 8, seed=0)
rewards = [right(asked, answer) for answer in eight]
assert 2 < sum(rewards) < 7
answer_group(asked, eight, rewards)

# %%
# The answers are drawn at random, as in the lesson on `sampling <../1_gpt2/5_sampling.ipynb>`_. The model still knows
# how to add, but it has also learned how people go wrong, and imitates that as well. How could it unlearn the mistakes?
# We have no better text. We have a program that says *right* or *wrong*, and nothing else.
#
# Here is where we begin, on 100 sums that the model has never seen: the share of right answers if they are *sampled*,
# and if the likeliest token is always taken (*greedy*).

unseen = held_out_questions("add", 100, [3])


def score(model, sampler=None):
    said = answers(model, unseen, 1, sampler)
    return sum(map(right, unseen, said)) / len(unseen)


sampled, greedy = score(model), score(model, GREEDY)
print(f"sampled {sampled:.2f}, greedy {greedy:.2f}")
assert 0.4 < sampled < 0.75 and greedy > 0.85

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
# whether an answer did better than *expected*. Subtract the mean reward of the *group*, here of the eight answers. What
# is left is the **advantage**:

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
# Nothing: all eight rewards equal their mean, so all advantages are 0, and nothing is pushed up or down. A question that
# is always answered right teaches nothing either. The trainer of `TRL
# <https://huggingface.co/docs/trl/v0.25.0/grpo_trainer>`_ logs the share of such groups as ``frac_reward_zero_std``: if it
# nears 1, the questions are too hard or too easy.
#
# Rewards strengthen what a model can do now and then. They cannot start what it never does.
#
# The whole run
# -------------
#
# One step is: ask, mark, compare, push. An answer with advantage 0 is pushed nowhere, so the model need not read it
# again. ``sequence_log_probs`` adds up the log-probabilities of an answer's tokens; those of the question do not count.


def reward_loss(model, asked, reward, seed):
    said = answers(model, asked, 8, seed=seed)
    group = [question for question in asked for _ in range(8)]
    R = torch.tensor([*map(reward, group, said)]).view(-1, 8)
    advantages = (R - R.mean(dim=1, keepdim=True)).flatten()
    pushed = (advantages != 0).nonzero()[:, 0].tolist() or [0]
    batch = targets_of(
        [answered(tokenizer, prompt("add", group[i]), said[i]) for i in pushed]
    )
    logits = model(batch.idx, positions=batch.positions)
    log_probs = sequence_log_probs(logits, batch.targets)
    loss = -(advantages[pushed] * log_probs).sum() / len(said)
    return loss, R.mean().item()


# %%
# A run is twenty such steps, each with ten new sums:


def learn(start, reward, seed, steps=20, lr=5e-4):
    model, curve = copy.deepcopy(start), []
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), fused=True
    )
    new = sums(Random(100 + seed))
    for n in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - n / steps)
        asked = [*islice(new, 10)]
        loss, mean = reward_loss(model, asked, reward, seed * 10_000 + n * 500)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(mean)
    return model, curve


# %%
# We make two runs, with other sums and other random numbers in each.
#
# **Predict first.** The model never sees a right answer, only its own answers with their marks. Before the run, about
# six of ten sampled answers to new sums are right. How many are right after twenty steps?
#
# * as many as before: nothing says *how* an answer was wrong
# * seven of ten
# * about nine of ten

runs = [learn(model, right, seed) for seed in range(2)]

fig, (ax,) = figure(4.6, 2.6)
for (_, curve), style, colour in zip(runs, ("-", "--"), COLOURS):
    smooth = torch.tensor(curve).unfold(0, 5, 1).mean(1)
    ax.plot(range(3, len(curve) - 1), smooth, style, color=colour)
ax.set(title="Mean reward of five steps", xlabel="step", ylim=(0, 1))
plt.show()
for learned, _ in runs:
    sampled, greedy = score(learned), score(learned, GREEDY)
    print(f"sampled {sampled:.2f}, greedy {greedy:.2f}")
    assert sampled > 0.8

# %%
# About nine of ten, on sums that the model has never seen. Right answers were pushed up wherever it gave some, and wrong
# ones down.
#
# But look at *greedy*: the likeliest answer was right in about nine of ten sums before. So the model has hardly learned
# anything new about addition. The reward made it *say* what it knew best.
#
# The price
# ---------
#
# Now the model nearly always says the same thing. We ask for eight answers to each of 30 sums, and count how many are
# different:


def different(model):
    said = answers(model, unseen[:30], 8)
    return sum(len({*said[i : i + 8]}) for i in range(0, 240, 8)) / 30


before = different(model)
print(f"before: {before:.1f} different answers of 8")
for learned, _ in runs:
    after = different(learned)
    print(f"after:  {after:.1f}")
    assert after < 0.7 * before

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


lazily, curve = learn(model, lazy, 0, lr=1e-3)
paid = sum(curve[-5:]) / 5
greedy = score(lazily, GREEDY)
print(f"paid {paid:.2f}, right {greedy:.2f}")
for question, answer in zip(unseen, answers(lazily, unseen[:6], 1, GREEDY)):
    print(question, "=", answer)
assert greedy < 0.6 < 0.7 < paid

# %%
# Numbers whose last digit is right. The reward is high, and most sums are wrong: look at their tens and hundreds.
# Mistakes there cost nothing any more, so these digits drift.
#
# This is called *reward hacking*, though nobody hacked anything: training optimised what we measured. So read what a
# model writes, and not only what it is paid.
#
# Exercises
# ---------
#
# 1. *Easy.* Do not subtract the mean: weight each answer by its reward. A good answer compares the scores of three
#    seeds.
# 2. *Medium.* Halve the group and double the number of questions, then the other way round. Which learns faster from
#    the same number of answers?
# 3. *Hard.* Let the model ``tasks`` learn ``countdown``, of which it solves two thirds, from an exact checker:
#    ``python -m lm_from_scratch train --grpo countdown --from tasks --out run``. A good answer explains why the reward
#    grows so slowly there, by counting the groups in which no answer is right, and those in which all are.
#
# Summary
# -------
#
# * A reward needs no example: the model answers, a program marks, and answers that are better than the mean of their
#   group become more probable.
# * Rewards strengthen what a model can do now and then. What it never does cannot be rewarded.
# * A model learns what the checker pays for, including the checker's mistakes.
