"""How large a client's request may be: what the longest context among the models can use."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coordinator.workers.catalog import Model

LEAST_BYTES = 2 * 2**20
"""Always allowed: room for schemas, tools and a batch of short prompts."""
BYTES_PER_TOKEN = 16
"""A token of a real prompt takes up to 9 bytes in JSON, where a Chinese character may be written as six."""
OPERATOR_BYTES = 2**20
"""Requests of services that clients do not use for generations."""
CLIENT_SERVICES = ("splitserve.v1.InferenceService", "inference.GRPCInferenceService")
OPERATOR_SERVICES = ("splitserve.v1.RoutesService", "splitserve.v1.ScalingService")


class InputLimits:
    """The limits in force; they grow with the contexts of the models that have registered."""

    def __init__(self, known_models: Callable[[], Mapping[str, Model]], max_message_bytes: int) -> None:
        self._known_models = known_models
        self._max_message_bytes = max_message_bytes

    @property
    def context_tokens(self) -> int:
        """The longest context of a known model; 0: there is none."""
        return max((model.context_tokens for model in self._known_models().values()), default=0)

    @property
    def request_bytes(self) -> int:
        """The most bytes of a client's request, on any entrypoint."""
        return min(self._max_message_bytes, max(LEAST_BYTES, BYTES_PER_TOKEN * self.context_tokens))

    def limit_of(self, method: str) -> int | None:
        """The most bytes of a gRPC method's request, by its full name "/package.Service/Method"."""
        service = method.split("/")[1]
        if service in CLIENT_SERVICES:
            return self.request_bytes
        return OPERATOR_BYTES if service in OPERATOR_SERVICES else None
