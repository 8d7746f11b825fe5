"""What SIGTERM says of ranks that are gone. The other checks are tested where they are used."""

import os
import subprocess
import sys

import pytest

from rowmesh.errors import DataError, PeerError, Terminated
from rowmesh.mesh import Mesh
from rowmesh.run.checks import naming_lost_peers


def test_sigterm_names_the_rank_that_died():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    mesh = Mesh(rank=0, world_size=2, hosts=(0, 0), pids=(os.getpid(), process.pid))
    with (
        pytest.raises(PeerError, match=rf"rank 0: rank 1 \(process {process.pid}\) died while testing;") as caught,
        naming_lost_peers(mesh, "testing"),
    ):
        raise Terminated
    assert isinstance(caught.value.__cause__, Terminated)


def test_sigterm_stays_what_it_is_while_all_ranks_live():
    with pytest.raises(Terminated), naming_lost_peers(Mesh(), "testing"):
        raise Terminated


def test_errors_of_this_rank_stay_what_they_are():
    with pytest.raises(DataError), naming_lost_peers(Mesh(), "testing"):
        raise DataError("no label")
