r"""
Preferences in depth
====================

The lesson on `preferences <2_preferences.ipynb>`_ takes the change of a log-probability as the reward of an answer.
Where does that formula come from? What exactly do :math:`\beta` and label smoothing do? And which mistakes leave the
loss at 0.693, or let it fall as if all were well?
"""

# sphinx_gallery_words = ["DPO derivation", "closed form solution", "label smoothing DPO", "cDPO", "conservative DPO", "length bias", "SimPO", "DPO loss stuck at 0.693", "rewards/margins", "rewards/accuracies", "implicit reward"]

import copy
import math

import torch

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.text.conversations import answered, targets_of
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.text.tasks import prompt
from lm_from_scratch.training.log_probs import (
    sequence_log_probs,
    token_log_probs,
)
from lm_from_scratch.training.preference import dpo_loss

# %%
# Where the reward comes from
# ---------------------------
#
# Suppose that every answer has a true reward r. We look for the model that earns a lot of it but stays near the
# reference. So it should make :math:`\sum_y \pi(y) r(y) - \beta \, \mathrm{KL}(\pi, \pi_\mathrm{ref})` as large as
# possible. (`KL <4_distillation.ipynb>`_ says how far two distributions are apart; it is 0 when they are equal.) There
# is a formula for this best model:
#
# .. math::
#
#    \pi^*(y) = \frac{\pi_\mathrm{ref}(y) \, e^{r(y) / \beta}}{\sum_{y'} \pi_\mathrm{ref}(y') \, e^{r(y') / \beta}}
#
# With six answers we can check it: the gradient there is 0, and 20 other models nearby are all worse.

random = torch.Generator().manual_seed(0)
N, beta = 6, 0.5
r = torch.randn(N, generator=random, dtype=torch.float64)
ref = torch.randn(N, generator=random, dtype=torch.float64).log_softmax(0)
star = (ref + r / beta).log_softmax(0)


def objective(logits):
    log_pi = logits.log_softmax(0)
    return (log_pi.exp() * (r - beta * (log_pi - ref))).sum()


logits = star.clone().requires_grad_()
(slope,) = torch.autograd.grad(objective(logits), logits)
print(f"gradient at the closed form: {slope.abs().max():.0e}")
print(f"objective {objective(star):.4f}, reference {objective(ref):.4f}")

assert slope.abs().max() < 1e-12
for _ in range(20):
    other = star + 0.1 * torch.randn(N, generator=random, dtype=torch.float64)
    assert objective(other) < objective(star)

# %%
# Now solve the formula for r. It is :math:`\beta \log (\pi^* / \pi_\mathrm{ref})`, plus a number that is the same for
# all answers and so cancels in a margin. That is the reward of DPO.
#
# Suppose that judges prefer y to y' with probability :math:`\sigma(r(y) - r(y'))`. Then DPO on their judgements should
# find :math:`\pi^*`, without ever seeing r:

i, j = torch.cartesian_prod(torch.arange(N), torch.arange(N)).T
judged = (r[i] - r[j]).sigmoid()  # how often i is preferred to j
logits = ref.clone().requires_grad_()
optimizer = torch.optim.LBFGS([logits], max_iter=200, tolerance_change=1e-14)


def closure():
    log_pi = logits.log_softmax(0)
    losses = dpo_loss(log_pi[i], log_pi[j], ref[i], ref[j], beta).losses
    loss = (judged * losses).mean()
    optimizer.zero_grad()
    loss.backward()
    return loss


optimizer.step(closure)
found = logits.detach().softmax(0)
print("closed form", [f"{x:.3f}" for x in star.exp().tolist()])
print("by DPO     ", [f"{x:.3f}" for x in found.tolist()])

torch.testing.assert_close(found, star.exp(), atol=1e-4, rtol=0)

# %%
# What beta does
# --------------
#
# How hard does one pair pull? If m is its margin, its loss changes by :math:`\beta \, \sigma(-m)` for each nat by which
# the two log-probabilities move apart. With a small :math:`\beta` a pair pulls weakly, but for a long time: to reach
# the margin m, they must move apart by :math:`m / \beta` nats.

for b in (0.1, 0.5, 1.0):
    change = torch.tensor([0.0, 5.0, 20.0], requires_grad=True)
    zero = torch.zeros(3)
    dpo_loss(change, zero, zero, zero, b).losses.sum().backward()
    pulls = [-x for x in change.grad.tolist()]
    print(f"beta {b}: pull at 0, 5, 20 nats", [f"{x:.4f}" for x in pulls])
    expected = [b * torch.sigmoid(torch.tensor(-b * x)) for x in (0, 5, 20)]
    torch.testing.assert_close(change.grad, -torch.stack(expected))

