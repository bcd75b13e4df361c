"""What every test shares: JAX's strict settings, the demo model, and the rule that nothing skips.

The settings hold in the test process only; a test that starts a child process sees what a user
sees. Nothing here imports the package at module level: the shape checker of `--jaxtyping-packages`
has to be in place first. Writers of tiny checkpoints live in the `tiny*.py` files beside this one.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxtyping
import pytest

MAY_SKIP = ("gpu", "oracle", "slow")
# Compiling is most of the tests' time: LLVM's and XLA's shortest ways take less than half of it.
# What is computed stays the same, but for last bits. Child processes inherit it, and so find the
# programs that this process has compiled. `-m oracle` and `-m slow` run the code that users run, as
# does any run under XLA_FLAGS=--xla_backend_optimization_level=3.
QUICK_COMPILING = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false"
)
# Files of few tests that take long: handed out first, so that neither process ends alone with one.
LONG_FILES = (
    "test_cli_train test_context_exact test_lossless test_mesh test_plan_allocates test_sampling "
    "test_serving_equality test_serving_paged test_smollm2 test_training_killed test_training_mesh "
    "test_training_resume test_training_step test_training_trainer"
).split()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    if "gpu" not in (config.option.markexpr or "").replace("not gpu", ""):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
        if "not slow" in (config.option.markexpr or ""):
            os.environ.setdefault("XLA_FLAGS", QUICK_COMPILING)
    if getattr(config, "cache", None) is not None:
        # Compiled programs of the last run, kept in .pytest_cache: a second run starts at once.
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONG_FILES)


def _must_run(node: pytest.Item | pytest.Collector) -> bool:
    on_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return on_ci and not any(node.get_closest_marker(name) for name in MAY_SKIP)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if (report.skipped or hasattr(report, "wasxfail")) and _must_run(item):
        report.outcome = "failed"
        report.longrepr = f"CI allows no skip and no xfail here, only under {MAY_SKIP}: " + str(
            getattr(report, "wasxfail", report.longrepr)
        )
        vars(report).pop("wasxfail", None)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    if report.skipped and _must_run(collector):
        report.outcome = "failed"
        report.longrepr = f"CI allows no skipped file; skip inside the test: {report.longrepr}"
    return report


@pytest.fixture
def as_a_user() -> Iterator[None]:
    """Calls as outside the test run, where no checker looks at types before the library does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo target in Hugging Face layout; the first call ever fetches and converts it."""
    from dflash_jax.weights.demo import demo_target

    return demo_target()
