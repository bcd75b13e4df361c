"""`dflash-jax doctor`: what is installed, what JAX runs on, what is missing and how to get it.

Looks and reports, changes nothing, and always ends with exit code 0: findings are `warnings`.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from dflash_jax.cli import options, output
from dflash_jax.cli.terminal import note

PACKAGES = (
    "dflash-jax jax jaxlib flax orbax-checkpoint optax safetensors numpy tokenizers "
    "huggingface_hub gguf"
).split()
EXTRAS = ("serve", "train", "test", "oracle", "dev")
DRIVER_LIST = Path("/proc/driver/nvidia/gpus")
_GIB = 2**30


def doctor(json: options.JsonOption = False) -> None:
    """Versions, devices and memory, and what is missing with the line that installs it."""
    document = examine()
    if json:
        output.print_json(document)
    else:
        _show(document)


def examine() -> dict[str, Any]:
    """Everything that is reported, as JSON."""
    devices = _devices()
    document = {
        "versions": {"python": platform.python_version()} | {n: _version(n) for n in PACKAGES},
        "jax": devices,
        "host_memory": _host_memory(),
        "nvidia": _nvidia(),
        "demo": _demo(),
        "extras": {extra: missing_packages(extra) for extra in EXTRAS},
        "qualification": qualification(),
    }
    return document | {"warnings": warnings(document)}


def warnings(document: dict[str, Any]) -> list[str]:
    """What keeps something from working, each with its remedy."""
    found = [
        f"{name} is not installed: pip install -e ."
        for name, version in document["versions"].items()
        if version is None
    ]
    jax, nvidia = document["jax"], document["nvidia"]
    if jax["error"]:
        found.append(f"JAX cannot start: {jax['error']}")
    if nvidia["visible"] and jax["backend"] != "gpu":
        found.append(
            f"an NVIDIA device is visible ({nvidia['seen_by']}) but JAX has no GPU backend: "
            'pip install -e ".[cuda12]"'
        )
    if not document["demo"]["drafter"]:
        found.append(document["demo"]["drafter_error"])
    return found


def qualification() -> list[dict[str, str]]:
    """What is known of each combination of platform, attention, layout and drafting method."""
    from dflash_jax.planning.qualification import table

    return [
        key._asdict() | {"standing": known.name, "grounds": known.grounds} for key, known in table()
    ]


def missing_packages(extra: str) -> list[str] | None:
    """Requirements of an extra that are not installed, by name; None: no installation says."""
    try:
        lines = importlib.metadata.requires("dflash-jax") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    marked = re.compile(rf"""extra\s*==\s*["']{extra}["']""")
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if marked.search(line)]
    return [name for name in names if _version(name) is None]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    """JAX's backend and devices; `error` says why there are none."""
    try:
        import jax

        devices = [
            {
                "kind": device.device_kind,
                "platform": device.platform,
                "memory": device.memory_stats() or None,
            }
            for device in jax.devices()
        ]
        return {"backend": jax.default_backend(), "devices": devices, "error": None}
    except (ImportError, RuntimeError) as error:
        return {"backend": None, "devices": [], "error": str(error)}


def _host_memory() -> dict[str, int]:
    """Bytes of this machine: all, and those that a plan counts on now."""
    from dflash_jax.planning.device import host_available_memory

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"total": total, "available": host_available_memory()}


def _nvidia() -> dict[str, Any]:
    """Whether the driver shows a device, asked without JAX."""
    if DRIVER_LIST.is_dir() and any(DRIVER_LIST.iterdir()):
        return {"visible": True, "seen_by": str(DRIVER_LIST)}
    program = shutil.which("nvidia-smi")
    if program is not None and _lists_devices(program):
        return {"visible": True, "seen_by": "nvidia-smi"}
    return {"visible": False, "seen_by": None}


def _lists_devices(program: str) -> bool:
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU" in done.stdout


def _demo() -> dict[str, Any]:
    """Whether the embedded pair is on this machine; fetches nothing."""
    from dflash_jax.errors import CheckpointError
    from dflash_jax.weights.demo import TARGET_NAME, cache_folder, demo_drafter

    target, error = cache_folder() / TARGET_NAME, None
    try:
        drafter = str(demo_drafter())
    except CheckpointError as missing:
        drafter, error = None, str(missing)
    return {
        "target": str(target) if (target / "config.json").is_file() else None,
        "cache": str(cache_folder()),
        "drafter": drafter,
        "drafter_error": error,
    }


def _show(document: dict[str, Any]) -> None:
    versions = {name: version or "missing" for name, version in document["versions"].items()}
    output.print_facts(versions, title="versions")
    output.print_facts(_machine(document), title="machine")
    demo = document["demo"]
    target = demo["target"] or f"not in {demo['cache']} yet: fetched by the first dflash-jax demo"
    output.print_facts(
        {"demo target": target, "demo drafter": demo["drafter"] or "missing"}, title="demo"
    )
    output.print_table(
        ["platform, attention, kv_layout, speculation", "standing", "evidence or grounds"],
        [_combination(row) for row in document["qualification"]],
        title="qualification of combinations",
    )
    extras = {extra: _extra(extra, names) for extra, names in document["extras"].items()}
    output.print_facts(extras, title="extras")
    for warning in document["warnings"]:
        note(f"warning: {warning}", style="yellow")


def _combination(row: dict[str, str]) -> list[str]:
    key = ", ".join(row[name] for name in ("platform", "attention", "kv_layout", "speculation"))
    return [key, row["standing"], row["grounds"]]


def _extra(extra: str, missing: list[str] | None) -> str:
    if missing is None:
        return "unknown, because dflash-jax itself is not installed"
    return f'pip install -e ".[{extra}]" brings {", ".join(missing)}' if missing else "installed"


def _machine(document: dict[str, Any]) -> dict[str, str]:
    jax, memory = document["jax"], document["host_memory"]
    facts = {"JAX backend": jax["backend"] or "none"}
    for index, device in enumerate(jax["devices"]):
        facts[f"device {index}"] = f"{device['kind']}, {_device_memory(device['memory'])}"
    facts["host memory"] = (
        f"{memory['available'] / _GIB:.1f} GiB free of {memory['total'] / _GIB:.1f} GiB"
    )
    facts["NVIDIA driver"] = document["nvidia"]["seen_by"] or "shows no device"
    return facts


def _device_memory(stats: dict[str, int] | None) -> str:
    if stats is None or "bytes_limit" not in stats:
        return "no memory figures of its own: it uses the host's memory"
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return f"{free / _GIB:.1f} GiB free of the {stats['bytes_limit'] / _GIB:.1f} GiB JAX may use"
