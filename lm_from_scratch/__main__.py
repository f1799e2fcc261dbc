"""The command line: ``python -m lm_from_scratch train | generate | quantize | check | doctor``."""

import argparse
import os
import sys

from lm_from_scratch.commands.doctor import doctor_command
from lm_from_scratch.commands.generate import add_generate
from lm_from_scratch.commands.quantize import add_quantize
from lm_from_scratch.commands.train import PRESETS, add_train, train_command
from lm_from_scratch.distributed import (
    ProcessLost,
)
from lm_from_scratch.exercises.commands import add_commands


def parser() -> argparse.ArgumentParser:
    """The argument parser, with an epilogue of examples for every command."""
    keep = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="python -m lm_from_scratch",
        description="Train a small language model, let one speak, shrink one, and check what runs "
        "here.",
    )
    commands = top.add_subparsers(required=True, metavar="command")
    add_train(commands, keep)
    add_generate(commands, keep)
    add_quantize(commands, keep)
    add_commands(commands, keep)
    p = commands.add_parser("doctor", help="what runs here, and how to fix what does not")
    p.set_defaults(run=doctor_command)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; a bad value becomes one line on stderr and exit code 2."""
    args = parser().parse_args(argv)
    if args.run is train_command:
        for name, value in PRESETS[args.preset].items():
            if getattr(args, name, None) is None:
                setattr(args, name, value)
        if args.optimizer == "galore" and args.rank is None:
            args.rank = max(1, args.n_embd // 4)
        for name in [name for name, value in vars(args).items() if value is None]:
            if name != "tokenizer":
                delattr(args, name)  # the default of the config holds
    try:
        return args.run(args)
    except (ValueError, FloatingPointError, ProcessLost) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
