"""Where a request stands in workers' queues follows from its tenant; its own number counts within the tenant only."""

from __future__ import annotations

import pytest

from coordinator.request.inference_request import PriorityClass, precedence_of


@pytest.mark.parametrize(("name", "rank"), [("interactive", 1), ("standard", 0), ("batch", -1)])
def test_the_rank_is_that_of_the_tenant_s_class(name: PriorityClass, rank: int) -> None:
    for priority in (-100, 0, 100):
        made = precedence_of("a", name, priority)
        assert (made.class_rank, made.within_tenant) == (rank, priority)


def test_tenants_differ_and_each_is_the_same_everywhere() -> None:
    keys = {precedence_of(name, "standard", 0).tenant_key for name in ("a", "b", "ä")}
    assert len(keys) == 3
    assert precedence_of("a", "standard", 5).tenant_key == 0xCABD1BCA128197CA
