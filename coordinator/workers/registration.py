"""Checks of registrations and reports: each field against its bound, and the worker against its peers. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from coordinator.workers.snapshot import NO_ADAPTERS, Model, Worker, WorkerKey
from kv_transfer.layout import DTYPE_BYTES, MAX_NAME, KvLayout
from kv_transfer.transports.regions import MEMORY_KINDS
from kv_transfer.transports.transport import MAX_METADATA_BYTES
from splitserve.addresses import check_address
from splitserve.config.engine import ADAPTER_NAME, MAX_ADAPTERS
from splitserve.errors import FailedPreconditionError, PermissionDeniedError, UnavailableError
from splitserve.generation.bounds import between, require
from splitserve.generation.kv_blocks import Adapter
from splitserve.host_facts import MAX_HOST_ID_LENGTH
from splitserve.roles import ROLE_NAMES
from splitserve.security.tls import PeerIdentity
from splitserve.v1 import generation_pb2, registry_pb2
from splitserve.v1.kv_transfer_pb2 import TransferEndpoint

WORKER_ID = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
AGENT_ID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\Z")
FINGERPRINT = re.compile(r"[0-9a-f]{64}\Z")
TRANSPORTS = ("nixl", "ucx")
MAX_WAITING_TOKENS = 2**40
MAX_MS = 1e9
"""Eleven days, since the process may have been stopped for a weekend."""
MAX_GB_PER_S = MAX_START_S = 1e6
MAX_NOTICE_NS = 86_400 * 10**9
MAX_REPLACED = 1024


class ReplacedBoots:
    """The latest MAX_REPLACED boots whose ids other boots have taken. If two workers have the same id by mistake, the
    later one serves: the earlier one may not take its id back, or both would replace each other for ever."""

    def __init__(self) -> None:
        self._keys: dict[WorkerKey, None] = {}

    def add(self, key: WorkerKey) -> None:
        """Adds a boot that was replaced, or moves it to the latest ones."""
        self._keys[key] = self._keys.pop(key, None)
        while len(self._keys) > MAX_REPLACED:
            del self._keys[next(iter(self._keys))]

    def check_takes(self, worker: Worker, registered: Worker) -> None:
        """Checks that a worker may take the id of a registered one. Raises UnavailableError (WORKER_ID_TAKEN) if the
        registered one has another certificate, FailedPreconditionError (WORKER_REPLACED) if it replaced the worker."""
        name = worker.worker_id
        if registered.certificate != worker.certificate:
            # The worker tries again: it gets the id once the registry has noticed that the earlier boot has ended.
            message = f"worker_id: {name!r} is registered with another certificate and still alive"
            raise UnavailableError(message, reason="WORKER_ID_TAKEN", field="worker_id")
        if worker.key in self._keys and registered.key != worker.key:
            self.add(worker.key)  # it still runs, so it is not to be forgotten
            message = f"worker_id: another worker has registered as {name!r} since, from {registered.address}"
            raise FailedPreconditionError(message, reason="WORKER_REPLACED", field="worker_id")


def checked_worker(request: registry_pb2.RegisterRequest, certificate: str = "") -> Worker:
    """The worker of a registration. Raises InvalidArgumentError naming field and bound."""
    _matches("worker_id", request.worker_id, WORKER_ID, "1..64 characters of [A-Za-z0-9._-]")
    require(request.epoch != 0, "epoch", "not 0")
    require(request.role in ROLE_NAMES, "role", "ROLE_PREFILL, ROLE_DECODE or ROLE_BOTH")
    check_address(request.address, "address")
    layout = request.endpoint.layout
    model = checked_model(request.model, "model")
    if model.pooling:
        is_both = request.role == registry_pb2.ROLE_BOTH and not request.changes_role
        require(is_both, "role", "ROLE_BOTH, without changes, for a pooling model")
    else:
        model = replace(model, block_size_tokens=layout.block_size_tokens)
    _check_endpoint(request.endpoint, has_kv=not model.pooling)
    between("max_step_tokens", request.max_step_tokens, 1, 2**20)
    between("max_running_requests", request.max_running_requests, 1, 65536)
    return Worker(
        worker_id=request.worker_id,
        epoch=request.epoch,
        role=ROLE_NAMES[request.role],
        changes_role=request.changes_role,
        address=request.address,
        model=model,
        agent_id=request.endpoint.agent_id,
        transport=request.endpoint.transport,
        host_id=request.endpoint.host_id,
        block_size_tokens=max(1, layout.block_size_tokens),
        block_bytes=request.endpoint.block_bytes,
        max_running_requests=request.max_running_requests,
        max_step_tokens=request.max_step_tokens,
        joined=False,
        in_rotation=not request.standby,
        registered_standby=request.standby,
        experimental=request.experimental,
        adapters=checked_adapters(request.model, "model"),
        start=_checked_start(request),
        certificate=certificate,
    )


def _checked_start(request: registry_pb2.RegisterRequest) -> registry_pb2.StartPhases | None:
    for phase, seconds in request.start.ListFields():
        between(f"start.{phase.name}", seconds, 0, MAX_START_S)
    return request.start if request.HasField("start") else None


def check_report(request: registry_pb2.ReportRequest) -> None:
    """Checks the numbers by which routing, admission and the autoscaler calculate: one NaN would spoil all their sums.
    Raises InvalidArgumentError naming field and bound."""
    load = request.load
    between("load.waiting_tokens", load.waiting_tokens, 0, MAX_WAITING_TOKENS)
    if load.latency.HasField("decode"):
        step = load.latency.decode
        between("load.latency.decode.base_ms", step.base_ms, 0, MAX_MS)
        between("load.latency.decode.sequence_ms", step.sequence_ms, 0, MAX_MS)
        between("load.latency.decode.context_token_ms", step.context_token_ms, 0, MAX_MS)
    if load.latency.HasField("prefill"):
        prompt, at = load.latency.prefill, "load.latency.prefill"
        between(f"{at}.base_ms", prompt.base_ms, 0, MAX_MS)
        require(0 < prompt.token_ms <= MAX_MS, f"{at}.token_ms", f"above 0, at most {MAX_MS:g}")
        between(f"{at}.pair_ms", prompt.pair_ms, 0, MAX_MS)
    if request.role:
        require(request.role in ROLE_NAMES, "role", "ROLE_PREFILL, ROLE_DECODE or ROLE_BOTH")
    if request.HasField("preemption"):
        left, source = request.preemption.time_left, request.preemption.source
        between("preemption.time_left", left.seconds * 10**9 + left.nanos, 0, MAX_NOTICE_NS)
        between("preemption.source (characters)", len(source), 0, 32)
    for lane in request.lanes:
        between("lanes.gb_per_second", lane.gb_per_second, 0, MAX_GB_PER_S)
        between("lanes.latency_ms", lane.latency_ms, 0, MAX_MS)


def check_identity(request: registry_pb2.RegisterRequest, identity: PeerIdentity) -> None:
    """Checks that the caller's certificate is a worker's, and names this worker if it names any.

    Call it after `checked_worker`. Raises PermissionDeniedError.
    """
    if "worker" not in identity.roles:
        shown = ", ".join(sorted(identity.roles)) or "no role"
        message = f"a certificate of {shown} may not register a worker"
        raise PermissionDeniedError(message, reason="WRONG_ROLE", field="worker_id")
    if not identity.may_be("worker", request.worker_id):
        message = f"worker_id: the certificate is not one of worker {request.worker_id!r}"
        raise PermissionDeniedError(message, reason="WRONG_WORKER_ID", field="worker_id")


def check_beside(
    worker: Worker, own: TransferEndpoint, others: Iterable[tuple[Worker, TransferEndpoint]]
) -> None:
    """Checks a worker, with its endpoint, against workers of other ids. Raises as `_check_names` and `_check_fits`."""
    fits = False
    for other, endpoint in others:
        if other.worker_id != worker.worker_id:
            _check_names(worker, other)
            if other.model.name == worker.model.name and not fits:
                _check_fits(worker, own, other, endpoint)
                fits = True  # those that serve the model fit each other: one of them stands for all


def _check_names(new: Worker, old: Worker) -> None:
    """Checks that no name means different things on two workers.

    Raises FailedPreconditionError: MODEL_MISMATCH if a name belongs to two models, ADAPTER_MISMATCH if two adapters of
    one name have different files.
    """
    if new.model.name != old.model.name:
        both = {new.model.name, *new.adapters} & {old.model.name, *old.adapters}
        reason, what = "MODEL_MISMATCH", "is a name of another model"
    else:
        both = {name for name, adapter in new.adapters.items() if old.adapters.get(name, adapter) != adapter}
        reason, what = "ADAPTER_MISMATCH", "is an adapter with other files"
    if both:
        message = f"model.adapters: {min(both)!r} {what} on {old.name}"
        raise FailedPreconditionError(message, reason=reason, field="model.adapters")


def _check_fits(new: Worker, endpoint: TransferEndpoint, old: Worker, peer: TransferEndpoint) -> None:
    """Checks a worker against another that already serves the same model.

    Raises FailedPreconditionError: LAYOUT_MISMATCH, TRANSPORT_MISMATCH or MODEL_MISMATCH, naming the field.
    """
    who = old.name
    if new.model.pooling != old.model.pooling:
        message = f"pooling differs from {who}"
        raise FailedPreconditionError(message, reason="MODEL_MISMATCH", field="model.pooling")
    KvLayout.from_proto(endpoint.layout).require_fits(KvLayout.from_proto(peer.layout), who=who)
    if new.transport != old.transport:
        raise FailedPreconditionError(
            f"transport differs from {who}: {new.transport!r} here, {old.transport!r} there",
            reason="TRANSPORT_MISMATCH",
            field="transport",
        )
    if new.model.vocabulary_size != old.model.vocabulary_size:
        raise FailedPreconditionError(
            f"vocabulary_size differs from {who}: "
            f"{new.model.vocabulary_size} here, {old.model.vocabulary_size} there",
            reason="MODEL_MISMATCH",
            field="vocabulary_size",
        )


def checked_model(model: registry_pb2.ServedModel, at: str) -> Model:
    """The base model in the field `at`. Raises InvalidArgumentError naming field and bound."""
    between(f"{at}.name (characters)", len(model.name), 1, 128)
    require(bool(model.tokenizer_source), f"{at}.tokenizer_source", "not empty")
    between(f"{at}.context_tokens", model.context_tokens, 1, 2**24)
    between(f"{at}.vocabulary_size", model.vocabulary_size, 1, 2**24)
    require(model.pooling in generation_pb2.Pooling.values(), f"{at}.pooling", "a Pooling")
    return Model(
        model.name,
        model.tokenizer_source,
        model.context_tokens,
        model.vocabulary_size,
        pooling=model.pooling,
    )


def checked_adapters(model: registry_pb2.ServedModel, at: str) -> Mapping[str, Adapter]:
    """The adapters of the base model in the field `at`. Raises InvalidArgumentError naming field and bound."""
    between(f"{at}.adapters (count)", len(model.adapters), 0, MAX_ADAPTERS)
    for adapter in model.adapters:
        _matches(f"{at}.adapters.name", adapter.name, ADAPTER_NAME, "1..128 characters of [A-Za-z0-9._-]")
        _matches(f"{at}.adapters.fingerprint", adapter.fingerprint, FINGERPRINT, "64 hex digits")
    adapters = {adapter.name: Adapter(adapter.name, adapter.fingerprint) for adapter in model.adapters}
    differ = len({model.name, *adapters}) == 1 + len(model.adapters)
    require(differ, f"{at}.adapters.name", "another one each, and not the model's")
    return adapters or NO_ADAPTERS


def _check_endpoint(endpoint: TransferEndpoint, *, has_kv: bool) -> None:
    _matches("endpoint.agent_id", endpoint.agent_id, AGENT_ID, "a UUID of 36 characters")
    between("endpoint.host_id (characters)", len(endpoint.host_id), 0, MAX_HOST_ID_LENGTH)
    layout = endpoint.layout
    _matches("endpoint.layout.model_fingerprint", layout.model_fingerprint, FINGERPRINT, "64 hex digits")
    require(layout.dtype in DTYPE_BYTES, "endpoint.layout.dtype", f"one of {', '.join(DTYPE_BYTES)}")
    between("endpoint.layout.engine_version (characters)", len(layout.engine_version), 1, MAX_NAME)
    if not has_kv:
        return
    require(endpoint.transport in TRANSPORTS, "endpoint.transport", f"one of {', '.join(TRANSPORTS)}")
    between("endpoint.metadata (bytes)", len(endpoint.metadata), 1, MAX_METADATA_BYTES)
    require(endpoint.base_address >= 1, "endpoint.base_address", "not 0")
    between("endpoint.num_blocks", endpoint.num_blocks, 1, 2**31 - 1)
    between("endpoint.probe_blocks", endpoint.probe_blocks, 0, endpoint.num_blocks - 1)
    require(endpoint.memory_kind in MEMORY_KINDS, "endpoint.memory_kind", "DRAM or VRAM")
    between("endpoint.layout.block_size_tokens", layout.block_size_tokens, 1, 1024)
    between("endpoint.layout.axis_order (characters)", len(layout.axis_order), 1, MAX_NAME)
    between("endpoint.layout.num_layers", layout.num_layers, 1, 1024)
    between("endpoint.layout.num_kv_heads", layout.num_kv_heads, 1, 1024)
    between("endpoint.layout.head_dim", layout.head_dim, 1, 4096)
    size = KvLayout.from_proto(layout).block_bytes
    require(endpoint.block_bytes == size, "endpoint.block_bytes", f"{size}, the size that the layout gives")


def _matches(name: str, value: str, pattern: re.Pattern[str], bound: str) -> None:
    require(pattern.match(value) is not None, name, bound)
