"""generate: where a text begins and ends, and talking to a model."""

import contextlib
import io
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_hf_qwen2
from tqdm import tqdm

from lm_from_scratch.__main__ import main
from lm_from_scratch.checkpoint.folders import SHIPPED
from lm_from_scratch.checkpoint.weights import load_shipped, save_pretrained
from lm_from_scratch.commands import generate as command
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.logit_processors import no_repeat_ngram
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.signals import Ended
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.weights.resize import resize_token_embeddings_

MODEL, TOKENIZER = load_shipped()
GREEDY = ["generate", "--temperature", "0", "--prompt", "Return the", "--max-new-tokens", "12"]
GREEDY += ["--layout", "off"]


def greedy(ids: list[int], n: int = 12) -> list[int]:
    return complete(generate(MODEL, [ids], n, Sampler(temperature=0)))[0]


@pytest.fixture
def folder(tmp_path) -> Path:
    """The shipped model, whose texts end at the fourth and the second token that it says."""
    (tmp_path / "model").mkdir()
    for file in SHIPPED.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_text_ends_where_the_config_says(folder, capsys) -> None:
    said = greedy(TOKENIZER.start("Return the"))
    end = next(i for i in range(3, 12) if said[i] not in said[:i])
    want = "Return the" + TOKENIZER.decode(said[:end])
    edit_config(folder, eos_token_id=said[end])
    for several in ([], ["--num-return-sequences", "1"]):
        assert main([*GREEDY, *several, "--model", str(folder)]) == 0
        assert capsys.readouterr().out == want + "\n"
    assert main([*GREEDY, "--num-return-sequences", "2", "--model", str(folder)]) == 0
    assert capsys.readouterr().out == f"--- 1\n{want}\n--- 2\n{want}\n"
    assert main([*GREEDY, "--ignore-eos", "--model", str(folder)]) == 0
    assert capsys.readouterr().out == "Return the" + TOKENIZER.decode(said) + "\n"


def test_each_of_several_end_tokens_ends_a_text_and_a_beam(folder, capsys) -> None:
    said = greedy(TOKENIZER.start("Return the"))
    ends = [said[5], said[2], 10**6]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    want = TOKENIZER.decode(said[: next(i for i in range(12) if said[i] in ends)])
    assert main([*GREEDY, "--model", str(folder)]) == 0
    assert capsys.readouterr().out == f"Return the{want}\n"
    assert main([*GREEDY, "--num-beams", "1", "--model", str(folder)]) == 0
    assert capsys.readouterr().out.endswith(f"\nReturn the{want}\n")


def test_greedy_text_is_that_of_transformers(tmp_path, capsys) -> None:
    """Of a Qwen2 whose tokenizer puts nothing in front, and whose texts end with either of two
    tokens that only generation_config.json names."""
    from tokenizers.processors import ByteLevel
    from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

    backend = Tokenizer.train(["the tides turn twice a day " * 20], 290).backend
    backend.post_processor = ByteLevel(trim_offsets=False)
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    model = tiny_hf_qwen2(vocab_size=310)  # padded: ids without a token
    ids = theirs("the tides", return_tensors="pt").input_ids
    free = GenerationConfig(do_sample=False, max_new_tokens=24, pad_token_id=0)
    new = model.generate(ids, free)[0, ids.shape[1] :].tolist()
    ends = [new[9], new[5]]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=0)
    for part in (model, theirs):
        part.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    out = again.generate(ids, do_sample=False, max_new_tokens=24)[0, ids.shape[1] :].tolist()
    want = "the tides" + theirs.decode([token for token in out if token not in ends])
    words = ["--prompt", "the tides", "--temperature", "0", "--max-new-tokens", "24"]
    assert main(["generate", "--model", str(tmp_path / "model"), *words]) == 0
    assert capsys.readouterr().out == want + "\n" and len(out) <= 10


