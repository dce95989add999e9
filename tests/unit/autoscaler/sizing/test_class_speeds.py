"""Speeds of classes that policy files give as engine models."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.policies.policy_file import ScalingPolicy, load_policy, parse_policy
from autoscaler.policy_in_force import PolicyFile
from autoscaler.sizing.class_speeds import work_rate
from autoscaler.sizing.engine_model import PRESETS, EngineModel
from splitserve.errors import ConfigError
from tests.support.policy_files import polled

SLOW = PRESETS["h100-8b"]
FAST = {
    "prefill": SLOW.at_speed("prefill", 3.5),
    "decode": SLOW.at_speed("decode", 3.5),
}


def written(folder: Path, **changes: Any) -> Path:
    """A policy whose pools have a slow and a fast class, by files beside it; `changes` are the pools' own."""
    (folder / "slow.json").write_text(json.dumps(asdict(SLOW)))
    for pool, model in FAST.items():
        (folder / f"{pool}.json").write_text(json.dumps(asdict(model)))
    pools = {
        pool: {
            "target_ms": 1000 if pool == "prefill" else 50,
            "classes": [
                {"name": "slow", "price_per_hour": 1.0, "engine_model": "slow.json"},
                {"name": "fast", "price_per_hour": 3.0, "engine_model": f"{pool}.json"},
            ],
            **changes,
        }
        for pool in FAST
    }
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump(pools))
    return path


def speeds(policy: ScalingPolicy) -> list[dict[str, float]]:
    return [dict(pool.speeds) for pool in policy.pools.values()]


def test_a_class_is_as_fast_as_its_model(tmp_path: Path) -> None:
    """What the simulator makes of a speed, the speed of that model gives back; decode by whole streams."""
    policy = load_policy(written(tmp_path))
    assert speeds(policy) == [{"slow": 1.0, "fast": 3.5}, {"slow": 1.0, "fast": pytest.approx(3.5, rel=0.01)}]
    models = [one.engine_model for one in policy.prefill.classes]
    assert models == [tmp_path / "slow.json", tmp_path / "prefill.json"]


def test_order_and_a_floor_in_units_do_not_matter(tmp_path: Path) -> None:
    path = written(tmp_path, on_demand_floor=8, min_replicas=8, max_replicas=20)
    values = yaml.safe_load(path.read_text())
    for pool in values.values():
        pool["classes"] = [{**one, "max_replicas": 2} for one in reversed(pool["classes"])]
    path.write_text(yaml.safe_dump(values))
    assert speeds(load_policy(path))[0] == {"fast": 3.5, "slow": 1.0}


def test_the_length_decides_where_models_differ_in_attention() -> None:
    linear = replace(SLOW, prefill_token_s=SLOW.prefill_token_s * 4, prefill_token2_s=0.0)
    short, long = (
        work_rate(SLOW, "prefill", tokens, None) / work_rate(linear, "prefill", tokens, None)
        for tokens in (512, 100_000)
    )
    assert long < short


