"""The golden prompts: texts that are sent again and again, and what they are in a model's tokens."""

from __future__ import annotations

from pathlib import Path

from splitserve.errors import ConfigError
from splitserve.models.tokenizer import Tokenizer
from splitserve.runtime.bounded_file import read_named_text

GOLDEN_TOKENS = 64
"""Leading tokens of a text that are sent: four blocks of the usual size."""
MAX_PROMPTS = 64
MAX_PROMPT_BYTES = 64 * 1024
"""Of the whole file."""
BUILT_IN = (
    "The sea covers about seventy percent of the planet. Its water moves in currents that carry heat from the "
    "equator towards the poles, and without them the winters of northern Europe would be as cold as those of Canada. "
    "The largest of these currents in the Atlantic is called the Gulf",
    "To bake a simple loaf of bread you need flour, water, salt and yeast. Mix them in a bowl, knead the dough for "
    "ten minutes, cover it with a cloth and let it rest until it has doubled in size. Then shape it, put it on a "
    "tray, and place it in a hot oven for about",
    "A train leaves the station at nine in the morning and travels at eighty kilometres an hour. A second train "
    "leaves the same station one hour later and follows on the same line at one hundred kilometres an hour. The "
    "second train reaches the first one after it has travelled for",
    "The printing press changed how knowledge spread. Before it, books were copied by hand, and a single copy could "
    "take a scribe many months. Within fifty years of its invention millions of books had been printed in Europe, "
    "in hundreds of towns, and the price of a book had",
)


def read_prompts(path: Path | None) -> tuple[str, ...]:
    """The texts of a file, one a line, empty lines left out; without a file the built-in ones.

    Raises ConfigError (`quality.prompts`) for a file that cannot be read, or holds none or too many.
    """
    if path is None:
        return BUILT_IN
    lines = read_named_text(path, "quality.prompts", MAX_PROMPT_BYTES).splitlines()
    texts = tuple(line.strip() for line in lines if line.strip())
    if not 1 <= len(texts) <= MAX_PROMPTS:
        message = f"quality.prompts: {path}: needs 1 to {MAX_PROMPTS} lines"
        raise ConfigError(message, field="quality.prompts")
    return texts


def golden_tokens(tokenizer: Tokenizer, text: str, room: int) -> tuple[int, ...]:
    """The first GOLDEN_TOKENS tokens of a text, at most `room`."""
    return tuple(tokenizer.encode(text)[: min(GOLDEN_TOKENS, room)])
