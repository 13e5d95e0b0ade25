"""Draws mutants by a fixed seed, evenly over the operators."""

from __future__ import annotations

import random

from tests.emulator.mutants.edits import Mutation


def draw(sites: dict[str, list[Mutation]], count: int, seed: str) -> list[Mutation]:
    """``count`` different mutations (fewer if there are no more), one operator after the other."""
    generator = random.Random(seed)
    queues = {name: generator.sample(found, len(found)) for name, found in sites.items() if found}
    drawn: list[Mutation] = []
    while queues and len(drawn) < count:
        for name in list(queues):
            if len(drawn) == count:
                break
            drawn.append(queues[name].pop())
            if not queues[name]:
                del queues[name]
    return drawn
