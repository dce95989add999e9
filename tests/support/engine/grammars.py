"""Compiled grammars for tests that have no event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from engine.core.model_runner import ModelFacts
from engine.runner.structured_output import CompiledGrammar, GrammarCompiler, GrammarMatcher
from splitserve.models.tokenizer import Tokenizer
from splitserve.v1.generation_pb2 import Grammar, SamplingParams
from tests.support.waiting import PATIENCE_S


class TestCompiler:
    """A GrammarCompiler whose processes start with its first grammar."""

    __test__ = False

    def __init__(self, tokenizer: Tokenizer, facts: ModelFacts) -> None:
        self.compiler = GrammarCompiler(tokenizer, facts)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar."""
        compiled = asyncio.run(self.compiler.compiled(SamplingParams(grammar=grammar)))
        assert compiled is not None
        answered = compiled.wait
        # Steps do not depend on how fast the grammar's process is.
        compiled.wait = lambda matcher, timeout_s: answered(matcher, PATIENCE_S)  # type: ignore[method-assign]
        return compiled

    def close(self) -> None:
        """Ends the processes."""
        self.compiler.close()


def asked(grammar: CompiledGrammar, output: Sequence[int] = ()) -> GrammarMatcher:
    """The answered state of an output."""
    matcher = grammar.matcher()
    matcher.advance(output)
    deadline_s = time.monotonic() + PATIENCE_S
    while not matcher.wait(0.1):
        assert time.monotonic() < deadline_s
    return matcher
