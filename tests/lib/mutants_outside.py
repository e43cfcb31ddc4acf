"""Small mistakes beside the engine and plans, where a wrong answer would be silent.

A leaf whose place or sharding is not what was asked for, a line for a machine that is
wrong: nothing raises there.
"""

from __future__ import annotations

from mutant import Mutant

MEMORY = "tests/places/test_memory.py"
SHARDINGS = "tests/places/test_shardings.py"
FRACTIONS = "tests/places/test_fractions.py"
TEMPLATES = "tests/places/test_templates.py"
DISK = "tests/states/test_disk.py"
TABLES = "tests/cli/test_tables.py"
CAPTURED = "tests/machine/test_captured.py"
_SHARDINGS_ASKED = f"{SHARDINGS}::test_what_is_asked_for_decides_before_what_a_box_says"
_TYPES = f"{MEMORY}::test_what_a_type_says_of_its_parts"

OUTSIDE = {
    "a step in another planned by itself": Mutant(
        "_step/streaming.py",
        "if not memory.as_on_device.value:\n        return False\n    around",
        "if True:\n        return False\n    around",
        ("tests/step/test_stream.py::test_a_step_in_another_is_planned_with_it",),
    ),
    # Places and shardings.
    "the smallest leaves of a share": Mutant(
        "_places/rules.py",
        "key=lambda path: (-sizes[path], path)",
        "key=lambda path: (sizes[path], path)",
        (FRACTIONS,),
    ),
    "a share of a binary number": Mutant(
        "_places/rules.py",
        "Fraction(str(rule.fraction))",
        "Fraction(rule.fraction)",
        (f"{FRACTIONS}::test_a_share_is_the_number_as_it_is_written",),
    ),
    "rules that are lenient for one of them": Mutant(
        "_places/rules.py",
        "return all(rule.optional for rule in self.rules)",
        "return any(rule.optional for rule in self.rules)",
        (
            "tests/places/test_rules.py::test_a_config_is_lenient_if_all_of_its_rules_are",
        ),
    ),
    "a rule file whose parameters are not read": Mutant(
        "_places/rule_files.py",
        'table.get("parameters", [])',
        "[]",
        ("tests/places/test_rules.py::test_load_config_of_a_whole_training",),
    ),
    "a box's rules before those given": Mutant(
        "_places/shardings.py",
        "rules = axis_rules or x.rules",
        "rules = x.rules or axis_rules",
        (_SHARDINGS_ASKED,),
    ),
    "a box's axes looked for that nobody asks": Mutant(
        "_places/shardings.py",
        "if m is not None and s is None and _mesh_of(m, mesh) is not None else None",
        "if m is not None and _mesh_of(m, mesh) is not None else None",
        (_SHARDINGS_ASKED,),
    ),
    "leaves spread along the axis that is sliced": Mutant(
        "_places/spread.py",
        "ndim >= 3 or",
        "ndim > 3 or",
        ("tests/places/test_spread.py::test_which_axis",),
    ),
    "what Auto mode does not tell taken for whole": Mutant(
        "_places/memory.py",
        "if kind == AxisType.Auto or name in axes_of(sharding.spec):",
        "if name in axes_of(sharding.spec):",
        (_TYPES,),
    ),
    "the bytes of a part rounded down": Mutant(
        "_places/memory.py",
        "return -(-nbytes(x) // shards)",
        "return nbytes(x) // shards",
        (_TYPES,),
    ),
    "matrices of a mesh sliced in Auto mode": Mutant(
        "_places/memory.py",
        "if auto and len(aval.shape) < 3:",
        "if auto and len(aval.shape) < 2:",
        (_TYPES,),
    ),
    "copies in pinned memory counted as one": Mutant(
        "_places/memory.py",
        "        * len(x.sharding.addressable_devices)\n",
        "",
        (f"{MEMORY}::test_pinned_bytes_are_those_of_all_devices",),
    ),
    # What a machine is found to be.
    "devices of a node counted among the chosen": Mutant(
        "_machine/host.py",
        'numbers = ",".join(str(facts.numbers[i]) for i in places[node])',
        'numbers = ",".join(map(str, places[node]))',
        (f"{CAPTURED}::test_chosen_devices_keep_their_numbers",),
    ),
    "a cgroup with half of what there is": Mutant(
        "_machine/host.py",
        "cgroup.free_bytes < machine.free_bytes // 2",
        "cgroup.free_bytes < machine.total_bytes // 2",
        (f"{CAPTURED}::test_a_cgroup_that_has_half_of_what_is_free",),
    ),
    "locked memory of every TPU": Mutant(
        "_machine/host.py",
        'if any(x.vendor == "google" and x.name != "TPU v4"',
        'if any(x.vendor == "google"',
        (f"{CAPTURED}::test_a_tpu_that_pins_without_vfio",),
    ),
    "the first version that copies taken for older": Mutant(
        "_machine/devices.py",
        "numbers < _COPIES_SINCE",
        "numbers <= _COPIES_SINCE",
        (f"{CAPTURED}::test_since_when_copy_engines_move_rows",),
    ),
    "a measured link that fit does not take": Mutant(
        "_machine/devices.py",
        "link = facts.jax.link_bytes_per_second or chip.link.bytes_per_second",
        "link = chip.link.bytes_per_second",
        (f"{CAPTURED}::test_fit_takes_the_link_that_was_measured",),
    ),
    # Templates.
    "parts of a leaf of other rows": Mutant(
        "_places/templates.py",
        "if s[:-1] == shape[:-1] and s[-1] >= shape[-1]",
        "if s[-1] >= shape[-1]",
        (f"{TEMPLATES}::test_parts_of_encoded_leaves_go_with_the_leaf",),
    ),
    "scales that are replicated": Mutant(
        "_places/templates.py",
        "sharding.update(spec=PartitionSpec(*sharding.spec[: len(shape) - 1]))",
        "sharding.update(spec=PartitionSpec())",
        (f"{TEMPLATES}::test_parts_of_encoded_leaves_go_with_the_leaf",),
    ),
    "state gathered as any parameter is sharded": Mutant(
        "_places/templates.py",
        "on_device = _only_over(at, anywhere if j is None else used[j])",
        "on_device = _only_over(at, anywhere)",
        (f"{TEMPLATES}::test_state_is_gathered_as_its_own_parameter_is_sharded",),
    ),
    # What the command prints.
    "parts in each other's columns": Mutant(
        "cli/tables.py",
        """            size_text(before.parts.get(part, 0)),
            size_text(after.parts.get(part, 0)),
""",
        """            size_text(after.parts.get(part, 0)),
            size_text(before.parts.get(part, 0)),
""",
        (f"{TABLES}::test_a_plan_is_shown_beside_the_step_as_given",),
    ),
    "peaks in each other's columns": Mutant(
        "cli/tables.py",
        "size_text(before.used_bytes), size_text(after.used_bytes))",
        "size_text(after.used_bytes), size_text(before.used_bytes))",
        (f"{TABLES}::test_a_plan_is_shown_beside_the_step_as_given",),
    ),
    "the largest leaf for all": Mutant(
        "cli/tables.py",
        "total = size_text(sum(x.nbytes for x in leaves))",
        "total = size_text(max(x.nbytes for x in leaves))",
        (f"{TABLES}::test_the_sum_of_leaves_is_of_all_of_them",),
    ),
    "the last step by its name": Mutant(
        "cli/checkpoint.py",
        "key=lambda p: int(p.name),",
        "key=lambda p: p.name,",
        (
            "tests/cli/test_checkpoint.py::test_the_last_step_is_the_one_of_the_largest_number",
        ),
    ),
    # What a step is jitted with.
    "the memory of a type before that of a sharding": Mutant(
        "_step/shardings.py",
        'return (memory.memory_kind_of(entry) == "device") == (kind == "device")',
        "return memory.memory_kind_of(entry) == kind",
        (
            "tests/step/test_jit_shardings.py::test_which_host_memory_is_what_a_sharding_says",
        ),
    ),
    "a call for the devices of its last leaf": Mutant(
        "_step/machine.py",
        "if devices and len(devices) >= machine.devices:",
        "if devices:",
        (
            "tests/step/test_latency_hiding.py::test_a_call_is_for_as_many_devices_as_its_largest_leaf",
        ),
    ),
    "options before those that a user gives": Mutant(
        "_step/machine.py",
        "return found | given if found else None",
        "return {**given, **dict(OFF)} if found else None",
        ("tests/step/test_latency_hiding.py::test_what_a_user_gives_stands",),
    ),
    # States on disk.
    "one array for several places": Mutant(
        "_states/disk.py",
        "found.setdefault((entry.number, struct.sharding), place)",
        "found.setdefault((entry.number, None), place)",
        (f"{DISK}::test_the_same_array_for_several_places",),
    ),
    "half of the space that is needed": Mutant(
        "_states/disk.py",
        "if needed > free:",
        "if needed > 2 * free:",
        (f"{DISK}::test_too_little_space",),
    ),
    # Low bits.
    "the other half of another shape": Mutant(
        "_low_bit/convert.py",
        "return next((p for p in found if p.shape == x.shape), None)",
        "return next(iter(found), None)",
        (
            "tests/low_bit/test_master_weights.py::test_the_parameter_that_has_the_other_half",
        ),
    ),
    "an infinite weight": Mutant(
        "_low_bit/by_parts.py",
        "return codec.encode(value), jnp.all(jnp.isfinite(value))",
        "return codec.encode(value), jnp.all(value == value)",
        ("tests/low_bit/test_by_parts.py::test_values_that_are_not_finite",),
    ),
    "heads that are one axis twice": Mutant(
        "_low_bit/by_parts.py",
        "        codec = dataclasses.replace(codec, tail=())\n",
        "",
        ("tests/low_bit/test_by_parts.py::test_wherever_they_come_from",),
    ),
    "a frozen parameter that a step replaces": Mutant(
        "_low_bit/frozen.py",
        "        for inside in [keys[i:] for i in range(min(len(keys), 3))]:",
        "        for inside in (keys,):",
        ("tests/low_bit/test_frozen.py::test_a_step_that_would_replace_them",),
    ),
    "chances of the first step in each": Mutant(
        "_low_bit/low_bit.py",
        "return Encoded.of(x, old.codec, path, old.step)",
        "return Encoded.of(x, old.codec, path)",
        ("tests/low_bit/test_low_bit.py::test_each_step_draws_its_own_chances",),
    ),
    "a parameter that is called as its copy": Mutant(
        "_low_bit/convert.py",
        "first = keys.index(field) + 1 if field in keys else 0",
        "first = 0",
        (
            "tests/low_bit/test_master_weights.py::"
            "test_parameters_that_are_called_as_their_copies",
        ),
    ),
    "what a heap has unused twice": Mutant(
        "aot/peak.py",
        "temporary_bytes = min(temporary_bytes, allocated - others)",
        "temporary_bytes = max(temporary_bytes, allocated - others)",
        ("tests/aot/test_peak.py::test_what_a_heap_has_unused_counts_once",),
    ),
    "parameters at rest in a branch": Mutant(
        "_step/streaming.py",
        "if made[1] > made[0]:",
        "if made[1][0] > made[0][0]:",
        ("tests/step/test_skipped_updates.py",),
    ),
}
