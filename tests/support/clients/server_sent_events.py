"""Server-sent events of the APIs that name each event by its type."""

from __future__ import annotations

import json
from typing import Any


def typed_events(data: bytes) -> list[dict[str, Any]]:
    """The data of the events, each of which has the name that its data have as their type."""
    shown = []
    for each in data.decode().removesuffix("\n\n").split("\n\n"):
        name, _, body = each.partition("\ndata: ")
        shown.append(json.loads(body))
        assert name == f"event: {shown[-1]['type']}"
    return shown
