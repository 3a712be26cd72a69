"""Options that several commands have: declared once, in a table, and added to the signature that Typer reads."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

__all__ = ["CommonOptions", "with_options"]

CommonOptions: TypeAlias = Mapping[str, tuple[Any, Any]]
"""By parameter: its annotation, which says what Typer reads, and its default."""


def with_options(
    common: CommonOptions, verb: Callable[..., Any], run: Callable[[dict[str, Any], dict[str, Any]], None]
) -> Callable[..., None]:
    """A command for Typer that has the options of ``verb`` first, then the common ones.

    Args:
        verb: its first parameter is no option: it is what ``run`` makes of the common ones.
        run: does the command, given the values of the verb's own options and those of the common ones.
    """
    _call, *own = inspect.signature(verb, eval_str=True).parameters.values()
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in common.items()
    ]
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + shared

    @functools.wraps(verb)
    def command(**given: Any) -> None:
        run(
            {parameter.name: given[parameter.name] for parameter in own},
            {name: given[name] for name in common},
        )

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by inspect.signature
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
