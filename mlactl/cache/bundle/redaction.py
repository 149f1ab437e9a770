"""Texts about URLs without the credentials that these may carry: userinfo, a presigned query, a token in the fragment.

URLs are taken as people write them: a password may have `@`, `/`, `?` or `#` in it unquoted, which RFC 3986 does not
allow. Where that leaves it open where a secret ends, more than needed is left out, and an ellipsis says so.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote, unquote_plus

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")
_NEARLY_URL = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]*)?)([:;]/?(?!/)|[:;]?//)(?=.)")
_ADDRESS = re.compile(r"\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._~-]+)?\](:[0-9]*)?")
"""An IPv6 address and a port: what may stand in brackets (RFC 3986, section 3.2.2)."""
_ELIDED = "…"
_SHORTEST_SECRET = 4
"""Values of fewer characters are flags and numbers, which stand in texts for other reasons too."""


def is_url(where: str) -> bool:
    """Whether a place is named by a URL, a chained one (`simplecache::https://…`) included."""
    return _URL.match(where) is not None


def nearly_url(where: str) -> tuple[str, str] | None:
    """Protocol and the rest of what looks like a mistyped URL (`s3:/x`, `s3//x`, `//x`); None for a URL, and for a plain path."""
    found = None if is_url(where) else _NEARLY_URL.match(where)
    return (found[1], where[found.end() :]) if found else None


def bare_url(url: str) -> str:
    """A URL, or nearly one, without userinfo, query and fragment; of one whose host is none that can be, nothing is sure."""
    nearly = nearly_url(url)
    if nearly is not None:
        rest = nearly[1]
        return url[: -len(rest)] + bare_url(f"url://{rest}").removeprefix("url://")
    scheme, mark, rest = url.partition("://")
    if not mark:
        return re.split("[?#]", url, maxsplit=1)[0]
    slashes = "" if scheme == "file" else rest[: len(rest) - len(rest.lstrip("/"))]
    rest = rest[len(slashes) :]
    mark += slashes
    userinfo = _userinfo(rest)
    if "?" in userinfo or "#" in userinfo:
        return f"{scheme}://{_ELIDED}"  # what follows the last @ may be the end of a query
    host = re.split("[/?#]", rest[len(userinfo) + 1 if userinfo else 0 :], maxsplit=1)[0]
    if ("[" in host or "]" in host) and not _ADDRESS.fullmatch(host):
        return f"{scheme}://{_ELIDED}"
    if userinfo:
        rest = rest[len(userinfo) + 1 :]
    return scheme + mark + (f"{_ELIDED}@" if "/" in userinfo else "") + re.split("[?#]", rest, maxsplit=1)[0]


def without_secrets(text: str, where: str) -> str:
    """What a client said about a place: URLs in it bare, in whatever spelling it normalised them to, and the secrets of `where` left out."""
    for secret in _secrets(where):
        text = text.replace(secret, _ELIDED)
    return re.sub(r"\S+", lambda found: _bare_word(found[0]), text)


def _bare_word(word: str) -> str:
    # urllib3 says path and query alone: `Max retries exceeded with url: /x?X-Amz-Signature=…`.
    return bare_url(word) if "://" in word else re.sub(r"\?.+", "", word)


def _userinfo(rest: str) -> str:
    """What stands before the last `@` of a URL after its scheme; nothing when that is the `@` of a path (`host/pkg@1`)."""
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    return rest.rpartition("@")[0] if "@" in authority or ":" in authority else ""


def _secrets(where: str) -> list[str]:
    """Password (else the user name, which may be a token) and values of the query of a URL, quoted and not, the longest first."""
    nearly = nearly_url(where)
    if nearly is None and not is_url(where):
        return []
    userinfo = _userinfo(nearly[1] if nearly else where.partition("://")[2].lstrip("/"))
    _, *query = re.split("[?#]", where, maxsplit=1)
    password = userinfo.partition(":")[2] or userinfo
    # A client that takes the URL apart by RFC 3986 speaks of the pieces: `SEC` of `user:SEC/RET@host` as a port, `RET@host` as a path.
    values = [password, *re.split("[/?#@]", password), *(field.partition("=")[2] or field for part in query for field in re.split("[&;#]", part))]
    spellings = {form for value in values for form in (value, unquote(value), unquote_plus(value))}
    spellings |= {form for value in spellings for form in (quote(value), quote(value, safe=""), repr(value)[1:-1])}
    return sorted((form for form in spellings if len(form) >= _SHORTEST_SECRET), key=lambda form: (-len(form), form))
