"""How long an answer will be: learned for each session, tenant and model, in a bounded table."""

from __future__ import annotations

from collections import OrderedDict

from coordinator.request_validation import Generation
from coordinator.route_scores import TYPICAL_OUTPUT_TOKENS
from coordinator.signal_book import LearnedMean

MAX_ROUTES = 4096

Route = tuple[str, str, str]
"""Model, tenant and session; the last ones empty where all are meant."""


class OutputLengths:
    """Mean output tokens of what ended. The routes that nothing used for longest are forgotten first."""

    def __init__(self, max_routes: int = MAX_ROUTES) -> None:
        self._max_routes = max_routes
        self._means: OrderedDict[Route, LearnedMean] = OrderedDict()

    def ended(self, generation: Generation, output_tokens: int) -> None:
        """Takes the length of a complete answer."""
        for route in _routes(generation):
            mean = self._means.get(route)
            if mean is None:
                mean = self._means[route] = LearnedMean(0.0)
            self._means.move_to_end(route)
            mean.add(output_tokens)
        while len(self._means) > self._max_routes:
            self._means.popitem(last=False)

    def expected(self, generation: Generation) -> float:
        """Output tokens to expect: the mean of the narrowest route that is known, at most what was asked for."""
        known = next((mean for route in _routes(generation) if (mean := self._means.get(route))), None)
        return min(known.value if known else float(TYPICAL_OUTPUT_TOKENS), generation.max_tokens)


def _routes(generation: Generation) -> tuple[Route, ...]:
    model, tenant = generation.model.name, generation.caller.tenant
    wide = (model, tenant, ""), (model, "", "")
    return ((model, tenant, generation.session_id), *wide) if generation.session_id else wide
