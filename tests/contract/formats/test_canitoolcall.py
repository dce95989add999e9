"""The cases of canitoolcall, recorded by others, of each family that is read, with every chunking."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Family, Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status

from coordinator.entrypoints.openai.formats.table import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from tests.support.formats.samples import cut_by_chance, read

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
STREAMED = {
    "deepseek/v3-truncated-mid-arguments",
    "deepseek/v31-truncated-mid-arguments",
    "deepseek/v32-truncated-mid-arguments",
    "deepseek/v32-truncated-second-parallel-call",
    "deepseek/v4-truncated-mid-arguments",
    "deepseek/v4-truncated-second-parallel-call",
    "deepseek/v41-truncated-mid-arguments",
    "deepseek/v41-truncated-second-parallel-call",
    "deepseek/vllm-v3-malformed-missing-brace",
    "glm/glm45-truncated-after-arg-key",
    "glm/glm47-truncated-before-close-call",
    "glm/glm47-truncated-inside-arg-value",
    "kimi/k26-truncated-inside-arguments",
    "kimi/k3-truncated-inside-argument",
    "llama/l3-truncated-inside-parameters",
    "llama/l4-truncated-missing-close-bracket",
    "mistral/v13think-truncated-in-arguments",
    "qwen3-hermes/bug-sglang-30480-truncated-mid-arguments",
    "qwen3-hermes/truncated-mid-arguments-no-thinking",
    "qwen3-hermes/truncated-mid-arguments-thinking",
    "qwen3-hermes/truncated-second-parallel-call",
    "qwen3-hermes/vllm-invalid-json-missing-brace",
    "qwen3-xml/q38-truncated-in-parameter",
}
"""The suite wants no call where one is cut. Ours has left by then, with arguments that are no JSON yet."""
MALFORMED = {
    "glm/glm47-missing-last-close-arg-value",
    "kimi/k2i-vllm-noise-between-markers",
    "qwen3-xml/llamacpp-q35-call-inside-think",
}
"""What the suite calls malformed, and reads otherwise."""
FAMILIES = load_families()
FIXTURES = [fixture for fixture in load_fixtures() if fixture.family not in NOT_READ]


def format_of(fixture: Fixture, family: Family) -> AnswerFormat:
    model = fixture.reference_model
    tools, named = next(names for part, names in FORMATS.items() if part in model)
    reasoning = REASONING_FORMATS[named] if named else None
    prompt = fixture.generation_prompt
    if prompt is None:
        reference = family.reference_for(model)
        prompt = (reference.default_generation_prompt if reference else None) or ""
    begun = reasoning is not None and prompt.rstrip().endswith(reasoning.begin.rstrip())
    return AnswerFormat(TOOL_FORMATS[tools], reasoning, is_reasoning=begun)


def result(answer: AnswerFormat, fixture: Fixture, pieces: list[str]) -> ParseResult:
    tools = {tool["function"]["name"]: tool["function"].get("parameters") for tool in fixture.tools}
    found = read(answer, pieces, is_cut=fixture.truncated, tools=tools)
    return ParseResult(
        content=found.text or None,
        reasoning_content=found.reasoning or None,
        tool_calls=tuple(ParsedToolCall(name, arguments) for name, arguments in found.calls),
    )


def chunkings(text: str) -> Iterator[tuple[str, list[str]]]:
    yield "one", [text]
    yield "token", list(text)
    for seed in range(1, 6):
        yield f"rand:{seed}:12", cut_by_chance(text, seed, 12)


def status_of(fixture: Fixture) -> Status:
    family = FAMILIES[fixture.family]
    answer = format_of(fixture, family)
    streams = {name: result(answer, fixture, pieces) for name, pieces in chunkings(fixture.raw_output)}
    observed = Observation(nonstream=result(answer, fixture, [fixture.raw_output]), streams=streams)
    return case_status(run_checks(fixture, family, observed))


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - NOT_READ))
def test_cases(family: str) -> None:
    """All well-formed ones pass, soft ones by white space alone; the others fail for the reasons given above."""
    cases = [fixture for fixture in FIXTURES if fixture.family == family]
    failed = {fixture.id for fixture in cases if status_of(fixture) not in (Status.PASS, Status.SOFT_PASS)}
    assert failed == {case for case in STREAMED | MALFORMED if case.startswith(f"{family}/")}
    odd = {fixture.id for fixture in cases if {"truncated", "malformed"} & set(fixture.tags)}
    assert failed <= odd
