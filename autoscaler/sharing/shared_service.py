"""The autoscaler of several models on one inventory: a control loop for each, one account, one lease.

A loop that is stuck or fails holds up no other: what its model has stays on the account, and the others share the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from autoscaler.actuators.actuator import Actuator
from autoscaler.control_loop import ControlLoop
from autoscaler.counterfactuals.score_metrics import score_metrics
from autoscaler.counterfactuals.scoring import ScoredPolicy, ShadowScoring, score_in_turn
from autoscaler.decisions.decisions_page import shared_document
from autoscaler.loop_metrics import loop_metrics
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.policy_in_force import PolicyFile, shadows_of
from autoscaler.service import (
    PLAN_INTERVALS,
    ScalingEndpoint,
    Sharing,
    control_loop,
    holder_name,
    lease_length_s,
    run_served,
    scaling,
)
from autoscaler.shadows.shadow import Shadows
from autoscaler.shadows.shadow_metrics import shadow_metrics
from autoscaler.sharing.merged_plans import MergedPlans
from autoscaler.sharing.model_account import AccountedActuator, ModelAccount
from autoscaler.sharing.models_file import (
    ModelsInForce,
    ScaledModel,
    SharedModels,
    check_policy,
    check_same_models,
    check_shared,
    check_workloads,
    least_uses,
    load_models,
)
from autoscaler.sharing.shared_account import SharedAccount
from autoscaler.sharing.shared_lease import SharedLease
from autoscaler.sharing.shared_metrics import shared_metrics
from autoscaler.signals.history_file import HistoryFile
from splitserve.client.scaling_client import DEFAULT_VALID_S, ScalingClient
from splitserve.config.autoscaler import AutoscalerConfig
from splitserve.errors import SplitserveError
from splitserve.logs import log_context, log_event
from splitserve.rpc.credentials import UNSECURED, ClusterCredentials, cluster_credentials
from splitserve.runtime.process import END_S, stop_signal
from splitserve.runtime.reload import FileWatcher, ReloadedFiles
from splitserve.security.api_keys import read_key


@dataclass(frozen=True, slots=True)
class ModelLoops:
    """The control loops by model; the caller runs them with `background`."""

    loops: Mapping[str, ControlLoop]
    account: SharedAccount
    policies: Mapping[str, PolicyFile]
    histories: Mapping[str, HistoryFile]
    in_force: ModelsInForce
    scorings: Mapping[str, ShadowScoring] = field(default_factory=dict)
    """Of the models with shadows."""

    @property
    def background(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        """All that is to be run, with the names of the metric."""
        scaling = [("scaling", partial(_run_as, model, loop.run)) for model, loop in self.loops.items()]
        history = [("history", partial(_run_as, model, one.run)) for model, one in self.histories.items()]
        scorings = list(self.scorings.values())
        scored = partial(score_in_turn, scorings, scorings[0].length_s) if scorings else None
        return [*scaling, *history, *([("scoring", scored)] if scored is not None else [])]

    def metrics(self, model: str) -> Iterator[Metric]:
        """Those of one model."""
        loop = self.loops[model]
        yield from loop_metrics(loop.status)
        yield from shadow_metrics(loop.shadows)
        if model in self.scorings:
            yield from score_metrics(self.scorings[model])


async def _run_as(model: str, run: Callable[[], Awaitable[None]]) -> None:
    with log_context(model=model):
        await run()


@asynccontextmanager
async def model_loops(
    shared: SharedModels,
    coordinators: Sequence[str],
    actuators: Mapping[str, Actuator | None],
    *,
    interval_s: float | None = None,
    window_s: float = 60.0,
    shadow_window_s: float = 600.0,
    dry_run: bool = False,
    lease_s: float | None = None,
    security: ClusterCredentials = UNSECURED,
    api_key: str | None = None,
) -> AsyncIterator[ModelLoops]:
    """Connected control loops. The actuators, one a model, are not closed here. Raises ConfigError for a wrong policy,
    or one that does not fit the others."""
    in_force = ModelsInForce(shared)
    policies = policies_of(in_force)
    rules = {model: partial(_rules, file) for model, file in policies.items()}
    account = SharedAccount(
        shared.limits,
        {model: partial(_least, one, in_force) for model, one in rules.items()},
        move_after_s=shared.move_after_s,
        interval_s=lambda model: interval_s or rules[model]().interval_s,
    )
    slowest_s = max(interval_s or one().interval_s for one in rules.values())
    starting, turns, loops = asyncio.Lock(), asyncio.Lock(), dict[str, ControlLoop]()
    plans = MergedPlans(max(DEFAULT_VALID_S, PLAN_INTERVALS * slowest_s))
    histories = {one.name: HistoryFile(one.history_file) for one in shared.models if one.history_file}
    async with AsyncExitStack() as stack:
        lease: SharedLease | None = None
        if lease_s is not None and not dry_run and any(actuators.values()):
            made = [ScalingClient(target, security=security, api_key=api_key) for target in coordinators]
            length_s = lease_length_s(lease_s, slowest_s)
            lease = await stack.enter_async_context(_held_by_this(made, length_s, account.forget))

        def may_act() -> bool:
            return lease is None or lease.held

        for one in shared.models:
            model, inner = one.name, actuators[one.name]
            own = ModelAccount(account, model, rules[model])
            loops[model] = await stack.enter_async_context(
                control_loop(
                    policies[model],
                    coordinators,
                    None if inner is None else AccountedActuator(inner, own, starting, may_act),
                    interval_s=interval_s,
                    window_s=window_s,
                    model=model,
                    dry_run=dry_run,
                    security=security,
                    api_key=api_key,
                    shadows=shared_shadows(shared, one, own, shadow_window_s),
                    history=histories.get(model),
                    sharing=Sharing(own, plans, turns, lease),
                )
            )
        await _first_look(loops)
        scorings = _scorings(shared, loops, account, shadow_window_s)
        yield ModelLoops(loops, account, policies, histories, in_force, scorings)


@asynccontextmanager
async def _held_by_this(
    made: Sequence[ScalingClient], length_s: float, taken: Callable[[], None]
) -> AsyncIterator[SharedLease]:
    """The lease, with the clients that it asks; released at the end."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client) for client in made]
        lease = SharedLease(clients, holder_name(), length_s, taken)
        stack.push_async_callback(lease.release)
        yield lease


