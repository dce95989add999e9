"""The policy file while the autoscaler runs: read again when it changes, without losing what was learned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from autoscaler.control_loop import ControlLoop, LoopSettings, PolicyChange
from autoscaler.decide import PlanMemory, PoolState, carried, make_decide, plan_holds
from autoscaler.decisions.attainment import AttainmentModel
from autoscaler.policies.custom import bounded_functions, loaded_functions
from autoscaler.policies.policy_file import (
    PredictivePool,
    ScalingPolicy,
    SloPool,
    named_files,
    policy_in,
    read_policy_file,
)
from autoscaler.policies.predictive import SEASONS_KEPT, PredictiveMemory, resumed
from autoscaler.policies.recommendation import Recommend
from autoscaler.reconcile import Bounds
from autoscaler.shadows.shadow import ShadowPolicy, Shadows, unchanged
from autoscaler.signals.history_file import MAX_RATES, ForecastHistory, SeasonRecord
from autoscaler.signals.observer import DEFAULT_HISTORY_S, Observer
from autoscaler.snapshot import PoolName, Snapshot
from autoscaler.start_watch import start_limits
from splitserve.config.yaml_file import YamlFile
from splitserve.errors import ConfigError
from splitserve.logs import log_event
from splitserve.runtime.reload import ReloadedFiles


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy with the code that it names."""

    rules: ScalingPolicy
    functions: Mapping[str, Recommend]
    """Of pools of the kind `custom`, by pool."""


class PolicyFile:
    """The policy in a YAML file, with the code and the engine models that it names."""

    def __init__(
        self,
        path: Path,
        check: Callable[[ScalingPolicy], None] = lambda rules: None,
        name: str = "policy",
    ) -> None:
        """Reads it. `check` says whether a policy fits what it shares with others, and may raise ConfigError; `name` is
        what metrics and logs call it. Raises ConfigError."""
        self.path, self._check = path, check
        self._value: LoadedPolicy | None = None
        self._named: list[Path] = []
        """Files that the version that was read last names, also one that was refused."""
        self.files = ReloadedFiles(name, lambda: [path, *self._named], self._load, self._adopt)
        """To be followed by a `FileWatcher`."""
        self.files.start()
        self.polled = self.value
        """The one that `poll` gave last."""
        self._refused = 0
        """The number of the refused version that `poll` told; 0 once a right one has followed."""

    @property
    def value(self) -> LoadedPolicy:
        """The last version that was right."""
        assert self._value is not None
        return self._value

    def poll(self) -> LoadedPolicy | None:
        """The value if another one was read since the last call, or the same again in place of one that was refused;
        else None.

        Raises ConfigError, once for each version of the files that was refused and is still there; `value` stays.
        """
        refused, told = self.files.outcomes["rejected"] if self.files.rejected else 0, self._refused
        self._refused = refused
        if refused and refused != told:
            raise ConfigError(self.files.problem, field="policy")
        mended = told and not refused
        if self.value is self.polled and not mended:
            return None
        self.polled = self.value
        return self.value

    def _load(self) -> LoadedPolicy:
        """Where it names other files than before, these count as changed meanwhile: once more, with their stamps."""
        file = read_policy_file(self.path)
        self._named = sorted(set(named_files(file)))
        return _policy_of(file)

    def _adopt(self, policy: LoadedPolicy) -> None:
        self._check(policy.rules)
        # The same rules again, a file that was touched, leave decisions under way alone. Code may have changed.
        if self._value is None or policy.functions or policy.rules != self._value.rules:
            self._value = policy


def history_s(policy: ScalingPolicy) -> float:
    """How far back arrivals are kept, seconds."""
    wanted = [pool.slo.history_s for pool in (policy.prefill, policy.decode) if isinstance(pool, SloPool)]
    return max([DEFAULT_HISTORY_S, *wanted])


def shadows_of(
    paths: Sequence[Path],
    window_s: float = 0.0,
    check: Callable[[ScalingPolicy], None] = lambda rules: None,
    within: Callable[[Snapshot], Snapshot] = unchanged,
) -> Shadows:
    """The policies in these files, named after them; arrivals are kept for `window_s` at least. `check` as in
    `PolicyFile`, `within` as in `Shadows`. Raises ConfigError."""
    loaded = [(path.stem, _loaded(path)) for path in paths]
    for _, one in loaded:
        check(one.rules)
    policies = tuple(ShadowPolicy(name, make_decide(one.rules, one.functions)) for name, one in loaded)
    kept_s = max((max(window_s, history_s(one.rules)) for _, one in loaded), default=0.0)
    return Shadows(policies, kept_s, within)


