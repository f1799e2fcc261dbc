r"""
Every kind meets every case
===========================

The package has five kinds of attention: the formula, the fused kernel, tiles, and the two ways of the lesson on
`packing <3_flex_and_packing.ipynb>`_, FlexAttention and packed sequences. All claim to compute one result. They are
fast for different reasons, and can go wrong in different places. How do you find out that all of them are right?

Most people begin by testing a full causal text. This page puts every kind on every kind of input, forward and
backward, in four number formats, and compares all of it with one slow and simple program. Then it plants bugs, and
looks which inputs reveal them. Six of the seven pass the full causal text.

One table instead of many tests
-------------------------------

The rows of the table are *cases*: the positions of tokens, what is padding, how many heads share a key. The columns
are *kinds*: functions with one signature. A cell holds the largest error of one kind on one case, or the message with
which the kind refused.

A table has an advantage over a list of tests. A new kind gets all cases, and a new case gets all kinds. A combination
that nobody thought of is an empty cell that anybody can see.

The expected result must come from elsewhere, because kinds can share a mistake, as we will see. So there is an
*oracle* beside the table: written to be read, in float64, and sharing no line with the kinds.
"""

# sphinx_gallery_thumbnail_number = 1
# sphinx_gallery_words = ["attn_implementation", "eager", "sdpa", "flash_attention_2", "different results", "numerical tolerance", "rtol atol"]
# sphinx_gallery_needs = ["1_attention", "2_masks"]

import inspect
import itertools
import math
import textwrap
from collections import Counter, defaultdict

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from lm_from_scratch.instruments.conformance import Case, oracle

print(inspect.getsource(Case.visible))
print(inspect.getsource(oracle))

# %%
# There is no mask tensor here. Whether a query sees a key is decided with Python integers, for one pair at a time. A
# query that sees nothing gets a sum of nothing, which is 0.
#
# Nothing checks the oracle, so you have to check it by hand. Queries of 0 give all visible keys the same weight, so
# each result is a plain mean that you can compute in your head.

from lm_from_scratch.instruments.conformance import itself

values = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(1, 1, 4, 1)
zeros = torch.zeros_like(values)
by_hand = {
    "causal": (itself([[0, 1, 2, 3]]), [1, 5.5, 37, 277.75]),
    "window of 2": (itself([[0, 1, 2, 3]], window=2), [1, 5.5, 55, 550]),
    "padding": (itself([[-1, 0, -1, 1]]), [0, 10, 0, 505]),
    "two documents": (
        itself([[0, 1, 0, 1]], [[0, 0, 1, 1]]),
        [1, 5.5, 100, 550],
    ),
}
for name, (case, expected) in by_hand.items():
    result = oracle(case, zeros, values, values).flatten()
    print(f"{name:14}", [round(y, 2) for y in result.tolist()])
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(result, wanted)

# %%
# The cases
# ---------
#
# A case is data: positions of queries and keys, documents, a window, numbers of heads. Here is one case, and how many
# cases have each property.

from lm_from_scratch.attention.kinds import ATTENTION_KINDS
from lm_from_scratch.instruments.conformance import CASES, DTYPES, matrix

case = CASES["chunk, padding inside, window"]
print("queries at", case.queries)
print("keys at   ", case.keys)
print("window    ", case.window)
for row in case.visibility().mask[0, 0].int():
    print(*row.tolist())


def properties(case):
    padded = any(-1 in row for row in case.keys)
    rows = case.visibility().mask.any(-1)
    found = {
        "a window": case.window is not None,
        "padding": padded,
        "documents": case.key_documents is not None,
        "shared key heads": case.n_head != case.n_kv_head,
        "fewer queries than keys": len(case.queries[0]) < len(case.keys[0]),
        "more keys than a tile": len(case.keys[0]) > 128,
        "a query without a key": not rows.all(),
        "large scores": case.scale > 1,
        "dropout": case.dropout > 0,
    }
    return [name for name, holds in found.items() if holds]


total = Counter(name for case in CASES.values() for name in properties(case))
for name, count in total.items():
    print(f"{count:3} of {len(CASES)} cases have {name}")
assert min(total.values()) >= 1
assert len(total) == 9

