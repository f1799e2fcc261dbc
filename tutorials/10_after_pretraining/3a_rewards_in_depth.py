r"""
Rewards in depth
================

The lesson on `rewards <3_rewards.ipynb>`_ pushes answers up or down by their advantage. Is that really the gradient of
the expected reward? What do the other parts of GRPO change: the baseline, the standard deviation, the clipped ratio,
the KL term, the choice of a mean? And which mistakes leave no trace in the loss? Here the model, or *policy*, is so
small that we can list all its answers and compute every average exactly.
"""

# sphinx_gallery_words = ["policy gradient theorem", "score function estimator", "RLOO", "leave one out", "Dr. GRPO", "DAPO", "clip higher", "k3 estimator", "importance ratio", "GRPO loss is 0", "element 0 of tensors does not require grad", "length bias", "token-level loss"]

import itertools
import math

import matplotlib.pyplot as plt
import torch

from lm_from_scratch.instruments.plot import COLOURS, figure
from lm_from_scratch.training.policy_gradient import (
    constant_mean,
    group_advantages,
    grpo_loss,
    leave_one_out,
    mean_of_means,
    reinforce_loss,
    token_mean,
)

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

# %%
# Nine answers
# ------------
#
# There are three tokens, and an answer has two of them, which makes nine answers. The second token depends on the
# first, so the policy is 3 + 9 logits. Two of the nine answers are right.


def all_log_probs(logits):  # (12,) -> (9, 2)
    first = logits[:3].log_softmax(-1)[:, None].expand(3, 3)
    second = logits[3:].view(3, 3).log_softmax(-1)
    return torch.stack([first, second], dim=-1).view(9, 2)


logits = torch.randn(12, requires_grad=True)
R = torch.zeros(9)
R[[1, 5]] = 1
said = torch.ones(9, 2, dtype=torch.bool)


def gradient(scalar, of=None):
    of = logits if of is None else of
    return torch.autograd.grad(scalar, of, retain_graph=True)[0]


log_probs = all_log_probs(logits)
pi = log_probs.sum(1).exp()  # (9,)
exact = gradient((pi * R).sum())
print(f"probabilities sum to {pi.sum():.6f}")
print(f"expected reward {(pi * R).sum():.4f}")

torch.testing.assert_close(pi.sum(), torch.tensor(1.0))

# %%
# The policy gradient is exact
# ----------------------------
#
# ``exact`` is the gradient of the expected reward: all nine probabilities times their rewards, added up. REINFORCE
# differentiates log-probabilities of sampled answers. If we weigh each answer by its probability, as sampling does on
# average, the two agree.
#
# They also agree with any *baseline*, a number that is subtracted from all rewards, because
# :math:`\sum_y \pi(y) \nabla \log \pi(y) = \nabla \sum_y \pi(y) = \nabla 1 = 0`.

for baseline in (0.0, 0.3, -7.0):
    weights = 9 * pi.detach() * (R - baseline)  # 9: the loss is a mean
    loss = reinforce_loss(all_log_probs(logits), weights, said)
    error = (gradient(loss) + exact).abs().max()
    print(f"baseline {baseline:4}: largest error {error:.0e}")
    assert error < 1e-12

# %%
# How noisy is one answer?
# ------------------------
#
# One sampled answer gives the estimate :math:`(R(y) - b) \nabla \log \pi(y)`, with a baseline b. Its variance says how
# far it is from the exact gradient, squared, on average. As a function of b it is a parabola.

scores = torch.stack([gradient(x) for x in all_log_probs(logits).sum(1)])
size = scores.square().sum(1)  # (9,), squared length
p = pi.detach()


def variance(b):
    return ((p * (R - b) ** 2 * size).sum() - exact.square().sum()).item()


