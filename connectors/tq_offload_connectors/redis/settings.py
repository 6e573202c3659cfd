"""Settings of the Redis store: an address as a URL, and options, strictly."""

from __future__ import annotations

import math
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tq_offload.errors import ConfigError
from tq_offload.values import FALSE, boolean, integer

__all__ = ["MODES", "OPTIONS", "RedisSettings"]

MODES = ("single", "cluster", "sentinel")

Address = tuple[str, int]

_PORT, _SENTINEL_PORT = 6379, 26379
_SCHEMES = {  # scheme -> mode, TLS
    "redis": ("single", False), "rediss": ("single", True), "unix": ("single", False),
    "valkey": ("single", False), "valkeys": ("single", True), "resp": ("single", False),
    "redis-cluster": ("cluster", False), "rediss-cluster": ("cluster", True),
    "redis-sentinel": ("sentinel", False), "rediss-sentinel": ("sentinel", True),
}  # fmt: skip
_URL_FORMS = (
    "redis://[user:password@]host[:port][/db], rediss:// (TLS), valkey://, valkeys://, resp://, unix:///path[?db=n], "
    "redis-cluster://host:port[,host:port], redis-sentinel://host:port[,host:port]/service[/db]"
)
_SCHEME = re.compile(r"[A-Za-z-]+://")
_HOST = r"(?:\[[0-9A-Fa-f:.]*\]|[\w.-]*)(?::\d{1,5})?"
_SHOWN = re.compile(  # after "user:password@" anything may be a host; without it, what could be a password is none
    rf"(?P<user>[^/?#]*@(?=[^@]*$))?(?P<hosts>(?(user)[^@?#]*|{_HOST}(?:,{_HOST})*(?:/[^@?#]*)?))(?P<query>[?#][^@]*)?"
)


@dataclass(frozen=True)
class RedisSettings:
    """Where a Redis store connects, and how long it waits.

    Args:
        addresses: Host and port of the server, of the Sentinels, or of some nodes of the cluster.
        path: Unix socket instead of an address.
        mode: `single`, `cluster` or `sentinel`.
        service: Name under which the Sentinels know the master.
        tls: Encrypted connections.
        db: Database; a cluster has only 0.
        username, password: None: none is sent. They are not sent to Sentinels.
        key_prefix: Comes before every key; the store lists and clears only keys with it.
        ttl_s: Seconds after which the server drops an entry that was not stored anew; None: never.
        max_connections: Connections at most, for each node of a cluster.
        connect_timeout_s: Longest wait for a connection.
        socket_timeout_s: Longest wait for the server to take an argument or send a reply, and for a free connection.
        retries: How often a call whose connection broke is tried again, at once. A timeout is not tried again.
        backoff_base_s, backoff_cap_s: Pause after the first failure in a row, doubled with each, and its maximum.
        pipeline_bytes: Most bytes of values that one pipeline sends; a larger value goes alone.
        tls_ca_certs, tls_cert, tls_key: Files in PEM; None: the system's authorities, no certificate of our own.
        tls_verify: Check the server's certificate and host name.
    """

    addresses: tuple[Address, ...] = (("localhost", _PORT),)
    path: str | None = None
    mode: str = "single"
    service: str | None = None
    tls: bool = False
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    key_prefix: str = "tq:"
    ttl_s: float | None = None
    max_connections: int = 16
    connect_timeout_s: float = 1.0
    socket_timeout_s: float = 5.0
    retries: int = 1
    backoff_base_s: float = 0.1
    backoff_cap_s: float = 5.0
    pipeline_bytes: int = 32 << 20
    tls_ca_certs: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_verify: bool = True

    @classmethod
    def from_url(cls, url: str, **options: object) -> RedisSettings:
        """The settings of an address and options; an option wins over what the URL says.

        Args:
            url: One of the forms that the error of a wrong one lists. User and password are percent-decoded.
            options: Fields of this class from `db` on, and `cluster=True` for a `redis://` address of a cluster.

        Raises:
            ConfigError: A URL or option that is not understood; its message shows no password.
        """
        return cls.from_mapping({"url": url, **options})

    @classmethod
    def from_mapping(cls, values: Mapping[str, object], shown: Callable[[str], str] = str) -> RedisSettings:
        """The settings of `url` and the options of `from_url`, also as text.

        Args:
            values: What was given.
            shown: From the name of a setting to what the user called it, for messages.

        Raises:
            ConfigError: `url` is missing, an unknown name, or a value that is not allowed.
        """
        for name in values:
            if name not in (*OPTIONS, "url"):  # the value is not shown: it may be a password
                raise ConfigError(shown(name), "...", "one of " + ", ".join(("url", *OPTIONS)))
        found = _parse_url(values.get("url"), shown("url"))
        for name, parse in _PARSERS.items():
            if name in values and values[name] is not None:
                found[name] = parse(shown(name), values[name])
        if found.pop("cluster", False):
            if found["mode"] == "sentinel" or "path" in found:
                raise ConfigError(shown("cluster"), True, "false with the address of a Sentinel or a unix socket")
            found["mode"] = "cluster"
        settings = cls(**found)  # type: ignore[arg-type]
        settings._check(shown)
        return settings

    def _check(self, shown: Callable[[str], str]) -> None:
        if self.mode == "cluster" and self.db:
            raise ConfigError(shown("db"), self.db, "0 on a cluster")
        if self.backoff_cap_s < self.backoff_base_s:
            raise ConfigError(shown("backoff_cap_s"), self.backoff_cap_s, f"{self.backoff_base_s} or more")
        for name in ("tls_ca_certs", "tls_cert", "tls_key"):
            path = getattr(self, name)
            if path is None:
                continue
            if not self.tls:
                raise ConfigError(shown(name), path, "unset unless the url is rediss:// or valkeys://")
            if not (os.path.isfile(path) and os.access(path, os.R_OK)):
                raise ConfigError(shown(name), path, "a file that is there and can be read")

    def describe(self) -> str:
        """The address and prefix, without user and password."""
        if self.path is not None:
            where = f"unix://{self.path}"
        else:
            scheme = ("rediss" if self.tls else "redis") + ("" if self.mode == "single" else f"-{self.mode}")
            hosts = ",".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in self.addresses)
            where = f"{scheme}://{hosts}" + (f"/{self.service}" if self.service else "")
        return f"{where}, database {self.db}, keys {self.key_prefix}*"


