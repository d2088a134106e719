"""Optimizer states of other optimizers and other configurations, as the state of this one.

Public as `optax_muon.checkpoints`. Nothing here reads files: Orbax, msgpack or NumPy do that. Every function
takes arrays and returns the state that `optimizer.init(params)` would make, filled with them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from optax_muon import _moments as moments
from optax_muon._moments import Initable, Moments
from optax_muon._muon import Muon
from optax_muon.parameters import Decision, MatrixView, Rule, decide, from_matrices, leaf_paths
from optax_muon.transforms._momentum import is_momentum, read_momentum

__all__ = ["adapt", "from_adamw", "from_optax_contrib", "from_torch", "to_optax_contrib"]


def adapt(state: Any, optimizer: Initable, params: Any) -> Any:
    """A state saved under another configuration, as the state of this optimizer.

    A leaf that both have is taken bit for bit, cast to the dtype that this optimizer keeps (momentum in
    float32, bfloat16 or int8). A leaf that only this optimizer has, because a parameter was re-routed between
    Muon and AdamW, is as `init` makes it, and a warning names it. A counter that only this optimizer has (a
    schedule in place of a number) continues at the step of the others. Orthogonalizer, coefficients, shape
    factor, rates and decay are not in the state, so a change of those alone needs no `adapt`.

    Args:
      state: of any optimizer of the same parameters, as Optax's tuples or as the dicts and lists that a
        restore without a template gives.
      optimizer: the optimizer that goes on.
      params: its parameters, as arrays.

    Returns:
      A state with the structure and dtypes of `optimizer.init(params)`. Leaves that lie on the mesh of
      `params` stay where they are (momentum cut further stays so); others go to where `init` puts them.

    Raises:
      ValueError: a leaf has another shape than this optimizer's, belongs to no parameter, or nothing fits at
      all.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax_muon
      >>> params = {"dense": {"kernel": jnp.ones((4, 4))}}
      >>> old = optax_muon.muon(1e-2).init(params)
      >>> new = optax_muon.muon(1e-2, mu_dtype=jnp.bfloat16)
      >>> state = optax_muon.checkpoints.adapt(old, new, params)
      >>> state.inner_states["muon"].inner_state[0].mu["dense"]["kernel"].dtype
      dtype(bfloat16)
    """
    name = "checkpoints.adapt"
    target = optimizer.init(params)
    flat, source = moments.flatten(target), moments.by_path(state)
    arrays = [path for path, x in source.items() if jnp.ndim(read_momentum(x))]
    moments.check_known(arrays, leaf_paths(params), name)
    step = max((int(x) for path, x in source.items() if moments.is_counter(path, x)), default=None)
    by_core = moments.unique((moments.core(path), path) for path in source)
    taken, fresh, leaves = [], [], []
    for path, leaf in flat:
        found = path if path in source else by_core.get(moments.core(path))
        if found is not None:
            leaf = moments.fitted(source[found], leaf, path)
        elif step is not None and moments.is_counter(path, leaf):
            leaf = jnp.full_like(leaf, step)
        if jnp.ndim(read_momentum(leaf)):
            (fresh if found is None else taken).append(path)
        leaves.append(leaf)
    if fresh and not taken:
        raise ValueError(
            f"{name}: no array of the state fits this optimizer, which needs {moments.listed(fresh)}; the "
            f"state has {moments.listed(arrays)}. For a state of another optimizer use from_adamw, "
            f"from_optax_contrib or from_torch."
        )
    moments.warn_fresh(name, fresh)
    return jax.tree.unflatten(jax.tree.structure(target, is_leaf=is_momentum), leaves)


def from_optax_contrib(state: Any, optimizer: Initable, params: Any) -> Any:
    """The state of `optax.contrib.muon` as the state of this optimizer, to go on in mid-run.

    Momentum is taken as it is (both keep averages), and so are the moments of AdamW leaves. A leaf that the
    peer trained with Adam and this optimizer with Muon starts from Adam's first moment, which is an average
    of gradients too. One that the peer trained with Muon and this optimizer with AdamW (embeddings and heads,
    which the peer sends to Muon) has no second moment: it starts fresh, and a warning names it.

    Args:
      state: of `optax.contrib.muon`, alone or in a chain.
      optimizer: the optimizer that goes on.
      params: its parameters, as arrays.

    Returns:
      A state with the structure, dtypes and shardings of `optimizer.init(params)`; every counter at the old
      step.

    Raises:
      ValueError: the state holds no moments, or those of other parameters or shapes; names them.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_muon
      >>> params = {"dense": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}
      >>> old = optax.contrib.muon(1e-2).init(params)
      >>> state = optax_muon.checkpoints.from_optax_contrib(old, optax_muon.muon(1e-2), params)

    Note:
      The next update is the peer's only with `nesterov='optax'`, the peer's shape factor and its AdamW
      numbers.
    """
    name = "checkpoints.from_optax_contrib"
    return moments.fill(name, moments.read(name, state, params), optimizer, params)


def to_optax_contrib(state: Any, optimizer: Initable, params: Any) -> Any:
    """The state of `muon` as the state of an `optax.contrib.muon`.

    The inverse of `from_optax_contrib`, with the same rules for leaves that the two route differently.

    Args:
      state: of `optax_muon.muon`, alone or in a chain.
      optimizer: the `optax.contrib.muon` (or a chain with it) that goes on.
      params: its parameters, as arrays.

    Returns:
      A state with the structure, dtypes and shardings of `optimizer.init(params)`.

    Raises:
      ValueError: the state holds no moments, or those of other parameters or shapes; names them.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_muon
      >>> params = {"dense": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}
      >>> old = optax_muon.muon(1e-2).init(params)
      >>> state = optax_muon.checkpoints.to_optax_contrib(old, optax.contrib.muon(1e-2), params)
    """
    name = "checkpoints.to_optax_contrib"
    return moments.fill(name, moments.read(name, state, params), optimizer, params)


def from_adamw(
    state: Any, optimizer: Initable, params: Any, *, momentum: Literal["carry", "fresh"] = "carry"
) -> Any:
    """The state of `optax.adamw` (or `adam`) as the state of this optimizer: a switch to Muon in mid-run.

    Leaves that stay with AdamW keep both moments bit for bit and its count. Matrices that go to Muon take
    Adam's first moment as their momentum, or start from zero.

    Args:
      state: of any chain with one `optax.scale_by_adam`.
      optimizer: the optimizer that goes on.
      params: its parameters, as arrays.
      momentum: 'carry' takes Adam's first moment, an average of gradients with its own decay, which Muon's
        replaces within some 20 steps; 'fresh' starts Muon's momentum at zero.

    Returns:
      A state with the structure, dtypes and shardings of `optimizer.init(params)`; every counter at the old
      step.

    Raises:
      ValueError: the state holds no moments, or those of other parameters or shapes; names them.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_muon
      >>> params = {"dense": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}
      >>> old = optax.adamw(1e-2).init(params)
      >>> state = optax_muon.checkpoints.from_adamw(old, optax_muon.muon(1e-2), params)

    Note:
      A model pre-trained with AdamW and fine-tuned with Muon was slightly worse than with AdamW throughout in
      Moonlight's own table (arXiv 2502.16982).
    """
    name = "checkpoints.from_adamw"
    if momentum not in ("carry", "fresh"):
        raise ValueError(f"{name}: momentum must be 'carry' or 'fresh', got {momentum!r}.")
    return moments.fill(name, moments.read(name, state, params), optimizer, params, momentum == "carry")


def from_torch(
    buffers: Mapping[str, Mapping[str, Any]],
    optimizer: Initable,
    params: Any,
    *,
    form: Literal["average", "sum"] = "average",
    momentum: float = 0.95,
    rules: Sequence[Rule] | None = None,
) -> Any:
    """The state of a PyTorch Muon as the state of this optimizer.

    Formula, for a momentum buffer B of a torch weight (out, in): `M = B^T` for form='average'
    (torch.optim.Muon and Keller Jordan's: `B <- mu B + (1 - mu) g`) and `M = (1 - mu) B^T` for form='sum'
    (Moonlight's: `B <- mu B + g`), then laid out by the leaf's matrix view.

    Args:
      buffers: for the slash path of each parameter here, the entry of the torch state dict of its parameter
        there, as arrays: `momentum_buffer` for Muon, `exp_avg`, `exp_avg_sq` (Moonlight: `moment1`,
        `moment2`) and `step` for AdamW. Shapes are torch's: (out, in); for a stack of layers or experts (...,
        out, in); (out, in, *kernel) for a convolution. Fused weights stay fused. Vectors and embeddings as
        they are; other AdamW matrices are transposed where only that fits.
      optimizer: the optimizer that goes on.
      params: its parameters, as arrays.
      form: what the torch optimizer stored.
      momentum: mu of the torch run; used with form='sum'.
      rules: the rules of the optimizer, where it is wrapped in a chain and does not tell them itself.

    Returns:
      A state with the structure, dtypes and shardings of `optimizer.init(params)`; every counter at `step`,
      where given.

    Raises:
      ValueError: a parameter without buffers, buffers without a parameter, or shapes that do not fit; names
      them.

    Example:
      >>> import jax.numpy as jnp, numpy as np
      >>> import optax_muon
      >>> params = {"dense": {"kernel": jnp.ones((4, 8))}}
      >>> buffers = {"dense/kernel": {"momentum_buffer": np.ones((8, 4), np.float32)}}
      >>> state = optax_muon.checkpoints.from_torch(buffers, optax_muon.muon(1e-2), params)

    References:
      torch.optim.Muon; KellerJordan/Muon; MoonshotAI/Moonlight, examples/toy_train.py.
    """
    name = "checkpoints.from_torch"
    if form not in ("average", "sum"):
        raise ValueError(f"{name}: form must be 'average' or 'sum', got {form!r}.")
    rules, labels = (
        (optimizer.config.rules, optimizer.config.param_labels)
        if isinstance(optimizer, Muon)
        else (rules, None)
    )
    table = {d.path: d for d in decide(params, rules, labels)}
    moments.check_known(buffers, table, name)
    steps = [int(np.asarray(entry["step"])) for entry in buffers.values() if "step" in entry]
    found = Moments(max(steps, default=None), {}, {})
    scale = np.float32(1 - momentum if form == "sum" else 1)
    for path, entry in buffers.items():
        get = lambda *names, entry=entry, path=path: next(
            (_as_leaf(np.asarray(entry[name]), table[path]) for name in names if name in entry), None
        )
        buffer = get("momentum_buffer")
        first, second = get("exp_avg", "moment1"), get("exp_avg_sq", "moment2")
        if buffer is not None:
            found.momentum[path] = buffer * scale
        if first is not None and second is not None:
            found.adam[path] = first, second
    return moments.fill(name, found, optimizer, params)


# --- torch's layout


def _as_leaf(x: np.ndarray, decision: Decision) -> np.ndarray:
    """A torch array in the layout of our leaf."""
    shape, view = decision.shape, decision.view
    if view is None:
        laid = x if x.shape == shape else x.T if x.shape == shape[::-1] else None
    else:
        laid = _matrix_as_leaf(x, view, shape)
    if laid is None:
        raise ValueError(
            f"`{decision.path}` has shape {shape} and a torch buffer of shape {x.shape}, which is neither "
            f"that nor (..., out, in){f' of {view}' if view else ''}. Give the buffer in torch's layout."
        )
    return np.asarray(laid, np.float32 if x.dtype != np.float64 else x.dtype)


def _matrix_as_leaf(x: np.ndarray, view: MatrixView, shape: tuple[int, ...]) -> Any:
    batch = view.batch_axes(len(shape))
    whole = MatrixView(view.reduction_axes, view.output_axes).resolve(shape)
    (sides,) = whole.matrix_shapes(shape)
    stack = tuple(shape[axis] for axis in batch)
    if x.shape == (*stack, sides.fan_out, sides.fan_in):
        matrices = jnp.asarray(x.reshape(-1, sides.fan_out, sides.fan_in)).mT
        return np.asarray(from_matrices((matrices,), whole, shape))
    if x.ndim == len(shape) > 2 and not batch:  # a convolution, (out, in, *kernel)
        if whole.output_axes == (0,) and x.shape == shape:
            return x
        moved = np.moveaxis(x, (0, 1), (-1, -2))
        if whole.output_axes == (len(shape) - 1,) and moved.shape == shape:
            return moved
    return None
