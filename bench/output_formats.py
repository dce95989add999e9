"""How our output formats, or vLLM's parsers, read the recorded answers of `canitoolcall`: a row for each family.

    python -m bench.output_formats
    .venv-vllm/bin/python -m bench.output_formats --vllm

vLLM's parsers are called as the package's own adapter calls them. The adapter would download the models' tokenizers;
here a tokenizer is trained on the answers, with the families' tags as tokens, and the prompt is what begins an answer.
So Mistral, whose parser asks for its own library's tokenizer, is missing, and gpt-oss, whose library downloads its
vocabulary.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Family, Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParseResult, Status, StreamAccumulator

from coordinator.entrypoints.openai.formats.table import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from coordinator.entrypoints.openai.formats.writer import ArgumentsPart, CallPart, ReasoningPart, TextPart

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
}
"""Tools' and reasoning's format by a part of the model's name; the first that fits."""
NOT_READ = {"gpt-oss"}
NOT_COMPARED = NOT_READ | {"mistral"}
_TAG = re.compile(
    r"<\|[^<>]*>|<[a-z_]+\|>|<｜[^<>]+｜>|\[/?[A-Z_]+\]|</?(?:think|tool_calls?|arg_(?:key|value))>"  # noqa: RUF001
)


def prompt_of(fixture: Fixture, family: Family) -> str:
    """The text at the end of the prompt, which begins the answer."""
    if fixture.generation_prompt is not None:
        return fixture.generation_prompt
    reference = family.reference_for(fixture.reference_model)
    return (reference.default_generation_prompt if reference else None) or ""


def chunkings(text: str) -> Iterator[tuple[str, list[str]]]:
    """The text whole, in characters, and in pieces of 1 to 12 characters."""
    yield "one", [text]
    yield "token", list(text)
    for seed in range(1, 6):
        drawn, pieces, start = random.Random(seed), [], 0
        while start < len(text):
            end = start + drawn.randint(1, 12)
            pieces.append(text[start:end])
            start = end
        yield f"rand:{seed}:12", pieces


def our_format(fixture: Fixture, family: Family) -> AnswerFormat:
    """The format of the model that wrote the answer."""
    tools, named = next(names for part, names in FORMATS.items() if part in fixture.reference_model)
    reasoning = REASONING_FORMATS[named] if named else None
    prompt = prompt_of(fixture, family).rstrip()
    begun = reasoning is not None and prompt.endswith(reasoning.begin.rstrip())
    return AnswerFormat(TOOL_FORMATS[tools], reasoning, is_reasoning=begun)


def our_result(answer: AnswerFormat, fixture: Fixture, pieces: Sequence[str]) -> ParseResult:
    """What our parser finds in an answer that arrives in these pieces."""
    tools = {tool["function"]["name"]: tool["function"].get("parameters") for tool in fixture.tools}
    parser, found = answer.parser(tools, must_call=False), StreamAccumulator()
    parts = [part for piece in pieces for part in parser.feed(piece)]
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
    answer, text = our_format(fixture, family), fixture.raw_output
    streams = {name: our_result(answer, fixture, pieces) for name, pieces in chunkings(text)}
    observed = Observation(nonstream=our_result(answer, fixture, [text]), streams=streams)
    return case_status(run_checks(fixture, family, observed))


class VllmStatus:
    """How vLLM's parsers do in a case."""

    def __init__(self, fixtures: Sequence[Fixture]) -> None:
        # Imported here: only the environment of vLLM has them.
        from canitoolcall.adapters.vllm import VllmAdapter, _Model
        from canitoolcall.adapters.worker import replay
        from canitoolcall.chunking import parse_strategies
        from canitoolcall.runner import _observation

        tokenizer = trained_tokenizer([fixture.raw_output for fixture in fixtures])

        class Adapter(VllmAdapter):
            """The package's adapter, with one tokenizer for all models."""

            prompt = ""

            def _model(self, raw: Any) -> Any:
                return _Model(raw.model, None, None, "auto", tokenizer, "trained", None, ())

            def _render_prompt(self, setup: Any) -> list[int]:
                return [int(token) for token in tokenizer.encode(self.prompt, add_special_tokens=False)]

            def units(self, raw: Any) -> list[int]:
                return super().units(replace(raw, token_ids=None))

        self._adapter, strategies = Adapter(), parse_strategies(None)
        self._observe = lambda fixture, family: _observation(
            replay(self._adapter, fixture, family, strategies)
        )

    def __call__(self, fixture: Fixture, family: Family) -> Status:
        """Replays a case."""
        self._adapter.prompt = prompt_of(fixture, family)
        self._adapter._setups.clear()  # they hold the prompt
        return case_status(run_checks(fixture, family, self._observe(fixture, family)))


def trained_tokenizer(texts: Sequence[str]) -> Any:
    """A tokenizer with vLLM's interface, trained on texts, whose tags are tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from vllm.tokenizers.hf import get_cached_tokenizer

    tags = sorted({tag for text in texts for tag in _TAG.findall(text)} | {"<think>", "</think>"})
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    )
    # Tags of the form <|…|> are special tokens of most models, others are not.
    made.add_tokens([AddedToken(tag, special=tag.startswith("<|"), normalized=False) for tag in tags])
    return get_cached_tokenizer(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>"))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.output_formats", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--vllm", action="store_true", help="vLLM's parsers in place of ours")
    parser.add_argument("--failed", action="store_true", help="the names of failed cases, too")
    options = parser.parse_args()
    families = load_families()
    fixtures = [fixture for fixture in load_fixtures() if fixture.family not in NOT_READ]
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