mean = (p * R).sum().item()
best = ((p * R * size).sum() / (p * size).sum()).item()
_, (ax,) = figure(4.6, 2.8)
bs = torch.linspace(-0.6, 1.4, 101).tolist()
ax.plot(bs, [variance(b) for b in bs], color=COLOURS[0])
for b, mark, name in (
    (0.0, "o", "0"),
    (mean, "s", "mean"),
    (best, "^", "best"),
):
    ax.plot(b, variance(b), mark, color=COLOURS[1], label=name)
ax.set(title="Variance of one estimate", xlabel="baseline", ylim=(0, None))
ax.legend(frameon=False)
plt.show()
for name, b in (("none", 0.0), ("mean reward", mean), ("best", best)):
    print(f"{name:12} b = {b:.3f}, variance {variance(b):.4f}")
print(f"rewards 10 and 11, no baseline: {variance(-10.0):.1f}")

assert variance(best) < variance(mean) < variance(0.0)
assert variance(best) > 0.8 * variance(mean)
assert variance(-10.0) > 100 * variance(0.0)

# %%
# With the mean reward as the baseline, the variance is not far from the best. How much a baseline saves depends on the
# rewards. With 0 and 1 and few right answers, it is not much. With 10 and 11, which mean the same, it is nearly
# everything.
#
# Groups
# ------
#
# In GRPO the baseline is the mean of a group of G answers. That mean contains the reward of the answer itself, so the
# average gradient is shorter by the factor (G - 1)/G, in the right direction. With the mean of the *others* it has the
# right length. Here are all 81 groups of two answers:

pairs = list(itertools.product(range(9), repeat=2))
both = torch.tensor(pairs)  # (81, 2)
chance = p[both].prod(1)


def average(advantages):  # (81, 2) -> (12,)
    return (chance[:, None, None] * advantages[..., None] * scores[both]).sum(
        (0, 1)
    ) / 2


of_group = average(group_advantages(R[both], scale=False))
of_others = average(R[both] - leave_one_out(R[both]))
for name, found in (("group", of_group), ("others", of_others)):
    share = (found @ exact / exact.square().sum()).item()
    print(f"mean of the {name:6}: {share:.3f} of the gradient")

torch.testing.assert_close(of_group, exact / 2)
torch.testing.assert_close(of_others, exact)

# %%
# To divide or not
# ----------------
#
# GRPO divides the advantages by the group's standard deviation. How hard does a group pull when k of 8 answers are
# right? We add up the absolute values of its advantages:

pulls = {}
for k in range(9):
    rewards = torch.tensor([[1.0] * k + [0.0] * (8 - k)])
    plain = group_advantages(rewards, scale=False).abs().sum().item()
    pulls[k] = plain, group_advantages(rewards).abs().sum().item()
    print(f"{k} of 8: {plain:5.2f}, divided {pulls[k][1]:5.2f}")

assert pulls[0] == pulls[8] == (0.0, 0.0)
assert math.isclose(pulls[4][0] / pulls[1][0], 16 / 7)
assert math.isclose(pulls[4][1] / pulls[1][1], (16 / 7) ** 0.5, rel_tol=1e-3)

# %%
# Undivided, a group with four right answers pulls 16/7 times as hard as one with a single right answer. Divided, it is
# only the root of that. So division gives very easy and very hard questions more weight. It also makes rewards of 0 and
# 100 the same as 0 and 1.
#
# But what it follows is no longer the gradient of the expected reward. A variant called Dr. GRPO leaves the division
# out for that reason.
#
# Answers that are used twice
# ---------------------------
#
# Answers are expensive, so you may want to take several steps on the same ones. But after the first step the model is
# no longer the one that gave them. The loss of PPO, a method older than GRPO, weighs each token by a *ratio*: its
# probability now, divided by the one with which it was sampled. It stops where a token has moved far enough *in the
# direction in which it was pushed*. That is the *clip*. (A negative gradient of the loss makes a token more probable.)

