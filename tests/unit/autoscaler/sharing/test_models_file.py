"""The file of several models: what it must keep, alone and with the policies that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.policies.policy_file import parse_policy
from autoscaler.sharing.claims.shares import GPUS, MONEY, of_class, of_kind
from autoscaler.sharing.model_account import ModelAccount
from autoscaler.sharing.models_file import (
    ModelsInForce,
    check_same_models,
    check_workloads,
    least_uses,
    load_models,
)
from autoscaler.sharing.shared_account import SharedAccount
from autoscaler.sharing.shared_service import policies_of, shared_shadows
from splitserve.config.autoscaler import AutoscalerConfig
from splitserve.errors import ConfigError
from tests.support.policy_files import polled

ONLY = [{"name": "only", "price_per_hour": 2.0}]
PRICED: dict[str, Any] = {"target_ms": 100, "classes": ONLY}
PLAIN: dict[str, Any] = {"target_ms": 100, "gpus_per_replica": 2}
MODELS = [{"name": "a", "policy": "a.yaml"}, {"name": "b", "policy": "b.yaml"}]


def write(folder: Path, file: dict[str, Any], **policies: dict[str, Any]) -> Path:
    for name, policy in policies.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(policy))
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump({"models": MODELS, **file}))
    return path


def both(pool: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"prefill": pool, "decode": pool, **more}


def test_it_names_policies_beside_it_and_what_is_shared(tmp_path: Path) -> None:
    file = {"budget_per_hour": 8, "class_limits": {"only": 3}, "move_after_s": 5}
    shared = load_models(write(tmp_path, file, a=both(PRICED), b=both(PRICED)))
    assert shared.limits == {MONEY: 8.0, of_class("only"): 3.0}
    assert [model.policy for model in shared.models] == [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    assert policies_of(ModelsInForce(shared)).keys() == {"a", "b"}


def test_gpus_are_shared_by_models_without_classes(tmp_path: Path) -> None:
    shared = load_models(write(tmp_path, {"gpu_budget": 8}, a=both(PLAIN), b=both(PLAIN)))
    assert shared.limits == {GPUS: 8.0}
    assert len(policies_of(ModelsInForce(shared))) == 2


def test_neutral_workers_of_classes_are_one_of_several_models(tmp_path: Path) -> None:
    path = write(tmp_path, {"budget_per_hour": 8}, a=both(PRICED, workers="neutral"), b=both(PRICED))
    files = policies_of(ModelsInForce(load_models(path)))
    assert files["a"].value.rules.workers == "neutral"
    assert least_uses(files["a"].value.rules)[MONEY] == 4.0, "one of each side"


def test_gpus_of_a_kind_are_limited_over_classes_of_different_sizes(tmp_path: Path) -> None:
    sizes = [
        {"name": "one", "price_per_hour": 1.0, "gpu": "H100"},
        {"name": "four", "price_per_hour": 3.5, "gpu": "NVIDIA H100 80GB", "gpus_per_replica": 4, "speed": 4},
        {"name": "old", "price_per_hour": 0.5, "gpu": "L40S"},
    ]
    policy = both({"target_ms": 100, "classes": sizes})
    shared = load_models(write(tmp_path, {"gpu_limits": {"h100": 8}}, a=policy, b=policy))
    policies_of(ModelsInForce(shared))
    assert shared.limits == {of_kind("h100"): 8.0}
    own = ModelAccount(SharedAccount(shared.limits, {"a": dict}), "a", lambda: parse_policy(policy))
    counted = {kind: own.uses_of("decode", kind).get(of_kind("h100")) for kind in ("one", "four", "old")}
    assert counted == {"one": 1.0, "four": 4.0, "old": None}


@pytest.mark.parametrize(
    ("limits", "policy", "said"),
    [
        ({"A100": 8}, both(PRICED), "gpu_limits names A100, which is the gpu of no class"),
        ({"H100": 0}, both(PRICED), "gpu_limits.H100: Input should be greater than or equal to 1"),
        ({"": 8}, both(PRICED), "gpu_limits"),
        ({"H100": 8}, both(PLAIN), "gpu_limits need classes in both pools of the policy of a"),
        (
            {"H100": 8},
            both({"target_ms": 100, "classes": [{**ONLY[0], "gpu": "H100"}]}, gpu_limits={"H100": 8}),
            "gpu_limits belong into the file of models, not into the policy of a",
        ),
    ],
)
def test_what_limits_by_kind_must_keep(
    tmp_path: Path, limits: dict[str, int], policy: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        policies_of(ModelsInForce(load_models(write(tmp_path, {"gpu_limits": limits}, a=policy, b=policy))))


@pytest.mark.parametrize(
    ("file", "a", "said"),
    [
        ({"budget_per_hour": 0}, PRICED, "budget_per_hour: Input should be greater than 0"),
        ({"models": []}, PRICED, "models: "),
        ({"models": [MODELS[0], MODELS[0]]}, PRICED, "model a is there twice"),
        ({"models": [{"name": "a b", "policy": "a.yaml"}]}, PRICED, "models.0.name"),
        ({"models": [{**MODELS[0], "prefill_workload": "pod/x"}]}, PRICED, "models.0.prefill_workload"),
        ({"models": [{**one, "history_file": "h.json"} for one in MODELS]}, PRICED, "h.json is there twice"),
        ({"class_limits": {"only": 0}}, PRICED, "class_limits.only"),
        ({"class_limits": {"none": 3}}, PRICED, "class_limits names none, which is a class of no policy"),
        ({"move_after_s": -1}, PRICED, "move_after_s"),
        ({"strange": 1}, PRICED, "strange"),
        ({"budget_per_hour": 8}, PLAIN, r"budget_per_hour \(8\) needs prefill.classes .* in the policy of a"),
        (
            {"budget_per_hour": 7},
            PRICED,
            r"budget_per_hour \(7\) must hold min_replicas and warm_standby of all models, .*: 8",
        ),
        (
            {"gpu_budget": 3},
            PRICED,
            r"gpu_budget \(3\) must hold min_replicas and warm_standby of all models: 4",
        ),
    ],
)
def test_what_it_must_keep(tmp_path: Path, file: dict[str, Any], a: dict[str, Any], said: str) -> None:
    path = write(tmp_path, file, a=both(a), b=both(PRICED))
    with pytest.raises(ConfigError, match=said):
        policies_of(ModelsInForce(load_models(path)))


def test_no_workload_is_scaled_by_two() -> None:
    check_workloads({"a": ("deployment/p", "deployment/d"), "b": ("deployment/q", "deployment/e")})
    for other in (("deployment/p", "deployment/e"), ("deployment/e", "deployment/e")):
        with pytest.raises(ConfigError, match="must have workloads of their own, and deployment/"):
            check_workloads({"a": ("deployment/p", "deployment/d"), "b": other})
    classed = {"a": ("deployment/p", "deployment/d"), "b": ("deployment/p-small", "deployment/e")}
    check_workloads(classed)
    with pytest.raises(ConfigError, match="and deployment/p-small of a is another's too"):
        check_workloads(classed, ["small"])


def test_a_policy_with_classes_has_no_budget_of_gpus_either(tmp_path: Path) -> None:
    path = write(tmp_path, {"budget_per_hour": 9}, a=both(PRICED, gpu_budget=8), b=both(PRICED))
    with pytest.raises(ConfigError, match=r"gpu_budget \(8\) of the policy of a is for one model"):
        policies_of(ModelsInForce(load_models(path)))


def test_models_with_and_without_classes_share_gpus(tmp_path: Path) -> None:
    shared = load_models(write(tmp_path, {"gpu_budget": 6}, a=both(PRICED), b=both(PLAIN)))
    policies = {name: file.value.rules for name, file in policies_of(ModelsInForce(shared)).items()}
    least = {name: least_uses(rules, shared.limits) for name, rules in policies.items()}
    assert least == {"a": {MONEY: 4.0, GPUS: 2.0}, "b": {GPUS: 4.0}}
    assert least_uses(policies["a"]) == {MONEY: 4.0}, "they are of several kinds"
    write(tmp_path, {}, a={"prefill": PRICED, "decode": PLAIN})
    with pytest.raises(
        ConfigError, match=r"gpu_budget \(6\) needs classes in both pools or in none: .* of a pre"
    ):
        policies_of(ModelsInForce(shared))


def test_the_least_of_all_must_fit_the_gpus(tmp_path: Path) -> None:
    path = write(tmp_path, {"gpu_budget": 7}, a=both(PLAIN), b=both(PLAIN))
    with pytest.raises(ConfigError, match=r"gpu_budget \(7\) must hold min_replicas .* of all models: 8"):
        policies_of(ModelsInForce(load_models(path)))


def test_a_policy_has_no_budget_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, {}, a=both(PRICED, budget_per_hour=20), b=both(PRICED))
    with pytest.raises(ConfigError, match="belongs into the file of models, not into the policy of a"):
        policies_of(ModelsInForce(load_models(path)))


def test_a_new_version_of_a_policy_must_fit_the_others(tmp_path: Path) -> None:
    shared = load_models(write(tmp_path, {"budget_per_hour": 10}, a=both(PRICED), b=both(PRICED)))
    files = policies_of(ModelsInForce(shared))
    before = files["a"].value
    write(tmp_path, {"budget_per_hour": 10}, a=both({**PRICED, "min_replicas": 3}), b=both(PRICED))
    with pytest.raises(ConfigError, match=r"budget_per_hour \(10\) must hold min_replicas and"):
        polled(files["a"])
    assert files["a"].value is before
    write(tmp_path, {"budget_per_hour": 10}, a=both({**PRICED, "max_replicas": 5}), b=both(PRICED))
    assert polled(files["a"]) is not None


def test_it_must_fit_the_limits_as_they_are_now(tmp_path: Path) -> None:
    in_force = ModelsInForce(
        load_models(write(tmp_path, {"budget_per_hour": 8}, a=both(PRICED), b=both(PRICED)))
    )
    files = policies_of(in_force)
    in_force.value = load_models(write(tmp_path, {"budget_per_hour": 12}))
    write(tmp_path, {"budget_per_hour": 12}, a=both({**PRICED, "min_replicas": 2}))
    assert polled(files["a"]) is not None


def test_each_model_has_its_own_shadows(tmp_path: Path) -> None:
    models = [{**MODELS[0], "shadow": ["b.yaml", "own.yaml"]}, MODELS[1]]
    own = {"a": both(PRICED), "b": both(PRICED), "own": both(PRICED, budget_per_hour=9)}
    shared = load_models(write(tmp_path, {"models": models, "budget_per_hour": 8}, **own))
    assert [model.shadow for model in shared.models] == [(tmp_path / "b.yaml", tmp_path / "own.yaml"), ()]
    account = SharedAccount(shared.limits, {"a": dict})
    of_a = ModelAccount(account, "a", lambda: parse_policy(both(PRICED)))
    with pytest.raises(ConfigError, match="not into the policy of a shadow of a"):
        shared_shadows(shared, shared.models[0], of_a, 60.0)
    right = shared.models[0].model_copy(update={"shadow": (tmp_path / "b.yaml",)})
    assert [one.name for one in shared_shadows(shared, right, of_a, 60.0).policies] == ["b"]
    with pytest.raises(ConfigError, match=r"models\.0\.shadow"):
        load_models(write(tmp_path, {"models": [{**MODELS[0], "shadow": ["s.yaml"] * 9}]}))


def test_other_models_need_a_restart(tmp_path: Path) -> None:
    shared = load_models(write(tmp_path, {}, a=both(PRICED), b=both(PRICED)))
    with pytest.raises(ConfigError, match="that needs a restart"):
        check_same_models(shared, load_models(write(tmp_path, {"models": MODELS[:1]}, a=both(PRICED))))


@pytest.mark.parametrize(
    ("field", "value"), [("policy", "p.yaml"), ("shadow", ("s.yaml",)), ("model", "a"), ("history_file", "h")]
)
def test_what_differs_by_model_is_in_the_file(field: str, value: Any) -> None:
    config = AutoscalerConfig.model_validate({"models": "models.yaml", field: value})
    with pytest.raises(ConfigError, match=f"^{field} must not be given with models") as caught:
        config.models_file  # noqa: B018
    assert caught.value.field == field
    assert AutoscalerConfig.model_validate({"models": "models.yaml"}).models_file == Path("models.yaml")
