"""How much memory a device has: sizes as people write them, and stats in every odd shape."""

from pathlib import Path
from typing import Any

import pytest

import dflash_jax as dj
from dflash_jax.planning import device
from dflash_jax.planning.device import (
    DeviceMemory,
    card_memory,
    devices_memory,
    given_memory,
    host_available_memory,
    parse_bytes,
)

GIB = 1024**3


@pytest.mark.parametrize(
    "text, expected",
    [
        (85_899_345_920, 80 * GIB),
        (1, 1),
        ("80GiB", 80 * 1024**3),
        ("80GB", 80 * 10**9),
        ("80gib", 80 * 1024**3),
        ("80gb", 80 * 10**9),
        ("  80 GiB ", 80 * 1024**3),
        ("80\tGB", 80 * 10**9),
        ("0.5GiB", 2**29),
        ("1.5 TiB", 3 * 2**39),
        ("2TB", 2 * 10**12),
        ("512MiB", 2**29),
        ("512MB", 512 * 10**6),
        ("3KiB", 3072),
        ("3kb", 3000),
        ("17B", 17),
        ("85899345920", 80 * GIB),
        # 1.001 x 1000 is 1000.9999999999999 in floats.
        ("1.001KB", 1001),
        ("4.35GB", 4_350_000_000),
        (10**30, 10**30),
    ],
)
def test_a_size_is_read_as_people_write_it(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "eighty",
        "80 gigs",
        "80G",
        "-80GiB",
        "+80GiB",
        "80GiB free",
        "1e9",
        "1,000",
        "0",
        "0GiB",
        "0.5B",
        "nan",
        "inf",
        ".5GiB",
        0,
        -1,
        True,
        False,
    ],
)
def test_what_is_no_size_is_refused_with_what_one_looks_like(text):
    with pytest.raises(dj.ConfigError) as refused:
        parse_bytes(text, "card")
    message = str(refused.value)
    assert f"card={text!r}" in message and "80GiB" in message and "80GB" in message


def test_the_option_that_is_blamed_is_device_memory_unless_another_is_named():
    with pytest.raises(dj.ConfigError, match="^device_memory='lots'"):
        parse_bytes("lots")


def test_a_size_of_absurd_length_is_no_crash():
    assert parse_bytes("9" * 400) == int("9" * 400)


def test_a_given_memory_is_what_xla_may_allocate_all_of_it():
    memory = given_memory("60GiB")
    assert (memory.total, memory.in_use, memory.overhead) == (60 * GIB, 0, 0)
    assert memory.free == 60 * GIB and "'60GiB'" in memory.source


def test_of_a_whole_card_the_runtime_takes_4_gib():
    memory = card_memory("80GiB")
    assert (memory.total, memory.overhead, memory.free) == (80 * GIB, 4 * GIB, 76 * GIB)


def test_a_share_of_a_card_is_what_xla_takes():
    """0.9 x 80 GiB, and no overhead: it lies in the other tenth."""
    memory = card_memory("80GiB", 0.9)
    assert (memory.total, memory.overhead) == (72 * GIB, 0)
    assert "0.9" in memory.source and "80GiB" in memory.source
    assert card_memory(80 * GIB, 1.0).free == 80 * GIB


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, 90.0, float("nan")])
def test_a_share_of_a_card_lies_above_0_and_up_to_1(share):
    with pytest.raises(dj.ConfigError, match="mem_fraction="):
        card_memory("80GiB", share)


def test_a_card_smaller_than_the_overhead_has_nothing_free():
    assert card_memory("3GiB").free == 0


class Device:
    """A device that answers what it is told to."""

    def __init__(self, stats: Any, platform: str = "gpu", name: str = "gpu:0"):
        self.platform, self._stats, self._name = platform, stats, name

    def memory_stats(self) -> Any:
        return self._stats

    def __repr__(self) -> str:
        return self._name


@pytest.mark.parametrize(
    "stats",
    [
        None,
        {},
        {"bytes_in_use": 5 * GIB},
        {"bytes_limit": -1},
        {"bytes_limit": 0},
        {"bytes_limit": None, "bytes_in_use": 1},
        {"bytes_limit": "80GiB"},
        {"pool_bytes": 60 * GIB, "bytes_in_use": 0},
        {"peak_bytes_in_use": GIB, "num_allocs": 3, "pool_bytes": -1},
    ],
)
def test_a_device_that_does_not_say_is_never_guessed_and_the_option_is_named(stats):
    """Fault 99: no KeyError, no default."""
    with pytest.raises(dj.MemoryPlanError) as refused:
        devices_memory([Device(stats)])
    message = str(refused.value)
    assert "gpu:0" in message and "device_memory=" in message
    assert ("nothing" in message) == (not stats)
    assert all(key in message for key in stats or {})


