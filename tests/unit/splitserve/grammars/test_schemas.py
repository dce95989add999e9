"""Answers of random schemas satisfy them, says another validator than the product's, or they are refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bench.engine.schemas import ENDED, LENGTH, SEEDS, STOP, search, seeds_of

SUITE = seeds_of(Path(__file__).parents[3] / "data/json_schema_test_suite.json")
COUNT = int(os.environ.get("SPLITSERVE_TEST_SCHEMAS", "300"))


@pytest.mark.parametrize("seeds", [SEEDS, SUITE], ids=["own", "suite"])
def test_an_answer_that_ends_by_itself_satisfies_its_schema(seeds: list[Any]) -> None:
    ends, broken = search(seeds, COUNT, seed=7)
    assert not broken, broken[0]
    assert ends.total() == COUNT
    assert ends[STOP] > COUNT // 3
    assert ends[ENDED] + ends[LENGTH] < COUNT // 10
