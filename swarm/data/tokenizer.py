"""Tokenizers. So far one: every byte of the text's UTF-8 form is a token."""

from __future__ import annotations

from collections.abc import Sequence


class BytesTokenizer:
    """Token = byte, so the vocabulary is 256 and no text is out of it."""

    name = "bytes"
    vocabulary = 256

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of ``text``."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``; what is not UTF-8 shows as U+FFFD. ValueError outside 0..255."""
        return bytes(tokens).decode(errors="replace")
