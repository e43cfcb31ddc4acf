"""State at rest in few bits."""

from optax_offload._low_bit.codecs import CODECS, codec_of
from optax_offload._low_bit.convert import (
    converted,
    low_bit_decode,
    low_bit_encode,
)
from optax_offload._low_bit.encoded import Encoded, encoded_parts
from optax_offload._low_bit.forms import (
    OtherForm,
    check_parameters,
    codecs_named,
    in_other_forms,
)
from optax_offload._low_bit.frozen import (
    check_state,
    decoding,
    has_frozen,
    replaced,
    warn_of_gradients,
)
from optax_offload._low_bit.in_rows import by_rows
from optax_offload._low_bit.known_fields import moments
from optax_offload._low_bit.low_bit import as_rules_say, low_bit, warn_of_blocks
from optax_offload._low_bit.master_weights import master_paths, master_weights
from optax_offload._low_bit.stochastic_round import stochastic_round

__all__ = [
    "CODECS",
    "Encoded",
    "OtherForm",
    "as_rules_say",
    "by_rows",
    "check_parameters",
    "check_state",
    "codec_of",
    "codecs_named",
    "converted",
    "decoding",
    "encoded_parts",
    "has_frozen",
    "in_other_forms",
    "low_bit",
    "low_bit_decode",
    "low_bit_encode",
    "master_paths",
    "master_weights",
    "moments",
    "replaced",
    "stochastic_round",
    "warn_of_blocks",
    "warn_of_gradients",
]
