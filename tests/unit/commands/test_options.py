"""The dataclasses of options: what they say of other modules, and what leaves no room."""

import subprocess
import sys
from dataclasses import fields, replace
from typing import Any, get_args

import pytest

from lm_from_scratch.__main__ import main
from lm_from_scratch.commands.generate import OURS
from lm_from_scratch.commands.options import GenerateOptions, QuantizeOptions, SpeedOptions
from lm_from_scratch.commands.presets import PRESETS, read
from lm_from_scratch.commands.train import train_config_of
from lm_from_scratch.commands.train_options import (
    DEFAULTS,
    FromFolder,
    Pretrain,
    RunOptions,
    StepOptions,
    TrainOptions,
)
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.instruments.layout import LAYOUTS, TRAINING
from lm_from_scratch.models.gpt2 import GPT2Config
from lm_from_scratch.optim.config import NUMBERS_OF, OptimizerConfig
from lm_from_scratch.optim.galore import MOMENTS
from lm_from_scratch.optim.galore_basis import BASES, PROJECTION_TYPES
from lm_from_scratch.runs.config import TrainConfig
from lm_from_scratch.runs.distributed import PARALLEL
from lm_from_scratch.weights.quantize import WEIGHTS


@pytest.mark.parametrize(
    "line",
    ["--help", "train --help", "list", "next", "hint rope", "solution rope", "start rope OUT"],
)
def test_what_needs_no_model_imports_no_torch(line, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LM_FROM_SCRATCH_PROGRESS", str(tmp_path / "progress.json"))
    words = [str(tmp_path / "rope.py") if word == "OUT" else word for word in line.split()]
    code = (
        "import sys\nfrom lm_from_scratch.__main__ import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    assert not {'torch', 'numpy', 'safetensors'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code, *words], check=True, stdout=subprocess.DEVNULL)


# --------------------------------------------------------- what the options say of other modules


def kinds(options: type, name: str) -> tuple[Any, ...]:
    """The words of a ``Literal``, of an optional one too."""
    (kind,) = (one.type for one in fields(options) if one.name == name)
    words = get_args(kind)
    return get_args(words[0]) if type(None) in words else words


def test_choices_are_those_of_the_modules_that_use_them() -> None:
    dtypes, libraries = (dict.fromkeys(words) for words in zip(*TRAINING, strict=True))
    for options, name, want in (
        (OptimizerConfig, "projection_type", PROJECTION_TYPES),
        (OptimizerConfig, "moments", MOMENTS), (OptimizerConfig, "basis", BASES),
        (StepOptions, "dtype", ("auto", *dtypes)),
        (RunOptions, "library", ("auto", *libraries)), (RunOptions, "parallel", PARALLEL),
        (RunOptions, "preset", tuple(PRESETS)), (QuantizeOptions, "bits", tuple(WEIGHTS)),
        (SpeedOptions, "layout", ("measured", *LAYOUTS, "off")),
    ):  # fmt: skip
        assert kinds(options, name) == want


def test_defaults_are_those_of_the_modules_that_use_them() -> None:
    known = {
        one.name: one.default for config in (TrainConfig, GPT2Config) for one in fields(config)
    }
    for one in fields(StepOptions):
        if "default: " in one.metadata["help"] and one.name not in ("rank", "dtype"):
            assert one.metadata["help"].endswith(f"default: {known[one.name]}")
        elif DEFAULTS.get(one.name) is not None:
            assert DEFAULTS[one.name] == known[one.name], one.name
    assert {name for names in NUMBERS_OF.values() for name in names} < {*known}
    assert known["initializer_range"] == 0.02


def test_every_number_of_a_run_is_taken_from_the_command_line(monkeypatch) -> None:
    """Each option that is a number of the run reaches it: none falls out between the two."""
    monkeypatch.setattr(TrainConfig, "__post_init__", lambda self: None)  # they fit no one run
    shared = {one.name for one in fields(StepOptions)} & {one.name for one in fields(TrainConfig)}
    assert {one.name for one in fields(TrainConfig)} - shared == {
        *("betas", "max_grad_norm", "chunked_loss", "seed")
    }
    steps = read(out="run").steps
    values = {**{name: f"given {name}" for name in shared}, "dtype": "bfloat16"}
    monkeypatch.setattr(StepOptions, "__post_init__", lambda self: None)
    run = replace(read(out="run", seed=7, chunked_loss=True), steps=replace(steps, **values))
    assert vars(train_config_of(run)).items() >= {**values, "seed": 7, "chunked_loss": True}.items()


def test_every_number_of_a_sampler_is_an_option_whose_help_says_the_default() -> None:
    options = {one.name: one for one in fields(GenerateOptions)}
    for one in fields(Sampler):
        assert options[one.name].default is None  # so that a folder may say it
        default = f"{vars(OURS)[one.name]:g}"
        assert options[one.name].metadata["help"].endswith(f"default: {default}")


# ------------------------------------------------------------------------------ a run of training


def test_a_preset_gives_what_the_command_line_does_not() -> None:
    run = read(out="run")
    nano = PRESETS["nano"]
    assert run == TrainOptions(
        run=RunOptions(out="run", preset="nano"), model=nano.model, steps=nano.steps,
        way=Pretrain(corpus=nano.corpus),
    )  # fmt: skip
    assert read(out="run", n_layer=3, lr=0.1).steps.lr == 0.1
    assert read(out="run", from_="gpt2-docs").model == FromFolder(from_="gpt2-docs")
    assert read(out="run", from_="x", grpo=("add",)).run.preset == "grpo"
    assert read(out="run", preset="docs", n_layer=3).model.n_layer == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preset": "finetune"}, "--preset finetune is for a model that there is: give --from"),
        ({"preset": "sft", "from_": "x"}, "--preset sft has no text: give --corpus"),
        ({"classify": "a", "no_isolate": True}, "--no-isolate is not for --classify"),
        ({"scale": 2.0}, "--galore-scale 2.0 is for --optimizer galore"),
        ({"kernels": True, "parallel": "ddp"}, "--kernels and --parallel do not work together"),
    ],
)
def test_options_that_leave_no_room_for_each_other(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        read(out="run", **given)


def test_what_a_run_keeps_can_be_written_as_json_and_says_no_place() -> None:
    kept = read(out="run", from_="x", dpo="pairs.jsonl", beta=0.2).arguments()
    assert kept["from"] == "x" and kept["beta"] == 0.2 and kept["dpo"] == "pairs.jsonl"
    assert not {"out", "device", "parallel", "quiet", "corpus", "n_layer"} & {*kept}
    assert read(out="run").arguments()["corpus"] == ["reference"]


def test_a_bad_value_is_said_by_the_first_process_alone(monkeypatch, capsys) -> None:
    words = ["train", "--out", "run", "--lr", "-1"]
    assert main(words) == 2 and "--lr -1.0 must be a positive number" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2 and capsys.readouterr().err == ""
