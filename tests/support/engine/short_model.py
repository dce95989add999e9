"""The embedded model with its first layers alone: its tokenizer, its sizes and weights, in a tenth of the time."""

from __future__ import annotations

import json
from pathlib import Path

LAYERS = 2
EMBEDDINGS = "model.embed_tokens.weight"
"""Of a model whose output layer is the same."""
BLANKS = "ĠĊĉč"
"""Space, line ends and tabulator in vocabularies of bytes."""


def shortened(model: str, folder: Path) -> str:
    """Makes a folder with the files of a model of which only the first layers are left. What it answers makes no sense
    and depends on all that it has read, as sensible answers do.

    Where a grammar allows blanks it would say nothing else. So tokens that are all blank get twice the mean of all
    embeddings, whose logits are far below zero."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder.mkdir()
    for file in Path(model).iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (folder / file.name).symlink_to(file)
    config = json.loads((Path(model) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    with safe_open(Path(model) / "model.safetensors", framework="pt") as weights:
        left = {name: weights.get_tensor(name) for name in weights.keys() if _is_left(name)}  # noqa: SIM118
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    blank = [number for token, number in vocabulary.items() if not token.strip(BLANKS)]
    left[EMBEDDINGS][blank] = 2 * left[EMBEDDINGS].mean(0)
    save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def _is_left(name: str) -> bool:
    """`model.layers.7.mlp…` is of layer 7; other weights are of none."""
    return not name.startswith("model.layers.") or int(name.split(".")[2]) < LAYERS
