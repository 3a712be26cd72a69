"""Write docs/reference/errors/CODE.md for every code and reason of the APIs; ``--check`` only compares.

The tables in docs/reference/http-errors.md and grpc-errors.md are the one list of codes; tests hold them equal to what
the code raises. This adds what an operator looks at, whether the same request may be sent again, and bodies and details
made by the surfaces' own code.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from error_reasons import reasons, statuses
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2

from iop.api.grpc.errors import failure_of
from iop.api.http.errors import Dialect, error_body, error_of_stream, error_status, error_type
from iop.core.errors import (
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    IopError,
    NotFound,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from iop.edge.pools.model import Refusal, RefusalReason
from iop.edge.refusals import error_of_refusal
from iop.wire.messages import StreamError, StreamErrorCode

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"
OVERVIEW = REFERENCE / "http-errors.md"
GRPC_OVERVIEW = REFERENCE / "grpc-errors.md"
FOLDER = REFERENCE / "errors"

ROW = re.compile(r"^\| \[`([a-z_]+)`\]\(errors/\1\.md\) \| (\d{3}) \| (.+?) \| (.+?) \|$", re.MULTILINE)
GRPC_ROW = re.compile(
    r"^\| \[`([A-Z_]+)`\]\(errors/([a-z_]+)\.md\) \|(?: ([A-Z_]+(?: or [A-Z_]+)*) \|)? (.+?) \| (.+?) \|$"
)
FAMILIES: dict[int, type[IopError]] = {
    400: InvalidRequest,
    401: Unauthenticated,
    403: PermissionDenied,
    404: NotFound,
    429: Overloaded,
    500: Internal,
    501: Unsupported,
    503: Unavailable,
    504: DeadlineExceeded,
}
# Statuses of 408 and above that another try of the same request does not help.
FINAL = {"loop_detected", "unsupported_encoding", "event_too_large", "no_output", "internal"}
AGAIN = {408, 429, 502, 503, 504}

REQUEST = "Nothing is wrong with the fleet. `iop explain REQUEST_ID` tells of one that was dispatched."
QUEUE = "`iop status` shows the queue and its providers; settings: `models[].queue`, `nodes[].adapters[].capacity`."
KEY = "The key's entry in `api_keys`; `iop config show` tells what the running Edge has."
CALLER = "The caller, or a proxy before the listener; settings: `limits`."
ENGINE = "`iop explain REQUEST_ID` names the provider, `iop status` how it is; then the engine's own log."
NODE = "`iop status` shows the Node, `iop node command NODE transport` its link; then the Node's log."
PAUSE = "`iop admin profile` shows what is paused, `iop admin list` which operation did it."
ROUTES = "`iop models` lists models, their routes and who serves them; settings: `models`."
LOOKS = {
    **dict.fromkeys(("queue_full", "queue_timeout", "busy", "waiting_full"), QUEUE),
    **dict.fromkeys(
        ("missing_api_key", "invalid_api_key", "model_not_allowed", "key_rate", "key_concurrency"), KEY
    ),
    "too_many_attempts": "`limits.strangers_per_minute`, and who sends from that address.",
    "overloaded": "`limits.buffered_bytes`, `limits.connections`, and who holds so much.",
    **dict.fromkeys(("body_too_large", "header_too_large", "json_too_deep", "pipelined"), CALLER),
    **dict.fromkeys(("malformed_request", "request_timeout", "transfer_coding", "method_unknown"), CALLER),
    **dict.fromkeys(("http_version", "target_too_long", "content_encoding", "expectation"), CALLER),
    **dict.fromkeys(
        ("model_not_found", "operation_not_supported", "unknown_path", "unsupported_feature"), ROUTES
    ),
    "long_context_not_supported": "`models[].long_context_tokens`, `nodes[].adapters[].long_context_capacity`.",
    "target_rank_not_served": "`GetModelInfo` tells the ranks in `extra`; the engine's own `GetServerInfo`.",
    "unsupported_field": "`models[].conversion_drops`; `iop models` shows which routes are converted.",
    **dict.fromkeys(("paused", "aborted", "aborted_by_admin"), PAUSE),
    **dict.fromkeys(("no_capacity", "node_lost", "node_shutdown"), NODE),
    "edge_shutdown": "Whoever stops the Edge; `dispatch.shutdown_grace_sec` is how long requests may finish.",
    "draining": "`iop status`, and the engine's own log: who stops it.",
    "loop_detected": "`nodes[].adapters` of each gateway: which names which.",
    "event_too_large": "`limits.sse_event_bytes`; `iop explain REQUEST_ID` names the provider.",
    "timeout": "`limits.first_byte_timeout_sec`, `limits.total_timeout_sec`; `iop explain REQUEST_ID`.",
    "no_output": "`nodes[].adapters[].cli`; run its command by hand where the Node runs.",
    "internal": "The log of the Edge, by the request id.",
    **dict.fromkeys(("connect_failed", "upstream_error", "upstream_truncated"), ENGINE),
    **dict.fromkeys(("unsupported_encoding", "cancelled"), ENGINE),
}

RIGHTS = "`iop config show` tells the principals and keys that the running server has."
CALLERS = "Nothing is wrong with the server. A refused mutation stands in the audit log with this reason."
ABSENT = "Nothing is wrong with the server, unless the named thing should be there: `iop status`."
ADMIN = "`iop admin profile` shows participants, epochs and revision, `iop admin list` what runs."
SERVER = "The log of the server by its time, `iop status`, then the engine's own log."
FAILED = "`iop admin get ID` has the error of each participant; then the log of the engine that it names."

REASONS = reasons()
SECTIONS = {
    "Credentials and rights": RIGHTS,
    "The request must change": CALLERS,
    "What was named is not there": ABSENT,
    "The admin service refuses an operation": ADMIN,
    "The server, or what is behind it": SERVER,
    "The operators' listener": "`iop status`; the caller of the `ops` listener.",
    "An accepted operation failed": FAILED,
}
# Reasons of families that another try usually helps, where the same request stays refused.
FINAL_REASONS = {
    *("REVISION_MISMATCH", "WEIGHT_VERSION_MISMATCH", "OPERATION_FAILED", "CONFLICT"),
    *("ENGINE_FAILED", "RANK_LOST", "ARTIFACT_LOST", "PREFILL_ONLY", "LEASE_LOST"),
}


def rows() -> list[tuple[str, int, str, str]]:
    """Code, status, when and what to do, of every line of the overview."""
    found = ROW.findall(OVERVIEW.read_text(encoding="utf-8"))
    return [(code, int(status), when, do) for code, status, when, do in found]


def grpc_rows() -> list[tuple[str, str, str, str, str]]:
    """Reason, statuses (empty for failed operations), when, what to do, section: every line of gRPC's overview."""
    found, section = [], ""
    for line in GRPC_OVERVIEW.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif (row := GRPC_ROW.match(line)) is not None:
            reason, stem, status, when, do = row.groups()
            if stem != reason.lower():
                raise SystemExit(f"grpc-errors.md links {reason} to errors/{stem}.md")
            found.append((reason, status or "", when, do, section))
    return found


