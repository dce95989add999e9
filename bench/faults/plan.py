"""The faults of one worker: in its KV transfer, and in the times that it measures."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from splitserve.config.base import Settings

Count = Annotated[int, Field(ge=1)]


class Trigger(Settings):
    """When a fault happens: at given operations, periodically, or at random."""

    at: tuple[Count, ...] = ()
    """Numbers of the operations, in call order from 1: `[3]` is the third."""
    every: Count | None = None
    """Period in operations: 10 hits every tenth."""
    probability: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability for all other operations, drawn from the plan's seed."""

    @property
    def planned(self) -> bool:
        """Whether the fault can ever happen."""
        return bool(self.at) or self.every is not None or self.probability > 0


NEVER = Trigger()


class FaultPlan(Settings):
    """Faults of one worker. The defaults plan none.

    Operations are counted per kind: writes, sent notifications (including those of writes), received notifications.
    """

    seed: int = 0
    """Random seed. Equal seeds and equal calls give equal faults."""
    step_noise: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Noise of the machine in the measured times of steps: each is multiplied by exp(step_noise * z), z standard
    normal."""
    latency_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Delay of every write and notification of this worker, in seconds."""
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0)] | None = None
    """Bandwidth of this worker's writes, which are serialized, in bytes per second. Default: unlimited."""
    hold_s: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """Delay of a late write, or a delayed or reordered notification."""
    stall_write: Trigger = NEVER
    """The write's bytes never leave, and it never ends until its peer is disconnected."""
    unreported_write: Trigger = NEVER
    """The bytes and the notification arrive, but the write does not end until its peer is disconnected."""
    late_write: Trigger = NEVER
    """The bytes arrive and the write ends `hold_s` late; later writes overtake it."""
    unclean_write: Trigger = NEVER
    """The write fails at once, but its bytes arrive `hold_s` late unless its peer is disconnected before."""
    wrong_bytes: Trigger = NEVER
    """A block is filled from the wrong local block. The source itself does not change."""
    break_connection: Trigger = NEVER
    """The connection to the peer breaks at this write, as when the peer restarts."""
    drop_notification: Trigger = NEVER
    """A notification is not sent."""
    duplicate_notification: Trigger = NEVER
    """A notification is sent twice."""
    delay_notification: Trigger = NEVER
    """A notification is sent `hold_s` late; later ones overtake it."""
    reorder_notification: Trigger = NEVER
    """A notification is sent after the next one to this peer, or `hold_s` late if none follows."""
    drop_arrival: Trigger = NEVER
    """A received notification is dropped."""
    duplicate_arrival: Trigger = NEVER
    """A received notification is delivered twice."""
    delay_arrival: Trigger = NEVER
    """A received notification is delivered `hold_s` late; later ones overtake it."""
