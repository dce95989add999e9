"""A tenant over its quota is refused before its prompt is tokenized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml

from splitserve.errors import ResourceExhaustedError, SplitserveError
from splitserve.rpc.status import error_from_rpc
from splitserve.security.api_keys import key_hash, new_key
from splitserve.v1 import inference_pb2
from tests.support.cluster.fake_cluster import FakeCluster, ask, collect, fake_cluster
from tests.support.engine.word_tokenizer import WordTokenizer
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S

KEY = new_key()
LONG = "w1 " * 2000

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that were tokenized."""
    lengths: list[int] = []
    real = WordTokenizer.encode

    def witness(self: WordTokenizer, text: str, *arguments: Any, **named: Any) -> list[int]:
        lengths.append(len(text))
        return real(self, text, *arguments, **named)

    monkeypatch.setattr(WordTokenizer, "encode", witness)
    return lengths


def tenants_file(folder: Path, **limits: float) -> Path:
    path = folder / "tenants.yaml"
    path.write_text(yaml.safe_dump({"tenants": [{"name": "a", "key_hashes": [key_hash(KEY)], **limits}]}))
    return path


async def ending(cluster: FakeCluster, request: inference_pb2.GenerateRequest) -> SplitserveError | None:
    metadata = (("x-api-key", KEY),)
    try:
        await collect(cluster.client.Generate(request, timeout=PATIENCE_S, metadata=metadata))
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    return None


@pytest.mark.parametrize(
    ("limits", "reason", "field"),
    [
        ({"requests_per_second": 0.001, "burst_seconds": 1}, "TENANT_QUOTA", "requests_per_second"),
        ({"prompt_tokens_per_second": 0.1, "burst_seconds": 1}, "TENANT_QUOTA", "prompt_tokens_per_second"),
    ],
)
async def test_rates(
    tmp_path: Path, tokenized: list[int], limits: dict[str, float], reason: str, field: str
) -> None:
    async with fake_cluster(tenants=tenants_file(tmp_path, **limits)) as cluster:
        assert await ending(cluster, ask(text="w1 w2")) is None
        tokenized.clear()
        pair = inference_pb2.TextPair(first=LONG, second=LONG)
        for request in (*(ask(text=LONG) for _ in range(5)), inference_pb2.GenerateRequest(pair=pair)):
            error = await ending(cluster, request)
            assert isinstance(error, ResourceExhaustedError)
            assert (error.reason, error.field) == (reason, field)
        assert tokenized == []


async def test_concurrency(tmp_path: Path, tokenized: list[int]) -> None:
    async with fake_cluster(tenants=tenants_file(tmp_path, max_concurrent_requests=1)) as cluster:
        cluster.prefills[0].first_token_gate.close()
        call = cluster.client.Generate(ask(), timeout=PATIENCE_S, metadata=(("x-api-key", KEY),))
        await settled(lambda: bool(cluster.prefills[0].calls.entries))
        tokenized.clear()
        error = await ending(cluster, ask(text=LONG))
        assert isinstance(error, ResourceExhaustedError)
        assert error.reason == "TENANT_CONCURRENCY"
        assert error.retry_after_s
        assert tokenized == []
        cluster.prefills[0].first_token_gate.open()
        await collect(call)
        assert await ending(cluster, ask(text="w1")) is None


async def test_what_generates_nothing_counts_as_a_request(tmp_path: Path) -> None:
    three = tenants_file(
        tmp_path, requests_per_second=0.003, prompt_tokens_per_second=0.1, burst_seconds=1000
    )
    bodies: dict[str, Any] = {
        "/tokenize": {"prompt": LONG},
        "/detokenize": {"tokens": [1]},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LONG}]},
    }
    async with fake_cluster(tenants=three, http_port=0) as cluster:
        base = f"http://127.0.0.1:{cluster.coordinator.http_port}"
        async with httpx.AsyncClient(base_url=base, headers={"x-api-key": KEY}, timeout=PATIENCE_S) as http:
            for status in (200, 429):
                for path, body in bodies.items():
                    response = await http.post(path, json=body)
                    assert response.status_code == status, response.text


async def test_a_prompt_that_turns_out_too_long_is_charged_what_its_size_tells(
    tmp_path: Path, tokenized: list[int]
) -> None:
    limits = {"prompt_tokens_per_second": 0.001, "burst_seconds": 86_400}
    async with fake_cluster(tenants=tenants_file(tmp_path, **limits)) as cluster:
        codes = [str((await ending(cluster, ask(text=LONG))).reason) for _ in range(2)]  # type: ignore[union-attr]
        assert codes == ["PROMPT_TOO_LONG", "TENANT_QUOTA"]
        assert len(tokenized) == 1
