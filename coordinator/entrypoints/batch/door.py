"""The way of a batch's request to the handlers of the HTTP API, in the lowest class of admission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic_core import from_json
from typing_extensions import override

from coordinator.admission.controller import CapacityAdmission
from coordinator.entrypoints.http.exchange import JSON_TYPE, ApiPath, Endpoint, Serve
from coordinator.entrypoints.inference_api import InferenceApi
from coordinator.request.inference_request import Authenticator, Caller
from coordinator.tenants.access_control import AccessControl
from splitserve.errors import SplitserveError

Verdict = Literal["answered", "refused", "broken"]
STARTING_S = 10.0
"""After a start, workers of some models may not have registered yet."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a handler has answered."""

    status: int
    body: bytes
    retry_after_s: float | None = None
    """The hint when to try again."""

    def verdict(self, uptime_s: float) -> Verdict:
        """Whether this is the request's result; or it was refused for load, or for want of workers, and is tried again
        while the batch has time; or something broke under it, and it is tried a few times."""
        if self.status == 429:
            return "answered" if self.retry_after_s is None else "refused"
        if self.status in (404, 503):
            code = from_json(self.body)["error"]["code"]
            if code == "model_not_found" and uptime_s < STARTING_S:
                return "refused"
            if self.status == 503:
                return "refused" if code in ("no_worker", "draining") else "broken"
        return "answered"


@dataclass(frozen=True, slots=True)
class _Known(Authenticator):
    """Has the caller already."""

    holder: Caller

    @override
    def caller(self, credential: str | None) -> Caller:
        return self.holder


class Door:
    """The handlers of this coordinator, by endpoint."""

    def __init__(
        self,
        api: InferenceApi,
        access: AccessControl,
        admission: CapacityAdmission,
        handlers: Mapping[str, Serve],
    ) -> None:
        self._api, self._access, self._admission, self._handlers = api, access, admission, handlers

    @property
    def uptime_s(self) -> float:
        """Seconds since the start of the coordinator."""
        return self._api.uptime_s

    def caller(self, tenant: str) -> tuple[Caller, int | None] | None:
        """The caller of a tenant's batches, and how many requests the tenant may have in progress; None: there is no
        such tenant now."""
        found = self._access.tenant(tenant)
        return None if found is None else (replace(found[0], priority_class="batch"), found[1])

    def is_crowded(self, model: str, caller: Caller) -> bool:
        """Whether requests of a higher class wait for this model."""
        try:
            found = self._api.routes.find(model, "", caller)
        except SplitserveError:
            return False  # the request fails, or waits, with this error
        counts = self._admission.counts().get(found.model.base_name) if found else None
        return counts is not None and counts.queued["interactive"] + counts.queued["standard"] > 0

    async def serve(self, endpoint: str, body: bytes, caller: Caller, request_id: str) -> Answer:
        """Serves one request. Cancelling this cancels the request."""
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", JSON_TYPE), (b"x-request-id", request_id.encode())]
        scope = {"type": "http", "method": "POST", "headers": headers}
        path = ApiPath(("POST",), endpoint, self._handlers[endpoint])
        await Endpoint(path, _Known(caller), self._api.limits)(scope, receive, send)
        start, *pieces = sent
        hint = dict(start["headers"]).get(b"retry-after-ms")
        whole = b"".join(piece["body"] for piece in pieces)
        return Answer(start["status"], whole, int(hint) / 1e3 if hint else None)
