"""Which engines speculate, and which refuse to."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.engine_core import EngineCore
from engine.runner.draft_runner import check_vocabulary, load_draft_model
from engine.speculation.draft_lengths import MAX_ROWS
from engine.speculation.settings import make_drafter, max_decode_rows, warm_up_drafts
from engine.worker.build import build_engine
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError
from splitserve.models.sources import ModelSource
from tests.support.engine.byte_tokenizer import ByteTokenizer
from tests.support.engine.engine_rig import request


def worker(**engine: object) -> WorkerConfig:
    return WorkerConfig(
        worker_id="w", model="simulated", transport="memory", engine=EngineConfig.model_validate(engine)
    )


def test_it_is_off_unless_asked_for() -> None:
    config = EngineConfig()
    assert make_drafter(config) is None
    assert not warm_up_drafts(config)
    assert max_decode_rows(config) == config.max_running_requests


def test_a_step_has_room_for_drafts_where_few_may_run() -> None:
    assert max_decode_rows(EngineConfig(speculation="prompt-lookup", max_running_requests=2)) == MAX_ROWS


def test_vllm_refuses_it_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.speculation: ") as refusal:
        build_engine(worker(kind="vllm", speculation="prompt-lookup"))
    assert refusal.value.field == "engine.speculation"


def test_the_simulated_engine_checks_drafts() -> None:
    """Its text is as good as random, so pairs of its characters come again, and mean little."""
    parts = build_engine(
        worker(kind="simulated", num_blocks=64, speculation="prompt-lookup", simulated_step_s=0.0)
    )
    assert isinstance(parts.core, EngineCore)
    parts.core.add_request(request(max_tokens=500, prompt=b"abcabcabcabcabc"))
    while parts.core.has_work():
        parts.core.step()
    assert parts.core.step_totals["decode"].drafted_tokens
    parts.core.close()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"speculation": "draft-model"}, "engine.draft_model"),
        ({"draft_model": "some/model"}, "engine.draft_model"),
        ({"speculation": "prompt-lookup", "draft_model": "some/model"}, "engine.draft_model"),
        (
            {"kind": "simulated", "speculation": "draft-model", "draft_model": "some/model"},
            "engine.speculation",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_before_anything_is_loaded(
    settings: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: ") as refusal:
        build_engine(worker(**settings))
    assert refusal.value.field == field


class Named(ByteTokenizer):
    """Names one token otherwise."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"!" if token_id == 65 else super().token_bytes(token_id)


class Longer(ByteTokenizer):
    vocabulary_size = 300


def test_a_draft_model_that_is_missing_is_named_by_its_own_setting(tmp_path: Path) -> None:
    config = EngineConfig(speculation="draft-model", draft_model=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"^engine\.draft_model: no such folder") as refusal:
        load_draft_model(config, ModelSource(str(tmp_path), None, "target"))
    assert refusal.value.field == "engine.draft_model"


@pytest.mark.parametrize("other", [Named(), Longer()])
def test_a_draft_model_of_another_vocabulary_is_refused(other: ByteTokenizer) -> None:
    check_vocabulary(ByteTokenizer(), ByteTokenizer())
    with pytest.raises(ConfigError, match=r"^engine\.draft_model: its vocabulary ") as refusal:
        check_vocabulary(ByteTokenizer(), other)
    assert refusal.value.field == "engine.draft_model"


def test_workers_that_do_not_decode_take_no_drafts() -> None:
    parts = build_engine(worker(kind="simulated", num_blocks=64, speculation="prompt-lookup"), decodes=False)
    assert parts.config.engine.speculation == "off"
    parts.core.close()
