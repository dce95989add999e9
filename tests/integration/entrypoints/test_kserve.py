"""The Open Inference Protocol with the real tritonclient, against a coordinator with scripted workers."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from splitserve.kserve import open_inference_pb2 as pb
from splitserve.kserve.open_inference_pb2_grpc import GRPCInferenceServiceStub
from splitserve.rpc.channel import make_channel
from splitserve.rpc.status import error_from_rpc
from tests.support.clients.triton import start_triton, triton
from tests.support.cluster.fake_cluster import ask, expected, fake_cluster
from tests.support.journal import settled

pytestmark = pytest.mark.timeout(60)


def text(prompt: str = "w1 w2 w3", max_tokens: int = 6, **inputs: Any) -> dict[str, Any]:
    return {"text_input": ["BYTES", [prompt]], "max_tokens": ["INT32", [max_tokens]], **inputs}


async def test_a_whole_answer_equals_that_of_our_own_service() -> None:
    async with fake_cluster() as cluster:
        ours = await cluster.answer(ask(6))
        requests = [
            {"inputs": text(), "id": "r1"},
            {"inputs": {"input_ids": ["INT64", [1, 2, 3]]}, "parameters": {"max_tokens": 6}},
            {
                "inputs": {"text_input": ["BYTES", ["w1 w2 w3"]]},
                "parameters": {"sampling_parameters": '{"max_tokens": "6"}'},
            },
            {
                "inputs": text(exclude_input_in_output=["BOOL", [False]]),
                "outputs": ["text_output", "num_input_tokens"],
            },
        ]
        whole, by_tokens, by_json, with_prompt = await triton(
            cluster.address, kind="infer", requests=requests
        )
        assert whole["outputs"] == {
            "text_output": [ours.text],
            "output_ids": ours.token_ids,
            "finish_reason": ["length"],
        }
        assert (whole["id"], whole["model"], whole["version"]) == ("r1", "words", "1")
        assert whole["parameters"]["prompt_tokens"] == 3
        assert whole["parameters"]["completion_tokens"] == 6
        assert whole["parameters"]["request_id"] == "r1"
        assert by_tokens["outputs"]["output_ids"] == by_json["outputs"]["output_ids"] == expected(6)
        assert with_prompt["outputs"] == {"text_output": [f"w1 w2 w3{ours.text}"], "num_input_tokens": [3]}


async def test_a_stream_with_a_callback() -> None:
    async with fake_cluster() as cluster:
        inputs = text(stream=["BOOL", [True]])
        seen = await triton(
            cluster.address, kind="stream", requests=[{"inputs": inputs, "id": "a"}], finals=1
        )
        assert [t for piece in seen for t in piece["outputs"]["output_ids"]] == expected(6)
        assert [piece["parameters"]["triton_final_response"] for piece in seen] == [False] * (
            len(seen) - 1
        ) + [True]
        # How many there are is up to the load: what is there at once travels together.
        reasons = [piece["outputs"]["finish_reason"] for piece in seen]
        assert reasons == [[""]] * (len(seen) - 1) + [["length"]]
        assert seen[-1]["parameters"]["completion_tokens"] == 6


async def test_an_empty_final_response_where_it_is_asked_for() -> None:
    async with fake_cluster() as cluster:
        asked = {"inputs": text(stream=["BOOL", [True]]), "empty_final": True}
        seen = await triton(cluster.address, kind="stream", requests=[asked], finals=1)
        assert [t for piece in seen[:-1] for t in piece["outputs"]["output_ids"]] == expected(6)
        assert seen[-2]["outputs"]["finish_reason"] == ["length"]
        assert not any(piece["parameters"]["triton_final_response"] for piece in seen[:-1])
        assert seen[-1]["outputs"] == {}
        assert seen[-1]["parameters"]["completion_tokens"] == 6


async def test_many_requests_on_one_stream_with_asyncio() -> None:
    async with fake_cluster() as cluster:
        requests = [
            {"inputs": text(stream=["BOOL", [True]], max_tokens=n), "id": f"r{n}"} for n in range(2, 12)
        ]
        seen = await triton(cluster.address, kind="aio", requests=requests)
        for n in range(2, 12):
            own = [piece for piece in seen if piece["id"] == f"r{n}"]
            assert [t for piece in own for t in piece["outputs"].get("output_ids", [])] == expected(n)
            finals = [piece for piece in own if piece["parameters"]["triton_final_response"]]
            assert finals == own[-1:]
            assert finals[0]["parameters"]["completion_tokens"] == n


async def test_a_failed_request_leaves_the_stream_and_the_others_alone() -> None:
    async with fake_cluster() as cluster:
        stream = {"stream": ["BOOL", [True]]}
        requests = [
            {"inputs": text(**stream), "id": "good"},
            {"inputs": text(**stream), "id": "unknown", "model": "other"},
            {"inputs": text(max_tokens=0, **stream), "id": "bad"},
            {"inputs": text(max_tokens=4, **stream), "id": "last"},
        ]
        seen = await triton(cluster.address, kind="stream", requests=requests, finals=4)
        errors = sorted(piece["error"] for piece in seen if "error" in piece)
        assert len(errors) == 2
        assert "[request id: bad] stop.max_tokens must be 1" in errors[0]
        assert "[request id: unknown] model 'other' is not served here" in errors[1]
        for name, count in (("good", 6), ("last", 4)):
            own = [piece for piece in seen if piece.get("id") == name]
            assert [t for piece in own for t in piece["outputs"]["output_ids"]] == expected(count)


async def test_settings_reach_the_workers() -> None:
    async with fake_cluster() as cluster:
        inputs = text(temperature=["FP32", [0.5]], top_k=["INT32", [7]], stop_words=["BYTES", ["end", "fin"]])
        request = {
            "inputs": inputs,
            "parameters": {"seed": 5, "top_p": 0.5, "ignore_eos": True},
            "sequence_id": "chat 7",
            "priority": 101,
            "timeout": 90_000_000,
        }
        await triton(cluster.address, kind="infer", requests=[request])
        call = cluster.prefills[0].calls.entries[0]
        assert (call.sampling.temperature, call.sampling.top_k, call.sampling.top_p) == (0.5, 7, 0.5)
        assert call.sampling.seed == 5
        assert (list(call.stop.stop_strings), call.stop.ignore_eos) == (["end", "fin"], True)
        assert call.precedence.within_tenant == 0
        assert 0 < call.timeout.seconds + call.timeout.nanos / 1e9 <= 90


async def test_cancelling_a_stream_cancels_all_that_it_started() -> None:
    async with fake_cluster() as cluster:
        cluster.decodes[0].token_gate.close()
        inputs = text(stream=["BOOL", [True]], max_tokens=40)
        requests = [{"inputs": inputs, "id": f"r{n}"} for n in range(3)]
        process = await start_triton(
            cluster.address, {"kind": "stream", "requests": requests, "finals": 3, "cancel_after": 3}
        )
        await process.communicate()
        await settled(lambda: cluster.coordinator.api.running == 0)
        await cluster.decodes[0].aborts.wait(3)
        assert cluster.decodes[0].live == 0


async def test_what_is_asked_besides_inference() -> None:
    async with fake_cluster() as cluster:
        seen = await triton(cluster.address, kind="metadata", model="words")
        assert (seen["live"], seen["ready"], seen["model_ready"], seen["unknown_ready"]) == (
            True,
            True,
            True,
            False,
        )
        assert seen["server"]["name"] == "splitserve"
        assert (seen["model"]["name"], seen["model"]["versions"]) == ("words", ["1"])
        assert {"name": "text_input", "datatype": "BYTES", "shape": ["1"]} in seen["model"]["inputs"]
        assert seen["config"]["config"]["model_transaction_policy"] == {"decoupled": True}
        assert seen["index"]["models"] == [{"name": "words", "version": "1", "state": "READY"}]
    async with fake_cluster(prefill=0, decode=0) as empty, make_channel(empty.address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelMetadata(pb.ModelMetadataRequest(name="words"))
        assert error_from_rpc(caught.value).reason == "MODEL_NOT_FOUND"


def request(**fields: Any) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="words", **fields)
    message.parameters["max_tokens"].int64_param = 6
    return message


def typed(prompt: bytes = b"w1 w2 w3") -> pb.ModelInferRequest.InferInputTensor:
    return pb.ModelInferRequest.InferInputTensor(
        name="text_input",
        datatype="BYTES",
        shape=[1],
        contents=pb.InferTensorContents(bytes_contents=[prompt]),
    )


async def test_typed_contents_are_answered_in_kind_and_errors_carry_details() -> None:
    async with fake_cluster() as cluster, make_channel(cluster.address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        answer = await stub.ModelInfer(request(inputs=[typed()]))
        by_name = {output.name: output for output in answer.outputs}
        assert list(by_name["output_ids"].contents.int_contents) == expected(6)
        assert not answer.raw_output_contents
        for message, reason, field in (
            (request(), "INVALID_ARGUMENT", "text_input"),
            (request(inputs=[typed(b"\xff")]), "INVALID_ARGUMENT", "text_input"),
            (request(inputs=[typed(), typed()]), "BAD_TENSOR", "text_input"),
            (
                request(
                    inputs=[typed(), pb.ModelInferRequest.InferInputTensor(name="tpo_p", datatype="FP32")]
                ),
                "BAD_TENSOR",
                "tpo_p",
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ModelInfer(message)
            error = error_from_rpc(caught.value)
            assert (error.code, error.reason, error.field) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                reason,
                field,
            )
        await cluster.prefills[0].stop()
        cluster.prefills.clear()
        await settled(lambda: not cluster.coordinator.registry.snapshot().ready_models())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(request(inputs=[typed()]))
        assert (error_from_rpc(caught.value).reason, error_from_rpc(caught.value).retry_after_s) == (
            "NO_WORKER",
            1.0,
        )


async def test_a_stream_takes_no_more_than_it_has_room_for() -> None:
    async with fake_cluster() as cluster, make_channel(cluster.address) as channel:
        cluster.coordinator.kserve.max_in_flight = 2
        cluster.prefills[0].first_token_gate.close()
        stub = GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer()
        for number in range(5):
            message = request(inputs=[typed()])
            message.id = f"r{number}"
            await call.write(message)
        await call.done_writing()
        await settled(lambda: cluster.coordinator.api.running == 2)
        cluster.prefills[0].first_token_gate.open()
        ids = [response.infer_response.id async for response in call]
        assert sorted(ids) == [f"r{number}" for number in range(5)]


async def test_reflection_describes_the_service() -> None:
    async with fake_cluster() as cluster, make_channel(cluster.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest
        call = stub.ServerReflectionInfo(
            iter([asked(list_services=""), asked(file_containing_symbol="inference.GRPCInferenceService")])
        )
        listed, described = [response async for response in call]
        names = [service.name for service in listed.list_services_response.service]
        assert "inference.GRPCInferenceService" in names
        assert "splitserve.v1.RoutesService" in names
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(data)
            for data in described.file_descriptor_response.file_descriptor_proto
        ]
        (service,) = [service for file in files for service in file.service]
        assert "ModelStreamInfer" in [method.name for method in service.method]


@pytest.mark.slow
async def test_clients_that_leave_during_a_write_are_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    """Some writes fail once their stream is over; asyncio would report what nobody has seen."""
    chance = random.Random(1)
    async with fake_cluster() as cluster:
        for _ in range(24):
            async with make_channel(cluster.address) as channel:
                call = GRPCInferenceServiceStub(channel).ModelStreamInfer()
                for number in range(8):
                    message = request(inputs=[typed()], id=f"r{number}")
                    message.parameters["max_tokens"].int64_param = 40
                    message.parameters["stream"].bool_param = True
                    await call.write(message)
                for _ in range(chance.randint(1, 8)):  # each request has one; the others may be merged
                    await call.read()
            gc.collect()
        await settled(lambda: cluster.coordinator.api.running == 0)
    gc.collect()
    await asyncio.sleep(0)
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]
