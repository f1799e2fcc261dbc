"""Every kind of tokenizer of the library ``tokenizers``: what a continuation says, and which tokens
an answer has. The judges are ``decode`` of the whole and ``transformers``."""

import json
import shlex
from base64 import b64encode
from functools import cache

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_gpt2
from tokenizer_kinds import BYTES, KINDS, LINES, RULES, SPECIAL, kind
from tokenizers import models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lm_from_scratch.__main__ import main
from lm_from_scratch.checkpoint.weights import save_pretrained
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.generation.text import generate_text, until
from lm_from_scratch.text.conversations import answered, continued
from lm_from_scratch.text.examples import pair
from lm_from_scratch.text.labelled import Labelled, LabelledBatches
from lm_from_scratch.text.streaming import common, stream
from lm_from_scratch.text.tokenizer import Tokenizer

#: Words that the tokenizers know, and anything.
WORDS = st.sampled_from([
    *" ".join(LINES[:7]).split(" "), " ", "  ", "\n", "=", "cat", "the=", " cat", "é", "😀", ".",
    "'s", "\ufffd", "ſ", "<s>", "</s>",
])  # fmt: skip
TEXT = st.one_of(st.lists(WORDS, max_size=6).map("".join),
                 st.lists(WORDS, max_size=6).map(" ".join), st.text(max_size=8))  # fmt: skip
NAMES, ALL_RULES = st.sampled_from(sorted(KINDS)), st.sampled_from(sorted(RULES))

CASES = pytest.mark.parametrize("cases", [40, pytest.param(3000, marks=pytest.mark.slow)])


def hold(law, cases: int, *drawn) -> None:
    """A law, for so many drawn cases."""
    settings(
        max_examples=cases, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )(given(*drawn)(law))()


@cache
def theirs(name: str, rule: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=kind(name, rule).backend, eos_token="</s>", bos_token="<s>",
        unk_token="<unk>", split_special_tokens=True,
    )  # fmt: skip


