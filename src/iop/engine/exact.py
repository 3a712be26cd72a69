"""Arithmetic whose result does not depend on order, shape, batch or the number of ranks.

A float32 matrix product is rounded at every addition, so its last bits follow the order in which a kernel adds, and
that order follows the shape. Greedy decoding then answers differently by who else is in the batch. Here nothing is
ever rounded in a sum:

* Products have integer operands: weights of 8 bits against activations of 10 bits (``ACTIVATION_LEVELS``). All partial
  sums stay below 2**24, where float32 holds every integer, so any kernel in any order gives the one exact sum.
* What is left is element by element (``+ - * / sqrt rint``), which IEEE 754 defines to the last bit.
* Sums over a row (norms, softmax) add fixed-point integers in float64, exact below 2**53.
* Parts that ranks hold are rounded per *lane*, a fixed quarter of a layer, and added as a fixed tree; the number of
  ranks only moves lanes between processes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ACTIVATION_LEVELS",
    "F32",
    "F64",
    "INNER_MAX",
    "KV_LEVELS",
    "LANES",
    "WEIGHT_LEVELS",
    "exp_of_negative",
    "inverse_rms",
    "quantise",
    "silu",
]

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

LANES: Final = 4
"""Fixed parts of every layer; ranks hold whole lanes, so 1, 2 or 4 ranks compute the same."""

WEIGHT_LEVELS: Final = 127
ACTIVATION_LEVELS: Final = 511
KV_LEVELS: Final = 127

INNER_MAX: Final = 2**24 // (WEIGHT_LEVELS * ACTIVATION_LEVELS)
"""Longest inner dimension of a product: a longer one could leave the integers that float32 holds."""

_PEAK_MIN: Final = np.float32(1e-30)
"""Vectors below this are zero: their scale would leave the normal numbers."""

_NORM_LEVELS: Final = 32767.0
_LOG2_E: Final = 1.4426950408889634
_EXPONENT_MIN: Final = -60.0
# Taylor terms of 2**f for f in [-1/2, 1/2]: ln(2)**k / k!. The error is below 1e-10, far under the fixed-point grid.
_EXP2: Final = tuple(
    float(c)
    for c in (
        1.0,
        0.6931471805599453,
        0.2402265069591007,
        0.05550410866482158,
        0.009618129107628477,
        0.0013333558146428443,
        0.00015403530393381608,
        1.525273380405984e-05,
        1.3215486790144307e-06,
    )
)


def quantise(x: F32, levels: int) -> tuple[F32, F32]:
    """Integers (as float32) and the scale of each vector along the last axis: ``x ~ integers * scale``.

    Args:
        x: shape (..., K).
        levels: largest absolute integer.

    Returns:
        Integers of shape (..., K) and scales of shape (..., 1); a vector of (nearly) zeros has scale 1.
    """
    peak = np.abs(x).max(axis=-1, keepdims=True)
    scale = np.where(peak > _PEAK_MIN, peak / np.float32(levels), np.float32(1.0)).astype(
        np.float32, copy=False
    )
    return np.rint(x / scale), scale


def inverse_rms(x: F32, epsilon: float) -> F32:
    """One over the root mean square of each row: shape (R, D) to (R, 1)."""
    peak = np.abs(x).max(axis=-1, keepdims=True).astype(np.float64)
    peak[peak <= _PEAK_MIN] = 1.0
    grid = np.rint(x * (_NORM_LEVELS / peak))
    unit = peak / _NORM_LEVELS
    mean = (grid * grid).sum(axis=-1, keepdims=True) / x.shape[-1] * (unit * unit)
    return np.asarray(1.0 / np.sqrt(mean + epsilon), dtype=np.float32)


def exp_of_negative(x: F64) -> F64:
    """e**x for x <= 0, element by element; below about e**-41 it stays there instead of reaching 0."""
    power = np.maximum(x * _LOG2_E, _EXPONENT_MIN)
    whole = np.rint(power)
    part = power - whole
    result = np.full_like(part, _EXP2[-1])
    for term in _EXP2[-2::-1]:
        result *= part
        result += term
    result *= ((whole.astype(np.int64) + 1023) << 52).view(np.float64)
    return result


def silu(x: F32) -> F32:
    """X / (1 + e**-x), element by element."""
    small = exp_of_negative(-np.abs(x).astype(np.float64))
    return np.asarray(x * (np.where(x >= 0, 1.0, small) / (1.0 + small)), dtype=np.float32)
