"""The worker's side of vLLM's ranks: a scripted rank answers over the real sockets; needs no vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from engine.vllm.links import VllmEndedError, VllmLink
from engine.vllm.processes import VllmProcesses
from engine.vllm.transport import VllmTransport
from kv_transfer.transports.regions import KvMemoryRegion
from kv_transfer.transports.transport import PollResult, TransferEndpoint, WriteResult
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, TransferError
from splitserve.v1 import vllm_pb2 as pb
from tests.support.transfer.numpy_pool import LAYOUT
from tests.support.waiting import PATIENCE_S

PEER_AGENT = "11111111-2222-3333-4444-555555555555"
MEMORY = KvMemoryRegion(4096, 64, LAYOUT)

pytestmark = pytest.mark.timeout(60)


class ScriptedRank:
    """A rank that remembers its commands and answers connects."""

    def __init__(self, path: str, index: int) -> None:
        rank = pb.VllmRank(
            index=index, agent_id=f"agent-{index}", handshake=b"h%d" % index, base_address=4096
        )
        self.link = VllmLink.to_worker(path, pb.VllmHello(rank=rank))
        self.commands: list[pb.VllmCommand] = []
        self.refusal = ""
        threading.Thread(target=self._serve, daemon=True).start()

    def kinds(self) -> list[str | None]:
        return [command.WhichOneof("kind") for command in self.commands]

    def wrote(self, handle: int, error: str = "") -> None:
        ended = pb.VllmWriteEnded(handle=handle, error=error, in_doubt=bool(error))
        self.link.send(pb.VllmEvent(write_ended=ended))

    def _serve(self) -> None:
        try:
            while True:
                command = self.link.receive(pb.VllmCommand)
                self.commands.append(command)
                if command.HasField("connect"):
                    self.link.send(pb.VllmEvent(reply=pb.VllmReply(error=self.refusal)))
        except VllmEndedError:
            return


class Rig:
    """A transport of scripted ranks, and the scheduler's link."""

    def __init__(self, ranks: int) -> None:
        self.processes = VllmProcesses(ranks)
        self.scheduler = VllmLink.to_worker(
            self.processes.socket_path, pb.VllmHello(scheduler=pb.VllmScheduler())
        )
        self.ranks = [ScriptedRank(self.processes.socket_path, index) for index in range(ranks)]
        self.processes.join()
        self.transport = VllmTransport(self.processes, "engine", ranks, MEMORY)
        self.wakes = 0
        self.processes.listen(self._wake)

    def _wake(self) -> None:
        self.wakes += 1

    def connect(self, endpoint: TransferEndpoint) -> None:
        """Connects a peer and waits until it is."""
        self.transport.connect(endpoint)
        self.polled(lambda _: endpoint.agent_id in self.transport.connected())

    def polled(self, holds: Callable[[PollResult], object]) -> PollResult:
        """Polls until what has come holds."""
        end_s, seen = time.monotonic() + PATIENCE_S, PollResult()
        while not holds(seen):
            assert time.monotonic() < end_s
            more = self.transport.poll()
            seen.writes += more.writes
            seen.notifications += more.notifications
            time.sleep(0.001)
        return seen


def told(rank: ScriptedRank, kind: str) -> pb.VllmCommand:
    """The rank's first command of a kind."""
    end_s = time.monotonic() + PATIENCE_S
    while kind not in rank.kinds():
        assert time.monotonic() < end_s, kind
        time.sleep(0.001)
    return rank.commands[rank.kinds().index(kind)]


@pytest.fixture
def rigs() -> Iterator[Callable[[int], Rig]]:
    with ExitStack() as stack:

        def make(ranks: int) -> Rig:
            rig = Rig(ranks)
            stack.callback(rig.processes.close)
            return rig

        yield make


def peer(ranks: int = 1, **fields: object) -> TransferEndpoint:
    connect = pb.VllmConnect(
        engine_id="other", tensor_parallel_size=ranks, handshakes=[b"there"] * ranks, **fields
    )
    return TransferEndpoint(PEER_AGENT, "nixl", connect.SerializeToString(), MEMORY)


def test_a_completion_rides_on_the_write_of_a_single_pair(rigs: Callable[[int], Rig]) -> None:
    rig = rigs(1)
    rig.connect(peer())
    rig.transport.connect(peer())
    handle = rig.transport.write(PEER_AGENT, [1, 2, 9], [5, 6, 7], b"done", (2, 1))
    write = told(rig.ranks[0], "write").write
    assert (list(write.local_blocks), list(write.remote_blocks)) == ([1, 2, 9], [5, 6, 7])
    assert (list(write.group_blocks), write.notification, write.engine_id) == ([2, 1], b"done", "other")
    assert write.post_before_ns > time.monotonic_ns()
    rig.ranks[0].wrote(handle)
    assert rig.polled(lambda seen: seen.writes).writes == [WriteResult(handle)]
    assert rig.ranks[0].kinds() == ["connect", "write"]
    assert rig.wakes


