"""Small mistakes in plans and in the figures of programs, which would be silent.

A plan that is not the fastest, a figure that is another one's or another program's:
nothing raises, and a step gives the same numbers.
"""

from __future__ import annotations

from mutant import Mutant

SEARCH = "tests/plan/test_search_by_hand.py"
PLANNER = "tests/plan/test_planner_by_hand.py"
STATE = "tests/plan/test_state.py"
FROZEN = "tests/plan/test_frozen_base.py"
RESULT = "tests/plan/test_result.py"
BUDGET = "tests/plan/test_budget.py"
LEAST = "tests/plan/test_least_state.py"
STEP_TIMES = "tests/aot/test_step_times.py"
TIMELINE = "tests/aot/test_timeline.py"
PEAK = "tests/aot/test_peak.py"
TRANSFERS = "tests/aot/test_transfers.py"
PRODUCTS = "tests/aot/test_products.py"
COMPILE = "tests/aot/test_compile.py"
KEPT = "tests/aot/test_measured.py"

IN_PLANS = {
    # Which way is the best.
    "the best way by what it moves": Mutant(
        "_plan/search.py",
        "key=lambda c: (c.step_seconds, c.moved_bytes + c.parameter_bytes),",
        "key=lambda c: (c.moved_bytes + c.parameter_bytes, c.step_seconds),",
        (f"{SEARCH}::test_the_best_is_the_fastest_whatever_it_moves",),
    ),
    "parameters that move for nothing": Mutant(
        "_plan/search.py",
        "c.moved_bytes + c.parameter_bytes),",
        "c.moved_bytes),",
        (f"{SEARCH}::test_the_best_is_the_fastest_whatever_it_moves",),
    ),
    "ways compiled by what they move": Mutant(
        "_plan/search.py",
        "v: (self.predicted_seconds(v), self._expect(v).link_bytes) for v in ways",
        "v: (self._expect(v).link_bytes, self.predicted_seconds(v)) for v in ways",
        (f"{SEARCH}::test_ways_are_compiled_by_their_time_and_then_by_what_they_move",),
    ),
    "a way compiled that is slower by so much": Mutant(
        "_plan/search.py",
        "/ (1 - LEAST_GAIN)",
        "* (1 - LEAST_GAIN)",
        (f"{SEARCH}::test_a_gain_of_less_than_a_fiftieth_is_not_worth_a_compilation",),
    ),
    "state in a codec passed over for moving more": Mutant(
        "_plan/search.py",
        "dataclasses.replace(one, **moved) == other",
        "dataclasses.replace(one, codecs=other.codecs, **moved) == other",
        (f"{SEARCH}::test_only_what_differs_in_nothing_else_moves_more",),
    ),
    "other state passed over for moving more": Mutant(
        "_plan/search.py",
        "and one.state >= other.state",
        "and len(one.state) >= len(other.state)",
        (f"{SEARCH}::test_only_what_differs_in_nothing_else_moves_more",),
    ),
    "the most that is hidden elsewhere taken for the mean": Mutant(
        "_plan/search.py",
        "share = min(1.0, sum(seen.values()) / len(seen))",
        "share = min(1.0, *seen.values())",
        (f"{SEARCH}::test_what_is_hidden_elsewhere",),
    ),
    "ways near that have other codecs": Mutant(
        "_plan/search.py",
        "len({*one.codecs} ^ {*other.codecs})",
        "len({*one.codecs} & {*other.codecs})",
        (f"{SEARCH}::test_ways_are_near_that_have_the_same_codecs",),
    ),
    "a way predicted by the farthest one": Mutant(
        "_plan/search.py",
        "near = min(self.known, key=lambda other: _distance(variant, other))",
        "near = max(self.known, key=lambda other: _distance(variant, other))",
        ("tests/plan/test_plan_search.py::test_predictions_learn",),
    ),
    # What is expected of a way.
    "the direction of the link that is waited for less": Mutant(
        "_plan/variants.py",
        "link = max(loaded, stored)",
        "link = min(loaded, stored)",
        (f"{SEARCH}::test_the_link_that_is_waited_for",),
    ),
    "stores after the step that take no time": Mutant(
        "_plan/variants.py",
        "return max(compute, link - late) + late",
        "return max(compute, link - late)",
        (f"{SEARCH}::test_the_link_that_is_waited_for",),
    ),
    "state that given rules move gone twice": Mutant(
        "_plan/variants.py",
        "        gone -= sizes.given_state[()]\n",
        "",
        (f"{SEARCH}::test_what_is_expected_to_leave_the_device",),
    ),
    "late gradients that there are none of": Mutant(
        "_plan/variants.py",
        "if 0 < facts.late_bytes < facts.gradient_bytes:",
        "if facts.late_bytes < facts.gradient_bytes:",
        (f"{SEARCH}::test_which_ways_there_are",),
    ),
    # What is frozen.
    "frozen parameters that are stored": Mutant(
        "_plan/variants.py",
        "return rest + loaded, rest + parameters",
        "return rest + loaded, rest + parameters + frozen",
        (f"{FROZEN}::test_ways_of_frozen_parameters",),
    ),
    "codes that leave the device for what they stand for": Mutant(
        "_plan/variants.py",
        "return self.all_frozen - plain.get(variant.frozen, 0)",
        "return self.all_frozen - self.moved_frozen(variant)",
        (f"{FROZEN}::test_ways_of_frozen_parameters",),
    ),
    "trained parameters that move before frozen ones": Mutant(
        "_plan/variants.py",
        "if rank(frozen) >= min(rank(trained), rank(of_frozen[-1])):",
        "if rank(trained) >= min(rank(frozen), rank(of_trained[-1])):",
        (f"{FROZEN}::test_ways_of_frozen_parameters",),
    ),
    "what given rules leave in its dtype encoded": Mutant(
        "_plan/frozen.py",
        "codec = name if rule is None else rule.codec",
        "codec = name if rule is None else rule.codec or name",
        (f"{FROZEN}::test_given_rules_decide_about_frozen_parameters",),
    ),
    "the bytes of codes of parameters without their scales": Mutant(
        "_plan/frozen.py",
        "nbytes=sum(y.nbytes or 0 for y in parts[x.argument])",
        "nbytes=parts[x.argument][0].nbytes",
        (f"{FROZEN}::test_bytes_of_frozen_parameters_in_a_codec",),
    ),
    "a step that replaces what is said to be frozen": Mutant(
        "_plan/frozen.py",
        "moving = [p for p in stays if p in trained] or _replaced(step, target, stays)",
        "moving = [p for p in stays if p in trained]",
        (f"{FROZEN}::test_what_cannot_be_frozen",),
    ),
    # What the planner makes of figures.
    "state that the host has no room for": Mutant(
        "_plan/planner.py",
        "state = frozenset(positions[i] for i in selection)",
        "state = frozenset(selection)",
        (f"{PLANNER}::test_less_is_moved_of_what_the_best_way_moves",),
    ),
    "no state where the host has room for some": Mutant(
        "_plan/planner.py",
        "        left += sum(sizes[i] for i in variant.state)\n",
        "",
        (f"{PLANNER}::test_as_much_state_as_the_host_has_room_for",),
    ),
    "transfers counted as computation": Mutant(
        "_plan/planner.py",
        "computed = plain.time.compute_seconds",
        "computed = plain.time.seconds",
        (
            f"{PLANNER}::"
            "test_computation_is_what_the_program_takes_without_its_transfers",
        ),
    ),
    "parameters of all devices on each": Mutant(
        "_plan/variants.py",
        """x.leaf.nbytes_per_device
                    for x in state.resting(w, w)""",
        """(x.leaf.nbytes or 0)
                    for x in state.resting(w, w)""",
        (f"{PLANNER}::test_bytes_are_those_of_each_device",),
    ),
    "products of all devices on each": Mutant(
        "_plan/candidates.py",
        "flops_of_jaxpr(found.step.jaxpr) / factory.target.device_count,",
        "flops_of_jaxpr(found.step.jaxpr),",
        (f"{PLANNER}::test_products_are_those_of_each_device",),
    ),
    "the host's memory asked of the device": Mutant(
        "_plan/planner.py",
        "environment(target, best.used_bytes, best.host_bytes)",
        "environment(target, best.host_bytes, best.used_bytes)",
        (f"{PLANNER}::test_the_settings_of_a_process_are_for_its_device_and_its_host",),
    ),
    "the device's peak taken for the host's": Mutant(
        "_plan/candidates.py",
        "on_host = found.peak.host_peak_bytes",
        "on_host = found.peak.peak_bytes",
        (f"{PLANNER}::test_the_settings_of_a_process_are_for_its_device_and_its_host",),
    ),
    "what fills the device as it was told before tracing": Mutant(
        "_plan/planner.py",
        "self._known[variant] = dataclasses.replace(found, parts=parts)",
        "self._known[variant] = found",
        (f"{PLANNER}::test_the_step_as_given_is_compiled_once",),
    ),
    "a window that the plan forgets": Mutant(
        "_plan/variants.py",
        "return dataclasses.replace(config, window_bytes=self.window_bytes)",
        "return config",
        (f"{PLANNER}::test_a_window_is_part_of_the_plan",),
    ),
    "a host's memory for each of its devices": Mutant(
        "_plan/budget.py",
        "host_memory_bytes // target.devices_per_host",
        "host_memory_bytes // target.device_count",
        (f"{BUDGET}::test_a_host_is_shared_by_its_devices",),
    ),
    "what is missing counted once": Mutant(
        "_plan/search.py",
        "short = sum(sizes[i] for i in stand_ins) + over",
        "short = over",
        (f"{LEAST}::test_stand_ins_that_do_not_suffice",),
    ),
    "all gradients late if one is": Mutant(
        "_plan/candidates.py",
        "late_bytes=sum(f.gradient_bytes for f in late),",
        "late_bytes=found.gradient_bytes if late else 0,",
        (
            "tests/plan/test_candidates.py::test_late_gradients_are_those_of_which_a_norm_is_taken",
        ),
    ),
    # What the rules of a plan say.
    "a pattern with one stacked leaf": Mutant(
        "_plan/state.py",
        "return all(leaf.stacked for leaf in self.leaves)",
        "return any(leaf.stacked for leaf in self.leaves)",
        (f"{STATE}::test_a_pattern_is_stacked_if_all_of_its_leaves_are",),
    ),
    "a rule for what is encoded and moves": Mutant(
        "_plan/state.py",
        "p for i, p in enumerate(self.patterns) if p.codec and i not in selection",
        "p for i, p in enumerate(self.patterns) if p.codec",
        (f"{STATE}::test_what_is_encoded_and_stays_has_a_rule_of_its_own",),
    ),
    "state that is small on each device": Mutant(
        "_plan/state.py",
        "leaf.nbytes >= min_bytes:",
        "leaf.nbytes_per_device >= min_bytes:",
        (f"{STATE}::test_bytes_of_whole_leaves_decide_what_is_small",),
    ),
    "what must stay moved by the plan": Mutant(
        "_plan/state.py",
        "undecided = [x for x, p in placements if p.rule is None]",
        'undecided = [x for x, p in placements if p.memory_kind == "device"]',
        (f"{STATE}::test_given_rules_decide_first",),
    ),
    # What its table says.
    "loads alone over the link": Mutant(
        "_plan/alternatives.py",
        "time.load_bytes + time.store_bytes",
        "time.load_bytes",
        (f"{RESULT}::test_alternatives_are_told_of_whole_hosts",),
    ),
    "one device's memory of a host": Mutant(
        "_plan/alternatives.py",
        "host_bytes=found.host_bytes * target.devices_per_host,",
        "host_bytes=found.host_bytes,",
        (f"{RESULT}::test_alternatives_are_told_of_whole_hosts",),
    ),
    "the peak on the device for the least on the host": Mutant(
        "_plan/alternatives.py",
        "found = min(on_device, key=lambda c: c.host_bytes)",
        "found = min(on_device, key=lambda c: c.used_bytes)",
        (f"{RESULT}::test_the_way_that_needs_least_of_the_host_is_named",),
    ),
    "more devices than one": Mutant(
        "_plan/alternatives.py",
        "math.ceil(target.device_count * least.used_bytes / budget_bytes)",
        "math.ceil(least.used_bytes / budget_bytes)",
        (f"{RESULT}::test_more_devices_are_those_of_all_hosts",),
    ),
    "a plan that only encodes taken for none": Mutant(
        "_plan/result.py",
        'rule.memory_kind == "device" and rule.codec is None',
        'rule.memory_kind == "device"',
        (f"{RESULT}::test_a_plan_is_empty_if_nothing_moves_and_nothing_is_encoded",),
    ),
    "the bytes of codes without their scales": Mutant(
        "_plan/step.py",
        "nbytes_per_device=whole.nbytes_per_device + leaf.nbytes_per_device,",
        "nbytes_per_device=whole.nbytes_per_device,",
        (f"{STATE}::test_codes_and_scales_are_one_leaf",),
    ),
    # The figures of a program.
    "loads that are its stores": Mutant(
        "aot/step_times.py",
        'load_bytes=sum(found.sizes("load")),',
        'load_bytes=sum(found.sizes("store")),',
        (f"{STEP_TIMES}::test_loads_are_no_stores",),
    ),
    "the time of loads that is that of stores": Mutant(
        "aot/step_times.py",
        "load_seconds=found.load_seconds,",
        "load_seconds=found.store_seconds,",
        (f"{STEP_TIMES}::test_loads_are_no_stores",),
    ),
    "the least time of the direction that moves less": Mutant(
        "aot/_timeline.py",
        "return self.model.least_seconds(max(sizes))",
        "return self.model.least_seconds(min(sizes))",
        (f"{STEP_TIMES}::test_loads_are_no_stores",),
    ),
    "a transfer that waits for none": Mutant(
        "aot/_timeline.py",
        "begin = max([self.seconds, *(self._free[w] for w in ways)])",
        "begin = self.seconds",
        (f"{TIMELINE}::test_loads_wait_for_loads_and_stores_for_stores",),
    ),
    "a copy within the host beside stores": Mutant(
        "aot/_timeline.py",
        'ways = ("load", "store") if copy else (move.direction,)',
        'ways = ("load",) if copy else (move.direction,)',
        (f"{TIMELINE}::test_a_copy_within_the_host_takes_both_directions",),
    ),
    "transfers that end after the step": Mutant(
        "aot/_timeline.py",
        "self.seconds = max(self.seconds, *self._free.values())",
        "self.seconds = max(self.seconds, min(self._free.values()))",
        (f"{TIMELINE}::test_loads_wait_for_loads_and_stores_for_stores",),
    ),
    "a loop's transfers weighed once": Mutant(
        "aot/_timeline.py",
        "sum(place.times * place.moved_bytes for place in inner)",
        "sum(place.moved_bytes for place in inner)",
        (f"{TIMELINE}::test_a_loop_counts_as_often_as_it_runs",),
    ),
    "the branch that moves less": Mutant(
        "aot/_timeline.py",
        "taken = max(places, key=",
        "taken = min(places, key=",
        (f"{TIMELINE}::test_the_branch_that_moves_more_is_taken",),
    ),
    "branches that are all carried out": Mutant(
        "aot/_timeline.py",
        "return (self.trip_count or 1) if self.taken else 0",
        "return self.trip_count or 1",
        (f"{TIMELINE}::test_the_branch_that_moves_more_is_taken",),
    ),
    "one array of an instruction that moves several": Mutant(
        "aot/_timeline.py",
        "found.setdefault(t.direction, move).nbytes += t.nbytes",
        "found.setdefault(t.direction, move).nbytes = t.nbytes",
        (f"{TIMELINE}::test_an_instruction_moves_its_arrays_at_once",),
    ),
    "time in two spans counted twice": Mutant(
        "aot/_timeline.py",
        "reached = max(reached, end)",
        "reached = end",
        (f"{TIMELINE}::test_spans_that_lie_in_others",),
    ),
    "results of the device counted as the host's": Mutant(
        "aot/peak.py",
        "host_output_bytes=stats.host_output_size_in_bytes,",
        "host_output_bytes=stats.output_size_in_bytes,",
        (f"{PEAK}::test_peak_has_the_compilers_figures",),
    ),
    "a program that fits by its arguments": Mutant(
        "aot/peak.py",
        "if usage.peak_bytes > target.memory_bytes:",
        "if usage.argument_bytes > target.memory_bytes:",
        (f"{PEAK}::test_a_program_for_a_gpu_is_compared_with_its_memory",),
    ),
    # Figures that are kept.
    "figures kept for any link": Mutant(
        "aot/measured.py",
        "of_target = target.name, target.memory_bytes, link",
        "of_target = target.name, target.memory_bytes",
        (f"{KEPT}::test_another_program_is_compiled",),
    ),
    "figures kept for any option of a compiler": Mutant(
        "aot/measured.py",
        "_versions(), _own_digest(), options]",
        "_versions(), _own_digest()]",
        (f"{KEPT}::test_another_program_is_compiled",),
    ),
    "figures kept for any compiler": Mutant(
        "aot/measured.py",
        "_versions(), _own_digest(), options]",
        "_own_digest(), options]",
        (f"{KEPT}::test_other_compilers_and_flags_compile_anew",),
    ),
    # What moves, and by what.
    "a copy within the host of unlike arrays": Mutant(
        "aot/transfers.py",
        'if loaded and same and form != "fusion":',
        'if loaded and stored and form != "fusion":',
        (f"{TRANSFERS}::test_what_reads_and_writes_unlike_arrays_of_the_host",),
    ),
    "slices at constant positions moved by kernels": Mutant(
        "aot/transfers.py",
        'dynamic = bool(work) and work[0].opcode.startswith("dynamic")',
        "dynamic = bool(work)",
        (f"{TRANSFERS}::test_slices_of_a_gpu_at_a_constant_position",),
    ),
    # What a program multiplies.
    "products of both widths at once": Mutant(
        "aot/_timeline.py",
        "wide + narrow)",
        "max(wide, narrow))",
        (
            f"{PRODUCTS}::test_products_of_both_widths_take_their_time_one_after_the_other",
        ),
    ),
    "a batch of products for the axis that they contract": Mutant(
        "aot/_products.py",
        'map(int, numbers["lhs_contracting_dimensions"])',
        'map(int, numbers["lhs_batch_dimensions"])',
        (f"{PRODUCTS}::test_batched_products_of_cublas",),
    ),
    "a gradient of a convolution by the axes of another": Mutant(
        "aot/_products.py",
        "return _convolution_flops(result, second, first, i)",
        "return _convolution_flops(first, second, result, i)",
        (f"{PRODUCTS}::test_convolutions_of_cudnn",),
    ),
    "scores that a backward pass keeps": Mutant(
        "aot/_products.py",
        '        products.append("bmm1")\n',
        "        pass\n",
        (f"{PRODUCTS}::test_attention_of_cudnn",),
    ),
    "padding on the other side": Mutant(
        "aot/_products.py",
        "start = output * axis.stride - axis.padding",
        "start = output * axis.stride + axis.padding",
        (f"{PRODUCTS}::test_positions_that_meet_an_input",),
    ),
    "a kernel as far apart as the inputs": Mutant(
        "aot/_products.py",
        "at = start + kernel * axis.kernel_dilation",
        "at = start + kernel * axis.left_dilation",
        (f"{PRODUCTS}::test_positions_that_meet_an_input",),
    ),
    # What it is compiled for.
    "the mesh of a leaf on fewer devices": Mutant(
        "aot/compile.py",
        "and sharding.mesh.size == target.device_count",
        "and sharding.mesh.size",
        (f"{COMPILE}::test_the_mesh_is_that_of_the_first_leaf_on_as_many_devices",),
    ),
    "results left on the host": Mutant(
        "aot/compile.py",
        'return NamedSharding(mesh, leaf, memory_kind="device")',
        "return NamedSharding(mesh, leaf)",
        (
            f"{COMPILE}::test_a_result_is_moved_to_the_memory_that_its_sharding_stands_for",
        ),
    ),
}
