"""Which faults to put into a worker's KV transfer, for tests; see `kv_transfer/faulty_transport.py`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]


class _Plan(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Trigger(_Plan):
    """When a fault happens: at named operations, and at others by chance."""

    at: tuple[Count, ...] = ()
    """Operations, counted from 1 in the order of the calls: `[3]` is the third."""
    every: Count | None = None
    """Every so many operations."""
    probability: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Chance of every other operation, from the plan's seed."""

    @property
    def planned(self) -> bool:
        """Whether it can ever happen."""
        return bool(self.at) or self.every is not None or self.probability > 0


NEVER = Trigger()


class FaultPlan(_Plan):
    """Faults of one worker's transport. The defaults plan none.

    Writes and sent notifications (those of writes included) are counted apart, and so are received ones.
    """

    seed: int = 0
    """Equal seeds and equal calls give equal faults."""
    latency_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Every write and notification of this worker leaves so many seconds later."""
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0)] | None = None
    """Writes of this worker pass one after the other at so many bytes a second. Default: as fast as they go."""
    hold_s: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """How long a late write, or a delayed or reordered notification, is held."""
    stall_write: Trigger = NEVER
    """The write's bytes never leave and it never ends, until its peer is disconnected."""
    unreported_write: Trigger = NEVER
    """The bytes and the notification arrive, but the write never ends, until its peer is disconnected."""
    late_write: Trigger = NEVER
    """The bytes land, and the write ends, `hold_s` late; later writes overtake it."""
    wrong_bytes: Trigger = NEVER
    """The blocks are filled from the wrong local blocks. The source itself is not touched."""
    break_connection: Trigger = NEVER
    """The connection to the peer breaks at this write, as when the peer restarts."""
    drop_notification: Trigger = NEVER
    """A notification is not sent."""
    duplicate_notification: Trigger = NEVER
    """A notification is sent twice."""
    delay_notification: Trigger = NEVER
    """A notification is sent `hold_s` late; later ones overtake it."""
    reorder_notification: Trigger = NEVER
    """A notification is sent after the next one to this peer, or `hold_s` late where none follows."""
    drop_arrival: Trigger = NEVER
    """A notification that arrives is lost."""
    duplicate_arrival: Trigger = NEVER
    """A notification that arrives is seen twice."""
    delay_arrival: Trigger = NEVER
    """A notification that arrives is seen `hold_s` late; later ones overtake it."""
