"""Every option of every command with odd words: done, or refused in a line, and never for ever."""

import argparse
import io
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import chat_folder

from lm_from_scratch.__main__ import main, parser
from lm_from_scratch.exercises.source import solution

ODD = [
    "", " ", "0", "-1", "1.5", "nan", "-inf", "1e999", "9" * 400, "None", "[]", "a\nb", "nowhere",
    "\x1b[2Jx", "/dev/full", "/dev/null", "pipe", ".", "\udcff", "-", "--", "a" * 300,
]  # fmt: skip

TRAIN = "--out run --steps 1 --warmup 0 --batch-size 2 --held-out 0.4 --library torch --quiet"
NUMBERS = f"train {TRAIN} --block-size 64 --from model"
#: A command that does something, in a moment, for each way through the program; with the options
#: to try, where others have tried the rest.
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate --model model --prompt ab --max-new-tokens 2": (),
    "generate --model model --prompts lines --max-new-tokens 2": ("--prompts", "--stop"),
    "classify --model model ab": (),
    "quantize model --out out": (),
    "convert model --out out": (),
    "describe model": (),
    f"train {TRAIN} --corpus notes --n-layer 1 --n-embd 8 --n-head 1 --vocab-size 260 "
    "--block-size 16": (),
    f"{NUMBERS} --sft rows": ("--sft", "--from", "--lora", "--lora-alpha", "--seed", "--dtype"),
    f"{NUMBERS} --dpo pairs": ("--dpo", "--beta"),
    f"{NUMBERS} --grpo rows --group-size 2 --max-new-tokens 2": (
        "--grpo", "--group-size", "--kl", "--max-new-tokens"
    ),
    f"{NUMBERS} --classify labels": ("--classify",),
    "hint rope": (),
    "solution rope": (),
    "start rope rope.py": (),
    "check rms_norm answer.py --case 1": (),
    "grade submitted --csv grades.csv --exercises rms_norm --jobs 1 --quiet": (),
}  # fmt: skip


def options(command: str) -> Iterator[argparse.Action]:
    """Those of a command, but for its help."""
    (commands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    for action in commands.choices[command.split()[0]]._actions:
        if action.option_strings and action.dest != "help":
            yield action


def cases(command: str) -> Iterator[list[str]]:
    """The command with each of its options, and each odd word behind it; with each odd word."""
    words = command.split()
    flags = {flag for action in options(command) for flag in action.option_strings}
    assert flags.issuperset(COMMANDS[command])
    for action in options(command):
        flag = action.option_strings[-1]
        if COMMANDS[command] and flag not in COMMANDS[command]:
            continue
        yield from ([*words, flag, odd] for odd in ODD) if action.nargs != 0 else [[*words, flag]]
    yield from ([*words, odd] for odd in ODD)


def too_long(number: int, frame: object) -> None:
    raise AssertionError("no answer in a minute")


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split()[:2]))
def test_odd_words_are_answered_in_a_line(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LM_FROM_SCRATCH_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setattr("lm_from_scratch.files.PATIENCE", 0.01)
    chat_folder(tmp_path / "model")
    os.mkfifo("pipe")
    Path("lines").write_text("one\ntwo\n")
    Path("notes").write_text("\n\n".join(f"note {n}: the tide" for n in range(40)))
    rows = [{"prompt": f"{n}=", "completion": "a"} for n in range(9)]
    pairs = [{"prompt": f"{n}=", "chosen": "a", "rejected": "b"} for n in range(9)]
    Path("rows").write_text("\n".join(map(json.dumps, rows)))
    Path("pairs").write_text("\n".join(map(json.dumps, pairs)))
    Path("labels").write_text("\n".join(f"text {n}\t{'ab'[n % 2]}" for n in range(9)))
    Path("answer.py").write_text(solution("rms_norm"))
    Path("submitted", "anna").mkdir(parents=True)
    Path("submitted", "anna", "a.py").write_text(solution("rms_norm"))
    codes: Counter[int] = Counter()
    previous = signal.signal(signal.SIGALRM, too_long)
    try:
        for words in cases(command):
            for folder in ("run", "out"):
                shutil.rmtree(folder, ignore_errors=True)
            monkeypatch.setattr("sys.stdin", io.StringIO(""))
            signal.alarm(60)
            try:
                code = main(words)
            except SystemExit as end:  # of argparse
                code = int(end.code or 0)
            error = capsys.readouterr().err
            lines = [line for line in error.splitlines() if "error: " in line]
            assert code in (0, 1, 2) and len(lines) == (code == 2), (words, code, error)
            own = [line for line in lines if line.startswith("error: ")]  # not those of argparse
            assert len(error) < 20_000 and "\x1b" not in "".join(own), (words, error)
            codes[code] += 1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert codes[2] > len(ODD) // 2, codes
