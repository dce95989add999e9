"""A replica that does nothing, in a moment: `python stub_worker.py FOLDER NAME`.

Says that it is ready; ends on SIGTERM, unless a file FOLDER/NAME.stubborn exists then. Only the standard library.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    signals = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    print(json.dumps({"level": "info", "event": "worker.ready", "worker_id": name}), flush=True)
    while True:
        signal.sigwait(signals)
        if not (folder / f"{name}.stubborn").exists():
            return


if __name__ == "__main__":
    main()
