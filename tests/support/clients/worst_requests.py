"""The requests that cost a server most for their size, sent from a process of their own: `python -m` this with ports.

Prints a line of JSON a request: its name and how it ended, an HTTP status or the name of a gRPC code.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
from collections.abc import Iterator

import grpc

from splitserve.kserve import open_inference_pb2 as pb
from splitserve.v1 import inference_pb2
from tests.support.clients.fuzz import as_they_are

KIB, MIB = 2**10, 2**20
AT_LIMIT = 2 * MIB - KIB
"""Just what a coordinator takes from a client whatever the model's context is."""
TOO_LONG = 15 * MIB
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GENERATE = "/splitserve.v1.InferenceService/Generate"
INFER = "/inference.GRPCInferenceService/ModelInfer"
WAIT_S = 120.0


def filled(before: str, item: str, after: str, size: int) -> bytes:
    """A body of this size whose middle repeats an item, with commas between."""
    count = max(1, (size - len(before) - len(after)) // (len(item) + 1))
    return (before + ",".join([item] * count) + after).encode()


def http_requests() -> Iterator[tuple[str, str, bytes]]:
    """(name, path, body)."""
    ask = '{"messages":[{"role":"user","content":"a"}],"max_tokens":2,'
    for size in (60 * KIB, AT_LIMIT, TOO_LONG):
        yield (
            f"messages {size}",
            CHAT,
            filled('{"max_tokens":2,"messages":[', '{"role":"user","content":"a"}', "]}", size),
        )
        yield f"wrong messages {size}", CHAT, filled('{"max_tokens":2,"messages":[', '{"rol":1}', "]}", size)
        yield (
            f"parts {size}",
            CHAT,
            filled(
                '{"max_tokens":2,"messages":[{"role":"user","content":[',
                '{"type":"text","text":"a"}',
                "]}]}",
                size,
            ),
        )
        yield (
            f"calls {size}",
            CHAT,
            filled(
                '{"max_tokens":2,"messages":[{"role":"assistant","tool_calls":[',
                '{"function":{"name":"f"}}',
                "]}]}",
                size,
            ),
        )
        yield (
            f"tools {size}",
            CHAT,
            filled(
                ask + '"tools":[', '{"type":"function","function":{"name":"f","parameters":{}}}', "]}", size
            ),
        )
        yield f"empty arrays {size}", CHAT, filled(ask + '"x":[', "[]", "]}", size)
        yield f"empty objects {size}", CHAT, filled(ask + '"x":[', "{}", "]}", size)
        yield f"stop {size}", CHAT, filled(ask + '"stop":[', '"a"', "]}", size)
        yield f"stop ids {size}", CHAT, filled(ask + '"stop_token_ids":[', "1", "]}", size)
        yield f"token ids {size}", TEXT, filled('{"max_tokens":2,"prompt":[', "1", "]}", size)
        yield f"lists of ids {size}", TEXT, filled('{"max_tokens":2,"prompt":[', "[1,2]", "]}", size)
        yield f"texts {size}", TEXT, filled('{"max_tokens":2,"prompt":[', '"a"', "]}", size)
        yield f"not quite {size}", TEXT, filled('{"max_tokens":2,"prompt":[', "1", ',"a"]}', size)
        yield f"line ends {size}", TEXT, filled('{"max_tokens":2,"prompt":"', "\\n", '"}', size)
        yield f"words {size}", TEXT, b'{"max_tokens":2,"prompt":"%s"}' % (b"word " * (size // 5 - 4))
        yield f"nesting {size}", CHAT, b"[" * size
        yield f"quotes {size}", CHAT, b'["' + b'","' * (size // 3 - 2)
        yield f"backslashes {size}", CHAT, b'["' + b"\\\\" * (size // 2 - 2)
        yield f"digits {size}", CHAT, b"1" * size
        yield f"cut off {size}", CHAT, filled(ask + '"x":[', '{"a":"b"}', "", size)
        keys = ",".join(f'"{number}":1' for number in range(size // 10))
        yield f"bias {size}", CHAT, f'{ask}"logit_bias":{{{keys}}}}}'.encode()
        schema = f'{{"type":"object","properties":{{{keys}}}}}'.replace(":1", ":{}")
        yield (
            f"schema {size}",
            CHAT,
            (
                f'{ask}"response_format":{{"type":"json_schema","json_schema":{{"schema":{schema}}}}}}}'.encode()
            ),
        )
    yield "number of 5000 digits", CHAT, (ask + '"logit_bias":{"' + "1" * 5000 + '":1}}').encode()
    yield "choices", CHAT, (ask + '"n":128,"user":"' + "u" * 400 * KIB + '"}').encode()
    turns = ",".join(['{"role":"user","content":"a"}'] * 2048)
    yield "choices of 2048 messages", CHAT, f'{{"n":128,"max_tokens":1,"messages":[{turns}]}}'.encode()


def length_delimited(number: int, data: bytes) -> bytes:
    """A protobuf field of bytes, a text or a message."""
    head, length = bytearray([number << 3 | 2]), len(data)
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    head.append(length)
    return bytes(head) + data


def grpc_requests() -> Iterator[tuple[str, str, bytes]]:
    """(name, method, message)."""
    generate = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
    infer = pb.ModelInferRequest.DESCRIPTOR.fields_by_name
    small = inference_pb2.GenerateRequest(text="a")
    small.stop.max_tokens = 1
    rest = small.SerializeToString()
    for size in (60 * KIB, AT_LIMIT, TOO_LONG):
        half = size // 2
        yield f"empty messages {size}", GENERATE, length_delimited(generate["chat"].number, b"\x0a\0" * half)
        yield f"samplings {size}", GENERATE, rest + length_delimited(generate["sampling"].number, b"") * half
        yield f"unknown {size}", GENERATE, rest + b"\x78\1" * half
        for name in ("text", "request_id", "session_id", "model"):
            yield f"{name} {size}", GENERATE, length_delimited(generate[name].number, b"a" * size)
        ids = length_delimited(1, b"\1" * size)
        yield f"ids {size}", GENERATE, length_delimited(generate["token_ids"].number, ids)
        tools = inference_pb2.GenerateRequest()
        tools.stop.max_tokens = 1
        tools.chat.messages.add(role="user", content="a")
        tools.chat.tools_json = "[" + "{}," * (size // 3) + "{}]"
        yield f"tools_json {size}", GENERATE, tools.SerializeToString()
        grammar = inference_pb2.GenerateRequest(text="a")
        grammar.stop.max_tokens = 1
        grammar.sampling.grammar.json_schema = '{"enum":[' + "[]," * (size // 3) + "[]]}"
        yield f"grammar {size}", GENERATE, grammar.SerializeToString()
        yield (
            f"biases {size}",
            GENERATE,
            rest + length_delimited(generate["sampling"].number, b"\x4a\0" * half),
        )
        for name in ("inputs", "outputs", "raw_input_contents", "parameters"):
            yield f"{name} {size}", INFER, length_delimited(infer[name].number, b"") * half
        yield f"id {size}", INFER, length_delimited(infer["id"].number, b"a" * size)
        raw = pb.ModelInferRequest()
        raw.inputs.add(name="input_ids", datatype="INT32", shape=[size // 4])
        raw.parameters["max_tokens"].int64_param = 1
        raw.raw_input_contents.append(b"\1\0\0\0" * (size // 4))
        yield f"raw ids {size}", INFER, raw.SerializeToString()
        strings = pb.ModelInferRequest()
        strings.inputs.add(name="stop", datatype="BYTES", shape=[size // 4])
        strings.raw_input_contents.append(bytes(size))
        yield f"raw strings {size}", INFER, strings.SerializeToString()
        typed = pb.ModelInferRequest()
        typed.inputs.add(name="input_ids", datatype="INT32", shape=[size])
        typed.parameters["max_tokens"].int64_param = 1
        typed.inputs[0].contents.int_contents.extend([1] * min(size, AT_LIMIT))
        yield f"typed ids {size}", INFER, typed.SerializeToString()
        settings = pb.ModelInferRequest()
        settings.parameters["text_input"].string_param = "a"
        settings.parameters["sampling_parameters"].string_param = '{"stop":[' + "[]," * (size // 3) + "[]]}"
        yield f"sampling_parameters {size}", INFER, settings.SerializeToString()


def raw_requests() -> Iterator[tuple[str, bytes]]:
    """(name, all bytes of a connection)."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    yield "headers", b"GET /health HTTP/1.1\r\n" + b"a:\r\n" * (MIB // 4)
    yield "pipelined", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 8192
    chunks = b"1\r\n \r\n" * (MIB // 6) + b"0\r\n\r\n"
    yield "chunks", head + b"transfer-encoding: chunked\r\n\r\n" + chunks
    yield "line ends", b"\r\n" * (MIB // 2)
    yield "long path", b"GET /" + b"a" * MIB + b" HTTP/1.1\r\n\r\n"


def send_raw(port: int, data: bytes) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
        answer = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(2**16):
                answer = answer or piece[:12]
        except OSError as error:
            return answer.decode() or type(error).__name__
    return answer.decode() or "closed"


def send_http(port: int, path: str, body: bytes) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return str(response.status)
    except ConnectionError as error:  # closed before all of a body that is too long was written
        return type(error).__name__
    finally:
        connection.close()


def send_grpc(
    channel: grpc.Channel, method: str, message: bytes, metadata: tuple[tuple[str, str], ...] = ()
) -> str:
    call = channel.unary_stream(method, request_serializer=as_they_are, response_deserializer=as_they_are)
    try:
        for _ in call(message, timeout=WAIT_S, metadata=metadata):
            pass
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def told(name: str, ended: str) -> None:
    print(json.dumps({"name": name, "ended": ended}), flush=True)


def main(http_port: int, grpc_port: int, only: set[str]) -> None:
    """Sends them one after the other: all, or those named in `only`."""

    def wanted(name: str) -> bool:
        return not only or name in only

    for name, path, body in http_requests():
        if wanted(f"http {name}"):
            told(f"http {name}", send_http(http_port, path, body))
    for name, data in raw_requests():
        if wanted(f"raw {name}"):
            told(f"raw {name}", send_raw(http_port, data))
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_metadata_size", 2**20),
    ]
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}", options=options) as channel:
        for name, method, message in grpc_requests():
            if wanted(f"grpc {name}"):
                told(f"grpc {name}", send_grpc(channel, method, message))
        metadata = tuple((f"x-{number}", "a" * 1000) for number in range(60))
        small = inference_pb2.GenerateRequest(text="a").SerializeToString()
        if wanted("metadata"):
            told("metadata", send_grpc(channel, GENERATE, small, metadata))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), set(sys.argv[3:]))