assert pulls[2] < 1e-6 and round(math.exp(20) / 1e6) == 485

# %%
# At 20 nats one probability has grown 485 million times as much as the other. With :math:`\beta = 0.1` the pair still
# pulls.
#
# Judges who make mistakes
# ------------------------
#
# If every judgement counts as certain, the loss falls for ever as the margin grows. *Label smoothing* assumes that a
# share :math:`\epsilon` of the judgements is wrong. Then there is a best margin,
# :math:`\log \frac{1 - \epsilon}{\epsilon}`:

margins = torch.linspace(-1, 8, 9001, dtype=torch.float64)
zero = torch.zeros_like(margins)
for smoothing in (0.05, 0.1, 0.3):
    losses = dpo_loss(margins, zero, zero, zero, 1.0, smoothing).losses
    best = margins[losses.argmin()].item()
    formula = math.log((1 - smoothing) / smoothing)
    print(f"smoothing {smoothing}: best margin {best:.3f}, {formula:.3f}")
    assert abs(best - formula) < 1e-3

# %%
# Long answers
# ------------
#
# A reward is a sum over tokens. If each token becomes 5 % more probable, an answer of 100 tokens earns ten times as
# much as one of 10 tokens. People often prefer the longer answer. Then the model can win margins with length alone.

earned = {T: 0.1 * T * math.log(1.05) for T in (10, 100)}
print({T: f"{reward:.3f}" for T, reward in earned.items()})

assert math.isclose(earned[100], 10 * earned[10])

# %%
# Bug museum
# ----------
#
# Each mistake is shown on the shipped model, with one pair.

model, tokenizer = load_shipped("tasks")
pair = ("6 3 8>17", "8+6+3", "8*(6-3)")
batch = targets_of(
    [answered(tokenizer, prompt("countdown", pair[0]), a) for a in pair[1:]]
)


def log_probs(model, targets=batch.targets):
    return sequence_log_probs(
        model(batch.idx, positions=batch.positions), targets
    )


def loss_of(now, reference):
    return dpo_loss(now[:1], now[1:], reference[:1], reference[1:]).losses[0]


with torch.no_grad():
    fixed = log_probs(model)

# %%
# Every target was masked
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# Long texts were cut at a maximum length, and the answers, which come last, were lost: no target was left (M120). All
# log-probabilities are 0, the loss is 0.6931 in every step, and every gradient is 0. `This log
# <https://github.com/Yifan-Song793/ETO/issues/14>`_ shows it: ``logps/chosen`` is 0.0.

nothing = torch.full_like(batch.targets, IGNORE)
now = log_probs(model, nothing)
loss = loss_of(now, now.detach())
model.zero_grad()
loss.backward()
steepest = max(p.grad.abs().max().item() for p in model.parameters())
print(f"loss {loss:.4f}, gradient {steepest}, log-probabilities {now.tolist()}")

assert abs(loss - math.log(2)) < 1e-6 and steepest == 0
assert now.tolist() == [0, 0] and (fixed < -0.1).all()

# %%
# Check: a log-probability of 0 is a probability of 1, which no answer has.
#
# The reference learned as well
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The reference was a second name for the model, not a copy (M121). Then the rewards are always 0 and the loss stays at
# 0.693. (In `this thread <https://github.com/jingyaogong/minimind/issues/674>`_ it stays there too; the cause was not
# found.) But the weights move: each pair pulls as hard as in the first step, and nothing ever stops it.


def trained(copied):
    student, _ = load_shipped("tasks")
    reference = copy.deepcopy(student) if copied else student
    optimizer = torch.optim.SGD(student.parameters(), lr=0.02)
    for _ in range(20):
        with torch.no_grad():
            by_reference = log_probs(reference)
        loss = loss_of(log_probs(student), by_reference)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        change = log_probs(student) - fixed
    return loss.item(), (change[0] - change[1]).item()


wrong, right = trained(copied=False), trained(copied=True)
print(f"no copy: loss {wrong[0]:.4f}, margin moved by {wrong[1]:.0f} nats")
print(f"a copy:  loss {right[0]:.4f}, margin moved by {right[1]:.0f} nats")

assert abs(wrong[0] - math.log(2)) < 1e-4 and right[0] < 0.5
assert wrong[1] > right[1] > 1