@pytest.mark.parametrize(
    "stored",
    [
        {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
        {"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.3},  # top_k=50 is theirs
        {"do_sample": True, "typical_p": 0.6, "top_k": 0, "temperature": None},
        {"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.2},
        {"do_sample": False, "no_repeat_ngram_size": 2},
    ],
)
def test_a_folder_says_how_tokens_are_chosen_as_in_transformers(stored, seeded) -> None:
    """The scores of each step of their generation, with that generation_config.json."""
    from transformers import GenerationConfig

    twin = tiny_hf_qwen2(vocab_size=97)
    ids = torch.tensor([[5, 9, 5, 9, 33]])
    twin.generation_config = GenerationConfig(
        **stored, max_new_tokens=6, pad_token_id=0, output_scores=True, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    theirs = twin.generate(ids)
    sampler, ngram = command.stored_choice(stored)
    if not stored["do_sample"]:
        assert sampler.temperature == 0
        sampler = replace(sampler, top_p=1.0)  # which the likeliest token stays within
    for step, (logits, scores) in enumerate(zip(theirs.logits, theirs.scores, strict=True)):
        row = theirs.sequences[0, : ids.shape[1] + step].tolist()
        seen = torch.zeros_like(logits, dtype=torch.bool)
        seen[0, row] = True
        logits = no_repeat_ngram(ngram)(logits, [row]) if ngram else logits
        ours = sampler.logits(logits, seen)
        torch.testing.assert_close(ours.softmax(-1), scores.softmax(-1))


def test_options_go_before_the_folder_and_the_folder_before_our_numbers(folder, capsys) -> None:
    words = ["generate", "--model", str(folder), "--prompt", "Return the", "--max-new-tokens", "12"]
    words += ["--layout", "off"]

    def says(*more: str) -> str:
        assert main([*words, *more]) == 0
        return capsys.readouterr().out

    ours, greedy = says("--temperature", "0.8", "--top-p", "0.95"), says("--temperature", "0")
    path = folder / "generation_config.json"
    assert says() == ours != greedy
    for generation, same in (
        ({"eos_token_id": 10**6}, ours),  # says nothing of it
        ({"do_sample": False}, greedy),
        ({"temperature": 0, "top_p": None}, greedy),
        (
            {"do_sample": True, "top_k": 3},
            says(*["--temperature", "1", "--top-p", "1", "--top-k", "3"]),
        ),
        ({"no_repeat_ngram_size": 1}, says("--no-repeat-ngram", "1")),
        ({"max_new_tokens": 2, "num_beams": 3, "num_return_sequences": 3}, ours),
    ):
        path.write_text(json.dumps(generation))
        assert says() == same, generation
    path.write_text(json.dumps({"do_sample": False, "no_repeat_ngram_size": 1}))
    assert says("--temperature", "0.8", "--no-repeat-ngram", "0") == ours
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.1, "top_k": 1}))
    assert says("--top-k", "0", "--temperature", "0.8", "--top-p", "0.95") == ours


@pytest.mark.parametrize(
    "generation",
    [{"temperature": "hot"}, {"top_p": 3}, {"do_sample": "yes"}, {"no_repeat_ngram_size": -1}],
)
def test_a_folder_that_chooses_by_nothing_is_one_line(generation, folder, capsys) -> None:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert main([*GREEDY, "--model", str(folder)]) == 2
    error = capsys.readouterr().err
    ((name, value),) = generation.items()
    assert error.count("\n") == 1 and f"generation_config.json: {name}={value!r} " in error


def test_the_tokenizer_says_what_stands_in_front(folder, capsys, monkeypatch) -> None:
    ids, end = TOKENIZER.encode("Return the"), TOKENIZER.eos_token_id
    bare, ended = (TOKENIZER.decode(greedy(start)) for start in (ids, [end, *ids]))
    assert bare != ended
    monkeypatch.setattr(Tokenizer, "start", lambda self, text: self.encode(text))
    for start, want in (("rule", bare), ("end", ended), ("nothing", bare)):
        assert main([*GREEDY, "--ignore-eos", "--start", start]) == 0
        assert capsys.readouterr().out == f"Return the{want}\n"
    assert main(["generate"]) == 2
    assert "nothing to go on from: give a --prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chat", "--prompt", "Hello"], "--prompt Hello is not for --chat"),
        (["--chat", "--num-beams", "2"], "--num-beams 2 is not for --chat"),
        (["--prompts", "a.txt", "--num-beams", "2"], "--num-beams 2 is not for --prompts"),
        (["--prompts", "a.txt", "--prompt", "Hello"], "--prompt Hello is not for --prompts"),
        (["--prompts", "a.txt", "--chat"], "--prompts a.txt is not for --chat"),
        (["--system", "Be brief."], "--system 'Be brief.' is for --chat"),
    ],
)
def test_what_means_nothing_together_is_refused(words, message, capsys) -> None:
    assert main(["generate", *words]) == 2
    assert message in capsys.readouterr().err


