"""Checks a model's files before anything is built from them: each error names the file and what is wrong in it.

Needs neither torch nor `transformers`, so that a damaged model is reported at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from splitserve.errors import ConfigError, NotFoundError, UnsupportedModelError
from splitserve.runtime.bounded_file import read_named_file

CONFIG_FILE, INDEX_FILE = "config.json", "model.safetensors.index.json"
MAX_JSON_BYTES = 64 * 2**20
_ENDING = (CONFIG_FILE, "generation_config.json")
_OBJECTS = (*_ENDING, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_LAYERS = "num_hidden_layers n_layer n_layers num_layers"
_WHOLE = (
    (2**12, _LAYERS),
    (2**16, "num_attention_heads n_head n_heads num_key_value_heads head_dim"),
    (2**20, "hidden_size n_embd d_model"),
    (2**24, "vocab_size"),
    (2**31 - 1, "max_position_embeddings n_positions original_max_position_embeddings"),
)
_MAXIMUM = {name: maximum for maximum, names in _WHOLE for name in names.split()}
"""Settings that are whole numbers from 1 on, and the maximum of each."""
_SINGLE = (*_LAYERS.split(), "vocab_size")
"""Settings that must not differ by layer."""
_BASES = "rope_theta rope_local_base_freq rotary_emb_base partial_rotary_factor"
_FACTORS = "factor long_factor short_factor low_freq_factor high_freq_factor beta_fast beta_slow"
_EPSILONS = "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon"
_POSITIVE = f"{_BASES} {_FACTORS} {_EPSILONS}".split()
"""Settings that are finite numbers above 0."""


def read_object(path: Path, setting: str = "model", *, may_be_pipe: bool = True) -> dict[str, Any]:
    """The JSON object in a file that a setting names. Raises ConfigError (field `setting`)."""
    content = read_named_file(path, setting, MAX_JSON_BYTES, may_be_pipe=may_be_pipe)
    try:
        value = from_json(content)
    except ValueError as error:
        raise ConfigError(f"{setting}: {path} is no JSON: {error}", field=setting) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{setting}: {path} must be a JSON object", field=setting)
    return value


def check_folder(folder: Path, *, weights: bool) -> None:
    """Checks the settings of a model's folder; with `weights` also that its weights are readable and complete.

    Raises ConfigError or UnsupportedModelError for a damaged file, NotFoundError (with `weights`) without weights.
    """
    paths = [folder / name for name in _OBJECTS]
    objects = {path.name: read_object(path, may_be_pipe=False) for path in paths if path.exists()}
    for file, name in ((CONFIG_FILE, "model_type"), ("tokenizer_config.json", "tokenizer_class")):
        if not isinstance(objects.get(file, {}).get(name, ""), str):
            raise damaged(folder / file, f"{name} must be a name, not {objects[file][name]!r:.80}")
    config = objects.get(CONFIG_FILE, {})
    check_settings(folder / CONFIG_FILE, config)
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config
    vocabulary = config.get("vocab_size") or _MAXIMUM["vocab_size"]
    for file in _ENDING:
        tokens = objects.get(file, {}).get("eos_token_id")
        for token in tokens if isinstance(tokens, list) else [tokens]:
            if token is not None and (type(token) is not int or not 0 <= token < vocabulary):
                why = f"eos_token_id must be token ids of 0..{vocabulary - 1}, not {token!r:.80}"
                raise damaged(folder / file, why)
    layers = max(config.get(name) or 0 for name in _LAYERS.split())
    if weights and layers > (count := _count_tensors(folder)):
        why = f"it asks for {layers} layers, but the weights are only {count} tensors"
        raise damaged(folder / CONFIG_FILE, why, "MODEL_INCOMPLETE")


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Checks numbers of a configuration, nested ones included. Raises UnsupportedModelError naming path and setting."""
    for name, value in settings.items():
        _check_value(path, name, value)


def damaged(path: Path, why: str, reason: str = "MODEL_UNREADABLE") -> UnsupportedModelError:
    """The error for a damaged file of a model."""
    return UnsupportedModelError(f"model: {path}: {why}", field="model", reason=reason)


def _check_value(path: Path, name: str, value: Any) -> None:
    if isinstance(value, dict) and name not in _MAXIMUM:
        check_settings(path, value)
    elif isinstance(value, list) and name not in _SINGLE:
        for entry in value:
            _check_value(path, name, entry)
    elif value is None:
        return
    elif name in _MAXIMUM and (type(value) is not int or not 1 <= value <= _MAXIMUM[name]):
        raise damaged(path, f"{name} must be a whole number of 1..{_MAXIMUM[name]}, not {value!r:.80}")
    elif name in _POSITIVE and (type(value) not in (int, float) or not 0 < value < math.inf):
        raise damaged(path, f"{name} must be a finite number above 0, not {value!r:.80}")
    elif isinstance(value, float) and math.isnan(value):
        raise damaged(path, f"{name} is NaN")


def _count_tensors(folder: Path) -> int:
    """The number of tensors in a folder's weights, after a check of their files."""
    # Imported here: the coordinator reads no weights.
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        if others := [path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind)]:
            why = f"weights are read from safetensors files only: save {min(others)} as model.safetensors"
            raise UnsupportedModelError(f"model: {folder}: {why}", field="model")
        raise NotFoundError(f"model: {folder} has no weights: it has no safetensors file")
    names: set[str] = set()
    for path in files:
        try:
            if not path.is_file():
                raise OSError("it is no regular file")
            with safe_open(path, framework="np") as file:
                names.update(file.keys())
        except (OSError, SafetensorError) as error:
            raise damaged(path, str(error)) from None
    index = folder / INDEX_FILE
    shards = read_object(index, may_be_pipe=False).get("weight_map") if index.exists() else {}
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise damaged(index, "weight_map must be an object that names the file of each weight")
    if missing := sorted(set(shards.values()) - {path.name for path in files}):
        raise damaged(index, f"it names {missing[0]!r:.80}, which is not in the folder")
    return len(names)


def check_gguf(path: Path) -> None:
    """Checks that a GGUF file is whole; takes seconds for a large vocabulary. Raises UnsupportedModelError."""
    # Imported here: few models are GGUF files.
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        count = len(reader.tensors)
        layers = [
            int(field.parts[-1][0]) for name, field in reader.fields.items() if name.endswith(".block_count")
        ]
    except Exception as error:  # the library raises no narrower type
        raise damaged(path, f"it is damaged or cut off: {error}") from None
    if layers and not 1 <= layers[0] <= count:
        raise damaged(path, f"it asks for {layers[0]} layers, but it has only {count} tensors")
