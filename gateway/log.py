"""Logging, one line per event: JSON for machines, colours for a terminal. Never log content, a token or a key."""

from __future__ import annotations

import datetime
import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import msgspec
import structlog

from gateway.settings import Settings


class RequestLine(msgspec.Struct, kw_only=True):
    """The log line of an inference request. Durations are in milliseconds."""

    request_id: str
    app: str
    format: str = msgspec.field(name="door")  # "native" or "openai"; empty before it is known
    model: str
    status: int
    code: str
    input_tokens: int | None
    output_tokens: int | None
    nano_euro: int
    ttft_ms: float | None
    duration_ms: float
    event: str = "request"
    level: str = "info"
    timestamp: datetime.datetime = msgspec.field(default_factory=lambda: datetime.datetime.now(datetime.UTC))


def request_line(line: RequestLine) -> None:
    """Writes JSON without structlog's processors, which cost as much as relaying a token or two."""
    if _fast_lines is not None:
        _fast_lines.msg(msgspec.json.encode(line))
    else:
        fields = msgspec.to_builtins(line)
        del fields["level"], fields["timestamp"]
        structlog.get_logger().info(**fields)


_fast_lines: structlog.BytesLogger | None = None


def _json(_: Any, __: str, event: MutableMapping[str, Any]) -> bytes:
    return msgspec.json.encode(event, enc_hook=repr)


def _with_trace(logger: Any, name: str, event: MutableMapping[str, Any]) -> bytes:
    if "exc_info" in event:
        structlog.processors.format_exc_info(logger, name, event)
    return _json(logger, name, event)


def _console() -> structlog.dev.ConsoleRenderer:
    # The default formatter also prints the values of local variables, which may be secrets.
    return structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty(), exception_formatter=structlog.dev.plain_traceback)


def configure(settings: Settings) -> None:
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    before: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    text = settings.log_format == "text"
    global _fast_lines
    _fast_lines = structlog.BytesLogger(sys.stdout.buffer) if not text and level <= logging.INFO else None
    structlog.configure(
        processors=[*before, _console() if text else _with_trace],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout)
        if text
        else structlog.BytesLoggerFactory(sys.stdout.buffer),
        cache_logger_on_first_use=True,
    )
    # Libraries log through the standard module, and get the same format. httpx logs URLs at INFO, which may hold
    # secrets, so only its warnings pass.
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _console() if text else lambda *event: _json(*event).decode(),
            ],
            foreign_pre_chain=[*before, structlog.processors.format_exc_info],
        )
    )
    logging.basicConfig(handlers=[handler], level=level, force=True)
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
