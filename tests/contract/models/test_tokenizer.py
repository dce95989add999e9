"""Our tokenizers against `transformers`': the same ids, texts, special tokens and rendered chats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

from splitserve.errors import InvalidArgumentError, NotFoundError
from splitserve.models.hf_tokenizer import HfTokenizer, load_tokenizer
from splitserve.models.sources import resolve_model
from splitserve.models.tokenizer import Turn
from splitserve.models.tokenizer_conversion import convert
from splitserve.models.tokenizer_files import FAMILY_RULES, PLAIN_CLASSES, is_plain, read_tokenizer
from tests.support.engine.tiny_models import FAMILIES, OTHERS, tiny_tokenizer

TEXTS = [
    "",
    " ",
    "It is a truth universally acknowledged, that a single man",
    "  two leading spaces, 12345 digits\n\n\ttabs\r\nand trailing  ",
    "Grüße, 世界 🎉 e\u0301 ﬁ",
    "<s>[INST] special <|im_start|>user</s> tokens <eos><image>in between <own> x",
    "don't we'll I'M",
]
SMOLLM2 = "smollm2-135m-instruct"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<image>"]
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": {"a": 1, "b": "<&'>", "ü": None}},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d<b>", "parameters": {"z": [1.5, True]}}}
]
CHATS = {
    "one": [Turn("user", "Hi 👋")],
    "system": [Turn("system", "Be brief."), Turn("user", " Hi ")],
    "turns": [Turn("user", "1"), Turn("assistant", "two"), Turn("user", "3\n"), Turn("assistant", "")],
    "calls": [
        Turn("user", "u"),
        Turn("assistant", "", [CALL]),
        Turn("tool", "7", tool_call_id="c1", name="f"),
    ],
    "empty": [],
}
TEMPLATES = {
    "plain": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "tokens": "{{ bos_token }}{% for m in messages %}{{ m.content + (eos_token or '') }}{% endfor %}{{ image_token }}",
    "json": "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ messages | tojson(sort_keys=true) }}"
    "|{{ messages | tojson(separators=(',', ':'), ensure_ascii=true) }}",
    "generation": "{% set x = 0 %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{% set x = 1 %}{{ m.content }}{{ x }}{% endgeneration %}{% endif %}{{ x }}{% endfor %}",
    "loops": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}\n    {% if loop.last %}\n   last\n  {% endif %}\n{% endfor %}",
    "namespace": "{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if m.tool_calls is defined %}{% set ns.found = true %}{{ m.tool_calls[0].function | items | list }}{% endif %}"
    "{% endfor %}{{ ns.n }}{{ ns.found }}{{ dict(a=1) }}{{ dict.fromkeys('ab', 1) }}",
    "time": "{{ strftime_now('%Y-%m-%d') }}{{ documents is none }}{{ tools is none }}",
    "macro": "{% macro show(m) %}<{{ m.role }}>{{ caller() if caller else '' }}{% endmacro %}"
    "{%- for m in messages -%}  {{ show(m) }}  {%- endfor -%}{{ undefined_variable }}",
    "refuses": "{% if messages[0].role == 'system' %}{{ raise_exception('no system, please') }}{% endif %}ok",
    "changes": "{% for m in messages %}{% if m.update({'content': 'x'}) %}{% endif %}{% endfor %}",
    "escapes": "{{ messages.__class__.__mro__ }}{{ ''.__class__ }}",
    "underscores": "{% set ns = namespace(__init__=1) %}{{ ns }}",
    "undefined": "{{ messages[5].content.x }}",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSERVE_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session")
def trained() -> tuple[str, str]:
    """A byte-level BPE and a SentencePiece-like one, as the text of a tokenizer.json."""
    text = [Path("tests/data/pride_and_prejudice.txt").read_text(encoding="utf-8")]
    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet)
    byte_level.train_from_iterator(text, trainer)
    pieces = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    pieces.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=[*SPECIAL, *fallback], max_token_length=12)
    pieces.train_from_iterator([text[0][:4000]], trainer)
    return byte_level.to_str(), pieces.to_str()


def write_folder(folder: Path, tokenizer: str, config: dict[str, Any], model_type: str = "llama") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def ours(folder: Path) -> HfTokenizer:
    tokenizer = load_tokenizer(str(folder))
    assert isinstance(tokenizer, HfTokenizer)
    return tokenizer


def assert_equal(tokenizer: HfTokenizer, theirs: Any) -> None:
    assert tokenizer.vocabulary_size == len(theirs)
    assert tokenizer.has_chat_template == bool(theirs.chat_template)
    special = theirs.all_special_ids
    for text in TEXTS:
        ids = theirs.encode(text)
        assert tokenizer.encode(text) == ids, text
        mixed = [*special, *ids, *special, *ids[::-1]]
        expected = theirs.decode(mixed, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(mixed) == expected
        for token_id in ids:
            assert tokenizer.decode([token_id]) == theirs.decode([token_id], skip_special_tokens=True)
            assert tokenizer.token_bytes(token_id)
    assert json.loads(tokenizer.definition())["added_tokens"] == [
        json.loads(theirs.backend_tokenizer.to_str())["added_tokens"][n]
        for n in range(len(theirs.added_tokens_decoder))
    ]
    if theirs.chat_template:
        for turns in CHATS.values():
            for tools in (TOOLS, []):
                assert_same_chat(tokenizer, theirs, turns, tools)


def assert_same_chat(tokenizer: HfTokenizer, theirs: Any, turns: list[Turn], tools: list[Any]) -> None:
    """What `transformers` refuses is an invalid argument; else the ids are the same."""
    messages = [
        {key: value for key, value in turn._asdict().items() if value or key in ("role", "content")}
        for turn in turns
    ]
    try:
        template = theirs.get_chat_template(tools=tools or None)
        text = theirs.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, tokenize=False
        )
        expected = theirs.encode(text, add_special_tokens=False)
    except Exception:
        template = expected = None
    if expected is None or (tools and "tools" not in template):
        with pytest.raises(InvalidArgumentError):
            tokenizer.render_chat(turns, tools)
    else:
        assert tokenizer.render_chat(turns, tools) == expected


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_tiny_models(family: str, tmp_path: Path) -> None:
    (FAMILIES | OTHERS)[family]().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    if is_plain(tmp_path):
        assert_equal(ours(tmp_path), theirs)
    else:
        (tmp_path / "plain").mkdir()
        convert(str(tmp_path), tmp_path / "plain")
        assert_equal(HfTokenizer(read_tokenizer(tmp_path / "plain")), theirs)


def test_the_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPLITSERVE_HOME")
    folder = Path(resolve_model(SMOLLM2).path)
    assert is_plain(folder)
    assert_equal(ours(folder), AutoTokenizer.from_pretrained(folder))


def _token(content: str, **flags: bool) -> dict[str, Any]:
    token = {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    return token | {"special": False} | flags


PLAIN_CONFIGS: dict[str, dict[str, Any]] = {
    "bare": {},
    "named": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "image_token": "<image>"},
    "asks for bos": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
    "objects": {
        "bos_token": {"__type": "AddedToken", **_token("<s>")},
        "own_token": "<own>",
        "unk_token": None,
    },
    "new tokens": {"eos_token": "<eos>", "pad_token": "<eos>", "additional_special_tokens": ["<own>", "<s>"]},
    "extra list": {
        "extra_special_tokens": ["<own>", {"__type": "AddedToken", **_token("<eos>", lstrip=True)}]
    },
    "extra by name": {"extra_special_tokens": {"image_token": "<image>", "own": "<own>"}},
    "declared": {
        "added_tokens_decoder": {
            "0": _token("<unk>", special=True),
            "701": _token("<own>", lstrip=True, rstrip=True),
            "700": _token("<eos>", special=True),
            "2": _token("</s>", special=True, lstrip=True),
        },
        "bos_token": "<own>",
    },
    "split": {"split_special_tokens": True, "bos_token": "<s>"},
}


@pytest.mark.parametrize("class_name", sorted(PLAIN_CLASSES))
@pytest.mark.parametrize("name", PLAIN_CONFIGS)
def test_what_a_configuration_adds(
    name: str, class_name: str, tmp_path: Path, trained: tuple[str, str]
) -> None:
    template = {"chat_template": TEMPLATES["tokens"]}
    for number, definition in enumerate(trained):
        config = {"tokenizer_class": class_name, **template, **PLAIN_CONFIGS[name]}
        folder = write_folder(tmp_path / str(number), definition, config)
        assert is_plain(folder)
        theirs = AutoTokenizer.from_pretrained(folder)
        assert_equal(ours(folder), theirs)
        assert read_tokenizer(folder).special_tokens == theirs.special_tokens_map


def _with_ends(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 1), ("</s>", 2)])


def _with_limits(tokenizer: Tokenizer) -> None:
    tokenizer.enable_padding(pad_id=0, pad_token="<unk>", length=64)
    tokenizer.enable_truncation(5)


def _with_added(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("<own>", rstrip=True), AddedToken("truth", single_word=True)])


@pytest.mark.parametrize("change", [_with_ends, _with_limits, _with_added])
def test_what_a_tokenizer_file_holds(
    change: Callable[[Tokenizer], None], tmp_path: Path, trained: tuple[str, str]
) -> None:
    tokenizer = Tokenizer.from_str(trained[0])
    change(tokenizer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "chat_template": "{{ pad_token }}",
    }
    folder = write_folder(tmp_path / "model", tokenizer.to_str(), config)
    assert_equal(ours(folder), AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize(
    ("class_name", "model_type", "kind"),
    [
        ("LlamaTokenizer", "llama", 1),
        ("LlamaTokenizerFast", "mistral", 1),
        ("LlamaTokenizerFast", "llama", 0),
        ("Qwen2Tokenizer", "qwen2", 0),
        ("PreTrainedTokenizerFast", "qwen2", 0),
        ("GPT2Tokenizer", "gpt2", 0),
        ("GemmaTokenizer", "gemma2", 1),
        ("", "olmo2", 0),
    ],
)
def test_families_with_rules_of_their_own(
    class_name: str, model_type: str, kind: int, tmp_path: Path, trained: tuple[str, str]
) -> None:
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "image_token": "<image>",
        "chat_template": TEMPLATES["tokens"],
    }
    config = {"tokenizer_class": class_name, **names} if class_name else names
    folder = write_folder(tmp_path / "model", trained[kind], config, model_type)
    assert not is_plain(folder)
    plain = tmp_path / "plain"
    plain.mkdir()
    convert(str(folder), plain)
    assert is_plain(plain)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert_equal(HfTokenizer(read_tokenizer(plain)), theirs)
    assert read_tokenizer(plain).special_tokens == theirs.special_tokens_map


def write_gguf(path: Path, definition: str) -> None:
    model = json.loads(definition)["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATES["tokens"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_a_gguf_is_converted_once_by_another_process(
    tmp_path: Path, trained: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, trained[0])
    tokenizer = ours(path)
    assert_equal(tokenizer, AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name))
    # The second time nothing needs to run.
    monkeypatch.setattr("sys.executable", "/no/such/program")
    assert ours(path).definition() == tokenizer.definition()


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates(name: str, tmp_path: Path) -> None:
    backend = tiny_tokenizer()
    backend.chat_template = TEMPLATES[name]
    backend.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert (tmp_path / "chat_template.jinja").is_file()
    tokenizer, theirs = ours(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for turns in CHATS.values():
        for tools in (TOOLS, []):
            assert_same_chat(tokenizer, theirs, turns, tools)


NAMED = [
    {"name": "default", "template": "d{{ messages[0].content }}"},
    {"name": "tool_use", "template": "t{{ tools }}"},
]


@pytest.mark.parametrize("templates", [NAMED, NAMED[1:], "", "single {{ tools }}"])
@pytest.mark.parametrize(
    "files",
    [{}, {"chat_template.jinja": "file"}, {"additional_chat_templates/tool_use.jinja": "f{{ tools }}"}],
)
def test_named_templates(
    templates: Any, files: dict[str, str], tmp_path: Path, trained: tuple[str, str]
) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": templates}
    folder = write_folder(tmp_path / "model", trained[0], config)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    assert_equal(ours(folder), AutoTokenizer.from_pretrained(folder))


def test_the_types_that_have_rules_of_their_own() -> None:
    registered = tokenization_auto.TOKENIZER_MAPPING_NAMES
    forced = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert {kind for kind in forced if registered[kind] not in PLAIN_CLASSES} == FAMILY_RULES


@pytest.mark.parametrize(
    ("config", "definition"),
    [
        ({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": {"content": "x"}}, None),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"1": "x"}}, None),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "{}"),
        ({"tokenizer_class": "TokenizersBackend"}, "no JSON"),
        ({"tokenizer_class": "TokenizersBackend", "chat_template": "{% for m in messages %}"}, None),
    ],
)
def test_damaged_files_are_told(
    config: dict[str, Any], definition: str | None, tmp_path: Path, trained: tuple[str, str]
) -> None:
    folder = write_folder(tmp_path / "model", definition or trained[0], config)
    with pytest.raises(NotFoundError, match=r"no usable tokenizer|is no chat template"):
        load_tokenizer(str(folder))
