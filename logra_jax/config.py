"""Reads, checks, shows and writes the settings of a run (`settings.py` holds the settings themselves)."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from logra_jax.errors import UserError
from logra_jax.rules import EXCLUSIVE, check, check_lengths, conditions, idle, reset
from logra_jax.schema import SETTINGS, Setting, key_of, lies_within
from logra_jax.settings import Config

PACKAGED = Path(__file__).parent / "demo"
PACKAGED_PREFIX = "demo:"
COMMAND_LINE = "command line"  # the place of a setting that was given there

__all__ = ["Config", "check_lengths", "check_paths", "format_help", "load_config", "resolve_path", "to_yaml"]


SECTIONS = frozenset(key.split(".")[0] for key in SETTINGS if "." in key)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file (None: the packaged demo), apply `key=value` overrides, and check everything.

    On the command line the value of a text setting is taken literally, without quotes; everything else is
    read as YAML (`null`, `true`, `1e-6`, `[a,b]`). `${key}` refers to another key set in the file or
    on the command line. Where the command line makes another choice than the file (`kl.control=false`,
    `optimizer.name=adamw`, a learning_rate instead of an update_ratio), the file's settings for its own choice
    go back to their defaults; in any other place, a setting that does nothing is an error. Raises UserError.
    """
    file = PACKAGED / "demo.yaml" if path is None else Path(path)
    merged, places = _read_file(file)
    for item in overrides:
        key, value = _read_override(item)
        OmegaConf.update(merged, key, value, force_add=True)
        places[key] = COMMAND_LINE
    try:
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{file}: cannot be resolved: {str(error).splitlines()[0]}") from None
    config = _build(Config, cast(dict[str, Any], values), "", places)

    def replaced(setting: Setting) -> bool:
        chosen = {places.get(key) for key, *_ in conditions(setting.only)}
        return COMMAND_LINE in chosen and places[setting.key] != COMMAND_LINE

    def said(key: str) -> bool:
        return places.get(key) == COMMAND_LINE and SETTINGS[key].of(config) != SETTINGS[key].default

    pairs = [pair for one, other in EXCLUSIVE for pair in ((one, other), (other, one))]
    config = reset(config, [SETTINGS[theirs] for mine, theirs in pairs if said(mine) and not said(theirs)])
    config = reset(config, filter(replaced, idle(config)))
    check(config)
    return config


def _read_file(file: Path) -> tuple[DictConfig, dict[str, str]]:
    """The file's values, and for every full key where it stands, for messages."""
    try:
        text = file.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = OmegaConf.create(text) if root is not None else OmegaConf.create()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise UserError(f"{file}: is not valid YAML: {error}") from None
    if not isinstance(values, DictConfig):
        raise UserError(f"{file}: expected `key: value` lines at the top level")
    places = {}
    for key, node, line in _lines(root):
        places[key] = f"{file}, line {line}"
        if key in SECTIONS and not isinstance(node, yaml.MappingNode):
            raise UserError(f"{places[key]}: {key} is a section: put its keys below it, indented")
        if key not in SECTIONS and key not in SETTINGS:
            raise _unknown(key, places[key])
    return values, places


def _lines(root: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, yaml.Node, int]]:
    if isinstance(root, yaml.MappingNode):
        for name, node in root.value:
            key = f"{prefix}{name.value}"
            yield key, node, name.start_mark.line + 1
            if key not in SETTINGS:
                yield from _lines(node, f"{key}.")


def _read_override(item: str) -> tuple[str, Any]:
    key, equals, text = item.partition("=")
    if not equals:
        raise UserError(f"command line: {item!r}: expected key=value, such as steps=10")
    if key in SECTIONS:
        raise UserError(f"command line: {key} is a section: set one of its keys, such as {_members(key)[0]}=...")
    if key not in SETTINGS:
        raise _unknown(key, "command line")
    kinds = _alternatives(SETTINGS[key].type)
    if str in kinds or any(typing.get_origin(kind) is Literal for kind in kinds):
        return key, None if text == "null" and type(None) in kinds else text
    try:
        values = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"command line: {key}: {text!r} cannot be read: {str(error).splitlines()[0]}") from None
    return key, cast(dict[str, Any], values)["value"]


