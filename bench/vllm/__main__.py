"""`python -m bench.vllm`; see `main.py`."""

from __future__ import annotations

import sys

from bench.vllm.main import main

sys.exit(main())
