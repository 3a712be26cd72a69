"""The administration records as protobuf messages and back, by field name.

Our records bear the wire's field names, so one walk over a dataclass serves every message in both directions:
the service decodes requests and encodes answers with it, clients and adapters do the reverse. The message
objects come from the caller; this module knows no generated code.

Where a record and its message differ in form:

- a union (`target`, `source`, `result`, `event`) is a oneof; `ONEOF_MEMBERS` names each type's member;
- a nested record whose name the message does not have is spread over the message itself (`info`,
  `capabilities`);
- `LOCAL_FIELDS` are ours alone and never travel.

Enum numbers agree, but the wire's zero, "not said", has no member with us: a required enum that is zero or
unknown is an error (AD-10), an optional one is `None`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from iop.admin.enums import EngineRole, ReconfigurableField
from iop.admin.profile import Capabilities, ParticipantInfo
from iop.admin.requests import (
    AllTargets,
    DiskSource,
    DistributedSource,
    InlineTensorSource,
    IpcSource,
    ModelTargets,
    ParticipantTargets,
    ServingChange,
    ServingValue,
)
from iop.admin.results import (
    FlushCachesResult,
    OperationAccepted,
    OperationCancelled,
    OperationCompleted,
    OperationFailed,
    OperationPlan,
    OperationProgress,
    ParticipantUpdate,
    PauseResult,
    ReconfigureServingResult,
    ReleaseResourcesResult,
    RestoreResourcesResult,
    ResumeResult,
    StartProfileResult,
    StopProfileResult,
    UpdateWeightsResult,
)
from iop.core.errors import InvalidRequest, IopError

__all__ = ["LOCAL_FIELDS", "ONEOF_MEMBERS", "RecordCodec"]

Record = TypeVar("Record")
AnyMessage = TypeVar("AnyMessage", bound=Message)

ONEOF_MEMBERS: Final[Mapping[type, str]] = MappingProxyType(
    {
        AllTargets: "all",
        ModelTargets: "models",
        ParticipantTargets: "participants",
        DiskSource: "disk",
        InlineTensorSource: "inline_tensors",
        DistributedSource: "distributed",
        IpcSource: "ipc",
        FlushCachesResult: "flush_caches",
        PauseResult: "pause",
        ResumeResult: "resume",
        ReleaseResourcesResult: "release_resources",
        RestoreResourcesResult: "restore_resources",
        UpdateWeightsResult: "update_weights",
        StartProfileResult: "start_profile",
        StopProfileResult: "stop_profile",
        ReconfigureServingResult: "reconfigure_serving",
        OperationAccepted: "accepted",
        OperationProgress: "progress",
        ParticipantUpdate: "participant",
        OperationCompleted: "completed",
        OperationFailed: "failed",
        OperationCancelled: "cancelled",
        OperationPlan: "plan",
    }
)
"""The oneof member that carries each type of a union."""

LOCAL_FIELDS: Final[Mapping[type, frozenset[str]]] = MappingProxyType(
    {
        ParticipantInfo: frozenset({"aliases", "instance", "lacking", "startup_source"}),
        # The profile's own sums leave these out; each participant tells its own.
        Capabilities: frozenset(
            {"weight_formats", "capacity_max", "data_parallel_size_max", "holds_previous_weights"}
        ),
    }
)
"""Fields that a message may lack; any other field without a counterpart is a programming error."""


class _Shape(enum.Enum):
    """How one field is carried."""

    PLAIN = enum.auto()
    ENUM = enum.auto()
    RECORD = enum.auto()
    UNION = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """What the walk needs to know about one dataclass field.

    Attributes:
        types: the one type of the value, or the members of a union.
        container: tuple or frozenset of such values; None: a single one.
    """

    name: str
    shape: _Shape
    types: tuple[Any, ...]
    container: type | None
    is_optional: bool


class RecordCodec:
    """Copies records to messages and back.

    Args:
        error: what bad input raises: InvalidRequest for a caller's request, RemoteProtocolError for answers.
        is_lenient: drop unknown numbers from lists of enums, and read them as absent where that is allowed;
            for answers of servers that are newer than we are. A request is never read leniently (AD-16).
    """

    def __init__(self, *, error: type[IopError] = InvalidRequest, is_lenient: bool = False) -> None:
        self._error = error
        self._is_lenient = is_lenient

    # ------------------------------------------------------------------------------------------------ encode

    def encode(self, record: object, message: AnyMessage) -> AnyMessage:
        """Copy a record into an empty message of the same meaning; returns the message."""
        if isinstance(record, ServingChange):
            _encode_serving_change(record, message)
            return message
        known = message.DESCRIPTOR.fields_by_name
        local = LOCAL_FIELDS.get(type(record), frozenset())
        for field in _fields_of(typing.cast("Any", type(record))):
            value = getattr(record, field.name)
            if value is None or (field.name in local and field.name not in known):
                continue
            if field.shape is _Shape.UNION:
                holder = getattr(message, field.name) if field.name in known else message
                member = getattr(holder, ONEOF_MEMBERS[type(value)])
                member.SetInParent()
                self.encode(value, member)
            elif field.name not in known:
                self._encode_unnamed(field, value, record, message)
            elif field.container is not None:
                self._encode_items(field, value, getattr(message, field.name))
            elif field.shape is _Shape.RECORD:
                nested = getattr(message, field.name)
                nested.SetInParent()
                self.encode(value, nested)
            else:
                setattr(message, field.name, value)
        return message

    def _encode_unnamed(self, field: _Field, value: object, record: object, message: Message) -> None:
        if field.shape is _Shape.RECORD:
            self.encode(value, message)
        else:
            raise TypeError(
                f"{message.DESCRIPTOR.name} has no field for {type(record).__name__}.{field.name}"
            )

    def _encode_items(self, field: _Field, values: Any, repeated: Any) -> None:
        # Sets have no order of their own; sorted, equal answers have equal bytes.
        items = sorted(values) if field.container is frozenset else values
        if field.shape is _Shape.RECORD:
            for item in items:
                self.encode(item, repeated.add())
        else:
            repeated.extend(items)

    # ------------------------------------------------------------------------------------------------ decode

    def decode(self, message: Message, record_type: type[Record], *, path: str = "") -> Record:
        """Make a record from a message.

        Args:
            message: what came in.
            record_type: the record of the same meaning.
            path: where the message stands, for errors: `pause.` within a request, empty at the top.

        Raises:
            IopError: of the class given at construction: a required enum or oneof is not said or not known.
        """
        if record_type is ServingChange:
            return typing.cast("Record", self._decode_serving_change(message, path))
        known = message.DESCRIPTOR.fields_by_name
        local = LOCAL_FIELDS.get(record_type, frozenset())
        values: dict[str, Any] = {}
        for field in _fields_of(typing.cast("Any", record_type)):
            if field.name in local and field.name not in known:
                continue
            where = f"{path}{field.name}"
            if field.shape is _Shape.UNION:
                values[field.name] = self._decode_union(field, message, where)
            elif field.name in known:
                values[field.name] = self._decode_value(field, message, where)
            elif field.shape is _Shape.RECORD:
                values[field.name] = self.decode(message, field.types[0], path=path)
        return record_type(**values)

    def _decode_value(self, field: _Field, message: Message, where: str) -> Any:
        value: Any = getattr(message, field.name)
        if field.container is not None:
            return field.container(self._decode_items(field, value, where))
        if field.is_optional and _is_unset(field, message, value):
            return None
        if field.shape is _Shape.ENUM:
            return self._decode_enum(field, value, where)
        if field.shape is _Shape.RECORD:
            return self.decode(value, field.types[0], path=f"{where}.")
        if isinstance(value, float) and not math.isfinite(value):
            # JSON and engines write it as null, their default, or refuse it: never what the caller said.
            raise self._bad(where, "must be a finite number", "INVALID_FIELD")
        return value

    def _decode_items(self, field: _Field, repeated: Any, where: str) -> list[Any]:
        if field.shape is _Shape.RECORD:
            return [
                self.decode(item, field.types[0], path=f"{where}[{index}].")
                for index, item in enumerate(repeated)
            ]
        if field.shape is _Shape.ENUM:
            if self._is_lenient:
                return [field.types[0](number) for number in repeated if _has_number(field.types[0], number)]
            return [self._decode_enum(field, number, where) for number in repeated]
        return list(repeated)

    def _decode_enum(self, field: _Field, number: int, where: str) -> Any:
        enum_type = field.types[0]
        if _has_number(enum_type, number):
            return enum_type(number)
        if self._is_lenient and field.is_optional:
            return None
        names = ", ".join(member.name for member in enum_type)
        if number == 0:
            raise self._bad(where, f"must be said: one of {names}", "UNSPECIFIED_ENUM")
        raise self._bad(where, f"has the unknown number {number}; known are {names}", "UNKNOWN_ENUM")

    def _decode_union(self, field: _Field, message: Message, where: str) -> Any:
        known = message.DESCRIPTOR.fields_by_name
        if field.name in known:
            if field.is_optional and not message.HasField(field.name):
                return None
            message = getattr(message, field.name)
        members = {ONEOF_MEMBERS[member]: member for member in field.types}
        set_member = next((name for name in members if message.HasField(name)), None)
        if set_member is None:
            if field.is_optional:
                return None
            raise self._bad(where, f"must be one of {', '.join(members)}", "EMPTY_SELECTOR")
        return self.decode(getattr(message, set_member), members[set_member], path=f"{where}.{set_member}.")

    def _decode_serving_change(self, message: Message, path: str) -> ServingChange:
        member = message.WhichOneof("change")
        if member is None:
            raise self._bad(f"{path}change", "must be set", "EMPTY_SELECTOR")
        value: Any = getattr(message, member)
        changed = ReconfigurableField[member.upper()]
        if changed is ReconfigurableField.SERVED_ALIASES:
            value = tuple(value.aliases)
        elif changed is ReconfigurableField.ROLE:
            role = _Field(
                name="role", shape=_Shape.ENUM, types=(EngineRole,), container=None, is_optional=False
            )
            value = self._decode_enum(role, value, f"{path}role")
        return ServingChange(field=changed, value=typing.cast("ServingValue", value))

    def _bad(self, where: str, rule: str, reason: str) -> IopError:
        return self._error(f"`{where}` {rule}.", reason=reason, details={"field": where})


def _encode_serving_change(record: ServingChange, message: Message) -> None:
    name = record.field.name.lower()
    if record.field is ReconfigurableField.SERVED_ALIASES:
        aliases: Any = getattr(message, name)
        aliases.SetInParent()
        aliases.aliases.extend(record.value)
    else:
        setattr(message, name, record.value)


def _is_unset(field: _Field, message: Message, value: object) -> bool:
    """Whether an optional field of ours is absent: by presence where the wire has it, else by zero."""
    if message.DESCRIPTOR.fields_by_name[field.name].has_presence:
        return not message.HasField(field.name)
    return not value


def _has_number(enum_type: Any, number: int) -> bool:
    return number in enum_type._value2member_map_


@functools.cache
def _fields_of(record_type: Any) -> tuple[_Field, ...]:
    """The fields of a record, worked out once per type; bounded by the number of record types."""
    hints = typing.get_type_hints(record_type)
    return tuple(_read_hint(field.name, hints[field.name]) for field in dataclasses.fields(record_type))


def _read_hint(name: str, hint: Any) -> _Field:
    container: type | None = None
    is_optional = False
    members: tuple[Any, ...] = (hint,)
    if typing.get_origin(hint) in {types.UnionType, typing.Union}:
        members = tuple(member for member in typing.get_args(hint) if member is not types.NoneType)
        is_optional = len(members) < len(typing.get_args(hint))
    if len(members) == 1 and typing.get_origin(members[0]) in {tuple, frozenset}:
        container = typing.get_origin(members[0])
        members = typing.get_args(members[0])[:1]
    return _Field(
        name=name, shape=_shape_of(members), types=members, container=container, is_optional=is_optional
    )


def _shape_of(members: tuple[Any, ...]) -> _Shape:
    if len(members) > 1:
        return _Shape.UNION if all(map(dataclasses.is_dataclass, members)) else _Shape.PLAIN
    only: Callable[..., Any] = members[0]
    if dataclasses.is_dataclass(only):
        return _Shape.RECORD
    if isinstance(only, type) and issubclass(only, enum.IntEnum):
        return _Shape.ENUM
    return _Shape.PLAIN
