"""The child process that forks the processes of grammars: `python -m` this module with two descriptors, see `main`.

The child process loads llguidance and the model's vocabulary once. It then forks a process for each grammar, and never
looks at a grammar itself: whatever a grammar does to its own process, the child process lives on. The kernel ends a
grammar's process that exceeds its memory, or the CPU time of one answer.

A frame on a grammar's socket is a length, uint32, and as many bytes. The grammar's process sends HELLO, receives the
grammar, sends COMPILED or REFUSED, and then answers rows in order. A row is the output of one request. The process ends
when its socket is closed.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import signal
import socket
import struct
import sys
import time
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from splitserve.grammars import schemas
from splitserve.grammars.refusals import refusal_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

HELLO, COMPILED, REFUSED = b"hello", b"compiled", b"refused "
LENGTH = struct.Struct("<I")
ROW = struct.Struct("<IB")
"""A row's number, and ASK or CLOSE in a question, MASK, COMPLETE or FAILED in an answer."""
ASK, CLOSE = 0, 1
"""ASK: the row's next tokens follow, uint32 each; the answer says what may come after them. CLOSE: the row has
ended."""
MASK, COMPLETE, FAILED = 0, 1, 2
"""MASK: one bit for each token that may follow. COMPLETE: only the end may follow. FAILED: why nothing may follow."""

STEP_CPU_S = 0.25
"""CPU time that an answer may take, beside TOKEN_CPU_S for each token of the question."""
TOKEN_CPU_S = 0.001
MEMORY_BYTES = 96 * 2**20
"""Memory that a grammar's process may allocate beyond the library and the vocabulary."""
STACK_BYTES = 128 * 2**20
NICENESS = 10
"""Rows without a grammar come first where cores are short."""
SLOW_NICENESS = 5
"""Added to NICENESS for grammars in the slow lane, so that quick ones come first."""
SESSION_NICENESS = 5
"""Niceness of the child process's session against all other sessions on the machine."""

_EMBEDDED = re.compile(r"(?:^(\w+)\[capture\]\s*:\s*)?%json\s*", re.MULTILINE)


class GrammarRefusedError(Exception):
    """Why a grammar does not compile."""


def main(control: socket.socket, vocabulary: Any) -> None:
    """Forks a process for each socket that arrives through `control`, until `control` is closed.

    `vocabulary`: the fields of `splitserve.grammars.processes.Vocabulary`; None to check grammars without one.
    """
    import jsonschema_rs  # noqa: F401 - here, so that the forked processes need not

    tokenizer = tokenizer_of(vocabulary)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard_limit = resource.getrlimit(resource.RLIMIT_STACK)  # negative: no limit
    stack_bytes = STACK_BYTES if hard_limit < 0 else min(STACK_BYTES, hard_limit)
    resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, hard_limit))
    be_nice()
    # The library writes to stderr before it aborts.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    gc.collect()
    gc.freeze()
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        if _forked():
            control.close()
            try:
                serve(socket.socket(fileno=descriptors[0]), tokenizer)
            finally:
                os._exit(0)
        os.close(descriptors[0])


def be_nice() -> None:
    """Lets all other processes on the machine run first, those of other sessions too.

    Linux divides the cores between sessions before it looks at the niceness of processes. So the child process makes a
    session for itself and its forks. All users together may set the niceness of sessions ten times a second.
    """
    os.setsid()
    os.nice(NICENESS)
    for _ in range(20):
        try:
            with open("/proc/self/autogroup", "w") as session:
                session.write(str(SESSION_NICENESS))
            return
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # a kernel or container without niceness of sessions
            return


def _forked() -> bool:
    try:
        return os.fork() == 0
    except OSError:
        return False  # no more processes: the socket is closed without a word


def serve(channel: socket.socket, tokenizer: LLTokenizer | str | None) -> None:
    """Compiles the grammar that arrives through `channel` and answers its rows."""
    bound_memory(MEMORY_BYTES)
    frames = channel.makefile("rb")
    _send(channel, HELLO)
    order = json.loads(_read(frames) or b"{}")
    os.nice(order["niceness"])
    allow(order["cpu_s"])
    try:
        if isinstance(tokenizer, str):
            raise GrammarRefusedError(tokenizer)
        grammar = LibraryGrammar(order["kind"], order["text"], tokenizer)
    except (GrammarRefusedError, schemas.SchemaError, MemoryError) as error:
        _send(channel, REFUSED + (str(error) or "it takes too much memory").encode())
        return
    allow(0)
    _send(channel, COMPILED + grammar.eos.tobytes())
    rows: dict[int, GrammarRow] = {}
    while (frame := _read(frames)) is not None:
        number, what = ROW.unpack_from(frame)
        if what == CLOSE:
            rows.pop(number, None)
            continue
        tokens = array("I", frame[ROW.size :])
        allow(STEP_CPU_S + TOKEN_CPU_S * len(tokens))
        row = rows.get(number) or rows.setdefault(number, GrammarRow(grammar))
        status, answer = row.advance(tokens.tolist())
        allow(0)
        _send(channel, ROW.pack(number, status) + answer)


