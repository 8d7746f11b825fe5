"""Limits of control groups, in files as kernels and container engines lay them out below another root."""

import sys

import pytest

from rowmesh._support import memory
from rowmesh._support.control_groups import control_groups, processor_limit

GB = 1 << 30
NONE_V1 = 9223372036854771712  # the largest whole number of pages
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:9 master:3 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2_MOUNTS = "30 23 0:26 {root} {point} rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_OWN = "9:name=systemd:/\n4:memory:{path}\n2:cpu,cpuacct:/elsewhere\n0::/\n"


@pytest.fixture
def machine(tmp_path):
    """Lays out files of a machine; `groups` are folder → contents of `memory.…` in it."""

    def lay_out(own, mounts, groups):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(own)
        (tmp_path / "proc/self/mountinfo").write_text(mounts)
        for folder, files in groups.items():
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            for name, value in files.items():
                (tmp_path / folder / f"memory.{name}").write_text(f"{value}\n")
        return tmp_path

    return lay_out


def v1(limit, used, cached=0):
    stat = f"cache 1\ninactive_file 3\nactive_file 4\ntotal_inactive_file {cached}\ntotal_active_file 0"
    return {"limit_in_bytes": limit, "usage_in_bytes": used, "stat": stat}


def v2(limit, used, cached=0, **more):
    return {"max": limit, "current": used, "stat": f"anon 1\ninactive_file {cached}\nactive_file 0", **more}


def lefts(root):
    return [group.left_bytes for group in control_groups(root)]


def test_a_group_of_version_1_and_those_above_it(machine):
    root = machine(
        V1_OWN.format(path="/slurm/job_7"),
        V1_MOUNTS.format(root="/"),
        {
            "sys/fs/cgroup/memory": v1(NONE_V1, 50 * GB),
            "sys/fs/cgroup/memory/slurm": v1(30 * GB, 20 * GB, cached=GB),
            "sys/fs/cgroup/memory/slurm/job_7": v1(16 * GB, 2 * GB, cached=GB),
            "sys/fs/cgroup/memory/slurm/job_8": v1(GB, GB),
        },
    )
    assert lefts(root) == [15 * GB, 11 * GB]
    assert memory.available_bytes(root) <= 11 * GB


def test_a_container_that_sees_its_own_group_of_version_1_alone(machine):
    """Without a namespace: the path is that on the host, and the mount begins there."""
    root = machine(
        V1_OWN.format(path="/docker/3f2a"),
        V1_MOUNTS.format(root="/docker/3f2a"),
        {"sys/fs/cgroup/memory": v1(512 << 20, 100 << 20)},
    )
    assert lefts(root) == [412 << 20]


def test_groups_of_version_2_below_the_mount(machine):
    root = machine(
        "0::/user.slice/user-1000.slice/run-r1.scope\n",
        V2_MOUNTS.format(root="/", point="/sys/fs/cgroup"),
        {
            "sys/fs/cgroup": {"stat": "anon 5"},  # the root has no limit and no usage
            "sys/fs/cgroup/user.slice": v2("max", 9 * GB),
            "sys/fs/cgroup/user.slice/user-1000.slice": v2(8 * GB, 6 * GB, cached=GB),
            "sys/fs/cgroup/user.slice/user-1000.slice/run-r1.scope": v2(4 * GB, GB, high="max"),
        },
    )
    assert lefts(root) == [3 * GB, 3 * GB]


def test_a_container_of_version_2_with_a_namespace(machine):
    root = machine(
        "0::/\n", V2_MOUNTS.format(root="/", point="/sys/fs/cgroup"), {"sys/fs/cgroup": v2(2 * GB, GB, cached=GB // 2)}
    )
    assert lefts(root) == [3 * GB // 2]


def test_beyond_the_high_mark_processes_are_slowed_down(machine):
    mounts = V2_MOUNTS.format(root="/", point="/sys/fs/cgroup")
    root = machine("0::/\n", mounts, {"sys/fs/cgroup": v2("max", GB, high=3 * GB)})
    assert lefts(root) == [2 * GB]


def test_a_mount_point_with_a_space(machine):
    mounts = V2_MOUNTS.format(root="/", point=r"/sys/fs/my\040groups")
    assert lefts(machine("0::/a\n", mounts, {"sys/fs/my groups/a": v2(2 * GB, GB)})) == [GB]


def test_a_group_outside_the_mount(machine):
    """As where a process was moved out of its namespace: the mount's own group is all that is seen."""
    mounts = V2_MOUNTS.format(root="/", point="/sys/fs/cgroup")
    assert lefts(machine("0::/../other\n", mounts, {"sys/fs/cgroup": v2(2 * GB, GB)})) == [GB]


def test_more_used_than_allowed_leaves_nothing(machine):
    mounts = V2_MOUNTS.format(root="/", point="/sys/fs/cgroup")
    assert memory.available_bytes(machine("0::/\n", mounts, {"sys/fs/cgroup": v2(GB, 2 * GB)})) == 0


@pytest.mark.parametrize("own", ["", "nonsense\n", "0::/gone\n", "4:memory:/gone\n"])
def test_no_limit_that_can_be_read(machine, own):
    root = machine(own, V1_MOUNTS.format(root="/") + "short\n", {"sys/fs/cgroup/memory": {"limit_in_bytes": "?"}})
    assert lefts(root) == []
    assert memory.available_bytes(root) > 0


def test_a_system_without_such_files(tmp_path):
    assert lefts(tmp_path) == []
    assert memory.available_bytes(tmp_path) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_this_machine_as_it_is():
    rooms = memory.rooms()
    assert memory.available_bytes() == pytest.approx(min(rooms.values()), rel=0.5)
    assert all(0 <= left < 1 << 62 for left in rooms.values())


@pytest.mark.parametrize(
    "files, limit",
    [
        ({"": "max 100000", "pod": "250000 100000", "pod/box": "400000 100000"}, 2.5),
        ({"pod/box": "50000 100000"}, 0.5),
        ({"pod": "max 100000"}, None),
        ({"pod": "what"}, None),
        ({}, None),
    ],
)
def test_processors_of_version_2(tmp_path, files, limit):
    """The strictest of the groups."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/box\n")
    (tmp_path / "proc/self/mountinfo").write_text(V2_MOUNTS.format(root="/", point="/sys/fs/cgroup"))
    for folder, text in files.items():
        place = tmp_path / "sys/fs/cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / "cpu.max").write_text(f"{text}\n")
    assert processor_limit(tmp_path) == limit


@pytest.mark.parametrize("quota, limit", [(150_000, 1.5), (-1, None)])
def test_processors_of_version_1(tmp_path, quota, limit):
    """In a hierarchy of their own."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(V1_OWN.format(path="/a"))
    (tmp_path / "proc/self/mountinfo").write_text(V1_MOUNTS.format(root="/"))
    place = tmp_path / "sys/fs/cgroup/cpu,cpuacct/elsewhere"
    place.mkdir(parents=True)
    (place / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (place / "cpu.cfs_period_us").write_text("100000\n")
    assert processor_limit(tmp_path) == limit
