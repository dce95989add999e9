"""Puts the autoscaler together: as a service of its own, or inside `splitserve up`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from autoscaler.actuator import Actuator
from autoscaler.actuators.gpu_inventory import gpu_inventory
from autoscaler.decide import make_decide
from autoscaler.loop import ControlLoop, LoopSettings
from autoscaler.loop_metrics import loop_metrics
from autoscaler.observe import DEFAULT_HISTORY_S, Observer
from autoscaler.policy_file import ScalingPolicy, SloPool, load_policy
from autoscaler.reconcile import Bounds
from autoscaler.rotation import CoordinatorRotation
from splitserve.api_keys import read_key
from splitserve.config import AutoscalerConfig
from splitserve.errors import ConfigError
from splitserve.logs import log_event
from splitserve.metrics import serving_metrics
from splitserve.part_security import UNSECURED, PartSecurity, part_security
from splitserve.scaling_client import ScalingClient
from splitserve.stop_signal import stop_signal

PLAN_INTERVALS = 4
"""A plan outlives so many ticks that never came."""
LEAST_PLAN_S = 30.0


@asynccontextmanager
async def control_loop(
    policy: ScalingPolicy,
    coordinators: Sequence[str],
    actuator: Actuator | None,
    *,
    interval_s: float | None = None,
    window_s: float = 60.0,
    model: str = "",
    dry_run: bool = False,
    security: PartSecurity = UNSECURED,
    api_key: str | None = None,
) -> AsyncIterator[ControlLoop]:
    """A loop that is connected while the context is open; somebody must `run` it. The actuator stays its owner's."""
    every_s = policy.interval_s if interval_s is None else interval_s
    async with AsyncExitStack() as stack:
        made = [ScalingClient(target, security=security, api_key=api_key) for target in coordinators]
        clients = [await stack.enter_async_context(client) for client in made]
        looks: dict[str, Any] = {"model": model, "window_s": window_s, "history_s": _history_s(policy)}
        listing: dict[str, Any] = {} if actuator is None else {"replicas": actuator.replicas}
        observer = Observer(clients, **listing, **looks)
        yield ControlLoop(
            observe=observer.observe,
            decide=make_decide(policy),
            rotation=CoordinatorRotation(clients, max(LEAST_PLAN_S, PLAN_INTERVALS * every_s)),
            actuator=actuator,
            settings=LoopSettings(
                bounds={
                    "prefill": Bounds(policy.prefill.min_replicas, policy.prefill.max_replicas),
                    "decode": Bounds(policy.decode.min_replicas, policy.decode.max_replicas),
                },
                drain_s={"prefill": policy.prefill.drain_s, "decode": policy.decode.drain_s},
                interval_s=every_s,
                dry_run=dry_run,
            ),
        )


async def serve(config: AutoscalerConfig) -> None:
    """Runs the autoscaler until SIGTERM or SIGINT. Replicas stay as they are.

    Raises ConfigError for a wrong policy file or actuator, FailedPreconditionError for a taken metrics port.
    """
    policy = load_policy(config.policy)
    security = part_security("autoscaler", config.tls, config.cluster_token_file)
    stop = stop_signal()
    actuator = make_actuator(config)
    try:
        async with control_loop(
            policy,
            config.coordinators,
            actuator,
            interval_s=config.interval_s,
            window_s=config.window_s,
            model=config.model,
            dry_run=config.dry_run,
            security=security,
            api_key=read_key(config.api_key_file),
        ) as loop:
            with serving_metrics(
                lambda: loop_metrics(loop.status), config.host, config.metrics_port, security.tls
            ):
                log_event("autoscaler.ready", actuator=config.actuator, interval_s=loop.settings.interval_s)
                await _run_until(loop, stop)
    finally:
        if actuator is not None:
            await actuator.close()
        log_event("autoscaler.stopped")


def make_actuator(config: AutoscalerConfig) -> Actuator | None:
    """The actuator that the settings name; None where nothing is to be acted on. Raises ConfigError."""
    match config.actuator:
        case "docker":
            return _docker(config)
        case "kubernetes":
            return _kubernetes(config)
        case "none":
            return None


def _docker(config: AutoscalerConfig) -> Actuator:
    try:
        from autoscaler.actuators.docker import DockerActuator
        from autoscaler.actuators.docker_engine import DockerEngine
    except ModuleNotFoundError:
        message = "actuator: docker needs `pip install 'splitserve[docker]'`"
        raise ConfigError(message, field="actuator") from None
    engine = DockerEngine(config.docker.request_timeout_s)
    return DockerActuator(engine, config.docker.project, gpu_inventory(config.docker.gpus))


def _kubernetes(config: AutoscalerConfig) -> Actuator:
    try:
        from autoscaler.actuators.kubernetes import KubernetesActuator
    except ModuleNotFoundError:
        message = "actuator: kubernetes needs `pip install 'splitserve[kubernetes]'`"
        raise ConfigError(message, field="actuator") from None
    return KubernetesActuator.connect(config.kubernetes)


async def _run_until(loop: ControlLoop, stop: asyncio.Event) -> None:
    async with asyncio.TaskGroup() as group:
        running = group.create_task(loop.run())
        await stop.wait()
        running.cancel()


def _history_s(policy: ScalingPolicy) -> float:
    wanted = [pool.slo.history_s for pool in (policy.prefill, policy.decode) if isinstance(pool, SloPool)]
    return max([DEFAULT_HISTORY_S, *wanted])
