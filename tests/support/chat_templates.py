"""Models with another chat template."""

from __future__ import annotations

from pathlib import Path


def with_template(model: str, folder: Path, template: str) -> str:
    """Makes a folder with the files of a model and this template; "{}" in it stands for the model's own."""
    folder.mkdir()
    for file in Path(model).iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    own = (Path(model) / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template.replace("{}", own))
    return str(folder)
