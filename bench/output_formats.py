"""How our output formats, or vLLM's parsers, read the recorded answers of `canitoolcall`: a row for each family.

    python -m bench.output_formats
    .venv-vllm/bin/python -m bench.output_formats --vllm

vLLM's parsers are called as the package's own adapter calls them. The adapter would download the models' tokenizers;
here a tokenizer is trained on the answers, with the families' tags as tokens, and the prompt is what begins an answer.
gpt-oss has its own vocabulary. Mistral, whose parser asks for its own library's tokenizer, is missing.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Family, Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParseResult, Status, StreamAccumulator

from coordinator.entrypoints.openai.formats.harmony import encoding_of
from coordinator.entrypoints.openai.formats.table import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from coordinator.entrypoints.openai.formats.writer import ArgumentsPart, CallPart, ReasoningPart, TextPart
from splitserve.models.tokenizer import Tokenizer

FORMATS = {
    "DeepSeek-V3-0324": ("deepseek_v3", "think"),
    "DeepSeek-V3.1": ("deepseek_v31", "think"),
    "DeepSeek-V3.2": ("deepseek_v32", "think"),
    "DeepSeek-V4-Flash": ("deepseek_v4", "think"),
    "DeepSeek-V4.1-Flash": ("deepseek_v41", "think"),
    "GLM-": ("glm", "think"),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "Kimi-K2.6": ("kimi_k2", "think"),
    "Kimi-K3": ("kimi_k3", "kimi_k3"),
    "Llama-3": ("llama", None),
    "Llama-4": ("llama_pythonic", None),
    "Magistral-Small-2506": ("mistral", "think"),
    "Mistral-7B": ("mistral_v3", None),
    "mistralai/": ("mistral", "mistral"),
    "Qwen3-Coder": ("qwen_xml", None),
    "Qwen3.": ("qwen_xml", "think"),
    "Qwen3-": ("hermes", "think"),
    "gemma-4": ("gemma", "gemma"),
    "gpt-oss": ("harmony", "harmony"),
}
"""Tools' and reasoning's format by a part of the model's name; the first that fits."""
NOT_COMPARED = {"mistral"}
GPT_OSS_TAGS = (
    *("<|startoftext|>", "<|endoftext|>", "<|reserved_200000|>", "<|reserved_200001|>", "<|return|>"),
    *("<|constrain|>", "<|reserved_200004|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>"),
    *("<|reserved_200009|>", "<|reserved_200010|>", "<|reserved_200011|>", "<|call|>"),
)
"""The tokens of gpt-oss behind the ordinary ones."""
RETURN = 200_002
"""The token with which gpt-oss ends its turn; the recorded answers are without it."""
_TAG = re.compile(
    r"<\|[^<>]*>|<[a-z_]+\|>|<｜[^<>]+｜>|\[/?[A-Z_]+\]|</?(?:think|tool_calls?|arg_(?:key|value))>"  # noqa: RUF001
)


def prompt_of(fixture: Fixture, family: Family) -> str:
    """The text at the end of the prompt, which begins the answer."""
    if fixture.generation_prompt is not None:
        return fixture.generation_prompt
    reference = family.reference_for(fixture.reference_model)
    return (reference.default_generation_prompt if reference else None) or ""


def chunkings(fixture: Fixture) -> Iterator[tuple[str, list[tuple[str, Sequence[int]]]]]:
    """The answer whole, in characters, and in pieces of 1 to 12 characters. That of gpt-oss, which is read by its
    tokens, is cut between these."""
    text: Sequence[Any] = fixture.raw_output
    if fixture.family == "gpt-oss":
        text = [*(fixture.output_token_ids or ()), *(() if fixture.truncated else (RETURN,))]

    def piece(start: int, end: int) -> tuple[str, Sequence[int]]:
        cut = text[start:end]
        return (cut, ()) if isinstance(cut, str) else (gpt_oss_encoding().decode(cut), cut)

    yield "one", [piece(0, len(text))]
    yield "token", [piece(place, place + 1) for place in range(len(text))]
    for seed in range(1, 6):
        drawn, pieces, start = random.Random(seed), [], 0
        while start < len(text):
            end = start + drawn.randint(1, 12)
            pieces.append(piece(start, end))
            start = end
        yield f"rand:{seed}:12", pieces


def our_format(fixture: Fixture, family: Family) -> AnswerFormat:
    """The format of the model that wrote the answer."""
    tools, named = next(names for part, names in FORMATS.items() if part in fixture.reference_model)
    reasoning = REASONING_FORMATS[named] if named else None
    prompt = prompt_of(fixture, family).rstrip()
    begun = reasoning is not None and prompt.endswith(reasoning.begin.rstrip())
    harmony = gpt_oss_encoding() if tools == "harmony" else None
    return AnswerFormat(TOOL_FORMATS[tools], reasoning, is_reasoning=begun, harmony=harmony)


