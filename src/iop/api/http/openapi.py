"""The public listener described in OpenAPI 3.1: every route, what it takes, and all that IOP itself may answer (SF-01).

Requests are described as far as this side judges them. Each dialect has more fields than any list of ours, providers
have their own besides, and all of them pass: so every object is open. What a provider answers on a tunnel is its own;
the schemas say what its dialect promises, and what runs and conversions give.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from iop.api.http.errors import STATUS_BY_REASON
from iop.api.http.operations import PATHS

__all__ = ["DESCRIPTION_PATH", "describe"]

DESCRIPTION_PATH: Final = "/openapi.json"

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_FLAG: Final[Schema] = {"type": "boolean"}
_OBJECT: Final[Schema] = {"type": "object"}
_OBJECTS: Final[Schema] = {"type": "array", "items": _OBJECT}


def _open(required: Iterable[str] = (), **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


_MODEL: Final[Schema] = {
    "type": "string",
    "minLength": 1,
    "description": "A model's id or alias, as `GET /v1/models` lists them.",
}
_STREAM: Final[Schema] = {"type": "boolean", "description": "Answer as server-sent events."}
_TEXT_PARTS: Final = _either(_TEXT, {"type": "array", "items": _open(["type"], type=_TEXT), "minItems": 1})

_CHAT_MESSAGE: Final = _open(
    ["role"],
    role={"enum": ["system", "developer", "user", "assistant", "tool"]},
    content=_or_null(_TEXT_PARTS),
    tool_calls=_OBJECTS,
    tool_call_id=_TEXT,
)
_TURN: Final = _open(["role", "content"], role={"enum": ["user", "assistant"]}, content=_TEXT_PARTS)

_REQUESTS: Final[Mapping[str, Schema]] = {
    "ChatRequest": _open(
        ["model", "messages"],
        model=_MODEL,
        messages={"type": "array", "items": _CHAT_MESSAGE, "minItems": 1},
        stream=_STREAM,
        stream_options=_open(include_usage=_FLAG),
        max_tokens={"type": "integer", "minimum": 1},
        temperature={"type": "number", "minimum": 0, "maximum": 2},
        top_p={"type": "number", "minimum": 0, "maximum": 1},
        n={"type": "integer", "minimum": 1, "maximum": 128},
        stop=_either(_TEXT, {"type": "array", "items": _TEXT, "maxItems": 4}),
        logprobs=_FLAG,
        top_logprobs={"type": "integer", "minimum": 0, "maximum": 20},
        tools=_OBJECTS,
        tool_choice=_either(_TEXT, _OBJECT),
        parallel_tool_calls=_FLAG,
        response_format=_OBJECT,
        seed={"type": "integer"},
        user=_TEXT,
    ),
    "CompletionRequest": _open(
        ["model", "prompt"],
        model=_MODEL,
        prompt=_either(_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}),
        stream=_STREAM,
        max_tokens={"type": "integer", "minimum": 1},
        temperature={"type": "number", "minimum": 0, "maximum": 2},
        n={"type": "integer", "minimum": 1, "maximum": 128},
        stop=_either(_TEXT, {"type": "array", "items": _TEXT, "maxItems": 4}),
        logprobs={"type": "integer", "minimum": 0, "maximum": 5},
    ),
    "EmbeddingRequest": _open(
        ["model", "input"],
        model=_MODEL,
        input=_either(_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}),
        encoding_format={"enum": ["float", "base64"]},
        dimensions={"type": "integer", "minimum": 1},
    ),
    "ResponseRequest": _open(
        ["model", "input"],
        model=_MODEL,
        input=_either(_TEXT, {"type": "array", "items": _OBJECT, "minItems": 1}),
        instructions=_TEXT,
        stream=_STREAM,
        max_output_tokens={"type": "integer", "minimum": 1},
        tools=_OBJECTS,
        store=_FLAG,
    ),
    "MessageRequest": _open(
        ["model", "messages", "max_tokens"],
        model=_MODEL,
        messages={"type": "array", "items": _TURN, "minItems": 1},
        max_tokens={"type": "integer", "minimum": 1},
        system=_TEXT_PARTS,
        stream=_STREAM,
        stop_sequences={"type": "array", "items": _TEXT},
        temperature={"type": "number", "minimum": 0, "maximum": 1},
        tools=_OBJECTS,
        tool_choice=_OBJECT,
    ),
    "CountRequest": _open(
        ["model", "messages"],
        model=_MODEL,
        messages={"type": "array", "items": _TURN, "minItems": 1},
        system=_TEXT_PARTS,
        tools=_OBJECTS,
    ),
}

_CHOICE_USAGE: Final = _or_null(
    _open(["prompt_tokens", "completion_tokens"], prompt_tokens=_COUNT, completion_tokens=_COUNT)
)

_ANSWERS: Final[Mapping[str, Schema]] = {
    "ChatCompletion": _open(
        ["id", "object", "created", "model", "choices"],
        id=_TEXT,
        object={"const": "chat.completion"},
        created=_COUNT,
        model=_TEXT,
        choices={
            "type": "array",
            "items": _open(
                ["index", "message", "finish_reason"],
                index=_COUNT,
                message=_open(["role"], role={"const": "assistant"}, content=_or_null(_TEXT)),
                finish_reason=_or_null(_TEXT),
            ),
        },
        usage=_CHOICE_USAGE,
    ),
    "Completion": _open(
        ["id", "object", "created", "model", "choices"],
        id=_TEXT,
        object={"const": "text_completion"},
        created=_COUNT,
        model=_TEXT,
        choices={"type": "array", "items": _open(["index", "text"], index=_COUNT, text=_TEXT)},
        usage=_CHOICE_USAGE,
    ),
    "Embeddings": _open(
        ["object", "data", "model"],
        object={"const": "list"},
        data={"type": "array", "items": _open(["index", "embedding"], index=_COUNT)},
        model=_TEXT,
    ),
    "Response": _open(
        ["id", "object", "created_at", "model", "status", "output"],
        id=_TEXT,
        object={"const": "response"},
        created_at={"type": "number"},
        model=_TEXT,
        status={"enum": ["completed", "incomplete", "failed", "in_progress", "queued", "cancelled"]},
        output={"type": "array", "items": _open(["type"], type=_TEXT)},
    ),
    "Message": _open(
        ["id", "type", "role", "model", "content", "stop_reason", "usage"],
        id=_TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        model=_TEXT,
        content={"type": "array", "items": _open(["type"], type=_TEXT)},
        stop_reason=_or_null(_TEXT),
        usage=_open(["input_tokens", "output_tokens"], input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "TokenCount": _open(["input_tokens"], input_tokens=_COUNT),
    "Model": _open(
        ["id", "object", "created", "owned_by", "type", "display_name", "created_at", "iop"],
        id=_TEXT,
        object={"const": "model"},
        created=_COUNT,
        owned_by=_TEXT,
        type={"const": "model"},
        display_name=_TEXT,
        created_at={"type": "string", "format": "date-time"},
        iop=_open(
            [
                "aliases",
                "operations",
                "endpoints",
                "conversions",
                "context_window",
                "modalities",
                "tools",
                "limits",
            ],
            aliases={"type": "array", "items": _TEXT},
            operations={"type": "array", "items": _TEXT},
            endpoints={"type": "object", "additionalProperties": {"type": "array", "items": _TEXT}},
            conversions={"type": "object", "additionalProperties": {"type": "array", "items": _TEXT}},
            context_window=_open(["min", "max"], min=_or_null(_COUNT), max=_or_null(_COUNT)),
            modalities=_open(
                ["text", "image", "audio"], text=_FLAG, image=_or_null(_FLAG), audio=_or_null(_FLAG)
            ),
            tools=_or_null(_FLAG),
            limits=_OBJECT,
            data_parallel_ranks=_TEXT,
            providers_configured=_COUNT,
            providers_live=_COUNT,
        ),
    ),
    "ModelList": _open(
        ["object", "data", "has_more", "first_id", "last_id"],
        object={"const": "list"},
        data={"type": "array", "items": _ref("Model")},
        has_more=_FLAG,
        first_id=_or_null(_TEXT),
        last_id=_or_null(_TEXT),
    ),
    "OpenAIError": _open(
        ["error"],
        error=_open(
            ["message", "type", "param", "code"],
            message=_TEXT,
            type=_TEXT,
            param=_or_null(_TEXT),
            code=_or_null(_TEXT),
        ),
    ),
    "AnthropicError": _open(
        ["type", "error"],
        type={"const": "error"},
        error=_open(["type", "message"], type=_TEXT, message=_TEXT, code=_or_null(_TEXT)),
        request_id=_or_null(_TEXT),
    ),
}

_ROUTES: Final = (
    ("chat_completions", "Chat", "ChatRequest", "ChatCompletion"),
    ("completions", "Continue a text", "CompletionRequest", "Completion"),
    ("embeddings", "Embed texts", "EmbeddingRequest", "Embeddings"),
    ("responses", "Respond", "ResponseRequest", "Response"),
    ("messages", "Chat (Anthropic)", "MessageRequest", "Message"),
    ("count_tokens", "Count tokens (Anthropic)", "CountRequest", "TokenCount"),
)
_STREAMED: Final = frozenset({"chat_completions", "completions", "responses", "messages"})

_REQUEST_ID: Final = {"description": "The request's id.", "required": True, "schema": _TEXT}
_OURS: Final = {
    "x-request-id": _REQUEST_ID,
    "x-iop-origin": {"description": "IOP itself made this answer.", "schema": {"const": "edge"}},
}
_REFUSED: Final = {
    "x-request-id": _REQUEST_ID,
    "x-iop-origin": {
        "description": "IOP itself made this answer; absent: the provider did.",
        "schema": {"const": "edge"},
    },
    "x-iop-reason": {"description": "The stable code, as in the body.", "schema": _TEXT},
    "retry-after": {
        "description": "Seconds after which another try makes sense.",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "accept-encoding": {"description": "How a body may come (415).", "schema": {"const": "identity"}},
}
_SERVED: Final = {
    "x-request-id": _REQUEST_ID,
    "x-iop-provider": {"description": "An opaque, stable name.", "schema": _TEXT},
    "x-iop-weight-version": {"description": "Weights at the first byte, or `unknown`.", "schema": _TEXT},
    "x-iop-queue-ms": {
        "description": "How long it waited.",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "x-iop-queue-position": {"description": "Behind how many.", "schema": _TEXT},
    "x-iop-converted": {"description": "The operation that the provider was asked instead.", "schema": _TEXT},
    "x-iop-dropped": {"description": "Fields of the request that were let go.", "schema": _TEXT},
    "x-iop-estimate": {"description": "The count is an estimate.", "schema": {"const": "1"}},
}

_WORDS: Final[Mapping[int, str]] = {
    400: "The request must change; `param` or the message names the field.",
    401: "No API key, or one that nobody has.",
    403: "The key may not do this.",
    404: "No such path or model, or the model's providers do not offer this route.",
    405: "The path takes another method; see `Allow`.",
    408: "The request took too long to arrive.",
    413: "The body is larger than `limits.body_bytes`.",
    414: "The target is too long.",
    415: "The body is compressed; send it without `Content-Encoding`.",
    417: "An expectation other than `100-continue`.",
    429: "A limit was hit: wait as `Retry-After` says.",
    431: "The header is too large.",
    500: "A bug of ours.",
    501: "A transfer coding or a method that is not spoken here.",
    502: "The provider failed.",
    503: "Nobody can serve it now: overload, pause, shutdown, no capacity.",
    504: "Out of time.",
    505: "Neither HTTP/1.1 nor HTTP/1.0.",
    508: "The request came back to a gateway that it had passed.",
}
assert set(STATUS_BY_REASON.values()) <= set(_WORDS), "every status of ours is described"

_GET_STATUSES: Final = (400, 401, 403, 404, 405, 408, 413, 414, 415, 417, 429, 431, 500, 501, 503, 505)


def describe(version: str, *, needs_key: bool) -> dict[str, Any]:
    """The whole description, as a JSON object.

    Args:
        version: of this software.
        needs_key: whether callers must show an API key.
    """
    paths: dict[str, Any] = {
        "/v1/models": {"get": _get("list_models", "List the models that the key may use", "ModelList")},
        "/v1/models/{model}": {
            "get": {
                **_get("get_model", "Show one model by its id or alias", "Model"),
                "parameters": [
                    {"name": "model", "in": "path", "required": True, "schema": {**_MODEL, "maxLength": 512}}
                ],
            }
        },
        DESCRIPTION_PATH: {"get": _get("describe", "This description", None)},
    }
    for operation, summary, request, answer in _ROUTES:
        paths[PATHS[operation]] = {"post": _post(operation, summary, request, answer)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "IOP",
            "version": version,
            "description": "OpenAI and Anthropic routes over a fleet of engines.",
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"x_api_key": []}, {"api_key": []}, *([] if needs_key else [{}])],
        "paths": paths,
        "components": {
            "schemas": {**_REQUESTS, **_ANSWERS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "api_key": {"type": "apiKey", "in": "header", "name": "api-key"},
            },
        },
    }


def _get(operation: str, summary: str, answer: str | None) -> dict[str, Any]:
    schema = _OBJECT if answer is None else _ref(answer)
    return {
        "operationId": operation,
        "summary": summary,
        "responses": {
            "200": {
                "description": "Made by the Edge.",
                "headers": _OURS,
                "content": {"application/json": {"schema": schema}},
            },
            **_refusals(_GET_STATUSES, "OpenAIError"),
        },
    }


def _post(operation: str, summary: str, request: str, answer: str) -> dict[str, Any]:
    is_anthropic = operation in {"messages", "count_tokens"}
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    if operation in _STREAMED:
        # Of each event, as tools that know streams read it.
        content["text/event-stream"] = {"schema": _open(["data"], event=_TEXT, data=_TEXT)}
    return {
        "operationId": operation,
        "summary": summary,
        "parameters": [
            {
                "name": "x-request-id",
                "in": "header",
                "description": "Taken if it is 1 to 128 visible ASCII characters, else one is made.",
                "schema": {"type": "string", "pattern": "^[!-~]{1,128}$"},
            }
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(request)}},
        },
        "responses": {
            "200": {
                "description": "The provider's answer, or on `x-iop-estimate` the Edge's.",
                "headers": _SERVED,
                "content": content,
            },
            **_refusals(_WORDS, "AnthropicError" if is_anthropic else "OpenAIError"),
            "default": {
                "description": "A tunnelled provider's own answer, unchanged.",
                "headers": {"x-request-id": _REQUEST_ID},
            },
        },
    }


def _refusals(statuses: Iterable[int], envelope: str) -> dict[str, Any]:
    return {
        str(status): {
            "description": _WORDS[status],
            "headers": _REFUSED,
            "content": {"application/json": {"schema": _ref(envelope)}},
        }
        for status in statuses
    }
