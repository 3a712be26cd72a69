"""The binding generator: fresh output is checked in, and a stale tree is named file by file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def gen_proto() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_proto", ROOT / "tools" / "gen_proto.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gen_proto"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fresh(gen_proto: ModuleType) -> dict[str, str]:
    generated: dict[str, str] = gen_proto.generate(gen_proto.PROTO_ROOT)
    return generated


@pytest.mark.slow
@pytest.mark.clause("EN-03")
def test_checked_in_bindings_are_fresh(gen_proto: ModuleType, fresh: dict[str, str]) -> None:
    assert gen_proto.report_differences(fresh, gen_proto.PACKAGE_ROOT) == 0


@pytest.mark.slow
@pytest.mark.clause("EN-03")
def test_check_names_edited_missing_and_extra_files(
    gen_proto: ModuleType, fresh: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gen_proto.write(fresh, tmp_path)
    assert gen_proto.report_differences(fresh, tmp_path) == 0
    with (tmp_path / "openengine/v1/admin_pb2.py").open("a", encoding="utf-8") as file:
        file.write("# edited\n")
    (tmp_path / "openengine/v1/kv_pb2.pyi").unlink()
    (tmp_path / "openengine/v1/stray_pb2.py").write_text("", encoding="utf-8")
    capsys.readouterr()

    assert gen_proto.report_differences(fresh, tmp_path) == 1

    told = capsys.readouterr().err
    assert "differs: openengine/v1/admin_pb2.py" in told
    assert "missing: openengine/v1/kv_pb2.pyi" in told
    assert "not generated from any proto: openengine/v1/stray_pb2.py" in told


@pytest.mark.slow
def test_writing_removes_what_no_proto_declares(
    gen_proto: ModuleType, fresh: dict[str, str], tmp_path: Path
) -> None:
    stray = tmp_path / "openengine" / "v1" / "old_pb2.py"
    stray.parent.mkdir(parents=True)
    stray.write_text("", encoding="utf-8")

    gen_proto.write(fresh, tmp_path)

    assert not stray.exists()
    assert gen_proto.existing_names(tmp_path) == set(fresh)


def test_imports_move_below_our_package_and_foreign_ones_stay(gen_proto: ModuleType) -> None:
    text = (
        "from google.protobuf import struct_pb2 as a\n"
        "from openengine.v1 import error_pb2 as b\n"
        "from iop import runtime_pb2 as c\n"
        "_builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, 'openengine.v1.kv_pb2', _globals)\n"
    )
    assert gen_proto.move_imports(text, ["iop", "openengine"]) == (
        "from google.protobuf import struct_pb2 as a\n"
        "from iop.pb.openengine.v1 import error_pb2 as b\n"
        "from iop.pb.iop import runtime_pb2 as c\n"
        "_builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, 'iop.pb.openengine.v1.kv_pb2', _globals)\n"
    )
