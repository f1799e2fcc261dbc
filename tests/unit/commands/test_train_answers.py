"""train --sft, --dpo and --grpo: as a newcomer would type them, and what is refused."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import chat_folder, chat_tokenizer

from lm_from_scratch.__main__ import main
from lm_from_scratch.checkpoint.weights import from_pretrained
from lm_from_scratch.commands.answers import question_of
from lm_from_scratch.text.tasks import TASKS
from lm_from_scratch.text.tokenizer import Tokenizer

NUMBERS = [
    "--steps", "3", "--warmup", "1", "--batch-size", "4", "--block-size", "64", "--held-out", "0.2",
    "--library", "torch", "--quiet",
]  # fmt: skip


def chat(question: str, answer: str) -> dict:
    said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": said}


#: The rows of a file for each way, of 20 questions.
ROWS = {
    "sft": [chat(str(n), "ab" * (1 + n % 3)) for n in range(20)],
    "dpo": [{"prompt": f"{n}=", "chosen": "a" * n, "rejected": "b"} for n in range(20)],
    "grpo": [{"prompt": f"{n}=", "completion": "a"} for n in range(20)],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("model"))


def write(file: Path, rows: list) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def command(way: str, file: object, source: Path, out: Path, *more: object) -> list[str]:
    words = ["train", f"--{way}", file, "--from", source, "--out", out, *NUMBERS]
    return [*map(str, [*words, *(["--max-new-tokens", 6] if way == "grpo" else []), *more])]


@pytest.fixture
def run(source, tmp_path, capsys):
    """A command in a folder of its own: exit code, stdout, stderr."""

    def run(way: str, rows: object = None, *more: object) -> tuple[int, str, str]:
        file = rows if isinstance(rows, str) else write(tmp_path / "rows.jsonl", rows or ROWS[way])
        code = main(command(way, file, source, tmp_path / "run", *more))
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def refused(said: tuple[int, str, str], *parts: str) -> None:
    code, _, error = said
    assert code == 2, said
    assert error.startswith("error: ") and error.count("\n") == 1 and len(error) < 700, error
    assert all(part in error for part in parts), error


def test_chats_are_learned_and_a_chat_ends_its_turn(source, tmp_path, capsys, monkeypatch) -> None:
    file = write(tmp_path / "chats.jsonl", [chat(str(n), "ab") for n in range(64)])
    numbers = ["--steps", "40", "--lr", "1e-2", "--batch-size", "16", "--eval-every", "40"]
    assert main(command("sft", file, source, tmp_path / "run", *numbers)) == 0
    said = capsys.readouterr().out
    assert "51 answers to learn from, 13 held out" in said and "--chat" in said
    assert float(said.split("held-out loss ")[1].split()[0]) < 0.1
    model = tmp_path / "run" / "model"
    end = Tokenizer.load(model).backend.token_to_id("<|im_end|>")
    written = json.loads((model / "generation_config.json").read_text())
    assert written["eos_token_id"] == [0, end]
    monkeypatch.setattr("sys.stdin", io.StringIO("7\n"))
    talk = ["generate", "--model", str(model), "--chat"]
    assert main([*talk, "--temperature", "0", "--max-new-tokens", "50"]) == 0
    said = capsys.readouterr().out
    assert said.replace(">", "").strip() == "ab" and "im_end" not in said


def test_preferences_are_learned(run, tmp_path) -> None:
    code, said, _ = run("dpo", None, "--eval-every", "3", "--lr", "1e-3", "--beta", "0.5")
    assert code == 0 and "16 pairs to learn from, 4 held out" in said
    assert "step 3: held-out loss" in said and "of 4 held-out pairs, " in said
    first = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(0.6931, abs=1e-3)


def test_rewards_are_learned_from(run, tmp_path) -> None:
    code, said, _ = run("grpo", None, "--group-size", "2", "--kl", "0.1")
    assert code == 0 and "16 questions to learn from, 4 held out" in said
    line = "mean reward of answers to 4 held-out questions, before and after: sampled 0.00 and 0.00"
    assert line in said and "the likeliest 0.00 and 0.00" in said
    steps = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [*range(1, 4)] == [step["step"] for step in steps]
    assert all(0 <= step["reward"] <= 1 for step in steps)


def test_a_chat_that_is_rewarded_ends_its_turn(run, source, tmp_path) -> None:
    code, said, error = run("grpo", [chat(str(n), "a") for n in range(20)], "--group-size", "2")
    assert code == 0 and said.rstrip().endswith("--chat"), error
    end = Tokenizer.load(source).backend.token_to_id("<|im_end|>")
    written = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())
    assert end in written["eos_token_id"]


def test_tasks_and_files_give_rewards_together(run, monkeypatch) -> None:
    monkeypatch.setattr("lm_from_scratch.commands.answers.ASKED", 30)
    monkeypatch.setattr("lm_from_scratch.commands.answers.HELD_OUT", 5)
    code, said, error = run("grpo", "add", "--grpo", "add", "max", "--group-size", "2")
    assert code == 0, error
    assert "60 questions to learn from, 10 held out" in said
    assert re.search(r"--prompt max:[\d ]+=$", said.replace("'", "").rstrip())


@pytest.mark.parametrize("share", ["0", "1", "-1", "nan", "1e-09"])
def test_a_task_needs_questions_on_both_sides(share: str, run, monkeypatch) -> None:
    monkeypatch.setattr("lm_from_scratch.commands.answers.ASKED", 30)
    refused(run("grpo", "add", "--held-out", share, "--group-size", "2"), "--held-out")


def test_no_file_and_no_task_of_that_name(run, tmp_path) -> None:
    refused(run("grpo", "nonsense"), "there is no file 'nonsense'", *TASKS)
    for way in ("sft", "dpo"):
        refused(run(way, "nonsense"), "nonsense: No such file or directory")
    refused(run("grpo", str(tmp_path)), "Is a directory")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("way", "more", "message"),
    [
        ("sft", ["--beta", "0.1"], "--beta 0.1 is for --dpo"),
        ("sft", ["--kl", "0.1"], "--kl 0.1 is for --grpo"),
        ("dpo", ["--group-size", "4"], "--group-size 4 is for --grpo"),
        ("grpo", ["--beta", "0.1"], "--beta 0.1 is for --dpo"),
        ("dpo", ["--max-new-tokens", "4"], "--max-new-tokens 4 is for --grpo"),
        ("sft", ["--classify", "a.tsv"], "--classify is not for --sft"),
        ("grpo", ["--classify", "a.tsv"], "--classify is not for --grpo"),
        ("sft", ["--corpus", "reference"], "--corpus is not for --sft"),
        ("sft", ["--kernels"], "--kernels is not for --sft"),
        ("dpo", ["--chunked-loss"], "--chunked-loss is not for --dpo"),
        ("grpo", ["--chunked-loss"], "--chunked-loss is not for --grpo"),
        ("grpo", ["--eval-every", "5"], "--eval-every is not for --grpo"),
        ("grpo", ["--parallel", "fsdp"], "give --parallel ddp"),
        ("sft", ["--no-isolate"], "--no-isolate is not for --sft"),
        ("sft", ["--n-layer", "3"], "--n-layer 3 is not for --from"),
        ("dpo", ["--beta", "0"], "--beta 0.0 must be a positive number"),
        ("dpo", ["--beta", "nan"], "--beta nan must be a positive number"),
        (
            "grpo",
            ["--group-size", "3"],
            "--group-size 3 must be at least 2, and divide --batch-size 4",
        ),
        ("grpo", ["--group-size", "2", "--kl", "-1"], "--kl -1.0 must be a finite number"),
        ("dpo", ["--dtype", "auto"], "--dtype auto is not for --dpo"),
        ("grpo", ["--group-size", "2", "--kl", "1", "--dtype", "auto"], "auto is not for --kl"),
        ("sft", ["--batch-size", "17"], "16 examples are fewer than batch_size=17"),
        ("dpo", ["--batch-size", "17"], "16 pairs are fewer than batch_size=17"),
        ("grpo", ["--batch-size", "64", "--group-size", "2"], "16 questions are fewer than the 32"),
        ("sft", ["--batch-size", "0"], "--batch-size 0 must be an integer, at least 1"),
        ("sft", ["--block-size", "20"], "more than block_size=20"),
        ("dpo", ["--block-size", "9"], "more than block_size=9"),
        ("sft", ["--block-size", "200"], "more than the 128 tokens"),
        ("sft", ["--held-out", "0"], "held_out=0.0 must be above 0 and below 1"),
    ],
)
def test_what_does_not_fit_is_one_line_and_leaves_nothing(
    way: str, more: list[str], message: str, run, tmp_path
) -> None:
    refused(run(way, None, *more), message)
    assert not (tmp_path / "run").exists()


def test_two_ways_at_once_and_none_at_all(source, tmp_path, capsys) -> None:
    assert main(command("sft", "a.jsonl", source, tmp_path / "run", "--dpo", "b.jsonl")) == 2
    assert "--dpo is not for --sft" in capsys.readouterr().err
    for words in (["--sft", "a.jsonl"], ["--dpo", "a.jsonl"], ["--grpo", "add"]):
        assert main(["train", "--out", str(tmp_path / "run"), *words]) == 2
        assert f"{words[0]} is for a model that can write already" in capsys.readouterr().err
    assert main(["train", "--out", str(tmp_path / "run"), "--beta", "0.2"]) == 2
    assert "--beta 0.2 is for --dpo" in capsys.readouterr().err


def test_a_tokenizer_without_a_template_cannot_learn_chats(tmp_path, capsys) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS["sft"])
    assert main(command("sft", file, Path("gpt2-docs"), tmp_path / "run")) == 2
    assert "example 1: the tokenizer has no chat template" in capsys.readouterr().err


GOOD = {way: rows[:5] for way, rows in ROWS.items()}


@pytest.mark.parametrize("way", ROWS)
@pytest.mark.parametrize(
    "row",
    [
        [1], None, {}, {"text": "a"}, {"messages": []}, {"messages": [5]}, {"messages": {"a": 1}},
        {"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": 1, "completion": "a"},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant"}]},
        {"prompt": "a", "completion": None}, {"prompt": ["a"], "completion": ["b"]},
        {"prompt": "a", "chosen": "b"}, {"prompt": [], "chosen": [], "rejected": []},
        {"prompt": [{"role": "user", "content": "Hi"}], "completion": [], "chosen": []},
        {"messages": [{"role": "assistant", "content": "a"}]}, {"prompt": "a" * 500},
        {"messages": [[["a"]]]}, {"prompt": "\ud83d", "completion": "a", "chosen": "a"},
        {"prompt": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a"}],
         "completion": [{"role": "user", "content": "b"}], "chosen": "b"},
    ],
    ids=range(20),
)  # fmt: skip
def test_a_row_that_is_none_is_named(way: str, row: object, run, tmp_path) -> None:
    where = "line 6" if not isinstance(row, dict) else "example 6"
    refused(run(way, [*GOOD[way], row]), f"{tmp_path / 'rows.jsonl'}, {where}: ")
    refused(run(way, [row] * 9), f"{tmp_path / 'rows.jsonl'}, {where[:-1]}1: ")
    assert not (tmp_path / "run").exists()


def test_the_last_message_of_a_question_with_a_right_answer_is_the_assistants(run) -> None:
    open_ended = chat("a", "b")["messages"] + [{"role": "user", "content": "c"}]
    refused(run("grpo", [*GOOD["grpo"], {"messages": open_ended}]), "example 6: the last message")
    turned = {"prompt": open_ended[:1], "completion": open_ended[1:]}
    refused(run("grpo", [*GOOD["grpo"], turned]), "example 6: the last message")


def test_a_call_of_a_tool_is_no_right_answer(tmp_path) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content or 'a call' }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    messages = [{"role": "user", "content": "1+1"}, call]
    with pytest.raises(ValueError, match="must be what the assistant says"):
        question_of(chat_tokenizer(tmp_path, template), {"messages": messages})


def test_the_name_of_a_file_is_said_once(run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a"), [{"text": "a"}] * 3)
    refused(run("sft", "a"), "error: a, example 1: it must be")
    write(Path("1"), ROWS["sft"][:1])
    refused(run("sft", "1"), "error: 1: 1 text cannot be split")


def test_the_command_to_try_runs_whatever_a_question_begins_with(run, capsys) -> None:
    rows = [{"prompt": f"-{n} + 1 =", "completion": "a"} for n in range(20)]
    code, said, _ = run("sft", rows)
    words = shlex.split(said.splitlines()[-1])
    assert code == 0 and words[:3] == ["try:", "python", "-m"]
    assert main([*words[4:], "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("-0 + 1 =")


# --------------------------------------------------------------------------------- going on


def test_a_run_goes_on_and_under_other_numbers_does_not(run, tmp_path) -> None:
    for way, more, other in (
        ("sft", [], [("--lr", "0.5")]),
        ("dpo", ["--beta", "0.2"], [("--beta", "0.3")]),
        ("grpo", ["--group-size", "2", "--kl", "0.1"],
         [("--group-size", "4"), ("--kl", "0.2"), ("--max-new-tokens", "5")]),
    ):  # fmt: skip
        out = ["--out", tmp_path / way]
        assert run(way, None, *more, *out)[0] == 0
        before = (tmp_path / way / "model" / "model.safetensors").read_bytes()
        code, said, _ = run(way, None, *more, *out)
        assert code == 0 and "going on after step 3" in said
        assert (tmp_path / way / "model" / "model.safetensors").read_bytes() == before
        for name, value in other:
            refused(run(way, None, *more, name, value, *out), f"holds a run with {name} ", value)
        rows = [*ROWS[way][1:], *ROWS[way][:1]]
        refused(run(way, rows, *more, *out), "the text, or its tokenizer, has changed")


@pytest.mark.parametrize("way", ["dpo", "grpo"])
def test_a_run_does_not_go_on_with_another_reference(way: str, tmp_path, capsys) -> None:
    source = chat_folder(tmp_path / "model")
    file = write(tmp_path / "rows.jsonl", ROWS[way])
    more = ["--group-size", "2", "--kl", "0.1"] if way == "grpo" else []
    words = command(way, file, source, tmp_path / "run", *more)
    assert main(words) == 0
    chat_folder(source, seed=1)
    assert main(words) == 2
    assert "the model that it is compared with has changed" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(source, tmp_path) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS["grpo"])
    words = command("grpo", file, source, tmp_path / "run", "--group-size", "2", "--steps", "400")
    process = subprocess.Popen(
        [sys.executable, "-m", "lm_from_scratch", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    log = tmp_path / "run" / "log.jsonl"
    while process.poll() is None and not (log.is_file() and log.read_text().count("\n") >= 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, error
    assert "the same command goes on from there" in said and error == ""
    (checkpoint,) = (tmp_path / "run").glob("step-*")
    assert log.read_text().count("\n") == int(checkpoint.name.removeprefix("step-"))
    from_pretrained(checkpoint)
