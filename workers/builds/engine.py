"""Engines, which carry out the steps of a deploy. The worker (`builder.py`) manages the states.

`LocalEngine` builds and serves on this machine: source → build command → release → health check → swap → canary. It
uses the steps of `workers/hosting/serving.py`. With shared storage, the engine in `shared.py` builds for all hosts that
serve apps. An external engine uses the operators' API instead.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Set
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog

from gateway import storage
from gateway.accounts.records import App, Build
from gateway.accounts.vault import NoEncryptionKey, Vault
from gateway.deploys.manifest import FILE as MANIFEST
from gateway.deploys.manifest import Manifest, ManifestError, seal_manifest
from gateway.deploys.sources import SOURCE_BYTES, Sources
from gateway.deploys.states import Deploy
from gateway.errors import StorageUnavailable
from gateway.settings import Settings
from gateway.storage import open_storage, until_storage_answers
from workers.builds import build, source
from workers.builds.registries import Registries
from workers.hosting import archives, disk
from workers.hosting.archives import BadArchive
from workers.hosting.release_files import read_release_manifest, write_environment, write_release_manifest
from workers.hosting.releases import exclusive_lock, link_folder, remove_folder
from workers.hosting.serving import DeployError, Job, Serving, run_in_thread
from workers.sandbox.machine import Unsafe
from workers.sandbox.sandbox import BUILD_USERS, MIB, open_sandbox

logger = structlog.get_logger()

PRUNE_SECONDS = 3_600.0  # between searches for archives that are no longer needed


class LocalEngine(Serving):
    """Builds and serves on this machine.

    The steps of a deploy are `build`, `check_health` before visitors see the release, `swap`, and `watch_canary` while
    visitors see it. Every step may raise `DeployError`, and every step may be canceled.

    `find_ai_url` returns the address of managed inference for an app's builds, or None while inference is off.
    `find_variables` returns an app's environment variables. It raises NoEncryptionKey.
    """

    def __init__(
        self,
        settings: Settings,
        find_app: Callable[[str], Awaitable[App | None]],
        find_ai_url: Callable[[App], Awaitable[str | None]],
        find_variables: Callable[[App], Awaitable[dict[str, str]]],
    ) -> None:
        super().__init__(settings, find_app)
        self._find_ai_url, self._find_variables = find_ai_url, find_variables
        self._vault = Vault(settings.encryption_key)
        self._storage = open_storage(settings)
        self._next_pruning = 0.0
        self._sandbox = open_sandbox(settings, BUILD_USERS)
        self._registries = Registries(settings.build_registries, settings.ca_file)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Waits until no other worker uses the data folder. Yields the folder's id."""
        self._releases.create_folders()
        try:
            await run_in_thread(source.check_git, self._sandbox.environment["PATH"])
        except DeployError as error:
            logger.error("deploys.no_repositories", action=str(error))
        async with exclusive_lock(self._releases.folder / "deploys.lock"):
            yield self._releases.folder_id()

    # -- build -----------------------------------------------------------------------------------------------

    async def build(self, job: Job) -> Manifest | None:
        """Makes the deploy's release, from its source or from an earlier release. Returns the release's manifest."""
        try:
            if job.deploy.release is None:
                return await self._build(job)
            return await self._reuse(job, job.deploy.release)
        except StorageUnavailable:  # it has been unavailable for an hour
            raise DeployError("the storage does not answer; deploy again later") from None

    async def _reuse(self, job: Job, former: str) -> Manifest | None:
        await run_in_thread(self._releases.claim_folder, job.deploy)
        found = await run_in_thread(self._releases.find_release, job.app.id, former)
        if found is None:
            raise DeployError(f"the release of {former} is no longer kept; deploy its source again")
        job.write_line(f"Using the release of {former}; no build is needed")
        release = self._releases.site(job.deploy).release(job.deploy.id)
        await run_in_thread(remove_folder, release)  # left by a worker that was stopped
        if not await link_folder(found, release):
            raise DeployError(f"the release of {former} could not be read; deploy its source again")
        if (release / "start").exists():
            write_environment(release, await self._open_variables(job.app), self._vault)
        await run_in_thread(self._bound_disk, job.deploy, release)
        await self._archive_again(job, former, release)
        return read_release_manifest(release)

    async def _archive_again(self, job: Job, former: str, release: Path) -> None:
        """Stores the archive of the earlier release under this deploy's key. Packs the release if there is none."""
        archive, own = archives.read_record(release), archives.archive_key(job.app.id, job.deploy.id)
        of_former = archives.archive_key(job.app.id, former)
        if archive is not None and await until_storage_answers(lambda: self._storage.copy(of_former, own)):
            await job.record_archive(archive)
            return
        folder = self._releases.builds / job.deploy.id
        folder.mkdir(mode=0o711, exist_ok=True)
        try:
            await self._archive(job, release, folder / "release.tar.gz")
        finally:
            await run_in_thread(remove_folder, folder)

    async def _open_variables(self, app: App) -> dict[str, str]:
        """Returns the app's environment variables. Raises DeployError."""
        try:
            return await self._find_variables(app)
        except NoEncryptionKey as error:
            logger.error("deploys.sealed", app=app.id, error=str(error))
            raise DeployError("an environment variable can't be decrypted; set it again") from None

    async def _build(self, job: Job) -> Manifest | None:
        deploy = job.deploy
        try:
            await run_in_thread(self._sandbox.check, self._releases.folder)
        except Unsafe as error:
            logger.error("deploys.unsafe", action=str(error))
            # In development the account holder is the operator.
            detail = str(error) if self._settings.allow_private_addresses else "the worker's log has the reason"
            raise DeployError(f"this machine can't build apps safely: {detail}") from None
        variables = await self._open_variables(job.app)
        folder = self._releases.builds / deploy.id
        await run_in_thread(self._releases.claim_folder, deploy)
        with self._sandbox.reserve_user() as uid:
            release = self._releases.site(deploy).release(deploy.id)
            for leftover in (folder, release):  # left by an attempt whose record Redis has lost
                await run_in_thread(remove_folder, leftover)
            folder.mkdir(mode=0o711)  # the worker owns the folder, and the build owns its contents
            try:
                await self._fetch_source(job, uid, folder)
                manifest = await run_in_thread(self._read_manifest, job, uid, folder)
                spec = (manifest.record_build if manifest else None) or job.app.build or Build(output=".")
                if spec.command:
                    ai_url = await self._find_ai_url(job.app)
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
                runs = spec.start is not None
                output = "." if runs else spec.output
                await run_in_thread(build.collect_output, folder / "source", output, release, uid, runs=runs)
                if spec.start is not None:
                    write_environment(release, variables, self._vault)
                    (release / "start").write_text(spec.start)
                write_release_manifest(release, manifest)
                await run_in_thread(self._bound_disk, deploy, release)
                await self._archive(job, release, folder / "release.tar.gz")
            finally:
                await run_in_thread(remove_folder, folder)
        return manifest

    def _read_manifest(self, job: Job, uid: int | None, folder: Path) -> Manifest | None:
        try:
            text = source.read_manifest(folder, uid)
            if text is None:
                return None
            job.write_line(f"Reading {MANIFEST}")
            return seal_manifest(text, self._vault, allow_private=self._settings.allow_private_addresses)
        except ManifestError as error:
            raise DeployError(str(error)) from None

    async def _archive(self, job: Job, release: Path, packed: Path) -> None:
        """Packs the release and puts the archive into the storage. Waits while the storage is unavailable."""
        try:
            archive = await archives.pack(release, packed)
            key = archives.archive_key(job.app.id, job.deploy.id)
            await until_storage_answers(lambda: self._storage.put(key, packed))
        except BadArchive as error:
            logger.error("deploys.not_archived", deploy=job.deploy.id, error=str(error))
            raise DeployError("the release can't be packed; deploy again later") from None
        archives.write_record(release, archive)
        await job.record_archive(archive)

    def _bound_disk(self, deploy: Deploy, release: Path) -> None:
        limit = self._settings.account_disk
        if not disk.make_room(self._releases, deploy.account, release, limit * MIB):
            remove_folder(release)
            raise DeployError(f"the account's apps use more than {limit} MiB of disk space; make them smaller")

    async def _fetch_source(self, job: Job, uid: int | None, folder: Path) -> None:
        deploy, settings = job.deploy, self._settings
        if deploy.source:
            archive, key = folder / "source.tar.gz", Sources.key(deploy.appId, deploy.source)
            if not await until_storage_answers(lambda: storage.fetch_object(self._storage, key, archive, SOURCE_BYTES)):
                raise DeployError("the stored source was removed; publish it again")
            await source.unpack(self._sandbox, uid, folder, archive, job.write_line)
            return
        if job.app.repository is None:
            raise DeployError("the app no longer has a repository; connect one, or publish its source")
        branch = deploy.branch or job.app.repository.branch
        job.write_line(f"Cloning branch {branch} of {job.app.repository.url}")
        try:
            url = job.app.repository.clone_url(self._vault)
        except NoEncryptionKey as error:
            logger.error("deploys.sealed", app=job.app.id, error=str(error))
            raise DeployError("the repository's password can't be decrypted; connect the repository again") from None
        commit = await source.clone(
            self._sandbox,
            uid,
            folder,
            url,
            branch,
            job.write_line,
            tenant=job.app.account,
            allow_private=settings.allow_private_addresses,
            ca_file=await run_in_thread(self._registries.write_authorities, folder),
        )
        job.write_line(f"Commit {commit}")
        await job.record_commit(commit)

    # -- afterwards ------------------------------------------------------------------------------------------

    async def remove_replaced(self, job: Job) -> None:
        """Stops and prunes the releases that the deploy has replaced, once it is live."""
        await super().remove_replaced(job)
        with suppress(StorageUnavailable):  # the next deploy of the app removes them
            await self._prune_archives(job.app.id)

    async def undo(self, deploy: Deploy) -> None:
        """Removes the deploy's release, and serves the release that it replaced. Can be repeated safely."""
        await super().undo(deploy)
        with suppress(StorageUnavailable):
            await self._storage.delete([archives.archive_key(deploy.appId, deploy.id)])

    async def _prune_archives(self, app_id: str) -> None:
        """Removes the archives of releases that this host no longer keeps. Raises StorageUnavailable."""
        await self._keep_archives(
            app_id, {path.name for path in await run_in_thread(self._releases.list_releases, app_id)}
        )

    async def _keep_archives(self, app_id: str, kept: Set[str]) -> None:
        names = await self._storage.list_names(f"{archives.FOLDER}{app_id}/")
        ids = {name.removesuffix(archives.SUFFIX) for name in names if name.endswith(archives.SUFFIX)}
        await self._storage.delete([archives.archive_key(app_id, deploy_id) for deploy_id in sorted(ids - kept)])

    async def tidy(self, in_progress: Set[str]) -> None:
        """Removes files that are no longer needed. The worker calls this regularly.

        `in_progress`: the ids of deploys to ignore. The set changes while this runs.
        """
        await super().tidy(in_progress)
        if time.monotonic() < self._next_pruning:
            return
        self._next_pruning = time.monotonic() + PRUNE_SECONDS
        with suppress(StorageUnavailable):
            for app_id in await self._storage.list_folders(archives.FOLDER):
                await self._prune_archives(app_id)
