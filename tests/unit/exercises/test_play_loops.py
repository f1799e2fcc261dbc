"""The loops of a machine, beside the package's own generation."""

import pytest
import torch

from lm_from_scratch.exercises import loops
from lm_from_scratch.exercises.loops import PROMPTS, batch, draft, learn, search, write
from lm_from_scratch.exercises.parts import trained, untrained
from lm_from_scratch.generation.beam_search import beam_search
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY


def texts(yielded) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for text, tokens in yielded:
        found.setdefault(text, []).extend(tokens)
    return found


@pytest.fixture
def greedy(monkeypatch) -> None:
    monkeypatch.setattr(loops, "TEMPERATURE", 1e-4)


def test_it_writes_what_the_package_writes(greedy) -> None:
    machine = trained()
    ours = texts(write(machine, PROMPTS[0], 16))[0]
    prompt = machine.tokenizer.start(PROMPTS[0])
    assert [ours] == complete(generate(trained().model, [prompt], 16, GREEDY))


def test_each_text_of_a_batch_is_the_one_that_is_written_alone() -> None:
    lengths = {len(trained().tokenizer.start(prompt)) for prompt in PROMPTS}
    assert len(lengths) > 1, "nothing is padded"
    together = texts(batch(trained(), PROMPTS, 12))
    for i, prompt in enumerate(PROMPTS):
        assert together[i] == texts(write(trained(), prompt, 12))[0]


def test_it_finds_what_the_package_s_beam_search_finds() -> None:
    machine = trained()
    prompts = [machine.tokenizer.start(prompt) for prompt in PROMPTS[:2]]
    stop = machine.tokenizer.encode(".")[0]
    want = beam_search(
        machine.model, prompts, 8, 4, num_return_sequences=3, early_stopping="never",
        stop_tokens=[stop],
    )  # fmt: skip
    found: dict[int, list[list[int]]] = {0: [], 1: []}
    for text, tokens in search(trained(), PROMPTS[:2], 8):
        found[text].append(tokens)
    assert found == {i: [[*h.tokens] for h in best] for i, best in enumerate(want)}


def test_greedy_drafts_give_the_greedy_text(greedy) -> None:
    drafted = texts(draft(trained(), PROMPTS[:2], 16))
    for i, prompt in enumerate(PROMPTS[:2]):
        assert drafted[i][:16] == texts(write(trained(), prompt, 16))[0]


def test_some_drafts_are_accepted_and_some_are_not() -> None:
    passes = [len(tokens) for _, tokens in draft(trained(), PROMPTS[:2], 20)]
    assert min(passes) == 1 and max(passes) > 2


def test_it_learns_and_padding_does_not_count() -> None:
    losses = texts(learn(untrained(), 30))[0]
    assert losses[0] > 5 and losses[-1] < 0.75 * losses[0]
    seen = []
    machine = untrained()
    plain = machine.loss
    machine.loss = lambda logits, targets: seen.append(targets) or plain(logits, targets)
    torch.testing.assert_close(texts(learn(machine, 2))[0], losses[:2])
    assert (seen[0][-1, 32:] == -100).all() and (seen[0][:-1] >= 0).all()
