"""Two processes of four devices give what one process of eight gives, and what one device gives."""

import os
import pathlib
import socket
import subprocess
import sys

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


def test_two_processes_of_four_devices():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    root = pathlib.Path(__file__).parents[2]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sharding.one_of_two_processes", str(rank), port],
            cwd=root,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outcomes = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (out, err) in zip(started, outcomes, strict=True):
        assert process.returncode == 0, err[-3000:]
        assert float(out.split()[-1]) < 1e-5  # measured 1.1e-6
