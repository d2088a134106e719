"""One process of a two-process run on the loopback address; `test_processes.py` starts both.

Writes to standard output the largest difference of its shards from the result of a loop on one device.
"""

import sys

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

from tests.sharding import trees


def main(rank, port):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    if len(jax.devices()) != 8 or len(jax.local_devices()) != 4:
        raise RuntimeError(f"{len(jax.local_devices())} of {len(jax.devices())} devices are mine, not 4 of 8")
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.default_device(jax.local_devices()[0]):
        plain = [np.asarray(x) for x in trees.leaves()]
        want = [np.asarray(y) for y in trees.loop(plain)]
    specs = trees.mixed_layout({"a": 4, "b": 2}, "a", "b")
    xs = [
        jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index, x=x: x[index])
        for x, spec in zip(plain, specs, strict=True)
    ]
    got = jax.jit(trees.ours)(xs)
    differences = [
        float(np.abs(np.asarray(shard.data) - y[shard.index]).max())
        for x, y in zip(got, want, strict=True)
        for shard in x.addressable_shards
    ]
    print(max(differences))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
