"""`splitserve simulate --models`: several models on one budget, each with a trace of its own."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitserve.cli.output import shown_progress, write
from splitserve.cli.simulation.replayed import Replayed
from splitserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from autoscaler.simulation.shared_simulation import SharedOutcome

NUMBERS = ("rate", "peak_rate", "duration", "burst", "shift", "scale", "peak_replicas", "cold_start")
COUNTS = ("prompt_tokens", "output_tokens", "seed")
KEYS = (*NUMBERS, *COUNTS, "engine_preset")
PIPED_WIDTH = 160
_GIVEN = re.compile(r"^(.+),([a-z_-]+)=([^,=]*)$")


def simulate_models(path: Path, traces: Sequence[str], common: Replayed, as_json: bool) -> None:
    """Replays the models of the file and shows what came of each, and of all. Raises ConfigError for the file,
    InvalidArgumentError naming the option."""
    from autoscaler.policies.policy_file import load_policy
    from autoscaler.sharing.models_file import check_shared, load_models
    from autoscaler.simulation.shared_simulation import SimulatedModel, simulate_shared

    shared = load_models(path)
    given = traces_by_model(traces, common, [model.name for model in shared.models])
    models = {}
    for one in shared.models:
        policy = load_policy(one.policy)
        models[one.name] = SimulatedModel(given[one.name].scenario(policy), policy)
    check_shared(shared, {name: one.policy for name, one in models.items()})
    with shown_progress("simulate") as progress:
        found = simulate_shared(shared.limits, models, shared.move_after_s, progress)
    write(f"{json.dumps(found.to_json())}\n" if as_json else shared_table(found, models_title(found)))


def traces_by_model(traces: Sequence[str], common: Replayed, names: Sequence[str]) -> dict[str, Replayed]:
    """What "MODEL=TRACE,key=value" says of each model; what is not said is as in `common`, but each has its own seed.

    Raises InvalidArgumentError (trace) for a model that is not in the file, is given twice or not at all, and for keys
    and values that are wrong."""
    found: dict[str, Replayed] = {}
    for text in traces:
        name = max((one for one in names if text.startswith(f"{one}=")), key=len, default="")
        rest = text[len(name) + 1 :]
        if not name or not rest:
            raise _wrong(f"must be MODEL=TRACE for a model of the file ({', '.join(names)}), not {text!r}")
        if name in found:
            raise _wrong(f"{name} has two")
        values: dict[str, Any] = {"seed": common.seed + names.index(name)}
        while match := _GIVEN.match(rest):
            rest, key, value = match.groups()
            values |= {key.replace("-", "_"): _value(name, key, value)}
        found[name] = replace(common, trace=rest, **values)
    if missing := [name for name in names if name not in found]:
        raise _wrong(f"{missing[0]} has none: give MODEL=TRACE for each model of the file")
    return found


def _value(model: str, key: str, text: str) -> str | float | int:
    name = key.replace("-", "_")
    if name not in KEYS:
        raise _wrong(f"{key} of {model} is none of {', '.join(KEYS)}")
    if name == "engine_preset":
        return text
    try:
        return int(text) if name in COUNTS else float(text)
    except ValueError:
        raise _wrong(f"{key} of {model} must be a number, not {text!r}") from None


def _wrong(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"trace: {what}", field="trace")


def models_title(found: SharedOutcome) -> str:
    """How long, and under which limits."""
    longest_s = max(one.duration_s for one in found.models.values())
    limits = ", ".join(f"{amount:g} {name}" for name, amount in found.limits.items()) or "no common limit"
    count = "1 model" if len(found.models) == 1 else f"{len(found.models)} models"
    return f"{count} on {limits}: {longest_s / 60:.0f} min"


def shared_table(found: SharedOutcome, title: str) -> str:
    """One line a model and one for all, the bill, and the most of each limit that was used. As wide as the terminal or
    `PIPED_WIDTH`."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    table.add_column("model")
    for heading in (
        "requests",
        "SLO ms",
        "attained",
        "TTFT",
        "TPOT",
        "failed",
        "replica-hours",
        "GPU-hours",
        "money",
    ):
        table.add_column(heading, justify="right")
    for name in found.models:
        table.add_row(*_row(found, name))
    total = found.to_json()["total"]
    table.add_row(
        "all",
        f"{total['requests']:,}",
        "",
        f"{found.attainment:.2%}",
        "",
        "",
        str(total["failed_requests"]),
        f"{total['replica_hours']:.2f}",
        f"{total['gpu_hours']:.2f}",
        _money(found.money),
    )
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    with console.capture() as captured:
        console.print(table)
    return captured.get() + "".join(f"{line}\n" for line in _limit_lines(found.limits, found.peaks))


def _row(found: SharedOutcome, name: str) -> list[str]:
    one, bill = found.models[name], found.cost(name)
    return [
        name,
        f"{len(one.requests):,}",
        f"{one.slo.ttft_s * 1e3:g} / {one.slo.tpot_s * 1e3:g}",
        f"{one.attainment:.2%}",
        f"{one.attainment_ttft:.2%}",
        f"{one.attainment_tpot:.2%}",
        str(one.failed_requests),
        f"{one.total_replica_hours:.2f}",
        f"{found.gpu_hours(name):.2f}",
        _money(None if bill is None else bill.money),
    ]


def _money(amount: float | None) -> str:
    return "" if amount is None else f"{amount:.2f}"


def _limit_lines(limits: Mapping[str, float], peaks: Mapping[str, float]) -> list[str]:
    return [f"most at once: {peaks.get(name, 0.0):g} of {limit:g} {name}" for name, limit in limits.items()]
