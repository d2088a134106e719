"""How a matrix is orthogonalised, as one value: method, coefficients, normalisation, precision."""

import dataclasses
import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from optax_muon.orthogonalization._choices import (
    gram_from_ratio,
    matrices_at_a_time,
    on_cpu,
    symmetric_blocks,
)
from optax_muon.orthogonalization._coefficients import KELLER, Coefficients
from optax_muon.orthogonalization._gram_newton_schulz import (
    UNSAFE_SLOPE,
    gram_flops,
    gram_newton_schulz,
    input_width,
    largest_slope,
    restart_schedule,
)
from optax_muon.orthogonalization._newton_schulz import largest_value, newton_schulz, newton_schulz_flops
from optax_muon.orthogonalization._normalization import as_normalization
from optax_muon.orthogonalization._svd import polar_factor
from optax_muon.orthogonalization._symmetric_matmul import Products, storage_dtype

METHODS = ("auto", "newton_schulz", "gram_newton_schulz", "svd")
_COMPUTE_DTYPES = ("bfloat16", "float16", "float32")
_PRECISIONS = tuple(
    p.name.lower() for p in (jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST)
)


@dataclasses.dataclass(frozen=True)
class Orthogonalizer:
    """How `G = U Σ Vᵀ` becomes `U p(Σ / ‖Σ‖) Vᵀ`, with p close to 1: a frozen, hashable value.

    It knows matrices only: no parameters, no mesh. Use it through `orthogonalize` or the `orthogonalizer=` of
    `muon`.

    Args:
        method: `'newton_schulz'` (three products per step), `'gram_newton_schulz'` (the same polynomial
            iterated on the small Gram matrix), `'svd'` (the exact polar factor; coefficients and
            normalisation play no part), or `'auto'`, which takes the faster of the first two for the shape,
            dtype and platform. A name means this or an error.
        coefficients: one triple `(a, b, c)` per step. See `KELLER`, `YOU`, `POLAR_EXPRESS`, `polar_express`
            ...
        normalization: `'frobenius'`, `'schatten'`, `'aol'`, or a value with a safety factor such as
            `Frobenius(safety=1.02)`.
        compute_dtype: what the inputs of matrix products are rounded to: `'auto'` is float32 on CPU and
            bfloat16 elsewhere (float64 arrays stay float64 everywhere), or `'bfloat16'`, `'float16'`,
            `'float32'`. Products accumulate in float32 and the iterate is kept in float32 between steps
            whatever this is.
        precision: of float32 products: `'highest'` is true float32 on every backend; `'high'` and `'default'`
            let TPU and GPU use bfloat16 passes or TF32. The global `jax_default_matmul_precision` has no
            effect.
        restarts: for the Gram method, the steps (counted from 0) before which it returns to the matrix
            itself. `None` takes the measured schedule for coefficients and dtype.

    Raises:
        ValueError: an unknown method, precision, dtype or normalisation, no or malformed or non-finite
            coefficients.
        TypeError: coefficients that are no triples of numbers, or an argument of another kind.

    Example:
        >>> Orthogonalizer(coefficients=KELLER[:1] * 2).coefficients
        ((3.4445, -4.775, 2.0315), (3.4445, -4.775, 2.0315))

    Source: Jordan et al., "Muon" (2024); the Gram method is Dao-AILab's gram-newton-schulz.
    """

    # Any where more is accepted than is stored: the values are checked, and converted, below.
    method: Any = "auto"
    coefficients: Any = KELLER
    normalization: Any = "frobenius"
    compute_dtype: Any = "auto"
    precision: Any = "highest"
    restarts: Any = None

    def __post_init__(self):
        _check_option("method", self.method, METHODS)
        checked = {
            "coefficients": _as_coefficients(self.coefficients),
            "normalization": as_normalization(self.normalization),
            "compute_dtype": _as_compute_dtype(self.compute_dtype),
            "precision": _as_precision(self.precision),
        }
        checked["restarts"] = _as_restarts(self.restarts, self.method, len(checked["coefficients"]))
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def apply(
        self, x: Shaped[Array, "*batch m n"], platform: str | None = None
    ) -> Float[Array, "*batch m n"]:
        """Orthogonalise every matrix of a stack.

        Args:
            x: real and floating, wide or tall; each matrix is handled alone.
            platform: where it will run, `'cpu'`, `'gpu'` or `'tpu'`; by default the default backend.

        Returns:
            The same shape in `promote(float32, x.dtype)`.

        Note:
            The cost of one matrix is `flops`. Temporaries are a few copies of the stack: pass `chunk`
            matrices at a time.
        """
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"Orthogonalizer.apply: x has dtype {x.dtype}, but only real floating matrices have an "
                "orthogonalisation here. "
                "Split a complex matrix into real ones, or leave it to AdamW."
            )
        x = x.astype(storage_dtype(x.dtype))
        if 0 in x.shape:
            return x
        m, n = x.shape[-2:]
        if m > n:
            return jnp.swapaxes(self._wide(jnp.swapaxes(x, -1, -2), platform), -1, -2)
        return self._wide(x, platform)

    def _wide(self, x: Float[Array, "*batch m n"], platform: str | None) -> Float[Array, "*batch m n"]:
        m, n = x.shape[-2:]
        dtype = self.matmul_dtype(x.dtype, platform)
        method = self.chosen_method(m, n, platform, x.dtype)
        if method == "svd":
            return polar_factor(x)
        _check_room(self.coefficients, 1 / self.normalization.safety, dtype.name)
        products = Products(dtype, jax.lax.Precision[self.precision.upper()], symmetric_blocks(m, platform))
        if method == "newton_schulz":
            return newton_schulz(x, self.coefficients, self.normalization, products)
        restarts = self._restarts(dtype, m)
        slope = largest_slope(self.coefficients, restarts)
        if slope > UNSAFE_SLOPE[input_width(dtype)]:
            _warn_unsafe(restarts, dtype.name, round(slope), restart_schedule(self.coefficients, dtype, m))
        return gram_newton_schulz(x, self.coefficients, self.normalization, products, restarts)

    def _restarts(self, dtype: Any, short: int) -> tuple[int, ...]:
        return restart_schedule(self.coefficients, dtype, short) if self.restarts is None else self.restarts

    def matmul_dtype(self, dtype: Any, platform: str | None = None) -> np.dtype:
        """What the inputs of matrix products are rounded to, for an array of this dtype."""
        if self.compute_dtype != "auto":
            return jnp.dtype(self.compute_dtype)
        if jnp.dtype(dtype) == jnp.float64:
            return jnp.dtype(jnp.float64)
        return jnp.dtype(jnp.float32 if on_cpu(platform) else jnp.bfloat16)

    def wire_dtype(self, dtype: Any, platform: str | None = None) -> np.dtype:
        """What a matrix is rounded to before it travels between devices: `matmul_dtype`, but not float16,
        whose range is too small for what has not been normalised yet.
        """
        compute = self.matmul_dtype(dtype, platform)
        return jnp.dtype(jnp.float32) if compute == jnp.float16 else compute

    def chosen_method(self, m: int, n: int, platform: str | None = None, dtype: Any = jnp.float32) -> str:
        """The method that matrices of this shape get: `method` itself, or what `'auto'` takes."""
        if self.method != "auto":
            return self.method
        short, long = sorted((m, n))
        ratio = gram_from_ratio(self.coefficients, self.matmul_dtype(dtype, platform), short, platform)
        return "gram_newton_schulz" if short and long >= ratio * short else "newton_schulz"

    def flops(self, m: int, n: int, platform: str | None = None) -> float:
        """Floating point operations for one matrix, as the compiler counts them in its matrix products."""
        short, long = sorted((m, n))
        method = self.chosen_method(m, n, platform)
        if method == "svd":
            # Golub and Van Loan's count for a thin SVD with both factors, and the product U Vᵀ.
            return 14.0 * long * short**2 + 8.0 * short**3 + 2.0 * long * short**2
        blocks = symmetric_blocks(short, platform)
        symmetric = (blocks + 1) / (2 * blocks)
        if method == "newton_schulz":
            return newton_schulz_flops(short, long, self.coefficients, symmetric)
        restarts = self._restarts(self.matmul_dtype(jnp.float32, platform), short)
        return sum(gram_flops(short, long, self.coefficients, restarts, symmetric))

    def chunk(self, m: int, n: int, platform: str | None = None) -> int:
        """How many matrices of this shape to orthogonalise at a time, at least 1."""
        return matrices_at_a_time(m, n, platform)


