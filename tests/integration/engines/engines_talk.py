"""Asking an engine over HTTP and taking down what it answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import urlsplit

from engines_transcript import RECORDS, Cleaner, Exchange, Transcript

ANSWER_WITHIN_S = 120.0


class Talk:
    """One conversation with one engine.

    Args:
        engine: what it is, for people.
        endpoint: where.
        cleaner: of what is taken down.
        key: sent as a bearer's; never taken down.
    """

    def __init__(self, engine: str, endpoint: str, cleaner: Cleaner, *, key: str = "") -> None:
        self.transcript = Transcript(engine)
        self.endpoint = endpoint
        self._cleaner = cleaner
        self._key = key

    def ask(
        self,
        name: str,
        method: str,
        path: str,
        body: object | None = None,
        *,
        trim: Callable[[bytes], bytes] | None = None,
        is_known: bool = True,
    ) -> bytes:
        """One exchange, taken down.

        Args:
            trim: leaves of the answer's body what matters.
            is_known: the engine is shown its key.
        """
        status, kind, answer = self._send(method, path, body, is_known=is_known)
        self.note(name, method, path, body, status, kind, trim(answer) if trim else answer)
        return answer

    def tell(self, method: str, path: str, body: object | None = None) -> tuple[int, bytes]:
        """One that is not taken down."""
        status, _, answer = self._send(method, path, body, is_known=True)
        return status, answer

    def note(
        self, name: str, method: str, path: str, body: object | None, status: int, kind: str, answer: bytes
    ) -> None:
        """Take down one exchange."""
        assert name not in {each.name for each in self.transcript.answers}, f"two exchanges {name!r}"
        self.transcript.answers.append(
            Exchange(
                name=name,
                method=method,
                path=self._cleaner.words(path),
                request=self._cleaner.value(body),
                status=status,
                content_type=kind,
                body=self._cleaner.body(answer, kind),
            )
        )

    @contextlib.contextmanager
    def streaming(self, path: str, body: Mapping[str, object]) -> Iterator[Stream]:
        """A stream under way while the block runs; given up at its end."""
        connection = self._connect()
        try:
            connection.request("POST", path, json.dumps(body), self._headers(is_known=True, has_body=True))
            stream = Stream(connection.getresponse())
            stream.begin()
            yield stream
        finally:
            connection.close()

    def _send(self, method: str, path: str, body: object | None, *, is_known: bool) -> tuple[int, str, bytes]:
        connection = self._connect()
        try:
            content = None if body is None else json.dumps(body)
            headers = self._headers(is_known=is_known, has_body=body is not None)
            connection.request(method, path, content, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers.get("Content-Type", ""), answer.read()
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.endpoint).netloc, timeout=ANSWER_WITHIN_S)

    def _headers(self, *, is_known: bool, has_body: bool) -> dict[str, str]:
        headers = {"Content-Type": "application/json"} if has_body else {}
        if self._key and is_known:
            headers["Authorization"] = f"Bearer {self._key}"
        return headers


class Stream:
    """One answer that is read beside what else is asked."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._has_begun = threading.Event()
        self.status = answer.status
        self.content_type = answer.headers.get("Content-Type", "")

    def begin(self) -> None:
        """Wait for the first text."""
        self._reader.start()
        assert self._has_begun.wait(ANSWER_WITHIN_S)

    def rest(self) -> bytes:
        """Wait for its end; all that came."""
        self._reader.join(ANSWER_WITHIN_S)
        assert not self._reader.is_alive()
        return b"".join(self._parts)

    def _read(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, AttributeError):
            while part := self._answer.read1(65_536):
                self._parts.append(part)
                if len(self._parts) > 2:
                    self._has_begun.set()
        self._has_begun.set()


def last_events(body: bytes, *, first: int = 2, last: int = 2) -> bytes:
    """Of a stream of thousands of events those at its two ends."""
    events = body.strip().split(b"\n\n")
    kept = events if len(events) <= first + last else [*events[:first], *events[-last:]]
    return b"\n\n".join(kept) + b"\n\n"


def ending(body: bytes) -> bytes:
    """Of a stream that was cut somewhere: its last chunk without its text, which may be any, and the terminator."""
    *_, last, terminator = body.strip().split(b"\n\n")
    chunk = json.loads(last.removeprefix(b"data: "))
    for choice in chunk["choices"]:
        del choice["delta"]
    return b"data: " + json.dumps(chunk).encode() + b"\n\n" + terminator + b"\n\n"


def judge(name: str, transcript: Transcript) -> None:
    """Compare what a real engine just said with what it is recorded to say; or record it."""
    if RECORDS:
        transcript.save(name)
        return
    drift = Transcript.load(name).differences(transcript)
    advice = "If the engine is right, record it anew (make engines-test RECORD=1) and look at the stand-ins."
    head = f"{name}: the engine answers otherwise than its transcript says."
    assert not drift, "\n".join([head, *drift, advice])
