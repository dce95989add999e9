"""The file of tenants: what it refuses, who holds which key, salts, usage, and reloading."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.request.inference_request import (
    Caller,
    InferenceRequest,
    RequestTargets,
    check_length,
    resolved_stop,
)
from coordinator.request.state import RequestEstimate, RequestState
from coordinator.request_events import RequestEvents
from coordinator.tenants.access_control import CLUSTER
from coordinator.tenants.policy_file import MAX_TENANTS_BYTES, TenantPolicy, load_tenants
from coordinator.tenants.tenants import RequestQuota, Tenants
from coordinator.tenants.usage import TenantUsage
from coordinator.workers.snapshot import Model
from splitserve.errors import ConfigError, InvalidArgumentError, ResourceExhaustedError, UnauthenticatedError
from splitserve.security.api_keys import checked_key, key_hash, new_key
from splitserve.v1 import generation_pb2, inference_pb2
from tests.support.clients.inference_requests import inference_request

SECRET = b"s" * 32
KEYS = {name: new_key() for name in ("alice", "bob", "carol")}
MODEL = Model("m", "words", 1000, 500)


def write(folder: Path, *tenants: dict[str, Any], **top: Any) -> Path:
    path = folder / "tenants.yaml"
    listed = [{"key_hashes": [key_hash(KEYS[one["name"]])]} | one for one in tenants]
    path.write_text(yaml.safe_dump({"tenants": listed} | top))
    return path


def test_a_file_becomes_callers(tmp_path: Path) -> None:
    tenants = Tenants(
        write(
            tmp_path,
            {"name": "alice", "admin": True, "weight": 3, "priority_class": "interactive"},
            {
                "name": "bob",
                "models": ["small-*"],
                "max_prompt_tokens": 7,
                "max_output_tokens": 9,
                "ttft_slo_s": 0.5,
                "on_late": "refuse",
            },
        )
    )
    alice, bob = tenants.caller(KEYS["alice"]), tenants.caller(KEYS["bob"])
    assert (alice.tenant, alice.is_admin, alice.weight, alice.priority_class) == (
        "alice",
        True,
        3,
        "interactive",
    )
    assert (bob.targets, bob.on_late, alice.on_late) == (RequestTargets(ttft_s=0.5), "refuse", None)
    assert (bob.is_admin, bob.max_prompt_tokens, bob.max_output_tokens) == (False, 7, 9)
    assert bob.may_use("small-1b")
    assert not bob.may_use("large")
    assert len(alice.cache_salt) == len(bob.cache_salt) == 16
    assert alice.cache_salt != bob.cache_salt


@pytest.mark.parametrize("key", ["", "x", "sha256:" + "0" * 64, "\udcff", "k" * 2**20, "ключ"])
def test_unknown_keys_are_refused(tmp_path: Path, key: str) -> None:
    tenants = Tenants(write(tmp_path, {"name": "alice"}))
    with pytest.raises(UnauthenticatedError) as caught:
        tenants.caller(key)
    assert caught.value.reason == "WRONG_API_KEY"
    assert not key or key not in caught.value.message
    with pytest.raises(UnauthenticatedError, match="authorization: Bearer") as caught:
        tenants.caller(None)
    assert caught.value.reason == "NO_API_KEY"
    assert tenants.unauthenticated == 2


def test_a_hash_is_no_key(tmp_path: Path) -> None:
    tenants = Tenants(write(tmp_path, {"name": "alice"}))
    with pytest.raises(UnauthenticatedError):
        tenants.caller(key_hash(KEYS["alice"]))


@pytest.mark.parametrize(
    ("tenant", "field"),
    [
        ({"name": "a b"}, "tenants.0.name"),
        ({"name": "alice", "key_hashes": ["plain-key"]}, "tenants.0.key_hashes.0"),
        ({"name": "alice", "requests_per_second": 0}, "tenants.0.requests_per_second"),
        ({"name": "alice", "weight": 0}, "tenants.0.weight"),
        ({"name": "alice", "priority_class": "vip"}, "tenants.0.priority_class"),
        ({"name": "alice", "max_concurrent_requests": 0}, "tenants.0.max_concurrent_requests"),
        ({"name": "alice", "max_output_tokens": "many"}, "tenants.0.max_output_tokens"),
        ({"name": "alice", "quota": 1}, "tenants.0.quota"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, tenant: dict[str, Any], field: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(yaml.safe_dump({"tenants": [tenant]}))
    with pytest.raises(ConfigError) as caught:
        load_tenants(path, SECRET)
    assert caught.value.field == field
    assert field in caught.value.message
    assert "plain-key" not in caught.value.message


@pytest.mark.parametrize(
    "text", ["", "tenants: []", "tenants: {alice: {}}", "[", "tenants:\n- name: a\n- name: a\n", "other: 1"]
)
def test_invalid_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_tenants(path, SECRET)


def test_the_file_may_be_as_long_as_its_bounds_allow(tmp_path: Path) -> None:
    entry = len("    - " + key_hash("key") + "\n")
    assert 10_000 * (64 * entry + 1024) < MAX_TENANTS_BYTES
    with (tmp_path / "tenants.yaml").open("wb") as file:
        file.truncate(MAX_TENANTS_BYTES + 1)
    with pytest.raises(ConfigError, match=f"more than {MAX_TENANTS_BYTES} bytes"):
        load_tenants(tmp_path / "tenants.yaml", SECRET)


def test_one_key_has_one_tenant(tmp_path: Path) -> None:
    hashed = key_hash(KEYS["alice"])
    path = write(tmp_path, {"name": "alice", "key_hashes": [hashed]}, {"name": "bob", "key_hashes": [hashed]})
    with pytest.raises(ConfigError, match="unique"):
        load_tenants(path, SECRET)


def test_salts_come_from_the_secret_and_the_name(tmp_path: Path) -> None:
    (tmp_path / "salt").write_bytes(b"x" * 16)
    path = write(
        tmp_path,
        {"name": "alice", "shared_cache_group": "team"},
        {"name": "bob", "shared_cache_group": "team"},
        {"name": "carol"},
        cache_salt_secret_file="salt",
    )
    first, second = Tenants(path), Tenants(path)
    salts = {name: first.caller(KEYS[name]).cache_salt for name in KEYS}
    assert salts["alice"] == salts["bob"] != salts["carol"]
    assert salts == {name: second.caller(KEYS[name]).cache_salt for name in KEYS}
    (tmp_path / "salt").write_bytes(b"y" * 16)
    assert first.file.reload()
    assert first.caller(KEYS["carol"]).cache_salt != salts["carol"]
    (tmp_path / "salt").write_bytes(b"short")
    with pytest.raises(ConfigError, match="at least 16 bytes"):
        Tenants(path)


def test_without_a_secret_salts_are_of_this_boot(tmp_path: Path) -> None:
    path = write(tmp_path, {"name": "alice"})
    first, second = Tenants(path), Tenants(path)
    salt = first.caller(KEYS["alice"]).cache_salt
    assert salt != second.caller(KEYS["alice"]).cache_salt
    assert first.file.reload()
    assert salt == first.caller(KEYS["alice"]).cache_salt


def test_a_group_and_a_tenant_of_one_name_differ(tmp_path: Path) -> None:
    path = write(tmp_path, {"name": "alice"}, {"name": "bob", "shared_cache_group": "alice"})
    tenants = Tenants(path)
    assert tenants.caller(KEYS["alice"]).cache_salt != tenants.caller(KEYS["bob"]).cache_salt


def test_a_bad_file_keeps_what_is_in_force(tmp_path: Path) -> None:
    path = write(tmp_path, {"name": "alice"})
    tenants = Tenants(path)
    path.write_text("tenants: [{name: alice, weight: -1}]")
    assert not tenants.file.reload()
    assert tenants.caller(KEYS["alice"]).tenant == "alice"
    path.unlink()
    assert not tenants.file.reload()
    assert tenants.caller(KEYS["alice"]).tenant == "alice"


def test_a_reload_takes_keys_away_and_keeps_debts(tmp_path: Path) -> None:
    path = write(tmp_path, {"name": "alice", "requests_per_second": 1, "burst_seconds": 1}, {"name": "bob"})
    tenants = Tenants(path)
    alice = tenants.caller(KEYS["alice"])
    begin(tenants.usage_of(alice), inference_request(caller=alice), 0.0)
    write(tmp_path, {"name": "alice", "requests_per_second": 0.1, "burst_seconds": 1})
    assert tenants.file.reload()
    with pytest.raises(UnauthenticatedError):
        tenants.caller(KEYS["bob"])
    assert tenants.usage_of(alice).running == 1
    assert list(tenants.usages) == ["alice"]
    with pytest.raises(ResourceExhaustedError):
        begin(tenants.usage_of(alice), inference_request(caller=alice), 0.0)


def begin(usage: TenantUsage, request: InferenceRequest, now: float) -> None:
    """As a request does that is neither invalid nor refused by anything else."""
    usage.enter(0, now)
    try:
        usage.charge_prompt(len(request.prompt), 0, now)
    except ResourceExhaustedError:
        usage.leave()
        raise


def test_quotas_are_asked_before_a_prompt_is_tokenized() -> None:
    policy = TenantPolicy(name="alice", requests_per_second=2, prompt_tokens_per_second=10, burst_seconds=2)
    usage = TenantUsage(policy, 0.0)
    usage.enter(10, 0.0)
    usage.charge_prompt(10, 10, 0.0)
    usage.enter(5, 0.0)
    with pytest.raises(ResourceExhaustedError):
        usage.charge_prompt(40, 5, 0.0)  # more than a full bucket holds, and it is not full
    with pytest.raises(ResourceExhaustedError) as caught:
        usage.enter(6, 0.0)  # what was charged on entry stays charged
    assert caught.value.field == "prompt_tokens_per_second"
    usage.enter(0, 0.0)
    usage.enter(0, 0.0)
    with pytest.raises(ResourceExhaustedError) as caught:
        usage.enter(0, 0.0)
    assert caught.value.field == "requests_per_second"
    assert usage.outcomes == {"completed": 0, "failed": 0, "refused": 3}


def test_a_prompt_above_the_burst_is_charged_whole_from_a_full_bucket() -> None:
    usage = TenantUsage(TenantPolicy(name="alice", prompt_tokens_per_second=10, burst_seconds=2), 0.0)
    usage.enter(15, 0.0)
    usage.charge_prompt(70, 15, 0.0)
    with pytest.raises(ResourceExhaustedError) as caught:
        usage.enter(0, 0.0)
    assert caught.value.retry_after_s == 5.0


def test_what_a_resumed_answer_had_is_charged_as_a_debt() -> None:
    """Workers compute it like a prompt; and a long answer must be able to go on."""
    usage = TenantUsage(TenantPolicy(name="alice", prompt_tokens_per_second=10, burst_seconds=2), 0.0)
    usage.enter(1, 0.0)
    usage.charge_prompt(1, 1, 0.0)
    usage.charge_resumed(319, 0.0)
    with pytest.raises(ResourceExhaustedError) as caught:
        usage.enter(0, 0.0)
    assert caught.value.retry_after_s == 30.0
    unlimited = TenantUsage(TenantPolicy(name="bob"), 0.0)
    unlimited.charge_resumed(10**6, 0.0)
    unlimited.enter(1, 0.0)


def test_a_resumed_request_is_charged_on_admission(tmp_path: Path) -> None:
    tenants = Tenants(write(tmp_path, {"name": "alice", "prompt_tokens_per_second": 10}))
    alice = tenants.caller(KEYS["alice"])
    ask = inference_pb2.GenerateRequest(text="w1 w2 w3")
    with tenants.entered(ask, alice) as quota:
        quota.charge_prompt(replace(inference_request(caller=alice), resumed=(5,) * 900))
    with pytest.raises(ResourceExhaustedError) as caught, tenants.entered(ask, alice):
        pytest.fail("it was let in with a debt")
    assert caught.value.field == "prompt_tokens_per_second"


def test_requests_prompts_and_concurrency_are_charged() -> None:
    policy = TenantPolicy(
        name="alice",
        requests_per_second=1,
        prompt_tokens_per_second=10,
        burst_seconds=2,
        max_concurrent_requests=3,
    )
    usage, ask = TenantUsage(policy, 0.0), inference_request(prompt=20)
    begin(usage, ask, 0.0)
    with pytest.raises(ResourceExhaustedError) as caught:
        begin(usage, ask, 0.0)
    assert (caught.value.reason, caught.value.field) == ("TENANT_QUOTA", "prompt_tokens_per_second")
    assert caught.value.retry_after_s == 2.0
    begin(usage, ask, 2.0)
    begin(usage, inference_request(prompt=1), 4.0)
    with pytest.raises(ResourceExhaustedError) as caught:
        begin(usage, inference_request(prompt=1), 10.0)
    assert caught.value.reason == "TENANT_CONCURRENCY"
    usage.leave()
    usage.count("completed")
    begin(usage, inference_request(prompt=1), 10.0)
    assert usage.outcomes == {"completed": 1, "failed": 0, "refused": 2}
    assert usage.tokens == {"prompt": 42, "output": 0}


def test_output_may_leave_a_debt_that_the_next_request_waits_out() -> None:
    usage = TenantUsage(TenantPolicy(name="alice", output_tokens_per_second=10, burst_seconds=1), 0.0)
    begin(usage, inference_request(), 0.0)
    usage.sent(40, 0.0)
    with pytest.raises(ResourceExhaustedError) as caught:
        begin(usage, inference_request(), 0.0)
    assert caught.value.field == "output_tokens_per_second"
    assert caught.value.retry_after_s == 3.0
    begin(usage, inference_request(), 3.0)


@dataclass
class Charged:
    """The control of a request that is under nothing but its tenant's quota."""

    quota: RequestQuota

    def output_sent(self, tokens: int) -> None:
        self.quota.output_sent(tokens)

    def decoded(self) -> None:
        raise AssertionError("nothing decodes")

    def ended(self, error: BaseException | None) -> None:
        self.quota.ended(error)