for ratio, A in itertools.product((0.5, 1.0, 1.5), (1.0, -1.0)):
    now = torch.tensor([[math.log(ratio)]], requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.bool)
    out = grpo_loss(now, torch.zeros(1, 1), torch.tensor([A]), one)
    slope = gradient(out.loss, now).item()
    print(f"ratio {ratio}, advantage {A:+.0f}: gradient {slope:+.1f}")
    clipped = (A > 0 and ratio > 1.2) or (A < 0 and ratio < 0.8)
    assert math.isclose(slope, 0.0 if clipped else -A * ratio)
    assert out.clipped.item() == clipped

# %%
# A good token that became less probable is still pushed up, and a bad one that became more probable is still pushed
# down: there the clip does not apply.
#
# Near the reference
# ------------------
#
# Many losses also hold the model near a frozen reference, with a term for the distance of the two distributions, the
# `KL divergence <4_distillation.ipynb>`_. It is estimated from sampled answers, by *k3* = r - 1 - log r, where r is the
# probability by the reference divided by that of the model.
#
# On average over all answers, k3 is exactly KL(model, reference). But the gradient that a loss takes of it is another
# one: that of KL(reference, model).

reference = (logits + 0.7 * torch.randn(12)).detach()
log_ref = all_log_probs(reference).sum(1)
log_pi = all_log_probs(logits).sum(1)
k3 = torch.expm1(log_ref - log_pi) - (log_ref - log_pi)
forward = (log_pi.exp() * (log_pi - log_ref)).sum()
backward = (log_ref.exp() * (log_ref - log_pi)).sum()
estimate = (p * k3).sum()
torch.testing.assert_close(estimate, forward)
slope = gradient(estimate)
print(f"KL(model, reference) {forward:.4f}, k3 {estimate:.4f}")
difference = (slope - gradient(forward)).abs().max()
print(f"gradients differ by {difference:.2f}")

torch.testing.assert_close(slope, gradient(backward))
assert difference > 0.01

# %%
# Both pull towards the reference. But KL(model, reference) forgives a model that gives up some of the reference's
# answers, and KL(reference, model) does not.
#
# Which mean?
# -----------
#
# Here are two wrong answers, one of 2 tokens and one of 8. How hard is a token of each pushed down?

mask = torch.zeros(2, 8, dtype=torch.bool)
mask[0, :2] = mask[1] = True
push = {}
for name, mean_ in (
    ("mean of means", mean_of_means),
    ("mean of tokens", token_mean),
    ("constant", constant_mean(8)),
):
    now = torch.zeros(2, 8, requires_grad=True)
    out = grpo_loss(
        now, now.detach(), torch.tensor([-1.0, -1.0]), mask, average=mean_
    )
    push[name] = gradient(out.loss, now)[:, 0].tolist()
    print(f"{name:15} short {push[name][0]:.4f}, long {push[name][1]:.4f}")

assert push["mean of means"] == [1 / 4, 1 / 16]
assert push["mean of tokens"] == [1 / 10, 1 / 10]
assert push["constant"] == [1 / 16, 1 / 16]

# %%
# If the mean is taken within each answer first, a token of the long answer is pushed only a quarter as hard. So a model
# that is wrong anyway does better if it goes on talking. The mean over all tokens treats both alike within one batch.
# Division by a constant treats them alike in all batches.
#
# A loss of 0 that learns
# -----------------------
#
# People `ask <https://github.com/huggingface/trl/issues/2703>`_ again `and again
# <https://github.com/huggingface/open-r1/issues/239>`_ why GRPO reports a loss of 0. In the first step on new answers
# all ratios are 1, and the advantages of a group add up to zero. So with the mean of means the
# loss *is* 0. (With the mean of tokens it is close to 0, because long answers weigh more.) But its gradient is not 0.

answers = all_log_probs(logits)[torch.tensor([1, 1, 2, 7])]
A = group_advantages(torch.tensor([[1.0, 1.0, 0.0, 0.0]])).flatten()
out = grpo_loss(answers, answers, A, said[:4])
slope = gradient(out.loss)
print(f"loss {abs(out.loss.item()):.4f}, gradient {slope.norm():.4f}")

