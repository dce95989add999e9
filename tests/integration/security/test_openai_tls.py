"""The OpenAI face with TLS and with tenants: HTTPS, keys that count, pages for admins."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest
import yaml

from coordinator.service import running_coordinator
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.config.security import TlsConfig
from splitserve.security.api_keys import key_hash, new_key
from splitserve.security.certificates import write_certificates
from tests.support.cluster.fake_cluster import fake_cluster
from tests.support.engine.word_tokenizer import load_word_tokenizer
from tests.support.waiting import PATIENCE_S


async def test_https(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["localhost", "127.0.0.1"], 1)
    settings = CoordinatorConfig(
        grpc_port=0, cluster_port=0, http_port=0, tls=TlsConfig(directory=tmp_path), no_worker_wait_s=0
    )
    trust = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    async with running_coordinator(settings, load=load_word_tokenizer) as coordinator:
        base = f"https://localhost:{coordinator.http_port}"
        async with httpx.AsyncClient(base_url=base, verify=trust, timeout=PATIENCE_S) as client:
            assert (await client.get("/health")).json() == {"status": "ok"}
        async with httpx.AsyncClient(base_url=base, timeout=PATIENCE_S) as stranger:
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await stranger.get("/health")
        async with httpx.AsyncClient(base_url=base.replace("https", "http"), timeout=PATIENCE_S) as plain:
            with pytest.raises(httpx.HTTPError):
                await plain.get("/health")


ASK = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2}


async def test_tenants(tmp_path: Path) -> None:
    keys = {name: new_key() for name in ("shop", "operations", "elsewhere")}
    tenants = [
        {"name": name, "key_hashes": [key_hash(key)], "admin": name == "operations"}
        for name, key in keys.items()
    ]
    tenants[0] |= {"requests_per_second": 0.01, "burst_seconds": 200, "max_output_tokens": 3}
    tenants[2]["models"] = ["other-*"]
    file = tmp_path / "tenants.yaml"
    file.write_text(yaml.safe_dump({"tenants": tenants}))
    async with (
        fake_cluster(http_port=0, tenants=file) as cluster,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{cluster.coordinator.http_port}", timeout=PATIENCE_S
        ) as client,
    ):

        async def get(path: str, **headers: str) -> int:
            return (
                await client.get(path, headers={name.replace("_", "-"): v for name, v in headers.items()})
            ).status_code

        for path in ("/health", "/ready"):
            assert await get(path) == 200
        for path in ("/version", "/v1/models", "/metrics"):
            assert await get(path) == 401
            assert await get(path, authorization="Bearer nonsense") == 401
            assert await get(path, authorization=f"bearer {keys['operations']}") == 200
            assert await get(path, x_api_key=keys["operations"]) == 200
        assert await get("/metrics", x_api_key=keys["shop"]) == 403

        async def ask(key: str, **more: object) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await client.post("/v1/chat/completions", json=ASK | more, headers=headers)

        refused = (await ask("nonsense")).json()["error"]
        assert refused["code"] == "invalid_api_key"
        assert (await ask(keys["elsewhere"], model="words")).json()["error"]["code"] == "model_not_found"
        # Two requests of the burst: one that is refused for what it asks counts as well, for it is looked at.
        limit = (await ask(keys["shop"], max_tokens=9)).json()["error"]
        assert limit["param"] == "max_tokens"
        assert (await ask(keys["shop"])).status_code == 200
        again = await ask(keys["shop"])
        assert again.status_code == 429
        assert again.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(again.headers["retry-after"]) <= 100
        assert (await ask(keys["operations"])).status_code == 200
