"""Faults that compiled kernels show, and that the interpreter cannot have.

*Unordered*: a program changes memory that several of its warps have read, and no barrier is between. A warp that comes
late reads what another one wrote. *Approximate*: quotients and roots that are not rounded as a CPU's are.
"""

from __future__ import annotations

import re
from math import ceil

_LAYOUT = re.compile(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>", re.M)
_ARGUMENTS = re.compile(r"tt\.func public @\w+\((.*?)\) attributes", re.S)
_DERIVED = re.compile(r"(%\w+) = (?:tt\.splat|tt\.addptr|tt\.broadcast|tt\.expand_dims|ttg\.convert_layout) (%\w+)")
_ACCESS = re.compile(
    r"tt\.(load|store) (%\w+)\b.* : (?:tensor<((?:\d+x)+)!tt\.ptr<\w+>, (.*?)>|!tt\.ptr<\w+>)(?: loc|$)"
)
_APPROXIMATE = re.compile(r"\b(?:(?:div|sqrt)\.(?:approx|full)|rcp\.approx|rsqrt\.approx)\.(?:ftz\.)?f(?:32|64)")


def approximate(ptx: str) -> list[str]:
    """Instructions that do not round as a CPU does."""
    return sorted(set(_APPROXIMATE.findall(ptx)))


def unordered(ttgir: str) -> list[str]:
    """Arguments that are changed where several warps have read the same element, and no barrier was since.

    In the order of the text: neither the next turn of a loop nor pointers that a loop carries are followed.
    """
    layouts = dict(_LAYOUT.findall(ttgir))
    found = _ARGUMENTS.search(ttgir)
    assert found, "no kernel"
    base = {name: name for name in re.findall(r"(%\w+): !tt\.ptr", found[1])}
    read_by_many, unsafe, count = set(), set(), 0
    for line in ttgir.splitlines():
        if derived := _DERIVED.search(line):
            if derived[2] in base:
                base[derived[1]] = base[derived[2]]
        elif re.search(r"\b(?:gpu|ttg)\.(?:local_)?barrier", line):
            read_by_many.clear()
        elif access := _ACCESS.search(line):
            count += 1
            kind, pointer, shape, layout = access.groups()
            argument = base.get(pointer, pointer)
            if kind == "store":
                unsafe |= read_by_many & {argument}
            elif _is_shared(shape, layout, layouts):
                read_by_many.add(argument)
    assert count, "no access to memory found: triton writes its code in another way by now"
    return sorted(argument.removeprefix("%") for argument in unsafe)


def _is_shared(shape: str | None, layout: str | None, layouts: dict[str, str]) -> bool:
    """Whether several warps hold the same element of a tensor."""
    if shape is None or layout is None:  # a number, which all of them read
        return True
    sizes = [int(size) for size in shape.split("x") if size]
    if sliced := re.match(r"#ttg\.slice<\{dim = (\d), parent = (#\w+)\}", layout):
        dim, layout = int(sliced[1]), sliced[2]
        sizes.insert(dim, 1)
    if (described := layouts.get(str(layout))) is None:  # of another kind: look at it
        return True
    threads, lanes, warps = (
        [int(number) for number in re.search(rf"{name} = \[([\d, ]+)\]", described)[1].split(",")]  # type: ignore
        for name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA")
    )
    return any(ceil(size / (t * n)) < w for size, t, n, w in zip(sizes, threads, lanes, warps, strict=True))