def test_decode_is_by_the_batch_that_keeps_the_target() -> None:
    model = EngineModel(step_s=0.01, sequence_s=0.001, max_running_requests=30, kv_capacity_tokens=20_000)
    assert work_rate(model, "decode", 100, 0.03) == pytest.approx(20 / 0.03)
    assert work_rate(model, "decode", 100, None) == pytest.approx(30 / 0.04)
    assert work_rate(model, "decode", 2000, None) == pytest.approx(10 / 0.02), "by its KV"
    assert work_rate(model, "decode", 100, 0.0105) == 0, "one stream is too slow"
    assert work_rate(model, "decode", 30_000, None) == 0, "it has no room"
    roomy = replace(model, kv_capacity_tokens=400_000, context_tokens=131_072)
    assert work_rate(roomy, "decode", 131_072, None) > 0
    assert work_rate(roomy, "decode", 131_073, None) == 0, "no stream has so much context"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speed": 2}, r"prefill.classes.1.speed must not be given with engine_model"),
        ({"engine_model": None}, r"prefill.classes.1.engine_model must be a file in all classes of a pool"),
        (
            {"engine_model": "none.json"},
            r"line \d+: prefill.classes.1.engine_model: .*cannot read .*none.json",
        ),
        (
            {"engine_model": "bad.json"},
            r"prefill.classes.1.engine_model: engine_model.step_s must be a number",
        ),
        ({"engine_model": "."}, r"prefill.classes.1.engine_model: .*cannot read"),
        ({"engine_model": "text.json"}, r"prefill.classes.1.engine_model: .* is no JSON"),
        (
            {"engine_model": "short.json"},
            r"classes.1.engine_model: .* cannot compute a prompt of 2048 tokens",
        ),
        (
            {"engine_model": "huge.json"},
            r"engine_model.step_s must be a number of .*, at most 1e\+18, not 1000",
        ),
        ({"engine_model": "long.json"}, r"prefill.classes.1.engine_model: .* more than 65536 bytes"),
        (
            {"engine_model": "pipe"},
            r"prefill.classes.1.engine_model: .*cannot read .*no regular file",
        ),
        (
            {"engine_model": "swift.json"},
            r"prefill.classes.1.speed: Input should be less than or equal to 1000",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = written(tmp_path)
    (tmp_path / "bad.json").write_text('{"step_s": -1}')
    (tmp_path / "text.json").write_text("speed: 3")
    (tmp_path / "huge.json").write_text(json.dumps({"step_s": 10**400}))
    (tmp_path / "long.json").write_text("{}" + " " * 65_536)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "short.json").write_text('{"context_tokens": 1024}')
    (tmp_path / "swift.json").write_text('{"prefill_token_s": 1e-12, "prefill_step_s": 0}')
    values = yaml.safe_load(path.read_text())
    values["prefill"]["classes"][1] |= changes
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=said):
        load_policy(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speed_at_tokens": 0}, "prefill.speed_at_tokens: Input should be greater than or equal to 1"),
        ({"speed_at_tokens": "x"}, "prefill.speed_at_tokens: Input should be a valid integer"),
        ({"target_ms": "soon"}, "prefill.target_ms"),
        ({"target_ms": float("nan")}, "prefill.target_ms"),
        ({"target_ms": 10**400}, "prefill.target_ms: "),
        (
            {"classes": [{"name": "a", "price_per_hour": 1.0, "engine_model": "none.json"}] * 7},
            "prefill.classes must be at most 6, not 7",
        ),
        (
            {"speed_at_tokens": 200_000, "target_ms": 3_600_000},
            r"prefill.classes.0.engine_model: .* speed_at_tokens is 200000",
        ),
        ({"target_ms": 7}, r"decode.classes.0.engine_model: .* a step of one stream within target_ms \(7\)"),
        ({"classes": [{"engine_model": "slow.json"}]}, "prefill.classes.0.name: Field required"),
    ],
)
def test_so_is_what_is_wrong_beside_it(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_policy(written(tmp_path, **changes))


def test_a_policy_from_elsewhere_gives_numbers() -> None:
    one = {"name": "a", "price_per_hour": 1.0, "engine_model": "a.json"}
    pool = {"target_ms": 50, "classes": [one]}
    with pytest.raises(ConfigError, match="engine_model is for policies that are read from files"):
        parse_policy({"prefill": pool, "decode": pool})


def test_a_model_that_changes_is_followed_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    file = PolicyFile(written(tmp_path))
    assert polled(file) is None
    (tmp_path / "prefill.json").write_text(json.dumps(asdict(SLOW.at_speed("prefill", 2))))
    after = polled(file)
    assert after is not None
    assert speeds(after.rules)[0] == {"slow": 1.0, "fast": 2.0}
    (tmp_path / "prefill.json").write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        polled(file)
    assert file.value is after


def test_a_newly_named_model_that_comes_later_is_read_then(tmp_path: Path) -> None:
    path = written(tmp_path)
    file = PolicyFile(path)
    path.write_text(path.read_text().replace("prefill.json", "later.json"))
    with pytest.raises(ConfigError, match=r"cannot read .*later.json"):
        polled(file)
    assert polled(file) is None
    (tmp_path / "later.json").write_text('{"step_s": "no"}')
    with pytest.raises(ConfigError, match=r"engine_model.step_s must be a number"):
        polled(file)
    assert polled(file) is None
    assert file.files.outcomes["rejected"] == 2
    (tmp_path / "later.json").write_text(json.dumps(asdict(SLOW.at_speed("prefill", 2))))
    after = polled(file)
    assert after is not None
    assert speeds(after.rules)[0] == {"slow": 1.0, "fast": 2.0}
    assert not file.files.problem


def test_a_policy_that_names_others_is_taken_at_once_and_no_old_problem_is_told_again(tmp_path: Path) -> None:
    path = written(tmp_path)
    file = PolicyFile(path)
    right = path.read_text()
    (tmp_path / "twice.json").write_text(json.dumps(asdict(SLOW.at_speed("prefill", 2))))
    path.write_text(right.replace("prefill.json", "none.json"))
    with pytest.raises(ConfigError, match=r"cannot read .*none.json"):
        polled(file)
    path.write_text(right.replace("prefill.json", "twice.json"))
    after = polled(file)
    assert after is not None
    assert speeds(after.rules)[0] == {"slow": 1.0, "fast": 2.0}


def test_newly_named_code_that_comes_later_is_read_then(tmp_path: Path) -> None:
    path = written(tmp_path)
    file = PolicyFile(path)
    pool = "{kind: custom, function: 'mine.py:mine'}"
    path.write_text(f"prefill: {pool}\ndecode: {pool}\n")
    with pytest.raises(ConfigError, match=r"there is no file .*mine.py"):
        polled(file)
    (tmp_path / "mine.py").write_text(
        "from autoscaler.policies.recommendation import Recommendation\n"
        "def mine(memory, snapshot, status):\n"
        "    return Recommendation(2, 'why'), memory\n"
    )
    assert polled(file) is not None
