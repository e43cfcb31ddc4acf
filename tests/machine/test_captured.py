"""Machines that nobody here has, as texts: what `doctor` finds on each."""

import pathlib

import pytest

from optax_offload._machine import Here, Saved, diagnose, parse
from optax_offload._machine.jax_view import Device, JaxView

CAPTURED = pathlib.Path(__file__).parent / "captured"
LEVELS = {
    "apple_m2": {"devices": "note", "memories": "stop", "host memory": "unseen"},
    "dgx_spark": {"devices": "good", "memories": "stop", "host memory": "good"},
    "docker_cgroup2_l4": {
        "devices": "fix",
        "memories": "good",
        "link": "unseen",
        "host memory": "fix",
        "pinned memory": "fix",
        "locked memory": "good",
        "NUMA": "good",
        "fit": "good",
    },
    "gh200": {
        "devices": "good",
        "memories": "good",
        "link": "good",
        "host memory": "good",
        "pinned memory": "good",
        "locked memory": "good",
        "NUMA": "fix",
    },
    "h100_two_nodes": {
        "devices": "good",
        "memories": "good",
        "link": "good",
        "host memory": "good",
        "pinned memory": "fix",
        "locked memory": "good",
        "NUMA": "note",
        "fit": "good",
    },
    "jetson_orin": {"devices": "fix", "memories": "stop", "host memory": "good"},
    "mi300a": {"devices": "good", "memories": "stop", "host memory": "good"},
    "nothing": {
        "devices": "unseen",
        "host memory": "good",
        "locked memory": "note",
        "NUMA": "good",
    },
    "slurm_cgroup1_a100": {
        "devices": "good",
        "JAX": "fix",
        "memories": "good",
        "link": "fix",
        "host memory": "fix",
        "pinned memory": "good",
        "locked memory": "good",
        "NUMA": "fix",
        "fit": "good",
    },
    "strix_halo": {"devices": "good", "memories": "stop", "host memory": "good"},
    "tpu_v5e_8": {
        "devices": "good",
        "memories": "good",
        "link": "good",
        "host memory": "good",
        "locked memory": "fix",
        "NUMA": "note",
        "fit": "good",
    },
    "wsl2_rtx4090": {
        "devices": "good",
        "memories": "good",
        "link": "unseen",
        "host memory": "good",
        "WSL2": "stop",
    },
}


def text_of(name):
    """A captured machine."""
    return (CAPTURED / f"{name}.txt").read_text()


def findings_of(name):
    """What is found on a captured machine, by topic."""
    return {x.topic: x for x in diagnose(Saved(text_of(name))).findings}


def test_every_captured_machine_is_expected():
    """A machine that is added says what is to be found on it."""
    assert sorted(path.stem for path in CAPTURED.glob("*.txt")) == sorted(LEVELS)


@pytest.mark.parametrize("name", LEVELS)
def test_levels(name):
    """Each topic that applies, with what is to be done about it, and no other."""
    found = {topic: x.level for topic, x in findings_of(name).items()}
    assert found == {"JAX": "good", "fit": "note"} | LEVELS[name]


@pytest.mark.parametrize("name", LEVELS)
def test_offload_helps_unless_something_stops_it(name):
    """It is told as one value too."""
    stopped = "stop" in LEVELS[name].values()
    assert diagnose(Saved(text_of(name))).offload_helps is not stopped


@pytest.mark.parametrize("name", LEVELS)
def test_what_is_to_be_done_has_a_source(name):
    """Nobody is to change a machine because of a sentence of ours."""
    for finding in findings_of(name).values():
        assert finding.seen
        assert finding.means
        if finding.level in ("fix", "stop"):
            assert finding.sources, finding