def shared_shadows(shared: SharedModels, model: ScaledModel, own: ModelAccount, window_s: float) -> Shadows:
    """One model's shadows, which see the account as its policy does. Raises ConfigError."""
    check = partial(check_policy, shared, f"a shadow of {model.name}")
    return shadows_of(model.shadow, window_s, check, own.within)


def _scorings(
    shared: SharedModels, loops: Mapping[str, ControlLoop], account: SharedAccount, window_s: float
) -> dict[str, ShadowScoring]:
    """Of each model with shadows: the policy in force and these, each with what the other models leave."""
    found = {}
    for model in shared.models:
        if model.shadow:
            shadows = [ScoredPolicy("shadow", path) for path in model.shadow]
            policies = [ScoredPolicy("in_force", model.policy), *shadows]
            left = partial(account.left_for, model.name)
            found[model.name] = ShadowScoring(loops[model.name].journal, policies, window_s, limits=left)
    return found


def policies_of(in_force: ModelsInForce) -> dict[str, PolicyFile]:
    """The policy files by model; each new version of one must fit the others. Raises ConfigError."""
    files: dict[str, PolicyFile] = {}

    def fits(model: str, rules: ScalingPolicy) -> None:
        if len(files) == len(in_force.value.models):
            check_shared(
                in_force.value, {name: file.value.rules for name, file in files.items()} | {model: rules}
            )

    for model in in_force.value.models:
        files[model.name] = PolicyFile(model.policy, partial(fits, model.name), f"policy of {model.name}")
    check_shared(in_force.value, {name: file.value.rules for name, file in files.items()})
    return files


