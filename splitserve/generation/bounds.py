"""Bounds of generation parameters, as documented in the protos. Pure.

The coordinator validates client requests; a worker validates again, because one bad value (NaN, an id outside
the vocabulary) would affect tensors that the whole batch shares.
"""

from __future__ import annotations

from typing import Never

from splitserve.errors import InvalidArgumentError
from splitserve.v1 import generation_pb2

MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKENS = 1024
MAX_BAD_WORDS, MAX_BAD_TOKENS = 128, 1024
"""Most words or sequences of tokens that must not be generated, and most tokens of them together."""
MAX_BAD_WORD_CHARACTERS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_PROMPT_VALUES = 2**16
"""Most log-probabilities of one prompt: 0.5 MiB of a message, and about 4 MiB of JSON."""
LEAST_TARGET_MS, MAX_TTFT_MS, MAX_TPOT_MS = 0.001, 86_400_000, 3_600_000
"""Bounds of the latency targets `ttft_ms` and `tpot_ms` of a request."""
MAX_PRIORITY = 100
"""The highest priority of a request; the lowest is -MAX_PRIORITY."""


def check_sampling(sampling: generation_pb2.SamplingParams, vocabulary_size: int) -> None:
    """Raises InvalidArgumentError naming field and bound. For grammars see `splitserve.grammars.forms`."""
    if sampling.HasField("temperature"):
        between("sampling.temperature", sampling.temperature, 0, 100)
    between("sampling.top_k", sampling.top_k, 0, 2**31 - 1)
    if sampling.HasField("top_p"):
        between("sampling.top_p", sampling.top_p, 0, 1)
    between("sampling.min_p", sampling.min_p, 0, 1)
    if sampling.HasField("repetition_penalty"):
        penalty = sampling.repetition_penalty
        require(0 < penalty <= 100, "sampling.repetition_penalty", "above 0 and at most 100")
    between("sampling.presence_penalty", sampling.presence_penalty, -2, 2)
    between("sampling.frequency_penalty", sampling.frequency_penalty, -2, 2)
    between("sampling.logprobs", sampling.logprobs, 0, 20)
    between("sampling.prompt_logprobs", sampling.prompt_logprobs, 0, 20)
    between("sampling.logit_bias (count)", len(sampling.logit_bias), 0, MAX_LOGIT_BIASES)
    for entry in sampling.logit_bias:
        between("sampling.logit_bias.token_id", entry.token_id, 0, vocabulary_size - 1)
        between("sampling.logit_bias.bias", entry.bias, -100, 100)
    ids = {entry.token_id for entry in sampling.logit_bias}
    require(len(ids) == len(sampling.logit_bias), "sampling.logit_bias", "of distinct token ids")
    between("sampling.allowed_token_ids (count)", len(sampling.allowed_token_ids), 0, MAX_ALLOWED_TOKENS)
    for token_id in sampling.allowed_token_ids:
        between("sampling.allowed_token_ids", token_id, 0, vocabulary_size - 1)
    between("sampling.bad_words (count)", len(sampling.bad_words), 0, MAX_BAD_WORDS)
    for position, word in enumerate(sampling.bad_words):
        name = f"sampling.bad_words[{position}]"
        between(f"{name} (characters)", len(word), 1, MAX_BAD_WORD_CHARACTERS)
        require(not word.isspace(), name, "more than spaces")
    check_bad_sequences(sampling, "sampling.bad_sequences")
    for bad in sampling.bad_sequences:
        require(bool(bad.ids), "sampling.bad_sequences", "of at least one token each")
        between("sampling.bad_sequences", max(bad.ids), 0, vocabulary_size - 1)


def check_bad_sequences(sampling: generation_pb2.SamplingParams, name: str) -> None:
    """Raises InvalidArgumentError for the field `name` if there are too many bad sequences, or tokens in them."""
    most = 2 * MAX_BAD_WORDS  # a word is tokenized with and without a space before it
    between(f"{name} (count)", len(sampling.bad_sequences), 0, most)
    tokens = sum(len(bad.ids) for bad in sampling.bad_sequences)
    between(f"{name} (tokens)", tokens, 0, MAX_BAD_TOKENS)


def check_prompt_logprobs(sampling: generation_pb2.SamplingParams, prompt_tokens: int) -> None:
    """Raises InvalidArgumentError for more log-probabilities of a prompt than one message takes."""
    values = prompt_tokens * (1 + sampling.prompt_logprobs) if sampling.HasField("prompt_logprobs") else 0
    if values > MAX_PROMPT_VALUES:
        bound = f"so small that it plus 1, times the prompt's {prompt_tokens} tokens, is at most {MAX_PROMPT_VALUES}"
        fail("sampling.prompt_logprobs", bound)


def check_stop(
    stop: generation_pb2.StopParams, vocabulary_size: int, context_tokens: int, least_tokens: int = 1
) -> None:
    """Raises InvalidArgumentError naming field and bound. `least_tokens`: the lowest `max_tokens`."""
    if stop.HasField("max_tokens"):
        most = 2**32 - 1 if stop.fit_max_tokens else context_tokens
        between("stop.max_tokens", stop.max_tokens, least_tokens, most)
    between("stop.stop_strings (count)", len(stop.stop_strings), 0, MAX_STOP_STRINGS)
    for position, text in enumerate(stop.stop_strings):
        name = f"stop.stop_strings[{position}]"
        between(f"{name} (characters)", len(text), 1, MAX_STOP_STRING_CHARACTERS)
    between("stop.stop_token_ids (count)", len(stop.stop_token_ids), 0, MAX_STOP_TOKEN_IDS)
    for token_id in stop.stop_token_ids:
        between("stop.stop_token_ids", token_id, 0, vocabulary_size - 1)


def between(name: str, value: float, low: float, high: float) -> None:
    """Refuses a value outside [low, high], and NaN."""
    # NaN fails this comparison and is refused.
    if not low <= value <= high:
        fail(name, f"{low}..{high}, not {f'{value:g}' if isinstance(value, float) else value}")


def require(condition: bool, name: str, bound: str) -> None:
    """Raises InvalidArgumentError unless the condition holds: `name` must be `bound`."""
    if not condition:
        fail(name, bound)


def fail(name: str, bound: str) -> Never:
    """Raises InvalidArgumentError: `name` must be `bound`."""
    raise InvalidArgumentError(f"{name} must be {bound}", field=name.split(" ")[0])
