"""The autoscaler service: wires policy, observer, actuator and control loop together and runs them."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from prometheus_client.core import Metric

from autoscaler.actuators.actuator import Actuator
from autoscaler.control_loop import ControlLoop, LoopSettings, PolicyChange
from autoscaler.counterfactuals.score_metrics import score_metrics
from autoscaler.counterfactuals.scoring import ScoredPolicy, ShadowScoring
from autoscaler.decisions.decider import Decider
from autoscaler.decisions.decisions_page import DECISIONS_PATH, decisions_document
from autoscaler.decisions.journal import DecisionJournal
from autoscaler.lease import Lease
from autoscaler.loop_metrics import loop_metrics
from autoscaler.policy_in_force import LearnedHistory, PolicyFile, PolicyInForce, shadows_of
from autoscaler.reconcile import PlannedRotation
from autoscaler.shadows.shadow import Shadows
from autoscaler.shadows.shadow_metrics import shadow_metrics
from autoscaler.sharing.merged_plans import MergedPlans
from autoscaler.sharing.model_account import ModelAccount
from autoscaler.signals.demand_watch import DemandWatch
from autoscaler.signals.history_file import HistoryFile
from autoscaler.signals.notice_watch import NoticeWatch
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
from splitserve.runtime.reload import FileWatcher, ReloadedFiles
from splitserve.security.api_keys import read_key
from splitserve.v1 import registry_pb2, scaling_pb2

T = TypeVar("T")
PLAN_INTERVALS = 4
"""A plan stays valid for this many missed ticks."""
LEAST_PLAN_S = 30.0
LEASE_INTERVALS = 3
"""A lease lasts this many intervals at least, so that its holder renews it in time."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the control loops of several models on one inventory have in common, and one model's part in it."""

    account: ModelAccount
    plans: MergedPlans
    turns: asyncio.Lock
    """Of decisions: each sees what the one before it claims."""
    lease: Lease | None = None

    @property
    def decider(self) -> Decider:
        """Of decisions that see the account."""
        return Decider(self.turns, self.account.seen, self.account.decided)


@asynccontextmanager
async def control_loop(
    policy: PolicyFile,
    coordinators: Sequence[str],
    actuator: Actuator | None,
    *,
    interval_s: float | None = None,
    window_s: float = 60.0,
    model: str = "",
    dry_run: bool = False,
    lease_s: float | None = None,
    security: ClusterCredentials = UNSECURED,
    api_key: str | None = None,
    shadows: Shadows | None = None,
    history: HistoryFile | None = None,
    sharing: Sharing | None = None,
) -> AsyncIterator[ControlLoop]:
    """A connected control loop; the caller runs it and `history`, and closes the actuator. With `lease_s` it acts only
    while it holds the coordinators' lease, given up at the end; with `sharing` it is one of several, and has theirs."""
    shadows = shadows or Shadows()
    async with AsyncExitStack() as stack:
        made = (ScalingClient(target, security=security, api_key=api_key) for target in coordinators)
        clients = [await stack.enter_async_context(client) for client in made]
        listing: dict[str, Any] = {} if actuator is None else {"replicas": actuator.replicas}
        if actuator is not None and actuator.proves_end and not dry_run:
            listing["on_ended"] = partial(report_ended, clients)
        observer = Observer(clients, **listing, model=model, window_s=window_s)
        settings = LoopSettings(interval_s=interval_s or 0.0, dry_run=dry_run)
        in_force = PolicyInForce(policy, observer, settings, shadows)
        observer.keep_history(in_force.history_s)
        first = in_force.first()
        lease = sharing.lease if sharing is not None else None
        if lease is None and lease_s is not None and actuator is not None and not dry_run:
            lease = Lease(clients, holder_name(), model, lease_length_s(lease_s, first.settings.interval_s))
            stack.push_async_callback(lease.release)
        on_demand = partial(_on_demand, policy, observer)
        rotation = CoordinatorRotation(clients, _plan_s(first.settings), lease, on_demand)

        def changed_policy() -> PolicyChange | None:
            change = in_force.poll()
            if change is not None:
                rotation.valid_s = _plan_s(change.settings)
            return change

        loop = ControlLoop(
            observe=observer.observe,
            decide=first.decide,
            rotation=rotation if sharing is None else sharing.plans.rotation(model, rotation),
            actuator=actuator,
            settings=first.settings,
            lease=lease,
            changed_policy=changed_policy,
            shadows=shadows,
            pause=DemandWatch(clients, model).pause,
            rest=NoticeWatch(clients, model).pause,
            decider=Decider() if sharing is None else sharing.decider,
            journal=DecisionJournal(first.attainment),
        )
        if history is not None:
            history.restore(LearnedHistory(policy, observer, loop), in_force.history_s)
        yield loop


