"""What a host has, read from files as Linux, containers and XLA have them."""

import pytest

from optax_offload._host import host_memory

GIB = 2**30


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A file system to write to, and no settings of XLA's."""
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    monkeypatch.delenv(host_memory.PLUGIN_LIMIT, raising=False)
    monkeypatch.delenv(host_memory.PLUGIN_PREALLOCATE, raising=False)
    return tmp_path


def write(root, files):
    """Writes files of a machine."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def found(**kwargs):
    """The limits that are found, by name, with their total and free bytes."""
    limits = host_memory.limits(**{"gpu": False, "pinned_bytes": 0} | kwargs)
    return {x.name: (x.total_bytes, x.free_bytes) for x in limits}


def test_machine(root):
    """In kB, whatever else there is."""
    text = "MemTotal: 8 kB\nMemFree: 1 kB\nMemAvailable: 5 kB\nHugePages_Total: 0\nX:\n"
    write(root, {"proc/meminfo": text})
    assert found() == {"machine": (8192, 5120)}


def test_nothing_known(root):
    """As on a system without /proc: no limit is better than a wrong one."""
    assert found() == {}
    write(root, {"proc/meminfo": "MemTotal: 8 kB\n"})
    assert found() == {}


def test_cgroup_2(root):
    """The tightest of a group and those it is in; cached pages count as free."""
    write(
        root,
        {
            "proc/self/cgroup": "0::/jobs/mine\n",
            "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
            "sys/fs/cgroup/jobs/mine/memory.current": "100\n",
            "sys/fs/cgroup/memory.max": "5000\n",
            "sys/fs/cgroup/memory.current": "2000\n",
            "sys/fs/cgroup/jobs/memory.max": "1000\n",
            "sys/fs/cgroup/jobs/memory.current": "700\n",
            "sys/fs/cgroup/jobs/memory.stat": "anon 500\ninactive_file 150\n",
        },
    )
    assert found() == {"cgroup": (1000, 450)}


def test_cgroup_2_in_a_container(root):
    """Its own group is the root of what it sees."""
    write(
        root,
        {
            "proc/self/cgroup": "0::/../../docker/abc\n",
            "sys/fs/cgroup/memory.max": "1000\n",
            "sys/fs/cgroup/memory.current": "1200\n",
        },
    )
    assert found() == {"cgroup": (1000, 0)}


def test_cgroup_1(root):
    """Beside other controllers; a path that is not there stands for its parents."""
    write(
        root,
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "600\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 100\n",
        },
    )
    assert found() == {"cgroup": (1000, 500)}


def test_cgroup_1_without_limit(root):
    """Which it says with a number beyond any machine."""
    write(
        root,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "600\n",
        },
    )
    assert found() == {}


@pytest.mark.parametrize(
    ("limit", "preallocate", "gib"),
    [("", "", 64), ("200", "", 200), ("lots", "", 64), ("", "true", 16)],
)
def test_plugin(root, monkeypatch, limit, preallocate, gib):
    """GPUs only; what this process has pinned is not free."""
    monkeypatch.setenv(host_memory.PLUGIN_LIMIT, limit)
    monkeypatch.setenv(host_memory.PLUGIN_PREALLOCATE, preallocate)
    assert found(gpu=True, pinned_bytes=GIB) == {
        "GPU plugin": (gib * GIB, (gib - 1) * GIB)
    }
    assert found(gpu=False) == {}


def test_shortages():
    """Each limit that is too small, with what mends it; the plugin pins only."""
    memory = host_memory.HostMemory(
        needed_bytes={"pinned_host": 100 * GIB, "unpinned_host": 20 * GIB},
        missing_bytes={"pinned_host": 90 * GIB, "unpinned_host": 20 * GIB},
        limits=(
            host_memory.Limit("machine", 200 * GIB, 100 * GIB),
            host_memory.Limit("cgroup", 150 * GIB, 109 * GIB),
            host_memory.Limit("GPU plugin", 64 * GIB, 54 * GIB),
        ),
    )
    machine, cgroup, plugin = memory.shortages
    assert machine.startswith("this process still needs 110.00 GiB of host memory")
    assert machine.endswith("shard the state over more hosts")
    assert "the cgroup has only 109.00 GiB left of 150.00 GiB" in cgroup
    assert "docker run --memory=" in cgroup
    assert plugin.startswith("this process still needs 90.00 GiB of host memory")
    assert plugin.endswith("export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=100")
    assert not host_memory.HostMemory({}, {}, memory.limits).shortages


def test_this_machine():
    """Linux says how much memory it has."""
    if not (host_memory.ROOT / "proc/meminfo").exists():
        pytest.skip("no /proc")
    total, free = found()["machine"]
    assert GIB // 2 < total < 2**60
    assert 0 < free <= total


@pytest.mark.parametrize(
    ("gib", "expected"), [(57, {}), (58, "64"), (64, "71"), (90, "99"), (0, {})]
)
def test_what_the_plugin_has_to_be_told(gib, expected):
    """A tenth more than is pinned, where that comes near its default of 64 GiB."""
    if expected:
        expected = {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": expected}
    assert host_memory.gpu_plugin_settings(gib * GIB) == expected
