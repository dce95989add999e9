"""Who may see the page's data. The page itself is public: it holds nothing."""

from __future__ import annotations

import hmac
from typing import Literal
from urllib.parse import urlsplit

from coordinator.entrypoints.http.exchange import HttpExchange
from coordinator.request.caller import ANYONE, Caller
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from splitserve.rpc.credentials import is_loopback, read_token_file


class PageAccess:
    """With tenants an API key is asked for, else the secret of `page_token_file`. With neither, the data are open on
    loopback and closed on every other interface.

    Raises ConfigError for a secret that cannot be read, or one beside tenants.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        path = config.page_token_file
        if path is not None and config.tenants is not None:
            message = "page_token_file: with tenants the page takes an admin's API key; leave it out"
            raise ConfigError(message, field="page_token_file")
        self._has_tenants = config.tenants is not None
        self.asks_for: Literal["api_key", "token"] | None = None
        """What credential the page has to ask for; None: none."""
        self._token = read_token_file(path, "page_token_file") if path is not None else None
        self._is_local = is_loopback(config.host)
        if self._has_tenants:
            self.asks_for = "api_key"
        elif self._token is not None:
            self.asks_for = "token"

    def caller(self, exchange: HttpExchange) -> Caller:
        """Who asks. Raises UnauthenticatedError, or PermissionDeniedError (PAGE_CLOSED)."""
        if self._has_tenants:
            return exchange.caller()
        if self._token is not None:
            given = exchange.credential
            if given is None:
                raise UnauthenticatedError("the page needs its token", reason="NO_PAGE_TOKEN")
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                raise UnauthenticatedError("this is not the page's token", reason="WRONG_PAGE_TOKEN")
            return ANYONE
        if not self._is_local:
            message = (
                "this coordinator listens on more than loopback without a credential for its page: set "
                "page_token_file or tenants"
            )
            raise PermissionDeniedError(message, reason="PAGE_CLOSED")
        if not _names_this_machine(exchange.header(b"host") or ""):
            # A name that a stranger's web page had resolved to 127.0.0.1.
            message = "without a credential the page is served to localhost only, whatever name leads here"
            raise PermissionDeniedError(message, reason="PAGE_CLOSED")
        return ANYONE


def _names_this_machine(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and is_loopback(name)
