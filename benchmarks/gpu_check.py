"""Everything worth knowing about a lent GPU, in one run with a deadline.

Rows run in order, each is printed as it ends, a table comes last; what was not reached says so.
With $OUT set, the results are also written there (JSON and a Markdown table) after every row. Run
from the repository; `--planner` checks the memory plan instead; `--tiny` tries the script itself,
on a CPU too:

    python benchmarks/gpu_check.py --deadline 300
    python benchmarks/gpu_check.py --planner --deadline 240
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gpu_invariants
import gpu_planner
import gpu_shapes
import jax
import jax.numpy as jnp
from gpu_invariants import Case
from gpu_shapes import Rates
from measure import race, streaming_bandwidth

NOT_REACHED = "not reached"

Figures = dict[str, Any]


class Row(NamedTuple):
    """One line of the result; `run` is given the figures of the rows before it."""

    name: str
    run: Callable[[dict[str, Figures]], Figures]
    precision: str | None = None


class Results:
    """What is known so far, and where it is written; one writer at a time."""

    def __init__(self, names: list[str]):
        self.figures: dict[str, Figures] = {}
        self.status = dict.fromkeys(names, NOT_REACHED)
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def begin(self, name: str) -> None:
        self.status[name] = "cut off by the deadline"
        print(f"{name} ...", flush=True)

    def end(self, name: str, status: str, figures: Figures, seconds: float) -> None:
        with self._lock:
            self.status[name], self.figures[name] = status, figures
            self.seconds[name] = seconds
            print(f"  {status}, {seconds:.1f} s: {_line(figures)}", flush=True)
            self._write()

    def close(self) -> bool:
        """Prints the table and says whether no row failed."""
        with self._lock:
            self._write()
            print("\n" + self.table(), flush=True)
        return not any(status.startswith("FAILED") for status in self.status.values())

    def table(self) -> str:
        lines = ["| row | status | seconds | figures |", "|---|---|---|---|"]
        for name, status in self.status.items():
            seconds = f"{self.seconds[name]:.1f}" if name in self.seconds else ""
            figures = _line(self.figures.get(name, {}))
            lines.append(f"| {name} | {status} | {seconds} | {figures} |")
        return "\n".join(lines)

    def _write(self) -> None:
        if not os.environ.get("OUT"):
            return
        folder = Path(os.environ["OUT"])
        document = {
            name: {"status": status, **self.figures.get(name, {})}
            for name, status in self.status.items()
        }
        (folder / "gpu_check.json").write_text(json.dumps(document, indent=2, default=str))
        (folder / "gpu_check.md").write_text(self.table() + "\n")


def _line(figures: Figures) -> str:
    return "; ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in figures.items()
    ).replace("|", "/")


def device(_: dict[str, Figures]) -> Figures:
    """Which device, which versions, and what it says about its memory."""
    one = jax.devices()[0]
    found: Figures = {"platform": one.platform, "kind": one.device_kind, "jax": jax.__version__}
    stats = one.memory_stats()
    return found | ({"memory_stats": None} if stats is None else dict(stats))


def bandwidth(megabytes: int) -> Callable[[dict[str, Figures]], Figures]:
    def row(_: dict[str, Figures]) -> Figures:
        rates = streaming_bandwidth(megabytes=megabytes, repeats=10)
        return {f"{name} GB/s": rate / 1e9 for name, rate in rates.items()}

    return row


def matmul_rate(size: int, dtype: str) -> Callable[[dict[str, Figures]], Figures]:
    def row(_: dict[str, Figures]) -> Figures:
        matrix = jnp.ones((size, size), jnp.dtype(dtype))
        program = jax.jit(lambda a, b: a @ b)
        taken = race({"product": lambda: jax.block_until_ready(program(matrix, matrix))}, 10)
        return {"Tflop/s": 2e-12 * size**3 / min(taken["product"])}

    return row


def measured_rates(before: dict[str, Figures], dtype: str) -> Rates | None:
    """The best of the rows above; None where one of them failed."""
    streaming, products = before.get("bandwidth", {}), before.get(f"matmul {dtype}", {})
    if not streaming or "Tflop/s" not in products:
        return None
    return Rates(1e9 * max(streaming.values()), 1e12 * products["Tflop/s"])


def check_rows(cases: tuple[Case, ...]) -> list[Row]:
    """Golden pairs and invariants; float32 products are exact ones, not TF32."""
    checks: dict[str, Callable[[Case], Figures]] = {
        "golden": gpu_invariants.golden,
        "invariant 1, lossless": gpu_invariants.lossless,
        "invariant 2, context": gpu_invariants.context_is_exact,
        "invariant 6, no copies": gpu_invariants.no_copies,
        "invariant 7, no compiles": gpu_invariants.no_compiles,
    }
    return [
        Row(
            f"{title}: {case.pair}, {case.dtype}",
            lambda _, check=check, case=case: check(case),
            "highest" if case.dtype == "float32" else None,
        )
        for case in cases
        for title, check in checks.items()
    ]


def shape_rows(name: str, contexts: tuple[int, ...], batches: tuple[int, ...]) -> list[Row]:
    dtype = "bfloat16"
    rows = [Row(f"{name} weights", lambda _: gpu_shapes.weights(name, dtype))]
    for batch in batches:
        for context in contexts:

            def run(before: dict[str, Figures], batch=batch, context=context) -> Figures:
                rates = measured_rates(before, dtype)
                return gpu_shapes.timings(name, dtype, batch, context, rates)

            rows.append(Row(f"{name}, batch {batch}, context {context}", run))
    return rows


def all_rows(*, tiny: bool) -> list[Row]:
    """The order is that of worth: a run that is cut off has the first ones."""
    size = 256 if tiny else 8192
    rows = [
        Row("device", device),
        Row("bandwidth", bandwidth(8 if tiny else 4096)),
        Row("matmul bfloat16", matmul_rate(size, "bfloat16")),
        Row("matmul float32", matmul_rate(size, "float32"), "highest"),
    ]
    if tiny:
        return (
            rows + check_rows((Case("qwen3-tiny", "float32", 1),)) + shape_rows("tiny", (32,), (1,))
        )
    pairs, dtypes = ("qwen3-tiny", "llama-tiny"), ("float32", "bfloat16")
    checks = check_rows(tuple(Case(pair, dtype, 2) for dtype in dtypes for pair in pairs))
    return rows + checks + shape_rows("Qwen3-8B", (1024, 8192), (1, 8))


def planner_rows(*, tiny: bool) -> list[Row]:
    """A device plans by its own figures; the small ones by a memory that is given."""
    small = {"layers": 4, "max_seq_len": 256, "device_memory": "6150MiB"}
    sizes = small if tiny else {"layers": 32, "max_seq_len": 32768}

    def boots(_: dict[str, Figures]) -> Figures:
        with tempfile.TemporaryDirectory() as folder:
            return gpu_planner.largest_boots(Path(folder), **sizes)

    return [Row("device", device), Row("planner: the largest batch boots", boots)]


def run_row(row: Row, results: Results) -> None:
    results.begin(row.name)
    begun = time.monotonic()
    # Programs compile in threads, which a context manager would not reach.
    jax.config.update("jax_default_matmul_precision", row.precision)
    try:
        status, figures = "passed", row.run(results.figures)
    except Exception as error:
        traceback.print_exc()
        status, figures = f"FAILED: {type(error).__name__}: {error}".splitlines()[0][:300], {}
    results.end(row.name, status, figures, time.monotonic() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description="One ordered run of all device checks.")
    parser.add_argument("--deadline", type=float, default=300, help="seconds for everything")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--planner", action="store_true", help="the memory plan's rows instead")
    args = parser.parse_args()
    rows = planner_rows(tiny=args.tiny) if args.planner else all_rows(tiny=args.tiny)
    results = Results([row.name for row in rows])

    def stop() -> None:
        results.close()
        os._exit(3)  # a compiler in progress cannot be interrupted

    watch = threading.Timer(args.deadline, stop)
    watch.daemon = True
    watch.start()
    for row in rows:
        run_row(row, results)
    watch.cancel()
    sys.exit(0 if results.close() else 1)


if __name__ == "__main__":
    main()
