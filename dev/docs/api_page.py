"""Writes docs/reference/api.md from the protos' comments and the Python client's docstrings; `--check`
verifies it is current."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from dev.proto import PROTOS
from splitserve import client
from splitserve.client import AsyncClient, types

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "api.md"
PACKAGE = "splitserve.v1"
FILES = {
    "inference": "For clients: generation, models, one request's record.",
    "generation": "What a generation asks for, and what comes back.",
}
"""The protos that clients use, with a sentence on each: calls, messages and fields are listed."""
OPERATOR_FILES = {
    "routes": "For operators: model routes.",
    "scaling": "For autoscalers: measured demand, plans, ended replicas.",
}
"""The protos whose calls alone are listed; their messages are described in the files."""
HEAD = """# API reference

`make docs` writes this page from the protos and the Python client. The guides show how to use them:
[gRPC and KServe](../guides/grpc-kserve.md), [OpenAI API](../guides/openai-api.md). [Security](../guides/security.md)
says who may call what. Messages that are not listed here are described in `protos/splitserve/v1`. The protos between
coordinator and workers (`prefill`, `decode`, `registry`, `kv_transfer`, `vllm`) are no interface for others.
"""
MESSAGE, ENUM, SERVICE = 4, 5, 6
"""Field numbers of FileDescriptorProto, as source locations name them (google/protobuf/descriptor.proto)."""
FIELD, NESTED_MESSAGE, NESTED_ENUM, ENUM_VALUE, METHOD = 2, 3, 4, 2, 2
_Field = FieldDescriptorProto


class ProtoPage:
    """The section of one proto file."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(location.path): " ".join(location.leading_comments.split())
            for location in file.source_code_info.location
        }

    def lines(self) -> Iterator[str]:
        """Services, then messages and enums, nested ones behind the message that they are in."""
        yield from self.services()
        for number, message in enumerate(self._file.message_type):
            yield from self._message(message, (MESSAGE, number), "")
        for number, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (ENUM, number), "")

    def services(self) -> Iterator[str]:
        """The calls of each service."""
        for number, service in enumerate(self._file.service):
            yield from self._service(service, (SERVICE, number))

    def _service(self, service: ServiceDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield from (f"### `{PACKAGE}.{service.name}`", "", self._comment(path), "", "| call | |", "|---|---|")
        for number, method in enumerate(service.method):
            asked, given = _type(method.input_type), _type(method.output_type)
            asked = f"stream of {asked}" if method.client_streaming else asked
            given = f"stream of {given}" if method.server_streaming else given
            text = self._cell((*path, METHOD, number))
            yield f"| `{method.name}` | {asked} to {given}. {text} |"
        yield ""

    def _message(self, message: DescriptorProto, path: tuple[int, ...], prefix: str) -> Iterator[str]:
        name = f"{prefix}{message.name}"
        yield from (f"### `{name}`", "", self._comment(path), "")
        if message.field:
            yield from ("| field | type | |", "|---|---|---|")
        maps = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
        for number, field in enumerate(message.field):
            text = self._cell((*path, FIELD, number))
            yield f"| `{field.name}` | {_field_type(field, maps)} | {_choice(message, field)}{text} |"
        if message.field:
            yield ""
        for number, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(nested, (*path, NESTED_MESSAGE, number), f"{name}.")
        for number, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, NESTED_ENUM, number), f"{name}.")

    def _enum(self, enum: EnumDescriptorProto, path: tuple[int, ...], prefix: str) -> Iterator[str]:
        yield from (f"### `{prefix}{enum.name}`", "", self._comment(path), "", "| value | |", "|---|---|")
        for number, value in enumerate(enum.value):
            yield f"| `{value.name}` | {self._cell((*path, ENUM_VALUE, number))} |"
        yield ""

    def _comment(self, path: tuple[int, ...]) -> str:
        return self._comments.get(path, "")

    def _cell(self, path: tuple[int, ...]) -> str:
        return self._comment(path).replace("|", "\\|")


