"""Settings of the Redis store: every form of address, strictly, and never a password in a message."""

import dataclasses
import os
from pathlib import Path

import pytest

from tq_offload.errors import ConfigError
from tq_offload_connectors.redis.settings import OPTIONS, RedisSettings

SECRET = "s3cr:t/@word"


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("redis://cache", {"addresses": (("cache", 6379),)}),
        ("redis://cache:7000/3", {"addresses": (("cache", 7000),), "db": 3}),
        ("redis://cache/?db=4", {"addresses": (("cache", 6379),), "db": 4}),
        ("redis://[::1]:7000", {"addresses": (("::1", 7000),)}),
        ("redis://[::1]", {"addresses": (("::1", 6379),)}),
        ("redis://u%40x:s3cr%3At%2F%40word@cache", {"username": "u@x", "password": SECRET}),
        ("redis://:p@cache", {"username": None, "password": "p"}),
        ("redis://u@cache", {"username": "u", "password": None}),
        ("rediss://cache", {"tls": True, "mode": "single"}),
        ("valkey://cache", {"tls": False, "mode": "single"}),
        ("valkeys://cache", {"tls": True}),
        ("resp://cache:1", {"addresses": (("cache", 1),), "tls": False}),
        ("unix:///run/redis.sock?db=2", {"path": "/run/redis.sock", "db": 2}),
        ("unix://u:p@/run/redis.sock", {"path": "/run/redis.sock", "username": "u", "password": "p"}),
        ("redis-cluster://a:1,b:2", {"mode": "cluster", "addresses": (("a", 1), ("b", 2))}),
        ("rediss-cluster://a", {"mode": "cluster", "tls": True}),
        ("redis-sentinel://a,b:2/main", {"mode": "sentinel", "service": "main", "addresses": (("a", 26379), ("b", 2))}),
        ("redis-sentinel://a:1/main/5", {"service": "main", "db": 5}),
        ("redis://cache?decode_responses=False", {"addresses": (("cache", 6379),)}),
    ],
)
def test_forms_of_address(url: str, wanted: dict[str, object]) -> None:
    settings = RedisSettings.from_url(url)
    assert {name: getattr(settings, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    "url",
    [
        "", "cache", "cache:6379", "http://cache", "redis://", "redis:///0", "redis://a,b", "redis://cache:0",
        "redis://cache:65536", "redis://cache:x", "redis://cache/x", "redis://cache/-1", "redis://cache/0/1",
        "redis://cache#x", "redis://cache?db=x", "redis://cache?", "redis://cache?socket_timeout=1", "redis://::1",
        "redis://cache?decode_responses=True", "unix://", "unix://host/run/x", "redis-sentinel://a:1",
        "redis-cluster://a/1", "redis-cluster://a:1,,b:2", "redis://cache?db",
    ],
)  # fmt: skip
def test_addresses_that_are_refused(url: str) -> None:
    if url == "redis://cache?":  # an empty query says nothing
        RedisSettings.from_url(url)
        return
    with pytest.raises(ConfigError):
        RedisSettings.from_url(url)


def test_decode_responses_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="values are bytes; leave it out"):
        RedisSettings.from_url("redis://cache?decode_responses=True")


def test_options_also_as_text() -> None:
    settings = RedisSettings.from_url(
        "redis://cache", db="7", ttl_s="60", max_connections="3", retries="0", socket_timeout_s=0.5, key_prefix="a*:",
        tls_verify="no", cluster="false", pipeline_bytes="1000", backoff_base_s="1", backoff_cap_s=2,
    )  # fmt: skip
    assert (settings.db, settings.ttl_s, settings.max_connections, settings.retries) == (7, 60.0, 3, 0)
    assert (settings.socket_timeout_s, settings.key_prefix, settings.tls_verify) == (0.5, "a*:", False)
    assert (settings.mode, settings.pipeline_bytes, settings.backoff_cap_s) == ("single", 1000, 2.0)


def test_an_option_wins_over_the_url() -> None:
    settings = RedisSettings.from_url("redis://u:p@cache/1", username="v", password="q", db=2)
    assert (settings.username, settings.password, settings.db) == ("v", "q", 2)


def test_none_is_an_option_left_out() -> None:
    assert RedisSettings.from_url("redis://u:p@cache", password=None, ttl_s=None).password == "p"


def test_a_cluster_by_option() -> None:
    assert RedisSettings.from_url("redis://cache", cluster=True).mode == "cluster"


