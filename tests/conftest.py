"""What every test runs under: several CPU devices or an accelerator, strict ranks."""

import collections
import gc
import os
import re
from importlib import metadata

import pytest

# What is arithmetic, files or text, and the same with each JAX: CI runs it with the
# default Python alone.
ANY_JAX = re.compile(
    r"tests/(benchmarks|cli|host|machine|report|rows|states)/"
    r"|tests/low_bit/test_(by_parts|codecs|forms|in_rows|low_bit|low_bit_checkpoints"
    r"|master_weights|stochastic_round|weights)\.py"
)

# Tests of many cases, of which one in so many is quick. The others are slow: CI runs
# them with the default Python alone.
ONE_IN = {
    "emit/test_init.py::test_state_is_where_its_parameter_is": 3,
    "emit/test_steps_in_bodies.py::test_layers_of_a_python_loop_at_rest_in_bodies": 2,
    "emit/test_steps_in_bodies.py::test_updates_are_fused_in_bodies": 2,
    "low_bit/test_weights.py::test_there_and_back": 3,
    "program/test_at_rest.py::test_losses": 2,
    "program/test_branches.py::test_values_are_those_of_the_plain_one": 2,
    "program/test_followed.py::test_decoded_by_rows": 2,
    "program/test_shard_maps.py::test_models": 2,
    "rows/test_slicing_rules.py::test_rows_are_those_of_vmap": 4,
    "schedule/test_chosen_state.py::test_optimizers": 2,
    "schedule/test_chosen_state.py::test_what_is_made_of_state": 3,
    "schedule/test_delayed_rows.py::test_a_tpu_moves_rows_in_turn": 2,
    "schedule/test_left_outside.py::test_what_else_a_step_does": 2,
    "schedule/test_passes.py::test_values_and_passes": 2,
    "schedule/test_replacements.py::test_what_makes_new_parameters": 2,
    "step/test_donation.py::test_bytes_of_compiled_programs": 4,
    "step/test_donation.py::test_same_numbers_where_the_step_left_them": 3,
    "step/test_functions_of_steps.py::test_functions_of_a_step": 3,
    "system/test_compiled_steps.py::test_peak_falls_in_a_whole_step": 2,
    "system/test_fine_tune.py::test_a_program_trains_adapters_alone": 2,
    "system/test_fused_models.py::test_three_steps": 3,
}


# Of two or three cases of a test CI runs one with the newer Python and the others with
# the default one, and of more every third, unless it asks what a JAX has.
ONE_IN_CASES = 3
OF_EACH_JAX = re.compile(r"tests/(step/test_flags|system/test_(lowered|upstream))\.py")


def asks_for_accelerator(config):
    """Whether tests are selected with ``-m accelerator``."""
    return re.search(r"(?<!not )\baccelerator\b", config.option.markexpr)


def pytest_configure(config):
    """Chooses the devices before JAX is imported: it reads both when it starts."""
    if asks_for_accelerator(config):
        # A difference is to be that of programs, not of a GPU's short products.
        os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    else:
        flags = os.environ.get("XLA_FLAGS", "")
        flags += " --xla_force_host_platform_device_count=8"
        # Programs of tests are small: to compile one in 32 parts costs a tenth more.
        flags += " --xla_cpu_parallel_codegen_split_count=1"
        if metadata.version("jaxlib").startswith("0.10."):
            # As compilers before had it: half the time. Newer ones know no such flag,
            # and test what users have.
            flags += " --xla_cpu_use_fusion_emitters=false"
        os.environ["XLA_FLAGS"] = flags
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_collection_modifyitems(items):
    """What is slow comes first, so that no process waits for the other at the end."""
    counts = collections.Counter()
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        if name in ONE_IN and not item.get_closest_marker("slow"):
            if counts[name] % ONE_IN[name]:
                item.add_marker(pytest.mark.slow)
            counts[name] += 1
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    cases = collections.defaultdict(list)
    for item in items:
        if ANY_JAX.search(item.path.as_posix()):
            item.add_marker(pytest.mark.any_jax)
        elif OF_EACH_JAX.search(item.path.as_posix()):
            continue
        elif not any(item.get_closest_marker(mark) for mark in ("slow", "skipif")):
            cases[item.nodeid.partition("[")[0]].append(item)
    for several in cases.values():
        parts = min(len(several), ONE_IN_CASES)
        for number, item in enumerate(several if parts > 1 else ()):
            item.add_marker("any_jax" if number % parts else "newer_jax")
    if metadata.version("jaxlib").startswith(("0.10.", "0.11.0")):
        for item in items:
            if item.get_closest_marker("newest"):
                item.add_marker(pytest.mark.skip("parameters stream with JAX 0.11.1"))


def pytest_ignore_collect(collection_path, config):
    """Other modules may need what an accelerator's machine lacks."""
    if asks_for_accelerator(config) and collection_path.suffix == ".py":
        return True if "mark.accelerator" not in collection_path.read_text() else None
    return None


@pytest.fixture(autouse=True, scope="session")
def compiled_once(tmp_path_factory):
    """Compiles what several tests compile once in each process: it is most of the time.

    A directory for each, since JAX may read what another process is still writing.
    """
    import jax

    directory = str(tmp_path_factory.mktemp("compiled"))
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@pytest.fixture(autouse=True, scope="session")
def less_for_python():
    """Two habits of JAX and Python that no test needs: an eighth of the time.

    JAX writes where an operation came from into each; collections look through all that
    was ever imported.
    """
    import jax

    jax.config.update("jax_traceback_in_locations_limit", 0)
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(autouse=True)
def compilers(request):
    """Skips a test marked `aot` where the real compilers (the extra `aot`) are not."""
    if request.node.get_closest_marker("aot"):
        # Imported here: it imports JAX, which reads what `pytest_configure` sets.
        from small_programs import missing_compilers

        if reason := missing_compilers():
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def optimized(request):
    """Has LLVM optimize the code of some tests only: that takes a third of the time.

    XLA's own passes run in all of them. Those for chips have it as users have.
    """
    import jax

    name = "jax_disable_most_optimizations"
    asked = asks_for_accelerator(request.config) or any(
        request.node.get_closest_marker(mark) for mark in ("aot", "optimized")
    )
    before = jax.config.values[name]
    jax.config.update(name, not asked)
    yield
    jax.config.update(name, before)


@pytest.fixture(autouse=True)
def strict_rank_promotion():
    """Nothing is broadcast by accident; strict dtypes are beyond optax's own Adam."""
    import jax

    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True)
def on_a_drive(monkeypatch):
    """Where temporary directories are memory, no test is warned of it."""
    from optax_offload._ground import file_system

    monkeypatch.setattr(file_system, "mount_here", lambda path: None)
