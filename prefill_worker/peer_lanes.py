"""The peers that a worker may write to: connected, measured, and not refused for a slow lane."""

from __future__ import annotations

import logging
from typing import Any, Literal

from kv_transfer.lane import JudgedLane, Lane, LaneKind, device_link, lane_problem
from kv_transfer.lane_probe import LaneProber
from kv_transfer.transports.transport import PollResult, TransferEndpoint, Transport
from splitserve.errors import FailedPreconditionError
from splitserve.host_facts import network_bytes_sent, rdma_devices
from splitserve.logs import log_event


class PeerLanes:
    """Measures the lane to each peer at first contact and judges it. Runs on the engine thread.

    `expected_gb_per_s` and `policy` are `WorkerConfig.expected_lane_gb_per_s` and `lane_policy`.
    """

    def __init__(
        self,
        transport: Transport,
        endpoint: TransferEndpoint,
        expected_gb_per_s: float | None,
        policy: Literal["warn", "refuse"],
    ) -> None:
        self._transport = transport
        self._prober = LaneProber(transport, endpoint.memory, endpoint.host_id, network_bytes_sent)
        self._expected_gb_per_s = expected_gb_per_s
        self._policy = policy
        self._has_rdma = bool(rdma_devices())
        self._judged: dict[str, JudgedLane] = {}

    @property
    def measuring(self) -> bool:
        """Whether a lane is still to be measured; the transport must then be polled."""
        return self._prober.active

    def connected(self, endpoint: TransferEndpoint) -> None:
        """Adds a peer that was connected; its lane will be measured."""
        self._judged.pop(endpoint.agent_id, None)
        self._prober.add(endpoint)

    def lost(self, agent_id: str) -> None:
        """Forgets a peer."""
        self._judged.pop(agent_id, None)
        self._prober.forget(agent_id)

    def poll(self) -> PollResult:
        """Polls the transport and advances the measurements; returns what the transport returned."""
        result = self._prober.poll()
        for lane in self._prober.take():
            self._judge(lane)
        return result

    def usable(self) -> frozenset[str]:
        """Agent ids of the peers that are connected, measured and not refused."""
        good = {agent_id for agent_id, judged in self._judged.items() if not judged.refused}
        return self._transport.connected() & good

    def lanes(self) -> tuple[JudgedLane, ...]:
        """The lanes measured so far."""
        return tuple(self._judged.values())

    def kind_of(self, agent_id: str) -> LaneKind:
        """The kind of a peer's lane; "unknown" if it is gone or not measured yet."""
        judged = self._judged.get(agent_id)
        return judged.lane.kind if judged is not None else "unknown"

    def gb_per_s(self, agent_id: str) -> float:
        """The speed of a peer's lane; 0 if it is not known."""
        judged = self._judged.get(agent_id)
        return judged.lane.gb_per_s if judged is not None else 0.0

    def require_not_refused(self, agent_id: str) -> None:
        """Raises FailedPreconditionError (SLOW_LANE) for a peer with a refused lane."""
        judged = self._judged.get(agent_id)
        if judged is not None and judged.refused:
            message = f"the lane to decode agent {agent_id} is refused: {judged.problem}"
            raise FailedPreconditionError(message, reason="SLOW_LANE")

    def _judge(self, lane: Lane) -> None:
        problem = lane_problem(lane, self._expected_gb_per_s, has_rdma=self._has_rdma)
        refused = problem is not None and self._policy == "refuse"
        self._judged[lane.agent_id] = JudgedLane(lane, problem, refused)
        fields: dict[str, Any] = {
            "agent_id": lane.agent_id,
            "lane": lane.kind,
            "gb_per_s": round(lane.gb_per_s, 3),
            "latency_ms": round(lane.latency_s * 1e3, 3),
        }
        if (link := device_link(lane)) is not None:
            fields["link"] = link
        if problem is None:
            log_event("lane.measured", **fields)
            return
        log_event(
            "lane.slow",
            level=logging.WARNING,
            **fields,
            problem=problem,
            expected_gb_per_s="auto" if self._expected_gb_per_s is None else self._expected_gb_per_s,
            refused=refused,
            advice="splitserve doctor",
        )
