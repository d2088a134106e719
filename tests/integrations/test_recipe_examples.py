"""The examples on mixtures of experts and on fine-tuning run at toy size and say what Muon got."""

import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]


def run(name, *arguments):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


TOY = ("--layers", 1, "--width", 32, "--heads", 2, "--context", 32, "--sequences", 4, "--eval-batches", 1)


def test_mixture_of_experts(tmp_path):
    experts = ("--experts", 4, "--expert-width", 16, "--rank", 8, "--nope", 8, "--rope", 8, "--value", 8)
    out = run("train_moe.py", *TOY, *experts, "--steps", 12, "--threshold", 0.5, "--out", tmp_path)
    assert re.search(r"experts/up .*muon", out)
    runs = json.loads((tmp_path / "train_moe.json").read_text())["runs"]
    rms = {name: np.asarray(several[0]["update_rms"])[5] for name, several in runs.items()}
    assert rms["kimi_k2"].shape == (1, 4)
    # Muon moves every expert alike; AdamW by what its tokens give it. Measured 1.04 and 1.5.
    assert rms["kimi_k2"].max() / rms["kimi_k2"].min() < 1.3
    assert (tmp_path / "train_moe.png").read_bytes().startswith(b"\x89PNG")


def test_fine_tuning(tmp_path):
    out = run(
        "finetune_lora.py",
        *TOY,
        "--steps",
        4,
        "--pretrain-steps",
        6,
        "--rank",
        2,
        "--rates",
        1,
        "--out",
        tmp_path,
    )
    assert "Caveat: optimizer mismatch" in out
    results = json.loads((tmp_path / "finetune_lora.json").read_text())["results"]
    assert len(results) == 2 * (1 + 4)
    leaves = {(r["how"], r["finetuned"]): r.get("muon_leaves") for r in results if r["how"] != "none"}
    # 6 matrices of the block; a and b beside query, key and value.
    assert leaves == {("full", "adamw"): 0, ("full", "muon"): 6, ("lora", "adamw"): 0, ("lora", "muon"): 6}
    assert all(r["new"] < 5.6 for r in results)
