# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""All keys of the config, each with its type, default and meaning, read from the dataclasses.

--help lists them, docs/reference.py writes a page of them, and the name of a key that does not
exist is compared with theirs.
"""

import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from types import UnionType
from typing import Any

from earl_jax.algorithms.algorithms import ALGORITHMS
from earl_jax.config.config import Config
from earl_jax.models.config import MODEL_SETTINGS, ModelConfig

_COLUMNS = 100
# The first line of the settings in --help.
SETTINGS = "settings, given as --config.KEY=VALUE:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """One setting: its path, such as "config.train.epochs", and its description.

    `choices` are the values of a `Literal` type; else `type` says the type in a word or two.
    """

    path: str
    type: str
    choices: tuple[Any, ...]
    default: Any
    meaning: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """The keys of one record of settings; `about` is what its docstring says of all of them."""

    path: str
    about: str
    keys: tuple[Key, ...]


def sections_of(cls: type, path: str) -> Iterator[Section]:
    """Yields the section of a dataclass of settings, and those of its fields after it."""
    types, inner = typing.get_type_hints(cls), []
    about, by_field = _descriptions(cls)
    keys, first_of = [], {}
    for field in dataclasses.fields(cls):
        if cls is ModelConfig and field.name not in MODEL_SETTINGS:
            continue
        kind = types[field.name]
        if dataclasses.is_dataclass(kind):
            inner.append((typing.cast(type, kind), f"{path}.{field.name}"))
            continue
        words = []
        for text in by_field.get(field.name, []):
            first = first_of.setdefault(text, field.name)
            words.append(text if first == field.name else f"See `{first}`.")
        is_literal = typing.get_origin(kind) is typing.Literal
        keys.append(
            Key(
                path=f"{path}.{field.name}",
                type=_type_name(kind),
                choices=typing.get_args(kind) if is_literal else (),
                default=_default(field),
                meaning=" ".join(dict.fromkeys(words)),
            )
        )
    yield Section(path=path, about=about, keys=tuple(keys))
    for kind, name in inner:
        yield from sections_of(kind, name)


def algorithm_sections() -> Iterator[tuple[str, Section]]:
    """Yields the name of each algorithm that has settings, and these.

    Where an algorithm before it has all of the keys, only those with other defaults.
    """
    shown: dict[type, str] = {}
    for name, algorithm in ALGORITHMS.items():
        settings = algorithm.settings
        for section in sections_of(type(settings), "config.algorithm_args"):
            keys = [
                dataclasses.replace(key, default=getattr(settings, key.path.rpartition(".")[2]))
                for key in section.keys
            ]
            first, about = shown.setdefault(type(settings), name), section.about
            if first != name:
                others = ALGORITHMS[first].settings
                keys = [k for k in keys if k.default != getattr(others, k.path.rpartition(".")[2])]
                about = f'The settings of "{first}"' + ", with other defaults:" * bool(keys)
            if section.keys:
                yield name, dataclasses.replace(section, about=about, keys=tuple(keys))


def all_keys() -> list[str]:
    """Returns the path of every key, those of the algorithms' settings among them."""
    sections = [*sections_of(Config, "config"), *(section for _, section in algorithm_sections())]
    return list(dict.fromkeys(key.path for section in sections for key in section.keys))


def settings_help() -> str:
    """Returns the text of --help about every key."""
    lines = [SETTINGS, "(with the defaults of what the config file does not set)"]
    for section in sections_of(Config, "config"):
        lines += _section_help(section, section.path)
    for name, section in algorithm_sections():
        lines += _section_help(section, f'{section.path} with config.algorithm="{name}"')
    return "\n".join(lines)


def _section_help(section: Section, title: str) -> Iterator[str]:
    yield f"\n{title}"
    for key in section.keys:
        kind = " | ".join(map(repr, key.choices)) or key.type
        is_record = dataclasses.is_dataclass(key.default)
        default = "" if is_record else f" = {key.default!r}"
        head = f"{key.path.removeprefix('config.')}{default}  ({kind})"
        yield from textwrap.wrap(head, _COLUMNS, initial_indent="  ", subsequent_indent="      ")
        yield from textwrap.wrap(
            key.meaning.replace("**", ""),
            _COLUMNS,
            initial_indent="      ",
            subsequent_indent="      ",
            break_on_hyphens=False,
        )


def _descriptions(cls: type) -> tuple[str, dict[str, list[str]]]:
    """Returns what a docstring says of the whole record, and of each field.

    A sentence is about the fields that it names in backticks; one that names none goes on from the
    sentence before it in its paragraph.
    """
    names, about, by_field = {field.name for field in dataclasses.fields(cls)}, [], {}
    # The fields of a record that this one extends are described there.
    bases = [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
    texts = [inspect.cleandoc(cls.__doc__ or "")]
    texts += [inspect.cleandoc(base.__doc__ or "").partition("\n\n")[2] for base in bases]
    for paragraph in re.split(r"\n\n|\n- ", "\n\n".join(texts)):
        text, named = "", set()
        for sentence in re.split(r"(?<=[.:;])\s+(?=[A-Z`\"])", " ".join(paragraph.split())):
            quoted = " ".join(re.findall(r"`([^`]+)`", sentence))
            found = {word.split(".")[0] for word in re.findall(r"[\w.]+", quoted)} & names
            if found and text:
                _add(by_field, about, named, text)
                text, named = "", set()
            named |= found
            text = f"{text} {sentence}".strip()
        _add(by_field, about, named, text)
    return "\n\n".join(about), by_field


def _add(by_field: dict[str, list[str]], about: list[str], names: set[str], text: str) -> None:
    for name in names:
        by_field.setdefault(name, []).append(text)
    if not names:
        about.append(text)


def _type_name(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return "choice"
    if origin is tuple:
        return f"list of {arguments[0].__name__}"
    if origin in (typing.Union, UnionType):
        plain, word = arguments
        return f"{plain.__name__} or {' or '.join(typing.get_args(word))}"
    if origin is not None:
        return "dict"
    return getattr(kind, "__name__", "any").replace("Any", "any")


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    made_by = field.default_factory
    return None if made_by is dataclasses.MISSING else made_by()