def bound_memory(more_bytes: int) -> None:
    """Lets this process allocate `more_bytes` beyond the memory it has now."""
    with open("/proc/self/statm") as pages:
        used = int(pages.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + more_bytes, used + more_bytes))


def allow(cpu_s: float) -> None:
    """Has the kernel end this process after `cpu_s` more seconds of CPU time; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _send(channel: socket.socket, frame: bytes) -> None:
    channel.sendall(LENGTH.pack(len(frame)) + frame)


def _read(frames: BinaryIO) -> bytes | None:
    head = frames.read(LENGTH.size)
    return frames.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else None


class LibraryGrammar:
    """A grammar, compiled for a vocabulary or, without one, only checked."""

    def __init__(self, kind: str, text: str, tokenizer: LLTokenizer | None) -> None:
        """Raises GrammarRefusedError and SchemaError."""
        from llguidance import LLMatcher as Matcher

        self._schemas: dict[str, dict[str, Any]] = {}
        """The prepared schemas by their names."""
        self.checks: dict[str, schemas.Check] = {}
        """The check of the whole answer under "", and of each part that the grammar captures under its name."""
        self.eos = array("I", tokenizer.eos_tokens if tokenizer is not None else ())
        source = self._source(kind, text)
        if tokenizer is None:
            refused, messages = Matcher.validate_grammar_with_warnings(source, limits=_limits())
            if refused:
                raise self._refusal(" ".join(messages))
            return
        self.tokenizer = tokenizer
        self._prototype = Matcher(tokenizer, source, log_level=0, limits=_limits())
        if not self._prototype.is_error():
            # The first mask detects grammars that no token can begin, and fills the caches that all rows share.
            self._prototype.compute_bitmask()
        if self._prototype.is_error():
            raise self._refusal(self._prototype.get_error() or self._prototype.stop_reason())

    def _refusal(self, error: str) -> GrammarRefusedError:
        """The error of the first schema that does not compile by itself, else the library's."""
        return GrammarRefusedError(refusal_of(self._schemas, error, _error_of))

    def matcher(self) -> LLMatcher:
        """The state of an empty output."""
        return self._prototype.deep_copy()

    def only_end(self) -> bytes:
        """The mask of the tokens that end an answer."""
        mask = bytearray(-(-self.tokenizer.vocab_size // 32) * 4)
        for token in self.eos:
            mask[token // 8] |= 1 << token % 8
        return bytes(mask)

    def _source(self, kind: str, text: str) -> str:
        from llguidance import LLMatcher as Matcher

        match kind:
            case "regex":
                return Matcher.grammar_from_regex(text)
            case "lark":
                return Matcher.grammar_from_lark(self._with_schemas(text))
            case "json_schema":
                schema, self.checks[""] = schemas.prepared(json.loads(text))
                self._schemas[""] = schema
            case _:
                schema = {"type": "object", "x-guidance": schemas.OPTIONS}
        try:
            return Matcher.grammar_from_json_schema(json.dumps(schema))
        except ValueError as error:  # its parser is stricter than Python's
            raise GrammarRefusedError(str(error)) from None

    def _with_schemas(self, lark: str) -> str:
        """A Lark grammar with its embedded schemas prepared.

        A schema that the grammar captures gets a check; any other one is strict, see `schemas`.
        """
        decoder, parts, end = json.JSONDecoder(), [], 0
        while (start := _EMBEDDED.search(lark, end)) is not None:
            parts.append(lark[end : start.end()])
            end = start.end()
            try:
                schema, after = decoder.raw_decode(lark, end)
            except (ValueError, RecursionError):
                continue  # the library refuses it, too
            if isinstance(schema, dict | bool):
                name = start.group(1)
                if name is None and isinstance(schema, dict):
                    schema = {"x-guidance": schemas.STRICT, **schema}
                schema, check = schemas.prepared(schema, name or "%json")
                if name is not None:
                    self.checks[name], self._schemas[name] = check, schema
                parts.append(json.dumps(schema))
                end = after
        return "".join([*parts, lark[end:]])


class GrammarRow:
    """The output of one request within a grammar."""

    def __init__(self, grammar: LibraryGrammar) -> None:
        self._grammar, self._matcher = grammar, grammar.matcher()
        self._tokens: list[int] = []

    def advance(self, tokens: list[int]) -> tuple[int, bytes]:
        """Takes the next tokens; returns MASK, COMPLETE or FAILED, and the answer's content."""
        matcher = self._matcher
        if tokens and not matcher.consume_tokens(tokens):
            return FAILED, self._error()
        self._tokens += tokens
        problem, final = "", False
        if self._grammar.checks and matcher.is_accepting():
            problem, final = self._problem()
        if final:
            return FAILED, problem.encode()
        if matcher.is_stopped() and not matcher.is_error() and matcher.is_accepting() and not problem:
            return COMPLETE, self._grammar.only_end()
        mask = bytearray(matcher.compute_bitmask())
        if matcher.is_error():
            return FAILED, self._error()
        if problem:  # the answer may not end here, but it may go on
            for token in self._grammar.eos:
                mask[token // 8] &= ~(1 << token % 8)
            if not any(mask):
                return FAILED, problem.encode()
        return MASK, bytes(mask)

    def _problem(self) -> tuple[str, bool]:
        """Why the answer may not end here, empty if it may; and whether no further token can change that."""
        checks, decoded = self._grammar.checks, self._grammar.tokenizer.decode_bytes
        if (whole := checks.get("")) is not None:
            return whole(decoded(self._tokens).decode(errors="replace")), False
        for name, part in self._matcher.get_captures():
            problem = checks[name](part.decode(errors="replace")) if name in checks else ""
            if problem:
                return f"{name}: {problem}", not decoded(self._tokens).endswith(part)
        return "", False

    def _error(self) -> bytes:
        return (self._matcher.get_error() or self._matcher.stop_reason()).encode()


def _error_of(schema: Mapping[str, Any]) -> str:
    """The library's error for a schema; empty if the schema compiles."""
    from llguidance import LLMatcher as Matcher

    try:
        source = Matcher.grammar_from_json_schema(json.dumps(schema))
    except ValueError as error:
        return str(error)
    refused, messages = Matcher.validate_grammar_with_warnings(source, limits=_limits())
    return " ".join(messages) if refused else ""


def _limits() -> LLParserLimits:
    """Cost limits of one grammar, in llguidance's units. Real schemas stay far below: 10,000 enum values or 500
    optional properties pass."""
    from llguidance import LLParserLimits as Limits

    return Limits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=200_000,
        step_max_items=10_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class _Tokens:
    """A model's vocabulary, in the form that llguidance's `TokenizerWrapper` takes.

    A tag such as `<tool_call>` is text to a grammar. The library's own reader of tokenizers takes it for a sign that no
    text contains, so that a grammar would keep the model from writing it as one token.
    """

    def __init__(self, tokens: list[bytes], eos: list[int], definition: str | None) -> None:
        self.tokens, self.special_token_ids = tokens, eos
        self.eos_token_id, self.bos_token_id = eos[0] if eos else None, None
        self._encode = None
        if definition is not None:
            from tokenizers import Tokenizer

            self._encode = Tokenizer.from_str(definition).encode
        self.library: LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        """The tokens that a model would write, if they are exactly the text: some tokenizers add a space."""
        exact = text.encode()
        if self._encode is None:
            return list(exact)
        tokens: list[int] = self._encode(text, add_special_tokens=False).ids
        if b"".join(self.tokens[token] for token in tokens) == exact:
            return tokens
        assert self.library is not None
        return self.library.greedy_tokenize(text)


def tokenizer_of(vocabulary: Any) -> LLTokenizer | str | None:
    """The vocabulary for llguidance, or why it cannot be read. Takes 0.5 s of CPU time for 50,000 tokens."""
    from llguidance import LLTokenizer as Tokenizer
    from llguidance import TokenizerWrapper

    if vocabulary is None:
        return None
    eos = vocabulary["eos"]
    try:
        tokens = _Tokens(
            [token.encode("latin-1") for token in vocabulary["tokens"]], eos, vocabulary["definition"]
        )
        tokens.library = Tokenizer(TokenizerWrapper(tokens), eos_token=eos or None)
    except Exception as error:  # the library `tokenizers` raises no narrower type
        return f"grammars are not supported for this model's tokenizer: {error}"
    return tokens.library


if __name__ == "__main__":
    with open(int(sys.argv[2]), "rb") as vocabulary_file:
        vocabulary_file.seek(0)
        model_vocabulary = json.load(vocabulary_file)
    main(socket.socket(fileno=int(sys.argv[1])), model_vocabulary)
