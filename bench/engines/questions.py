"""What an engine process is asked and what it answers, one JSON object a line.

Imports the standard library alone, for peers run it in environments of their own. A question is
`{"phase": "decode" | "prefill", "batch": n, "context": tokens, "steps": n}`, the answer `{"step_s": [...]}`: for decode
the time of each step in which all `batch` sequences got a token, beginning at a context of `context`; for prefill that
of each of `steps` whole prompts of `context` tokens, first token included. Our own engine also gives `outside_s`, the
part of a decode step outside the model, and answers `{"phase": "limits"}` with what the machine gives.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]
Question = dict[str, Any]


def serve(start: Callable[[], Callable[[Question], Answer]]) -> None:
    """Starts an engine and answers until the input ends. What libraries print goes to stderr, not between answers."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    answer = start()
    out.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        out.write(json.dumps(answer(json.loads(line))) + "\n")
