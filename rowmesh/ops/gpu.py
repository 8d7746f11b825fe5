"""GPU: the parts that all GPU kernels share and that need no Triton.

[Note: GPU kernels]

`rowmesh/ops/<op>/cuda.py` holds an op's Triton kernels and the plain functions over tensors that launch them. Triton is
imported with those modules and nowhere else, so rowmesh runs without it. These rules hold for all of them:

- They run on the tensors' device; on CPU tensors where `TRITON_INTERPRET=1` stood in the environment before the import.
- The host never waits: no size is read back. Counts stay on the device as tensors of one element; a kernel that follows
  is launched for the upper bound, and its programs look at the count themselves.
- Rows are addressed with 64 bits. Floating-point numbers are never added by atomics, and results do not depend on the
  order in which programs run: a replay is equal to the bit.
- Products are rounded before they are added, as torch's are, whatever the default of a Triton release (`launch`).
- Arguments are checked as far as the host knows them, dtypes and shapes. Ids and slots must be in range.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError

# Programs of a kernel that finds out on the device how many rows there are. Enough to fill a GPU: each goes on to
# further rows, and none is started for rows that turn out not to be there.
MOST_PROGRAMS = 4096
_TILE_BYTES = 8192
# Threads of a pipeline launch, too. The interpreter has one state for all of them, and Triton does not say that two may
# compile a kernel, or load it, at once.
_launching = threading.Lock()
# Compiled kernels, with the constants that end their arguments; see `_kind_of`. Triton finds it again at every launch,
# which takes the host longer than most kernels take a GPU.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


class Signature(NamedTuple):
    """The types that a kernel is compiled for where there is no GPU. Every `cuda.py` lists its kernels as `SIGNATURES`.

    Attributes:
        kernel: a `triton.jit` function.
        types: of its arguments but the constants, in order and separated by blanks, as Triton writes them: `*fp32 i32`.
        constants: values of its `constexpr` arguments, and None for every optional pointer that is left out.
        num_warps: as it is launched.
    """

    kernel: Any
    types: str
    constants: dict[str, Any]
    num_warps: int = 4

    @property
    def name(self) -> str:
        """The kernel's name, without the underscore of what is private."""
        return self.kernel.__name__.lstrip("_")


def launch(kernel: Any, programs: int | tuple[int, ...], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Runs a kernel on the device of its first argument, on the current stream; does nothing where there is no program.

    Args:
        kernel: a `triton.jit` function.
        programs: how many, in one to three dimensions.
        arguments: of the kernel, the first a tensor.
        num_warps: of a program.
        constants: the kernel's `constexpr` arguments.
    """
    grid = (programs,) if isinstance(programs, int) else programs
    if 0 in grid:
        return
    device = arguments[0].device
    if device.type != "cuda":
        with _launching:
            kernel[grid](*arguments, num_warps=num_warps, enable_fp_fusion=False, **constants)
        return
    if device.index != torch.cuda.current_device():  # where Triton launches, wherever the tensors are
        with torch.cuda.device(device):
            launch(kernel, grid, *arguments, num_warps=num_warps, **constants)
        return
    key = kernel, device.index, num_warps, tuple(constants.items()), tuple(map(_kind_of, arguments))
    if (found := _compiled.get(key)) is not None:
        compiled, values = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *values)
        return
    with _launching:
        compiled = kernel[grid](*arguments, num_warps=num_warps, enable_fp_fusion=False, **constants)
    names = kernel.arg_names[len(arguments) :]
    if len(names) == len(constants):
        _compiled[key] = compiled, tuple(constants[name] for name in names)


def _kind_of(argument: Any) -> Any:
    """All of an argument that Triton compiles a kernel for, and perhaps more: whether it is aligned, or divisible."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        bits = argument.bit_length()
        return type(argument), argument == 1, argument % 16 == 0, bits > 31, bits > 63
    return type(argument)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def require_triton(device: str | torch.device) -> None:
    """Raises where kernels of a device cannot be used for want of Triton.

    Raises:
        ConfigurationError: it is not installed; says how to get it.
    """
    if importlib.util.find_spec("triton") is None:
        raise ConfigurationError(
            f"device {str(device)!r} needs triton, which is not installed: install a CUDA build of torch, which brings "
            "it, or pip install '.[gpu]' in a checkout of rowmesh; or use device 'cpu'"
        )


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not less than n; Triton's blocks have such sizes.

    >>> [next_power_of_2(n) for n in (0, 1, 3, 64, 100)]
    [1, 1, 4, 64, 128]
    """
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(n: int, divisor: int) -> int:
    """How many blocks of `divisor` cover n.

    >>> ceil_div(0, 4), ceil_div(4, 4), ceil_div(5, 4)
    (0, 1, 2)
    """
    return -(-n // divisor)


def check(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], dim: int, device: torch.device) -> None:
    """Raises where a kernel could not read or write a tensor: it knows its address, not its layout.

    Raises:
        TypeError: the dtype is none of `dtypes`.
        ValueError: the tensor has not `dim` dimensions, is not contiguous, or is on another device.

    Example:
        >>> check("slots", torch.zeros(3), (torch.int32, torch.int64), 1, torch.device("cpu"))
        Traceback (most recent call last):
        ...
        TypeError: slots must be int32 or int64, got float32
    """
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {str(tensor.dtype).removeprefix('torch.')}")
    if tensor.dim() != dim or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous with {dim} dimension(s), got shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()}; use .contiguous()"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, other arguments on {device}; bring them together with .to()")


def compute_dtype(storage: torch.dtype) -> torch.dtype:
    """The type that rows of a storage are computed in.

    >>> compute_dtype(torch.bfloat16), compute_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if storage == torch.float64 else torch.float32


def tile_of_rows(dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Columns and rows of a tile of whole rows that 128 threads move with four 16-byte loads each.

    Memory of 4.8 TB/s needs some 25 KB under way on every multiprocessor; four loads a thread are enough for that at a
    third of the threads that fit.

    >>> tile_of_rows(64, torch.float32), tile_of_rows(100, torch.bfloat16), tile_of_rows(4096, torch.float64)
    ((64, 32), (128, 32), (4096, 1))
    """
    columns = next_power_of_2(dim)
    return columns, max(_TILE_BYTES // (columns * dtype.itemsize), 1)
