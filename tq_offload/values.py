"""Values of settings: what is meant, or a text that says it; strictly."""

from __future__ import annotations

from collections.abc import Collection

from tq_offload.errors import ConfigError

__all__ = ["FALSE", "TRUE", "boolean", "choice", "integer"]

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def integer(name: str, value: object, low: int, high: int, *, typed: bool = False) -> int:
    """A whole number within bounds, or its digits unless `typed`.

    Raises:
        ConfigError: It is something else; the message calls it `name`, as all of these do.
    """
    text = value.strip() if isinstance(value, str) and not typed else ""
    number = int(text) if text.isascii() and text.isdigit() else value
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise ConfigError(name, value, f"an integer from {low} to {high}")
    return number


def boolean(name: str, value: object) -> bool:
    """One of TRUE and FALSE, in any case."""
    text = str(value).strip().lower()
    if text in TRUE or text in FALSE:
        return text in TRUE
    raise ConfigError(name, value, [*TRUE, *FALSE])


def choice(name: str, value: object, allowed: Collection[str]) -> str:
    """One of the texts that are allowed."""
    if value not in allowed:
        raise ConfigError(name, value, [*allowed])
    return str(value)