# %%
# How large may an error be?
# --------------------------
#
# A number format rounds to a relative precision, its *epsilon*. The oracle and the kinds get the same inputs, rounded
# already, so every error comes from the computation. We take the largest difference, divided by the largest entry of
# the result where that exceeds 1.
#
# The limits of this page are 16 epsilon for results and 64 for gradients. The 16-bit formats get a quarter of that,
# because their sums are taken in float32 and rounded late.
#
# There is one exception. A score of size n carries a rounding error of n times epsilon / 2, and the exponential turns
# an absolute error into a relative one. So in two cases with huge scores, gradients in float32 and float64 may be wrong
# by n epsilon.


def largest_score(case):
    q, k, _, _ = case.tensors(torch.float64)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (q @ k.mT).abs().max().item() / math.sqrt(q.shape[-1])


HUGE = {
    name: largest_score(case) for name, case in CASES.items() if case.scale > 1
}
print({name: round(score) for name, score in HUGE.items()})
assert max(HUGE.values()) > torch.finfo(torch.float16).max
assert all(
    largest_score(case) < 10 for name, case in CASES.items() if name not in HUGE
)


def in_epsilon(cell):
    eps = torch.finfo(cell.dtype).eps
    errors = cell.forward, cell.gradient
    return [None if error is None else error / eps for error in errors]


def limits(cell):
    if cell.dtype in (torch.float16, torch.bfloat16):
        return 4, 16
    return 16, max(64, HUGE.get(cell.case, 0))


# %%
# Dropout is random, so its case compares a mean over many draws with the result without dropout. The error is noise,
# and its limit is 0.1. An error of zero is wrong too: then nothing was dropped.


def is_right(cell):
    if cell.case == "dropout":
        errors = cell.forward, cell.gradient
        return all(error is None or 1e-4 < error < 0.1 for error in errors)
    pairs = zip(in_epsilon(cell), limits(cell), strict=True)
    return all(error is None or error <= limit for error, limit in pairs)


# %%
# A comparison with NaN is never true, so NaN counts as wrong.
#
# The matrix
# ----------
#
# Now all of it runs.

cells = list(matrix())
tally = Counter(
    "right, forward and backward" if cell.gradient is not None
    else "right, forward only" if cell.forward is not None
    else "refused"
    for cell in cells
    if is_right(cell)
)  # fmt: skip
sizes = len(CASES), len(ATTENTION_KINDS), len(DTYPES)
print(f"{len(cells)} cells = {sizes[0]} cases x {sizes[1]} kinds x {sizes[2]}")
for name, count in tally.items():
    print(f"{count:5} {name}")
assert len(cells) == math.prod(sizes)
assert tally.total() == len(cells)
assert tally["right, forward and backward"] > len(cells) / 2

# %%
# No cell is wrong. A function that refuses everything would have no wrong cell either, so the number of cells with a
# measured result matters as much.
#
# First the results in float32, forward. Numbers are errors in epsilon, rounded up: 0 is exact, and a dash is a refusal.


def show(name, entries):
    *above, last = textwrap.wrap(name, 23, subsequent_indent="  ") or [""]
    for line in above:
        print(line)
    print(f"{last:24}" + "".join(f"{entry:>5}" for entry in entries))


def table(which, dtype, kinds, names):
    found = {
        (cell.case, cell.kind): cell for cell in cells if cell.dtype == dtype
    }
    show("error in epsilon", [kind[:4] for kind in kinds])
    for case in names:
        if case != "dropout":
            row = [in_epsilon(found[case, kind])[which] for kind in kinds]
            show(case, ["-" if e is None else math.ceil(e) for e in row])


table(0, torch.float32, list(ATTENTION_KINDS), CASES)
float32 = [cell for cell in cells if cell.dtype == torch.float32]
worst = max(
    cell.forward
    for cell in float32
    if cell.forward is not None and cell.case != "dropout"
)
print(f"largest error in float32: {worst:.1e}")
assert worst < 16 * torch.finfo(torch.float32).eps < 2e-6

# %%
# Then the gradients of queries, keys and values in the two cases with huge scores, in the same unit. FlexAttention has
# no backward pass on a CPU.

can_train = [kind for kind in ATTENTION_KINDS if kind != "flex"]
table(1, torch.float32, can_train, HUGE)

# %%
# Such scores are large enough for rounding to matter, and kinds differ in what they round. That is why the limit has an
# exception.
#
# Now all formats. For each kind, the next lines print the largest error in epsilon over all other cases, results and
# gradients.

