"""The official clients, on every chat route, over the reference engine, which serves chat completions only."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import pytest
from dialect_clients import TALKS, Ask, say
from http_fleet import KEY, HttpFleet, fleet_of

from iop.api.http.engine import EngineHttp
from iop.api.http.limits import HttpLimits
from iop.api.http.server import HttpServer
from iop.edge.snapshot import PoolMember
from iop.engine import Engine
from iop.testing.http_site import SystemClock


@asynccontextmanager
async def engine_fleet() -> AsyncIterator[HttpFleet]:
    numbers = itertools.count()
    clock = SystemClock()
    async with Engine() as engine:
        handler = EngineHttp(
            engine, limits=HttpLimits(), clock=clock, make_id=lambda: f"engine-{next(numbers)}"
        )
        async with HttpServer(handler, limits=HttpLimits(), clock=clock) as server:
            _, port = await server.listen("127.0.0.1", 0)
            async with fleet_of(
                endpoint=f"http://127.0.0.1:{port}",
                operations=frozenset({"chat_completions"}),
                members=(PoolMember(key=KEY, target=engine.info.model_id),),
            ) as fleet:
                yield fleet
                await fleet.settled()


@pytest.mark.clause("SF-01", "SF-02", "SF-10")
async def test_every_chat_route_is_answered_by_an_engine_that_serves_one() -> None:
    async with engine_fleet() as fleet:
        for dialect, is_stream in itertools.product(("messages", "responses"), (False, True)):
            said = await say(
                TALKS[dialect],
                fleet.url,
                Ask("Tell me about the sea.", max_tokens=12),
                is_stream=is_stream,
                is_sync=False,
            )
            assert said.text
            assert said.stop in ("length", "stop")
            assert said.tokens is not None
            assert said.tokens[0] > 0
            assert 0 < said.tokens[1] <= 12
        _, client = TALKS["messages"].clients(fleet.url)
        async with client:
            with pytest.raises(anthropic.BadRequestError) as caught:
                await client.messages.create(**TALKS["messages"].params(Ask("look", with_image=True)))
            assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]  # foreign
