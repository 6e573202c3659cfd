"""Settings: strict, named as the user wrote them."""

from __future__ import annotations

import re

import pytest

from tq_offload.errors import ConfigError, IncompatibleError
from tq_offload.integrations.lmcache.settings import (
    SERDE_SETTINGS,
    gib_to_bytes,
    serde_requested,
    settings_from_env,
    settings_from_serde,
    tier_settings,
)
from tq_offload.integrations.lmcache.versions import check_lmcache, has_plugins
from tq_offload.spec import CodecSpec


def test_lmcache_serde() -> None:
    assert serde_requested({"LMCACHE_SERDE": "turboquant"})
    for value in ("", "naive", "cachegen", "kivi"):
        assert not serde_requested({"LMCACHE_SERDE": value})
    assert not serde_requested({})
    for value in ("TurboQuant", "turboquant ", "fp8", "tq_offload"):
        with pytest.raises(ConfigError, match=f"LMCACHE_SERDE='{value}' is not understood; allowed: turboquant"):
            serde_requested({"LMCACHE_SERDE": value})


def test_defaults() -> None:
    settings = settings_from_env({})
    assert settings.spec == CodecSpec()
    assert (settings.head_dim, settings.uint8_as, settings.repair, settings.backend) == (None, "none", True, "auto")
    assert 1 <= settings.workers <= 4


