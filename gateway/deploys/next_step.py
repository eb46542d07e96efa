"""What somebody can do after a deploy has failed, from its record and its log."""

import re

import msgspec

from gateway.deploys.manifest import FILE as MANIFEST
from gateway.deploys.phases import find_phase
from gateway.deploys.records import Deploy

SEARCHED = 65_536  # characters at the end of a log, where the failure is
COLOR = re.compile(r"\x1b\[[0-9;]*m")
NAME = r"([A-Z][A-Z0-9_]+)"
QUOTED = rf"[\"'`]?{NAME}[\"'`]?"
# How programs say that an environment variable is missing. The group is its name.
MISSING = re.compile(
    "|".join(
        [
            rf"\bKeyError: ['\"]{NAME}['\"]",  # os.environ["X"]
            rf"\b(?:process\.env|import\.meta\.env|os\.environ|ENV)(?:\.|\[['\"]){NAME}(?:['\"]\])?[^\n]{{0,80}}"
            r"\b(?:undefined|missing|required|not set|not defined|empty)\b",
            rf"(?i:environment variables?)(?: (?i:not found|missing|required))?:? {QUOTED}",  # Prisma, environs
            rf"(?i:(?:missing|set the|define the)(?: required)?(?: environment| env)?(?: variables?| var)?):? {QUOTED}",
            rf"\b{QUOTED}(?i: (?:environment |env )?(?:variable |var )?(?:(?:is |was )?"
            r"(?:missing|required|undefined|unset|not set|not found\. Declare it)|must be set))\b",  # decouple
        ]
    )
)
# pydantic names the field, in a line of its own.
FIELD = re.compile(r"^([A-Za-z]\w*)\n +Field required \[type=missing", re.M)
UNSETTABLE = ("PORT", "HOST", "HOME", "PATH", "DATA_DIR")  # the service sets them
STEPS = {
    "build": "The log shows why the build failed. Correct it, and deploy again.",
    "health": "The release did not pass its health check; the log has its output. Correct it, and deploy again.",
    "canary": "The release failed while visitors used it; the log has its output. Correct it, and deploy again.",
}


class NextStep(msgspec.Struct, frozen=True):
    text: str
    command: str | msgspec.UnsetType = msgspec.UNSET  # of the command line
    variable: str | msgspec.UnsetType = msgspec.UNSET  # which the log says is missing


def find_next_step(deploy: Deploy, log: str) -> NextStep | None:
    """Returns what to do after a failure; None for a deploy that has not failed."""
    if deploy.state != "failed":
        return None
    error = deploy.error or ""
    if error.startswith(MANIFEST):
        return NextStep(f"Correct {MANIFEST}, and deploy again.")
    if deploy.serviceFault:
        return NextStep(
            "The service failed, not your app. Deploy again; if it fails again, tell the service's operators."
        )
    if (name := find_missing_variable(f"{log}\n{error}")) is not None:
        # In previews, the variable may have another value than live, or none.
        where, option = (" for previews", " --preview") if deploy.kind == "preview" else ("", "")
        text = f"The log says that the variable {name} is missing. Set it{where}, and deploy again."
        return NextStep(text, f"capsule env set {deploy.app} {name}{option}", name)
    return NextStep(STEPS[find_phase(deploy)])


def find_missing_variable(log: str) -> str | None:
    """Returns the last environment variable of which the log says that it is missing."""
    log = COLOR.sub("", log[-SEARCHED:])
    found = [(match.start(), next(filter(None, match.groups()))) for match in MISSING.finditer(log)]
    found += [(match.start(), match[1].upper()) for match in FIELD.finditer(log)]
    return next((name for _, name in sorted(found, reverse=True) if name not in UNSETTABLE), None)
