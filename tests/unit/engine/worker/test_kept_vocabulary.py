"""A vocabulary that a process keeps for those forked from it: taken once, and only where it is what would be built."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.core.types import ModelFacts
from engine.worker import kept_vocabulary
from engine.worker.kept_vocabulary import keep_vocabulary, load_vocabulary
from splitserve.errors import NotFoundError
from splitserve.models import hf_tokenizer
from splitserve.models.hf_tokenizer import ByteTokenizer
from splitserve.models.tokenizer_files import FAMILY_RULES, read_tokenizer

RULED = next(iter(FAMILY_RULES))
FACTS = ModelFacts(64, 3, frozenset({2}))


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    yield
    kept_vocabulary._kept.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in {
        "config.json": '{"model_type": "llama"}',
        "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}',
    }.items():
        (tmp_path / name).write_text(content)
    save(tmp_path, {"a": 0, "b": 1, "<eos>": 2})
    return tmp_path


def save(folder: Path, vocabulary: dict[str, int]) -> None:
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))


def taken(folder: Path, facts: ModelFacts = FACTS) -> bool:
    """Whether what is kept is what a worker has."""
    kept = kept_vocabulary._kept[0].grammars if kept_vocabulary._kept else None
    return load_vocabulary(str(folder), facts)[1] is kept


def test_it_is_taken_once(folder: Path) -> None:
    keep_vocabulary(str(folder), FACTS)
    kept = kept_vocabulary._kept[0]
    assert load_vocabulary(str(folder), FACTS) == (kept.tokenizer, kept.grammars)
    assert load_vocabulary(str(folder), FACTS)[1] is not kept.grammars


@pytest.mark.parametrize("facts", [ModelFacts(64, 4, frozenset({2})), ModelFacts(64, 3, frozenset({1, 2}))])
def test_a_model_with_another_vocabulary_has_its_own(folder: Path, facts: ModelFacts) -> None:
    keep_vocabulary(str(folder), FACTS)
    assert not taken(folder, facts)
    assert taken(folder, ModelFacts(32, 3, frozenset({2}))), "a shorter context is no other vocabulary"


def test_files_that_have_changed_since_are_loaded(folder: Path) -> None:
    keep_vocabulary(str(folder), FACTS)
    save(folder, {"a": 1, "b": 0, "<eos>": 2})
    tokenizer, _ = load_vocabulary(str(folder), FACTS)
    assert tokenizer.encode("a") == [1]


def test_what_cannot_be_loaded_is_left_to_the_worker(folder: Path, tmp_path: Path) -> None:
    keep_vocabulary(str(tmp_path / "nowhere"), FACTS)
    keep_vocabulary("some-org/never-fetched", FACTS)
    keep_vocabulary("simulated", FACTS)
    (folder / "tokenizer.json").write_text("{")
    keep_vocabulary(str(folder), FACTS)
    assert not kept_vocabulary._kept
    with pytest.raises(NotFoundError):
        load_vocabulary(str(folder), FACTS)


@pytest.mark.parametrize("config", ["tokenizer_config.json", "config.json"])
def test_what_has_to_be_converted_first_is_left_to_the_worker(
    folder: Path, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_tokenizer, "converted_tokenizer", lambda _: read_tokenizer(folder))
    content = {"tokenizer_config.json": {"tokenizer_class": "Own"}, "config.json": {"model_type": RULED}}
    (folder / config).write_text(json.dumps(content[config]))
    keep_vocabulary(str(folder), FACTS)
    assert not kept_vocabulary._kept


@pytest.mark.slow
def test_files_that_are_gone_are_missed_where_they_are_loaded(folder: Path) -> None:
    keep_vocabulary(str(folder), FACTS)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(NotFoundError):
        load_vocabulary(str(folder), FACTS)


def test_simulated_workers_have_their_own(folder: Path) -> None:
    keep_vocabulary(str(folder), FACTS)
    tokenizer, _ = load_vocabulary("simulated", FACTS)
    assert isinstance(tokenizer, ByteTokenizer)
    assert kept_vocabulary._kept