@functools.cache
def _warn_unsafe(restarts: tuple[int, ...], dtype: str, slope: int, schedule: tuple[int, ...]) -> None:
    warnings.warn(
        f"Orthogonalizer: method='gram_newton_schulz' with restarts={restarts} and {dtype} products "
        "amplifies rounding by a "
        f"slope of {slope} between restarts; on some spectra singular values leave the band or overflow. "
        "Leave restarts=None "
        f"(here {schedule}), or take method='newton_schulz'.",
        stacklevel=4,
    )


@functools.cache
def _check_room(coefficients: Coefficients, start: float, dtype: str) -> None:
    # Above 1.2 of all published sets: none with float32, CANS alone with narrow products.
    unit = float(jnp.finfo(dtype).eps) / 2
    exact, reached = (largest_value(coefficients, start, rounding) for rounding in (0.0, unit))
    if reached <= 1.2 * exact:
        return
    warnings.warn(
        f"Orthogonalizer: coefficients={coefficients!r} leave no room for the rounding of {dtype} products: "
        f"singular values that should end below {exact:.3g} can reach {reached:.3g}. "
        "Write compute_dtype='float32', or take coefficients with a cushion, such as POLAR_EXPRESS_5 or "
        "polar_express(5).",
        stacklevel=4,
    )


