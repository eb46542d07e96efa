"""The redirects, rewrites and headers of a static app, from its files `_redirects` and `_headers`.

Their format is the one of Netlify and Cloudflare Pages. When a release is made, its rules become a template for Caddy,
`rules`, which Caddy runs at each request for that release (`Caddyfile`). So a deploy changes no configuration. It runs
one part of `rules.d` too: that of the path, of the path's first part, or of all other paths. The
template answers with headers for Caddy: the status of the rule that matches (`Capsule-Status`), the address to which it
leads (`Capsule-Location`, `Capsule-Path`), a content type (`Capsule-Type`), which rules they are (`Capsule-Rules`), and
the headers of the response.
"""

import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import msgspec

from gateway.text_files import decode_text

FILE, PARTS, REDIRECTS, HEADERS = "rules", "rules.d", "_redirects", "_headers"
OWN_ENDINGS = (".html", "/index.html")  # of the file for a path
MAX_REDIRECTS, MAX_HEADERS = 2_000, 100
MAX_PATTERNS = 200  # that a request runs: each costs it up to 0.05 ms
MAX_PLACEHOLDERS = 10
MAX_ANYWHERE = 20  # patterns for paths whose first part differs
MAX_BYTES, MAX_LINE = 1 << 20, 1_000
REDIRECT_STATUSES = {301, 302, 303, 307, 308}
STATUSES = {200, *REDIRECT_STATUSES, 404, 410}
# The connection's own headers, and those that say how the body is sent.
FORBIDDEN = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
    *("transfer-encoding", "upgrade", "content-length", "content-encoding", "content-range", "date", "server", "via"),
}
ENCODED_PATH = '(trimPrefix "/" (urlJoin (dict "path" (print "/" {}))))'
ENCODED_QUERY = "(urlquery {})"
_HEADER_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_NAME = "[A-Za-z][A-Za-z0-9_]*"
_PLACEHOLDER = re.compile(f":({_NAME})")
_VARIABLE = re.compile(rf"(:{_NAME}|\*)")
_HEADER = re.compile(rf"({_HEADER_NAME}):\s*([\t\x20-\x7e]*)")


class Redirect(msgspec.Struct, frozen=True):
    """A line of `_redirects`. `source` is decoded, `target` as it was written."""

    number: int  # of the line
    source: str
    target: str
    status: int
    force: bool

    @property
    def overrides_files(self) -> bool:
        return self.force or self.status != 200

    @property
    def is_pattern(self) -> bool:
        return self.source.endswith("*") or _PLACEHOLDER.search(self.source) is not None

    @property
    def first_part(self) -> str | None:
        """The first part of the paths that match. None if it differs."""
        first = _first_part(self.source)
        return None if "*" in first or _PLACEHOLDER.search(first) else first


class HeaderRule(msgspec.Struct, frozen=True):
    """A path of `_headers` and its lines. A header without a value is removed."""

    path: str
    lines: list[tuple[str, str | None]]


class _BadLine(Exception):
    """Account holders see the message in the deploy's log."""


def compile_rules(release: Path) -> list[str]:
    """Writes the template of a release that is served. Returns what the log says of lines that can't be read."""
    problems: list[str] = []
    redirects = parse_redirects(_take(release / "files" / REDIRECTS, problems), problems)
    headers = parse_headers(_take(release / "files" / HEADERS, problems), problems)
    if redirects or headers:
        _write(release, redirects, headers, problems)
    return problems


