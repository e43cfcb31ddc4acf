"""`low_bit`: an optax transformation whose state is in few bits between updates."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_offload._ground import trees
from optax_offload._ground.errors import CodecError, OffloadWarning
from optax_offload._ground.extra_args import Transformation, as_transformation
from optax_offload._low_bit import codecs, forms
from optax_offload._low_bit.convert import decoded_at
from optax_offload._low_bit.encoded import Encoded, is_encoded
from optax_offload._places import memory, templates
from optax_offload._places.rules import (
    STATE_CODECS,
    CodecName,
    OffloadConfig,
    Rules,
    as_config,
    check_codecs,
)


def low_bit(
    inner: Transformation,
    rules: Rules,
    codec: CodecName | None = "int8",
) -> optax.GradientTransformationExtraArgs:
    """Keeps chosen state of an optimizer in few bits between updates.

    An update decodes the state to float32, runs ``inner``'s own equations, and encodes
    the new state. State stays in its memory. To offload it too, give `offload` rules
    with a codec, or put `offload` around this.

    An encoded leaf is a node, with its parts at ``codes`` and ``scales`` below its
    path. Rules match the path of the leaf itself.

    - ``"int8"``: 256 values that lie closer around zero, a float32 scale for every
      256 (Dettmers et al. 2021, arXiv 2110.02861). 1.016 bytes a value. For every 128
      or 64 where the last axis, as of attention heads, has no more.
    - ``"int8-companded"``: a scale of 16 bits for every 32, arithmetic alone
      (arXiv 2602.23349). 1.06 bytes.
    - ``"float8"``: e4m3, a float32 scale for every 256. 1.016 bytes.
    - ``"bfloat16"``, ``"bfloat16-stochastic"``: rounded to nearest, or by chance.
    - ``"bfloat16-remainder"``: for the weights of `master_weights`, exact.

    Leaves keep their dtype if they hold no floating numbers, have fewer than 4096
    values, or have a last axis that is not a multiple of 64 (on each device, as far as
    is known). `memory_report` says which are encoded.

    Finite values stay finite. In a block without negative values, as of second moments,
    no value above zero becomes zero. A value that is infinite or NaN, or negative where
    there is no sign, makes its whole block infinite or NaN when decoded: nothing is
    clipped.

    Args:
      inner: any optax transformation.
      rules: the state to encode: a regex that matches the whole path of a leaf of
        ``inner``'s state, such as ``.*/(mu|nu)/.*``; or a `Rule`, a sequence of them,
        or an `OffloadConfig`. Only ``codec`` and ``signed`` of a `Rule` matter. Without
        ``signed`` a moment has a sign unless it is known to need none, as optax's
        second moments are.
      codec: the format for rules that name none. None leaves their state as it is.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      TypeError: ``inner`` is no transformation, or the rules are of no known form.
      ValueError: ``codec`` is none of the above; or, from ``init``, a rule matches no
        leaf, names ``"bfloat16-remainder"`` for state other than master weights, or a
        lossy codec for parameters (as in ``optax.contrib.schedule_free``).
      CodecError: from ``update``, state is in another form than its rule names, as from
        a float32 checkpoint.

    Example:
      >>> import jax.numpy as jnp, optax, optax_offload as oo
      >>> tx = oo.low_bit(optax.adam(1e-3), ".*/(mu|nu)/.*")
      >>> state = tx.init({"w": jnp.ones((64, 256))})
      >>> state[0].mu["w"], state[0].mu["w"].codes.nbytes
      (Encoded(int8, float32[64, 256]), 16384)
    """
    config = as_config(rules)
    if codec is not None and codecs.codec_of(codec).of_parameters:
        raise ValueError(
            f"codec is {codec!r}, which is for frozen parameters. Give "
            f"one of {', '.join(map(repr, STATE_CODECS))}"
        )
    core = _LowBit(as_transformation(inner, "low_bit"), config, codec)
    return optax.GradientTransformationExtraArgs(core.init, core.update)


def as_rules_say(
    inner: optax.GradientTransformationExtraArgs,
    config: OffloadConfig,
    on_misplaced: str,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose state is in the forms that rules name, or an error.

    Args:
      inner: The optimizer.
      config: The rules.
      on_misplaced: The treatment of state in other forms by an update: ``"raise"`` or
        ``"move"``.
    """
    fix = (
        "Convert it: state = optax_offload.place(state, rules). For a first step after "
        'a checkpoint in that form: offload(..., on_misplaced="move")'
    )
    core = _LowBit(inner, config, None, on_misplaced, fix)
    return optax.GradientTransformationExtraArgs(
        core.init if core.encodes else inner.init, core.update
    )


