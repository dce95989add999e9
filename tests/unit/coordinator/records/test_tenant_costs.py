"""Costs by tenant: sums of what records say, priced by a file, for a bounded number of tenants."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from coordinator.metrics.tenant_metrics import MAX_TENANTS, tenant_metrics
from coordinator.records.record_keeper import RecordKeeper
from coordinator.records.request_record import cost_of
from coordinator.records.tenant_costs import TenantCosts, load_prices, tenant_costs
from coordinator.tenants.tenants import Tenants
from splitserve.config.coordinator import RecordsConfig
from splitserve.errors import ConfigError
from tests.unit.coordinator.records.test_record import Clock, served

PRICES = {"currency": "EUR", "prefill_second": 2.0, "decode_second": 1.0, "gigabyte_written": 10.0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def tenants(folder: Path, *names: str) -> Tenants:
    return Tenants(tenants_file(folder, *names))


def tenants_file(folder: Path, *names: str) -> Path:
    path = folder / "tenants.yaml"
    path.write_text(yaml.safe_dump({"tenants": [{"name": name} for name in names]}))
    return path


def prices(folder: Path, **changed: object) -> Path:
    path = folder / "prices.yaml"
    path.write_text(yaml.safe_dump(PRICES | changed))
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
    keeper = RecordKeeper(RecordsConfig(), on_ended=costs.add)
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
    assert not [name for name in found if "nobody" in name or name[0] == "cost_total"]


def test_costs_are_counted_where_no_records_are_kept(tmp_path: Path, clock: Clock) -> None:
    costs = TenantCosts(tenants(tmp_path, "alice"))
    keeper = RecordKeeper(RecordsConfig(max_recent_records=0, max_notable_records=0), on_ended=costs.add)
    assert keeper.enabled
    kept = RecordKeeper(RecordsConfig())
    with pytest.raises(AssertionError):
        served(clock, keeper, "r", "alice")  # it is not to be found afterwards
    assert samples(costs)["prefill_seconds_total", "alice"] == cost_of(served(clock, kept)).prefill_s


def test_a_request_costs_what_is_in_force_at_its_end(tmp_path: Path, clock: Clock) -> None:
    path = prices(tmp_path)
    costs = TenantCosts(tenants(tmp_path, "alice"), path)
    keeper = RecordKeeper(RecordsConfig(), on_ended=costs.add)
    cost = cost_of(served(clock, keeper, "first", "alice"))
    first = 2 * cost.prefill_s + cost.decode_s + 10 * cost.written_bytes / 1e9
    assert samples(costs)["cost_total", "alice", "EUR"] == pytest.approx(first)
    assert costs.file is not None
    prices(tmp_path, currency="USD", prefill_second=0, gigabyte_written=0)
    assert costs.file.reload()
    path.write_text("{currency: euro}")
    assert not costs.file.reload()
    second = cost_of(served(clock, keeper, "second", "alice"))
    assert samples(costs)["cost_total", "alice", "EUR"] == pytest.approx(first)
    assert samples(costs)["cost_total", "alice", "USD"] == pytest.approx(second.decode_s)


def test_a_tenant_that_is_gone_has_no_series(tmp_path: Path, clock: Clock) -> None:
    file = tenants(tmp_path, "alice", "bob")
    costs = TenantCosts(file)
    served(clock, RecordKeeper(RecordsConfig(), on_ended=costs.add), "r", "bob")
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


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"currency": "euro"}, "currency"),
        ({"decode_second": -1}, "decode_second"),
        ({"prefill_second": "dear"}, "prefill_second"),
        ({"gigabyte_written": float("inf")}, "gigabyte_written"),
        ({"per_token": 1}, "per_token"),
    ],
)
def test_a_wrong_price_file_names_its_field(tmp_path: Path, changed: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field) as refusal:
        load_prices(prices(tmp_path, **changed))
    assert refusal.value.field == field


def test_prices_need_tenants(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prices: "):
        tenant_costs(None, prices(tmp_path))
    assert tenant_costs(None, None) is None
