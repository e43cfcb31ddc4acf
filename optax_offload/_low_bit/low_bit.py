"""`low_bit`: an optax transformation whose state is in few bits between updates."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_offload import _memory, _rules, _templates, _trees
from optax_offload._errors import OffloadWarning
from optax_offload._extra_args import as_transformation
from optax_offload._low_bit import codecs, known_fields
from optax_offload._low_bit.convert import low_bit_decode
from optax_offload._low_bit.encoded import Encoded, is_encoded
from optax_offload._low_bit.master_weights import master_paths


def low_bit(
    inner: Any, rules: _rules.Rules, codec: _rules.CodecName | None = "int8"
) -> optax.GradientTransformationExtraArgs:
    """Keeps chosen state of an optimizer in few bits between its updates.

    An update decodes the state to float32, runs ``inner``'s own equations, takes the
    new state as it is for the update, and encodes it. Nothing is said of memories:
    `offload` takes rules with a codec, and encodes by this; or goes around it.

    A leaf in few bits is a node of its parts, at ``codes`` and ``scales`` below its
    path. Rules match its own path, as they do for all leaves.

    - ``"int8"``: 256 values that lie closer around zero, a float32 scale for every
      256 (Dettmers et al. 2021, arXiv 2110.02861). 1.016 bytes a value. For every 128
      or 64 where the last axis, as of attention heads, has no more.
    - ``"int8-companded"``: a float16 scale for every 32, arithmetic alone
      (arXiv 2602.23349). 1.06 bytes.
    - ``"float8"``: e4m3, a float32 scale for every 256. 1.016 bytes.
    - ``"bfloat16"``, ``"bfloat16-stochastic"``: rounded to nearest, or by chance.
    - ``"bfloat16-remainder"``: for the weights of `master_weights`, exact.

    Leaves that are no floating numbers, that have fewer than 4096 values, or whose last
    axis (on each device, as far as is known) no multiple of 64 is, keep their dtype.
    `memory_report` says which are encoded.

    A value that is infinite or NaN, or negative where there is no sign, makes its whole
    block infinite or NaN when it is decoded: nothing is clipped to what codes can hold.

    Args:
      inner: any optax transformation.
      rules: which state: a regex that matches the whole path of a leaf of ``inner``'s
        state, such as ``.*/(mu|nu)/.*``; or a `Rule`, a sequence of them, or an
        `OffloadConfig`. Of a `Rule` its ``codec`` and ``signed`` count. Without the
        latter a moment has a sign unless it is known to need none, as optax's second
        moments are.
      codec: the format for rules that name none; None leaves their state as it is.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      TypeError: ``inner`` is no transformation, or the rules are of no known form.
      ValueError: ``codec`` is none of the above; or, from ``init``, a rule matches no
        leaf, or asks for a remainder of what are no master weights, or for less
        than that of what are parameters (as in ``optax.contrib.schedule_free``).

    Example:
      >>> import jax.numpy as jnp, optax, optax_offload as oo
      >>> tx = oo.low_bit(optax.adam(1e-3), ".*/(mu|nu)/.*")
      >>> state = tx.init({"w": jnp.ones((64, 256))})
      >>> state[0].mu["w"], state[0].mu["w"].codes.nbytes
      (Encoded(int8, float32[64, 256]), 16384)
    """
    config = _rules.as_config(rules)
    if codec is not None:
        codecs.codec_of(codec)
    core = _LowBit(as_transformation(inner, "low_bit"), config, codec)
    return optax.GradientTransformationExtraArgs(core.init, core.update)


@dataclasses.dataclass(frozen=True)
class _LowBit:
    """An optimizer and its rules: what the two functions of a transformation share."""

    inner: optax.GradientTransformationExtraArgs
    config: _rules.OffloadConfig
    codec: _rules.CodecName | None

    def init(self, params: optax.Params) -> optax.OptState:
        """As of `optax.GradientTransformation`."""
        if not (jax.tree.leaves(params) or self.config.lenient):
            # optax.tree.map_params has a placeholder for all parameters.
            lenient = dataclasses.replace(self, config=self.config.made_lenient())
            return lenient.init(params)
        leaves = jax.tree.leaves(params)
        structs = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        if _memory.is_traced(params) or structs:
            return self._init(params)
        # So that what is encoded is never there whole.
        shardings = _templates.init_shardings(self._init, params)
        state = jax.jit(self._init, out_shardings=shardings)(params)
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
        decoded = low_bit_decode(state, params)
        updates, new = self.inner.update(updates, decoded, params, **extra_args)
        leaves, _ = _trees.flatten_with_path(state, is_leaf=is_encoded)
        # By their keys: two leaves can have the same path.
        before = {keys: x for keys, x in leaves if is_encoded(x)}

        def encode(keys: Any, x: Any) -> Any:
            old = before.get(keys)
            if old is None:
                return x
            return Encoded.of(x, old.codec, _trees.path_string(keys), old.step)

        return updates, _trees.map_with_path(encode, new)

    def _init(self, params: optax.Params) -> optax.OptState:
        state = self.inner.init(params)
        leaves, structure = _trees.flatten_with_path(state)
        paths = [_trees.path_string(keys) for keys, _ in leaves]
        never_negative = known_fields.never_negative(state)
        masters = master_paths(state)
        parameters = known_fields.parameters(state) | masters
        sizes = [_memory.movable_nbytes(x) for _, x in leaves]
        placements = _rules.place(self.config, list(zip(paths, sizes, strict=True)))
        encoded: list[Any] = []
        strangers: list[str] = []
        lossy: list[str] = []
        for path, (_, x), placed in zip(paths, leaves, placements, strict=True):
            rule = placed.rule
            name = rule and (rule.codec or self.codec)
            if rule is None or name is None:
                encoded.append(x)
                continue
            signed = rule.signed
            codec = codecs.codec_of(
                name, path not in never_negative if signed is None else signed
            )
            codec = codec.fitting(x)
            whole = codec.why_not(x) is not None
            if isinstance(codec, codecs.Bfloat16Remainder):
                if path not in masters:
                    strangers.append(path)
            elif path in parameters and not whole:
                lossy.append(path)
            encoded.append(x if whole else Encoded.of(_unfolded(x), codec, path))
        if strangers:
            raise ValueError(
                f"codec 'bfloat16-remainder' for {_trees.listed(strangers)}: it is for "
                "the weights that optax_offload.master_weights keeps, at .*master/.*"
            )
        if lossy:
            raise ValueError(
                f"a codec for {_trees.listed(lossy)}: these are parameters, and what "
                "rounding changes of them is no less than an update. Give rules that "
                "leave them out; 'bfloat16-remainder' is exact, for the weights that "
                "optax_offload.master_weights keeps"
            )
        return jax.tree.unflatten(structure, encoded)


def warn_of_blocks(state: Any) -> None:
    """Warns of blocks that lie on two devices: in Auto mode no type says so before."""
    leaves, _ = _trees.flatten_with_path(state, is_leaf=is_encoded)
    cut = [
        _trees.path_string(keys)
        for keys, x in leaves
        if is_encoded(x) and x.codes.sharding.shard_shape(x.shape)[-1] % x.codec.chunk
    ]
    if cut:
        warnings.warn(
            f"{_trees.listed(cut)}: sharded so that blocks of the codec lie on two "
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
