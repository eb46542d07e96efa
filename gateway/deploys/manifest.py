"""Reads an app's manifest, the file `capsule.toml` at the root of its source.

A table of the manifest replaces the field of this name in the app's record: at the swap of a live deploy, until the
deploy fails its canary. What the manifest does not name stays. `name` and `dev` are for the command line.

No script can change the app's record together with the deploy, because they are in different slots of a cluster. So the
record itself keeps what a deploy has replaced, and a worker that ends an unfinished deploy first puts it back.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from gateway.accounts.app_fields import NewAuth, check_auth, check_build, check_name
from gateway.accounts.records import App, Auth, Build, ReplacedFields
from gateway.accounts.vault import Vault
from gateway.errors import RequestMalformed
from gateway.settings.text_files import decode_text
from gateway.settings.toml import parse_toml
from gateway.validation import Command, Folder, Id, Path, explain, locate

FILE = "capsule.toml"
MAX_BYTES = 16_384

KeyPath = tuple[str, ...]  # the names of a key's tables, and its own


class ManifestError(ValueError):
    """The manifest has a fault. The message begins with the file and the line."""

    def __init__(self, message: str, line: int = 1, column: int = 1) -> None:
        super().__init__(f"{FILE}, line {line}: {message} (column {column})")
        self.line, self.column = line, column


class ManifestBuild(Build, frozen=True):
    """How the app is built and served."""

    command: Annotated[Command, Meta(description="Builds the app, in the folder of its source.")] = ""
    output: Annotated[Folder, Meta(description="The folder to serve, after the build.")] = "dist"
    start: Annotated[Command, Meta(description="Starts the app's own backend, instead of serving a folder.")] | None = (
        None
    )
    overlap: Annotated[
        bool, Meta(description="Whether the former release may run beside the new one while that is checked.")
    ] = True
    health: (
        Annotated[Path, Meta(description="The path that answers 2xx or 3xx while the app's own backend works.")] | None
    ) = None


class ManifestDev(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How `capsule dev` runs the app."""

    command: Annotated[Command, Meta(min_length=1, description="Runs the app on this machine, outside the sandbox.")]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings of an app that its source contains."""

    name: Annotated[Id, Meta(description="The app that this folder is, for the command line.")] | None = None
    build: ManifestBuild | None = None
    auth: Auth | None = None
    dev: ManifestDev | None = None

    @property
    def overlap(self) -> bool:
        """Whether two releases may run on the app's data while a swap is checked."""
        return self.build is None or self.build.overlap

    @property
    def record_build(self) -> Build | None:
        """The build for the app's record."""
        build = self.build
        return None if build is None else Build(build.command, build.output, build.start, build.health)


class _Text(Manifest, frozen=True):
    """A manifest as its author writes it, with a plain secret."""

    auth: NewAuth | None = None


def parse_manifest(text: bytes) -> Manifest:
    """Returns the manifest, with the auth as its author wrote it. Raises ManifestError."""
    return _parse(text)[0]


def seal_manifest(text: bytes, vault: Vault, *, allow_private: bool) -> Manifest:
    """Returns the manifest to store, with its auth checked and the secret encrypted. Raises ManifestError."""
    manifest, keys = _parse(text)
    auth: Auth | None = None
    if manifest.auth is not None:
        try:
            auth = check_auth(manifest.auth, vault, allow_private=allow_private)
        except RequestMalformed as error:
            raise _locate_fault(str(error), keys) from None
    return Manifest(manifest.name, manifest.build, auth, manifest.dev)


def _parse(text: bytes) -> tuple[_Text, Mapping[KeyPath, TomlPosition]]:
    if len(text) > MAX_BYTES:
        raise ManifestError(f"the file has more than {MAX_BYTES // 1024} KiB; make it smaller")
    try:
        source = decode_text(text, "strict").replace("\r\n", "\n")
        tables = parse_toml(source)
    except UnicodeDecodeError as error:
        raise ManifestError("the file is not text in UTF-8", text.count(b"\n", 0, error.start) + 1) from None
    except tomllib.TOMLDecodeError as error:
        raise _syntax_fault(str(error), source) from None
    keys = dict(_find_keys(source))
    try:
        manifest = msgspec.convert(tables, _Text)
        if manifest.name is not None:
            check_name(manifest.name)
        check_build(manifest.build)
    except msgspec.ValidationError as error:
        raise _structure_fault(str(error), keys) from None
    except RequestMalformed as error:
        raise _locate_fault(str(error), keys) from None
    return manifest, keys


# -- faults --------------------------------------------------------------------------------------------------


class TomlPosition(NamedTuple):
    line: int
    column: int


