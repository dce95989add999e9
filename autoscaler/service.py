"""The autoscaler service: wires policy, observer, actuator and control loop together and runs them."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from autoscaler.actuators.actuator import Actuator
from autoscaler.control_loop import ControlLoop
from autoscaler.decisions import DECISIONS_PATH
from autoscaler.lease import Lease
from autoscaler.loop_metrics import loop_metrics
from autoscaler.policy_in_force import PolicyFile, PolicyInForce
from autoscaler.reconcile import PlannedRotation
from autoscaler.signals.demand_watch import DemandWatch
from autoscaler.signals.observer import Observer
from splitserve.client.scaling_client import MAX_LEASE_S, ScalingClient
from splitserve.config.autoscaler import AutoscalerConfig
from splitserve.errors import ConfigError, FailedPreconditionError, SplitserveError, UnavailableError
from splitserve.logs import log_event
from splitserve.metrics import reload_metrics, serving_metrics
from splitserve.rpc.credentials import UNSECURED, ClusterCredentials, cluster_credentials
from splitserve.runtime.cancellation import run_beside
from splitserve.runtime.loops import LoopRunner
from splitserve.runtime.process import END_S, stop_signal
from splitserve.runtime.reload import FileWatcher
from splitserve.security.api_keys import read_key
from splitserve.v1 import registry_pb2, scaling_pb2

T = TypeVar("T")
LEASE_INTERVALS = 3
"""A lease lasts at least this many intervals, so that its holder renews it in time."""


@asynccontextmanager
async def control_loop(
    policy: PolicyFile,
    coordinators: Sequence[str],
    actuator: Actuator | None,
    *,
    window_s: float = 60.0,
    model: str = "",
    dry_run: bool = False,
    lease_s: float | None = None,
    security: ClusterCredentials = UNSECURED,
    api_key: str | None = None,
) -> AsyncIterator[ControlLoop]:
    """A connected control loop; the caller runs it and closes the actuator. With `lease_s` it acts only
    while it holds the coordinators' lease, which it gives up at the end."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(ScalingClient(target, security=security, api_key=api_key))
            for target in coordinators
        ]
        listing: dict[str, Any] = {} if actuator is None else {"replicas": actuator.replicas}
        if actuator is not None and actuator.proves_end and not dry_run:
            listing["on_ended"] = partial(report_ended, clients)
        observer = Observer(clients, **listing, model=model, window_s=window_s)
        in_force = PolicyInForce(policy, observer)
        observer.keep_history(in_force.history_s)
        first = in_force.first()
        lease = None
        if lease_s is not None and actuator is not None and not dry_run:
            holder = f"{socket.gethostname()[:60]}/{uuid.uuid4()}"  # unique to this run of the autoscaler
            valid_s = min(MAX_LEASE_S, max(lease_s, LEASE_INTERVALS * first.policy.interval_s))
            lease = Lease(clients, holder, model, valid_s)
            stack.push_async_callback(lease.release)
        loop = ControlLoop(
            observe=observer.observe,
            decide=first.decide,
            rotation=CoordinatorRotation(clients, lease, partial(_on_demand, policy, observer)),
            actuator=actuator,
            policy=first.policy,
            dry_run=dry_run,
            lease=lease,
            changed_policy=in_force.poll,
            pause=DemandWatch(clients, model).pause,
        )
        yield loop


def _on_demand(policy: PolicyFile, observer: Observer) -> Sequence[registry_pb2.ServedModel]:
    """The models whose workers are started when requests wait for them."""
    return tuple(observer.served.values()) if policy.value.rules.may_be_at_zero else ()


async def serve(config: AutoscalerConfig) -> None:
    """Runs the autoscaler until SIGTERM or SIGINT. Replicas stay as they are.

    Raises ConfigError for a wrong policy file or actuator, FailedPreconditionError for a taken metrics port.
    """
    policy = PolicyFile(config.policy)
    security = cluster_credentials("autoscaler", config.tls, config.cluster_token_file)
    watcher = FileWatcher(policy.files, security.server_tls.file if security.server_tls else None)
    stop = stop_signal(END_S)
    async with AsyncExitStack() as stack:
        stack.callback(log_event, "autoscaler.stopped")
        actuator = make_actuator(config)
        running = control_loop(
            policy,
            config.coordinators,
            actuator,
            window_s=config.window_s,
            model=config.model,
            dry_run=config.dry_run,
            lease_s=config.lease_s,
            security=security,
            api_key=read_key(config.api_key_file),
        )
        loop = await stack.enter_async_context(closed_first(actuator, running))
        loops = LoopRunner()
        with serving_metrics(
            lambda: [*loop_metrics(loop.status), loops.metric(), *reload_metrics(watcher.files)],
            config.host,
            config.metrics_port,
            security.server_tls,
            {DECISIONS_PATH: loop.journal.document},
            security.token,
        ):
            log_event("autoscaler.ready", actuator=config.actuator)
            scaling, files = loops.run("scaling", loop.run), loops.run("files", watcher.follow)
            await run_beside(stop.wait(), [("scaling", scaling), ("files", files)])


