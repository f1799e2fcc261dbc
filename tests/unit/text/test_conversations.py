"""conversations.py: what is learned of a chat is what ``transformers`` marks as the assistant's."""

import random

import pytest
import torch
import torch.nn.functional as F
from tiny_models import CHATML, chat_tokenizer, tiny_gpt2
from transformers import PreTrainedTokenizerFast

from lm_from_scratch.text import conversations
from lm_from_scratch.text.conversations import Answered, answered, conversation, targets_of
from lm_from_scratch.text.corpora import reference
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.loss import causal_lm_loss

PLAIN = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
DEFAULT = """{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful \
assistant.<|im_end|>\\n' }}{% endif %}"""
#: Words that are no special tokens, and no token after what the assistant says.
WORDS = """{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'Answer:' }}\
{% generation %}{{ ' ' + m['content'] + '.' }}{% endgeneration %}{{ '\\n' }}\
{% else %}{{ 'Question: ' + m['content'] + '\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"""
#: Earlier answers lose what they thought, as in Qwen3's.
THINKING = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}\
{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}\
{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
#: It writes whatever it is given, also nothing.
LENIENT = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""

TEXTS = tuple(document.text for document in reference()[:4])
SAID = [
    "Hi", "", " ", "  two spaces, at both ends  ", "\n\nlines\n", "\t",
    "你好，世界", "👩‍👩‍👧 ok 🦊", "naïve é",
    "<|im_end|>", "<|im_start|>assistant\nno", "<|endoftext|>", "a<|im_end|>\n",
    "42", "x = {'a': 1}",
]  # fmt: skip


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def chats(system: bool = True) -> list[list[dict[str, str]]]:
    """Chats of one to five turns, in which everything is said by everyone."""
    chance, found = random.Random(0), []
    for n in range(60):
        chat = [says("system", chance.choice(SAID))] if system and n % 3 == 0 else []
        for _ in range(1 + n % 5):
            chat += [says("user", chance.choice(SAID)), says("assistant", chance.choice(SAID))]
        found.append([*chat, says("user", chance.choice(SAID))] if n % 7 == 0 else chat)
    return found


def theirs(folder) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("template", [CHATML, DEFAULT + CHATML, WORDS], ids=["chatml", "d", "w"])
@pytest.mark.parametrize("vocab_size", [259, 600])
def test_what_is_learned_is_what_transformers_marks(template, vocab_size, tmp_path) -> None:
    ours = chat_tokenizer(tmp_path, template, TEXTS, vocab_size)
    their_tokenizer = theirs(tmp_path)
    for chat in chats():
        want = their_tokenizer.apply_chat_template(
            chat, return_assistant_tokens_mask=True, return_dict=True
        )
        got = conversation(ours, chat)
        assert got.ids == want["input_ids"], chat
        assert got.answer == [bool(mark) for mark in want["assistant_masks"]], chat


def test_without_marks_the_same_is_learned(tmp_path) -> None:
    marked = chat_tokenizer(tmp_path / "marked", CHATML, TEXTS, 600)
    plain = chat_tokenizer(tmp_path / "plain", PLAIN, TEXTS, 600)
    for chat in chats():
        assert conversation(plain, chat) == conversation(marked, chat)
        want = theirs(tmp_path / "plain").apply_chat_template(chat, tokenize=True)["input_ids"]
        assert conversation(plain, chat).ids == want


def test_an_end_token_that_takes_the_line_break_is_learned_too(tmp_path) -> None:
    """In some published tokenizers the end of a turn takes the spaces after it (``rstrip``)."""
    made = chat_tokenizer(tmp_path, CHATML)
    written = made.backend.to_str().replace(
        '"content":"<|im_end|>","single_word":false,"lstrip":false,"rstrip":false',
        '"content":"<|im_end|>","single_word":false,"lstrip":false,"rstrip":true',
    )
    assert written != made.backend.to_str()
    (tmp_path / "tokenizer.json").write_text(written)
    taking = Tokenizer.load(tmp_path)
    chat = [says("user", "2+2?"), says("assistant", "4")]
    got = conversation(taking, chat)
    assert len(got.ids) == len(made.chat(chat, add_generation_prompt=False)) - 2
    want = theirs(tmp_path).apply_chat_template(
        chat, return_assistant_tokens_mask=True, return_dict=True
    )
    assert (got.ids, got.answer) == (want["input_ids"], [*map(bool, want["assistant_masks"])])
    assert (
        taking.decode([i for i, a in zip(got.ids, got.answer, strict=True) if a]) == "4<|im_end|>"
    )


def test_messages_that_are_known_are_given(tmp_path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    chat = [says("user", "a"), says("assistant", "b"), says("user", "c"), says("assistant", "d")]
    whole, last = conversation(tokenizer, chat), conversation(tokenizer, chat, known=3)
    assert whole.ids == last.ids and sum(whole.answer) == 4 and sum(last.answer) == 2
    assert last.answer[-3:] == [True, True, False]
    with pytest.raises(ValueError, match="the assistant says nothing in this chat"):
        conversation(tokenizer, chat, known=4)


def test_a_template_that_writes_earlier_turns_otherwise_is_refused(tmp_path) -> None:
    tokenizer = chat_tokenizer(tmp_path, THINKING)
    one = [says("user", "2+2?"), says("assistant", "<think>2 and 2</think>4")]
    assert sum(conversation(tokenizer, one).answer) == len("<think>2 and 2</think>4") + 1
    with pytest.raises(ValueError, match="writes message 1 otherwise when others follow"):
        conversation(tokenizer, [*one, says("user", "sure?"), says("assistant", "yes")])


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([says("user", "Hi")], "the assistant says nothing in this chat"),
        ([says("assistant", "Hi")], "must begin with a question"),
        ([], "at least one"),
        ("Hi", "a chat is a list of messages"),
        ([says("user", "Hi"), {"role": "assistant"}], "message 1 has no text as its content"),
        ([{"role": "user", "content": [{"type": "text"}]}, says("assistant", "a")], "message 0"),
        ([{"role": "user", "content": 5}, says("assistant", "a")], "message 0"),
        ([says("user", "Hi"), "no"], "a message has a role and a content, not no"),
        ([says("user", "\ud83d"), says("assistant", "a")], "half of a surrogate pair"),
    ],
)
def test_a_chat_that_teaches_nothing_is_one_line(chat, message, tmp_path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        conversation(chat_tokenizer(tmp_path, LENIENT), chat)
    assert "\n" not in str(error.value)


def test_a_plain_answer_ends_with_the_end_token(tmp_path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    got = answered(tokenizer, "add:2+2=", "4<|im_end|>")
    end = tokenizer.eos_token_id
    assert got.ids == [*tokenizer.start("add:2+2="), *tokenizer.encode("4<|im_end|>"), end]
    assert got.answer == [i >= len(tokenizer.start("add:2+2=")) for i in range(len(got.ids))]
    without = Tokenizer(tokenizer.backend)
    without.eos_token_id = None
    assert answered(without, "2+2=", "4").ids == got.ids[:1] + tokenizer.encode("2+2=4")
    with pytest.raises(ValueError, match="no token is to be written"):
        answered(without, "2+2=", "")
    for one in ([True], [], [True, False]):
        with pytest.raises(ValueError, match="no token is to be written"):
            Answered([1] * len(one), one)


# ------------------------------------------------------------------------------- the targets


def examples(tokenizer: Tokenizer) -> list[Answered]:
    return [conversation(tokenizer, chat) for chat in chats()[:6]] + [
        answered(tokenizer, prompt, said) for prompt, said in (("2+2=", "4"), ("", "é"), ("a", ""))
    ]


def loss_by_hand(model: torch.nn.Module, some: list[Answered]) -> float:
    """Of each example alone, the surprise at each token of its answer."""
    surprises = []
    for one in some:
        logits = model(torch.tensor([one.ids]))[0].double()
        for n in range(1, len(one.ids)):
            if one.answer[n]:
                surprises.append(F.cross_entropy(logits[n - 1], torch.tensor(one.ids[n])).item())
    return sum(surprises) / len(surprises)


def check_targets(tokenizer: Tokenizer) -> None:
    model, some = tiny_gpt2(vocab_size=259, block_size=512, n_layer=1), examples(tokenizer)
    batch = conversations.targets_of(some)
    assert batch.count == sum(sum(one.answer[1:]) for one in some)
    with torch.no_grad():
        loss = causal_lm_loss(model(batch.idx, positions=batch.positions), batch.targets)
        assert loss.item() == pytest.approx(loss_by_hand(model, some), abs=1e-4)


def shifted(batch):
    batch.targets[:, 1:] = batch.targets[:, :-1].clone()
    return batch


def same_token(batch):
    """The target of a token is itself."""
    counts = batch.targets != IGNORE
    batch.targets[:, 1:][counts[:, :-1]] = batch.idx[:, 1:][counts[:, :-1]]
    return batch


def prompt_counted(batch):
    follows = batch.positions[:, 1:] > 0
    batch.targets[:, :-1] = batch.idx[:, 1:].masked_fill(~follows, IGNORE)
    return batch


def padding_counted(batch):
    batch.targets[batch.positions < 0] = 0
    return batch


def padding_seen(batch):
    batch.positions[:] = torch.arange(batch.idx.shape[1]).flip(0)
    return batch


def first_of_answer_lost(batch):
    for row in batch.targets:
        row[(row != IGNORE).nonzero()[0]] = IGNORE
    return batch


def end_lost(batch):
    for row in batch.targets:
        row[(row != IGNORE).nonzero()[-1]] = IGNORE
    return batch


MISTAKES = [
    shifted, same_token, prompt_counted, padding_counted, padding_seen, first_of_answer_lost,
    end_lost,
]  # fmt: skip


def test_the_loss_is_that_of_the_answers_alone(tmp_path) -> None:
    check_targets(chat_tokenizer(tmp_path))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_in_the_targets_is_found(mistake, tmp_path, monkeypatch) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    monkeypatch.setattr(conversations, "targets_of", lambda some: mistake(targets_of(some)))
    with pytest.raises(AssertionError):
        check_targets(tokenizer)


def test_padded_is_as_alone(tmp_path) -> None:
    some = examples(chat_tokenizer(tmp_path))
    together = targets_of(some)
    for row, one in enumerate(some):
        alone, n = targets_of([one]), len(one.ids)
        for name in ("idx", "targets", "positions"):
            assert torch.equal(getattr(together, name)[row, :n], getattr(alone, name)[0])
        assert (together.targets[row, n:] == IGNORE).all()
        assert (alone.targets[0, :-1] != IGNORE).tolist() == one.answer[1:]
