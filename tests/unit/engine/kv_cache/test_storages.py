"""Memory of tensors that is given back and taken again: on cpu, where torch's storages do the same as on a device."""

from __future__ import annotations

import pytest
import torch

from engine.kv_cache.storages import HostCopy, give_back, host_copy, storages_of


def test_views_have_their_content_again() -> None:
    whole = torch.randn(7, 33)
    part, same = whole[2:5], whole.t()
    other = torch.arange(5, dtype=torch.int64)
    expected = [each.clone() for each in (whole, part, same, other)]
    storages = storages_of([whole, part, other, same, torch.empty(0)])
    assert len(storages) == 2
    copy = HostCopy(storages)
    assert [storage.nbytes() for storage in storages] == [0, 0]
    copy.bring_back()
    assert all(torch.equal(now, then) for now, then in zip((whole, part, same, other), expected, strict=True))


def test_what_is_given_back_is_gone_and_usable_again() -> None:
    blocks = torch.ones(4, 8)
    row, storage = blocks[3], blocks.untyped_storage()
    size = storage.nbytes()
    give_back([storage])
    assert storage.nbytes() == 0
    storage.resize_(size)
    blocks.fill_(2)
    assert row.tolist() == [2] * 8


def test_weights_stay_where_the_host_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(100)
    monkeypatch.setattr("engine.kv_cache.storages.free_memory", lambda: 399)
    assert host_copy([weight]) is None
    assert weight.sum() == 100
    monkeypatch.setattr("engine.kv_cache.storages.free_memory", lambda: 400)
    copy = host_copy([weight])
    assert copy is not None
    copy.bring_back()
    assert weight.sum() == 100


def test_nothing_to_move() -> None:
    HostCopy([]).bring_back()
