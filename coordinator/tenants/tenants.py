"""The tenants as they are now: who holds a key, and what each has used. Follows its file while it runs."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from coordinator.caller import Caller
from coordinator.tenants.accounts import Account
from coordinator.tenants.key_ring import KeyRing
from coordinator.tenants.policy_file import TenantBook, TenantPolicy, load_tenants, new_secret
from splitserve.errors import ConfigError, UnauthenticatedError
from splitserve.logs import log_event

LOOK_EVERY_S = 1.0

Stamp = tuple[int, int, int]


class Tenants:
    """An Authenticator. A reload replaces all keys and limits between two requests; running ones go on.

    Raises ConfigError when the file is wrong at the start. Later a wrong file changes nothing.
    """

    def __init__(self, path: Path) -> None:
        self.unauthenticated = 0
        """Calls without a key that is known, since the start."""
        self._path = path
        self._fallback_secret = new_secret()
        self._accounts: dict[str, Account] = {}
        self._changed = asyncio.Event()
        self._stamp = _stamp(path)
        self._adopt(load_tenants(path, self._fallback_secret))

    @property
    def accounts(self) -> Mapping[str, Account]:
        """By name, only of tenants in the file."""
        return {policy.name: self._accounts[policy.name] for policy in self._policies}

    def caller(self, credential: str | None) -> Caller:
        """See Authenticator."""
        found = self._keys.find(credential) if credential is not None else None
        if found is not None:
            return found
        self.unauthenticated += 1
        if credential is None:
            message = "an API key is needed: `authorization: Bearer KEY`, or `x-api-key: KEY`"
            raise UnauthenticatedError(message, reason="NO_API_KEY")
        raise UnauthenticatedError("the API key is not known", reason="WRONG_API_KEY")

    def account(self, caller: Caller) -> Account:
        """What the caller's tenant has used. Callers that are no tenants have an account without limits."""
        account = self._accounts.get(caller.tenant)
        if account is None:
            account = Account(TenantPolicy(name=caller.tenant), time.monotonic())
        return account

    def reload(self) -> bool:
        """Reads the file again. A wrong one is told of in the log, and what was in force stays. True: adopted."""
        self._stamp = _stamp(self._path)
        try:
            book = load_tenants(self._path, self._fallback_secret)
        except ConfigError as error:
            log_event("tenants.rejected", level=logging.ERROR, field=error.field, error=error.message)
            return False
        self._adopt(book)
        log_event("tenants.reloaded", tenants=len(book.file.tenants))
        return True

    async def follow(self) -> None:
        """Reloads after SIGHUP, and when the file changes, until cancelled."""
        with self._on_hangup():
            while True:
                told = False
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        told = await self._changed.wait()
                self._changed.clear()
                if told or _stamp(self._path) != self._stamp:
                    self.reload()

    def _adopt(self, book: TenantBook) -> None:
        now = time.monotonic()
        for policy in book.file.tenants:
            if account := self._accounts.get(policy.name):
                account.adopt(policy, now)
            else:
                self._accounts[policy.name] = Account(policy, now)
        names = {policy.name for policy in book.file.tenants}
        for gone in self._accounts.keys() - names:
            del self._accounts[gone]
        self._policies = book.file.tenants
        self._keys = KeyRing(book)

    @contextmanager
    def _on_hangup(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        try:
            loop.add_signal_handler(signal.SIGHUP, self._changed.set)
        except (NotImplementedError, RuntimeError, ValueError):
            yield  # off the main thread: the file is looked at all the same
            return
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)


def _stamp(path: Path) -> Stamp | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
