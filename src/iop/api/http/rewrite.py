"""A model's opt-in rewrites: what the Edge changes of chats, where the config says so by name (SF-15).

Without a rule nothing here runs. With one, only the bytes that it is about change: every other member, number and
escape stays the caller's or the provider's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from iop.api.http.bulk import CONVERTED_BYTES_MAX, BulkFields
from iop.api.http.rename import rename_event_models, rename_model
from iop.api.http.splice import RequestFields, decode_object, find_value
from iop.core.errors import InvalidRequest

__all__ = [
    "INCLUDE_USAGE",
    "MERGE_SYSTEM",
    "REASONING_NAMES",
    "RULES",
    "Rule",
    "answer_rewrite",
    "rewrite_chat",
    "rewritten_parts",
    "with_reasoning_names",
]

Rule: TypeAlias = Literal["merge_system", "reasoning_names", "include_usage"]
RULES: Final[tuple[str, ...]] = get_args(Rule)

MERGE_SYSTEM: Final = "merge_system"
"""All system and developer messages become one leading system message, their texts in order."""

REASONING_NAMES: Final = "reasoning_names"
"""Where an answer has ``reasoning`` or ``reasoning_content`` alone, it gets the other with the same text."""

INCLUDE_USAGE: Final = "include_usage"
"""Streams are asked to tell their usage; on tunnels the caller sees that chunk."""

Rewrite: TypeAlias = Callable[[bytes, bool], bytes]
"""Answer bytes as the caller is to see them: a whole body, or (True) whole events."""

_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ROLES: Final = frozenset({b'"system"', b'"developer"'})
_DATA_LINE: Final = re.compile(rb"^(?:\xef\xbb\xbf)?data: ?(\{.*\})[ \t]*\r?$", re.MULTILINE)
_NAMES: Final = (("reasoning", b"reasoning_content"), ("reasoning_content", b"reasoning"))
_WANTS_USAGE: Final = b'{"include_usage":true}'
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidRequest)


# ---- requests ----


def rewritten_parts(
    fields: RequestFields, name: str, rules: Collection[str], *, is_chat: bool
) -> list[bytes]:
    """The body for the provider: with its name for the model, and rewritten where a rule has something to change.

    Args:
        fields: the caller's body.
        name: the provider's name for the model.
        rules: those of the model.
        is_chat: whether it is a chat; completions have no messages.

    Raises:
        InvalidRequest: the body is too dense to be looked into.
    """
    wanted = rules if is_chat else [rule for rule in rules if rule == INCLUDE_USAGE]
    if not wanted or (not fields.is_stream and MERGE_SYSTEM not in wanted):
        return fields.with_model(name)
    strings = fields.strings if isinstance(fields, BulkFields) else None
    if not fields.body:
        raise InvalidRequest(
            f"To be rewritten as this model's rules say, a body may have {CONVERTED_BYTES_MAX} bytes besides its "
            "long strings.",
            reason="BODY_TOO_LARGE",
            details={"limit_bytes": str(CONVERTED_BYTES_MAX)},
        )
    text = rewrite_chat(fields.body, wanted, is_stream=fields.is_stream)
    if text is fields.body:
        return fields.with_model(name)
    start, end = find_value(text, _OBJECT.decode(text), "model")
    text = b"%b%b%b" % (text[:start], msgspec.json.encode(name), text[end:])
    return [text] if strings is None else strings.expand(text)


def rewrite_chat(body: bytes, rules: Collection[str], *, is_stream: bool) -> bytes:
    """A request body with the rules applied; the same object where there is nothing to change."""
    raw = decode_object(body, 0)
    edits: list[tuple[int, int, bytes]] = []
    if MERGE_SYSTEM in rules and (messages := raw.get("messages")) is not None:
        merged = _merged(bytes(messages))
        if merged is not None:
            edits.append((*find_value(body, raw, "messages"), merged))
    if INCLUDE_USAGE in rules and is_stream:
        options = raw.get("stream_options")
        if options is None:
            start = body.index(b"{") + 1
            edits.append((start, start, b'"stream_options":' + _WANTS_USAGE + b","))
        elif (asking := _asking(bytes(options))) is not None:
            edits.append((*find_value(body, raw, "stream_options"), asking))
    return _edited(body, edits) if edits else body


def _asking(options: bytes) -> bytes | None:
    """Stream options that ask for usage; None where they do, or are nothing that could."""
    if options == b"null":
        return _WANTS_USAGE
    try:
        raw = _OBJECT.decode(options)
    except _UNREADABLE:
        return None
    if bytes(raw.get("include_usage", b"")) == b"true":
        return None
    return msgspec.json.encode(raw | {"include_usage": msgspec.Raw(b"true")})


def _merged(messages: bytes) -> bytes | None:
    """The list with one leading system message; None where it is so already, or is no list of messages."""
    try:
        items = [(item, _OBJECT.decode(item)) for item in _LIST.decode(messages)]
        places = [number for number, (_, raw) in enumerate(items) if bytes(raw.get("role", b"")) in _ROLES]
        if not places or (places == [0] and bytes(items[0][1]["role"]) == b'"system"'):
            return None
        content = _joined([bytes(items[number][1].get("content", b"null")) for number in places])
    except _UNREADABLE:
        return None
    if content is None:
        return None
    first = b'{"role":"system","content":%b}' % content
    others = (bytes(item) for number, (item, _) in enumerate(items) if number not in places)
    return b"[%b]" % b",".join((first, *others))


def _joined(contents: list[bytes]) -> bytes | None:
    """Contents as one, in order: texts with an empty line between, or all as parts where one is a list of them."""
    contents = [content for content in contents if content != b"null"]
    if all(content[:1] == b'"' for content in contents):
        return b'"%b"' % b"\\n\\n".join(content[1:-1] for content in contents)
    parts: list[bytes] = []
    for content in contents:
        if content[:1] == b'"':
            parts.append(b'{"type":"text","text":%b}' % content)
        elif content[:1] == b"[":
            parts += [bytes(part) for part in _LIST.decode(content)]
        else:
            return None  # what that is, the provider may judge
    return b"[%b]" % b",".join(parts)


# ---- answers ----


def answer_rewrite(shown_model: str | None, rules: Collection[str], *, is_chat: bool) -> Rewrite | None:
    """What a tunnel's answer goes through; None: nothing, so that its bytes pass untouched.

    Args:
        shown_model: the name to show instead of the provider's, where the rule ``response_model`` says so.
        rules: those of the model.
        is_chat: whether the provider answers in chat completions.
    """
    name = None if shown_model is None else msgspec.json.encode(shown_model)
    names = is_chat and REASONING_NAMES in rules
    if name is None and not names:
        return None

    def rewrite(data: bytes, is_events: bool) -> bytes:
        if name is not None:
            data = rename_event_models(data, name) if is_events else rename_model(data, name)
        if names and b'"reasoning' in data:
            if is_events:
                return _DATA_LINE.sub(
                    lambda line: line[0].replace(line[1], with_reasoning_names(line[1]), 1), data
                )
            return with_reasoning_names(data)
        return data

    return rewrite


def with_reasoning_names(answer: bytes) -> bytes:
    """A chat completion or chunk whose messages and deltas say their reasoning under both names."""
    try:
        raw = _OBJECT.decode(answer)
        if "choices" not in raw:
            return answer
        offset, _ = find_value(answer, raw, "choices")
        choices = bytes(raw["choices"])
        edits: list[tuple[int, int, bytes]] = []
        for at, choice in _items(choices):
            members = _OBJECT.decode(choice)
            for key in ("delta", "message"):
                said = members.get(key)
                if said is None or bytes(said)[:1] != b"{":
                    continue
                start, _ = find_value(choice, members, key)
                edits += [
                    (offset + at + start + end, offset + at + start + end, more)
                    for end, more in _other_name(bytes(said))
                ]
    except _UNREADABLE:
        return answer
    return _edited(answer, edits)


def _other_name(said: bytes) -> Iterator[tuple[int, bytes]]:
    """What to put where."""
    raw = _OBJECT.decode(said)
    for name, other in _NAMES:
        if name in raw and other.decode() not in raw and bytes(raw[name])[:1] == b'"':
            yield find_value(said, raw, name)[1], b',"%b":%b' % (other, bytes(raw[name]))


def _items(text: bytes) -> Iterator[tuple[int, bytes]]:
    """The members of a JSON list, and where each begins."""
    position = 1
    for item in _LIST.decode(text):
        value = bytes(item)
        position = text.index(value, position)
        yield position, value
        position += len(value)


def _edited(text: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    parts: list[bytes] = []
    position = 0
    for start, end, value in sorted(edits):
        parts += [text[position:start], value]
        position = end
    return b"".join([*parts, text[position:]])
