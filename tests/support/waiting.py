"""How long tests wait: one limit for all that must happen in the end, which no busy machine reaches."""

from __future__ import annotations

PATIENCE_S = 180.0
"""For a process to start, answer, settle or end. What happens sooner is noticed at once; only failures take so long."""
LEAST_TIMEOUT_S = 400.0
"""The least timeout of a test as a whole, so that the wait that fails tells what it waited for."""
SLACK_S = 60.0
"""What a busy machine may add to a time that a test bounds from above: the bound tells a mechanism from another that is
much slower, not a fast machine from a slow one."""
