"""Handoffs between two engines' orders: whole blocks on one side, rows of layers on the other, checksums between."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.kv_cache.axis_orders import BlockConverter, keys_and_values
from engine.kv_cache.memory import KvCacheMemory
from engine.vllm.kv_memory import converter_of, kv_region, read_blocks
from kv_transfer.handoff.checksums import HandoffVerifier
from kv_transfer.handoff.notification import WriteCompletion, decode
from kv_transfer.handoff.pusher import KvPusher
from kv_transfer.handoff.reservation_actions import Admit, Rejected
from kv_transfer.handoff.reservation_table import ReservationTable
from kv_transfer.handoff.ticket import KvTicket
from kv_transfer.layout import AXIS_ORDER, KEYS_BY_DIM, KvLayout
from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from kv_transfer.transports.nixl.transport import NixlTransport
from kv_transfer.transports.transport import TransferEndpoint, Transport
from kv_transfer.wire_format import PlainWire
from tests.support.waiting import PATIENCE_S

LAYERS, HEADS, TOKENS, DIM, BLOCKS = 3, 2, 32, 16, 12
LAYOUT = KvLayout("f" * 64, "float32", TOKENS, LAYERS, HEADS, DIM)
EPOCH, FIRST_TOKEN, NOW = 9, 7, 1.0


class Pool:
    """KV of one engine with its wire. `kv` is a copy of it, `[layers, 2, blocks, heads, tokens, dim]`."""

    def __init__(self, order: str) -> None:
        self.order = order
        if order == AXIS_ORDER:
            self._memory = KvCacheMemory(LAYOUT, BLOCKS, torch.device("cpu"))
            pieces = self._memory.tensor.flatten(2)
            self.layers = [pieces[:, layer] for layer in range(LAYERS)]
            converter = BlockConverter(LAYOUT, self.layers)
            self.wire = PlainWire(self._memory.memory, self._memory.read_blocks, converter)
        else:
            rows = torch.zeros(LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIM)
            tensors = {str(layer): rows[layer] for layer in range(LAYERS)}
            self.layers = list(rows.flatten(2))
            region = kv_region(tensors, LAYOUT.model_fingerprint, order, "v")
            region = replace(region, probe_blocks=0)
            self.wire = PlainWire(
                lambda: region, lambda ids: read_blocks(region, ids), converter_of(tensors, region.layout)
            )

    def stamp(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            layer.copy_(torch.randn(layer.shape, generator=draw))

    @property
    def kv(self) -> torch.Tensor:
        return torch.stack(
            [torch.stack(keys_and_values(layer, self.order, LAYOUT)) for layer in self.layers]
        ).clone()


class Handoff:
    """One ticket from a pool to another, on a transport."""

    def __init__(self, kind: str, order: str, other: str, blocks: Sequence[int], one_in: int) -> None:
        hub = MemoryHub()
        self.sender: Transport = MemoryTransport(hub) if kind == "memory" else NixlTransport()
        self.owner: Transport = MemoryTransport(hub) if kind == "memory" else NixlTransport()
        self.source, self.target = Pool(order), Pool(other)
        self.source.stamp(1)
        self.target.stamp(2)
        self.sender.register_memory(self.source.wire.memory)
        endpoint = self.owner.register_memory(self.target.wire.memory)
        endpoint = TransferEndpoint.from_proto(endpoint.to_proto())
        self.sender.connect(endpoint)
        self.verifier = HandoffVerifier(EPOCH, one_in, self.target.wire)
        self.table = ReservationTable(
            EPOCH,
            lease_s=5.0,
            quarantine_s=5.0,
            content_matches=self.verifier.matches,
            orders=self.target.wire.orders,
        )
        size, tokens = LAYOUT.block_bytes, len(blocks) * TOKENS - 5
        number = self.table.open("r", "c", len(blocks), size, 100.0, NOW)
        self.verifier.expect(number, blocks, tokens)
        ticket = KvTicket(
            endpoint.agent_id,
            EPOCH,
            number,
            tuple(blocks),
            0,
            len(blocks) * size,
            deadline_s=100.0,
            verify_one_in=one_in,
        )
        self.pusher = KvPusher(self.sender, self.source.wire)
        self.pusher.start("r", ticket, endpoint, NOW)

    def run(self, table: Sequence[int], *, half: bool) -> bytes:
        """Pushes blocks in one chunk or two; returns the completion."""
        tokens = len(table) * TOKENS - 5
        if half:
            self.pusher.on_progress("r", tokens // 2, table[: len(table) // 2 + 1], False, None, NOW)
        self.pusher.on_progress("r", tokens, table, True, FIRST_TOKEN, NOW)
        arrived: list[tuple[str, bytes]] = []
        events, end = [], time.monotonic() + PATIENCE_S
        while not (events and arrived):
            assert time.monotonic() < end
            events += self.pusher.poll(NOW)
            arrived += self.owner.poll().notifications
        ((self.writer_id, message),) = arrived
        return message

    def close(self) -> None:
        self.sender.close()
        self.owner.close()


ORDERS = [(AXIS_ORDER, KEYS_BY_DIM), (KEYS_BY_DIM, AXIS_ORDER), (KEYS_BY_DIM, KEYS_BY_DIM)]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("one_in", [0, 1, 16])
@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("kind", ["memory", "nixl"])
def test_keys_and_values_arrive_in_the_owners_order(
    kind: str, orders: tuple[str, str], one_in: int, half: bool
) -> None:
    local, remote = [3, 4, 11, 0], [5, 6, 0, 2]
    handoff = Handoff(kind, *orders, remote, one_in)
    sent, before = handoff.source.kv, handoff.target.kv
    message = handoff.run(local, half=half)
    done = decode(message)
    assert isinstance(done, WriteCompletion)
    assert done.axis_order == ("" if orders[0] == orders[1] else orders[0])
    verdict = handoff.table.on_notification(handoff.writer_id, message, NOW)
    assert isinstance(verdict, Admit), verdict
    handoff.target.wire.unpack(remote, verdict.axis_order)
    received = handoff.target.kv
    assert torch.equal(received[:, :, remote], sent[:, :, local])
    others = [block for block in range(BLOCKS) if block not in remote]
    assert torch.equal(received[:, :, others], before[:, :, others])
    assert torch.equal(handoff.source.kv, sent), "the writer's blocks are shared by its prefix cache"
    handoff.close()


@pytest.mark.parametrize("orders", ORDERS[:2])
def test_one_wrong_element_is_found_before_anything_is_converted(orders: tuple[str, str]) -> None:
    local, remote = [1, 2], [8, 3]
    handoff = Handoff("memory", *orders, remote, 1)
    message = handoff.run(local, half=False)
    handoff.target.layers[-1][3, 11] += 1
    before = handoff.target.kv
    verdict = handoff.table.on_notification(handoff.writer_id, message, NOW)
    assert isinstance(verdict, Rejected)
    assert verdict.reason == "checksum_mismatch"
    assert torch.equal(handoff.target.kv, before)
    handoff.close()
