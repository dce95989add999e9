"""A worker pinned to one pool that trades prefixes: the process of a neutral worker with the requests of one pool."""

from __future__ import annotations

from engine.worker.process import WorkerProcess
from neutral_worker.composed_role import DECODE, PREFILL, ComposedRole
from neutral_worker.neutral_connector import NeutralConnector
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError
from splitserve.security.tls import Role
from splitserve.v1 import registry_pb2

CERTIFICATES: dict[registry_pb2.Pool.ValueType, Role] = {PREFILL: "prefill", DECODE: "decode"}


class TradingRole(ComposedRole):
    """Serves the requests of one pool; gives prefixes of its cache and takes others."""

    trades_prefixes = True

    def __init__(self, worker: WorkerProcess[NeutralConnector], pool: registry_pb2.Pool.ValueType) -> None:
        super().__init__(worker, only=pool)
        self._pool = pool
        self.certificate = CERTIFICATES[pool]

    @property
    def pool(self) -> registry_pb2.Pool.ValueType:
        """See WorkerRole."""
        return self._pool


async def serve_prefill(config: WorkerConfig) -> None:
    """Runs a prefill worker that trades prefixes until SIGTERM or SIGINT. Raises ConfigError where one request at a
    time is allowed: a prefix on its way would hold all prompts up."""
    if config.engine.max_running_requests < 2:
        field = "engine.max_running_requests"
        raise ConfigError(f"{field}: a prefill worker that takes prefixes needs at least 2", field=field)
    await WorkerProcess(config, lambda worker: TradingRole(worker, PREFILL)).run()


async def serve_decode(config: WorkerConfig) -> None:
    """The same of a decode worker."""
    await WorkerProcess(config, lambda worker: TradingRole(worker, DECODE)).run()