def loop_settings(policy: ScalingPolicy, given: LoopSettings) -> LoopSettings:
    """The loop's settings under a policy. `given` has what is not the policy's; its interval wins unless it is 0."""
    pools, neutral = policy.pools, policy.workers == "neutral"
    longest_s = max(pool.drain_s for pool in pools.values())
    return replace(
        given,
        bounds={name: Bounds(pool.min_replicas, pool.max_replicas) for name, pool in pools.items()},
        # A neutral worker ends with what both pools have sent it.
        drain_s={name: longest_s if neutral else pool.drain_s for name, pool in pools.items()},
        gpus_each={name: pool.gpus_per_replica for name, pool in pools.items()},
        neutral=neutral,
        starts=start_limits(policy),
        interval_s=given.interval_s or policy.interval_s,
    )


@dataclass(slots=True)
class PolicyInForce:
    """Makes the loop follow the file."""

    file: PolicyFile
    observer: Observer
    given: LoopSettings
    shadows: Shadows = field(default_factory=Shadows)

    def first(self) -> PolicyChange:
        """The policy at the start. The file's may be newer: `poll` gives it."""
        return self._change(self.file.polled, self.file.polled)

    @property
    def history_s(self) -> float:
        """How far back arrivals are kept for the policy and its shadows, seconds."""
        return max(history_s(self.file.value.rules), self.shadows.history_s)

    def poll(self) -> PolicyChange | None:
        """The changed policy, if the file has changed. Raises ConfigError; the policy before stays in force."""
        before, after = self.file.polled, self.file.poll()
        if after is None:
            return None
        change = self._change(before, after)
        self.observer.keep_history(self.history_s)
        log_event("policy.reloaded", policy=str(self.file.path))
        return change

    def _change(self, before: LoadedPolicy, after: LoadedPolicy) -> PolicyChange:
        decide = make_decide(after.rules, bounded_functions(after.functions))
        carry = partial(carried, before=before.rules, after=after.rules)
        settings, holds = loop_settings(after.rules, self.given), plan_holds(before.rules, after.rules)
        return PolicyChange(decide, settings, carry, AttainmentModel(after.rules), holds)


@dataclass(frozen=True, slots=True)
class LearnedHistory:
    """What outlives a restart: what the observer has seen, and the seasons that the policy has recorded, but not those
    of shadows. A `Remembering`."""

    policy: PolicyFile
    observer: Observer
    loop: ControlLoop

    def history(self) -> ForecastHistory:
        """See `Remembering`."""
        seasons, ahead_s = dict[PoolName, SeasonRecord](), self.observer.ahead_s
        for name, pool in self.policy.value.rules.pools.items():
            memory = _state_of(self.loop.memory, name).policy
            if not (isinstance(pool, PredictivePool) and isinstance(memory, PredictiveMemory)):
                continue
            if memory.interval is not None:
                seasons[name] = _season_record(pool, memory, memory.interval, ahead_s)
        return self.observer.history().model_copy(update={"seasons": seasons})

    def remember(self, history: ForecastHistory) -> None:
        """See `Remembering`. A season that the policy does not have any more, or that ended long ago, begins anew."""
        self.observer.remember(history)
        states = dict[PoolName, PoolState]()
        for name, pool in self.policy.value.rules.pools.items():
            season = history.seasons.get(name)
            if season is not None and isinstance(pool, PredictivePool):
                states[name] = PoolState(policy=self._resumed(pool, season))
        if states:
            nothing = PoolState()
            self.loop.memory = PlanMemory(states.get("prefill", nothing), states.get("decode", nothing))

    def _resumed(self, pool: PredictivePool, season: SeasonRecord) -> PredictiveMemory | None:
        wall_s = self.observer.wall_s()
        of_another = (season.season_s, season.interval_s) != (pool.season_s, pool.interval_s)
        if of_another or wall_s - season.seen_until_wall_s > SEASONS_KEPT * pool.season_s:
            return None
        memory = PredictiveMemory(
            seen_until_s=season.seen_until_wall_s - self.observer.ahead_s - _CLOCK_NOISE_S,
            interval=season.interval,
            amount=season.amount,
            covered_s=season.covered_s,
            rates=season.rates,
        )
        return resumed(pool, memory, wall_s)


_CLOCK_NOISE_S = 1e-3
"""Between two readings of both clocks, at most."""


def _state_of(memory: object, name: PoolName) -> PoolState:
    if not isinstance(memory, PlanMemory):
        return PoolState()
    return memory.prefill if name == "prefill" else memory.decode


def _season_record(
    pool: PredictivePool, memory: PredictiveMemory, interval: int, ahead_s: float
) -> SeasonRecord:
    return SeasonRecord(
        season_s=pool.season_s,
        interval_s=pool.interval_s,
        seen_until_wall_s=memory.seen_until_s + ahead_s,
        interval=interval,
        amount=memory.amount,
        covered_s=memory.covered_s,
        rates=memory.rates[-MAX_RATES:],
    )


def _loaded(path: Path) -> LoadedPolicy:
    return _policy_of(read_policy_file(path))


def _policy_of(file: YamlFile) -> LoadedPolicy:
    rules = policy_in(file)
    with file.naming_lines():
        return LoadedPolicy(rules, loaded_functions(rules))
