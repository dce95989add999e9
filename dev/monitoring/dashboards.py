"""Writes Grafana's dashboards from the panels; with `--check` it only says whether they are up to date."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dev.monitoring.cluster_panels import AUTOSCALER, LANES, TENANTS
from dev.monitoring.panels import POOLS, SERVICE, Dashboard, Panel

FOLDER = Path(__file__).parents[2] / "compose/monitoring/grafana/dashboards"
DASHBOARDS = (SERVICE, POOLS, LANES, AUTOSCALER, TENANTS)
SOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT = 12, 8
"""Size of a panel in Grafana's units; a dashboard is 24 wide."""


def panel_json(panel: Panel, number: int) -> dict[str, Any]:
    """A panel as Grafana stores it. `number`: its place, from 0."""
    custom = {"lineInterpolation": "linear", "fillOpacity": 0, "stacking": {"mode": "none"}}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.note,
        "datasource": SOURCE,
        "gridPos": {"x": number % 2 * WIDTH, "y": number // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend}
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def dashboard_text(dashboard: Dashboard) -> str:
    """A dashboard as Grafana reads it from a file."""
    content = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["splitserve"],
        "timezone": "browser",
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "schemaVersion": 39,
        "version": 1,
        "links": [{"type": "dashboards", "title": "splitserve", "tags": ["splitserve"], "keepTime": True}],
        "panels": [panel_json(panel, number) for number, panel in enumerate(dashboard.panels)],
    }
    return json.dumps(content, indent=1) + "\n"


def main() -> int:
    """Exit code 1 with `--check` where a file differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    wanted = {FOLDER / f"{dashboard.uid}.json": dashboard_text(dashboard) for dashboard in DASHBOARDS}
    present = {path: path.read_text() for path in sorted(FOLDER.glob("*.json"))}
    if check:
        if present != wanted:
            sys.stderr.write(f"{FOLDER.name} is out of date: make docs\n")
        return int(present != wanted)
    for path in present.keys() - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