def holder_name() -> str:
    """Unique to this run of the autoscaler."""
    return f"{socket.gethostname()[:60]}/{uuid.uuid4()}"


def lease_length_s(given_s: float, interval_s: float) -> float:
    """How long a lease lasts that is renewed at each interval."""
    return min(MAX_LEASE_S, max(given_s, LEASE_INTERVALS * interval_s))


def _on_demand(policy: PolicyFile, observer: Observer) -> Sequence[registry_pb2.ServedModel]:
    """The models whose workers are started when requests wait for them."""
    return tuple(observer.served.values()) if policy.value.rules.may_be_at_zero else ()


async def serve(config: AutoscalerConfig) -> None:
    """Runs the autoscaler until SIGTERM or SIGINT. Replicas stay as they are.

    Raises ConfigError for a wrong policy file or actuator, FailedPreconditionError for a taken metrics port.
    """
    policy, shadows = PolicyFile(config.one_policy), shadows_of(config.shadow, config.shadow_window_s)
    security = cluster_credentials("autoscaler", config.tls, config.cluster_token_file)
    watcher = FileWatcher(policy.files, security.server_tls.file if security.server_tls else None)
    history = None if config.history_file is None else HistoryFile(config.history_file)
    stop = stop_signal(END_S)
    async with scaling(
        {config.model: config},
        lambda actuators: control_loop(
            policy,
            config.coordinators,
            actuators[config.model],
            interval_s=config.interval_s,
            window_s=config.window_s,
            model=config.model,
            dry_run=config.dry_run,
            lease_s=config.lease_s,
            security=security,
            api_key=read_key(config.api_key_file),
            shadows=shadows,
            history=history,
        ),
    ) as loop:
        scoring = _scoring(config, loop)
        background = [("scaling", loop.run), ("scoring", scoring.run), ("files", watcher.follow)]
        if history is not None:
            background.append(("history", history.run))
        told = ScalingEndpoint(
            lambda: [*loop_metrics(loop.status), *shadow_metrics(shadows), *score_metrics(scoring)],
            lambda: decisions_document(loop.journal.decisions, scoring.document()),
            watcher.files,
        )
        await run_served(config, security, background, told, stop)


@asynccontextmanager
async def scaling(
    configs: Mapping[str, AutoscalerConfig],
    loops: Callable[[Mapping[str, Actuator | None]], AbstractAsyncContextManager[T]],
) -> AsyncIterator[T]:
    """`loops`, with the actuators of these settings, by model. These close before it ends: an order under way ends
    before the lease does, because another that takes it would not see the order. Raises ConfigError."""
    async with AsyncExitStack() as stack:
        stack.callback(log_event, "autoscaler.stopped")
        actuators, closing = dict[str, Actuator | None](), await stack.enter_async_context(AsyncExitStack())
        for model, config in configs.items():
            actuators[model] = made = make_actuator(config)
            if made is not None:
                closing.push_async_callback(made.close)
        entered = await stack.enter_async_context(loops(actuators))
        stack.push_async_callback(closing.aclose)
        yield entered


@dataclass(frozen=True, slots=True)
class ScalingEndpoint:
    """What an autoscaler tells at its metrics port, beside the state of its loops and files."""

    metrics: Callable[[], Sequence[Metric]]
    decisions: Callable[[], dict[str, Any]]
    reloaded: Sequence[ReloadedFiles[Any]]


async def run_served(
    config: AutoscalerConfig,
    security: ClusterCredentials,
    background: Sequence[tuple[str, Callable[[], Awaitable[None]]]],
    told: ScalingEndpoint,
    stop: asyncio.Event,
) -> None:
    """Runs these loops, each with its name, until `stop` is set. Raises FailedPreconditionError for a taken port."""
    loops = LoopRunner()
    with serving_metrics(
        lambda: [*told.metrics(), loops.metric(), *reload_metrics(told.reloaded)],
        config.host,
        config.metrics_port,
        security.server_tls,
        {DECISIONS_PATH: told.decisions},
        security.token,
    ):
        log_event("autoscaler.ready", actuator=config.actuator)
        await run_beside(stop.wait(), [(name, loops.run(name, loop)) for name, loop in background])


