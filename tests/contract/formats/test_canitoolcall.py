"""The cases of canitoolcall, recorded by others, of each family that is read, with every chunking."""

from __future__ import annotations

import pytest
from canitoolcall.fixtures import load_families, load_fixtures
from canitoolcall.results import Status

from bench.output_formats import our_status

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
    "gpt-oss/harmony-truncated-in-arguments",
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
FIXTURES = list(load_fixtures())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_cases(family: str) -> None:
    """All well-formed ones pass, soft ones by white space alone; the others fail for the reasons given above."""
    cases = [fixture for fixture in FIXTURES if fixture.family == family]
    failed = {
        fixture.id
        for fixture in cases
        if our_status(fixture, FAMILIES[family]) not in (Status.PASS, Status.SOFT_PASS)
    }
    assert failed == {case for case in STREAMED | MALFORMED if case.startswith(f"{family}/")}
    odd = {fixture.id for fixture in cases if {"truncated", "malformed"} & set(fixture.tags)}
    assert failed <= odd
