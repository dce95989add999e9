"""Which replicas the figures of a class are means of, in production and in the simulator. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from autoscaler.snapshot import ReplicaState

T = TypeVar("T")


def serving_by_class(replicas: Iterable[tuple[str, ReplicaState, T]]) -> dict[str, list[T]]:
    """Those in rotation, by the class that they say, in order of its name. What starts has measured nothing, and what
    leaves serves ever less: neither has a part in what a replica of its class does."""
    found: dict[str, list[T]] = {}
    for name, state, replica in replicas:
        if state is ReplicaState.READY:
            found.setdefault(name, []).append(replica)
    return dict(sorted(found.items()))
