"""What no honest caller sends, to the coordinator and to the workers behind it (failure case 21)."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from splitserve.client import AsyncClient
from splitserve.errors import InvalidArgumentError, SplitserveError
from splitserve.rpc.channel import make_channel
from splitserve.rpc.status import error_from_rpc
from splitserve.v1 import decode_pb2, generation_pb2, prefill_pb2
from tests.support.cluster.real_cluster import Cluster
from tests.support.cluster.streams import worker
from tests.support.waiting import PATIENCE_S

NAN = float("nan")

pytestmark = pytest.mark.timeout(60)


async def _raw(address: str, method: str, data: bytes) -> SplitserveError:
    """The error of a call whose request is these bytes."""
    async with make_channel(address) as channel:
        call = channel.unary_stream(f"/splitserve.v1.{method}")(data, timeout=PATIENCE_S)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
    return error_from_rpc(raised.value)


async def _address(cluster: Cluster, name: str) -> str:
    async with AsyncClient(cluster.target) as client:
        return worker(await client.server_info(), name).address


async def _still_serves(cluster: Cluster) -> None:
    async with AsyncClient(cluster.target) as client:
        answer = await client.generate("hello", max_tokens=3)
    assert len(answer.token_ids) == 3
    await cluster.assert_no_leaks()


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x12\x02\xc3\x28", b"\x12\x7f"], ids=repr)
async def test_bytes_that_are_no_message(simulated_cluster: Cluster, data: bytes) -> None:
    """Noise, bad UTF-8 in `text`, and a message that is cut off."""
    error = await _raw(simulated_cluster.target, "InferenceService/Generate", data)
    assert isinstance(error, InvalidArgumentError)
    for name, method in (("prefill-0", "PrefillService/Prefill"), ("decode-0", "DecodeService/Reserve")):
        error = await _raw(await _address(simulated_cluster, name), method, b"\xff\xff\xff\xff")
        assert isinstance(error, InvalidArgumentError)
    await _still_serves(simulated_cluster)


def _request(kind: type, **changed: Any) -> bytes:
    fields: dict[str, Any] = {
        "request_id": "bad",
        "token_ids": [1, 2, 3],
        "stop": generation_pb2.StopParams(max_tokens=4),
    }
    if kind is decode_pb2.ReserveRequest:
        fields["coordinator_id"] = "nobody"
    request = kind(**(fields | changed))
    request.timeout.FromSeconds(changed.get("timeout_s", 30))
    data: bytes = request.SerializeToString()
    return data


def _sampling(**values: Any) -> dict[str, Any]:
    return {"sampling": generation_pb2.SamplingParams(**values)}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": [1, 10**6]}, "token_ids"),
    ({"token_ids": []}, "prompt"),
    ({"request_id": ""}, "request_id"),
    ({"prior_output_tokens": 3}, "prior_output_tokens"),
    ({"cache_salt": b"x" * 65}, "cache_salt"),
    ({"stop": generation_pb2.StopParams()}, "stop.max_tokens"),
    ({"stop": generation_pb2.StopParams(max_tokens=4, stop_token_ids=[10**6])}, "stop.stop_token_ids"),
    (_sampling(temperature=NAN), "sampling.temperature"),
    (_sampling(temperature=-1.0), "sampling.temperature"),
    (_sampling(top_p=NAN), "sampling.top_p"),
    (_sampling(presence_penalty=NAN), "sampling.presence_penalty"),
    (
        _sampling(logit_bias=[generation_pb2.LogitBias(token_id=10**6, bias=1)]),
        "sampling.logit_bias.token_id",
    ),
    (_sampling(logit_bias=[generation_pb2.LogitBias(token_id=1, bias=NAN)]), "sampling.logit_bias.bias"),
]


@pytest.mark.parametrize(("changed", "field"), BAD, ids=lambda value: value if isinstance(value, str) else "")
async def test_workers_check_for_themselves(
    simulated_cluster: Cluster, changed: dict[str, Any], field: str
) -> None:
    data = _request(prefill_pb2.PrefillRequest, **changed)
    error = await _raw(await _address(simulated_cluster, "prefill-0"), "PrefillService/Prefill", data)
    assert isinstance(error, InvalidArgumentError)
    assert error.field == field
    await _still_serves(simulated_cluster)


async def test_a_reservation_for_nobody_is_refused(simulated_cluster: Cluster) -> None:
    data = _request(decode_pb2.ReserveRequest)
    error = await _raw(await _address(simulated_cluster, "decode-0"), "DecodeService/Reserve", data)
    assert error.reason == "NO_OUTPUT_STREAM"
    await _still_serves(simulated_cluster)
