"""Typed settings: a value from YAML becomes the declared type, inside the declared range.

Only harmless conversions are made (an integer for a number, a list for a tuple).
"""

import types
import typing
from dataclasses import field
from typing import Any, Literal

from attnknn.checks import check_one_of, check_range


class ConfigError(ValueError):
    """A parameter that cannot be used, with the reason."""


def option(
    default: Any,
    *,
    low: int | float | None = None,
    high: int | float | None = None,
    open_low: bool = False,
):
    """Declare a setting with its default and, for numbers, its closed range."""
    return field(default=default, metadata={"low": low, "high": high, "open_low": open_low})


def checked_value(entry: Any, hint: Any, value: Any) -> Any:
    """Return ``value`` in the declared type, inside the declared range."""
    converted = _converted(entry.name, hint, value)
    low, high = entry.metadata["low"], entry.metadata["high"]
    numbers = converted if isinstance(converted, tuple) else (converted,)
    for number in numbers:
        if isinstance(number, int | float) and not isinstance(number, bool):
            try:
                check_range(
                    entry.name,
                    number,
                    low=-float("inf") if low is None else low,
                    high=float("inf") if high is None else high,
                    low_open=entry.metadata["open_low"],
                )
            except ValueError as error:
                raise ConfigError(str(error)) from None
    return converted


def _converted(name: str, hint: Any, value: Any) -> Any:
    """Return ``value`` as ``hint`` asks, or refuse; only harmless conversions are made."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        try:
            return check_one_of(name, value, typing.get_args(hint))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if origin in (types.UnionType, typing.Union):
        return _converted_to_any(name, typing.get_args(hint), value)
    if origin is tuple:
        return _converted_tuple(name, typing.get_args(hint)[0], value)
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads 2e-4 as a string: it wants a dot in the mantissa.
        value = _number_or_same(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(
        f"{name} must be {_spoken(hint)}, got {name}={value!r} ({type(value).__name__})"
    )


def _converted_to_any(name: str, hints: tuple[Any, ...], value: Any) -> Any:
    for hint in hints:
        try:
            return value if hint is type(None) and value is None else _converted(name, hint, value)
        except ConfigError:
            continue
    spoken = " or ".join(_spoken(hint) for hint in hints)
    raise ConfigError(f"{name} must be {spoken}, got {name}={value!r} ({type(value).__name__})")


def _converted_tuple(name: str, inner: Any, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} must be a list, got {name}={value!r} ({type(value).__name__})")
    return tuple(_converted(name, inner, item) for item in value)


def _number_or_same(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _spoken(hint: Any) -> str:
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a list of {_spoken(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is tuple:
        return "a list"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, str(hint))