assert abs(out.loss.item()) < 1e-12 and slope.norm() > 0.1

# %%
# So do not watch the loss. Watch the mean reward, the share of groups in which rewards differ, and the length of the
# gradient.
#
# Bug museum
# ----------
#
# Log-probabilities without a gradient
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The loss used the log-probabilities that were noted while the answers were generated (M110). There PyTorch records
# nothing, so they have no gradient. In `this thread <https://github.com/jingyaogong/minimind/issues/750>`_ that ended
# in an error. Where another term of the loss has a gradient, there is no error, and the reward is not learned.

with torch.no_grad():
    kept = all_log_probs(logits)[torch.tensor([1, 1, 2, 7])]
try:
    grpo_loss(kept, kept, A, said[:4]).loss.backward()
except RuntimeError as error:
    message = str(error).splitlines()[0]
print(message)

assert "does not require grad" in message
assert not kept.requires_grad and answers.requires_grad

# %%
# Check: ``log_probs.requires_grad`` is true, and the gradient is not zero where rewards differ.
#
# The old model is always the new one
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The old log-probabilities were computed anew before every step on the same answers (M111). Then each ratio is 1,
# nothing is ever clipped, and a few answers are pushed without limit.


def steps_on_the_same(again):
    theta = logits.detach().clone().requires_grad_()
    rows = torch.tensor([1, 1, 2, 7])
    old = all_log_probs(theta)[rows].detach()
    for _ in range(30):
        now = all_log_probs(theta)[rows]
        old = now.detach() if again else old
        out = grpo_loss(now, old, A, said[:4])
        theta.data -= 0.5 * gradient(out.loss, theta)
    moved = (all_log_probs(theta)[1] - all_log_probs(logits)[1]).exp()
    return moved.max().item(), out.clipped.item()


wrong, right = steps_on_the_same(True), steps_on_the_same(False)
print(f"again: ratio {wrong[0]:.2f}, clipped {wrong[1]:.0%} of the tokens")
print(f"kept:  ratio {right[0]:.2f}, clipped {right[1]:.0%}")

assert wrong[1] == 0 and right[1] > 0.2
assert wrong[0] > 1.2 * right[0]

# %%
# Check: in the second step on the same answers some ratios differ from 1. (With *one* step on each set of answers, as
# in the lesson, a ratio of 1 is `right <https://github.com/jingyaogong/minimind/issues/775>`_.)
#
# Rewards that were not centred
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Every answer got one point for its form and another one for being right, and no baseline was subtracted (M112). On
# average the gradient is as before. But every answer is pushed up, wrong ones too, and the estimate is much noisier.

one_point_more = variance(-1.0)  # rewards 1 and 2
print(f"variance {one_point_more:.2f}, centred {variance(mean):.2f}")
centred = group_advantages(torch.tensor([[2.0, 2.0, 1.0, 1.0]]), scale=False)
torch.testing.assert_close(
    centred, group_advantages(torch.tensor([[1.0, 1.0, 0.0, 0.0]]), scale=False)
)

assert one_point_more > 5 * variance(mean)

# %%
# Check: add 10 to all rewards. The gradient of a batch must stay the same.
#
# A divergence with the wrong sign
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Papers write down what should *grow*: the reward minus the KL. A loss should shrink, so there the KL is added. It was
# subtracted (M113), and the model is paid for leaving the reference.


def distance_after(sign):
    theta = reference.clone().requires_grad_()
    theta.data += 0.3 * scores[0]
    for _ in range(20):
        now = all_log_probs(theta)
        gain = now - all_log_probs(reference)
        k3 = (torch.expm1(-gain) + gain).mean()
        theta.data -= 0.3 * gradient(sign * k3, theta)
    new = all_log_probs(theta).sum(1)
    return (new.exp() * (new - log_ref)).sum().item()