def _rules(file: PolicyFile) -> ScalingPolicy:
    return file.value.rules


def _least(rules: Callable[[], ScalingPolicy], in_force: ModelsInForce) -> dict[str, float]:
    return least_uses(rules(), in_force.value.limits)


async def _first_look(loops: Mapping[str, ControlLoop]) -> None:
    """So that no first decision has to wait for what another model has. The loops look again."""

    async def look(model: str, actuator: Actuator, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await actuator.replicas()
        except (SplitserveError, TimeoutError) as error:
            log_event("shared.unknown", level=logging.WARNING, model=model, error=str(error))

    looks = [
        look(model, loop.actuator, loop.settings.observe_s)
        for model, loop in loops.items()
        if loop.actuator is not None
    ]
    await asyncio.gather(*looks)


async def serve_models(config: AutoscalerConfig) -> None:
    """Runs the autoscaler of the models in the configured file until SIGTERM or SIGINT. Replicas stay as they are.

    Raises ConfigError for a wrong file, policy or actuator, FailedPreconditionError for a taken metrics port.
    """
    path = config.models_file
    shared = load_models(path)
    security = cluster_credentials("autoscaler", config.tls, config.cluster_token_file)
    own, stop = {model.name: _config_of(config, model) for model in shared.models}, stop_signal(END_S)
    if config.actuator == "kubernetes":
        workloads = {name: (one.kubernetes.prefill, one.kubernetes.decode) for name, one in own.items()}
        check_workloads(workloads, config.kubernetes.classes)
    async with scaling(
        own,
        lambda actuators: model_loops(
            shared,
            config.coordinators,
            actuators,
            interval_s=config.interval_s,
            window_s=config.window_s,
            shadow_window_s=config.shadow_window_s,
            dry_run=config.dry_run,
            lease_s=config.lease_s,
            security=security,
            api_key=read_key(config.api_key_file),
        ),
    ) as scaled:
        certificates = security.server_tls.file if security.server_tls else None
        policies = [file.files for file in scaled.policies.values()]
        watcher = FileWatcher(*policies, _followed(path, scaled), certificates)
        told = ScalingEndpoint(
            lambda: shared_metrics({model: scaled.metrics(model) for model in scaled.loops}, scaled.account),
            lambda: _page(scaled),
            watcher.files,
        )
        await run_served(config, security, [*scaled.background, ("files", watcher.follow)], told, stop)


def _config_of(config: AutoscalerConfig, model: ScaledModel) -> AutoscalerConfig:
    workloads = {"prefill": model.prefill_workload, "decode": model.decode_workload}
    given = {pool: name for pool, name in workloads.items() if name is not None}
    kubernetes = config.kubernetes.model_copy(update=given)
    return config.model_copy(update={"model": model.name, "kubernetes": kubernetes})


def _followed(path: Path, scaled: ModelLoops) -> ReloadedFiles[SharedModels]:
    """The file's limits, which are followed; its models are not."""

    def adopt(found: SharedModels) -> None:
        check_shared(found, {model: file.value.rules for model, file in scaled.policies.items()})
        check_same_models(scaled.in_force.value, found)
        scaled.in_force.value = found
        scaled.account.limits, scaled.account.move_after_s = found.limits, found.move_after_s

    files = ReloadedFiles("models", lambda: [path], partial(load_models, path), adopt)
    files.start()
    return files


def _page(scaled: ModelLoops) -> dict[str, Any]:
    decisions = {model: loop.journal.decisions for model, loop in scaled.loops.items()}
    replays = {model: one.document() for model, one in scaled.scorings.items()}
    return shared_document(decisions, scaled.account.limits, scaled.account.used, replays)
