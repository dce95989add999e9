"""Both tokenizer implementations, and loading by name."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from splitserve.errors import ConfigError, InvalidArgumentError, NotFoundError, UnavailableError
from splitserve.models import chat_template
from splitserve.models.hf_tokenizer import ByteTokenizer, HfTokenizer, entry_bytes, load_tokenizer
from splitserve.models.sources import ModelSource
from splitserve.models.tokenizer import Tokenizer, TooManyTokensError, Turn
from splitserve.models.tokenizer_cache import CONVERSION, converted_tokenizer
from splitserve.models.tokenizer_conversion import UnusableError, write_plain
from splitserve.models.tokenizer_files import read_tokenizer
from tests.support.engine.tiny_models import CHAT_TEMPLATE, EOS, VOCABULARY, tiny_tokenizer
from tests.support.waiting import LEAST_TIMEOUT_S

TEXTS = ["", "hello", "Grüße, 世界 🎉", "a\nb\tc", " leading and trailing  "]
TURNS = [Turn("system", "Be brief."), Turn("user", "Hi 👋")]


@pytest.fixture(params=["bytes", "tokenizers"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else saved(tmp_path)


def saved(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> HfTokenizer:
    """The tiny tokenizer, loaded from a model's folder."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return HfTokenizer(read_tokenizer(folder))


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert all(0 <= token < tokenizer.vocabulary_size for token in tokens)
    assert tokenizer.decode(tokens) == text


def test_special_tokens_and_broken_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocabulary_size == VOCABULARY
    assert tokenizer.decode([*tokenizer.encode("x"), EOS]) == "x"
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


def test_chat_is_rendered_with_a_generation_prompt(tokenizer: Tokenizer) -> None:
    assert tokenizer.has_chat_template
    text = tokenizer.decode(tokenizer.render_chat(TURNS))
    assert text == "system: Be brief.\nuser: Hi 👋\nassistant: "


