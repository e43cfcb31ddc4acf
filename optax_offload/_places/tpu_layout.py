"""The layout of arrays on a TPU: which of their axes fill the tiles (F23, F24, F25).

The last two axes of a layout are tiled, with 8 to 32 rows (sublanes) and 128 columns
(lanes), and others are free (https://docs.jax.dev/en/latest/pallas/tpu/details.html).
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from optax_offload._places import memory

# The rows and columns of a vector register, which are those of a tile of 4-byte values.
SUBLANES = 8
LANES = 128
# The tile of an array with a single axis: all values of a vector register.
LINEAR_TILE = 1024


def order(x: Any) -> tuple[int, ...]:
    """The axes of a value or type from major to minor, as a TPU's compiler orders them.

    Tiles are filled by the two axes that take the least padding; of equals by the last,
    as in row-major order. The others keep theirs. This is the layout of arguments and
    results, in device and in host memory, and each device's part decides (F23): in Auto
    mode a type does not say what that is, and the whole is taken for it.
    """
    return _order(memory.shape_on_each_device(x), memory.itemsize(x))


@functools.cache
def _order(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    natural = range(len(shape))
    if len(shape) < 2 or 0 in shape:
        return tuple(natural)
    # Narrow types are packed, several rows to a sublane.
    fewest_rows = 4 // min(itemsize, 4)

    def padding(tiled: tuple[int, int]) -> float:
        rows, columns = (shape[axis] for axis in tiled)
        tile = max(fewest_rows, min(SUBLANES, 2 ** math.ceil(math.log2(rows))))
        return _padding(rows, tile) * _padding(columns, LANES)

    last_first = itertools.product(natural[::-1], repeat=2)
    pairs = ((rows, columns) for columns, rows in last_first if rows != columns)
    tiled = min(pairs, key=padding)
    return (*(axis for axis in natural if axis not in tiled), *tiled)


def _padding(size: int, tile: int) -> float:
    """Returns how many times as large an axis gets by filling its tiles."""
    return math.ceil(size / tile) * tile / size


def unit(x: Any, axis: int) -> int:
    """Returns the unit of which slices along an axis must be multiples."""
    axes = order(x)
    if len(axes) == 1:
        return LINEAR_TILE
    rows, columns = axes[-2:]
    if axis == columns:
        # "Slicing lane dimension is only supported when the lane slice size is a
        # multiple of LaneCount" (F24)
        return LANES
    rows_in_tile = 32 // min(memory.itemsize(x), 4)
    size = memory.shape_on_each_device(x)[rows]
    if axis == rows or (rows_in_tile > SUBLANES and size % rows_in_tile):
        return rows_in_tile
    return 1


def row_moves(x: Any, axis: int) -> bool:
    """Returns whether a TPU moves one index along an axis between memories (F24).

    It does not along the lanes, nor along the rows of tiles where these are packed.
    """
    *_, columns = axes = order(x)
    return axis != columns and (memory.itemsize(x) >= 4 or axis not in axes[-2:])


def part_of_row_moves(x: Any, axis: int) -> bool:
    """Returns whether a TPU also moves some columns alone of one index along an axis.

    These are what a compiler takes of a row that is sharded only where it is used.
    """
    return row_moves(x, axis) and axis not in order(x)[-2:]


def constrain(x: jax.Array, of: Any, *, made_here: bool = False) -> jax.Array:
    """Asks a TPU's compiler to lay out a part of an array as it does all of it.

    Left to itself it takes the body of a loop for row-major, and then copies on the
    host what is laid out in another way (F25).

    Args:
      x: The part, or all of it.
      of: The type of all of it.
      made_here: Whether a loop computes it, and takes it from no array in host memory.
        Then a compiler may lay it out in any way, and does not find a buffer for it.
    """
    axes = order(of)
    # Of words of codes a compiler likes to turn the last two axes, and then cannot
    # write their slices.
    is_row_major = axes == tuple(range(len(axes)))
    if is_row_major and x.dtype != jnp.uint16 and not made_here:
        return x
    return lax.platform_dependent(
        x,
        tpu=lambda x: with_layout_constraint(x, Layout(axes)),
        default=lambda x: x,
    )
