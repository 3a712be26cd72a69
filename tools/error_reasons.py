"""Which reasons the gRPC listeners can give, found in the code that raises them.

A reason is what ``google.rpc.ErrorInfo`` carries (AD-17). Every raise of an error family in the modules below is looked
at: its reason is a literal, a constant, what a helper of the same module was called with, or a member of one of the
enums that hold reasons. What cannot be followed is an error, so that no reason stays out by accident.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from iop.admin.enums import AdminErrorCode
from iop.admin.states import Legality
from iop.api.http.errors import error_of_stream
from iop.core import errors
from iop.core.errors import STATUS_BY_CODE, IopError, LocalProtocolError
from iop.edge.pools.model import Refusal, RefusalReason
from iop.edge.refusals import error_of_refusal
from iop.wire.messages import StreamError, StreamErrorCode

SOURCE = Path(__file__).resolve().parent.parent / "src" / "iop"

RAISES = (
    "admin/*.py",
    "api/*.py",
    "api/grpc/*.py",
    "api/http/keys.py",
    "app/ops_*.py",
    "edge/artifacts.py",
    "edge/dispatch.py",
    "edge/nodes.py",
    "edge/participants.py",
    "edge/refusals.py",
    "edge/status.py",
    "engine/chat.py",
    "engine/engine.py",
    "engine/generation.py",
    "engine/participants.py",
    "engine/ranks.py",
    "engine/runner.py",
    "engine/tokenizer.py",
    "store/journal.py",
)
"""Modules whose errors reach a caller of a gRPC listener, or of the operators' one, as a status. What a step of an
operation raises does not: it becomes the error of a participant, which has a code of its own."""

AT_START = {"api/grpc/server.py", "api/grpc/tls.py"}
"""Modules of these that raise only before the listener is open."""

NEVER_TOLD = {"ENGINE_STARTED", "RANK_NOT_STARTED"}
"""Raised to whoever starts an engine in its own process."""

FOLLOWED = {
    ("admin/legality.py", "answer.value"): {each.value for each in Legality} - {Legality.LEGAL.value},
    ("edge/artifacts.py", "self._error.code"): {each.value for each in StreamErrorCode},
    ("edge/refusals.py", "reason"): set(),  # each with its own family, below
}
"""Reasons that come out of an enum."""

FAMILIES = {
    name: family
    for name, family in vars(errors).items()
    if isinstance(family, type) and issubclass(family, IopError) and family is not IopError
}

RAISERS = {**FAMILIES, "_error": errors.InvalidRequest}
"""What is called to make an error; the codec of records is given its family, and a request's is this."""


def reasons() -> dict[str, set[type[IopError]]]:
    """The families of errors by their reason, as ``ErrorInfo`` spells it."""
    found: dict[str, set[type[IopError]]] = defaultdict(set)
    for path in sorted(path for pattern in RAISES for path in SOURCE.glob(pattern)):
        where = path.relative_to(SOURCE).as_posix()
        if where not in AT_START:
            for family, reason in _raised(where, ast.parse(path.read_text(encoding="utf-8"))):
                found[reason.upper()].add(family)
    for refusal in RefusalReason:
        found[refusal.value.upper()].add(type(error_of_refusal(Refusal(reason=refusal), "m")))
    for code in StreamErrorCode:
        error = error_of_stream(StreamError(code=code))
        found[error.reason.upper()].add(type(error))
    for family in FAMILIES.values():
        found[family.code.value].add(family)
    return {reason: families for reason, families in found.items() if reason not in NEVER_TOLD}


def statuses(families: set[type[IopError]]) -> str:
    """The gRPC statuses of families, in words."""
    return " or ".join(sorted({STATUS_BY_CODE[family.code].grpc for family in families}))


def admin_codes() -> set[str]:
    """How an accepted operation can fail."""
    return {code.name for code in AdminErrorCode}


def _raised(where: str, tree: ast.Module) -> Iterator[tuple[type[IopError], str]]:
    constants = dict(_constants(tree))
    helpers = {helper.name: helper for helper in ast.walk(tree) if isinstance(helper, ast.FunctionDef)}
    holders = {call: helper for helper in helpers.values() for call in ast.walk(helper)}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or (family := RAISERS.get(_name(call.func))) is None:
            continue
        if issubclass(family, LocalProtocolError):
            continue  # a defect of ours, not an answer to anybody
        given = next((keyword.value for keyword in call.keywords if keyword.arg == "reason"), None)
        if given is None:
            continue  # the family's own
        yield from ((family, reason) for reason in _values(where, given, call, constants, holders, tree))


def _values(
    where: str,
    given: ast.expr,
    call: ast.Call,
    constants: dict[str, str],
    holders: dict[ast.AST, ast.FunctionDef],
    tree: ast.Module,
) -> Iterator[str]:
    text = ast.unparse(given)
    helper = holders.get(call)
    if isinstance(given, ast.Constant):
        yield str(given.value)
    elif isinstance(given, ast.Name) and given.id in constants:
        yield constants[given.id]
    elif (where, text) in FOLLOWED:
        yield from sorted(FOLLOWED[where, text])
    elif isinstance(given, ast.Name) and helper is not None and given.id in _parameters(helper):
        yield from _passed(helper, given.id, tree)
    elif not text.endswith(".reason"):  # an error told again keeps its reason
        raise SystemExit(f"{where}:{call.lineno}: where does the reason {text!r} come from?")


def _passed(helper: ast.FunctionDef, name: str, tree: ast.Module) -> Iterator[str]:
    """What the calls of a helper give for its parameter, and the parameter's default."""
    names = _parameters(helper)
    place = names.index(name) - (names[0] == "self")
    defaults = dict(zip(reversed(names), reversed(helper.args.defaults), strict=False))
    for value in (defaults.get(name), *(each for each in _arguments(helper.name, name, place, tree))):
        if isinstance(value, ast.Constant):
            yield str(value.value)


def _arguments(helper: str, name: str, place: int, tree: ast.Module) -> Iterator[ast.expr]:
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and _name(call.func) == helper:
            yield from (keyword.value for keyword in call.keywords if keyword.arg == name)
            yield from call.args[place : place + 1]


def _parameters(helper: ast.FunctionDef) -> list[str]:
    return [each.arg for each in helper.args.args]


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                yield name, text
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text))):
                yield name, text


def _name(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
