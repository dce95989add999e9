"""The tested image without its software, for further Engines: copying gigabytes into each would take minutes.

Containers get the software from where the first Engine has it unpacked, through a read-only mount.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from docker import APIClient

from tests.support.scaling.docker_rig import IMAGE_VARIABLE

SOFTWARE = "opt/splitserve"
TAG = "light"


@dataclass(frozen=True, slots=True)
class LightImage:
    """A tar file of the image's other files, what the image says of itself, and where its software lies."""

    archive: Path
    changes: tuple[str, ...]
    software: Path

    def give_to(self, client: APIClient) -> str:
        """Imports it; its name."""
        imported: Any = client.import_image  # untyped in the stubs
        imported(src=str(self.archive), repository="splitserve", tag=TAG, changes=list(self.changes))
        return f"splitserve:{TAG}"


@contextmanager
def light_image(client: APIClient, folder: Path) -> Iterator[LightImage]:
    """Skips the test where the Engine's files are not on this machine."""
    image = os.environ[IMAGE_VARIABLE]
    made = client.create_container(image, entrypoint=["sleep", "infinity"], network_disabled=True)
    try:
        client.start(made["Id"])
        found = client.inspect_container(made["Id"])
        root = Path(found["GraphDriver"]["Data"].get("MergedDir", "/nowhere"))
        if not (root / SOFTWARE).is_dir():
            pytest.skip(f"{root}: the Engine's files are not here")
        archive = folder / "light.tar"
        left_out = [f"--exclude=./{path}/*" for path in (SOFTWARE, "proc", "sys", "dev")]
        subprocess.run(["tar", "-C", str(root), *left_out, "-cf", str(archive), "."], check=True)
        config = found["Config"]
        described: Any = client.inspect_image(image)  # type: ignore[no-untyped-call]
        entry = described["Config"]["Entrypoint"]
        changes = (
            *(f"ENV {name}={value}" for name, _, value in (e.partition("=") for e in config["Env"])),
            f"USER {config['User']}",
            "ENTRYPOINT " + str(entry).replace("'", '"'),
        )
        yield LightImage(archive, changes, root / SOFTWARE)
    finally:
        client.remove_container(made["Id"], force=True, v=True)