formats = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
ordinary = [
    cell for cell in cells if cell.case not in HUGE and cell.case != "dropout"
]
for which, title in enumerate(("forward", "gradient")):
    print(f"{title:9}" + "".join(f"{name:>9}" for name in formats.values()))
    for kind in ATTENTION_KINDS:
        row = ""
        for dtype in DTYPES:
            errors = [
                in_epsilon(cell)[which]
                for cell in ordinary
                if (cell.kind, cell.dtype) == (kind, dtype)
            ]
            errors = [error for error in errors if error is not None]
            row += f"{max(errors):9.1f}" if errors else f"{'-':>9}"
        print(f"{kind:9}{row}")

# %%
# The figure has a dot for each of these cells; errors of 0 are at the lower edge. Dashed lines are the limits of
# float32 and float64, dotted lines those of the 16-bit formats.

from lm_from_scratch.instruments.plot import COLOURS, figure

_, axes = figure(6.4, 6.4, rows=2)
for which, ax in enumerate(axes):
    for i, (dtype, name) in enumerate(formats.items()):
        for j, kind in enumerate(ATTENTION_KINDS):
            errors = [
                max(in_epsilon(cell)[which], 0.02)
                for cell in ordinary
                if (cell.kind, cell.dtype) == (kind, dtype)
                and in_epsilon(cell)[which] is not None
            ]
            marks = dict(
                color=COLOURS[i], marker="osD^"[i], markersize=4, alpha=0.6
            )
            x = [j + 0.18 * (i - 1.5)] * len(errors)
            ax.plot(
                x, errors, linestyle="", label=name if j == 0 else None, **marks
            )
    for limit, style in zip((16, 4) if which == 0 else (64, 16), ("--", ":")):
        ax.axhline(limit, color=COLOURS[7], linestyle=style, linewidth=1.2)
    ax.set(yscale="log", ylim=(0.015, 200), ylabel="error / epsilon")
    ax.set_xticks(range(len(ATTENTION_KINDS)), list(ATTENTION_KINDS))
    ax.grid(axis="x", visible=False)
axes[0].set_title("Forward: one dot for each case")
axes[1].set_title("Gradients (flex has none on a CPU)")
axes[1].legend(
    frameon=False,
    ncols=2,
    fontsize=9,
    loc="lower center",
    bbox_to_anchor=(0.7, 0.0),
)
plt.show()

# %%
# Two kinds that agree
# --------------------
#
# Why not do without the oracle and compare the kinds with each other? The next lines count the cells in which two kinds
# have the same error to the last bit.

errors = {(cell.kind, cell.case, cell.dtype): cell for cell in cells}
same = Counter()
for case, dtype in itertools.product(CASES, DTYPES):
    for pair in itertools.combinations(ATTENTION_KINDS, 2):
        one, other = (errors[kind, case, dtype].forward for kind in pair)
        same[pair] += one is not None and one == other and one > 0
for pair, count in same.most_common(3):
    print(f"{' and '.join(pair):18} {count} of {len(CASES) * len(DTYPES)}")
assert same.most_common(1)[0][0] == ("sdpa", "packed")
assert same["sdpa", "packed"] > len(CASES) * len(DTYPES) / 2

# %%
# Packed sequences go through the fused kernel, one after the other. So ``sdpa`` and ``packed`` have the same error to
# the last bit in more than half of their cells. If the kernel were wrong there, both would be wrong together, and a
# comparison of the two would pass.
#
# What a kind refuses
# -------------------
#
# A kind refuses with a ``ValueError`` that gives the reason; a wrong result without an error would be worse. These are
# the messages, with the number of cells and the cases.

refusals = defaultdict(list)
for cell in cells:
    if cell.unsupported is not None:
        key = cell.kind, cell.unsupported, cell.forward is not None
        refusals[key].append(cell.case)
for (kind, message, has_result), cases in refusals.items():
    names = "; ".join(sorted(set(cases)))
    if has_result:
        names = f"the gradients of {len(set(cases))} cases"
    print(textwrap.fill(f"{kind}, {len(cases)} cells ({names}):", 72))
    print(
        textwrap.fill(
            message, 72, initial_indent="    ", subsequent_indent="    "
        )
    )

assert {kind for kind, _, _ in refusals} == {"tiled", "flex", "packed"}

# %%
# The formula and the fused kernel refuse nothing. Packing takes the tokens out of their rows, so it needs them in
# order. In a ring buffer they are not, which is the case "keys in any order".
#
# Planted bugs
# ------------
#
# A test that never failed has not been tested. Here are seven bugs. The first widens a window by one key. Each of the
# others replaces one expression in a copy of the package's source, and nothing else.