start = distance_after(0)
toward, away = distance_after(1), distance_after(-1)
print(f"KL before {start:.4f}")
print(f"KL after 20 steps: added {toward:.4f}, subtracted {away:.4f}")

assert toward < start / 2 < 2 * start < away

# %%
# Check: with all advantages 0, a step must bring the model nearer to the reference.
#
# Padding that was paid for
# ~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Short answers were padded, and the mask counted the padding (M114). So tokens after the end of an answer are pushed up
# and down with it, and the mean is taken over more tokens than the model wrote.

short = torch.tensor([[True, False], [True, True]])
A2 = torch.tensor([1.0, -1.0])


def of(padding, mask):
    now = torch.tensor([[-0.5, padding], [-0.7, -1.1]], requires_grad=True)
    return gradient(grpo_loss(now, now.detach(), A2, mask).loss, now)


print("right:", of(-3.0, short)[0].tolist())
print("wrong:", of(-3.0, torch.ones(2, 2, dtype=torch.bool))[0].tolist())
drifted = torch.tensor([[-0.5, -9.0], [-0.7, -1.1]], requires_grad=True)
old = torch.tensor([[-0.5, -3.0], [-0.7, -1.1]])
masked = grpo_loss(drifted, old, A2, short).loss
unmasked = grpo_loss(drifted, old, A2, torch.ones_like(short)).loss

assert of(-3.0, short)[0, 1] == 0
assert abs(masked) < 1e-12 < 0.1 < abs(unmasked)

# %%
# Check: write anything into the padding. The loss and the gradient must stay the same.
#
# A checker that read the question
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The checker looked for the number in the whole text, the question included (M115). There it always is. So every answer
# gets 1, all advantages are 0, and the run looks perfect from the first step on.

question = "countdown:6 3 8>17="
texts = [question + answer for answer in ("8+6+3", "8*3-6", "", "no idea")]
wrong = torch.tensor([[float("17" in text) for text in texts]])
print("rewards", wrong.tolist()[0])

assert wrong.min() == 1 and not group_advantages(wrong).any()

# %%
# Check: before training, give the checker an empty answer, a wrong answer, and a right answer to *another* question.
# Each must get 0.
#
# Exercises
# ---------
#
# 1. *Easy.* Give all nine answers the reward 1. What is the exact gradient, and how large is the variance without a
#    baseline? A good answer has both numbers, and the baseline for which the variance is 0.
# 2. *Medium.* Compute the gradient of GRPO with division by the standard deviation, on average over all 6,561 groups of
#    four. A good answer gives the angle between it and the exact gradient.
# 3. *Hard.* Replace k3 by the plain log ratio, *k1*, and by half its square, *k2*. A good answer says, for each, what
#    its value is on average and what its gradient is, by enumeration.
#
# Sources
# -------
#
# * Williams, `Simple Statistical Gradient-Following Algorithms <https://doi.org/10.1007/BF00992696>`_, 1992: REINFORCE
# * Schulman et al., `Proximal Policy Optimization Algorithms <https://arxiv.org/abs/1707.06347>`_, 2017
# * Shao et al., `DeepSeekMath <https://arxiv.org/abs/2402.03300>`_, 2024: GRPO
# * Ahmadian et al., `Back to Basics <https://arxiv.org/abs/2402.14740>`_, 2024: leaving one out
# * Liu et al., `Understanding R1-Zero-Like Training <https://arxiv.org/abs/2503.20783>`_, 2025: Dr. GRPO
# * Yu et al., `DAPO <https://arxiv.org/abs/2503.14476>`_, 2025: the mean of tokens
# * Schulman, `Approximating KL Divergence <http://joschu.net/blog/kl-approx.html>`_, 2020: k1, k2 and k3

import lm_from_scratch

torch.set_default_dtype(torch.float32)
print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