@pytest.mark.parametrize(
    "options",
    [
        {"db": -1}, {"db": True}, {"db": 1.5}, {"db": "x"}, {"ttl_s": 0}, {"ttl_s": "nan"}, {"ttl_s": "inf"},
        {"ttl_s": True}, {"max_connections": 0}, {"retries": -1}, {"retries": 11}, {"socket_timeout_s": 0},
        {"connect_timeout_s": -1}, {"backoff_base_s": 3, "backoff_cap_s": 2}, {"pipeline_bytes": 0},
        {"key_prefix": ""}, {"tls_verify": "maybe"}, {"cluster": "perhaps"}, {"cluster": True, "db": 1},
        {"tls_ca_certs": "ca.pem"}, {"password": ""}, {"password": 5}, {"unknown": 1}, {"addresses": ()},
        {"decode_responses": False},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RedisSettings.from_url("redis://cache", **options)


@pytest.mark.parametrize("url", ["redis-sentinel://a/main", "unix:///run/x"])
def test_cluster_with_another_kind_of_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        RedisSettings.from_url(url, cluster=True)


def test_messages_name_the_setting_as_the_user_wrote_it() -> None:
    with pytest.raises(ConfigError, match="TQ_REDIS_RETRIES='many'"):
        RedisSettings.from_mapping(
            {"url": "redis://cache", "retries": "many"}, shown=lambda name: f"TQ_REDIS_{name.upper()}"
        )
    with pytest.raises(ConfigError, match="TQ_REDIS_URL=None"):
        RedisSettings.from_mapping({}, shown=lambda name: f"TQ_REDIS_{name.upper()}")


@pytest.mark.parametrize(
    "values",
    [
        {"url": f"http://u:{SECRET}@cache"},
        {"url": "redis://u:s3cr:t/@word@cache"},
        {"url": "redis://u:s3cr:t?a=@word@cache"},
        {"url": "redis://u:s3cr:t#@word@cache"},
        {"url": "redis:u:s3cr:t@cache"},
        {"url": "redis://u:s3cr:t@cache:x"},
        {"url": "redis://u:s3cr:t@cache?password=s3cr:t"},
        {"url": "redis://cache", "passwort": "s3cr:t"},
        {"url": "redis://cache", "password": ["s3cr:t"]},
        {"url": "redis://cache", "redispassword": "s3cr:t"},
        {"url": "redis://localhost?password=s3cr:t&x"},
        {"url": "redis://u:p@localhost?password=s3cr:t&x"},
        {"url": "redis://localhost?password=p@s3cr:t&x"},
        {"url": "redis://localhost#s3cr:t"},
        {"url": "redis://u:s3cr:t"},
        {"url": "redis://:s3cr/t"},
        {"url": "redis:u:s3cr:t"},
        {"url": b"redis://u:s3cr:t@cache"},
        {"url": ["redis://u:s3cr:t@cache"]},
    ],
    ids=str,
)
def test_no_message_shows_a_password(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisSettings.from_mapping(values)
    error: BaseException | None = caught.value
    while error is not None:
        assert "s3cr" not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://cache:1/2", "http://cache:1/2"), ("cache:6379", "cache:6379"), ("redis://cache:65536", None),
        ("redis://[::1]:0,b:2/main?x", "redis://[::1]:0,b:2/main?..."), ("redis://u:p@cache:x/3", "redis://***@cache:x/3"),
        ("redis://cache:x", "redis://..."), ("redis://u:p?@cache", "redis://..."), ("", None),
        ("redis://u:12?34@cache", "redis://..."),
    ],
)  # fmt: skip
def test_messages_show_of_an_address_what_can_be_no_password(url: str, shown: "str | None") -> None:
    with pytest.raises(ConfigError) as caught:
        RedisSettings.from_url(url)
    assert caught.value.value == (url if shown is None else shown)


@pytest.mark.parametrize("name", ["tls_ca_certs", "tls_cert", "tls_key"])
def test_files_that_cannot_be_read_are_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file.pem"
    for path in (file, tmp_path, f"{file}\0"):
        with pytest.raises(ConfigError, match=f"^{name}=.*a file that is there"):
            RedisSettings.from_url("rediss://cache", **{name: str(path)})
    file.touch(0o600)
    assert getattr(RedisSettings.from_url("rediss://cache", **{name: str(file)}), name) == str(file)
    if os.geteuid():  # root reads everything
        file.chmod(0)
        with pytest.raises(ConfigError, match="can be read"):
            RedisSettings.from_url("rediss://cache", **{name: str(file)})


def test_neither_repr_nor_description_shows_a_password() -> None:
    settings = RedisSettings.from_url("rediss://user:s3cr%3At@cache:7/2", key_prefix="p:")
    assert settings.password == "s3cr:t"
    assert "s3cr" not in repr(settings)
    assert settings.describe() == "rediss://cache:7, database 2, keys p:*"
    assert RedisSettings.from_url("unix:///run/x").describe() == "unix:///run/x, database 0, keys tq:*"
    sentinel = RedisSettings.from_url("redis-sentinel://[::1]:1,b/main")
    assert sentinel.describe() == "redis-sentinel://[::1]:1,b:26379/main, database 0, keys tq:*"


def test_every_option_is_a_field() -> None:
    assert set(OPTIONS) - {"cluster"} < {field.name for field in dataclasses.fields(RedisSettings)}
