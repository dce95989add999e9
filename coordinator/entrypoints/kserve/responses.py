"""Translates deltas of an answer, and information about models, into responses of the Open Inference Protocol. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from coordinator.entrypoints.kserve.requests import INPUTS, OUTPUTS, USUAL_OUTPUTS, ParsedRequest
from coordinator.entrypoints.kserve.tensors import Tensor, add_output
from splitserve import __version__
from splitserve.client.types import FINISH_REASONS
from splitserve.errors import NotFoundError, SplitserveError
from splitserve.generation.output_delta import TokenDelta
from splitserve.kserve import open_inference_pb2 as pb
from splitserve.v1 import inference_pb2

FINAL = "triton_final_response"
ONLY_VERSION = "1"
"""The version of a model that is not behind a model route."""


class Responses:
    """Builds the responses to one request."""

    def __init__(self, request: pb.ModelInferRequest, parsed: ParsedRequest) -> None:
        self._name, self._id = request.model_name, request.id
        self._parsed = parsed
        self._plain: pb.ModelStreamInferResponse | None = None
        """What the responses to plain deltas with the usual outputs have in common."""

    def whole(
        self, deltas: Sequence[TokenDelta], done: inference_pb2.GenerationDone
    ) -> pb.ModelInferResponse:
        """The answer as one response."""
        merged = TokenDelta(
            0,
            token_ids=[token for delta in deltas for token in delta.token_ids],
            text=self._parsed.prefix + "".join(delta.text for delta in deltas),
            logprobs=[entry for delta in deltas for entry in delta.logprobs],
            finish_reason=done.finish_reason,
        )
        response = pb.ModelInferResponse()
        self._fill(response, merged, done)
        return response

    def piece(
        self, delta: TokenDelta, done: inference_pb2.GenerationDone | None = None
    ) -> pb.ModelStreamInferResponse:
        """One response of a stream. `done`: only in the last one."""
        is_usual = self._parsed.outputs == USUAL_OUTPUTS and not self._parsed.raw
        if done is None and is_usual and delta.is_plain:
            return self._usual(delta)
        message = pb.ModelStreamInferResponse()
        self._fill(message.infer_response, delta, done)
        message.infer_response.parameters[FINAL].bool_param = done is not None
        return message

    def empty_final(self, done: inference_pb2.GenerationDone) -> pb.ModelStreamInferResponse:
        """The final response of a stream, without outputs."""
        message = pb.ModelStreamInferResponse()
        self._envelope(message.infer_response, done)
        message.infer_response.parameters[FINAL].bool_param = True
        return message

    def _usual(self, delta: TokenDelta) -> pb.ModelStreamInferResponse:
        """As `piece`, by a copy: most fields are the same in each response."""
        if self._plain is None:
            self._plain = pb.ModelStreamInferResponse()
            self._fill(self._plain.infer_response, TokenDelta(0, []), None)
            self._plain.infer_response.parameters[FINAL].bool_param = False
            self._plain.infer_response.outputs[0].contents.Clear()
        message = pb.ModelStreamInferResponse()
        message.CopyFrom(self._plain)
        text, ids, _ = message.infer_response.outputs
        text.contents.bytes_contents.append(delta.text.encode())
        ids.contents.int_contents.extend(delta.token_ids)
        ids.shape[0] = len(delta.token_ids)
        return message

    def _envelope(self, response: pb.ModelInferResponse, done: inference_pb2.GenerationDone | None) -> None:
        response.model_name, response.id = self._name, self._id
        if done is None:
            return
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

    def _fill(
        self, response: pb.ModelInferResponse, delta: TokenDelta, done: inference_pb2.GenerationDone | None
    ) -> None:
        self._envelope(response, done)
        for name in self._parsed.outputs:
            if name != "num_input_tokens" or done is not None:  # the prompt's length is known only at the end
                add_output(response, _tensor(name, delta, done), self._parsed.raw)


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


def _tensor(name: str, delta: TokenDelta, done: inference_pb2.GenerationDone | None) -> Tensor:
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


def _logprobs(delta: TokenDelta) -> Iterable[dict[str, object]]:
    for entry in delta.logprobs:
        top = [{"token_id": other.token_id, "logprob": other.logprob} for other in entry.top]
        yield {"token_id": entry.token_id, "logprob": entry.logprob, "top": top}


PLATFORM = "splitserve"


def server_metadata() -> pb.ServerMetadataResponse:
    """Name, version and extensions of the server."""
    extensions = ("model_repository", "model_configuration", "parameters", "binary_tensor_data")
    return pb.ServerMetadataResponse(name=PLATFORM, version=__version__, extensions=extensions)


def model_metadata(model: inference_pb2.ModelInfo) -> pb.ModelMetadataResponse:
    """A model's input and output tensors."""
    response = pb.ModelMetadataResponse(name=model.name, versions=versions_of(model), platform=PLATFORM)
    for (datatype, length), names in INPUTS.items():
        for name in names:
            response.inputs.add(name=name, datatype=datatype, shape=[length])
    for name, (datatype, length) in OUTPUTS.items():
        response.outputs.add(name=name, datatype=datatype, shape=[length])
    return response


def model_config(model: inference_pb2.ModelInfo) -> pb.ModelConfigResponse:
    """A model's configuration: decoupled, that is, with any number of responses per request."""
    config = pb.ModelConfig(name=model.name, platform=PLATFORM, backend=PLATFORM, max_batch_size=0)
    config.model_transaction_policy.decoupled = True
    for (kind, length), names in INPUTS.items():
        for name in names:
            config.input.add(name=name, data_type=_data_type(kind), dims=[length], optional=True)
    for name, (kind, length) in OUTPUTS.items():
        config.output.add(name=name, data_type=_data_type(kind), dims=[length])
    return pb.ModelConfigResponse(config=config)


def _data_type(datatype: str) -> pb.DataType.ValueType:
    return pb.DataType.Value("TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}")


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
