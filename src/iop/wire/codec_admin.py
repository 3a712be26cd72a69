"""The admin records of the wire, by message name; ``iop.net.admin_steps`` knows the vocabulary they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from iop.pb.iop import runtime_pb2 as pb
from iop.wire.codec_records import Record

_MESSAGES = {
    "AdminStepRequest": pb.AdminStepRequest,
    "AdminStepProgress": pb.AdminStepProgress,
    "AdminStepOutcome": pb.AdminStepOutcome,
    "ParticipantInfo": pb.ParticipantInfo,
    "ParticipantReadBack": pb.ParticipantReadBack,
}


def admin_record(message: str, cls: Any, *, arms: Mapping[type, str] | None = None) -> Record[Any]:
    """Translator between a message of ``runtime.proto`` and a dataclass, or a union of dataclasses, of the caller's.

    Raises:
        KeyError: not an admin record.
        TypeError: the class does not fit the message.
    """
    return Record(cls, _MESSAGES[message], arms=arms)
