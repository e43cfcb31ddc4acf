"""Small mistakes in the engine: `_program`, `_rows`, `_schedule`, `_emit`.

And of its neighbours `_step` and `_low_bit` those that came with it.
"""

from __future__ import annotations

from mutant import Mutant

RULES = "_rows/rules"
REFUSED = "tests/rows/test_refused_rows.py"
MODELS = "tests/system/test_fused_models.py"
OPTIMIZERS = "tests/system/test_optimizers.py"
LEFT = "tests/schedule/test_left_outside.py"
LATE = "tests/schedule/test_delayed_rows.py"
STREAM = "tests/emit/test_update.py"
PASSES = "tests/schedule/test_passes.py"
PIPELINE = "tests/schedule/test_pipeline.py"
CUTTING = "tests/schedule/test_cutting.py"
BESIDE = "tests/schedule/test_beside.py"
CHAIN = "tests/schedule/test_chain.py"
CROSSING = "tests/schedule/test_crossing.py"
PENALTIES = "tests/schedule/test_penalties.py"
LIVENESS = "tests/schedule/test_liveness.py"
FORWARD = "tests/schedule/test_forward.py"
WANTED = "tests/program/test_wanted.py"
SEGMENT = "tests/emit/test_segment.py"
BODIES = "tests/emit/test_steps_in_bodies.py"
STACKS = "tests/schedule/test_stacks.py"
INSIDE = "tests/schedule/test_inside.py"
OWN = "tests/schedule/test_own_updates.py"
REPLACED = "tests/program/test_replaced.py"
MERGED = "tests/program/test_merged.py"

