"""Damaged models: each is refused in one line that names the file, within seconds, before anything is served."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from engine.runner.torch_runner import build_torch_runner
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig
from splitserve.errors import ConfigError, NotFoundError, SplitserveError, UnsupportedModelError
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.sources import checked_model
from tests.support.cluster.forked import stop_fork_servers
from tests.support.cluster.processes import ServiceProcess
from tests.support.engine.tiny_models import CONTEXT, EOS, VOCABULARY, make_tiny_model
from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S
from worker.build import build_engine

MOST_S = 5.0
CONFIG, GENERATION, INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FILES = (
    CONFIG,
    GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    INDEX,
    *SHARDS,
)
GGUF = "tiny.gguf"
SEED = 46
CUTS, CHANGES, SWAPS = 4, 4, 3
ENGINE = EngineConfig(kind="torch", device="cpu", threads=1, num_blocks=8)
DEEP = 100_000

Damage = Callable[[Path], None]
"""Damages a copy of the models' folder."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in two shards, without metadata in its index, beside a GGUF file of the same model."""
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("models"))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = dict(zip(SHARDS, (names[: len(names) // 2], names[len(names) // 2 :]), strict=True))
    for shard, part in parts.items():
        save_file({name: weights[name] for name in part}, folder / shard, metadata={"format": "pt"})
    weight_map = {name: shard for shard, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    write_gguf(folder / GGUF, weights, json.loads((folder / "tokenizer.json").read_text()))
    return folder


def write_gguf(path: Path, weights: dict[str, torch.Tensor], tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    tokens = [*sorted(vocabulary, key=vocabulary.get), "<eos>"]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<eos>" else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(EOS)
    renamed = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    layered = {
        **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
        "self_attn.o_proj": "attn_output",
        **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, weight in weights.items():
        bare = name.removeprefix("model.").removesuffix(".weight")
        if bare.startswith("layers."):
            _, number, inner = bare.split(".", 2)
            writer.add_tensor(f"blk.{number}.{layered[inner]}.weight", weight.numpy())
        else:
            writer.add_tensor(f"{renamed[bare]}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return damage


def cut(name: str, share: float) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])

    return damage


def change(name: str, share: float) -> Damage:
    """One byte becomes 0xFF, which is in no text, and is in no head of a weights' file."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        start = 8 if name in SHARDS else 0
        end = start + int.from_bytes(content[:8], "little") if name in SHARDS else len(content)
        content[start + int((end - start) * share)] = 0xFF
        (folder / name).write_bytes(content)

    return damage


def swap(name: str, other: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).rename(folder / "kept")
        (folder / other).rename(folder / name)
        (folder / "kept").rename(folder / other)

    return damage


def patch(name: str, at: int, content: bytes) -> Damage:
    def damage(folder: Path) -> None:
        whole = bytearray((folder / name).read_bytes())
        whole[at : at + len(content)] = content
        (folder / name).write_bytes(whole)

    return damage


def settings(name: str, **changed: Any) -> Damage:
    def damage(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        for key, value in changed.items():
            before = found.get(key)
            found[key] = before | value if isinstance(value, dict) and isinstance(before, dict) else value
        (folder / name).write_text(json.dumps(found))

    return damage


def only_pickled(folder: Path) -> None:
    for name in (INDEX, *SHARDS):
        (folder / name).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK")


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def generated() -> Iterator[tuple[str, str, Damage]]:
    """What each damage is, a word of the file that its error names, and the damage itself; the same every time."""
    chance = random.Random(SEED)
    for name in FILES:
        yield f"{name} empty", name, write(name, b"")
        for _ in range(CUTS):
            share = chance.uniform(0.05, 0.7)
            yield f"{name} cut {share:.3f}", name, cut(name, share)
        for _ in range(CHANGES):
            share = chance.uniform(0, 0.99)
            yield f"{name} changed {share:.3f}", name, change(name, share)
        others = [other for other in FILES if other != name and not {name, other} <= {*SHARDS}]
        for other in chance.sample(others, SWAPS):
            yield f"{name} swapped with {other}", ".", swap(name, other)
    yield f"{GGUF} empty", GGUF, write(GGUF, b"")
    for share in (0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 0.99):
        yield f"{GGUF} cut {share}", GGUF, cut(GGUF, share)
    yield f"{GGUF} swapped", GGUF, swap(GGUF, CONFIG)
    for what, at, content in (
        ("magic", 0, b"GGML"),
        ("version", 4, b"\x09\x00\x00\x00"),
        ("tensors", 8, b"\xff" * 7),
        ("values", 16, b"\xff" * 7),
    ):
        yield f"{GGUF} {what}", GGUF, patch(GGUF, at, content)


def told() -> Iterator[tuple[str, str, Damage]]:
    """Files of people that ended in tracebacks, or that started and were wrong: what, a word of the error, damage."""
    yield "only pytorch_model.bin", "safetensors files only: save pytorch_model.bin", only_pickled
    yield "no tokenizer", "no tokenizer files", remove("tokenizer.json")
    yield "a shard is missing", f"{INDEX}: it names '{SHARDS[1]}'", remove(SHARDS[1])
    yield "0 heads", "num_attention_heads must be", settings(CONFIG, num_attention_heads=0)
    yield "0 KV heads", "num_key_value_heads must be", settings(CONFIG, num_key_value_heads=0)
    yield "heads of no number", "num_attention_heads must be", settings(CONFIG, num_attention_heads={})
    yield "3 KV heads", "k_proj", settings(CONFIG, num_key_value_heads=3)
    yield "context 1e18", "max_position_embeddings must be", settings(CONFIG, max_position_embeddings=10**18)
    yield "context as float", "max_position_embeddings", settings(CONFIG, max_position_embeddings=1e18)
    yield "1e6 layers", "num_hidden_layers must be", settings(CONFIG, num_hidden_layers=10**6)
    yield "4000 layers", "it asks for 4000 layers", settings(CONFIG, num_hidden_layers=4000)
    yield "layers in a list", "num_hidden_layers", settings(CONFIG, num_hidden_layers=[2])
    yield "wide", "down_proj", settings(CONFIG, intermediate_size=10**12)
    yield "vocabulary", "vocab_size", settings(CONFIG, vocab_size=-1)
    yield "padding", "Padding_idx", settings(CONFIG, pad_token_id=10**12)
    yield "activation", "'gulu' is not known", settings(CONFIG, hidden_act="gulu")
    yield "rope type", "'spiral' is not known", settings(CONFIG, rope_parameters={"rope_type": "spiral"})
    for value in (math.nan, math.inf, 0, -1.0, "x"):
        yield f"rope_theta {value}", "rope_theta", settings(CONFIG, rope_parameters={"rope_theta": value})
    for kind, factor in (("yarn", 0.0), ("yarn", math.nan), ("linear", 0), ("dynamic", -2.0)):
        scaled = {"rope_type": kind, "factor": factor}
        yield f"{kind} {factor}", "factor must be", settings(CONFIG, rope_parameters=scaled)
    tiny = {"rope_theta": 1e-300}
    yield "rope_theta too small", "inv_freq is not finite", settings(CONFIG, rope_parameters=tiny)
    yield "eps NaN", "rms_norm_eps", settings(CONFIG, rms_norm_eps=math.nan)
    yield "dropout NaN", "attention_dropout is NaN", settings(CONFIG, attention_dropout=math.nan)
    yield "dtype", "float17", settings(CONFIG, dtype="float17")
    yield "model type", "model_type", settings(CONFIG, model_type=None)
    yield "model type in a list", "model_type must be", settings(CONFIG, model_type=[1])
    yield "tokenizer class", "tokenizer_class must be", settings("tokenizer_config.json", tokenizer_class=[])
    yield "quantized by a word", CONFIG, settings(CONFIG, quantization_config="x")
    for token in (10**12, -1, "x", [EOS, 10**12], True):
        yield f"end {token}", f"{GENERATION}: eos_token_id", settings(GENERATION, eos_token_id=token)
    yield "end of the model", f"{CONFIG}: eos_token_id", settings(CONFIG, eos_token_id=10**12)
    for name in (CONFIG, GENERATION, "tokenizer.json", "tokenizer_config.json", INDEX):
        yield f"{name} nested", name, write(name, '{"a":' * DEEP + "1" + "}" * DEEP)
        yield f"{name} is a list", name, write(name, "[1, 2]")
    yield "template nested", "chat_template.jinja", write("chat_template.jinja", "{{" + "(" * DEEP)


def cpu_s() -> float:
    """CPU time of this process and of its ended children, which a busy machine hardly changes."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def refusal(model: Path) -> str:
    """The error of a worker that is to serve the model, which comes in time and in one line."""
    began_s = cpu_s()
    with pytest.raises(SplitserveError) as caught:
        build_engine(WorkerConfig(worker_id="w", model=str(model), engine=ENGINE), lambda _call: None)
    assert cpu_s() - began_s < MOST_S
    assert isinstance(caught.value, ConfigError | UnsupportedModelError | NotFoundError)
    assert "\n" not in caught.value.message
    return caught.value.message


def damaged_copy(sound: Path, target: Path, damage: Damage) -> Path:
    folder = shutil.copytree(sound, target)
    damage(folder)
    return folder


DAMAGES = list(generated())


def test_there_are_more_than_100() -> None:
    assert len(DAMAGES) > 100
    assert len({what for what, _, _ in DAMAGES}) == len(DAMAGES)


@pytest.mark.parametrize(("what", "word", "damage"), DAMAGES, ids=[what for what, _, _ in DAMAGES])
def test_a_damaged_model_is_one_line(
    sound: Path, tmp_path: Path, what: str, word: str, damage: Damage
) -> None:
    folder = damaged_copy(sound, tmp_path / "model", damage)
    message = refusal(folder / GGUF if what.startswith(GGUF) else folder)
    assert word in message
    assert str(folder) in message


@pytest.fixture(scope="module")
def forks() -> Iterator[None]:
    yield
    stop_fork_servers()


@pytest.mark.parametrize(("what", "word", "damage"), list(told()), ids=[what for what, _, _ in told()])
def test_a_worker_of_a_damaged_model_ends_in_one_line(
    sound: Path, tmp_path: Path, forks: None, what: str, word: str, damage: Damage
) -> None:
    folder = damaged_copy(sound, tmp_path / "model", damage)
    arguments = ["worker", "--model", str(folder), "--engine", "torch", "--coordinator", "127.0.0.1:1"]
    worker = ServiceProcess("worker", arguments, tmp_path, imports="torch")
    worker.start()
    assert worker.process.wait(PATIENCE_S) in (1, 2)
    assert "Traceback" not in worker.log_tail()
    (line,) = [line for line in worker.log_tail().splitlines() if line.startswith("error: ")]
    assert word in line
    assert str(folder) in line


def test_the_sound_model_loads_in_every_form(sound: Path, tmp_path: Path) -> None:
    """An index needs no metadata, and the suffix of a GGUF file may be of any case."""
    shouted = tmp_path / "TINY.GGUF"
    shutil.copy(sound / GGUF, shouted)
    for model in (sound, sound / GGUF, shouted):
        runner = build_torch_runner(ENGINE, checked_model(str(model)))
        assert runner.facts.context_tokens == CONTEXT
        assert runner.facts.eos_token_ids == {EOS}
        runner.close()
    assert load_tokenizer(str(sound)).vocabulary_size == VOCABULARY


ODD = [None, [], {}, -1, 0, 1, 7, 1e308, math.nan, math.inf, "x", True, 10**30, [[]], {"a": 1}, "yarn"]


@pytest.mark.timeout(120)
def test_whatever_a_setting_becomes_the_model_loads_or_is_refused(sound: Path, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    good = json.loads((sound / CONFIG).read_text())
    good |= {f"rope_parameters.{name}": None for name in good["rope_parameters"]}
    folder = damaged_copy(sound, tmp_path / "model", lambda _: None)
    for _ in range(150):
        name, odd = chance.choice(sorted(good)), chance.choice(ODD)
        outer, _, inner = name.partition(".")
        shutil.copy(sound / CONFIG, folder)
        settings(CONFIG, **{outer: {inner: odd} if inner else odd})(folder)
        began_s = cpu_s()
        with suppress(SplitserveError):
            build_torch_runner(ENGINE, checked_model(str(folder))).close()
        assert cpu_s() - began_s < MOST_S, (name, odd)


@pytest.mark.timeout(LEAST_TIMEOUT_S)
@pytest.mark.parametrize(
    ("command", "model", "damage"),
    [
        (("up", "--grpc-port", "0", "--http-port", "0"), "", settings(CONFIG, num_hidden_layers=10**6)),
        (("worker",), "", cut(SHARDS[0], 0.5)),
        (("decode-worker",), GGUF, cut(GGUF, 0.9)),
    ],
)
def test_commands_end_in_one_line(
    sound: Path, tmp_path: Path, command: tuple[str, ...], model: str, damage: Damage
) -> None:
    folder = damaged_copy(sound, tmp_path / "model", damage)
    ended = subprocess.run(
        [sys.executable, "-m", "launcher", *command, "--model", str(folder / model), "--engine", "torch"],
        capture_output=True,
        text=True,
        timeout=LEAST_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"error: model: {folder}" in errors[0]
    assert ended.stdout == ""
