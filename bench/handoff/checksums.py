"""Cost of `--verify-kv`: checksums of a handoff's blocks, on one core, from memory that no cache holds.

    python -m bench.handoff.checksums [--json]

Writer and reader each pay this once a handoff, on the engine thread: the writer chunk by chunk, the reader
when the completion arrives. Blocks are those of SmolLM2-135M in bfloat16 with 16 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from bench.machine import report, this_machine
from kv_transfer.handoff.checksums import ONE_IN, digests_of, fold_digests, verified_positions
from launcher.cluster.placement import available_cores

BLOCK_TOKENS = 16
BLOCK_BYTES = 30 * 2 * 3 * BLOCK_TOKENS * 64 * 2
POOL_BLOCKS = 3000
"""1.1 GB, far more than the caches hold."""
PROMPTS = (128, 1024, 8192, 30_000)
REPEATS = 9
FUNCTIONS: dict[str, Callable[[memoryview], int]] = {
    "xxh3_64": xxhash.xxh3_64_intdigest,
    "xxh64": xxhash.xxh64_intdigest,
    "crc32": zlib.crc32,
    "adler32": zlib.adler32,
}


def median_s(action: Callable[[], object]) -> float:
    """The median duration of `REPEATS` runs, in seconds."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return sorted(times)[REPEATS // 2]


def function_rows(pool: Sequence[memoryview]) -> list[dict[str, object]]:
    """GB/s of each candidate over 200 scattered blocks."""
    blocks = random.Random(1).sample(range(len(pool)), 200)
    rows: list[dict[str, object]] = []
    for name, function in FUNCTIONS.items():

        def run(function: Callable[[memoryview], int] = function) -> None:
            for block in blocks:
                function(pool[block])

        rows.append({"function": name, "gb_per_s": round(200 * BLOCK_BYTES / median_s(run) / 1e9, 2)})
    return rows


def handoff_rows(pool: Sequence[memoryview]) -> list[dict[str, object]]:
    """Milliseconds per handoff for writer and reader, by prompt length and mode."""
    rows: list[dict[str, object]] = []
    for tokens in PROMPTS:
        count = -(-tokens // BLOCK_TOKENS)
        table = random.Random(tokens).sample(range(len(pool)), count)
        for mode, one_in in ONE_IN.items():
            asked = len(verified_positions(7, 1, count, one_in))

            def write(table: list[int] = table, one_in: int = one_in) -> tuple[int, ...]:
                positions = verified_positions(7, 1, len(table), one_in)
                return fold_digests(digests_of(pool[table[position]] for position in positions))

            # Reading is the same work: the same function over as many blocks of the other pool.
            rows.append(
                {
                    "tokens": tokens,
                    "megabytes": round(count * BLOCK_BYTES / 1e6, 1),
                    "mode": mode,
                    "blocks": asked,
                    "ms_each_side": round(median_s(write) * 1e3, 3),
                }
            )
    return rows


def main() -> None:
    """Runs on one core and prints both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, available_cores()[:1])
    memory = np.random.default_rng(1).integers(0, 256, (POOL_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    pool = [memoryview(row) for row in memory]
    functions, handoffs = function_rows(pool), handoff_rows(pool)
    if arguments.json:
        command = "python -m bench.handoff.checksums --json"
        print(
            json.dumps(report("verify_kv", command, this_machine(), functions=functions, handoffs=handoffs))
        )
        return
    for rows in (functions, handoffs):
        print(" | ".join(rows[0]))
        for row in rows:
            print(" | ".join(str(value) for value in row.values()))
        print()


if __name__ == "__main__":
    main()
