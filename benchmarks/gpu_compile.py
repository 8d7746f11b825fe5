"""Compiles every GPU kernel for targets that need not be there: registers, spills, shared memory and faults of each.

    python -m benchmarks.gpu_compile                  sm_80, sm_90 and sm_100, every signature
    python -m benchmarks.gpu_compile --op gather      of one op
    python -m benchmarks.gpu_compile --quick          the first signature of every kernel, for sm_90

Needs triton (`pip install '.[gpu]'` in a checkout) and no GPU. Ends with an error where a kernel does not compile.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.command import Report
from benchmarks.gpu_hazards import approximate, unordered
from rowmesh.ops import __file__ as ops_file
from rowmesh.ops.gpu import Signature

TARGETS = (80, 90, 100)
_WARP_SIZE = 32
_USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack_bytes>\d+)")
_LOCAL = re.compile(r"\b(?:STL|LDL)(?:\.LU)?(?:\.(64|128))?\b")


def ops_with_kernels() -> list[str]:
    """Names of the ops that run on GPUs."""
    return sorted(path.parent.name for path in Path(ops_file).parent.glob("*/cuda.py"))


def signatures(op: str, quick: bool = False) -> Iterator[Signature]:
    """What the kernels of an op are compiled for; with `quick` each kernel once."""
    seen: set[str] = set()
    for signature in import_module(f"rowmesh.ops.{op}.cuda").SIGNATURES:
        if not (quick and signature.name in seen):
            yield signature
        seen.add(signature.name)


def compiled(signature: Signature, target: int) -> Any:
    """Compiles a kernel to machine code; triton's object, with all that it went through as `asm`.

    Pointers are taken to be aligned to 16 bytes, as torch allocates.

    Raises:
        ValueError: the signature does not fit the kernel's arguments.
        Exception: the kernel does not compile; of triton's own classes.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    types = _types(signature)
    names = list(types)
    source = triton.compiler.ASTSource(
        signature.kernel,
        types,
        signature.constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind.startswith("*")},
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", target, _WARP_SIZE),
        options={"num_warps": signature.num_warps, "enable_fp_fusion": False},
    )


def compile_for(signature: Signature, target: int) -> dict[str, Any]:
    """Compiles a kernel, and reads from its code what it takes and what is wrong; raises what `compiled` does."""
    kernel = compiled(signature, target)
    cubin = kernel.asm["cubin"]
    usage = _usage(cubin)
    # Spilled registers live in the stack, which calls of subroutines use as well.
    spilled = _spilled_bytes(cubin) if usage["stack_bytes"] else 0
    # Shared memory is claimed at the launch; what the machine code itself claims is the kilobyte that CUDA keeps.
    return {
        **usage,
        "spill_bytes": spilled,
        "shared_bytes": kernel.metadata.shared,
        "cubin_bytes": len(cubin),
        "unordered": unordered(kernel.asm["ttgir"]),
        "approximate": approximate(kernel.asm["ptx"]),
    }


def _types(signature: Signature) -> dict[str, str]:
    """The type of every argument, `constexpr` for the constants."""
    given = iter(signature.types.split())
    names = signature.kernel.arg_names
    types = {name: "constexpr" if name in signature.constants else next(given, "missing") for name in names}
    unknown = signature.constants.keys() - types.keys()
    if "missing" in types.values() or next(given, None) or unknown:
        raise ValueError(
            f"the signature of {signature.name} does not fit its arguments {names}: types {signature.types!r}, "
            f"constants {sorted(signature.constants)}; correct SIGNATURES beside the kernel"
        )
    return types


def _usage(cubin: bytes) -> dict[str, int]:
    from triton import knobs

    text = _run(knobs.nvidia.cuobjdump.path, "-res-usage", code=cubin)
    found = _USAGE.search(text)
    assert found, f"no resource usage in what cuobjdump says: {text}"
    return {name: int(value) for name, value in found.groupdict().items()}


def _spilled_bytes(cubin: bytes) -> int:
    """Bytes a thread that all instructions which store to the stack, or load from it, move once."""
    from triton import knobs

    widths = _LOCAL.findall(_run(knobs.nvidia.cuobjdump.path, "-sass", code=cubin))
    return sum(int(bits or 32) // 8 for bits in widths)


def _run(program: str, *options: str, code: bytes) -> str:
    """What a tool of CUDA prints about code."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        done = subprocess.run([program, *options, file.name], check=True, capture_output=True, text=True)
    return done.stdout + done.stderr


def main(arguments: list[str] | None = None) -> None:
    """Compiles what is asked for.

    Raises:
        SystemExit: a kernel did not compile.
    """
    # Interpreted kernels cannot be compiled, and which of both they are is settled when triton is imported.
    os.environ["TRITON_INTERPRET"] = "0"
    options = _parse(arguments)
    report = Report("gpu_compile", options.output)
    failed, spills, count = [], {}, 0
    for op in options.op or ops_with_kernels():
        for signature in signatures(op, options.quick):
            for target in options.target or ((90,) if options.quick else TARGETS):
                name = f"{op}/{signature.name} sm_{target}"
                try:
                    usage = compile_for(signature, target)
                except Exception as error:  # triton's errors have no common base
                    usage = {"error": f"{type(error).__name__}: {error}"}
                    failed.append(name)
                count += 1
                if usage.get("spill_bytes"):
                    spills[name] = max(usage["spill_bytes"], spills.get(name, 0))
                report.line(
                    op=op,
                    kernel=signature.name,
                    target=f"sm_{target}",
                    num_warps=signature.num_warps,
                    types=signature.types,
                    constants=_plain(signature.constants),
                    **usage,
                )
    report.line(summary={"compiled": count - len(failed), "failed": failed, "spill_bytes": spills}, **_versions())
    if failed:
        raise SystemExit(f"{len(failed)} of {count} kernels do not compile: {', '.join(failed)}")


def _plain(constants: dict[str, Any]) -> dict[str, Any]:
    """Types, which JSON does not know, by their names."""
    return {
        name: value if value is None or isinstance(value, (int, float, str)) else str(value)
        for name, value in constants.items()
    }


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=ops_with_kernels(), help="one op; may be given again")
    parser.add_argument("--target", action="append", type=int, help="90 for sm_90; may be given again")
    parser.add_argument("--quick", action="store_true", help="the first signature of every kernel, for sm_90")
    parser.add_argument("--output", type=Path, help="also append the lines to this file")
    return parser.parse_args(arguments)


def _versions() -> dict[str, str]:
    import torch
    import triton

    return {"triton": triton.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    main()
