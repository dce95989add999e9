"""`pip install` into this environment, by uv where that is installed: the same packages in a tenth of the time.

Run as `python -m dev.installer ARGUMENTS`, with the arguments of `pip install`. uv does not read pip's settings, so
indexes, wheel folders and certificates from pip's configuration are passed to uv, unless uv is configured itself.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")
NO_COMPILE = "--no-compile"
"""Modules are compiled at first import: compiling all takes longer than installing."""
PIP = (sys.executable, "-m", "pip")


def pip_settings(listing: str) -> dict[str, str]:
    """`pip config list` by name without section; environment variables win, as in pip."""
    settings: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in listing.splitlines():
            name, _, value = line.partition("=")
            if value and name.rpartition(".")[0] == section:
                settings[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    return settings


def uv_options(settings: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """pip's configuration as options of `uv pip`. Like pip, uv then takes the best version of all indexes."""
    if any(name in environment for name in INDEX_VARIABLES):
        return []
    options = ["--index-strategy", "unsafe-best-match"]
    for name, option in (
        ("index-url", "--default-index"),
        ("extra-index-url", "--index"),
        ("find-links", "--find-links"),
        ("trusted-host", "--allow-insecure-host"),
    ):
        for value in settings.get(name, "").split():
            options += [option, value]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    return options


def install(arguments: Sequence[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs `pip install ARGUMENTS`; output comes back only with `--dry-run`."""
    uv, environment = shutil.which("uv"), dict(os.environ)
    command = [*PIP, "install", "--disable-pip-version-check"]
    if uv is not None:
        listing = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
        settings = pip_settings(listing)
        if "cert" in settings:
            environment.setdefault("SSL_CERT_FILE", settings["cert"])
        command = [uv, "pip", "install", "--python", sys.executable, *uv_options(settings, os.environ)]
        arguments = [argument for argument in arguments if argument != NO_COMPILE]  # as uv does it anyway
    dry = "--dry-run" in arguments
    command += [*([] if dry else ["--quiet"]), *arguments]
    return subprocess.run(command, check=check, env=environment, capture_output=dry, text=True)


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:], check=False).returncode)
