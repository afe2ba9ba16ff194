"""Options: what each takes, where settings come from and which goes first, and errors that help."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import vram
from vram.config import OPTIONS, Config, limit_bytes, parse_pool_options, split_settings
from vram.errors import ConfigError

MIB = 1 << 20
TRACE = Path(__file__).resolve().parents[2] / "traces" / "oom_gpt2_train_9000.pickle.xz"


def config(given: dict[str, Any] | None = None, **environ: str) -> Config:
    return Config(given, environ=environ)


# ---- layers -----------------------------------------------------------------------------------------------


def test_keyword_goes_before_conf_before_variable_before_default() -> None:
    assert config()["stream_cache"] == OPTIONS["stream_cache"].default == 4096
    assert config(VRAM_CACHE_SIZE="7")["stream_cache"] == 7
    assert config(VRAM_CACHE_SIZE="7", VRAM_CONF="stream_cache:8")["stream_cache"] == 8
    assert config({"stream_cache": 9}, VRAM_CACHE_SIZE="7", VRAM_CONF="stream_cache:8")["stream_cache"] == 9


def test_setting_one_knob_resets_no_other() -> None:
    settings = config({"limit": "2GiB"}, VRAM_CONF="cross_stream:wait", VRAM_SEGMENT_SIZE="64MiB")
    settings.set({"journal": 5})
    settings.set({"limit": "3GiB"})
    assert (settings["limit"], settings["journal"]) == (3 << 30, 5)
    assert (settings["cross_stream"], settings["segment_size"]) == ("wait", 64 * MIB)


def test_a_wrong_setting_changes_nothing() -> None:
    settings = config({"journal": 5})
    with pytest.raises(ConfigError):
        settings.set({"journal": 6, "stream_cache": -1})
    assert settings["journal"] == 5


def test_the_single_variables() -> None:
    settings = config(VRAM_SEGMENT_SIZE="1G", VRAM_CACHE_SIZE="10", VRAM_WARMUP="true", VRAM_STATS="1")
    names = ("segment_size", "stream_cache", "enable_warmup", "enable_stats")
    assert [settings[name] for name in names] == [1 << 30, 10, True, True]
    assert config(VRAM_WARMUP="")["enable_warmup"] is None
    named = config(VRAM_WARMUP="4KiB:50,1MiB:2")
    assert named["enable_warmup"] and named["warmup_sizes"] == ((4096, 50), (MIB, 2))


def test_the_reference_designs_names_are_options_of_the_pool() -> None:
    settings = config(
        {"allocation_strategy": "good_fit", "cache_sizes": {"stream_local": 100, "global": 500}}
    )
    assert settings["best_fit"] is False
    assert (settings["stream_cache"], settings["release_threshold"]) == (100, 500 * 2 * MIB)
    settings.set({"cache_sizes": {"global": "1GiB"}})
    assert (settings["stream_cache"], settings["release_threshold"]) == (100, 1 << 30)
    assert not {"cache_sizes", "allocation_strategy"} & set(settings)


def test_what_was_set_is_shown() -> None:
    assert repr(config({"limit": "20GiB", "journal": 3})) == "Config(limit=20GiB, journal=3)"
    assert config({"journal": 3}).is_set("journal") and not config().is_set("journal")


# ---- the grammar ------------------------------------------------------------------------------------------


def test_settings_are_split_as_in_pytorch() -> None:
    text = " limit:2GiB, warmup_sizes:[4KiB:50,64KiB:3] ,cross_stream:wait,"
    expected = {"limit": "2GiB", "warmup_sizes": "[4KiB:50,64KiB:3]", "cross_stream": "wait"}
    assert split_settings(text) == expected
    assert split_settings("") == {}


@pytest.mark.parametrize("text", ["limit", "limit:", ":3", "limit=3"])
def test_what_is_not_key_value_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"VRAM_CONF: .* is not key:value"):
        config(VRAM_CONF=text)


# ---- values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("limit", None, 0), ("limit", 0, 0), ("limit", "none", 0), ("limit", 5, 5), ("limit", 1, 1),
        ("limit", "20GiB", 20 << 30), ("limit", "1.5GiB", 3 << 29), ("limit", 0.9, 0.9),
        ("limit", "0.9", 0.9),
        ("limit", 1.0, 1.0), ("limit", 2e9, 2_000_000_000),
        ("pages", "off", False), ("pages", 1, True), ("pages", "TRUE", True),
        ("cross_stream", "never", "never"),
        ("max_page", "8MiB", 8 * MIB),
        ("release_threshold", None, -1), ("release_threshold", "none", -1),
        ("release_threshold", "1GiB", 1 << 30),
        ("journal", "100", 100),
        ("stacks", None, "none"), ("stacks", "python", "python"),
        ("warmup_sizes", {"4KiB": 3}, ((4096, 3),)), ("warmup_sizes", [(1, 2)], ((1, 2),)),
        ("pressure_high", "0.9", 0.9),
    ],
)  # fmt: skip
def test_values_are_read(name: str, value: object, read: object) -> None:
    found = config({name: value})[name]
    assert found == read and type(found) is type(read)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", -1), ("limit", 0.0), ("limit", -0.5), ("limit", "1.5"), ("limit", "much"), ("limit", []),
        ("limit", float("nan")), ("limit", True), ("limit", 2**70),
        ("pages", "maybe"), ("pages", 2), ("pages", []),
        ("cross_stream", "later"), ("cross_stream", ["wait"]),
        ("max_page", "4MiB"),
        ("stream_cache", -1), ("stream_cache", 2**32), ("stream_cache", 1.5), ("stream_cache", True),
        ("journal", "many"),
        ("warmup_sizes", 5), ("warmup_sizes", [(1, -2)]), ("warmup_sizes", [(1,)]),
        ("cache_sizes", {"local": 3}), ("cache_sizes", 3),
        ("pressure_high", 1.5), ("expand_factor", 0.5), ("expand_factor", "inf"),
    ],
)  # fmt: skip
def test_a_bad_value_says_what_the_option_takes(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot be .* valid: ") as caught:
        config({name: value})
    assert caught.value.option == name and isinstance(caught.value, ValueError)


def test_an_unknown_option_names_the_valid_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown option 'segmnt_size'; did you mean segment_size\?"
    ) as caught:
        config({"segmnt_size": 5})
    assert "cross_stream" in str(caught.value) and "segment_size" in caught.value.valid
    with pytest.raises(ConfigError, match="VRAM_CONF: unknown option 'zzz'"):
        config(VRAM_CONF="zzz:1")
    with pytest.raises(ConfigError, match="VRAM_STATS: enable_stats cannot be 'perhaps'"):
        config(VRAM_STATS="perhaps")


# ---- for the pool -----------------------------------------------------------------------------------------


def test_pool_options_are_only_those_given() -> None:
    assert parse_pool_options({}) == {}
    given = {"cross_stream": "wait", "limit": "0.5"}
    assert parse_pool_options(given, capacity=1000) == {"cross_stream": "wait", "limit": 500}


def test_options_of_others_are_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"option of the memory manager; set it with vram\.configure"):
        parse_pool_options({"adaptive": True})
    with pytest.raises(ConfigError, match=r"option of vram\.Pool and does not apply here"):
        parse_pool_options({"stacks": "python"})


def test_a_share_needs_a_capacity() -> None:
    assert limit_bytes(0.5, 100) == 50 and limit_bytes(7, None) == 7
    with pytest.raises(ConfigError, match="fraction needs a device with a known capacity"):
        parse_pool_options({"limit": 0.5}, capacity=0)


def test_every_option_reads_its_own_default() -> None:
    for option in OPTIONS.values():
        if option.default is not None:
            assert option.read(option.default) == option.default, option.name
        assert option.doc and option.takes


def test_replay_reads_settings_with_the_same_table() -> None:
    replay = importlib.import_module("vram.replay")
    snapshot = importlib.import_module("vram.trace").open_trace(TRACE)
    with pytest.raises(ConfigError, match="cross_stream cannot be 'later'; valid: ready, wait or never"):
        replay.replay(snapshot, conf={"cross_stream": "later"})
    with pytest.raises(ConfigError, match="did you mean segment_size"):
        replay.replay(snapshot, conf={"segmnt_size": "2MiB"})
    tight = replay.replay(snapshot, conf={"limit": "0.5"}, capacity="8GiB")
    assert tight.oom is not None and tight.peak_reserved <= 4 << 30


# ---- extreme settings -------------------------------------------------------------------------------------

TEXTS = [
    *(
        "",
        "0",
        "1",
        "-1",
        str(2**31),
        str(2**32),
        str(2**63 - 1),
        str(2**63),
        str(2**64),
        "1e309",
        "nan",
        "inf",
    ),
    *(
        "true",
        "No",
        "none",
        "auto",
        "8MiB",
        "-8MiB",
        "1e3GiB",
        "99999999999999999999TiB",
        "0x10",
        " 5 ",
        "5 5",
    ),
    *(",", ":", "[1,2]", "{}", "(", "\u0661\u0662", "é", "a\tb", "a" * 10000, "8MiB,", "1/2", "0.5", "50%"),
    *("ready", "python", "good_fit", "{4KiB: 50}"),
]


@pytest.mark.parametrize("name", OPTIONS)
def test_extreme_settings_are_refused_or_served(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = set()
    for text in TEXTS:
        monkeypatch.setenv("VRAM_CONF", f"{name}:{text}")
        try:
            with vram.Pool(vram.Device.model("1GiB")) as pool:
                pool.allocate(1024).free()
                assert pool.check() is None
            outcomes.add("served")
        except (ConfigError, vram.OutOfMemory) as error:
            assert name in str(error) or isinstance(error, vram.OutOfMemory) or len(text) > 100 or "," in text
            outcomes.add("refused")
    assert "refused" in outcomes
