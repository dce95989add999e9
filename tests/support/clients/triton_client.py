"""A process with the real tritonclient in it: reads one JSON job on stdin, writes what it saw as JSON on stdout.

It must not share a process with a coordinator: both have the protocol's messages, and one pool of descriptors holds
them once.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.support.waiting import PATIENCE_S

Job = dict[str, Any]
Seen = dict[str, Any]


def tensors(given: dict[str, Any], module: Any) -> list[Any]:
    """Inputs from {name: [datatype, values]}."""
    kinds = {"BYTES": np.object_, "INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "BOOL": np.bool_}
    found = []
    for name, (datatype, values) in given.items():
        elements = [v.encode() for v in values] if datatype == "BYTES" else values
        array = np.array(elements, dtype=kinds[datatype])
        tensor = module.InferInput(name, array.shape, datatype)
        tensor.set_data_from_numpy(array)
        found.append(tensor)
    return found


def asked(request: Job, module: Any) -> dict[str, Any]:
    """What both clients take for one request."""
    outputs = [module.InferRequestedOutput(name) for name in request.get("outputs", [])]
    return {
        "model_name": request.get("model", "words"),
        "model_version": request.get("version", ""),
        "inputs": tensors(request["inputs"], module),
        "outputs": outputs or None,
        "request_id": request.get("id", ""),
        "parameters": request.get("parameters"),
        "sequence_id": request.get("sequence_id", 0),
        "priority": request.get("priority", 0),
        "timeout": request.get("timeout"),
    }


def shown(result: Any) -> Seen:
    """A response in plain values."""
    response = result.get_response()
    seen: Seen = {"id": response.id, "model": response.model_name, "version": response.model_version}
    seen["outputs"] = {}
    for output in response.outputs:
        values = result.as_numpy(output.name).tolist()
        seen["outputs"][output.name] = [v.decode() if isinstance(v, bytes) else v for v in values]
    seen["parameters"] = {
        key: getattr(value, value.WhichOneof("parameter_choice"))
        for key, value in response.parameters.items()
    }
    return seen


def failed(error: Exception) -> Seen:
    """An error in plain values."""
    status = error.status() if isinstance(error, InferenceServerException) else None
    return {"error": str(error), "status": str(status)}


def infer(job: Job) -> list[Seen]:
    """ModelInfer, one call after the other."""
    with triton.InferenceServerClient(job["address"]) as client:
        seen = []
        for request in job["requests"]:
            try:
                seen.append(shown(client.infer(**asked(request, triton), headers=job.get("headers"))))
            except InferenceServerException as error:
                seen.append(failed(error))
        return seen


def stream(job: Job) -> list[Seen]:
    """ModelStreamInfer with a callback; ends when `finals` requests have ended."""
    heard: queue.Queue[Seen] = queue.Queue()

    def callback(result: Any, error: Exception | None) -> None:
        heard.put(failed(error) if error else shown(result))

    with triton.InferenceServerClient(job["address"]) as client:
        client.start_stream(callback, headers=job.get("headers"))
        for request in job["requests"]:
            arguments = asked(request, triton)
            client.async_stream_infer(
                **arguments, enable_empty_final_response=request.get("empty_final", False)
            )
        seen: list[Seen] = []
        ended = 0
        while ended < job["finals"]:
            seen.append(heard.get(timeout=PATIENCE_S))
            ended += "error" in seen[-1] or seen[-1]["parameters"].get("triton_final_response", True)
            if len(seen) == job.get("cancel_after"):
                print(json.dumps({"cancelling": seen}), flush=True)
                client.stop_stream(cancel_requests=True)
                return seen
        client.stop_stream()
        return seen


async def stream_aio(job: Job) -> list[Seen]:
    """ModelStreamInfer with asyncio."""

    async def requests() -> Any:
        for request in job["requests"]:
            yield asked(request, triton_aio)

    async with triton_aio.InferenceServerClient(job["address"]) as client:
        seen = []
        async for result, error in client.stream_infer(requests(), headers=job.get("headers")):
            seen.append(failed(error) if error else shown(result))
        return seen


def metadata(job: Job) -> Seen:
    """Everything that is asked besides inference."""
    model = job["model"]
    with triton.InferenceServerClient(job["address"]) as client:
        return {
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "model_ready": client.is_model_ready(model),
            "unknown_ready": client.is_model_ready("other"),
            "server": client.get_server_metadata(as_json=True),
            "model": client.get_model_metadata(model, as_json=True),
            "config": client.get_model_config(model, as_json=True),
            "index": client.get_model_repository_index(as_json=True),
        }


def main() -> None:
    job = json.loads(sys.stdin.read())
    kinds = {"infer": infer, "stream": stream, "metadata": metadata}
    seen = asyncio.run(stream_aio(job)) if job["kind"] == "aio" else kinds[job["kind"]](job)
    print(json.dumps({"seen": seen}), flush=True)


if __name__ == "__main__":
    main()
