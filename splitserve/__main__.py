"""`python -m splitserve`."""

from __future__ import annotations

import sys

from splitserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
