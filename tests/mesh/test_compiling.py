"""Ranks that compile kernels are known to the others."""

import threading

import numba

from rowmesh.mesh.waiting import barrier


def watch(mesh):
    """Each rank looks before, while and after rank 1 compiles a kernel; returns its findings."""
    compiling, found = mesh.compiling, []
    compiling.begin()
    goes_on, began = threading.Event(), threading.Event()

    @numba.extending.overload(hold := lambda: None)
    def _hold():
        began.set()
        goes_on.wait()
        return lambda: None

    thread = threading.Thread(target=numba.njit(lambda: hold()))
    for moment in ("before", "while", "after"):
        if mesh.rank == 1 and moment == "while":
            thread.start()
            began.wait()
        if mesh.rank == 1 and moment == "after":
            goes_on.set()
            thread.join()
        barrier(mesh, "testing")
        found.append((compiling.is_here, compiling.is_anywhere))
        barrier(mesh, "testing")
    compiling.end()
    compiling.end()
    return found


def test_all_ranks_know_which_compile(ranks):
    none, both = (False, False), (True, True)
    assert ranks.run(watch) == [[none, (False, True), none], [none, both, none]]
