"""Refuses grammars that cannot be compiled, before any worker hears of the request."""

from __future__ import annotations

from collections import OrderedDict

from splitserve.grammar_thread import GrammarThread
from splitserve.grammars import check_grammar, compile_limits, llguidance_source, refused
from splitserve.v1 import generation_pb2

REMEMBERED_GRAMMARS = 256


class GrammarCheck:
    """Compiles grammars without a vocabulary, on a thread of its own; remembers those that were fine.

    A worker compiles them again for its model, and may still refuse what only the vocabulary shows.
    """

    def __init__(self) -> None:
        self._thread = GrammarThread()
        self._fine: OrderedDict[bytes, None] = OrderedDict()

    async def check(self, sampling: generation_pb2.SamplingParams) -> None:
        """Raises InvalidArgumentError naming the field and what is wrong with the grammar, if there is one."""
        if not sampling.HasField("grammar"):
            return
        key = sampling.grammar.SerializeToString(deterministic=True)
        if key not in self._fine:
            await self._thread.run(lambda: check_compiles(sampling.grammar))
            self._fine[key] = None
        self._fine.move_to_end(key)
        if len(self._fine) > REMEMBERED_GRAMMARS:
            self._fine.popitem(last=False)


def check_compiles(grammar: generation_pb2.Grammar) -> None:
    """Checks bounds and compiles; needs a thread with a stack of STACK_BYTES. Raises InvalidArgumentError."""
    from llguidance import LLMatcher

    check_grammar(grammar)
    source = llguidance_source(grammar)
    wrong, messages = LLMatcher.validate_grammar_with_warnings(source, limits=compile_limits())
    if wrong:
        raise refused(grammar, " ".join(messages))
