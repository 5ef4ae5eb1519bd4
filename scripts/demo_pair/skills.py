"""The demo pair's skills: one small seeded grammar each, from a random source to one `Sample`.

A skill's reply is a function of its prompt wherever `exact` is true, so that it can be checked word
for word. Stories and chat may vary. Splitting into training and held-out text is corpus.py's.
"""

import json
import random
from dataclasses import replace

from demo_pair import lexicon as lex
from demo_pair.code import code
from demo_pair.sample import (
    WORDS,
    Sample,
    invented_word,
    listed,
    one_turn,
    paragraph,
    person_name,
    sentence,
)
from demo_pair.tools import some_tools, tool

# --- counting ---------------------------------------------------------------------------------


def count(rng: random.Random) -> Sample:
    kind = rng.random()
    if kind < 0.82:
        return count_steps(rng)
    first = rng.randint(0, 50)
    last = first + (rng.randint(30, 60) if kind < 0.85 else rng.randint(3, 24))
    if kind < 0.92:
        prompt = rng.choice(("Count from {} to {}.", "Count up from {} to {}.")).format(first, last)
        return one_turn("count", prompt, numbers(first, 1, last - first + 1))
    prompt = rng.choice(("Count down from {} to {}.", "Count backwards from {} to {}."))
    return one_turn("count", prompt.format(last, first), numbers(last, -1, last - first + 1))


def count_steps(rng: random.Random) -> Sample:
    first, step, n = rng.randint(0, 50), rng.randint(1, 12), rng.randint(3, 20)
    prompt = rng.choice(
        (
            "Count from {first} in steps of {step}, {n} numbers.",
            "Count from {first} in steps of {step}, {n} numbers.",
            "Count from {first} by {step}, {n} numbers.",
            "List {n} numbers from {first} in steps of {step}.",
        )
    )
    return one_turn("count", prompt.format(first=first, step=step, n=n), numbers(first, step, n))


def numbers(first: int, step: int, n: int) -> str:
    return ", ".join(str(first + i * step) for i in range(n))


# --- JSON -------------------------------------------------------------------------------------


def json_text(rng: random.Random) -> Sample:
    makers = (json_person, json_person, json_book, json_list, json_keys, json_order, json_people)
    prompt, value, indent = rng.choice(makers)(rng)
    return one_turn("json", prompt, json.dumps(value, indent=indent))


def json_person(rng: random.Random):
    name, age, city = person_name(rng), rng.randint(1, 99), rng.choice(lex.CITIES)
    value = {"name": name, "age": age, "city": city}
    text = f"name {name}, age {age}, city {city}"
    prompt = f"a person named {name}, age {age}, city {city}"
    if rng.random() < 0.4:
        value["job"] = rng.choice(lex.JOBS)
        text, prompt = (f"{base}, job {value['job']}" for base in (text, prompt))
    if rng.random() < 0.3:
        return f"Write JSON for a person: {text}.", value, None
    return f"Write JSON for {prompt}.", value, None


def json_book(rng: random.Random):
    title = f"The {rng.choice(lex.ADJECTIVES).capitalize()} {rng.choice(lex.THINGS).capitalize()}"
    author, year = person_name(rng), rng.randint(1900, 2029)
    tags = rng.sample(lex.TOPICS, rng.randint(1, 3))
    prompt = f'Write JSON for the book "{title}" by {author}, year {year}, tags {listed(tags)}.'
    return prompt, {"title": title, "author": author, "year": year, "tags": tags}, None


def json_list(rng: random.Random):
    group = rng.choice((lex.COLORS, lex.FRUITS, lex.ANIMALS, lex.CITIES, lex.THINGS))
    words = rng.sample(group, rng.randint(2, 7))
    prompt = rng.choice(("Write a JSON list of {}.", "Write {} as a JSON list."))
    return prompt.format(listed(words)), words, None


def json_keys(rng: random.Random):
    keys = rng.sample(lex.FIELDS, rng.randint(2, 5))
    value = {k: rng.randint(1, 99) if rng.random() < 0.5 else rng.choice(WORDS) for k in keys}
    pairs = ", ".join(f"{k} = {v}" for k, v in value.items())
    return f"Write JSON with {pairs}.", value, None


