"""Puts the fused kernels in the place of a model's own operations, where they give the same.

What may be replaced is found by structure, not by the names of models: `transformers` marks such classes only where the
package `kernels` is installed. In one pass over a few tokens each candidate's result is compared with the module's own,
on the inputs that the model gives it and on random ones of that shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.backends.cuda.fused import rotary
from engine.backends.cuda.fused.forward import FusedForward, FusedUnary
from engine.backends.cuda.fused.gated import fused_feed_forwards
from engine.backends.cuda.fused.rms_norm import fused_norms
from engine.model.attention_interface import AttentionContext
from engine.model.probe import probe_logits
from engine.model.sibling_linears import relative_difference
from splitserve.logs import log_event

MAX_DEVIATIONS = {torch.float32: 5e-6, torch.bfloat16: 0.01}
"""Of one module's result, see `deviation`. Another order of roundings differs in a third of the elements."""
MAX_LOGITS_DIFFERENCES = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Of the whole model's logits, relative norm: many layers carry one rounding far."""
SPREAD = 2.0
"""Standard deviation of random inputs."""
NOT_CALLED = "not called"


class _Trial(FusedForward):
    """Computes a module's own result and compares it with those of the candidates: `chosen` is the first that agrees.

    Those after it are not even compiled.
    """

    def __init__(self, module: nn.Module, candidates: list[FusedUnary], numbers: torch.Generator) -> None:
        super().__init__(module)
        self._candidates, self._numbers = candidates, numbers
        self._called = False
        self.why = NOT_CALLED

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See the class."""
        self._called = True
        if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor):
            self._candidates, self.why = [], "called with something else than one tensor"
        while self._candidates:
            why = verdict(partial(self._deviation, self._candidates[0], args[0]), args[0].dtype)
            if why is None:
                break
            self._candidates, self.why = self._candidates[1:], why
        return self.own(*args, **kwargs)

    def _deviation(self, candidate: FusedUnary, x: torch.Tensor) -> float:
        return max(candidate.difference(x), candidate.difference(random_like(x, self._numbers)))

    @property
    def chosen(self) -> FusedUnary | None:
        """The candidate that agreed in every call."""
        return self._candidates[0] if self._called and self._candidates else None


class _RotaryTrial(rotary.FusedRotary):
    """An attention module whose rotations are the function's own, compared with the kernel's."""

    def __init__(self, module: nn.Module, numbers: torch.Generator) -> None:
        super().__init__(module, self._compared)
        self._numbers = numbers
        self.why: str | None = NOT_CALLED

    def _compared(self, own: rotary.Rotate) -> rotary.Rotate:
        def call(*args: Any, **kwargs: Any) -> rotary.Rotated:
            if kwargs or len(args) != 4 or not all(isinstance(given, torch.Tensor) for given in args):
                self.why = "called with something else than four tensors"
            elif self.why in (None, NOT_CALLED):
                self.why = verdict(partial(self._deviation, own, *args), args[0].dtype)
            return own(*args, **kwargs)

        return call

    def _deviation(self, own: rotary.Rotate, *given: torch.Tensor) -> float:
        again = [random_like(one, self._numbers) for one in given]
        return max(rotary.difference(own, *given), rotary.difference(own, *again))


def fuse(module: nn.Module, context: AttentionContext) -> int:
    """Replaces what the kernels compute alike in a model bound to `context`; returns in how many modules.

    Logs what stays, and why. Modules keep their classes, names and weights: `unfuse` undoes it. Does nothing to a model
    that is fused.
    """
    if any(isinstance(vars(part).get("forward"), FusedForward) for part in module.modules()):
        return 0
    numbers = torch.Generator(next(module.parameters()).device).manual_seed(0)
    before = probe_logits(module, context)
    trials: list[_Trial | _RotaryTrial] = []
    for part in module.modules():
        if candidates := fused_norms(part) or fused_feed_forwards(part):
            trials.append(_Trial(part, candidates, numbers))
        elif rotary.calls_rotary(part):
            trials.append(_RotaryTrial(part, numbers))
    try:
        _put([(trial.module, trial) for trial in trials])
        probe_logits(module, context)
    finally:
        unfuse(module)
    chosen: list[tuple[nn.Module, FusedForward]] = []
    left: Counter[tuple[str, str]] = Counter()
    for trial in trials:
        replacement = _chosen(trial)
        if replacement is None:
            left[type(trial.module).__name__, str(trial.why)] += 1
        else:
            chosen.append((trial.module, replacement))
    for (name, why), count in left.items():
        log_event("engine.module_not_fused", module=name, count=count, why=why)
    return _installed(module, context, chosen, before)


def unfuse(module: nn.Module) -> None:
    """Gives all modules their own forward passes back."""
    for part in module.modules():
        if isinstance(vars(part).get("forward"), FusedForward):
            del part.forward


def verdict(difference: Callable[[], float], dtype: torch.dtype) -> str | None:
    """Why a kernel does not stand for a module, in one line; None if it does."""
    try:
        found = difference()
    except Exception as error:  # of whatever kind: compilers raise many, and the module's own code is there
        return (str(error).strip().partition("\n")[0] or type(error).__name__)[:300]
    return None if found <= MAX_DEVIATIONS.get(dtype, -1.0) else f"results differ by {found:.2g}"


def random_like(x: torch.Tensor, numbers: torch.Generator) -> torch.Tensor:
    """Random numbers of the shape and dtype."""
    drawn = torch.randn(x.shape, generator=numbers, device=x.device, dtype=torch.float32)
    return (SPREAD * drawn).to(x.dtype)


def _chosen(trial: _Trial | _RotaryTrial) -> FusedForward | None:
    if isinstance(trial, _Trial):
        return trial.chosen
    return None if trial.why is not None else rotary.FusedRotary(trial.module, rotary.by_kernel)


def _put(forwards: list[tuple[nn.Module, FusedForward]]) -> None:
    for module, forward in forwards:
        module.forward = forward


def _installed(
    module: nn.Module,
    context: AttentionContext,
    chosen: list[tuple[nn.Module, FusedForward]],
    before: torch.Tensor,
) -> int:
    """Puts them in place, unless the model as a whole gives something else then."""
    _put(chosen)
    try:
        difference = relative_difference(probe_logits(module, context).float(), before.float())
        allowed = MAX_LOGITS_DIFFERENCES.get(before.dtype, -1.0)
        why = None if difference <= allowed else f"logits differ by {difference:.3g}"
    except Exception as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
    if why is not None:
        unfuse(module)
        log_event("engine.fused_kernels_off", why=why)
        return 0
    log_event("engine.fused_kernels", modules=dict(Counter(type(part).__name__ for part, _ in chosen)))
    return len(chosen)
