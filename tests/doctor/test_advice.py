"""What facts and times come to, and what is said about it."""

from dataclasses import replace

import pytest

from rowmesh.doctor.advice import KEEP_MEMORY, findings, standing
from rowmesh.doctor.facts import Facts, read_facts
from rowmesh.doctor.step import Failed, StepTimes
from rowmesh.doctor.text import WIDTH, report_json, report_text

FACTS = Facts(
    system="linux",
    versions={
        "rowmesh": "0.1.0",
        "torch": "2.13.0",
        "numba": "0.68",
        "triton": None,
        "pyarrow": "26",
        "system": "Linux",
    },
    processors=8,
    all_processors=8,
    threads_per_core=1,
    processor_limit=None,
    load=0.1,
    allocator="glibc",
    variables={
        "MALLOC_MMAP_THRESHOLD_": "1073741824",
        "MALLOC_TRIM_THRESHOLD_": "4294967296",
        "OMP_WAIT_POLICY": "PASSIVE",
    },
    huge_pages="madvise",
    kernel_folder="/home/user/.cache/numba",
    shares_memory=True,
    shm_bytes=8 << 30,
    open_files=20_000,
    gpus=(),
    has_nccl=False,
    address="10.0.0.7",
    interfaces=("eth0",),
)
STEP = StepTimes(
    ranks=1,
    threads=8,
    said=None,
    transport="local",
    import_s=2.0,
    first_s=0.5,
    compiled=0,
    step_s=0.01,
    sparse_s=0.001,
    one_thread_s=0.012,
    faults=20.0,
    samples=2048,
    window_bytes=1_000_000,
)
TWO = replace(STEP, ranks=2, threads=4, transport="one_sided", step_s=0.006)


def named(name, facts=FACTS, steps=(STEP,)):
    """The worst finding of that name."""
    order = ("ok", "note", "slow", "failed")
    return max((each for each in findings(facts, steps) if each.name == name), key=lambda each: order.index(each.level))


def test_nothing_is_slow_where_all_is_well():
    assert {finding.level for finding in findings(FACTS, [STEP, TWO])} == {"ok"}
    assert report_text(FACTS, [STEP, TWO], findings(FACTS, [STEP, TWO])).endswith("\nnothing is slow here")


CASES = [
    ("threads", {}, {"ranks": 2}, "slow", "export OMP_NUM_THREADS=4"),
    ("threads", {}, {"ranks": 16, "threads": 1}, "slow", "use 8 ranks or fewer"),
    ("threads", {"threads_per_core": 2}, {}, "slow", "export OMP_NUM_THREADS=4"),
    ("threads", {"processor_limit": 2.0}, {}, "slow", "export OMP_NUM_THREADS=2"),
    ("threads", {}, {"step_s": 0.5}, "slow", "export OMP_NUM_THREADS=1"),
    ("threads", {}, {"ranks": 2, "threads": 1}, "note", "export OMP_NUM_THREADS=4"),
    ("threads", {}, {}, "note", "ranks with a thread each come first: torchrun --standalone --nproc-per-node 8"),
    ("waiting", {"variables": {}}, {}, "note", "export OMP_WAIT_POLICY=PASSIVE"),
    ("waiting", {"variables": {"OMP_WAIT_POLICY": "ACTIVE"}}, {}, "note", "export OMP_WAIT_POLICY=PASSIVE"),
    ("waiting", {"variables": {"OMP_WAIT_POLICY": "passive"}}, {}, "ok", ""),
    ("limit", {"processor_limit": 2.5}, {}, "slow", "2 ranks or threads at most"),
    ("affinity", {"processors": 2}, {"threads": 2}, "note", "taskset"),
    ("load", {"load": 9.0}, {}, "slow", "other programs"),
    ("load", {"load": None}, {}, "ok", ""),
    ("malloc", {"variables": {}}, {"faults": 9000.0}, "slow", f"for programs of your own: {KEEP_MEMORY}"),
    ("malloc", {"variables": {}}, {}, "note", f"for programs of your own: {KEEP_MEMORY}"),
    ("malloc", {"variables": {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}}, {"faults": 9000.0}, "ok", ""),
    ("malloc", {"variables": {}, "allocator": "jemalloc"}, {"faults": 9000.0}, "ok", ""),
    ("huge pages", {"huge_pages": "never"}, {}, "slow", "echo madvise"),
    ("huge pages", {"huge_pages": None}, {}, "ok", ""),
    ("kernels", {"kernel_folder": None}, {"compiled": 40}, "slow", "export NUMBA_CACHE_DIR="),
    ("kernels", {}, {"compiled": 40}, "note", "run this again"),
    ("memory", {"shares_memory": False}, {}, "note", "Linux"),
    ("memory", {"shares_memory": False}, {"ranks": 2, "threads": 4}, "slow", "Linux"),
    ("/dev/shm", {"shm_bytes": 64 << 20}, {}, "note", "--shm-size"),
    ("/dev/shm", {"shm_bytes": 64 << 20, "gpus": ("H100",)}, {}, "slow", "--shm-size"),
    ("/dev/shm", {"shm_bytes": None}, {}, "ok", ""),
    ("open files", {"open_files": 256}, {}, "slow", "ulimit -n 288"),
    ("open files", {"open_files": None}, {}, "ok", ""),
    ("gpu", {"gpus": ("H100", "H100")}, {}, "slow", "pip install '.[gpu]'"),
    ("gpu", {"gpus": ("H100",), "versions": {"triton": "3.5"}}, {}, "slow", "CUDA build"),
    ("gpu", {"gpus": ("H100",), "versions": {"triton": "3.5"}, "has_nccl": True}, {}, "ok", ""),
    ("network", {"address": "127.0.1.1"}, {}, "note", "export GLOO_SOCKET_IFNAME"),
    ("network", {"address": None, "interfaces": ()}, {}, "note", "up are: none"),
    ("network", {"variables": {"GLOO_SOCKET_IFNAME": "eth1"}}, {}, "slow", "choose one of: eth0"),
    ("network", {"variables": {"GLOO_SOCKET_IFNAME": "lo"}}, {}, "ok", ""),
]


