"""A model that tells stories of small worlds, asked and checked by what knows the world.

Pages and records ask it here: what it answers in plots that it was not trained on, and what is
wrong in the stories that it tells.
"""

from collections.abc import Sequence
from random import Random

from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY, Sampler
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.text.plots import PlotConfig, config_of_corpus, make_plot
from lm_from_scratch.text.story_grammar import PEOPLE, QUESTIONS, Sentence, cut, read, write
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.text.worlds import Report, check, same

#: The corpus has plots of seed 0.
HELD_OUT_SEED = 10**12


def new_plots(n: int, config: PlotConfig | None = None, seed: int = 0) -> list[list[Sentence]]:
    """Plots that the corpus does not have; without a ``config`` as large as its own."""
    generators = [Random(HELD_OUT_SEED + seed * 1_000_003 + number) for number in range(n)]
    return [make_plot(config or config_of_corpus(rng), rng) for rng in generators]


def answers(
    model: CausalLM, tokenizer: Tokenizer, texts: Sequence[str], rows: int = 64
) -> list[str]:
    """The next sentence after each text, greedily."""
    prompts = [tokenizer.start(text) for text in texts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # little padding
    texts_of: dict[int, str] = {}
    for start in range(0, len(order), rows):
        part = order[start : start + rows]
        ends = [tokenizer.encode(mark)[-1] for mark in (".", "。")]
        stops = [*ends, tokenizer.eos_token_id or 0]
        steps = generate(model, [prompts[i] for i in part], 40, GREEDY, stops)
        new = complete(steps)
        for i, ids in zip(part, new, strict=True):
            texts_of[i] = tokenizer.decode(ids, after=prompts[i]).strip()
    return [texts_of[i] for i in range(len(texts))]


def answered(
    model: CausalLM, tokenizer: Tokenizer, plots: Sequence[Sequence[Sentence]], language: str
) -> dict[str, tuple[int, int]]:
    """Of each kind of question: how many answers were right, and how many there were."""
    asked = [(plot, i) for plot in plots for i, s in enumerate(plot) if s.kind in QUESTIONS]
    texts = [write(plot[: i + 1], language) for plot, i in asked]
    counts = {kind: (0, 0) for kind in QUESTIONS}
    for (plot, i), answer in zip(asked, answers(model, tokenizer, texts), strict=True):
        try:
            right = same(read(answer), plot[i + 1])
        except ValueError:
            right = False
        a, b = counts[plot[i].kind]
        counts[plot[i].kind] = (a + right, b + 1)
    return counts


def told(
    model: CausalLM, tokenizer: Tokenizer, language: str, n: int, temperature: float, seed: int = 0
) -> tuple[list[str], Report, int]:
    """``n`` stories that the model tells, each begun with a name, up to its own end; their reports
    added up; and how many have no fault. A story that does not end within the model's length loses
    its last, unfinished sentence."""
    names = [PEOPLE[who] if language == "chinese" else who for who in PEOPLE]
    prompts = [tokenizer.start(names[i % len(names)]) for i in range(n)]
    room = model.config.block_size - max(map(len, prompts))
    end = tokenizer.eos_token_id
    assert end is not None
    sampler = Sampler(temperature=temperature)
    rows = complete(generate(model, prompts, room, sampler, [end], seed=seed))
    stories = []
    for i, ids in enumerate(rows):
        words = [token for token in ids if token != end]
        text = names[i % len(names)] + tokenizer.decode(words, after=prompts[i])
        if end not in ids:
            text = text[: text.rindex(cut(text)[-1])]
        stories.append(text)
    reports = [check(story) for story in stories]
    whole = sum(report.sentences > 0 and not report.faults for report in reports)
    return stories, sum(reports, Report()), whole
