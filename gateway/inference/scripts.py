"""Functions for the scripts that record which accounts had an answer of a provider lately."""

from gateway.keys import answers_of_provider_key
from gateway.redis.client import Script, Store

_RECORD_ANSWER = Script("inference/record_answer")
_LIST_ANSWERS = Script("inference/list_answers")


async def record_answer(store: Store, provider: str, account: str, life: int) -> None:
    """Records that the account had an answer of the provider. It is forgotten after `life` ms."""
    await store.run_script(_RECORD_ANSWER, [answers_of_provider_key(provider)], account, life)


async def list_answers(store: Store, provider: str, life: int) -> list[str]:
    """Returns the accounts with the provider's two latest answers, of the last `life` ms."""
    found: list[str] = await store.run_script(_LIST_ANSWERS, [answers_of_provider_key(provider)], life)
    return found
