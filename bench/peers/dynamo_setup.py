"""Makes `.peers/dynamo`: an environment with NVIDIA Dynamo's frontend and its engine mock, separate from splitserve's.

    python bench/peers/dynamo_setup.py [--folder .peers/dynamo]

Neither needs torch nor a GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

DYNAMO = "ai-dynamo==1.4.2"
CHECK = "import dynamo.frontend, dynamo.mocker"
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".peers" / "dynamo"


def main() -> int:
    """Does nothing where Dynamo can be imported already."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER)
    python = parser.parse_args().folder / "bin" / "python"
    if not python.exists():
        venv.create(python.parent.parent, with_pip=True)
    elif subprocess.run([python, "-c", CHECK], check=False, capture_output=True).returncode == 0:
        return 0
    subprocess.run([python, "-m", "pip", "install", "-qq", DYNAMO], check=True)
    return subprocess.run([python, "-c", CHECK], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
