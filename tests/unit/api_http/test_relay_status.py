"""What a Node says of an answer is not taken on trust: a status that no caller may see (SF-04)."""

from __future__ import annotations

import pytest

from iop.api.http.errors import Dialect, error_body, error_status
from iop.api.http.exchange import Exchange
from iop.api.http.limits import HttpLimits
from iop.api.http.protocol import HttpConnection
from iop.api.http.relay import Relay
from iop.api.http.server import HttpServer
from iop.core.errors import IopError
from iop.testing.http_site import Recorder, SilentTransport, SystemClock
from iop.wire.messages import BodyFraming


class FakeHandle:
    version_begun = weight_version = "v"

    def __init__(self) -> None:
        self.cancels = 0
        self.is_truncated = False

    def consumed(self, size_bytes: int) -> None:
        pass

    def cancel(self, _reason: object) -> None:
        self.cancels += 1

    def note_truncated(self) -> None:
        self.is_truncated = True


def fail(exchange: Exchange, error: IopError) -> None:
    exchange.respond(error_status(error), [], error_body(error, Dialect.CHAT, "r"))


@pytest.mark.clause("SF-04", "SF-06")
@pytest.mark.parametrize("status", [-1, 0, 99, 100, 101, 199, 1000, 2**31])
@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
def test_a_status_that_is_none_or_an_interim_one_becomes_a_502(status: int, kind: bytes) -> None:
    transport, handler, handle = SilentTransport(), Recorder(), FakeHandle()
    handler.on_exchange = lambda exchange, body: None
    connection = HttpConnection(HttpServer(handler, limits=HttpLimits(), clock=SystemClock()))
    connection.connection_made(transport)
    connection.data_received(b"GET / HTTP/1.1\r\nHost: e\r\n\r\n")
    relay = Relay(
        handler.exchanges[0],
        dialect=Dialect.CHAT,
        choices=1,
        event_bytes_max=1000,
        begin=lambda *_: [],
        fail=fail,
    )
    relay.bind(handle)  # type: ignore[arg-type]
    relay.on_response_start(status=status, headers=[(b"content-type", kind)], framing=BodyFraming.CLOSE)
    relay.on_body(b"HTTP/1.1 200 OK\r\n\r\nPOISON")
    relay.on_end()
    answer = b"".join(transport.written)
    assert answer.startswith(b"HTTP/1.1 502 ") and answer.count(b"HTTP/1.1") == 1
    assert b"POISON" not in answer
    assert (handle.cancels, handle.is_truncated) == (1, True)
    connection.connection_lost(None)