def _type(name: str) -> str:
    return f"`{name.removeprefix('.').removeprefix(f'{PACKAGE}.')}`"


def _field_type(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    if field.type in (_Field.TYPE_MESSAGE, _Field.TYPE_ENUM):
        if entry := maps.get(field.type_name.rpartition(".")[2]):
            key, value = (_field_type(part, {}) for part in entry.field)
            return f"map of {key} to {value}"
        name = _type(field.type_name)
    else:
        name = _Field.Type.Name(field.type).removeprefix("TYPE_").lower()
    return f"list of {name}" if field.label == _Field.LABEL_REPEATED else name


def _choice(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """What the declaration says beside the comment: that a field may be left out, or is one of several."""
    if field.proto3_optional:
        return "Optional. "
    if field.HasField("oneof_index"):
        return f"One of `{message.oneof_decl[field.oneof_index].name}`. "
    return ""


def proto_files() -> dict[str, FileDescriptorProto]:
    """The listed files with their comments, by name without suffix."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "descriptors"
        names = [str(PROTOS / "splitserve" / "v1" / f"{name}.proto") for name in (*FILES, *OPERATOR_FILES)]
        protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", "--include_source_info"]
        subprocess.run([*protoc, f"--descriptor_set_out={out}", *names], check=True)
        descriptors = FileDescriptorSet.FromString(out.read_bytes())
    return {Path(file.name).stem: file for file in descriptors.file}


def client_lines() -> Iterator[str]:
    """The Python client: methods with their signatures, then value types."""
    yield from ("## The Python client", "", *_paragraphs(AsyncClient), "")
    yield from ("`Client` has the same methods for programs without an event loop.", "")
    for name, member in inspect.getmembers(AsyncClient):
        if name.startswith("_") or not inspect.isroutine(member):
            continue
        yield from (f"### `AsyncClient.{name}{_signature(member)}`", "", *_paragraphs(member), "")
    for name in client.__all__:
        value = vars(client)[name]
        if not inspect.isclass(value) or value.__module__ != types.__name__:
            continue
        yield from (f"### `{name}`", "", *_paragraphs(value), "")
        if fields := list(_fields(value)):
            yield from ("| field | type | |", "|---|---|---|", *fields, "")


def _fields(value: type) -> Iterator[str]:
    """Rows of a class's fields: name, type, and the string below it in the source."""
    (declared,) = ast.parse(inspect.getsource(value)).body
    assert isinstance(declared, ast.ClassDef)
    for statement, following in pairwise([*declared.body, ast.Pass()]):
        if not isinstance(statement, ast.AnnAssign):
            continue
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        kind = ast.unparse(statement.annotation).replace("|", "\\|")
        yield f"| `{ast.unparse(statement.target)}` | `{kind}` | {text} |"


def _signature(method: object) -> str:
    """As in the source, where annotations are not evaluated and therefore quoted here."""
    parts = inspect.signature(method)  # type: ignore[arg-type]
    plain = [
        parameter.replace(annotation=_Unquoted(parameter.annotation))
        if parameter.annotation is not parameter.empty
        else parameter
        for name, parameter in parts.parameters.items()
        if name != "self"
    ]
    return str(parts.replace(parameters=plain, return_annotation=_Unquoted(parts.return_annotation)))


class _Unquoted(str):
    """A type as it stands in the source."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _paragraphs(documented: object) -> Sequence[str]:
    return (inspect.getdoc(documented) or "").splitlines()


def page() -> str:
    """The whole page."""
    lines = [HEAD, *client_lines(), "## gRPC", ""]
    files = proto_files()
    for name, purpose in FILES.items():
        lines += [f"## `{name}.proto`", "", purpose, "", *ProtoPage(files[name]).lines()]
    for name, purpose in OPERATOR_FILES.items():
        lines += [f"## `{name}.proto`", "", purpose, "", *ProtoPage(files[name]).services()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def main() -> int:
    """Writes the page; with `--check` changes nothing, and fails if it is out of date."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE.name} is out of date: run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
