"""A sanitizer for interpreted kernels: finds what goes well in an interpreter, program after program, and not on a GPU.

- Memory: whatever a kernel reads or writes belongs to one of the tensors it was given.
- Races: no two programs of a launch write the same element, and none reads what another one writes. What is changed by
  atomics alone may be, and may be read, if the kernel is one that says why.
- One store that writes one element twice writes the same.
- What `tl.multiple_of` promises the compiler is true.

Programs run in random order, so that what their order changes is found by the tests' own comparisons.
"""

from __future__ import annotations

import functools
import random
from typing import Any, NamedTuple

import numpy as np
import torch

READ, WRITE, ATOMIC = 1, 2, 4
READS_BESIDE_ATOMICS = {"_insert"}  # whose loads may be outdated, as it says
FOLLOWS_POINTERS = {"_gather_from"}  # which are in memory, to the arenas of all ranks


class Accesses(NamedTuple):
    """Elements that one operation of one program reads or writes."""

    addresses: np.ndarray
    kind: int
    program: int


class Sanitizer:
    """Stands between the interpreter and memory.

    Args:
        seed: of the order of programs.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._builder: Any = None
        self._kernel = ""
        self._begins = self._ends = np.empty(0, np.uint64)
        self._accesses: list[Accesses] = []

    def watch(self) -> None:
        """Watches all kernels of this process from now on."""
        from triton.runtime import interpreter

        self._builder = builder = interpreter.interpreter_builder
        executor = interpreter.GridExecutor
        load, store, cas, rmw = (
            getattr(builder, f"create_{name}") for name in ("masked_load", "masked_store", "atomic_cas", "atomic_rmw")
        )
        set_grid_idx, call, set_attr = builder.set_grid_idx, executor.__call__, interpreter.TensorHandle.set_attr

        def watched_load(ptrs: Any, mask: Any, *rest: Any) -> Any:
            self._note(READ, ptrs.data, mask.data)
            return load(ptrs, mask, *rest)

        def watched_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._note(WRITE, ptrs.data, mask.data, value.data)
            return store(ptrs, value, mask, *rest)

        def watched_cas(ptr: Any, *rest: Any) -> Any:
            self._note(ATOMIC, ptr.data, np.ones_like(ptr.data, bool))
            return cas(ptr, *rest)

        def watched_rmw(operation: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._note(ATOMIC, ptr.data, mask.data)
            return rmw(operation, ptr, value, mask, *rest)

        def in_random_order(*index: int) -> None:
            number = self._order(int(np.ravel_multi_index(index, builder.grid_dim)), builder.grid_dim)
            set_grid_idx(*map(int, np.unravel_index(number, builder.grid_dim)))

        def watched_call(executing: Any, *arguments: Any, **named: Any) -> None:
            self._begin(executing.fn.__name__, [*arguments, *named.values()])
            call(executing, *arguments, **named)
            self._check_races()

        def checked_set_attr(handle: Any, name: str, values: Any) -> None:
            for value in values if name == "tt.divisibility" else ():
                assert not np.any(handle.data % value), f"{self._kernel}: not all are multiples of {value}"
            set_attr(handle, name, values)

        builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
        builder.create_atomic_cas, builder.create_atomic_rmw = watched_cas, watched_rmw
        builder.set_grid_idx, executor.__call__ = in_random_order, watched_call
        interpreter.TensorHandle.set_attr = checked_set_attr

    @property
    def _program(self) -> int:
        return int(np.ravel_multi_index(self._builder.grid_idx, self._builder.grid_dim))

    def _order(self, number: int, grid: tuple[int, ...]) -> int:
        """Which program runs as the given one."""
        if number == 0:
            self._programs = list(range(int(np.prod(grid))))
            self._random.shuffle(self._programs)
        return self._programs[number]

    def _begin(self, kernel: str, arguments: list[Any]) -> None:
        self._kernel, self._accesses = kernel, []
        tensors = [each for each in arguments if isinstance(each, torch.Tensor) and each.numel()]
        spans = sorted((each.data_ptr(), each.data_ptr() + _span(each)) for each in tensors)
        self._begins, self._ends = np.array(spans, np.uint64).reshape(-1, 2).T

    def _note(self, kind: int, pointers: np.ndarray, mask: np.ndarray, values: np.ndarray | None = None) -> None:
        pointers, mask = np.broadcast_arrays(pointers, mask)
        addresses = pointers[mask].astype(np.uint64)
        if not addresses.size:
            return
        if self._kernel not in FOLLOWS_POINTERS:
            self._check_memory(addresses)
        if values is not None:
            self._check_store(addresses, np.broadcast_to(values, mask.shape)[mask])
        self._accesses.append(Accesses(addresses, kind, self._program))

    def _check_memory(self, addresses: np.ndarray) -> None:
        """Each is in the last of the tensors that begin at or before it, or in one that overlaps that."""
        ends = np.maximum.accumulate(self._ends)
        place = np.searchsorted(self._begins, addresses, side="right")
        outside = (place == 0) | (addresses >= ends[place - 1])
        assert not outside.any(), f"{self._kernel}: program {self._program} is outside of its tensors"

    def _check_store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        order = np.argsort(addresses, kind="stable")
        addresses, values = addresses[order], values[order]
        differs = (addresses[1:] == addresses[:-1]) & (values[1:] != values[:-1]) & (values[1:] == values[1:])
        assert not differs.any(), f"{self._kernel}: a store writes different values into one element"

    def _check_races(self) -> None:
        """No element is written by one program and touched by another; see the module."""
        accesses, self._accesses = self._accesses, []
        if not accesses:
            return
        sizes = [len(each.addresses) for each in accesses]
        addresses = np.concatenate([each.addresses for each in accesses])
        kinds = np.repeat([each.kind for each in accesses], sizes)
        programs = np.repeat([each.program for each in accesses], sizes)
        order = np.argsort(addresses, kind="stable")
        addresses, kinds, programs = addresses[order], kinds[order], programs[order]
        firsts = np.flatnonzero(np.diff(addresses, prepend=addresses[0] - np.uint64(1)))
        of_element = np.bitwise_or.reduceat(kinds, firsts)
        is_shared = np.minimum.reduceat(programs, firsts) != np.maximum.reduceat(programs, firsts)
        raced = is_shared & ((of_element & WRITE) != 0)
        if self._kernel not in READS_BESIDE_ATOMICS:
            raced |= is_shared & (of_element == READ | ATOMIC)
        assert not raced.any(), f"{self._kernel}: {raced.sum()} elements are written by a program and used by another"


@functools.cache
def install() -> None:
    """Watches all kernels of this process from now on; once."""
    Sanitizer().watch()


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first to behind the last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
