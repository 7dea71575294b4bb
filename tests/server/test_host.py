"""Cores and memory that the process may use: control groups of both versions, by recorded files of the system."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ferrule_server.host import Host

GIB = 1 << 30
UNLIMITED = "9223372036854771712\n"
V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "35 31 0:32 {top} /sys/fs/cgroup/memory rw shared:3 master:2 - cgroup cgroup rw,memory\n"
    "36 31 0:33 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "37 31 0:34 {top} /sys/fs/cgroup/systemd rw - cgroup systemd rw,name=systemd\n"
)
V1_GROUPS = "9:name=systemd:{path}\n4:memory:{path}\n3:cpu,cpuacct:{path}\n"
MEMORY, CPU = "sys/fs/cgroup/memory", "sys/fs/cgroup/cpu,cpuacct"
HYBRID = V1.format(top="/") + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


def host(folder: Path, files: Mapping[str, str | bytes]) -> Host:
    """Return a machine of 16 GiB, 10 of them available; the process holds 1 GiB."""
    meminfo = f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {10 << 20} kB\nHugePages_Total: 0\n"
    half = f"{1 << 19} kB\n"
    status = f"Name:\tpython\nVmRSS:\t {2 << 20} kB\nRssAnon:\t {half}RssFile:\t {1 << 20} kB\nRssShmem:\t {half}"
    for name, content in {"proc/meminfo": meminfo, "proc/self/status": status, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Host(folder)


def limits_of(found: Host) -> list[tuple[str, float, float]]:
    """Return name, bound and free GiB of each limit, the tightest first."""
    return [(it.name, it.total_bytes / GIB, it.free_bytes / GIB) for it in found.memory_limits()]


MACHINE = ("this machine", 16, 11)
IN_A_CONTAINER = V1_GROUPS.format(path="/docker/abc")
ARC = f"13 1 0x01 147 39984 7 8\nname   type data\nhits   4    7\nc_min  4    {GIB}\nsize   4    {3 * GIB}\n"
CASES: dict[str, tuple[dict[str, str | bytes], list[tuple[str, float, float]], int]] = {
    "nothing": ({}, [MACHINE], 8),
    "a cache of ZFS": ({"proc/spl/kstat/zfs/arcstats": ARC}, [("this machine", 16, 13)], 8),
    "v2 flat": (
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory.stat": f"anon 1\nactive_file {GIB // 4}\ninactive_file {GIB // 4}\n"
            f"slab_reclaimable {GIB // 4}\nslab {GIB}\n",
            "sys/fs/cgroup/cpu.max": "200000 100000\n",
        },
        [("/sys/fs/cgroup/memory.max", 4, 2.75), MACHINE],
        2,
    ),
    "v2 nested, limits in the parents": (
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": "0::/a/b/c\n",
            "sys/fs/cgroup/a/b/c/memory.max": "max\n",
            "sys/fs/cgroup/a/b/c/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/b/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/a/b/cpu.max": "350000 100000\n",
            "sys/fs/cgroup/a/memory.max": f"{6 * GIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/a/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/other/memory.max": "1\n",
        },
        [("/sys/fs/cgroup/a/memory.max", 6, 2), ("/sys/fs/cgroup/a/b/memory.max", 8, 8), MACHINE],
        3,
    ),
    "v1": (
        {
            "proc/self/mountinfo": V1.format(top="/"),
            "proc/self/cgroup": V1_GROUPS.format(path="/user/me"),
            f"{MEMORY}/user/me/memory.limit_in_bytes": UNLIMITED,
            f"{MEMORY}/user/memory.limit_in_bytes": f"{2 * GIB}\n",
            f"{MEMORY}/user/memory.usage_in_bytes": f"{2 * GIB}\n",
            f"{MEMORY}/user/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB // 2}\ntotal_active_file 0\n",
            f"{MEMORY}/memory.limit_in_bytes": UNLIMITED,
            f"{CPU}/user/me/cpu.cfs_quota_us": "-1\n",
            f"{CPU}/user/me/cpu.cfs_period_us": "100000\n",
            f"{CPU}/user/cpu.cfs_quota_us": "50000\n",
            f"{CPU}/user/cpu.cfs_period_us": "100000\n",
        },
        [("/sys/fs/cgroup/memory/user/memory.limit_in_bytes", 2, 1.5), MACHINE],
        1,
    ),
    "v1 in a container, whose mounts show its own group as their top": (
        {
            "proc/self/mountinfo": V1.format(top="/docker/abc"),
            "proc/self/cgroup": IN_A_CONTAINER,
            f"{MEMORY}/memory.limit_in_bytes": f"{3 * GIB}\n",
            f"{CPU}/cpu.cfs_quota_us": "400000\n",
            f"{CPU}/cpu.cfs_period_us": "100000\n",
        },
        [("/sys/fs/cgroup/memory/memory.limit_in_bytes", 3, 3), MACHINE],
        4,
    ),
    "v1 in a pod, whose limit no mount shows": (
        {
            "proc/self/mountinfo": V1.format(top="/kubepods/pod/abc"),
            "proc/self/cgroup": V1_GROUPS.format(path="/kubepods/pod/abc"),
            f"{MEMORY}/memory.limit_in_bytes": UNLIMITED,
            f"{MEMORY}/memory.stat": f"hierarchical_memory_limit {5 * GIB}\n",
        },
        [("/sys/fs/cgroup/memory/memory.limit_in_bytes", 5, 5), MACHINE],
        8,
    ),
    "a path that no mount has: the top of the mount": (
        {
            "proc/self/mountinfo": V1.format(top="/docker/xyz"),
            "proc/self/cgroup": IN_A_CONTAINER,
            f"{MEMORY}/memory.limit_in_bytes": f"{3 * GIB}\n",
            f"{CPU}/cpu.cfs_quota_us": "100000\n",
            f"{CPU}/cpu.cfs_period_us": "50000\n",
        },
        [("/sys/fs/cgroup/memory/memory.limit_in_bytes", 3, 3), MACHINE],
        2,
    ),
    "a path that does not exist below the mount": (
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": "0::/docker/abc\n",
            "sys/fs/cgroup/memory.max": f"{3 * GIB}\n",
            "sys/fs/cgroup/cpu.max": "100000 100000\n",
        },
        [("/sys/fs/cgroup/memory.max", 3, 3), MACHINE],
        1,
    ),
    "a group outside the namespace": (
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": "0::/../neighbour\n",
            "sys/fs/cgroup/memory.max": f"{3 * GIB}\n",
            "sys/fs/neighbour/memory.max": "1\n",
        },
        [("/sys/fs/cgroup/memory.max", 3, 3), MACHINE],
        8,
    ),
    "a mount of another group beside that of the process": (
        {
            "proc/self/mountinfo": V2.replace(" / /sys/fs/cgroup", " /other /mnt/other") + V2,
            "proc/self/cgroup": "0::/mine\n",
            "mnt/other/memory.max": "1\n",
            "sys/fs/cgroup/mine/memory.max": f"{3 * GIB}\n",
        },
        [("/sys/fs/cgroup/mine/memory.max", 3, 3), MACHINE],
        8,
    ),
    "hybrid": (
        {
            "proc/self/mountinfo": HYBRID,
            "proc/self/cgroup": V1_GROUPS.format(path="/x") + "0::/x\n",
            f"{MEMORY}/x/memory.limit_in_bytes": f"{7 * GIB}\n",
            "sys/fs/cgroup/unified/x/cpu.max": "300000 100000\n",
        },
        [("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", 7, 7), MACHINE],
        3,
    ),
    "a mount point with a blank": (
        {
            "proc/self/mountinfo": V2.replace("/sys/fs/cgroup", r"/control\040groups"),
            "proc/self/cgroup": "0::/a:b\n",
            "control groups/a:b/memory.max": f"{3 * GIB}\n",
        },
        [("/control groups/a:b/memory.max", 3, 3), MACHINE],
        8,
    ),
    "no limits": (
        {
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": "0::/a\n",
            "sys/fs/cgroup/a/memory.max": "max\n",
            "sys/fs/cgroup/a/cpu.max": "max 100000\n",
        },
        [MACHINE],
        8,
    ),
    "a limit of zero": (
        {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "0\n"},
        [("/sys/fs/cgroup/memory.max", 0, 0), MACHINE],
        8,
    ),
    "a larger limit than the machine": (
        {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{64 * GIB}\n"},
        [MACHINE, ("/sys/fs/cgroup/memory.max", 64, 64)],
        8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_tightest_limit_of_the_chain_counts(name: str, tmp_path: Path) -> None:
    """Of 8 processors, and of 16 GiB, in whatever way the system shows its control groups."""
    files, limits, num_threads = CASES[name]
    found = host(tmp_path, files)
    assert limits_of(found) == limits
    assert found.num_threads(set(range(8))) == num_threads


GARBAGE = (
    b"\xff\xfe\x00",
    b"",
    b"\n\n",
    b"-5",
    b"1e9",
    b"9" * 5000,
    b"12 34 56",
    b"0 0",
    b"100000 0",
    b"max",
    b" - cgroup2 ",
)


@pytest.mark.parametrize("garbage", GARBAGE, ids=repr)
def test_garbage_limits_nothing(garbage: bytes, tmp_path: Path) -> None:
    """In each file; nothing is raised."""
    paths = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/cpu.max", "sys/fs/cgroup/memory.stat", "proc/self/status")
    tree: dict[str, str | bytes] = {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/\n"}
    assert host(tmp_path / "a", tree | dict.fromkeys(paths, garbage)).num_threads({0, 1}) == 2
    assert limits_of(Host(tmp_path / "a")) == [("this machine", 16, 10)]
    for name in ("proc/self/mountinfo", "proc/self/cgroup", "proc/meminfo"):
        found = host(tmp_path / name, tree | {name: garbage, "sys/fs/cgroup/memory.max": f"{GIB}\n"})
        assert {limit.total_bytes for limit in found.memory_limits()} <= {GIB, 16 * GIB}
        assert found.num_threads({0, 1}) == 2


def test_what_cannot_be_read_limits_nothing(tmp_path: Path) -> None:
    """A folder cannot be read even by root."""
    found = host(tmp_path, {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/\n"})
    for name in ("memory.max", "cpu.max"):
        (tmp_path / "sys/fs/cgroup" / name).mkdir(parents=True)
    assert limits_of(found) == [MACHINE]
    assert found.num_threads({0, 1}) == 2
    assert Host(tmp_path / "nowhere").memory_limits() == []


def test_a_path_that_no_system_accepts_limits_nothing(tmp_path: Path) -> None:
    """A zero byte, which mountinfo can spell."""
    files = {"proc/self/mountinfo": V2.replace("fs/cgroup", "fs/\\000"), "proc/self/cgroup": "0::/a\n"}
    found = host(tmp_path, files)
    assert limits_of(found) == [MACHINE]
    assert found.num_threads(set(range(8))) == 8


def test_half_a_core_rounds_up(tmp_path: Path) -> None:
    """Always, and there is one thread at least."""
    tree = {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/\n"}
    found = host(tmp_path, tree)
    for quota, num_threads in ((0.2, 1), (0.5, 1), (1.4, 1), (1.5, 2), (2.4, 2), (2.5, 3), (3.5, 4), (99, 8)):
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text(f"{round(quota * 100000)} 100000\n")
        assert found.num_threads(set(range(8))) == num_threads, quota


def test_threads_are_the_physical_cores_that_may_be_used(tmp_path: Path) -> None:
    """Two processors of one core count once."""
    for number, siblings in enumerate(("0,4", "1", "2", "3", "0,4")):
        topology = tmp_path / "sys/devices/system/cpu" / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    assert Host(tmp_path).num_threads({0, 1, 2, 4}) == 3
    assert Host(tmp_path / "nowhere").num_threads({7, 8}) == 2
    assert Host(tmp_path).num_threads(set(range(10, 1000))) == 256


def test_this_machine_has_cores_and_memory() -> None:
    """The real files."""
    assert Host().num_threads() >= 1
    assert all(0 <= limit.free_bytes <= limit.total_bytes for limit in Host().memory_limits())