class Shouting(PreTrainedTokenizerFast):
    """A model family that overrides decoding."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


MARKED = (
    "{% for message in messages %}<eos>{{ message['role'] }}\n{{ message['content'] }}<eos>\n{% endfor %}"
    "<eos>assistant"
)


@pytest.mark.parametrize(
    "content", ["Hi", "", "\n", "a<eos>b", "<eos><eos>", " x ", "assistant\n", "Grüße 🎉 " * 200]
)
def test_a_chat_is_tokenized_as_its_whole_text(tmp_path: Path, content: str) -> None:
    made = saved(tmp_path, MARKED)
    rust = read_tokenizer(tmp_path).tokenizer
    turns = [Turn("system", "Be brief."), Turn("user", content)]
    text = "".join(f"<eos>{turn.role}\n{turn.content}<eos>\n" for turn in turns) + "<eos>assistant"
    whole = rust.encode(text, add_special_tokens=False).ids
    assert EOS in whole
    assert made.render_chat(turns) == made.render_chat(turns) == whole
    with pytest.raises(TooManyTokensError):
        made.render_chat(turns, (), len(whole) - 1)


def test_a_template_that_wants_more_than_a_message_is_served(tmp_path: Path) -> None:
    wants = "{% if messages | length < 2 %}{{ raise_exception('two') }}{% endif %}" + MARKED
    made = saved(tmp_path, wants)
    assert made.render_chat([Turn("user", "a"), Turn("user", "b")])


def test_a_family_that_decodes_by_itself_is_refused(tmp_path: Path) -> None:
    backend = tiny_tokenizer()
    write_plain(backend, tmp_path)
    backend.__class__ = Shouting
    with pytest.raises(UnusableError, match="Shouting overrides decoding"):
        write_plain(backend, tmp_path)


def test_a_tokenizer_without_template_says_so(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, chat_template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidArgumentError, match="no chat template") as error:
        tokenizer.render_chat(TURNS)
    assert error.value.field == "prompt.chat"


def test_a_template_that_refuses_is_an_invalid_argument(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, "{{ raise_exception('roles must alternate') }}" + CHAT_TEMPLATE)
    with pytest.raises(InvalidArgumentError, match="roles must alternate"):
        tokenizer.render_chat(TURNS)


LOOPS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
CALLS = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"

LARGE = (
    "{{ 'a' * 10 ** 10 }}",
    "{{ (10 ** 9 * ['a']) | join }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set a = 'a' * 10 ** 6 %}{% for i in range(99) %}{{ a }}{% endfor %}",
    "{{ 'a' | center(10 ** 9) }}",
    "{{ 'a'.rjust(10 ** 9) }}",
    "{{ '\\t'.expandtabs(10 ** 9) }}",
    "{% set a = 'a' * 10 ** 6 %}{{ a | replace('a', a) }}",
    "{% set a = 'a' * 10 ** 6 %}{{ a.replace('a', a) }}",
    "{% set a = 'a' * 10 ** 6 %}{{ a.translate({97: a}) }}",
    "{% set a = 'a' * 10 ** 6 %}{{ range(999) | map('string') | join(a) }}",
    "{% set a = 'a' * 10 ** 6 %}{{ a.join(range(999) | map('string')) }}",
    "{{ ('a\n' * 10 ** 6) | indent(10 ** 6) }}",
    "{{ [1] | tojson(indent=10 ** 8) }}",
    "{{ 'aaa' | wordwrap(1, wrapstring='a' * 10 ** 7 * 2) }}",
    "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "{{ '%s%s%s' % ('a' * 10 ** 7, 1, 2) * 9 }}",
    "{{ ('{a}' * 99).format(a='a' * 10 ** 6) }}",
    "{% set a = 'a' * 999 %}" + "{% set a = a + a %}" * 40,
    "{% set a = 'a' * 999 %}" + "{% set a = a ~ a %}" * 40,
    *(
        "{% set a = [1] %}" + "{% set a = [a, {'b': a}] %}" * 40 + use
        for use in ("{{ a }}", "{{ a ~ 1 }}", "{{ a | tojson }}", "{{ a | upper }}", "{{ '%s' % a }}")
    ),
    "{% set a = [1] %}" + "{% set a = [a, a] %}" * 40 + "{{ '{}'.format(a) }}",
    "{% set a = '\"' %}{{ a" + " | tojson" * 40 + " }}",
    "{% set a = 'a' * 10 ** 6 %}{% set b %}{% for i in range(99) %}{{ a }}{% endfor %}{% endset %}",
)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (LOOPS, "rendering takes more than 0.3 s"),
        (CALLS, "rendering takes more than 0.3 s"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ 2.0 ** 10000 }}", "out of range"),
        ("{{ '%0999999999d' % 1 }}", "large width"),
        ("{{ '%*d' | format(10 ** 9, 1) }}", "large width"),
        ("{{ '{:>{}}'.format(1, 10 ** 9) }}", "large width"),
        ("".join(f"{{% set a{n} = 'a' * 2 ** 25 %}}" for n in range(9)), "characters together"),
        ("{{ 1 // (messages | length - 2) }}", "by zero"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ messages[0].deep | tojson }}", "recursion"),
        *((template, f"more than {chat_template.MOST_CHARACTERS} characters") for template in LARGE),
    ],
)
def test_a_template_that_cannot_render_is_an_invalid_argument(
    tmp_path: Path, template: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "RENDER_CPU_S", 0.3)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    tokenizer = saved(tmp_path, template + "{% set mentioned = 'deep' %}")
    with pytest.raises(InvalidArgumentError, match=why) as caught:
        tokenizer.render_chat([TURNS[0]._replace(further={"deep": deep}), TURNS[1]])
    assert caught.value.field == "prompt.chat"


@pytest.mark.parametrize("template", ["{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "{% if %}"])
def test_a_template_that_does_not_parse_is_told_when_it_is_loaded(tmp_path: Path, template: str) -> None:
    with pytest.raises(ConfigError, match=r"chat_template\.jinja is no chat template: \w"):
        saved(tmp_path, template)


def test_lone_surrogates_do_not_crash() -> None:
    # JSON can contain them; UTF-8 cannot.
    assert ByteTokenizer().decode(ByteTokenizer().encode("a\ud800b")) == "a?b"


def test_threads_may_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    def work(number: int) -> bool:
        text = f"request {number} " * 20
        rendered = tokenizer.decode(tokenizer.render_chat([Turn("user", text)]))
        return tokenizer.decode(tokenizer.encode(text)) == text and text in rendered

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))


def test_loading_by_name(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer("simulated"), ByteTokenizer)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.decode(loaded.encode("hello")) == "hello"
    assert loaded.has_chat_template
    with pytest.raises(NotFoundError):
        load_tokenizer(str(tmp_path / "nothing"))


def _program(path: Path, *lines: str) -> str:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


def _unread(folder: Path) -> ModelSource:
    (folder / "vocab.txt").write_text("a")
    return ModelSource(str(folder), None, "unread")


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (["echo noise", "echo no fast form", "exit 3"], NotFoundError, "no usable tokenizer: no fast form"),
        (["echo killed >&2", "exit 1"], UnavailableError, "could not be converted: killed"),
        (["kill -9 $$"], UnavailableError, "ended with status -9"),
    ],
)
def test_a_failed_conversion_is_told(
    script: list[str], kind: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.executable", _program(tmp_path / "python", *script))
    with pytest.raises(kind, match=words):
        converted_tokenizer(_unread(tmp_path))
    assert list((tmp_path / "home" / "tokenizers").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(LEAST_TIMEOUT_S)
def test_a_conversion_ends_with_the_process_that_wants_it(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    (tmp_path / "conversion.py").write_text(
        "import sys, threading\n"
        "from splitserve.models import tokenizer_conversion\n"
        "def convert(*_):\n"
        f"    with open({str(pipe)!r}, 'w') as held:\n"
        "        print('at work', file=held, flush=True)\n"
        "        threading.Event().wait()\n"
        "tokenizer_conversion.convert = convert\n"
        "tokenizer_conversion.main(sys.argv[3:])\n"
    )
    python = _program(tmp_path / "python", f'exec {sys.executable} {tmp_path}/conversion.py "$@"')
    source = _unread(tmp_path)
    program = (
        "import sys\n"
        "from splitserve.models.sources import ModelSource\n"
        "from splitserve.models.tokenizer_cache import converted_tokenizer\n"
        f"sys.executable = {python!r}\n"
        f"converted_tokenizer(ModelSource({source.path!r}, None, 'unread'))\n"
    )
    wanting = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {"SPLITSERVE_HOME": str(tmp_path / "home")}
    )
    try:
        with pipe.open() as held:
            assert held.readline() == "at work\n"
            wanting.kill()
            assert held.read() == ""  # nobody holds it open any more
    finally:
        wanting.kill()
        wanting.wait()


def test_a_cache_that_cannot_be_written_is_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("not a folder")
    tiny_tokenizer().save_pretrained(tmp_path / "made")
    monkeypatch.setenv("SPLITSERVE_HOME", str(tmp_path / "home"))
    copy = f'test "$2" = {CONVERSION} && cp {tmp_path}/made/* "$4"'
    monkeypatch.setattr("sys.executable", _program(tmp_path / "python", copy))
    tokenizer = HfTokenizer(converted_tokenizer(_unread(tmp_path)))
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_a_folder_without_tokenizer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(NotFoundError, match="no tokenizer files"):
        load_tokenizer(str(tmp_path))


TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}|{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.arguments | tojson }}]{% endfor %}"
    "{% if message.tool_call_id is defined %}#{{ message.tool_call_id }}{% endif %};{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_tools_and_calls_reach_the_template(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, TOOLS_TEMPLATE)
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    turns = [Turn("user", "u"), Turn("assistant", "", [call]), Turn("tool", "7", tool_call_id="c1")]
    assert tokenizer.decode(tokenizer.render_chat(turns, TOOLS)) == 'f|user:u;assistant:[{"a": 1}];tool:7#c1;'
    assert tokenizer.decode(tokenizer.render_chat(turns[:1])) == "user:u;"


THINKING = (
    "{% for m in messages %}{{ m.role }}: {{ m['content'] }}"
    "{% if m.reasoning_content is defined %}({{ m.reasoning_content }}){% endif %}"
    "{% if m.get('mood') %}[{{ m.mood }}]{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.note }}{% endfor %}{% endfor %}"
)


def test_further_fields_of_messages_reach_the_template(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, THINKING)
    call = {"function": {"name": "f", "arguments": {}}, "note": "!"}
    turns = [
        Turn("user", "a", further={"mood": "b"}),
        Turn("assistant", "c", [call], further={"reasoning_content": "d"}),
    ]
    assert tokenizer.decode(tokenizer.render_chat(turns)) == "user: a[b]assistant: c(d)f!"
    plain = [Turn("user", "a"), Turn("assistant", "c")]
    assert tokenizer.decode(tokenizer.render_chat(plain)) == "user: aassistant: c"


@pytest.mark.parametrize(
    ("turn", "field"),
    [
        (Turn("user", "", further={"contents": "a"}), "contents"),
        (Turn("user", "", further={"reasoning_content": "a", "images": []}), "images"),
        (Turn("assistant", "", [{"function": {"name": "f"}, "extra": 1}]), "tool_calls[0].extra"),
        (Turn("assistant", "", [{"function": {"name": "f", "args": 1}}]), "tool_calls[0].function.args"),
    ],
)
def test_a_field_that_the_template_does_not_read_is_refused_by_name(
    tmp_path: Path, turn: Turn, field: str
) -> None:
    for tokenizer in (saved(tmp_path, THINKING), ByteTokenizer()):
        with pytest.raises(InvalidArgumentError) as caught:
            tokenizer.render_chat([Turn("user", "a"), turn])
        assert (caught.value.reason, caught.value.field) == (
            "UNSUPPORTED_FIELD",
            f"prompt.chat.messages[1].{field}",
        )


def test_reasoning_may_be_sent_back_to_any_template_and_developer_is_system_where_unknown(
    tmp_path: Path,
) -> None:
    turns = [Turn("developer", "a"), Turn("assistant", "b", further={"reasoning_content": "c"})]
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    for template, role in (
        (plain, "system"),
        (plain + "{% if role == 'developer' %}{% endif %}", "developer"),
    ):
        tokenizer = saved(tmp_path, template)
        assert tokenizer.decode(tokenizer.render_chat(turns)) == f"{role}: a assistant: b "


def test_a_template_without_tools_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="does not support tools") as error:
        saved(tmp_path).render_chat(TURNS, TOOLS)
    assert (error.value.field, error.value.reason) == ("prompt.chat.tools_json", "TOOLS_UNSUPPORTED")


def test_the_bytes_of_single_tokens(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize(
    ("entry", "byte_level", "expected"),
    [
        ("Ġthe", True, b" the"),
        ("Ã©Ċ", True, "é\n".encode()),
        ("Ãł", True, b"\xc3\xa0"),
        ("世", True, "世".encode()),
        ("\u2581the", False, b" the"),
        ("<0x0A>", False, b"\n"),
        ("<0xE4>", False, b"\xe4"),
        ("é", False, "é".encode()),
    ],
)
def test_both_spellings_of_a_vocabulary(entry: str, byte_level: bool, expected: bytes) -> None:
    assert entry_bytes(entry, byte_level=byte_level) == expected
