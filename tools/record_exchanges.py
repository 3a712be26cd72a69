"""Record what an engine answers, byte for byte: ``record_exchanges.py ENDPOINT MODEL FILE``.

Each request goes over a connection of its own, and the answer is kept as it came off the socket: status line, header,
chunks and all. The tests replay and damage the file (tests/integration/api_http/test_edge_recordings.py). No
credential is sent, so none is recorded.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from pathlib import Path
from urllib.parse import urlsplit

WAIT_S = 60.0
TURN = '"messages":[{"role":"user","content":"Say it, S\\u00e9bastien \\ud83d\\ude80"}]'
SYSTEM = '"system":"Be brief.",'
TOOL = (
    '"tools":[{"type":"function","function":{"name":"get_weather","parameters":'
    '{"type":"object","properties":{"city":{"type":"string"}}}}}]'
)
RESPONSES_TOOL = (
    '"tools":[{"type":"function","name":"get_weather","strict":false,"parameters":'
    '{"type":"object","properties":{"city":{"type":"string"}}}}]'
)
MESSAGES_TOOL = (
    '"tools":[{"name":"get_weather",'
    '"input_schema":{"type":"object","properties":{"city":{"type":"string"}}}}]'
)

# The spelling is odd on purpose: spaces, escapes, a late model, numbers in several forms, keys that stand twice below
# the top, fields that nobody knows. MODEL is the caller's name for the model, in its quotes.
REQUESTS = {
    "chat": ("/v1/chat/completions", "{ " + TURN + ', "model" : MODEL ,"max_tokens":16,"seed":1}'),
    "chat streamed": (
        "/v1/chat/completions",
        '{"stream":true,"stream_options":{"include_usage":true},"model":MODEL,"max_tokens":16,' + TURN + "}",
    ),
    "chat with tools": ("/v1/chat/completions", '{"model":MODEL,"max_tokens":64,' + TOOL + "," + TURN + "}"),
    "chat with tools, streamed": (
        "/v1/chat/completions",
        '{"model":MODEL,"stream":true,"max_tokens":64,' + TOOL + "," + TURN + "}",
    ),
    "chat, odd spelling": (
        "/v1/chat/completions",
        '{"x_unknown":{"a":1,"a":2,"big":123456789012345678901234567890,"e":1E2,"z":0.10},\n\t"max_tokens":4,'
        '"temperature":0.0,"model":MODEL,' + TURN + "}",
    ),
    "chat, wrong": ("/v1/chat/completions", '{"model":MODEL,"messages":5}'),
    "completion": ("/v1/completions", '{"model":MODEL,"prompt":"Say it","max_tokens":8}'),
    "completion streamed": (
        "/v1/completions",
        '{"prompt":"Say it","stream":true,"model":MODEL,"max_tokens":8}',
    ),
    "messages": ("/v1/messages", '{"model":MODEL,"max_tokens":16,' + SYSTEM + TURN + "}"),
    "messages streamed": (
        "/v1/messages",
        '{"stream":true,"model":MODEL,"max_tokens":16,' + SYSTEM + TURN + "}",
    ),
    "messages with tools": (
        "/v1/messages",
        '{"model":MODEL,"max_tokens":64,' + MESSAGES_TOOL + "," + TURN + "}",
    ),
    "token count": ("/v1/messages/count_tokens", '{"model":MODEL,' + TURN + "}"),
    "response": ("/v1/responses", '{"model":MODEL,"input":"Say it","max_output_tokens":16}'),
    "response streamed": (
        "/v1/responses",
        '{"input":"Say it","stream":true,"model":MODEL,"max_output_tokens":16}',
    ),
    "response with tools": (
        "/v1/responses",
        '{"model":MODEL,"input":"Say it","max_output_tokens":64,' + RESPONSES_TOOL + "}",
    ),
    "embeddings": ("/v1/embeddings", '{"model":MODEL,"input":"x"}'),
}


async def record(host: str, port: int, path: str, body: bytes) -> bytes:
    """One answer, as bytes came."""
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: %b:%d\r\nContent-Type: application/json\r\nAccept-Encoding: identity\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b"
            % (path.encode(), host.encode(), port, len(body), body)
        )
        answer = await reader.read()
        writer.close()
        return answer


async def record_all(endpoint: str, model: str) -> list[dict[str, str]]:
    """All requests, one after the other."""
    parts = urlsplit(endpoint)
    assert parts.hostname is not None and parts.port is not None
    exchanges = []
    for name, (path, template) in REQUESTS.items():
        body = template.replace("MODEL", json.dumps(model)).encode()
        answer = await record(parts.hostname, parts.port, path, body)
        text = {"name": name, "path": path, "request": template}
        exchanges.append({**text, "answer": base64.b64encode(answer).decode()})
        print(f"{answer.partition(b' ')[2][:3].decode()} {len(answer):6} {name}")
    return exchanges


def main() -> None:
    """Record all requests into one file."""
    endpoint, model, file = sys.argv[1:4]
    exchanges = asyncio.run(record_all(endpoint, model))
    Path(file).write_text(json.dumps({"model": model, "exchanges": exchanges}, indent=1) + "\n")


if __name__ == "__main__":
    main()
