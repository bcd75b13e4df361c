"""A mesh divides parameters and arenas by heads and changes no text (two virtual CPU devices)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import tiny

HERE = Path(__file__).parent

PROGRAM = """
import json, sys
from pathlib import Path
import jax, numpy as np
import dflash_jax as dj
import tiny_engine

pair = [Path(folder) for folder in sys.argv[1:]]
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tensor",))
answers = []
for chosen in (None, mesh):
    llm = tiny_engine.start(*pair, max_seq_len=48, max_batch_size=2, mesh=chosen)
    params = dj.SamplingParams(max_tokens=16)
    for one in (params, dj.SamplingParams(max_tokens=16, temperature=1.0, seed=5)):
        done = llm.generate([[1, 2, 3], [4, 5, 6, 7, 8]], one)
        answers.append([[c.token_ids, c.stats.acceptance_lengths] for c in done])
arenas = llm.arenas
parts = [
    [list(layer.keys.addressable_shards[0].data.shape), list(layer.keys.shape)]
    for arena in arenas for layer in arena.layers
]
print(json.dumps([answers, parts, len(jax.devices())]))
"""


def test_two_devices_give_the_ids_of_one_and_each_holds_half_of_the_kv_heads(tmp_path: Path):
    target, drafter = tiny.write_target(tmp_path / "t"), tiny.write_drafter(tmp_path / "d")
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    paths = f"{HERE}{os.pathsep}{HERE.parent}"
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(target), str(drafter)],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths},
    )
    assert run.returncode == 0, run.stderr
    answers, parts, devices = json.loads(run.stdout.splitlines()[-1])
    assert devices == 2
    assert answers[:2] == answers[2:]
    assert len(parts) == 4 + 2
    assert all(whole[1] == 2 * part[1] for part, whole in parts)