@asynccontextmanager
async def closed_first(actuator: Actuator | None, loop: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
    """`loop`, which ends only after the actuator is closed. So an order under way is over before the lease ends:
    another autoscaler that takes the lease would not see the order."""
    async with AsyncExitStack() as stack:
        closing = await stack.enter_async_context(AsyncExitStack())
        if actuator is not None:
            closing.push_async_callback(actuator.close)
        entered = await stack.enter_async_context(loop)
        stack.push_async_callback(closing.aclose)
        yield entered


def make_actuator(config: AutoscalerConfig) -> Actuator | None:
    """The configured actuator; None for `none`. Raises ConfigError."""
    if config.docker.hosts is not None and config.actuator != "docker":
        message = f"docker.hosts (--docker-hosts) needs actuator (--actuator) docker, not {config.actuator}"
        raise ConfigError(message, field="docker.hosts")
    try:
        match config.actuator:
            case "docker":
                from autoscaler.actuators.hosts.make_hosts import make_docker_actuator

                return make_docker_actuator(config.docker, config.model)
            case "kubernetes":
                from autoscaler.actuators.kubernetes import KubernetesActuator

                return KubernetesActuator.connect(config.kubernetes)
            case "none":
                return None
    except ModuleNotFoundError:
        message = f"actuator: {config.actuator} needs `pip install 'splitserve[{config.actuator}]'`"
        raise ConfigError(message, field="actuator") from None


@dataclass(slots=True)
class CoordinatorRotation:
    """A `Rotation` over one client per coordinator; the caller closes the clients. One failure does not stop the
    rest."""

    clients: Sequence[ScalingClient]
    lease: Lease | None = None
    """Where given, each plan carries the fencing number that its coordinator gave."""
    on_demand: Callable[[], Sequence[registry_pb2.ServedModel]] = tuple
    """Returns the models whose workers are started when requests wait for them."""

    async def apply(
        self, where: PlannedRotation, decisions: Sequence[scaling_pb2.PoolDecision], valid_s: float
    ) -> None:
        """Tells every coordinator.

        Raises FailedPreconditionError (STALE_LEASE) when a coordinator says that another autoscaler holds the lease,
        and UnavailableError naming the coordinators that could not be reached."""
        models = self.on_demand()
        calls = [self._apply_to(client, where, decisions, valid_s, models) for client in self.clients]
        failed = [error for error in await asyncio.gather(*calls) if error]
        text = "; ".join(f"{target}: {error}" for target, error in failed)
        if any(error.reason == "STALE_LEASE" for _, error in failed):
            raise FailedPreconditionError(text, reason="STALE_LEASE")
        if failed:
            raise UnavailableError(text, reason="PLAN_NOT_APPLIED")

    async def _apply_to(
        self,
        client: ScalingClient,
        where: PlannedRotation,
        decisions: Sequence[scaling_pb2.PoolDecision],
        valid_s: float,
        models: Sequence[registry_pb2.ServedModel],
    ) -> tuple[str, SplitserveError] | None:
        try:
            await client.apply_plan(
                standby=sorted(where.standby),
                active=sorted(where.active),
                valid_s=valid_s,
                lease_number=self.lease.number_at(client.target) if self.lease is not None else 0,
                decisions=decisions,
                roles=where.roles,
                on_demand=models,
            )
        except SplitserveError as error:
            return client.target, error
        return None


async def report_ended(clients: Sequence[ScalingClient], boots: Sequence[tuple[str, int]]) -> None:
    """Reports the boots, (worker id, epoch), whose processes have ended. Failures are logged, not raised."""
    answers = await asyncio.gather(
        *(client.report_ended(boots) for client in clients), return_exceptions=True
    )
    for client, error in zip(clients, answers, strict=True):
        if isinstance(error, SplitserveError):
            log_event("ended.not_reported", coordinator=client.target, error=error.message)
        elif error is not None:
            raise error
