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

from gateway.settings.text_files import decode_text

FILE, PARTS, REDIRECTS, HEADERS = "rules", "rules.d", "_redirects", "_headers"
# What is added to an address, without its slash at the end, to find its file, in this order. The pages have addresses
# without that slash, and the index has one with it. A file itself, to which nothing is added, has only its own address.
PAGES, INDEX = ("", ".html"), "/index.html"
MAX_REDIRECTS, MAX_HEADERS = 2_000, 100
MAX_PATTERNS = 200  # that a request runs: each costs it up to 0.05 ms
MAX_PLACEHOLDERS = 10
MAX_ANYWHERE = 20  # patterns for paths whose first part differs
MAX_BYTES = 1 << 20
REDIRECT_CHARACTERS, HEADER_CHARACTERS = 1_000, 4_096  # of a line; a policy with many digests is long
NAMED_PROBLEMS, PROBLEM_CHARACTERS = 10, 100  # in a warning
REDIRECT_STATUSES = {301, 302, 303, 307, 308}
STATUSES = {200, *REDIRECT_STATUSES, 404, 410}
# The connection's own headers, and those that say how the body is sent.
FORBIDDEN = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
    *("transfer-encoding", "upgrade", "content-length", "content-encoding", "content-range", "date", "server", "via"),
}
# What a template knows of the request: its path decoded, without the slash at the end, and with one.
PATHS = '{{$bare := trimSuffix "/" .Req.URL.Path}}{{$path := print $bare "/"}}'
# The path encoded, in one spelling: `%41` is decoded, because no program tells it from `A`. The signs that may have a
# meaning stay as they were sent, encoded or plain. Few paths need the template that does this, so it is a part.
SPELLING = "spelling"
ENCODED = (
    "{{$encoded := .Req.URL.EscapedPath}}"
    f'{{{{if contains "%" $encoded}}}}{{{{$encoded = include "/{PARTS}/{SPELLING}"}}}}{{{{end}}}}'
)
ONE_SPELLING = r"""
{{- $kept := regexReplaceAll "%(2[14-9A-Ca-cFf]|3[ABDabd]|40|5[BDbd])" .Req.URL.EscapedPath "%25${1}"}}
{{- $encoded := urlJoin (dict "path" (urlParse (print "x://x" $kept)).path)}}
{{- range $sign, $code := dict "!" "%21" "'" "%27" "(" "%28" ")" "%29" "*" "%2A" "[" "%5B" "]" "%5D"}}
{{- $encoded = replace $code $sign $encoded}}{{end}}
{{- replace "%25" "%" $encoded -}}
"""
SIGNS = "!$&'()*+,/:;=@[]"  # may stand in a path both plain and encoded, which may differ in meaning
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
        return self.force or self.status in REDIRECT_STATUSES

    @property
    def is_local(self) -> bool:
        return self.target.startswith("/")

    @property
    def is_pattern(self) -> bool:
        return self.source.endswith("*") or _PLACEHOLDER.search(self.source) is not None

    @property
    def can_lead_back(self) -> bool:
        """Whether it may lead to a path that it matches, which would never end."""
        return self.is_pattern and self.is_local and self.status in REDIRECT_STATUSES

    @property
    def needs_encoded(self) -> bool:
        """Whether it must know how the visitor has encoded the path."""
        has_splat = self.source.endswith("*") and ":splat" in self.target
        return self.can_lead_back or has_splat or _PLACEHOLDER.search(self.source) is not None

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


def explain_problems(problems: list[str]) -> str:
    """Returns a warning that names at most ten lines that can't be read. Empty if there are none."""
    if not problems:
        return ""
    named = "; ".join(each[:PROBLEM_CHARACTERS] for each in problems[:NAMED_PROBLEMS])
    more = f"; and {len(problems) - NAMED_PROBLEMS} more" if len(problems) > NAMED_PROBLEMS else ""
    return f"{named}{more}."


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
    _check_length(line, REDIRECT_CHARACTERS)
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
    if status in REDIRECT_STATUSES and _bare(unquote(_split(target)[1])) == _bare(source.replace("*", ":splat")):
        raise _BadLine("it leads to its own address, with or without a slash at the end")
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
            _check_length(stripped, HEADER_CHARACTERS)
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


