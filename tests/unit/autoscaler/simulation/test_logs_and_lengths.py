"""Logs of other systems through a column map, and distributions of lengths."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from autoscaler.simulation.traces.columns import ColumnMap
from autoscaler.simulation.traces.synthetic import LengthDistribution, steady
from autoscaler.simulation.traces.trace import Trace, load_trace
from splitserve.errors import InvalidArgumentError

MAP = "timestamp=ts,input_length=usage.prompt_tokens,output_length=usage.completion_tokens"


def loaded(tmp_path: Path, text: str, columns: str) -> Trace:
    path = tmp_path / "log"
    path.write_text(text)
    return load_trace(path, columns=ColumnMap.parse(columns))


def test_json_with_nested_fields(tmp_path: Path) -> None:
    text = (
        '{"ts": "2026-11-25T10:00:01Z", "usage": {"prompt_tokens": 20, "completion_tokens": 3}}\n\n'
        '{"ts": "2026-11-25T10:00:00.5+00:00", "usage": {"prompt_tokens": 10, "completion_tokens": 0}}\n'
    )
    trace = loaded(tmp_path, text, MAP)
    assert [(one.arrival_s, one.prompt_tokens, one.output_tokens) for one in trace.requests] == [
        (0.0, 10, 1),
        (0.5, 20, 3),
    ]
    flat = '{"ts": 5, "usage.prompt_tokens": 7, "usage.completion_tokens": 8}\n'
    assert loaded(tmp_path, flat, MAP).requests[0].prompt_tokens == 7


@pytest.mark.parametrize(("unit", "factor"), [("", 1.0), (",unit=ms", 1e-3), (",unit=ns", 1e-9)])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_in_any_order(tmp_path: Path, unit: str, factor: float, delimiter: str) -> None:
    rows = [("out", "at", "who", "in"), ("5", "1000", "a", "50"), ("6", "1500", "b", "60")]
    text = "".join(f"{delimiter.join(row)}\n" for row in rows)
    trace = loaded(tmp_path, text, f"timestamp=at,input_length=in,output_length=out{unit}")
    assert trace.requests[1].arrival_s == pytest.approx(500 * factor)
    assert [(one.prompt_tokens, one.output_tokens) for one in trace.requests] == [(50, 5), (60, 6)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "line 1: no column 'ts'"),
        ("", "line 1: no column"),
        ("ts,usage.prompt_tokens,usage.completion_tokens\n1,2\n", "line 2: expected 3 columns, found 2"),
        (
            "ts,usage.prompt_tokens,usage.completion_tokens\nnow,2,3\n",
            "line 2: ts must be a number or a time",
        ),
        (
            "ts,usage.prompt_tokens,usage.completion_tokens\nnan,2,3\n",
            "line 2: ts must be a number or a time",
        ),
        ("ts,usage.prompt_tokens,usage.completion_tokens\n1,x,3\n", "must be a whole number, not 'x'"),
        ("ts,usage.prompt_tokens,usage.completion_tokens\n1,2,-3\n", "must be 0.."),
        ('{"ts": 1, "usage": {"prompt_tokens": 1}}', "line 1: no field 'usage.completion_tokens'"),
        ('{"ts": 1, "usage": null}', "line 1: no field 'usage.prompt_tokens'"),
        ('{"ts": true, "usage": {"prompt_tokens": 1, "completion_tokens": 1}}', "ts must be a number"),
        ('{"ts": 1, "usage": {"prompt_tokens": null, "completion_tokens": 1}}', "must be a whole number"),
        ('{"ts": 1}\n{', "line 1: no field"),
        ("{", "line 1: not a JSON object"),
        ('{"ts":' + "[" * 100_000, "line 1: not a JSON object"),
        ("ts," + "x" * 2**24 + "x", "line 1: not CSV"),
    ],
)
def test_bad_lines(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        loaded(tmp_path, text, MAP)
    assert caught.value.field == "trace"


def test_prompts_beside_the_numbers(tmp_path: Path) -> None:
    columns = "timestamp=at,input_length=in,output_length=out"
    text = f'at,in,out,prompt\n1,2,3,{"x" * 200_000}\n2,4,5,"two\nlines"\n3,x,5,y\n'
    with pytest.raises(InvalidArgumentError, match="line 5: in must be a whole number"):
        loaded(tmp_path, text, columns)
    assert len(loaded(tmp_path, text.replace("x,5", "6,5"), columns).requests) == 3
    # No end of a line in JSON.
    text = '{"at": 1, "in": 2, "out": 3, "prompt": "a\u2028b"}\r\n{"at": 2, "in": 2, "out": 3}\r\n'
    assert len(loaded(tmp_path, text, columns).requests) == 2


@pytest.mark.parametrize("timestamp", ["1e400", "9" * 400, "-1", "true"])
def test_times_of_mooncake_traces_are_bounded(tmp_path: Path, timestamp: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"timestamp": {timestamp}, "input_length": 5, "output_length": 5}}\n')
    with pytest.raises(InvalidArgumentError, match="line 1: timestamp must be a number of milliseconds"):
        load_trace(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected KEY=COLUMN"),
        ("timestamp", "expected KEY=COLUMN"),
        ("timestamp=", "expected KEY=COLUMN"),
        ("timestamp=a", "missing: input_length, output_length"),
        ("when=a", "no such key: 'when'"),
        ("timestamp=a,timestamp=b", "given twice"),
        ("timestamp=a,input_length=b,output_length=c,unit=min", "unit must be"),
    ],
)
def test_bad_maps(text: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        ColumnMap.parse(text)
    assert caught.value.field == "columns"


def test_lengths_have_the_given_percentiles() -> None:
    chance = random.Random(3)
    drawn = [LengthDistribution.parse("p", "p50=800,p95=4000").sample(chance) for _ in range(20_000)]
    assert np.percentile(drawn, [50, 95]) == pytest.approx([800, 4000], rel=0.06)
    assert max(drawn) < 17_000
    assert {LengthDistribution.parse("p", "250").sample(chance) for _ in range(9)} == {250}
    for text in (
        "0",
        "x",
        "-5",
        "1.5",
        "p50=",
        "p0=5",
        "p100=5",
        "50=5",
        "p50=9,p95=8",
        "p50=1,p50=2",
        "p50=1",
        "",
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            LengthDistribution.parse("prompt_tokens", text)
        assert caught.value.field == "prompt_tokens"


def test_steady_traffic() -> None:
    lengths = LengthDistribution.parse("p", "p50=100,p95=250")
    trace = steady(20, 100, lengths, lengths, 7)
    assert len(trace.requests) == pytest.approx(2000, rel=0.1)
    assert trace == steady(20, 100, lengths, lengths, 7) != steady(20, 100, lengths, lengths, 8)
