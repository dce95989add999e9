"""The policy `custom`: a function of your own for one pool. Loaded and tried when the policy file is read.

Behavior, bounds, the GPU budget and the drain apply to it as to every kind. A function that fails does not end the
control loop: the count is kept, and the next call begins with a new memory. A slow function does not delay a running
autoscaler either: it has a daemon thread of its own, which is waited for no longer than `CALL_S` (`bounded_functions`).
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from autoscaler.policies.policy_file import CustomPool, ScalingPolicy
from autoscaler.policies.recommendation import PoolStatus, Recommend, Recommendation
from autoscaler.snapshot import DecodeSignals, PrefillSignals, Snapshot
from splitserve.errors import ConfigError
from splitserve.runtime.bounded_file import read_small_text

CALL_S = 1.0
"""How long the control loop waits for one recommendation."""
LOAD_S = 10.0
"""How long loading and trying a function may take."""

_PASSED_THROUGH = ("importlib", "concurrent/futures")
"""In paths of code that stands between this module and a function in a traceback."""

T = TypeVar("T")


def _on_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Calls the function on a daemon thread of its own. The future has its result or its exception: a RuntimeError in
    place of a BaseException that is no Exception, such as a SystemExit, since nobody interrupts this thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:
            failure = RuntimeError(str(error) or type(error).__name__)
            future.set_exception(failure.with_traceback(error.__traceback__))

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class BoundedFunction:
    """A pool's function that answers within `limit_s` seconds; else the count is kept. A function that is overdue is
    not called again until it has returned, and its late answer goes unused."""

    def __init__(self, function: Recommend, pool: str, limit_s: float | None = None) -> None:
        self._function, self._pool = function, pool
        self._limit_s = CALL_S if limit_s is None else limit_s
        self._overdue: Future[tuple[Recommendation, Any]] | None = None
        self._began_s = 0.0

    def __call__(self, memory: Any, snapshot: Snapshot, status: PoolStatus) -> tuple[Recommendation, Any]:
        """As `Recommend`. After an overdue call it begins with a new memory, as after an error."""
        try:
            if self._overdue is not None:
                self._overdue.result(0.0)
            # Stored before the wait: the call goes on if the wait is interrupted.
            self._began_s = time.monotonic()
            call = partial(self._function, memory, snapshot, status)
            self._overdue = _on_thread(call, f"policy {self._pool}")
            answer = self._overdue.result(self._limit_s)
        except TimeoutError:
            error = f"{self._pool}.function: has not returned for {time.monotonic() - self._began_s:.0f} s"
            return _kept(status, "custom policy is overdue: count kept", error)
        self._overdue = None
        return answer


def custom_policy(pool: CustomPool, name: str) -> Recommend:
    """The pool's function, which never raises. Raises ConfigError when it cannot be loaded or breaks the contract."""
    field = f"{name}.function"
    loading = _on_thread(partial(_usable, pool), f"policy {name}")
    try:
        function = loading.result(LOAD_S)
    except Exception as error:
        # Foreign code: whatever it raises, a TimeoutError too, the policy is refused.
        why = f"{_where(error)}{str(error) or type(error).__name__}"
        why = why if loading.done() else f"has not returned for {LOAD_S:.0f} s"
        raise ConfigError(f"{field}: {pool.function}: {why}", field=field) from None
    return partial(_guarded, function)


def loaded_functions(policy: ScalingPolicy) -> dict[str, Recommend]:
    """The custom policies by pool. Raises ConfigError."""
    return {
        name: custom_policy(pool, name) for name, pool in policy.pools.items() if isinstance(pool, CustomPool)
    }


def bounded_functions(functions: Mapping[str, Recommend]) -> dict[str, Recommend]:
    """The same functions, each with `CALL_S` seconds of real time for an answer: not for simulations."""
    return {pool: BoundedFunction(function, pool) for pool, function in functions.items()}


def _usable(pool: CustomPool) -> Recommend:
    """The pool's function with its options, loaded and tried. Raises what loading or the function raises."""
    loaded: Any = _loaded(pool.function)
    function: Recommend = partial(loaded, **pool.options) if pool.options else loaded
    _try(function)
    return function


def _loaded(reference: str) -> Callable[..., Any]:
    place, _, attribute = reference.rpartition(":")
    if not place:
        raise LookupError("write module:function, or file.py:function")
    if place.endswith(".py"):
        function = getattr(_run(Path(place)), attribute)
    else:
        function = getattr(importlib.import_module(place), attribute)
    if not callable(function):
        raise TypeError("is not a function")
    return function  # type: ignore[no-any-return]


def _run(path: Path) -> Any:
    """The module in this file, run anew, so that a reload sees its edits. Compiled here, past any cached bytecode."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"splitserve_policy_{path.stem}"
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader=None))  # type: ignore[arg-type]
    module.__file__ = str(path)
    exec(compile(read_small_text(path), str(path), "exec"), module.__dict__)
    return module


def _try(function: Recommend) -> None:
    """Calls the function twice, as before anything is measured. Raises its exception, or TypeError for a wrong
    answer."""
    snapshot, status = Snapshot(0.0, PrefillSignals(), DecodeSignals()), PoolStatus(1, 1, 0)
    first, _ = _checked(function(None, snapshot, status))
    again, _ = _checked(function(None, snapshot, status))
    if first != again:
        raise TypeError(
            f"answers {first} and then {again} to the same snapshot: it must not read clocks or keep state"
        )


def _checked(answer: Any) -> tuple[Recommendation, Any]:
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Recommendation)):
        raise TypeError(f"must return (Recommendation, memory), not {answer!r:.80}")
    wanted, reason, need = answer[0].wanted, answer[0].reason, answer[0].need
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 0:
        raise TypeError(f"wanted must be a whole number from 0 on, not {wanted!r:.40}")
    if not isinstance(reason, str) or not reason.strip():
        raise TypeError("reason must say why, in one line")
    if not isinstance(need, int | float) or not math.isfinite(need) or need < 0:
        raise TypeError(f"need must be a finite number from 0 on, not {need!r:.40}")
    return answer[0], answer[1]


def _guarded(
    function: Recommend, memory: Any, snapshot: Snapshot, status: PoolStatus
) -> tuple[Recommendation, Any]:
    try:
        return _checked(function(memory, snapshot, status))
    except BaseException as error:
        # Foreign code: whatever it raises, the loop goes on, and the next call begins without memory.
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # whoever simulates wants to stop
        error_text = f"{_where(error)}{type(error).__name__}: {error}"
        return _kept(status, "custom policy failed: count kept", error_text)


def _kept(status: PoolStatus, reason: str, error: str) -> tuple[Recommendation, Any]:
    """The answer in place of a function's: the current count, and no memory."""
    return Recommendation(status.current, reason, 0.0, error), None


def _where(error: BaseException) -> str:
    """The line of the error: that of a syntax error, else the innermost line of the function's code that ran."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: "
    trace, line = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if Path(file).parent != Path(__file__).parent and not any(name in file for name in _PASSED_THROUGH):
            line = f"line {trace.tb_lineno}: "
        trace = trace.tb_next
    return line
