"""A Mooncake Store in this process's memory, as far as workers that share one use it."""

from __future__ import annotations

import ctypes
import threading

from engine.tiers.stores.mooncake_store import SharedMooncakeStore
from tests.support.waiting import PATIENCE_S


class FakeMooncake:
    """The objects of a master, and what its clients do with them."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.may_answer = threading.Event()
        """Questions wait for it."""
        self.may_answer.set()
        self.asked = threading.Event()
        """Set by a question."""
        self.fails = False
        self.questions: list[int] = []
        """Keys in each."""
        self.writes = self.closes = 0

    def register_buffer(self, _address: int, _size: int) -> int:
        return 0

    def put_from(self, key: str, address: int, size: int) -> int:
        return 0 if key in self.objects else self.upsert_from(key, address, size)

    def upsert_from(self, key: str, address: int, size: int) -> int:
        self.writes += 1
        self.objects[key] = ctypes.string_at(address, size)
        return -1 if self.fails else 0

    def get_into(self, key: str, address: int, size: int) -> int:
        if self.fails:
            return -1
        held = self.objects.get(key)
        if held is None:
            return -704
        ctypes.memmove(address, held, min(size, len(held)))
        return len(held)

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.asked.set()
        self.may_answer.wait(PATIENCE_S)
        self.questions.append(len(keys))
        return [-1 if self.fails else int(key in self.objects) for key in keys]

    def close(self) -> None:
        self.closes += 1
        self.may_answer.set()

    def store(self, block_bytes: int, slots: int, identity: bytes = bytes(32)) -> SharedMooncakeStore:
        """Of another worker."""
        return SharedMooncakeStore(self, block_bytes, slots, identity, "fake:1")
