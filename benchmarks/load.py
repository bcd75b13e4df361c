"""Time to load a checkpoint folder from safetensors and from Orbax, side by side.

Each load runs in a process of its own (so that the peak of resident memory is its own), the two
formats in turn (so that both see the same machine), files warm in the page cache; the table gives
medians and the spread. CPU seconds count all threads. Run from the repository:

    python benchmarks/load.py demo
    python benchmarks/load.py FOLDER --kind drafter --runs 5
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# Run by every child: seconds from call to last byte on the device, and memory beyond the idle
# process with a started backend.
_CHILD = """
import json, pathlib, sys, time
import jax
from dflash_jax.weights import match
from dflash_jax.weights.load import load_drafter, load_target

def peak_kb():
    # VmHWM starts anew in a new program; getrusage's maximum is inherited from the parent.
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


folder, kind, dtype = sys.argv[1:]
jax.block_until_ready(jax.device_put(0.0))
idle = peak_kb()
start, busy = time.perf_counter(), time.process_time()
model = (load_target if kind == "target" else load_drafter)(folder, dtype=dtype)
seconds, busy = time.perf_counter() - start, time.process_time() - busy
peak = peak_kb()
nbytes = sum(array.nbytes for array in match.parameters(model).values())
print(json.dumps({"seconds": seconds, "cpu": busy, "peak_mb": (peak - idle) / 1e3,
                  "model_mb": nbytes / 1e6}))
"""


def measure(folder: Path, kind: str, dtype: str) -> dict[str, float]:
    """One load in a fresh process."""
    command = [sys.executable, "-c", _CHILD, str(folder), kind, dtype]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def row(name: str, runs: list[dict[str, float]]) -> str:
    """One line of the table: median, fastest and slowest seconds; median CPU time and memory."""
    seconds = [run["seconds"] for run in runs]
    cpu, peak, model = (
        statistics.median(run[key] for run in runs) for key in ("cpu", "peak_mb", "model_mb")
    )
    spread = f"{min(seconds):.2f} - {max(seconds):.2f}"
    return (
        f"| {name} | {statistics.median(seconds):.2f} | {spread} | {cpu:.2f} | {model:.0f} | "
        f"{peak:.0f} | {peak / model:.2f} |"
    )


def main() -> None:
    """Converts the folder once into a temporary one, then times both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder in Hugging Face layout, hub id or 'demo'")
    parser.add_argument("--kind", choices=("target", "drafter"), default="target")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()

    from dflash_jax.weights.convert import convert
    from dflash_jax.weights.hub import resolve_model

    source = resolve_model(args.model, kind=args.kind)
    print("| format | seconds | fastest - slowest | CPU s | model MB | peak MB | peak / model |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        other = convert(source, Path(scratch) / "orbax", args.kind)
        folders = {"safetensors": source, "orbax": other}
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
        for _ in range(args.runs):
            for name, folder in folders.items():
                runs[name].append(measure(folder, args.kind, args.dtype))
        for name in folders:
            print(row(name, runs[name]))


if __name__ == "__main__":
    main()