class Template:
    """Every message between end tokens, and what was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []

    def __call__(self, tokenizer, messages) -> list[int]:
        self.asked.append([dict(message) for message in messages])
        text = "".join(message["content"] + " " for message in messages)
        return [tokenizer.eos_token_id, *tokenizer.encode(text)]


@pytest.fixture
def template(monkeypatch) -> Template:
    made = Template()
    monkeypatch.setattr(Tokenizer, "chat", lambda *args: made(*args), raising=False)
    return made


CHAT = ["generate", "--chat", "--temperature", "0", "--max-new-tokens", "5"]


def test_a_chat_takes_turns(template, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Return the\nwhat else?\n"))
    assert main([*CHAT, "--system", "Be brief."]) == 0
    said = capsys.readouterr().out
    first = template.asked[2][2]["content"]
    assert said.startswith(first + "\n") and len(said) > len(first) + 2
    system, hello = {"role": "system", "content": "Be brief."}, {"role": "user"}
    assert template.asked == [
        [system, {**hello, "content": "Hello"}],  # whether it can be asked at all
        [system, {**hello, "content": "Return the"}],
        [
            system,
            {**hello, "content": "Return the"},
            {"role": "assistant", "content": first},
            {**hello, "content": "what else?"},
        ],
    ]
    assert first


@pytest.mark.parametrize(
    ("ended", "goes_on"),
    [(KeyboardInterrupt(), True), (Ended(signal.SIGINT), True), (Ended(signal.SIGTERM), False)],
)
def test_ctrl_c_ends_an_answer_and_other_signals_the_chat(
    ended, goes_on, template, monkeypatch, capsys
) -> None:
    said = iter([["one ", "two "], ["three"]])

    def pieces(self, prompt, max_new_tokens, seed):
        texts = next(said)
        yield from texts
        if len(texts) > 1:
            raise ended

    monkeypatch.setattr(command.Speaker, "pieces", pieces)
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    code = main(CHAT)
    out = capsys.readouterr()
    if goes_on:
        assert (code, out.out) == (0, "one two \nthree\n")
        assert template.asked[2][1] == {"role": "assistant", "content": "one two "}
    else:
        assert code == 128 + signal.SIGTERM and out.err.count("\n") == 1


def test_a_chat_that_is_too_long_is_one_line(template, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Return " * 300 + "\n"))
    assert main(CHAT) == 2
    assert "the model reads 256: begin a new one" in capsys.readouterr().err


def test_a_chat_uses_the_template_of_the_folder(folder, monkeypatch, capsys) -> None:
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|endoftext|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("Return the\n"))
    assert main([*CHAT, "--model", str(folder)]) == 0
    ids = [TOKENIZER.eos_token_id, *TOKENIZER.encode("user: Return the\n")]
    want = TOKENIZER.decode(greedy(ids, 5)).split("<|endoftext|>")[0]
    assert capsys.readouterr().out == want + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("Return the\n"))
    assert main(CHAT) == 2  # the shipped model has none
    assert capsys.readouterr().err.count("\n") == 1


# ----------------------------------------------------------------------------- many prompts

PROMPTS = ["Return the number of", "The", "", "json.dumps(obj)", "If the file does not exist, an"]


def alone(prompt: str, *more: str) -> str:
    """What the command says after one prompt."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["generate", "--prompt", prompt, "--max-new-tokens", "12", *more]) == 0
    return out.getvalue()