from lm_from_scratch.attention import online_softmax, sdpa
from lm_from_scratch.attention.attention import formula_attention


def one_key_more(q, k, v, visibility, dropout=0.0):
    window = visibility.window and visibility.window + 1
    return formula_attention(q, k, v, visibility.within(window), dropout)


def planted(module, kind, old, new):
    source = inspect.getsource(module)
    assert old in source
    copy = {"__name__": "planted"}
    exec(source.replace(old, new), copy)
    return copy[f"{kind}_attention"]


def in_tiles(old, new):
    return planted(online_softmax, "tiled", old, new)


bugs = {
    "W": ("window + 1", one_key_more),
    "C": (
        "triangle in the corner of the first key",
        planted(
            sdpa,
            "sdpa",
            "visibility.is_causal",
            "visibility.hides_only_the_future",
        ),
    ),
    "R": (
        "no rescale of the tiles before",
        in_tiles("rescale = torch.exp(m - new_m)", "rescale = 1.0"),
    ),
    "H": (
        "key heads 0 1 0 1, not 0 0 1 1",
        in_tiles(
            "repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])",
            "(x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))",
        ),
    ),
    "I": (
        "running maximum starts at -inf",
        in_tiles(
            "torch.full_like(q_tile[..., :1], torch.finfo(work).min)",
            "torch.full_like(q_tile[..., :1], -torch.inf)",
        ),
    ),
    "D": (
        "no delta in the backward pass",
        in_tiles("do @ v_tile.mT - delta", "do @ v_tile.mT"),
    ),
    "U": (
        "no float32 inside",
        in_tiles("torch.promote_types(q.dtype, torch.float32)", "q.dtype"),
    ),
}
wrong_kinds = {letter: attend for letter, (_, attend) in bugs.items()}
planted_cells = list(matrix(wrong_kinds, dtypes=(torch.float32, torch.float16)))
red = {
    letter: [
        cell
        for cell in planted_cells
        if cell.kind == letter and not is_right(cell)
    ]
    for letter in bugs
}

# %%
# The bugs run in float32 and float16. A cell below is marked ``x`` if a result is wrong, and ``g`` if only a gradient
# is. Cases that reveal no bug are left out.


def mark(letter, case):
    found = [cell for cell in red[letter] if cell.case == case]
    wrong = any(
        not error <= limits(cell)[0]
        for cell in found
        for error in in_epsilon(cell)[:1]
    )
    return "x" if wrong else "g" if found else "."


for letter, (what, _) in bugs.items():
    print(f"{letter}  {what}: {len({cell.case for cell in red[letter]})} cases")
print()
seen = {}
show("case", bugs)
for case in CASES:
    marks = [mark(letter, case) for letter in bugs]
    seen[case] = {letter for letter, m in zip(bugs, marks) if m != "."}
    if seen[case]:
        show(case, marks)
assert all(red.values())

# %%
# Read the columns. Only cases longer than a tile reveal a missing rescale: with fewer keys than a tile holds, there is
# nothing to rescale. Only cases after a cache reveal the wrong corner. The missing delta gives right results
# everywhere, so only gradients show it. The missing float32 shows in float16 and not in float32.

long = {case for case in CASES if "longer than a tile" in case}
assert {cell.case for cell in red["R"]} == long
assert all("after a cache" in cell.case for cell in red["C"])
assert {cell.dtype for cell in red["U"]} == {torch.float16}
marks = {mark("D", case) for case in CASES}
assert marks == {"g", "."}

# %%
# Now read the row that everybody tests: "causal, known", a full text. Its results reveal no bug at all, and its
# gradients reveal one.

assert seen["causal, known"] == {"D"}
assert mark("D", "causal, known") == "g"

for size in range(1, len(bugs) + 1):
    groups = [
        group
        for group in itertools.combinations(CASES, size)
        if set().union(*(seen[case] for case in group)) == set(bugs)
    ]
    if groups:
        break
print(f"{size} cases reveal all seven bugs, in {len(groups)} ways. One way:")
print(*groups[0], sep="\n")
assert 1 < size < len(bugs)

# %%
# A few cases would be enough for these seven bugs. The rest of the table is for the bugs that we have not thought of.
#
# A query without a key
# ---------------------
#
# In a padded batch some queries see nothing: their softmax divides 0 by 0. Programs differ in what they return. Here is
# row 0 of the case "left padding", whose first token is padding, from seven functions.