def example(code: str, status: int, when: str) -> IopError:
    """The error as the surfaces make it; where its words depend on the request, with the overview's."""
    if code in {reason.value for reason in RefusalReason}:
        return error_of_refusal(Refusal(reason=RefusalReason(code), retry_after_s=1.0), "fast")
    if code in {known.value for known in StreamErrorCode} - {"invalid_request", "internal"}:
        return error_of_stream(StreamError(code=code))
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", when)
    return FAMILIES.get(status, Unavailable)(f"{words[0].upper()}{words[1:]}.", reason=code.upper())


def deeper(text: str) -> str:
    """Links of the overview, seen from the pages' folder."""
    return re.sub(r"\]\((?!http)", "](../", text)


def fold(text: str) -> str:
    """Lines of at most 118 characters, broken between words."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) >= 118:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def sentence(words: str) -> str:
    """A cell of the overview as a sentence of its own."""
    return fold(f"{words[0].upper()}{deeper(words[1:])}.")


def page(code: str, status: int, when: str, do: str) -> str:
    """One code's page."""
    error = example(code, status, when)
    if error_status(error) != status:
        raise SystemExit(f"http-errors.md says {status} of {code}, the code says {error_status(error)}")
    again = status in AGAIN and code not in FINAL
    told = REASONS.get(code.upper())
    parts = [
        f"# {code}\n\nMade by `tools/gen_errors.py`; do not edit. All codes: [error codes](../http-errors.md).\n",
        "| | |\n| --- | --- |",
        f"| HTTP status, in every dialect | {status} |",
        f"| OpenAI `error.type` | `{error_type(status, Dialect.CHAT)}` |",
        f"| Anthropic `error.type` | `{error_type(status, Dialect.MESSAGES)}` |",
        *([f"| over gRPC | {statuses(told)}, `ErrorInfo.reason` `{code.upper()}` |"] if told else []),
        f"| the same request again | {'may help, after a wait' if again else 'does not help'} |\n",
        f"## When\n\n{sentence(when)}\n",
        f"## What the caller does\n\n{sentence(do)}\n",
        f"## What the operator looks at\n\n{fold(LOOKS.get(code, REQUEST))}\n",
        "## Bodies\n\nThe code is `error.code`, and `x-iop-reason`; `message` may change. OpenAI's shape:\n",
    ]
    for dialect, between in ((Dialect.CHAT, "\nAnthropic's:\n"), (Dialect.MESSAGES, None)):
        body = json.dumps(json.loads(error_body(error, dialect, "req-7")), indent=2, ensure_ascii=False)
        parts.append(f"```json\n{body}\n```")
        parts += [between] if between else []
    return "\n".join(parts) + "\n"


