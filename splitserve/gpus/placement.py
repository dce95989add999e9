"""Which GPUs a replica gets. Pure: the GPUs that other replicas use come in, and names go out. So a restarted
autoscaler, which reads from the containers which replica has which GPU, goes on where the last one stopped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from splitserve.errors import FailedPreconditionError, ResourceExhaustedError
from splitserve.gpus.inventory import GpuInventory, is_mig

MAX_CANDIDATES = 16
"""Of more free GPUs only the first are considered: the choice of 8 of 16 compares 12,870 sets."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """A replica that has GPUs, also while it drains."""

    pool: str
    gpus: tuple[str, ...]


def choose_gpus(
    inventory: GpuInventory, uses: Iterable[GpuUse], pool: str, count: int, kind: str = ""
) -> tuple[str, ...]:
    """`count` GPUs for a replica of this pool, in the inventory's order; () for 0. With a `kind` only GPUs of it.

    A GPU that already has `replicas_per_gpu` replicas is not chosen. Among the sets of other GPUs the best has, in this
    order: fewest kinds, fewest replicas of the same pool that share its GPUs, fewest replicas in total, most NVLink
    pairs inside, fewest NVLink pairs with free GPUs outside, the first place in the inventory.

    Raises ResourceExhaustedError (NO_GPU) if too few GPUs are free, FailedPreconditionError for several MIG slices, of
    which CUDA shows a process only one (MIG_GROUP), and without a GPU of this kind (GPU_KIND).
    """
    if count == 0:
        return ()
    inventory = inventory.of_kind(kind)
    used = _Uses(inventory, uses)
    free = [gpu for gpu in inventory.gpus if used.count(gpu) < inventory.replicas_per_gpu]
    whole = [gpu for gpu in free if count == 1 or not is_mig(gpu)]
    if len(whole) < count <= len(free):
        message = f"a replica takes {count} GPUs, and CUDA shows a process only one MIG slice"
        raise FailedPreconditionError(message, reason="MIG_GROUP", field="gpus_per_replica")
    if len(whole) < count:
        raise _none_free(inventory, len(whole), count, kind)
    unused = [gpu for gpu in whole if used.count(gpu) == 0]
    # GPUs in use come last: they are shared only where the unused GPUs do not suffice.
    shared = sorted(set(whole) - set(unused), key=lambda gpu: (used.count(gpu, pool), used.count(gpu)))
    candidates = set((unused + shared)[: max(MAX_CANDIDATES, count)])
    ordered = [gpu for gpu in whole if gpu in candidates]

    def cost(chosen: tuple[str, ...]) -> tuple[int, ...]:
        kinds = len({inventory.kinds.get(gpu, "") for gpu in chosen})
        inside = sum(frozenset(pair) in inventory.links for pair in combinations(chosen, 2))
        unchosen = [gpu for gpu in unused if gpu not in chosen]
        broken = sum(frozenset((gpu, other)) in inventory.links for gpu in chosen for other in unchosen)
        same = sum(used.count(gpu, pool) for gpu in chosen)
        return kinds, same, sum(used.count(gpu) for gpu in chosen), -inside, broken

    return min(combinations(ordered, count), key=cost)


class _Uses:
    """How many replicas have each GPU."""

    def __init__(self, inventory: GpuInventory, uses: Iterable[GpuUse]) -> None:
        self._users: dict[str, list[str]] = {}
        for use in uses:
            for gpu in inventory.named(use.gpus):
                self._users.setdefault(gpu, []).append(use.pool)

    def count(self, gpu: str, pool: str | None = None) -> int:
        """The number of replicas, or of replicas of `pool`, that have this GPU."""
        users = self._users.get(gpu, ())
        return len(users) if pool is None else sum(user == pool for user in users)


def taken(inventory: GpuInventory, uses: Sequence[GpuUse]) -> int:
    """How much of the inventory's `capacity` these replicas take."""
    return sum(gpu in inventory.gpus for use in uses for gpu in inventory.named(use.gpus))


def _none_free(inventory: GpuInventory, free: int, count: int, kind: str) -> ResourceExhaustedError:
    gpus = f"{len(inventory.gpus)} GPUs" + (f" of the kind {kind!r}" if kind else "")
    what = f"{free or 'none'} of the {gpus} {'are' if free > 1 else 'is'} free"
    if count > 1:
        what += f", a replica takes {count}"
    return ResourceExhaustedError(what, reason="NO_GPU")
