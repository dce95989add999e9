"""Translates requests of vLLM's gRPC contract into a GenerateRequest, and deltas back into its responses. Pure.

A field that would change the answer and is not served is refused by name, those of later versions included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Never

from smg_grpc_proto import vllm_engine_pb2 as pb

from coordinator.entrypoints.http.exchange import FieldNames
from coordinator.entrypoints.openai.tools import MAX_FORM_CHOICES, choice_grammar
from coordinator.request.inference_request import REQUEST_ID
from splitserve.client.request_builder import build_request
from splitserve.client.types import FINISH_REASONS
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import generation_pb2, inference_pb2

MAX_ID = 1024
"""Most characters of a request's id."""
REQUEST_FIELDS = frozenset(
    {"request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"}
)
"""Fields of a request that are served. The rank is ignored: there is one."""
SAMPLING = (
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "temperature",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "seed",
)
"""Fields of SamplingParams with the same name and meaning here. As in vLLM, 0 of one that is not optional means not
given."""
GRAMMARS: Mapping[str, str] = {
    "json_schema": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "lark",
}
"""Forms of an answer with their names here."""
IDLE = frozenset(
    {
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "grammar_from_first_token",
        "skip_special_tokens",
    }
)
"""Fields without effect on token ids, which are all that an answer consists of. A grammar always begins with the first
token. `skip_special_tokens` matters beside stop strings only."""
SAMPLING_FIELDS = frozenset(
    {*SAMPLING, *GRAMMARS, *IDLE, "stop", "stop_token_ids", "logit_bias", "choice", "n"}
)
NAMES = FieldNames(
    {
        "sampling.": "sampling_params.",
        "sampling.grammar.": "sampling_params.",
        "sampling.grammar.lark": "sampling_params.grammar",
        "stop.": "sampling_params.",
        "stop.stop_strings": "sampling_params.stop",
        "prompt.text": "text",
        "prompt.token_ids": "tokenized.input_ids",
    }
)
"""The names of gRPC fields in vLLM's contract."""
ABORTED = pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason="abort"))
"""The end of an answer that the client has aborted."""


@contextmanager
def naming_fields() -> Iterator[None]:
    """Lets errors name the fields of vLLM's contract."""
    try:
        yield
    except InvalidArgumentError as error:
        if error.field is None:
            raise
        field = NAMES.http_name(error.field)
        raise InvalidArgumentError(NAMES.reworded(error), reason=error.reason, field=field) from None


@naming_fields()
def read_request(request: pb.GenerateRequest) -> inference_pb2.GenerateRequest:
    """The request in our form. Raises InvalidArgumentError naming the field."""
    params = request.sampling_params
    if len(request.request_id) > MAX_ID:
        _refuse("request_id", f"must have at most {MAX_ID} characters, not {len(request.request_id)}")
    _refuse_others(request, REQUEST_FIELDS, "")
    _refuse_others(params, SAMPLING_FIELDS, "sampling_params.")
    if params.n > 1:
        _refuse("sampling_params.n", f"must be 1, not {params.n}: send a request for each answer")
    kind = request.WhichOneof("input")
    if kind is None:
        _refuse("input", "must be tokenized or text")
    if kind == "tokenized" and not request.tokenized.input_ids:
        _refuse("tokenized.input_ids", "must not be empty")
    given = {field.name: value for field, value in params.ListFields()}
    options: Any = {name: given[name] for name in SAMPLING if name in given}
    options["stop"], options["stop_token_ids"] = list(params.stop), list(params.stop_token_ids)
    options["logit_bias"] = dict(params.logit_bias)
    if REQUEST_ID.match(request.request_id):
        options["request_id"] = request.request_id
    form = params.WhichOneof("constraint")
    if form == "choice":
        choices = params.choice.choices
        if not (0 < len(choices) <= MAX_FORM_CHOICES and all(choices)):
            _refuse("sampling_params.choice", f"must have 1..{MAX_FORM_CHOICES} choices, none of them empty")
        options["lark"] = choice_grammar(choices).lark
    elif form is not None:
        options[GRAMMARS[form]] = getattr(params, form)
    generate = build_request(request.text if kind == "text" else request.tokenized.input_ids, options)
    generate.stop.keep_special_tokens = bool(params.stop) and not params.skip_special_tokens
    return generate


def _refuse_others(message: Any, served: frozenset[str], path: str) -> None:
    for field, _ in message.ListFields():
        if field.name not in served:
            _refuse(f"{path}{field.name}", "is not served here")


def _refuse(name: str, problem: str) -> Never:
    raise InvalidArgumentError(f"{name} {problem}", field=name)


class VllmResponses:
    """Builds the responses to one request, as vLLM does: a stream's tokens are in its chunks, and its last response
    repeats those of the last chunk."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._stream, self._prompt_tokens = request.stream, 0
        self._stop_token_ids = frozenset(request.sampling_params.stop_token_ids)
        self._deltas: list[generation_pb2.OutputDelta] = []
        """All deltas of an answer that is sent whole, the last one of a stream."""

    def chunk(self, delta: generation_pb2.OutputDelta, prompt_tokens: int = 0) -> pb.GenerateResponse | None:
        """The chunk of a stream; None if the answer is sent whole. `prompt_tokens`: given with the first one."""
        self._prompt_tokens = prompt_tokens or self._prompt_tokens
        if not self._stream:
            self._deltas.append(delta)
            return None
        self._deltas = [delta]
        chunk = pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(delta.token_ids),
        )
        _add_logprobs(chunk, [delta])
        return pb.GenerateResponse(chunk=chunk)

    @property
    def size(self) -> int:
        """Bytes of what the last response is made from."""
        return sum(delta.ByteSize() for delta in self._deltas)

    def complete(self, done: inference_pb2.GenerationDone) -> pb.GenerateResponse:
        """The last response."""
        ids = [token for delta in self._deltas for token in delta.token_ids]
        complete = pb.GenerateComplete(
            output_ids=ids,
            finish_reason=FINISH_REASONS.get(done.finish_reason, "error"),
            prompt_tokens=done.usage.prompt_tokens,
            completion_tokens=len(ids),
            cached_tokens=done.usage.cached_prompt_tokens,
        )
        if done.finish_reason == generation_pb2.FINISH_REASON_STOP and self._stop_token_ids.intersection(
            ids[-1:]
        ):
            complete.matched_token_id = ids[-1]
        _add_logprobs(complete, self._deltas)
        return pb.GenerateResponse(complete=complete)


def _add_logprobs(
    response: pb.GenerateStreamChunk | pb.GenerateComplete, deltas: Sequence[generation_pb2.OutputDelta]
) -> None:
    for delta in deltas:
        for entry in delta.logprobs:
            logprobs = response.output_logprobs
            logprobs.token_ids.append(entry.token_id)
            logprobs.token_logprobs.append(entry.logprob)
            if entry.top:
                logprobs.top_logprobs.add(
                    token_ids=[other.token_id for other in entry.top],
                    values=[other.logprob for other in entry.top],
                )
