"""The form that rules name for each leaf of a state, and the leaves in another form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from optax_offload._ground import trees
from optax_offload._low_bit import codecs, known_fields
from optax_offload._low_bit.encoded import Encoded, is_encoded
from optax_offload._low_bit.master_weights import master_paths
from optax_offload._places.rules import (
    STATE_CODECS,
    CodecName,
    OffloadConfig,
    decide,
)


@dataclasses.dataclass(frozen=True)
class OtherForm:
    """A leaf that is not in the form that its rule names.

    Attributes:
      keys: Its keys in its tree.
      path: Its path as rules see it.
      form: The form that it has.
      named: The form that its rule names.
      codec: The codec of that form, None for none.
    """

    keys: tuple[Any, ...]
    path: str
    form: str
    named: str
    codec: codecs.Codec | None


def codecs_named(
    state: Any,
    config: OffloadConfig,
    codec: CodecName | None = None,
    *,
    under: str = "",
) -> dict[tuple[Any, ...], codecs.Codec | None]:
    """The codec that rules name for each leaf, by the leaf's keys; None for none.

    Args:
      state: A tree, of which some leaves may be encoded.
      config: The rules.
      codec: The format for rules that name none.
      under: The path of the state that the rules are for. Other leaves are left out.

    Raises:
      ValueError: A rule matches nothing, or its codec is not for what it matches.
    """
    leaves, structure = trees.flatten_with_path(state, is_leaf=is_encoded)
    fields = jax.tree.unflatten(structure, range(len(leaves)))
    masters = master_paths(fields)
    parameters = known_fields.parameters(fields) | masters
    of_state = parameters | known_fields.moments(fields)
    never_negative = known_fields.never_negative(fields)
    paths = [trees.path_string(keys) for keys, _ in leaves]
    # Sizes say where a leaf is kept, and not how.
    sizes = [(path, None) for path in paths]
    placements = decide(config, sizes, under=under)
    named: dict[tuple[Any, ...], codecs.Codec | None] = {}
    strangers: list[str] = []
    lossy: list[str] = []
    moving: list[str] = []
    for (keys, x), path, placed in zip(leaves, paths, placements, strict=True):
        if not placed.memory_kind:
            continue
        rule = placed.rule
        name = rule and (rule.codec or codec)
        if rule is None or name is None:
            named[keys] = None
            continue
        signed = path not in never_negative if rule.signed is None else rule.signed
        named[keys] = of_leaf = codecs.codec_of(name, signed)
        if isinstance(of_leaf, codecs.Bfloat16Remainder):
            strangers += [path] * (path not in masters)
        elif of_leaf.of_parameters:
            moving += [path] * (path in of_state)
        elif path in parameters:
            lossy += [path] * (is_encoded(x) or can_be(x, of_leaf))
    if strangers:
        raise ValueError(
            f"codec 'bfloat16-remainder' for {trees.listed(strangers)}: it works only "
            "on the weights that optax_offload.master_weights keeps, at .*master/.*"
        )
    if moving:
        raise ValueError(
            f"a codec of frozen parameters, for {trees.listed(moving)}: each update "
            "replaces these. Those of state are " + ", ".join(map(repr, STATE_CODECS))
        )
    if lossy:
        raise ValueError(
            f"a lossy codec for {trees.listed(lossy)}: these leaves are parameters, "
            "and rounding would change them by as much as an update. Give rules that "
            "leave them out. 'bfloat16-remainder' is exact, for the weights that "
            "optax_offload.master_weights keeps"
        )
    return named


def in_other_forms(
    state: Any, named: Mapping[tuple[Any, ...], codecs.Codec | None]
) -> list[OtherForm]:
    """The leaves that are encoded otherwise than named, or are and should not be."""
    leaves, _ = trees.flatten_with_path(state, is_leaf=is_encoded)
    found: list[OtherForm] = []
    for keys, x in leaves:
        codec = named.get(keys)
        if keys not in named or _is_in(x, codec):
            continue
        form = x.codec.name if is_encoded(x) else str(np.dtype(x.dtype))
        wanted = "no codec" if codec is None else codec.name
        if form == wanted:
            form, wanted = _with_sign(x.codec), _with_sign(codec)
        path = trees.path_string(keys)
        found.append(OtherForm(keys, path, form, wanted, codec))
    return found


def check_parameters(
    state: Any, named: Mapping[tuple[Any, ...], codecs.Codec | None]
) -> None:
    """Raises where parameters cannot be encoded as rules name it.

    Those that are small, or norms and biases, are left as they are.
    """
    leaves, _ = trees.flatten_with_path(state, is_leaf=is_encoded)
    wrong: list[str] = []
    bare: list[str] = []
    for keys, x in leaves:
        codec = named.get(keys)
        if codec is None or not codec.of_parameters or is_encoded(x):
            continue
        path = trees.path_string(keys)
        if path.rpartition("/")[2].startswith(trees.CODES):
            bare.append(path)
            continue
        if not hasattr(x, "dtype") or codec.why_left(x) is not None:
            continue
        why_not = codec.fitting(x).why_not(x)
        if why_not is not None:
            wrong.append(f"{path!r} cannot be {codec.name}: {why_not}")
    if bare:
        raise ValueError(
            f"{trees.listed(bare)}: codes of leaves that a loader restored with no "
            "template, so that nothing says what they stand for. Give the loader "
            "optax_offload.place(structs, rules): jax.ShapeDtypeStruct for each "
            "parameter, and the rules that they were saved with"
        )
    if wrong:
        raise ValueError(
            "\n".join(wrong[:5])
            + f"\nand {len(wrong) - 5} more" * (len(wrong) > 5)
            + "\nGive them a rule of their own without a codec, before this one"
        )


def described(others: Sequence[OtherForm]) -> str:
    """The leaves, those of like forms together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for x in others:
        groups.setdefault((x.form, x.named), []).append(x.path)
    return "; ".join(
        f"{trees.listed(paths)} in {form}, where the rules say {named}"
        for (form, named), paths in groups.items()
    )


def in_form(x: Any, codec: codecs.Codec | None, path: str) -> Any:
    """A value, encoded if it can be: in the largest blocks that divide its last axis.

    Args:
      x: The value.
      codec: The format; None for none.
      path: The leaf's path.
    """
    if codec is None or not can_be(x, codec):
        return x
    return Encoded.of(x, codec.fitting(x), path)


def _is_in(x: Any, codec: codecs.Codec | None) -> bool:
    if not is_encoded(x):
        return codec is None or not can_be(x, codec)
    # In whatever blocks: what divides a last axis depends on how it is sharded.
    return (type(x.codec), x.codec.signed) == (type(codec), codec and codec.signed)


def can_be(x: Any, codec: codecs.Codec) -> bool:
    """Returns whether a value can be encoded so, in some blocks."""
    return hasattr(x, "dtype") and codec.fitting(x).why_not(x) is None


def _with_sign(codec: Any) -> str:
    return f"{codec.name} {'with' if codec.signed else 'without'} a sign"
