"""Processes that compile grammars and match outputs with them, one for each grammar in use.

Native code compiles grammars that strangers send. It may crash, or take minutes or gigabytes; then only the grammar's
own process ends. A child process, `splitserve.grammars.child`, has library and vocabulary loaded and forks them.

A grammar is first compiled in the quick lane: a few at once, each with little CPU time. One that needs more starts
again in the slow lane, one at a time. In both lanes tenants take turns. So costly grammars do not delay small ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import tempfile
from array import array
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from splitserve.errors import InvalidArgumentError, ResourceExhaustedError, SplitserveError
from splitserve.grammars import child
from splitserve.grammars.forms import check_grammar, refused
from splitserve.logs import log_event
from splitserve.runtime.call_thread import SharedCalls
from splitserve.runtime.child_launch import launcher, python_module
from splitserve.runtime.fair_lane import FairLane
from splitserve.v1 import generation_pb2

QUICK_CPU_S, SLOW_CPU_S = 0.05, 1.0
QUICK_AT_ONCE = max(1, min(4, len(os.sched_getaffinity(0)) // 2))
"""At most half of the cores: of grammars that share a core, the smallest waits for all others."""
MAX_WAITING = 64
"""Maximum number of grammars of one tenant that wait for a lane."""
BUSY = "GRAMMARS_BUSY"
ANSWER_S = 20.0
"""Time within which a process must answer, also on a busy machine. Wall-clock time."""
CACHED_VERDICTS = 256
COSTLY = f"it takes more than {SLOW_CPU_S:g} s or too much memory to compile, or it ends the compiler"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's vocabulary, as the compiler needs it.

    `definition`: the text of its `tokenizer.json`; None: a token is the byte of its number. `tokens`: the bytes of each
    token, as the characters of a text. `eos`: ids of the tokens that end an answer.
    """

    definition: str | None
    tokens: list[str]
    eos: list[int]