@pytest.mark.parametrize(
    ("name", "topic", "text"),
    [
        ("apple_m2", "memories", "Apple M2 Max (Apple silicon): host and device share"),
        ("apple_m2", "host memory", "64.00 GiB in all"),
        ("apple_m2", "devices", "training runs on the CPU"),
        ("dgx_spark", "memories", "NVIDIA GB10 (DGX Spark (GB10)): host and device"),
        ("dgx_spark", "fit", "offloading does not help on this machine"),
        ("docker_cgroup2_l4", "devices", "1 x NVIDIA L4, 22.49 GiB"),
        ("docker_cgroup2_l4", "devices", 'pip install -U "jax[cuda12]"'),
        (
            "docker_cgroup2_l4",
            "link",
            "8 of its 16 lanes are in use, perhaps",
        ),
        ("docker_cgroup2_l4", "link", "its slot of 8 lanes carries 16 GB/s"),
        ("docker_cgroup2_l4", "host memory", "the cgroup has 30.00 GiB free of 32.00"),
        ("docker_cgroup2_l4", "host memory", "docker run --memory=161g ..."),
        ("docker_cgroup2_l4", "pinned memory", "runs out before XLA refuses"),
        ("docker_cgroup2_l4", "pinned memory", "HOST_MEMORY_LIMIT_GB=27"),
        ("docker_cgroup2_l4", "fit", "--target l4 --host-memory 27GiB"),
        ("gh200", "memories", "has its own memory, coherent with the host's"),
        ("gh200", "host memory", "95.35 GiB of it is the device's"),
        ("gh200", "host memory", "450.14 GiB are left for offloaded state"),
        ("gh200", "NUMA", "nodes 1, 2, 3, 4, 5, 6, 7, 8 have none"),
        ("gh200", "NUMA", "numactl --membind=0 python train.py"),
        ("gh200", "fit", "fit does not know NVIDIA GH200 480GB"),
        ("h100_two_nodes", "devices", "4 x NVIDIA H100 80GB HBM3, 79.65 GiB on each"),
        ("h100_two_nodes", "devices", "driver 570.86.15"),
        ("h100_two_nodes", "link", "52 GB/s each way, measured"),
        ("h100_two_nodes", "pinned memory", "XLA pins at most 64.00 GiB"),
        ("h100_two_nodes", "pinned memory", "HOST_MEMORY_LIMIT_GB=1778"),
        (
            "h100_two_nodes",
            "NUMA",
            "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=2,3 numactl "
            "--cpunodebind=1 --preferred=1 python train.py",
        ),
        (
            "h100_two_nodes",
            "fit",
            "--target h100:4 --host-memory 1778GiB --measure-link",
        ),
        ("jetson_orin", "memories", "NVIDIA Jetson AGX Orin Developer Kit (Jetson)"),
        ("jetson_orin", "devices", "Unable to load cuDNN"),
        ("mi300a", "devices", "4 x AMD Instinct MI300A"),
        ("mi300a", "memories", "(MI300A): host and device share one memory"),
        ("nothing", "devices", "no accelerator was found"),
        ("nothing", "fit", "no device was found"),
        ("slurm_cgroup1_a100", "JAX", "From 0.11.1 on (Python 3.12)"),
        ("slurm_cgroup1_a100", "link", "less than usual"),
        ("slurm_cgroup1_a100", "host memory", "sbatch --mem=841G ..."),
        ("slurm_cgroup1_a100", "NUMA", "at node 0; this process may run on node 1"),
        ("slurm_cgroup1_a100", "NUMA", "sbatch --gres-flags=enforce-binding ..."),
        ("slurm_cgroup1_a100", "fit", "--target a100-80 --host-memory 55GiB"),
        ("strix_halo", "memories", "AMD Radeon Graphics (Strix Halo (Ryzen AI Max))"),
        ("tpu_v5e_8", "devices", "8 x TPU v5 lite"),
        ("tpu_v5e_8", "locked memory", "ulimit -l unlimited"),
        ("tpu_v5e_8", "NUMA", "One process drives all chips of a host"),
        ("tpu_v5e_8", "fit", "--target v5e:2x4 --host-memory 335GiB"),
        ("wsl2_rtx4090", "devices", "1 x NVIDIA GeForce RTX 4090"),
        ("wsl2_rtx4090", "link", "not measured (not under WSL2)"),
        ("wsl2_rtx4090", "WSL2", "0.5 to 1 GiB for a process"),
    ],
)
def test_found(name, topic, text):
    """What was seen, what it means, or the line to paste."""
    finding = findings_of(name)[topic]
    assert text in "\n".join([finding.seen, finding.means, *finding.do])


