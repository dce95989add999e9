"""Responses to ModelMetadata, ModelConfig and RepositoryIndex: a model's inputs and outputs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.entrypoints.kserve.responses import ONLY_VERSION
from splitserve import __version__
from splitserve.errors import NotFoundError
from splitserve.kserve import open_inference_pb2 as pb
from splitserve.v1 import inference_pb2

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
    kind = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=model.name,
        versions=versions_of(model),
        platform=PLATFORM,
        inputs=[kind(name=name, datatype=t, shape=[length]) for name, (t, length) in INPUTS.items()],
        outputs=[kind(name=name, datatype=t, shape=[length]) for name, (t, length) in OUTPUTS.items()],
    )


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
        lines = [(version.name, version.ready) for version in model.versions] or [(ONLY_VERSION, model.ready)]
        for version, ready in lines:
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
    """The model of that name, which must have the version if one is given. Raises NotFoundError (MODEL_NOT_FOUND)."""
    for model in models:
        if model.name == name:
            if version and version not in versions_of(model):
                break
            return model
    what = f"model {name[:128]!r}" + (f" of version {version[:64]!r}" if version else "")
    raise NotFoundError(f"{what} is not served here", reason="MODEL_NOT_FOUND", field="model_name")
