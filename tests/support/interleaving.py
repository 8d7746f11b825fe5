"""Interpreted programs that run at once: at every access to memory another one may go on, as on a GPU.

    with interleaved(seed):
        kernel[(8,)](…)

Each program of a launch has a thread, of which one runs at a time. Every access is seen by all at once. On a GPU plain
writes may be seen later, but no kernel reads what another of its programs writes (the sanitizer sees to it); what
atomics change is seen at once there as well.
"""

from __future__ import annotations

import inspect
import math
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

ACCESSES = ("create_masked_load", "create_masked_store", "create_atomic_cas", "create_atomic_rmw")


class Programs:
    """Those of one launch.

    Args:
        builder: of the interpreter, which knows the number of the program that runs.
        generator: of the order.
    """

    def __init__(self, builder: Any, generator: random.Random) -> None:
        self._builder, self._random = builder, generator
        self._turns: dict[int, threading.Semaphore] = {}  # of the threads that have not ended
        self._numbers: dict[int, Any] = {}
        self._failed: list[BaseException] = []
        self._done = threading.Semaphore(0)

    def run(self, calls: list[tuple[Any, Any]]) -> None:
        """Runs functions, each with the number of its program."""
        threads = []
        for index, (number, call) in enumerate(calls):
            self._turns[index], self._numbers[index] = threading.Semaphore(0), number
            threads.append(threading.Thread(target=self._run, args=(index, call), name=str(index)))
        for thread in threads:
            thread.start()
        self._go_on()
        self._done.acquire()
        for thread in threads:
            thread.join()
        if self._failed:
            raise self._failed[0]

    def _run(self, index: int, call: Any) -> None:
        self._turns[index].acquire()
        try:
            self._builder.grid_idx = self._numbers[index]
            call()
        except BaseException as error:  # of another thread than the test's
            self._failed.append(error)
        del self._turns[index]
        self._go_on()

    def _go_on(self) -> None:
        """Lets any program go on, or the launch end."""
        if self._turns:
            self._turns[self._random.choice(list(self._turns))].release()
        else:
            self._done.release()

    def switch(self) -> None:
        """Waits until this program may go on."""
        index = int(threading.current_thread().name)
        self._go_on()
        self._turns[index].acquire()
        self._builder.grid_idx = self._numbers[index]


class Collector:
    """Stands for a kernel's function: its programs run when the last of them is called.

    Args:
        function: of the kernel.
        builder: of the interpreter.
        run: is given the programs.
    """

    def __init__(self, function: Any, builder: Any, run: Any) -> None:
        self._function, self._builder, self._run = function, builder, run
        self._calls: list[tuple[Any, Any]] = []
        self.__name__, self.__globals__ = function.__name__, function.__globals__
        self.__signature__ = inspect.signature(function)

    def __call__(self, **arguments: Any) -> None:
        self._calls.append((self._builder.grid_idx, lambda: self._function(**arguments)))
        if len(self._calls) == math.prod(self._builder.grid_dim):
            self._run(self._calls)


@contextmanager
def interleaved(seed: int) -> Iterator[None]:
    """Runs the programs of every launch at once."""
    from triton.runtime import interpreter

    builder, generator = interpreter.interpreter_builder, random.Random(seed)
    call = interpreter.GridExecutor.__call__
    running: list[Programs] = []

    def switching(access: Any) -> Any:
        def switched(*arguments: Any) -> Any:
            running[0].switch()
            return access(*arguments)

        return switched

    def interleaved_call(executing: Any, *arguments: Any, **named: Any) -> None:
        running[:] = [Programs(builder, generator)]
        with mock.patch.object(executing, "fn", Collector(executing.fn, builder, running[0].run)):
            call(executing, *arguments, **named)

    with (
        mock.patch.multiple(builder, **{name: switching(getattr(builder, name)) for name in ACCESSES}),
        mock.patch.object(interpreter.GridExecutor, "__call__", interleaved_call),
    ):
        yield