import transformers
from transformers.models.qwen2.modeling_qwen2 import eager_attention_forward

case = CASES["left padding"]
q, k, v, _ = case.tensors(torch.float32)
visible = case.visibility().mask
minimum = torch.finfo(torch.float32).min


def softmax_with(fill):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~visible, fill).softmax(-1) @ v


def of_transformers():
    module = torch.nn.Module().eval()
    module.num_key_value_groups = 1
    added = torch.zeros(visible.shape).masked_fill(~visible, minimum)
    scale = 1 / math.sqrt(q.shape[-1])
    y, _ = eager_attention_forward(module, q, k, v, added, scale)
    return y.transpose(1, 2)  # from (B, T, H, D)


results = {
    "softmax, -inf": softmax_with(-torch.inf)[0, 0, 0],
    "softmax, minimum": softmax_with(minimum)[0, 0, 0],
    "transformers, eager": of_transformers()[0, 0, 0],
    "torch, sdpa": F.scaled_dot_product_attention(q, k, v, attn_mask=visible)[
        0, 0, 0
    ],
}
for kind in ("formula", "tiled", "packed"):
    attend = ATTENTION_KINDS[kind]
    results[f"package, {kind}"] = attend(q, k, v, case.visibility(), 0.0)[
        0, 0, 0
    ]
for name, y in results.items():
    print(f"{name:20}", *(f"{number:6.2f}" for number in y[:4].tolist()))

mean = v[0, 0].mean(0)
assert results["softmax, -inf"].isnan().all()
torch.testing.assert_close(results["softmax, minimum"], mean)
torch.testing.assert_close(results["transformers, eager"], mean)
for kind in ("formula", "tiled", "packed"):
    assert (results[f"package, {kind}"] == 0).all()

# %%
# A softmax over infinities gives NaN. With the most negative finite number it gives the plain mean of all seven values,
# including those of padding and of the future.
#
# In this package the answer is 0, for three reasons. A sum over no keys is 0. A result of 0 contains nothing that is
# hidden, so nothing can leak. And its gradient is 0, where NaN would spread.

spread = softmax_with(-torch.inf)  # the next layer reads these as values
weights = torch.zeros(7)
weights[6] = 1.0  # it gives padding the weight 0
print("0 times NaN in the next layer:", (weights @ spread[0, 0])[:2].tolist())
assert (weights @ spread[0, 0]).isnan().all()

# %%
# So one NaN is not harmless, even in a row that nobody reads: 0 times NaN is NaN.
#
# Bug museum
# ----------
#
# The minimum plus a little less
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Earlier code made a mask of ``finfo.min`` and *added* it to the scores. In float16 the most negative finite number is
# -65504, and the next step down is infinite. A score of -16 or less takes it. (Q23)

half = torch.finfo(torch.float16).min
for score in (0.0, -15.0, -16.0, -100.0):
    total = torch.tensor(half).half() + torch.tensor(score).half()
    print(f"{half:.0f} + ({score:.0f}) = {total.item():.0f}")
    assert total.isinf() == (score <= -16)
lowest = torch.tensor(torch.finfo(torch.bfloat16).min).bfloat16()
assert lowest - 10000 == lowest

# %%
# So the row of a padding token, which should become a plain mean, becomes NaN if its scores are negative enough. Nobody
# reads that row, and the layer's real rows are right. But the next layer multiplies its values by 0.


def add(scores, hidden):
    return scores + torch.zeros_like(scores).masked_fill(hidden, half)


def fill(scores, hidden):
    return scores.masked_fill(hidden, half)


def layers(hide, factor, n):
    x = factor * torch.ones(7, 4).half()  # every score is -2 factor^2
    visible = case.visibility().mask[0, 0]
    for _ in range(n):
        scores = hide(-x @ x.mT / 2, ~visible)
        x = scores.float().softmax(-1).half() @ x
    return x[:2], x[2:]  # rows of padding, real rows


print("NaN in rows of     padding   real   real, next layer")
for name, hide in (("add", add), ("fill", fill)):
    for factor in (1.0, 4.0):
        rows = *layers(hide, factor, 1), layers(hide, factor, 2)[1]
        counts = [x.isnan().sum().item() for x in rows]
        score = f"score {-2 * factor**2:.0f}"
        print(f"{name:5}{score:13}{counts[0]:7}{counts[1]:7}{counts[2]:11}")
        broken = hide is add and factor == 4.0
        assert counts == ([8, 0, 20] if broken else [0, 0, 0])

