"""ChatML: how a chat becomes text in the models that are made here, as in Qwen2's.

Every turn is ``<|im_start|>``, the role, a new line, what is said, ``<|im_end|>`` and a new line.
The special tokens must be in the vocabulary before a model is trained, because each has a row in
its embedding. Those of a tool are there, too: they stand around a call and its result.

Source: OpenAI, *Chat Markup Language*, 2023; Qwen2's ``tokenizer_config.json``.
"""

from collections.abc import Iterable

from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.text.tokenizer_files import with_template

#: What a chat needs besides the end of a text.
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>", "<|tool_call|>", "<|tool_result|>")

#: The template, in jinja2.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer learned from ``texts``, with the special tokens of a chat and the template.

    With ``vocab_size=261`` there are no merges: each of the 256 bytes is a token of its own.
    """
    learned = Tokenizer.train(texts, vocab_size, CHAT_TOKENS)
    return Tokenizer(learned.backend, files=with_template(learned.backend, CHATML))