def _members(section: str) -> list[str]:
    return [key for key in SETTINGS if key.startswith(f"{section}.")]


def _unknown(key: str, place: str) -> UserError:
    """Name the valid key that was probably meant: the same name elsewhere, else the most similar name."""
    plain = key.replace("-", "_").lower()
    section, _, leaf = plain.rpartition(".")
    names = {full: full.rpartition(".")[2] for full in SETTINGS}
    meant = [plain] if plain in SETTINGS else [full for full in SETTINGS if names[full] == leaf]
    if not meant:
        in_section = {names[full] for full in _members(section)}  # a slip in the name before one in the section
        near = difflib.get_close_matches(leaf, sorted(in_section or set(names.values())), n=1, cutoff=0.7)
        meant = [full for full in SETTINGS if names[full] in near and (not in_section or full.startswith(section))]
    if meant:
        return UserError(f"{place}: unknown key {key!r}: did you mean {' or '.join(meant)}?")
    sections = difflib.get_close_matches(plain.partition(".")[0], sorted(SECTIONS), n=1)
    if sections:
        return UserError(f"{place}: unknown key {key!r}: valid are {', '.join(_members(sections[0]))}")
    return UserError(f"{place}: unknown key {key!r}: --help lists all keys")


def _build(section: type, values: Mapping[str, Any], prefix: str, places: Mapping[str, str]) -> Any:
    hints = typing.get_type_hints(section)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        name, hint = key_of(field), hints[field.name]
        if name not in values:
            continue
        if dataclasses.is_dataclass(hint):
            found[field.name] = _build(cast(type, hint), values[name], f"{name}.", places)
        else:
            key = prefix + name
            found[field.name] = _convert(SETTINGS[key], values[name], places[key])
    return section(**found)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    # A Literal beside None makes a Union of the older kind.
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def _convert(setting: Setting, value: Any, place: str) -> Any:
    """The value in the setting's type, or a UserError with key, place, expectation and finding."""
    kinds = _alternatives(setting.type)
    for kind in kinds:
        converted = _as(kind, value)
        if converted is not _NO:
            break
    else:
        found = _show(value) if isinstance(value, str | None) else f"{_show(value)} ({type(value).__name__})"
        raise UserError(
            f"{place}: {setting.key}: expected {_type_text(kinds)}, found {found}{_near_choice(kinds, value)}"
        )
    if setting.within and converted is not None and not lies_within(setting.within, converted):
        raise UserError(f"{place}: {setting.key}: must lie in {setting.within}, found {_show(value)}")
    return converted


_NO = object()


def _as(kind: Any, value: Any) -> Any:
    """`value` as `kind`, or _NO. A float may be text (YAML 1.1 reads 1e-6 so), nothing else bends."""
    if typing.get_origin(kind) is Literal:
        if isinstance(value, bool):  # YAML 1.1 reads a bare off or on as a truth value
            value = "on" if value else "off"
        return value if value in typing.get_args(kind) else _NO
    if typing.get_origin(kind) is tuple:
        kinds = _alternatives(typing.get_args(kind)[0])
        return tuple(value) if isinstance(value, list) and all(type(x) in kinds for x in value) else _NO
    if kind is float:
        return _as_float(value)
    return value if type(value) is kind else _NO