def _check_length(line: str, limit: int) -> None:
    if len(line) > limit:
        raise _BadLine(f"it has more than {limit} characters")


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
            exact.setdefault(_bare(each.source), []).append(each)
    expressions = {each.number: re.compile(_pattern(each.source)) for each in patterns}
    for path, lines in exact.items():
        own, encoded = _has_file(release / "files", path), quote(path, safe=SIGNS)
        group = groups.get(_first_part(path), groups[None])
        found = {each.number: expressions[each.number].fullmatch(encoded) for each in group}
        matching = [*lines, *(each for each in group if (match := found[each.number]) and not _leads_back(each, match))]
        counting = [each for each in matching if each.overrides_files or not own]
        first_line = sorted(counting, key=lambda each: each.number)[:1]
        (parts / f"path-{_digest(path)}").write_text(_render_redirects(first_line))
    (parts / SPELLING).write_text(ONE_SPELLING)
    version = secrets.token_hex(8)  # tells Caddy whether a swap came between the rules and the file
    (parts / f"id-{version}").touch()
    (release / FILE).write_text(_render(headers, version))


def _bare(path: str) -> str:
    """Returns the path without the slash at its end. Those of the path with and without it are one address."""
    return path.removesuffix("/")


def _first_part(path: str) -> str:
    return "/" + path[1:].partition("/")[0]


def _leads_back(redirect: Redirect, match: re.Match[str]) -> bool:
    """Returns whether a redirect leads to the path that it matches."""
    path = _VARIABLE.sub(lambda name: match.groupdict("").get(name[0][1:], name[0]), _split(redirect.target)[1])
    return redirect.can_lead_back and _bare(path) == _bare(match.string)


def _has_file(top: Path, path: str) -> bool:
    if ".." in path.split("/"):
        return False
    try:
        return any(Path(f"{top}{path}{ending}").is_file() for ending in (*PAGES, INDEX))
    except OSError:  # a name that is too long for a file
        return False


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _render(headers: Iterable[HeaderRule], version: str) -> str:
    parts = [
        PATHS,
        f'{{{{.RespHeader.Set "Capsule-Rules" "{version}"}}}}',
    ]
    for rule in headers:
        parts.append(f"{{{{if {_render_header_match(rule.path)}}}}}")
        for name, value in rule.lines:
            verb, name = ("Set", "capsule-type") if name == "content-type" else ("Add", name)
            action = f"Del {_quote(name)}" if value is None else f"{verb} {_quote(name)} {_quote(value)}"
            parts.append(f"{{{{.RespHeader.{action}}}}}")
        parts.append("{{end}}")
    return (
        "\n".join(parts)
        + f"""
{{{{$part := print "/{PARTS}/path-" (sha256sum $bare)}}}}
{{{{if not (fileExists $part)}}}}
{{{{$part = print "/{PARTS}/first-" (sha256sum (regexFind "^/[^/]*" $path))}}}}
{{{{end}}}}
{{{{if not (fileExists $part)}}}}{{{{$part = "/{PARTS}/other"}}}}{{{{end}}}}
{{{{include $part}}}}
"""
    )


def _render_redirects(redirects: list[Redirect]) -> str:
    parts = [
        PATHS,
        '{{$query := ""}}{{if .Req.URL.RawQuery}}{{$query = print "?" .Req.URL.RawQuery}}{{end}}{{$own := false}}',
    ]
    if any(each.needs_encoded for each in redirects):
        parts.append(ENCODED)
    if not all(each.overrides_files for each in redirects):
        endings = " ".join(map(_quote, (*PAGES, INDEX)))
        parts.append(
            f'{{{{range list {endings}}}}}{{{{$file := print "/files" $bare .}}}}'
            "{{if and (fileExists $file) (not (fileStat $file).IsDir)}}{{$own = true}}{{end}}{{end}}"
        )
    for number, redirect in enumerate(redirects):
        path, rest = _render_target(redirect)
        conditions = [_render_match(redirect)]
        if not redirect.overrides_files:
            conditions.append("(not $own)")
        if redirect.can_lead_back:
            conditions.append(f'(ne (trimSuffix "/" {path}) (trimSuffix "/" $encoded))')
        parts.append(f"{{{{{'else ' if number else ''}if and {' '.join(conditions)}}}}}")
        parts.append(f'{{{{.RespHeader.Set "Capsule-Status" "{redirect.status}"}}}}')
        if redirect.status in REDIRECT_STATUSES:
            parts.append(f'{{{{.RespHeader.Set "Capsule-Location" (print {path} {rest})}}}}')
        else:
            parts.append(f'{{{{.RespHeader.Set "Capsule-Path" {path}}}}}')
    if redirects:
        parts.append("{{end}}")
    return "\n".join(parts)