def grpc_page(reason: str, status: str, when: str, do: str, section: str) -> str:
    """The page of one reason that only gRPC callers and operators meet."""
    families = REASONS.get(reason, set())
    if status and statuses(families) != status:
        raise SystemExit(
            f"grpc-errors.md says {status} of {reason}, the code says {statuses(families) or 'nothing'}"
        )
    parts = [
        f"# {reason}\n\nMade by `tools/gen_errors.py`; do not edit. All: [gRPC and admin](../grpc-errors.md).\n",
        "| | |\n| --- | --- |",
    ]
    if status:
        again = reason not in FINAL_REASONS and any(each.retryable_by_default for each in families)
        parts += [
            f"| gRPC status | {status} |",
            f"| the same request again | {'may help, after a wait' if again else 'does not help'} |\n",
        ]
    else:
        parts.append(f"| where | `AdminError.code`: `ADMIN_ERROR_CODE_{reason}` |\n")
    parts += [
        f"## When\n\n{sentence(when)}\n",
        f"## What the caller does\n\n{sentence(do)}\n",
        f"## What the operator looks at\n\n{fold(SECTIONS[section])}",
    ]
    if status:
        shown = json.dumps(details(min(families, key=lambda family: family.__name__), reason, when), indent=2)
        parts.append(
            f"\n## Details\n\nPrograms match on `reason`; `message` may change.\n\n```json\n{shown}\n```"
        )
    return "\n".join(parts) + "\n"


def details(family: type[IopError], reason: str, when: str) -> dict[str, object]:
    """The status as a listener sends it, in the JSON that gRPC's tools show."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", when)
    failure = failure_of(family(f"{words[0].upper()}{words[1:]}.", reason=reason))
    status = status_pb2.Status.FromString(failure.trailing_metadata[0][1])
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    told = json_format.MessageToDict(info)
    return {"status": failure.code.name, "message": status.message, "google.rpc.ErrorInfo": told}


def main() -> int:
    """Write the pages, or compare them."""
    pages = {FOLDER / f"{row[0]}.md": page(*row) for row in rows()}
    pages |= {FOLDER / f"{row[0].lower()}.md": grpc_page(*row) for row in grpc_rows()}
    extra = set(FOLDER.glob("*.md")) - set(pages)
    if "--check" in sys.argv[1:]:
        stale = {path for path, text in pages.items() if not path.exists() or path.read_text("utf-8") != text}
        for path in sorted(stale | extra):
            print(f"docs/reference/errors/{path.name} is stale: run tools/gen_errors.py", file=sys.stderr)
        return 1 if stale | extra else 0
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    for path in extra:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
