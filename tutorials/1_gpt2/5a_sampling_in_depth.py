r"""
Sampling in depth: is the draw right?
=====================================

A sampler can be wrong for years, because a text with a wrong distribution still looks like a text. How
do you check one? This page belongs to the lesson `sampling <5_sampling.ipynb>`_.

It tests the draw against its distribution over thousands of numbers. It derives what temperature does
to the entropy, measures how greedy text differs from real text, compares each step with
``transformers``, and shows two samplers that were wrong.

The scores of one context
-------------------------

Let the last token of a context have the scores, or *logits*, :math:`z_i`, one for each of the V
tokens. The model's distribution for the next token is their softmax:

.. math::

   p_i = \frac{e^{z_i}}{\sum_{j=1}^{V} e^{z_j}}

Its *entropy* says in nats how open the choice is: 0 if one token is certain, :math:`\log V` if all
are equally likely.

.. math::

   H = - \sum_{i=1}^{V} p_i \log p_i

Here are five beginnings, sorted by the entropy of the next token. The logits become float64, so that
rounding does not blur the later comparisons.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["repetition_penalty", "min_p", "logits processor", "LogitsProcessor", "generation config", "max_new_tokens", "reproducible", "seed", "is my sampler right", "frequency penalty", "presence penalty"]
# sphinx_gallery_museum = ["G13"]

import math

import torch
from torch import Tensor

from lm_from_scratch.checkpoint.weights import load_shipped

model, tokenizer = load_shipped()
end, V = tokenizer.eos_token_id, model.config.vocab_size


def logits_of(ids: list[int]) -> Tensor:
    """The logits (T, V) after each token of a document that begins with ``ids``."""
    with torch.no_grad():
        return model(torch.tensor([[end, *ids]]))[0, 1:].double()


def entropy(logits: Tensor) -> Tensor:
    p = logits.softmax(-1)
    return -(p * p.clamp(min=1e-300).log()).sum(-1)


beginnings = [
    "The", "Return the", "def __init__(self", "The value of the", "Raise ValueError if the",
]  # fmt: skip
by_text = {text: logits_of(tokenizer.encode(text))[-1] for text in beginnings}
ordered = sorted(beginnings, key=lambda text: entropy(by_text[text]))
for text in ordered:
    print(f"H = {entropy(by_text[text]):.2f}   {text}")

assert all(0 < entropy(logits) < math.log(V) for logits in by_text.values())
torch.testing.assert_close(entropy(torch.zeros(V)), torch.tensor(math.log(V)))

# %%
# The first line of the list is the *sharp* context, the last the *flat* one, and the one in the middle
# is the example of this page.

from lm_from_scratch.text import corpora

_, held_out = corpora.split(corpora.reference())
sharp, example, flat = ordered[0], ordered[len(ordered) // 2], ordered[-1]
logits = by_text[example]
top = logits.topk(10).indices
p = logits.softmax(-1)
torch.testing.assert_close((logits + 5).softmax(-1), p)

# %%
# The last line of the code adds 5 to every logit, and the probabilities stay the same. One logit has no meaning by itself;
# only its difference from other logits has.
#
# Drawing with one number
# -----------------------
#
# To draw a token, lay the probabilities end to end on the line from 0 to 1. Throw a uniform number u
# on the line, and take the token whose piece it hits. A piece is as long as its token's probability,
# so each token comes up as often as it should.

import inspect

import matplotlib.pyplot as plt

from lm_from_scratch.generation.sampling import draw, keep_top_k
from lm_from_scratch.instruments.plot import COLOURS, figure, printable

print(inspect.getsource(draw))

# %%
# The figure shows the line for five tokens only, because the pieces of all V would be too thin to
# see.

five = keep_top_k(logits[None], 5)[0].softmax(-1)
u = torch.rand(4, generator=torch.Generator().manual_seed(0))
drawn = draw(five.log().expand(4, V), u)

fig, (ax,) = figure(4.8, 2.4)
tokens = sorted(top[:5].tolist())
shares = five[tokens]
lefts = shares.cumsum(-1) - shares
spot = 1.1
for token, left, share in reversed(
    [*zip(tokens, lefts.tolist(), shares.tolist())]
):
    colour = COLOURS[tokens.index(token)]
    ax.barh(0, share, left=left, color=colour, edgecolor="white")
    middle = left + share / 2
    spot = min(middle, spot - 0.1)  # the names keep a distance
    ax.plot([middle, spot], [0.42, 0.72], color="black", linewidth=0.8)
    name = printable(tokenizer.decode([token]))
    ax.text(spot, 0.78, name, rotation=45, ha="left", va="bottom")
ax.plot(u, [-0.62] * 4, "^", color="black", markersize=9)
ax.set(xlim=(0, 1), ylim=(-1, 2.2), yticks=[], xlabel="u")
ax.set_title("Five tokens, and four draws (triangles)")
ax.grid(False)
plt.show()

line = five.cumsum(-1)  # where each token's piece ends
print([tokenizer.decode([token]) for token in drawn.tolist()])
assert ((line - five)[drawn] <= u).all()
assert (u < line[drawn]).all()

# %%
# Two tests show that the draw is right. The first needs no luck. In the place of random numbers, use
# the N teeth of a comb, evenly spaced. A piece of length :math:`p_i` then catches :math:`N p_i` teeth,
# with an error of at most one.


def count(u: Tensor) -> Tensor:
    """How often each token of the example is drawn (V,), in parts that fit into memory."""
    tokens = torch.cat(
        [draw(logits.expand(len(part), V), part) for part in u.split(2000)]
    )
    return torch.bincount(tokens, minlength=V).double()


N = 2_000
comb = (torch.arange(N, dtype=torch.float64) + 0.5) / N
error = (count(comb) - N * p).abs().max()
print(f"largest error in the count of a token: {error:.3f}")

assert error < 1 + 1e-6

# %%
# The second uses random numbers and the chi-square statistic. If the draws follow :math:`p`, it is
# about as large as the number of cells minus one, the degrees of freedom, with a standard deviation
# of the root of twice that. Tokens that are expected fewer than ten times share one cell.
#
# .. math::
#
#    \chi^2 = \sum_{i} \frac{(n_i - N p_i)^2}{N p_i}


def chi_square(n: Tensor, expected: Tensor) -> tuple[float, int]:
    often = expected >= 10
    n = torch.cat([n[often], n[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    return float(((n - expected) ** 2 / expected).sum()), len(n) - 1


N = 8_000
random_u = torch.rand(N, generator=torch.Generator().manual_seed(0))
counted = count(random_u)
chi2, freedom = chi_square(counted, N * p)
sigmas = (chi2 - freedom) / math.sqrt(2 * freedom)
print(
    f"chi-square {chi2:.0f} with {freedom} degrees of freedom: {sigmas:+.1f} standard deviations"
)

assert abs(sigmas) < 5

# %%
# A wrong sampler does not pass. Expect the logits divided by 1.1 instead, a small change, and the
# statistic is more than ten standard deviations away.

wrong, freedom = chi_square(counted, N * (logits / 1.1).softmax(-1))
print(f"{(wrong - freedom) / math.sqrt(2 * freedom):+.0f} standard deviations")

assert (wrong - freedom) / math.sqrt(2 * freedom) > 10
assert (random_u * 2**24).frac().eq(0).all()

# %%
# .. note::
#
#    A float32 number from ``torch.rand`` is a multiple of :math:`2^{-24}`, as the last line checks. It
#    can miss a token whose piece is shorter than that. ``draw`` adds up the line in float64 and takes
#    numbers in float64 as well.
#
# Temperature and entropy
# -----------------------
#
# A temperature :math:`\tau > 0` divides every logit before the softmax:
#
# .. math::
#
#    p_i(\tau) = \frac{e^{z_i / \tau}}{\sum_j e^{z_j / \tau}}
#
# The order of the tokens stays as it is.

from lm_from_scratch.generation.sampling import apply_temperature

for tau in (0.5, 2):
    assert apply_temperature(logits, tau).topk(10).indices.equal(top)

# %%
# And the entropy? Write :math:`E` for the mean of the logits under :math:`p(\tau)` and
# :math:`\operatorname{Var}` for their variance. Put :math:`\log p_i = z_i / \tau - \log \sum_j e^{z_j / \tau}`
# into the entropy, and take derivatives:
#
# .. math::
#
#    H &= \log \sum_j e^{z_j / \tau} - \frac{E}{\tau} \\
#    \frac{d}{d\tau} \log \sum_j e^{z_j / \tau} &= - \frac{E}{\tau^2} \\
#    \frac{dE}{d\tau} &= - \frac{\operatorname{Var}}{\tau^2} \\
#    \frac{dH}{d\tau} &= - \frac{E}{\tau^2} + \frac{E}{\tau^2} - \frac{1}{\tau} \frac{dE}{d\tau} \\
#    &= \frac{\operatorname{Var}}{\tau^3}
#
# A variance is never negative, so a higher temperature never lowers the entropy. Autograd gives the
# same slope.

for temperature in (0.3, 1.0, 3.0):
    tau = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    H = entropy(apply_temperature(logits, tau))
    (slope,) = torch.autograd.grad(H, tau)
    q = apply_temperature(logits, temperature).softmax(-1)
    variance = (q * logits**2).sum() - (q * logits).sum() ** 2
    torch.testing.assert_close(slope, variance / temperature**3)
    print(f"tau = {temperature}: H = {H.item():.3f}, dH/dtau = {slope:.3f}")

# %%
# The curve runs between two limits. Near 0 only the most likely token is left. Far above 1 the model
# is ignored, and all tokens are equally likely.

temperatures = torch.logspace(-1, 1, 41, dtype=torch.float64)
fig, (ax,) = figure(4.8, 4.0)
for name, text, style in (
    ("sharp", sharp, "-"),
    ("example", example, "--"),
    ("flat", flat, ":"),
):
    values = torch.stack(
        [entropy(apply_temperature(by_text[text], tau)) for tau in temperatures]
    )
    assert (values.diff() > -1e-12).all()  # up to rounding
    ax.plot(temperatures, values, style, label=f"{name}: {text}")
ax.axhline(math.log(V), color="black", linewidth=1, label="log V")
ax.set_xscale("log")
ax.set_xticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
ax.minorticks_off()
ax.set(xlabel="temperature τ", ylabel="entropy H in nats")
ax.set_title("Entropy against temperature")
fig.legend(loc="outside lower center", ncols=2, fontsize=8)
plt.show()

assert apply_temperature(logits, 0.0001).softmax(-1).max() > 0.999
assert math.log(V) - entropy(apply_temperature(logits, 1000.0)) < 0.001

# %%
# A temperature of 0 would divide by zero. ``Sampler`` takes it as the name of the limit, the most
# likely token. A negative temperature would reverse the order of the tokens, and ``Sampler`` refuses
# it. (An old program accepted it: defect G13.)

from lm_from_scratch.generation.sampling import Sampler

seen = torch.zeros(1, V, dtype=torch.bool)  # no token has occurred yet
greedy = Sampler(temperature=0.0)(logits[None], seen, torch.tensor([0.5]))
assert greedy == logits.argmax()
assert apply_temperature(logits, -1.0).argmax() == logits.argmin()
try:
    Sampler(temperature=-1.0)
    raise AssertionError("a negative temperature must be refused")
except ValueError as error:
    print(error)

# %%
# How greedy text differs from real text
# --------------------------------------
#
# The lesson shows one greedy text that loops. Is that a rule? Here the model writes 120 tokens after
# four beginnings, twice each, at three temperatures. Two numbers describe a text:
#
# * the share of its groups of four tokens that are repetitions of an earlier group,
# * its *surprise*: the mean of :math:`-\log p` over its tokens, under the model at temperature 1.
#
# The yardstick is real text: pieces of the same length from documents that the model was not trained
# on.

from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.training.loss import causal_lm_loss


def repeated(row: list[int], n: int = 4) -> float:
    groups = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
    return 1 - len(set(groups)) / len(groups)


def surprise(prompts: list[list[int]], rows: list[list[int]]) -> list[float]:
    """Nats per token of each row after its prompt; both begin at the end-of-text token."""
    losses = []
    for prompt, row in zip(prompts, rows):
        before_each = logits_of([*prompt, *row][1:-1])[-len(row) :]  # (T, V)
        losses.append(causal_lm_loss(before_each, torch.tensor(row)).item())
    return losses


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


length, times = 120, 2
prompts = [[end, *tokenizer.encode(text)] for text in beginnings[:4]]
starts = [prompt for prompt in prompts for _ in range(times)]
real_text = [
    [end, *ids[i : i + length]]
    for ids in (tokenizer.encode(document.text) for document in held_out)
    for i in range(0, min(len(ids) - length, 2 * length), length)
]
real_repeated = mean([repeated(row[1:]) for row in real_text])
real_surprise = mean(
    surprise([row[:3] for row in real_text], [row[3:] for row in real_text])
)

measured = {}
for tau in (0.0, 1.0, 1.3):
    rows = complete(
        generate(
            model,
            prompts,
            length,
            Sampler(temperature=tau),
            num_return_sequences=times,
        )
    )
    measured[tau] = [repeated(row) for row in rows], surprise(starts, rows)
    print(
        f"tau = {tau:<4}  repeated {mean(measured[tau][0]):4.0%}  surprise {mean(measured[tau][1]):.2f}"
    )
print(
    f"real text   repeated {real_repeated:4.0%}  surprise {real_surprise:.2f}"
)

# %%
# Greedy text repeats itself more than five times as much as real text and has less than half of its
# surprise. Real text is not a chain of most likely tokens: it says what could not be guessed.

assert len(set(measured[0.0][0][:times])) == 1
assert mean(measured[0.0][0]) > 5 * max(mean(measured[1.0][0]), real_repeated)
assert (
    mean(measured[0.0][1])
    < 0.5 * real_surprise
    < real_surprise
    < mean(measured[1.3][1])
)

# %%
# Why does it repeat? What the text says once becomes more likely to be said again. Take six passages of
# the real text. On average a passage costs fewer nats after itself than after another passage, so
# every repetition prepares the next one. Drawing can leave such a loop by chance; the greedy choice
# cannot.

passages = [row[1:25] for row in real_text[:6]]
cost = {}
for a, before in enumerate(passages):
    for b, after in enumerate(passages):
        (cost[a, b],) = surprise([[end, *before]], [after])
same = mean([cost[a, b] for a, b in cost if a == b])
other = mean([cost[a, b] for a, b in cost if a != b])
print(f"after itself {same:.2f}, after another {other:.2f} nats per token")

assert same < other

# %%
# What top-k and top-p keep
# -------------------------
#
# Top-p keeps the smallest set of most likely tokens whose probability reaches p. Forbidden logits
# become minus infinity, so the softmax gives their probability to the tokens that are kept.

from lm_from_scratch.generation.sampling import keep_top_p

print(inspect.getsource(keep_top_p))

# %%
# Two properties to check, of the example and its tail:


def kept(z: Tensor) -> Tensor:
    """The tokens that can still be drawn (V,)."""
    return z.reshape(-1, V)[0].isfinite()


four, half = (
    kept(keep_top_k(logits[None], 4)),
    kept(keep_top_p(logits[None], 0.5)),
)
assert four.sum() == 4
assert p[half].sum() >= 0.5 > p[half].sum() - p[half].min()
torch.testing.assert_close(
    keep_top_k(logits[None], 4)[0].softmax(-1)[four], p[four] / p[four].sum()
)

# %%
# Top-p reaches 0.5, and would not without its last token. The tokens that are kept keep their
# proportions.

# %%
# Repetition penalty
# ------------------
#
# The penalty makes tokens that the row already holds less likely. With a factor :math:`r > 1`, a
# positive logit is divided by it and a negative one is multiplied:
#
# .. math::
#
#    z_i \leftarrow \min(z_i / r, \; z_i \, r)
#
# Pretend that the most likely token has occurred already.

from lm_from_scratch.generation.sampling import apply_repetition_penalty

marked = torch.zeros(1, V, dtype=torch.bool)
marked[0, top[0]] = True
penalised = apply_repetition_penalty(logits[None], marked, 1.5)[0]

assert penalised.softmax(-1)[top[0]] < p[top[0]]
torch.testing.assert_close(
    apply_repetition_penalty(logits[None], torch.ones_like(marked), 1.5)[0],
    torch.minimum(logits / 1.5, logits * 1.5),
)

# %%
# The formula has a catch. A number added to all logits changes nothing for the softmax. But it does for
# the penalty, which depends on which of the logits are positive. So it can treat two models with the same
# distribution differently.

for shift in (0.0, 5.0, -20.0):
    shifted = logits + shift
    before = shifted.softmax(-1)[top[0]]
    after = apply_repetition_penalty(shifted[None], marked, 1.5)[0].softmax(-1)[
        top[0]
    ]
    print(
        f"all logits {shift:+5.1f}: probability {before:.4f} becomes {after:.5f}"
    )

a, b = (
    apply_repetition_penalty((logits + c)[None], marked, 1.5)[0].softmax(-1)
    for c in (0.0, 5.0)
)
torch.testing.assert_close((logits + 5.0).softmax(-1), p)
assert b[top[0]] < a[top[0]] < p[top[0]]

# %%
# The order of the steps
# ----------------------
#
# ``Sampler`` applies the steps in the usual order.

print(inspect.getsource(Sampler.logits))

# %%
# Some neighbouring steps may be swapped. Penalty and temperature both scale a logit and keep its sign. Top-k
# looks at the order of the logits alone, and a temperature does not change it. But top-p looks at
# the probabilities, so it may be swapped neither with the temperature nor with top-k.

z = by_text[flat][None]
everything = torch.ones_like(marked)


def warm(z: Tensor) -> Tensor:
    return apply_temperature(z, 2.0)


torch.testing.assert_close(
    warm(apply_repetition_penalty(z, everything, 1.3)),
    apply_repetition_penalty(warm(z), everything, 1.3),
)
torch.testing.assert_close(warm(keep_top_k(z, 50)), keep_top_k(warm(z), 50))

orders = {
    "temperature 2, then top-p 0.9": keep_top_p(warm(z), 0.9),
    "top-p 0.9, then temperature 2": warm(keep_top_p(z, 0.9)),
    "top-k 50, then top-p 0.9": keep_top_p(keep_top_k(z, 50), 0.9),
    "top-p 0.9, then top-k 50": keep_top_k(keep_top_p(z, 0.9), 50),
}
for name, cut in orders.items():
    print(f"{name}: {kept(cut).sum()} tokens")

first, second, third, fourth = (int(kept(cut).sum()) for cut in orders.values())
assert first > 1.5 * second
assert third < fourth == 50

# %%
# A high temperature before top-p moves probability into the tail, so the set must grow to reach its
# p. After top-k the probability is shared among fewer tokens, so 0.9 is reached sooner.
#
# The same as transformers
# ------------------------
#
# ``transformers`` has a class for each step. On random logits each class gives the same numbers as our
# function, and so does the whole chain.

import transformers
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

generator = torch.Generator().manual_seed(0)
z = 4 * torch.randn(33, 997, generator=generator)  # (B, V)
idx = torch.randint(997, (33, 41), generator=generator)
occurred = torch.zeros(33, 997, dtype=torch.bool).scatter_(1, idx, True)

penalty, warper = (
    RepetitionPenaltyLogitsProcessor(1.3),
    TemperatureLogitsWarper(0.7),
)
torch.testing.assert_close(
    apply_repetition_penalty(z, occurred, 1.3), penalty(idx, z)
)
torch.testing.assert_close(apply_temperature(z, 0.7), warper(idx, z))
for k in (1, 7, 50, 997):
    torch.testing.assert_close(keep_top_k(z, k), TopKLogitsWarper(k)(idx, z))
for mass in (0.01, 0.3, 0.9, 0.999):
    torch.testing.assert_close(
        keep_top_p(z, mass), TopPLogitsWarper(mass)(idx, z)
    )

chain = LogitsProcessorList(
    [penalty, warper, TopKLogitsWarper(50), TopPLogitsWarper(0.9)]
)
ours = Sampler(temperature=0.7, top_k=50, top_p=0.9, repetition_penalty=1.3)
torch.testing.assert_close(ours.logits(z, occurred), chain(idx, z))
print("penalty, temperature, top-k, top-p and their chain: equal")

# %%
# A seed for each row
# -------------------
#
# ``generate`` runs many rows at once. If they shared one source of random numbers, what a row says
# would depend on its neighbours. Here row i has a source of its own, seeded with ``seed + i``, and
# draws one number at each step.
#
# So a row of a batch gets the text that it would get alone, although the prompts have different lengths
# and are padded.

prompts = [[end, *tokenizer.encode(text)] for text in (sharp, example, flat)]
nucleus = Sampler(temperature=0.8, top_p=0.9)
together = complete(generate(model, prompts, 30, nucleus, seed=7))
for i, prompt in enumerate(prompts):
    (alone,) = complete(generate(model, [prompt], 30, nucleus, seed=7 + i))
    assert together[i] == alone
print(
    "prompts of",
    *(len(prompt) for prompt in prompts),
    "tokens: each row as if alone",
)

# %%
# Bug museum
# ----------
#
# The penalty that rewards
# ~~~~~~~~~~~~~~~~~~~~~~~~
#
# The story is in the lesson; here is the arithmetic. An old program divided the logit of every token
# that had occurred, as the formula of the CTRL paper says. Divide a negative logit by 2, and it moves
# *up*, towards zero. (G9)

z = torch.tensor([[1.5, -1.5, -1.65]])
has_occurred = torch.tensor([[False, False, True]])
old = torch.where(has_occurred, z / 2, z)
new = apply_repetition_penalty(z, has_occurred, 2.0)
before, after, right = (x.softmax(-1)[0, 2].item() for x in (z, old, new))
print(f"before {before:.3f}, old penalty {after:.3f}, ours {right:.3f}")

assert (round(before, 3), round(after, 3)) == (0.039, 0.085)
assert right < before < after

# %%
# The probability of the repeated token rises from 0.039 to 0.085. The fixed line looks at the sign:
# ``torch.where(logits > 0, logits / penalty, logits * penalty)``.
#
# The test that finds the mistake states the purpose of the penalty: whatever the logits are, a token that
# has occurred never becomes more likely.

generator = torch.Generator().manual_seed(1)
z = 3 * torch.randn(500, 11, generator=generator)
one = torch.zeros(500, 11, dtype=torch.bool)
one[:, 4] = True
before = z.softmax(-1)[:, 4]
assert (apply_repetition_penalty(z, one, 1.3).softmax(-1)[:, 4] <= before).all()
wrong = torch.where(one, z / 1.3, z).softmax(-1)[:, 4] > before
print(
    f"the old line makes the token more likely in {wrong.float().mean():.0%} of the rows"
)

assert 0.3 < wrong.float().mean() < 0.7

# %%
# One token too many
# ~~~~~~~~~~~~~~~~~~
#
# Top-p of the same program removed a token when the sum *up to the token before it* exceeded p. Take
# two equally likely tokens and p = 0.5. The first reaches p but does not exceed it, so the second
# stays. (G14)


def old_top_p(logits: Tensor, p: float) -> Tensor:
    ordered, order = logits.sort(descending=True)
    removed = ordered.softmax(-1).cumsum(-1) > p
    removed[:, 1:] = removed[:, :-1].clone()
    removed[:, 0] = False
    return logits.masked_fill(
        torch.zeros_like(removed).scatter(-1, order, removed), -math.inf
    )


z = torch.zeros(1, 2)
print("old ", old_top_p(z, 0.5).softmax(-1)[0].tolist())
print("ours", keep_top_p(z, 0.5).softmax(-1)[0].tolist())

assert old_top_p(z, 0.5).isfinite().sum() == 2
assert keep_top_p(z, 0.5).isfinite().sum() == 1
assert TopPLogitsWarper(0.5)(None, z).isfinite().sum() == 1

# %%
# The fixed line removes a token when the sum *before* it has reached p: ``before >= p``.
#
# On random logits the two lines agree, because no sum hits p exactly. A random test does not find a
# mistake at a boundary. A test at the boundary does.

z = 4 * torch.randn(500, 997, generator=generator)
torch.testing.assert_close(old_top_p(z, 0.9), keep_top_p(z, 0.9))

# %%
# Exercises
# ---------
#
# 1. *Easy.* Find the temperature at which the model's text is as surprising as real text. Hint:
#    ``measured`` and ``real_surprise`` are on the page; add temperatures where the curve crosses.
# 2. *Medium.* Draw with V numbers instead of one: the largest of :math:`z_i + g_i` with
#    :math:`g_i = -\log(-\log u_i)` is a draw from the softmax (the Gumbel trick). Check it with
#    ``chi_square``, and say why ``draw`` is the better choice in ``generate``.
# 3. *Hard.* Penalise only tokens of the last w positions, and draw the share of repeated groups
#    against w. Hint: ``seen`` is a mask that the caller fills; write a loop around the model that
#    fills it from a window. Which w is needed to break a loop of 20 tokens?
#
# Summary
# -------
#
# * A token is drawn with one uniform number on the line of cumulated probabilities. With a comb of N
#   numbers, each token's count is right to within one.
# * The entropy never falls with the temperature: its slope is :math:`\operatorname{Var} / \tau^3`.
# * Greedy text repeated itself more than five times as much as real text or text at temperature 1, and
#   had less than half of the surprise of real text.
# * The penalty and the temperature may be swapped, and so may the temperature and top-k. Top-p may
#   be swapped with neither temperature nor top-k.
# * Every step equals the one of ``transformers``, and every row of a batch gets the text that it would
#   get alone.
#
# Sources
# -------
#
# * Holtzman, Buys, Du, Forbes, Choi: `The Curious Case of Neural Text Degeneration <https://arxiv.org/abs/1904.09751>`_, 2020. Top-p, loops, and the surprise of human text.
# * Fan, Lewis, Dauphin: `Hierarchical Neural Story Generation <https://arxiv.org/abs/1805.04833>`_, 2018. Top-k.
# * Keskar, McCann, Varshney, Xiong, Socher: `CTRL <https://arxiv.org/abs/1909.05858>`_, 2019. The repetition penalty.
# * The dog that repeated itself: `a penalty divides negative logits <https://github.com/huggingface/transformers/issues/2302>`_, 2019, fixed in `pull request 2303 <https://github.com/huggingface/transformers/pull/2303>`_.
# * `The logits processors of transformers <https://github.com/huggingface/transformers/blob/main/src/transformers/generation/logits_process.py>`_.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