@pytest.mark.parametrize(
    "more", [["--temperature", "0", "--no-repeat-ngram", "2"], ["--seed", "5", "--stop", "e"]]
)
def test_many_prompts_say_what_each_says_alone(more, tmp_path, capsys) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    words = ["generate", "--prompts", str(file), "--max-new-tokens", "12", "--layout", "off"]
    assert main([*words, *more]) == 0
    want = [alone(prompt, "--layout", "off", *more) for prompt in PROMPTS]
    assert capsys.readouterr().out == "".join(
        f"--- {number}\n{said}" for number, said in enumerate(want, start=1)
    )


def test_many_prompts_from_the_input_and_by_default_laid_out(monkeypatch, capsys) -> None:
    seen = []
    monkeypatch.setattr(
        command, "make_fast", lambda model, args, rows: seen.append((args.layout, rows)) or ""
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffThe\nReturn"))
    assert main(["generate", "--prompts", "-", "--temperature", "0", "--max-new-tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("--- 1\nThe") and "\n--- 2\nReturn" in out
    assert seen == [("measured", 2)]


def test_more_prompts_than_run_at_a_time(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(command, "MANY", 2)
    file = tmp_path / "prompts.txt"
    file.write_text("The\n" * 5 + "Return the number of the items in\n")
    words = ["generate", "--prompts", str(file), "--temperature", "0", "--layout", "off"]
    assert main([*words, "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.count("--- ") == 6


def test_long_prompts_show_how_far_they_are_read(monkeypatch, tmp_path, capsys) -> None:
    """A bar counts the tokens that are read and said, on a terminal alone."""
    assert command.progress(3).disable
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert not command.progress(3).disable
    monkeypatch.setattr("sys.stderr", None)
    assert command.progress(3).disable
    bars = []

    def bar(total: int) -> tqdm:
        bars.append(tqdm(total=total, disable=False, file=io.StringIO()))
        return bars[-1]

    monkeypatch.setattr(command, "progress", bar)
    file = tmp_path / "prompts.txt"
    file.write_text("The\n" + "word " * 100 + "\n")
    words = ["generate", "--prompts", str(file), "--max-new-tokens", "4", "--ignore-eos"]
    assert main([*words, "--layout", "off"]) == 0
    read = sum(len(TOKENIZER.start(line)) for line in file.read_text().splitlines())
    assert bars[0].n == bars[0].total == read + 2 * 3  # the last of each is never read


@pytest.mark.parametrize(
    ("text", "message"), [("", "has no line"), ("The\n" + "word " * 400 + "\n", "line 2: ")]
)
def test_prompts_that_cannot_be_continued_are_one_line(text, message, tmp_path, capsys) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(text)
    assert main(["generate", "--prompts", str(file), "--layout", "off"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


# -------------------------------------------------------------------------------------- drafts


@pytest.mark.parametrize(
    ("rows", "more"), [(4160, []), (4090, ["--repetition-penalty", "1.3", "--stop", "list"])]
)
def test_drafts_change_no_word_whatever_the_padding_of_their_model(
    rows, more, tmp_path, capsys
) -> None:
    """Of another model with the same tokens, whose vocabulary has more rows, or lacks some."""
    model, tokenizer = load_shipped("qwen2-docs")
    resize_token_embeddings_(model, rows)
    save_pretrained(model, tmp_path / "draft", tokenizer)
    texts = []
    for draft in ([], ["--draft", str(tmp_path / "draft")]):
        assert main([*GREEDY, "--max-new-tokens", "30", *more, *draft]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) > 20


def test_a_draft_model_with_other_tokens_is_refused(capsys) -> None:
    assert main([*GREEDY, "--draft", "tasks"]) == 2
    assert "--draft tasks has other tokens than the model" in capsys.readouterr().err
    for flag, value in (("--prompts", "-"), ("--num-beams", "2"), ("--num-return-sequences", "2")):
        assert main(["generate", "--draft", "qwen2-docs", flag, value]) == 2
        assert f"--draft qwen2-docs is not for {flag}" in capsys.readouterr().err
