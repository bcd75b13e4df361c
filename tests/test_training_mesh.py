"""Documents divided over two virtual CPU devices train the same drafter (fault 131)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

PROGRAM = """
import csv, json, sys
from pathlib import Path
import jax, numpy as np
import tiny_training as tiny
from dflash_jax.training import step
from dflash_jax.training.trainer import train

model = tiny.target()
documents = tiny.documents(model, 8)
options = tiny.options(
    num_layers=1, steps=10, save_every=10, documents_per_step=8, accumulate=2, pack=2,
    narrow_until=0.0, full_head_from=0.0, learning_rate=1e-3,
)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
found = []
for name, chosen in (("one", None), ("two", mesh)):
    folder = Path(sys.argv[1]) / name
    trained = train(model, documents, folder, options, mesh=chosen)
    with (folder / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    arrays = step.drafter_params(trained.drafter)
    params = {k: np.asarray(v) for k, v in arrays.items()}
    found.append((params, rows, [len(v.devices()) for v in arrays.values()]))
(one, rows, _), (two, others, places) = found
largest = max(float(np.abs(one[k] - two[k]).max()) for k in one)
losses = [[float(row["loss"]) for row in log] for log in (rows, others)]
print(json.dumps([len(jax.devices()), largest, losses, sorted(set(places))]))
"""


def test_two_devices_train_what_one_does(tmp_path: Path, pytestconfig: pytest.Config):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    cache = str(pytestconfig.cache.mkdir("jax")) if pytestconfig.cache else ""
    paths = f"{HERE}{os.pathsep}{HERE.parent}"
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ
        | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
        | {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
    )
    assert run.returncode == 0, run.stderr
    devices, largest, losses, places = json.loads(run.stdout.splitlines()[-1])
    assert devices == 2
    assert 0.0 <= largest < 1e-5
    assert losses[0] and abs(losses[0][-1] - losses[1][-1]) < 2e-4  # as logged: four digits
    assert places == [1]  # what was trained on two lies on one, as a drafter that was loaded