class Connection:
    """The socket of one grammar's process. Used on one thread at a time; nothing here waits."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self.channel = channel
        self._unsent = b""
        self._received = bytearray()
        self.ended = False
        """Whether the process has ended, or will because its connection is closed."""
        self.eos_token_ids: frozenset[int] = frozenset()
        """The vocabulary's tokens that end an answer; known once the grammar is compiled."""

    def send(self, frame: bytes) -> None:
        """Sends a frame, now or with a later call of `receive`."""
        self._unsent += child.LENGTH.pack(len(frame)) + frame
        self._flush()

    def receive(self) -> list[bytes]:
        """The frames that have arrived whole since the last call."""
        self._flush()
        with suppress(BlockingIOError):
            while not self.ended:
                try:
                    data = self.channel.recv(1 << 18)
                except ConnectionError:
                    data = b""
                self.ended = not data
                self._received += data
        frames, start = [], 0
        while len(self._received) >= start + child.LENGTH.size:
            end = start + child.LENGTH.size + child.LENGTH.unpack_from(self._received, start)[0]
            if end > len(self._received):
                break
            frames.append(bytes(self._received[start + child.LENGTH.size : end]))
            start = end
        del self._received[:start]
        return frames

    def _flush(self) -> None:
        with suppress(BlockingIOError):
            while self._unsent and not self.ended:
                try:
                    self._unsent = self._unsent[self.channel.send(self._unsent) :]
                except ConnectionError:
                    self._unsent = b""  # the answers before are still to be read

    async def readable(self) -> None:
        """Waits until there is something to receive. On the event loop."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.channel, ready.set)
        if self._unsent:
            loop.add_writer(self.channel, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self.channel)
            loop.remove_writer(self.channel)

    def close(self) -> None:
        """Ends the process."""
        self.ended = True
        self.channel.close()


class GrammarProcesses:
    """The compiler of a process: checks grammars without a vocabulary, or compiles them for one model's."""

    def __init__(self, vocabulary: Callable[[], Vocabulary] | None = None) -> None:
        self._vocabulary = vocabulary
        self._control: socket.socket | None = None
        self._parent: subprocess.Popen[bytes] | None = None
        self._quick, self._slow = FairLane(QUICK_AT_ONCE), FairLane(1)
        self._verdicts: OrderedDict[bytes, InvalidArgumentError | None] = OrderedDict()
        self._checks: SharedCalls[None] = SharedCalls()

    def start(self) -> None:
        """Starts the child process unless it runs. Does not wait until it has loaded the library and the vocabulary."""
        if self._parent is not None and self._parent.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as vocabulary_file:
            vocabulary = None if self._vocabulary is None else asdict(self._vocabulary())
            vocabulary_file.write(json.dumps(vocabulary).encode())
            vocabulary_file.flush()
            descriptors = theirs.fileno(), vocabulary_file.fileno()
            command = [*launcher(), *python_module(child.__name__), *map(str, descriptors)]
            self._parent = subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL)
        self._control = ours
        log_event("grammars.started", pid=self._parent.pid)

    def close(self) -> None:
        """Ends the child process. A grammar's process ends when its connection is closed. Idempotent."""
        if self._control is not None:
            self._control.close()
        if self._parent is not None:
            self._parent.kill()
            self._parent.wait()
        self._control = self._parent = None

    async def check(self, grammar: generation_pb2.Grammar, tenant: object = None) -> None:
        """Raises InvalidArgumentError naming the field of a grammar that does not compile. See `compiled`.

        Equal grammars that are checked at the same time are compiled once. The latest verdicts are remembered. A check
        ends when its last caller is cancelled.
        """
        key = grammar.SerializeToString(deterministic=True)
        if key not in self._verdicts:

            async def compile_once() -> None:
                try:
                    (await self.compiled(grammar, tenant)).close()
                except InvalidArgumentError:
                    return  # the verdict is remembered, and raised below

            await self._checks.result(key, compile_once)
        self._raise_remembered(key)

    async def compiled(self, grammar: generation_pb2.Grammar, tenant: object = None) -> Connection:
        """A connection to a new process that has compiled a grammar. Call it on the event loop.

        Raises InvalidArgumentError, with the field, for a grammar that is malformed, not supported, too costly, or that
        no text of the vocabulary satisfies; ResourceExhaustedError (GRAMMARS_BUSY) if too many of the tenant's wait.
        """
        check_grammar(grammar)
        key = grammar.SerializeToString(deterministic=True)
        self._raise_remembered(key)
        try:
            connection = await self._compiled_in_turn(grammar, tenant, self._quick, QUICK_CPU_S)
            if connection is None:
                connection = await self._compiled_in_turn(grammar, tenant, self._slow, SLOW_CPU_S)
            if connection is None:
                raise refused(grammar, COSTLY)
        except InvalidArgumentError as error:
            self._remember(key, error)
            raise
        self._remember(key, None)
        return connection

    def begin(self, grammar: generation_pb2.Grammar, cpu_s: float) -> Connection:
        """A connection to a process that compiles a grammar in at most `cpu_s` seconds of CPU time, or ends.

        Thread-safe. Raises ResourceExhaustedError (GRAMMARS_BUSY) while there is no child process to fork from.
        """
        ours, theirs = socket.socketpair()
        connection = Connection(ours)
        with theirs:
            try:
                if self._control is None:
                    raise BrokenPipeError
                socket.send_fds(self._control, [b"g"], [theirs.fileno()], socket.MSG_DONTWAIT)
            except OSError:
                connection.close()
                raise _busy("the process that compiles grammars is not there") from None
        kind = grammar.WhichOneof("kind")
        niceness = child.SLOW_NICENESS if cpu_s > QUICK_CPU_S else 0
        text = str(getattr(grammar, kind or ""))
        order = {"kind": kind, "text": text, "cpu_s": cpu_s, "niceness": niceness}
        connection.send(json.dumps(order).encode())
        return connection

    async def _compiled_in_turn(
        self, grammar: generation_pb2.Grammar, tenant: object, lane: FairLane, cpu_s: float
    ) -> Connection | None:
        if lane.waiting(tenant) >= MAX_WAITING:
            raise _busy(f"{MAX_WAITING} others of this tenant wait already")
        async with lane.turn(tenant, grammar.ByteSize()):
            return await self._compiled(grammar, cpu_s)

    async def _compiled(self, grammar: generation_pb2.Grammar, cpu_s: float) -> Connection | None:
        """A connection to a process that has compiled a grammar; None if the process has ended."""
        self.start()
        connection, frames, compiled = self.begin(grammar, cpu_s), list[bytes](), False
        try:
            async with asyncio.timeout(ANSWER_S):
                while len(frames) < 2 and not connection.ended:
                    await connection.readable()
                    frames += connection.receive()
            if not frames:
                raise _busy("no process can be started to compile the grammar")
            if len(frames) == 2 and frames[1].startswith(child.REFUSED):
                raise refused(grammar, frames[1].removeprefix(child.REFUSED).decode(errors="replace"))
            if compiled := len(frames) == 2:
                ids = array("I", frames[1].removeprefix(child.COMPILED))
                connection.eos_token_ids = frozenset(ids)
            return connection if compiled else None
        except TimeoutError:
            raise _busy(f"the grammar was not compiled in {ANSWER_S:g} s") from None
        finally:
            if not compiled:
                connection.close()

    def _remember(self, key: bytes, error: InvalidArgumentError | None) -> None:
        self._verdicts[key] = error
        if len(self._verdicts) > CACHED_VERDICTS:
            self._verdicts.popitem(last=False)

    def _raise_remembered(self, key: bytes) -> None:
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            if (error := self._verdicts[key]) is not None:
                raise InvalidArgumentError(error.message, reason=error.reason, field=error.field)


def _busy(message: str) -> SplitserveError:
    return ResourceExhaustedError(message, reason=BUSY, retry_after_s=1.0)
