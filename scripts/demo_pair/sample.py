"""One training sample, and the small pieces of text that the skills build theirs from."""

import random
from dataclasses import dataclass, field

from demo_pair import lexicon as lex


@dataclass(frozen=True)
class Sample:
    """One exchange: `messages` end with what the model must answer by `reply`.

    reply  raw model text, control tokens included, without the closing <turn|>; a tool call ends
           with <|tool_response>, the id that hands over to the caller
    exact  the reply follows from the messages alone
    fixed  one of a few standing prompts: always in training, never held out
    """

    skill: str
    messages: list[dict]
    reply: str
    exact: bool = True
    tools: list[dict] = field(default_factory=list)
    thinking: bool = False
    fixed: bool = False


def one_turn(skill: str, prompt: str, reply: str, exact: bool = True, **rest) -> Sample:
    return Sample(skill, [{"role": "user", "content": prompt}], reply, exact, **rest)


def invented_word(rng: random.Random) -> str:
    """A word outside the lexicon, so that copying cannot lean on knowing the words."""
    return "".join(rng.choice(lex.SYLLABLES) for _ in range(rng.randint(2, 3)))


def person_name(rng: random.Random) -> str:
    return invented_word(rng).capitalize() if rng.random() < 0.2 else rng.choice(lex.NAMES)


def all_words() -> list[str]:
    groups = (lex.ANIMALS, lex.COLORS, lex.FRUITS, lex.THINGS, lex.PLACES, lex.JOBS)
    return [word for group in (*groups, lex.ADJECTIVES, lex.VERBS, lex.TOPICS) for word in group]


WORDS = all_words()


def listed(words: list[str]) -> str:
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]


def sentence(rng: random.Random) -> str:
    """One plain sentence of 5 to 12 words."""
    name, other = rng.sample(lex.NAMES, 2)
    adjective, thing, place = (
        rng.choice(group) for group in (lex.ADJECTIVES, lex.THINGS, lex.PLACES)
    )
    animal, verb, color = (rng.choice(group) for group in (lex.ANIMALS, lex.VERBS, lex.COLORS))
    return rng.choice(
        (
            f"{name} {verb} the {adjective} {thing} in the {place}.",
            f"The {adjective} {animal} {verb} a {color} {thing}.",
            f"{name} and {other} walk to the {place}.",
            f"In the {rng.choice(lex.TIMES)}, {name} {verb} a {thing}.",
            f"The {thing} is {color} and {adjective}.",
            f"{name} has {rng.randint(2, 99)} {rng.choice(lex.FRUITS)} and a {color} {thing}.",
            f"There is a {adjective} {animal} near the {place}.",
            f"{name} works as a {rng.choice(lex.JOBS)} in {rng.choice(lex.CITIES)}.",
        )
    )


def paragraph(rng: random.Random, n: int) -> str:
    return " ".join(sentence(rng) for _ in range(n))
