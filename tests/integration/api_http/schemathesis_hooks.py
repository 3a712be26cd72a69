"""Loaded by the tool: most requests should get past the model's name, or nothing behind it would ever be asked."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) % 8:
        return body | {"model": "fast"}
    return body