def test_every_variable_is_read() -> None:
    env = {
        "TQ_OFFLOAD_PRESET": "turboquant_k8v4", "TQ_OFFLOAD_KEY_BITS": "3", "TQ_OFFLOAD_VALUE_BITS": "2",
        "TQ_OFFLOAD_SEED": "5", "TQ_OFFLOAD_MEAN": "0", "TQ_OFFLOAD_KEY_RULE": "norm", "TQ_OFFLOAD_VALUE_RULE": "lsq",
        "TQ_OFFLOAD_QJL": "1", "TQ_OFFLOAD_KEY_OUTLIERS": "6", "TQ_OFFLOAD_PROTECT_FIRST": "1",
        "TQ_OFFLOAD_PROTECT_LAST": "2",
        "TQ_OFFLOAD_HEAD_DIM": "96", "TQ_OFFLOAD_WORKERS": "7", "TQ_OFFLOAD_THREADS": "3",
        "TQ_OFFLOAD_UINT8_AS": "float8_e5m2",
        "TQ_OFFLOAD_REPAIR": "0", "TQ_OFFLOAD_BACKEND": "reference", "TQ_OFFLOAD_BITS": "8",
    }  # fmt: skip
    env["TQ_OFFLOAD_FIT_RANGE"] = "0"
    assert set(env) == {f"TQ_OFFLOAD_{name.upper()}" for name in SERDE_SETTINGS}
    settings = settings_from_env(env)
    assert settings.spec == CodecSpec(
        key_bits=3, value_bits=2, seed=5, mean=False, fit_range=False, key_rule="norm", value_rule="lsq", qjl=True,
        key_outliers=6, protect_first=1, protect_last=2,
    )  # fmt: skip
    assert (settings.head_dim, settings.workers, settings.uint8_as) == (96, 7, "float8_e5m2")
    assert (settings.repair, settings.backend, settings.threads) == (False, "reference", 3)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TQ_OFFLOAD_BITS", "9"),
        ("TQ_OFFLOAD_BITS", "four"),
        ("TQ_OFFLOAD_BITS", ""),
        ("TQ_OFFLOAD_HEAD_DIM", "0"),
        ("TQ_OFFLOAD_HEAD_DIM", "-64"),
        ("TQ_OFFLOAD_WORKERS", "0"),
        ("TQ_OFFLOAD_WORKERS", "1.5"),
        ("TQ_OFFLOAD_UINT8_AS", "fp8"),
        ("TQ_OFFLOAD_REPAIR", "maybe"),
        ("TQ_OFFLOAD_BACKEND", "cuda"),
        ("TQ_OFFLOAD_PRESET", "best"),
        ("TQ_OFFLOAD_BIT", "4"),
        ("TQ_OFFLOAD_bits", "4"),
    ],
)
def test_errors_name_variable_value_and_what_is_allowed(variable: str, value: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings_from_env({variable: value})
    assert error.value.setting == variable
    assert re.match(f"{variable}='?{re.escape(value)}'? is not understood; allowed: .", str(error.value))


def test_an_explicit_serde_takes_the_rest_from_the_environment() -> None:
    env = {"TQ_OFFLOAD_BITS": "3", "TQ_OFFLOAD_HEAD_DIM": "80"}
    assert settings_from_serde({}, env).spec == CodecSpec(key_bits=3, value_bits=3)
    settings = settings_from_serde({"preset": "turboquant_k8v4", "max_workers": 2}, env)
    assert settings.spec == CodecSpec.preset("turboquant_k8v4"), "codec settings come from one place only"
    assert (settings.head_dim, settings.workers) == (80, 2)


def test_errors_of_an_explicit_serde() -> None:
    with pytest.raises(ConfigError, match=r"serde\.bit='4' is not understood"):
        settings_from_serde({"bit": "4"}, {})
    with pytest.raises(ConfigError, match=r"serde\.bits=9 is not understood"):
        settings_from_serde({"bits": 9}, {})
    with pytest.raises(ConfigError, match=r"serde\.max_workers='x' is not understood"):
        settings_from_serde({"max_workers": "x"}, {})
    with pytest.raises(ConfigError, match="either workers or max_workers"):
        settings_from_serde({"max_workers": 1, "workers": 1}, {})
    with pytest.raises(ConfigError, match="TQ_OFFLOAD_SEED"):
        settings_from_serde({"head_dim": 64}, {"TQ_OFFLOAD_SEED": "x"})
    with pytest.raises(ConfigError, match=r"^turboquant\.bits=9 is not understood"):
        settings_from_serde({"bits": 9}, {}, prefix="turboquant.")
    with pytest.raises(ConfigError, match=r"^turboquant\.max_workers='x' is not understood"):
        settings_from_serde({"max_workers": "x"}, {}, prefix="turboquant.")


def test_settings_of_tiers_are_named_as_written() -> None:
    settings = tier_settings({"redis_db": 3, "queue_gb": "0.5"}, {"TQ_OFFLOAD_REDIS_TTL_S": "5"})
    assert (settings.queue_gb, settings.redis) == (0.5, {"db": 3, "ttl_s": "5"})
    assert settings.redis_names == {"db": "turboquant.redis_db", "ttl_s": "TQ_OFFLOAD_REDIS_TTL_S"}
    with pytest.raises(ConfigError, match=r"^turboquant\.write_threads=0 is"):
        tier_settings({"write_threads": 0}, {})
    with pytest.raises(ConfigError, match=r"^mine=0 is"):
        tier_settings({"write_threads": 0}, {}, shown=lambda _: "mine")
    with pytest.raises(ConfigError, match=r"^TQ_OFFLOAD_WRITE_THREADS='0' is"):
        tier_settings({}, {"TQ_OFFLOAD_WRITE_THREADS": "0"})


@pytest.mark.parametrize("variable", ["TQ_OFFLOAD_REDISPASSWORD", "TQ_OFFLOAD_PASS", "TQ_OFFLOAD_REDISURL"])
def test_no_message_shows_what_may_be_a_password(variable: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{variable}='\.\.\.' is not understood") as error:
        settings_from_env({variable: "redis://:hunter2@h"})
    assert "hunter2" not in f"{error.value}{error.value.value}"
    with pytest.raises(ConfigError, match=r"^serde\.password='\.\.\.'"):
        settings_from_serde({"password": "hunter2"}, {})


def test_sizes_are_numbers_or_text() -> None:
    assert gib_to_bytes("x", "16") == gib_to_bytes("x", 16) == 16 << 30
    assert gib_to_bytes("x", 0.5) == 1 << 29
    for bad in ("", "much", 0, -1, True, None, float("nan"), float("inf"), 1 << 20):
        with pytest.raises(ConfigError, match=r"^x=.*a size in GiB, more than 0"):
            gib_to_bytes("x", bad)


def test_versions() -> None:
    assert not has_plugins("0.5.3")
    assert has_plugins("0.5.4")
    for good in ("0.5.3", "0.5.4", "0.5.6", "0.5.6.dev1+g12"):
        assert check_lmcache(good) == good
    for bad in ("0.5.2", "0.5.7", "0.6.0", "1.0.0", "0.4.9", "unknown"):
        with pytest.raises(IncompatibleError, match=f"lmcache {bad} is installed; supported: lmcache 0.5.3 to 0.5.6"):
            check_lmcache(bad)
