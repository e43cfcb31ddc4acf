"""Factories of the libraries that people write models with, as in the examples."""

import importlib.util
import pathlib
import sys

import jax
import pytest

import optax_offload as oo
from optax_offload import aot
from optax_offload._places.step_options import Options
from optax_offload._plan.candidates import traced
from optax_offload._plan.state import movable_state
from optax_offload._plan.step import StepFactory, record
from optax_offload._plan.variants import Variant

H100 = aot.Target("h100")
PATH = pathlib.Path(__file__).parent.parent.parent / "examples" / "factories.py"
SMALL = {"layers": 32, "width": 512}


@pytest.fixture(scope="module")
def factories():
    """The module of the examples."""
    pytest.importorskip("equinox")
    spec = importlib.util.spec_from_file_location("factories_of_examples", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def small(make_step):
    """The factory, of a small model."""
    return lambda offload, target: make_step(offload, target, **SMALL)


NAMES = pytest.mark.parametrize("name", ["linen", "in_nnx", "in_equinox"])


@NAMES
def test_parameters_and_gradients_are_found(factories, name):
    """Scans take the rows of all parameters, and none has its gradient whole."""
    factory = StepFactory(small(getattr(factories, name)), H100)
    state = movable_state(record(factory), None, 1)
    kernels = 32 * 512 * 512 * 4
    assert sum(x.leaf.nbytes_per_device for x in state.parameters) >= kernels
    options = Options(late_gradients="recompute", residuals="host")
    found = traced(factory, state, Variant(state.everything, (), "all", options))
    known = state.with_rows(found.row_arguments)
    assert sum(x.leaf.nbytes_per_device for x in known.resting("rows")) >= kernels
    assert found.gradient_bytes >= kernels
    assert found.late_bytes == 0
    assert found.residual_bytes > 0


@NAMES
@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.newest
def test_fit_moves_parameters_of_a_step_as_it_is_written(factories, name, tmp_path):
    """And the file it writes is what a training needs."""
    make_step = getattr(factories, name)
    found = oo.plan(small(make_step), target=H100, budget_bytes=64 * 2**20)
    assert found.after.parameter_bytes > 0
    assert found.placed == (("model",) if name == "in_nnx" else ("params",))
    found.save(tmp_path / "rules.toml")
    config = oo.load_config(tmp_path / "rules.toml")
    assert config.parameters
    step = small(make_step)(lambda inner: oo.offload(inner, config), H100)
    jitted = oo.jit(step.fn, donate_argnums=step.donate_argnums, **config.step)
    pattern = "|".join(f"(.*/)?{rule.regex}" for rule in config.parameters)
    paths = r"(?!.*(mu|nu)/)" + f"({pattern})"
    args = oo.set_memory_kind(step.args, paths, "pinned_host")
    compiled = aot.compile(jitted, *args, target=H100)
    assert aot.peak(compiled).peak_bytes == found.after.used_bytes
    assert aot.step_time(compiled, H100) == found.after.time
    assert jax.tree.structure(args) == jax.tree.structure(step.args)
