"""gpt-oss: messages on channels, read by OpenAI's library, which is the extra `harmony`
(https://github.com/openai/harmony/blob/main/docs/format.md).

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

The library reads tokens, not text.
"""

from __future__ import annotations

import os
import tempfile
from base64 import b64encode
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from coordinator.entrypoints.openai.formats.answer import AnswerParser
from coordinator.entrypoints.openai.formats.reader import Reader, Steps
from coordinator.entrypoints.openai.formats.tool_format import NAME, CallForm, ReasoningFormat, ToolFormat
from coordinator.entrypoints.openai.formats.writer import Part, Writer
from splitserve.errors import InvalidArgumentError, MissingExtraError
from splitserve.models.sources import cache_folder
from splitserve.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from openai_harmony import HarmonyEncoding, StreamableParser

ORDINARY_TOKENS = 199_998
"""Number of tokens before the special ones."""
START, MESSAGE, ENDS = 200_006, 200_008, frozenset({200_002, 200_007, 200_012})
"""The tokens <|start|> and <|message|>, and those that end messages: <|return|>, <|end|>, <|call|>."""
FOLDER = "TIKTOKEN_ENCODINGS_BASE"
"""The variable that tells the library where its vocabulary is. Without it the library downloads the file."""
FILE = "o200k_base.tiktoken"
FUNCTIONS = "functions."
"""Begins the recipient of a call."""
FINAL = "<|channel|>final<|message|>"


def _unread(reader: Reader, writer: Writer) -> Steps[bool]:
    """HarmonyParser reads the calls."""
    yield from ()
    return False


_CALL = f"<|channel|>commentary to={FUNCTIONS}"
HARMONY = ToolFormat(
    name="harmony",
    markers=("<|channel|>", "<|message|>", "<|start|>"),
    opens=(_CALL,),
    read=_unread,
    form=CallForm(head=f"{_CALL}{NAME} <|constrain|>json<|message|>", tail="", between=None),
)
HARMONY_REASONING = ReasoningFormat(
    "harmony", "<|channel|>analysis<|message|>", ("<|end|><|start|>assistant",), content=FINAL
)


@lru_cache(maxsize=1)
def _encoding() -> HarmonyEncoding:
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def encoding_of(tokenizer: Tokenizer) -> HarmonyEncoding:
    """The library's vocabulary, which is that of gpt-oss: made from the model's own tokenizer, not downloaded. Takes
    1 s, and 54 MB of memory, once in a process.

    Raises MissingExtraError without the library, InvalidArgumentError for another vocabulary.
    """
    try:
        if FOLDER in os.environ:
            return _encoding()
        folder = cache_folder() / "harmony"
        if not (folder / FILE).is_file():
            _write_vocabulary(tokenizer, folder)
        os.environ[FOLDER] = str(folder)
        try:
            return _encoding()
        except BaseException:
            # Not the vocabulary that the library knows, by its hash.
            os.environ.pop(FOLDER)
            (folder / FILE).unlink(missing_ok=True)
            raise
    except ImportError as error:
        raise MissingExtraError("reading this model's answers", "harmony", error) from None
    except Exception as error:  # the library's own class is not known without it
        message = f"format harmony: openai-harmony cannot load gpt-oss's vocabulary: {error}"
        raise InvalidArgumentError(message, reason="HARMONY_VOCABULARY", field="model") from None


