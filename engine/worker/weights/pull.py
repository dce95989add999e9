"""How a worker that starts gets its weights from one that runs: whom it asks, in which order, and the call."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from kv_transfer.transports.factory import make_transport
from kv_transfer.transports.transport import TransferEndpoint
from kv_transfer.weights.manifest import PULL_S, Manifest, TensorSpec, WeightsForm
from kv_transfer.weights.taker import Destination, WeightsTaker
from splitserve.config.worker import WorkerConfig
from splitserve.errors import DeadlineExceededError, NotFoundError, SplitserveError, UnavailableError
from splitserve.logs import log_event
from splitserve.models.sources import resolve_model
from splitserve.rpc.credentials import ClusterCredentials
from splitserve.rpc.status import error_from_rpc
from splitserve.security.tls import Role
from splitserve.v1 import registry_pb2, weights_pb2
from splitserve.v1.registry_pb2_grpc import RegistryServiceStub
from splitserve.v1.weights_pb2_grpc import WeightsServiceStub

if TYPE_CHECKING:
    Ask = Callable[[], Sequence[registry_pb2.WeightsHolder]]
    PullFrom = Callable[
        [
            registry_pb2.WeightsHolder,
            Sequence[TensorSpec],
            Callable[[TensorSpec], Destination],
            WeightsForm,
            float,
        ],
        Manifest,
    ]

FIND_S = 5.0
"""How long a coordinator may take to name holders."""
OPEN_S = 20.0
"""How long a giver may take to say what it gives."""
FINISH_S = 20.0
"""How long a giver may take to close its transport."""
BUSY_S = 60.0
"""How long a worker waits while all holders give their weights to others."""
RETRY_S = 1.0
BUSY = "WEIGHTS_BUSY"
POOL_ROLES: dict[int, Role] = {registry_pb2.POOL_PREFILL: "prefill", registry_pb2.POOL_DECODE: "decode"}


class PeerWeights:
    """A `WeightsSource`: the first holder that gives them all. Used on the engine's thread, which it blocks."""

    def __init__(
        self,
        ask: Ask,
        pull: PullFrom,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._ask, self._pull, self._clock, self._wait = ask, pull, clock, wait

    def fetch(
        self, specs: Sequence[TensorSpec], allocate: Callable[[TensorSpec], Destination], form: WeightsForm
    ) -> Manifest:
        """See `WeightsSource`. Each holder is tried once, and again only while all of them are busy with others. All of
        it takes PULL_S at most."""
        asked_s = self._clock()
        while True:
            errors: list[SplitserveError] = []
            for holder in self._ask():
                began_s = self._clock()
                try:
                    manifest = self._pull(holder, specs, allocate, form, asked_s + PULL_S - began_s)
                except SplitserveError as error:
                    log_event(
                        "weights.pull_failed", peer=holder.worker_id, reason=error.reason, why=error.message
                    )
                    errors.append(error)
                    continue
                total, took_s = sum(spec.num_bytes for spec in specs), round(self._clock() - began_s, 3)
                log_event("weights.pulled", peer=holder.worker_id, bytes=total, took_s=took_s)
                return manifest
            if not errors:
                raise NotFoundError("no worker gives weights now", reason="NO_WEIGHTS")
            if any(error.reason != BUSY for error in errors) or self._clock() > asked_s + BUSY_S:
                raise errors[-1]
            self._wait(RETRY_S)


class GrpcPull:
    """A `PullCall` over gRPC that ends after `limit_s` seconds. Close it in any case."""

    def __init__(self, channel: grpc.Channel, metadata: Any, limit_s: float) -> None:
        self._requests: queue.SimpleQueue[weights_pb2.PullWeightsRequest | None] = queue.SimpleQueue()
        stub: Any = WeightsServiceStub(channel)
        self._call: Any = stub.PullWeights(iter(self._requests.get, None), timeout=limit_s, metadata=metadata)

    def open(self, window: TransferEndpoint) -> Manifest:
        """See `PullCall`."""
        self._requests.put(weights_pb2.PullWeightsRequest(window=window.to_proto()))
        with self._at_most(OPEN_S), _errors():
            response = next(self._call, None)
        if response is None:
            raise UnavailableError("the giver has ended before it gave anything", reason="NO_WEIGHTS")
        return Manifest.from_proto(response.manifest)

    @contextmanager
    def _at_most(self, seconds: float) -> Iterator[None]:
        """Cancels the call once they have passed: waiting for a message has no limit of its own."""
        passed = threading.Event()

        def end() -> None:
            passed.set()
            self._call.cancel()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except SplitserveError:
            if not passed.is_set():
                raise
            message = f"the giver has not said what it gives for {seconds:g} s"
            raise DeadlineExceededError(message, reason="WEIGHTS_STALLED") from None
        finally:
            timer.cancel()

    def grant(self, blocks: Sequence[int]) -> None:
        """See `PullCall`."""
        self._requests.put(weights_pb2.PullWeightsRequest(blocks=blocks))

    def check(self) -> None:
        """See `PullCall`."""
        if self._call.is_active():
            return
        if self._call.code() is grpc.StatusCode.OK:
            raise UnavailableError("the giver has ended before all weights were here")
        raise error_from_rpc(self._call)

    def finish(self) -> None:
        """See `PullCall`."""
        self._requests.put(None)
        with _errors():
            try:
                self._call.result(FINISH_S)
            except grpc.FutureTimeoutError:
                message = f"the giver has not ended for {FINISH_S:g} s after its last piece"
                raise UnavailableError(message, reason="WEIGHTS_STALLED") from None

    def close(self) -> None:
        """Cancels what is left of the call."""
        self._call.cancel()
        self._requests.put(None)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_rpc(error) from None  # type: ignore[arg-type]


def weights_peer(config: WorkerConfig, security: ClusterCredentials) -> PeerWeights | None:
    """The peers that the settings ask for weights, over the worker's coordinators; None: only files are asked.
    Raises as `resolve_model`."""
    if config.weights_from == "disk" or config.engine.kind != "torch":
        return None
    source = resolve_model(config.model)
    if config.weights_from == "auto" and source.has_weights:
        return None

    def ask() -> Sequence[registry_pb2.WeightsHolder]:
        name = config.served_model_name or source.short_name
        request = registry_pb2.FindWeightsRequest(model=name, worker_id=config.worker_id)
        failed: SplitserveError | None = None
        for coordinator in config.coordinators:
            with security.blocking_channel(coordinator, "coordinator") as channel:
                stub: Any = RegistryServiceStub(channel)
                try:
                    with _errors():
                        found = stub.FindWeights(request, timeout=FIND_S, metadata=security.metadata)
                except SplitserveError as error:
                    failed = error
                    continue
            return list(found.holders)
        raise failed or NotFoundError("no coordinator is set", reason="NO_WEIGHTS")

    def pull(
        holder: registry_pb2.WeightsHolder,
        specs: Sequence[TensorSpec],
        allocate: Callable[[TensorSpec], Destination],
        form: WeightsForm,
        limit_s: float,
    ) -> Manifest:
        role: Role = "worker" if holder.neutral else POOL_ROLES.get(holder.pool, "worker")
        with (
            security.blocking_channel(holder.address, role) as channel,
            closing(GrpcPull(channel, security.metadata, limit_s)) as call,
        ):
            return WeightsTaker(call, lambda: make_transport(config.transport)).take(specs, allocate, form)

    return PeerWeights(ask, pull)
