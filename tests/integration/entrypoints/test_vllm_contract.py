"""vLLM's gRPC contract with the stub of its own package: real processes, simulated and with SmolLM2."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from tokenizers import Tokenizer

from splitserve.rpc.channel import make_channel
from splitserve.rpc.status import error_from_rpc
from splitserve.security.api_keys import key_hash
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

pytest.importorskip("smg_grpc_proto", reason="needs the extra vllm-grpc")
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

KEYS = {"hers": "k" * 43, "his": "m" * 43, "root": "r" * 43}
IDS = pb.TokenizedInput(input_ids=[5, 6, 7, 8])


@asynccontextmanager
async def stub_of(cluster: Cluster) -> AsyncIterator[Any]:
    async with make_channel(cluster.target) as channel:
        yield VllmEngineStub(channel)


async def answer(
    stub: Any, request: pb.GenerateRequest, **options: Any
) -> tuple[list[int], pb.GenerateComplete]:
    """The tokens of all chunks, and the last response."""
    ids: list[int] = []
    async for response in stub.Generate(request, timeout=PATIENCE_S, **options):
        ids += response.chunk.token_ids
    return ids, response.complete


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [response async for response in call] if hasattr(call, "__aiter__") else await call
    return caught.value.code(), error_from_rpc(caught.value).message


async def test_a_real_model_answers_as_by_our_own_service(smollm2: str, log_dir: Path) -> None:
    params = pb.SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)
    prompt = "The capital of France is"
    async with running(Cluster(log_dir, model=smollm2, engine="torch")) as cluster:
        async with cluster.client() as client, stub_of(cluster) as stub:
            ours = await client.generate(prompt, max_tokens=12, temperature=0.0)
            ids, last = await answer(
                stub, pb.GenerateRequest(text=prompt, sampling_params=params, stream=True)
            )
            assert ids == list(ours.token_ids)
            whole = await answer(stub, pb.GenerateRequest(text=prompt, sampling_params=params))
            assert whole[0] == []
            assert list(whole[1].output_ids) == ids
            assert (whole[1].completion_tokens, whole[1].finish_reason) == (12, "length")
            assert len(whole[1].output_logprobs.top_logprobs) == 12
            assert ids[-len(last.output_ids) :] == list(last.output_ids)
            digit = pb.SamplingParams(choice=pb.ChoiceConstraint(choices=["tea", "coffee"]), max_tokens=12)
            chosen = await answer(stub, pb.GenerateRequest(text=prompt, sampling_params=digit))
            chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
            archive = b"".join(chunk.data for chunk in chunks)
            assert chunks[-1].sha256 == hashlib.sha256(archive).hexdigest()
            files = zipfile.ZipFile(io.BytesIO(archive))
            tokenizer = Tokenizer.from_str(files.read("tokenizer.json").decode())
            assert tokenizer.decode(list(chosen[1].output_ids)) in ("tea", "coffee")
        await cluster.assert_no_leaks()


async def test_tenants_aborts_refusals_and_information(tmp_path: Path, log_dir: Path) -> None:
    tenants = [
        {"name": name, "key_hashes": [key_hash(key)], "admin": name == "root", "max_prompt_tokens": 100}
        for name, key in KEYS.items()
    ]
    path = tmp_path / "tenants.yaml"
    path.write_text(yaml.safe_dump({"tenants": tenants}))
    metadata = {name: (("authorization", f"Bearer {key}"),) for name, key in KEYS.items()}
    setup = Cluster(
        log_dir,
        coordinator_options=["--tenants", str(path)],
        worker_options=["--simulated-step-s", "0.01"],
        api_key=KEYS["root"],
    )
    async with running(setup) as cluster:
        async with stub_of(cluster) as stub:
            hers, admins = {"metadata": metadata["hers"]}, {"metadata": metadata["root"]}
            health = await stub.HealthCheck(pb.HealthCheckRequest())
            assert health.healthy
            code, _ = await refusal(stub.Generate(pb.GenerateRequest(tokenized=IDS)))
            assert code == grpc.StatusCode.UNAUTHENTICATED
            long = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1] * 101))
            assert (await refusal(stub.Generate(long, **hers)))[0] == grpc.StatusCode.INVALID_ARGUMENT
            odd = pb.GenerateRequest(tokenized=IDS, kv_transfer_params_json="{}")
            code, message = await refusal(stub.Generate(odd, **hers))
            assert (code, message) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "kv_transfer_params_json is not served here",
            )
            far = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[2**31]))
            code, message = await refusal(stub.Generate(far, **hers))
            assert (code, message.split()[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "tokenized.input_ids")

            params = pb.SamplingParams(max_tokens=2000, ignore_eos=True)
            endless = pb.GenerateRequest(
                request_id="long/1", tokenized=IDS, sampling_params=params, stream=True
            )
            call = stub.Generate(endless, **hers)
            first = await call.read()
            assert first.chunk.token_ids
            assert first.chunk.prompt_tokens == 4
            await stub.Abort(pb.AbortRequest(request_ids=["long/1", "none"]), metadata=metadata["his"])
            assert (await call.read()).HasField("chunk"), "another tenant ended it"
            loads = await stub.GetLoads(pb.GetLoadsRequest(), **admins)
            assert loads.loads[0].num_total_reqs == 1
            assert loads.loads[0].max_total_num_tokens > 0
            await stub.Abort(pb.AbortRequest(request_ids=["long/1"] * 2), **hers)
            async with asyncio.timeout(PATIENCE_S):
                while not (response := await call.read()).HasField("complete"):
                    assert response.chunk.token_ids
            assert response.complete.finish_reason == "abort"
            assert await call.code() == grpc.StatusCode.OK

            model = await stub.GetModelInfo(pb.GetModelInfoRequest(), **hers)
            assert (model.served_model_name, model.is_generation) == ("simulated", True)
            assert model.vocab_size > 0
            assert (await refusal(stub.GetServerInfo(pb.GetServerInfoRequest(), **hers)))[0] == (
                grpc.StatusCode.PERMISSION_DENIED
            )
            info = await stub.GetServerInfo(pb.GetServerInfoRequest(), **admins)
            assert (info.server_type, info.data_parallel_size) == ("splitserve", 1)
            missing = stub.GetTokenizer(common_pb2.GetTokenizerRequest(), **hers)
            assert (await refusal(missing))[0] == grpc.StatusCode.NOT_FOUND
            embed = stub.Embed(pb.EmbedRequest(tokenized=IDS), **hers)
            assert (await refusal(embed))[0] == grpc.StatusCode.UNIMPLEMENTED
        await cluster.assert_no_leaks()
