"""Costs by tenant: sums of what records say, for a bounded number of tenants."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from coordinator.telemetry.record_keeper import RecordKeeper
from coordinator.telemetry.request_record import cost_of
from coordinator.telemetry.tenant_metrics import MAX_TENANTS, TenantCosts, tenant_metrics
from coordinator.tenants.tenants import Tenants
from splitserve.config.coordinator import RecordsConfig
from tests.unit.coordinator.telemetry.test_record import Clock, served


def tenants(folder: Path, *names: str) -> Tenants:
    return Tenants(tenants_file(folder, *names))


def tenants_file(folder: Path, *names: str) -> Path:
    path = folder / "tenants.yaml"
    path.write_text(yaml.safe_dump({"tenants": [{"name": name} for name in names]}))
    return path


def samples(costs: TenantCosts) -> dict[tuple[str, ...], float]:
    """Values by name and labels."""
    return {
        (sample.name.removeprefix("splitserve_tenant_"), *sample.labels.values()): sample.value
        for family in costs.metrics()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def test_totals_are_the_sums_of_records(tmp_path: Path, clock: Clock) -> None:
    costs = TenantCosts(tenants(tmp_path, "alice", "bob"))
    keeper = RecordKeeper(RecordsConfig(), on_ended=[costs.add])
    of_alice = [cost_of(served(clock, keeper, f"r{number}", "alice")) for number in range(3)]
    served(clock, keeper, "other", "nobody")
    found = samples(costs)
    assert found["prefill_seconds_total", "alice"] == pytest.approx(sum(cost.prefill_s for cost in of_alice))
    assert found["decode_seconds_total", "alice"] == pytest.approx(sum(cost.decode_s for cost in of_alice))
    blocks = sum(cost.kv_block_s for cost in of_alice)
    assert found["kv_block_seconds_total", "alice"] == pytest.approx(blocks)
    written = sum(cost.written_bytes for cost in of_alice)
    assert found["kv_written_bytes_total", "alice"] == written
    assert min(written, blocks, *(cost.prefill_s for cost in of_alice)) > 0
    assert found["decode_seconds_total", "bob"] == 0
    assert not [name for name in found if "nobody" in name]


def test_costs_are_counted_where_no_records_are_kept(tmp_path: Path, clock: Clock) -> None:
    costs = TenantCosts(tenants(tmp_path, "alice"))
    keeper = RecordKeeper(RecordsConfig(max_recent_records=0, max_notable_records=0), on_ended=[costs.add])
    assert keeper.enabled
    kept = RecordKeeper(RecordsConfig())
    with pytest.raises(AssertionError):
        served(clock, keeper, "r", "alice")  # it is not to be found afterwards
    assert samples(costs)["prefill_seconds_total", "alice"] == cost_of(served(clock, kept)).prefill_s


def test_a_tenant_that_is_gone_has_no_series(tmp_path: Path, clock: Clock) -> None:
    file = tenants(tmp_path, "alice", "bob")
    costs = TenantCosts(file)
    served(clock, RecordKeeper(RecordsConfig(), on_ended=[costs.add]), "r", "bob")
    tenants_file(tmp_path, "alice")
    assert file.file.reload()
    assert {labels[1] for labels in samples(costs)} == {"alice"}


def test_the_number_of_tenants_with_series_is_bounded(tmp_path: Path) -> None:
    names = [f"t{number:04}" for number in range(MAX_TENANTS + 7)]
    file = tenants(tmp_path, *names)
    shown = {labels[1] for labels in samples(TenantCosts(file))}
    assert shown == set(names[:MAX_TENANTS])
    found = {sample.name: sample for family in tenant_metrics(file) for sample in family.samples}
    assert found["splitserve_tenants_without_series"].value == 7
    in_metrics = {
        sample.labels["tenant"]
        for family in tenant_metrics(file)
        for sample in family.samples
        if "tenant" in sample.labels
    }
    assert in_metrics == shown
