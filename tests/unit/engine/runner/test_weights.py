"""Weights that a process keeps for those forked from it: taken once, and only where they are what would be loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.backends.cpu.int8_linears import is_exact
from engine.backends.cpu.kernels import CpuKernels
from engine.model import named_weights
from engine.model.loaded_model import LoadedModel
from engine.model.named_weights import NamedWeights
from engine.model.probe import probe_logits
from engine.runner import weights
from engine.runner.weights import keep_weights, load_weights
from kv_transfer.layout import FP8_E4M3
from kv_transfer.weights.manifest import Manifest, TensorSpec, WeightsForm, WeightsReader
from splitserve.config.engine import EngineConfig
from splitserve.errors import SplitserveError
from splitserve.models.sources import resolve_model
from tests.support.engine.tiny_models import make_tiny_model

INT8 = {"quantization": "int8"}
needs_int8 = pytest.mark.skipif(not is_exact(), reason="this processor has no int8 products")


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    weights._kept.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(make_tiny_model("llama", tmp_path))


def config(**settings: Any) -> EngineConfig:
    return EngineConfig.model_validate({"device": "cpu", "threads": 1, **settings})


def taken(settings: EngineConfig, folder: Path) -> bool:
    """Whether the kept weights are what loading these settings gives."""
    kept = weights._kept[0].weights.model
    return load_weights(settings, resolve_model(str(folder)), lambda _fraction: None).model is kept


def test_they_are_taken_once(folder: Path) -> None:
    keep_weights(config(), str(folder))
    kept, progress = weights._kept[0].weights, list[float]()
    source = resolve_model(str(folder))
    taken = load_weights(config(threads=2), source, progress.append)
    assert taken.model is kept.model
    assert taken.origin == "kept"
    assert progress == [1.0]
    assert load_weights(config(), source, lambda _fraction: None).model is not kept.model


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"cpu_kernels": "off"}])
def test_other_settings_load_for_themselves(folder: Path, settings: dict[str, str]) -> None:
    kept = {"dtype": "bfloat16"}
    keep_weights(config(**kept), str(folder))
    assert not taken(config(**kept | settings), folder)
    assert taken(config(**kept), folder)


def test_files_that_have_changed_since_are_loaded(folder: Path) -> None:
    keep_weights(config(), str(folder))
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    assert not taken(config(), folder)


def test_another_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    keep_weights(config(), str(folder))
    assert not taken(config(), Path(make_tiny_model("qwen2", tmp_path / "other")))


def test_a_model_that_cannot_be_loaded_is_left_to_the_worker(folder: Path, tmp_path: Path) -> None:
    keep_weights(config(), str(tmp_path / "nowhere"))
    keep_weights(config(), "some-org/never-fetched")
    (folder / "model.safetensors").write_bytes(b"torn")
    keep_weights(config(), str(folder))
    assert not weights._kept


def test_a_large_model_is_left_to_the_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_KEPT_BYTES", 1000)
    keep_weights(config(), str(folder))
    assert not weights._kept
    in_files = sum(file.stat().st_size for file in folder.iterdir())
    monkeypatch.setattr(weights, "MAX_KEPT_BYTES", in_files)
    keep_weights(config(dtype="float32"), str(folder))
    assert not weights._kept, "twice as large in memory"
    keep_weights(config(dtype="bfloat16"), str(folder))
    assert weights._kept


def test_a_narrower_wire_decides_the_dtype(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runner.dtype.multiplies_bfloat16", lambda: False)
    keep_weights(config(), str(folder), FP8_E4M3)
    kept = weights._kept[0].weights
    source = resolve_model(str(folder))
    assert load_weights(config(), source, lambda _fraction: None, FP8_E4M3).model is kept.model


def test_files_that_are_gone_are_missed_where_they_are_loaded(folder: Path) -> None:
    keep_weights(config(), str(folder))
    source = resolve_model(str(folder))
    shutil.rmtree(folder)
    with pytest.raises(SplitserveError):
        load_weights(config(), source, lambda _fraction: None)


def test_what_was_logged_is_logged_where_they_are_taken(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(dtype="float32")
    with caplog.at_level("INFO", "splitserve"):
        keep_weights(settings, str(folder))
        events = [event.getMessage() for event in weights._kept[0].events]
        assert not caplog.records
        assert taken(settings, folder)
    assert [record.getMessage() for record in caplog.records] == events


class Peer:
    """A running worker's weights, in this process; `change` is applied to what arrives."""

    def __init__(
        self, reader: WeightsReader, change: Callable[[str, Any], None] = lambda name, into: None
    ) -> None:
        self.reader, self.change = reader, change

    def fetch(
        self, specs: Sequence[TensorSpec], allocate: Callable[[TensorSpec], Any], form: WeightsForm
    ) -> Manifest:
        given = self.reader
        manifest = Manifest(given.fingerprint, "agent", tuple(given.specs), given.form, given.content)
        manifest.require_same(specs, form)
        for spec in self.reader.specs:
            into = allocate(spec)
            into[:] = self.reader.read(spec, 0, spec.num_bytes)
            self.change(spec.name, into)
        return Manifest.from_proto(manifest.to_proto())