def arriving(caller: Caller, quota: RequestQuota) -> RequestEvents:
    events = RequestEvents(RequestState(inference_request(caller=caller), RequestEstimate(10.0, 3.0)))
    quota.charge_prompt(events.state.request)
    events.control = Charged(quota)
    return events


def test_quotas_are_released_whatever_happens(tmp_path: Path) -> None:
    tenants = Tenants(write(tmp_path, {"name": "alice", "max_concurrent_requests": 1}))
    alice = tenants.caller(KEYS["alice"])
    ask = inference_pb2.GenerateRequest(text="w1 w2 w3")
    with suppress(RuntimeError), tenants.entered(ask, alice) as quota, arriving(alice, quota) as events:
        events.sent(generation_pb2.OutputDelta(token_ids=[1] * 4), 0.0)
        raise RuntimeError
    with (
        tenants.entered(ask, alice) as quota,
        arriving(alice, quota),
        pytest.raises(ResourceExhaustedError),
        tenants.entered(ask, alice),
    ):
        pytest.fail("a second request was let in")
    with suppress(ValueError), tenants.entered(ask, alice):
        raise ValueError("as an invalid request does")
    usage = tenants.usage_of(alice)
    assert usage.outcomes == {"completed": 1, "failed": 1, "refused": 1}
    assert usage.tokens == {"prompt": 6, "output": 4}
    with tenants.entered(ask, CLUSTER) as quota, arriving(CLUSTER, quota):
        assert usage.running == 0


def test_bounds_of_a_caller() -> None:
    with pytest.raises(InvalidArgumentError, match="at most 4") as caught:
        check_length(5, "prompt.text", MODEL, 4)
    assert (caught.value.field, caught.value.reason) == ("prompt.text", "TENANT_LIMIT")
    check_length(4, "prompt.text", MODEL, 4)
    assert resolved_stop(generation_pb2.StopParams(), 10, MODEL, 50).max_tokens == 50
    assert resolved_stop(generation_pb2.StopParams(), 980, MODEL, 50).max_tokens == 20
    assert resolved_stop(generation_pb2.StopParams(max_tokens=50), 10, MODEL, 50).max_tokens == 50
    with pytest.raises(InvalidArgumentError, match="at most 50") as caught:
        resolved_stop(generation_pb2.StopParams(max_tokens=51), 10, MODEL, 50)
    assert caught.value.field == "stop.max_tokens"


@pytest.mark.parametrize("key", ["", "two\nlines", "ключ", "k" * 513])
def test_keys_that_no_header_carries(key: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        checked_key(key)
    assert not key or key not in caught.value.message
