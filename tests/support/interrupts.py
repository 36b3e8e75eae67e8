"""Interrupts at chosen points: at each of those at which CPython looks for signals, a handler's
exception is raised.

The main thread looks for signals when a function begins, when a call has returned, and at a jump
back (and in C code that waits, where the effect is that of the call before). ``sys.settrace`` sees
these points, and raises there.
"""

from __future__ import annotations

import contextlib
import dis
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

_CALLS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW"}


class Interrupt(KeyboardInterrupt):
    """What is raised; no other code does."""


@contextlib.contextmanager
def dropped_by_python(kind: type[BaseException]) -> Iterator[None]:
    """``kind`` is no failure where Python drops it: in a destructor, a callback of the collector, a
    generator's end.
    """
    before = sys.unraisablehook

    def tell(hooked: sys.UnraisableHookArgs) -> None:
        if not issubclass(hooked.exc_type, kind):
            before(hooked)

    sys.unraisablehook = tell
    try:
        yield
    finally:
        sys.unraisablehook = before


def free_loggers() -> None:
    """Free what ``logging`` has locked: before Python 3.13 an interrupt in it leaves the lock of a
    handler taken.
    """
    handlers = [reference() for reference in logging._handlerList]  # type: ignore[attr-defined]
    for lock in (logging._lock, *(handler.lock for handler in handlers if handler)):  # type: ignore[attr-defined]
        while lock is not None and lock._is_owned():
            lock.release()


class Interrupts:
    """Raises at the ``at``-th of the points that :meth:`run` comes to; with ``at`` 0 it only counts
    them.
    """

    def __init__(self, at: int = 0) -> None:
        """Nothing has run yet."""
        self._at = at
        self._before: dict[FrameType, int] = {}
        self.count = 0
        self.where = ""

    def run(self, call: Callable[[], Any]) -> Any:
        """Run ``call``, at most until the point is there: then :class:`Interrupt` is raised in
        it.
        """
        outer = sys.gettrace()
        with dropped_by_python(Interrupt):
            sys.settrace(self._enter)
            try:
                return call()
            finally:
                sys.settrace(outer)
                self._before.clear()
                free_loggers()

    def _point(self, frame: FrameType) -> None:
        self.count += 1
        if self.count == self._at:
            sys.settrace(None)
            stack = [
                f"{each.f_code.co_qualname}:{each.f_lineno}"
                for each, _ in traceback.walk_stack(frame)
            ]
            self.where = f"{frame.f_code.co_filename} {' < '.join(stack[:8])}"
            raise Interrupt

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename == __file__ or frame.f_code.co_name == "<module>":
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._point(frame)
        return self._trace

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if event != "opcode":
            self._before.pop(frame, None)
            return self._trace
        code, here = _code(frame.f_code), frame.f_lasti
        before = self._before.get(frame)
        self._before[frame] = here
        if code.names.get(here) == "JUMP_BACKWARD" or (
            before is not None
            and code.names.get(before) in _CALLS
            and code.handler(before) == code.handler(here)
        ):
            self._point(frame)
        return self._trace


class _Code:
    """The instructions of a function, by offset, and who handles what is raised in them."""

    def __init__(self, code: CodeType) -> None:
        self.names = {
            instruction.offset: instruction.opname for instruction in dis.get_instructions(code)
        }
        self._handlers = [
            (entry.start, entry.end, entry.target, entry.depth)
            for entry in dis._parse_exception_table(code)  # type: ignore[attr-defined]
        ]

    def handler(self, offset: int) -> tuple[int, int] | None:
        return next(
            (
                (target, depth)
                for start, end, target, depth in self._handlers
                if start <= offset < end
            ),
            None,
        )


_codes: dict[CodeType, _Code] = {}


def _code(code: CodeType) -> _Code:
    if code not in _codes:
        _codes[code] = _Code(code)
    return _codes[code]
