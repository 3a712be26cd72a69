"""The ops listener: health for everybody, all else for viewers."""

from __future__ import annotations

import pytest
from aiohttp import ClientSession

from iop.api.http.ops import OpsServer, ops_app
from iop.core.errors import NotFound, PermissionDenied, Unauthenticated, Unavailable


class Source:
    def status(self, *, with_leases=False):
        return {"config_revision": 1, **({"leases": []} if with_leases else {})}

    def explain(self, request_id):
        if request_id != "team/r 1":
            raise NotFound("no recent request has this id", reason="unknown_request")
        return {"request_id": request_id}

    async def command(self, node, what, *, adapter=""):
        return {"node": node, "command": what, "adapter": adapter}


async def read_artifact(name):
    if name != "n1/main/abc":
        raise NotFound("no artifact of this name is known", reason="unknown_artifact")
    for data in (b"one ", b"two"):
        yield data


def authorize(token):
    if token is None or token == "wrong":
        raise Unauthenticated("a viewer token is needed", reason="UNAUTHENTICATED")
    if token == "stranger":
        raise PermissionDenied("this token may not read", reason="PERMISSION_DENIED")


@pytest.fixture
async def ops():
    state = {"ready": (True, "")}
    app = ops_app(
        source=Source(),
        render_metrics=lambda: b"iop_edge_requests_live 0\n",
        metrics_type="text/plain; version=0.0.4",
        authorize=authorize,
        is_ready=lambda: state["ready"],
        read_artifact=read_artifact,
    )
    async with OpsServer(app, host="127.0.0.1", port=0) as server, ClientSession() as client:

        async def get(path, token=None):
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            async with client.get(f"http://127.0.0.1:{server.port}{path}", headers=headers) as answer:
                body = await answer.read()
                is_json = answer.content_type == "application/json"
                return answer.status, (await answer.json() if is_json else body), answer.headers

        get.state = state
        get.port = server.port
        yield get


@pytest.mark.clause("SF-30")
@pytest.mark.parametrize(
    "path", ["/metrics", "/status", "/explain/x", "/nodes/n1/usage", "/artifacts/n1/main/abc"]
)
@pytest.mark.parametrize(("token", "status"), [(None, 401), ("wrong", 401), ("stranger", 403)])
async def test_readings_need_a_viewer_token(ops, path, token, status):
    answer, body, headers = await ops(path, token)
    assert answer == status
    assert body["error"]["code"] in {"UNAUTHENTICATED", "PERMISSION_DENIED"}
    assert ("www-authenticate" in headers) == (status == 401)


async def test_health_needs_none_and_readiness_says_why_not(ops):
    assert (await ops("/healthz"))[:2] == (200, {"status": "ok"})
    assert (await ops("/readyz"))[:2] == (200, {"ready": True, "reason": ""})
    ops.state["ready"] = (False, "the store cannot be written")
    assert (await ops("/readyz"))[:2] == (503, {"ready": False, "reason": "the store cannot be written"})


async def test_a_viewer_reads_status_leases_metrics_and_explanations(ops):
    assert (await ops("/status", "viewer"))[1] == {"config_revision": 1}
    assert (await ops("/status?leases=1", "viewer"))[1] == {"config_revision": 1, "leases": []}
    assert (await ops("/metrics", "viewer"))[1] == b"iop_edge_requests_live 0\n"
    assert (await ops("/explain/team/r%201", "viewer"))[1] == {"request_id": "team/r 1"}
    answer = await ops("/nodes/n1/usage?adapter=main", "viewer")
    assert answer[1] == {"node": "n1", "command": "usage", "adapter": "main"}
    assert (await ops("/artifacts/n1/main/abc", "viewer"))[:2] == (200, b"one two")
    assert (await ops("/artifacts/n1/main/other", "viewer"))[0] == 404
    status, body, _ = await ops("/explain/other", "viewer")
    assert (status, body["error"]["code"]) == (404, "unknown_request")


async def test_a_taken_port_is_a_clear_error(ops):
    app = ops_app(
        source=Source(),
        render_metrics=bytes,
        metrics_type="text/plain",
        authorize=authorize,
        is_ready=lambda: (True, ""),
    )
    with pytest.raises(Unavailable, match=str(ops.port)):
        async with OpsServer(app, host="127.0.0.1", port=ops.port):
            pass
