"""The tenants in force: authenticates API keys, keeps each tenant's usage, reloads the tenants file."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from coordinator.request.inference_request import Authenticator, Caller
from coordinator.tenants.policy_file import TenantPolicy, TenantsConfig, load_tenants, new_secret
from coordinator.tenants.usage import TenantUsage
from splitserve.errors import UnauthenticatedError
from splitserve.runtime.reload import ReloadedFiles
from splitserve.security.api_keys import HASH_PREFIX, MAX_KEY_CHARACTERS


class Tenants(Authenticator):
    """Callers and usage according to the tenants file. A reload replaces all keys and limits at once; running requests
    continue.

    Raises ConfigError if the file is invalid at the start. Later, an invalid file changes nothing.
    """

    def __init__(self, path: Path) -> None:
        self.unauthenticated = 0
        """Calls without a known key since the start."""
        self._usages: dict[str, TenantUsage] = {}
        self._paths = [path]
        self._fallback_secret = new_secret()
        self.file = ReloadedFiles("tenants", lambda: self._paths, self._load, self._adopt)
        """The tenants file with its secret, for a `FileWatcher`."""
        self.file.start()

    @property
    def usages(self) -> Mapping[str, TenantUsage]:
        """Usage by tenant name, for tenants in the file only."""
        return {policy.name: self._usages[policy.name] for policy in self._policies}

    @override
    def caller(self, credential: str | None) -> Caller:
        holder = self._keys.find(credential) if credential is not None else None
        if holder is not None:
            return holder
        self.unauthenticated += 1
        if credential is None:
            message = "an API key is needed: `authorization: Bearer KEY`, or `x-api-key: KEY`"
            raise UnauthenticatedError(message, reason="NO_API_KEY")
        raise UnauthenticatedError("the API key is not known", reason="WRONG_API_KEY")

    def usage_of(self, caller: Caller) -> TenantUsage:
        """The usage of the caller's tenant. A caller without a tenant gets a new usage without limits."""
        usage = self._usages.get(caller.tenant)
        if usage is None:
            usage = TenantUsage(TenantPolicy(name=caller.tenant), time.monotonic())
        return usage

    def __contains__(self, name: str) -> bool:
        """Whether the file has a tenant of this name."""
        return name in self._usages

    def _load(self) -> tuple[TenantsConfig, KeyRing]:
        loaded = load_tenants(self._paths[0], self._fallback_secret)
        return loaded, KeyRing(loaded)

    def _adopt(self, content: tuple[TenantsConfig, KeyRing]) -> None:
        now, (loaded, keys) = time.monotonic(), content
        for policy in loaded.file.tenants:
            if usage := self._usages.get(policy.name):
                usage.adopt(policy, now)
            else:
                self._usages[policy.name] = TenantUsage(policy, now)
        names = {policy.name for policy in loaded.file.tenants}
        for name in self._usages.keys() - names:
            del self._usages[name]
        self._policies = loaded.file.tenants
        self._keys = keys
        self._paths = [self._paths[0], *([loaded.secret_path] if loaded.secret_path else [])]


class KeyRing:
    """Callers by the hashes of their keys. Immutable.

    Hashes are looked up by a second hash, keyed with random bytes. So the time of a look-up reveals nothing about
    partial matches, and does not depend on the number of tenants.
    """

    def __init__(self, loaded: TenantsConfig) -> None:
        self._blind = secrets.token_bytes(32)
        self._callers = {
            self._blinded(bytes.fromhex(key_hash.removeprefix(HASH_PREFIX))): caller
            for policy in loaded.file.tenants
            for caller in [loaded.caller(policy)]
            for key_hash in policy.key_hashes
        }

    def find(self, key: str) -> Caller | None:
        """The holder of this key, or None. Accepts any text."""
        if len(key) > MAX_KEY_CHARACTERS:
            return None
        return self._callers.get(self._blinded(hashlib.sha256(key.encode("utf-8", "replace")).digest()))

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._blind, digest, "sha256")
