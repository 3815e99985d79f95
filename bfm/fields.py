# SPDX-License-Identifier: Apache-2.0
"""Settings as frozen dataclasses: a field's default, help and range; a mapping checked against them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


class SettingsError(ValueError):
    """A setting that is unknown, ill-typed or out of range; one line that names it."""


def field(default: Any, help: str, **check: Any) -> Any:
    """Declare a setting; check: low and high (inclusive), or among."""
    return dataclasses.field(default=default, metadata={"help": help, **check})


def build(kind: type, config: Mapping[str, Any], where: str = "") -> Any:
    """Check a mapping and return the settings class made of it; groups are classes of their own.

    Raises SettingsError naming the first bad field, below `where`.
    """
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in config:
        if key not in fields:
            raise SettingsError(f"{where}{key}: unknown setting; known: {', '.join(fields)}")
    values = {}
    for name, one in fields.items():
        if name not in config:
            continue
        value, label = config[name], where + name
        if dataclasses.is_dataclass(one.default_factory):
            if not isinstance(value, Mapping) and not hasattr(value, "keys"):
                raise SettingsError(f"{label}: must be a group of settings, not {value!r}")
            values[name] = build(one.default_factory, value, f"{label}.")
            continue
        values[name] = _checked(one, value, label)
    return kind(**values)


def _checked(one: dataclasses.Field, value: Any, label: str) -> Any:
    expected = type(one.default)
    if expected is float and type(value) is int:
        value = float(value)
    if type(value) is not expected:
        raise SettingsError(f"{label}: must be {expected.__name__}, not {value!r}")
    among = one.metadata.get("among")
    if among and value not in among:
        raise SettingsError(f"{label}: {value!r} is not one of {', '.join(map(str, among))}")
    low, high = one.metadata.get("low"), one.metadata.get("high")
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise SettingsError(f"{label}: must be {bounds}, not {value!r}")
    return value


def describe(kind: type, where: str = "") -> list[tuple[str, Any, str]]:
    """List (name, default, help) of every setting of a class, groups flattened with dots."""
    rows = []
    for one in dataclasses.fields(kind):
        name = where + one.name
        if dataclasses.is_dataclass(one.default_factory):
            rows += describe(one.default_factory, f"{name}.")
            continue
        text, among = one.metadata["help"], one.metadata.get("among")
        known = f" ({'|'.join(map(str, among))})" if among else ""
        rows.append((name, one.default, text + known))
    return rows
