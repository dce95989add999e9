"""Docker contexts as `docker context create` leaves them on disk. The Docker SDK reads none without a config.json."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from autoscaler.hosts.inventory_file import check_encrypted, check_endpoint
from splitserve.errors import ConfigError, InvalidArgumentError
from splitserve.runtime.bounded_file import read_small_text
from splitserve.security.tls import TlsFiles


def docker_folder() -> Path:
    """Where the Docker command keeps its settings: DOCKER_CONFIG, else ~/.docker."""
    return Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")


def read_context(name: str, folder: Path) -> tuple[str, TlsFiles | None]:
    """Endpoint and TLS files of a context. Raises ConfigError (field `context`) for one that is not there, that cannot
    be read, or that leads to another machine without mutual TLS."""
    number = hashlib.sha256(name.encode()).hexdigest()
    try:
        meta = json.loads(read_small_text(folder / "contexts/meta" / number / "meta.json"))
        docker = meta["Endpoints"]["docker"]
        endpoint, unchecked = check_endpoint(str(docker["Host"])), bool(docker.get("SkipTLSVerify", False))
    except FileNotFoundError:
        raise _bad(name, f"there is none in {folder}/contexts") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _bad(name, f"it cannot be read: {error}") from None
    except InvalidArgumentError as error:
        raise _bad(name, error.message) from None
    pems = folder / "contexts/tls" / number / "docker"
    files = TlsFiles(pems / "ca.pem", pems / "cert.pem", pems / "key.pem") if pems.is_dir() else None
    try:
        check_encrypted(endpoint, tls=files is not None and not unchecked)
    except ValueError as error:
        raise _bad(name, str(error)) from None
    return endpoint, files


def _bad(name: str, why: str) -> ConfigError:
    return ConfigError(f"context {name}: {why}", field="context")
