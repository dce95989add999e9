"""Loaders, generators and scaling of traces."""

from __future__ import annotations

import gzip
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from autoscaler.simulation.cluster.prefix_cache import PrefixCache
from autoscaler.simulation.engine_model import preset
from autoscaler.simulation.traces.columns import ColumnMap
from autoscaler.simulation.traces.scaling import peak_replicas, scaled
from autoscaler.simulation.traces.synthetic import (
    SYNTHETIC,
    LengthDistribution,
    TraceShape,
    steady,
    synthetic,
)
from autoscaler.simulation.traces.trace import Trace, TraceRequest, load_trace
from splitserve.errors import ConfigError, InvalidArgumentError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def written(tmp_path: Path, text: str, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def test_azure_with_crlf_seven_digits_and_no_final_newline(tmp_path: Path) -> None:
    text = f"{HEADER}\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109"
    trace = load_trace(written(tmp_path, text))
    assert [(r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(374, 44), (396, 109)]
    assert trace.requests[0].arrival_s == 0
    assert trace.duration_s == pytest.approx(4.314579, abs=1e-6)


def test_a_compressed_trace_is_read(tmp_path: Path) -> None:
    text = f"{HEADER}\n2023-11-16 18:15:46,374,44\n2023-11-16 18:15:50,396,109".encode()
    plain = load_trace(written(tmp_path, text.decode())).requests
    path = tmp_path / "trace.csv.gz"
    for packed in (gzip.compress(text), gzip.compress(text[:40]) + gzip.compress(text[40:])):
        path.write_bytes(packed)
        assert load_trace(path).requests == plain
    for damaged, why in (
        (gzip.compress(text)[:-12], "is damaged: .* ended before"),
        (b"\x1f\x8bxxxxxxxxxxxxxxxx", "is damaged: Unknown compression"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=why) as caught:
            load_trace(path)
        assert caught.value.field == "trace"


@pytest.mark.parametrize(
    "lines",
    [
        [f"{HEADER}", "2023-11-16 18:15:46,374,44", "2023-12-18 18:15:50,396,109"],
        [
            '{"timestamp": 0, "input_length": 5, "output_length": 5}',
            '{"timestamp": 3e9, "input_length": 5, "output_length": 5}',
        ],
    ],
)
def test_a_trace_of_more_than_a_month_is_refused_with_a_hint(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(InvalidArgumentError, match="look at the unit of its times") as caught:
        load_trace(written(tmp_path, "\n".join(lines)))
    assert (caught.value.reason, caught.value.field) == ("TRACE_TOO_LONG", "trace")


def test_more_copies_than_can_be_replayed_are_refused() -> None:
    trace = Trace("t", [TraceRequest(float(at), 5, 5) for at in range(10)])
    with pytest.raises(InvalidArgumentError, match="cut the trace"):
        scaled(trace, 1e6)


def test_mooncake_spreads_a_tick_until_the_next(tmp_path: Path) -> None:
    lines = [f'{{"timestamp": {tick}, "input_length": 600, "output_length": 5, "hash_ids": [{n}, 7]}}'
             for tick in (0, 3000, 6000) for n in range(50)]  # fmt: skip
    path = written(tmp_path, "\n".join(lines))
    trace = load_trace(path, seed=1)
    arrivals = [request.arrival_s for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert max(Counter(int(at) for at in arrivals).values()) < 30
    assert 6 < trace.duration_s < 9
    assert trace.requests[3].block_ids[1] == 7
    assert [r.arrival_s for r in load_trace(path, seed=1).requests] == arrivals
    assert [r.arrival_s for r in load_trace(path, seed=2).requests] != arrivals


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "line 1: no column 'TIMESTAMP', only none"),
        ("a,b,c\n1,2,3", "line 1: no column 'TIMESTAMP', only a, b, c"),
        (HEADER, "line 1: no requests"),
        (f"{HEADER}\n2023-11-16 18:15:46,374,44\nnever,1,2", "line 3: TIMESTAMP must be a number or a time"),
        (f"{HEADER}\n2023-11-16 18:15:46,374", "line 2: expected 3 columns, found 2"),
        (
            f"{HEADER}\n2023-11-16 18:15:46,many,44",
            "line 2: ContextTokens must be a whole number, not 'many'",
        ),
        (f"{HEADER}\n2023-11-16 18:15:46,1,-4", "line 2: GeneratedTokens must be 0..16777216, not -4"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 3}\n{', "line 2: not a JSON object"),
        ('{"timestamp": "x", "input_length": 3, "output_length": 3}', "line 1: timestamp must be a number"),
        ('{"timestamp": 0, "output_length": 3}', "line 1: input_length must be a whole number, not None"),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 3, "hash_ids": "x"}',
            "hash_ids must be a list",
        ),
    ],
)
def test_a_bad_file_names_its_line(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        load_trace(written(tmp_path, text))
    assert part in error.value.message
    assert error.value.field == "trace"


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot read"):
        load_trace(tmp_path / "none")
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgumentError, match="no UTF-8 text"):
        load_trace(path)


@pytest.mark.parametrize("kind", SYNTHETIC)
def test_synthetic_traces_are_seeded(kind: str) -> None:
    shape = TraceShape(kind, rate=2, peak_rate=6, duration_s=600, burst_s=60, seed=3)
    trace = synthetic(shape)
    assert trace == synthetic(shape)
    assert trace != synthetic(TraceShape(kind, rate=2, peak_rate=6, duration_s=600, burst_s=60, seed=4))
    arrivals = [request.arrival_s for request in trace.requests]
    assert arrivals == sorted(arrivals)
    expected = {"constant": 1200, "ramp": 2400, "burst": 1440, "diurnal": 2400}[kind]
    assert len(arrivals) == pytest.approx(expected, rel=0.15)
    mean = sum(request.prompt_tokens for request in trace.requests) / len(arrivals)
    assert mean == pytest.approx(1000, rel=0.1)


def test_wrong_shapes() -> None:
    with pytest.raises(InvalidArgumentError, match="no such synthetic trace"):
        synthetic(TraceShape("sawtooth"))
    with pytest.raises(InvalidArgumentError, match="rate must be above 0"):
        synthetic(TraceShape("constant", rate=0))


def test_scaling_repeats_requests_and_keeps_the_time_axis() -> None:
    trace = synthetic(TraceShape("diurnal", rate=1, peak_rate=5, duration_s=900, seed=1))
    grown = scaled(trace, 2.5, seed=1)
    assert len(grown.requests) == pytest.approx(2.5 * len(trace.requests), rel=0.05)
    arrivals = [request.arrival_s for request in grown.requests]
    assert arrivals == sorted(arrivals)
    assert min(arrivals) >= 0
    assert max(arrivals) <= trace.duration_s
    assert scaled(trace, 2.5, seed=1) == grown
    engine = preset("h100-8b")
    assert peak_replicas(grown, engine, 0.1) == pytest.approx(
        2.5 * peak_replicas(trace, engine, 0.1), rel=0.1
    )


def test_copies_share_no_prefix() -> None:
    trace = Trace("t", [TraceRequest(1.0, 1024, 5, (3, 4)), TraceRequest(2.0, 1024, 5, (3, 5))])
    grown = scaled(trace, 2, jitter_s=0.1)
    first = {request.block_ids[0] for request in grown.requests}
    assert len(first) == 2
    assert len({request.block_ids[1] for request in grown.requests}) == 4


def test_prefix_cache_forgets_the_least_recently_used() -> None:
    cache = PrefixCache(4 * 512)
    cache.keep((1, 2, 3))
    assert cache.cached_tokens((1, 2, 9), 1500) == 1024
    assert cache.cached_tokens((1, 2, 3), 1536) == 1535  # the last token is always computed
    assert cache.cached_tokens((9, 1), 1024) == 0
    cache.keep((7, 8))
    assert cache.cached_tokens((1, 2, 3), 1536) == 1024


def test_a_file_too_long_is_refused_before_all_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "\n".join(f"2023-11-16 18:15:{second},374,44" for second in range(10, 20))
    path = written(tmp_path, f"{HEADER}\n{rows}\n")
    monkeypatch.setattr("autoscaler.simulation.traces.trace.MOST_REQUESTS", 10)
    assert len(load_trace(path).requests) == 10
    for name, most, said in (
        ("MOST_REQUESTS", 9, "more than 9 requests"),
        ("MOST_BYTES", 64, "more than 64 bytes"),
    ):
        monkeypatch.setattr(f"autoscaler.simulation.traces.trace.{name}", most)
        with pytest.raises(InvalidArgumentError, match=said) as caught:
            load_trace(path)
        assert caught.value.field == "trace"


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
