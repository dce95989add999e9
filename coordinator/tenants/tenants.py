"""The tenants in force: authenticates API keys, charges requests to their tenants, reloads the tenants file."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from coordinator.request.inference_request import Authenticator, Caller, InferenceRequest
from coordinator.tenants.policy_file import TenantPolicy, TenantsConfig, load_tenants, new_secret
from coordinator.tenants.usage import TenantUsage
from splitserve.errors import UnauthenticatedError
from splitserve.runtime.reload import ReloadedFiles
from splitserve.security.api_keys import HASH_PREFIX, MAX_KEY_CHARACTERS
from splitserve.v1 import inference_pb2


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

    @contextmanager
    def entered(self, request: inference_pb2.GenerateRequest, caller: Caller) -> Iterator[RequestQuota]:
        """Counts a request as in progress while the context is open, and charges it to its tenant. Call it before any
        work for the request. Never waits: raises ResourceExhaustedError with a retry hint for a tenant over quota."""
        usage, least = self.usage_of(caller), least_prompt_tokens(request)
        usage.enter(least, time.monotonic())
        try:
            yield RequestQuota(usage, least)
        finally:
            usage.leave()

    def named(self, name: str) -> tuple[Caller, int | None] | None:
        """The caller of a tenant in the file, and the most requests that it may have in progress; None: there is no
        such tenant."""
        return self._keys.by_tenant.get(name)

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
        self.by_tenant = {
            policy.name: (loaded.caller(policy), policy.max_concurrent_requests)
            for policy in loaded.file.tenants
        }
        """Each tenant's caller, and the most requests that it may have in progress."""
        self._callers = {
            self._blinded(bytes.fromhex(key_hash.removeprefix(HASH_PREFIX))): self.by_tenant[policy.name][0]
            for policy in loaded.file.tenants
            for key_hash in policy.key_hashes
        }

    def find(self, key: str) -> Caller | None:
        """The holder of this key, or None. Accepts any text."""
        if len(key) > MAX_KEY_CHARACTERS:
            return None
        return self._callers.get(self._blinded(hashlib.sha256(key.encode("utf-8", "replace")).digest()))

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._blind, digest, "sha256")


MOST_BYTES_PER_TOKEN = 32
"""Prompts average fewer bytes per token, so a prompt's size gives a lower bound of its tokens."""


def least_prompt_tokens(request: inference_pb2.GenerateRequest) -> int:
    """A lower bound of the prompt's tokens, before it is tokenized."""
    match request.WhichOneof("prompt"):
        case "token_ids":
            return len(request.token_ids.ids)
        case "text":
            return len(request.text) // MOST_BYTES_PER_TOKEN
        case "pair":
            return (len(request.pair.first) + len(request.pair.second)) // MOST_BYTES_PER_TOKEN
    return request.chat.ByteSize() // MOST_BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True)
class RequestQuota:
    """Charges one request to its tenant. `charged` tokens of its prompt were charged when it entered."""

    usage: TenantUsage
    charged: int

    def charge_prompt(self, request: InferenceRequest) -> None:
        """Charges the prompt, once it is tokenized. Raises ResourceExhaustedError with a retry hint."""
        now = time.monotonic()
        self.usage.charge_prompt(len(request.prompt), self.charged, now)
        self.usage.charge_resumed(len(request.resumed), now)

    def output_sent(self, tokens: int) -> None:
        """Charges output."""
        self.usage.sent(tokens, time.monotonic())

    def ended(self, error: BaseException | None) -> None:
        """Counts the end of a request whose prompt was charged."""
        self.usage.count("completed" if error is None else "failed")
