"""Plain text of any length, the same in every run."""

from __future__ import annotations

import random

SUBJECTS = (
    "the river|a tall tree|my old neighbour|the city library|a small ship|the morning train|our teacher"
)
VERBS = "carries|remembers|crosses|watches|follows|describes|repairs|welcomes"
OBJECTS = "the quiet valley|a long letter|two wooden boxes|the northern road|a story about rain|many visitors"
PLACES = "near the harbour|before the winter|in the market|behind the mountains|at the end of the day"


def sentences(count: int, seed: int) -> str:
    """`count` English sentences."""
    pick = random.Random(seed)
    parts = [words.split("|") for words in (SUBJECTS, VERBS, OBJECTS, PLACES)]
    lines = [" ".join(pick.choice(words) for words in parts) for _ in range(count)]
    return " ".join(line[0].upper() + line[1:] + "." for line in lines)
