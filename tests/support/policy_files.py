"""A policy file that a test edits."""

from __future__ import annotations

from autoscaler.policy_in_force import LoadedPolicy, PolicyFile


def reread(file: PolicyFile) -> None:
    """Reads it if it has changed, as its `FileWatcher` does once it stands still."""
    files = file.files
    while files.is_due() or files.is_due():  # the first reading may find out that other files are named
        files.reload()


def polled(file: PolicyFile) -> LoadedPolicy | None:
    """What its loop hears at its next tick."""
    reread(file)
    return file.poll()
