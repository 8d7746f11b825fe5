"""What all tests share: the pool of ranks, the device of GPU kernels, and how hypothesis searches."""

import gc
import os
import shutil
import signal
import tempfile
import threading

import hypothesis
import pytest
import torch

from tests.support.ranks import RankPool
from tests.support.slow import slow_cases
from tests.support.triton import device

__all__ = ["device"]

# The same examples every time: a failure in one run is a failure in all.
hypothesis.settings.register_profile(
    "rowmesh",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # it depends on what else the machine does
)
hypothesis.settings.load_profile("rowmesh")
torch.set_num_threads(1)
STATE = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="rowmesh-state-")  # of runs, in place of the user's
collect_ignore = ["support/warm.py"]  # it trains when it is imported, as looking for doctests would


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items):
    """Marks what `tests/slow_cases.txt` lists."""
    slow = slow_cases()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.listed)


def pytest_collection_finish():
    """Leaves imported modules out of all garbage collections to come, which tests ask for."""
    gc.freeze()


def pytest_sessionfinish():
    """Lets extension modules free what they would report as leaked; removes what runs keep of a user."""
    gc.unfreeze()
    shutil.rmtree(STATE, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def little_to_collect():
    """Leaves what other modules have compiled out of garbage collections likewise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks():
    """Ranks that live as long as the test session."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def leaves_no_loader_behind():
    """A thread that reads ahead ends with its loop, also where an error ended that."""
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "rowmesh-prefetch"]


@pytest.fixture
def heeds_ctrl_c():
    """This process and those it starts heed SIGINT, also where a shell's background job is to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
