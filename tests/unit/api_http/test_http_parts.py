"""The small parts of the HTTP surfaces: heads, headers, keys, codings, estimates, budgets, routes."""

from __future__ import annotations

import gzip
import hashlib
import zlib

import pytest

from iop.api.http.content_coding import EXPANSION_BYTES_MAX, DecodeError, decoder_for
from iop.api.http.estimate import estimate_tokens, prompt_bytes
from iop.api.http.head import NO_HEAD, HeaderList, RequestHead, read_head, split_target
from iop.api.http.headers import accepts_coding, provider_headers, request_headers, request_id_of
from iop.api.http.keys import ApiKeys, ApiKeySpec
from iop.api.http.limits import ByteBudget, HttpLimits
from iop.api.http.routing import Routes
from iop.api.http.splice import read_fields
from iop.api.http.usage import usage_of, usage_of_body
from iop.core.errors import InvalidRequest, NotFound, Overloaded, PermissionDenied, Unauthenticated
from iop.wire.messages import Usage


def head_of(*headers: tuple[bytes, bytes], version: str = "1.1", length: int | None = None) -> RequestHead:
    fields: HeaderList = list(headers)
    return RequestHead(
        method=b"POST",
        path=b"/",
        query=b"",
        version=version,
        headers=fields,
        content_length=length,
        is_chunked=False,
        is_keep_alive=True,
        expects_continue=False,
    )


# ---- heads ----


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"/", (b"/", b"")),
        (b"/a?b=c?d", (b"/a", b"b=c?d")),
        (b"/a%20b", (b"/a%20b", b"")),
        (b"http://h:1/a?b", (b"/a", b"b")),
        (b"HTTPS://h", (b"/", b"")),
    ],
)
def test_targets_are_split(target: bytes, expected: tuple[bytes, bytes]) -> None:
    assert split_target(target) == expected


@pytest.mark.parametrize(
    "target", [b"", b"*", b"a", b"/a b", b"/#", b"/\x7f", b"/\xc3", b"ftp://h/", b"http:///a", b"http://u@h/"]
)
def test_targets_that_can_be_read_two_ways_are_refused(target: bytes) -> None:
    with pytest.raises(InvalidRequest):
        split_target(target)


def judge(host: bytes) -> RequestHead:
    return read_head(method=b"GET", target=b"/", version="1.1", headers=[(b"host", host)], is_keep_alive=True)


@pytest.mark.parametrize("host", [b"h", b"h:80", b"[::1]:80", b"a.b-c_d", b""])
def test_usual_hosts_pass(host: bytes) -> None:
    assert judge(host).path == b"/"


@pytest.mark.parametrize("host", [b"h/x", b"h h", b"u@h", b"h:80:80", b"h:port", b"h\xff", b"[::1"])
def test_odd_hosts_do_not(host: bytes) -> None:
    with pytest.raises(InvalidRequest):
        judge(host)


# ---- headers ----


@pytest.mark.clause("SF-13")
@pytest.mark.parametrize("value", [b"", b"a b", b"a" * 129, b"\xc3\xa9", b"a\tb"])
def test_a_bad_request_id_is_not_taken(value: bytes) -> None:
    assert request_id_of(head_of((b"x-request-id", value))) is None
    assert request_id_of(head_of((b"x-request-id", b"good-1"))) == "good-1"


@pytest.mark.clause("SF-04")
def test_nobody_can_drop_a_bodys_type_by_naming_it() -> None:
    head = head_of(
        (b"connection", b"content-type, x-a, content-encoding"), (b"content-type", b"t"), (b"x-a", b"1")
    )
    names = [name for name, _ in request_headers(head, request_id="r", is_stream=False)]
    assert b"content-type" in names
    assert b"x-a" not in names
    kept = provider_headers([(b"Connection", b"Content-Type"), (b"Content-Type", b"t")])
    assert kept == [(b"content-type", b"t")]


@pytest.mark.case("P-16")
@pytest.mark.clause("SF-04", "EN-04")
def test_no_header_of_a_provider_tells_where_it_is() -> None:
    addresses = [b"http://10.0.0.5:8000/v1/models", b"//10.0.0.5/v1", b"/\\10.0.0.5/v1", b"10.0.0.5"]
    told = [(name, value) for name in (b"Location", b"Content-Location", b"Alt-Svc") for value in addresses]
    assert provider_headers([*told, (b"Refresh", b"0; url=http://10.0.0.5/")]) == []
    paths = [(b"Location", b"/v1/chat/completions"), (b"Content-Location", b"/a?b=c")]
    assert provider_headers(paths) == [(name.lower(), value) for name, value in paths]


