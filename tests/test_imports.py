"""Importing rowmesh is cheap, and brings neither peers nor compilers of kernels."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "rowmesh"
MODULES = sorted(path.relative_to(ROOT.parent) for path in ROOT.rglob("*.py"))
FOREIGN = {"torchrec", "fbgemm_gpu", "triton", "cupy"}
KERNELS = ("cuda", "tiles")  # in rowmesh/ops/*: these alone may import triton


@functools.cache
def parsed(path):
    """The syntax tree of a file, which several tests look at."""
    return ast.parse(Path(path).read_text())


@functools.cache
def imported(path):
    """The modules that a file names in imports, at the top, in functions and for type checkers alike."""
    names = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(node.module)
    return names


def is_kernel(path):
    return path.match("rowmesh/ops/*/*.py") and path.stem in KERNELS


def test_no_peer_and_no_gpu_library_is_imported():
    """But for triton, by kernels."""
    found = [(path, name.split(".")[0]) for path in MODULES for name in imported(ROOT.parent / path)]
    assert not [(path, name) for path, name in found if name in FOREIGN - ({"triton"} if is_kernel(path) else set())]


def test_gpu_kernels_are_imported_only_where_they_are_used():
    """At the top of other modules none is: triton may be absent, and takes a while to import."""
    for path in (path for path in MODULES if not is_kernel(path)):
        top = parsed(ROOT.parent / path).body
        names = [node.module for node in top if isinstance(node, ast.ImportFrom)]
        assert not [name for name in names if name.startswith("rowmesh.ops.") and name.rpartition(".")[2] in KERNELS], (
            path
        )


def test_importing_rowmesh_does_not_import_torch():
    code = "import sys, rowmesh; assert 'torch' not in sys.modules; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_tables_do_not_need_is_not_imported():
    """Of what takes a while: what data, commands and solvers need; and torch's compiler, where a network is counted."""
    code = """if True:
        import sys
        from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Pipeline
        print(*sys.modules)
        from rowmesh.models.layers import mlp
        from rowmesh.run.network_memory import without_memory
        with without_memory():
            mlp([3, 2], relu_last=True)
        print(*sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    loaded, with_network = (set(line.split()) for line in done.stdout.splitlines())
    late = {"pyarrow", "pydantic", "scipy.sparse", "scipy.optimize", "sknetwork", "rich", "cyclopts", "filelock"}
    assert not loaded & (late | {"triton", "tensorboard", "torch._dynamo", "torch._inductor", "rowmesh.data"})
    assert not with_network & {"torch._dynamo", "torch._inductor"}


def test_public_names_are_listed():
    import rowmesh
    import rowmesh.placement

    assert set(rowmesh.__all__) <= set(dir(rowmesh))
    assert set(rowmesh.placement.__all__) <= set(dir(rowmesh.placement))


def test_every_public_name_can_be_imported():
    import rowmesh

    assert all(getattr(rowmesh, name) for name in rowmesh.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Collection'"):
        rowmesh.Collection  # noqa: B018
