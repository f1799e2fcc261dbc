"""chatml: a tokenizer of bytes with the tokens of a chat, as transformers reads it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_run import SMALL
from transformers import AutoTokenizer

from lm_from_scratch.__main__ import main
from lm_from_scratch.text.chatml import CHAT_TOKENS, chat_tokenizer
from lm_from_scratch.text.tokenizer import Tokenizer

BYTES = chat_tokenizer(["any text, for there is no room for merges"], 261)


@given(st.text())
def test_every_byte_is_a_token(text: str) -> None:
    ids = BYTES.encode(text)
    assert len(ids) == len(text.encode()) and BYTES.decode(ids) == text
    assert not ids or min(ids) >= 5


def test_special_tokens_come_first_and_fill_the_vocabulary_with_the_bytes() -> None:
    assert BYTES.vocab_size == 256 + 1 + len(CHAT_TOKENS) == 261
    assert [BYTES.encode(name, special=True) for name in CHAT_TOKENS] == [[1], [2], [3], [4]]
    assert BYTES.eos_token_id == 0 and BYTES.start("") == [0]


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("vocab_size", [261, 300])
def test_the_saved_tokenizer_writes_chats_as_transformers_does(
    tmp_path, vocab_size: int, add_generation_prompt: bool
) -> None:
    chat_tokenizer(["what is what is what is"] * 9, vocab_size).save(tmp_path)
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        {"role": "system", "content": "Answer in one number."},
        {"role": "user", "content": "What is 47+38?"},
        {"role": "assistant", "content": "85"},
        {"role": "user", "content": "é<|tool_call|>"},
    ]
    want = theirs.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    ids = ours.chat(messages, add_generation_prompt)
    assert ids == want
    text = ours.decode(ids)
    assert text.count("<|im_start|>") == ids.count(1) == 4 + add_generation_prompt
    assert text.endswith("assistant\n" if add_generation_prompt else "<|im_end|>\n")
    assert theirs.eos_token == "<|endoftext|>"


def test_a_run_gets_such_a_tokenizer_and_goes_on_with_it(tmp_path, capsys) -> None:
    text, out = tmp_path / "text.md", tmp_path / "run"
    text.write_text("\n\n".join(f"paragraph {i} of a text that is read" for i in range(200)))
    words = ["train", *SMALL, "--corpus", str(text), "--chat-tokens", "--out", str(out)]
    assert main([*words, "--vocab-size", "261"]) == 0
    assert json.loads((out / "recipe.json").read_text())["arguments"]["chat_tokens"] is True
    for folder in (out, out / "model"):
        assert Tokenizer.load(folder).chat([{"role": "user", "content": "a"}])[0] == 1
    assert main([*words, "--vocab-size", "261"]) == 0
    capsys.readouterr()
    assert main(["train", "--from", str(out / "model"), "--chat-tokens", "--out", "x"]) == 2
    assert "--chat-tokens True is not for --from" in capsys.readouterr().err


def test_there_must_be_room_for_the_special_tokens() -> None:
    with pytest.raises(ValueError, match="vocab_size=260 is too small: 256 bytes and 5 special"):
        chat_tokenizer(["a"], 260)
