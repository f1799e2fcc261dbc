"""Commands that are ended at random moments: no traceback, and runs that end bit for bit alike."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lm_from_scratch.__main__ import main

PROGRAM = [sys.executable, "-m", "lm_from_scratch"]
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
RUN = [
    "train", "--library", "torch",
    "--vocab-size", "300", "--n-layer", "2", "--n-head", "2", "--n-embd", "16",
    "--block-size", "32", "--dropout", "0.1", "--batch-size", "4", "--steps", "40", "--warmup", "5",
    "--eval-every", "0", "--checkpoint-every", "1", "--held-out", "0.3", "--quiet",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[list[str], dict[str, torch.Tensor], float]:
    """A command, the weights that it ends with, and the seconds that it takes."""
    root = tmp_path_factory.mktemp("whole")
    text = root / "notes.txt"
    text.write_text("\n\n".join(f"note {i}: the tides turn {i * i} times" for i in range(900)))
    command = [*PROGRAM, *RUN, "--corpus", str(text), "--out"]
    started = time.perf_counter()
    subprocess.run([*command, str(root / "run")], check=True, capture_output=True)
    seconds = time.perf_counter() - started
    return command, load_file(root / "run" / "model" / "model.safetensors"), seconds


def ended(command: list[str], number: int, seconds: float) -> tuple[int, str]:
    """Exit code and stderr of a command that gets a signal after so many seconds."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    time.sleep(seconds)
    process.send_signal(number)
    _, error = process.communicate(timeout=120)
    return process.returncode, error


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_run_ended_at_random_moments_ends_bit_for_bit_alike(whole, tmp_path, seed: int) -> None:
    command, want, seconds = whole
    chance, codes = random.Random(seed), []
    for i in range(6):  # the first ones before the first step
        number = chance.choice([*SIGNALS, signal.SIGKILL, signal.SIGKILL])
        when = seconds * (chance.uniform(0.05, 0.5) if i < 2 else chance.uniform(0.3, 1.0))
        code, error = ended([*command, str(tmp_path)], number, when)
        assert code in (0, -signal.SIGKILL, 128 + number), (code, number, when, error)
        assert error.count("\n") <= 1 and "Traceback" not in error, (number, when, error)
        codes.append(code)
    assert any(codes)
    done = subprocess.run([*command, str(tmp_path)], check=False, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    got = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(got[name], want[name]) for name in want)
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 41))
    left = sorted(p.name for p in tmp_path.iterdir() if p.suffix in (".tmp", ".old"))
    assert left == []
    assert sorted(p.name for p in tmp_path.glob("*step-*")) == ["step-00000039", "step-00000040"]


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_that_is_ended_leaves_a_checkpoint_and_says_how_to_go_on(
    whole, tmp_path, number
) -> None:
    command, want, _ = whole
    process = subprocess.Popen([*command, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    log = tmp_path / "log.jsonl"
    while process.poll() is None and not (log.is_file() and log.read_text().count("\n") >= 4):
        time.sleep(0.002)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "the same command goes on from there" in said
    assert [*tmp_path.glob("step-*")]
    assert main([*command[len(PROGRAM) :], str(tmp_path)]) == 0
    got = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--max-new-tokens", "200"],
        ["generate", "--max-new-tokens", "60", "--num-beams", "3"],
        ["quantize", "qwen2-docs", "--out", "OUT"],
        ["convert", "qwen2-docs", "--out", "OUT", "--dtype", "float32", "--max-shard", "300k"],
        ["doctor"],
        ["check", "rms_norm", "FILE"],
    ],
)
def test_a_signal_ends_a_command_in_one_line(words, number, tmp_path) -> None:
    (tmp_path / "mine.py").write_text("def rms_norm(x, weight, eps):\n    return x\n")
    places = {"OUT": tmp_path / "out", "FILE": tmp_path / "mine.py"}
    command = [*PROGRAM, *(str(places.get(word, word)) for word in words)]
    started = time.perf_counter()
    subprocess.run(command, check=False, capture_output=True)
    seconds = time.perf_counter() - started
    chance = random.Random(f"{words} {number}")
    for _ in range(3):
        when = chance.uniform(0.1, 1.0) * seconds
        code, error = ended(command, number, when)
        finished = code in (0, 1) and not error
        assert finished or (code == 128 + number and error.count("\n") == 1), (when, code, error)
        assert not [*Path(tmp_path).glob(".*.tmp")], when
