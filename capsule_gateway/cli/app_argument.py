"""The argument APP of a command. If it is missing, `capsule.toml` in the working folder or above names the app.

An app's name has only lower-case letters, digits and hyphens. An argument with other characters, such as an id, a path
or a domain, is therefore one of the command's next arguments, and APP is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from capsule_gateway.cli.service import WrongUsage

MANIFEST = "capsule.toml"
NAME = re.compile(r"[a-z0-9-]+", re.ASCII)


def find_app_name() -> str | None:
    """Returns the name in the nearest manifest, or None without one. Raises WrongUsage if it cannot be read."""
    import tomllib

    for folder in _list_folders():
        manifest = folder / MANIFEST
        if not manifest.is_file():
            continue
        try:
            name = tomllib.loads(manifest.read_text()).get("name")
        except (OSError, ValueError) as error:
            raise WrongUsage(f"{manifest} cannot be read: {error}") from None
        return name if isinstance(name, str) and NAME.fullmatch(name) else None
    return None


def _list_folders() -> Iterator[Path]:
    """Yields the working folder and those above it, up to the root of the repository or the user's home."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        yield folder
        if (folder / ".git").exists() or folder == Path.home():
            return


class AppArgument(click.Argument):
    """APP as the first argument of a command. In the folder of an app, it may be omitted."""

    def __init__(self, declarations: Any, **options: Any) -> None:
        super().__init__(declarations, **{"required": False, **options})

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        assert isinstance(opts, dict)  # the raw arguments of the command, of which APP is the first to be processed
        if not ctx.resilient_parsing:  # otherwise the shell completes an unfinished line
            self._fill_in(ctx, opts)
        return super().handle_parse_result(ctx, opts, args)

    def _fill_in(self, ctx: click.Context, raw: dict[str, Any]) -> None:
        """Sets APP from the manifest if it is missing. Raises UsageError if there is none."""
        given = raw.get("app")
        following = [param for param in ctx.command.params if isinstance(param, click.Argument) and param is not self]
        if isinstance(given, str):
            incomplete = any(param.required and not _is_given(raw, param) for param in following)
            is_name = NAME.fullmatch(given) is not None
            if is_name and not incomplete:
                return
            name = find_app_name()
            if name is None and is_name:
                return  # click names the argument that is missing
            if name is None or not _move_right(raw, given, following):
                raise click.BadParameter(f"{given!r} is not the name of an app.", ctx, self)
        else:
            name = find_app_name()
        if name is None:
            raise click.UsageError(
                f"Missing argument 'APP': give it, or use a folder whose {MANIFEST} names the app.", ctx
            )
        raw["app"] = name


def _is_given(raw: Mapping[str, Any], param: click.Argument) -> bool:
    return isinstance(raw.get(str(param.name)), str | tuple)


def _move_right(raw: dict[str, Any], value: str, params: list[click.Argument]) -> bool:
    """Makes `value` the first of these arguments. Returns False if there is no room."""
    for param in params:
        name = str(param.name)
        if param.nargs == -1:
            raw[name] = (value, *(raw[name] if _is_given(raw, param) else ()))
            return True
        previous, raw[name] = raw.get(name), value
        if not isinstance(previous, str):
            return True
        value = previous
    return False
