"""Draws mutants by a fixed seed, evenly over the operators."""

from __future__ import annotations

import random

from tests.emulator.mutants.edits import Mutation


def draw(sites: dict[str, list[Mutation]], count: int, seed: str) -> list[Mutation]:
    """``count`` different mutations (fewer if there are no more), one operator after the other."""
    generator = random.Random(seed)
    names = generator.sample(sorted(sites), len(sites))
    queues = {name: generator.sample(sites[name], len(sites[name])) for name in names}
    queues = {name: queue for name, queue in queues.items() if queue}
    drawn: list[Mutation] = []
    while queues and len(drawn) < count:
        for name in list(queues):
            if len(drawn) == count:
                break
            drawn.append(queues[name].pop())
            if not queues[name]:
                del queues[name]
    return drawn
