"""Generate the protobuf bindings under ``src/iop/pb`` from ``proto``, or check that they are fresh (EN-03).

    python tools/gen_proto.py           write the bindings
    python tools/gen_proto.py --check   exit 1 and name the files that differ from a fresh generation

Descriptor file names stay as published (``openengine/v1/admin.proto``), since server reflection shows them;
only Python import paths are moved below ``iop.pb``. The output depends on the versions of grpcio-tools and
mypy-protobuf, which the lock files pin.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PROTO_ROOT: Final = ROOT / "proto"
PACKAGE_ROOT: Final = ROOT / "src" / "iop" / "pb"
PACKAGE_NAME: Final = "iop.pb"

INIT_TEXT: Final = (
    '"""Generated protobuf bindings; see tools/gen_proto.py. Never edited by hand (EN-03)."""\n'
)

_PLUGINS: Final = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
_SERVICE: Final = re.compile(r"^service\s+\w+", re.MULTILINE)


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit status is 0 when the bindings are fresh afterwards."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args(argv)
    fresh = generate(PROTO_ROOT)
    if options.check:
        return report_differences(fresh, PACKAGE_ROOT)
    write(fresh, PACKAGE_ROOT)
    print(f"wrote {len(fresh)} files to {PACKAGE_ROOT.relative_to(ROOT)}")
    return 0


def generate(proto_root: Path) -> dict[str, str]:
    """Run the compiler over every proto file; returns file text by path relative to the package root."""
    sources = sorted(path.relative_to(proto_root).as_posix() for path in proto_root.rglob("*.proto"))
    top_packages = sorted({source.split("/", 1)[0] for source in sources})
    with tempfile.TemporaryDirectory(prefix="iop-proto-") as scratch:
        out = Path(scratch)
        compile_protos(sources, proto_root=proto_root, out=out)
        drop_empty_services(sources, proto_root=proto_root, out=out)
        texts = {
            path.relative_to(out).as_posix(): move_imports(path.read_text("utf-8"), top_packages)
            for path in sorted(out.rglob("*.py*"))
        }
    folders = {"", *(parent.as_posix() for name in texts for parent in Path(name).parents)} - {"."}
    texts.update({f"{folder}/__init__.py".lstrip("/"): INIT_TEXT for folder in folders})
    return texts


def compile_protos(sources: list[str], *, proto_root: Path, out: Path) -> None:
    """Call protoc from grpcio-tools with the type stub plugins of this interpreter's environment."""
    scripts = Path(sys.executable).parent
    found = {name: shutil.which(name, path=str(scripts)) or shutil.which(name) for name in _PLUGINS}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise SystemExit(f"{', '.join(missing)} not found: install the 'dev' extra into {scripts.parent}")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{proto_root}"]
    command += [f"--plugin={name}={path}" for name, path in found.items()]
    command += [f"--{kind}_out={out}" for kind in ("python", "grpc_python")]
    command += [f"--{kind}_out=quiet:{out}" for kind in ("mypy", "mypy_grpc")]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(  # the command is ours alone
        [*command, *sources], check=False, capture_output=True, text=True, env=environment, timeout=300
    )
    if done.returncode != 0:
        raise SystemExit(f"protoc failed:\n{done.stderr}")


def drop_empty_services(sources: list[str], *, proto_root: Path, out: Path) -> None:
    """Remove the service modules of files that declare no service: they hold nothing."""
    for source in sources:
        if _SERVICE.search((proto_root / source).read_text("utf-8")):
            continue
        stem = source.removesuffix(".proto")
        for suffix in ("_pb2_grpc.py", "_pb2_grpc.pyi"):
            (out / f"{stem}{suffix}").unlink(missing_ok=True)


def move_imports(text: str, top_packages: list[str]) -> str:
    """Point the generated imports, and the module names of message classes, below ``iop.pb``."""
    tops = "|".join(map(re.escape, top_packages))
    text = re.sub(
        rf"^(\s*from )((?:{tops})(?:\.\w+)* import \w+_pb2)",
        rf"\1{PACKAGE_NAME}.\2",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(
        rf"^(\s*import )((?:{tops})(?:\.\w+)*_pb2)\b", rf"\1{PACKAGE_NAME}.\2", text, flags=re.MULTILINE
    )
    return re.sub(rf"(DESCRIPTOR, ')((?:{tops})\.[\w.]+_pb2')", rf"\1{PACKAGE_NAME}.\2", text)


def write(fresh: dict[str, str], package_root: Path) -> None:
    """Make the package hold exactly ``fresh``."""
    for name in sorted(existing_names(package_root) - fresh.keys()):
        (package_root / name).unlink()
    for name, text in fresh.items():
        path = package_root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def report_differences(fresh: dict[str, str], package_root: Path) -> int:
    """Print what is missing, extra or different; 0 if nothing is."""
    present = existing_names(package_root)
    problems = [f"missing: {name}" for name in sorted(fresh.keys() - present)]
    problems += [f"not generated from any proto: {name}" for name in sorted(present - fresh.keys())]
    problems += [
        f"differs: {name}"
        for name in sorted(present & fresh.keys())
        if (package_root / name).read_text("utf-8") != fresh[name]
    ]
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print(
            "run 'make proto' (python tools/gen_proto.py); generated files are never edited", file=sys.stderr
        )
    return 1 if problems else 0


def existing_names(package_root: Path) -> set[str]:
    """Python sources and stubs in the package now."""
    return {
        path.relative_to(package_root).as_posix()
        for pattern in ("*.py", "*.pyi")
        for path in package_root.rglob(pattern)
    }


if __name__ == "__main__":
    raise SystemExit(main())
