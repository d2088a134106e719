"""The GPT of train_gpt.py on a (data, model) mesh: Explicit axes, ZeRO-1, a checkpoint, another mesh.

    python examples/train_gpt_sharded.py --devices 8 --mesh 4 2         # 8 CPU devices; saves runs/sharded
    python examples/train_gpt_sharded.py --devices 8 --mesh 2 4 --resume --steps 60
    python examples/train_gpt_sharded.py --devices 8 --processes 2      # the same run in two real processes

On a machine with GPUs or TPUs leave out --devices. `optax_muon.muon` is told nothing about the mesh: it reads
the shardings of the arrays. What one run prints does not depend on the mesh or the number of processes.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import optax
from corpus import batch, load
from flax import nnx
from gpt import GPT, Config
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

import optax_muon

# Columns of the maps into a head or a hidden unit and rows of the maps out of it lie on the `model` axis.
# Everything else is replicated, and the batch lies on `data`.
SPECS = {
    r".*/(query|key|value|up)/kernel": PartitionSpec(None, "model"),
    r".*/(out|down)/kernel": PartitionSpec("model", None),
}


def shardings(params, mesh: jax.sharding.Mesh):
    """A NamedSharding for each leaf, by its path."""

    def of(path, leaf) -> NamedSharding:
        del leaf
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        return NamedSharding(
            mesh, next((s for pattern, s in SPECS.items() if re.fullmatch(pattern, name)), PartitionSpec())
        )

    return jax.tree_util.tree_map_with_path(of, params)


class Trainer:
    """Model, optimizer and their layout; the arrays travel through its functions."""

    def __init__(self, config: Config, learning_rate: float, mesh: jax.sharding.Mesh):
        rise = optax.linear_schedule(0.0, learning_rate, 5)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax_muon.muon(rise))
        self.mesh = mesh
        make = lambda: GPT(config, nnx.Rngs(0))
        self.graph = nnx.graphdef(nnx.eval_shape(make))
        initial = lambda: nnx.state(make(), nnx.Param)

        shapes = jax.eval_shape(initial)
        self.init_params = jax.jit(initial, out_shardings=shardings(shapes, mesh))
        self.params = placed(shapes, shardings(shapes, mesh))
        # ZeRO-1: each replica of a parameter keeps one part of its momentum and of AdamW's moments.
        state_shardings = optax_muon.state_shardings(self.optimizer, self.params, shard_over="data")
        self.init_state = jax.jit(self.optimizer.init, out_shardings=state_shardings)
        self.state = placed(jax.eval_shape(self.optimizer.init, self.params), state_shardings)
        self.step = jax.jit(self._step, donate_argnums=(0, 1))

    def _loss(self, params, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(self.graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def _step(self, params, state, tokens: jax.Array):
        loss, gradients = jax.value_and_grad(self._loss)(params, tokens)
        updates, state = self.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def on_mesh(self, tokens: np.ndarray) -> jax.Array:
        """Every process makes the whole batch and gives its devices their rows."""
        rows = NamedSharding(self.mesh, PartitionSpec("data"))
        return jax.make_array_from_callback(tokens.shape, rows, lambda index: tokens[index])


def placed(shapes, where):
    """Abstract arrays with shardings: what Orbax restores onto."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where)


def train(arguments: argparse.Namespace) -> None:
    import orbax.checkpoint as ocp

    count = jax.device_count()
    shape = tuple(arguments.mesh or ((count // 2, 2) if count % 2 == 0 else (count, 1)))
    mesh = jax.make_mesh(shape, ("data", "model"))
    leader = jax.process_index() == 0
    corpus = load()
    config = Config(
        width=arguments.width,
        heads=arguments.heads,
        layers=arguments.layers,
        context=arguments.context,
        residual=PartitionSpec("data"),
    )
    checkpoint = (arguments.out / "checkpoint").absolute()
    with jax.set_mesh(mesh), ocp.StandardCheckpointer() as checkpointer:
        trainer = Trainer(config, arguments.learning_rate, mesh)
        if arguments.resume:
            saved = {"params": trainer.params, "state": trainer.state, "step": 0}
            saved = checkpointer.restore(checkpoint, saved)
            params, state, first = saved["params"], saved["state"], int(saved["step"])
        else:
            params = trainer.init_params()
            state, first = trainer.init_state(params), 0
        if leader:
            print(optax_muon.describe(params))
            print(f"\n{corpus}\nmesh {dict(mesh.shape)}, {jax.process_count()} processes, from step {first}")
        losses = []
        for step in tqdm(range(first, arguments.steps), disable=not leader):
            tokens = batch(corpus.train, 0, step, arguments.sequences, config.context)
            params, state, loss = trainer.step(params, state, trainer.on_mesh(tokens))
            losses.append(float(loss))
        checkpointer.save(checkpoint, {"params": params, "state": state, "step": arguments.steps}, force=True)
    if leader:
        print(f"loss {losses[0]:.4f} at step {first}, {losses[-1]:.4f} at step {arguments.steps - 1}")
        record = {"mesh": shape, "processes": jax.process_count(), "first_step": first, "loss": losses}
        (arguments.out / "train_gpt_sharded.json").write_text(json.dumps(record))


def launch(processes: int) -> int:
    """Starts this command once per process, joined over the loopback address; the worst exit status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, *sys.argv, "--coordinator", address, "--process-id"]
    children = [subprocess.Popen([*command, str(index)]) for index in range(processes)]
    return max(abs(child.wait()) for child in children)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, help="CPU devices to simulate, over all processes")
    parser.add_argument("--mesh", type=int, nargs=2, metavar=("DATA", "MODEL"))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint under --out")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/sharded"), metavar="DIR")
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--process-id", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.processes > 1 and arguments.coordinator is None:
        sys.exit(launch(arguments.processes))
    if arguments.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.devices // arguments.processes)
    if arguments.coordinator:
        jax.distributed.initialize(arguments.coordinator, arguments.processes, arguments.process_id)
    train(arguments)


if __name__ == "__main__":
    main()
