"""What `import optax_muon` costs beyond `import optax`: fresh interpreters, in turn, medians."""

import argparse
import subprocess
import sys

import record


def fresh(statement: str):
    def run() -> None:
        subprocess.run([sys.executable, "-c", statement], check=True)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    times = record.interleaved(
        {"optax": fresh("import optax"), "optax_muon": fresh("import optax; import optax_muon")}, rounds
    )
    beyond = times["optax_muon"]["median_s"] - times["optax"]["median_s"]
    record.write("import", [{"benchmark": "import", "beyond_optax_s": beyond, **times}])


if __name__ == "__main__":
    main()
