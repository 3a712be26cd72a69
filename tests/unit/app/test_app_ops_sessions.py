"""Ending an agent's session from the ops listener (EN-70)."""

from __future__ import annotations

import pytest
from aiohttp import ClientSession

from iop.admin.permissions import PRESETS, Principal
from iop.api.http.ops import OpsServer, ops_app
from iop.app.ops_sessions import SESSION_BYTES_MAX, session_routes
from iop.core.errors import Unauthenticated


class NoSource:
    """Nothing here asks it."""


def authenticate(token):
    if token not in PRESETS:
        raise Unauthenticated("a token is needed", reason="UNAUTHENTICATED")
    return Principal(name=token, permissions=PRESETS[token])


@pytest.fixture
async def ops():
    """Asks ``DELETE``; ``ops.ended`` keeps what the Nodes would have been told."""
    ended = []

    def terminate(session):
        ended.append(session)
        return ["n1", "n2"]

    app = ops_app(
        source=NoSource(),
        render_metrics=lambda: b"",
        metrics_type="text/plain",
        authorize=authenticate,
        is_ready=lambda: (True, ""),
        more_routes=session_routes(terminate, authenticate),
    )
    async with OpsServer(app, host="127.0.0.1", port=0) as server, ClientSession() as client:

        async def delete(path, token=None):
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            url = f"http://127.0.0.1:{server.port}{path}"
            async with client.delete(url, headers=headers) as answer:
                return answer.status, await answer.json()

        delete.ended = ended
        yield delete


@pytest.mark.clause("EN-70")
async def test_an_admin_ends_a_session_by_its_whole_id(ops):
    assert await ops("/sessions/team%3Aa%2Fb", "admin") == (
        200,
        {"session": "team:a/b", "nodes": ["n1", "n2"]},
    )
    assert ops.ended == ["team:a/b"]


@pytest.mark.clause("EN-70", "AD-103")
@pytest.mark.parametrize(("token", "status"), [(None, 401), ("viewer", 403), ("operator", 403)])
async def test_others_may_not(ops, token, status):
    answer, body = await ops("/sessions/team%3As1", token)
    assert answer == status
    assert body["error"]["message"]
    assert ops.ended == []


@pytest.mark.clause("EN-70")
async def test_an_id_that_no_session_can_have_is_refused(ops):
    status, body = await ops(f"/sessions/{'s' * (SESSION_BYTES_MAX + 1)}", "admin")
    assert (status, body["error"]["code"]) == (400, "BAD_SESSION")
    assert ops.ended == []
