"""Reads a tokenizer from a model's folder with the library `tokenizers`, equal to what `transformers` builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from splitserve.errors import ConfigError
from splitserve.models.chat_template import DEFAULT, check_template
from splitserve.models.model_files import read_object
from splitserve.runtime.bounded_file import read_named_text

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
PLAIN_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Class names for which `transformers` uses the tokenizer file unchanged; for others it applies the rules of a
model family, which may differ from the file."""
FAMILY_RULES = frozenset(
    {"hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "siglip2"}
)
"""Model types for which `transformers` builds the family's tokenizer regardless of the class in the files."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LEGACY_FILES = ("special_tokens_map.json", "added_tokens.json")
_OTHER_BUILDERS = ("auto_map", "fast_tokenizer_files", "fix_mistral_regex")
_SOURCES = ("*.model", "*.txt", "*.tiktoken", "tokenizer*.json", "vocab*.json", "tekken.json")


@dataclass(frozen=True, slots=True)
class TokenizerDefinition:
    """A tokenizer with its chat templates.

    `special_tokens` maps names such as "bos_token" to tokens, as templates read them; `templates` maps names to
    chat templates.
    """

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    templates: Mapping[str, str]


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has any tokenizer file."""
    return any(path.name != CONFIG_FILE for pattern in _SOURCES for path in folder.glob(pattern))


def is_plain(folder: Path) -> bool:
    """Whether `transformers` uses the folder's tokenizer file unchanged, so that `read_tokenizer` equals it.

    Raises ConfigError for damaged files.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        return False
    config = _read_json(folder / CONFIG_FILE)
    if config.get("tokenizer_class") not in PLAIN_CLASSES or any(config.get(key) for key in _OTHER_BUILDERS):
        return False
    if "added_tokens_decoder" not in config and any((folder / name).exists() for name in _LEGACY_FILES):
        return False
    return _read_json(folder / "config.json").get("model_type") not in FAMILY_RULES


def read_tokenizer(folder: Path) -> TokenizerDefinition:
    """Reads a plain tokenizer; see `is_plain`. Raises ValueError or ConfigError for invalid files."""
    config, tokenizer = _read_json(folder / CONFIG_FILE), read_backend(folder / TOKENIZER_FILE)
    try:
        return _defined(folder, config, tokenizer)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"{CONFIG_FILE}: {error}") from None


def read_backend(path: Path) -> Tokenizer:
    """The tokenizer in a file. Raises ValueError naming it."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise ValueError(f"{path.name}: {error}") from None


def _defined(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> TokenizerDefinition:
    named = _named_tokens(config)
    if tokenizer.padding is not None:
        named.setdefault("pad_token", tokenizer.padding["pad_token"])
    _add_tokens(tokenizer, config, named)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    special = {name: str(token) for name, token in named.items()}
    return TokenizerDefinition(tokenizer, special, _templates(folder, config))


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str | AddedToken]:
    """Standard special tokens such as "bos_token", then model-specific ones such as "image_token"."""
    own = {key: value for key, value in config.items() if key.endswith("_token") and key not in NAMED_TOKENS}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        own |= extra
    tokens = {key: _token(config.get(key)) for key in NAMED_TOKENS}
    if wrong := [key for key in NAMED_TOKENS if config.get(key) is not None and tokens[key] is None]:
        raise ValueError(f"{wrong[0]} is not a token")
    tokens |= {key: _token(value) for key, value in own.items()}
    return {key: token for key, token in tokens.items() if token is not None}


def _token(value: object) -> str | AddedToken | None:
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return AddedToken(**{key: entry for key, entry in value.items() if key != "__type"})
    return value if isinstance(value, str) else None


def _add_tokens(
    tokenizer: Tokenizer, config: Mapping[str, Any], named: Mapping[str, str | AddedToken]
) -> None:
    """Adds the tokens that the configuration names but the tokenizer file lacks."""
    declared = {
        int(key): AddedToken(**token) for key, token in config.get("added_tokens_decoder", {}).items()
    }
    missing: list[str | AddedToken] = [declared[key] for key in sorted(declared)]
    known = {str(token) for token in (*tokenizer.get_added_tokens_decoder().values(), *missing)}
    for token in (*named.values(), *_extra_tokens(config)):
        if str(token) not in known:
            known.add(str(token))
            missing.append(token)
    names = {str(token) for token in named.values()}
    added = [AddedToken(token, special=True) if isinstance(token, str) else token for token in missing]
    for entry in added:
        entry.special = entry.special or str(entry) in names
    tokenizer.add_tokens(added)


def _extra_tokens(config: Mapping[str, Any]) -> list[str | AddedToken]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    tokens = [] if isinstance(extra, dict) else [_token(value) for value in extra]
    return [token for token in tokens if token is not None]


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; template files take precedence over the configuration."""
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (single := folder / "chat_template.jinja").is_file():
        files.setdefault(DEFAULT, single)
    if files:
        return {name: _template_file(path) for name, path in files.items()}
    template = config.get("chat_template") or {}
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    templates = {DEFAULT: template} if isinstance(template, str) else dict(template)
    for text in templates.values():
        check_template("chat_template", text)
    return templates


def _template_file(path: Path) -> str:
    text = read_named_text(path, "model")
    if not text.strip():
        raise ConfigError(f"model: {path} is empty", field="model")
    check_template(str(path), text)
    return text


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path, may_be_pipe=False) if path.exists() else {}
