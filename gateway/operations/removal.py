"""Removes an app with all its data."""

from gateway.accounts.app_changes import AppChanges
from gateway.accounts.records import App
from gateway.data.commands import DataCommands
from gateway.data.records import DataRecords
from gateway.deploys.environment import Environments
from gateway.deploys.hooks import Hooks
from gateway.deploys.records import DeployRecords
from gateway.deploys.states import Deploys


class Removal:
    def __init__(
        self,
        app_changes: AppChanges,
        hooks: Hooks,
        environments: Environments,
        data_commands: DataCommands,
        data_records: DataRecords,
        deploys: Deploys,
        deploy_records: DeployRecords,
    ) -> None:
        self._app_changes, self._hooks, self._environments = app_changes, hooks, environments
        self._data_commands, self._data_records = data_commands, data_records
        self._deploys, self._deploy_records = deploys, deploy_records

    async def remove(self, app: App) -> None:
        """Raises NotFound if the app now belongs to another account.

        The record is deleted last, so that an interrupted removal can be repeated.
        """
        if await self._deploy_records.find_live_id(app) is not None:
            await self._app_changes.withhold_name(app)
        await self._hooks.forget_app(app)
        await self._environments.forget_variables(app)
        await self._data_commands.forget_app(app, self._data_records)
        await self._deploys.forget_app(app)
        await self._app_changes.delete_app(app)
