"""vLLM's own parser and checks behind `--engine-args`; no model is loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.vllm.boot import FIRST_TOKENS
from engine.vllm.options import BY_SETTING, REFUSED, checked_options, own_arguments
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError

OF_ITS_SERVER = {"--config", "--lora-modules"}
SINCE_0_31 = {"--max-num-active-seqs"}
OWN = own_arguments(EngineConfig(kind="vllm", context_tokens=512), "no-model", on_cpu=True)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


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
    ],
)
def test_wrong_options_are_one_sentence(given: str, named: str, capfd: pytest.CaptureFixture[str]) -> None:
    from engine.vllm.options import read_options

    with pytest.raises(ConfigError) as raised:
        read_options(OWN, checked_options(given))
    assert raised.value.message.startswith(f"engine.engine_args: {named}")
    assert raised.value.field == "engine.engine_args"
    assert "usage" not in "".join(capfd.readouterr())


def test_the_users_options_come_last() -> None:
    from engine.vllm.options import read_options

    args = read_options(OWN, checked_options("--seed 3 --seed 4 --tensor_parallel_size=2"))
    assert (args.seed, args.tensor_parallel_size, args.max_model_len) == (4, 2, 512)


def test_what_is_refused_is_named_as_vllm_names_it() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="--engine-args", add_help=False, allow_abbrev=False)
    known = EngineArgs.add_cli_args(parser).format_help()
    assert {name for name in (*BY_SETTING, *REFUSED) if name not in known} <= OF_ITS_SERVER | SINCE_0_31


def test_vllm_takes_no_sampler_of_others_beside_speculation() -> None:
    """Why the ranks get `FirstTokenRank`."""
    import torch
    from vllm.v1.sample.logits_processor import build_logitsprocs

    with pytest.raises(ValueError, match="not supported when speculative decoding is enabled"):
        build_logitsprocs(
            SimpleNamespace(speculative_config=object()), torch.device("cpu"), False, False, [FIRST_TOKENS]
        )
