"""Faults that compiled kernels show, and that the interpreter cannot have.

*Unordered*: a program changes memory that several of its warps have read, and no barrier is between. A warp that comes
late reads what another one wrote. *Approximate*: quotients and roots that are not rounded as a CPU's are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

_LAYOUT = re.compile(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>", re.M)
_ARGUMENTS = re.compile(r"tt\.func public @\w+\((.*?)\) attributes", re.S)
_DERIVED = re.compile(r"(%\w+) = (?:tt\.splat|tt\.addptr|tt\.broadcast|tt\.expand_dims|ttg\.convert_layout) (%\w+)")
_LOOP = re.compile(r"( *)(?:%\S+ = )?scf\.(?:for|while) ")
_CARRIED = re.compile(r"(%\w+) = (%\w+)(?=[,)])")
_LINE = re.compile(r"\s*(?:(%\w+)(?::\d+)? = )?(\S*)(.*)")
_NAME = re.compile(r"%\w+")
_ELEMENTWISE = ("arith.", "math.", "tt.precise_")
_ACCESS = re.compile(
    r"(?:(%\w+) = )?tt\.(load|store) (%\w+)\b.* : (?:tensor<((?:\d+x)+)!tt\.ptr<\w+>, (.*?)>|!tt\.ptr<\w+>)(?: loc|$)"
)
_APPROXIMATE = re.compile(r"\b(?:(?:div|sqrt)\.(?:approx|full)|rcp\.approx|rsqrt\.approx)\.(?:ftz\.)?f(?:32|64)")


def approximate(ptx: str) -> list[str]:
    """Instructions that do not round as a CPU does."""
    return sorted(set(_APPROXIMATE.findall(ptx)))


def unordered(ttgir: str) -> list[str]:
    """Arguments that are changed where another warp has read the same element, and no barrier was since.

    In the order of the text, each loop twice: what one turn reads the next one may change. Where several warps have an
    element one of them stores it, so that late readers do no harm which use it for that element alone. Where a load and
    a store deal elements to warps in different ways, what is stored must be made of what was loaded.
    """
    layouts = dict(_LAYOUT.findall(ttgir))
    found = _ARGUMENTS.search(ttgir)
    assert found, "no kernel"
    base = {name: name for name in re.findall(r"(%\w+): !tt\.ptr", found[1])}
    lines = ttgir[found.end() :].splitlines()
    operations = [_Operation.of(line) for line in lines]
    read: list[_Read] = []
    unsafe, count = set(), 0
    for line in _turned_twice(lines):
        if _LOOP.match(line):
            base |= {name: base[before] for name, before in _CARRIED.findall(line) if before in base}
        elif derived := _DERIVED.search(line):
            if derived[2] in base:
                base[derived[1]] = base[derived[2]]
        elif re.search(r"\b(?:gpu|ttg)\.(?:local_)?barrier", line):
            read.clear()
        elif access := _ACCESS.search(line):
            count += 1
            value, kind, pointer, shape, layout = access.groups()
            argument, dealt = base.get(pointer, pointer), (shape, layout)
            if kind == "load":
                read.append(_Read(argument, dealt, _is_shared(shape, layout, layouts), *_made_of(value, operations)))
            elif any(each.endangers(argument, dealt, _NAME.findall(line)) for each in read):
                unsafe.add(argument)
    assert count, "no access to memory found: triton writes its code in another way by now"
    return sorted(argument.removeprefix("%") for argument in unsafe)


class _Operation(NamedTuple):
    """A line: the name of its result, what it does, and the names that it uses."""

    result: str | None
    name: str
    used: set[str]

    @classmethod
    def of(cls, line: str) -> _Operation:
        result, name, operands = _LINE.match(line).groups()  # type: ignore
        return cls(result, name, set(_NAME.findall(name + operands)))


class _Read(NamedTuple):
    """A load since the last barrier: of what, how dealt to warps, what is made of it element by element, and all."""

    argument: str
    dealt: tuple[str | None, str | None]
    is_shared: bool
    same: set[str | None]
    made: set[str | None]

    def endangers(self, argument: str, dealt: tuple[str | None, str | None], used: list[str]) -> bool:
        """Whether a store may come before another warp has read."""
        if argument != self.argument:
            return False
        if self.is_shared:
            return self.same != self.made or self.dealt == (None, None)
        return dealt != self.dealt and self.made.isdisjoint(used)


def _turned_twice(lines: Sequence[str]) -> Iterator[str]:
    """The lines, with those of every loop twice."""
    rest = iter(lines)
    for line in rest:
        yield line
        if loop := _LOOP.match(line):
            end = f"{loop[1]}}}"
            body = []
            for inner in rest:
                if inner.startswith(end) and not inner.startswith(f"{end} do"):
                    break
                body.append(inner)
            twice = list(_turned_twice(body))
            yield from twice
            yield from twice


def _made_of(value: str, operations: Sequence[_Operation]) -> tuple[set[str | None], set[str | None]]:
    """What is computed from a tensor element by element, and all that is; None stands for what has no name."""
    same: set[str | None] = {value}
    made: set[str | None] = {value}
    for result, name, used in operations:
        if not used.isdisjoint(made) and name != "tt.store":
            made.add(result)
            if name.startswith(_ELEMENTWISE):
                same.add(result)
    return same, made


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
