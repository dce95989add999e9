"""Values of options in the words of another program's command line."""

from __future__ import annotations

import pytest

from splitserve.gpus.worker_gpus import TENSOR_PARALLEL, value_given


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], None),
        (["--seed", "3"], None),
        (["-tp", "2"], "2"),
        (["--tensor_parallel_size=2"], "2"),
        (["-tp=2", "--tensor-parallel-size", "4"], "4"),
        (["-tp"], ""),
        (["-tp="], ""),
        (["-tpx", "2"], None),
    ],
)
def test_the_last_value_counts(words: list[str], value: str | None) -> None:
    assert value_given(words, TENSOR_PARALLEL) == value
