"""Actions that bring pools of several classes to their mixes, beside `reconcile` for all others. Pure, level-triggered.

A replica that is too much ends only once those in rotation carry without it what is wanted, and those of them that are
not on spot machines the floor; spot machines go first, and come last. Nothing is started for
which the budgets have no room beside all that exists, what drains included: where old and new together are too dear, or
take too many GPUs, the old one ends first, and before one that serves those on standby, where that is enough. A standby
of any class joins while those in rotation do not carry what is wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoscaler.classes.class_shares import (
    LIVE,
    ClassRoom,
    carried_units,
    carry,
    floor_holds,
    gpus_there,
    places_left,
    price_per_hour,
    share_of,
)
from autoscaler.classes.neutral.class_leanings import lean_classes
from autoscaler.plan import ClassShare, PoolPlan, ScalingPlan
from autoscaler.reconcile import (
    Action,
    Activate,
    Bounds,
    Drain,
    ReplicaView,
    Rest,
    Start,
    in_state,
    least_loaded,
    oldest,
    reconcile,
)
from autoscaler.snapshot import OTHER_POOL, POOLS, PoolClass, PoolName, ReplicaState

_NO_PROMISES: Mapping[PoolName, Counter[str]] = {pool: Counter() for pool in POOLS}


def reconcile_classes(
    plan: ScalingPlan,
    pools: Mapping[PoolName, Sequence[ReplicaView]],
    bounds: Mapping[PoolName, Bounds],
    paused: Collection[PoolClass] = (),
) -> tuple[Action, ...]:
    """As `reconcile`, for pools with and without classes. A class that is `paused` holds up no other."""
    classed = [pool for pool in POOLS if plan.pool(pool).mix]
    paused_pools = {pool for pool, _ in paused}
    if not classed:
        return reconcile(plan, pools, bounds, paused_pools)
    actions = list(_of_others(plan, classed, pools, bounds, paused_pools))
    room, promised = ClassRoom(places=dict(plan.class_room)), _NO_PROMISES
    if plan.one_price_list:
        leant = lean_classes(plan, pools)
        pools, promised = leant.pools, leant.promised
        actions += leant.actions
        for name, count in places_left(plan, pools).items():
            room.places[name] = min(count, room.places.get(name, count))
    if plan.budget_per_hour is not None:
        room.money = plan.budget_per_hour - sum(price_per_hour(plan.pool(p), pools[p]) for p in classed)
    if plan.gpu_budget is not None:
        room.gpus = plan.gpu_budget - sum(gpus_there(plan.pool(p), pools[p]) for p in classed)
    for name, most in plan.gpu_limits.items():
        room.kinds[name] = most - sum(gpus_there(plan.pool(p), pools[p], name) for p in classed)
    turns = []
    for pool in classed:
        ours = [one for one in pools[pool] if one.ours]
        # A neutral worker is started the same way for either pool.
        held = frozenset(name for where, name in paused if where == pool or plan.one_price_list)
        other = OTHER_POOL[pool]
        leaning = Counter(promised[pool])
        leaning.subtract(promised[other])
        turns.append(_Classed(pool, plan.pool(pool), ours, held, leaning).turn(room))
    if not _makes_room(turns, _expected(turns, room)):
        for turn in turns:
            turn.of.add_standbys(turn, room)
    _choose_ends(turns, _expected(turns, room), plan.one_price_list)
    return tuple(actions) + tuple(action for turn in turns for action in turn.of.actions(turn))


def _of_others(
    plan: ScalingPlan,
    classed: Collection[PoolName],
    pools: Mapping[PoolName, Sequence[ReplicaView]],
    bounds: Mapping[PoolName, Bounds],
    paused: Collection[PoolName],
) -> tuple[Action, ...]:
    """Those of pools without classes."""
    rest = {pool: () if pool in classed else pools[pool] for pool in POOLS}
    nothing, none = Bounds(0, 0), PoolPlan(0)
    return reconcile(
        replace(
            plan,
            prefill=none if "prefill" in classed else plan.prefill,
            decode=none if "decode" in classed else plan.decode,
        ),
        rest,
        {pool: nothing if pool in classed else bounds[pool] for pool in POOLS},
        paused,
    )


@dataclass(slots=True)
class _Turn:
    """What one pool does now."""

    of: _Classed
    joining: Sequence[ReplicaView]
    leaving: Sequence[ReplicaView]
    """Into and out of rotation."""
    starts: Counter[str] = field(default_factory=Counter)
    """By class."""
    blocked: list[ClassShare] = field(default_factory=list)
    """Classes of which more are wanted in rotation than there is room for."""
    ends: str = ""
    """The replica to drain; empty: none, or none yet."""

    @property
    def moving(self) -> set[str]:
        """Names of those that join or leave."""
        return {one.name for one in (*self.joining, *self.leaving)}

    @property
    def resting(self) -> list[ReplicaView]:
        """Those that stay on standby."""
        return [one for one in in_state(self.of.ours, ReplicaState.STANDBY) if one not in self.joining]

    @property
    def serving(self) -> list[ReplicaView]:
        """Those that stay in rotation, or join."""
        ready = in_state(self.of.ours, ReplicaState.READY)
        return [*self.joining, *(one for one in ready if one not in self.leaving and one.name != self.ends)]

    def keep_one_serving(self) -> None:
        """Where the last one in rotation ends while some are wanted, one on standby takes its place at once."""
        ready = in_state(self.of.ours, ReplicaState.READY)
        ends = any(one.name == self.ends for one in ready)
        if ends and not self.serving and any(share.count for share in self.of.plan.mix):
            if self.leaving:
                self.leaving = self.leaving[:-1]
            else:
                self.joining = self.resting[:1]


def _expected(turns: Sequence[_Turn], room: ClassRoom) -> ClassRoom:
    """What there is room for once all that drains has ended."""
    draining = [
        (share_of(turn.of.plan, one.replica_class), 1)
        for turn in turns
        for one in in_state(turn.of.ours, ReplicaState.DRAINING)
    ]
    return room.with_ended(draining)


def _makes_room(turns: Sequence[_Turn], room: ClassRoom) -> bool:
    """Whether one that is blocked has room once standbys have ended, and what is too much."""
    resting = [(share_of(turn.of.plan, one.replica_class), 1) for turn in turns for one in turn.resting]
    return any(
        room.with_ended([*resting, *turn.of.too_much(turn, room)]).holds(share)
        for turn in turns
        for share in turn.blocked
    )


def _choose_ends(turns: Sequence[_Turn], room: ClassRoom, either: bool) -> None:
    """One replica of a pool at a time: what can be done without, then a standby so that one in rotation has room, then
    one that serves, for the same; of the other pool as well if `either`, as one may wait for what the other gives."""
    free = [turn for turn in turns if not in_state(turn.of.ours, ReplicaState.DRAINING)]
    for turn in free:
        turn.ends = turn.of.overdue() or turn.of.superfluous(False, turn.moving)
    ending = [
        (share_of(turn.of.plan, one.replica_class), 1)
        for turn in free
        for one in turn.of.ours
        if one.name == turn.ends
    ]
    room = room.with_ended(ending)
    free = [turn for turn in free if not turn.ends]
    for turn in turns:
        for share in turn.blocked:
            givers = [turn, *(one for one in turns if either and one is not turn)]
            room = _room_made(givers, share, free, room)
    for turn in turns:
        turn.keep_one_serving()


def _room_made(
    givers: Sequence[_Turn], blocked: ClassShare, free: Sequence[_Turn], room: ClassRoom
) -> ClassRoom:
    """The room once one more has been told to end for this class, if that is of use. `givers`: whose replicas in
    rotation may, the own pool first."""
    if room.holds(blocked):
        return room
    resting = [
        (share_of(other.of.plan, one.replica_class), other, one.name)
        for other in free
        if not other.ends
        for one in other.resting
    ]
    standbys = [(share, 1) for share, *_ in resting]
    each = [(giver, giver.of.too_much(giver, room)) for giver in givers]
    too_much = [one for _, given in each for one in given]
    serving = room.with_ended(too_much).holds(blocked)
    if room.with_ended(standbys).holds(blocked) or (
        not serving and room.with_ended([*standbys, *too_much]).holds(blocked)
    ):
        share, giver, name = max(resting, key=lambda it: (it[0].price_per_hour, it[0].gpus))
        giver.ends = name
        return room.with_ended([(share, 1)])
    for giver, given in each if serving else ():
        if any(count for _, count in given) and giver in free and not giver.ends:
            giver.ends = giver.of.superfluous(True, giver.moving)
            if len(givers) > 1 and not any(one.serving for one in givers):
                giver.ends = ""  # of neutral workers one stands in for both sides
            if giver.ends:
                break
    return room


@dataclass(frozen=True, slots=True)
class _Classed:
    """One pool."""

    pool: PoolName
    plan: PoolPlan
    ours: Sequence[ReplicaView]
    paused: frozenset[str] = frozenset()
    """Classes of which nothing is ordered now."""
    leaning: Mapping[str, int] = field(default_factory=dict)
    """Neutral workers of a class that will lean here once the other pool can do without; negative: the other way."""

    def actions(self, turn: _Turn) -> list[Action]:
        """All that it does, in order."""
        actions: list[Action] = [Activate(self.pool, one.name) for one in turn.joining]
        actions += [Rest(self.pool, one.name) for one in turn.leaving]
        for share in self.plan.mix:
            if count := turn.starts.get(share.name):
                # Where all are alike nobody has to choose.
                name = share.name if len(self.plan.mix) > 1 else ""
                actions.append(Start(self.pool, count, name, share.gpus, share.gpu))
        actions += [Drain(self.pool, (turn.ends,))] if turn.ends else []
        # As `reconcile` does: once they have nothing left.
        if empty := tuple(one.name for one in in_state(self.ours, ReplicaState.PREEMPTED) if not one.load):
            actions.append(Drain(self.pool, empty))
        return actions

    def turn(self, room: ClassRoom) -> _Turn:
        """What joins, leaves and starts in rotation, spot machines last. `room` is what may be taken; what is taken is
        taken off."""
        turn = _Turn(self, *self._rotation())
        for share in sorted(self.plan.mix, key=lambda share: share.spot):
            count = self._lacking(share) - share.standby
            able = max(0, min(count, room.places.get(share.name, count)))
            turn.starts[share.name] = room.take(share, able)
            if turn.starts[share.name] < able:
                turn.blocked.append(share)
        return turn

    def add_standbys(self, turn: _Turn, room: ClassRoom) -> None:
        """Those that are started, of the room that is left."""
        for share in sorted(self.plan.mix, key=lambda share: share.spot):
            count = min(share.standby, self._lacking(share) - turn.starts[share.name])
            turn.starts[share.name] += room.take(share, count)

    def _lacking(self, share: ClassShare) -> int:
        """How many may be ordered of those that are missing."""
        return 0 if share.name in self.paused else -self._surplus(share)

    def _rotation(self) -> tuple[list[ReplicaView], list[ReplicaView]]:
        """Standbys to take into rotation: what a class lacks there, then whatever rests, while what is ready does not
        carry what is wanted. And replicas to take out of it: what a class has too many there and too few on standby,
        once the others carry without."""
        ready = in_state(self.ours, ReplicaState.READY)
        resting = sorted(in_state(self.ours, ReplicaState.STANDBY), key=oldest)
        joining: list[ReplicaView] = []
        for share in self.plan.mix:
            lacking = share.count - len(self._of(share, ready))
            joining += self._of(share, resting)[: max(0, lacking)]
        for one in resting:
            if one not in joining and not carry(self.plan, [*ready, *joining]):
                joining.append(one)
        leaving: list[ReplicaView] = []
        for share in self.plan.mix:
            kept = [one for one in resting if one not in joining]
            lacking = share.standby - len(self._of(share, kept))
            spare = len(self._of(share, [*ready, *joining])) - share.count
            for one in sorted(self._of(share, ready), key=least_loaded)[: max(0, min(lacking, spare))]:
                left = [other for other in ready if other not in (*leaving, one)]
                if carry(self.plan, left) and (share.spot or floor_holds(self.plan, left)):
                    leaving.append(one)
        return joining, leaving

    def too_much(self, turn: _Turn, room: ClassRoom) -> list[tuple[ClassShare, int]]:
        """What may end before what replaces it is there. The last one that serves, and carries all, does not, unless
        those on standby carry it: nobody would serve meanwhile."""
        serving = turn.serving
        carries = carried_units(self.plan, serving) >= (self.plan.units or 0.0) - 1e-9
        if (
            len(serving) == 1
            and room.is_kept
            and carries
            and not carry(self.plan, [*turn.resting, *turn.leaving])
        ):
            return []
        return [(share, max(0, self._surplus(share))) for share in self.plan.mix]

    def _of(self, share: ClassShare, there: Sequence[ReplicaView]) -> list[ReplicaView]:
        return [one for one in there if share_of(self.plan, one.replica_class) is share]

    def _surplus(self, share: ClassShare) -> int:
        """Replicas of a class beyond what it shall have; negative: those that are missing."""
        live = sum(one.state in LIVE for one in self._of(share, self.ours))
        return live + self.leaning.get(share.name, 0) - share.count - share.standby

    def overdue(self) -> str:
        """It holds the place of its replacement, which comes once it is gone."""
        for share in self.plan.mix:
            there = self._of(share, self.ours)
            overdue = sorted(in_state(there, ReplicaState.OVERDUE), key=oldest)
            if overdue and (share.name not in self.paused or len(there) > share.count + share.standby):
                return overdue[0].name
        return ""

    def superfluous(self, makes_room: bool, moving: Collection[str]) -> str:
        """The one to drain next; empty: none, or none yet. None of those that are `moving` in or out of rotation."""
        ready = in_state(self.ours, ReplicaState.READY)
        if not (ready or in_state(self.ours, ReplicaState.STANDBY) or self.plan.given_up):
            return ""  # the coordinators may have just restarted
        for state in (ReplicaState.STARTING, ReplicaState.STANDBY, ReplicaState.READY):
            for share in sorted(self.plan.mix, key=lambda share: not share.spot):
                of_class = self._of(share, in_state(self.ours, state))
                able = sorted((one for one in of_class if one.name not in moving), key=least_loaded)
                enough_rest = state is ReplicaState.STANDBY and len(of_class) <= share.standby
                if self._surplus(share) <= 0 or not able or enough_rest:
                    continue
                left = [one for one in ready if one.name not in moving and one is not able[0]]
                enough = carry(self.plan, left) and (share.spot or floor_holds(self.plan, left))
                gives = makes_room or share.name == self.plan.gives
                if state is not ReplicaState.READY or gives or enough:
                    return able[0].name
        return ""
