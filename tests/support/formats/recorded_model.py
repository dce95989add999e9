"""Models' folders without weights: tokenizers in whose vocabularies the tags of families are special tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.output_formats import GptOssTokens
from coordinator.entrypoints.openai.formats.table import REASONING_FORMATS, TOOL_FORMATS
from coordinator.entrypoints.openai.formats.tool_format import ReasoningFormat
from tests.support.formats.samples import SAMPLES

EOS, TURN = "<|endoftext|>", "<|im_start|>"
"""TURN stands before each turn, and before the answer."""
GPT_OSS_EOS, GPT_OSS_TURN = "<|return|>", "<|startoftext|>"
_TAG = re.compile(
    r"<\|[^<>]*>|<[a-z_]+\|>|<｜[^<>]+｜>|\[/?[A-Z_]+\]|</?(?:think|tool_calls?|arg_(?:key|value))>"  # noqa: RUF001
)


def reasoning_of(family: str) -> ReasoningFormat:
    """How the models reason that write calls in this format."""
    return REASONING_FORMATS.get(family, REASONING_FORMATS["think"])


def family_template(family: str) -> str:
    """A chat template that writes the turns as they are, with the marks of a family of formats."""
    reasoning, turn = reasoning_of(family), GPT_OSS_TURN if family == "harmony" else TURN
    marks = " ".join((*TOOL_FORMATS[family].markers, reasoning.begin, reasoning.ends[0]))
    tools = "{% if tools %}{{ tools | tojson }}{% endif %}"
    turns = f"{{% for turn in messages %}}{turn}{{{{ turn.content }}}}{{% endfor %}}"
    return f"{{# {marks} #}}{tools}{turns}{turn}"


def make_recorded_model(folder: Path) -> Tokenizer:
    """Writes the folder, and returns its tokenizer. The template is that of Hermes."""
    texts = [sample.calls for sample in SAMPLES.values()]
    ends = [tag for one in REASONING_FORMATS.values() for tag in (one.begin, *one.ends)]
    tags = sorted({tag for text in (*texts, *ends) for tag in _TAG.findall(text)})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts * 3, trainer)
    tokenizer.add_special_tokens([EOS, TURN, *tags])
    return _written(tokenizer, folder, "hermes", EOS, TURN)


def make_gpt_oss_model(folder: Path) -> Tokenizer:
    """Writes a folder with the vocabulary of gpt-oss, and returns its tokenizer, which spells texts in bytes."""
    return _written(GptOssTokens().tokenizer(), folder, "harmony", GPT_OSS_EOS, GPT_OSS_TURN)


def _written(tokenizer: Tokenizer, folder: Path, family: str, eos: str, turn: str) -> Tokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "bos_token": turn}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "chat_template.jinja").write_text(family_template(family))
    return tokenizer
