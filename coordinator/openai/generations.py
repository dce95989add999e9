"""Runs the generations of one HTTP request side by side and answers from what they send: streamed, or at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.caller import Caller
from coordinator.front_door import FrontDoor
from coordinator.openai.answers import DONE_EVENT, ChoiceBody, ChoiceStream, Frame, usage_event
from coordinator.openai.exchange import Exchange
from coordinator.openai.usage import UsageSum
from coordinator.request_flow import Send
from splitserve.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Generations:
    """What one HTTP request asks for."""

    requests: Sequence[inference_pb2.GenerateRequest]
    """One for each choice, in order of their indices."""
    caller: Caller
    choices_per_prompt: int
    frame: Frame


async def stream(
    exchange: Exchange,
    door: FrontDoor,
    wanted: Generations,
    choices: Sequence[ChoiceStream],
    *,
    has_usage: bool,
) -> None:
    """Sends events as pieces come. Nothing is sent before the first piece, so an error until then has its status."""
    usage = UsageSum(wanted.choices_per_prompt)

    def sender(index: int) -> Send:
        choice, write = choices[index], exchange.event

        async def send(response: inference_pb2.GenerateResponse) -> None:
            if response.HasField("done"):
                usage.add(index, response.done)
                events = choice.done(response.done)
            else:
                events = choice.delta(response.delta)
            if events:
                await write(events)

        return send

    async with exchange.while_connected():
        await _run(door, wanted, [sender(index) for index in range(len(choices))])
        last = usage_event(wanted.frame, usage.shown()) if has_usage else b""
        await exchange.end_events(last + DONE_EVENT)


async def answer(
    exchange: Exchange, door: FrontDoor, wanted: Generations, choices: Sequence[ChoiceBody]
) -> None:
    """Sends one JSON object when all have ended."""
    usage = UsageSum(wanted.choices_per_prompt)
    shown: list[Mapping[str, Any]] = [{}] * len(choices)

    def sender(index: int) -> Send:
        choice = choices[index]

        async def send(response: inference_pb2.GenerateResponse) -> None:
            if response.HasField("done"):
                usage.add(index, response.done)
                shown[index] = choice.shown(response.done)
            else:
                choice.delta(response.delta)

        return send

    async with exchange.while_connected():
        await _run(door, wanted, [sender(index) for index in range(len(choices))])
        body = wanted.frame.head() | {"choices": shown, "usage": usage.shown()}
        await exchange.respond(200, json.dumps(body, ensure_ascii=False).encode())


async def _run(door: FrontDoor, wanted: Generations, senders: Sequence[Send]) -> None:
    """The first failure ends them all."""
    if len(senders) == 1:
        await door.generate(wanted.requests[0], wanted.caller, senders[0])
        return
    async with asyncio.TaskGroup() as group:
        for request, send in zip(wanted.requests, senders, strict=True):
            group.create_task(door.generate(request, wanted.caller, send))
