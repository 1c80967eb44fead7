"""The settings as a table by key, derived from the classes of `settings.py`. Free of jax."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from logra_jax.settings import Config


@dataclass(frozen=True)
class Setting:
    """One leaf of the configuration: full key, type, default, help, allowed interval, where it has an effect."""

    key: str
    type: Any
    default: Any
    help: str
    within: str | None
    only: str

    def of(self, config: Config) -> Any:
        """Its value in a configuration."""
        found: Any = config
        for name in self.key.split("."):
            found = getattr(found, f"{name}_" if name == "async" else name)
        return found


def key_of(field: dataclasses.Field[Any]) -> str:
    """The name of a field in YAML."""
    return field.name.rstrip("_")  # `async` is a keyword of Python, so its attribute is `async_`


def _settings(section: type, prefix: str = "") -> Iterator[Setting]:
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _settings(cast(type, hints[field.name]), f"{key_of(field)}.")
        else:
            yield Setting(prefix + key_of(field), hints[field.name], field.default, **field.metadata)


SETTINGS: Mapping[str, Setting] = {setting.key: setting for setting in _settings(Config)}


def lies_within(interval: str, value: float) -> bool:
    """Whether a finite value lies in an interval written like "[0, 1)"."""
    low, high = interval[1:-1].split(", ")
    above = float(low) <= value if interval[0] == "[" else float(low) < value
    below = value <= float(high) if interval[-1] == "]" else value < float(high)
    return math.isfinite(value) and above and below