IN_ENGINE = {
    # Rows in the scan.
    "rows in the wrong order": Mutant(
        "_emit/scan.py",
        "self._scan.length - 1 - number if reverse else number",
        "number",
        (f"{MODELS}::test_one_update_reads_what_another_replaces[24]",),
    ),
    "a late row one off": Mutant(
        "_emit/scan.py",
        "lambda n: (first + n, first + n - 1, first + n + 1)",
        "lambda n: (first + n, first + n, first + n + 1)",
        (f"{LATE}::test_late_rows_with_every_jax",),
    ),
    "the last late row one off": Mutant(
        "_emit/scan.py",
        "last = scan.length - 1",
        "last = scan.length - 2",
        (f"{LATE}::test_late_rows_with_every_jax",),
    ),
    "rows that are late stored too early": Mutant(
        "_emit/scan.py",
        "found = self._iteration(number, then, state, buffers)",
        "found = self._iteration(number, then, state, given(state))",
        (f"{LATE}::test_late_rows_with_every_jax",),
    ),
    "rows loaded ahead on a TPU one off": Mutant(
        "_emit/scan.py",
        "(jnp.int32(then), carry, rows)",
        "(jnp.int32(then) - 1, carry, rows)",
        (f"{LATE}::test_a_tpu_moves_rows_in_turn",),
    ),
    "stores on a TPU that wait for none": Mutant(
        "_emit/scan.py",
        "if last is not None:",
        "if False:",
        (f"{LATE}::test_a_tpu_moves_rows_in_turn",),
    ),
    "equal but for parameters": Mutant(
        "_program/merged.py",
        "tuple(map(self._value, e.invars)), params, e.ctx",
        "tuple(map(self._value, e.invars)), e.ctx",
        (f"{MERGED}::test_other_operands_parameters_or_literals",),
    ),
    "what follows from equal equations not equal": Mutant(
        "_program/merged.py",
        "return self._first.get(a, a)",
        "return a",
        (f"{MERGED}::test_what_is_evaluated_twice_is_once",),
    ),
    "equal loads merged": Mutant(
        "_program/merged.py",
        "v in self._loaded or v in self._results",
        "v in self._results",
        (f"{MERGED}::test_loads_stay_where_they_are_taken",),
    ),
    "equal results merged": Mutant(
        "_program/merged.py",
        "v in self._loaded or v in self._results",
        "v in self._loaded",
        (f"{MERGED}::test_results_stay",),
    ),
    "computed of what is loaded and of anything": Mutant(
        "_program/loaded.py",
        "if loaded and taken - loaded <= self.given:",
        "if loaded:",
        ("tests/program/test_loaded.py",),
    ),
    "codes that are computed loaded": Mutant(
        "_program/loaded.py",
        "(are_codes(e) and operands <= self.given)",
        "are_codes(e)",
        ("tests/program/test_loaded.py",),
    ),
    "bodies equal that close over other arrays": Mutant(
        "_program/merged.py",
        "tuple(map(id, x.consts))",
        "len(x.consts)",
        (f"{MERGED}::test_bodies_traced_apart_are_equal",),
    ),
    "rows that are handed through forgotten": Mutant(
        "_program/replaced.py",
        "yield from ((y, n + 1) for y in variables([taken[x]]))",
        "yield from ()",
        ("tests/program/test_replaced.py",),
    ),
    "new values read for old ones": Mutant(
        "_emit/scan.py",
        "before, buffers = buffers, dict(buffers)",
        "before = buffers = dict(buffers)",
        (f"{MODELS}::test_one_update_reads_what_another_replaces[24]",),
    ),
    "a dropped store": Mutant(
        "_emit/scan.py",
        "for v in turn.kept:",
        "for v in ():",
        (f"{LEFT}::test_what_else_a_step_does[a gradient]",),
    ),
    "gradients that wait stored in the wrong row": Mutant(
        "_emit/scan.py",
        "self._store(v, row, i, buffers)",
        "self._store(v, row, number, buffers)",
        (f"{LATE}::test_gradients_that_wait",),
    ),
    "no barrier between what leaves together": Mutant(
        "_emit/scan.py",
        "tied = together(given)",
        "tied = given",
        (f"{LATE}::test_late_rows_with_every_jax",),
    ),
    # What waits for what in a turn.
    "updates of a GPU in no turn": Mutant(
        "_schedule/pipeline.py",
        "            before = leaving[:1]",
        "            before = ()",
        (f"{LATE}::test_updates_are_in_turn",),
    ),
    "what is stored before its buffer is read": Mutant(
        "_schedule/pipeline.py",
        "if v in replaced or v in beside)",
        "if v in beside)",
        (PIPELINE,),
    ),
    "rows ahead that are copied where something is stored": Mutant(
        "_schedule/pipeline.py",
        "if begins and v not in replaced)",
        "if begins and v in replaced)",
        (PIPELINE,),
    ),
    "rows that are printed and not moved": Mutant(
        "_schedule/pipeline.py",
        "_rows_text(self.delayed, length)",
        "_rows_text(self.delayed[1:], length)",
        (PIPELINE,),
    ),
    # Layers of a Python loop.
    "a scan that takes nothing for its updates": Mutant(
        "_schedule/beside.py",
        "reads = dict.fromkeys((*node.reads, *_given(each, each.first_pass(sums))))",
        "reads = dict.fromkeys(node.reads)",
        (BESIDE,),
    ),
    "nodes in the order of the program": Mutant(
        "_schedule/beside.py",
        "apart(step, _in_order(found) if scans else found, scans, passes)",
        "apart(step, found, scans, passes)",
        (BESIDE,),
    ),
    "what waits for a pass before it": Mutant(
        "_schedule/beside.py",
        "late.update(node.defines * waits)",
        "late.update(())",
        (BESIDE,),
    ),
    "gradients of a scan that are there": Mutant(
        "_schedule/beside.py",
        "own = (v for v in node.defines if v not in gradients)",
        "own = node.defines",
        (BESIDE,),
    ),
    "gradients of probabilities before those of values": Mutant(
        "_schedule/turns/ties.py",
        "if smaller and not taken.isdisjoint(own):",
        "if False:",
        (CHAIN,),
    ),
    "a product of a large result taken with the one before": Mutant(
        "_schedule/turns/ties.py",
        " and not x.large:",
        ":",
        (CHAIN,),
    ),
    "an updated state that is updated again is cut": Mutant(
        "_schedule/turns/chain.py",
        "if _is_updated_twice(beside.nodes):",
        "if False:",
        ("tests/emit/test_segment.py",),
    ),
    "penalties where they are written": Mutant(
        "_schedule/turns/penalties.py",
        "longer <= nbytes(nodes[k].defines)",
        "bool(old[k])",
        (PENALTIES,),
    ),
    "numbers of layers after the last of these": Mutant(
        "_schedule/turns/penalties.py",
        "found.setdefault(of[k], set()).add(k)",
        "pass",
        (PENALTIES,),
    ),
    "gradients of layers' numbers before the backward pass": Mutant(
        "_schedule/turns/penalties.py",
        "later |= _arithmetic(step, nodes, takers, before)",
        "pass",
        (PENALTIES,),
    ),
    "a product waits to be laid out": Mutant(
        "_schedule/turns/penalties.py",
        "if laid_out and any(takers[v][-1] == k for v in old[k]):",
        "if laid_out and not taken:",
        (PENALTIES,),
    ),
    "half of a gradient where it is written": Mutant(
        "_schedule/turns/penalties.py",
        "later = _products(step, nodes, takers, before, loaded)",
        "later: dict[int, int] = {}",
        (PENALTIES,),
    ),
    "products wait that take more than they are": Mutant(
        "_schedule/turns/penalties.py",
        "if longer < nbytes(node.defines) and",
        "if",
        (PENALTIES,),
    ),
    "products that others take too wait": Mutant(
        "_schedule/turns/penalties.py",
        "if len(taken) != 1 or taken[0] == len(nodes):",
        "if not taken or taken[0] == len(nodes):",
        (PENALTIES,),
    ),
    "a derivative's arithmetic is in memory beside its product": Mutant(
        "_schedule/turns/liveness.py",
        "if any(until.get(x, last) < last for x in made_of.takes):",
        "if True:",
        (LIVENESS,),
    ),
    "arithmetic of what is gone is never in memory": Mutant(
        "_schedule/turns/liveness.py",
        "if any(until.get(x, last) < last for x in made_of.takes):",
        "if False:",
        (LIVENESS,),
    ),
    "what is handed on is written over what it is made of": Mutant(
        "_schedule/turns/cutting.py",
        "near = [x._replace(over=x.over and x.last not in own) for x in near]",
        "pass",
        (CUTTING,),
    ),
    "turns are cut for a little of all that is taken": Mutant(
        "_schedule/turns/cutting.py",
        "max(now.least_parted_bytes, now.least_parted_part * filling.size(taken))",
        "now.least_parted_bytes",
        (CUTTING,),
    ),
    "turns are as large as usual, whatever they hand on": Mutant(
        "_schedule/turns/cutting.py",
        "if peak(others, wider, alive) < peak(found, filling, alive):",
        "if False:",
        (CUTTING,),
    ),
    "turns are as large as they may be": Mutant(
        "_schedule/turns/cutting.py",
        "if peak(others, wider, alive) < peak(found, filling, alive):",
        "if True:",
        (CUTTING,),
    ),
    "residuals at rest are on the device all the time": Mutant(
        "_schedule/turns/forward.py",
        "if span.var not in resting:",
        "if True:",
        (FORWARD,),
    ),
    "norms of parameters after the forward pass": Mutant(
        "_schedule/turns/penalties.py",
        "for k, first in _reductions(step, nodes, loaded, later).items():",
        "for k, first in {}.items():",
        (PENALTIES,),
    ),
    "what a layer takes of its own is a residual": Mutant(
        "_schedule/turns/forward.py",
        "max(of[made].most + 1, of[made].backward) <= after",
        "of[made].most < after",
        (FORWARD,),
    ),
    "long turns however little rests": Mutant(
        "_schedule/turns/cutting.py",
        "share = min(share, size / now.most_share)",
        "pass",
        (CUTTING,),
    ),
    "microbatches that compute little are cut": Mutant(
        "_program/wanted.py",
        "(much or worth_it)",
        "True",
        (WANTED,),
    ),
    "turns of what is little as long as of much": Mutant(
        "_schedule/turns/cutting.py",
        "max(1 / now.least_part, min(part, part**0.5))",
        "max(1.0, min(part, part**0.5))",
        (CUTTING,),
    ),
    "turns of residuals alone beside a scan": Mutant(
        "_schedule/turns/chain.py",
        "if not scans or found.has_leaves(n)]",
        "]",
        (BESIDE,),
    ),
    "short products alone": Mutant(
        "_schedule/turns/ties.py",
        "if found and found[-1].work * room < least and not x.large:",
        "if False:",
        (CHAIN,),
    ),
    "a last product too short for residuals": Mutant(
        "_schedule/turns/ties.py",
        "if len(found) > 1 and found[-1].work * room < least:",
        "if False:",
        (CHAIN,),
    ),
    "all stores beside the first product": Mutant(
        "_schedule/turns/ties.py",
        "passed += move.nbytes",
        "passed += 0",
        (CHAIN,),
    ),
    "two copies in flight": Mutant(
        "_step/machine.py",
        "found |= MANY_IN_FLIGHT",
        "pass",
        ("tests/step/test_latency_hiding.py",),
    ),
    "as much loaded for a turn, however little fills it": Mutant(
        "_schedule/turns/chain.py",
        "min(limits.now.turn_bytes, rooms)",
        "limits.now.turn_bytes",
        (CHAIN,),
    ),
    "what follows from updates when its turn ends": Mutant(
        "_emit/segment.py",
        "            for x in node.reads:\n                self._value(x)\n",
        "",
        (SEGMENT,),
    ),
    "a segment that takes more than fits": Mutant(
        "_schedule/turns/cutting.py",
        "filling.size(there | more) <= most",
        "filling.size(there | more) <= 2 * most",
        (CHAIN,),
    ),
    "an update before the last that reads what it replaces": Mutant(
        "_schedule/turns/placing.py",
        "return max(self._known.get(v, _FIRST), self._read.get(v, _FIRST))",
        "return self._known.get(v, _FIRST)",
        (CHAIN,),
    ),
    "a residual that is taken before it rests": Mutant(
        "_schedule/turns/chain.py",
        "if near is not None and m > near}",
        "if near is not None and m >= near}",
        (CHAIN, SEGMENT),
    ),
    "casts that are kept from one segment to the next": Mutant(
        "_schedule/turns/chain.py",
        "v in loaded or v in loaded.constants) and v not in kept",
        "v in loaded.constants) and v not in kept",
        (CHAIN,),
    ),
    "what waits for a pass after the chain forgotten": Mutant(
        "_schedule/beside.py",
        "taken.update(v for x in after for v in x.reads)",
        "pass",
        (f"{SEGMENT}::test_norms_of_what_scans_too_update",),
    ),
    "what is taken after the chain forgotten": Mutant(
        "_schedule/turns/placing.py",
        "elsewhere = {*wanted}",
        "elsewhere = {*variables(self._step.program.outvars)}",
        (f"{SEGMENT}::test_norms_of_what_scans_too_update",),
    ),
    "arrays that join outputs overlooked": Mutant(
        "_schedule/turns/placing.py",
        "            joined.join(some)",
        "            joined.join(some[-1:])",
        (CHAIN,),
    ),
    "a segment's own loads taken for those before": Mutant(
        "_emit/segment.py",
        "[turn.on_device[v] for v in segment.ahead]",
        "[turn.on_device[v] for v in segment.ahead[::-1]]",
        (SEGMENT,),
    ),
    "a segment that ends where much goes on": Mutant(
        "_schedule/turns/cutting.py",
        "if passing[k] < least:",
        "if passing[k] > least:",
        (CHAIN,),
    ),
    "a buffer that waits filled by what is larger": Mutant(
        "_schedule/turns/cutting.py",
        "if 2 * size >= x.nbytes >= size",
        "if 2 * size >= x.nbytes",
        (CUTTING,),
    ),
    "a segment cut where as much is in memory": Mutant(
        "_schedule/turns/cutting.py",
        "best[0] <= peaks[n] - gain",
        "least[0] <= peaks[n]",
        (CUTTING,),
    ),
    "loads that wait where the peak stays": Mutant(
        "_schedule/turns/cutting.py",
        "others * way[-1].alone",
        "0 * way[-1].alone",
        (CUTTING,),
    ),
    "what a loop takes freed before its end": Mutant(
        "_schedule/turns/cutting.py",
        "if x.made >= begin and not _is_handed(x, piece):",
        "if not _is_handed(x, piece):",
        (CUTTING,),
    ),
    "turns of more layers, the more there are": Mutant(
        "_schedule/turns/cutting.py",
        "min(filling.times * max(usual, share), layers)",
        "usual",
        (CUTTING,),
    ),
    "residuals at rest counted on the device": Mutant(
        "_schedule/turns/chain.py",
        "if span.var not in self.residuals)",
        "if span.var is not self)",
        (CHAIN,),
    ),
    "many arrays handed on for one product": Mutant(
        "_schedule/turns/crossing.py",
        "self._drop_together(left)",
        "self._drop_together([])",
        (CROSSING,),
    ),
    "arithmetic handed on beside what it is made of": Mutant(
        "_schedule/turns/crossing.py",
        "while self._drop_singly(left):",
        "while self._drop_singly([]):",
        (CROSSING,),
    ),
    "arithmetic handed on that parts before made again": Mutant(
        "_schedule/turns/crossing.py",
        "self._made[y] < part and y in self.handed",
        "self._made[y] < part",
        (CROSSING,),
    ),
    "gradients that wait on the device": Mutant(
        "_schedule/turns/placing.py",
        "if v in self._on_host:",
        "if v in self._on_host and not v.aval.shape:",
        (CHAIN,),
    ),
    "sums over gradients where they stood": Mutant(
        "_schedule/turns/chain.py",
        "if node.position in reduced.early:",
        "if node.position in reduced.early and not node.reads:",
        (CHAIN,),
    ),
    "gradients added where they stood": Mutant(
        "_schedule/late.py",
        "elif not late and _is_elementwise(e) and gradients.issuperset(e.outvars):",
        "elif not late and _is_elementwise(e) and not gradients:",
        (CHAIN,),
    ),
    "numbers that gradients are scaled by where they stood": Mutant(
        "_schedule/late.py",
        "early |= _numbers_for(step, early)",
        "early |= _numbers_for(step, set())",
        (CHAIN,),
    ),
    "what is made between turns handed on": Mutant(
        "_schedule/turns/chain.py",
        "fixed.update(v for x in nodes for v in x.reads if v not in made)",
        "fixed.update(v for x in nodes for v in x.reads)",
        (CHAIN,),
    ),
    "large updates where much is alive": Mutant(
        "_schedule/turns/placing.py",
        "return m if self._alive[m] + size + made <= self._alive[n] else n",
        "return n",
        (CHAIN,),
    ),
    "updates that wait for what is known": Mutant(
        "_schedule/late.py",
        "wanted.update(v for x in step.inlined_updates for v in variables(x.operands))",
        "wanted.update(())",
        (CHAIN,),
    ),
    "large updates in turns that they fill": Mutant(
        "_schedule/turns/placing.py",
        "full = asked is None and self._is_too_much(n, size, made)",
        "full = False",
        (CHAIN,),
    ),
    "turns as large as logits": Mutant(
        "_schedule/turns/cutting.py",
        "return sizes[-1] if len(sizes) == least else 0",
        "return max(sizes, default=0)",
        ("tests/schedule/test_cutting.py",),
    ),
    "types of Auto mode forgotten": Mutant(
        "_places/memory.py",
        "if explicit_sharding(type_of(filled)) != sharding:",
        "if sharding and explicit_sharding(type_of(filled)) != sharding:",
        (SEGMENT,),
    ),
    "residuals of what is computed again": Mutant(
        "_schedule/turns/chain.py",
        "if v in kept or n > min(segments[-1], fullest) or",
        "if v in kept or n > segments[-1] or",
        (CHAIN,),
    ),
    "a turn with room for any update": Mutant(
        "_schedule/turns/placing.py",
        "full = sum(taken) + size > (asked or self._turn_bytes)",
        "full = sum(taken) > (asked or self._turn_bytes)",
        (CHAIN,),
    ),
    "large loads beside short products": Mutant(
        "_schedule/turns/ties.py",
        "key=lambda x: -x.nbytes",
        "key=lambda x: x.nbytes",
        (CHAIN,),
    ),
    "a load whose end nothing waits for": Mutant(
        "_schedule/turns/ties.py",
        "for moves in (loading, storing):",
        "for moves in (storing,):",
        (CHAIN,),
    ),
    "state loaded after the product that it is stored with": Mutant(
        "_schedule/turns/ties.py",
        "place(move, range(max(0, k - 2), k))",
        "place(move, range(len(room)))",
        (CHAIN,),
    ),
    "state that is loaded a turn before, however much it is": Mutant(
        "_schedule/turns/ties.py",
        "if few or nbytes(loads) <= self.turn_bytes:",
        "if few or nbytes(loads):",
        (CHAIN,),
    ),
    "what the last layer computes again as a residual": Mutant(
        "_schedule/turns/forward.py",
        "if not gradients.isdisjoint(made) or follow.is_transposed_last(e):",
        "if not gradients.isdisjoint(made):",
        (CHAIN,),
    ),
    "microbatches that load all of their layers": Mutant(
        "_program/wanted.py",
        "rows=found.rows.union(consts)",
        "rows=found.rows",
        (f"{BODIES}::test_microbatches_of_a_python_loop",),
    ),
    "microbatches whose layers are in no turns": Mutant(
        "_schedule/inside.py",
        "x.is_fused_backward or x.chain for x",
        "x.is_fused_backward for x",
        (f"{BODIES}::test_microbatches_of_a_python_loop",),
    ),
    "residuals of the first backward pass alone": Mutant(
        "_schedule/turns/forward.py",
        "if backward is not None and follow.is_derived_first(e):",
        "if False and backward is not None:",
        (CHAIN,),
    ),
    "rows stored in a stack that is read already": Mutant(
        "_schedule/turns/segments.py",
        "if not taken.isdisjoint(some):",
        "if not some:",
        (STACKS,),
    ),
    "a large residual alone in its turn": Mutant(
        "_schedule/turns/cutting.py",
        "usual = residual + min(layer, usual)",
        "pass",
        (CUTTING,),
    ),
    "each residual in the first row": Mutant(
        "_emit/segment.py",
        "with_rows(stacks[stack], one, number + row, 0)",
        "with_rows(stacks[stack], one, number, 0)",
        (SEGMENT,),
    ),
    "residuals stored by the turn that makes them": Mutant(
        "_schedule/turns/chain.py",
        "at = after  # Which has it anyway, and products beside it.",
        "pass",
        (CHAIN,),
    ),
    "short turns however long a sequence is": Mutant(
        "_schedule/turns/cutting.py",
        "min(filling.times * max(usual, share), layers)",
        "min(usual, layers)",
        (CUTTING,),
    ),
    "no room for a residual": Mutant(
        "_schedule/turns/cutting.py",
        "layers = max(now.most_layers * layer, layer + residual)",
        "layers = MOST_LAYERS * layer",
        (CUTTING,),
    ),
    "what is loaded behind the barrier of its checkpoint": Mutant(
        "_program/remats.py",
        "        and a not in loaded\n",
        "",
        (CHAIN,),
    ),
    # Positions.
    "rows copied as an older compiler reads positions": Mutant(
        "_places/memory.py",
        """    if compat.COPIES_AT_POSITIONS:
        return lambda position: position
""",
        """    if True:
        return lambda position: position
""",
        ("tests/places/test_memory.py::test_positions_that_no_compiler_follows",),
    ),
    # What is done in which order.
    "effects in no order": Mutant(
        "_program/step.py",
        "found[i] = before, (jex.Var(_TOKEN),)",
        "found[i] = (), (jex.Var(_TOKEN),)",
        ("tests/system/test_effects.py::test_ordered_effects_are_in_their_order",),
    ),
    "a norm of a norm in the pass of that norm": Mutant(
        "_schedule/waiting.py",
        "return last + (after >= scan)",
        "return last + (after > scan)",
        (f"{LEFT}::test_norms_of_norms",),
    ),
    # What is summed up.
    "sums that begin with one": Mutant(
        "_emit/sums.py",
        '{"add": 0, "mul": 1',
        '{"add": 1, "mul": 1',
        (f"{LATE}::test_gradients_that_wait",),
    ),
    "a largest value that begins with the largest": Mutant(
        "_emit/sums.py",
        'least = by == "max"',
        'least = by == "min"',
        (f"{LEFT}::test_what_else_a_step_does[other sums]",),
    ),
    "a product of other axes summed up": Mutant(
        "_rows/sums.py",
        "return [a, b] if right[left.index(axes[a])] == axes[b] else []",
        "return [a, b]",
        (f"{LEFT}::test_what_else_a_step_does[products with other rows]",),
    ),
    # Passes that read state first.
    "a norm of a norm read in the first pass": Mutant(
        "_schedule/updates/passes.py",
        "if not late.isdisjoint(used):",
        "if False:",
        (f"{PASSES}::test_values_and_passes[clip twice-262144]",),
    ),
    "effects had in each pass": Mutant(
        "_schedule/updates/passes.py",
        "if any(map(compat.has_effects, update.program.equations)):",
        "if False:",
        (f"{PASSES}::test_no_pass[an effect]",),
    ),
    "a sum without the rows that are left": Mutant(
        "_emit/loop.py",
        """                for t in self.group.targets
                if t.sum is not None""",
        """                for t in self.group.targets
                if not isinstance(self._first, int)""",
        (f"{PASSES}::test_rows_that_are_left_when_a_loop_ends",),
    ),
    "a slice that is only read waits for none": Mutant(
        "_schedule/updates/loops.py",
        "if group is earlier and not (group.sums or group.makes):",
        "if group is earlier and not group.makes:",
        (f"{PASSES}::test_a_slice_waits_for_the_one_before",),
    ),
    "a slice of new state waits for none": Mutant(
        "_schedule/updates/loops.py",
        "if group is earlier and not (group.sums or group.makes):",
        "if group is earlier and not group.sums:",
        ("tests/emit/test_init.py::test_slices_of_new_state_wait_for_each_other",),
    ),
    # What is moved into the scan.
    "a gradient that another scan adds to": Mutant(
        "_schedule/step.py",
        "if not self._taken.isdisjoint(c.results):",
        "if False:",
        (f"{MODELS}::test_three_steps[layers used twice]",),
    ),
    "old parameters gone before the second run": Mutant(
        "_schedule/step.py",
        "now, late = (), fused",
        "pass",
        (f"{LATE}::test_what_need_not_wait_for_a_second_run_does",),
    ),
    "a value read after it is replaced": Mutant(
        "_schedule/step.py",
        "        yield from self._old_values(found, fused)\n",
        "",
        (f"{LEFT}::test_what_else_a_step_does[old parameters used]",),
    ),
    "what a later scan gives taken for known": Mutant(
        "_schedule/follow.py",
        "late = i in self._later or not self.late.isdisjoint(operands)",
        "late = not self.late.isdisjoint(operands)",
        (f"{MODELS}::test_an_update_that_takes_what_a_later_scan_gives",),
    ),
    "the next argument of another type replaced": Mutant(
        "_schedule/step.py",
        "and _type(x) == _type(v)",
        "and True",
        (f"{OPTIMIZERS}::test_each_result_replaces_an_argument_of_its_type",),
    ),
    # Loops over slices.
    "one slice for all of an iteration": Mutant(
        "_emit/loop.py",
        "at((number * loop.unroll + i) * (rows or 0))",
        "at((number * loop.unroll + 0) * (rows or 0))",
        (f"{STREAM}::test_stages_give_the_plain_values[a last slice]",),
    ),
    "the rest of the rows at the wrong place": Mutant(
        "_schedule/updates/loops.py",
        "group.rows - self.slices * rows, self.slices * rows)",
        "group.rows - self.slices * rows, 0)",
        ("tests/schedule/test_loops.py",),
    ),
    "no barrier between what is stored and the next load": Mutant(
        "_emit/loop.py",
        "if load_after or self._handed:",
        "if False:",
        (f"{STREAM}::test_what_is_replaced_is_read_before",),
    ),
    "no barrier between read and replace": Mutant(
        "_emit/moves.py",
        "return lax.optimization_barrier(x)",
        "return x",
        (f"{STREAM}::test_what_is_replaced_is_read_before",),
    ),
    "the other branch of a predicate": Mutant(
        "_program/branches.py",
        "for value in (0, 1))",
        "for value in (1, 0))",
        ("tests/program/test_branches.py",),
    ),
    "a window counted twice": Mutant(
        "_schedule/updates/window.py",
        "while inside > window_bytes and first < k:",
        "while inside > 2 * window_bytes and first < k:",
        ("tests/schedule/test_window.py",),
    ),
    "slices along a sharded axis": Mutant(
        "_rows/analysis.py",
        "if aval.sharding.spec[axis] is not None:",
        "if False:",
        ("tests/rows/test_slicing.py",),
    ),
    "a value whole and by rows": Mutant(
        "_rows/analysis.py",
        "if any(v in self.axes for v in self._whole_to.get(id(e), ())):",
        "if False:",
        ("tests/rows/test_slicing.py",),
    ),
    # Buffers.
    "donation across memories": Mutant(
        "_step/donation.py",
        "return buffer.type, buffer.kind, buffer.sharding if partitioned else None",
        "return buffer.type, buffer.sharding if partitioned else None",
        (
            "tests/step/test_donation.py::test_where_jax_pairs_well_the_program_is_the_same",
        ),
    ),
    "a wrong alias": Mutant(
        "_step/donation.py",
        "aliases[argument.position] = result.position",
        "aliases[argument.position] = free[-1].position",
        (
            "tests/step/test_donation.py::test_where_jax_pairs_well_the_program_is_the_same",
        ),
    ),
    # Low bits.
    "codes one off": Mutant(
        "_low_bit/dynamic_map.py",
        "return jnp.where(x < 0, 127 - at, 127 + at).astype(jnp.uint8)",
        "return jnp.where(x < 0, 127 - at, 126 + at).astype(jnp.uint8)",
        ("tests/low_bit/test_codecs.py",),
    ),
    "a positive value encoded as zero": Mutant(
        "_low_bit/codecs.py",
        "vanished = (codes == self.zero) & (x > 0) & (low >= 0)[..., None]",
        "vanished = (codes == self.zero) & (x < 0) & (low >= 0)[..., None]",
        ("tests/low_bit/test_codecs.py",),
    ),
    # What slicing rules refuse.
    "rule: operands with rows along two axes": Mutant(
        f"{RULES}/registry.py",
        "    if len(found) != 1:",
        "    if not found:",
        (REFUSED,),
    ),
    "rule: a primitive without a rule": Mutant(
        f"{RULES}/registry.py",
        "return RULES.get(e.primitive.name, _REFUSED)",
        'return RULES.get(e.primitive.name, RULES["add"])',
        (REFUSED,),
    ),
    "rule: a sort of the rows": Mutant(
        f"{RULES}/elementwise.py",
        'if e.params["dimension"] == only(ins, e):',
        "if False:",
        (REFUSED,),
    ),
    "rule: a sort of the rows, followed back": Mutant(
        f"{RULES}/elementwise.py",
        'if e.params["dimension"] == only(outs, e):',
        "if False:",
        (REFUSED,),
    ),
    "rule: an iota along the rows": Mutant(
        f"{RULES}/indexing.py",
        'if e.params["dimension"] == only(outs, e):',
        "if False:",
        (REFUSED,),
    ),
    "rule: an update of some rows": Mutant(
        f"{RULES}/indexing.py",
        """if any(x is not None for x in ins[2:]) or (
            shape(e.invars[1])[axis] != rows.count
        ):""",
        "if any(x is not None for x in ins[2:]):",
        (REFUSED,),
    ),
    "rule: a gather of rows": Mutant(
        f"{RULES}/indexing.py",
        """        if not whole or e.params["slice_sizes"][operand] != rows.count:
""",
        """        if whole and operand in numbers.start_index_map:
            return Axes([*ins], [0])
        if not whole or e.params["slice_sizes"][operand] != rows.count:
""",
        (REFUSED,),
    ),
    "rule: a gather of paired rows": Mutant(
        f"{RULES}/indexing.py",
        "if indices not in (None, wanted):",
        "if False:",
        (REFUSED,),
    ),
    "rule: a product over the rows": Mutant(
        f"{RULES}/products.py",
        """        if ins[side] not in batch[side]:
            raise NotRowLocalError(e.primitive.name)
""",
        """        if ins[side] not in batch[side]:
            return Axes([*ins], [0])
""",
        (REFUSED,),
    ),
    "rule: a product of rows with other rows": Mutant(
        f"{RULES}/products.py",
        "if ins[1 - side] not in (None, axes[1 - side]):",
        "if False:",
        (REFUSED,),
    ),
    "rule: random bits from one key": Mutant(
        f"{RULES}/random.py",
        "class RandomBits(Unary):",
        "class RandomBits(Elementwise):",
        (REFUSED,),
    ),
    "rule: a reshape that mixes rows": Mutant(
        f"{RULES}/shapes.py",
        "return next((i for i in places if math.prod(sizes[:i]) == before), None)",
        "return next(places, None)",
        (REFUSED,),
    ),
    "rule: a sum over the rows": Mutant(
        f"{RULES}/shapes.py",
        "return None if axis in removed else axis - sum(d < axis for d in removed)",
        "return axis - sum(d < axis for d in removed)",
        (REFUSED,),
    ),
    "rule: a sum of all rows before": Mutant(
        f"{RULES}/shapes.py",
        "return None if axis in self.along(e) else axis",
        "return axis",
        (REFUSED,),
    ),
    # Steps in bodies.
    "gradients of microbatches counted with their sums": Mutant(
        "_schedule/fused_step.py",
        "inside = (x for x in self.inside.values() if x.holds_update)",
        "inside = self.inside.values()",
        (f"{INSIDE}::test_microbatches",),
    ),
    "shardings forgotten in a body": Mutant(
        "_emit/streamed_step.py",
        "            if a in sharded\n",
        "            if False\n",
        ("tests/emit/test_steps_in_bodies.py::test_state_in_bodies_stays_spread",),
    ),
    # What replaces what rests.
    "gradients of microbatches wait for one another": Mutant(
        "_schedule/own_updates.py",
        "and not is_transfer(e) and not self._sums(e)",
        "and not is_transfer(e)",
        (f"{OWN}::test_gradients_of_microbatches_are_summed_where_they_are_made",),
    ),
    "what is needed elsewhere is made in an update": Mutant(
        "_schedule/own_updates.py",
        "if after.isdisjoint(x.takes) and self._is_reduced(x, outside)",
        "if after.isdisjoint(x.takes)",
        (f"{OWN}::test_what_is_left_as_it_is",),
    ),
    "numbers of a count come from outside": Mutant(
        "_schedule/own_updates.py",
        "number = None if shape(v) else of_arguments(program, v)",
        "number = None",
        (f"{OWN}::test_momentum",),
    ),
    "two results in the place of one argument": Mutant(
        "_schedule/replacements.py",
        "        if len({*arguments}) < len(arguments):",
        "        if False:",
        ("tests/schedule/test_replacements.py::test_no_two_results_take_one_place",),
    ),
    "a distance from old parameters replaces them": Mutant(
        "_program/replaced.py",
        "    return [*found] == last",
        "    return True",
        (f"{REPLACED}::test_a_distance_from_an_argument_comes_after_it",),
    ),
    "what a step moves by hand is moved back": Mutant(
        "_program/replaced.py",
        " or not by_hand.isdisjoint({v, a})",
        "",
        (f"{REPLACED}::test_what_a_step_moves_by_hand_stays_there",),
    ),
    "the last tree of several is in the place": Mutant(
        "_step/donation.py",
        "        taken = min(like, key=lambda k: (len(k) > 1, k[-1:] != key[1:]))",
        "        taken = like[-1]",
        (
            "tests/step/test_donation.py"
            "::test_results_in_the_place_of_donated_arguments",
        ),
    ),
    "a norm has all of what it is of kept": Mutant(
        "_schedule/turns/placing.py",
        "if after and arrays and is_reduced(self._step.program, node.position):",
        "if False:",
        (f"{SEGMENT}::test_norms_of_what_is_updated",),
    ),
    "a norm keeps new parameters from their place": Mutant(
        "_schedule/replacements.py",
        "            elif self._is_reduced(at):",
        "            elif False:",
        ("tests/schedule/test_replacements.py::test_what_makes_new_parameters",),
    ),
    "a constraint of what rests is lost": Mutant(
        "_emit/spread.py",
        "    if has is None or i is None:\n        return x",
        "    return x",
        (
            "tests/step/test_jit_shardings.py"
            "::test_a_step_says_how_parameters_at_rest_are_spread",
        ),
    ),
    "rule: a scan over the rows": Mutant(
        f"{RULES}/bodies.py",
        """            if axis + by < 0:
                raise NotRowLocalError(turn.equation.primitive.name)
""",
        """            if axis + by < 0:
                return None
""",
        (REFUSED,),
    ),
}
