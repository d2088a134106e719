"""Checks of hyperparameters at construction.

Only Python and NumPy numbers are checked: `optax.inject_hyperparams` and users who `vmap` over rates pass
tracers, and schedules are functions.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


def is_number(value: Any) -> bool:
    """Whether the value is a Python or NumPy real number, whose range can be checked."""
    return isinstance(value, numbers.Real | np.number) and not isinstance(value, bool)


def check_not_negative(name: str, value: Any) -> None:
    """Raises unless a rate or decay given as a number is finite and not negative."""
    if isinstance(value, bool | str) or value is None:
        raise TypeError(f"{name} must be a number or a schedule (step -> number), got {value!r}.")
    if is_number(value) and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and not negative, got {value!r}.")


def check_unit_interval(name: str, value: Any) -> None:
    """Raises unless a momentum given as a number lies in [0, 1)."""
    if isinstance(value, bool | str) or value is None:
        raise TypeError(f"{name} must be a number in [0, 1) or a schedule (step -> number), got {value!r}.")
    if is_number(value) and not 0 <= value < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {value!r}.")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raises unless the value is one of the choices."""
    if not any(value is choice or value == choice for choice in choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_instance(name: str, value: Any, kind: type, instead: str) -> None:
    """Raises unless the value is of the kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {instead}, got {value!r}.")


def check_float_dtype(
    name: str, value: Any, refused: Sequence[Any] = (), why: str = "", other: str | None = None
) -> None:
    """Raises unless the value is None or names a real floating dtype that is not refused.

    `other` names a further choice, for the message.
    """
    if value is None:
        return
    wanted = f"a floating dtype such as jnp.bfloat16, {f'{other}, ' if other else ''}or None"
    try:
        dtype = jnp.dtype(value)
    except TypeError as error:
        raise TypeError(f"{name} must be {wanted}, got {value!r}.") from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name} must be {wanted}, got {value!r}.")
    if dtype in [jnp.dtype(r) for r in refused]:
        raise ValueError(f"{name} cannot be {dtype.name}: {why}")
