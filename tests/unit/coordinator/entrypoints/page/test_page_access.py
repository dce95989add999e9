"""Who sees the page's data: holders of the credential where there is one, else this machine alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.entrypoints.http.exchange import HttpExchange
from coordinator.entrypoints.inference_api import InputLimits
from coordinator.entrypoints.page.endpoints import PageAccess
from coordinator.request.inference_request import AnonymousAuthenticator
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import ConfigError, PermissionDeniedError, UnauthenticatedError

TOKEN = "a-token-of-more-than-16-characters"


def exchange(host: str = "127.0.0.1:8000", authorization: str | None = None) -> HttpExchange:
    headers = [(b"host", host.encode())]
    if authorization is not None:
        headers.append((b"authorization", authorization.encode()))
    limits = InputLimits(dict, 2**20)
    unused: Any = None
    return HttpExchange(AnonymousAuthenticator(), limits, {"headers": headers}, unused, unused)


def test_on_loopback_it_is_open_to_this_machines_names() -> None:
    access = PageAccess(CoordinatorConfig())
    assert access.asks_for is None
    for name in ("127.0.0.1:8000", "localhost", "localhost:8000", "[::1]:8000", "127.0.0.2"):
        assert access.caller(exchange(name)).is_admin
    for name in ("evil.example", "evil.example:8000", "", "[", "localhost.evil.example", "10.0.0.1"):
        with pytest.raises(PermissionDeniedError) as caught:
            access.caller(exchange(name))
        assert caught.value.reason == "PAGE_CLOSED"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "front.example"])
def test_beyond_loopback_without_a_credential_it_is_closed(host: str) -> None:
    access = PageAccess(CoordinatorConfig(host=host))
    with pytest.raises(PermissionDeniedError, match="page_token_file") as caught:
        access.caller(exchange("localhost"))
    assert caught.value.reason == "PAGE_CLOSED"


def test_the_token_opens_it_under_every_name(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    access = PageAccess(CoordinatorConfig(host="0.0.0.0", page_token_file=path))
    assert access.asks_for == "token"
    assert access.caller(exchange("front.example", f"Bearer {TOKEN}")).is_admin
    for given, reason in (
        (None, "NO_PAGE_TOKEN"),
        ("Bearer wrong", "WRONG_PAGE_TOKEN"),
        (f"Bearer {TOKEN}x", "WRONG_PAGE_TOKEN"),
        ("Bearer \u00e9", "WRONG_PAGE_TOKEN"),
        ("Bearer ", "WRONG_PAGE_TOKEN"),
    ):
        with pytest.raises(UnauthenticatedError) as caught:
            access.caller(exchange("front.example", given))
        assert caught.value.reason == reason


def test_wrong_settings_name_the_field(tmp_path: Path) -> None:
    short, tenants = tmp_path / "short", tmp_path / "tenants.yaml"
    short.write_text("short")
    for config in (
        CoordinatorConfig(page_token_file=short),
        CoordinatorConfig(page_token_file=tmp_path / "missing"),
        CoordinatorConfig(page_token_file=short, tenants=tenants),
    ):
        with pytest.raises(ConfigError) as caught:
            PageAccess(config)
        assert caught.value.field == "page_token_file"
        assert "short'" not in caught.value.message