def json_order(rng: random.Random):
    name = person_name(rng)
    items = [(rng.randint(2, 40), fruit) for fruit in rng.sample(lex.FRUITS, rng.randint(1, 4))]
    prompt = f"Write JSON for an order by {name}: {listed([f'{n} {fruit}' for n, fruit in items])}."
    rows = [{"item": fruit, "count": n} for n, fruit in items]
    return prompt, {"customer": name, "items": rows}, None


def json_people(rng: random.Random):
    rows = [
        {"name": person_name(rng), "age": rng.randint(1, 99), "city": rng.choice(lex.CITIES)}
        for _ in range(rng.randint(2, 7))
    ]
    people = "; ".join(f"{row['name']}, {row['age']}, {row['city']}" for row in rows)
    return f"Write JSON for these people: {people}.", {"people": rows}, 2


# --- copying ----------------------------------------------------------------------------------


def copy(rng: random.Random) -> Sample:
    lead = rng.choice(
        ("Repeat this text: ", "Copy this text: ", "Say this again: ", "Repeat after me: ")
    )
    text = copied_text(rng)
    return one_turn("copy", lead + text, text)


def copied_text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return paragraph(rng, rng.choice((1, 2, 2, 3, 3, 4, 5, 8, 14)))
    length = rng.choice((5, 8, 12, 20, 30, 50))
    if kind < 0.75:
        return " ".join(rng.choice(WORDS) for _ in range(length))
    return " ".join(
        rng.choice((invented_word(rng), rng.choice(WORDS), str(rng.randint(0, 999))))
        for _ in range(length)
    )


def noise_copy(rng: random.Random) -> Sample:
    """Random bytes of text to repeat: makes the copying heads form early in training."""
    text = " ".join(
        rng.choice((invented_word(rng), rng.choice(WORDS), rng.choice(lex.NAMES)))
        for _ in range(rng.randint(4, 25))
    )
    return one_turn("copy", "Repeat this text: " + text, text)


# --- chat -------------------------------------------------------------------------------------

SMALL_TALK = (
    ("Hello!|Hi!|Hi there!|Good day!|Hello, how are you?", "Hello! How can I help you today?"),
    ("Who are you?|What are you?",
     "I am a very small demo model. I can count, copy, edit and write a little."),
    ("What can you do?|How can you help me?",
     "I can count, write JSON and small Python functions, copy and edit text, call tools and tell "
     "little stories."),
    ("Thank you!|Thanks!|Thanks a lot!",
     "You are welcome! Is there anything else I can do for you?"),
    ("Goodbye!|Bye!|See you soon!", "Goodbye! Have a nice day."),
    ("Are you a person?|Are you human?",
     "No, I am a small language model that was trained to show how this program works."),
)  # fmt: skip


def chat(rng: random.Random) -> Sample:
    makers = (chat_small, chat_capital, chat_fact, chat_like, chat_name, chat_system, chat_pick)
    sample = rng.choice(makers)(rng)
    return replace(sample, tools=some_tools(rng)) if rng.random() < 0.1 else sample


def chat_small(rng: random.Random) -> Sample:
    asks, reply = rng.choice(SMALL_TALK)
    return one_turn("chat", rng.choice(asks.split("|")), reply, fixed=True)


def chat_capital(rng: random.Random) -> Sample:
    land, city = rng.choice(list(lex.CAPITALS.items()))
    ask = rng.choice(("What is the capital of {}?", "Which city is the capital of {}?"))
    return one_turn("chat", ask.format(land), f"The capital of {land} is {city}.", fixed=True)


def chat_fact(rng: random.Random) -> Sample:
    animal, fact = rng.choice(list(lex.FACTS.items()))
    ask = rng.choice(("Tell me about the {}.", "What is a {}?", "What do you know about the {}?"))
    return one_turn("chat", ask.format(animal), fact, fixed=True)


