"""How much memory one device has for us, from options or from what the device says.

Sizes are parsed here and `memory_stats()` is read here, in every odd shape that it comes in: None,
missing keys, -1. A number that nobody gave is never guessed. Devices are handed in; nothing here
starts a backend.
"""

import os
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from dflash_jax.errors import ConfigError, MemoryPlanError
from dflash_jax.planning.budget import OVERHEAD

_UNITS = {
    "": 1, "B": 1,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_MEMINFO = Path("/proc/meminfo")
# What a backend of each platform cannot allocate from may be raised with this.
_RAISE_POOL = "XLA_CLIENT_MEM_FRACTION (XLA takes 0.75 of a card unless it is set)"


class DeviceMemory(NamedTuple):
    """Memory of one device, in bytes.

    Attributes:
        total: what XLA may allocate, or the whole card.
        in_use: of which is taken already.
        source: who said so, for people.
        overhead: what the runtime takes besides; only where `total` is a card.
    """

    total: int
    in_use: int
    source: str
    overhead: int = 0

    @property
    def free(self) -> int:
        """What may still be allocated."""
        return max(0, self.total - self.in_use - self.overhead)

    @property
    def lever(self) -> str:
        """How there could be more."""
        if "bytes_limit" in self.source:
            return f"raise {_RAISE_POOL}"
        return "use a device with more memory"


def parse_bytes(value: int | str, option: str = "device_memory") -> int:
    """Bytes of `85899345920`, "80GiB" (1024^3) or "80 GB" (1000^3); units in any case.

    Raises:
        ConfigError: not a size, or not above 0.
    """
    size: int | Fraction = -1
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        unit = None if match is None else _UNITS.get(match[2].upper())
        size = -1 if match is None or unit is None else Fraction(match[1]) * unit
    if size < 1:
        raise ConfigError(
            f"{option}={value!r}: a size above 0 is needed, such as '80GiB' (80 x 1024^3), '80GB' "
            "(80 x 1000^3) or a number of bytes"
        )
    return int(size)


def given_memory(device_memory: int | str) -> DeviceMemory:
    """What the user says that XLA may allocate."""
    total = parse_bytes(device_memory)
    return DeviceMemory(total, 0, f"device_memory={device_memory!r}")


def card_memory(card: int | str, mem_fraction: float | None = None) -> DeviceMemory:
    """What XLA may allocate of a card: the given share, or all but the runtime's overhead.

    Raises:
        ConfigError: the share is not in (0, 1].
    """
    total = parse_bytes(card, "card")
    if mem_fraction is None:
        return DeviceMemory(total, 0, f"card of {card}, all of it", OVERHEAD)
    if not 0 < mem_fraction <= 1:
        raise ConfigError(f"mem_fraction={mem_fraction}: a share above 0 and at most 1 is needed")
    return DeviceMemory(int(total * mem_fraction), 0, f"{mem_fraction} of a card of {card}")


def devices_memory(devices: Sequence[Any]) -> DeviceMemory:
    """What the devices themselves say; of several, the one with least free.

    A CPU has no figures: its devices share the host's available memory.

    Raises:
        MemoryPlanError: a device has no usable figures.
    """
    if all(device.platform == "cpu" for device in devices):
        share = host_available_memory() // len(devices)
        each = "" if len(devices) == 1 else f", one of {len(devices)} devices' share"
        return DeviceMemory(share, 0, f"host memory available now{each}")
    return min((_stats_memory(device) for device in devices), key=lambda memory: memory.free)


def _stats_memory(device: Any) -> DeviceMemory:
    stats: Mapping[str, Any] = device.memory_stats() or {}
    limit = _figure(stats, "bytes_limit")
    if limit is None:
        pool = _figure(stats, "pool_bytes")
        raise MemoryPlanError(
            f"{device} does not say how much memory it may allocate (memory_stats() gives "
            f"{_shown(stats)}{'' if pool is None else f', pool_bytes {pool}'}): set "
            "device_memory='…GiB'"
        )
    return DeviceMemory(limit, _figure(stats, "bytes_in_use") or 0, f"bytes_limit of {device}")


def _figure(stats: Mapping[str, Any], key: str) -> int | None:
    """A figure that is there and says something; unset ones read -1 or 0 on some devices."""
    value = stats.get(key)
    return value if isinstance(value, int) and value > 0 else None


def _shown(stats: Mapping[str, Any]) -> str:
    return f"only {', '.join(sorted(stats))}" if stats else "nothing"


def host_available_memory() -> int:
    """Bytes of this host that can be had without swapping."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
