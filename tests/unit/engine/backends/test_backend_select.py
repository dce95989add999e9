"""The backend that a setting chooses, and what is refused."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest
import torch

from engine.backends.select import choose_backend
from splitserve.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages that are installed."""
    names = {"triton"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: ModuleSpec(name, None) if name in names else None
    )
    return names


@pytest.mark.parametrize("setting", ["auto", "torch"])
def test_cpu_computes_in_torch(installed: set[str], setting: str) -> None:
    assert choose_backend(setting, CPU) == "torch"


def test_cuda_computes_with_triton_where_it_is_installed(installed: set[str]) -> None:
    assert choose_backend("auto", CUDA) == "triton"
    assert choose_backend("triton", CUDA) == "triton"
    assert choose_backend("torch", CUDA) == "torch"
    installed.clear()
    assert choose_backend("auto", CUDA) == "torch"


@pytest.mark.parametrize(
    ("setting", "device", "missing", "words"),
    [
        ("triton", CPU, set(), "needs a cuda device, not cpu"),
        ("triton", CUDA, {"triton"}, "needs triton, which is not installed"),
    ],
)
def test_what_cannot_work_is_refused(
    installed: set[str], setting: str, device: torch.device, missing: set[str], words: str
) -> None:
    installed -= missing
    with pytest.raises(ConfigError, match=words) as refusal:
        choose_backend(setting, device)
    assert refusal.value.field == "engine.attention_backend"
