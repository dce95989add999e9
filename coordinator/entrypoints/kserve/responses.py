"""Translates deltas of an answer, and information about models, into responses of the Open Inference Protocol. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from coordinator.entrypoints.kserve.requests import ParsedRequest
from coordinator.entrypoints.kserve.tensors import Tensor, add_output
from splitserve import __version__
from splitserve.client.types import FINISH_REASONS
from splitserve.errors import NotFoundError, SplitserveError
from splitserve.kserve import open_inference_pb2 as pb
from splitserve.v1 import generation_pb2, inference_pb2

FINAL = "triton_final_response"
ONLY_VERSION = "1"
"""The version of a model that is not behind a model route."""


class Responses:
    """Builds the responses to one request."""

    def __init__(self, request: pb.ModelInferRequest, parsed: ParsedRequest) -> None:
        self._name, self._id = request.model_name, request.id
        self._parsed = parsed

    def whole(
        self, deltas: Sequence[generation_pb2.OutputDelta], done: inference_pb2.GenerationDone
    ) -> pb.ModelInferResponse:
        """The answer as one response."""
        merged = generation_pb2.OutputDelta(
            token_ids=[token for delta in deltas for token in delta.token_ids],
            text=self._parsed.prefix + "".join(delta.text for delta in deltas),
            logprobs=[entry for delta in deltas for entry in delta.logprobs],
            finish_reason=done.finish_reason,
        )
        return self._response(merged, done)

    def piece(
        self, delta: generation_pb2.OutputDelta, done: inference_pb2.GenerationDone | None = None
    ) -> pb.ModelInferResponse:
        """One response of a stream. `done`: only in the last one."""
        response = self._response(delta, done)
        response.parameters[FINAL].bool_param = done is not None
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

    def _response(
        self, delta: generation_pb2.OutputDelta, done: inference_pb2.GenerationDone | None
    ) -> pb.ModelInferResponse:
        response = self._envelope(done)
        for name in self._parsed.outputs:
            if name != "num_input_tokens" or done is not None:  # the prompt's length is known only at the end
                add_output(response, _tensor(name, delta, done), self._parsed.raw)
        return response


def failure(request_id: str, error: SplitserveError) -> pb.ModelStreamInferResponse:
    """The error that ends one request of a stream. The message contains the request's id: some clients show nothing
    else."""
    label = f"[request id: {request_id}] " if request_id else ""
    response = pb.ModelStreamInferResponse(error_message=f"{label}{error.message}")
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
    # One call for all entries would hold the interpreter's lock for long.
    return _text(name, f"[{', '.join(map(json.dumps, _logprobs(delta)))}]")


def _text(name: str, text: str) -> Tensor:
    return Tensor(name, "BYTES", (1,), (text.encode(),))


def _logprobs(delta: generation_pb2.OutputDelta) -> Iterable[dict[str, object]]:
    for entry in delta.logprobs:
        top = [{"token_id": other.token_id, "logprob": other.logprob} for other in entry.top]
        yield {"token_id": entry.token_id, "logprob": entry.logprob, "top": top}


PLATFORM = "splitserve"
ANY_LENGTH = -1
Shape = tuple[str, int]
"""(datatype, length)."""

INPUTS: Mapping[str, Shape] = {
    "text_input": ("BYTES", 1),
    "input_ids": ("INT32", ANY_LENGTH),
    "stream": ("BOOL", 1),
    "max_tokens": ("INT32", 1),
    "min_tokens": ("INT32", 1),
    "temperature": ("FP32", 1),
    "top_k": ("INT32", 1),
    "top_p": ("FP32", 1),
    "min_p": ("FP32", 1),
    "repetition_penalty": ("FP32", 1),
    "presence_penalty": ("FP32", 1),
    "frequency_penalty": ("FP32", 1),
    "seed": ("UINT64", 1),
    "stop": ("BYTES", ANY_LENGTH),
    "stop_token_ids": ("INT32", ANY_LENGTH),
    "ignore_eos": ("BOOL", 1),
    "logprobs": ("INT32", 1),
    "sampling_parameters": ("BYTES", 1),
    "exclude_input_in_output": ("BOOL", 1),
    "return_finish_reason": ("BOOL", 1),
    "return_num_input_tokens": ("BOOL", 1),
    "return_num_output_tokens": ("BOOL", 1),
}
OUTPUTS: Mapping[str, Shape] = {
    "text_output": ("BYTES", 1),
    "output_ids": ("INT32", ANY_LENGTH),
    "finish_reason": ("BYTES", 1),
    "num_input_tokens": ("UINT32", 1),
    "num_output_tokens": ("UINT32", 1),
    "logprobs": ("BYTES", 1),
}
_DATA_TYPES: Mapping[str, pb.DataType.ValueType] = {
    "BOOL": pb.TYPE_BOOL,
    "INT32": pb.TYPE_INT32,
    "UINT32": pb.TYPE_UINT32,
    "UINT64": pb.TYPE_UINT64,
    "FP32": pb.TYPE_FP32,
    "BYTES": pb.TYPE_STRING,
}


def server_metadata() -> pb.ServerMetadataResponse:
    """Name, version and extensions of the server."""
    extensions = ("model_repository", "model_configuration", "parameters", "binary_tensor_data")
    return pb.ServerMetadataResponse(name=PLATFORM, version=__version__, extensions=extensions)


def model_metadata(model: inference_pb2.ModelInfo) -> pb.ModelMetadataResponse:
    """A model's input and output tensors."""
    response = pb.ModelMetadataResponse(name=model.name, versions=versions_of(model), platform=PLATFORM)
    for tensors, shapes in ((response.inputs, INPUTS), (response.outputs, OUTPUTS)):
        for name, (datatype, length) in shapes.items():
            tensors.add(name=name, datatype=datatype, shape=[length])
    return response


