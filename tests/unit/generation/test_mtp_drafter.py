"""mtp_drafter.py: the tokens of plain generation, and drafts that are what the layers say to the
row without any cache, after any number of rejections."""

from collections import Counter
from functools import cache

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from mtp_layers import enlarged, of_transformers, taught, theirs
from test_speculative import PENALTY, PROMPTS, Scripted, cache_of, nothing, p_value, rows_of
from tiny_models import ours_from_hf, tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.mtp_drafter import MTPDrafter
from lm_from_scratch.generation.sampling import GREEDY, Sampler
from lm_from_scratch.generation.speculative import distribution, seen_before, speculate
from lm_from_scratch.models.modes import evaluating
from lm_from_scratch.models.mtp import MTP

QWEN2 = tiny_qwen2(vocab_size=31, attention_dropout=0.3).double()
SLIDES = tiny_qwen2(vocab_size=31, sliding_window=5, layer_types=("sliding_attention",) * 3)
MIXED = tiny_qwen2(vocab_size=31, sliding_window=4, max_window_layers=1, tie_word_embeddings=True)
MODELS = {"qwen2": QWEN2, "slides": SLIDES.double(), "mixed": MIXED.double()}


@cache
def layers(name: str, n_depth: int) -> MTP:
    """That have learned a little of what the model says."""
    return taught(MODELS[name], n_depth, PROMPTS)


KINDS = ["none", "growing", "static", "sliding", "paged", "layered"]
lengths_of_prompts = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@examples(6, 50)
@given(
    name=st.sampled_from(sorted(MODELS)),
    n_depth=st.integers(1, 3),
    kind=st.sampled_from(KINDS),
    lengths=lengths_of_prompts,
    n_draft=st.integers(1, 6),
    max_new_tokens=st.integers(1, 18),
    sampler=st.sampled_from([GREEDY, PENALTY]),
    stop=st.sets(st.integers(3, 30), max_size=2),
    chunk=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 10**6),
)
def test_greedy_is_what_generate_says(
    name, n_depth, kind, lengths, n_draft, max_new_tokens, sampler, stop, chunk, seed
) -> None:
    model, drafter = MODELS[name], MTPDrafter(layers(name, n_depth))
    prompts = [token_ids(n, seed=seed + i, high=31).tolist() for i, n in enumerate(lengths)]
    want = complete(generate(model, prompts, max_new_tokens, sampler, stop))
    cache = None
    if kind != "none":
        cache = cache_of(kind, model, len(prompts), max(lengths) + max_new_tokens, n_draft)
    passes = list(
        speculate(model, drafter, prompts, max_new_tokens, sampler, n_draft, stop, 0, cache, chunk)
    )
    assert rows_of(passes) == want
    for p in passes:
        for new, proposed, accepted in zip(p.tokens, p.proposed, p.accepted, strict=True):
            assert 0 <= accepted <= proposed <= n_draft
            assert new or not proposed


# ------------------------------------------------------------------------ what the layers would say


@torch.no_grad()
def said(model, mtp: MTP, row: list[int], n: int, sampler: Sampler, draft=None):
    """The ``n`` drafts after ``row``, and their distributions (n, V), from the whole row each time.

    The states come from the row without its last token; each depth goes on from the depth before,
    the last from itself: then its own state stands in for the one of the depth before.
    """
    with evaluating(model), evaluating(mtp):
        idx = torch.tensor([row])
        h, D = model.model(idx[:, :-1]), len(mtp.layers)
        drafts, q, V = [], [], model.config.vocab_size
        for k in range(n):
            if k < D:
                known = torch.tensor([(row + drafts)[k + 1 :]])
                below, x = h, known
                h = mtp.step(model, k + 1, h, known)
            else:
                below = torch.cat([below, h[:, -1:]], 1)
                x = torch.cat([x, torch.tensor([[drafts[-1]]])], 1)
                h = mtp.step(model, D, below, x)
            logits = h[:, -1] @ model.head.weight.T
            marks = seen_before([row + drafts], [[]], V)[:, 0]
            q.append(distribution(sampler, logits, marks)[0])
            drafts.append(int(q[-1].argmax()) if draft is None else draft[k])
    return drafts, torch.stack(q)


SAMPLED = Sampler(temperature=1.3, repetition_penalty=1.2)
BOTH = [(3, GREEDY), (1, SAMPLED), (1, GREEDY), (2, GREEDY), (2, SAMPLED), (3, SAMPLED)]