def changed(name, **sections):
    """A captured machine with other texts: `/` is written `__`, as in a name."""
    machine = Saved(text_of(name))
    texts = {k.replace("__", "/"): v for k, v in sections.items()}
    machine._texts |= texts
    return {x.topic: x for x in diagnose(machine).findings}


H100 = "h100_two_nodes"
STATUS = "Cpus_allowed_list:\t{}\nMems_allowed_list:\t0-1\n"


def test_one_chosen_device_has_one_node():
    """CUDA_VISIBLE_DEVICES chooses; the line then binds the whole process."""
    found = changed(H100, environment="CUDA_VISIBLE_DEVICES=2")["NUMA"]
    assert found.level == "fix"
    assert found.do == ("numactl --cpunodebind=1 --preferred=1 python train.py",)
    near = changed(
        H100,
        environment="CUDA_VISIBLE_DEVICES=2",
        proc__self__status=STATUS.format("56-111"),
    )["NUMA"]
    assert near.level == "good"
    # By another name, as a UUID, all are taken.
    assert changed(H100, environment="CUDA_VISIBLE_DEVICES=GPU-1")["NUMA"].do


@pytest.mark.parametrize("chosen", ["1,2", "2,1"])
def test_chosen_devices_keep_their_numbers(chosen):
    """The line for a node names a device that is there, and that was chosen."""
    found = changed(H100, environment=f"CUDA_VISIBLE_DEVICES={chosen}")["NUMA"]
    assert found.do == tuple(
        f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={number} numactl "
        f"--cpunodebind={node} --preferred={node} python train.py"
        for node, number in ((0, 1), (1, 2))
    )


def test_processors_of_the_other_node_outside_of_slurm():
    """A container is given other processors by its own option."""
    found = changed(
        H100,
        environment="CUDA_VISIBLE_DEVICES=0",
        proc__self__status=STATUS.format("56-111"),
    )["NUMA"]
    assert found.do == (
        "docker run --cpuset-cpus=$(cat /sys/devices/system/node/node0/cpulist) "
        "--cpuset-mems=0 ...",
    )


@pytest.mark.parametrize(
    ("value", "level", "text"),
    [
        ("1800", "good", "about as much as the host has"),
        ("3000", "fix", "runs out before XLA refuses"),
        ("lots", "fix", "ignores 'lots'"),
        ("", "fix", "is not set"),
    ],
)
def test_the_plugins_limit(value, level, text):
    """Beside what the host has free."""
    variable = f"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={value}"
    found = changed(H100, environment=variable)["pinned memory"]
    assert found.level == level
    assert text in f"{found.seen} {found.means}"


def test_a_platform_that_is_forbidden():
    """JAX_PLATFORMS hides a device; no plugin is missing."""
    found = changed("docker_cgroup2_l4", environment="JAX_PLATFORMS=cpu")["devices"]
    assert found.do == ("unset JAX_PLATFORMS",)


def test_a_link_that_is_slow():
    """In a slot whose lanes are not all in use, that may be why."""
    width = "sys__bus__pci__devices__0000:19:00.0__current_link_width"
    view = Saved(text_of(H100)).read("jax").replace("51700000000.0", "11e9")
    found = changed(H100, jax=view, **{width: "4"})["link"]
    assert found.level == "fix"
    assert "only 4 of its 16 lanes are in use" in found.means
    # One that is fast has its lanes when it needs them.
    assert changed(H100, **{width: "4"})["link"].level == "good"


def test_fit_takes_the_link_that_was_measured():
    """Else the documented one of the chip."""
    measured = findings_of("h100_two_nodes")["fit"].seen
    assert measured.endswith("a link of 52 GB/s each way")
    text = text_of("h100_two_nodes")
    line = next(x for x in text.splitlines() if "link_bytes_per_second" in x)
    without = text.replace(
        line, ' "link_bytes_per_second": null' + "," * line.endswith(",")
    )
    found = {x.topic: x for x in diagnose(Saved(without)).findings}
    assert found["fit"].seen.endswith("a link of 64 GB/s each way")


def test_a_coherent_link_is_not_its_slot():
    """What PCI Express carries says nothing of it."""
    assert "slot" not in findings_of("gh200")["link"].means


def test_memory_that_is_no_devices():
    """A node without processors beside another kind of device is the host's."""
    node = "sys__devices__system__node__node1__cpulist"
    assert changed(H100, **{node: "\n"})["NUMA"].level == "good"