def _parse_url(value: object, name: str) -> dict[str, object]:
    if not isinstance(value, str):
        raise ConfigError(name, None if value is None else "...", _URL_FORMS)
    refused = ConfigError(name, _without_password(value), _URL_FORMS)
    try:
        url = urllib.parse.urlsplit(value)
        mode, tls = _SCHEMES[url.scheme]
        if url.scheme != "unix" and "@" in url.path + url.query + url.fragment:  # "/", "?" or "#" in a password
            raise refused
        userinfo, _, hosts = url.netloc.rpartition("@")
        found: dict[str, object] = {"mode": mode, "tls": tls, **_parse_user(userinfo)}
        found |= _parse_query(url.query, name)
        path = urllib.parse.unquote(url.path)
        if url.scheme == "unix":
            if hosts or not path.startswith("/") or path == "/":
                raise refused
            return {**found, "path": path}
        default_port = _SENTINEL_PORT if mode == "sentinel" else _PORT
        found["addresses"] = tuple(_parse_address(host, default_port) for host in hosts.split(","))
        parts = [part for part in path.split("/") if part]
        if mode == "sentinel":
            found["service"] = parts.pop(0)
        if mode == "single" and len(hosts.split(",")) > 1:
            raise refused
        if parts:
            found["db"] = integer(f"the database of {name}", parts.pop(0), 0, 1 << 31)
    except (KeyError, IndexError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise refused from None  # the cause may quote the password
    if parts or url.fragment:
        raise refused
    return found


def _parse_user(userinfo: str) -> dict[str, object]:
    user, _, password = userinfo.partition(":")
    found = {"username": urllib.parse.unquote(user), "password": urllib.parse.unquote(password)}
    return {name: text for name, text in found.items() if text}


def _parse_address(text: str, default_port: int) -> Address:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(default_port)
    if not host or (":" in host and not host.startswith("[")) or not (port.isascii() and port.isdigit()):
        raise ValueError(text)
    if not 0 < int(port) < 1 << 16:
        raise ValueError(text)
    return host.strip("[]"), int(port)


def _parse_query(query: str, name: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in urllib.parse.parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
        if key == "db":
            found["db"] = integer(f"the database of {name}", value, 0, 1 << 31)
        elif key == "decode_responses":
            if value.lower() not in FALSE:
                raise ConfigError(f"decode_responses in {name}", value, "false: values are bytes; leave it out")
        else:
            raise ConfigError(f"{key} in {name}", "...", "db alone; everything else is an option beside the url")
    return found


def _without_password(url: str) -> str:
    """The URL without user and query; where a password may be in any other part of it, its scheme alone."""
    scheme = _SCHEME.match(url)
    start = scheme[0] if scheme else ""
    found = _SHOWN.fullmatch(url, len(start))
    if found is None:
        return f"{start}..."
    user, hosts, query = found.group("user", "hosts", "query")
    return f"{start}{'***@' if user else ''}{hosts}{'?...' if query else ''}"


def _seconds(name: str, value: object, low: float = 0.001, high: float = 3600.0) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not low <= number <= high:
        raise ConfigError(name, value, f"seconds from {low:g} to {high:g}")
    return number


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(name, value, "a text that is not empty")
    return value


def _secret(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(name, "...", "a text that is not empty")
    return value


_PARSERS: dict[str, Callable[[str, object], object]] = {
    "db": lambda name, value: integer(name, value, 0, 1 << 31),
    "cluster": boolean,
    "username": _text,
    "password": _secret,
    "key_prefix": _text,
    "ttl_s": lambda name, value: _seconds(name, value, 0.001, 10 * 365 * 86400.0),
    "max_connections": lambda name, value: integer(name, value, 1, 10000),
    "connect_timeout_s": _seconds,
    "socket_timeout_s": _seconds,
    "retries": lambda name, value: integer(name, value, 0, 10),
    "backoff_base_s": _seconds,
    "backoff_cap_s": _seconds,
    "pipeline_bytes": lambda name, value: integer(name, value, 1, 1 << 40),
    "tls_ca_certs": _text,
    "tls_cert": _text,
    "tls_key": _text,
    "tls_verify": boolean,
}

OPTIONS = tuple(_PARSERS)
"""Names of the options beside `url`."""
