"""What a decision costs where many models share an inventory: counted, as all of them are taken on one event loop."""

from __future__ import annotations

import cProfile
import pstats

from autoscaler.sharing.claims.shares import GPUS, MONEY, of_class
from tests.support.classes.shared_models import Models, Wish

KINDS = {"w": (1.0, 1.0), "x": (2.0, 2.5), "y": (3.0, 3.1), "z": (4.0, 5.0)}
GPUS_EACH = {"w": 1, "x": 1, "y": 2, "z": 2}
MODELS = 16
MOST_CALLS = 400_000
"""It is 250,000, some hundredths of a second; it was twice that before steps that had no room were passed over."""


def test_a_decision_of_sixteen_models_with_four_classes_is_cheap() -> None:
    """They want three times what there is of money, of GPUs and of each class."""
    wishes = {f"m{number:02}": Wish(6, KINDS, {"w": 1}, GPUS_EACH) for number in range(MODELS)}
    limits = {of_class(kind): float(count) for kind, count in zip(KINDS, (32, 16, 16, 8), strict=True)}
    models = Models(wishes, limits | {GPUS: 2.0 * MODELS, MONEY: 6.0 * MODELS})
    for one in models.models:
        one.decide(models.clock.now)
    models.round()
    profile = cProfile.Profile()
    profile.enable()
    models.models[0].decide(models.clock.now)
    profile.disable()
    assert pstats.Stats(profile).total_calls < MOST_CALLS  # type: ignore[attr-defined]
