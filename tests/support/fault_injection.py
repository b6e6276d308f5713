"""Puts exceptions into functions: finds those that a piece of work calls, and makes one of them fail at every call."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
_NESTED: Final = 0x10
_TRAMPOLINE = """
def trampoline(*args, **kwargs):
    from tests.support import fault_injection

    return fault_injection.run_injected(%d, args, kwargs)
"""


@functools.cache
def functions() -> dict[CodeType, list[FunctionType]]:
    """The proxy's functions by their code, of all modules that are loaded by now."""
    by_code: dict[CodeType, list[FunctionType]] = {}
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename.startswith(str(ROOT / "proxy")):
            by_code.setdefault(each.__code__, []).append(each)
    return by_code


class Injected(Exception):
    """What is put in. ``CANARY`` must not be seen in any log."""

    def __init__(self) -> None:
        super().__init__("CANARY")


class Injection:
    """One function that fails while this is entered and *armed* says so.

    ``met`` counts its failures; ``early`` tells what *early* said at the first of them.
    """

    def __init__(self, code: CodeType, armed: Callable[[], bool], early: Callable[[], bool]) -> None:
        self.code = code
        self.met = 0
        self.early = False
        self._is_early = early
        self._armed = armed
        self._originals: list[tuple[FunctionType, FunctionType]] = []

    def __enter__(self) -> Injection:
        _RUNNING.append(self)
        matching = functions().get(self.code, [])
        if matching and not self.code.co_freevars and not self.code.co_flags & _NESTED:
            for at, function in enumerate(matching):
                self._replace(at, function)
        else:
            # A function made anew at each call of another has no body that could be exchanged: it fails once a thread.
            self._watch()
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2, initializer=self._watch))
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        for function, original in self._originals:
            function.__code__ = original.__code__
        _RUNNING.remove(self)

    def fail(self) -> None:
        """Raise, if armed."""
        if self._armed():
            self.early = self.early or (not self.met and self._is_early())
            self.met += 1
            raise Injected

    def call(self, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Fail, or do what the function does."""
        self.fail()
        return self._originals[at][1](*args, **kwargs)

    def _replace(self, at: int, function: FunctionType) -> None:
        code, closure = function.__code__, function.__closure__
        original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
        original.__kwdefaults__ = function.__kwdefaults__
        self._originals.append((function, original))
        namespace: dict[str, Any] = {}
        exec(_TRAMPOLINE % at, namespace)
        function.__code__ = namespace["trampoline"].__code__

    def _watch(self) -> None:
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is self.code:
            self.fail()


_RUNNING: list[Injection] = []


def run_injected(at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function whose body was exchanged does."""
    return _RUNNING[-1].call(at, args, kwargs)


@contextlib.contextmanager
def calls_seen(on_call: Callable[[CodeType], None]) -> Iterator[None]:
    """Give *on_call* the named functions of the proxy that are called meanwhile, by this thread or a new worker."""
    roots = str(ROOT / "proxy")

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(roots) and code.co_name[0] != "<":
            on_call(code)

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2, initializer=lambda: sys.setprofile(note)))
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))


def name_of(code: CodeType) -> str:
    """File and qualified name of a function."""
    return f"{Path(code.co_filename).relative_to(ROOT)} {code.co_qualname}"
