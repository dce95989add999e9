"""Files and batches as the folder keeps them and as clients see them.

Objects of https://platform.openai.com/docs/api-reference/files and .../batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Purpose = Literal["batch", "batch_output"]
Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "cancelling", "cancelled", "expired", "failed"
]
FOLLOWING: Mapping[Status, tuple[Status, ...]] = MappingProxyType(
    {
        "validating": ("in_progress", "cancelling", "expired", "failed"),
        "in_progress": ("finalizing", "cancelling", "expired", "failed"),
        "finalizing": ("completed", "failed"),
        "cancelling": ("cancelled", "failed"),
    }
)
"""The statuses that may follow each unfinished one."""
FILE_PREFIX, BATCH_PREFIX = "file-", "batch_"


def new_id(prefix: str) -> str:
    """A new id; it is also the name of a file in the folder."""
    return prefix + secrets.token_hex(16)


class StoredFile(BaseModel):
    """A file of a tenant."""

    model_config = ConfigDict(frozen=True)

    id: str
    tenant: str
    filename: str
    bytes: int
    created_at: int
    """Seconds since the epoch, as all times here."""
    purpose: Purpose

    def shown(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return self.model_dump(exclude={"tenant"}) | {"object": "file", "status": "processed"}


class Batch(BaseModel):
    """A batch of a tenant. Only the folder changes it."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    """The latter two are chosen with the batch. They become files of the tenant when it ends, if they have lines."""
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    times: dict[str, int] = {}
    """When it got each status: `in_progress_at`, …"""
    lines: int = 0
    """Lines of the input file, empty ones included; known once it is validated."""
    total: int = 0
    """Requests."""
    completed: int = 0
    failed: int = 0
    """Lines of the file of results, and of that of errors."""
    errors: list[dict[str, Any]] = []
    """Why the input is invalid: OpenAI's error objects."""

    @property
    def is_over(self) -> bool:
        """Whether its status is the last one."""
        return self.status not in FOLLOWING

    def shown(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        return self.model_dump(exclude={"tenant", "times", "lines", *counts}) | {
            "object": "batch",
            "output_file_id": self.output_file_id if self.is_over and self.completed else None,
            "error_file_id": self.error_file_id if self.is_over and self.failed else None,
            "request_counts": counts,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            **self.times,
        }