@pytest.mark.clause("SF-04", "SF-14", "SF-24")
def test_what_another_edge_says_of_its_answer_passes_and_what_it_says_of_itself_does_not() -> None:
    told = [(b"X-Iop-Origin", b"edge"), (b"x-iop-reason", b"queue_full"), (b"x-iop-estimate", b"1")]
    told += [(b"x-iop-converted", b"messages"), (b"x-iop-dropped", b"seed")]
    own = [(b"x-iop-provider", b"p-1"), (b"x-iop-queue-ms", b"3"), (b"x-iop-weight-version", b"v")]
    assert provider_headers([*told, *own]) == [(name.lower(), value) for name, value in told]


@pytest.mark.clause("SF-04")
@pytest.mark.parametrize("is_stream", [True, False])
def test_plain_bytes_are_asked_for_unless_the_caller_reads_others(is_stream: bool) -> None:
    asked = dict(request_headers(head_of((b"accept-encoding", b"gzip")), request_id="r", is_stream=is_stream))
    assert asked[b"accept-encoding"] == (b"identity" if is_stream else b"gzip")
    asked = dict(request_headers(head_of(), request_id="r", is_stream=is_stream))
    assert asked[b"accept-encoding"] == b"identity"


@pytest.mark.parametrize(
    ("value", "is_accepted"),
    [
        (b"gzip", True),
        (b"br, GZIP;q=0.5", True),
        (b"x-gzip", True),
        (b"gzip;q=0", False),
        (b"gzip; q=0.0", False),
        (b"*", True),
        (b"*;q=0", False),
        (b"*, gzip;q=0", False),
        (b"br", False),
        (b"identity", False),
    ],
)
def test_accept_encoding_is_understood(value: bytes, is_accepted: bool) -> None:
    assert accepts_coding(head_of((b"accept-encoding", value)), b"gzip") is is_accepted


# ---- keys ----


def keys_of(*specs: ApiKeySpec, times: list[float]) -> ApiKeys:
    return ApiKeys(specs, buffered_bytes=100, now=lambda: times[0])


def spec(name: str, **fields) -> ApiKeySpec:
    return ApiKeySpec(name=name, sha256=hashlib.sha256(name.encode()).digest(), **fields)


@pytest.mark.clause("SF-11")
def test_keys_are_found_by_their_digest() -> None:
    keys = keys_of(spec("a"), spec("b"), times=[0.0])
    assert keys.identify(head_of((b"authorization", b"Bearer b"))).name == "b"
    for headers in (
        (),
        ((b"authorization", b"Basic b"),),
        ((b"authorization", b"Bearer "),),
        ((b"x-api-key", b"c"),),
    ):
        with pytest.raises(Unauthenticated):
            keys.identify(head_of(*headers))
    assert "sha256" not in repr(spec("a"))


@pytest.mark.clause("SF-11")
def test_without_keys_everybody_is_the_same_nameless_caller() -> None:
    keys = keys_of(times=[0.0])
    caller = keys.identify(head_of((b"authorization", b"Bearer whatever")))
    assert caller.name == ""
    caller.enter(0.0)
    caller.check_model("anything")


@pytest.mark.clause("SF-11")
def test_a_rate_is_refilled_by_time() -> None:
    times = [0.0]
    caller = keys_of(spec("a", requests_per_minute=60), times=times).identify(head_of((b"api-key", b"a")))
    for _ in range(60):
        caller.enter(0.0)
    with pytest.raises(Overloaded) as caught:
        caller.enter(0.5)
    assert caught.value.retry_after_s == pytest.approx(0.5)
    caller.enter(1.0)
    with pytest.raises(Overloaded):
        caller.enter(1.0)


@pytest.mark.clause("SF-11")
def test_leaving_makes_room_and_models_are_checked_by_any_name() -> None:
    keys = keys_of(spec("a", concurrent=1, models=frozenset({"fast-latest"})), times=[0.0])
    caller = keys.identify(head_of((b"api-key", b"a")))
    caller.enter(0.0)
    with pytest.raises(Overloaded):
        caller.enter(0.0)
    caller.leave()
    caller.enter(0.0)
    caller.check_model("fast", "fast-latest")
    with pytest.raises(PermissionDenied):
        caller.check_model("slow")