def test_firmware_that_does_not_say():
    """-1 is no node; the driver may know."""
    node = "sys__bus__pci__devices__0000:cb:00.0__numa_node"
    found = changed(H100, **{node: "-1"})["NUMA"]
    assert (found.level, found.do) == ("unseen", ("nvidia-smi topo -m",))


def test_nodes_without_a_device():
    """Nothing is near or far of a device that is not there."""
    node = "sys/devices/system/node/node"
    texts = f"== {node}0/cpulist\n0-3\n== {node}1/cpulist\n4-7\n"
    found = {x.topic: x for x in diagnose(Saved(texts)).findings}["NUMA"]
    assert (found.level, found.do) == ("note", ())


def test_a_process_that_says_nothing_of_itself():
    """Where it may run is then not guessed."""
    found = changed(H100, proc__self__status="Name:\tpython\n")["NUMA"]
    assert found.level == "unseen"


def test_a_plugin_that_cannot_start():
    """It is installed: JAX says why, and nothing is to be installed."""
    view = JaxView(
        {"jax": "0.12.0", "libtpu": "0.0.50"}, (), "RuntimeError: TPU is in use"
    )
    found = changed("tpu_v5e_8", jax=view.as_json())["devices"]
    assert found.level == "fix"
    assert "plugin is installed (RuntimeError: TPU is in use)" in found.means
    assert found.do[0].startswith("JAX_PLATFORMS=tpu python -c")


def test_memory_of_a_pod():
    """Kubernetes has its own line."""
    found = changed(
        "docker_cgroup2_l4",
        proc__self__cgroup="0::/kubepods.slice/pod1",
    )["host memory"]
    assert found.do[0].startswith("kubectl set resources")


@pytest.mark.parametrize(("free_gib", "level"), [(100, "fix"), (50, "good")])
def test_a_cgroup_that_has_half_of_what_is_free(free_gib, level):
    """It is no bound to mend where the machine itself has no more to give."""
    memory = f"MemTotal: {200 * 2**20} kB\nMemAvailable: {free_gib * 2**20} kB\n"
    found = changed("docker_cgroup2_l4", proc__meminfo=memory)["host memory"]
    assert found.level == level
    assert "the cgroup has 30.00 GiB free of 32.00 GiB" in found.seen
    assert found.means.startswith("30.00 GiB are left")


def test_a_tpu_that_pins_without_vfio():
    """Of a v4 the limit of locked memory bounds nothing."""
    text = text_of("tpu_v5e_8").replace("PCI_ID=1AE0:0063", "PCI_ID=1AE0:005E")
    found = {x.topic: x for x in diagnose(Saved(text)).findings}
    assert found["locked memory"].level == "note"


@pytest.mark.parametrize(
    ("version", "level"), [("0.11.0", "fix"), ("0.11.1", "good"), ("0.12", "good")]
)
def test_since_when_copy_engines_move_rows(version, level):
    """The first version that does needs no newer one."""
    text = text_of("slurm_cgroup1_a100").replace(
        '"jax": "0.10.2"', f'"jax": "{version}"'
    )
    found = {x.topic: x for x in diagnose(Saved(text)).findings}
    assert found["JAX"].level == level


def test_no_pinned_host():
    """A device whose JAX has no such memory cannot be offloaded from."""
    view = Saved(text_of(H100)).read("jax").replace('"pinned_host"', '"unpinned_host"')
    found = changed(H100, jax=view)["devices"]
    assert found.level == "stop"
    assert "no pinned_host to offload to" in found.means