def _scoring(config: AutoscalerConfig, loop: ControlLoop) -> ShadowScoring:
    """Of the policy in force and its shadows; without shadows there is nothing to compare."""
    shadows = [ScoredPolicy("shadow", path) for path in config.shadow]
    policies = [ScoredPolicy("in_force", config.one_policy), *shadows] if shadows else []
    return ShadowScoring(loop.journal, policies, config.shadow_window_s)


def make_actuator(config: AutoscalerConfig) -> Actuator | None:
    """The configured actuator; None for `none`. Raises ConfigError."""
    if config.docker.hosts is not None and config.actuator != "docker":
        message = f"docker.hosts (--docker-hosts) needs actuator (--actuator) docker, not {config.actuator}"
        raise ConfigError(message, field="docker.hosts")
    try:
        match config.actuator:
            case "docker":
                from autoscaler.hosts.make_hosts import make_docker_actuator

                return make_docker_actuator(config.docker, config.model, pulls=not config.dry_run)
            case "kubernetes":
                from autoscaler.actuators.kubernetes import KubernetesActuator

                return KubernetesActuator.connect(config.kubernetes)
            case "none":
                return None
    except ModuleNotFoundError:
        message = f"actuator: {config.actuator} needs `pip install 'splitserve[{config.actuator}]'`"
        raise ConfigError(message, field="actuator") from None


def _plan_s(settings: LoopSettings) -> float:
    return max(LEAST_PLAN_S, PLAN_INTERVALS * settings.interval_s)


class CoordinatorRotation:
    """A `Rotation` over one client per coordinator; clients are not closed here. A failure does not stop the rest.

    A plan expires after `valid_s` seconds: if the autoscaler dies, its standbys serve again. With `lease` each plan
    carries the fencing number that its coordinator gave. `on_demand` gives the models whose workers are started when
    requests wait for them.
    """

    def __init__(
        self,
        clients: Sequence[ScalingClient],
        valid_s: float,
        lease: Lease | None = None,
        on_demand: Callable[[], Sequence[registry_pb2.ServedModel]] = tuple,
    ) -> None:
        self.valid_s, self._on_demand = valid_s, on_demand
        self._clients = tuple(clients)
        self._lease = lease

    async def apply(self, where: PlannedRotation, decisions: Sequence[scaling_pb2.PoolDecision] = ()) -> None:
        """See `Rotation`. Raises FailedPreconditionError (STALE_LEASE) when a coordinator says that another may act,
        and UnavailableError naming the coordinators that could not be reached."""
        plan: dict[str, Any] = {
            "standby": sorted(where.standby),
            "active": sorted(where.active),
            "lend": where.lend,
            "decisions": decisions,
            "leanings": where.leanings,
        }
        if models := self._on_demand():
            plan["on_demand"] = models
        if where.sleeping:
            plan["sleeping"] = sorted(where.sleeping)
        if where.movable:
            plan["movable"] = sorted(where.movable)
        calls = [self._apply_to(client, plan) for client in self._clients]
        failed = [error for error in await asyncio.gather(*calls) if error]
        text = "; ".join(f"{target}: {error}" for target, error in failed)
        if any(error.reason == "STALE_LEASE" for _, error in failed):
            raise FailedPreconditionError(text, reason="STALE_LEASE")
        if failed:
            raise UnavailableError(text, reason="PLAN_NOT_APPLIED")

    async def _apply_to(
        self, client: ScalingClient, plan: Mapping[str, Any]
    ) -> tuple[str, SplitserveError] | None:
        number = self._lease.number_at(client.target) if self._lease is not None else 0
        fenced: dict[str, Any] = {"lease_number": number} if number else {}
        try:
            await client.apply_plan(**plan, valid_s=self.valid_s, **fenced)
        except SplitserveError as error:
            return client.target, error
        return None


async def report_ended(clients: Sequence[ScalingClient], boots: Sequence[tuple[str, int]]) -> None:
    """Says that the processes of these boots, (worker id, epoch), have ended. Failures are logged, not raised."""
    answers = await asyncio.gather(
        *(client.report_ended(boots) for client in clients), return_exceptions=True
    )
    for client, error in zip(clients, answers, strict=True):
        if isinstance(error, SplitserveError):
            log_event("ended.not_reported", coordinator=client.target, error=error.message)
        elif error is not None:
            raise error