# ---- codings ----


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("coding", "pack"),
    [
        (b"gzip", gzip.compress),
        (b"x-gzip", lambda data: gzip.compress(data[:100]) + gzip.compress(data[100:])),
        (b"deflate", zlib.compress),
        (b"deflate", lambda data: zlib.compress(data, wbits=-15)),
    ],
    ids=["gzip", "members", "zlib", "bare"],
)
def test_codings_are_undone_at_any_split(coding: bytes, pack, size: int) -> None:
    clear = b"event " * 500
    packed = pack(clear)
    decoder = decoder_for(coding)
    assert decoder is not None
    parts = [decoder.decode(packed[at : at + size]) for at in range(0, len(packed), size)]
    assert b"".join(parts) == clear


def test_broken_and_exploding_codings_are_refused() -> None:
    decoder = decoder_for(b"gzip")
    assert decoder is not None
    with pytest.raises(DecodeError):
        decoder.decode(b"no gzip at all")
    decoder = decoder_for(b"gzip")
    assert decoder is not None
    with pytest.raises(DecodeError):
        decoder.decode(gzip.compress(b"\0" * (EXPANSION_BYTES_MAX * 3)))
    assert decoder_for(b"br") is None


# ---- estimates and usage ----


@pytest.mark.clause("EN-111")
def test_an_estimate_counts_text_and_not_pictures() -> None:
    picture = b"A" * 100_000
    body = (
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"' + b"x" * 4000 + b'"},'
        b'{"type":"image_url","image_url":{"url":"data:' + picture + b'"}}]}]}'
    )
    fields = read_fields(body, depth_max=32)
    assert 1000 <= estimate_tokens(fields, threshold=2000, bytes_per_token=4.0) <= 1020
    assert estimate_tokens(fields, threshold=None, bytes_per_token=4.0) == len(body) // 4
    ids = read_fields(b'{"model":"m","prompt":[[1,2,3],[4]]}', depth_max=32)
    assert prompt_bytes(ids) == 16


def test_usage_is_read_in_every_dialect() -> None:
    assert usage_of(
        {
            "prompt_tokens": 1,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 4},
        }
    ) == Usage(prompt_tokens=1, completion_tokens=2, cached_prompt_tokens=3, reasoning_tokens=4)
    assert usage_of({"input_tokens": 1, "output_tokens": 2, "cache_read_input_tokens": 3}) == Usage(
        prompt_tokens=1, completion_tokens=2, cached_prompt_tokens=3
    )
    assert usage_of({"prompt_tokens": "1", "completion_tokens": True, "input_tokens": -1}) == Usage()
    assert usage_of_body(b'{"usage":{"input_tokens":5}}') == Usage(prompt_tokens=5)
    for body in (b'{"usage":7}', b'{"usage":', b'"usage"', b"{}", b'{"usage":null}'):
        assert usage_of_body(body) is None


# ---- budgets and routes ----


@pytest.mark.clause("SF-12")
def test_a_budget_gives_what_fits_and_counts_what_does_not() -> None:
    budget = ByteBudget(10)
    assert budget.reserve(10)
    assert not budget.reserve(1)
    budget.release(4)
    assert budget.reserve(4)
    assert (budget.held_bytes, budget.rejected) == (10, 1)


@pytest.mark.clause("SF-12")
def test_a_key_may_always_send_one_largest_body() -> None:
    assert HttpLimits(body_bytes=100, buffered_bytes=1000).key_buffered_bytes == 250
    assert HttpLimits(body_bytes=900, buffered_bytes=1000).key_buffered_bytes == 900


def test_routes_know_paths_methods_and_one_prefix() -> None:
    routes: Routes[str] = Routes({(b"GET", b"/a"): "a", (b"POST", b"/b"): "b"}, prefix=(b"/a/", "one"))
    assert routes.find(b"HEAD", b"/a") == ("a", b"")
    assert routes.find(b"GET", b"/a/x/y") == ("one", b"x/y")
    with pytest.raises(InvalidRequest) as caught:
        routes.find(b"DELETE", b"/a")
    assert caught.value.details["allow"] == "GET, HEAD"
    with pytest.raises(InvalidRequest):
        routes.find(b"POST", b"/a/x")
    for path in (b"/c", b"/a/", b"/A"):
        with pytest.raises(NotFound):
            routes.find(b"GET", path)


def test_the_stand_in_head_asks_for_nothing() -> None:
    assert not NO_HEAD.is_keep_alive
    assert NO_HEAD.headers == []