def tokens(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, with many bytes, and some that have no token."""
    names = [i for name in BYTES if (i := tokenizer.backend.token_to_id(name)) is not None]
    ids = st.integers(0, tokenizer.vocab_size + 3)
    return st.lists(st.one_of(ids, st.sampled_from(names)) if names else ids, max_size=12)


@CASES
def test_what_is_streamed_is_what_the_whole_gains(cases) -> None:
    def law(data, name, prompt, text, rule) -> None:
        tokenizer = kind(name, rule)
        before = tokenizer.start(prompt)
        new = data.draw(st.one_of(tokens(tokenizer), st.just(tokenizer.encode(text))))
        whole, start = tokenizer.decode([*before, *new]), tokenizer.decode(before)
        pieces = list(tokenizer.stream(iter(new), after=before))
        assert all(pieces)
        if "\ufffd" in whole:  # bytes that are no text: characters beside them may have been said
            said = iter("".join(pieces))
            gain = tokenizer.decode(new, after=before)
            assert all(character in said for character in gain if character != "\ufffd")
            return
        assert "".join(pieces) == tokenizer.decode(new, after=before)
        assert whole.endswith("".join(pieces))
        if whole.startswith(start):
            assert start + "".join(pieces) == whole
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(tokenizer.stream(new)) == tokenizer.decode(new)

    hold(law, cases, st.data(), NAMES, TEXT, TEXT, ALL_RULES)


@pytest.mark.parametrize("name", ["<0x0A>", "<0xE7>", "▁"])
def test_a_token_without_end_costs_the_same_each_time(name) -> None:
    """Also a byte, of which none may be half a character, behind a long prompt."""
    tokenizer, lengths = kind("byte fallback, Metaspace"), []
    token = tokenizer.backend.token_to_id(name)

    def decode(ids):
        lengths.append(len(ids))
        return tokenizer.decode(ids)

    words = [token, *tokenizer.encode("the cat")] * 200
    newline = tokenizer.backend.token_to_id("<0x0A>")
    for before in (words, words + [newline] * 2000, [newline] * 2000):
        lengths.clear()
        pieces = stream(decode, tokenizer.backend.id_to_token, [token] * 400, before)
        text = "".join(pieces)
        if "\ufffd" not in tokenizer.decode([*before, token]):
            assert text == tokenizer.decode([token] * 400, after=before)
        assert sum(lengths) < 400 * 60


def test_a_stop_string_of_bytes_ends_the_text_at_once() -> None:
    tokenizer = kind("byte fallback, Metaspace")
    newline, drawn = tokenizer.backend.token_to_id("<0x0A>"), []
    ids = (drawn.append(newline) or newline for _ in range(300))
    before = tokenizer.encode("the cat")
    assert "".join(until(tokenizer.stream(ids, after=before), ["\n\n"])) == ""
    assert len(drawn) < 5


def test_what_config_json_says_of_a_tokenizer_goes_with_it(tmp_path) -> None:
    """Into a folder without one, as that of an adapter."""
    kind("byte-level").save(tmp_path)
    settings = {"add_prefix_space": True, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = Tokenizer.load(tmp_path)
    tokenizer.save(tmp_path / "adapter")
    again = Tokenizer.load(tmp_path / "adapter")
    assert again.encode("the") == tokenizer.encode("the") == tokenizer.encode(" the")


@CASES
def test_a_stop_string_ends_the_text_wherever_tokens_end(cases) -> None:
    def law(name, prompt, text, stop) -> None:
        tokenizer = kind(name)
        before, new = tokenizer.start(prompt), tokenizer.encode(text)
        whole = tokenizer.decode(new, after=before)
        said = "".join(until(tokenizer.stream(new, after=before), [stop]))
        assert said == whole.partition(stop)[0]

    hold(law, cases, NAMES, TEXT, TEXT, WORDS.filter(bool))


@CASES
def test_ids_and_texts_are_those_of_transformers(cases) -> None:
    def law(name, rule, text) -> None:
        ours, reference = kind(name, rule), theirs(name, rule)
        assert ours.encode(text) == reference.encode(text, add_special_tokens=False)
        ids = reference.encode(text)
        assert ours.enclosed(text, 10**6) == ids
        assert ours.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)
        behind = len(ours.around[1])
        assert ours.start(text) == ids[: len(ids) - behind]
        for limit in (4, 7):
            cut = reference.encode(text, truncation=True, max_length=limit)
            assert ours.enclosed(text, limit) == cut

    hold(law, cases, NAMES, ALL_RULES, TEXT)


@CASES
def test_an_answer_has_the_tokens_that_follow_its_question(cases) -> None:
    """``trl`` 1.16 tokenises question and answer together and puts the border where the tokens of
    both part from those of the question. So it is here, if that is after the whole question; else
    the question keeps the tokens that generation starts from, and the text is the same."""

    def law(name, rule, prompt, completion) -> None:
        tokenizer = kind(name, rule)
        question, answer = continued(tokenizer, prompt, completion)
        start, together = tokenizer.start(prompt), tokenizer.start(prompt + completion)
        assert tokenizer.decode([*question, *answer]) == tokenizer.decode(together)
        border = common(start, together)
        if border == len(start) or question != start:
            assert (question, answer) == (together[:border], together[border:])
        if question or answer:
            learned = answered(tokenizer, prompt, completion)
            assert learned.ids == [*question, *answer, tokenizer.eos_token_id]
            assert learned.answer == [False] * len(question) + [True] * (len(answer) + 1)

    hold(law, cases, NAMES, ALL_RULES, TEXT, TEXT)


@pytest.mark.parametrize("name", KINDS)
def test_both_answers_of_a_pair_follow_the_tokens_that_generation_starts_from(name) -> None:
    tokenizer = kind(name, "around")
    row = {"prompt": "the cat sat on", "chosen": " the mat", "rejected": " a list"}
    for one, answer in zip(pair(tokenizer, row), (row["chosen"], row["rejected"]), strict=True):
        question = tokenizer.start(row["prompt"])
        assert one.ids[: len(question)] == question and one.answer.index(True) == len(question)
        assert one.ids.count(tokenizer.eos_token_id) == 1  # no rule's token in the midst
        words = one.ids[len(question) : -1]
        assert row["prompt"] + tokenizer.decode(words, after=question) == row["prompt"] + answer


@pytest.mark.parametrize("rule", RULES)
def test_a_classifier_reads_what_the_rule_puts_behind(rule) -> None:
    tokenizer, lines = kind("WordPiece", rule), LINES[:4]
    rows = [Labelled(line, str(n % 2)) for n, line in enumerate(lines)]
    batches = LabelledBatches(rows, ["0", "1"], tokenizer, batch_size=2, block_size=9)
    reference = theirs("WordPiece", rule)
    assert batches.ids == [reference(x, truncation=True, max_length=9).input_ids for x in lines]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_opens_from_its_file(name, tmp_path) -> None:
    made = kind(name, "around")
    made.save(tmp_path)
    again, reference = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in (*LINES[:7], "ſ 12", ""):
        assert again.encode(text) == made.encode(text)
        assert again.enclosed(text, 10**6) == reference(text, split_special_tokens=True).input_ids
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path).start("the") == made.start("the")


@pytest.mark.parametrize("name", ["Unigram", "byte fallback, prepended", "</w>", "WordLevel"])
def test_every_way_to_generate_says_the_same_spaces(name, tmp_path, capsys) -> None:
    """The command alone, of several prompts, with beams, and several times; and in Python."""
    tokenizer = kind(name)
    model = tiny_gpt2(vocab_size=tokenizer.vocab_size, block_size=32)
    save_pretrained(model, tmp_path / "m", tokenizer)
    prompt, file = "the cat", tmp_path / "prompts"
    ids = tokenizer.start(prompt)
    new = complete(generate(model, [ids], 8, GREEDY))[0]
    want = tokenizer.decode(new, after=ids)
    assert prompt + want == tokenizer.decode([*ids, *new])
    assert "".join(generate_text(model, Tokenizer(tokenizer.backend), prompt, 8, GREEDY)) == want
    file.write_text(prompt)
    words = ["generate", "--model", str(tmp_path / "m"), "--max-new-tokens", "8", "--ignore-eos"]
    asked = [*words, "--temperature", "0", "--prompt", prompt]
    for one in (
        asked, [*asked, "--num-return-sequences", "2"], [*words, "--prompt", prompt,
        "--num-beams", "1"], [*words, "--temperature", "0", "--prompts", str(file)],
    ):  # fmt: skip
        assert main(one) == 0
        assert f"{prompt}{want}\n" in capsys.readouterr().out
    stop = want[: len(want) // 2][-4:]
    assert main([*asked, "--stop", stop]) == 0
    assert capsys.readouterr().out == prompt + want.partition(stop)[0] + "\n"


def test_a_missing_unknown_token_is_named_where_it_is_missing() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"))
    ours = Tokenizer(backend)
    assert ours.encode("a") == [0]
    with pytest.raises(ValueError, match=r"cannot be encoded: .*Missing \[UNK\] token"):
        ours.encode("c")


PREFIXED = [
    "byte-level", "byte-level, space in front", "byte-level, Qwen2",
    "byte fallback, prepended", "byte fallback, Metaspace", "Metaspace always",
]  # fmt: skip


@pytest.mark.parametrize("settings", [
    {}, {"add_prefix_space": True}, {"add_prefix_space": False}, {"legacy": True},
    {"legacy": False, "add_prefix_space": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", PREFIXED)
def test_a_space_in_front_is_that_of_transformers(name, settings, tmp_path) -> None:
    kind(name, "in front").backend.save(str(tmp_path / "tokenizer.json"))
    classes = ["PreTrainedTokenizerFast", "TokenizersBackend"]
    classes += ["LlamaTokenizer", "LlamaTokenizerFast"]
    classes += ["GPT2Tokenizer"] if name in PREFIXED[:2] else []
    classes += ["Qwen2TokenizerFast"] if name == "byte-level, Qwen2" else []
    for tokenizer_class in classes:
        written = {"tokenizer_class": tokenizer_class, "eos_token": "</s>", **settings}
        check_ids(tmp_path, written)
    if "add_prefix_space" in settings:  # without it a file that stands alone means what it says
        del written["tokenizer_class"]
        for family in ["llama", *(["gpt2"] if name in PREFIXED[:2] else [])]:
            (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
            check_ids(tmp_path, written)


def check_ids(tmp_path, written) -> None:
    """Ours and theirs, with these settings."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    ours, reference = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in (*LINES[:7], "", " ", " the", "  the cat", "\nthe", "the <s> cat", "<s> cat"):
        ids = reference.encode(text, add_special_tokens=False)
        assert ours.encode(text, special=True) == ids, (written, text)
        assert ours.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "qwen3", "qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("named", [True, False], ids=["its class", "its model"])
def test_vocabulary_and_merges_alone_are_those_of_transformers(family, named, tmp_path) -> None:
    written = json.loads(kind("byte-level").backend.to_str())["model"]
    vocab = {**written["vocab"], "<|endoftext|>": len(written["vocab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    merges = ["#version: 0.2", *map(" ".join, written["merges"])]
    (tmp_path / "merges.txt").write_text("\n".join(merges) + "\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    if named:
        settings = {"tokenizer_class": "GPT2Tokenizer" if family == "gpt2" else "Qwen2Tokenizer"}
        settings["add_prefix_space"] = True
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, reference = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.eos_token_id == reference.eos_token_id == len(vocab) - 1
    for text in (*LINES[:7], "", " the", "a 123 e\u0301", "x<|endoftext|> y"):
        assert ours.start(text, special=True) == reference.encode(text)
    ours.save(tmp_path / "again")
    again = Tokenizer.load(tmp_path / "again")
    assert again.backend.to_str() == ours.backend.to_str()
    (tmp_path / "merges.txt").write_text("one\n")
    for settings, reason in (
        ({}, "has a merges.txt or vocab.json that cannot be read: .*line 1"),
        ({"tokenizer_class": "RobertaTokenizer"}, "of RobertaTokenizer, merges.*AutoTokenizer"),
        ({"add_bos_token": True}, "of add_bos_token, merges.*AutoTokenizer"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.raises(ValueError, match=reason) as error:
            Tokenizer.load(tmp_path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("config", [{"model_type": "mamba"}, {}, None])
def test_vocabulary_and_merges_of_a_family_that_is_not_known_are_refused(config, tmp_path) -> None:
    kind("byte-level").backend.model.save(str(tmp_path))
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"of a class that no file names, merges.*AutoTokenizer"):
        Tokenizer.load(tmp_path)


def test_the_replacement_character_itself_is_a_text() -> None:
    tokenizer = kind("byte fallback, Metaspace")
    before, new = tokenizer.encode("the cat"), tokenizer.encode("\ufffd" * 4)
    assert "".join(tokenizer.stream(new, after=before)).strip() == "\ufffd" * 4


def test_what_is_to_be_run_makes_the_tokenizer(tmp_path) -> None:
    """A small tekken.json; the advice is run as it stands."""
    words = [bytes([i]) for i in range(256)] + [b"th", b"the"]
    vocab = [{"rank": i, "token_bytes": b64encode(x).decode()} for i, x in enumerate(words)]
    special = [{"rank": i, "token_str": name} for i, name in enumerate(SPECIAL)]
    config = {"pattern": r"\p{L}+|\P{L}", "default_vocab_size": len(words) + 3}
    config["default_num_special_tokens"] = 3
    written = {"config": config, "vocab": vocab, "special_tokens": special}
    (tmp_path / "tekken.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match="no tokenizer at") as error:
        Tokenizer.load(tmp_path)
    exec(shlex.split(str(error.value).partition("python -c ")[2])[0])
    ours = Tokenizer.load(tmp_path)
    assert ours.encode("the t") == [3 + 257, 3 + ord(" "), 3 + ord("t")]
    assert ours.decode(ours.encode("é, the cat")) == "é, the cat"


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("tokenizer.model", "AutoTokenizer"),
        ("vocab.json", "AutoTokenizer"),
        ("tekken.json", "convert_tekken_tokenizer"),
        ("other", r"save_pretrained\(model, folder, tokenizer\)"),
    ],
)
def test_a_folder_of_another_tokenizer_says_what_to_run(file, remedy, tmp_path) -> None:
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(ValueError, match=f"no tokenizer at .*{remedy}.* one") as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)