def _quote(text: str) -> str:
    """Writes a string of a Go template."""
    return json.dumps(text, ensure_ascii=False)


def _pattern(source: str) -> str:
    """Returns the regular expression of the encoded paths that match, with a named group for each placeholder."""
    start = source.removesuffix("*")
    written = [
        f"(?P<{part[1:]}>[^/]+)" if _PLACEHOLDER.fullmatch(part) else "".join(map(_escape, part.encode()))
        for part in _VARIABLE.split(_bare(start))
    ]
    if start == source:
        written.append("/?")
    elif start.endswith("/"):
        written.append(f"(?:{_escape(ord('/'))}(?P<splat>.*))?")
    else:
        written.append("(?P<splat>.*)")
    return f"(?s)^{''.join(written)}$"


def _escape(byte: int) -> str:
    """Returns the regular expression of a byte in an encoded path."""
    sign, code = chr(byte), f"%{byte:02X}"
    if sign in SIGNS:
        return f"(?:{re.escape(sign)}|%{code[1]}[{code[2]}{code[2].lower()}])"
    return re.escape(quote(sign)) if byte < 128 else code


def _render_match(redirect: Redirect) -> str:
    if not redirect.is_pattern:
        return f"(eq $bare {_quote(_bare(redirect.source))})"
    if _PLACEHOLDER.search(redirect.source):
        return f"(regexMatch {_quote(_pattern(redirect.source))} $encoded)"
    return f"(hasPrefix {_quote(redirect.source[:-1])} $path)"


def _render_header_match(path: str) -> str:
    """A * may stand anywhere."""
    if "*" not in path and not _PLACEHOLDER.search(path):
        return f"(eq $bare {_quote(_bare(path))})"
    if path.endswith("*") and "*" not in path[:-1] and not _PLACEHOLDER.search(path):
        return f"(hasPrefix {_quote(path[:-1])} $path)"
    written = [
        ".*" if part == "*" else "[^/]+" if _PLACEHOLDER.fullmatch(part) else re.escape(part)
        for part in _VARIABLE.split(_bare(path))
    ]
    pattern = f"(?s)^{''.join(written)}/?$"
    return f"(regexMatch {_quote(pattern)} $path)"


def _render_target(redirect: Redirect) -> tuple[str, str]:
    """Returns the expressions of the address to which a rule leads: up to its path, and what follows."""
    names = {*_PLACEHOLDER.findall(redirect.source), *(["splat"] if redirect.source.endswith("*") else [])}
    pattern = _quote(_pattern(redirect.source))
    base, path, mark, tail = _split(redirect.target)

    def render(text: str, capture: str) -> str:
        parts = ['""']
        for part in _VARIABLE.split(text):
            if part.startswith(":") and part[1:] in names:
                parts.append(capture.format(f'(regexReplaceAll {pattern} $encoded "${{{part[1:]}}}")'))
            else:
                parts.append(_quote(_encode(part)))
        return " ".join(parts)

    # One slash at the start: two would lead to another host.
    whole = f'(print {_quote(base)} (regexReplaceAll "^/+" (print {render(path, "{}")}) "/"))'
    if names.isdisjoint(each[1:] for each in _VARIABLE.findall(path)):
        whole = _quote(f"{base}/{_encode(path).lstrip('/')}")
    # A part of a path stays one value of a query.
    query = render(tail, '(replace "&" "%26" (replace "+" "%2B" {}))')
    return whole, f"{'' if mark == '?' else '$query'} {_quote(mark)} {query}"


def _encode(text: str) -> str:
    """Encodes what may not stand in an address; what is encoded already stays so."""
    return quote(text, safe=f"{SIGNS}%?#")


def _split(target: str) -> tuple[str, str, str, str]:
    """Returns the scheme and host, the path, the mark of a query or fragment, and what follows the mark."""
    place = re.search(r"[?#]|$", target)
    assert place
    address, mark, tail = target[: place.start()], place[0], target[place.end() :]
    found = re.fullmatch(r"(https?://[^/]+)?(.*)", address)
    assert found
    return found[1] or "", found[2] or "/", mark, tail
