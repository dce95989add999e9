"""Checks of a registration and of reports: each field against its bound, and the worker against its peers. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from coordinator.workers.catalog import Model
from coordinator.workers.prefix_index.tier_reads import check_tier_reads
from coordinator.workers.snapshot import NO_ADAPTERS, PoolName, Worker, WorkerKey
from kv_transfer.layout import DTYPE_BYTES, MAX_NAME, QUANTIZATIONS, WIRE_DTYPES, KvLayout
from kv_transfer.transports.descriptors import MAX_METADATA_BYTES, MEMORY_KINDS
from splitserve.addresses import check_address
from splitserve.config.engine import ADAPTER_NAME, MAX_ADAPTERS
from splitserve.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    PermissionDeniedError,
    UnavailableError,
)
from splitserve.generation.kv_blocks import Adapter
from splitserve.host_facts import MAX_HOST_ID_LENGTH
from splitserve.security.tls import PeerIdentity
from splitserve.v1 import registry_pb2
from splitserve.v1.kv_transfer_pb2 import TransferEndpoint

REPLICA_CLASS = re.compile(r"[a-z0-9-]{0,32}\Z")
WORKER_ID = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
AGENT_ID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\Z")
FINGERPRINT = re.compile(r"[0-9a-f]{64}\Z")
TRANSPORTS = ("nixl", "ucx", "memory")
WHOLE_BLOCK_TRANSPORTS = ("ucx",)
"""Transports between workers of one block size."""
MAX_RANK_METADATA_BYTES = 2**14
MAX_LAYER_STRIDE = 2**48
MAX_WAITING_TOKENS, MAX_TOKENS_PER_S = 2**40, 1e9
MAX_MS = 1e9
"""Eleven days: the process may have been stopped for a weekend."""
MAX_LENT_SPEEDUP = 64.0
MAX_GB_PER_S = MAX_START_S = 1e6
MAX_NOTICE_NS = 86_400 * 10**9
MAX_REPLACED = 1024

POOLS: Mapping[PoolName, registry_pb2.Pool.ValueType] = {
    "prefill": registry_pb2.POOL_PREFILL,
    "decode": registry_pb2.POOL_DECODE,
}
_POOLS: dict[int, PoolName] = {number: name for name, number in POOLS.items()}


class ReplacedBoots:
    """The latest MAX_REPLACED boots whose ids others have taken. One that still runs would take its id back at once,
    and so on for ever: of two workers of one id, which only a mistake starts, the one that came last serves."""

    def __init__(self) -> None:
        self._keys: dict[WorkerKey, None] = {}

    def add(self, key: WorkerKey) -> None:
        """A boot was replaced."""
        self._keys[key] = self._keys.pop(key, None)  # the latest last
        while len(self._keys) > MAX_REPLACED:
            del self._keys[next(iter(self._keys))]

    def check_takes(self, worker: Worker, registered: Worker) -> None:
        """Checks that a worker may have the id of one that is registered. Raises UnavailableError (WORKER_ID_TAKEN) if
        that one has another certificate, FailedPreconditionError (WORKER_REPLACED) if it has replaced the worker."""
        name = worker.worker_id
        if registered.certificate != worker.certificate:
            # Retried: a renewed worker gets its id back once the registry has noticed that its earlier boot has ended.
            message = f"worker_id: {name!r} is registered with another certificate and still alive"
            raise UnavailableError(message, reason="WORKER_ID_TAKEN", field="worker_id")
        if worker.key in self._keys and registered.key != worker.key:
            self.add(worker.key)  # it still runs, so it is not to be forgotten
            message = f"worker_id: another worker has registered as {name!r} since, from {registered.address}"
            raise FailedPreconditionError(message, reason="WORKER_REPLACED", field="worker_id")


def checked_worker(
    request: registry_pb2.RegisterRequest, certificate: str = "", *, trade: bool = True
) -> Worker:
    """The worker of a registration; `trade` as for `Registry`. Raises InvalidArgumentError naming field and bound."""
    _matches("worker_id", request.worker_id, WORKER_ID, "1..64 characters of [A-Za-z0-9._-]")
    _require(request.epoch != 0, "epoch", "not 0")
    _require(request.pool in _POOLS, "pool", "POOL_PREFILL or POOL_DECODE")
    check_address(request.address, "address")
    model = checked_model(request.model, "model", request.endpoint.layout.block_size_tokens)
    _check_endpoint(request.endpoint)
    _between("max_step_tokens", request.max_step_tokens, 1, 2**20)
    _between("max_running_requests", request.max_running_requests, 1, 65536)
    _matches("replica_class", request.replica_class, REPLICA_CLASS, "0..32 characters of [a-z0-9-]")
    return Worker(
        worker_id=request.worker_id,
        epoch=request.epoch,
        pool=_POOLS[request.pool],
        address=request.address,
        model=model,
        agent_id=request.endpoint.agent_id,
        transport=request.endpoint.transport,
        host_id=request.endpoint.host_id,
        block_size_tokens=request.endpoint.layout.block_size_tokens,
        block_bytes=request.endpoint.block_bytes,
        max_running_requests=request.max_running_requests,
        max_step_tokens=request.max_step_tokens,
        joined=False,
        in_rotation=not request.standby,
        registered_standby=request.standby,
        experimental=request.experimental,
        neutral=request.neutral,
        registered_pool=_POOLS[request.pool],
        paces_prompts=request.paces_prompts,
        replica_class=request.replica_class,
        carries_calls=request.carries_calls,
        adapters=checked_adapters(request.model, "model"),
        start=_checked_start(request),
        sleeping=request.sleeping,
        gives_weights=request.gives_weights,
        certificate=certificate,
        trades_prefixes=trade and request.trades_prefixes and not request.neutral,
    )


def _checked_start(request: registry_pb2.RegisterRequest) -> registry_pb2.StartPhases | None:
    _matches("start.weights_from", request.start.weights_from, REPLICA_CLASS, "0..32 characters of [a-z0-9-]")
    for phase, seconds in request.start.ListFields():
        if phase.name != "weights_from":
            _between(f"start.{phase.name}", seconds, 0, MAX_START_S)
    return request.start if request.HasField("start") else None


def check_report(request: registry_pb2.ReportRequest) -> None:
    """Checks what routing, admission and the autoscaler calculate with: one NaN would be in all of their sums. Raises
    InvalidArgumentError naming field and bound."""
    load = request.load
    _between("load.waiting_tokens", load.waiting_tokens, 0, MAX_WAITING_TOKENS)
    _between("load.prefill_tokens_per_second", load.prefill_tokens_per_second, 0, MAX_TOKENS_PER_S)
    _between("load.decode_step_ms", load.decode_step_ms, 0, MAX_MS)
    if load.HasField("step_fit"):
        step = load.step_fit
        _between("load.step_fit.base_ms", step.base_ms, 0, MAX_MS)
        _between("load.step_fit.sequence_ms", step.sequence_ms, 0, MAX_MS)
        _between("load.step_fit.context_token_ms", step.context_token_ms, 0, MAX_MS)
    if load.HasField("prompt_fit"):
        prompt = load.prompt_fit
        _between("load.prompt_fit.base_ms", prompt.base_ms, 0, MAX_MS)
        _require(0 < prompt.token_ms <= MAX_MS, "load.prompt_fit.token_ms", f"above 0, at most {MAX_MS:g}")
        _between("load.prompt_fit.pair_ms", prompt.pair_ms, 0, MAX_MS)
        _between("load.prompt_fit.mixing_ms", prompt.mixing_ms, -prompt.base_ms, MAX_MS)
    check_tier_reads(load)
    _between("load.lent_speedup", load.lent_speedup or 1, 1, MAX_LENT_SPEEDUP)
    _between("load.decode_speedup", load.decode_speedup or 1, 1, MAX_LENT_SPEEDUP)
    if request.leaning:
        _require(request.leaning in _POOLS, "leaning", "POOL_PREFILL or POOL_DECODE")
    if request.HasField("preemption"):
        left, source = request.preemption.time_left, request.preemption.source
        _between("preemption.time_left", left.seconds * 10**9 + left.nanos, 0, MAX_NOTICE_NS)
        _between("preemption.source (characters)", len(source), 0, 32, field="preemption.source")
    _between("wake_seconds", request.wake_seconds, 0, MAX_START_S)
    for lane in request.lanes:
        _between("lanes.gb_per_second", lane.gb_per_second, 0, MAX_GB_PER_S)
        _between("lanes.latency_ms", lane.latency_ms, 0, MAX_MS)


def leaning_of(worker: Worker, request: registry_pb2.ReportRequest) -> PoolName:
    """The pool that a worker leans to by its report. Raises InvalidArgumentError for one that does not exist, and for
    another one than its own of a worker that is not neutral."""
    if not request.leaning:
        return worker.registered_pool or worker.pool
    _require(request.leaning in _POOLS, "leaning", "POOL_PREFILL or POOL_DECODE")
    leaning = _POOLS[request.leaning]
    if not worker.neutral and leaning != worker.pool:
        message = f"leaning: {worker.name} is not neutral, and cannot lean to {leaning}"
        raise InvalidArgumentError(message, field="leaning")
    return leaning


def check_identity(request: registry_pb2.RegisterRequest, identity: PeerIdentity) -> None:
    """Checks that the caller's certificate is one of this worker: of role `worker` for a neutral one, else of its pool.

    Takes a request that `checked_worker` has passed. Raises PermissionDeniedError.
    """
    role, field = ("worker", "neutral") if request.neutral else (_POOLS[request.pool], "pool")
    kind = "neutral" if request.neutral else role
    if role not in identity.roles:
        shown = ", ".join(sorted(identity.roles)) or "no role"
        message = f"{field}: a certificate of {shown} may not register a {kind} worker"
        raise PermissionDeniedError(message, reason="WRONG_ROLE", field=field)
    if not identity.may_be(role, request.worker_id):
        message = f"worker_id: the certificate is not one of {kind} worker {request.worker_id!r}"
        raise PermissionDeniedError(message, reason="WRONG_WORKER_ID", field="worker_id")


def check_beside(
    worker: Worker, own: TransferEndpoint, others: Iterable[tuple[Worker, TransferEndpoint]]
) -> None:
    """Checks a worker, with its endpoint, against those of other ids. Raises as `_check_names` and `_check_fits`."""
    for other, endpoint in others:
        if other.worker_id != worker.worker_id:
            _check_names(worker, other)
            if other.model.name == worker.model.name:
                _check_fits(worker, own, other, endpoint)


def _check_names(new: Worker, old: Worker) -> None:
    """Checks that a name stands for the same on two workers.

    Raises FailedPreconditionError: MODEL_MISMATCH for a name of two models, ADAPTER_MISMATCH for an adapter's name with
    other content.
    """
    if new.model.name != old.model.name:
        both = {new.model.name, *new.adapters} & {old.model.name, *old.adapters}
        reason, what = "MODEL_MISMATCH", "is a name of another model"
    else:
        both = {name for name, adapter in new.adapters.items() if old.adapters.get(name, adapter) != adapter}
        reason, what = "ADAPTER_MISMATCH", "is an adapter with other files"
    if both:
        message = f"model.adapters: {min(both)!r} {what} on {old.pool} worker {old.worker_id}"
        raise FailedPreconditionError(message, reason=reason, field="model.adapters")


def _check_fits(new: Worker, endpoint: TransferEndpoint, old: Worker, peer: TransferEndpoint) -> None:
    """Checks a worker against another that already serves the same model.

    Raises FailedPreconditionError: LAYOUT_MISMATCH, TRANSPORT_MISMATCH or MODEL_MISMATCH, naming the field.
    """
    who = f"{old.pool} worker {old.worker_id}"
    KvLayout.from_proto(endpoint.layout).require_fits(KvLayout.from_proto(peer.layout), who=who)
    if new.transport != old.transport:
        raise FailedPreconditionError(
            f"transport differs from {who}: {new.transport!r} here, {old.transport!r} there",
            reason="TRANSPORT_MISMATCH",
            field="transport",
        )
    if new.transport in WHOLE_BLOCK_TRANSPORTS and new.block_size_tokens != old.block_size_tokens:
        raise FailedPreconditionError(
            f"KV layout differs from {who} in block_size_tokens: {new.block_size_tokens} here, "
            f"{old.block_size_tokens} there; transport {new.transport} writes whole blocks only",
            reason="LAYOUT_MISMATCH",
            field="block_size_tokens",
        )
    if new.model.vocabulary_size != old.model.vocabulary_size:
        raise FailedPreconditionError(
            f"vocabulary_size differs from {who}: "
            f"{new.model.vocabulary_size} here, {old.model.vocabulary_size} there",
            reason="MODEL_MISMATCH",
            field="vocabulary_size",
        )


def checked_model(model: registry_pb2.ServedModel, at: str, *block_sizes: int) -> Model:
    """The base model in the field `at`. Raises InvalidArgumentError naming field and bound."""
    _between(f"{at}.name (characters)", len(model.name), 1, 128, field=f"{at}.name")
    _require(bool(model.tokenizer_source), f"{at}.tokenizer_source", "not empty")
    _between(f"{at}.context_tokens", model.context_tokens, 1, 2**24)
    _between(f"{at}.vocabulary_size", model.vocabulary_size, 1, 2**24)
    return Model(model.name, model.tokenizer_source, model.context_tokens, model.vocabulary_size, block_sizes)


def checked_adapters(model: registry_pb2.ServedModel, at: str) -> Mapping[str, Adapter]:
    """The adapters of the base model in the field `at`. Raises InvalidArgumentError naming field and bound."""
    _between(f"{at}.adapters (count)", len(model.adapters), 0, MAX_ADAPTERS)
    for adapter in model.adapters:
        _matches(f"{at}.adapters.name", adapter.name, ADAPTER_NAME, "1..128 characters of [A-Za-z0-9._-]")
        _matches(f"{at}.adapters.fingerprint", adapter.fingerprint, FINGERPRINT, "64 hex digits")
    found = {adapter.name: Adapter(adapter.name, adapter.fingerprint) for adapter in model.adapters}
    differ = len({model.name, *found}) == 1 + len(model.adapters)
    _require(differ, f"{at}.adapters.name", "another one each, and not the model's")
    return found or NO_ADAPTERS


def _check_endpoint(endpoint: TransferEndpoint) -> None:
    _matches("endpoint.agent_id", endpoint.agent_id, AGENT_ID, "a UUID of 36 characters")
    _require(endpoint.transport in TRANSPORTS, "endpoint.transport", f"one of {', '.join(TRANSPORTS)}")
    least = 0 if endpoint.transport == "memory" else 1
    _between("endpoint.metadata (bytes)", len(endpoint.metadata), least, MAX_METADATA_BYTES)
    if endpoint.ranks:
        _require(endpoint.base_address == 0, "endpoint.base_address", "0 with ranks")
        _require(endpoint.layer_stride == 0, "endpoint.layer_stride", "0 with ranks")
    else:
        _require(endpoint.base_address >= least, "endpoint.base_address", "not 0")
    _between("endpoint.num_blocks", endpoint.num_blocks, 1, 2**31 - 1)
    _between("endpoint.probe_blocks", endpoint.probe_blocks, 0, endpoint.num_blocks - 1)
    _between("endpoint.host_id (characters)", len(endpoint.host_id), 0, MAX_HOST_ID_LENGTH)
    _require(endpoint.memory_kind in MEMORY_KINDS, "endpoint.memory_kind", "DRAM or VRAM")
    layout = endpoint.layout
    _matches("endpoint.layout.model_fingerprint", layout.model_fingerprint, FINGERPRINT, "64 hex digits")
    _require(layout.dtype in DTYPE_BYTES, "endpoint.layout.dtype", f"one of {', '.join(DTYPE_BYTES)}")
    _between("endpoint.layout.block_size_tokens", layout.block_size_tokens, 1, 1024)
    _between("endpoint.layout.axis_order (characters)", len(layout.axis_order), 1, MAX_NAME)
    _between("endpoint.layout.tensor_parallel_size", layout.tensor_parallel_size, 1, 64)
    _between("endpoint.layout.num_layers", layout.num_layers, 1, 1024)
    _between("endpoint.layout.num_kv_heads", layout.num_kv_heads, 1, 1024)
    _between("endpoint.layout.head_dim", layout.head_dim, 1, 4096)
    _between("endpoint.layout.engine_version (characters)", len(layout.engine_version), 1, MAX_NAME)
    wire = "endpoint.layout.wire_dtype"
    _require(layout.wire_dtype in WIRE_DTYPES, wire, f"one of {', '.join(WIRE_DTYPES)}")
    quantization = "endpoint.layout.quantization"
    _require(layout.quantization in QUANTIZATIONS, quantization, f"one of {', '.join(QUANTIZATIONS)}")
    size = KvLayout.from_proto(layout).block_bytes
    _require(endpoint.block_bytes == size, "endpoint.block_bytes", f"{size}, the size that the layout gives")
    row = endpoint.num_blocks * (size // layout.num_layers)
    if endpoint.layer_stride:
        _require(
            endpoint.layer_stride >= row, "endpoint.layer_stride", f"0, or at least {row}, a layer's bytes"
        )
    _check_ranks(endpoint)


def _check_ranks(endpoint: TransferEndpoint) -> None:
    """Checks the parts of a pool that ranks hold. The size of their layout has been checked."""
    size = endpoint.layout.tensor_parallel_size
    heads = endpoint.layout.num_kv_heads
    _require(
        heads % size == 0 or size % heads == 0,
        "endpoint.layout.tensor_parallel_size",
        f"a divisor or a multiple of {heads}, the number of KV heads",
    )
    _require(
        len(endpoint.ranks) == (size if size > 1 else 0),
        "endpoint.ranks",
        f"one for each of the {size} ranks of tensor_parallel_size" if size > 1 else "empty with one rank",
    )
    layout = KvLayout.from_proto(endpoint.layout)
    row = endpoint.num_blocks * (layout.rank.block_bytes // layout.num_layers)
    least = 0 if endpoint.transport == "memory" else 1
    agent_ids = {endpoint.agent_id}
    for rank in endpoint.ranks:
        _matches("endpoint.ranks.agent_id", rank.agent_id, AGENT_ID, "a UUID of 36 characters")
        agent_ids.add(rank.agent_id)
        _between("endpoint.ranks.metadata (bytes)", len(rank.metadata), least, MAX_RANK_METADATA_BYTES)
        _require(rank.base_address >= 1, "endpoint.ranks.base_address", "not 0")
        _require(
            rank.layer_stride == 0 or row <= rank.layer_stride <= MAX_LAYER_STRIDE,
            "endpoint.ranks.layer_stride",
            f"0, or {row}..{MAX_LAYER_STRIDE}, at least a layer's bytes",
        )
    _require(len(agent_ids) == len(endpoint.ranks) + 1, "endpoint.ranks.agent_id", "each another one")


def _between(name: str, value: float, low: float, high: float, field: str | None = None) -> None:
    if not low <= value <= high:
        _require(False, name, f"{low}..{high}, not {value}", field)


def _matches(name: str, value: str, pattern: re.Pattern[str], bound: str) -> None:
    _require(pattern.match(value) is not None, name, bound)


def _require(condition: bool, name: str, bound: str, field: str | None = None) -> None:
    if not condition:
        raise InvalidArgumentError(f"{name} must be {bound}", field=field or name.split(" ")[0])
