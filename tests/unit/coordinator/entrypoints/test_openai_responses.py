"""Rendered responses: chunks, whole bodies, logprobs, token counts, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.entrypoints.http.exchange import FieldNames, HttpError, error_response
from coordinator.entrypoints.openai.bodies import MAX_RESPONSE_VALUES, Extras, Frame, UsageSum, usage_event
from coordinator.entrypoints.openai.chat import ChatResponse, ChatStream
from coordinator.entrypoints.openai.completion import CompletionResponse, CompletionStream
from coordinator.entrypoints.openai.formats.answer import AnswerParser
from coordinator.entrypoints.openai.formats.table import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat
from coordinator.entrypoints.openai.logprobs import TokenTexts
from splitserve.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    SplitserveError,
    UnauthenticatedError,
    UnavailableError,
)
from splitserve.models.hf_tokenizer import ByteTokenizer
from splitserve.v1 import generation_pb2, inference_pb2

STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH
FRAME = Frame("id-1", "chat.completion.chunk", 7, 'm"ö')
WITH_TEXTS = Extras(texts=TokenTexts(ByteTokenizer()))


def delta(text: str, reason: Any = 0, logprobs: Any = ()) -> generation_pb2.OutputDelta:
    return generation_pb2.OutputDelta(text=text, finish_reason=reason, logprobs=logprobs)


def done(reason: Any = STOP, **fields: Any) -> inference_pb2.GenerationDone:
    return inference_pb2.GenerationDone(finish_reason=reason, **fields)


def whole(body: ChatResponse | CompletionResponse, reason: Any = STOP) -> dict[str, Any]:
    body.done(done(reason))
    return body.to_json()


def said(
    kind: type[ChatResponse | CompletionResponse],
    *deltas: generation_pb2.OutputDelta,
    reason: Any = STOP,
    **options: Any,
) -> dict[str, Any]:
    """The choice that a response makes of these deltas."""
    body = kind(FRAME, 0, **options)
    for one in deltas:
        body.delta(one)
    return whole(body, reason)


def streamed(
    kind: type[ChatStream | CompletionStream], *deltas: generation_pb2.OutputDelta, **options: Any
) -> list[dict[str, Any]]:
    """The choices in the events of a stream of these deltas."""
    chunks = kind(FRAME, 0, **options)
    return [event["choices"][0] for event in events(b"".join(map(chunks.delta, deltas)))]


def events(data: bytes) -> list[dict[str, Any]]:
    shown = data.decode().split("\n\n")
    assert shown.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in shown)
    return [json.loads(event.removeprefix("data: ")) for event in shown]


def token(token_id: int, logprob: float, *top: tuple[int, float]) -> generation_pb2.TokenLogprob:
    others = [generation_pb2.TopLogprob(token_id=i, logprob=p) for i, p in top]
    return generation_pb2.TokenLogprob(token_id=token_id, logprob=logprob, top=others)


def test_a_streamed_chat_answer() -> None:
    chunks = ChatStream(FRAME, 3)
    shown = events(chunks.delta(delta("Hi")) + chunks.delta(delta("")) + chunks.delta(delta(" you", STOP)))
    assert chunks.done(done()) == b""
    assert [event["choices"][0]["delta"] for event in shown] == [
        {"role": "assistant", "content": ""},
        {"content": "Hi"},
        {"content": " you"},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in shown] == [None, None, None, "stop"]
    for event in shown:
        assert (event["id"], event["object"], event["created"], event["model"]) == (
            "id-1",
            "chat.completion.chunk",
            7,
            'm"ö',
        )
        assert event["choices"][0]["index"] == 3
        assert event["choices"][0]["logprobs"] is None
        assert "usage" not in event


def test_an_end_that_only_done_carries() -> None:
    chunks = ChatStream(FRAME, 0, extras=Extras(has_usage=True))
    chunks.delta(delta("Hi"))
    (last,) = events(chunks.done(done(LENGTH)))
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["usage"] is None


@given(st.text())
def test_any_text_survives(text: str) -> None:
    chat, plain = ChatStream(FRAME, 0, extras=Extras(has_usage=True)), CompletionStream(FRAME, 0)
    text = text.encode("utf-8", "replace").decode()
    chat.delta(delta("x"))
    if text:
        assert events(chat.delta(delta(text)))[0]["choices"][0]["delta"] == {"content": text}
        assert events(plain.delta(delta(text)))[0]["choices"][0]["text"] == text


def calls_parser() -> AnswerParser:
    return AnswerFormat(TOOL_FORMATS["hermes"]).parser({}, must_call=False)


def reasoning_parser() -> AnswerParser:
    return AnswerFormat(None, REASONING_FORMATS["think"], is_reasoning=True, end_ids=(7, 8)).parser(
        {}, must_call=False
    )


def token_delta(text: str, *token_ids: int, reason: Any = 0) -> generation_pb2.OutputDelta:
    return generation_pb2.OutputDelta(text=text, token_ids=token_ids, finish_reason=reason)


def test_reasoning_apart_from_content() -> None:
    deltas = [
        token_delta("I thi", 1, 2),
        token_delta("nk</thi", 3, 7),
        token_delta("nk>\n\nYes", 8, 9, 1, reason=STOP),
    ]
    body = ChatResponse(FRAME, 0, parser=reasoning_parser())
    for one in deltas:
        body.delta(one)
    shown = whole(body)
    assert (shown["message"]["content"], shown["finish_reason"]) == ("Yes", "stop")
    assert shown["message"]["reasoning_content"] == shown["message"]["reasoning"] == "I think"
    assert body.reasoning_tokens == 5
    chunks = ChatStream(FRAME, 0, parser=reasoning_parser())
    streamed = [one["choices"][0]["delta"] for one in events(b"".join(map(chunks.delta, deltas)))]
    assert "".join(one.get("reasoning_content", "") for one in streamed) == "I think"
    assert "".join(one.get("reasoning", "") for one in streamed) == "I think"
    assert "".join(one.get("content", "") for one in streamed) == "Yes"
    assert chunks.reasoning_tokens == 5
    plain = ChatStream(FRAME, 0, parser=calls_parser())
    assert plain.reasoning_tokens is None


def test_an_answer_that_ends_in_its_reasoning() -> None:
    parser = reasoning_parser()
    cut = token_delta("I think</thi", 1, 2, 3, 4, 7, reason=LENGTH)
    shown = said(ChatResponse, cut, reason=LENGTH, parser=parser)
    assert (shown["message"]["content"], shown["message"]["reasoning_content"]) == (None, "I think")
    assert (shown["finish_reason"], parser.reasoning_tokens) == ("length", 5)


def test_reasoning_tokens_are_counted_for_all_choices() -> None:
    usage = UsageSum(2)
    assert "completion_tokens_details" not in usage.to_json()
    usage.add(0, done(), 4)
    usage.add(1, done(), 3)
    assert usage.to_json()["completion_tokens_details"] == {"reasoning_tokens": 7}


def test_streamed_calls() -> None:
    text = 'Hm. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    shown = streamed(ChatStream, *map(delta, text), delta("", STOP), parser=calls_parser())
    assert shown[-1]["finish_reason"] == "tool_calls"
    deltas = [choice["delta"] for choice in shown]
    assert "".join(one.get("content", "") for one in deltas) == "Hm."
    calls = [one["tool_calls"][0] for one in deltas if "tool_calls" in one]
    assert calls[0]["type"] == "function"
    assert calls[0]["function"] == {"name": "f", "arguments": ""}
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    assert all(call["index"] == 0 for call in calls)


def test_whole_calls() -> None:
    call = delta('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', STOP)
    shown = said(ChatResponse, call, parser=calls_parser())
    assert shown["finish_reason"] == "tool_calls"
    assert shown["message"]["content"] is None
    assert shown["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    cut = delta('<tool_call>{"name": "f", "arguments": {"a"', LENGTH)
    assert said(ChatResponse, cut, reason=LENGTH, parser=calls_parser())["finish_reason"] == "length"


LOGPROBS = [token(0x48, -0.5, (0x48, -0.5), (0x49, -1.0)), token(0xC3, float("-inf"))]


def test_log_probabilities_of_chat() -> None:
    expected = [
        {
            "token": "H",
            "logprob": -0.5,
            "bytes": [0x48],
            "top_logprobs": [
                {"token": "H", "logprob": -0.5, "bytes": [0x48]},
                {"token": "I", "logprob": -1.0, "bytes": [0x49]},
            ],
        },
        {"token": "bytes:\\xc3", "logprob": -9999.0, "bytes": [0xC3], "top_logprobs": []},
    ]
    shown = said(ChatResponse, delta("H", STOP, LOGPROBS), extras=WITH_TEXTS)
    assert shown["logprobs"] == {"content": expected, "refusal": None}
    deltas = delta("", 0, LOGPROBS[:1]), delta("H", STOP, LOGPROBS[1:])
    parts = [choice["logprobs"] or {} for choice in streamed(ChatStream, *deltas, extras=WITH_TEXTS)]
    assert [entry for part in parts for entry in part.get("content", [])] == expected


def test_log_probabilities_of_completions() -> None:
    deltas = delta("H", 0, LOGPROBS[:1]), delta("", STOP, LOGPROBS[1:])
    assert said(CompletionResponse, *deltas, extras=WITH_TEXTS)["logprobs"] == {
        "tokens": ["H", "bytes:\\xc3"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"H": -0.5, "I": -1.0}, {"bytes:\\xc3": -9999.0}],
        "text_offset": [0, 1],
    }
    assert offsets(*deltas) == [0, 1]


def offsets(*deltas: generation_pb2.OutputDelta) -> list[int]:
    """Those of the tokens of a stream."""
    parts = [choice["logprobs"] or {} for choice in streamed(CompletionStream, *deltas, extras=WITH_TEXTS)]
    return [offset for part in parts for offset in part.get("text_offset", [])]


def test_offsets_are_those_of_the_text_and_parts_of_characters_are_told_apart() -> None:
    text = "🐱é x🐱"
    parts = [token(byte, -1.0, (0xF0, -2.0), (0x9F, -3.0)) for byte in text.encode()]
    expected = [0, 0, 0, 0, 1, 1, 2, 3, 4, 4, 4, 4]
    shown = said(CompletionResponse, delta(text, STOP, parts), extras=WITH_TEXTS)["logprobs"]
    assert shown["text_offset"] == expected
    assert shown["tokens"][:5] == [f"bytes:\\x{byte:02x}" for byte in (0xF0, 0x9F, 0x90, 0xB1, 0xC3)]
    assert shown["top_logprobs"][2] == {
        "bytes:\\x90": -1.0,
        "bytes:\\xf0": -2.0,
        "bytes:\\x9f": -3.0,
    }
    first = [delta("", 0, [one]) for one in parts[:-1]]
    assert offsets(*first, delta(text, STOP, parts[-1:])) == expected


def test_offsets_end_where_a_stop_string_has_cut_the_text() -> None:
    tokens = [token(byte, -1.0) for byte in b"ab END"]
    shown = said(CompletionResponse, delta("ab", STOP, tokens), extras=WITH_TEXTS)
    assert shown["logprobs"]["text_offset"] == [0, 1, 2, 2, 2, 2]
    assert offsets(delta("a", 0, tokens[:1]), delta("b", STOP, tokens[1:])) == [0, 1, 2, 2, 2, 2]


def test_special_tokens_take_no_place_in_the_text() -> None:
    answer = delta("ab", STOP, [token(97, -1.0), token(256, -1.0), token(98, -1.0)])
    extras = Extras(texts=TokenTexts(SpecialTokenizer()))
    shown = said(CompletionResponse, answer, extras=extras)["logprobs"]
    assert (shown["tokens"], shown["text_offset"]) == (["a", "<s>", "b"], [0, 1, 1])


class SpecialTokenizer(ByteTokenizer):
    def token_bytes(self, token_id: int) -> bytes:
        return b"<s>" if token_id == self.EOS else super().token_bytes(token_id)


def test_completions_with_their_prompt() -> None:
    assert said(CompletionResponse, delta("upon", STOP), echo="Once ") == {
        "index": 0,
        "text": "Once upon",
        "logprobs": None,
        "finish_reason": "stop",
    }
    shown = streamed(CompletionStream, delta("upon", STOP), echo="Once ")
    assert [choice["text"] for choice in shown] == ["Once ", "upon", ""]


PROMPT = generation_pb2.PromptLogprobs(
    token_ids=[256, 97, 256, 98],
    logprobs=[-0.5, float("-inf"), -2.0],
    ranks=[1, 9, 3],
    top_token_ids=[97, 99, 99, 97, 97, 98],
    top_logprobs=[-0.5, -1.0, -0.25, -3.0, -0.5, -2.0],
)


def test_log_probabilities_of_a_prompt_that_is_echoed() -> None:
    """The tokenizer has added the first special token, the prompt spells the second one."""
    answer = [token(99, -1.5, (99, -1.5))]
    body = CompletionResponse(FRAME, 0, echo="a<s>b", extras=Extras(texts=TokenTexts(SpecialTokenizer())))
    body.delta(generation_pb2.OutputDelta(text="c", logprobs=answer, prompt_logprobs=PROMPT))
    assert whole(body, LENGTH)["logprobs"] == {
        "tokens": ["<s>", "a", "<s>", "b", "c"],
        "token_logprobs": [None, -0.5, -9999.0, -2.0, -1.5],
        "top_logprobs": [
            None,
            {"a": -0.5, "c": -1.0},
            {"<s>": -9999.0, "c": -0.25, "a": -3.0},
            {"b": -2.0, "a": -0.5},
            {"c": -1.5},
        ],
        "text_offset": [0, 0, 1, 4, 5],
    }


def test_log_probabilities_of_a_prompt_as_vllm_gives_them() -> None:
    texts = TokenTexts(SpecialTokenizer())
    completion = CompletionResponse(FRAME, 0, extras=Extras(texts=texts, prompt_texts=texts))
    chat = ChatResponse(FRAME, 0, extras=Extras(prompt_texts=texts), parser=calls_parser())
    for body in (completion, chat):
        body.delta(generation_pb2.OutputDelta(finish_reason=LENGTH, prompt_logprobs=PROMPT))
    shown = whole(completion, LENGTH)
    sibling = CompletionResponse(FRAME, 1, extras=Extras(prompt_texts=texts))
    sibling.share_prompt(completion)
    assert whole(sibling, LENGTH)["prompt_logprobs"] == shown["prompt_logprobs"]
    assert chat.beside_choices() == {"prompt_logprobs": shown["prompt_logprobs"]}
    assert (shown["text"], shown["logprobs"]["tokens"], shown["finish_reason"]) == ("", [], "length")
    first, *others = shown["prompt_logprobs"]
    assert first is None
    assert others[1] == {
        "256": {"logprob": -9999.0, "rank": 9, "decoded_token": "<s>"},
        "99": {"logprob": -0.25, "rank": 1, "decoded_token": "c"},
        "97": {"logprob": -3.0, "rank": 2, "decoded_token": "a"},
    }
    assert [list(entry) for entry in others] == [["97", "99"], ["256", "99", "97"], ["98", "97"]]


def test_log_probabilities_of_prompts_are_bounded() -> None:
    usage = UsageSum(2)  # both choices show the prompt's
    half = generation_pb2.PromptLogprobs(logprobs=[0.0] * (MAX_RESPONSE_VALUES // 2))
    usage.add_prompt_logprobs(half)
    with pytest.raises(InvalidArgumentError, match=str(MAX_RESPONSE_VALUES)):
        usage.add_prompt_logprobs(PROMPT)


EXTRAS = Extras(has_usage=True, counts_continuously=True, token_ids=True)
STARTED = inference_pb2.GenerationStart(prompt_tokens=2, prompt_token_ids=[7, 8])


@pytest.mark.parametrize("kind", [ChatStream, CompletionStream])
def test_token_ids_and_counts_in_a_stream(kind: type[ChatStream | CompletionStream]) -> None:
    chunks = kind(FRAME, 0, extras=EXTRAS)
    chunks.begin(STARTED)
    deltas = [token_delta("", 1), token_delta("Hi", 2, 3), token_delta("", reason=STOP)]
    shown = events(b"".join(map(chunks.delta, deltas)))
    place = shown[0] if kind is ChatStream else shown[0]["choices"][0]
    assert place["prompt_token_ids"] == [7, 8]
    assert json.dumps(shown).count("prompt_token_ids") == 1
    ids = [event["choices"][0].get("token_ids") for event in shown]
    assert [one for one in ids if one] == [[1], [2, 3]]
    assert [event["usage"]["completion_tokens"] for event in shown][-3:] == [1, 3, 3]
    assert {event["usage"]["prompt_tokens"] for event in shown} == {2}
    assert shown[-1]["usage"]["total_tokens"] == 5


def test_token_ids_of_whole_responses() -> None:
    chat, plain = (
        ChatResponse(FRAME, 0, extras=EXTRAS, parser=calls_parser()),
        CompletionResponse(FRAME, 0, extras=EXTRAS),
    )
    for body in (chat, plain):
        body.begin(STARTED)
        body.delta(token_delta("a", 1, 2))
        body.delta(token_delta("b", 3, reason=STOP))
        assert whole(body)["token_ids"] == [1, 2, 3]
    assert chat.beside_choices() == {"prompt_token_ids": [7, 8]}
    assert whole(plain)["prompt_token_ids"] == [7, 8]
    assert plain.beside_choices() == {}


def test_tokens_named_by_their_ids() -> None:
    for keep_special, echo in ((True, None), (False, "<s>")):  # the prompt spells it
        texts = TokenTexts(SpecialTokenizer(), as_ids=True, keep_special=keep_special)
        body = CompletionResponse(FRAME, 0, extras=Extras(texts=texts), echo=echo)
        body.delta(delta("<s>b", STOP, [token(256, -1.0), token(98, -1.0)]))
        shown = whole(body)["logprobs"]
        assert (shown["tokens"], shown["text_offset"]) == (["token_id:256", "token_id:98"], [0, 3])
        assert body.mean_logprob == -1.0


def test_token_counts() -> None:
    usage = UsageSum(2)
    local = inference_pb2.ServedBy(decode_worker="d")
    shipped = inference_pb2.ServedBy(decode_worker="d", transport="nixl")
    for index, served in enumerate((shipped, shipped, local)):
        cached = 0 if served is shipped else 8  # of one that decode computed itself
        counts = inference_pb2.Usage(
            prompt_tokens=10 + index, completion_tokens=3, cached_prompt_tokens=cached, decode_cached_tokens=8
        )
        usage.add(index, done(usage=counts, served_by=served))
    shown = {
        "prompt_tokens": 22,
        "completion_tokens": 9,
        "total_tokens": 31,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    assert usage.to_json() == shown
    (event,) = events(usage_event(FRAME, usage.to_json()))
    assert (event["choices"], event["usage"]) == ([], shown)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidArgumentError("x"), 400, "invalid_request_error", "invalid_value"),
        (
            InvalidArgumentError("x", reason="PROMPT_TOO_LONG"),
            400,
            "invalid_request_error",
            "context_length_exceeded",
        ),
        (UnauthenticatedError("x"), 401, "authentication_error", "invalid_api_key"),
        (PermissionDeniedError("x", reason="ADMIN_ONLY"), 403, "permission_error", "admin_only"),
        (NotFoundError("x", reason="MODEL_NOT_FOUND"), 404, "invalid_request_error", "model_not_found"),
        (HttpError(405, "x", "METHOD_NOT_ALLOWED"), 405, "invalid_request_error", "method_not_allowed"),
        (ResourceExhaustedError("x"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (UnavailableError("x", reason="NO_WORKER"), 503, "server_error", "no_worker"),
        (FailedPreconditionError("x"), 503, "server_error", "failed_precondition"),
        (DeadlineExceededError("x"), 504, "server_error", "deadline_exceeded"),
        (SplitserveError("x"), 500, "server_error", "internal"),
    ],
)
def test_errors(error: SplitserveError, status: int, kind: str, code: str) -> None:
    answer = error_response(error)
    assert answer.status == status
    shown = {"message": "x", "type": kind, "param": None, "code": code}
    assert json.loads(answer.body) == {"error": shown}


def test_errors_name_the_clients_fields() -> None:
    names = FieldNames({"prompt.chat": "messages"})
    error = InvalidArgumentError("sampling.top_p must be above 0", field="sampling.top_p")
    shown = json.loads(error_response(error, names).body)["error"]
    assert (shown["message"], shown["param"]) == ("top_p must be above 0", "top_p")
    error = InvalidArgumentError("prompt.chat has 9 tokens", field="prompt.chat")
    shown = json.loads(error_response(error, names).body)["error"]
    assert (shown["message"], shown["param"]) == ("messages has 9 tokens", "messages")


def test_retry_hints() -> None:
    assert error_response(ResourceExhaustedError("x")).headers == []
    headers = dict(error_response(ResourceExhaustedError("x", retry_after_s=0.25)).headers)
    assert headers == {b"retry-after": b"1", b"retry-after-ms": b"250"}
    assert dict(error_response(UnavailableError("x")).headers)[b"retry-after"] == b"1"
    assert dict(error_response(UnavailableError("x", retry_after_s=2.5)).headers)[b"retry-after"] == b"3"


def test_internal_errors_are_not_disclosed() -> None:
    try:
        raise ZeroDivisionError("secret")
    except ZeroDivisionError as error:
        answer = error_response(error)
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert b"incident" in answer.body


def test_the_first_known_error_of_several() -> None:
    group = ExceptionGroup("two", [ExceptionGroup("one", [NotFoundError("gone")]), ValueError("x")])
    assert error_response(group).status == 404
