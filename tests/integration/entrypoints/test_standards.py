"""What RFC 9110 and RFC 9112 ask of the HTTP port, and gRPC's reflection of the gRPC port."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from coordinator.service import SERVICES
from splitserve.rpc.channel import make_channel
from tests.integration.entrypoints.test_openai_http import CHAT, HI, payloads, serving

GET, POST = b"GET /health HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\n"


def chat_head(version: bytes, body: bytes, more: bytes = b"") -> bytes:
    length = b"content-length: %d\r\n" % len(body)
    head = b"POST %b HTTP/%b\r\nhost: x\r\n" % (CHAT.encode(), version)
    return head + b"content-type: application/json\r\n" + length + more + b"\r\n" + body


def split(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a response."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, body


async def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_the_connection() -> None:
    async with serving() as http:
        body = json.dumps(HI | {"stream": True}).encode()
        answer = await http.raw(chat_head(b"1.0", body))
        status, headers, events = split(answer)
        assert status == 200
        assert "transfer-encoding" not in headers
        assert "content-length" not in headers
        assert headers["connection"] == "close"
        *chunks, last = payloads(events.decode())
        assert last == "[DONE]"
        assert all(json.loads(chunk)["object"] == "chat.completion.chunk" for chunk in chunks)
        chunked = await http.raw(chat_head(b"1.1", body, b"connection: close\r\n"))
        assert split(chunked)[1]["transfer-encoding"] == "chunked"


async def test_a_whole_answer_to_http_1_0_has_its_length() -> None:
    async with serving() as http:
        for request in (chat_head(b"1.0", json.dumps(HI).encode()), b"GET /v1/models HTTP/1.0\r\n\r\n"):
            status, headers, body = split(await http.raw(request))
            assert status == 200
            assert int(headers["content-length"]) == len(body)
            assert isinstance(json.loads(body), dict)
        status, _, body = split(await http.raw(chat_head(b"1.0", b"{}")))
        assert (status, json.loads(body)["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize(
    "request_bytes",
    [
        GET + b"\r\n",
        GET + b"host: a\r\nhost: b\r\n\r\n",
        GET + b"host: a\r\nHost: a\r\n\r\n",
        GET + b"host: a b\r\n\r\n",
        GET + b"host: user@a/b\r\n\r\n",
        b"GET /health HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
    ],
)
async def test_no_host_or_more_than_one_is_400(request_bytes: bytes) -> None:
    async with serving() as http:
        status, headers, body = split(await http.raw(request_bytes))
        assert status == 400
        assert headers["connection"] == "close"
        assert "date" in headers
        assert "Host" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("host", [b"h", b"h:8000", b"[::1]:80", b"", b"a.example.org"])
async def test_a_host_is_one(host: bytes) -> None:
    async with serving() as http:
        answer = await http.raw(GET + b"host: " + host + b"\r\nconnection: close\r\n\r\n")
        assert split(answer)[0] == 200
        assert split(await http.raw(b"GET /health HTTP/1.0\r\n\r\n"))[0] == 200
        absolute = b"GET http://h/health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"
        assert split(await http.raw(absolute))[0] == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        POST + b"host : h\r\n\r\n{}",
        POST + b"host: h\r\ncontent-length: +2\r\n\r\n{}",
        POST + b"host: h\r\ncontent-length: x\r\n\r\n",
        POST + b"host: h\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        POST + b"host: h\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        POST + b"host: h\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        POST + b"host: h\r\nx y: z\r\n\r\n{}",
        POST + b"host: h\r\nx: \x00\r\n\r\n{}",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_400(request_bytes: bytes) -> None:
    async with serving() as http:
        status, headers, body = split(await http.raw(request_bytes))
        assert (status, headers["connection"]) == (400, "close")
        assert json.loads(body)["error"]["code"] == "malformed_http"
        assert (await http.client.get("/health")).status_code == 200


async def test_a_method_that_a_path_does_not_take_names_those_it_does() -> None:
    async with serving() as http:
        for method, path, allowed in (("GET", CHAT, "POST"), ("POST", "/health", "GET, HEAD")):
            response = await http.client.request(method, path)
            assert (response.status_code, response.headers["allow"]) == (405, allowed)
        head = await http.client.head("/health")
        assert (head.status_code, head.content) == (200, b"")


async def test_401_says_how_to_authenticate(tmp_path: Any) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(f'tenants:\n  - name: a\n    key_hashes: ["sha256:{"ab" * 32}"]\n')
    async with serving(tenants=tenants) as http:
        calls = [
            http.client.post(CHAT, json=HI),
            http.client.post(CHAT, json=HI, headers={"authorization": "Bearer wrong"}),
            http.client.get("/v1/models"),
            http.client.get("/metrics"),
        ]
        for call in calls:
            response = await call
            assert response.status_code == 401
            assert re.fullmatch(r'Bearer realm="[^"]+"', response.headers["www-authenticate"])


def preflight(origin: str) -> dict[str, str]:
    wanted = "authorization, content-type, x-stainless-os"
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": wanted,
    }


@pytest.mark.parametrize(
    ("allowed", "origin", "shown"),
    [
        (["https://a.example", "https://b.example:8443"], "https://b.example:8443", "https://b.example:8443"),
        (["*"], "https://any.example", "*"),
        (["https://a.example"], "https://a.example.evil", None),
        (["https://a.example"], "null", None),
        ([], "https://a.example", None),
    ],
)
async def test_pages_of_allowed_origins_call_the_api(
    tmp_path: Any, allowed: list[str], origin: str, shown: str | None
) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(f'tenants:\n  - name: a\n    key_hashes: ["sha256:{"ab" * 32}"]\n')
    async with serving(tenants=tenants, allowed_origins=allowed) as http:
        asked = await http.client.options(CHAT, headers=preflight(origin))
        granted = {name: value for name, value in asked.headers.items() if name.startswith("access-control")}
        if shown is None:
            assert (asked.status_code, granted) == (403 if allowed else 405, {})
        else:
            assert asked.status_code == 200
            assert granted.pop("access-control-max-age").isdigit()
            assert granted == {
                "access-control-allow-origin": shown,
                "access-control-allow-methods": "POST",
                "access-control-allow-headers": preflight(origin)["access-control-request-headers"],
                "access-control-expose-headers": "*",
            }
        refused = await http.client.post(CHAT, json=HI, headers={"origin": origin})
        assert refused.status_code == 401
        for response in (refused, await http.client.get("/nothing", headers={"origin": origin})):
            assert response.headers.get("access-control-allow-origin") == shown
            assert ("Origin" in response.headers.get("vary", "")) == bool(allowed)
            assert "access-control-allow-credentials" not in response.headers
        for path in ("/", "/page/access", "/page/snapshot", "/page/static/main.js"):
            for response in (
                await http.client.get(path, headers={"origin": origin}),
                await http.client.options(path, headers=preflight(origin)),
            ):
                assert not [name for name in response.headers if name.startswith("access-control")]


async def test_bounds_of_histograms_are_written_as_openmetrics_has_it() -> None:
    async with serving() as http:
        await http.post(CHAT, HI)
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        response = await http.client.get("/metrics", headers=accept)
        assert response.headers["content-type"].startswith("application/openmetrics-text")
        bounds = set(re.findall(r'\ble="([^"]*)"', response.text))
        assert "+Inf" in bounds
        assert len(bounds) > 2
        assert all(bound == "+Inf" or bound == str(float(bound)) for bound in bounds)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_in_both_versions(version: str) -> None:
    async with serving() as http:
        from grpc_reflection.v1alpha import reflection_pb2 as pb

        async with make_channel(http.cluster.address) as channel:
            call = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=pb.ServerReflectionRequest.SerializeToString,
                response_deserializer=pb.ServerReflectionResponse.FromString,
            )(
                iter(
                    [
                        pb.ServerReflectionRequest(list_services=""),
                        pb.ServerReflectionRequest(file_containing_symbol=SERVICES[0]),
                        pb.ServerReflectionRequest(file_containing_symbol="nothing.Like.This"),
                    ]
                )
            )
            listed, found, missing = [response async for response in call]
        assert set(SERVICES) <= {service.name for service in listed.list_services_response.service}
        assert found.file_descriptor_response.file_descriptor_proto
        assert missing.error_response.error_code == 5