def _write_vocabulary(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokens in the form of tiktoken: base64 and rank, a line each."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=folder)
    with os.fdopen(descriptor, "wb") as file:
        for token_id in range(ORDINARY_TOKENS):
            file.write(b"%b %d\n" % (b64encode(tokenizer.token_bytes(token_id)), token_id))
    Path(name).rename(folder / FILE)


class HarmonyParser(AnswerParser):
    """Reads one answer of gpt-oss by its tokens. A message whose header is malformed is left out, as is one to a tool
    that is no function.

    What is read waits until the answer's text has got as far: the text ends before a stop string, the tokens after it.
    """

    def __init__(
        self, writer: Writer, encoding: HarmonyEncoding, answer: tuple[bool, bool], *, continues: bool = False
    ) -> None:
        """`answer`: whether it has calls, and reasoning; what it has not is text. `continues`: the prompt ends within
        the answer's text."""
        super().__init__(writer)
        self._encoding = encoding
        self._has_calls, self._has_reasoning = answer
        self._parser = self._started()
        for token_id in encoding.encode(FINAL, allowed_special="all") if continues else ():
            self._parser.process(token_id)
        self._kind = "text" if continues else ""
        """Of the message that is read: "text", "reasoning", "arguments" of a call, or "" for none."""
        self._is_empty = True
        """Whether the message has no content so far."""
        self._is_lost = False
        """Whether tokens are left out until a message starts."""
        self._kinds: set[str] = set()
        """Of the messages so far."""
        self._header = self._count = 0
        """Tokens of this message's header, and of the reasoning."""
        self._read_length = self._text_length = 0
        self._last = ""
        """Kind of what was written last."""
        self._waiting: deque[tuple[int, str, str]] = deque()
        """Pieces with the length of the text before them, and their kind; "call" is the name of one."""

    @property
    @override
    def reasoning_tokens(self) -> int | None:
        return self._count if self._has_reasoning else None

    @override
    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Part]:
        for token_id in token_ids:
            self._process(token_id)
        self._text_length += len(text)
        self._write(self._text_length)
        return self._taken()

    @override
    def close(self, *, is_cut: bool = False) -> list[Part]:
        # A message that goes on where the answer ends by itself: it ends with a stop string.
        if is_cut or not self._kind:
            self._write(self._read_length)
        if self._last == "reasoning":
            self._writer.trim()
        self._writer.end(is_whole=True)
        return self._taken()

    def _started(self, role: str | None = "assistant") -> StreamableParser:
        """A parser behind the start of a message of this role, or before one."""
        from openai_harmony import Role, StreamableParser

        return StreamableParser(self._encoding, Role(role) if role else None, strict=False)

    def _process(self, token_id: int) -> None:
        self._is_lost = self._is_lost and token_id != START
        piece = None
        if not self._is_lost:
            try:
                piece = self._parser.process(token_id).last_content_delta
            except Exception:  # the library's own class is not known without it
                self._parser, self._is_lost, self._kind = self._started(role=None), True, ""
        self._header += 1
        # 1. Within a message.
        if self._kind and token_id not in ENDS:
            if piece:
                self._waiting.append((self._read_length, self._kind, piece))
                self._read_length += len(piece)
                self._is_empty = False
            self._count += self._kind == "reasoning"
            return
        # 2. Between messages, or in a header.
        before, self._read_length = (
            self._read_length,
            self._read_length + len(self._encoding.decode([token_id])),
        )
        # 3. A message begins.
        if token_id == MESSAGE and not self._is_lost:
            self._begin(self._parser.current_channel, self._parser.current_recipient or "")
        # 4. A message ends.
        elif token_id in ENDS:
            self._count += self._kind == "reasoning"
            if self._kind == "arguments" and self._is_empty:
                self._waiting.append((before, "arguments", "{}"))
            self._kind, self._header = "", 0

    def _begin(self, channel: str | None, recipient: str) -> None:
        """Begins a message of this header."""
        self._is_empty = True
        function = recipient.removeprefix(FUNCTIONS)
        if function != recipient and self._has_calls:
            self._kind = "arguments"
            self._waiting.append((self._read_length, "call", function))
        elif function == recipient and recipient:
            self._kind = "other"
        else:
            self._kind = "reasoning" if channel == "analysis" and self._has_reasoning else "text"
            if self._kind in self._kinds:
                self._waiting.append((self._read_length, self._kind, "\n"))
            self._count += self._header if self._kind == "reasoning" else 0
        self._kinds.add(self._kind)

    def _write(self, length: int) -> None:
        """Writes what lies before this length of the text."""
        writer, waiting = self._writer, self._waiting
        while waiting and waiting[0][0] < length:
            at, kind, piece = waiting.popleft()
            if kind == "call":
                writer.call(piece)
                continue
            left = length - at
            if len(piece) > left:
                waiting.appendleft((length, kind, piece[left:]))
            if kind == "reasoning":
                if not self._last:
                    writer.trim()
                writer.reasoning(piece[:left])
            elif kind == "arguments":
                writer.arguments(piece[:left])
            elif kind == "text":
                if self._last == "reasoning":
                    writer.trim()
                writer.text(piece[:left])
            self._last = kind
