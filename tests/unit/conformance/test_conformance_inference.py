"""Requests that the suite makes itself, to servers that do not behave."""

from __future__ import annotations

import asyncio

import pytest

from iop.conformance.inference import Generation, HttpInference


@pytest.mark.clause("AD-102")
@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 two hundred\r\n\r\n"]
)
async def test_a_server_that_goes_at_any_point_of_its_answer_is_an_outcome_of_the_request(
    said: bytes,
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    generation, begun = Generation(), asyncio.Event()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        inference = HttpInference(f"http://127.0.0.1:{port}")
        await inference.take("m", tokens=4, goes_on=False, generation=generation, begun=begun)
    assert begun.is_set()
    assert generation.outcome
    assert generation.outcome != "finished"