def named(settings: EngineConfig, folder: Path) -> NamedWeights:
    model = load_weights(settings, resolve_model(str(folder)), lambda _fraction: None).model
    return reader_of(model)


def reader_of(model: LoadedModel) -> NamedWeights:
    return NamedWeights(model.module, model.tensors, model.fingerprint, model.form, model.content)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"dtype": "float32"}),
        ("llama", {}),
        ("phi3", {"cpu_kernels": "off"}),
        ("gemma2", {}),
        ("mixtral", {}),
        pytest.param("llama", INT8, marks=needs_int8),
        pytest.param("llama", {**INT8, "cpu_kernels": "off"}, marks=needs_int8),
        pytest.param("qwen2", INT8, marks=needs_int8),
        pytest.param("qwen2", {**INT8, "cpu_kernels": "off"}, marks=needs_int8),
        pytest.param("gemma2", INT8, marks=needs_int8),
    ],
)
def test_weights_of_a_peer_are_those_of_the_files(
    family: str, settings: dict[str, str], tmp_path: Path
) -> None:
    folder = Path(make_tiny_model(family, tmp_path))
    asked = config(**{"dtype": "bfloat16"} | settings)
    before = named(asked, folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    source = resolve_model(str(folder))
    assert not source.has_weights
    got = load_weights(asked, source, lambda _fraction: None, peer=Peer(before))
    assert got.origin == "peer"
    after = reader_of(got.model)
    assert (after.fingerprint, after.specs) == (before.fingerprint, before.specs)
    assert (after.form, after.content) == (before.form, before.content)
    for spec in before.specs:
        assert bytes(after.read(spec, 0, spec.num_bytes)) == bytes(before.read(spec, 0, spec.num_bytes))
    assert got.model.facts.eos_token_ids is not None


def test_wrong_weights_are_left_for_those_of_the_files(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(dtype="float32")
    right, source = named(settings, folder), resolve_model(str(folder))

    def flip(name: str, into: Any) -> None:
        if name.endswith("norm.weight"):
            into[3] ^= 64

    with caplog.at_level("WARNING", "splitserve"):
        got = load_weights(settings, source, lambda _fraction: None, peer=Peer(right, flip))
    assert (got.origin, got.model.fingerprint) == ("disk", right.fingerprint)
    assert "weights.not_from_peer" in caplog.text


@needs_int8
@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_int8_weights_of_a_peer_give_the_same_logits(kernels: str, folder: Path) -> None:
    asked = config(dtype="bfloat16", cpu_kernels=kernels, **INT8)
    source = resolve_model(str(folder))
    own = load_weights(asked, source, lambda _fraction: None).model
    got = load_weights(asked, source, lambda _fraction: None, peer=Peer(reader_of(own)))
    assert got.origin == "peer"
    assert got.model.work == own.work
    first, second = (probe_logits(model.module, model.context) for model in (own, got.model))
    assert torch.equal(first, second)
    plain = sum(spec.num_bytes for spec in named(config(dtype="bfloat16"), folder).specs)
    assert sum(spec.num_bytes for spec in own.tensors) < plain


@needs_int8
@pytest.mark.parametrize(("giver", "taker"), [({}, INT8), (INT8, {})])
def test_another_quantization_is_refused_before_anything_moves(
    giver: dict[str, str], taker: dict[str, str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peer = Peer(named(config(dtype="bfloat16", **giver), folder), refuse_bytes)
    asked, source = config(dtype="bfloat16", **taker), resolve_model(str(folder))
    with caplog.at_level("WARNING", "splitserve"):
        assert load_weights(asked, source, lambda _fraction: None, peer=peer).origin == "disk"
    (record,) = (each for each in caplog.records if each.getMessage() == "weights.not_from_peer")
    fields = vars(record)["event_fields"]
    assert fields["reason"] == "WEIGHTS_MISMATCH"
    assert "quantization is" in fields["why"]


@needs_int8
@pytest.mark.parametrize("what", ["weight", "weight_scale", "norm.weight"])
def test_wrong_int8_weights_are_left_for_those_of_the_files(
    what: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(dtype="bfloat16", **INT8)
    right, source = named(settings, folder), resolve_model(str(folder))

    def change(name: str, into: Any) -> None:
        if name.endswith(what):
            into[0] ^= 1

    with caplog.at_level("WARNING", "splitserve"):
        got = load_weights(settings, source, lambda _fraction: None, peer=Peer(right, change))
    assert (got.origin, got.model.fingerprint) == ("disk", right.fingerprint)
    assert "weights.not_from_peer" in caplog.text


@pytest.mark.parametrize("quantization", ["none", pytest.param("int8", marks=needs_int8)])
def test_another_configuration_is_refused_before_anything_moves(
    quantization: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(dtype="bfloat16", quantization=quantization)
    peer = Peer(named(settings, folder), refuse_bytes)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    changed = json.loads((other / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (other / "config.json").write_text(json.dumps(changed))
    with caplog.at_level("WARNING", "splitserve"):
        got = load_weights(settings, resolve_model(str(other)), lambda _fraction: None, peer=peer)
    assert got.origin == "disk"
    assert got.model.fingerprint != peer.reader.fingerprint
    (record,) = (each for each in caplog.records if each.getMessage() == "weights.not_from_peer")
    assert "configuration" in vars(record)["event_fields"]["why"]


def refuse_bytes(name: str, _into: Any) -> None:
    raise AssertionError(f"{name} was moved")


def test_weights_in_another_type_are_left(folder: Path) -> None:
    peer = Peer(named(config(dtype="bfloat16"), folder))
    source = resolve_model(str(folder))
    assert load_weights(config(dtype="float32"), source, lambda _fraction: None, peer=peer).origin == "disk"


def test_without_room_nothing_is_received(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(named(config(dtype="float32"), folder))
    monkeypatch.setattr("engine.runner.model_loader.free_memory", lambda: 1000)
    source = resolve_model(str(folder))
    assert load_weights(config(dtype="float32"), source, lambda _fraction: None, peer=peer).origin == "disk"


def test_a_model_with_tensors_that_are_not_sent_loads_from_its_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings, source = config(dtype="float32"), resolve_model(str(folder))
    peer = Peer(named(settings, folder))
    monkeypatch.delitem(named_weights._NAMES, torch.float32)
    assert load_weights(settings, source, lambda _fraction: None).model.tensors == ()
    with caplog.at_level("WARNING", "splitserve"):
        got = load_weights(settings, source, lambda _fraction: None, peer=peer)
    assert got.origin == "disk"
    (record,) = caplog.records
    assert vars(record)["event_fields"]["reason"] == "WEIGHTS_UNUSABLE"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.uint16, torch.uint32])
def test_one_tensor_that_is_not_sent_leaves_none_to_give(dtype: torch.dtype) -> None:
    module: Any = nn.Linear(2, 3)
    module.all_tied_weights_keys = {}
    assert len(named_weights.tensor_specs(module)) == 2
    module.register_buffer("scales", torch.empty(2, dtype=dtype))
    assert named_weights.tensor_specs(module) == ()


@pytest.mark.parametrize(
    "error", [KeyError("dtype"), OSError(12, "cannot map"), RuntimeError("no room"), MemoryError()]
)
def test_faults_of_the_system_leave_the_files(
    error: Exception, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(dtype="float32")

    def fail(_name: str, _into: Any) -> None:
        raise error

    peer = Peer(named(settings, folder), fail)
    with caplog.at_level("WARNING", "splitserve"):
        got = load_weights(settings, resolve_model(str(folder)), lambda _fraction: None, peer=peer)
    assert got.origin == "disk"
    (record,) = caplog.records
    assert vars(record)["event_fields"]["reason"] == "WEIGHTS_UNUSABLE"


def test_siblings_are_unpacked_each_for_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = named(config(dtype="bfloat16"), folder)
    unpacked, unpack = list[int](), CpuKernels.unpack

    def counted(packed: torch.Tensor, rows: slice) -> torch.Tensor:
        part = unpack(packed, rows)
        unpacked.append(len(part))
        return part

    monkeypatch.setattr(CpuKernels, "unpack", staticmethod(counted))
    spec = next(spec for spec in reader.specs if spec.name.endswith("k_proj.weight"))
    for start in (0, spec.num_bytes // 2):
        reader.read(spec, start, spec.num_bytes // 2)
    assert unpacked in ([spec.shape[0]], []), "[] where our kernels cannot be compiled"


def test_nothing_unpacked_is_kept_after_a_pull(folder: Path) -> None:
    reader = named(config(dtype="bfloat16"), folder)
    for spec in reader.specs:
        reader.read(spec, 0, spec.num_bytes)
    assert reader._last is not None
    reader.rest()
    assert reader._last is None
    assert bytes(reader.read(reader.specs[0], 0, 4))
