"""Makes the release of a deploy on this machine: its source → the build command → the release → its archive.

The files of the release are in the data folder (`Releases.built`) until the deploy ends. A host on this data folder
links them. Other machines fetch the archive from the storage.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import structlog

from gateway import storage
from gateway.accounts.records import DEFAULT_BRANCH, App
from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.cancellation import run_in_thread
from gateway.deploys.manifest import FILE as MANIFEST
from gateway.deploys.manifest import Manifest, ManifestError, seal_manifest
from gateway.deploys.records import Deploy, Origin
from gateway.deploys.release import Release, ReleaseArchive
from gateway.deploys.sources import SOURCE_BYTES, Sources
from gateway.deploys.states import DeployError
from gateway.events.catalog import Kind
from gateway.settings import Settings
from gateway.storage import Storage, until_storage_answers
from workers.builds import build, source
from workers.builds.caches import BuildCaches
from workers.builds.recognition import choose_build, is_built_by_tool
from workers.builds.registries import Registries
from workers.hosting import archives, disk
from workers.hosting.archive_files import BadArchive
from workers.hosting.digests import BY_TOOL
from workers.hosting.release_files import write_release_manifest
from workers.hosting.releases import Releases
from workers.hosting.rules import compile_rules, explain_problems
from workers.sandbox.machine import Unsafe
from workers.sandbox.removal import remove_folder
from workers.sandbox.sandbox import BUILD_USERS, MIB, open_sandbox

logger = structlog.get_logger()


NAMES = 10  # in a line of the log


class Job(msgspec.Struct, frozen=True):
    deploy: Deploy
    app: App
    write_line: Callable[[str], None]  # to the deploy's log
    record_commit: Callable[[Origin, str], Awaitable[object]]  # what was cloned, and what it lacks
    record: Callable[..., Awaitable[object]]  # other fields of the deploy

    async def record_archive(self, archive: ReleaseArchive) -> None:
        await self.record(digest=archive.digest, size=str(archive.size))


class Compiler:
    """Makes releases from sources.

    `find_ai_url` returns the address of managed inference for an app's builds, or None while inference is off.
    `find_variables` returns an app's environment variables, live or in previews. It raises NoEncryptionKey.
    `find_clearing` returns the id of the last clearing of an app's cache.
    """

    def __init__(
        self,
        settings: Settings,
        releases: Releases,
        storage: Storage,
        find_ai_url: Callable[[App], Awaitable[str | None]],
        find_variables: Callable[[App, Kind], Awaitable[dict[str, str]]],
        find_clearing: Callable[[App], Awaitable[str]],
    ) -> None:
        self.caches = BuildCaches(releases.folder, settings.build_cache * MIB)
        self._find_clearing = find_clearing
        self._settings, self._releases, self._storage = settings, releases, storage
        self._find_ai_url, self._find_variables = find_ai_url, find_variables
        self._vault = Vault(settings.encryption_key)
        self._sandbox = open_sandbox(settings, BUILD_USERS)
        self._registries = Registries(settings.build_registries, settings.ca_file)

    async def check_tools(self) -> None:
        try:
            await run_in_thread(source.check_git, self._sandbox.environment["PATH"])
        except DeployError as error:
            logger.error("deploys.no_repositories", action=str(error))

    async def compile(self, job: Job) -> Release:
        """Raises DeployError or StorageUnavailable."""
        try:
            await run_in_thread(self._sandbox.check, self._releases.folder)
        except Unsafe as error:
            logger.error("deploys.unsafe", action=str(error))
            # In development the account holder is the operator.
            detail = str(error) if self._settings.allow_private_addresses else "the worker's log has the reason"
            raise DeployError(f"this machine can't build apps safely: {detail}", service_fault=True) from None
        variables = await self.open_variables(job)
        folder, release = self._releases.builds / job.deploy.id, self._releases.built / job.deploy.id
        with self._sandbox.reserve_user() as uid:
            for leftover in (folder, release):  # left by an attempt whose record Redis has lost
                await run_in_thread(remove_folder, leftover)
            folder.mkdir(mode=0o711)  # the worker owns the folder, and the build owns its contents
            try:
                warning = await self._fetch_source(job, uid, folder)
                manifest = await run_in_thread(self._read_manifest, job, uid, folder)
                spec = await run_in_thread(choose_build, folder / "source", manifest, job.app.build, job.write_line)
                by_tool = await run_in_thread(is_built_by_tool, folder / "source", spec)
                if spec.command:
                    ai_url = await self._find_ai_url(job.app)
                    origin = f"{job.app.account} {await self._find_clearing(job.app)}"
                    if await self.caches.copy(job.app.id, origin, folder, uid):
                        job.write_line("Using the packages that the last deploy downloaded")
                    await build.run_build_command(
                        self._sandbox,
                        uid,
                        folder,
                        spec.command,
                        ai_url,
                        job.write_line,
                        variables=variables,
                        registries=self._registries,
                    )
                    if job.deploy.kind == "live":
                        await self.caches.set_aside(job.deploy.id, origin, folder)
                runs = spec.start is not None
                output = "." if runs else spec.output
                private = await run_in_thread(build.collect_output, folder / "source", output, release, uid, runs=runs)
                if private:
                    job.write_line(f"Left out, because visitors must not read them: {_list_names(private)}")
                if spec.start is not None:
                    (release / "start").write_text(spec.start)
                else:
                    if by_tool:
                        (release / BY_TOOL).touch()
                    if problems := await run_in_thread(compile_rules, release):
                        for problem in problems:
                            job.write_line(problem)
                        await job.record(warning=f"{warning} {explain_problems(problems)}".lstrip())
                write_release_manifest(release, manifest)
                limit = self._settings.account_disk
                await run_in_thread(disk.require_room, self._releases, job.app.account, release, limit)
                archive = await self._package(job, release, folder / "release.tar.gz")
            finally:
                await run_in_thread(remove_folder, folder)
        text = msgspec.json.encode(manifest).decode() if manifest is not None else ""
        environment = self.seal_variables(variables) if runs else ""
        return Release(archive.digest, archive.size, runs, environment, text, spec.health or "")

    async def open_variables(self, job: Job) -> dict[str, str]:
        """Returns the environment variables of the deploy. Raises DeployError."""
        try:
            return await self._find_variables(job.app, job.deploy.kind)
        except NoEncryptionKey as error:
            logger.error("deploys.sealed", app=job.app.id, error=str(error))
            raise DeployError("an environment variable can't be decrypted; set it again") from None

    def seal_variables(self, variables: dict[str, str]) -> str:
        """Encrypts the variables of a start command, as its release keeps them."""
        return self._vault.seal(msgspec.json.encode(variables).decode()) if variables else ""

    async def _fetch_source(self, job: Job, uid: int | None, folder: Path) -> str:
        """Returns a warning about what the source lacks; empty if it is whole."""
        deploy = job.deploy
        if deploy.source:
            archive, key = folder / "source.tar.gz", Sources.key(deploy.appId, deploy.source)
            if not await until_storage_answers(lambda: storage.fetch_object(self._storage, key, archive, SOURCE_BYTES)):
                raise DeployError("the stored source was removed; publish it again")
            own = job.app.build
            served = own.output if own and not own.command and own.start is None else ""
            await source.unpack(self._sandbox, uid, folder, archive, job.write_line, output=served)
            return ""
        if job.app.repository is None:
            raise DeployError("the app no longer has a repository; connect one, or publish its source")
        branch = deploy.branch or job.app.repository.branch
        job.write_line(f"Cloning {f'branch {branch}' if branch else 'the default branch'} of {job.app.repository.url}")
        try:
            url = job.app.repository.clone_url(self._vault)
        except NoEncryptionKey as error:
            logger.error("deploys.sealed", app=job.app.id, error=str(error))
            raise DeployError("the repository's password can't be decrypted; connect the repository again") from None
        cloned = await source.clone(
            self._sandbox,
            uid,
            folder,
            url,
            branch,
            job.write_line,
            tenant=job.app.account,
            or_default=not deploy.branch and branch == DEFAULT_BRANCH,
            allow_private=self._settings.allow_private_addresses,
            ca_file=await run_in_thread(self._registries.write_authorities, folder),
        )
        job.write_line(f"Commit {cloned.commit}")
        pointers = await run_in_thread(source.find_lfs_pointers, folder / "source")
        warning = source.explain_lfs_pointers(pointers)
        if warning:
            job.write_line(warning)
        await job.record_commit(cloned, warning)
        return warning

    def _read_manifest(self, job: Job, uid: int | None, folder: Path) -> Manifest | None:
        try:
            text = source.read_manifest(folder, uid)
            if text is None:
                return None
            job.write_line(f"Reading {MANIFEST}")
            return seal_manifest(text, self._vault, allow_private=self._settings.allow_private_addresses)
        except ManifestError as error:
            raise DeployError(str(error)) from None

    async def _package(self, job: Job, release: Path, packed: Path) -> ReleaseArchive:
        """Packs the release and puts the archive into the storage. Waits while the storage is unavailable."""
        try:
            if not (release / "start").exists():
                await archives.prepare(release)
            archive = await archives.pack(release, packed)
            key = archives.archive_key(job.app.id, job.deploy.id)
            await until_storage_answers(lambda: self._storage.put(key, packed))
        except BadArchive as error:
            logger.error("deploys.not_archived", deploy=job.deploy.id, error=str(error))
            raise DeployError("the release can't be packed; deploy again later", service_fault=True) from None
        archives.write_record(release, archive)
        await job.record_archive(archive)
        return archive


def _list_names(names: list[str]) -> str:
    shown = [name for name in names if name.isprintable()][:NAMES]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
