"""speculative.py: the tokens of plain generation, from fewer passes, whatever the drafter says."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch
from examples import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.cache.codec import Quantized
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.paged import BlockPool, PagedCache
from lm_from_scratch.cache.slots import SlidingCache, StaticCache, cache_for
from lm_from_scratch.generation import speculative
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.logit_processors import forbid, min_length, no_repeat_ngram
from lm_from_scratch.generation.sampling import GREEDY, Sampler
from lm_from_scratch.generation.speculative import (
    ModelDrafter,
    Pass,
    PromptLookup,
    accept,
    distribution,
    seen_before,
    speculate,
    uniform,
)
from lm_from_scratch.models.modes import evaluating

# float64: passes of another width round differently, which must not decide between two tokens
GPT2 = tiny_gpt2(vocab_size=31, attn_pdrop=0.3, resid_pdrop=0.3).double()
QWEN2 = tiny_qwen2(vocab_size=31).double()
SLIDES = tiny_qwen2(vocab_size=31, sliding_window=5, layer_types=("sliding_attention",) * 3)
MIXED = tiny_qwen2(vocab_size=31, sliding_window=4, max_window_layers=1)
MODELS = {"gpt2": GPT2, "qwen2": QWEN2, "slides": SLIDES.double(), "mixed": MIXED.double()}
SAME = tiny_gpt2(vocab_size=31).double()  # the weights of GPT2, in a module of its own
SMALL = tiny_gpt2(seed=5, vocab_size=31, n_layer=1).double()
NEAR = tiny_gpt2(vocab_size=31).double()  # right more often than not
with torch.no_grad():
    NEAR.transformer.h[0].mlp.c_fc.weight *= 0.6
PROMPTS = [[5, 6, 7, 8, 9, 10], [11], [12, 13, 14]]
SAMPLER = Sampler(temperature=1.5, top_k=20, top_p=0.95, repetition_penalty=1.2)
PENALTY = Sampler(temperature=0.0, repetition_penalty=1.7)


class Scripted:
    """Proposes what a function of the row and the number wanted says; keeps what it was asked."""

    def __init__(self, script: Callable[[list[int], int], Iterable[int]]) -> None:
        self.script, self.asked = script, []

    def start(self, model, sampler, longest, n_draft):
        return self.propose

    def propose(self, rows, wanted, generators):
        self.asked.append(list(wanted))
        pairs = zip(rows, wanted, strict=True)
        return [list(self.script(row, n))[:n] if n else [] for row, n in pairs], None


class Uneven(Scripted):
    """Draws drafts from distributions of its own, 0 to n for a row, so that rows differ."""

    def __init__(self, vocab_size: int, temperature: float = 1.0) -> None:
        self.vocab_size, self.temperature = vocab_size, temperature

    def propose(self, rows, wanted, generators):
        counts = [(len(row) + sum(row)) % (n + 1) for row, n in zip(rows, wanted, strict=True)]
        K = max(counts)
        q = torch.zeros(len(rows), K, self.vocab_size, dtype=torch.float64)
        drafts = [[] for _ in rows]
        for i, u in enumerate(uniform(generators, counts)):
            for k in range(counts[i]):
                g = torch.Generator().manual_seed(len(rows[i]) + k + 7 * rows[i][-1])
                logits = torch.randn(self.vocab_size, generator=g, dtype=torch.float64)
                q[i, k] = (logits / self.temperature).softmax(0)
                drafts[i].append(int(torch.searchsorted(q[i, k].cumsum(0), u[k], right=True)))
        return drafts, q


def nothing(row, n):
    return []


def rows_of(passes: Iterable[Pass]) -> list[list[int]]:
    return [
        list(itertools.chain.from_iterable(parts))
        for parts in zip(*(p.tokens for p in passes), strict=True)
    ]


def follow(prompts, answers, wrong=()):
    """A script that knows the answers, and is wrong by one at the places ``wrong``."""

    def script(row, n):
        for prompt, answer in zip(prompts, answers, strict=True):
            if row == [*prompt, *answer][: len(row)] and len(row) >= len(prompt):
                at = len(row) - len(prompt)
                places = range(at, min(at + n, len(answer)))
                return [(answer[k] + (k in wrong)) % 31 for k in places]
        return []

    return script


def cache_of(kind: str, model, rows: int, longest: int, n_draft: int):
    config = model.config
    n_layer, windows = config.n_layer, set(config.windows)
    if kind == "static":
        return StaticCache(n_layer, longest - 1)  # the last token is never fed
    if kind == "growing":
        return GrowingCache(n_layer)
    if kind == "sliding" and None not in windows:
        return SlidingCache(n_layer, max(windows), slack=n_draft)
    if kind == "paged":
        heads = getattr(config, "n_kv_head", config.n_head)
        blocks = rows * (longest // 3 + 1)
        return PagedCache(
            BlockPool(n_layer, heads, config.head_dim, blocks, block_size=3, dtype=torch.float64)
        )
    return cache_for(config.windows, slack=n_draft)


lengths_of_prompts = st.lists(st.integers(1, 9), min_size=1, max_size=4)


drawn = given(
    name=st.sampled_from(sorted(MODELS)),
    drafter=st.sampled_from(
        ["itself", "near", "small", "other", "lookup", "right", "wrong", "uneven"]
    ),
    kind=st.sampled_from(["none", "growing", "static", "sliding", "paged", "layered"]),
    lengths=lengths_of_prompts,
    n_draft=st.integers(1, 7),
    max_new_tokens=st.integers(1, 22),
    sampler=st.sampled_from([GREEDY, PENALTY]),
    stop=st.sets(st.integers(3, 30), max_size=2),
    chunk=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 10**6),
)


def greedy_is_what_generate_says(
    name, drafter, kind, lengths, n_draft, max_new_tokens, sampler, stop, chunk, seed
) -> None:
    """For any drafter, number of drafts, cache, and batch of unequal prompts."""
    model = MODELS[name]
    prompts = [token_ids(n, seed=seed + i, high=31).tolist() for i, n in enumerate(lengths)]
    want = complete(generate(model, prompts, max_new_tokens, sampler, stop))
    drafters = {
        "itself": lambda: ModelDrafter(model, prefill_chunk=chunk),
        "near": lambda: ModelDrafter(NEAR),
        "small": lambda: ModelDrafter(SMALL),
        "other": lambda: ModelDrafter(QWEN2 if name == "gpt2" else MODELS["slides"]),
        "lookup": lambda: PromptLookup(2),
        "right": lambda: Scripted(follow(prompts, want, wrong={2, 5, 11})),
        "wrong": lambda: Scripted(follow(prompts, want, wrong=range(99))),
        "uneven": lambda: Uneven(31),
    }
    cache = None
    if kind != "none":
        cache = cache_of(kind, model, len(prompts), max(lengths) + max_new_tokens, n_draft)
    passes = list(
        speculate(
            model, drafters[drafter](), prompts, max_new_tokens, sampler, n_draft, stop, 0,
            cache, chunk,
        )
    )  # fmt: skip
    assert rows_of(passes) == want
    for p in passes:
        for new, proposed, accepted in zip(p.tokens, p.proposed, p.accepted, strict=True):
            assert 0 <= accepted <= proposed <= n_draft
            assert len(new) in ((0, accepted, accepted + 1) if stop else (0, accepted + 1))
            assert new or not proposed
    if cache is not None:  # left as plain generation would: all but the last token
        assert cache.lengths.tolist() == [
            len(prompt) + len(row) - 1 for prompt, row in zip(prompts, want, strict=True)
        ]
    if drafter == "itself":
        assert all(
            accepted == proposed or new[-1] in stop
            for p in passes
            for new, proposed, accepted in zip(p.tokens, p.proposed, p.accepted, strict=True)
        )
    if drafter == "wrong":
        assert not any(itertools.chain(*(p.accepted for p in passes)))
        assert len(passes) == max(map(len, want))


test_greedy_is_what_generate_says = examples(16, 50)(drawn(greedy_is_what_generate_says))
test_greedy_is_what_generate_says_in_more_examples = pytest.mark.slow(
    settings(max_examples=150)(drawn(greedy_is_what_generate_says))
)


def test_a_quantised_cache_says_what_it_says_in_plain_generation() -> None:
    for bits in (8, 4):
        caches = [GrowingCache(3, Quantized(bits, 4)) for _ in range(2)]
        want = complete(generate(QWEN2, PROMPTS, 20, GREEDY, cache=caches[0]))
        got = speculate(QWEN2, ModelDrafter(QWEN2), PROMPTS, 20, GREEDY, cache=caches[1])
        assert rows_of(got) == want


@examples(8, 30)
@given(
    lengths_of_prompts,
    st.integers(1, 5),
    st.integers(0, 1000),
    st.sampled_from([ModelDrafter(SMALL), ModelDrafter(QWEN2), PromptLookup(), Uneven(31)]),
)
def test_a_row_of_a_batch_equals_the_row_alone(lengths, n_draft, seed, drafter) -> None:
    prompts = [token_ids(n, seed=seed + i, high=31).tolist() for i, n in enumerate(lengths)]
    stop = [4, 5]
    together = rows_of(speculate(GPT2, drafter, prompts, 12, SAMPLER, n_draft, stop, seed))
    for i, prompt in enumerate(prompts):
        alone = rows_of(speculate(GPT2, drafter, [prompt], 12, SAMPLER, n_draft, stop, seed + i))
        assert together[i] == alone[0]


def test_where_nothing_is_proposed_the_draws_are_those_of_generate() -> None:
    for seed in range(5):
        want = complete(generate(GPT2, PROMPTS, 20, SAMPLER, [4], seed=seed))
        passes = list(speculate(GPT2, Scripted(nothing), PROMPTS, 20, SAMPLER, 4, [4], seed))
        assert rows_of(passes) == want
        assert len(passes) == max(map(len, want))


# ------------------------------------------------------------------------------ the acceptance rule


def probabilities(*shape: int, seed: int, temperature: float = 0.7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, generator=generator, dtype=torch.float64)
    cut = torch.rand(shape, generator=generator) < 0.2  # some tokens cannot be drawn
    cut[..., 0] = False
    return (logits / temperature).masked_fill(cut, -torch.inf).softmax(-1)


def outcomes(p: torch.Tensor, q: torch.Tensor, x: int, n: int = 400) -> tuple[float, torch.Tensor]:
    """How often the draft ``x`` (and no other) is accepted, and the distribution of the token that
    comes out, over a grid of n² pairs of random numbers: an integral, not a simulation."""
    V = len(p)
    middle = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    u = torch.cartesian_prod(middle, middle)  # (n², 2)
    draft = torch.full((n * n, 1), x)
    after = torch.eye(V, dtype=torch.float64)[0]  # what follows an accepted draft: not looked at
    rows = torch.stack([p, after]).expand(n * n, 2, V)
    count, token = accept(rows, q.expand(n * n, 1, V), draft, u)
    out = torch.where(count == 1, draft[:, 0], token)
    return float(count.double().mean()), torch.bincount(out, minlength=V) / n**2


@examples(2, 4)
@given(st.integers(0, 10**6))
def test_what_comes_out_has_the_distribution_of_the_model(seed: int) -> None:
    p, q = probabilities(2, 6, seed=seed)
    total, rate = torch.zeros(6, dtype=torch.float64), 0.0
    for x in range(6):
        if q[x] > 0:
            accepted, out = outcomes(p, q, x)
            assert accepted == pytest.approx(min(1.0, float(p[x] / q[x])), abs=1 / 400)
            total += q[x] * out
            rate += float(q[x]) * accepted
    torch.testing.assert_close(total, p, atol=6 / 400, rtol=0)
    assert rate == pytest.approx(float(torch.minimum(p, q).sum()), abs=1 / 400)


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(0, 10**6))
def test_the_rule_is_that_of_transformers(K: int, seed: int) -> None:
    from transformers.generation import utils

    p, q = probabilities(K + 1, 7, seed=seed), probabilities(K, 7, seed=seed + 1)
    q = 0.5 * (q + p[:K])  # good drafts, so that some are accepted
    generator = torch.Generator().manual_seed(seed)
    draft = torch.multinomial(q, 1, generator=generator)[:, 0]
    u = torch.rand(1, K + 1, generator=generator, dtype=torch.float64)
    kept = {}

    def keep(p_prime, num_samples):
        kept["p"] = p_prime
        return torch.zeros(1, 1, dtype=torch.long)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand_like", lambda x: u[0, 1:].to(x))
        patch.setattr(torch, "multinomial", keep)
        _, n = utils._speculative_sampling(draft[None], q.log()[None], K, p.log()[None])
    count, token = accept(p[None], q[None], draft[None], u)
    assert count.tolist() == [int(n)]
    want = torch.searchsorted(kept["p"].cumsum(-1), u[:, :1], right=True)
    assert token.tolist() == want[:, 0].tolist()


def test_rows_with_fewer_drafts_end_where_theirs_end() -> None:
    """What stands in q behind the end of a draft must not count."""
    p, q = probabilities(4, 4, 5, seed=1), probabilities(4, 3, 5, seed=2)
    draft = torch.tensor([[1, 2, 3], [1, 2, -1], [1, -1, -1], [-1, -1, -1]])
    u = torch.zeros(4, 4, dtype=torch.float64)
    u[:, 0] = torch.linspace(0.2, 0.9, 4)  # every coin is 0: all is accepted that p has
    p = (p + 0.05) / 1.25
    count, token = accept(p, q, draft, u)
    assert count.tolist() == [3, 2, 1, 0]
    for i, n in enumerate(count.tolist()):
        want = torch.searchsorted(p[i, n].cumsum(0), u[i, :1], right=True)
        assert token[i] == want[0]
        row = slice(i, i + 1)
        alone = accept(p[row, : n + 1], q[row, :n], draft[row, :n], u[row, : n + 1])
        assert alone[0] == n and alone[1] == token[i]


def test_no_token_without_probability_is_accepted_and_equal_distributions_accept_all() -> None:
    p = torch.tensor([[[0.0, 0.4, 0.6], [1.0, 0.0, 0.0]]], dtype=torch.float64)
    sure = torch.tensor([[[1.0, 0.0, 0.0]]], dtype=torch.float64)
    count, token = accept(p, sure, torch.tensor([[0]]), torch.tensor([[0.5, 0.0]]).double())
    assert count.tolist() == [0] and token.tolist() == [2]
    u = torch.tensor([[0.5, 1.0]]).double()  # 1.0: what a float32 can make of a number below 1
    count, token = accept(p, p[:, :1], torch.tensor([[1]]), u)
    assert count.tolist() == [0] and token.tolist() == [2]  # p - q is 0: p is drawn from
    u = torch.tensor([[0.5, 0.999999]]).double()
    assert accept(p, p[:, :1], torch.tensor([[1]]), u)[0].tolist() == [1]


def test_a_draft_of_equal_quality_everywhere_gives_the_tokens_of_the_paper() -> None:
    """(1 - α^(K + 1)) / (1 - α) a pass, Leviathan et al., equation 1."""
    N, K = 40000, 4
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    generator = torch.Generator().manual_seed(0)
    draft = torch.multinomial(q.expand(N, 3), K, replacement=True, generator=generator)
    u = torch.rand(N, K + 1, generator=generator, dtype=torch.float64)
    count, _ = accept(p.expand(N, K + 1, 3), q.expand(N, K, 3), draft, u)
    alpha = 0.7  # the sum of min(p, q)
    want = (1 - alpha ** (K + 1)) / (1 - alpha)
    assert float((count + 1).double().mean()) == pytest.approx(want, abs=4 * 1.6 / N**0.5)


# ------------------------------------------------------------------- the same distribution, sampled

TOKENS, LENGTH, ROWS = 4, 4, 6000
TARGET = tiny_gpt2(seed=2, vocab_size=TOKENS, n_layer=1, n_head=2, n_embd=12).double()
DRAFT, PADDED, SHORT = (
    tiny_qwen2(
        seed=4, vocab_size=V, n_layer=1, n_head=2, n_kv_head=1, n_embd=12, intermediate_size=16
    ).double()
    for V in (TOKENS, TOKENS + 1, TOKENS - 1)
)
CUT = Sampler(temperature=1.1, top_p=0.97, repetition_penalty=3.0)


@torch.no_grad()
def next_token(model, rows: list[list[int]], sampler: Sampler) -> torch.Tensor:
    """The distribution after each row, (N, V), from the whole row without a cache."""
    logits = model(torch.tensor(rows))[:, -1]
    return distribution(sampler, logits, seen_before(rows, [[]] * len(rows), TOKENS)[:, 0])


def exact(prompt: list[int], length: int, sampler: Sampler) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of that length: the chain rule, token by token."""
    known = {(): 1.0}
    for _ in range(length):
        p = next_token(TARGET, [prompt + list(start) for start in known], sampler)
        known = {
            (*start, x): chance * float(p[i, x])
            for i, (start, chance) in enumerate(known.items())
            for x in range(TOKENS)
        }
    return known


