"""The audit trail: every change that an operator made or tried to make.

- `{ops}:audit:changes` has the changes by people
- `{ops}:audit:reports` has the reports of watchdogs, scanners and deploy engines, which use the operator token too. In
  a trail of their own they do not push out the changes

A request writes its record before anything else happens, and again with its result before the response ends. The second
write replaces the first in one step.

Failure policy: when the first record cannot be written, the request is refused and changes nothing. When the result
cannot be written, the change has happened. The record stays without a result, and the log has it as `audit.unfinished`.
A gateway that dies in between leaves the same record.

A record is kept for 400 days. The results of later requests remove the older ones.

A record never contains a secret. It has the values of the body's `FIELDS`, and only the names of other fields. A reason
that looks like a secret is refused.
"""

import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import structlog

from gateway.accounts.operators import Operator
from gateway.errors import BackboneUnavailable
from gateway.ids import Time, now_iso
from gateway.keys import audit_key
from gateway.redis.client import Store
from gateway.redis.errors import code_of

logger = structlog.get_logger()

Trail = Literal["changes", "reports"]
MAX_RECORDS = 10_000  # per trail
READ_RECORDS = 500  # at once, to find those that a filter chooses
KEPT_SECONDS = 400 * 86_400
VALUE_LENGTH = 500  # characters

# Fields of bodies whose values are not secret.
FIELDS = {
    "account",
    "approved",
    "branch",
    "customDomain",
    "customDomainVerified",
    "dailyEuro",
    "enabled",
    "exitCode",
    "kind",
    "name",
}
FIELDS |= {"ok", "phase", "plan", "reason"}
RESPONSE_FIELDS = {"deployId", "id"}
HIDDEN = "(not recorded)"

Value = str | int | bool | None


class AuditRecord(msgspec.Struct, kw_only=True):
    id: str = ""  # of its entry in the trail; it changes when the result is known
    at: Time
    operator: str
    token: str  # fingerprint of the token; empty for an operator who signed in
    action: str  # such as `change_account`
    target: str  # the account, app or deploy; empty for the whole service
    details: dict[str, Value] = {}
    reason: str = ""  # of the operator, from the header X-Reason
    status: int | None = None  # of the response; null: the result is not known
    code: str = ""  # of a refusal
    requestId: str


class AuditFilter(msgspec.Struct, frozen=True):
    """Chooses records. An empty text chooses all."""

    operator: str = ""
    action: str = ""
    target: str = ""

    def matches(self, record: AuditRecord) -> bool:
        return all(
            wanted in ("", having)
            for wanted, having in (
                (self.operator, record.operator),
                (self.action, record.action),
                (self.target, record.target),
            )
        )


EVERY_RECORD = AuditFilter()


class AuditTrail:
    def __init__(self, store: Store, *, max_records: int = MAX_RECORDS) -> None:
        self._store, self._max_records = store, max_records

    async def begin_record(
        self, trail: Trail, operator: Operator, action: str, target: str, request_id: str, reason: str = ""
    ) -> AuditRecord:
        """Records that an operator is about to change something. Raises BackboneUnavailable."""
        record = AuditRecord(
            at=now_iso(),
            operator=operator.name,
            token=operator.fingerprint,
            action=action,
            target=target,
            reason=reason,
            requestId=request_id,
        )
        key = audit_key(trail)
        async with self._store.client.pipeline(transaction=True) as pipe:
            pipe.xadd(key, _encode(record), maxlen=self._max_records, approximate=False)
            pipe.expire(key, KEPT_SECONDS)
            record.id, _ = await pipe.execute()
        record.at = now_iso(int(record.id.partition("-")[0]) / 1000)  # Redis's clock
        return record

    async def finish_record(self, trail: Trail, record: AuditRecord) -> None:
        """Records and logs the result. If it cannot be written, logs that too: the change has happened."""
        key, first = audit_key(trail), record.id
        oldest = (
            int(first.partition("-")[0]) - KEPT_SECONDS * 1000
        )  # by Redis's clock: a wrong one here removes nothing
        who = {"operator": record.operator, "token": record.token}
        what = {"action": record.action, "target": record.target, "status": record.status, "code": record.code}
        logger.info("audit.recorded", trail=trail, request_id=record.requestId, **who, **what)
        try:
            async with self._store.client.pipeline(transaction=True) as pipe:
                pipe.xadd(key, _encode(record), maxlen=self._max_records, approximate=False)
                pipe.xdel(key, first)
                pipe.xtrim(key, minid=oldest, approximate=False)
                pipe.expire(key, KEPT_SECONDS)
                await pipe.execute()
        except BackboneUnavailable as error:
            record_fields = msgspec.to_builtins(record)
            logger.error("audit.unfinished", trail=trail, record=record_fields, error=code_of(error.__cause__))

    async def list_records(
        self, trail: Trail, limit: int, before: str | None, chosen: AuditFilter = EVERY_RECORD
    ) -> list[AuditRecord]:
        """Returns records, newest first. `before` is the id of a record. Raises BackboneUnavailable."""
        oldest = int((time.time() - KEPT_SECONDS) * 1000)
        count = limit if chosen == EVERY_RECORD else READ_RECORDS
        found: list[AuditRecord] = []
        has_more = True
        while has_more and len(found) < limit:
            newest = "+" if before is None else f"({before}"
            entries = await self._store.client.xrevrange(audit_key(trail), newest, oldest, count=count)
            records = [_decode(entry, fields) for entry, fields in entries]
            found += [record for record in records if chosen.matches(record)]
            if has_more := len(records) == count:
                before = records[-1].id
        return found[:limit]


def _encode(record: AuditRecord) -> dict[str, str]:
    return {"record": msgspec.json.encode(record).decode()}


def _decode(entry: str, fields: Mapping[str, str]) -> AuditRecord:
    record = msgspec.json.decode(fields["record"], type=AuditRecord)
    if record.status is None:
        record.at = now_iso(int(entry.partition("-")[0]) / 1000)
    record.id = entry
    return record


def describe_body(body: Any) -> dict[str, Value]:
    """Returns the body's fields, without those that have their defaults."""
    if not isinstance(body, msgspec.Struct):
        return {}
    given = {field.name: getattr(body, field.name) for field in msgspec.structs.fields(body) if _is_given(body, field)}
    return {name: _shorten(value) if name in FIELDS else HIDDEN for name, value in given.items()}


def _is_given(body: msgspec.Struct, field: msgspec.structs.FieldInfo) -> bool:
    value = getattr(body, field.name)
    return value is not msgspec.UNSET and (field.required or value != field.default)


def read_response(body: bytes) -> tuple[dict[str, Value], str]:
    """Returns the ids in a response, and the code of a refusal."""
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}, ""
    if not isinstance(fields, dict):
        return {}, ""
    error = fields.get("error")
    code = str(error.get("code", "")) if isinstance(error, dict) else ""
    return {name: _shorten(fields[name]) for name in sorted(RESPONSE_FIELDS & fields.keys())}, code


def _shorten(value: Any) -> Value:
    if value is None or isinstance(value, bool | int):
        return value
    return value[:VALUE_LENGTH] if isinstance(value, str) else HIDDEN
