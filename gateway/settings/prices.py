"""The models on offer and their prices. An operator's file changes them, and adds models.

Prices hold from their own time on: a tariff is the prices of all models in the time between two changes. Each request
has one tariff, chosen at its admission by Redis's clock, so all processes change prices at the same moment. Every model
has a price in every tariff: before the first time that the file names, those below hold, and for a model that only the
file has its first price.
"""

import datetime
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from gateway.ids import day_of, read_time
from gateway.settings.toml import read_toml

PRICED_ON = "2026-07-02"  # the date of PRICES
DEFAULT_MODEL = "gpt-oss-120b"
MAX_OUTPUT_TOKENS = 2_000

# Tokens that the provider's chat template may add: to a request with one message, and for each further message.
TEMPLATE_TOKENS = 256
MESSAGE_TOKENS = 16

FOREVER = 1 << 52  # milliseconds, which scripts in Redis still read exactly
MAX_EURO = 10_000  # per million tokens
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Price(msgspec.Struct, frozen=True):
    """Nano-euro per token."""

    input: int
    output: int


PRICES = {
    "gpt-oss-120b": Price(150, 600),
    "qwen3.6-35b-a3b": Price(250, 1_500),
    "llama-3.3-70b-instruct": Price(900, 900),
}


class Tariff(msgspec.Struct, frozen=True):
    """The price of each model from `since` to before `until`, both in milliseconds since the epoch."""

    prices: dict[str, Price]
    since: int = 0
    until: int = FOREVER

    @property
    def date(self) -> str:
        """The date in UTC from which these prices hold."""
        return max(PRICED_ON, day_of(self.since))


TARIFFS = (Tariff(PRICES),)  # without a file


def tariff_at(tariffs: Sequence[Tariff], time: int) -> Tariff:
    """Returns the tariff at a time in milliseconds since the epoch."""
    return next(each for each in reversed(tariffs) if each.since <= time)


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A table of the file."""

    input: float  # euro per million tokens, as is `output`
    output: float
    since: Any  # a date or a time of TOML
    model: str = ""  # in `[[price]]`, which earlier versions wrote; other tables have the model's name


def read_prices(path: str) -> tuple[Tariff, ...]:
    """Reads the file. Raises ValueError with the file, and the line or the key that is wrong."""
    with read_toml(path, dict[str, Any]) as file:
        changes: dict[int, dict[str, Price]] = {}
        for place, model, entry in _list_entries(file):
            try:
                since = _read_since(entry.since)
                price = Price(_read_euro("input", entry.input), _read_euro("output", entry.output))
                if not _MODEL.fullmatch(model):
                    raise ValueError("model: must be 1 to 100 letters, digits, dots, hyphens and underscores")
                if model in changes.setdefault(since, {}):
                    raise ValueError(f"since: {model!r} has another price since the same time")
            except ValueError as error:
                raise ValueError(f"{place}.{error}") from None
            changes[since][model] = price
        if not changes:
            raise ValueError("must have at least one table with the name of a model")
    return tuple(_tariffs(sorted(changes.items())))


def _list_entries(file: dict[str, Any]) -> Iterator[tuple[str, str, _Entry]]:
    """Yields the key, the model and the content of each table. A model whose price changes has several."""
    for name, value in file.items():
        for number, table in enumerate(value if isinstance(value, list) else [value]):
            place = f"{name}[{number}]" if isinstance(value, list) else name
            try:
                entry = msgspec.convert(table, _Entry)
            except msgspec.ValidationError as error:
                raise ValueError(f"{place}: {error}") from None
            if name != "price" and entry.model:
                raise ValueError(f"{place}: the table has the model's name; remove the key model")
            yield place, entry.model if name == "price" else name, entry


def _read_since(value: Any) -> int:
    """Returns milliseconds since the epoch. A time without an offset is in UTC."""
    try:
        if isinstance(value, datetime.date):  # which a datetime is too
            return round(read_time(value.isoformat()) * 1000)
    except ValueError:
        pass
    raise ValueError("since: must be a date or a time, such as 2027-01-01 or 2027-01-01T12:00:00Z, without quotes")


def _read_euro(name: str, euro: float) -> int:
    """Returns nano-euro per token."""
    amount = Decimal(str(euro)) * 1000  # a euro per million tokens is a thousand nano-euro per token
    if not 0 < euro <= MAX_EURO or amount != int(amount):
        raise ValueError(
            f"{name}: must be euro per million tokens, from 0.001 to {MAX_EURO} and with at most three decimals: "
            "a token costs whole nano-euro"
        )
    return int(amount)


def _tariffs(changes: Sequence[tuple[int, dict[str, Price]]]) -> Iterable[Tariff]:
    prices = dict(PRICES)
    for _, changed in changes:
        prices = prices | {model: price for model, price in changed.items() if model not in prices}
    starts = [(0, prices), *changes]
    for (since, changed), (until, _) in itertools.pairwise([*starts, (FOREVER, {})]):
        prices = prices | changed
        yield Tariff(prices, since, until)


class Usage(msgspec.Struct, frozen=True):
    """Tokens, as the provider reported them."""

    input: int
    output: int
    details: dict[str, dict[str, int]] | None = None  # of OpenAI's format, such as cached tokens; not priced


class Charge(msgspec.Struct, frozen=True):
    """The cost at which a request is settled."""

    cost: int  # nano-euro, at most the reservation's maximum cost
    anomaly: str | None = None  # why the cost is not the price of the usage: a label of `gateway_usage_anomalies`


NOTHING = Charge(0)


def choice_of(models: Iterable[str]) -> str:
    """Returns what to do after the request for another model."""
    return f"Choose one of the models offered here: {', '.join(models)}."


def worst_case_tokens(text_bytes: int, max_tokens: int) -> int:
    """Returns the most tokens that a request can use. A token is at least one byte of text."""
    return text_bytes + TEMPLATE_TOKENS + max_tokens


def worst_case_cost(model: str, text_bytes: int, max_tokens: int, tariff: Tariff) -> int:
    """Returns the most that a request can cost, in nano-euro."""
    price = tariff.prices[model]
    return (text_bytes + TEMPLATE_TOKENS) * price.input + max_tokens * price.output


def charge_for_usage(price: Price, usage: Usage, max_cost: int) -> Charge:
    cost = usage.input * price.input + usage.output * price.output
    return Charge(cost) if cost <= max_cost else Charge(max_cost, "above bound")
