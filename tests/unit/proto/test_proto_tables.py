"""The compiled descriptors hold exactly what the wire tables say: nothing missing, nothing more."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor, FileDescriptor

from iop.pb.openengine.v1 import (
    admin_pb2,
    error_pb2,
    generation_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    openengine_pb2,
    server_pb2,
)

TABLES = Path(__file__).parents[2] / "data" / "wire"
CORE_MODULES: dict[str, ModuleType] = {
    "error": error_pb2,
    "kv": kv_pb2,
    "generation": generation_pb2,
    "server": server_pb2,
    "lifecycle": lifecycle_pb2,
    "lora": lora_pb2,
    "model": model_pb2,
    "openengine": openengine_pb2,
}

# kind, owner, name, number, type, label, oneof
Row = tuple[str, str, str, str, str, str, str]

_SCALARS = {
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
}


def read_table(name: str) -> list[dict[str, str]]:
    """Rows of one table, by column name."""
    with (TABLES / name).open(encoding="utf-8", newline="") as file:
        return [
            {key: value or "" for key, value in row.items()}
            for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        ]


def table_rows(rows: list[dict[str, str]]) -> set[Row]:
    """What the table says, comparable with :func:`descriptor_rows`."""
    return {
        (row["kind"], row["owner"], row["name"], row["number"], row["type"], row["label"], row["oneof"])
        for row in rows
    }


def type_name(field: FieldDescriptor) -> str:
    """A field's type as the tables spell it: short for our own package, full for others."""
    if field.message_type is not None:
        return str(field.message_type.full_name).removeprefix("openengine.v1.")
    if field.enum_type is not None:
        return str(field.enum_type.full_name).removeprefix("openengine.v1.")
    return _SCALARS[field.type]


def field_row(owner: str, field: FieldDescriptor) -> Row:
    """One field as a table row."""
    synthetic = field.containing_oneof is not None and field.containing_oneof.name == f"_{field.name}"
    real_oneof = field.containing_oneof.name if field.containing_oneof is not None and not synthetic else ""
    label = "repeated" if field.is_repeated else "optional" if synthetic else ""
    return ("field", owner, field.name, str(field.number), type_name(field), label, real_oneof)


def enum_rows(enum: EnumDescriptor) -> Iterator[Row]:
    """All values of one enum as table rows."""
    for value in enum.values:
        yield ("enum", enum.name, value.name, str(value.number), "", "", "")


def descriptor_rows(file: FileDescriptor) -> set[Row]:
    """Everything that one compiled file declares, as table rows."""
    rows: set[Row] = set()
    for message in file.message_types_by_name.values():
        assert not message.nested_types, f"{message.name}: nested types are not in the tables"
        assert not message.enum_types, f"{message.name}: nested enums are not in the tables"
        if not message.fields:
            rows.add(("message", message.name, "", "", "", "", ""))
        rows.update(field_row(message.name, field) for field in message.fields)
    for enum in file.enum_types_by_name.values():
        rows.update(enum_rows(enum))
    for service in file.services_by_name.values():
        for method in service.methods:
            sent = ("stream " if method.client_streaming else "") + method.input_type.name
            answered = ("stream " if method.server_streaming else "") + method.output_type.name
            rows.add(("rpc", service.name, method.name, "", f"{sent} -> {answered}", "", ""))
    return rows


def differences(said: set[Row], compiled: set[Row]) -> list[str]:
    """Both directions, readable."""
    return [f"missing {row}" for row in sorted(said - compiled)] + [
        f"not in the table {row}" for row in sorted(compiled - said)
    ]


@pytest.mark.clause("AD-01", "AD-05")
def test_admin_descriptors_are_exactly_the_admin_table() -> None:
    said = table_rows(read_table("openengine-admin-wire.tsv"))
    assert differences(said, descriptor_rows(admin_pb2.DESCRIPTOR)) == []


@pytest.mark.clause("SF-20")
@pytest.mark.parametrize("file_name", sorted(CORE_MODULES))
def test_core_descriptors_are_exactly_the_core_table(file_name: str) -> None:
    said = table_rows([row for row in read_table("openengine-v1-wire.tsv") if row["file"] == file_name])
    assert said, f"the table has no rows for {file_name}"
    assert differences(said, descriptor_rows(CORE_MODULES[file_name].DESCRIPTOR)) == []


def test_every_file_of_the_core_table_is_compiled() -> None:
    assert {row["file"] for row in read_table("openengine-v1-wire.tsv")} == set(CORE_MODULES)


def test_descriptor_files_keep_their_published_names() -> None:
    for name, module in {**CORE_MODULES, "admin": admin_pb2}.items():
        assert module.DESCRIPTOR.name == f"openengine/v1/{name}.proto"
        assert module.DESCRIPTOR.package == "openengine.v1"


@pytest.mark.clause("AD-01")
def test_admin_service_has_the_eleven_rpcs_and_the_three_additive_ones() -> None:
    service = admin_pb2.DESCRIPTOR.services_by_name["OpenEngineAdmin"]
    assert [method.name for method in service.methods] == [
        "FlushCaches",
        "Pause",
        "Resume",
        "ReleaseResources",
        "RestoreResources",
        "UpdateWeights",
        "StartProfile",
        "StopProfile",
        "ReconfigureServing",
        "GetOperation",
        "CancelOperation",
        "GetAdminProfile",
        "ListOperations",
        "WatchOperation",
    ]


@pytest.mark.clause("AD-03")
def test_no_admin_message_has_a_credential_field() -> None:
    suspicious = re.compile(r"credential|password|secret|authori[sz]ation|bearer|api_?key|token(?!s$)")
    # A page token is a cursor into a listing, not a credential.
    found = [
        f"{message.name}.{field.name}"
        for message in admin_pb2.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if suspicious.search(field.name) and not field.name.endswith("page_token")
    ]
    assert found == []


@pytest.mark.clause("AD-05")
def test_no_admin_message_has_a_map_or_free_form_field() -> None:
    for message in admin_pb2.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            nested = field.message_type
            if nested is not None:
                assert not nested.GetOptions().map_entry, f"{message.name}.{field.name}"
                assert nested.file.package != "google.protobuf", f"{message.name}.{field.name}"


@pytest.mark.clause("AD-10")
def test_the_zero_value_of_every_admin_enum_says_nothing() -> None:
    for enum in admin_pb2.DESCRIPTOR.enum_types_by_name.values():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
