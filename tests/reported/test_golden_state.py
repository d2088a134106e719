"""A state that release 0.1.0 saved is loaded and goes on as it did then.

`python tests/reported/test_golden_state.py` (with the repository on the path) wrote the file. It is never
written again: a change that breaks this test breaks the checkpoints of users, and needs a migration.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_muon import muon

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "state_0_1_0.npz"


def tree(seed):
    rng = np.random.default_rng(seed)
    shapes = {"attention": {"query": {"kernel": (8, 2, 4), "bias": (2, 4)}}, "embed": {"embedding": (16, 8)}}
    make = lambda s: jnp.asarray(rng.normal(size=s), jnp.float32)
    return jax.tree.map(make, shapes, is_leaf=lambda x: isinstance(x, tuple))


def optimizer():
    return optax.chain(optax.clip_by_global_norm(1.0), muon(optax.constant_schedule(1e-2)))


def named(tree):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in flat}


def test_a_state_of_0_1_0_goes_on():  # google-research/runtime-error-prediction #92; maxdiffusion #484
    saved = dict(np.load(GOLDEN))
    params, tx = tree(0), optimizer()
    fresh = named(tx.init(params))
    in_file = {k.removeprefix("state/"): v for k, v in saved.items() if k.startswith("state/")}
    assert {k: (v.shape, v.dtype) for k, v in in_file.items()} == {
        k: (v.shape, v.dtype) for k, v in fresh.items()
    }
    state = jax.tree.unflatten(jax.tree.structure(tx.init(params)), [jnp.asarray(in_file[k]) for k in fresh])
    updates, _ = tx.update(tree(3), state, params)
    for path, update in named(updates).items():
        # measured 0 on the machine that wrote it; bound 1e-6 for others
        np.testing.assert_allclose(update, saved[f"update/{path}"], rtol=1e-4, atol=1e-6)
    moved = updates["attention"]["query"]["kernel"] + 1e-3 * params["attention"]["query"]["kernel"]
    assert np.linalg.matrix_rank(moved.reshape(8, 8)) == 8


def write():
    params, tx = tree(0), optimizer()
    state = tx.init(params)
    for seed in (1, 2):
        _, state = tx.update(tree(seed), state, params)
    out = {f"state/{k}": v for k, v in named(state).items()}
    updates, _ = tx.update(tree(3), state, params)
    np.savez(GOLDEN, **out, **{f"update/{k}": v for k, v in named(updates).items()})


if __name__ == "__main__":
    write()