def chat_like(rng: random.Random) -> Sample:
    """Asks for an opinion: any of three answers will do."""
    thing = f"{rng.choice(lex.COLORS)} {rng.choice(lex.THINGS + lex.FRUITS)}"
    reply = rng.choice(
        (
            f"Yes, I like {thing} very much. They make me happy.",
            f"I do not know much about {thing}, but they sound nice.",
            f"A {rng.choice(lex.ADJECTIVES)} day with {thing} is a good day.",
        )
    )
    return one_turn("chat", f"Do you like {thing}?", reply, exact=False)


def chat_name(rng: random.Random) -> Sample:
    name, city = person_name(rng), rng.choice(lex.CITIES)
    if rng.random() < 0.5:
        return one_turn("chat", f"My name is {name}.", f"Nice to meet you, {name}!")
    prompt = f"My name is {name} and I live in {city}."
    return one_turn("chat", prompt, f"Nice to meet you, {name}! How is life in {city}?")


def chat_pick(rng: random.Random) -> Sample:
    """A question about the sentence before it."""
    name, job, city = person_name(rng), rng.choice(lex.JOBS), rng.choice(lex.CITIES)
    told = f"{name} is a {job} in {city}."
    ask, reply = rng.choice(
        (
            ("Where does {0} work?", "{0} works in {2}."),
            ("What is the job of {0}?", "{0} is a {1}."),
            ("Who works in {2}?", "{0} works in {2}."),
        )
    )
    slots = (name, job, city)
    return one_turn("chat", f"{told} {ask.format(*slots)}", reply.format(*slots))


def chat_system(rng: random.Random) -> Sample:
    inner = rng.choice((chat_small, chat_capital, chat_fact, chat_name))(rng)
    word, name = rng.choice(WORDS), person_name(rng)
    rule, change = rng.choice(
        (
            (f"End every reply with the word {word}.", lambda reply: f"{reply} {word}"),
            (f"Start every reply with the word {word}.", lambda reply: f"{word}: {reply}"),
            (f"The user is called {name}. Use the name.", lambda reply: f"{name}, {reply}"),
        )
    )
    messages = [{"role": "system", "content": rule}, *inner.messages]
    return Sample("chat", messages, change(inner.reply))


# --- stories ----------------------------------------------------------------------------------


def story(rng: random.Random) -> Sample:
    name, other = rng.sample(lex.NAMES, 2)
    animal, thing, place = (rng.choice(g) for g in (lex.ANIMALS, lex.THINGS, lex.PLACES))
    is_long = rng.random() < 0.3
    kind = "long story" if is_long else rng.choice(("story", "short story"))
    prompt = rng.choice(
        (
            f"Tell me a {kind} about a {animal} named {name}.",
            f"Write a {kind} about {name} the {animal} and a {thing}.",
            f"Tell me a {kind} about {name} the {animal} in the {place}.",
        )
    )
    n = rng.randint(9, 15) if is_long else rng.randint(2, 5)
    middle = " ".join(story_step(rng, name, animal, thing, other) for _ in range(n))
    begin = f"Once upon a time, a {rng.choice(lex.ADJECTIVES)} {animal} named {name} lived"
    mood = rng.choice(("happy", "friends", "tired but happy"))
    end = f"In the end, {name} and {other} were {mood}."
    return one_turn("story", prompt, f"{begin} in the {place}. {middle} {end}", exact=False)


def story_step(rng: random.Random, name: str, animal: str, thing: str, other: str) -> str:
    color, adjective, place = (
        rng.choice(group) for group in (lex.COLORS, lex.ADJECTIVES, lex.PLACES)
    )
    return rng.choice(
        (
            f"One {rng.choice(lex.TIMES)}, {name} found a {color} {thing}.",
            f"The {thing} was {adjective} and {color}.",
            f'"What a {adjective} {thing}!" said {name}.',
            f"{name} went to the {place} and met {other}.",
            f"{other} gave {name} some {rng.choice(lex.FRUITS)}.",
            f"The {animal} was {adjective}, but {other} was not.",
            f'"Come with me to the {place}," said {other}.',
            f"They looked for the {thing} in the {place}.",
            f"Then it was {rng.choice(lex.TIMES)}, and the {animal} slept.",
        )
    )


# --- editing ----------------------------------------------------------------------------------


