"""Makes prompts and answers that carry a number and words that occur nowhere else, so that the run finds leaked
content.
"""

import random

from tests.support import prices

PROMPT = "Zwetschgenroester"
COMPLETION = "Marillenknoedel"
MAX_TOKENS = 64


def make_prompt(number: int) -> str:
    return f"{PROMPT} {number:09d}"


def parse_prompt(text: str) -> int:
    return int(text.removeprefix(PROMPT))


def piece_sizes(number: int) -> list[int]:
    """Returns the number of tokens in each piece of the answer to a prompt, at most 60 in total."""
    if is_left(number):
        return [2] * 10
    chance = random.Random(number)
    return [chance.randint(1, 12) for _ in range(chance.randint(1, 5))]


def make_word(number: int, index: int) -> str:
    """Returns a token of the answer to a prompt. All tokens differ, so lost, moved and foreign text is found."""
    return f"{COMPLETION} {number}.{index} "


def is_faithful(number: int, text: str, *, whole: bool) -> bool:
    """Returns whether the text is the answer to the prompt, or if not `whole`, its beginning."""
    expected = "".join(make_word(number, index) for index in range(sum(piece_sizes(number))))
    return text == expected if whole else expected.startswith(text)


def is_left(number: int) -> bool:
    """Returns whether the caller disconnects after the first token, before the provider has answered completely."""
    return number % 12 == 5


def max_cost() -> int:
    """Returns the nano-euro that the gateway reserves for each of these prompts."""
    return prices.max_cost(make_prompt(0), MAX_TOKENS)