@pytest.mark.parametrize("name, facts, step, level, advice", CASES)
def test_what_is_slow_is_named_with_what_to_do(name, facts, step, level, advice):
    found = named(name, replace(FACTS, **facts), [replace(STEP, **step)])
    assert (found.level, advice in found.advice) == (level, True), found
    assert bool(found.advice) == (level != "ok")


def test_several_ranks_are_compared_with_one():
    assert "2 ranks train 1.67 times" in named("ranks", steps=[STEP, TWO]).text
    assert named("ranks", steps=[STEP, replace(TWO, step_s=0.02)]).level == "note"


def test_the_report_fits_80_columns():
    versions = {**FACTS.versions, "system": "Linux-6.1.0-" + "very-long-" * 12}
    facts = replace(
        FACTS,
        versions=versions,
        variables={},
        kernel_folder=None,
        gpus=("NVIDIA H100 80GB HBM3",) * 8,
        load=99.0,
        shm_bytes=1 << 20,
    )
    steps = [replace(STEP, faults=9000.0), Failed(4, "rank 1: PeerError: " + "something broke " * 12 + "\nrank 2: too")]
    found = findings(facts, steps)
    text = report_text(facts, steps, found)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "failed  4 ranks     rank 1: PeerError: something broke" in text
    assert text.splitlines()[-1].startswith(
        f"{sum(each.level in ('slow', 'failed') for each in found)} to look at: 4 ranks,"
    )
    assert report_json(facts, steps, found)["steps"][1]["ranks"] == 4


def test_facts_of_this_system():
    facts = read_facts()
    assert 1 <= facts.processors <= facts.all_processors
    assert facts.versions["torch"]
    assert {finding.level for finding in findings(facts, [STEP])} <= {"ok", "note", "slow"}


SHARED = [
    ((1, 8), {}, []),
    ((2, 4), {}, []),
    ((2, 8), {}, ["export OMP_NUM_THREADS=4"]),
    ((9, 1), {}, ["use 8 ranks or fewer"]),
    ((4, 1), {"processor_limit": 2.0}, ["raise the limit"]),
    ((4, 1), {"huge_pages": "never", "kernel_folder": None}, ["transparent_hugepage", "NUMBA_CACHE_DIR"]),
    ((1, 1), {"load": 50.0, "shm_bytes": 1}, []),  # of the moment, or of no use to a run
]


@pytest.mark.parametrize("ranks_and_threads, facts, advice", SHARED)
def test_what_is_slow_whatever_is_trained(ranks_and_threads, facts, advice):
    found = standing(replace(FACTS, **facts), *ranks_and_threads)
    assert len(found) == len(advice)
    for finding, words in zip(found, advice, strict=True):
        assert finding.level == "slow"
        assert words in finding.advice
