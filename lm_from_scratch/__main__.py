"""The command line: ``python -m lm_from_scratch train | generate | quantize | check | doctor``."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "train": "train a GPT-2 or a Qwen2 on text",
    "generate": "let a model continue a text",
    "quantize": "write a model with weights of 8 or 4 bits",
    "doctor": "what runs here, and how to fix what does not",
}


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The argument parser, with examples for every command that has options.

    Only the command that ``words`` begin with is imported; without words, all are.
    """
    keep = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="python -m lm_from_scratch",
        description="Train a small language model, let one speak, shrink one, and check what runs "
        "here.",
    )
    commands = top.add_subparsers(required=True, metavar="command")
    for name, text in COMMANDS.items():
        p = commands.add_parser(name, help=text, formatter_class=keep)
        if not words or words[0] == name:
            command = import_module(f"lm_from_scratch.commands.{name}")
            p.set_defaults(run=command.run)
            command.add_options(p)
    if not words or words[0] not in COMMANDS:
        from lm_from_scratch.exercises.commands import add_commands

        add_commands(commands, keep)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; a bad value becomes one line on stderr and exit code 2."""
    words = sys.argv[1:] if argv is None else argv
    args = parser(words).parse_args(words)
    try:
        return args.run(args)
    except (ValueError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
