"""Renders the OpenAPI document as a page: each operation with its credentials, parameters, body, answers and errors."""

import html
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

Schema = dict[str, Any]

ORDER = ("Inference", "Account", "Deploy hooks", "Agents", "Platform", "Operation", "Pages", "Events")
DEPTH = 4  # of nested fields that a table shows
TOKENS = {"apiKey": "$CAPSULE_API_KEY", "userToken": "$TOKEN", "operatorToken": "$GATEWAY_OPERATOR_TOKEN"}
BOUNDS = {
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minimum": "at least {}",
    "maximum": "at most {}",
    "exclusiveMinimum": "more than {}",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "pattern": "matches {}",
}


class ReferencePage(NamedTuple):
    title: str
    content: str  # HTML
    sections: list[tuple[str, str]]  # anchors and titles


def render(document: Schema) -> ReferencePage:
    groups: dict[str, list[str]] = {}
    components = document["components"]["schemas"]
    for path, item in document["paths"].items():
        for method, operation in item.items():
            example = _example(path, method, operation)
            rendered = _render_operation(f"{method.upper()} {path}", operation, components, example)
            groups.setdefault(operation.get("tags", ["Other"])[0], []).append(rendered)
    events = [(name, each) for name, item in document["webhooks"].items() for each in item.values()]
    groups["Events"] = [_render_operation(name, event, components) for name, event in events]
    tags = sorted(groups, key=lambda tag: ORDER.index(tag) if tag in ORDER else len(ORDER))
    sections = [(tag.lower().replace(" ", "-"), tag) for tag in tags]
    content = (
        "<h1>API operations</h1>"
        f"<p>{_mark(document['info']['description'])}</p>"
        '<p>The same in <a href="/docs/openapi.json">OpenAPI 3.1</a>. '
        'The <a href="/docs/api">overview</a> explains limits, costs and the rules of HTTP.</p>'
    )
    for anchor, tag in sections:
        content += f'<h2 id="{anchor}">{tag}</h2>{"".join(groups[tag])}'
    return ReferencePage("API operations", content, sections)


def _render_operation(call: str, operation: Schema, components: Schema, example: str = "") -> str:
    anchor = re.sub(r"\W+", "-", call.lower()).strip("-")
    parts = [f'<details class="operation" id="{anchor}"><summary><code>{html.escape(call)}</code> ']
    parts.append(f"<span>{_mark(operation.get('summary', ''))}</span></summary>")
    if description := operation.get("description"):
        parts.append(f"<p>{_mark(description)}</p>")
    if security := operation.get("security"):
        parts.append(f"<p>Credential: {' or '.join(sorted({kind for choice in security for kind in choice}))}</p>")
    if example:
        parts.append(f'<pre tabindex="0"><code>{html.escape(example)}</code></pre>')
    parameters = [
        (f"{each['name']}", f"{each['in']}, {_kind(each.get('schema', {}), components)}", each.get("description", ""))
        for each in operation.get("parameters", [])
    ]
    parts.append(_table("Parameters", parameters))
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        fields = list(_fields(content.get("schema", {}), components))
        parts.append(_table(f"Body: {media_type}", fields) if fields else f"<p>Body: <code>{media_type}</code></p>")
    for status, response in operation["responses"].items():
        if not status.startswith("2"):
            continue
        for media_type, content in response.get("content", {"": {}}).items():
            fields = list(_fields(content.get("schema", {}), components))
            title = f"Answer {status}: {media_type}" if media_type else f"Answer {status}, without a body"
            parts.append(_table(title, fields) if fields else f"<p>{html.escape(title)}</p>")
    errors = [
        (status, _mark(response["description"]))
        for status, response in operation["responses"].items()
        if not status.startswith("2")
    ]
    if errors:
        rows = "".join(f"<tr><th scope=row>{status}<td>{text}" for status, text in errors)
        parts.append(f"<table><caption>Errors</caption><tbody>{rows}</tbody></table>")
    return "".join(parts) + "</details>"


def _example(path: str, method: str, operation: Schema) -> str:
    """Returns a call with curl. `api.example.com` stands for the service."""
    address = path.replace("{", "<").replace("}", ">")
    lines = [f"curl -X {method.upper()} 'https://api.example.com{address}'"]
    kinds = {kind for choice in operation.get("security", ()) for kind in choice}
    if found := next((TOKENS[kind] for kind in TOKENS if kind in kinds), None):
        lines.append(f'-H "Authorization: Bearer {found}"')
    for media_type in list(operation.get("requestBody", {}).get("content", {}))[:1]:
        body = "'{…}'" if media_type == "application/json" else "@file"
        lines += [f"-H 'Content-Type: {media_type}'", f"--data-binary {body}"]
    return " \\\n  ".join(lines)


def _table(title: str, rows: list[tuple[str, str, str]]) -> str:
    if not rows:
        return ""
    cells = "".join(
        f"<tr><th scope=row><code>{html.escape(name)}</code><td>{html.escape(kind)}<td>{_mark(text)}"
        for name, kind, text in rows
    )
    table = f"<table><caption>{html.escape(title)}</caption><tbody>{cells}</tbody></table>"
    return f'<div class="wide" tabindex="0">{table}</div>'


def _fields(schema: Schema, components: Schema, prefix: str = "", depth: int = DEPTH) -> Iterator[tuple[str, str, str]]:
    """Yields each field of an object with its type and description; fields of nested objects after a dot."""
    schema = _follow(schema, components)
    for choice in schema.get("anyOf") or schema.get("oneOf") or ():
        if (found := _follow(choice, components)).get("properties"):
            schema = found
            break
    if schema.get("type") == "array":
        yield from _fields(schema.get("items", {}), components, prefix or "[].", depth)
        return
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        kind = _kind(field, components)
        yield f"{prefix}{name}", kind if name in required else f"{kind}, optional", field.get("description", "")
        if depth > 1:
            many = _follow(field, components).get("type") == "array"
            yield from _fields(field, components, f"{prefix}{name}{'[]' if many else ''}.", depth - 1)


def _follow(schema: Schema, components: Schema) -> Schema:
    while "$ref" in schema:
        schema = components[schema["$ref"].rpartition("/")[2]]
    return schema


def _kind(schema: Schema, components: Schema) -> str:
    """Returns the type and the bounds of a value in words."""
    schema = _follow(schema, components)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_kind(choice, components) for choice in choices))
    if "enum" in schema:
        return " or ".join(str(value) for value in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("type", "any")
    kind = " or ".join(kind) if isinstance(kind, list) else kind
    if kind == "array":
        kind = f"list of {_kind(schema.get('items', {}), components)}"
    bounds = [words.format(schema[name]) for name, words in BOUNDS.items() if name in schema]
    return ", ".join([kind, *bounds])


def _mark(text: str) -> str:
    """Returns a text as HTML, with code in backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
