"""Sizes as people write them."""

from __future__ import annotations

import math

import pytest

from vram.errors import ConfigError
from vram.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (17, 17),
        (2.0, 2),
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("1KiB", 1024),
        ("1KB", 1000),
        ("1K", 1024),
        ("512MiB", 512 << 20),
        ("512 mib", 512 << 20),
        ("3MB", 3_000_000),
        ("3m", 3 << 20),
        ("1.5GiB", 3 << 29),
        (".5G", 1 << 29),
        ("2GB", 2_000_000_000),
        ("1TiB", 1 << 40),
        ("1tb", 10**12),
        ("2T", 2 << 40),
        ("1_000", 1000),
        ("0.3B", 0),
        ("0.1GiB", (1 << 30) // 10),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_a_size_is_read_exactly(text: int | float | str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "bad",
    [
        "", "MiB", "1 2", "12QiB", "1Mi", "1iB", "-1", "1e9", "nan", "inf", "0x10", "1.2.3", "_1", "1__0",
        "١", "8388608TiB", "9" * 400, "9" * 63 + "T",
        -1, -1.0, 1.5, math.nan, math.inf, 2**63, 1e300, True, None,
        b"1MiB", [1],
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_the_valid_units(bad: object) -> None:
    with pytest.raises(ConfigError, match="is not a size") as caught:
        parse_size(bad)  # type: ignore[arg-type]
    assert "MiB" in str(caught.value)
    assert len(str(caught.value)) < 500
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 << 29, "1.5 GiB"),
        (141 << 30, "141 GiB"),
        (1_234_567, "1.18 MiB"),
        ((1 << 20) - 1, "1 MiB"),
        (5 << 50, "5120 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_a_size_is_written_in_its_largest_unit(size: int, expected: str) -> None:
    assert format_size(size) == expected


def test_whole_units_survive_the_round_trip() -> None:
    for power in range(41):
        assert parse_size(format_size(1 << power)) == 1 << power
