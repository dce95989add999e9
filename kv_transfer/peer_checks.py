"""What every transport checks before it touches a peer's memory."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.transport import PoolMemory, TransferEndpoint
from splitserve.errors import FailedPreconditionError, InvalidArgumentError

MAX_METADATA_BYTES = 2**20
MEMORY_KINDS = ("DRAM", "VRAM")
_MAX_BLOCKS = 2**31 - 1


def check_pool(pool: PoolMemory) -> None:
    """Raises InvalidArgumentError naming the field that no transport can work with."""
    if pool.base_address <= 0:
        raise InvalidArgumentError("base_address must not be 0", field="base_address")
    if not 1 <= pool.num_blocks <= _MAX_BLOCKS:
        raise InvalidArgumentError(f"num_blocks must be 1..{_MAX_BLOCKS}", field="num_blocks")
    if not 0 <= pool.probe_blocks < pool.num_blocks:
        raise InvalidArgumentError(
            "probe_blocks must be 0 or more and below num_blocks", field="probe_blocks"
        )
    if pool.memory_kind not in MEMORY_KINDS:
        raise InvalidArgumentError(f"memory_kind must be one of {MEMORY_KINDS}", field="memory_kind")


def check_endpoint(mine: TransferEndpoint, theirs: TransferEndpoint) -> None:
    """Refuses a peer that this side must not write to.

    Raises FailedPreconditionError for another transport or layout (naming the field) and
    InvalidArgumentError for values that no honest peer sends.
    """
    if theirs.transport != mine.transport:
        raise FailedPreconditionError(
            f"agent {theirs.agent_id} speaks {theirs.transport!r}, this side {mine.transport!r}",
            reason="TRANSPORT_MISMATCH",
            field="transport",
        )
    mine.pool.layout.require_equal(theirs.pool.layout, who=f"agent {theirs.agent_id}")
    if not theirs.agent_id or theirs.agent_id == mine.agent_id:
        raise InvalidArgumentError("agent_id must name another agent", field="agent_id")
    if len(theirs.metadata) > MAX_METADATA_BYTES:
        raise InvalidArgumentError(f"metadata must be at most {MAX_METADATA_BYTES} bytes", field="metadata")
    check_pool(theirs.pool)


def check_blocks(local: Sequence[int], local_count: int, remote: Sequence[int], remote_count: int) -> None:
    """Raises InvalidArgumentError unless both have one length >= 1 and lie in pools of those many blocks."""
    if not local or len(local) != len(remote):
        raise InvalidArgumentError(
            f"a write takes as many local as remote blocks, at least one: {len(local)}, {len(remote)}",
            field="remote_blocks" if local else "local_blocks",
        )
    sides = (("local_blocks", local, local_count), ("remote_blocks", remote, remote_count))
    for name, blocks, count in sides:
        if min(blocks) < 0 or max(blocks) >= count:
            raise InvalidArgumentError(f"{name} must be 0..{count - 1}", field=name)


def check_notification(notification: bytes | None) -> None:
    """Raises InvalidArgumentError for an empty one, which NIXL would silently not send."""
    if notification is not None and not notification:
        raise InvalidArgumentError("a notification must not be empty", field="notification")
