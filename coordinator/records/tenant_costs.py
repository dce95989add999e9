"""What each tenant's requests have cost: sums over their records, and money where a price file says so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated

from prometheus_client.core import CounterMetricFamily, Metric
from pydantic import Field

from coordinator.metrics.tenant_metrics import MAX_TENANTS
from coordinator.records.request_record import CostOfRequest, RequestRecord, cost_of
from coordinator.tenants.tenants import Tenants
from splitserve.config.base import ConfigModel
from splitserve.config.yaml_file import read_yaml_file
from splitserve.errors import ConfigError
from splitserve.metrics import counters
from splitserve.runtime.reload import ReloadedFiles

Price = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class PriceFile(ConfigModel):
    """The content of the price file. What has no price is free."""

    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    """Three capital letters, as in ISO 4217."""
    prefill_second: Price = 0.0
    """Of a second in which a prompt was computed."""
    decode_second: Price = 0.0
    """Of a second of decoding."""
    kv_block_second: Price = 0.0
    """Of a KV block held for a second."""
    gigabyte_written: Price = 0.0
    """Of 10^9 bytes of KV written by handoffs."""
    gpu_hour: dict[str, Price] = Field(default_factory=dict)
    """Of a GPU for an hour, by its name in docs/plan.md. Read by `splitserve plan` only."""

    def price_of(self, cost: CostOfRequest) -> float:
        """The price of a request."""
        return (
            cost.prefill_s * self.prefill_second
            + cost.decode_s * self.decode_second
            + cost.kv_block_s * self.kv_block_second
            + cost.written_bytes / 1e9 * self.gigabyte_written
        )


@dataclass(slots=True)
class CostTotals:
    """The cost of all ended requests of a tenant since the start."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    kv_block_s: float = 0.0
    written_bytes: int = 0
    money: dict[str, float] = field(default_factory=dict)
    """By currency; a request counts with the prices that are in force at its end."""

    def add(self, cost: CostOfRequest, prices: PriceFile | None) -> None:
        """Adds a request."""
        self.prefill_s += cost.prefill_s
        self.decode_s += cost.decode_s
        self.kv_block_s += cost.kv_block_s
        self.written_bytes += cost.written_bytes
        if prices is not None:
            self.money[prices.currency] = self.money.get(prices.currency, 0.0) + prices.price_of(cost)


class TenantCosts:
    """Totals of the tenants in their file. With a price file, raises ConfigError if that is invalid at the start; later
    an invalid one changes nothing."""

    def __init__(self, tenants: Tenants, prices: Path | None = None) -> None:
        self._tenants = tenants
        self._totals: dict[str, CostTotals] = {}
        self._prices: PriceFile | None = None
        self.file: ReloadedFiles[PriceFile] | None = None
        """The price file, for a `FileWatcher`."""
        if prices is not None:
            self.file = ReloadedFiles("prices", lambda: [prices], lambda: load_prices(prices), self._adopt)
            self.file.start()

    def add(self, record: RequestRecord) -> None:
        """Adds an ended request."""
        if record.tenant in self._tenants:
            self._totals.setdefault(record.tenant, CostTotals()).add(cost_of(record), self._prices)

    def metrics(self) -> list[Metric]:
        """The totals of the tenants that have series; see `MAX_TENANTS`. For the scraping thread."""
        shown = list(islice(self._tenants.usages, MAX_TENANTS))
        totals = {name: self._totals.get(name) or CostTotals() for name in shown}
        return [
            _by_tenant("prefill_seconds", "Time in which prompts were computed", totals, "prefill_s"),
            _by_tenant("decode_seconds", "Time from the first decode step to the end", totals, "decode_s"),
            _by_tenant("kv_block_seconds", "KV blocks held, times seconds", totals, "kv_block_s"),
            _by_tenant("kv_written_bytes", "KV bytes that handoffs wrote", totals, "written_bytes"),
            *_money(totals),
        ]

    def _adopt(self, content: PriceFile) -> None:
        self._prices = content


def load_prices(path: Path) -> PriceFile:
    """Reads a price file. Raises ConfigError naming line, field and bound."""
    yaml_file = read_yaml_file(path, "prices")
    with yaml_file.naming_lines():
        return yaml_file.validated(PriceFile, "prices")


def tenant_costs(tenants: Tenants | None, prices: Path | None) -> TenantCosts | None:
    """The costs of these tenants; None without tenants. Raises ConfigError, also for prices without tenants."""
    if tenants is not None:
        return TenantCosts(tenants, prices)
    if prices is not None:
        raise ConfigError("prices: costs are counted by tenant, which needs `tenants`", field="prices")
    return None


def _by_tenant(name: str, text: str, totals: dict[str, CostTotals], fact: str) -> Metric:
    samples = {tenant: getattr(total, fact) for tenant, total in totals.items()}
    return counters(f"splitserve_tenant_{name}", text, "tenant", samples)


def _money(totals: dict[str, CostTotals]) -> Iterable[Metric]:
    family = CounterMetricFamily(
        "splitserve_tenant_cost", "Price of ended requests, by the price file", labels=["tenant", "currency"]
    )
    for tenant, total in totals.items():
        for currency, amount in total.money.copy().items():
            family.add_metric([tenant, currency], amount)
    return [family] if family.samples else []
