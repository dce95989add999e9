"""The policy file while the autoscaler runs. It is read again when it changes; the policy's memory is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from autoscaler.control_loop import PolicyChange
from autoscaler.decide import carried, make_decide
from autoscaler.policies.custom import bounded_functions, loaded_functions
from autoscaler.policies.policy_file import ScalingPolicy, SloPool, named_files, policy_in, read_policy_file
from autoscaler.policies.recommendation import Recommend
from autoscaler.signals.observer import DEFAULT_HISTORY_S, Observer
from splitserve.errors import ConfigError
from splitserve.logs import log_event
from splitserve.runtime.reload import ReloadedFiles


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy with the code that it names."""

    rules: ScalingPolicy
    functions: Mapping[str, Recommend]
    """The functions of pools of kind `custom`, by pool."""


class PolicyFile:
    """The policy in a YAML file, with the code that it names."""

    def __init__(self, path: Path) -> None:
        """Reads it. Raises ConfigError."""
        self.path = path
        self._value: LoadedPolicy | None = None
        self._named: list[Path] = []
        """Files of code that the last version names, also a refused version."""
        self.files = ReloadedFiles("policy", lambda: [path, *self._named], self._load, self._adopt)
        """A `FileWatcher` follows these files."""
        self.files.start()
        self.polled = self.value
        """The value that `poll` returned last."""
        self._reported_refusal = 0
        """The number of the refused version that `poll` has reported; 0 once a right version has followed."""

    @property
    def value(self) -> LoadedPolicy:
        """The last version that was right."""
        assert self._value is not None
        return self._value

    def poll(self) -> LoadedPolicy | None:
        """The value, if it changed since the last call or if a refused version has been corrected; else None.

        Raises ConfigError, once for each refused version of the files; `value` stays.
        """
        refusal = self.files.outcomes["rejected"] if self.files.rejected else 0
        reported, self._reported_refusal = self._reported_refusal, refusal
        if refusal and refusal != reported:
            raise ConfigError(self.files.problem, field="policy")
        corrected = reported and not refusal
        if self.value is self.polled and not corrected:
            return None
        self.polled = self.value
        return self.value

    def _load(self) -> LoadedPolicy:
        file = read_policy_file(self.path)
        self._named = sorted(set(named_files(file)))
        rules = policy_in(file)
        with file.naming_lines():
            return LoadedPolicy(rules, loaded_functions(rules))

    def _adopt(self, policy: LoadedPolicy) -> None:
        # A touched file with the same rules changes nothing. A function's code may have changed, so it is taken.
        if self._value is None or policy.functions or policy.rules != self._value.rules:
            self._value = policy


@dataclass(slots=True)
class PolicyInForce:
    """Makes the loop follow the file."""

    file: PolicyFile
    observer: Observer

    def first(self) -> PolicyChange:
        """The policy at the start. If the file has changed since, the next `poll` returns the newer one."""
        return self._change(self.file.polled, self.file.polled)

    @property
    def history_s(self) -> float:
        """How far back arrivals are kept for the policy, seconds."""
        pools = self.file.value.rules.pools.values()
        return max([DEFAULT_HISTORY_S, *(pool.slo.history_s for pool in pools if isinstance(pool, SloPool))])

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
        return PolicyChange(decide, after.rules, carry)
