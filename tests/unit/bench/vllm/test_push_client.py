"""The client of vLLM's pair asks in the order that each connector needs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typing_extensions import override

from bench.peers.vllm_client import VllmPair

WAIT_S = 10.0
ANSWERED = {"remote_block_ids": [3]}
PUSHES = {"remote_engine_id": "p", "remote_port": 5600}


class FakePair:
    """Both servers. Prefill answers once decode has been asked, if that comes first; `asked`: names and bodies."""

    def __init__(self, *, decode_first: bool) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self._decode_asked, self._prefilled = threading.Event(), threading.Event()
        if not decode_first:
            self._decode_asked.set()

    def prefill(self, request_id: str, body: dict[str, Any]) -> bytes:
        assert self._decode_asked.wait(WAIT_S)
        self.asked.append(("prefill", request_id, body))
        self._prefilled.set()
        return json.dumps({"kv_transfer_params": ANSWERED}).encode()

    def decode(self, request_id: str, body: dict[str, Any]) -> bytes:
        self.asked.append(("decode", request_id, body))
        self._decode_asked.set()
        assert self._prefilled.wait(WAIT_S)
        events = [{"choices": [{"token_ids": [token]}]} for token in (5, 6)]
        return b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events)


@contextmanager
def serving(answer: Any) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = answer(self.headers["X-Request-Id"], body)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(reply)

        @override
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("pushes", [None, PUSHES])
def test_decode_is_asked_first_where_prefill_pushes(pushes: dict[str, Any] | None) -> None:
    fake = FakePair(decode_first=pushes is not None)
    with serving(fake.prefill) as prefill, serving(fake.decode) as decode:
        pair = VllmPair("127.0.0.1", prefill, decode, "m", pushes)
        answer = pair.generate([1, 2, 3], 2)
        pair.close()
    assert answer.token_ids == (5, 6)
    asked = {name: (request_id, body) for name, request_id, body in fake.asked}
    assert [name for name, *_ in fake.asked] == (
        ["prefill", "decode"] if pushes is None else ["decode", "prefill"]
    )
    request_id = asked["prefill"][0]
    assert request_id
    assert request_id == asked["decode"][0]
    assert asked["prefill"][1]["max_tokens"] == 1
    assert asked["prefill"][1]["kv_transfer_params"]["do_remote_decode"]
    told = asked["decode"][1]["kv_transfer_params"]
    if pushes is None:
        assert told == ANSWERED
    else:
        assert told == {
            **PUSHES,
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": request_id,
        }
