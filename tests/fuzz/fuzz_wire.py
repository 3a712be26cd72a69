"""Coverage-guided fuzzing of what reads a peer's bytes: ``make fuzz`` (EN-100).

    python tests/fuzz/fuzz_wire.py frames|packets|edge|node [libFuzzer's flags]

A finding is anything but a typed error of the peer's, or memory that grows with what a peer claims rather than sends.
Seeds are made from the code, so that they cannot age; what fuzzing finds is kept beside this file under ``corpus``,
which is not checked in. A finding becomes an ``@example`` of the property tests, which ``make test`` runs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["iop.wire"]):
    from iop.core.errors import RemoteProtocolError
    from iop.core.limits import HANDSHAKE_BYTES_MAX
    from iop.testing import packets as make
    from iop.testing.packets import SessionPair
    from iop.wire import codec
    from iop.wire import messages as m
    from iop.wire import packets as p
    from iop.wire.frames import HEADER_BYTES, FrameReader, frame
    from iop.wire.session import Session, SessionSettings

FRAME_BYTES_MAX = HANDSHAKE_BYTES_MAX
SETTINGS = SessionSettings(frame_bytes_max=FRAME_BYTES_MAX, stream_window_bytes=16_384, streams_max=8)
CUTS_MAX = 8


def pieces(data: bytes) -> Iterator[bytes]:
    """The input's first bytes say where the rest is cut: no cut may change what is read."""
    provider = atheris.FuzzedDataProvider(data)
    for _ in range(provider.ConsumeIntInRange(0, CUTS_MAX)):
        yield provider.ConsumeBytes(provider.ConsumeIntInRange(0, 64))
    yield provider.ConsumeBytes(provider.remaining_bytes())


def fuzz_frames(data: bytes) -> None:
    """Frames come out as they went in, or the reader says what is wrong; it never holds more than a frame."""
    reader = FrameReader(FRAME_BYTES_MAX)
    fed = taken = 0
    try:
        for piece in pieces(data):
            fed += len(piece)
            for _, start, end in reader.feed(piece):
                assert 0 < end - start <= FRAME_BYTES_MAX
                taken += end - start + HEADER_BYTES
            assert reader.held_bytes <= FRAME_BYTES_MAX + HEADER_BYTES
            assert taken + reader.held_bytes == fed, "no byte is lost or made up"
    except RemoteProtocolError:
        pass


def fuzz_packets(data: bytes) -> None:
    """A packet is understood, and then says the same when it is written and read again, or refused by type."""
    try:
        call, message = codec.decode(memoryview(data))
    except RemoteProtocolError:
        return
    if isinstance(message, p.Unknown):
        return
    again = codec.decode(memoryview(codec.encode(message, call)))
    assert again == (call, message), (message, again)


def _feed(session: Session, data: bytes) -> None:
    """As raw bytes or, by the last byte, each piece as a frame: random bytes seldom have a fitting length in front."""
    now = 1.0
    is_framed = bool(data[-1:] and data[-1] & 1)
    for piece in pieces(data[:-1]):
        now += 0.01
        session.receive_data(frame(piece) if is_framed and piece else piece, now=now)
        session.data_to_send()
        session.handle_deadline(now=now)
        assert session.streams_open <= SETTINGS.streams_max * 2
    session.receive_eof()
    assert session.is_closed
    assert not session.streams_open, "every stream has had its end"


def fuzz_edge(data: bytes) -> None:
    """An Edge with a running tunnel and a run hears anything at all from its Node."""
    pair = SessionPair.ready(SETTINGS)
    pair.edge.open_tunnel(make.tunnel_request("run-1"), [b"{}"])
    pair.edge.open_run(make.run_request("run-2"))
    pair.carry()
    _feed(pair.edge, data)


def fuzz_node(data: bytes) -> None:
    """A Node with a running tunnel hears anything at all from its Edge."""
    pair = SessionPair.ready(SETTINGS)
    pair.edge.open_tunnel(make.tunnel_request("run-1"), [b"{}"])
    pair.carry()
    _feed(pair.node, data)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "frames": fuzz_frames,
    "packets": fuzz_packets,
    "edge": fuzz_edge,
    "node": fuzz_node,
}


def seeds() -> list[bytes]:
    """One of most kinds of packet, so that fuzzing begins behind the first checks."""
    messages: list[p.Message] = [
        make.register_response(),
        make.ready_request(),
        m.ReadyAck(ready=True),
        p.Heartbeat(sequence=1, clock_unix_nanos=1),
        p.Goodbye(reason_code="shutdown", reason="bye"),
        p.TunnelFrame(run_id="run-1", kind=p.FrameKind.BODY, sequence=1, body=b"x" * 40),
        p.TunnelFrame(run_id="run-1", kind=p.FrameKind.END, sequence=2),
        p.StreamCredit(stream_id="run-1", bytes=1000),
    ]
    return [codec.encode(message, 1) for message in messages]


def main() -> None:
    """Fuzz one target until libFuzzer's limits."""
    name, *flags = sys.argv[1:]
    corpus = Path(__file__).parent / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for number, seed in enumerate(seeds()):
            # Integers are taken from the end: no cuts, and for sessions each piece a frame.
            data = {"packets": seed, "frames": frame(seed) + b"\0"}.get(name, seed + b"\0\1")
            (Path(scratch) / str(number)).write_bytes(data)
        atheris.Setup([sys.argv[0], *flags, str(corpus), scratch], TARGETS[name])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
