"""`buf generate` for other languages: the published templates are valid and name each file's package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).parent / "buf"
PLUGIN = f"""#!{sys.executable}
import sys
from google.protobuf.compiler import plugin_pb2

request = plugin_pb2.CodeGeneratorRequest.FromString(sys.stdin.buffer.read())
response = plugin_pb2.CodeGeneratorResponse(supported_features=3, minimum_edition=998, maximum_edition=1001)
for file in request.proto_file:
    response.file.add(name=file.name + ".NAME", content=file.options.go_package + "\\n" + request.parameter)
sys.stdout.buffer.write(response.SerializeToString())
"""


@pytest.mark.parametrize(("template", "plugins"), [("buf.gen.yaml", 2), ("buf.gen.ts.yaml", 1)])
def test_the_templates_generate(tmp_path: Path, template: str, plugins: int) -> None:
    """With plugins that note what they are asked for: the real ones come from other languages' registries."""
    names = [plugin["local"] for plugin in yaml.safe_load((ROOT / template).read_text())["plugins"]]
    assert len(names) == plugins
    for name in names:
        path = tmp_path / name
        path.write_text(PLUGIN.replace("NAME", name))
        path.chmod(0o755)
    subprocess.run(
        [BUF, "generate", "--template", template, "-o", tmp_path / "out"],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
        timeout=PATIENCE_S,
    )
    services = {path.name.split(".")[0] for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"inference", "generation", "open_inference"} <= services
    if template == "buf.gen.yaml":
        noted = tmp_path / "out" / "gen" / "splitserve" / "v1" / f"inference.proto.{names[0]}"
        package, options = noted.read_text().splitlines()
        assert package == "example.com/client/gen/splitserve/v1;splitservev1"
        assert options == "paths=source_relative"


def test_every_proto_names_its_go_package() -> None:
    for path in sorted((ROOT / "protos").rglob("*.proto")):
        folder = path.parent.relative_to(ROOT / "protos")
        assert f'option go_package = "{folder};' in path.read_text(), path
