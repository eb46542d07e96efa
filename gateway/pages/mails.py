"""The messages of notices and invitations by e-mail: a text for each type, which becomes a plain and an HTML part.

Names of apps and accounts, reasons of failed builds and findings come from customers. They are cleaned of line breaks
and other control characters, cut, and escaped in the HTML part. Mail programs turn what looks like a page's address
into a link: an account whose name does is shown by its id.
"""

import datetime
import html
import re
import textwrap
import unicodedata
from collections.abc import Callable
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime, parseaddr
from functools import cache
from string import Template
from typing import Any, NamedTuple
from urllib.parse import quote

from gateway.ids import now_iso
from gateway.pages.error_pages import TEMPLATE
from gateway.settings import NANO
from gateway.validation import is_email

POLICY = SMTP.clone(max_line_length=998)  # of headers: the link in one of them must not be folded
LINE_CHARACTERS = 76  # of the plain part
VALUE_CHARACTERS = 300  # of a value from a customer
NAME_CHARACTERS = 60  # of an account, whose name strangers choose
PAGE_ADDRESS = re.compile(r"://|www\.|\w[.。]\w", re.IGNORECASE)

LINK = '<a class="quiet" href="{}" style="color: #66625b">{}</a>'
INVITATION = "invitation"  # the kind that nobody chooses


class Text(NamedTuple):
    title: str  # also the subject
    paragraphs: list[str]
    facts: list[tuple[str, str]]  # a label and its value
    label: str  # of the link to the dashboard
    path: str  # of the link, after `/dashboard#/`


class Footer(NamedTuple):
    """Why a notice came, and how to stop it."""

    account: str  # its id
    name: str  # of the account
    kind: str
    is_last: bool  # of the day, because the address has got as many as it may, of all accounts or of this one
    base_url: str
    end: str  # the link that ends all notices, or invitations by e-mail


def write_message(
    text: Text, footer: Footer, *, sender: str, recipient: str, message_id: str, now: float
) -> EmailMessage:
    """Returns the message. `message_id` is its part before the @. `now` is in seconds since the epoch."""
    message = EmailMessage(policy=POLICY)
    message["From"] = sender
    message["To"] = recipient
    message["Subject"] = clean(text.title)
    message["Date"] = format_datetime(datetime.datetime.fromtimestamp(int(now), datetime.UTC))
    message["Message-ID"] = f"<{message_id}@{parseaddr(sender)[1].partition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"
    message["List-Unsubscribe"] = f"<{footer.end}>"
    message["List-Unsubscribe-Post"] = "List-Unsubscribe=One-Click"
    message.set_content(_render_plain(text, footer), cte="quoted-printable")
    message.add_alternative(_render_html(text, footer), subtype="html", cte="quoted-printable")
    return message