class GptOssTokens:
    """The ordinary tokens of gpt-oss, from the package `quicktok-v1`."""

    def __init__(self) -> None:
        found = find_spec("quicktok")
        assert found is not None
        assert found.origin is not None
        data = (Path(found.origin).parent / "data" / "o200k.vocab").read_bytes()
        count, at = int.from_bytes(data[:4], "little"), 4
        self.tokens = [b""] * count
        for _ in range(count):  # the length, the bytes, and the number of a token
            end = at + 2 + int.from_bytes(data[at : at + 2], "little")
            self.tokens[int.from_bytes(data[end : end + 4], "little")] = data[at + 2 : end]
            at = end + 4

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token."""
        return self.tokens[token_id]

    def tokenizer(self) -> Any:
        """The whole vocabulary for the library `tokenizers`, which spells texts in bytes: the merges are missing."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        # The alphabet of GPT-2: a byte that is no visible character is one from 256 on.
        signs, hidden = {}, 0
        for byte in range(256):
            is_visible = 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174
            signs[byte] = chr(byte if is_visible else 256 + hidden)
            hidden += not is_visible
        spelled = ("".join(signs[byte] for byte in token) for token in self.tokens)
        made = Tokenizer(models.BPE({token: number for number, token in enumerate(spelled)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(list(GPT_OSS_TAGS))
        return made


@cache
def gpt_oss_encoding() -> Any:
    """The vocabulary of gpt-oss as its library has it."""
    return encoding_of(cast("Tokenizer", GptOssTokens()))


def our_result(
    answer: AnswerFormat, fixture: Fixture, pieces: Sequence[tuple[str, Sequence[int]]]
) -> ParseResult:
    """What our parser finds in an answer that arrives in these pieces, texts and their tokens."""
    tools = {tool["function"]["name"]: tool["function"].get("parameters") for tool in fixture.tools}
    parser, found = answer.parser(tools, must_call=False), StreamAccumulator()
    parts = [part for text, token_ids in pieces for part in parser.feed(text, token_ids)]
    for part in [*parts, *parser.close(is_cut=fixture.truncated)]:
        match part:
            case TextPart(text):
                found.add_content(text)
            case ReasoningPart(text):
                found.add_reasoning(text)
            case CallPart(index, _, name):
                found.add_tool_call(index, name, "")
            case ArgumentsPart(index, text):
                found.add_tool_call(index, None, text)
    return found.result()


def our_status(fixture: Fixture, family: Family) -> Status:
    """How our parser does in a case."""
    answer, streams = our_format(fixture, family), {}
    for name, pieces in chunkings(fixture):
        streams[name] = our_result(answer, fixture, pieces)
    observed = Observation(nonstream=streams["one"], streams=streams)
    return case_status(run_checks(fixture, family, observed))


class VllmStatus:
    """How vLLM's parsers do in a case."""

    def __init__(self, fixtures: Sequence[Fixture]) -> None:
        # Imported here: only the environment of vLLM has them.
        from canitoolcall.adapters.vllm import VllmAdapter, _Model
        from canitoolcall.adapters.worker import replay
        from canitoolcall.chunking import parse_strategies
        from canitoolcall.runner import _observation

        trained = for_vllm(trained_tokenizer([fixture.raw_output for fixture in fixtures]))
        gpt_oss_encoding()  # for vLLM as well
        gpt_oss = for_vllm(GptOssTokens().tokenizer())

        class Adapter(VllmAdapter):
            """The package's adapter, with one tokenizer for all models but gpt-oss."""

            prompt = ""

            def _model(self, raw: Any) -> Any:
                if raw.family == "gpt-oss":
                    return _Model(raw.model, None, None, "auto", gpt_oss, "gpt-oss", "gpt_oss", ())
                return _Model(raw.model, None, None, "auto", trained, "trained", None, ())

            def _render_prompt(self, setup: Any) -> list[int]:
                return list(setup.model.tok.encode(self.prompt, add_special_tokens=False))

            def units(self, raw: Any) -> list[int]:
                return super().units(raw if raw.family == "gpt-oss" else replace(raw, token_ids=None))

        self._adapter, strategies = Adapter(), parse_strategies(None)

        def observe(fixture: Fixture, family: Family) -> Observation:
            return _observation(replay(self._adapter, fixture, family, strategies))

        self._observe = observe

    def __call__(self, fixture: Fixture, family: Family) -> Status:
        """Replays a case."""
        self._adapter.prompt = prompt_of(fixture, family)
        self._adapter._setups.clear()  # they hold the prompt
        return case_status(run_checks(fixture, family, self._observe(fixture, family)))


def trained_tokenizer(texts: Sequence[str]) -> Any:
    """A tokenizer of the library `tokenizers`, trained on texts, whose tags are tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tags = sorted({tag for text in texts for tag in _TAG.findall(text)} | {"<think>", "</think>"})
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    # Tags of the form <|…|> are special tokens of most models, others are not.
    made.add_tokens([AddedToken(tag, special=tag.startswith("<|"), normalized=False) for tag in tags])
    return made


def for_vllm(tokenizer: Any) -> Any:
    """A tokenizer with vLLM's interface."""
    from transformers import PreTrainedTokenizerFast
    from vllm.tokenizers.hf import get_cached_tokenizer

    return get_cached_tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>"))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.output_formats", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--vllm", action="store_true", help="vLLM's parsers in place of ours")
    parser.add_argument("--failed", action="store_true", help="the names of failed cases, too")
    options = parser.parse_args()
    families = load_families()
    fixtures = list(load_fixtures())
    if options.vllm:
        fixtures = [fixture for fixture in fixtures if fixture.family not in NOT_COMPARED]
    status = VllmStatus(fixtures) if options.vllm else our_status
    print(f"{'family':14} {'cases':>6} {'pass':>6} {'soft':>6} {'fail':>6}")
    for family in sorted({fixture.family for fixture in fixtures}):
        cases = [fixture for fixture in fixtures if fixture.family == family]
        found = {fixture.id: status(fixture, families[family]) for fixture in cases}
        counts = Counter(found.values())
        passed, soft = counts[Status.PASS], counts[Status.SOFT_PASS]
        print(f"{family:14} {len(cases):6} {passed:6} {soft:6} {len(cases) - passed - soft:6}")
        if options.failed:
            bad = (name for name, one in found.items() if one not in (Status.PASS, Status.SOFT_PASS))
            print("".join(f"    {name}\n" for name in bad), end="")


if __name__ == "__main__":
    main()