@pytest.mark.parametrize(
    "stats, free",
    [
        ({"bytes_limit": 60 * GIB}, 60),
        ({"bytes_limit": 60 * GIB, "bytes_in_use": 0}, 60),
        ({"bytes_limit": 60 * GIB, "bytes_in_use": -1}, 60),
        ({"bytes_limit": 60 * GIB, "bytes_in_use": None}, 60),
        ({"bytes_limit": 60 * GIB, "bytes_in_use": 6 * GIB, "pool_bytes": -1}, 54),
        ({"bytes_limit": 60 * GIB, "bytes_in_use": 61 * GIB}, 0),
    ],
)
def test_a_limit_is_enough_and_what_is_in_use_comes_off_it(stats, free):
    """Fault 99: partial stats."""
    assert devices_memory([Device(stats)]).free == free * GIB


def test_the_limit_is_not_the_card_and_the_setting_that_raises_it_is_named():
    """Fault 100: 0.75 of an 80 GiB card, a tenth of it in use."""
    memory = devices_memory([Device({"bytes_limit": 60 * GIB, "bytes_in_use": 6 * GIB})])
    assert (memory.total, memory.in_use, memory.free) == (60 * GIB, 6 * GIB, 54 * GIB)
    assert "bytes_limit" in memory.source and "gpu:0" in memory.source
    assert "XLA_CLIENT_MEM_FRACTION" in memory.lever and "0.75" in memory.lever


def test_a_memory_that_was_given_is_not_raised_by_a_setting():
    assert "XLA_CLIENT_MEM_FRACTION" not in given_memory("60GiB").lever
    assert "XLA_CLIENT_MEM_FRACTION" not in card_memory("80GiB").lever


def test_of_several_devices_the_one_with_least_free_counts():
    devices = [
        Device({"bytes_limit": 60 * GIB, "bytes_in_use": 1 * GIB}, name="gpu:0"),
        Device({"bytes_limit": 60 * GIB, "bytes_in_use": 9 * GIB}, name="gpu:1"),
        Device({"bytes_limit": 58 * GIB, "bytes_in_use": 0}, name="gpu:2"),
    ]
    memory = devices_memory(devices)
    assert memory.free == 51 * GIB and "gpu:1" in memory.source


def test_one_silent_device_of_several_is_not_passed_over():
    devices = [Device({"bytes_limit": 60 * GIB}), Device({}, name="gpu:1")]
    with pytest.raises(dj.MemoryPlanError, match="gpu:1"):
        devices_memory(devices)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_cpu_devices_share_the_hosts_available_memory(monkeypatch, count):
    monkeypatch.setattr(device, "host_available_memory", lambda: 24 * GIB)
    cpus = [Device(None, "cpu", f"cpu:{i}") for i in range(count)]
    memory = devices_memory(cpus)
    assert memory.free == 24 * GIB // count
    assert "host memory" in memory.source
    assert (f"one of {count} devices" in memory.source) == (count > 1)
    assert "XLA_CLIENT_MEM_FRACTION" not in memory.lever


def test_the_hosts_memory_is_what_is_available_and_not_what_there_is(monkeypatch, tmp_path: Path):
    listing = tmp_path / "meminfo"
    listing.write_text("MemTotal:  64000 kB\nMemFree:  100 kB\nMemAvailable:    48000 kB\n")
    monkeypatch.setattr(device, "_MEMINFO", listing)
    assert host_available_memory() == 48_000 * 1024


@pytest.mark.parametrize("text", [None, "MemTotal:  64000 kB\n"])
def test_a_host_without_that_listing_still_says(monkeypatch, tmp_path: Path, text):
    listing = tmp_path / "meminfo"
    if text is not None:
        listing.write_text(text)
    monkeypatch.setattr(device, "_MEMINFO", listing)
    pages = {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": 1000}
    monkeypatch.setattr(device.os, "sysconf", pages.__getitem__)
    assert host_available_memory() == 4_096_000


def test_the_memory_of_this_host_is_a_number():
    assert host_available_memory() > 2**20


def test_what_is_in_use_and_the_overhead_come_off_the_total():
    assert DeviceMemory(100, 30, "test", 20).free == 50
    assert DeviceMemory(100, 90, "test", 20).free == 0