@pytest.mark.parametrize(("mine", "theirs"), [(2, 1), (1, 2), (2, 2)])
def test_with_several_ranks_it_is_sent_after_the_last_part(
    rigs: Callable[[int], Rig], mine: int, theirs: int
) -> None:
    rig = rigs(mine)
    rig.connect(peer(theirs))
    handle = rig.transport.write(PEER_AGENT, [1], [5], b"done")
    for rank in rig.ranks:
        assert told(rank, "write").write.notification == b""
    for rank in rig.ranks[:-1]:
        rank.wrote(handle)
    assert "notify" not in rig.ranks[0].kinds()
    rig.ranks[-1].wrote(handle)
    assert rig.polled(lambda seen: seen.writes).writes == [WriteResult(handle)]
    assert told(rig.ranks[0], "notify").notify.notification == b"done"


def test_a_part_that_fails_leaves_the_write_in_doubt_and_says_nothing(rigs: Callable[[int], Rig]) -> None:
    rig = rigs(2)
    rig.connect(peer(2))
    handle = rig.transport.write(PEER_AGENT, [1], [5], b"done")
    rig.ranks[0].wrote(handle, "broken")
    rig.ranks[1].wrote(handle)
    assert rig.polled(lambda seen: seen.writes).writes == [WriteResult(handle, "broken", in_doubt=True)]
    assert "notify" not in rig.ranks[0].kinds()
    rig.ranks[0].wrote(handle)  # once more: it is nobody's
    assert rig.transport.poll().writes == []


def test_a_disconnected_peer_fails_its_writes(rigs: Callable[[int], Rig]) -> None:
    rig = rigs(1)
    rig.connect(peer())
    handle = rig.transport.write(PEER_AGENT, [1], [5], b"done")
    rig.transport.disconnect(PEER_AGENT)
    assert [write.handle for write in rig.transport.poll().writes] == [handle]
    assert rig.transport.connected() == frozenset()
    with pytest.raises(TransferError):
        rig.transport.write(PEER_AGENT, [1], [5])
    assert told(rig.ranks[0], "disconnect").disconnect == "other"


def test_notifications_are_passed_on_unless_refused(rigs: Callable[[int], Rig]) -> None:
    rig = rigs(1)
    for agent in ("bad", "good"):
        rig.transport.refuse("bad")
        notified = pb.VllmNotified(agent_id=agent, notification=b"n")
        rig.ranks[0].link.send(pb.VllmEvent(notified=notified))
    assert rig.polled(lambda seen: seen.notifications).notifications == [("good", b"n")]


def test_events_of_the_scheduler_go_to_the_engine(rigs: Callable[[int], Rig]) -> None:
    rig = rigs(1)
    seen: list[pb.VllmEvent] = []
    rig.transport.on_scheduler = seen.append
    rig.scheduler.send(pb.VllmEvent(ended=pb.VllmEnded(request_id="r", held=True)))
    rig.polled(lambda _: seen)
    assert seen[0].ended.held


def test_a_rank_that_refuses_a_peer_is_told_to_forget_it(rigs: Callable[[int], Rig]) -> None:
    rig = rigs(2)
    rig.ranks[1].refusal = "other layout"
    rig.transport.connect(peer())
    rig.polled(lambda _: "disconnect" in rig.ranks[0].kinds())
    assert rig.transport.connected() == frozenset()
    assert told(rig.ranks[0], "disconnect").disconnect == "other"
    rig.ranks[1].refusal = ""
    rig.connect(peer())


def test_a_peer_that_is_disconnected_before_the_ranks_have_answered_stays_so(
    rigs: Callable[[int], Rig],
) -> None:
    rig = rigs(1)
    rig.transport.connect(peer())
    rig.transport.disconnect(PEER_AGENT)
    rig.polled(lambda _: "disconnect" in rig.ranks[0].kinds())
    assert rig.transport.connected() == frozenset()
    rig.connect(peer())


@pytest.mark.parametrize(
    ("metadata", "what"),
    [
        (b"\xff\xff", "not an engine's"),
        (b"", "one handshake"),
        (
            pb.VllmConnect(engine_id="e", tensor_parallel_size=2, handshakes=[b"1"]).SerializeToString(),
            "one handshake",
        ),
        (
            pb.VllmConnect(engine_id="e", tensor_parallel_size=2, handshakes=[b"1"] * 3).SerializeToString(),
            "one handshake",
        ),
        (
            pb.VllmConnect(
                engine_id="e", tensor_parallel_size=65, handshakes=[b"1"] * 65
            ).SerializeToString(),
            "1..64",
        ),
    ],
)
def test_what_no_correct_peer_says_is_refused(rigs: Callable[[int], Rig], metadata: bytes, what: str) -> None:
    rig = rigs(1)
    with pytest.raises(InvalidArgumentError, match=what):
        rig.transport.connect(TransferEndpoint(PEER_AGENT, "nixl", metadata, MEMORY))
    with pytest.raises(FailedPreconditionError):
        rig.transport.connect(TransferEndpoint(PEER_AGENT, "ucx", metadata, MEMORY))


def test_a_process_that_ends_ends_the_engine(rigs: Callable[[int], Rig]) -> None:
    rig = rigs(2)
    rig.scheduler.close()
    with pytest.raises(VllmEndedError):
        rig.polled(lambda _: False)