# %%
# With small scores the mistake does not show, and in bfloat16 the minimum absorbs even a score of -10000. The fixed
# line is in ``attention_weights``: it replaces hidden scores, in float32, and sets hidden weights to 0. The check
# combines padding with large negative scores, in float16, and looks at all rows, including those of padding.
#
# Which sentence is false?
# ------------------------
#
# 1. Two kinds that agree in every cell may both be wrong.
# 2. A limit of 4 epsilon allows float16 a larger error than bfloat16.
# 3. The gradient of a query that sees no key is 0.
# 4. A kind that refuses every case has no wrong cell.


def refuses(*inputs):
    raise ValueError("no")


alike = dict.fromkeys(("one", "two"), one_key_more)
few = {"window 2": CASES["window 2"]}
one, two = matrix(alike, few, [torch.float64])
assert one[2:] == two[2:]
assert not is_right(one)

query = q.clone().requires_grad_()
formula_attention(query, k, v, case.visibility()).sum().backward()
assert (query.grad[0, :, :2] == 0).all()
assert (query.grad[0, :, 3:] != 0).any()

assert all(is_right(cell) for cell in matrix({"none": refuses}, few))

eps = [torch.finfo(dtype).eps for dtype in (torch.float16, torch.bfloat16)]
print("epsilon of float16 and bfloat16:", eps)
assert eps[1] == 8 * eps[0]

# %%
# The second sentence is false. Of its 16 bits, bfloat16 spends three more on the range of its numbers than float16
# does, so its epsilon is eight times as large.
#
# Exercises
# ---------
#
# 1. *Easy.* Add a case: one query after a cache, three query heads on one key head, a window of 1. Say first which
#    kinds refuse it and what the result is, then run ``matrix`` with this case. Hint: a window of 1 leaves the query's
#    own key.
# 2. *Easy.* Plant ``1 / q.shape[-1]`` for the root in ``tile_scores``. Which cases do *not* see it? A right answer
#    names what they have in common, apart from the one that is refused. Hint: what is a softmax over one key?
# 3. *Medium.* Write a kind that sorts the keys of each row by position and then calls ``packed_attention``. A right
#    answer refuses fewer cases than ``packed``, and all its cells are right. Hint: ``argsort`` and ``gather`` along S;
#    padding has position -1.
# 4. *Hard.* Plant a bug that no cell of the matrix sees, but that gives wrong results for some input. Then add the case
#    that finds it. A right answer is all green before, and red after. Hint: which lengths and head sizes do the cases
#    have?
#
# Summary
# -------
#
# * A conformance matrix puts every kind on every case, and compares it with an oracle that shares no code with the
#   kinds.
# * No cell is wrong: where scores are below 10, results are within 16 epsilon and gradients within 64, and within a
#   quarter of that in the 16-bit formats. What a kind cannot compute, it refuses.
# * ``sdpa`` and ``packed`` have the same error to the last bit in more than half of the cells, because they share a
#   kernel. Agreement is no proof.
# * A full causal text reveals none of seven planted bugs by its results, and one by its gradients.
# * A query without a key gives 0, where a plain softmax gives NaN or the mean of what is hidden.
#
# Sources
# -------
#
# * Vaswani et al.: `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, 2017.
# * DeMillo, Lipton, Sayward: `Hints on Test Data Selection <https://doi.org/10.1109/C-M.1978.218136>`_, 1978. Tests are
#   judged by planted bugs.
# * Goldberg: `What Every Computer Scientist Should Know About Floating-Point Arithmetic
#   <https://doi.org/10.1145/103162.103163>`_, 1991.
# * Dao et al.: `FlashAttention <https://arxiv.org/abs/2205.14135>`_, 2022.
# * Dong et al.: `Flex Attention <https://arxiv.org/abs/2412.05496>`_, 2024.
# * Q23 in the wild: `the minimum plus a score <https://github.com/huggingface/transformers/pull/17306>`_.
# * Rows without a key: `NaN with a padding mask <https://github.com/pytorch/pytorch/issues/103749>`_.

import platform

import lm_from_scratch

print("python", platform.python_version())
print("torch", torch.__version__)
print("transformers", transformers.__version__)
print("lm_from_scratch", lm_from_scratch.__version__)
