"""The model "simulated" needs no files: it has an engine of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.config.base import merge_settings, read_settings_file
from splitserve.config.cluster import ClusterConfig
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError


def test_the_simulated_model_has_the_simulated_engine(tmp_path: Path) -> None:
    path = tmp_path / "up.yaml"
    path.write_text("model: simulated\nengine: {num_blocks: 64}\n")
    engine = merge_settings(ClusterConfig, read_settings_file(path)).engine
    assert (engine.kind, engine.num_blocks) == ("simulated", 64)
    assert merge_settings(ClusterConfig, {}, {"model": "simulated"}).engine.kind == "simulated"
    assert (
        merge_settings(WorkerConfig, {}, {"worker_id": "w", "model": "simulated"}).engine.kind == "simulated"
    )
    assert merge_settings(ClusterConfig, {}, {"model": "other"}).engine.kind == "torch"


@pytest.mark.parametrize("kind", ["torch", "vllm"])
def test_no_other_engine_serves_it(kind: str) -> None:
    for settings in (ClusterConfig, WorkerConfig):
        given = {"worker_id": "w"} if settings is WorkerConfig else {}
        with pytest.raises(ConfigError, match="engine simulated"):
            merge_settings(settings, {}, dict(model="simulated", engine={"kind": kind}, **given))
