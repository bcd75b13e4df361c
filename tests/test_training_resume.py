"""Tests of `training/snapshots.py`, and of runs that a kill or a figure stops."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_training as tiny
from dflash_jax.errors import ConfigError
from dflash_jax.training.snapshots import Standing
from dflash_jax.training.trainer import train

HERE = Path(__file__).parent
RUN = {"held_out": 0.6, "evaluate_every": 2, "save_every": 5}
# One shape of a step in place of three: less to compile.
PLAIN = {"narrow_until": 0.0, "full_head_from": 0.0, "held_out": 0.6, "evaluate_every": 2}


@pytest.fixture(scope="module")
def model():
    return tiny.target()


@pytest.fixture(scope="module")
def documents(model):
    return tiny.documents(model)


@pytest.fixture(scope="module")
def straight(model, documents, tmp_path_factory):
    """A run of ten steps that nothing stopped, and its folder."""
    folder = tmp_path_factory.mktemp("straight")
    return train(model, documents, folder, tiny.options(**RUN)), folder


def _rows(folder):
    with (folder / "log.csv").open() as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def _steps(folder):
    return sorted(int(path.name) for path in (folder / "steps").iterdir() if path.name.isdigit())


CHILD = """
import json, os, signal, sys, time
from pathlib import Path
import jax
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_compilation_cache_dir", sys.argv[2] or None)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
import tiny_training as tiny
from dflash_jax.training import trainer
folder = Path(sys.argv[1])

def die(stage, done, total):
    if done == 7:
        while not (folder / "steps" / "5").is_dir():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

model = tiny.target()
options = tiny.options(**json.loads(sys.argv[3]))
trainer.train(model, tiny.documents(model), folder, options, progress=die)
"""


def test_a_run_killed_in_the_middle_resumes_to_the_same_parameters_bit_for_bit(
    model, documents, straight, tmp_path, pytestconfig
):
    """Fault 127. Another process, killed with SIGKILL two steps after its last checkpoint."""
    cache = getattr(pytestconfig, "cache", None)
    programs = "" if cache is None else str(cache.mkdir("jax"))
    killed = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), programs, json.dumps(RUN)],
        cwd=HERE,
        env=os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert max(_steps(tmp_path)) < 10
    seen = []
    resumed = train(
        model, documents, tmp_path, tiny.options(**RUN), progress=lambda *now: seen.append(now)
    )
    assert seen[0][1] > 5 and seen[-1] == ("train", 10, 10)
    whole, folder = straight
    assert (resumed.steps, resumed.best_step) == (10, whole.best_step)
    assert resumed.held_out == whole.held_out
    tiny.assert_same(tiny.params(resumed.drafter), tiny.params(whole.drafter))
    assert _rows(tmp_path) == _rows(folder)


def test_the_best_and_the_last_checkpoints_are_kept_and_the_best_is_what_a_run_gives(
    model, documents, tmp_path
):
    """A rate that ruins the drafter after a few steps, so that the best is not the last."""
    options = tiny.options(**PLAIN, learning_rate=5.0, warmup=0.5)
    trained = train(model, documents, tmp_path, options)
    figures = {int(row["step"]): row["held_out_accepted"] for row in _rows(tmp_path)}
    best = max((s for s in figures if figures[s]), key=lambda s: (float(figures[s]), -s))
    assert trained.best_step == best < trained.steps == 10
    assert trained.held_out is not None
    assert f"{trained.held_out.accepted:.4f}" == figures[best]
    assert {best, 10} <= set(_steps(tmp_path)) and len(_steps(tmp_path)) <= 3
    # The whole run once more does nothing and gives the same.
    again = train(model, documents, tmp_path, options)
    tiny.assert_same(tiny.params(again.drafter), tiny.params(trained.drafter))


def test_a_run_stops_after_evaluations_without_a_better_figure(model, documents, tmp_path):
    options = tiny.options(**PLAIN | {"evaluate_every": 1}, patience=2, learning_rate=0.0)
    for _ in range(2):  # a resume of a run that gave up does not go on
        trained = train(model, documents, tmp_path, options)
        assert (trained.steps, trained.best_step) == (3, 1)
    with pytest.raises(
        ConfigError, match="patience 2 needs held-out documents, and held_out 1e-09"
    ):
        train(model, documents, tmp_path / "none", tiny.options(patience=2, held_out=1e-9))


def test_a_standing_counts_evaluations_since_the_best_and_keeps_the_earlier_of_equals():
    standing = Standing()
    for done, figure in enumerate((1.5, 1.2, 1.5, 1.7, 1.6), start=1):
        standing = standing.after(figure, done)
    assert standing == Standing(best=1.7, best_step=4, since=1)
    assert Standing(1.5, 1, 0).after(1.5, 2) == Standing(1.5, 1, 1)


def test_a_resume_with_other_options_or_documents_names_the_difference(
    model, documents, straight, tmp_path
):
    _, folder = straight
    with pytest.raises(ConfigError, match=r"gamma was 4.0 and is 5.0"):
        train(model, documents, folder, tiny.options(**RUN, gamma=5.0))
    for name, value in {
        "pack": 2,
        "anchor_chunk": 1,
        "sliding_window": 9,
        "features": "computed",
    }.items():
        with pytest.raises(ConfigError, match=rf"{name} was \S+ and is '?{value}'?\)"):
            train(model, documents, folder, tiny.options(**RUN | {name: value}))
    with pytest.raises(ConfigError, match="documents_sha256"):
        train(model, documents[1:], folder, tiny.options(**RUN))
    with pytest.raises(ConfigError, match=r"steps was 10 and is 12.*schedule 'wsd'"):
        train(model, documents, folder, tiny.options(**RUN, steps=12))


class _Stopped(Exception):
    pass


def test_between_warm_up_and_decay_of_wsd_the_number_of_steps_may_change(
    model, documents, tmp_path
):
    def stop(stage, done, total):
        if done == 5:
            raise _Stopped

    def run(steps, progress=None):
        options = tiny.options(
            **PLAIN | {"held_out": 0.0}, schedule="wsd", decay_share=0.3, steps=steps
        )
        return train(model, documents, tmp_path, options, progress=progress)

    with pytest.raises(_Stopped):
        run(10, stop)
    # At step 5 a decay over the last 30 % of five steps would have begun.
    with pytest.raises(ConfigError, match="steps was 10 and is 5"):
        run(5)
    assert run(12).steps == 12
    with pytest.raises(ConfigError, match="steps was 12 and is 20"):
        run(20)


def test_an_option_that_an_older_record_does_not_name_had_its_default(model, documents, straight):
    _, folder = straight
    record = folder / "options.json"
    kept = record.read_text()
    older = {k: v for k, v in json.loads(kept).items() if k not in ("patience", "schedule")}
    record.write_text(json.dumps(older))
    try:
        assert train(model, documents, folder, tiny.options(**RUN)).steps == 10
        with pytest.raises(ConfigError, match="schedule was 'cosine' and is 'wsd'"):
            train(model, documents, folder, tiny.options(**RUN, schedule="wsd"))
    finally:
        record.write_text(kept)
