"""The sentences of small stories, in English and Chinese.

A :class:`Sentence` has a kind and words, and no language. One table says every kind in both
languages: :func:`write` fills its slots, and :func:`read` finds them again::

    Sentence("put", ("Mia", "key", "box"))
    Mia puts the key in the box.
    米娅把钥匙放进了箱子。
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

LANGUAGES = ("english", "chinese")

PEOPLE = {
    "Mia": "米娅", "Tom": "汤姆", "Anna": "安娜", "Paul": "保罗", "Lily": "莉莉",
    "Leo": "里奥", "Emma": "艾玛", "Max": "马克斯", "Nina": "妮娜", "Sam": "山姆",
}  # fmt: skip
ROOMS = {
    "kitchen": "厨房", "garden": "花园", "bedroom": "卧室", "bathroom": "浴室",
    "hall": "门厅", "cellar": "地下室", "attic": "阁楼", "study": "书房",
}  # fmt: skip
BOXES = {"box": "箱子", "bag": "袋子", "basket": "篮子", "bucket": "水桶", "suitcase": "手提箱"}
THINGS = {
    "key": "钥匙", "ball": "球", "book": "书", "apple": "苹果", "ring": "戒指", "map": "地图",
    "cup": "杯子", "hat": "帽子", "coin": "硬币", "pen": "笔", "letter": "信", "clock": "闹钟",
}  # fmt: skip

#: What may fill a slot of a sentence. ``some`` is a list of one or more.
SLOTS = {
    "who": PEOPLE, "whom": PEOPLE, "room": ROOMS, "box": BOXES, "thing": THINGS,
    "what": {**THINGS, **BOXES}, "some": {**THINGS, **BOXES},
}  # fmt: skip

#: What happens.
EVENTS = {
    "go": ("{who} goes to the {room}.", "{who}去了{room}。"),
    "run": ("{who} runs to the {room}.", "{who}跑进了{room}。"),
    "join": ("{who} joins {whom}.", "{who}去找了{whom}。"),
    "carry": ("{who} takes the {what} to the {room}.", "{who}把{what}拿到了{room}。"),
    "take": ("{who} takes the {what}.", "{who}拿起了{what}。"),
    "pick up": ("{who} picks up the {what}.", "{who}捡起了{what}。"),
    "take out": ("{who} takes the {thing} out of the {box}.", "{who}从{box}里拿出了{thing}。"),
    "put": ("{who} puts the {thing} in the {box}.", "{who}把{thing}放进了{box}。"),
    "hide": ("{who} hides the {thing} in the {box}.", "{who}把{thing}藏进了{box}。"),
    "put down": ("{who} puts down the {what}.", "{who}放下了{what}。"),
    "give": ("{who} gives the {what} to {whom}.", "{who}把{what}给了{whom}。"),
    "empty": ("{who} empties the {box}.", "{who}倒空了{box}。"),
}
QUESTIONS = {
    "where": ("Where is the {what}?", "{what}在哪里？"),
    "where is": ("Where is {who}?", "{who}在哪里？"),
    "who has": ("Who has the {what}?", "谁拿着{what}？"),
    "what has": ("What does {who} have?", "{who}拿着什么？"),
    "what is in": ("What is in the {box}?", "{box}里有什么？"),
}
#: What introduces people and things; three of these are answers as well.
FACTS = {
    "is in": ("{who} is in the {room}.", "{who}在{room}。"),
    "lies in": ("The {what} is in the {room}.", "{what}在{room}。"),
    "inside": ("The {thing} is in the {box}.", "{thing}在{box}里。"),
    "has": ("{who} has {some}.", "{who}拿着{some}。"),
}
#: The other answers.
ANSWERS = {
    "inside there": ("The {thing} is in the {box}, in the {room}.", "{thing}在{room}的{box}里。"),
    "held there": ("{who} has the {what}, in the {room}.", "{who}在{room}，手里拿着{what}。"),
    "no one": ("No one has the {what}.", "没有人拿着{what}。"),
    "nothing": ("{who} has nothing.", "{who}什么也没拿。"),
    "holds": ("The {box} holds {some}.", "{box}里有{some}。"),
    "is empty": ("The {box} is empty.", "{box}是空的。"),
}
GRAMMAR = {**EVENTS, **QUESTIONS, **FACTS, **ANSWERS}

#: Of each language: between sentences; and in a list before each, between two, before the last.
GAPS = {"english": (" ", "the ", ", ", " and "), "chinese": ("", "", "、", "和")}


class Sentence(NamedTuple):
    """A kind of the grammar, and the English words of its slots in the order of the English
    sentence. A list of things is a tuple."""

    kind: str
    words: tuple[Any, ...]


def write(sentences: Iterable[Sentence], language: str = "english") -> str:
    """A text of these sentences. Raises ``ValueError`` for what the grammar does not know."""
    if language not in LANGUAGES:
        raise ValueError(f"language={language!r} must be one of {', '.join(LANGUAGES)}")
    texts = []
    for kind, words in sentences:
        if len(words) != len(slots(kind)):
            raise ValueError(f"{kind!r} takes {slots(kind)}, not the words {words}")
        named = {slot: _named(word, slot, language) for slot, word in zip(slots(kind), words)}
        texts.append(GRAMMAR[kind][LANGUAGES.index(language)].format(**named))
    return GAPS[language][0].join(texts)


def _named(word: str | tuple[str, ...], slot: str, language: str) -> str:
    """What fills a slot: "key", or of a list "the key, the ball and the map"."""
    if slot == "some":
        _, before, between, last = GAPS[language]
        names = [before + _named(one, "what", language) for one in word]
        return last.join([between.join(names[:-1]), names[-1]] if names[1:] else names)
    if word not in SLOTS[slot]:
        raise ValueError(f"{slot}={word!r} is not one of {', '.join(SLOTS[slot])}")
    return str(word) if language == "english" else SLOTS[slot][str(word)]


@cache
def slots(kind: str) -> list[str]:
    """The names of the slots of a kind of sentence. Raises ``ValueError`` for another kind."""
    if kind not in GRAMMAR:
        raise ValueError(f"kind={kind!r} is not one of {', '.join(GRAMMAR)}")
    return re.findall(r"{(\w+)}", GRAMMAR[kind][0])


def cut(text: str) -> list[str]:
    """The sentences of a text in either language; an unfinished last one, too."""
    return [part.strip() for part in re.findall(r"[^.?。？]+[.?。？]?", text) if part.strip()]


def read(text: str) -> Sentence:
    """One sentence in either language. Raises ``ValueError`` if the grammar has none like it."""
    for language in LANGUAGES:
        for kind, pattern in _patterns(language).items():
            if match := pattern.fullmatch(text):
                words = (_word(match[slot], slot, language) for slot in slots(kind))
                return Sentence(kind, tuple(words))
    raise ValueError(f"no sentence of the grammar: {text[:80]!r}")


@cache
def _patterns(language: str) -> dict[str, re.Pattern[str]]:
    """A regular expression for each kind of sentence, with a named group for each slot."""
    patterns = {}
    for kind in GRAMMAR:
        pattern = re.escape(GRAMMAR[kind][LANGUAGES.index(language)])
        for slot in slots(kind):
            one = f"(?:{'|'.join(map(re.escape, _words(slot, language)))})"
            if slot == "some":
                _, before, between, last = GAPS[language]
                one = f"(?:{before}{one}(?:{between}{before}{one})*{last})?{before}{one}"
            pattern = pattern.replace(re.escape(f"{{{slot}}}"), f"(?P<{slot}>{one})")
        patterns[kind] = re.compile(pattern)
    return patterns


@cache
def _words(slot: str, language: str) -> Mapping[str, str]:
    """From the words that may fill a slot to the English ones."""
    return {(e if language == "english" else c): e for e, c in SLOTS[slot].items()}


def _word(text: str, slot: str, language: str) -> str | tuple[str, ...]:
    """The opposite of :func:`_named`."""
    if slot != "some":
        return _words(slot, language)[text]
    _, before, *between = GAPS[language]
    parts: Sequence[str] = re.split("|".join(between), text)
    return tuple(_words("what", language)[part.removeprefix(before)] for part in parts)
