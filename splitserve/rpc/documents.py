"""Messages as JSON for people and programs: `explain --json`, `top --json` and the page show the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.message import Message

TIMESTAMP = "google.protobuf.Timestamp"


def document(message: Message) -> dict[str, Any]:
    """A message as a JSON object with all fields, numbers as numbers, times as ISO 8601; None where none was set."""
    # protobuf's own JSON prints 64-bit numbers as strings and leaves out zeros.
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def _value(message: Message, field: Any) -> Any:
    if field.is_repeated:
        items = getattr(message, field.name)
        return [document(item) for item in items] if field.message_type else list(items)
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if not field.message_type:
        return value
    return value.ToJsonString() if field.message_type.full_name == TIMESTAMP else document(value)