def _take(path: Path, problems: list[str]) -> list[str]:
    """Returns the lines of a file that is not served."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    path.unlink()
    if len(content) > MAX_BYTES:
        problems.append(f"{path.name} is skipped: it has more than {MAX_BYTES} bytes")
        return []
    return decode_text(content).splitlines()


def parse_redirects(lines: list[str], problems: list[str]) -> list[Redirect]:
    redirects: list[Redirect] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(redirects) == MAX_REDIRECTS:
            problems.append(
                f"{REDIRECTS}:{number}: this line and those after it are skipped, after {MAX_REDIRECTS} rules"
            )
            break
        try:
            redirects.append(_parse_redirect(number, line, words))
        except _BadLine as error:
            problems.append(f"{REDIRECTS}:{number} is skipped: {error}")
    return redirects


def _parse_redirect(number: int, line: str, words: list[str]) -> Redirect:
    _check_length(line)
    words = words[: next((place for place, word in enumerate(words) if word.startswith("#")), None)]
    if len(words) < 2:
        raise _BadLine("write: from to [status]")
    source, target, *rest = words
    if not source.startswith("/"):
        raise _BadLine("the first path must start with /")
    if "*" in source[:-1] or "?" in source:
        raise _BadLine("a path may have * at its end alone, and no query")
    if len(rest) > 1 or "=" in "".join(rest) or not re.fullmatch(r"/.*|https?://.*", target):
        raise _BadLine("conditions are not supported; write: from to [status]")
    found = re.fullmatch(r"([0-9]{3})(!?)", rest[0] if rest else "301")
    if found is None or int(found[1]) not in STATUSES:
        raise _BadLine("the status must be one of " + ", ".join(map(str, sorted(STATUSES))))
    status = int(found[1])
    if status not in REDIRECT_STATUSES and not target.startswith("/"):
        raise _BadLine(f"{status} must lead to a path of this app")
    if not target.startswith("/"):
        _check_host(target)
    source = unquote(source)
    names = _PLACEHOLDER.findall(source)
    if len(names) != len(set(names)) or (source.endswith("*") and "splat" in names):
        raise _BadLine("a placeholder is named twice")
    if len(names) > MAX_PLACEHOLDERS:
        raise _BadLine(f"it has more than {MAX_PLACEHOLDERS} placeholders")
    return Redirect(number, source, target, status, bool(found[2]))


def _check_host(target: str) -> None:
    with contextlib.suppress(ValueError):
        parts = urlsplit(target)
        if parts.hostname and parts.netloc.lower() in (parts.hostname, f"{parts.hostname}:{parts.port}"):
            return
    raise _BadLine("the target is not a URL with a fixed host")


def parse_headers(lines: list[str], problems: list[str]) -> list[HeaderRule]:
    rules: list[HeaderRule] = []
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        try:
            _check_length(line)
            if line[0] not in " \t":
                if len(rules) == MAX_HEADERS:
                    problems.append(
                        f"{HEADERS}:{number}: this path and those after it are skipped, after {MAX_HEADERS}"
                    )
                    break
                # Lines below a path that can't be read belong to no path.
                rules.append(HeaderRule(unquote(stripped), []))
                if not stripped.startswith("/"):
                    raise _BadLine("a path must start with /")
            elif not rules:
                raise _BadLine("a path must come first")
            else:
                rules[-1].lines.append(_parse_header(stripped))
        except _BadLine as error:
            problems.append(f"{HEADERS}:{number} is skipped: {error}")
    return [rule for rule in rules if rule.path.startswith("/") and rule.lines]


def _parse_header(line: str) -> tuple[str, str | None]:
    if line.startswith("!") and (removed := re.fullmatch(_HEADER_NAME, line[1:].strip())):
        return removed[0].lower(), None
    found = _HEADER.fullmatch(line)
    if found is None:
        raise _BadLine("write: Name: value, with characters of ASCII")
    name, value = found[1].lower(), found[2].strip()
    if name in FORBIDDEN or name.startswith("capsule-"):
        raise _BadLine(f"{name} can't be set")
    if name == "set-cookie" and re.search(r";\s*domain\b", value, re.IGNORECASE):
        raise _BadLine("a cookie can't have a Domain")
    return name, value


def _check_length(line: str) -> None:
    if len(line) > MAX_LINE:
        raise _BadLine(f"it has more than {MAX_LINE} characters")


# -- the template --------------------------------------------------------------------------------------------


def _write(release: Path, redirects: list[Redirect], headers: list[HeaderRule], problems: list[str]) -> None:
    """Writes the template and its parts, so that a request runs only the rules that may match its path."""
    parts = release / PARTS
    parts.mkdir(mode=0o755)
    patterns = [each for each in redirects if each.is_pattern]
    anywhere = [each for each in patterns if each.first_part is None]
    groups: dict[str | None, list[Redirect]] = {None: anywhere}
    if len(anywhere) > MAX_ANYWHERE:  # they would be written for each first part
        groups[None] = patterns
    else:
        for each in patterns:
            if (first := each.first_part) is not None:
                groups.setdefault(first, [*anywhere]).append(each)
    if any(len(group) > MAX_PATTERNS for group in groups.values()):
        problems.append(f"{REDIRECTS}: of the lines with * or :name that start alike, the first {MAX_PATTERNS} count")
    for part, group in groups.items():
        group.sort(key=lambda each: each.number)
        del group[MAX_PATTERNS:]
        (parts / (f"first-{_digest(part)}" if part else "other")).write_text(_render_redirects(group))

    exact: dict[str, list[Redirect]] = {}
    for each in redirects:
        if not each.is_pattern:
            exact.setdefault(each.source, []).append(each)
    expressions = {each.number: re.compile(_pattern(each.source)) for each in patterns}
    for path, lines in exact.items():
        own = _has_file(release / "files", path)
        group = groups.get(_first_part(path), groups[None])
        matching = [*lines, *(each for each in group if expressions[each.number].fullmatch(path))]
        counting = [each for each in matching if each.overrides_files or not own]
        first_line = sorted(counting, key=lambda each: each.number)[:1]
        (parts / f"path-{_digest(path)}").write_text(_render_redirects(first_line))
    version = secrets.token_hex(8)  # tells Caddy whether a swap came between the rules and the file
    (parts / f"id-{version}").touch()
    (release / FILE).write_text(_render(headers, version))


def _first_part(path: str) -> str:
    return "/" + path[1:].partition("/")[0]


def _has_file(top: Path, path: str) -> bool:
    if ".." in path.split("/"):
        return False
    try:
        return any(Path(f"{top}{path}{end}").is_file() for end in ("", *OWN_ENDINGS))
    except OSError:  # a name that is too long for a file
        return False


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _render(headers: Iterable[HeaderRule], version: str) -> str:
    parts = [
        "{{$path := .Req.URL.Path}}",
        f'{{{{.RespHeader.Set "Capsule-Rules" "{version}"}}}}',
        '{{.RespHeader.Set "Capsule-Path" .Req.URL.EscapedPath}}',
    ]
    for rule in headers:
        parts.append(f"{{{{if {_render_match(rule.path, anywhere=True)}}}}}")
        for name, value in rule.lines:
            verb, name = ("Set", "capsule-type") if name == "content-type" else ("Add", name)
            action = f"Del {_quote(name)}" if value is None else f"{verb} {_quote(name)} {_quote(value)}"
            parts.append(f"{{{{.RespHeader.{action}}}}}")
        parts.append("{{end}}")
    return (
        "\n".join(parts)
        + f"""
{{{{$part := print "/{PARTS}/path-" (sha256sum $path)}}}}
{{{{if not (fileExists $part)}}}}
{{{{$part = print "/{PARTS}/first-" (sha256sum (regexFind "^/[^/]*" $path))}}}}
{{{{end}}}}
{{{{if not (fileExists $part)}}}}{{{{$part = "/{PARTS}/other"}}}}{{{{end}}}}
{{{{include $part}}}}
"""
    )


def _render_redirects(redirects: list[Redirect]) -> str:
    parts = [
        "{{$path := .Req.URL.Path}}{{$own := false}}",
        '{{$query := ""}}{{if .Req.URL.RawQuery}}{{$query = print "?" .Req.URL.RawQuery}}{{end}}',
    ]
    if not all(each.overrides_files for each in redirects):
        endings = " ".join(map(_quote, ("", *OWN_ENDINGS)))
        parts.append(
            f'{{{{range list {endings}}}}}{{{{$file := print "/files" $path .}}}}'
            "{{if and (fileExists $file) (not (fileStat $file).IsDir)}}{{$own = true}}{{end}}{{end}}"
        )
    for number, redirect in enumerate(redirects):
        condition = _render_match(redirect.source)
        if not redirect.overrides_files:
            condition = f"and {condition} (not $own)"
        parts.append(f"{{{{{'else ' if number else ''}if {condition}}}}}")
        parts.append(f'{{{{.RespHeader.Set "Capsule-Status" "{redirect.status}"}}}}')
        name = "Location" if redirect.status in REDIRECT_STATUSES else "Path"
        parts.append(f'{{{{.RespHeader.Set "Capsule-{name}" ({_render_target(redirect)})}}}}')
    if redirects:
        parts.append("{{end}}")
    return "\n".join(parts)


def _quote(text: str) -> str:
    """Writes a string of a Go template."""
    return json.dumps(text, ensure_ascii=False)


def _pattern(path: str, *, anywhere: bool = False) -> str:
    """Returns the regular expression of a path, with a named group for each placeholder.

    With `anywhere`, a * may stand anywhere; otherwise only at the end.
    """
    written = []
    for part in _VARIABLE.split(path):
        if part == "*":
            written.append(".*" if anywhere else "(?P<splat>.*)")
        elif _PLACEHOLDER.fullmatch(part):
            written.append("[^/]+" if anywhere else f"(?P<{part[1:]}>[^/]+)")
        else:
            written.append(re.escape(part))
    return f"(?s)^{''.join(written)}$"


def _render_match(path: str, *, anywhere: bool = False) -> str:
    if "*" not in path and not _PLACEHOLDER.search(path):
        return f"(eq $path {_quote(path)})"
    if path.endswith("*") and "*" not in path[:-1] and not _PLACEHOLDER.search(path):
        return f"(hasPrefix {_quote(path[:-1])} $path)"
    return f"(regexMatch {_quote(_pattern(path, anywhere=anywhere))} $path)"


def _render_target(redirect: Redirect) -> str:
    """Returns the expression of the address to which a rule leads.

    Captured parts are encoded for where they stand, so none can add a query, a header or another host.
    """
    names = {*_PLACEHOLDER.findall(redirect.source), *(["splat"] if redirect.source.endswith("*") else [])}
    pattern = _quote(_pattern(redirect.source))
    base, path, mark, tail = _split(redirect.target)

    def render(text: str, encode: str) -> str:
        parts = ['""']
        for part in _VARIABLE.split(text):
            if part.startswith(":") and part[1:] in names:
                parts.append(encode.format(f'(regexReplaceAll {pattern} $path "${{{part[1:]}}}")'))
            else:
                parts.append(_quote(quote(part, safe="/%:@!$&'()*+,;=-._~?#[]")))
        return " ".join(parts)

    # One slash at the start: two would lead to another host.
    whole = f'(regexReplaceAll "^/+" (print {render(path, ENCODED_PATH)}) "/")'
    if redirect.status not in REDIRECT_STATUSES:
        return whole
    query = "" if mark == "?" else "$query"
    return f"print {_quote(base)} {whole} {query} {_quote(mark)} {render(tail, ENCODED_QUERY)}"


def _split(target: str) -> tuple[str, str, str, str]:
    """Returns the scheme and host, the path, the mark of a query or fragment, and what follows the mark."""
    place = re.search(r"[?#]|$", target)
    assert place
    address, mark, tail = target[: place.start()], place[0], target[place.end() :]
    found = re.fullmatch(r"(https?://[^/]+)?(.*)", address)
    assert found
    return found[1] or "", found[2] or "/", mark, tail