@dataclasses.dataclass(frozen=True)
class _LowBit:
    """An optimizer and its rules: what the two functions of a transformation share."""

    inner: optax.GradientTransformationExtraArgs
    config: OffloadConfig
    codec: CodecName | None
    on_misplaced: str = "raise"
    fix: str = (
        "Convert it: state = optax_offload.low_bit_encode(optax_offload."
        "low_bit_decode(state, params), optax_offload.eval_shape(tx.init, params))"
    )

    def __post_init__(self):
        rules = self.config.rules
        check_codecs("rules", rules, STATE_CODECS)

    @property
    def encodes(self) -> bool:
        """Returns whether a rule names a codec."""
        return any(rule.codec or self.codec for rule in self.config.rules)

    def init(self, params: optax.Params) -> optax.OptState:
        """As of `optax.GradientTransformation`."""
        if not (jax.tree.leaves(params) or self.config.lenient):
            # optax.tree.map_params has a placeholder for all parameters.
            lenient = dataclasses.replace(self, config=self.config.made_lenient())
            return lenient.init(params)
        leaves = jax.tree.leaves(params)
        structs = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        if memory.is_traced(params) or structs:
            return self._init(params)
        # So that what is encoded is never there whole.
        state = templates.make(self._init, params, params)
        warn_of_blocks(state)
        return state

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        """As of `optax.GradientTransformationExtraArgs`."""
        leaves, _ = trees.flatten_with_path(state, is_leaf=is_encoded)
        if not (self.encodes or any(is_encoded(x) for _, x in leaves)):
            return self.inner.update(updates, state, params, **extra_args)
        named = forms.codecs_named(state, self.config.made_lenient(), self.codec)
        others = forms.in_other_forms(state, named)
        if others:
            kept = self._kept_by_inner(updates if params is None else params)
            others = [x for x in others if x.keys not in kept]
            named = {k: codec for k, codec in named.items() if k not in kept}
        if others:
            self._tell_of(others)
        elsewhere = {x.keys for x in others}
        # By their keys: two leaves can have the same path.
        before = {
            keys: x
            for keys, x in leaves
            if is_encoded(x) and keys in named and keys not in elsewhere
        }
        decoded = decoded_at(state, params, named)
        updates, new = self.inner.update(updates, decoded, params, **extra_args)

        def encode(keys: Any, x: Any) -> Any:
            if is_encoded(x):
                return x
            path, old = trees.path_string(keys), before.get(keys)
            if old is None:
                return forms.in_form(x, named.get(keys), path)
            return Encoded.of(x, old.codec, path, old.step)

        new = trees.map_with_path(encode, new, is_leaf=is_encoded)
        return updates, new

    def _kept_by_inner(self, params: Any) -> set[Any]:
        """The keys of the leaves that the optimizer inside keeps encoded itself."""
        state = jax.eval_shape(self.inner.init, params)
        leaves, _ = trees.flatten_with_path(state, is_leaf=is_encoded)
        return {keys for keys, x in leaves if is_encoded(x)}

    def _tell_of(self, others: list[forms.OtherForm]) -> None:
        """Raises or warns of leaves in another form than their rule names."""
        came = (
            "state came to update in another form than its rule names: "
            f"{forms.described(others)}"
        )
        if self.on_misplaced == "move":
            warnings.warn(
                f"{came}. This step converts it, and the next one is compiled once "
                "more",
                OffloadWarning,
                stacklevel=2,
            )
        else:
            raise CodecError(f"{came}. {self.fix}")

    def _init(self, params: optax.Params) -> optax.OptState:
        state = self.inner.init(params)
        named = forms.codecs_named(state, self.config, self.codec)
        leaves, _ = trees.flatten_with_path(state, is_leaf=is_encoded)
        twice = [trees.path_string(k) for k, x in leaves if is_encoded(x) and named[k]]
        if twice:
            raise ValueError(
                f"{trees.listed(twice)}: encoded already, by a low_bit inside of this "
                "one. Name the codec of a leaf in the rules of one of them"
            )

        def encode(keys: Any, x: Any) -> Any:
            codec = named[keys]
            if codec is None or not forms.can_be(x, codec):
                return x
            return forms.in_form(_unfolded(x), codec, trees.path_string(keys))

        return trees.map_with_path(encode, state, is_leaf=is_encoded)


def warn_of_blocks(state: Any) -> None:
    """Warns of blocks that lie on two devices: in Auto mode no type says so before."""
    leaves, _ = trees.flatten_with_path(state, is_leaf=is_encoded)
    cut = [
        trees.path_string(keys)
        for keys, x in leaves
        if is_encoded(x) and x.codes.sharding.shard_shape(x.shape)[-1] % x.codec.chunk
    ]
    if cut:
        warnings.warn(
            f"{trees.listed(cut)}: sharded so that blocks of the codec lie on two "
            "devices, which have to talk in every update. Give these leaves a codec of "
            'smaller blocks ("int8-companded" has 32), or none',
            OffloadWarning,
            stacklevel=3,
        )


def _unfolded(x: Any) -> Any:
    """A leaf, mostly of zeros, whose encoding XLA does not work out as it compiles.

    It folds a reduction of 8 million zeros in some minutes.
    """
    one = lax.optimization_barrier(jnp.ones((), x.dtype))
    return x * one
