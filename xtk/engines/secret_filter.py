"""Removal of API keys from texts of servers: services and proxies repeat the headers of a request in many forms."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Any

REPLACEMENT = "***"
SCHEMES = ("Bearer", "Basic")
# Shorter secrets may be words of an answer or a message: these are replaced only after the name of a scheme.
MIN_LENGTH_IN_ANSWERS, MIN_LENGTH_IN_MESSAGES = 16, 8
MIN_BASE64_LENGTH = 6
_BASE64_OF_URLS = {"+": "-", "/": "_"}
_SEPARATOR = r"(?:\s|\\{1,16}[nrt]){0,4}"  # Base64 may be wrapped


class SecretFilter:
    """Replaces secrets in texts, also where they are escaped as in JSON, URLs, HTML or Python, or are in Base64.

    Args:
        secrets: keys and passwords; empty ones are ignored.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        given = [secret for secret in secrets if secret]
        self._message_patterns = _patterns(_with_scheme(given, MIN_LENGTH_IN_MESSAGES))
        self._answer_patterns = _patterns(_with_scheme(given, MIN_LENGTH_IN_ANSWERS))

    def message(self, text: str) -> str:
        """Return a text for an error or a note, without the secrets."""
        return _replace(self._message_patterns, text)

    def answer(self, value: Any, text: str) -> Any:
        """Return a JSON value without the secrets in its texts and keys.

        Args:
            text: its JSON. Most have no secret, and their values are returned as they are.
        """
        has_secret = any(pattern.search(text) for pattern in self._answer_patterns)
        return self._replaced(value) if has_secret else value

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, str):
            return _replace(self._answer_patterns, value)
        if isinstance(value, list):
            return [self._replaced(element) for element in value]
        if isinstance(value, dict):
            return {self._replaced(name): self._replaced(content) for name, content in value.items()}
        return value


def _with_scheme(secrets: Iterable[str], min_length: int) -> list[str]:
    """Return the secrets, with each scheme before shorter ones."""
    schemes = {secret: ("",) if len(secret) >= min_length else SCHEMES for secret in secrets}
    return [f"{scheme} {secret}".strip() for secret, names in schemes.items() for scheme in names]


def _replace(patterns: Iterable[re.Pattern[str]], text: str) -> str:
    for pattern in patterns:
        text = pattern.sub(REPLACEMENT, text)
    return text


def _patterns(secrets: Iterable[str]) -> list[re.Pattern[str]]:
    """Return a pattern for each form of each secret, the longest first."""
    forms = {form for secret in secrets for form in (secret, *_base64_forms(secret))}
    return [re.compile(_pattern(form)) for form in sorted(forms, key=lambda form: (-len(form), form))]


def _base64_forms(secret: str) -> Iterator[str]:
    """Yield the Base64 of a secret inside of a longer text, for its three alignments.

    Characters that also depend on the text around the secret are left out.
    """
    data = secret.encode()
    for offset in range(3):
        encoded = b64encode(bytes(offset) + data).decode()
        form = encoded[-(-offset * 8 // 6) : (offset + len(data)) * 8 // 6]
        if len(form) >= MIN_BASE64_LENGTH:
            yield form


def _pattern(form: str) -> str:
    """Return the pattern of a form, in which each character may be escaped, and cases do not differ."""
    return _SEPARATOR.join(map(_any_form_of, form))


def _any_form_of(character: str) -> str:
    r"""Return a pattern of a character: itself, `\/`, `\u002f`, `\x2f`, `%2F`, `&#47;`, also escaped several times.

    Each alternative starts with a literal: a search skips other characters quickly. No text matches two of them: a
    search would take exponential time.
    """
    cases = {character, character.lower(), character.upper(), _BASE64_OF_URLS.get(character, character)}
    literals = sorted(case for case in cases if len(case) == 1)
    codes = "|".join(f"u{{?0{{0,6}}{ord(literal):x}}}?|x{ord(literal):02x}" for literal in literals)
    numbers = "|".join(f"0{{0,6}}{ord(literal)};|x0{{0,6}}{ord(literal):x};" for literal in literals)
    percent = "|".join("%".join(f"(?:25){{0,3}}{byte:02x}" for byte in literal.encode()) for literal in literals)
    texts = "|".join(map(re.escape, literals))
    # Only from the first one of some backslashes: a text of backslashes would take quadratic time.
    escaped = rf"\\(?<!\\\\)\\{{0,15}}(?:{texts}|(?i:{codes}))"
    return rf"(?:{texts}|{escaped}|%(?i:{percent})|&(?i:(?:amp;){{0,3}}\#(?:{numbers})))"
