"""The actions on deploys: roll back to an earlier release, publish, promote and end a preview, build again, cancel.

Serving a release again is a deploy of its own that only reuses the files. So it is checked, swapped in, watched and
reported like any other deploy. The hosts keep a few releases for each address. The address's record names them
(`serving.py`), and a release that is no longer kept is refused at once.
"""

import contextlib
from collections.abc import Set

from gateway.accounts.records import App
from gateway.deploys.addresses import address
from gateway.deploys.previews import Previews
from gateway.deploys.records import FINAL, Deploy, DeployRecords, Origin, Trigger
from gateway.deploys.serving import Records
from gateway.deploys.states import Deploys, StaleDeploy
from gateway.errors import BackboneUnavailable, NoDeployYet, NotFound, RequestMalformed, TarballGone

MAX_SEARCHED = 1_000  # deploys of an account
ATTEMPTS = 5  # to cancel a deploy that changes its state
BUILT = ("checking", "canary")


class DeployActions:
    def __init__(self, serving: Records, deploys: Deploys, records: DeployRecords, previews: Previews) -> None:
        self._serving, self._deploys, self._records, self._previews = serving, deploys, records, previews

    async def publish_branch(self, app: App, branch: str, by: str) -> str:
        """Queues a preview of a branch of the app's repository, and returns its id. Raises a ServiceError."""
        await self._deploys.require_active(app)
        if app.repository is None:
            raise NoDeployYet("This app has no repository; publish a folder as a preview instead.")
        return await self._deploys.queue(app, "branch", Origin(by=by, branch=branch), kind="preview")

    async def end_preview(self, app: App, slug: str) -> None:
        """Ends a preview, and cancels its deploys. Raises a ServiceError."""
        name, canceled = f"p-{slug}", False
        for deploy in await self._records.list(app.account, app.id, MAX_SEARCHED):
            if deploy.state not in FINAL and address(deploy.kind, deploy.branch) == name:
                await self._deploys.end_as_canceled(deploy, "the preview was ended")
                canceled = True
        if not await self._previews.end(app.account, app.id, name) and not canceled:
            raise NotFound("This app has no such preview.")

    async def roll_back(self, app: App, deploy_id: str | None, by: str) -> str:
        """Queues a live deploy of an earlier release, and returns its id.

        Without `deploy_id` this is the release before the one that is live or about to be live. Raises a ServiceError.
        """
        await self._deploys.require_active(app)
        current = await self._records.find_live_id(app)
        if deploy_id is None:
            target = await self._find_previous(app, current)
        else:
            target = await self._find_live(app, deploy_id, current)
        return await self._serve_again(app, "rollback", target, by)

    async def _find_live(self, app: App, deploy_id: str, current: str | None) -> Deploy:
        deploy = await self._records.get(deploy_id, app.account)
        if deploy is None or deploy.account != app.account or deploy.appId != app.id:
            raise NotFound("deployId: this app has no such deploy; 'capsule deploys list' shows its deploys.")
        if deploy.kind != "live":
            raise RequestMalformed("deployId: this deploy is a preview; promote it instead.")
        if deploy.state != "live":
            raise RequestMalformed(f"deployId: a deploy that is {deploy.state} has no release to roll back to.")
        if deploy.id == current:
            raise RequestMalformed("deployId: this deploy is already live; choose an earlier one.")
        await self._require_release(deploy)
        return deploy

    async def _find_previous(self, app: App, current: str | None) -> Deploy:
        """Returns the newest kept release older than the live deploy, or than a newer one about to be live."""
        leaving, kept = current, await self._serving.list_kept(app.account, app.id)
        for deploy in await self._records.list(app.account, app.id, MAX_SEARCHED):
            if deploy.kind != "live":
                continue
            if deploy.state in BUILT and leaving == current:  # one that is building will be canceled
                leaving = deploy.id
            if deploy.state == "live" and leaving is not None and deploy.id < leaving and _may_be_kept(deploy, kept):
                return deploy
        raise NoDeployYet(
            "This app has no earlier live release to roll back to; publish it, or trigger one of its hooks."
        )

    async def promote(self, deploy: Deploy, app: App, by: str) -> str:
        """Queues a live deploy of a preview's release, and returns its id. Raises a ServiceError."""
        await self._deploys.require_active(app)
        if deploy.kind != "preview" or deploy.state != "live":
            raise RequestMalformed(
                f"deploy: only a preview that is live can be promoted; this is a {deploy.kind} deploy in state "
                f"{deploy.state}."
            )
        await self._require_release(deploy)
        return await self._serve_again(app, "promote", deploy, by)

    async def restore(self, app: App, snapshot: str, by: str) -> str:
        """Queues a deploy of the live release on restored data, and returns its id. Raises a ServiceError.

        `snapshot` is the storage's key of the snapshot. A newer release that is about to be live would be replaced by
        the present one, so the restore is refused until that deploy has ended.
        """
        await self._deploys.require_active(app)
        live = await self._records.find_live_id(app)
        deploy = None if live is None else await self._records.get(live, app.account)
        if deploy is None:
            raise NoDeployYet("This app is not live yet; publish it first, then restore its data.")
        await self._require_release(deploy)
        for coming in await self._records.list(app.account, app.id, MAX_SEARCHED):
            if coming.kind == "live" and coming.state in BUILT:
                raise RequestMalformed(f"app: its deploy {coming.id} is about to be live; restore once it has ended.")
        return await self._serve_again(app, "restore", deploy, by, restores=snapshot)

    async def redeploy(self, deploy: Deploy, app: App, by: str) -> str:
        """Queues a deploy that builds the same source again, and returns its id. Raises a ServiceError.

        With a repository, it builds the latest commit of the branch.
        """
        await self._deploys.require_active(app)
        if app.repository is None and not deploy.source:
            raise TarballGone("This deploy was built from a repository, and the app has none; publish its source.")
        if deploy.source and not await self._deploys.has_source(deploy):
            raise TarballGone
        if deploy.source:
            origin = _repeat_origin(deploy, by)
        else:
            origin = Origin(by=by, branch=deploy.branch if deploy.kind == "preview" else None)
        return await self._deploys.queue(app, "redeploy", origin, kind=deploy.kind, source=deploy.source)

    async def _serve_again(
        self, app: App, trigger: Trigger, release: Deploy, by: str, *, restores: str | None = None
    ) -> str:
        """Queues the deploy, and cancels an older build of the live address.

        Deploys of an app are made in order: the queued deploy would wait for the build, and replace it at once.
        """
        queued = await self._deploys.queue(app, trigger, _repeat_origin(release, by), reuse=release, restores=restores)
        for older in await self._records.list(app.account, app.id, MAX_SEARCHED):
            if older.kind == "live" and older.state == "building" and older.id < queued:
                with contextlib.suppress(StaleDeploy):  # it has just been built, and continues
                    await self._deploys.cancel(older, f"replaced by {queued}, a {trigger} to an existing release")
        return queued

    async def cancel(self, deploy: Deploy) -> Deploy:
        """Cancels a deploy that is queued or building. Raises a ServiceError."""
        for _ in range(ATTEMPTS):
            if deploy.state not in ("queued", "building"):
                hint = "roll back once it is live" if deploy.state in BUILT else "it has ended"
                raise RequestMalformed(f"deploy: one that is {deploy.state} can no longer be canceled; {hint}.")
            try:
                return await self._deploys.cancel(deploy, "canceled on request")
            except StaleDeploy:
                found = await self._records.get(deploy.id, deploy.account)
                if found is None:
                    raise NotFound from None
                deploy = found
        raise BackboneUnavailable("The deploy's state keeps changing; try again.")

    async def _require_release(self, deploy: Deploy) -> None:
        if not _may_be_kept(deploy, await self._serving.list_kept(deploy.account, deploy.appId)):
            raise TarballGone("The release of this deploy is no longer kept; publish its source again.")


def _repeat_origin(deploy: Deploy, by: str) -> Origin:
    """Returns the origin of a deploy of the same source by somebody else."""
    return Origin(by=by, message=deploy.message, commit=deploy.commit, branch=deploy.branch, dirty=deploy.dirty)


def _may_be_kept(deploy: Deploy, kept: Set[str]) -> bool:
    """Returns whether the release may be kept. With an external engine, no records say so."""
    return not kept or deploy.id in kept
