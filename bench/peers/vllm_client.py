"""Client of a vLLM prefill/decode pair: two calls per request. No process stands between client and servers.

The prefill server gets the prompt with `max_tokens` 1 and `do_remote_decode`. With NixlConnector its answer holds the
parameters with which the decode server, which gets the same prompt, pulls the KV. With NixlPushConnector the decode
server is asked first, under the same `X-Request-Id`, and gives its blocks to the prefill server, which writes there.
"""

from __future__ import annotations

import http.client
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 120.0
HANDSHAKE_TRIES = 4
PATH = "/v1/completions"
HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class PairAnswer:
    """One request. Times are seconds since the first call was sent.

    `prefilled_s`: the prefill server's answer has come; `token_s` and `token_ids`: what the decode server streamed.
    """

    prefilled_s: float
    token_s: tuple[float, ...]
    token_ids: tuple[int, ...]


class VllmPair:
    """One connection to each server, for one request at a time."""

    def __init__(
        self,
        host: str,
        prefill_port: int,
        decode_port: int,
        model: str,
        pushes: Mapping[str, Any] | None = None,
    ) -> None:
        """`pushes`: what the decode server is told of a prefill server that pushes; None where decode pulls."""
        self._prefill = http.client.HTTPConnection(host, prefill_port, timeout=TIMEOUT_S)
        self._decode = http.client.HTTPConnection(host, decode_port, timeout=TIMEOUT_S)
        self._model, self._pushes = model, pushes

    def generate(self, prompt: Sequence[int], max_tokens: int) -> PairAnswer:
        """Greedy, exactly `max_tokens` tokens. Raises RuntimeError when a server refuses or fails."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        wish = {"do_remote_decode": True, "do_remote_prefill": False}
        # Reconnect for every request, before the clock starts: the servers close connections idle for 5 s.
        self.close()
        self._prefill.connect()
        self._decode.connect()
        name = {"X-Request-Id": uuid.uuid4().hex}
        decoded = {**body, "max_tokens": max_tokens, "stream": True}
        start = time.perf_counter()
        if self._pushes is not None:
            peer = {"do_remote_prefill": True, "do_remote_decode": False, **self._pushes}
            peer["remote_request_id"] = name["X-Request-Id"]
            _send(self._decode, {**decoded, "kv_transfer_params": peer}, name)
        _send(self._prefill, {**body, "max_tokens": 1, "kv_transfer_params": wish}, name)
        params = json.loads(_reply(self._prefill).read()).get("kv_transfer_params")
        prefilled_s = time.perf_counter() - start
        if self._pushes is None:
            _send(self._decode, {**decoded, "kv_transfer_params": params}, name)
        token_s: list[float] = []
        token_ids: list[int] = []
        for event in _events(_reply(self._decode)):
            if "error" in event:
                raise RuntimeError(f"vLLM failed: {event['error']}")
            new = event["choices"][0].get("token_ids") or []
            token_ids += new
            token_s += [time.perf_counter() - start] * len(new)
        if len(token_ids) != max_tokens:
            raise RuntimeError(f"vLLM gave {len(token_ids)} tokens, not {max_tokens}")
        return PairAnswer(prefilled_s, tuple(token_s), tuple(token_ids))

    def shake_hands(self) -> None:
        """Makes decode connect to prefill, which it does at its first request within 5 s. Retries a few times."""
        for left in reversed(range(HANDSHAKE_TRIES)):
            try:
                self.generate(range(1000, 1016), 2)
                return
            except RuntimeError:
                if not left:
                    raise

    def close(self) -> None:
        """Closes both connections."""
        self._prefill.close()
        self._decode.close()


def _send(connection: http.client.HTTPConnection, body: dict[str, Any], name: Mapping[str, str]) -> None:
    connection.request("POST", PATH, json.dumps(body).encode(), {**HEADERS, **name})


def _reply(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    reply = connection.getresponse()
    if reply.status != http.HTTPStatus.OK:
        raise RuntimeError(f"vLLM answered {reply.status}: {reply.read().decode(errors='replace')}")
    return reply


def _events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    for line in reply:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)