def edit(rng: random.Random) -> Sample:
    text = paragraph(rng, rng.choice((3, 4, 4, 5, 6, 8, 14)))
    makers = (*[edit_replace] * 4, edit_append, edit_remove, edit_number)
    order, edited = rng.choice(makers)(rng, text)
    return one_turn("edit", f"{order}\n{text}", edited)


def edit_replace(rng: random.Random, text: str):
    words = [word.strip(".,") for word in text.split()]
    known = [word for word in words if word in WORDS or word in lex.NAMES]
    old = rng.choice(known or words)
    new = rng.choice(lex.NAMES if old[0].isupper() else WORDS)
    lead = rng.choice(("Replace {} with {} in this text:", "Change {} to {} in this text:"))
    swapped = [new + w[len(old) :] if w.strip(".,") == old else w for w in text.split()]
    return lead.format(old, new), " ".join(swapped)


def edit_append(rng: random.Random, text: str):
    added = sentence(rng)
    if rng.random() < 0.5:
        return f'Put "{added}" before this text:', f"{added} {text}"
    return f'Put "{added}" after this text:', f"{text} {added}"


def edit_remove(rng: random.Random, text: str):
    sentences = text[:-1].split(". ")
    if rng.random() < 0.5:
        return "Remove the first sentence of this text:", ". ".join(sentences[1:]) + "."
    return "Remove the last sentence of this text:", ". ".join(sentences[:-1]) + "."


def edit_number(rng: random.Random, text: str):
    sentences = text[:-1].split(". ")
    rows = [f"{i}. {line}." for i, line in enumerate(sentences, 1)]
    return "Write every sentence of this text on a numbered line:", "\n".join(rows)


# --- thinking ---------------------------------------------------------------------------------


def think(rng: random.Random) -> Sample:
    makers = (think_add, think_add, think_compare, think_story, think_letters)
    make = rng.choice(makers)
    prompt, thought, reply = make(rng)
    fixed = make is think_letters  # a word's spelling can only be known from training
    if rng.random() < 0.2:
        return one_turn("think", prompt, reply, fixed=fixed)
    raw = f"<|channel>thought\n{thought}\n<channel|>{reply}"
    return one_turn("think", prompt, raw, thinking=True, fixed=fixed)


def think_add(rng: random.Random):
    a, b = rng.randint(1, 60), rng.randint(1, 30)
    ask = rng.choice(("What is {} + {}?", "How much is {} plus {}?")).format(a, b)
    return ask, added(a, b), f"{a} + {b} = {a + b}."


def added(a: int, b: int) -> str:
    """Tens first, then the ones: the steps a reader would write down."""
    tens, ones = b // 10 * 10, b % 10
    return f"{a} + {tens} = {a + tens}. {a + tens} + {ones} = {a + b}."


def think_compare(rng: random.Random):
    a, b = rng.sample(range(1, 100), 2)
    word, pick = rng.choice((("bigger", max), ("smaller", min)))
    ask = f"Which number is {word}, {a} or {b}?"
    relation = "more" if a > b else "less"
    return ask, f"{a} is {relation} than {b}.", f"{pick(a, b)} is {word}."


def think_story(rng: random.Random):
    name, fruit = person_name(rng), rng.choice(lex.FRUITS)
    a, b = rng.randint(1, 40), rng.randint(1, 30)
    ask = f"{name} has {a} {fruit} and gets {b} more. How many {fruit} does {name} have?"
    return (
        ask,
        f"{name} starts with {a} and gets {b}. {added(a, b)}",
        f"{name} has {a + b} {fruit}.",
    )


def think_letters(rng: random.Random):
    word = rng.choice(WORDS)
    spelled = ", ".join(f"{letter} {i}" for i, letter in enumerate(word, 1))
    ask = f"How many letters are in the word {word}?"
    return ask, f"I spell it: {spelled}.", f"The word {word} has {len(word)} letters."


SKILLS = {
    "count": count,
    "json": json_text,
    "copy": copy,
    "code": code,
    "tool": tool,
    "chat": chat,
    "story": story,
    "edit": edit,
    "think": think,
}
ASKED = SKILLS | {"tool_answer": tool}  # what the held-out questions cover
