"""vLLM's own parser and checks behind `--engine-args`; no model is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.vllm.options import BY_SETTING, REFUSED
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


def read(engine_args: str) -> Any:
    from engine.vllm.options import read_options

    config = EngineConfig(kind="vllm", context_tokens=512, engine_args=engine_args)
    return read_options(config, "no-model", on_cpu=True)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--block-siz 64", "unrecognized arguments: --block-siz 64"),
        ("--frobnicate 3", "unrecognized arguments: --frobnicate 3"),
        ("model", "unrecognized arguments: model"),
        ("--help", "unrecognized arguments: --help"),
        ("--seed", "argument --seed: expected one argument"),
        ("--seed x", "argument --seed: invalid int value: 'x'"),
        ("-n2", "--nnodes is refused: a worker is on one machine"),
        ("--load-format dummy", "--load-format dummy is refused"),
        ("--block-size 64", "--block-size is set by engine.block_size_tokens"),
        ("--max_num_seqs=3", "--max-num-seqs is set by engine.max_running_requests"),
        ("-dp=2", "--data-parallel-size is refused: start more workers;"),
        ("-dcp 2", "--decode-context-parallel-size is refused"),
        ("--scheduler_cls x", "--scheduler-cls is refused"),
        ("--kv-transfer-config.kv_role kv_both", "--kv-transfer-config is refused"),
        ("--kv-offloading-backend lmcache", "--kv-offloading-backend is refused"),
        ("--enable-lora", "--enable-lora is set by engine.adapters"),
        ("--config x.yaml", "--config is refused: give the options themselves"),
    ],
)
def test_wrong_options_are_one_sentence(given: str, named: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        read(given)
    assert raised.value.message.startswith(f"engine.engine_args: {named}")
    assert raised.value.field == "engine.engine_args"
    assert "usage" not in "".join(capfd.readouterr())


def test_the_users_options_come_last() -> None:
    args = read("--seed 3 --seed 4 --tensor_parallel_size=2 --no-enforce-eager --hf-overrides '{\"a\": 1}'")
    assert (args.seed, args.tensor_parallel_size, args.max_model_len) == (4, 2, 512)
    assert (args.enforce_eager, args.hf_overrides) == (False, {"a": 1})


def test_what_is_refused_is_named_as_vllm_names_it() -> None:
    assert set(vars(read(""))) >= {*BY_SETTING, *REFUSED}


def test_vllm_takes_no_sampler_of_others_beside_speculation() -> None:
    """Why the ranks get `FirstTokenRank`."""
    import torch
    from vllm.v1.sample.logits_processor import build_logitsprocs

    with pytest.raises(ValueError, match="not supported when speculative decoding is enabled"):
        build_logitsprocs(
            SimpleNamespace(speculative_config=object()), torch.device("cpu"), False, False, ["any"]
        )
