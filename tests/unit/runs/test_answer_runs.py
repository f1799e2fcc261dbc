"""Runs on answers, pairs and rewards: killed ones end bit for bit alike, two processes as one."""

import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import torchrun_environment
from safetensors.torch import load_file
from tiny_models import chat_folder

from lm_from_scratch.__main__ import main

STEPS = {"sft": 40, "dpo": 40, "grpo": 24}
NUMBERS = {
    "sft": [],
    "dpo": ["--beta", "0.3"],
    "grpo": ["--group-size", "4", "--max-new-tokens", "6", "--kl", "0.05"],
}
RUN = [
    "--lr", "1e-3", "--warmup", "3", "--batch-size", "8", "--grad-accumulation", "2",
    "--block-size", "64", "--held-out", "0.2", "--checkpoint-every", "3", "--library", "torch",
    "--quiet",
]  # fmt: skip


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ROWS = {
    "sft": [{"messages": [says("user", str(n)), says("assistant", "ab" * (1 + n % 3))]}
            for n in range(40)],
    "dpo": [{"prompt": f"{n}=", "chosen": "a" * (n % 5), "rejected": str(n)} for n in range(40)],
    "grpo": [{"prompt": f"{n}=", "completion": "ab"[n % 2]} for n in range(40)],
}  # fmt: skip


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> dict[str, list[str]]:
    """What follows the name of the program, but for the folder of the run."""
    root = tmp_path_factory.mktemp("rows")
    model, found = chat_folder(root / "model", n_layer=1), {}
    for way, rows in ROWS.items():
        file = root / f"{way}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if way == "grpo":  # of a model that gives one of the answers already
            learn = ["train", "--sft", file, "--from", model, "--out", root / "run", *RUN]
            assert main([*map(str, learn), "--steps", "40", "--lr", "5e-3"]) == 0
            model = root / "run" / "model"
        words = ["train", f"--{way}", file, "--from", model, "--steps", STEPS[way], *NUMBERS[way]]
        found[way] = [*map(str, words), *RUN]
    return found


def begin(words: list[str], out: Path, processes: int = 1) -> list[subprocess.Popen[str]]:
    """The processes of a run, without the launcher, which takes seconds to start."""
    command = [sys.executable, "-m", "lm_from_scratch", *words, "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if processes == 1:
        return [subprocess.Popen(command, env=environment, **pipes)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = []
    for rank in range(processes):
        more = torchrun_environment(rank, processes, store.port)
        words = [*command, "--parallel", "ddp"]
        started.append(subprocess.Popen(words, env={**environment, **more}, **pipes))
        started[-1].store = store  # which lives as long as they do
    return started


def end(started: list[subprocess.Popen[str]]) -> str:
    """What the processes say, all of which end well."""
    ended = [process.communicate(timeout=600) for process in started]
    assert all(process.returncode == 0 for process in started), ended
    return "".join(said for said, _ in ended)


def kill(started: list[subprocess.Popen[str]], out: Path, after: int) -> None:
    """SIGKILL once the log has so many lines."""
    log = out / "log.jsonl"
    while all(p.poll() is None for p in started) and len(steps(log)) < after:
        time.sleep(0.002)
    alive = [process.poll() is None for process in started]
    for process in started:
        process.kill()
    ended = [process.communicate() for process in started]
    assert all(alive), ended


def steps(log: Path) -> list[dict]:
    written = log.read_text() if log.is_file() else ""
    return [json.loads(line) for line in written[: written.rfind("\n") + 1].splitlines()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(commands, tmp_path_factory):
    """The folder of an uninterrupted run in one process, and what it said."""

    @cache
    def whole(way: str) -> tuple[Path, str]:
        out = tmp_path_factory.mktemp("whole") / way
        return out, end(begin(commands[way], out))

    return whole


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sft", "dpo", "grpo"])
def test_a_killed_run_ends_bit_for_bit_alike(way: str, commands, whole, tmp_path) -> None:
    (folder, want), out = whole(way), tmp_path / "run"
    kill(begin(commands[way], out), out, after=8)
    said = end(begin(commands[way], out))
    assert "going on after step" in said
    # what is counted at the beginning and measured at the end is the same, too
    lines = [line for line in want.splitlines() if not line.startswith(("model", "step", "try:"))]
    assert len(lines) == (1 if way == "sft" else 2) and all(line in said for line in lines)
    wanted, got = weights(folder), weights(out)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    logs = [steps(place / "log.jsonl") for place in (folder, out)]
    for one, other in zip(*logs, strict=True):
        del one["tokens_per_second"], other["tokens_per_second"]
        assert one == other
    if way == "grpo":
        assert len({step["reward"] for step in logs[0]}) > 3


@pytest.mark.slow
@pytest.mark.parametrize(("way", "first"), [("sft", 2), ("dpo", 2), ("grpo", 2), ("grpo", 1)])
def test_two_processes_take_the_steps_of_one_and_either_goes_on(
    way: str, first: int, commands, whole, tmp_path
) -> None:
    kill(begin(commands[way], tmp_path, first), tmp_path, after=8)
    said = end(begin(commands[way], tmp_path, 3 - first))
    assert "going on after step" in said and (first == 2 or "2 processes, 4 rows each" in said)
    folder, _ = whole(way)
    logs = [steps(place / "log.jsonl") for place in (folder, tmp_path)]
    for one, other in zip(*logs, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-4)
        assert other["reward"] == one["reward"]  # the same texts
    want, got = weights(folder), weights(tmp_path)
    assert max((got[name] - want[name]).abs().max().item() for name in want) < 2e-4
