"""Gradient accumulation in which the optimizer runs once per window, not once per gradient."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import AxisType

from optax_muon.parameters import leaf_paths
from optax_muon.sharding import reshard_like, zeros_like_param
from optax_muon.transforms._checks import check_float_dtype
from optax_muon.transforms._momentum import on_mesh_of


class AccumulateGradientsState(NamedTuple):
    """State of `accumulate_gradients`.

    Attributes:
      micro_step: int32 scalar, gradients in the mean so far; 0 directly after an update.
      step: int32 scalar, updates done so far.
      mean: mean of the gradients of this window, of the parameters' structure, shapes and shardings.
      inner_state: state of the optimizer, untouched between updates.
    """

    micro_step: jax.Array
    step: jax.Array
    mean: Any
    inner_state: Any


def accumulate_gradients(
    optimizer: optax.GradientTransformation,
    every: int | Callable[[jax.Array], Any],
    *,
    dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages the gradients of `every` micro-steps and then updates once.

    Formula, for micro-step k = 0 ... every - 1 of a window with gradient g_k:

        mean <- mean + (g_k - mean) / (k + 1)
        update = optimizer(mean) at the last micro-step, and exactly zero before it

    As `optax.MultiSteps`, but the optimizer sits in a loop that only the last micro-step of a window enters
    (once): the others pay for the mean alone. (`optax.MultiSteps` computes every update in full and throws it
    away, which for Muon is most of the cost of a step.)

    Args:
      optimizer: any transformation. It sees the mean in the dtype of the gradients; params and extra
        arguments of `update` are passed on at the last micro-step of a window.
      every: number of micro-steps per update, at least 1; or a function of the number of updates so far.
      dtype: floating dtype of the mean; None for the parameter's, but at least float32 (a mean of bfloat16
        gradients kept in bfloat16 loses the later ones).

    Returns:
      A `GradientTransformationExtraArgs` with state `AccumulateGradientsState`: beside the optimizer's own,
      one gradient tree, sharded as the parameters, and two counters. Updates have the dtypes and shardings
      that the optimizer gives them.

    Raises:
      ValueError, TypeError: `every` is no positive integer, or `optimizer` no transformation; at `update` for
        gradients of other shapes than the parameters'.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from optax_muon import accumulate_gradients, muon
      >>> optimizer = accumulate_gradients(muon(1e-2), every=4)
      >>> params = {"dense": {"kernel": jnp.eye(4)}}
      >>> state = optimizer.init(params)
      >>> for _ in range(3):
      ...     updates, state = optimizer.update(params, state, params)
      >>> int(state.micro_step), float(abs(updates["dense"]["kernel"]).max())
      (3, 0.0)
      >>> updates, state = optimizer.update(params, state, params)
      >>> int(state.step), bool(abs(updates["dense"]["kernel"]).max() > 0)
      (1, True)

    Note:
      A schedule of the optimizer counts updates, not micro-steps. A gradient that is not finite makes this
      window's update not finite, and the next window starts anew; to drop such a gradient instead, put
      `optax.apply_if_finite` around the whole. Under `jit` an update cannot be differentiated in reverse.

    References:
      optax.MultiSteps.
    """
    _check(optimizer, every)
    check_float_dtype("dtype", dtype)
    inner = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> AccumulateGradientsState:
        inner_state = inner.init(params)  # first, for its message about a leaf that is no array
        return AccumulateGradientsState(
            micro_step=on_mesh_of(jnp.zeros([], jnp.int32), params),
            step=on_mesh_of(jnp.zeros([], jnp.int32), params),
            mean=jax.tree.map(lambda p: _zero_mean(p, dtype), params),
            inner_state=inner_state,
        )

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        _check_shapes(updates, state)
        window = every(state.step) if callable(every) else every

        last = state.micro_step + 1 >= window
        means = jax.tree.unflatten(jax.tree.structure(state.mean), _means(updates, state))

        def finish(means: Any, inner_state: Any):
            result, after = inner.update(_as_gradients(means, updates), inner_state, params, **extra_args)
            return result, jax.tree.map(jnp.zeros_like, means), jax.tree.map(_as_before, after, inner_state)

        result, *_ = jax.eval_shape(finish, means, state.inner_state)
        carry = (_no_update(result, updates), means, state.inner_state)
        if isinstance(last, Tracer):
            carry = _at_most_once(last, finish, carry)
        elif last:  # a loop outside jit would be compiled anew at every call
            carry = finish(*carry[1:])
        return carry[0], AccumulateGradientsState(
            micro_step=jnp.where(last, 0, optax.safe_increment(state.micro_step)),
            step=jnp.where(last, optax.safe_increment(state.step), state.step),
            mean=carry[1],
            inner_state=carry[2],
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _check(optimizer: Any, every: Any) -> None:
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"accumulate_gradients: optimizer must be an optax.GradientTransformation, got {optimizer!r}."
        )
    if callable(every) or isinstance(every, jax.Array):
        return
    try:
        number = None if isinstance(every, bool) else operator.index(every)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(
            f"accumulate_gradients: every must be an integer, or a function of the number of updates, "
            f"got {every!r}."
        )
    if number < 1:
        raise ValueError(f"accumulate_gradients: every must be at least 1, got {every!r}.")


