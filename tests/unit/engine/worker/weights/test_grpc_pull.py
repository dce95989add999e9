"""The taker's call to a giver, over gRPC in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grpc
import pytest

from engine.worker.weights import pull as module
from engine.worker.weights.pull import GrpcPull
from kv_transfer.transports.transport import TransferEndpoint
from kv_transfer.weights.manifest import PULL_S
from kv_transfer.weights.window import PieceWindow
from splitserve.errors import DeadlineExceededError
from splitserve.v1 import weights_pb2
from splitserve.v1.weights_pb2_grpc import WeightsServiceServicer, add_WeightsServiceServicer_to_server
from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S

pytestmark = pytest.mark.timeout(LEAST_TIMEOUT_S)
WINDOW = TransferEndpoint("taker", "memory", b"", PieceWindow(1, 4096).memory)


class Giver(WeightsServiceServicer):
    """Says what it gives once `may_answer` is set, and then nothing until the taker leaves."""

    def __init__(self) -> None:
        self.may_answer, self.left = threading.Event(), threading.Event()

    def PullWeights(self, requests: Any, context: Any) -> Iterator[weights_pb2.PullWeightsResponse]:
        context.add_callback(self.left.set)
        while not self.left.is_set():
            if self.may_answer.wait(0.01):
                yield weights_pb2.PullWeightsResponse(
                    manifest=weights_pb2.WeightsManifest(model_fingerprint="f" * 64, agent_id="giver")
                )
                self.left.wait(PATIENCE_S)


@pytest.fixture
def giver() -> Iterator[tuple[Giver, grpc.Channel]]:
    giver, server = Giver(), grpc.server(ThreadPoolExecutor(1))
    add_WeightsServiceServicer_to_server(giver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield giver, channel
    giver.left.set()
    server.stop(0).wait(PATIENCE_S)


def test_a_giver_that_says_nothing(
    giver: tuple[Giver, grpc.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OPEN_S", 0.1)
    with closing(GrpcPull(giver[1], None, PULL_S)) as call:
        with pytest.raises(DeadlineExceededError) as caught:
            call.open(WINDOW)
        assert caught.value.reason == "WEIGHTS_STALLED"
        assert giver[0].left.wait(PATIENCE_S)


def test_an_answer_in_time_leaves_the_call_alive(
    giver: tuple[Giver, grpc.Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = list[threading.Timer]()

    class Timer(threading.Timer):
        def start(self) -> None:
            timers.append(self)
            super().start()

    monkeypatch.setattr(threading, "Timer", Timer)
    giver[0].may_answer.set()
    with closing(GrpcPull(giver[1], None, PULL_S)) as call:
        assert call.open(WINDOW).agent_id == "giver"
        call.check()
        (timer,) = timers
        timer.join(PATIENCE_S)
        assert not timer.is_alive()
        call.check()


def test_all_of_it_ends_at_the_limit(giver: tuple[Giver, grpc.Channel]) -> None:
    giver[0].may_answer.set()
    ended = threading.Event()
    with closing(GrpcPull(giver[1], None, 0.5)) as call:
        call._call.add_callback(ended.set)
        assert ended.wait(PATIENCE_S)
        with pytest.raises(DeadlineExceededError):
            call.check()


def test_no_time_left(giver: tuple[Giver, grpc.Channel]) -> None:
    with closing(GrpcPull(giver[1], None, -1.0)) as call, pytest.raises(DeadlineExceededError):
        call.open(WINDOW)