def p_value(found: Counter, expected: dict[tuple[int, ...], float], n: int) -> float:
    """Pearson's chi-square test; cells that are expected fewer than 5 times are one cell."""
    if any(expected[cell] == 0 for cell in found):
        return 0.0
    large = [cell for cell, chance in expected.items() if n * chance >= 5]
    pairs = [(found[cell], n * expected[cell]) for cell in large]
    rest = n - sum(e for _, e in pairs)
    if rest > 1e-6:
        pairs.append((n - sum(o for o, _ in pairs), rest))
    statistic = sum((o - e) ** 2 / e for o, e in pairs)
    half = torch.tensor([(len(pairs) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


EXPECTED = exact([1, 3], LENGTH, CUT)
SAMPLED = {
    "model": ModelDrafter(DRAFT),
    "more padding": ModelDrafter(PADDED),
    "fewer tokens": ModelDrafter(SHORT),
    "lookup": PromptLookup(),
    "uneven": Uneven(TOKENS, temperature=0.5),
}


def sampled(drafter, seed: int = 0, rows: int = ROWS) -> tuple[float, list[Pass]]:
    passes = list(speculate(TARGET, drafter, [[1, 3]] * rows, LENGTH, CUT, 3, (), seed))
    return p_value(Counter(map(tuple, rows_of(passes))), EXPECTED, rows), passes


@pytest.mark.slow
@pytest.mark.parametrize("drafter", sorted(SAMPLED))
def test_sampled_sequences_have_the_distribution_of_the_model(drafter: str) -> None:
    assert sum(chance > 0 for chance in EXPECTED.values()) > 150
    p, passes = sampled(SAMPLED[drafter])
    assert p > 0.01
    proposed = sum(sum(p.proposed) for p in passes)
    assert 0.2 * proposed < sum(sum(p.accepted) for p in passes) < 0.9 * proposed


def test_the_rate_of_acceptance_is_the_overlap_of_the_two_distributions() -> None:
    """At one place: the sum of min(p, q), averaged over the token before it."""
    N = 4000
    passes = list(speculate(TARGET, ModelDrafter(DRAFT), [[1, 3]] * N, 3, CUT, 1))
    first = next_token(TARGET, [[1, 3]], CUT)[0]
    rows = [[1, 3, x] for x in range(TOKENS)]
    overlap = torch.minimum(next_token(TARGET, rows, CUT), next_token(DRAFT, rows, CUT)).sum(-1)
    want = float(first @ overlap)
    assert passes[1].proposed == [1] * N
    assert 0.2 < want < 0.9
    assert sum(passes[1].accepted) / N == pytest.approx(
        want, abs=3 * (want * (1 - want) / N) ** 0.5
    )


# --------------------------------------------------------------------------------- drafters, passes


class Passes:
    """Counts the passes of a model, and keeps the shapes, the last position and the number of
    tokens that are fed."""

    def __init__(self, model) -> None:
        self.shapes, self.highest, self.fed, self.model = [], -1, 0, model

    def __enter__(self):
        def note(module, args, kwargs, output):
            self.shapes.append(tuple(args[0].shape))
            if kwargs.get("positions") is not None:
                self.highest = max(self.highest, int(kwargs["positions"].max()))
                self.fed += int((kwargs["positions"] >= 0).sum())

        self.hook = self.model.register_forward_hook(note, with_kwargs=True)
        return self

    def __exit__(self, *_):
        self.hook.remove()


@pytest.mark.parametrize("sampler", [GREEDY, SAMPLER, Sampler()])
@pytest.mark.parametrize(("n_draft", "count"), [(1, 11), (4, 5), (20, 2), (50, 2)])
def test_the_model_as_its_own_drafter_accepts_all(sampler, n_draft: int, count: int) -> None:
    """21 tokens: one from the prompt, and K + 1 from each pass after it."""
    with Passes(GPT2) as counted:
        passes = list(speculate(GPT2, ModelDrafter(SAME), PROMPTS, 21, sampler, n_draft))
    assert len(counted.shapes) == len(passes) == count == 1 + -(-20 // (n_draft + 1))
    assert all(p.accepted == p.proposed for p in passes)
    assert passes[1].proposed == [min(n_draft, 19)] * 3
    assert counted.shapes[1] == (3, min(n_draft, 19) + 1)
    assert counted.highest == 6 + 21 - 2  # the last token is never fed


@pytest.mark.parametrize("V", [25, 30, 32, 41])
@pytest.mark.parametrize("sampler", [GREEDY, SAMPLER])
def test_a_draft_model_may_have_other_padding(V: int, sampler: Sampler) -> None:
    """With the weights of the model itself all drafts are accepted, but where it has no such token
    or reads another; what comes out is what the model says alone."""
    drafter = tiny_gpt2(vocab_size=V).double()
    weights = GPT2.state_dict()
    padded = torch.nn.functional.pad(weights["transformer.wte.weight"], (0, 0, 0, V - 31))
    drafter.load_state_dict(weights | {"transformer.wte.weight": padded})
    rows = [[*prompt, 30] for prompt in PROMPTS]
    passes = list(speculate(GPT2, ModelDrafter(drafter), rows, 21, sampler))
    if sampler is GREEDY:
        assert rows_of(passes) == complete(generate(GPT2, rows, 21, sampler))
    proposed, accepted = (sum(sum(vars(p)[c]) for p in passes) for c in ("proposed", "accepted"))
    assert accepted > 0.5 * proposed if V > 31 else proposed > 0


def test_the_draft_model_runs_once_for_each_draft() -> None:
    """Nothing is fed twice: the first pass of a round feeds the token that is new, and the last
    draft before it, if that was accepted."""
    with Passes(NEAR) as counted:
        passes = list(speculate(GPT2, ModelDrafter(NEAR), PROMPTS[:1], 40, GREEDY, 3))
    drafting = [p for p in passes if p.proposed[0]]
    shapes, lacking = [], 7
    for p in drafting:
        shapes += [(1, lacking)] + [(1, 1)] * (p.proposed[0] - 1)
        lacking = 2 if p.accepted == p.proposed else 1
    assert counted.shapes == shapes and (1, 2) in shapes


def test_rows_that_want_fewer_drafts_are_not_fed_more() -> None:
    propose = ModelDrafter(SMALL).start(GPT2, GREEDY, 20, 5)
    generators = [torch.Generator() for _ in PROMPTS]
    with Passes(SMALL) as counted:
        drafts, _ = propose(PROMPTS, [2, 5, 0], generators)
    assert [len(draft) for draft in drafts] == [2, 5, 0]
    assert counted.fed == 6 + 1 + 1 + 4  # the last draft is not fed


@pytest.mark.parametrize("unequal", [True, False])
def test_prompts_are_read_in_chunks_by_both_models(unequal: bool) -> None:
    prompts = PROMPTS if unequal else PROMPTS[:1]
    with Passes(GPT2) as big, Passes(SMALL) as small:
        drafter = ModelDrafter(SMALL, prefill_chunk=3)
        list(speculate(GPT2, drafter, prompts, 2 + 1, GREEDY, 1, prefill_chunk=4))
    assert [shape[1] for shape in big.shapes[:2]] == [4, 2]
    assert [shape[1] for shape in small.shapes] == [3, 3, 1]


def test_the_draft_model_goes_on_where_the_row_was_cut() -> None:
    """What it proposes is what it would say to the row as it is, after any number of rejections."""
    asked = []
    inner = ModelDrafter(NEAR).start(GPT2, GREEDY, 40, 3)

    class Watched(Scripted):
        def propose(self, rows, wanted, generators):
            drafts, q = inner(rows, wanted, generators)
            asked.append(([list(row) for row in rows], drafts))
            assert q is None or q.shape == (len(rows), max(map(len, drafts)), 31)
            return drafts, q

    passes = list(speculate(GPT2, Watched(nothing), PROMPTS, 20, GREEDY, 3, stop_tokens=[4]))
    assert len({n for p in passes for n in p.accepted}) == 4  # 0, 1, 2 and 3
    for rows, drafts in asked:
        for row, draft in zip(rows, drafts, strict=True):
            if draft:
                assert complete(generate(NEAR, [row], len(draft), GREEDY)) == [draft]


def test_some_rows_propose_and_others_do_not() -> None:
    want = complete(generate(GPT2, PROMPTS, 12, GREEDY))
    right = follow(PROMPTS[1:2], want[1:2])
    drafter = Scripted(right)
    with Passes(GPT2) as counted:
        passes = list(speculate(GPT2, drafter, PROMPTS, 12, GREEDY, 5))
    assert rows_of(passes) == want
    assert passes[1].proposed == [0, 5, 0] and passes[1].accepted == [0, 5, 0]
    assert [len(new) for new in passes[1].tokens] == [1, 6, 1]
    assert passes[2].proposed == [0, 4, 0]  # 12 = 1 + 6 + (4 + 1)
    assert passes[3].tokens[1] == [] and passes[3].proposed == [0, 0, 0]
    assert len(passes) == 12 and counted.shapes[3:] == [(3, 1)] * 9
    assert [asked[1] for asked in drafter.asked] == [5, 4] + [0] * 9
    assert [asked[0] for asked in drafter.asked] == [5] * 6 + [4, 3, 2, 1, 0]


def test_a_stop_token_inside_an_accepted_draft_ends_the_row() -> None:
    want = complete(generate(GPT2, PROMPTS[:1], 12, GREEDY))[0]
    place = next(k for k in range(2, 6) if want[k] not in want[:k])
    script = follow(PROMPTS[:1], [want])
    (first, second) = speculate(
        GPT2, Scripted(script), PROMPTS[:1], 12, GREEDY, 8, stop_tokens=[want[place]]
    )
    assert first.tokens == [want[:1]] and second.tokens == [want[1 : place + 1]]
    assert second.proposed == [8] and second.accepted == [place]  # all of them from the draft
    (only,) = speculate(GPT2, Scripted(script), PROMPTS[:1], 12, GREEDY, stop_tokens=want[:1])
    assert only == Pass([want[:1]], [0], [0])


def test_prompt_look_up_finds_what_followed() -> None:
    look_up = PromptLookup(ngram=3).look_up
    row = [1, 2, 3, 4, 5, 9, 1, 2, 3, 6, 7, 8, 9, 1, 2, 3]
    assert look_up(row, 2) == [6, 7]  # the last earlier 9 1 2 3, not the first
    assert look_up(row, 20)[:8] == [6, 7, 8, 9, 1, 2, 3, 6]  # a copy runs into itself
    assert look_up([7, 1, 2, 8, 3, 2], 2) == [8, 3]  # no trigram, no bigram: one token
    assert look_up([5, 1, 2, 6, 4, 2, 7, 1, 2], 1) == [6]  # the longer match wins: 1 2, not 2
    assert look_up([4, 4], 3) == [4, 4, 4]
    assert look_up([1, 2, 3, 4], 3) == [] and look_up([1], 3) == []
    assert look_up([3, 1, 2, 3], 0) == []
    strict = PromptLookup(ngram=3, shortest=2).look_up
    assert strict([7, 1, 2, 8, 3, 2], 2) == [] and strict([1, 2, 8, 1, 2], 1) == [8]


@given(st.lists(st.integers(0, 5), min_size=2, max_size=14), st.integers(1, 3), st.integers(1, 4))
def test_prompt_look_up_is_that_of_transformers_where_one_match_is_longest(row, ngram, n) -> None:
    """There the first occurrence is taken, and a copy ends with the row."""
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    hf = PromptLookupCandidateGenerator(
        num_output_tokens=n, max_matching_ngram_size=ngram, max_length=99
    )
    ids, _ = hf.get_candidates(torch.tensor([row]))
    want = ids[0, len(row) :].tolist()
    got = PromptLookup(ngram).look_up(row, n)
    places = [
        [e for e in range(k, len(row)) if row[e - k : e] == row[-k:]] for k in range(ngram, 0, -1)
    ]
    found = next((ends for ends in places if ends), [])
    assert bool(got) == bool(found) == bool(want)
    assume(len(found) == 1)
    assert got[: len(want)] == want


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 3))
def test_prompt_look_up_by_its_definition(row: list[int], ngram: int) -> None:
    """The source of the copy is the last earlier occurrence of the longest n-gram that has one."""
    got = PromptLookup(ngram).look_up(row, 4)
    for size in range(ngram, 0, -1):
        ends = [e for e in range(size, len(row)) if row[e - size : e] == row[-size:]]
        if len(row) > size and ends:
            text = row + got
            assert text[len(row) :] == text[ends[-1] : ends[-1] + 4]
            return
    assert got == []


def test_a_text_that_repeats_needs_few_passes() -> None:
    """The copy is right as long as the model goes round in a loop, as this one soon does."""
    want = complete(generate(GPT2, PROMPTS, 50, GREEDY))
    passes = list(speculate(GPT2, PromptLookup(), PROMPTS, 50, GREEDY, 8))
    assert rows_of(passes) == want
    assert len(passes) < 50


# ----------------------------------------------------------------------------------------- the edge


def test_drafts_stay_below_the_position_limit() -> None:
    want = complete(generate(GPT2, [[5] * 60, [6]], 5, GREEDY))
    with Passes(GPT2) as counted:
        passes = speculate(GPT2, ModelDrafter(SAME), [[5] * 60, [6]], 5, GREEDY, 9)
        assert rows_of(passes) == want  # 60 + 5 - 1 = 64 tokens are fed
    assert counted.highest == 63
    # the drafter reads one less
    short = tiny_gpt2(vocab_size=31, block_size=63).double()
    with Passes(short) as counted:
        list(speculate(GPT2, ModelDrafter(short), [[5] * 60, [6]], 5, GREEDY, 9))
    assert counted.highest == 62
    with pytest.raises(ValueError, match=r"65 tokens do not fit into .* block_size=62"):
        short = tiny_gpt2(vocab_size=31, block_size=62)
        speculate(GPT2, ModelDrafter(short), [[5] * 60, [6]], 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_draft": 0}, "n_draft=0 must be an integer, at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 60}, "6 tokens and max_new_tokens=60 do not fit into block_size=64"),
        ({"prompts": [[5], []]}, "at least one token"),
        ({"prompts": [[31]]}, "token id 31 is not below vocab_size=31"),
        ({"stop_tokens": [99]}, "stop token 99"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63 - 3}, "seed="),
        ({"prefill_chunk": 0}, "prefill_chunk=0"),
        ({"drafter": ModelDrafter(TARGET)}, r"vocab_size=4, the model 31"),
        ({"model": SLIDES, "cache": SlidingCache(3, 5, slack=3)}, "n_draft=4 .* slack=3"),
        ({"model": MIXED, "cache": cache_for(MIXED.config.windows)}, "n_draft=4 .* slack=0"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(change, message) -> None:
    arguments = dict(model=GPT2, drafter=PromptLookup(), prompts=PROMPTS, max_new_tokens=5)
    with pytest.raises(ValueError, match=message):
        speculate(**{**arguments, **change})  # at the call, not at the first pass


def test_a_cache_with_tokens_and_bad_drafters_are_refused() -> None:
    cache = GrowingCache(3)
    with evaluating(GPT2):
        GPT2(token_ids(1, 4, high=31), cache=cache)
    with pytest.raises(ValueError, match="holds 4 tokens already"):
        speculate(GPT2, PromptLookup(), PROMPTS, 5, cache=cache)
    for ngram, shortest in ((0, 1), (2, 3), (2, 0)):
        with pytest.raises(ValueError, match=f"shortest={shortest} must be in 1 ... ngram={ngram}"):
            PromptLookup(ngram, shortest)

    class Greedy(Scripted):
        def propose(self, rows, wanted, generators):
            return [[1] * (n + 1) for n in wanted], None

    with pytest.raises(ValueError, match=r"more than wanted=\[4, 4, 4\] tokens"):
        list(speculate(GPT2, Greedy(nothing), PROMPTS, 9))


def test_a_small_static_cache_says_so() -> None:
    passes = speculate(GPT2, ModelDrafter(SAME), PROMPTS, 10, GREEDY, cache=StaticCache(3, 14))
    with pytest.raises(ValueError, match="15 tokens do not fit into a cache of capacity=14"):
        list(passes)


def test_a_layered_cache_keeps_its_parts_in_step() -> None:
    cache = cache_for(MIXED.config.windows, slack=4)
    assert len(cache.tracks) == 2
    rows = rows_of(
        speculate(MODELS["mixed"], ModelDrafter(SMALL), PROMPTS, 20, GREEDY, cache=cache)
    )
    assert rows == complete(generate(MODELS["mixed"], PROMPTS, 20, GREEDY))
    ends = [track.positions.amax(dim=1) + 1 for track in cache.tracks]
    assert [end.tolist() for end in ends] == [[25, 20, 22]] * 2


def test_one_drafter_serves_two_generations_at_once() -> None:
    drafter = ModelDrafter(SMALL)
    want = [rows_of(speculate(GPT2, drafter, PROMPTS[i:], 12, GREEDY, 3)) for i in (0, 1)]
    runs = [speculate(GPT2, drafter, PROMPTS[i:], 12, GREEDY, 3) for i in (0, 1)]
    both = list(itertools.zip_longest(*runs))
    for i in (0, 1):
        assert rows_of(p[i] for p in both if p[i] is not None) == want[i]


def test_modes_and_random_states_are_left_alone() -> None:
    small = tiny_gpt2(vocab_size=31, n_layer=1, attn_pdrop=0.5)
    state = torch.get_rng_state()
    small.train()
    GPT2.train()
    try:
        rows = []
        for p in speculate(GPT2, ModelDrafter(small), PROMPTS, 9, SAMPLER, seed=3):
            assert GPT2.training and small.training
            rows.append(p)
        GPT2.eval()
        small.eval()
        again = speculate(GPT2, ModelDrafter(small), PROMPTS, 9, SAMPLER, seed=3)
        assert rows_of(rows) == rows_of(again)  # no dropout while drafting and judging
    finally:
        GPT2.eval()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_prompts_of_the_caller_do_not_change_and_may_be_a_tensor() -> None:
    idx = token_ids(2, 5, high=31)
    prompts = idx.tolist()
    kept = [list(prompt) for prompt in prompts]
    rows = rows_of(speculate(GPT2, PromptLookup(), prompts, 9))
    assert prompts == kept
    assert rows_of(speculate(GPT2, PromptLookup(), idx, 9)) == rows


def test_a_half_precision_model_is_judged_in_double_precision() -> None:
    model, dtypes, bent = tiny_gpt2(vocab_size=31).bfloat16(), [], []

    def spy(p, q, draft, u):
        dtypes.append({x.dtype for x in (p, q, u)})
        return accept(p, q, draft, u)

    class Spy(Sampler):
        def logits(self, logits, seen):
            bent.append(logits.dtype)
            return super().logits(logits, seen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative, "accept", spy)
        list(speculate(model, ModelDrafter(model), PROMPTS, 5, Spy()))
        list(speculate(model, PromptLookup(), PROMPTS, 5, Spy()))
    assert all(kinds == {torch.float64} for kinds in dtypes)
    assert set(bent) == {torch.float32}


@pytest.mark.parametrize("sampler", [GREEDY, Sampler()])
def test_a_row_without_a_likeliest_token_is_refused(sampler) -> None:
    model = tiny_gpt2(vocab_size=31)
    with torch.no_grad():
        model.transformer.wpe.weight[7] = float("nan")  # where row 1 begins to draft
    prompts = [[5, 6, 7], [5, 6, 7, 8, 9, 10, 11], [5]]
    drafter = Scripted(lambda row, n: [row[-1]] * n)
    passes = speculate(model, drafter, prompts, 3, sampler)
    assert next(passes).tokens  # the prompts
    with pytest.raises(ValueError, match="largest logit of row 1 is nan"):
        next(passes)


@pytest.mark.parametrize("drafter", [PromptLookup(), ModelDrafter(NEAR), ModelDrafter(SMALL)])
@pytest.mark.parametrize("name", ["gpt2", "mixed"])
def test_processors_judge_every_draft_after_the_drafts_before_it(name, drafter) -> None:
    """No pair twice: what is forbidden at a place depends on the drafts before it."""
    rules = [no_repeat_ngram(2), forbid([3]), min_length(20, [7])]
    options = dict(stop_tokens=[7], processors=rules)
    wanted = complete(generate(MODELS[name], PROMPTS, 24, GREEDY, **options))
    found = rows_of(speculate(MODELS[name], drafter, PROMPTS, 24, GREEDY, n_draft=3, **options))
    assert found == wanted
    plain = complete(generate(MODELS[name], PROMPTS, 24, GREEDY, stop_tokens=[7]))
    assert plain != wanted  # the rules matter here
    for prompt, row in zip(PROMPTS, found, strict=True):
        pairs = list(itertools.pairwise([*prompt, *row]))
        assert len(set(pairs)) == len(pairs) and 3 not in row
