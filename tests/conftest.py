"""What all tests share: the pool of ranks, the device of GPU kernels, and how hypothesis searches."""

import gc
import os
import shutil
import signal
import tempfile
import threading
from itertools import groupby

import hypothesis
import pytest
import torch

from tests.support.durations import COLLECTED, Stopwatch, function_of, listed, measured, surplus
from tests.support.ranks import RankPool
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


def pytest_addoption(parser):
    parser.addoption(
        "--measure", action="store_true", help="write how long cases take into tests/durations.txt: `make durations`"
    )


def pytest_configure(config):
    """Has the process that reports measure how long cases take."""
    is_measuring = config.getoption("measure")
    if is_measuring and (config.option.keyword or any("::" in argument for argument in config.args)):
        raise pytest.UsageError("--measure takes whole files: it replaces what tests/durations.txt has of them")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch(writes=is_measuring))


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(config, items):
    """Marks what `make test` leaves out; nothing where durations are measured, so that all of it runs."""
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    if config.getoption("measure"):
        return
    candidates = [item for item in items if not item.get_closest_marker("slow")]
    left_out = listed((item.nodeid for item in candidates), measured())
    compiling = [item for item in candidates if item.get_closest_marker("compiles") and item.nodeid not in left_out]
    for _, group in groupby(compiling, key=lambda item: function_of(item.nodeid)):
        left_out |= surplus({item.nodeid: item.callspec.params for item in group})
    for item in items:
        if item.nodeid in left_out:
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
