"""Compiles kernels as tests launch them, for a GPU that is not there.

    python -m tests.support.launches record FILE PYTEST-ARGUMENTS    runs tests, notes what they launch
    python -m tests.support.launches compile FILE                    compiles each form of it once, prints JSON lines

`SIGNATURES` beside the kernels say what is measured. This is what a GPU would compile in these tests: other dims,
pointers that are not aligned to 16 bytes, numbers that are 1 or a multiple of 16, as Triton distinguishes them. Two
processes, as kernels that are interpreted cannot be compiled.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

TARGET = 90
_ALIGNMENT = 16


class Launch(NamedTuple):
    """A launch of a kernel.

    Attributes:
        module, kernel: names.
        arguments: of a tensor its dtype, and where it begins modulo the alignment.
        num_warps: of a program.
        constants: by name.
    """

    module: str
    kernel: str
    arguments: tuple[Any, ...]
    num_warps: int
    constants: tuple[tuple[str, Any], ...]


def record(file: Path, pytest_arguments: Sequence[str]) -> int:
    """Runs tests and writes the different launches among theirs; returns the status of pytest."""
    import pytest

    from rowmesh.ops import gpu

    launched, launch = set(), gpu.launch

    def noting(kernel: Any, programs: Any, *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
        given = tuple(_described(argument) for argument in arguments)
        launched.add((kernel.fn.__module__, kernel.fn.__name__, given, num_warps, tuple(constants.items())))
        launch(kernel, programs, *arguments, num_warps=num_warps, **constants)

    gpu.launch = noting  # before kernels are imported
    status = int(pytest.main(list(pytest_arguments)))
    file.write_bytes(pickle.dumps(launched))
    return status


def compile_forms(file: Path) -> Iterator[dict[str, Any]]:
    """A launch of each form that Triton distinguishes, and what is wrong with its code."""
    os.environ["TRITON_INTERPRET"] = "0"
    from triton.runtime import driver

    from benchmarks.gpu_hazards import approximate, unordered

    driver.set_active(_NoGpu())
    forms = set()
    for launch in sorted((Launch(*each) for each in pickle.loads(file.read_bytes())), key=repr):
        kernel = getattr(import_module(launch.module), launch.kernel)
        line: dict[str, Any] = {"kernel": launch.kernel.lstrip("_"), "launch": repr(launch)}
        try:
            form = kernel.warmup(
                *map(_made, launch.arguments),
                grid=(1,),
                num_warps=launch.num_warps,
                enable_fp_fusion=False,
                **dict(launch.constants),
            )
            if form in forms:
                continue
            forms.add(form)
            line |= {"unordered": unordered(form.asm["ttgir"]), "approximate": approximate(form.asm["ptx"])}
        except Exception as error:  # triton's errors have no common base
            line["error"] = f"{type(error).__name__}: {error}"
        yield line


class _NoGpu:
    """What Triton asks for before it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", TARGET, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _described(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT
    return argument


def _made(described: Any) -> Any:
    """Such an argument."""
    if not isinstance(described, tuple):
        return described
    dtype, begin = described
    return torch.empty(2 * _ALIGNMENT, dtype=torch.uint8)[begin : begin + dtype.itemsize].view(dtype)


if __name__ == "__main__":
    what, path, *more = sys.argv[1:]
    if what == "record":
        sys.exit(record(Path(path), more))
    for found in compile_forms(Path(path)):
        sys.stdout.write(f"{json.dumps(found)}\n")
