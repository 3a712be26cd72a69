"""Arguments of a role, read from the same declarations that Typer reads, without what Typer needs to read them.

Typer converts values through pydantic, which a process that lives for months would carry for its first tenth of a
second. So long options with a value each are read here, and whatever else a command line may hold, mistakes and
``--help`` above all, is left to Typer: this module never explains anything.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from typer.models import OptionInfo

__all__ = ["plain_arguments"]

_MISSING: Final = inspect.Parameter.empty


class _NotPlainError(Exception):
    """Something that Typer must read, or complain of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """One option of a command.

    Attributes:
        on: its spelling; for a flag, the one that sets it.
        off: the spelling that clears a flag; empty if there is none.
        variable: where a value comes from when the option is not given; empty if there is none.
    """

    name: str
    kind: type
    on: str
    off: str
    variable: str
    least: float | None
    default: Any


def plain_arguments(
    command: Callable[..., None], arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any] | None:
    """What Typer would call the command with; None: let Typer do it.

    Args:
        command: each parameter is annotated with a typer.Option.
        arguments: what follows the command's name.
        environment: of the process.
    """
    options = _options(command)
    try:
        given = _given(options, arguments)
        return {option.name: _value(option, given, environment) for option in options}
    except _NotPlainError:
        return None


def _options(command: Callable[..., None]) -> list[_Option]:
    hints = typing.get_type_hints(command, include_extras=True)
    return [_option(each, hints[name]) for name, each in inspect.signature(command).parameters.items()]


def _option(parameter: inspect.Parameter, hint: Any) -> _Option:
    annotation, info = typing.get_args(hint)
    assert isinstance(info, OptionInfo) and isinstance(info.default, str), (
        "a role takes options, each spelled"
    )
    # In an annotation Typer takes the spelling where elsewhere a default stands.
    spelling = info.default
    on, _, off = spelling.partition("/")
    if isinstance(annotation, types.UnionType):
        (annotation,) = (arm for arm in typing.get_args(annotation) if arm is not types.NoneType)
    assert info.envvar is None or isinstance(info.envvar, str)
    return _Option(
        name=parameter.name,
        kind=annotation,
        on=on,
        off=off,
        variable=info.envvar or "",
        least=info.min,
        default=parameter.default,
    )


def _given(options: Sequence[_Option], arguments: Sequence[str]) -> dict[str, str | bool]:
    """By parameter; the last one counts."""
    by_spelling = {spelling: option for option in options for spelling in (option.on, option.off) if spelling}
    given: dict[str, str | bool] = {}
    rest = iter(arguments)
    for argument in rest:
        spelling, has_value, text = argument.partition("=")
        option = by_spelling.get(spelling)
        if option is None or (option.kind is bool and has_value):
            raise _NotPlainError
        if option.kind is bool:
            given[option.name] = spelling == option.on
            continue
        value = text if has_value else next(rest, "")
        if not value or value.startswith("-"):
            raise _NotPlainError
        given[option.name] = value
    return given


def _value(option: _Option, given: Mapping[str, str | bool], environment: Mapping[str, str]) -> Any:
    text = given.get(option.name)
    if text is None and option.variable:
        text = environment.get(option.variable) or None
    if text is None:
        if option.default is _MISSING:
            raise _NotPlainError
        return option.default
    if isinstance(text, bool):
        return text
    return _converted(option, text)


def _converted(option: _Option, text: str) -> Any:
    kind = option.kind
    if kind is str:
        return text
    if kind is Path:
        return Path(text)
    if (
        kind is int
        and text.isascii()
        and text.isdigit()
        and (option.least is None or int(text) >= option.least)
    ):
        return int(text)
    if issubclass(kind, Enum) and text in [member.value for member in kind]:
        return kind(text)
    raise _NotPlainError
