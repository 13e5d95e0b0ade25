"""Which modules an exclude list, an ignore list or a target list names.

Producers write exact names, globs, ``re:`` regular expressions, bare leaves (``mlp.gate``) and
module paths that mean everything below. Two rules keep them from matching too much: names are
compared by whole segments, so that ``mlp.gate`` is not ``mlp.gate_proj``, and a ``*`` after a digit
never continues the number, so that ``layers.1*`` is not layer 10. Standard library only.

Names of one module differ between config and tensors (``model.layers.3`` beside
``model.language_model.layers.3`` or ``layers.3``), so what is compared starts at the layer stack.
"""

import fnmatch
import re
from collections.abc import Iterable

from rubin_moe.errors import ConfigError

_STACK = re.compile(r"^(?:[^.]+\.)*?(?=(?:mtp|layers)(?:\.|$))")
_PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")


def spellings(module: str) -> tuple[str, ...]:
    """The module's own path, and its path from the layer stack under every usual prefix."""
    tail = _STACK.sub("", module, count=1)
    if tail == module and not module.startswith(("layers.", "mtp.")):
        return (module,)
    return tuple(dict.fromkeys((module, *(p + tail for p in _PREFIXES))))


class Patterns:
    """A compiled list.

    Raises:
        ConfigError: an entry that is no string or no regular expression.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self.entries = tuple(entries)
        self._plain: dict[str, str] = {}
        self._compiled: list[tuple[re.Pattern[str], str, bool]] = []
        for entry in self.entries:
            if not isinstance(entry, str):
                raise ConfigError(f"module pattern {entry!r} is no string")
            if entry.startswith("re:"):
                self._compiled.append((_compile(entry[3:], entry), entry, False))
            elif any(c in entry for c in "*?["):
                self._compiled.append((_compile(_glob(entry), entry), entry, True))
            elif entry:
                self._plain[entry.removesuffix(".weight")] = entry

    def __len__(self) -> int:
        return len(self.entries)

    def match(self, module: str) -> str | None:
        """The first entry that names ``module`` or something above it; None if none does."""
        for name in spellings(module):
            found = self._match_plain(name) or self._match_compiled(name)
            if found is not None:
                return found
        return None

    def _match_plain(self, name: str) -> str | None:
        if not self._plain:
            return None
        parts = name.split(".")
        for start in range(len(parts)):
            for stop in range(start + 1, len(parts) + 1):
                found = self._plain.get(".".join(parts[start:stop]))
                if found is not None:
                    return found
        return None

    def _match_compiled(self, name: str) -> str | None:
        for pattern, entry, whole in self._compiled:
            if (pattern.fullmatch if whole else pattern.match)(name):
                return entry
        return None


def _compile(source: str, entry: str) -> re.Pattern[str]:
    try:
        return re.compile(source)
    except (re.error, RecursionError, OverflowError) as e:
        raise ConfigError(f"module pattern {entry!r} is no regular expression: {e}") from e


def _glob(entry: str) -> str:
    """A glob as a regular expression for the module it names and everything below."""
    body = re.sub(r"(?<=\d)\*", "\0", entry)
    parts = [re.sub(r"\\Z$|\\z$", "", fnmatch.translate(p)) for p in body.split("\0")]
    return r"(?!\d).*".join(parts) + r"(?:\..*)?"