def _as_float(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return _NO
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return _NO
    return number if math.isfinite(number) else _NO


def _type_text(kinds: Sequence[Any]) -> str:
    names = {int: "int", float: "float", bool: "true or false", str: "text", type(None): "null"}
    texts = []
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            texts.append(" or ".join(typing.get_args(kind)))
        elif typing.get_origin(kind) is tuple:
            texts.append("a list of texts such as [q_proj, v_proj]")
        else:
            texts.append(names[kind])
    return " or ".join(texts)


def _near_choice(kinds: Sequence[Any], value: Any) -> str:
    choices = [choice for kind in kinds if typing.get_origin(kind) is Literal for choice in typing.get_args(kind)]
    near = difflib.get_close_matches(str(value), choices, n=1)
    return f": did you mean {near[0]}?" if near else ""


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return repr(value)


def resolve_path(value: str) -> Path:
    """The file or folder a setting names; `demo:NAME` lies in the package's demo folder."""
    if value.startswith(PACKAGED_PREFIX):
        return PACKAGED / value.removeprefix(PACKAGED_PREFIX)
    return Path(value).expanduser()


def check_paths(config: Config, trains: bool = True) -> None:
    """Refuse missing data files (data.train only if it `trains`) or model folder. Raises UserError."""
    files = [("data.train", config.data.train)] if trains else []
    if config.data.eval is not None:
        files.append(("data.eval", config.data.eval))
    for key, value in files:
        if not value:
            raise UserError(f"{key} is not set: give a JSONL or Parquet file, or a mixture of tasks (YAML)")
        if not resolve_path(value).is_file():
            raise UserError(f"{key}={value}: no such file (current directory: {Path.cwd()})")
    if not config.model.path and config.model.preset is not None:
        raise UserError(
            f"model.path is not set, and model.preset={config.model.preset} has no weights: it serves "
            "python -m logra_jax.plan; fetch the model and give its folder as model.path"
        )
    if not config.model.path:
        raise UserError("model.path is not set: give a folder in Hugging Face layout, or demo:model")
    if not (resolve_path(config.model.path) / "config.json").is_file():
        run = (resolve_path(config.model.path) / "hf" / "config.json").is_file()
        hint = f"; did you mean {config.model.path}/hf?" if run else f" (current directory: {Path.cwd()})"
        raise UserError(f"model.path={config.model.path}: no folder with a config.json{hint}")


def as_dict(config: Any) -> dict[str, Any]:
    """Nested plain values with the keys of the YAML file."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found[key_of(field)] = as_dict(value)
        else:
            found[key_of(field)] = list(value) if isinstance(value, tuple) else value
    return found


def to_yaml(config: Config) -> str:
    """Every setting with its value, as YAML that `load_config` reads back to an equal configuration."""

    def escaped(value: Any) -> Any:  # a literal ${ must not be taken for a reference to another setting
        if isinstance(value, dict):
            return {key: escaped(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [escaped(inner) for inner in value]
        return value.replace("${", "\\${") if isinstance(value, str) else value

    return yaml.safe_dump(escaped(as_dict(config)), sort_keys=False, allow_unicode=True, width=110)


def format_help() -> str:
    """Every key with its default and meaning, section by section."""
    lines = []
    section = None
    docs = {key_of(f): typing.get_type_hints(Config)[f.name].__doc__ for f in dataclasses.fields(Config)}
    for setting in SETTINGS.values():
        head = setting.key.split(".")[0] if "." in setting.key else None
        if head != section:
            lines += ["", f"{head}: {docs[head]}" if head else ""]
            section = head
        notes = []
        kinds = _alternatives(setting.type)
        if any(typing.get_origin(kind) is Literal for kind in kinds):
            notes.append(_type_text(kinds))
        if setting.within and ("inf" not in setting.within or setting.within[0] == "("):
            notes.append(f"in {setting.within}")
        if setting.only:
            notes.append(f"only with {setting.only}")
        default = yaml.safe_dump(setting.default, default_flow_style=True).removesuffix("\n...\n").strip()
        notes.append(f"default {default}")
        lines.append(f"  {setting.key:<32}{setting.help} ({'; '.join(notes)})")
    return "\n".join(lines).lstrip("\n")
