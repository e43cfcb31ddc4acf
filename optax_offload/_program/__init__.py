"""Programs as values: the equations of a step or an update, and rewrites of them."""

from optax_offload._program.at_rest import AtRest, Resting
from optax_offload._program.bodies import as_they_are
from optax_offload._program.branches import (
    Branches,
    as_zero,
    find_branches,
    keeps_state,
)
from optax_offload._program.build import Builder, flatten
from optax_offload._program.call import (
    Call,
    Caller,
    as_on_device,
    call_update,
    called,
    offloaded_update,
)
from optax_offload._program.graph import (
    Atom,
    Components,
    Program,
    ancestors,
    bound,
    dependents,
    described,
    evaluate,
    in_pairs,
    live,
    needed,
    nested,
    read,
    shape,
    signature,
    variables,
    within,
)
from optax_offload._program.keys import Places, key_data
from optax_offload._program.remats import scans
from optax_offload._program.step import (
    InlinedUpdate,
    Step,
    constrained,
    handed_on,
    is_store,
    is_transfer,
    take_apart,
)
from optax_offload._program.update import Input, Output, Update, trace

__all__ = [
    "AtRest",
    "Atom",
    "Branches",
    "Builder",
    "Call",
    "Caller",
    "Components",
    "InlinedUpdate",
    "Input",
    "Output",
    "Places",
    "Program",
    "Resting",
    "Step",
    "Update",
    "ancestors",
    "as_on_device",
    "as_they_are",
    "as_zero",
    "bound",
    "call_update",
    "called",
    "constrained",
    "dependents",
    "described",
    "evaluate",
    "find_branches",
    "flatten",
    "handed_on",
    "in_pairs",
    "is_store",
    "is_transfer",
    "keeps_state",
    "key_data",
    "live",
    "needed",
    "nested",
    "offloaded_update",
    "read",
    "scans",
    "shape",
    "signature",
    "take_apart",
    "trace",
    "variables",
    "within",
]
