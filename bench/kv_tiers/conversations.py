"""A synthetic trace of conversations: turns of several users at a time, over a few shared system prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Conversations:
    """`users` conversations of `turns` turns each. Who is next is chance; a prompt is all that was said before."""

    users: int
    turns: int
    system_prompts: int = 3
    system_tokens: int = 192
    turn_tokens: tuple[int, int] = (48, 160)
    """Least and most new tokens of a turn, question and previous answer together."""
    vocabulary: int = 30_000
    seed: int = 1

    def prompts(self) -> list[list[int]]:
        """The prompts in the order in which they come."""
        dice = random.Random(self.seed)

        def words(count: int) -> list[int]:
            return [dice.randrange(1000, self.vocabulary) for _ in range(count)]

        systems = [words(self.system_tokens) for _ in range(self.system_prompts)]
        said = {user: list(systems[user % self.system_prompts]) for user in range(self.users)}
        left = dict.fromkeys(said, self.turns)
        prompts = []
        while left:
            user = dice.choice(list(left))
            said[user] += words(dice.randint(*self.turn_tokens))
            prompts.append(list(said[user]))
            left[user] -= 1
            if not left[user]:
                del left[user]
        return prompts