def model_config(model: inference_pb2.ModelInfo) -> pb.ModelConfigResponse:
    """A model's configuration: decoupled, that is, with any number of responses per request."""
    config = pb.ModelConfig(name=model.name, platform=PLATFORM, backend=PLATFORM, max_batch_size=0)
    config.model_transaction_policy.decoupled = True
    for name, (kind, length) in INPUTS.items():
        config.input.add(name=name, data_type=_DATA_TYPES[kind], dims=[length], optional=True)
    for name, (kind, length) in OUTPUTS.items():
        config.output.add(name=name, data_type=_DATA_TYPES[kind], dims=[length])
    return pb.ModelConfigResponse(config=config)


def repository_index(
    models: Sequence[inference_pb2.ModelInfo], only_ready: bool
) -> pb.RepositoryIndexResponse:
    """All models, one entry per version."""
    response = pb.RepositoryIndexResponse()
    for model in models:
        versions = {version.name: version.ready for version in model.versions} or {ONLY_VERSION: model.ready}
        for version, ready in versions.items():
            if ready:
                response.models.add(name=model.name, version=version, state="READY")
            elif not only_ready:
                reason = "no complete pair of workers is ready"
                response.models.add(name=model.name, version=version, state="UNAVAILABLE", reason=reason)
    return response


def versions_of(model: inference_pb2.ModelInfo) -> list[str]:
    """The served models behind a model route, or the only version."""
    return [version.name for version in model.versions] or [ONLY_VERSION]


def named(models: Sequence[inference_pb2.ModelInfo], name: str, version: str) -> inference_pb2.ModelInfo:
    """The model of that name and version; without a version, of that name. Raises NotFoundError (MODEL_NOT_FOUND)."""
    for model in models:
        if model.name == name and (not version or version in versions_of(model)):
            return model
    message = (
        f"model {name[:128]!r}" + (f" of version {version[:64]!r}" if version else "") + " is not served here"
    )
    raise NotFoundError(message, reason="MODEL_NOT_FOUND", field="model_name")