@pytest.mark.parametrize(
    ("name", "target", "level"),
    [
        ("NVIDIA H200", "h200:4", "good"),
        ("NVIDIA A100-SXM4-40GB", "a100-40:4", "good"),
        ("NVIDIA A100 80GB PCIe", "a100-80:4", "note"),
        ("NVIDIA H100 PCIe", "h100:4", "note"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090:4", "note"),
        ("NVIDIA L40S", "l40s:4", "good"),
        ("NVIDIA TITAN V", None, "note"),
        ("NVIDIA GB200", None, "note"),
    ],
)
def test_targets_of_gpus(name, target, level):
    """A chip that is known, one that is like it, or none."""
    view = Saved(text_of(H100)).read("jax").replace("NVIDIA H100 80GB HBM3", name)
    found = changed(H100, jax=view)["fit"]
    assert found.level == level
    if target is not None:
        assert f"target {target}," in found.seen
    else:
        assert "fit does not know" in found.seen


@pytest.mark.parametrize(
    ("kind", "count", "grid", "target"),
    [
        ("TPU v4", 4, (2, 2, 1), "v4:2x2x1"),
        ("TPU v5", 4, (2, 2, 4), "v5p:2x2x4"),
        ("TPU v6 lite", 4, (), "v6e:2x2"),
        ("TPU v5 lite", 8, (4, 4, 1), "v5e:4x4"),
        ("TPU v5 lite", 3, (), "v5e:1x1"),
        ("TPU7x", 8, (2, 2, 1), "tpu7x:2x2x1"),
    ],
)
def test_targets_of_tpus(kind, count, grid, target):
    """By JAX's coordinates, of all hosts; or by what a host usually has."""
    device = Device(kind, "tpu", count, ("device", "pinned_host"), grid)
    view = JaxView({"jax": "0.12.0"}, (device,))
    found = changed("tpu_v5e_8", jax=view.as_json())["fit"]
    assert f"target {target}," in found.seen


@pytest.mark.parametrize(
    ("row", "level"),
    [
        ("00000000:19:00.0, Tesla V100-SXM2-32GB, 32768 MiB, 570.86.15", "good"),
        ("00000000:19:00.0, NVIDIA GX20, [N/A], 570.86.15", "unseen"),
    ],
)
def test_a_device_that_no_table_has(row, level):
    """It has a memory of its own if its driver says how much."""
    name = row.split(", ")[1]
    view = Saved(text_of(H100)).read("jax").replace("NVIDIA H100 80GB HBM3", name)
    sections = {f"$ {parse.SMI_COMMAND}": row, "jax": view}
    assert changed(H100, **sections)["memories"].level == level


def test_a_machine_that_says_nothing():
    """Every topic that applies to any machine says that it could not see."""
    found = {x.topic: x for x in diagnose(Saved("== proc/version\n")).findings}
    unseen = ["devices", "JAX", "host memory", "locked memory", "NUMA"]
    assert [topic for topic, x in found.items() if x.level == "unseen"] == unseen
    assert found["fit"].do[-1].endswith("--target h100")


def test_a_gpu_that_nothing_names():
    """Without a driver there is its number at the bus."""
    uevent = "PCI_CLASS=30200\nPCI_ID=10DE:2330\n"
    path = "sys/bus/pci/devices/0000:19:00.0/uevent"
    found = diagnose(Saved(f"== {path}\n{uevent}")).findings[0]
    assert found.seen == "1 x NVIDIA GPU (PCI device 2330)"


GARBAGE = ["", "\n", "-1", "max max max", "a: b: c", "=,=", "0-99999999999", "9" * 40]


@pytest.mark.parametrize("name", LEVELS)
def test_no_text_raises(name):
    """Each section in turn is garbage, or cut in half; something is always said."""
    machine = Saved(text_of(name))
    whole = dict(machine._texts)
    for section, text in whole.items():
        for garbage in [*GARBAGE, text[: len(text) // 2]]:
            machine._texts = whole | {section: garbage}
            found = diagnose(machine).findings
            assert [x.topic for x in found][-1] == "fit"


@pytest.mark.parametrize("name", ["h100_two_nodes", "gh200", "mi300a", "strix_halo"])
def test_files_are_read_as_texts_are(name, tmp_path, monkeypatch):
    """The same findings from a file system, and from what is saved of that."""
    machine = Saved(text_of(name))
    for path, text in machine._texts.items():
        if path.startswith(("proc/", "sys/")):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
    monkeypatch.setattr(Here, "output", lambda self, command: machine.output(command))
    monkeypatch.setattr(Here, "environment", lambda self: machine.environment())
    here = Here(tmp_path)
    here.seen["jax"] = machine.read("jax")
    expected = diagnose(machine)
    assert diagnose(here) == expected
    here.seen |= {k: v for k, v in machine._texts.items() if k[0] in "$e"}
    assert diagnose(Saved(here.saved())) == expected
