"""Requests as plain objects, with nothing in them that could not be written again."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, NoReturn

from iop.core.errors import InvalidRequest

__all__ = ["load_request", "load_text"]


def load_text(text: bytes | str) -> Any:
    """Decode JSON. Integers keep their size up to 4300 digits.

    Raises:
        ValueError: it is none, or a number in it has more digits, or exceeds what a float can say: both would be
            something else, or no JSON, on the other side of a conversion.
    """
    return json.loads(text, parse_float=_finite, parse_constant=_refuse)


def load_request(body: bytes) -> Any:
    """Decode a body that is known to be JSON.

    Raises:
        InvalidRequest: it is not UTF-8, nests too deeply, or holds a number that is too large to be converted.
    """
    try:
        return load_text(body)
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not valid UTF-8.", reason="INVALID_JSON") from None
    except RecursionError:
        raise InvalidRequest("The body nests too deeply to be converted.", reason="JSON_TOO_DEEP") from None
    except ValueError:
        raise InvalidRequest("A number in the body is too large to be converted.") from None


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError("a number is too large")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
