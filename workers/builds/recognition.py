"""Chooses how a source is built: by its manifest, by the app's own setting, or by what its files are."""

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from gateway.accounts.records import Build
from gateway.deploys.manifest import Manifest
from gateway.deploys.recognition import SourceFolder, Unrecognizable, explain_missing_page, recognize
from gateway.deploys.states import DeployError


def choose_build(
    source: Path, manifest: Manifest | None, own: Build | None, write_line: Callable[[str], None]
) -> Build:
    """Returns the build for the source in this folder. `own` is the app's setting. Raises DeployError.

    A source that is served as it is must have a page at the top. A build may make the page.
    """
    build = (manifest.record_build if manifest else None) or own
    if build is None and manifest is None:
        try:
            found = recognize(SourceFolder(source))
        except Unrecognizable as error:
            raise DeployError(str(error)) from None
        write_line(f"Recognised as {found.describe()}")
        build = found.build
    build = build or Build(output=".")
    if not build.command and build.start is None and (fault := explain_missing_page(source, build.output)):
        raise DeployError(fault)
    return build


def is_built_by_tool(source: Path, build: Build) -> bool:
    """Returns whether a recognized tool writes the files that are served, whoever has written the build's command."""
    try:
        found = recognize(SourceFolder(source))
    except Unrecognizable:
        return False
    outputs = (PurePosixPath(each.output) for each in (found.build, build))
    return bool(found.file and build.command) and found.build.start is build.start is None and len({*outputs}) == 1
