"""A plan as text."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

PIPED_WIDTH = 140
_KINDS = ("split", "colocated")


def plan_text(found: Mapping[str, Any]) -> str:
    """The replica, the two clusters, and what to take. Plain when piped."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    traffic, slo = found["traffic"], found["slo"]
    table = Table(
        title=f"{traffic['requests_per_second']:g} requests/s of {traffic['mean_prompt_tokens']:.0f} + "
        f"{traffic['mean_output_tokens']:.0f} tokens, targets {slo['ttft_s'] * 1e3:g} ms TTFT, "
        f"{slo['tpot_s'] * 1e3:g} ms TPOT"
    )
    table.add_column("cluster")
    money = found["currency"]
    headings = ["replicas", "GPUs", "attained", "TTFT p95 ms", "TPOT p95 ms", "busy", "GPU-h / 1M tokens"]
    if money:
        headings += [f"{money} / h", f"{money} / 1M tokens", f"{money} / 1M output"]
    for heading in headings:
        table.add_column(Text(heading), justify="right")  # a currency is no markup
    for kind in _KINDS:
        if found[kind] is not None:
            table.add_row(*_row(kind, found[kind]))
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    with console.capture() as captured:
        console.print(table)
    return captured.get() + "".join(f"{line}\n" for line in _lines(found))


def _row(kind: str, one: Mapping[str, Any]) -> Iterator[str]:
    yield kind
    yield one["name"]
    yield f"{one['prefill_gpus']} + {one['decode_gpus']}" if kind == "split" else f"{one['gpus']}"
    yield f"{one['attainment']:.1%}"
    yield "" if one["ttft_p95_s"] is None else f"{one['ttft_p95_s'] * 1e3:.0f}"
    yield "" if one["tpot_p95_s"] is None else f"{one['tpot_p95_s'] * 1e3:.1f}"
    busy = f"{one['prefill_busy']:.0%}"
    yield f"{busy} / {one['decode_busy']:.0%}" if kind == "split" else busy
    yield f"{one['gpu_hours_per_million_tokens']:.3f}"
    for name in ("cost_per_hour", "cost_per_million_tokens", "cost_per_million_output_tokens"):
        if one[name] is not None:
            yield f"{one[name]:.2f}"


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    best = found[found["best"]]
    others = [found[kind] for kind in _KINDS if kind != found["best"] and found[kind] is not None]
    if not others:
        does = "was not seen to reach" if found["out_of_time"] else "does not reach"
        why = f"the other kind {does} {found['goal']:.0%}"
    elif others[0]["gpus"] > best["gpus"]:
        why = f"{others[0]['name']} takes {others[0]['gpus']}"
    else:
        why = f"{others[0]['name']} takes as many, and is no better"
    yield f"Take {best['name']}: {best['gpus']} GPUs; {why}."
    if best["replica_cost_per_hour"] is not None:
        yield f"One replica more costs {best['replica_cost_per_hour']:.2f} an hour, one less saves as much."
    yield f"Apply: {best['apply']}"
    yield from _mix_lines(found.get("mix"))
    replica = found["replica"]
    gpus = f"{replica['gpus']} x {replica['gpu'] or 'GPU'}"
    if replica["weights_gb"] is not None:
        yield (
            f"A replica is {gpus}: weights {replica['weights_gb']:.1f} GB, workspace "
            f"{replica['workspace_gb']:.1f} GB, KV {replica['kv_gb']:.1f} GB for "
            f"{replica['engine']['kv_capacity_tokens']:,} tokens"
        )
    else:
        yield f"A replica is {gpus}, as measured: {replica['engine']['kv_capacity_tokens']:,} tokens of KV"
    for other in found["other_replicas"]:
        yield f"Replicas of {other['gpus_per_replica']} GPUs: {other['name']}, {other['gpus']} GPUs"
    yield from (f"note: {note}" for note in found["notes"])


def _mix_lines(mix: Mapping[str, Any] | None) -> Iterator[str]:
    """The pools as mixes of a policy's classes."""
    if mix is None:
        return
    for pool in ("prefill", "decode"):
        one = mix[pool]
        counts = " + ".join(f"{count} {name}" for name, count in one["classes"].items() if count)
        yield (
            f"{pool} of the policy's classes: {counts} for {one['units']} units, {one['on_demand_units']:g} of "
            f"them not on spot machines: {one['cost_per_hour']:.2f} an hour"
        )
    told = f"{mix['cost_per_hour']:.2f} an hour, {mix['cost_per_million_tokens']:.2f} / 1M tokens"
    if mix["on_demand_cost_per_hour"] is not None:
        told += (
            f"; without spot machines {mix['on_demand_cost_per_hour']:.2f}, "
            f"{mix['on_demand_cost_per_million_tokens']:.2f} / 1M tokens"
        )
    yield f"Both pools: {told}"