# %%
# Check: after one step the loss on the same pair is below 0.693, and the reference's log-probabilities have not
# changed.
#
# Chosen and rejected were swapped
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Two columns of a file changed places (M122). The loss begins at 0.693 and falls as it should. Margins grow on held-out
# pairs, too, because those are swapped as well. The model learns to prefer what is worse.


def preferred(first, second):
    student, _ = load_shipped("tasks")
    optimizer = torch.optim.SGD(student.parameters(), lr=0.02)
    order = torch.tensor([first, second])
    losses = []
    for _ in range(10):
        losses.append(loss_of(log_probs(student)[order], fixed[order]))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    with torch.no_grad():
        change = log_probs(student) - fixed
    return losses[0].item(), losses[-1].item(), (change[0] > change[1]).item()


right, swapped = preferred(0, 1), preferred(1, 0)
for name, (first, last, better) in (("right", right), ("swapped", swapped)):
    print(f"{name:8} loss {first:.3f} to {last:.3f}, prefers 8+6+3: {better}")

assert right[1] < 0.68 > swapped[1] and right[2] and not swapped[2]

# %%
# Check: one pair whose better answer you know, written into the test by hand.
#
# The question counted, too
# ~~~~~~~~~~~~~~~~~~~~~~~~~
#
# The mask let the tokens of the question count as well (M123). You see nothing: both texts begin with the same
# question, so its log-probabilities cancel in the margin. They stop cancelling on the day on which somebody takes
# *means* over tokens.

start = (batch.targets[0] != IGNORE).nonzero()[0].item()
all_targets = batch.targets.clone()
all_targets[:, :start] = batch.idx[:, 1 : start + 1]
student = copy.deepcopy(model)
with torch.no_grad():
    student.head.weight.mul_(1.1)
    margin, mean_margin = [], []
    for targets in (batch.targets, all_targets):
        change = log_probs(student, targets) - log_probs(model, targets)
        counts = (targets != IGNORE).sum(1)
        margin.append((change[0] - change[1]).item())
        mean_margin.append((change / counts).diff().neg().item())
print(f"sums:  {margin[0]:.4f}, with the question {margin[1]:.4f}")
print(f"means: {mean_margin[0]:.4f}, with the question {mean_margin[1]:.4f}")

assert abs(margin[0] - margin[1]) < 1e-4
assert abs(mean_margin[0] - mean_margin[1]) > 1e-3

# %%
# Check: the first target that counts is the first token of the answer.
#
# A mean for a sum
# ~~~~~~~~~~~~~~~~
#
# Log-probabilities were divided by the length of the answer (M124); a reader found this in `the code of a course
# <https://github.com/jingyaogong/minimind/issues/659>`_. That is another method: a token of a short answer now weighs
# more than one of a long answer, and all margins are smaller, so the same :math:`\beta` means something else.

change = token_log_probs(
    student(batch.idx, positions=batch.positions), batch.targets
) - token_log_probs(model(batch.idx, positions=batch.positions), batch.targets)
lengths = (batch.targets != IGNORE).sum(1)
sums = change.detach().sum(1)
weights = [1 / n for n in lengths.tolist()]
print("tokens", lengths.tolist(), "weights", [f"{w:.3f}" for w in weights])
print(f"margin of sums {sums[0] - sums[1]:.3f}, of means {mean_margin[0]:.3f}")

assert lengths.tolist() == [6, 8]
assert abs(mean_margin[0]) < abs(margin[0])

# %%
# Check: take all answers of one token, and add up the exponentials of their log-probabilities. The sum must be 1.
#
# Exercises
# ---------
#
# 1. *Easy.* At which margin is a pair's pull half of what it was at 0? A good answer is a number, by the formula and
#    by ``autograd``.
# 2. *Medium.* Of the six answers above, give DPO only the pairs among the first three. What becomes of the other three?
#    A good answer compares their probabilities with those of the reference, and explains the sum.
# 3. *Hard.* Let all judgements be certain: 1 where r is larger, 0 elsewhere. Where does the model go with more and more
#    steps, and where with label smoothing 0.1?
#
# Sources
# -------
#
# * Rafailov et al., `Direct Preference Optimization <https://arxiv.org/abs/2305.18290>`_, 2023
# * Mitchell, `A Note on DPO with Noisy Preferences <https://ericmitchell.ai/cdpo.pdf>`_, 2023: label smoothing
# * Razin et al., `Unintentional Unalignment <https://arxiv.org/abs/2410.08847>`_, 2024: both answers become less
#   probable
# * Meng et al., `SimPO <https://arxiv.org/abs/2405.14734>`_, 2024: means over tokens, on purpose

import lm_from_scratch

print("torch", torch.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
