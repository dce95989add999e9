"""`splitserve generate`: streams one answer to standard output."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.cli import options
from launcher.cli.output import write, write_json
from splitserve.errors import InvalidArgumentError, NotFoundError, UnavailableError
from splitserve.runtime.bounded_file import read_named_text

if TYPE_CHECKING:
    from splitserve.client import AsyncClient, Completion, GenerateOptions, Prompt
    from splitserve.v1 import inference_pb2


PromptText = Annotated[str, typer.Argument(help="What to answer; '-' reads it from standard input.")]
ModelName = Annotated[str, typer.Option(help="Model name. Default: the only one served.")]
MaxTokens = Annotated[int | None, typer.Option(help="Output tokens at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; up to 100.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one's probability.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling reproducible.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")]
JsonSchema = Annotated[
    str | None, typer.Option(metavar="FILE|TEXT", help="Answer with JSON of this JSON Schema.")
]
JsonObject = Annotated[bool, typer.Option("--json-object", help="Answer with a JSON object.")]
Regex = Annotated[str | None, typer.Option(help="Answer with what this expression matches.")]
Lark = Annotated[str | None, typer.Option(metavar="FILE|TEXT", help="Answer within this Lark grammar.")]
System = Annotated[str | None, typer.Option(help="System message before the prompt.")]
Raw = Annotated[bool, typer.Option("--raw", help="Send the text as it is, not as a chat turn.")]
TokenIds = Annotated[
    bool, typer.Option("--token-ids", help="PROMPT is token ids, separated by commas or blanks.")
]
Timings = Annotated[bool, typer.Option("--timings", help="Show where the time went, on stderr.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="Time for the whole answer.")]


def generate(
    prompt: PromptText,
    target: options.Target = options.DEFAULT_TARGET,
    model: ModelName = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = None,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    json_schema: JsonSchema = None,
    json_object: JsonObject = False,
    regex: Regex = None,
    lark: Lark = None,
    system: System = None,
    raw: Raw = False,
    token_ids: TokenIds = False,
    as_json: options.AsJson = False,
    timings: Timings = False,
    timeout: Timeout = options.DEFAULT_TIMEOUT_S,
    api_key: options.ApiKey = None,
    tls: options.TlsClient = None,
) -> None:
    """Stream one answer. The prompt is a chat turn where the model has a chat template."""
    chosen: GenerateOptions = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or (),
        "json_object": json_object,
    }
    if json_schema is not None:
        chosen["json_schema"] = _file_or_text(json_schema, "json-schema")
    if regex is not None:
        chosen["regex"] = regex
    if lark is not None:
        chosen["lark"] = _file_or_text(lark, "lark")
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidArgumentError("prompt: standard input is not UTF-8 text", field="prompt") from None

    def prompt_for(model: inference_pb2.ModelInfo) -> Prompt:
        return _prompt(prompt, model, system=system, raw=raw, token_ids=token_ids)

    client = options.client(target, api_key, tls, timeout)
    completion = asyncio.run(_ask(client, prompt_for, chosen, stream=not as_json))
    if as_json:
        # Without the log-probabilities, which no option requests.
        write_json({name: value for name, value in asdict(completion).items() if name != "logprobs"})
    if timings:
        _show_timings(completion)
    if completion.finish_reason == "abort":
        raise UnavailableError("the server gave the answer up before its end", reason="ABORTED")


def _file_or_text(given: str, option: str) -> str:
    """The text itself, or the content of the file of that name. A text with a brace or a colon is no file name."""
    if "{" in given or ":" in given:
        return given
    return read_named_text(Path(given), option)


async def _ask(
    client: AsyncClient,
    prompt_for: Callable[[inference_pb2.ModelInfo], Prompt],
    chosen: GenerateOptions,
    *,
    stream: bool,
) -> Completion:
    """The whole answer; `stream` writes its text as it comes."""
    from splitserve.client import Completion
    from splitserve.client.request_builder import build_request

    # Report invalid values even when no server runs.
    build_request([0], chosen)
    shown = False
    async with client:
        model = await _find_model(client, chosen["model"])
        chosen = {**chosen, "model": model.name}
        try:
            async with aclosing(client.stream(prompt_for(model), **chosen)) as items:
                async for item in items:
                    if isinstance(item, Completion):
                        return item
                    if stream:
                        write(item.text)
                        shown = True
        finally:
            # The shell's prompt, or an error, starts on a new line.
            if shown:
                write("\n")
    raise UnavailableError("the stream ended early", reason="STREAM_BROKEN")


async def _find_model(client: AsyncClient, name: str) -> inference_pb2.ModelInfo:
    """Resolves the model: whether it has a chat template decides how the prompt is sent."""
    models = await client.models()
    known = {model.name: model for model in models}
    if name in known:
        return known[name]
    if not known:
        raise UnavailableError(f"{client.target} serves no model yet (splitserve status)", reason="NO_WORKER")
    if name:
        message = f"model {name!r} is not served at {client.target}; served: {', '.join(known)}"
        raise NotFoundError(message, reason="MODEL_NOT_FOUND", field="model")
    if len(known) > 1:
        message = f"model must be named with --model: one of {', '.join(known)}"
        raise InvalidArgumentError(message, field="model")
    return models[0]


def _prompt(
    text: str, model: inference_pb2.ModelInfo, *, system: str | None, raw: bool, token_ids: bool
) -> Prompt:
    from splitserve.client import ChatMessage

    if token_ids:
        words = re.split(r"[\s,]+", text.strip())
        if not all(word.isdecimal() for word in words):
            message = "prompt must be token ids, separated by commas or blanks, with --token-ids"
            raise InvalidArgumentError(message, field="prompt")
        return [int(word) for word in words]
    if raw or not model.has_chat_template:
        if system is not None:
            message = "system must not be given for a raw prompt or a model without a chat template"
            raise InvalidArgumentError(message, field="system")
        return text
    if not text.strip():
        raise InvalidArgumentError("prompt must not be empty", field="prompt")
    turns = [] if system is None else [ChatMessage("system", system)]
    return [*turns, ChatMessage("user", text)]


def _show_timings(completion: Completion) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    times, usage, served = completion.timings, completion.usage, completion.served_by
    written = f"{decimal(times.transfer_bytes)} over {served.transport}"
    table = Table(title=f"request {completion.request_id}", title_justify="left")
    table.add_column("phase")
    table.add_column("ms", justify="right")
    table.add_column("what")
    rows: list[tuple[str, float, Any]] = [
        ("queue", times.queue_ms, f"of it {times.reserve_ms:.1f} ms for the decode reservation"),
        ("prefill", times.prefill_ms, f"{usage.prompt_tokens} tokens, {usage.cached_prompt_tokens} cached"),
        ("transfer", times.transfer_ms, written if times.transfer_bytes else "nothing shipped"),
        ("decode admit", times.decode_admit_ms, f"{usage.decode_cached_tokens} tokens held already"),
        ("TTFT", times.ttft_ms, f"on {served.prefill_worker or served.decode_worker}"),
        ("TPOT", times.tpot_ms, f"{usage.completion_tokens} tokens, on {served.decode_worker or 'none'}"),
    ]
    for phase, milliseconds, what in rows:
        table.add_row(phase, f"{milliseconds:.1f}", what)
    Console(stderr=True).print(table)