def _check_option(name: str, value: Any, options: tuple[str, ...]) -> None:
    if value not in options:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(
            f"Orthogonalizer: {name}={value!r} is unknown. Write one of {', '.join(map(repr, options))}."
        )


def _as_coefficients(value: Any) -> Coefficients:
    try:
        triples = tuple(tuple(triple) for triple in value)
    except TypeError:
        raise TypeError(
            f"Orthogonalizer: coefficients={value!r} is not a sequence of triples. Write one triple (a, b, "
            "c) per step, for "
            "example KELLER or ((3.4445, -4.775, 2.0315),) * 5."
        ) from None
    if not triples:
        raise ValueError(
            "Orthogonalizer: coefficients is empty. Write one triple (a, b, c) per step, for example KELLER."
        )
    for step, triple in enumerate(triples):
        if len(triple) != 3:
            raise ValueError(
                f"Orthogonalizer: coefficients[{step}]={triple!r} has {len(triple)} numbers, but a step is a "
                "triple (a, b, c) "
                "for a s + b s³ + c s⁵; write c = 0 for a cubic step."
            )
        for x in triple:
            if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating):
                raise TypeError(
                    f"Orthogonalizer: coefficients[{step}]={triple!r} must hold Python or NumPy numbers."
                )
            if not math.isfinite(x):
                raise ValueError(f"Orthogonalizer: coefficients[{step}]={triple!r} must be finite.")
    return tuple((float(a), float(b), float(c)) for a, b, c in triples)


def _as_compute_dtype(value: Any) -> str:
    if isinstance(value, str) and value == "auto":
        return value
    try:
        name = jnp.dtype(value).name
    except TypeError:
        name = None
    if value is None or name not in _COMPUTE_DTYPES:
        hint = " float64 arrays are multiplied in float64 under 'auto'." if name == "float64" else ""
        options = ", ".join(map(repr, ("auto", *_COMPUTE_DTYPES)))
        raise ValueError(
            f"Orthogonalizer: compute_dtype={value!r} is not supported. Write one of {options}.{hint}"
        )
    return name


def _as_precision(value: Any) -> str:
    name = value.name.lower() if isinstance(value, jax.lax.Precision) else value
    _check_option("precision", name, _PRECISIONS)
    return name


def _as_restarts(value: Any, method: str, steps: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    if method not in ("auto", "gram_newton_schulz"):
        raise ValueError(
            f"Orthogonalizer: restarts={value!r} belong to method='gram_newton_schulz', not to {method!r}."
        )
    try:
        restarts = tuple(value)
    except TypeError:
        raise TypeError(
            f"Orthogonalizer: restarts={value!r} must be a tuple of steps, for example (1, 3)."
        ) from None
    for step in restarts:
        if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step < steps:
            raise ValueError(
                f"Orthogonalizer: restarts={value!r} must hold steps from 1 to {steps - 1}: the iteration of "
                f"{steps} steps "
                "starts anew before each of them."
            )
    if list(restarts) != sorted(set(restarts)):
        raise ValueError(f"Orthogonalizer: restarts={value!r} must increase.")
    return restarts