@pytest.mark.parametrize(
    ("n_depth", "sampler"),
    [pytest.param(*row, marks=[pytest.mark.slow] * (i > 1)) for i, row in enumerate(BOTH)],
)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_drafts_are_those_of_the_row_without_a_cache(name, n_depth, sampler) -> None:
    model, mtp, asked = MODELS[name], layers(name, n_depth), []

    class Watched(MTPDrafter):
        def start(self, *given):
            inner = super().start(*given)

            def propose(rows, wanted, generators):
                drafts, q = inner(rows, wanted, generators)
                asked.append(([list(row) for row in rows], wanted, drafts, q))
                return drafts, q

            propose.hear = inner.hear
            return propose

    passes = list(
        speculate(model, Watched(mtp), PROMPTS, 25, sampler, 4, stop_tokens=[4], prefill_chunk=4)
    )
    assert len({n for p in passes for n in p.accepted}) > 2
    for rows, wanted, drafts, q in asked:
        for i, (row, n, draft) in enumerate(zip(rows, wanted, drafts, strict=True)):
            assert len(draft) == n
            if n:
                given = None if sampler is GREEDY else draft
                want, p = said(model, mtp, row, n, sampler, given)
                assert draft == want
                torch.testing.assert_close(q[i, :n], p)


def test_each_column_is_computed_once_by_a_single_depth() -> None:
    """And of several depths, those that were made of drafts once more."""
    for n_depth in (1, 2):
        mtp = layers("qwen2", n_depth)
        shapes = []
        hooks = [
            layer.register_forward_hook(
                lambda m, args, out, shapes=shapes: shapes.append(args[0].shape[1])
            )
            for layer in mtp.layers
        ]
        passes = list(speculate(QWEN2, MTPDrafter(mtp), PROMPTS[:1], 30, GREEDY, 2))
        for hook in hooks:
            hook.remove()
        new, want = 6, []
        for p in passes[1:]:
            if not p.proposed[0]:
                continue
            again = n_depth - 1 if want else 0
            want += [new + again, 1 if n_depth == 1 else new + again][: p.proposed[0]]
            new = len(p.tokens[0])
        assert shapes == want


@pytest.mark.parametrize(
    ("family", "n_depth"),
    [
        ("qwen3", 3),
        pytest.param("llama", 1, marks=pytest.mark.slow),
        pytest.param("llama", 3, marks=pytest.mark.slow),
        pytest.param("qwen3", 1, marks=pytest.mark.slow),
    ],
)
def test_the_passes_are_those_of_transformers(family: str, n_depth: int, monkeypatch) -> None:
    """There as many drafts as depths, none capped, and the first pass after the prompt has them."""
    from transformers.modeling_layers import MtpModel

    seeds, proposed, accepted = 0, 0, 0
    for seed in range(60, 63):
        twin = theirs(family, seed)
        model = ours_from_hf(twin)
        prompt = token_ids(1, 6, seed=seed)
        mtp = taught(model, n_depth, prompt.tolist(), steps=8)
        made = of_transformers(twin, mtp)
        monkeypatch.setattr(MtpModel, "from_pretrained", lambda *_, made=made, **__: made)
        fed = []
        hook = twin.register_forward_hook(
            lambda m, args, given, out, fed=fed: fed.append(given["input_ids"].shape[1]),
            with_kwargs=True,
        )
        twin.generation_config.eos_token_id = None
        text = twin.generate(prompt, use_mtp=True, max_new_tokens=16, do_sample=False)
        hook.remove()
        want = complete(generate(model, prompt, 16, GREEDY))[0]
        if text[0, 6:].tolist() != want:  # a near-tie fell another way
            continue
        seeds += 1
        passes = list(speculate(model, MTPDrafter(mtp), prompt, 16, GREEDY, n_depth))
        assert rows_of(passes) == [want]
        assert len(passes) == len(fed)
        proposed += sum(p.proposed[0] for p in passes)
        accepted += sum(p.accepted[0] for p in passes)
    assert seeds > 1 and 5 < accepted < proposed


# ------------------------------------------------------------------- the same distribution, sampled

TOKENS, LENGTH, ROWS = 4, 4, 3000
TARGET = tiny_qwen2(
    seed=2, vocab_size=TOKENS, n_layer=1, n_head=2, n_kv_head=1, n_embd=12, intermediate_size=16
).double()
CUT = Sampler(temperature=1.1, top_p=0.97, repetition_penalty=2.0)


