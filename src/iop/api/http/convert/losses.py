"""What a conversion may lose: nothing, unless the model's config names the field (SF-10)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from iop.core.errors import InvalidRequest

__all__ = ["Losses", "items_of", "object_of", "text_of"]

_POSITION: Final = re.compile(r"\[\d+\]")


class Losses:
    """Judges each field that the target cannot say.

    Args:
        target: the dialect converted to, for messages.
        allowed: fields that the config lets go, without positions: ``thinking``, ``tools.type``.

    Attributes:
        dropped: fields that were let go, each once, in order of appearance.
        names: after a first conversion, what the caller calls a field, by the beginning of its new name.
    """

    __slots__ = ("_allowed", "_target", "dropped", "names")

    def __init__(self, target: str, allowed: frozenset[str] = frozenset()) -> None:
        self.names: Mapping[str, str] = {}
        self._target = target
        self._allowed = allowed
        self.dropped: list[str] = []

    def refuse(self, field: str, why: str = "") -> None:
        """Let ``field`` go if the config allows it.

        Raises:
            InvalidRequest: it does not (reason UNSUPPORTED_FIELD); the message names field and target.
        """
        said = self._said(field)
        bare = _POSITION.sub("", said)
        if bare in self._allowed or _POSITION.sub("", field) in self._allowed:
            self.note(field)
            return
        message = f"`{said}` cannot be said in {self._target}, which is all that this model's provider speaks"
        raise InvalidRequest(
            f"{message}{': ' + why if why else ''}.", reason="UNSUPPORTED_FIELD", details={"field": said}
        )

    def note(self, field: str) -> None:
        """Record that ``field``, a mere hint, was let go."""
        bare = _POSITION.sub("", self._said(field))
        if bare not in self.dropped:
            self.dropped.append(bare)

    def _said(self, field: str) -> str:
        """The field as the caller knows it."""
        for begin, name in self.names.items():
            if field == begin or field.startswith((begin + ".", begin + "[")):
                return name + _POSITION.sub("", field[len(begin) :])  # positions were another list's
        return field


def invalid(field: str, rule: str) -> InvalidRequest:
    """A field of the wrong kind."""
    return InvalidRequest(f"`{field}` {rule}.", details={"field": field})


def items_of(value: Any, field: str) -> list[Any]:
    """A list, or an error that names the field."""
    if not isinstance(value, list):
        raise invalid(field, "must be a list")
    return value


def object_of(value: Any, field: str) -> Mapping[str, Any]:
    """An object, or an error that names the field."""
    if not isinstance(value, dict):
        raise invalid(field, "must be an object")
    return value


def text_of(value: Any, field: str) -> str:
    """Text, or an error that names the field."""
    if not isinstance(value, str):
        raise invalid(field, "must be a string")
    return value
