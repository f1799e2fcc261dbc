"""A storyteller is asked what it should be asked, and its stories are judged."""

import pytest
import torch
from tiny_models import tiny_qwen2

from lm_from_scratch.instruments import storyteller
from lm_from_scratch.instruments.storyteller import answered, answers, new_plots, told
from lm_from_scratch.text.plots import PlotConfig, stories
from lm_from_scratch.text.story_grammar import LANGUAGES, QUESTIONS, write
from lm_from_scratch.text.tokenizer import Tokenizer

TEXTS = [document.text for document in stories(200)]
TOKENIZER = Tokenizer.train(TEXTS, 500)


def model() -> torch.nn.Module:
    return tiny_qwen2(vocab_size=TOKENIZER.vocab_size, block_size=256)


def test_new_plots_are_not_in_the_corpus() -> None:
    corpus = {document.text for document in stories(2000)}
    assert not corpus & {write(plot) for plot in new_plots(200)}
    assert new_plots(3) == new_plots(3) != new_plots(3, seed=1)
    assert all(len(plot) > 60 for plot in new_plots(5, PlotConfig(events=50)))


@pytest.mark.parametrize("language", LANGUAGES)
def test_right_answers_count_as_right(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plots = new_plots(20)
    asked = [(p, i) for p in plots for i, s in enumerate(p) if s.kind in QUESTIONS]
    right = {write(p[: i + 1], language): write([p[i + 1]], language) for p, i in asked}

    def say(model, tokenizer, texts, rows=64):
        return [right[text] for text in texts]

    monkeypatch.setattr(storyteller, "answers", say)
    counts = answered(None, TOKENIZER, plots, language)
    assert sum(n for n, _ in counts.values()) == sum(n for _, n in counts.values()) == len(asked)
    monkeypatch.setattr(storyteller, "answers", lambda *given: ["nonsense."] * len(asked))
    assert sum(n for n, _ in answered(None, TOKENIZER, plots, language).values()) == 0


def test_answers_come_in_the_order_of_the_texts() -> None:
    torch.manual_seed(0)
    net = model()
    texts = ["Where is Mia?", "Mia is in the hall. Where is the key? ", "谁拿着钥匙？"]
    together = answers(net, TOKENIZER, texts, rows=2)
    assert together == [answers(net, TOKENIZER, [text])[0] for text in texts]


def test_stories_begin_with_a_name_and_are_judged() -> None:
    torch.manual_seed(0)
    found, report, whole = told(model(), TOKENIZER, "chinese", 4, temperature=1.0)
    assert len(found) == 4 and all(
        story[:2] in ("", *["米娅", "汤姆", "安娜", "保罗"]) for story in found
    )
    assert whole == 0 and report.readable < report.sentences  # it has learned nothing
