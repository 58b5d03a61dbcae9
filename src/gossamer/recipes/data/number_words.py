"""Number words in English and German: an endless parallel corpus that needs no download.

English to German is a real, if small, translation: units come before tens ("forty-two", "zweiundvierzig"), German
joins everything into one word, and "one" is "eins" at the end but "ein" elsewhere ("zweihunderteintausend").
"""

from bisect import bisect
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

LIMIT = 1_000_000
LENGTHS = 6
_split = str.split

_EN_SMALL = _split(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_EN_TENS = _split("- - twenty thirty forty fifty sixty seventy eighty ninety")
_DE_SMALL = _split(
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
    "siebzehn achtzehn neunzehn"
)
_DE_TENS = _split("- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")


def english(number: int) -> str:
    """British style: "one hundred and five thousand, one hundred and one" without the comma."""
    thousands, rest = divmod(number, 1000)
    parts = []
    if thousands:
        parts.append(f"{_english_hundreds(thousands)} thousand")
        if 0 < rest < 100:
            parts.append("and")
    if rest or not thousands:
        parts.append(_english_hundreds(rest))
    return " ".join(parts)


def _english_hundreds(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    if not hundreds:
        return _english_tens(rest)
    words = f"{_EN_SMALL[hundreds]} hundred"
    return f"{words} and {_english_tens(rest)}" if rest else words


def _english_tens(number: int) -> str:
    if number < 20:
        return _EN_SMALL[number]
    tens, unit = divmod(number, 10)
    return f"{_EN_TENS[tens]}-{_EN_SMALL[unit]}" if unit else _EN_TENS[tens]


def german(number: int) -> str:
    """One word; a final one is "eins"."""
    thousands, rest = divmod(number, 1000)
    word = f"{_german_hundreds(thousands)}tausend" if thousands else ""
    if rest or not thousands:
        word += _german_hundreds(rest)
    return f"{word}s" if number % 100 == 1 else word


def _german_hundreds(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    word = f"{_DE_SMALL[hundreds]}hundert" if hundreds else ""
    return word + _german_tens(rest) if rest or not hundreds else word


def _german_tens(number: int) -> str:
    if number < 20:
        return _DE_SMALL[number]
    tens, unit = divmod(number, 10)
    return f"{_DE_SMALL[unit]}und{_DE_TENS[tens]}" if unit else _DE_TENS[tens]


def held_out(number: int) -> bool:
    """Return whether the number is kept for validation and test: one in twenty, from 1000 on."""
    return number >= 1000 and number * 2654435761 % 2**32 < 2**32 // 20


def draw(
    random: np.random.Generator, *, test: bool = False, digits: NDArray[np.float64] | None = None
) -> Iterator[int]:
    """Yield numbers without end; all lengths are equally likely, or have the six probabilities `digits`."""
    shares = np.cumsum(np.full(LENGTHS, 1 / LENGTHS) if digits is None else digits)[:-1].tolist()
    while True:
        length = bisect(shares, random.random())
        low, high = 10**length if length else 0, 10 ** (length + 1)
        number = low + int(random.random() * (high - low))
        if held_out(number) == test:
            yield number