_SYNTAX_POSITION = re.compile(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


def _syntax_fault(fault: str, source: str) -> ManifestError:
    lines = source.rstrip("\n").split("\n")
    found = _SYNTAX_POSITION.fullmatch(fault)
    message, line, column = found.groups() if found else (fault, None, None)
    position = TomlPosition(int(line), int(column)) if line and column else TomlPosition(len(lines), len(lines[-1]) + 1)
    return ManifestError(message[:1].lower() + message[1:], *position)


def _structure_fault(fault: str, keys: Mapping[KeyPath, TomlPosition]) -> ManifestError:
    """Translates a message of msgspec into the words of TOML, which has no null."""
    reason, field = locate(fault)
    field = re.sub(r"\[.*", "", field)  # of a list, the list itself
    if unknown := _UNKNOWN.fullmatch(reason):
        name = unknown[1]
        message = f"{field}: there is no key called {name}" if field else f"there is no table or key called {name}"
        return ManifestError(message, *_find_position(keys, (*_split(field), name)))
    message = explain(reason.replace(" | null`", "`"), _Text, field)
    message = message.replace("an object", "a table").replace("the field ", "the key ")
    return ManifestError(f"{field}: {message}" if field else message, *_find_position(keys, _split(field)))


def _locate_fault(message: str, keys: Mapping[KeyPath, TomlPosition]) -> ManifestError:
    """Adds the position of the key that the message names first."""
    return ManifestError(message.removesuffix("."), *_find_position(keys, _split(message.partition(":")[0])))


def _split(field: str) -> KeyPath:
    return tuple(field.split(".")) if field else ()


def _find_position(keys: Mapping[KeyPath, TomlPosition], path: KeyPath) -> TomlPosition:
    """Returns where the key is, or else the first key of its table."""
    while path:
        if path in keys:
            return keys[path]
        if inside := [position for key, position in keys.items() if key[: len(path)] == path]:
            return min(inside)
        path = path[:-1]
    return TomlPosition(1, 1)


# -- where the keys are --------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"(?P<space>[ \t]+|\#[^\n]*)"
    r'|(?P<string>"""(?:\\.|[^\\])*?"{3,5}|' + r"'''.*?'{3,5}|" + r'"(?:\\.|[^"\\])*"|' + r"'[^']*')"
    r"|(?P<line>\n)"
    r"|(?P<mark>[\[\]{}=,.])"
    r"|(?P<word>[^\s\[\]{}=,.#\"']+)",
    re.DOTALL,
)


def _find_keys(source: str) -> Iterator[tuple[KeyPath, TomlPosition]]:
    """Yields the path and the position of each key and table of a valid TOML document, because `tomllib` gives none."""
    table: KeyPath = ()  # of the last header
    brackets: list[KeyPath | None] = []  # that are open in a value: the path of an inline table, None for a list
    key: KeyPath = ()
    position: TomlPosition | None = None  # of the key that is being read
    reads_key, line, line_start = True, 1, 0
    for token in _TOKEN.finditer(source):
        kind, text = token.lastgroup, token[0]
        if kind == "space":
            continue
        if reads_key and kind in ("word", "string"):
            key += (_unquote(text),)
            position = position or TomlPosition(line, token.start() - line_start + 1)
        elif reads_key and text == "=" and position is not None:
            key = ((brackets[-1] or ()) if brackets else table) + key
            yield key, position
            reads_key = False
        elif reads_key and text == "]" and position is not None:
            yield key, position
            table, key, position = key, (), None
        elif not reads_key and text in ("[", "{"):
            brackets.append(key if text == "{" else None)
        elif brackets and text in ("]", "}"):
            brackets.pop()
            reads_key = False
        ends_value = kind == "line" and not brackets
        if ends_value or (text == "," and brackets and brackets[-1] is not None) or (text == "{" and not reads_key):
            reads_key, key, position = True, (), None
        if "\n" in text:
            line, line_start = line + text.count("\n"), token.start() + text.rindex("\n") + 1


def _unquote(text: str) -> str:
    return str(tomllib.loads(f"key = {text}")["key"]) if text[0] in "\"'" else text


# -- the app's record ----------------------------------------------------------------------------------------


def apply_manifest(app: App, deploy_id: str, manifest: Manifest) -> App:
    """Returns the app with the fields of the manifest. Keeps the replaced ones. Can be repeated."""
    if app.replaced is not None and app.replaced.deploy == deploy_id:
        return app
    fields: dict[str, Any] = {"auth": manifest.auth, "build": manifest.record_build}
    fields = {name: value for name, value in fields.items() if value is not None}
    before = {name: getattr(app, name) for name in fields}
    return msgspec.structs.replace(app, **fields, replaced=ReplacedFields(deploy_id, **before) if fields else None)


def undo_manifest(app: App, deploy_id: str) -> App:
    """Returns the app with the fields that the manifest of this deploy replaced. Can be repeated."""
    if app.replaced is None or app.replaced.deploy != deploy_id:
        return app
    return msgspec.structs.replace(
        app,
        auth=app.auth if app.replaced.auth is msgspec.UNSET else app.replaced.auth,
        build=app.build if app.replaced.build is msgspec.UNSET else app.replaced.build,
        replaced=None,
    )


# -- the schema ----------------------------------------------------------------------------------------------


def manifest_schema() -> dict[str, Any]:
    """Returns the JSON schema of the manifest, for editors."""
    _, definitions = msgspec.json.schema_components([_Text], ref_template="#/$defs/{name}")
    definitions = _without_null(definitions)
    root = {**definitions.pop(_Text.__name__), "title": FILE, "description": Manifest.__doc__}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": definitions}


def _without_null(schema: Any) -> Any:
    """Removes null, which TOML does not have, from the choices and defaults of a schema."""
    if isinstance(schema, list):
        return [_without_null(each) for each in schema if each != {"type": "null"}]
    if not isinstance(schema, dict):
        return schema
    schema = {name: _without_null(value) for name, value in schema.items() if (name, value) != ("default", None)}
    if len(schema.get("anyOf", ())) == 1:
        (only,) = schema.pop("anyOf")
        return {**only, **schema}
    return schema