def clean(value: object, most: int = VALUE_CHARACTERS) -> str:
    """Returns the value as one line of printable characters."""
    line = " ".join("".join(each if each.isprintable() else " " for each in str(value)).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def name_account(account: str, name: str) -> str:
    """Returns the name of the account, or its id if the name looks like the address of a page.

    The name of a person's own account is at first their e-mail address.
    """
    shown = clean(name, NAME_CHARACTERS)
    if is_email(shown):
        return shown
    return account if PAGE_ADDRESS.search(unicodedata.normalize("NFKC", shown)) else shown


def _render_plain(text: Text, footer: Footer) -> str:
    parts = [textwrap.fill(clean(part), LINE_CHARACTERS) for part in (text.title, *text.paragraphs)]
    parts.append("\n".join(f"{clean(label)}: {clean(value)}" for label, value in text.facts))
    parts.append(f"{text.label}: {_dashboard(footer, text.path)}")
    parts.append("-- \n" + textwrap.fill(_explain(footer), LINE_CHARACTERS))  # as before a signature
    parts.append("\n".join(f"{label}: {url}" for label, url in _list_links(footer)))
    return "\n\n".join(parts) + "\n"


def _render_html(text: Text, footer: Footer) -> str:
    paragraph = '<p class="ink" style="margin: 0 0 12px; color: #1c1b1a">{}</p>'
    cell = 'valign="top" style="padding: 8px 0; border-top: 1px solid #e3e0d8; color: {}; word-break: break-word{}"'
    quiet, ink = cell.format("#66625b", "; padding-right: 16px"), cell.format("#1c1b1a", "")
    fact = f'<tr><td class="quiet line" width="36%" {quiet}>{{}}</td><td class="ink line" {ink}>{{}}</td></tr>'
    return Template(_template()).substitute(
        title=_escape(text.title),
        paragraphs="".join(paragraph.format(_escape(each)) for each in text.paragraphs),
        facts="".join(fact.format(_escape(label), _escape(value)) for label, value in text.facts),
        url=html.escape(_dashboard(footer, text.path)),
        label=_escape(text.label),
        why=_escape(_explain(footer)),
        links=" · ".join(LINK.format(html.escape(url), label) for label, url in _list_links(footer)),
    )


@cache
def _template() -> str:
    return TEMPLATE.with_name("mail.html").read_text()


def _escape(value: str) -> str:
    return html.escape(clean(value))


def _dashboard(footer: Footer, path: str) -> str:
    return f"{footer.base_url}/dashboard#/{quote(clean(path))}"


KINDS = {
    "budget": "daily caps",
    "deployFailed": "failed deploys",
    "appDown": "apps that do not answer",
    "certificate": "certificates that end",
    "finding": "security findings",
}


def _list_links(footer: Footer) -> list[tuple[str, str]]:
    """Returns the label and the address of each link at the end."""
    if footer.kind == INVITATION:
        return [("Get no more invitations by e-mail", footer.end)]
    return [("Choose your notices", _dashboard(footer, "account")), ("End all of them", footer.end)]


def _explain(footer: Footer) -> str:
    name = name_account(footer.account, footer.name)
    if footer.kind == INVITATION:
        return f"You get this because the account {name} has invited your address."
    why = f"You get this because you chose notices about {KINDS[footer.kind]} of the account {name}."
    if footer.is_last:
        why += (
            " This is the last notice of today about this account, because you have got as many as are sent in a day."
        )
    return why


# -- one text for each type ------------------------------------------------------------------------------------


def write_text(notice_type: str, app: str, data: dict[str, Any]) -> Text:
    """Returns the text of a notice. `app` is the app's name, or '' for the account. Raises KeyError for other types."""
    return _TEXTS[notice_type](app, data)


def _budget(app: str, data: dict[str, Any]) -> Text:
    whose, path = (f"The app {app}", f"apps/{app}/usage") if app else ("Your account", "usage")
    facts = [("Used today", _euro(data["used"])), ("Daily cap", _euro(data["cap"])), ("Day", f"{data['day']}, UTC")]
    until = "until midnight UTC. Refused requests cost nothing."
    if data["level"] < 100:
        title = f"{whose} has used 80% of its daily cap"
        then = f"Its users still get answers. Once the cap is reached, requests to the model are refused {until}"
    else:
        title = f"{whose} has reached its daily cap"
        then = f"Requests to the model that could cost more than what is left of the cap are refused {until}"
    counted = "What is used includes the most that running requests can still cost."
    return Text(title, [then, counted], facts, "Show the usage", path)


PHASES = {"build": "the build", "health": "the check of the new version", "canary": "the first minutes with visitors"}


def _deploy_failed(app: str, data: dict[str, Any]) -> Text:
    preview = data["kind"] == "preview"
    title = f"A preview of {app} failed" if preview else f"The deploy of {app} failed"
    kept = "The live app is not affected." if preview else "The version that was live before, if any, is still live."
    facts = [("Failed in", PHASES[data["phase"]]), ("Reason", data["reason"]), ("Deploy", data["deployId"])]
    return Text(title, [kept], facts, "Read its log", f"deploys/{data['deployId']}")


PROBE_REASONS = {
    "dns": "The name of its address cannot be found",
    "connect": "No connection can be made",
    "tls": "The TLS connection fails",
    "timeout": "It does not answer in time",
    "status": "It answers with an error",
}


def _app_unhealthy(app: str, data: dict[str, Any]) -> Text:
    facts = [("Address", data["url"]), ("Problem", PROBE_REASONS[data["reason"]])]
    facts.append(("Failed checks in a row", str(data["failures"])))
    then = "Its visitors probably get an error. Another notice follows when it answers again."
    return Text(f"{app} does not answer", [then], facts, "Show the app", f"apps/{app}")


def _app_recovered(app: str, data: dict[str, Any]) -> Text:
    facts = [("Address", data["url"]), ("Down since", _time(data["downSince"])), ("For", _duration(data["downMs"]))]
    return Text(f"{app} answers again", ["Its visitors reach it as before."], facts, "Show the app", f"apps/{app}")


def _certificate(app: str, data: dict[str, Any]) -> Text:
    days, has_ended = data["daysLeft"], data["daysLeft"] < 1 and data["expiresAt"] <= now_iso()
    when = "within a day" if days < 1 else "in 1 day" if days == 1 else f"in {days} days"
    title = f"The certificate of {data['domain']} {'has ended' if has_ended else f'ends {when}'}"
    facts = [("Domain", data["domain"]), ("App", app), ("Ended" if has_ended else "Ends", _time(data["expiresAt"]))]
    then = "Browsers" if has_ended else "After that, browsers"
    then += " show a warning in place of the app. Renew the certificate, or check that the domain still points to this "
    then += "service if the service renews it."
    return Text(title, [then], facts, "Show the domain", f"apps/{app}/settings/domain")


def _findings(app: str, data: dict[str, Any]) -> Text:
    count = data["count"]
    title = f"{app} has {count} urgent security findings" if count > 1 else f"{app} has an urgent security finding"
    facts = [(clean(each["cve"], 40), _describe_finding(each)) for each in data["findings"]]
    if (more := count - len(facts)) > 0:
        facts.append(("And", f"{more} more"))
    then = "A scan of what the app consists of found known vulnerabilities. Update the components, and deploy again."
    return Text(title, [then], facts, "Show all findings", f"apps/{app}")


def _describe_finding(finding: dict[str, Any]) -> str:
    fixed = f"fixed in {finding['fixedIn']}" if finding["fixedIn"] else "not fixed yet"
    by = f"; due on {_time(finding['deadlineAt'])}" if finding["deadlineAt"] else ""
    return f"{clean(finding['component'], 100)}, {clean(finding['severity'], 20)}, {clean(fixed, 80)}{by}"


ROLES = {
    "owner": "Owner: may do everything",
    "developer": "Developer: all but keys, members, limits and deletions",
    "viewer": "Viewer: reads",
}


def _invitation(_: str, data: dict[str, Any]) -> Text:
    name, by = name_account(data["account"], data["name"]), data["by"]
    who = by if "@" in by else "Somebody with an API key of the account"
    facts = [("Account", name), ("Account id", data["account"]), ("Invited by", by), ("Role", ROLES[data["role"]])]
    facts.append(("Ends", _time(data["endsAt"])))
    ask = f"{who} invites you to become a member of the account {name}. Sign in with this address to accept or decline."
    wait = "You are no member until you accept. If you do not know them, do nothing: the invitation ends by itself."
    return Text(f"You are invited to the account {name}", [ask, wait], facts, "Sign in and answer", "")


_TEXTS: dict[str, Callable[[str, dict[str, Any]], Text]] = {
    "budget": _budget,
    "deploy.failed": _deploy_failed,
    "app.unhealthy": _app_unhealthy,
    "app.recovered": _app_recovered,
    "domain.expiring": _certificate,
    "security.finding": _findings,
    INVITATION: _invitation,
}


def _euro(nano_euro: int) -> str:
    """Returns the amount with cents, or with more digits if it is less than a cent."""
    euro = nano_euro / NANO
    return f"€{euro:.2f}" if euro >= 0.01 or not nano_euro else f"€{euro:.2g}"


def _time(iso: str) -> str:
    at = datetime.datetime.fromisoformat(iso)
    return f"{at.day} {at:%B %Y, %H:%M} UTC"


def _duration(milliseconds: int) -> str:
    minutes = max(round(milliseconds / 60_000), 1)
    days, rest = divmod(minutes, 1_440)
    hours, rest = divmod(rest, 60)
    units = [(days, "day"), (hours, "hour"), (rest, "minute")]
    return " ".join(f"{number} {unit}{'' if number == 1 else 's'}" for number, unit in units if number)
