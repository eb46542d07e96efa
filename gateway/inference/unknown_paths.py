"""Explains unknown addresses below `/capsule/<app>/ai/` by what their caller may have meant."""

from gateway.inference.spend.prices import MODEL_CHOICE

OFFERED = "POST /ai, POST /ai/chat/completions, GET /ai/models and GET /ai/models/<model>"
NOT_TEXT = ("audio", "embeddings", "files", "images", "moderations")


def explain_missing(path: str) -> str:
    """Returns the message for `path`, the part after `/ai/`. The message does not repeat it."""
    first = path.partition("/")[0]
    if first == "v1":
        return "Leave out '/v1': the base URL ends with '/ai'."
    if path.rstrip("/") in ("", "chat/completions", "models"):
        return "Leave out the slash at the end of the address."
    if first == "responses":
        return (
            "The Responses API is not offered; use chat completions, at /ai/chat/completions. "
            "With the Vercel AI SDK, call createOpenAI(…).chat(model)."
        )
    if first == "completions":
        return "Completions of a bare prompt are not offered; use chat completions, at /ai/chat/completions."
    if first == "models":
        return MODEL_CHOICE
    if first in NOT_TEXT:
        return f"Only text is generated here. The addresses are {OFFERED}."
    return f"There is nothing at this address. The addresses are {OFFERED}."
