"""What a number of a config may be, said beside the field: in its type.

``n_layer: Count = 12`` is an integer to a type checker, and to :func:`check`, which a dataclass
calls when it is made, an integer of at least 1. A limit may look at another field of the same
config: ``n_embd: Annotated[Count, multiple_of("n_head")]``. The error names field, value and limit.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from reprlib import Repr
from typing import Annotated, Any, Literal, get_args, get_origin


@dataclass(frozen=True)
class Limit:
    """What must hold of a value, and the words for it: ``NAME=VALUE`` stands in front of them."""

    words: str
    holds: Callable[..., bool]
    beside: str | None = None  # the field that `holds` is given too, and that `words` may name

    def check(self, name: str, values: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` if this does not hold of the one called ``name``."""
        others = {self.beside: values[self.beside]} if self.beside else {}
        if None not in others.values() and not self.holds(values[name], *others.values()):
            words = self.words.format_map(others) if others else self.words
            raise ValueError(f"{name}={shown(values[name])} {words}")


def check(config: Any) -> None:
    """Raises ``ValueError`` for the first field of a dataclass that is not what its type says.
    Limits that look at another field come last.

    A token id that stands there by default, and that the vocabulary does not have, becomes None:
    the model can never produce it. One that was given and is the same counts as the default.
    """
    values = vars(config)
    given = [f for f in fields(config) if values[f.name] is not None or not _may_be_none(f.type)]
    limits = [(field.name, limit) for field in given for limit in limits_of(field.type)]
    defaults = {field.name: field.default for field in given}
    for name, limit in sorted(limits, key=lambda pair: pair[1].beside is not None):
        is_default_token = limit.beside == "vocab_size" and values[name] == defaults[name]
        if is_default_token and not limit.holds(values[name], values["vocab_size"]):
            object.__setattr__(config, name, None)
        else:
            limit.check(name, values)


def require(kind: Any, **values: Any) -> None:
    """Raises ``ValueError`` unless each of the named values is of that kind, as ``Count``."""
    for name in values:
        for limit in limits_of(kind):
            limit.check(name, values)


def limits_of(kind: Any) -> list[Limit]:
    """The limits that a type stands for; none for ``float`` and for a tuple."""
    kinds = [part for part in get_args(kind) if part is not type(None)]
    if _may_be_none(kind):
        return limits_of(kinds[0])
    if get_origin(kind) is Annotated:
        return [limit for limit in kinds if isinstance(limit, Limit)]
    if get_origin(kind) is Literal:
        return [Limit(f"must be {' or '.join(map(repr, kinds))}", kinds.__contains__)]
    if kind in PLAIN:
        return [PLAIN[kind]]
    if isinstance(kind, type) and kind is not float and not kinds:
        return [Limit(f"must be a {kind.__name__}", lambda value: isinstance(value, kind))]
    return []


def _may_be_none(kind: Any) -> bool:
    return type(None) in get_args(kind)


def is_plain(x: Any) -> bool:
    """Whether ``x`` is a finite number of Python's own, as a config's must be: JSON holds them.
    True and False are none."""
    if isinstance(x, int):
        return not isinstance(x, bool) and abs(x) < 2**63
    return isinstance(x, float) and math.isfinite(x)


def is_integer(n: Any, least: int) -> bool:
    """Whether ``n`` is an integer of Python's own, ``least`` or more; True and False are none."""
    return type(n) is int and least <= n


#: A value on one short line, whatever it is.
_short = Repr()
_short.maxlevel, _short.maxdict, _short.maxlist, _short.maxtuple = 3, 8, 40, 40
_short.maxstring = _short.maxlong = _short.maxother = 80
shown = _short.repr


def multiple_of(name: str, hint: str = "") -> Limit:
    """The limit of a number that another field, ``name``, divides."""
    return Limit(f"is not a multiple of {name}={{{name}}}{hint}", lambda n, of: n % of == 0, name)


def are_tokens(ids: Any, vocab_size: int) -> bool:
    """Whether ``ids`` is a token of the vocabulary, or a tuple of some."""
    several = ids if isinstance(ids, tuple) and ids else (ids,)
    return all(is_integer(n, 0) and n < vocab_size for n in several)


_FROM_1 = "must be an integer, at least 1"
_NEVER = "is not below vocab_size={vocab_size}: the model could never produce it"
#: The product of two such lengths still has 64 bits.
_FITS = Limit("is larger than any tensor", lambda n: n is None or n < 2**31)
_INT64 = Limit("does not fit into 64 bits", lambda n: n < 2**63)

PLAIN: dict[Any, Limit] = {
    bool: Limit("is not a bool", lambda value: type(value) is bool),
    int: Limit("must be an integer", lambda n: is_integer(n, -(2**63)) and n < 2**63),
    str: Limit("must be a string", lambda value: isinstance(value, str)),
}

#: A number of things, of which there is at least one.
Count = Annotated[int, Limit(_FROM_1, lambda n: is_integer(n, 1)), _FITS]
#: A number of things, of which there may be none.
Whole = Annotated[int, Limit("must be an integer, at least 0", lambda n: is_integer(n, 0)), _INT64]
#: A :data:`Count`; None, until the config is made, stands for a number that others give.
Computed = Annotated[int, Limit(_FROM_1, lambda n: n is None or is_integer(n, 1)), _FITS]
Positive = Annotated[float, Limit("must be a positive number", lambda x: is_plain(x) and x > 0)]
NotNegative = Annotated[
    float, Limit("must be a finite number, not negative", lambda x: is_plain(x) and x >= 0)
]
#: A share of a whole that leaves something of it, as of dropout.
Share = Annotated[float, Limit("must be in [0, 1)", lambda x: is_plain(x) and 0 <= x < 1)]
#: A token of the vocabulary.
TokenId = Annotated[int, Limit(_NEVER, lambda n, size: is_integer(n, 0) and n < size, "vocab_size")]
#: One, or several: the tokens with which a text may end.
TokenIds = Annotated[int | tuple[int, ...], Limit(_NEVER, are_tokens, "vocab_size")]