@torch.no_grad()
def exact(prompt: list[int], sampler: Sampler) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of LENGTH tokens: the chain rule, token by token."""
    known = {(): 1.0}
    for _ in range(LENGTH):
        rows = [prompt + list(start) for start in known]
        logits = TARGET(torch.tensor(rows))[:, -1]
        p = distribution(sampler, logits, seen_before(rows, [[]] * len(rows), TOKENS)[:, 0])
        known = {
            (*start, x): chance * float(p[i, x])
            for i, (start, chance) in enumerate(known.items())
            for x in range(TOKENS)
        }
    return known


def sampled(drafter) -> tuple[float, float]:
    passes = list(speculate(TARGET, drafter, [[1, 3]] * ROWS, LENGTH, CUT, 3))
    rate = sum(sum(p.accepted) for p in passes) / sum(sum(p.proposed) for p in passes)
    return p_value(Counter(map(tuple, rows_of(passes))), exact([1, 3], CUT), ROWS), rate


@pytest.mark.parametrize("n_depth", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_sampled_sequences_have_the_distribution_of_the_model(n_depth: int) -> None:
    p, rate = sampled(MTPDrafter(enlarged(TARGET, n_depth, seed=3).double()))
    assert p > 0.01
    assert 0.2 < rate < 0.95


@pytest.mark.slow
def test_the_same_test_sees_drafts_judged_by_another_q() -> None:
    """Drawn from its q, but judged as if drawn from a sharper one; and greedy drafts judged as if
    they had been drawn."""

    class Sharper(MTPDrafter):
        def start(self, *given):
            inner = super().start(*given)

            def propose(*asked):
                drafts, q = inner(*asked)
                return drafts, q if q is None else (q**3) / (q**3).sum(-1, keepdim=True)

            propose.hear = inner.hear
            return propose

    class Greedy(MTPDrafter):
        def start(self, model, sampler, longest, n_draft):
            drawn = super().start(model, sampler, longest, n_draft)
            likeliest = super().start(model, GREEDY, longest, n_draft)

            def propose(rows, wanted, generators):
                _, q = drawn(rows, wanted, generators)
                return likeliest(rows, wanted, generators)[0], q

            def hear(*states):
                drawn.hear(*states)
                likeliest.hear(*states)

            propose.hear = hear
            return propose

    mtp = enlarged(TARGET, 1, seed=3).double()
    for wrong in (Sharper(mtp), Greedy(mtp)):
        assert sampled(wrong)[0] < 1e-6


# ----------------------------------------------------------------------------------------- the rest


@examples(4, 10)
@given(lengths_of_prompts, st.integers(1, 5), st.integers(0, 1000), st.integers(1, 3))
def test_a_row_of_a_batch_equals_the_row_alone(lengths, n_draft, seed, n_depth) -> None:
    prompts = [token_ids(n, seed=seed + i, high=31).tolist() for i, n in enumerate(lengths)]
    drafter, sampler = MTPDrafter(layers("qwen2", n_depth)), Sampler(temperature=1.3)
    together = rows_of(speculate(QWEN2, drafter, prompts, 12, sampler, n_draft, [4, 5], seed))
    for i, prompt in enumerate(prompts):
        alone = speculate(QWEN2, drafter, [prompt], 12, sampler, n_draft, [4, 5], seed + i)
        assert together[i] == rows_of(alone)[0]


def test_two_generations_of_one_model_do_not_hear_each_other() -> None:
    drafter = MTPDrafter(layers("qwen2", 2))
    want = [list(speculate(QWEN2, drafter, PROMPTS[i:], 12, GREEDY, 3)) for i in (0, 1)]
    runs = [speculate(QWEN2, drafter, PROMPTS[i:], 12, GREEDY, 3) for i in (0, 1)]
    found = [[], []]
    for _ in range(20):
        for run, passes in zip(runs, found, strict=True):
            passes += [p for p in [next(run, None)] if p]
    assert found == want


def test_the_model_is_left_as_it_was() -> None:
    mtp = layers("qwen2", 1)
    QWEN2.train(), mtp.train()
    try:
        passes = list(speculate(QWEN2, MTPDrafter(mtp), PROMPTS, 9, GREEDY))
        assert QWEN2.training and mtp.training
    finally:
        QWEN2.eval(), mtp.eval()
    assert passes == list(speculate(QWEN2, MTPDrafter(mtp), PROMPTS, 9, GREEDY))
    assert not QWEN2.model._forward_hooks
    broken = cache_of("static", QWEN2, 3, 8, 4)
    with pytest.raises(ValueError, match="do not fit into a cache"):
        list(speculate(QWEN2, MTPDrafter(mtp), PROMPTS, 20, GREEDY, cache=broken))
    assert not QWEN2.model._forward_hooks


def test_a_drafter_that_does_not_listen_costs_no_hook() -> None:
    seen = []
    original = QWEN2.model.register_forward_hook
    QWEN2.model.register_forward_hook = lambda *a, **k: seen.append(a) or original(*a, **k)
    try:
        list(speculate(QWEN2, Scripted(nothing), PROMPTS, 3, GREEDY))
    finally:
        del QWEN2.model.register_forward_hook
    assert not seen


def test_layers_of_another_model_are_refused() -> None:
    drafter = MTPDrafter(layers("qwen2", 1))
    for model in (tiny_gpt2(vocab_size=31), tiny_qwen2(vocab_size=31, n_embd=36)):
        with pytest.raises(ValueError, match="made for states of n_embd=48, the model is a"):
            speculate(model, drafter, PROMPTS, 5)
