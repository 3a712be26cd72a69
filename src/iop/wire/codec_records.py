"""Dataclasses to and from protobuf messages whose fields have the same names.

A :class:`Record` is built once per pair of classes from their type hints and descriptors; what does not fit together
is a ``TypeError`` at import, so that a drift between ``runtime.proto`` and our types cannot reach a running process.

How a hint meets a field:

===========================  ===========================================================================
``str bytes int bool``       a scalar of that kind; ``X | None`` follows the field's presence
an ``IntEnum``               an enum of the same numbers; unknown numbers become ``UNSPECIFIED`` or an error
``bytes``                    a message: passed on serialised, not decoded
``tuple[X, ...]``            a repeated field; so does ``frozenset[X]``
``tuple[A, B]``              a message of two fields, in the order of their numbers
``Mapping[str, X]``          a map
a dataclass                  a message
``frozenset[X] | None``      a message with one repeated field
a union of dataclasses       the oneof of that name, or a message that is only a oneof; ``arms`` names the members
(``IntEnum``, scalar union)  a message that is only a oneof whose numbers are the enum's
===========================  ===========================================================================
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from iop.core.errors import LocalProtocolError, RemoteProtocolError

T = TypeVar("T")

Fill = Callable[[Any, Any], None]
Read = Callable[[Any], Any]
Arms = Mapping[type, str]


class Record(Generic[T]):
    """Translates one dataclass to one message type and back.

    Args:
        cls: the dataclass.
        message: the message class.
        arms: for every dataclass that is a member of a union somewhere below: its oneof field's name.
    """

    def __init__(self, cls: type[T], message: type[Message], *, arms: Arms | None = None) -> None:
        self._message = message
        descriptor: Any = message.DESCRIPTOR
        self._fill, self._read = _message_pair(cls, descriptor, arms or {})

    def fill(self, message: Any, value: T) -> None:
        """Write ``value`` into an empty message."""
        self._fill(message, value)

    def read(self, message: Any) -> T:
        """The dataclass of a parsed message. Raises RemoteProtocolError for an enum number that has no meaning."""
        result: T = self._read(message)
        return result

    def encode(self, value: T) -> bytes:
        """Serialise alone, outside a packet."""
        message = self._message()
        self._fill(message, value)
        return message.SerializeToString()

    def decode(self, data: bytes) -> T:
        """Parse what :meth:`encode` made. Raises RemoteProtocolError."""
        try:
            message = self._message.FromString(data)
        except DecodeError as exc:
            raise RemoteProtocolError("A record could not be decoded.", reason="UNDECODABLE") from exc
        return self.read(message)


def _message_pair(cls: Any, descriptor: Descriptor | None, arms: Arms) -> tuple[Fill, Read]:
    """Fill and read for a hint that stands for a whole message."""
    if descriptor is None:
        raise TypeError(f"{cls!r} does not stand for a message")
    if dataclasses.is_dataclass(cls):
        hints = typing.get_type_hints(cls)
        names = [field.name for field in dataclasses.fields(cls)]
        if _is_tagged(descriptor, [hints[name] for name in names]):
            make: Callable[..., Any] = cls  # type: ignore[assignment]  # a dataclass, not an instance of one
            return _tagged_pair(make, [hints[name] for name in names], descriptor, names)
        return _dataclass_pair(cls, hints, descriptor, arms)
    if _is_union(cls):
        return _oneof_pair(typing.get_args(cls), descriptor, descriptor.oneofs[0].name, arms)
    if typing.get_origin(cls) is tuple:
        hints_of_pair = list(typing.get_args(cls))
        if _is_tagged(descriptor, hints_of_pair):
            return _tagged_pair(lambda a, b: (a, b), hints_of_pair, descriptor, None)
        return _two_field_pair(hints_of_pair, descriptor, arms)
    raise TypeError(f"{cls!r} cannot stand for message {descriptor.full_name}")


def _dataclass_pair(
    cls: Any, hints: Mapping[str, Any], descriptor: Descriptor, arms: Arms
) -> tuple[Fill, Read]:
    fills: list[tuple[str, Fill]] = []
    reads: list[tuple[str, Read]] = []
    for field in dataclasses.fields(cls):
        fill, read = _field_pair(hints[field.name], descriptor, field.name, arms)
        fills.append((field.name, fill))
        reads.append((field.name, read))

    def fill_all(message: Any, value: Any) -> None:
        for name, fill in fills:
            fill(message, getattr(value, name))

    def read_all(message: Any) -> Any:
        return cls(**{name: read(message) for name, read in reads})

    return fill_all, read_all


def _field_pair(hint: Any, descriptor: Descriptor, name: str, arms: Arms) -> tuple[Fill, Read]:
    """Fill and read for one field of a message; fill gets the message, not the field."""
    inner, is_optional = _strip_optional(hint)
    if name in descriptor.oneofs_by_name and name not in descriptor.fields_by_name:
        return _optional_oneof(_oneof_pair(typing.get_args(inner), descriptor, name, arms), name)
    if name not in descriptor.fields_by_name:
        raise TypeError(f"{descriptor.full_name} has no field {name!r}")
    field = descriptor.fields_by_name[name]
    if _is_map(field):
        return _map_pair(inner, field, arms)
    if field.is_repeated:
        return _repeated_pair(inner, field, arms)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return _submessage_pair(inner, field, arms, is_optional=is_optional)
    return _scalar_pair(inner, field, is_optional=is_optional)


def _scalar_pair(inner: Any, field: FieldDescriptor, *, is_optional: bool) -> tuple[Fill, Read]:
    name = field.name
    to_ours = _from_scalar(inner)
    has_presence = field.has_presence

    def fill(message: Any, value: Any) -> None:
        if value is not None:
            setattr(message, name, value)

    def read_plain(message: Any) -> Any:
        return to_ours(getattr(message, name))

    def read_present(message: Any) -> Any:
        return to_ours(getattr(message, name)) if message.HasField(name) else None

    def read_nonzero(message: Any) -> Any:
        value = getattr(message, name)
        return to_ours(value) if value else None

    if not is_optional:
        return fill, read_plain
    return fill, read_present if has_presence else read_nonzero


def _submessage_pair(
    inner: Any, field: FieldDescriptor, arms: Arms, *, is_optional: bool
) -> tuple[Fill, Read]:
    name = field.name
    if inner is bytes:
        return _opaque_pair(name)
    if typing.get_origin(inner) is frozenset:
        fill_below, read_below = _repeated_pair(inner, _only_field(field), arms)
    else:
        fill_below, read_below = _message_pair(inner, field.message_type, arms)

    def fill(message: Any, value: Any) -> None:
        if value is not None:
            below = getattr(message, name)
            below.SetInParent()
            fill_below(below, value)

    def read(message: Any) -> Any:
        return read_below(getattr(message, name)) if message.HasField(name) else None

    def read_always(message: Any) -> Any:
        return read_below(getattr(message, name))

    return fill, read if is_optional else read_always


def _opaque_pair(name: str) -> tuple[Fill, Read]:
    def fill(message: Any, value: bytes) -> None:
        if value:
            below = getattr(message, name)
            below.SetInParent()
            try:
                below.MergeFromString(value)
            except DecodeError as exc:
                raise LocalProtocolError(f"The record for {name} is not a serialised message.") from exc

    def read(message: Any) -> bytes:
        result: bytes = getattr(message, name).SerializeToString()
        return result

    return fill, read


def _repeated_pair(inner: Any, field: FieldDescriptor, arms: Arms) -> tuple[Fill, Read]:
    origin = typing.get_origin(inner)
    if origin not in {tuple, frozenset}:
        raise TypeError(f"{field.full_name} is repeated; {inner!r} is not a tuple or frozenset")
    collect: Any = origin
    item = typing.get_args(inner)[0]
    name = field.name
    if field.type != FieldDescriptor.TYPE_MESSAGE:
        to_ours = _from_scalar(item)

        def fill_scalars(message: Any, values: Any) -> None:
            # Sorted sets, so that equal values have equal bytes.
            getattr(message, name).extend(sorted(values) if collect is frozenset else values)

        def read_scalars(message: Any) -> Any:
            return collect(map(to_ours, getattr(message, name)))

        return fill_scalars, read_scalars
    fill_item, read_item = _message_pair(item, field.message_type, arms)

    def fill(message: Any, values: Any) -> None:
        container = getattr(message, name)
        for value in values:
            fill_item(container.add(), value)

    def read(message: Any) -> Any:
        return collect(map(read_item, getattr(message, name)))

    return fill, read


def _map_pair(inner: Any, field: FieldDescriptor, arms: Arms) -> tuple[Fill, Read]:
    name = field.name
    value_field = _entry_fields(field)["value"]
    if value_field.type != FieldDescriptor.TYPE_MESSAGE:

        def fill_plain(message: Any, values: Mapping[str, Any]) -> None:
            if values:
                getattr(message, name).update(values)

        def read_plain(message: Any) -> dict[str, Any]:
            return dict(getattr(message, name))

        return fill_plain, read_plain
    fill_item, read_item = _message_pair(typing.get_args(inner)[1], value_field.message_type, arms)

    def fill(message: Any, values: Mapping[str, Any]) -> None:
        container = getattr(message, name)
        for key, value in values.items():
            below = container[key]
            fill_item(below, value)

    def read(message: Any) -> dict[str, Any]:
        return {key: read_item(value) for key, value in getattr(message, name).items()}

    return fill, read


def _two_field_pair(hints: list[Any], descriptor: Descriptor, arms: Arms) -> tuple[Fill, Read]:
    first, second = sorted(descriptor.fields, key=lambda field: field.number)
    fill_first, read_first = _field_pair(hints[0], descriptor, first.name, arms)
    fill_second, read_second = _field_pair(hints[1], descriptor, second.name, arms)

    def fill(message: Any, value: Any) -> None:
        fill_first(message, value[0])
        fill_second(message, value[1])

    def read(message: Any) -> Any:
        return read_first(message), read_second(message)

    return fill, read


def _oneof_pair(
    members: tuple[Any, ...], descriptor: Descriptor, oneof: str, arms: Arms
) -> tuple[Fill, Read]:
    fills: dict[type, tuple[str, Fill]] = {}
    reads: dict[str, Read] = {}
    allowed = {field.name: field for field in descriptor.oneofs_by_name[oneof].fields}
    for member in members:
        field = allowed[arms[member]]
        fill_member, read_member = _message_pair(member, field.message_type, arms)
        fills[member] = field.name, fill_member
        reads[field.name] = read_member

    def fill(message: Any, value: Any) -> None:
        name, fill_below = fills[type(value)]
        below = getattr(message, name)
        below.SetInParent()
        fill_below(below, value)

    def read(message: Any) -> Any:
        name = message.WhichOneof(oneof)
        if name is None:
            raise RemoteProtocolError(f"{descriptor.name}.{oneof} is not set.", reason="UNDECODABLE")
        return reads[name](getattr(message, name))

    return fill, read


def _optional_oneof(pair: tuple[Fill, Read], oneof: str) -> tuple[Fill, Read]:
    fill_set, read_set = pair

    def fill(message: Any, value: Any) -> None:
        if value is not None:
            fill_set(message, value)

    def read(message: Any) -> Any:
        return None if message.WhichOneof(oneof) is None else read_set(message)

    return fill, read


def _tagged_pair(
    make: Callable[..., Any], hints: list[Any], descriptor: Descriptor, names: list[str] | None
) -> tuple[Fill, Read]:
    tag_type: type[IntEnum] = hints[0]
    enums = [arg for arg in typing.get_args(hints[1]) if isinstance(arg, type) and issubclass(arg, IntEnum)]
    by_number = {field.number: field for field in descriptor.fields}
    oneof = descriptor.oneofs[0].name

    def fill(message: Any, value: Any) -> None:
        tag, content = (getattr(value, names[0]), getattr(value, names[1])) if names else value
        field = by_number[int(tag)]
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            below = getattr(message, field.name)
            below.SetInParent()
            getattr(below, _only_field(field).name).extend(content)
        else:
            setattr(message, field.name, content)

    def read(message: Any) -> Any:
        name = message.WhichOneof(oneof)
        if name is None:
            raise RemoteProtocolError(f"{descriptor.name} names no field.", reason="UNDECODABLE")
        field = descriptor.fields_by_name[name]
        content = getattr(message, name)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            content = tuple(getattr(content, _only_field(field).name))
        elif field.type == FieldDescriptor.TYPE_ENUM:
            content = _from_scalar(enums[0])(content)
        tag = _from_scalar(tag_type)(field.number)
        return make(tag, content) if names is None else make(**{names[0]: tag, names[1]: content})

    return fill, read


def _is_tagged(descriptor: Descriptor, hints: list[Any]) -> bool:
    return (
        len(hints) == 2
        and len(descriptor.oneofs) == 1
        and len(descriptor.oneofs[0].fields) == len(descriptor.fields)
        and isinstance(hints[0], type)
        and issubclass(hints[0], IntEnum)
    )


def _from_scalar(hint: Any) -> Callable[[Any], Any]:
    """What turns protobuf's value of a scalar into ours."""
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    if isinstance(hint, type) and issubclass(hint, IntEnum):
        return _from_enum(hint)
    return _same


