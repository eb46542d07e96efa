"""The prices file."""

from pathlib import Path

import pytest

from gateway.settings import BadSettings, load
from gateway.settings.prices import PRICES, TARIFFS, Price, Tariff, tariff_at
from tests.lua.scripts import at

ONE = 'model = "gpt-oss-120b"\ninput = 0.2\noutput = 0.80\nsince = 2027-01-01\n'
NEW = 'model = "small-1"\ninput = 1\noutput = 0.001\nsince = 2027-03-01\n'
OSS = "gpt-oss-120b"


def milliseconds(text: str) -> int:
    return at(text) // 1000


def read(tmp_path: Path, *tables: str, text: str = "") -> tuple[Tariff, ...]:
    path = tmp_path / "prices.toml"
    path.write_text(text or "".join(f"[[price]]\n{table}" for table in tables))
    return load({"GATEWAY_PRICES_FILE": str(path)}).tariffs


async def test_a_price_holds_from_its_date_on(tmp_path: Path) -> None:
    later = ONE.replace("0.2", "0.3").replace("2027-01-01", "2027-06-01T10:00:00+02:00")
    tariffs = read(tmp_path, later, ONE)  # in any order
    for moment, price in {
        "2026-01-01T00:00:00": PRICES[OSS],
        "2026-12-31T23:59:59.999": PRICES[OSS],
        "2027-01-01T00:00:00": Price(200, 800),
        "2027-06-01T07:59:59.999": Price(200, 800),
        "2027-06-01T08:00:00": Price(300, 800),
        "2060-01-01T00:00:00": Price(300, 800),
    }.items():
        tariff = tariff_at(tariffs, milliseconds(moment))
        assert tariff.since <= milliseconds(moment) < tariff.until
        assert tariff.prices == PRICES | {OSS: price}, "models that are not named keep their prices"
    assert [each.date for each in tariffs] == ["2026-07-02", "2027-01-01", "2027-06-01"]


async def test_a_table_has_the_name_of_its_model(tmp_path: Path) -> None:
    first, second = ONE.partition("\n")[2], NEW.partition("\n")[2]
    same = read(tmp_path, ONE, NEW, NEW.replace("= 1\n", "= 2\n").replace("03", "09"))
    later = second.replace("= 1\n", "= 2\n").replace("03", "09")
    assert read(tmp_path, text=f'["{OSS}"]\n{first}[[small-1]]\n{second}[[small-1]]\n{later}') == same
    for text, said in {
        f'["{OSS}"]\n{ONE}': f"{OSS}: the table has the model's name; remove the key model",
        f'["{OSS}"]\n{first.replace("0.2", "0")}': f"{OSS}.input: must be euro per million tokens",
        f"[[small-1]]\n{first}[[small-1]]\n{first}": r"small-1\[1\].since: 'small-1' has another price",
        f'["a/b"]\n{first}': "a/b.model: must be 1 to 100",
        "small-1 = 1\n": "small-1: Expected `object`, got `int`",
    }.items():
        with pytest.raises(BadSettings, match=f"prices.toml: {said}"):
            read(tmp_path, text=text)


async def test_a_model_that_only_the_file_has_a_price_at_every_time(tmp_path: Path) -> None:
    tariffs = read(tmp_path, NEW.replace("= 1\n", "= 2\n").replace("03", "09"), NEW)
    prices = [each.prices["small-1"] for each in tariffs]
    assert prices == [Price(1000, 1), Price(1000, 1), Price(2000, 1)]
    assert list(tariffs[0].prices) == [*PRICES, "small-1"]


async def test_all_providers_may_serve_it(tmp_path: Path) -> None:
    prices, providers = tmp_path / "prices.toml", tmp_path / "providers.toml"
    prices.write_text(f"[[price]]\n{NEW}")
    table = '[[provider]]\nname = "one"\nurl = "https://a.example/v1"\nregion = "fr-par"\nkey_env = "K"\n'
    assert load({"GATEWAY_PRICES_FILE": str(prices)}).models == (*PRICES, "small-1")
    both = {"GATEWAY_PRICES_FILE": str(prices), "GATEWAY_PROVIDERS_FILE": str(providers)}
    providers.write_text(table)
    assert load(both).models == (*PRICES, "small-1")
    providers.write_text(table + 'models = { "small-1" = "vendor/small" }\n')
    assert load(both).models == ("small-1",)
    with pytest.raises(BadSettings, match=r"provider\[0\].models: 'small-1' has no price; .* GATEWAY_PRICES_FILE$"):
        load({"GATEWAY_PROVIDERS_FILE": str(providers)})


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ([], "at least one table"),
        ([ONE, ONE], r"price\[1\].since: 'gpt-oss-120b' has another price since the same time"),
        ([ONE, ONE.replace("01-01", "01-01T01:00:00+01:00")], r"price\[1\].since: "),
        ([ONE.replace('"gpt-oss-120b"', '"a/b"')], r"price\[0\].model: must be 1 to 100"),
        ([ONE.replace("since = 2027-01-01\n", "")], r"price\[0\]: .*missing required field `since`"),
        ([ONE.replace("2027-01-01", '"2027-01-01"')], r"price\[0\].since: must be a date or a time"),
        ([ONE, NEW.replace("= 1\n", "= 0\n")], r"price\[1\].input: must be euro per million tokens"),
        ([ONE.replace("0.2", "-0.2")], r"price\[0\].input: "),
        ([ONE.replace("0.2", "0.0005")], r"price\[0\].input: .*three decimals"),
        ([ONE.replace("0.80", "nan")], r"price\[0\].output: "),
        ([ONE.replace("0.80", "10_001")], r"price\[0\].output: "),
        ([ONE + "currency = 1\n"], "unknown field `currency`"),
    ],
)
async def test_a_fault_stops_the_start(tmp_path: Path, tables: list[str], said: str) -> None:
    with pytest.raises(BadSettings, match=f"^GATEWAY_PRICES_FILE: .*prices.toml: .*{said}"):
        read(tmp_path, *tables, text="" if tables else "# none\n")


async def test_without_a_file_the_services_prices_hold() -> None:
    assert load({}).tariffs == TARIFFS
    with pytest.raises(BadSettings, match=r"^GATEWAY_PRICES_FILE: /missing: cannot be read: No such file"):
        load({"GATEWAY_PRICES_FILE": "/missing"})
