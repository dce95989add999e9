"""The report of `dev.gpu_check`: what each part gave, what is installed, as Markdown and JSON. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["passed", "failed", "timed out", "not run"]
_NAME = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;#]*)")
_TEST = re.compile(r" (PASSED|FAILED|ERROR|SKIPPED)(?: \(.*\))?\s+\[ *\d+%\]$")
TAIL_LINES = 40


@dataclass(frozen=True, slots=True)
class PartResult:
    """What one part gave. `details` is its own JSON, `tail` the end of its output where it did not pass."""

    name: str
    outcome: Outcome
    seconds: float
    summary: str
    details: Mapping[str, Any] = field(default_factory=dict)
    tail: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PackageState:
    """A package that the checks use: the range asked for, and the version here; None if it is missing."""

    name: str
    wanted: str
    installed: str | None

    @property
    def remark(self) -> str:
        """ "missing", "older than asked for", or empty."""
        if self.installed is None:
            return "missing"
        lowest = re.search(r"(?:>=|==)\s*([\d.]+)", self.wanted)
        older = lowest is not None and _numbers(self.installed) < _numbers(lowest[1])
        return "older than asked for" if older else ""


def package_states(
    requirements: Iterable[str], versions: Mapping[str, str], needed: Iterable[str] = ()
) -> list[PackageState]:
    """The state of every package that `requirements` (as in pyproject.toml) or `needed` names, by name.

    `versions`: what is installed, by normalized name.
    """
    wanted: dict[str, str] = dict.fromkeys(map(normalized, needed), "")
    for requirement in requirements:
        match = _NAME.match(requirement)
        if match is not None:
            wanted[normalized(match[1])] = match[2].strip()
    return [PackageState(name, asked, versions.get(name)) for name, asked in sorted(wanted.items())]


def normalized(name: str) -> str:
    """A distribution's name in the form in which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_tests(output: str) -> tuple[Outcome, str, dict[str, Any]]:
    """Outcome, summary and counts of a run of `pytest -v`, also of one that was cut short. No test passed: failed."""
    counts = {"passed": 0, "failed": 0, "error": 0, "skipped": 0}
    failures = []
    for line in output.splitlines():
        match = _TEST.search(line)
        if match is not None:
            counts[match[1].lower()] += 1
            if match[1] in ("FAILED", "ERROR"):
                failures.append(line[: match.start()])
    bad = counts["failed"] + counts["error"]
    summary = ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "no test ran"
    outcome: Outcome = "passed" if counts["passed"] and not bad else "failed"
    return outcome, summary, {"counts": counts, "failures": failures}


def tail(output: str) -> list[str]:
    """The last lines of an output."""
    return output.splitlines()[-TAIL_LINES:]


def as_document(
    date: str,
    commit: str,
    device: Mapping[str, Any],
    packages: Sequence[PackageState],
    results: Sequence[PartResult],
) -> dict[str, Any]:
    """The JSON of a report. `date`: ISO 8601, UTC."""
    return {
        "report": "gpu-check",
        "date": date,
        "commit": commit,
        "passed": all_passed(results),
        "device": dict(device),
        "packages": [asdict(package) | {"remark": package.remark} for package in packages],
        "parts": [asdict(result) for result in results],
    }


def all_passed(results: Sequence[PartResult]) -> bool:
    """Whether every part ran and passed."""
    return bool(results) and all(result.outcome == "passed" for result in results)


def as_markdown(document: Mapping[str, Any]) -> str:
    """The report in Markdown, for people."""
    device = document["device"]
    lines = [
        f"# GPU check: {'passed' if document['passed'] else 'not passed'}",
        "",
        f"{document['date']}, commit `{document['commit']}`, {device.get('name', 'unknown device')}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in device.items()),
        "",
        "| part | outcome | seconds | |",
        "|---|---|---|---|",
    ]
    for part in document["parts"]:
        lines.append(
            f"| {part['name']} | {part['outcome']} | {part['seconds']:.0f} | {_cell(part['summary'])} |"
        )
    remarked = [package for package in document["packages"] if package["remark"]]
    if remarked:
        lines += ["", "Packages:", "", "| package | asked for | here | |", "|---|---|---|---|"]
        lines += [
            f"| {p['name']} | {p['wanted'] or 'any'} | {p['installed'] or '-'} | {p['remark']} |"
            for p in remarked
        ]
    for part in document["parts"]:
        if part["tail"]:
            lines += ["", f"## {part['name']}", "", *(f"    {line}".rstrip() for line in part["tail"])]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"[\d.]+", version)
    return tuple(int(part) for part in match[0].strip(".").split(".")) if match else ()
