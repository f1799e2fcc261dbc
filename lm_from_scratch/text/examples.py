"""Files of questions with answers, and batches of them.

A line of a file holds one example, in a form that the field uses, that of the library ``trl``:

* ``{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}`` is
  a chat, which becomes text by the tokenizer's own template,
* ``{"prompt": "add:2+2=", "completion": "4"}`` is plain text, which the end token ends,
* ``{"prompt": "add:2+2=", "chosen": "4", "rejected": "5"}`` is a pair to learn a preference from.

Prompts and answers are texts, or lists of messages.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_from_scratch.limits import Count, require, shown
from lm_from_scratch.text.batch import Batch
from lm_from_scratch.text.batches import Shuffled, in_order
from lm_from_scratch.text.conversations import Answered, answered, conversation, targets_of
from lm_from_scratch.text.rows import numbered_lines, split_by
from lm_from_scratch.text.tokenizer import Tokenizer


def example(tokenizer: Tokenizer, row: Mapping[str, Any]) -> Answered:
    """The example in a line of a file. Raises ``ValueError`` for one of another form."""
    if isinstance(row, Mapping) and isinstance(row.get("messages"), list):
        return conversation(tokenizer, row["messages"])
    return _continued(tokenizer, row, "completion")


def pair(tokenizer: Tokenizer, row: Mapping[str, Any]) -> tuple[Answered, Answered]:
    """The chosen and the rejected answer in a line of a file, each after its question."""
    return _continued(tokenizer, row, "chosen"), _continued(tokenizer, row, "rejected")


def _continued(tokenizer: Tokenizer, row: Mapping[str, Any], key: str) -> Answered:
    prompt, answer = (row.get("prompt"), row.get(key)) if isinstance(row, Mapping) else (None, None)
    if isinstance(prompt, str) and isinstance(answer, str):
        return answered(tokenizer, prompt, answer)
    if isinstance(prompt, list) and isinstance(answer, list):
        return conversation(tokenizer, [*prompt, *answer], known=len(prompt))
    wanted = '"messages", or "prompt" and "completion"' if key == "completion" else (
        '"prompt", "chosen" and "rejected"'
    )  # fmt: skip
    raise ValueError(f"it must be an object with {wanted}, as texts or lists of messages")


def read_rows(path: str | Path) -> list[Mapping[str, Any]]:
    """The objects of a ``.jsonl`` file. Raises ``ValueError`` with the number of a line that is
    none, and for a file without any."""
    rows: list[Mapping[str, Any]] = []
    for number, line in numbered_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: it is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: {shown(row)} is not an object")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no example")
    return rows


def split_rows(
    rows: Sequence[Mapping[str, Any]], held_out: float = 0.05
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Rows to train on and rows that are held out, about ``held_out`` of all. A row's side depends
    on its question alone, so that no question is on both sides. Raises ``ValueError`` where a side
    would be empty."""
    return split_by(lambda row: json.dumps(_question(row)), rows, held_out)


def _question(row: Mapping[str, Any]) -> Any:
    question = row["messages"] if isinstance(row.get("messages"), list) else row.get("prompt")
    if isinstance(question, list):  # of a chat, what the user says first
        of_user = (m for m in question if isinstance(m, dict) and m.get("role") == "user")
        question = next(of_user, {}).get("content")
    return question


class AnswerBatches:
    """Batch number ``i`` of an endless run over examples: a function of the seed and ``i``.

    Raises ``ValueError`` for an example that is longer than ``block_size`` and for fewer examples
    than ``batch_size``.
    """

    def __init__(
        self,
        examples: Sequence[Answered],
        tokenizer: Tokenizer,
        batch_size: int,
        block_size: int,
        seed: int = 0,
    ) -> None:
        require(Count, batch_size=batch_size, block_size=block_size)
        check_lengths(examples, block_size)
        if len(examples) < batch_size:
            raise ValueError(
                f"{len(examples)} examples are fewer than batch_size={batch_size}: "
                "use more examples or a smaller batch"
            )
        self.examples, self.batch_size, self.block_size = list(examples), batch_size, block_size
        self.order = Shuffled(len(examples), batch_size, seed)
        self.batches_per_epoch = self.order.batches_per_epoch
        self.key = examples_key(examples, tokenizer)

    def recipe(self) -> dict[str, object]:
        """All that the batches depend on."""
        return {
            "text": self.key,
            "batch_size": self.batch_size,
            "block_size": self.block_size,
            "seed": self.order.seed,
        }

    def __getitem__(self, i: int) -> Batch:
        return self._batch(self.order[i])

    def each_once(self) -> Iterator[Batch]:
        """Every example once, in order: for what is held out."""
        return map(self._batch, in_order(len(self.examples), self.batch_size))

    def _batch(self, rows: Sequence[int]) -> Batch:
        return targets_of([self.examples[row] for row in rows])


def check_lengths(examples: Sequence[Answered], block_size: int) -> None:
    """Raises ``ValueError`` for the first example that is longer than ``block_size``."""
    for one in examples:
        if len(one.ids) > block_size:
            raise ValueError(
                f"an example has {len(one.ids)} tokens, more than block_size={block_size}"
            )


def examples_key(examples: Sequence[Answered], tokenizer: Tokenizer) -> str:
    """A digest of the tokenizer and of every example."""
    digest = hashlib.sha256(tokenizer.backend.to_str().encode())
    for one in examples:
        digest.update(json.dumps([one.ids, one.answer]).encode())
    return digest.hexdigest()
