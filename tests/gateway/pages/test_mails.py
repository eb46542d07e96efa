"""The messages of notices: what each says, and that names and reasons from customers change no header and no tag."""

import email
import email.policy

import msgspec
import pytest

from gateway.events.catalog import SAMPLES
from gateway.events.notices import KIND_OF_EVENT, shorten_data
from gateway.pages.mails import Footer, name_account, write_message, write_text
from tests.fakes.mail_server import text_of

BASE_URL = "https://api.example.com"
FOOTER = Footer("acc_1", "Ada’s workshop", "finding", False, BASE_URL, f"{BASE_URL}/unsubscribe/x")
NANO = 1_000_000_000
BUDGET = {"level": 80, "used": 410_000_000, "cap": NANO // 2, "day": "2026-07-02"}
CERTIFICATE, LATE = "The certificate of app.example.com", {"expiresAt": "2999-01-01T00:00:00.000Z"}


def write(notice_type: str, app: str, data: dict[str, object], footer: Footer = FOOTER) -> email.message.EmailMessage:
    """Returns the message as its recipient parses it."""
    sent = write_message(
        write_text(notice_type, app, data),
        footer,
        sender="Capsule <notices@example.com>",
        recipient="ada@example.com",
        message_id="p38.1-0",
        now=1_782_979_200,
    )
    # A long link stays on one line.
    assert f"List-Unsubscribe: <{footer.end}>\r\n".encode() in sent.as_bytes()
    return email.message_from_bytes(sent.as_bytes(), policy=email.policy.default)


def parts_of(message: email.message.EmailMessage) -> list[str]:
    """Returns both parts of a message, each on one line."""
    return [" ".join(text_of(message, kind).split()) for kind in ("plain", "html")]


def data_of(event: str) -> dict[str, object]:
    return msgspec.json.decode(shorten_data(msgspec.json.encode(SAMPLES[event]).decode()))


# The notice, its data beside the event's own, the subject, and what both parts of the message say.
TEXTS: list[tuple[str, dict[str, object], str, list[str]]] = [
    ("budget", BUDGET, "The app notes has used 80% of its daily cap", ["€0.41", "€0.50", "apps/notes/usage"]),
    ("app.recovered", {}, "notes answers again", ["31 December 2025, 23:57 UTC", "3 minutes"]),
    ("app.unhealthy", {}, "notes does not answer", ["It does not answer in time"]),
    ("domain.expiring", {}, f"{CERTIFICATE} ends in 6 days", ["7 January 2026, 12:00 UTC"]),
    ("domain.expiring", {"daysLeft": 0}, f"{CERTIFICATE} has ended", ["Ended", "Browsers show"]),
    ("domain.expiring", {"daysLeft": 0} | LATE, f"{CERTIFICATE} ends within a day", ["Ends", "After that"]),
    ("deploy.failed", {}, "The deploy of notes failed", ["command ended with status 1", "deploys/dep_sample"]),
    ("security.finding", {}, "notes has an urgent security finding", ["CVE-2026-0001", "fixed in 1.0.1"]),
]


@pytest.mark.parametrize(("kind", "data", "subject", "facts"), TEXTS)
def test_the_text_of_each_notice(kind: str, data: dict[str, object], subject: str, facts: list[str]) -> None:
    assert {each for each, *_ in TEXTS} == {*KIND_OF_EVENT, "budget", "app.recovered"}
    message = write(kind, "notes", data if kind == "budget" else data_of(kind) | data)
    assert message["Subject"] == subject
    for part in parts_of(message):
        assert [fact for fact in [subject, *facts] if fact not in part] == []


def test_the_cap_of_an_account() -> None:
    message = write("budget", "", BUDGET | {"level": 100})
    assert message["Subject"] == "Your account has reached its daily cap"
    assert [fact for fact in ("refused", "dashboard#/usage") if fact not in text_of(message)] == []


def test_each_message_says_why_it_came_and_how_to_stop_it() -> None:
    message = write("security.finding", "notes", data_of("security.finding"), FOOTER._replace(is_last=True))
    assert message["List-Unsubscribe"] == "<https://api.example.com/unsubscribe/x>"
    assert message["List-Unsubscribe-Post"] == "List-Unsubscribe=One-Click"
    assert (message["From"], message["To"]) == ("Capsule <notices@example.com>", "ada@example.com")
    assert (message["Message-ID"], message["Auto-Submitted"]) == ("<p38.1-0@example.com>", "auto-generated")
    for part in parts_of(message):
        assert "because you chose notices about security findings of the account Ada’s workshop" in part
        assert "the last notice of today" in part
        assert "https://api.example.com/unsubscribe/x" in part
        assert "https://api.example.com/dashboard#/account" in part


INVITATION = {"account": "acc_1", "name": "Ada’s workshop", "by": "ada@example.com", "role": "developer"}
INVITATION |= {"endsAt": "2026-07-16T12:00:00.000Z"}


@pytest.mark.parametrize("by", ["ada@example.com", "API key"])
def test_an_invitation(by: str) -> None:
    """It says who invites to what, and that nothing happens without an answer."""
    link = "https://api.example.com/unsubscribe/" + "x" * 500
    message = write("invitation", "", INVITATION | {"by": by}, FOOTER._replace(kind="invitation", end=link))
    assert message["Subject"] == "You are invited to the account Ada’s workshop"
    assert message["List-Unsubscribe"] == f"<{link}>"
    who = by if "@" in by else "Somebody with an API key of the account"
    facts = ("acc_1", "Developer", "16 July 2026, 12:00 UTC", "no member until you accept", "Get no more invitations")
    for part in parts_of(message):
        assert [fact for fact in (f"{who} invites you", *facts) if fact not in part] == []
        assert "Choose your notices" not in part


def test_a_name_that_is_the_address_of_a_page_is_in_no_mail() -> None:
    evil = "Pay now at https://evil.example/pay"
    for kind in ("invitation", "finding"):
        message = write("invitation", "", INVITATION | {"name": evil}, FOOTER._replace(kind=kind, name=evil))
        assert message["Subject"] == "You are invited to the account acc_1"
        for part in parts_of(message):
            assert "the account acc_1" in part
            assert "evil" not in part
    for name in ("Ada’s workshop", "Lovelace & Co. KG", "Wait... what?", "ada@example.com"):
        assert name_account("acc_1", name) == name
    for name in (
        "ada@example.com at evil.example",
        "Pay at EVIL.EXAMPLE/pay",
        "call 10.0.0.1",
        "see WWW.",
        "ftp://evil",
    ):
        assert name_account("acc_1", name) == "acc_1"
    for name in ("evil．example", "bücher。example"):  # other dots, which browsers read as one
        assert name_account("acc_1", name) == "acc_1"


def test_what_customers_write_changes_no_header_and_no_tag() -> None:
    evil = 'x\r\nBcc: eve@example\r\n\r\n<script>alert("1")</script>\u2028\x00' + "y" * 1_000
    finding = {"cve": evil, "component": evil, "severity": evil, "fixedIn": evil, "deadlineAt": None}
    data = {"kind": "live", "phase": "build", "reason": evil, "deployId": evil}
    plain = write("deploy.failed", "notes", data_of("deploy.failed"))
    for message in (
        write("deploy.failed", evil, data, FOOTER._replace(name=evil)),
        write("security.finding", evil, {"findings": [finding] * 10, "count": 100}),
        write("invitation", "", INVITATION | {"name": evil, "by": evil}, FOOTER._replace(kind="invitation")),
    ):
        assert message.keys() == plain.keys()
        assert "Bcc: eve@example" in message["Subject"]
        assert "<script" not in text_of(message, "html")
        assert len(message.as_bytes()) < 50_000
        assert all("\x00" not in text_of(message, kind) for kind in ("plain", "html"))
