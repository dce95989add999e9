"""Translates the deltas of an answer into responses of the Open Inference Protocol. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from coordinator.entrypoints.kserve.requests import Asked
from coordinator.entrypoints.kserve.tensors import Tensor, add_output
from splitserve.errors import SplitserveError
from splitserve.kserve import open_inference_pb2 as pb
from splitserve.v1 import generation_pb2, inference_pb2

FINAL = "triton_final_response"
ONLY_VERSION = "1"
"""The version of a model that is not behind a model route."""
FINISH_REASONS = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_ABORT: "abort",
}


class Responses:
    """Builds the responses to one request."""

    def __init__(self, request: pb.ModelInferRequest, asked: Asked) -> None:
        self._name, self._id = request.model_name, request.id
        self._asked = asked

    def whole(
        self, deltas: Sequence[generation_pb2.OutputDelta], done: inference_pb2.GenerationDone
    ) -> pb.ModelInferResponse:
        """The answer as one response."""
        response = self._envelope(done)
        merged = generation_pb2.OutputDelta(
            token_ids=[token for delta in deltas for token in delta.token_ids],
            text=self._asked.prefix + "".join(delta.text for delta in deltas),
            logprobs=[entry for delta in deltas for entry in delta.logprobs],
            finish_reason=done.finish_reason,
        )
        self._fill(response, merged, done)
        return response

    def piece(
        self, delta: generation_pb2.OutputDelta, done: inference_pb2.GenerationDone | None = None
    ) -> pb.ModelInferResponse:
        """One response of a stream; `done` is given for the last one."""
        response = self._envelope(done)
        response.parameters[FINAL].bool_param = done is not None
        self._fill(response, delta, done)
        return response

    def empty_final(self, done: inference_pb2.GenerationDone) -> pb.ModelInferResponse:
        """The final response of a stream, without outputs."""
        response = self._envelope(done)
        response.parameters[FINAL].bool_param = True
        return response

    def _envelope(self, done: inference_pb2.GenerationDone | None) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(model_name=self._name, id=self._id)
        if done is None:
            return response
        served, usage, timings = done.served_by, done.usage, done.timings
        response.model_name = self._name or done.model
        response.model_version = ONLY_VERSION if served.model == response.model_name else served.model
        parameters = response.parameters
        parameters["request_id"].string_param = done.request_id
        parameters["prompt_tokens"].int64_param = usage.prompt_tokens
        parameters["completion_tokens"].int64_param = usage.completion_tokens
        parameters["cached_prompt_tokens"].int64_param = usage.cached_prompt_tokens
        parameters["ttft_ms"].double_param = timings.ttft_ms
        parameters["tpot_ms"].double_param = timings.tpot_ms
        parameters["prefill_worker"].string_param = served.prefill_worker
        parameters["decode_worker"].string_param = served.decode_worker
        parameters["seed"].uint64_param = done.seed
        return response

    def _fill(
        self,
        response: pb.ModelInferResponse,
        delta: generation_pb2.OutputDelta,
        done: inference_pb2.GenerationDone | None,
    ) -> None:
        for name in self._asked.outputs:
            if name != "num_input_tokens" or done is not None:  # the prompt's length is known only at the end
                add_output(response, _tensor(name, delta, done), self._asked.raw)


def failure(request_id: str, error: SplitserveError) -> pb.ModelStreamInferResponse:
    """The error that ends one request of a stream. The message repeats the id for clients that show nothing else."""
    who = f"[request id: {request_id}] " if request_id else ""
    response = pb.ModelStreamInferResponse(error_message=f"{who}{error.message}")
    response.infer_response.id = request_id
    parameters = response.infer_response.parameters
    parameters[FINAL].bool_param = True
    parameters["error_code"].string_param = error.code.name
    parameters["error_reason"].string_param = error.reason
    if error.field is not None:
        parameters["error_field"].string_param = error.field
    if error.retry_after_s is not None:
        parameters["retry_after_ms"].int64_param = round(error.retry_after_s * 1e3)
    return response


def _tensor(
    name: str, delta: generation_pb2.OutputDelta, done: inference_pb2.GenerationDone | None
) -> Tensor:
    match name:
        case "text_output":
            return _text(name, delta.text)
        case "output_ids":
            return Tensor(name, "INT32", (len(delta.token_ids),), delta.token_ids)
        case "finish_reason":
            return _text(name, FINISH_REASONS.get(delta.finish_reason, ""))
        case "num_input_tokens":
            return Tensor(name, "UINT32", (1,), (done.usage.prompt_tokens if done else 0,))
        case "num_output_tokens":
            return Tensor(name, "UINT32", (1,), (len(delta.token_ids),))
    # Entry by entry: one call for all would keep the interpreter to itself.
    return _text(name, f"[{', '.join(map(json.dumps, _logprobs(delta)))}]")


def _text(name: str, text: str) -> Tensor:
    return Tensor(name, "BYTES", (1,), (text.encode(),))


def _logprobs(delta: generation_pb2.OutputDelta) -> Iterable[dict[str, object]]:
    for entry in delta.logprobs:
        top = [{"token_id": other.token_id, "logprob": other.logprob} for other in entry.top]
        yield {"token_id": entry.token_id, "logprob": entry.logprob, "top": top}