def _zero_mean(param: Any, dtype: Any) -> jax.Array:
    """Zeros of the parameter's shape; of no size for a leaf that is not trained."""
    own = jnp.result_type(param)
    if not jnp.issubdtype(own, jnp.inexact):
        return jnp.zeros((0,), jnp.float32)
    return zeros_like_param(param, dtype or jnp.promote_types(own, jnp.float32))


def _is_kept(mean: jax.Array, gradient: Any) -> bool:
    """Whether the leaf has a mean: see `_zero_mean`."""
    return mean.shape == jnp.shape(gradient)


def _check_shapes(updates: Any, state: AccumulateGradientsState) -> None:
    """Raises unless gradients and means have the same leaves and shapes."""
    gradients, means = jax.tree.leaves(updates), jax.tree.leaves(state.mean)
    if len(gradients) != len(means):
        theirs, ours = set(leaf_paths(updates)), set(leaf_paths(state.mean))
        odd = ", ".join(f"`{path}`" for path in sorted(theirs ^ ours)) or "other leaves"
        raise ValueError(
            f"accumulate_gradients was initialised with {len(means)} parameters, but this update has "
            f"{len(gradients)} gradients; they differ in {odd}. Call init on the parameters that are trained."
        )
    for path, g, m in zip(leaf_paths(updates), gradients, means, strict=True):
        if not _is_kept(m, g) and m.shape != (0,):  # optax #515
            raise ValueError(
                f"`{path}` has shape {m.shape}, but its gradient has shape {jnp.shape(g)}. Average "
                f"per-example gradients before the update."
            )


def _means(updates: Any, state: AccumulateGradientsState) -> list[jax.Array]:
    """The means with this micro-step's gradients in them."""

    def add(g: Any, m: jax.Array) -> jax.Array:
        if not _is_kept(m, g):
            return m
        return m + (reshard_like(jnp.asarray(g), m).astype(m.dtype) - m) / count.astype(m.dtype)

    count = state.micro_step + 1
    return [add(g, m) for g, m in zip(jax.tree.leaves(updates), jax.tree.leaves(state.mean), strict=True)]


def _as_gradients(means: Any, updates: Any) -> Any:
    """The means as the optimizer gets them: in the dtype of the gradients, as it would without us."""
    leaves, treedef = jax.tree.flatten(updates)
    pairs = zip(leaves, jax.tree.leaves(means), strict=True)
    return treedef.unflatten([m.astype(jnp.result_type(g)) if _is_kept(m, g) else g for g, m in pairs])


def _at_most_once(wanted: jax.Array, step: Callable[..., Any], carry: tuple[Any, ...]) -> tuple[Any, ...]:
    """`step` on all but the first of the carry, if wanted.

    A loop of no or one turn and not a `lax.cond`, whose results XLA never puts where its operands are: the
    optimizer's state would be copied at every micro-step, and be there twice.
    """
    turn = lambda c: (jnp.zeros_like(c[0]), *step(*c[2:]))
    return jax.lax.while_loop(lambda c: c[0], turn, (wanted, *carry))[1:]


def _as_before(new: Any, old: Any) -> jax.Array:
    """The new state in the dtype and sharding of the old: some optimizers drift (optax #1039, #1122)."""
    new, old = jnp.asarray(new), jnp.asarray(old)
    return reshard_like(new if new.dtype == old.dtype else new.astype(old.dtype), old)


def _no_update(result: Any, updates: Any) -> Any:
    """Zeros of the types that the optimizer's update would have."""

    def zeros(r: jax.ShapeDtypeStruct, g: Any) -> jax.Array:
        if r.shape != jnp.shape(g) or jnp.result_type(g) == jax.dtypes.float0:
            return jnp.zeros(r.shape, r.dtype)
        like = jnp.zeros_like(g, dtype=r.dtype)
        mine = jax.typeof(like).sharding
        explicit = r.sharding is not None and AxisType.Explicit in mine.mesh.axis_types
        return jax.sharding.reshard(like, r.sharding) if explicit and r.sharding != mine else like

    leaves, treedef = jax.tree.flatten(result)
    return treedef.unflatten([zeros(r, g) for r, g in zip(leaves, jax.tree.leaves(updates), strict=True)])