def _same(value: Any) -> Any:
    return value


def _from_enum(enum: type[IntEnum]) -> Callable[[int], Any]:
    by_number: dict[int, IntEnum] = {int(member): member for member in enum}
    fallback = enum.__members__.get("UNSPECIFIED")

    def read(number: int) -> IntEnum:
        member = by_number.get(number, fallback)
        if member is None:
            raise RemoteProtocolError(f"{enum.__name__} has no value {number}.", reason="UNKNOWN_ENUM_VALUE")
        return member

    return read


def _strip_optional(hint: Any) -> tuple[Any, bool]:
    if not _is_union(hint):
        return hint, False
    args = typing.get_args(hint)
    rest = [arg for arg in args if arg is not types.NoneType]
    if len(rest) == len(args):
        return hint, False
    return (rest[0] if len(rest) == 1 else typing.Union[tuple(rest)]), True  # noqa: UP007 - built at run time


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in {typing.Union, types.UnionType}


def _entry_fields(field: FieldDescriptor) -> Mapping[str, FieldDescriptor]:
    assert field.message_type is not None
    return field.message_type.fields_by_name


def _only_field(field: FieldDescriptor) -> FieldDescriptor:
    """The one field of a message that wraps a list, so that the list can be absent."""
    assert field.message_type is not None
    (only,) = field.message_type.fields
    return only


def _is_map(field: FieldDescriptor) -> bool:
    return bool(
        field.type == FieldDescriptor.TYPE_MESSAGE
        and field.message_type is not None
        and field.message_type.GetOptions().map_entry
    )
