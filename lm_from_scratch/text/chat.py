"""A chat becomes text by the template that its model was trained with.

A template is a small program in the language of jinja2. It comes from whoever published the model,
so it runs in jinja2's sandbox: it sees the messages and the names of the special tokens, and can
change nothing. What it may call is what ``transformers`` gives it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from importlib import metadata
from typing import Any

import jinja2  # no dependency of ours by name: torch needs it too, so it is always there
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lm_from_scratch.text.tokenizer_files import TokenizerFiles

#: Looked up once: each time, a file would be read.
version = cache(metadata.version)


class Generation(Extension):
    """``{% generation %}`` marks what the model itself says. The text is the same without it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        """The statements up to ``{% endgeneration %}``."""
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), True), lineno=line)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    """A template that is ready to run, since a file of chats is rendered by one."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(template)


def render(
    files: TokenizerFiles,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
) -> str:
    """The text of a chat by a tokenizer's own template.

    A message is a ``role`` and a ``content``; ``add_generation_prompt`` opens the answer that the
    model is to write.

    Raises ``ValueError`` of one line if there is no template, and for messages that it refuses.
    """
    if [*map(int, re.findall(r"\d+", version("jinja2"))[:3])] < [3, 1, 6]:
        raise ValueError("jinja2 3.1.6 or newer is needed: in older ones a template can break out")
    if (template := files.chat_template) is None:
        raise ValueError(
            "the tokenizer has no chat template: its model was not made for chats (published ones "
            "have Instruct or Chat in their names)"
        )
    if isinstance(messages, str | Mapping) or not messages:
        raise ValueError("a chat is a list of messages, at least one")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"a message has a role and a content, not {str(message)[:60]}")
    plain = [{k: v for k, v in message.items() if v is not None} for message in messages]
    try:
        return _compiled(template).render(
            messages=json.loads(json.dumps(plain)),  # plain data: no object, no method of its own
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **files.special_tokens,
        )
    except Exception as error:  # a program of someone else: it can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the chat template refuses these messages: {reason}") from error
