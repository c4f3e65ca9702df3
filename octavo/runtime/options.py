"""Command-line options made from config dataclasses, so that each option, default and help text stands in one place."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace every parameter of ``command`` that is a config dataclass by one option per field.

    The wrapped command builds the dataclasses from the options; other parameters stay as they are.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    configs: dict[str, type] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if dataclasses.is_dataclass(kind):
            configs[name] = typing.cast(type, kind)
            parameters += _field_options(typing.cast(type, kind))
        else:
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        for name, config in configs.items():
            own = {field.name: values.pop(field.name) for field in option_fields(config)}
            values[name] = config(**{key: tuple(v) if isinstance(v, list) else v for key, v in own.items()})
        command(**values)

    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _field_options(config: type) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(config)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[_option_type(hints[field.name]), typer.Option(help=field.metadata["help"])],
        )
        for field in option_fields(config)
    ]


def option_fields(config: type) -> list[dataclasses.Field[Any]]:
    """The fields that are options: those with a help text. The others are for Python alone."""
    return [field for field in dataclasses.fields(config) if "help" in field.metadata]


def _option_type(kind: Any) -> Any:
    """A tuple of any length is an option that may be given several times."""
    return types.GenericAlias(list, typing.get_args(kind)[0]) if typing.get_origin(kind) is tuple else kind
