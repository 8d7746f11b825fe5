"""Measures which linear layers oneDNN computes faster than torch's own; kept on disk, for each kind of machine.

A layer's times depend on its shape and on the samples. The choice must not depend on the number of ranks, though,
or the same model would get other bits on two ranks than on four: callers give the samples of the global batch, and no
more than MOST_SAMPLES are measured, from where on the ratio stays.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from rowmesh.ops.compiled import cache_folder
from rowmesh.ops.linear import reference
from rowmesh.ops.linear.choices import Choices, Passes, Shape
from rowmesh.ops.linear.cpu import product, weight_product

logger = logging.getLogger("rowmesh")
BUDGET_S = 1.0
LEAST_GAIN, LEAST_SHARE = 1.2, 0.003
"""How much faster oneDNN must be, and what share of the time of all products it must save by that: near ties and small
products would be decided by chance, and otherwise another time."""
LEAST_SAMPLES, MOST_SAMPLES = 16, 1024
MOST_VARYING_SAMPLES = 4096
"""Where the samples vary, oneDNN makes an operator for each number of them, which takes as long for many as for few."""
_ROUNDS = 100
_VERSION = 3
Times = tuple[tuple[float, float], tuple[float, float], tuple[float, float]]
"""Seconds of the three products, each by torch and by oneDNN."""


@dataclass(frozen=True)
class Measured:
    """Times that were measured, or read from disk.

    Attributes:
        times: of each shape.
        samples: with which.
        is_kept: whether all of it was read.
        varies: whether every product was of another number of samples.
    """

    times: Mapping[Shape, Times]
    samples: int
    is_kept: bool
    varies: bool = False

    @property
    def choices(self) -> Choices:
        """By oneDNN wherever that is clearly faster."""
        least_s = LEAST_SHARE * sum(theirs for times in self.times.values() for theirs, _ in times)
        return Choices(
            {
                shape: Passes(*(theirs >= LEAST_GAIN * ours and theirs - ours >= least_s for theirs, ours in times))
                for shape, times in self.times.items()
            }
        )

    @property
    def gain(self) -> float:
        """How many times as fast all layers are together, as chosen, each once."""
        passes, before, after = self.choices.passes, 0.0, 0.0
        for shape, times in self.times.items():
            for is_chosen, (theirs, ours) in zip(passes[shape], times, strict=True):
                before, after = before + theirs, after + (ours if is_chosen else theirs)
        return before / after if after else 1.0


def measure(shapes: Sequence[Shape], samples: int, budget_s: float = BUDGET_S, *, varies: bool = False) -> Measured:
    """Times of linear layers on this machine, with as many threads as torch has now.

    Times of earlier calls, by whichever process, are read; the others are measured, and written where a folder can be.
    Files that are damaged are measured again.

    Args:
        shapes: `[N, K]` of the layers.
        samples: of the global batch.
        budget_s: about how long to measure, in seconds.
        varies: whether every batch has another number of samples, so that oneDNN makes its operators again each time.
    """
    rounded = measured_samples(samples, varies=varies)
    path = cache_path(rounded, varies=varies)
    known = _read(path)
    missing = [shape for shape in shapes if shape not in known]
    if missing:
        known |= _measure(missing, rounded, budget_s, varies=varies)
        _write(path, known)
    return Measured({shape: known[shape] for shape in shapes}, rounded, not missing, varies)


def measured_samples(samples: int, *, varies: bool = False) -> int:
    """The power of two at or below a number of samples, within bounds.

    >>> [measured_samples(samples) for samples in (1, 100, 4096)]
    [16, 64, 1024]
    """
    most = MOST_VARYING_SAMPLES if varies else MOST_SAMPLES
    return min(max(1 << max(samples, 1).bit_length() - 1, LEAST_SAMPLES), most)


def cache_path(samples: int, *, varies: bool = False) -> Path | None:
    """The file for this processor, torch and number of threads, beside the compiled kernels; None where none can be."""
    folder = cache_folder()
    if folder is None:
        return None
    how = f"{samples} varying" if varies else str(samples)
    key = f"{_VERSION} {_processor()} {torch.__version__} {torch.get_num_threads()} {how}"
    return Path(folder) / f"linear.{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.json"


def _processor() -> str:
    from llvmlite import binding  # names what a processor is as kernels are compiled for it

    return f"{binding.get_host_cpu_name()} {sorted(binding.get_host_cpu_features().items())}"


def _measure(shapes: Sequence[Shape], samples: int, budget_s: float, *, varies: bool) -> dict[Shape, Times]:
    """The shortest times of rounds in turns, so that what else runs on the machine slows both.

    One thread is timed by what it takes of the processor: others may have that for most of the time.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    products = {(shape, number): pair for shape in shapes for number, pair in enumerate(_pairs(shape, samples))}
    best = {key: [float("inf"), float("inf")] for key in products}
    for pair in products.values():
        for run in pair:
            run(samples)  # the first time compiles
    end_s = clock() + budget_s
    rounds = min(_ROUNDS, max(samples // 8, 2)) if varies else _ROUNDS  # no number of rows comes twice
    for number in range(rounds):
        rows = samples - 1 - number if varies else samples
        for key, pair in products.items():
            for side, run in enumerate(pair):
                began_s = clock()
                run(rows)
                best[key][side] = min(best[key][side], max(clock() - began_s, 1e-9))
        if number > 0 and clock() > end_s:
            break
    return {shape: _times([best[shape, number] for number in range(3)]) for shape in shapes}


def _pairs(shape: Shape, samples: int) -> Iterator[tuple[Callable[[int], object], Callable[[int], object]]]:
    """The three products of a layer, each by torch and by oneDNN, of so many of the samples or fewer."""
    (outputs, inputs), generator = shape, torch.Generator().manual_seed(0)
    sizes = ((samples, inputs), shape, (outputs,), (samples, outputs))
    x, weight, bias, grad = (torch.randn(size, generator=generator, device="cpu") for size in sizes)
    yield lambda n: F.linear(x[:n], weight, bias), lambda n: product(x[:n], weight, bias)
    yield lambda n: reference.input_gradient(grad[:n], weight), lambda n: product(grad[:n], weight.t())
    yield lambda n: reference.weight_gradient(grad[:n], x[:n]), lambda n: weight_product(grad[:n], x[:n])


def _read(path: Path | None) -> dict[Shape, Times]:
    if path is None:
        return {}
    try:
        return {(int(n), int(k)): _times(times) for n, k, times in json.loads(path.read_text())}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        logger.warning("linear layers are measured again, as %s cannot be used: %s", path, error)
        return {}


def _times(values: Any) -> Times:
    forward, of_input, of_weight = ((float(theirs), float(ours)) for theirs, ours in values)
    if not all(0.0 < seconds < 3600.0 for pair in (forward, of_input, of_weight) for seconds in pair):
        raise ValueError(f"{values} are no times")
    return forward, of_input, of_weight


def _write(path: Path | None, times: Mapping[Shape, Times]) -> None:
    """Writes a file that appears whole; where it cannot be written, each process measures for itself."""
    if path is None:
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps([[*shape, each] for shape, each in times.items()]))
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
