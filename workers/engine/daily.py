"""When the daily snapshot of an app's data is due: a day after the last one, if something has changed since."""

from workers.engine.app_data import AppData, is_empty

DAILY_SECONDS = 86_400.0


class DailySnapshots:
    """The file `daily` has the time of the last snapshot, or when none was needed, and the fingerprint at that time."""

    def __init__(self, data: AppData) -> None:
        self._data, self._record = data, data.folder / "daily"

    def is_due(self, now: float) -> bool:
        at, _ = self._read()
        return not at or now - float(at) >= DAILY_SECONDS

    def find_change(self, now: float) -> str:
        """Returns the fingerprint if a snapshot is due and something has changed. If not, notes that for a day.

        What changes from now on has another fingerprint, even if the snapshot has it.
        """
        if not self.is_due(now):
            return ""
        at, before = self._read()
        if at and not is_empty(self._data.files) and (fingerprint := self._data.fingerprint()) != before:
            return fingerprint
        self.note(now, before)
        return ""

    def note(self, now: float, fingerprint: str) -> None:
        self._record.write_text(f"{now} {fingerprint}")

    def _read(self) -> tuple[str, str]:
        at, _, before = self._record.read_text().partition(" ") if self._record.exists() else ("", "", "")
        return at, before
