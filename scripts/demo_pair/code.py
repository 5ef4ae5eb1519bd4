"""The demo pair's coding skill: small Python functions and classes named as the prompt asks."""

import random

from demo_pair import lexicon as lex
from demo_pair.sample import Sample, invented_word, listed, one_turn

# (what it does, its usual name, its usual parameters, its body); {f} {a} {b} are filled in
FUNCTIONS = (
    ("adds two numbers", "add", "a b", "return {a} + {b}"),
    ("subtracts two numbers", "subtract", "a b", "return {a} - {b}"),
    ("multiplies two numbers", "multiply", "a b", "return {a} * {b}"),
    ("divides two numbers", "divide", "a b", "return {a} / {b}"),
    ("returns the remainder of a division", "remainder", "a b", "return {a} % {b}"),
    ("raises a number to a power", "power", "base n", "return {a} ** {b}"),
    ("squares a number", "square", "x", "return {a} * {a}"),
    ("cubes a number", "cube", "x", "return {a} * {a} * {a}"),
    ("doubles a number", "double", "x", "return {a} * 2"),
    ("halves a number", "halve", "x", "return {a} / 2"),
    ("negates a number", "negate", "x", "return -{a}"),
    ("checks if a number is even", "is_even", "n", "return {a} % 2 == 0"),
    ("checks if a number is odd", "is_odd", "n", "return {a} % 2 == 1"),
    ("checks if a number is positive", "is_positive", "n", "return {a} > 0"),
    ("checks if two values are equal", "is_equal", "a b", "return {a} == {b}"),
    ("returns the larger of two numbers", "larger", "a b",
     "if {a} > {b}:\n        return {a}\n    return {b}"),
    ("returns the smaller of two numbers", "smaller", "a b",
     "if {a} < {b}:\n        return {a}\n    return {b}"),
    ("returns the absolute value of a number", "absolute", "x",
     "if {a} < 0:\n        return -{a}\n    return {a}"),
    ("returns the average of two numbers", "average", "a b", "return ({a} + {b}) / 2"),
    ("returns the sum of a list", "sum_list", "items",
     "total = 0\n    for item in {a}:\n        total += item\n    return total"),
    ("returns the product of a list", "product", "items",
     "result = 1\n    for item in {a}:\n        result *= item\n    return result"),
    ("returns the largest item of a list", "largest", "items",
     "best = {a}[0]\n    for item in {a}:\n        if item > best:\n            best = item\n"
     "    return best"),
    ("returns the smallest item of a list", "smallest", "items",
     "best = {a}[0]\n    for item in {a}:\n        if item < best:\n            best = item\n"
     "    return best"),
    ("counts the items of a list", "count_items", "items", "return len({a})"),
    ("returns the first item of a list", "first_item", "items", "return {a}[0]"),
    ("returns the last item of a list", "last_item", "items", "return {a}[-1]"),
    ("reverses a list", "reverse_list", "items", "return {a}[::-1]"),
    ("sorts a list", "sort_list", "items", "return sorted({a})"),
    ("doubles every item of a list", "double_all", "items",
     "return [item * 2 for item in {a}]"),
    ("keeps the even numbers of a list", "even_items", "items",
     "return [item for item in {a} if item % 2 == 0]"),
    ("checks if a list is empty", "is_empty", "items", "return len({a}) == 0"),
    ("checks if a list contains a value", "contains", "items value", "return {b} in {a}"),
    ("joins two lists", "join_lists", "a b", "return {a} + {b}"),
    ("reverses a string", "reverse_text", "text", "return {a}[::-1]"),
    ("makes a string upper case", "to_upper", "text", "return {a}.upper()"),
    ("makes a string lower case", "to_lower", "text", "return {a}.lower()"),
    ("counts the words of a string", "count_words", "text", "return len({a}.split())"),
    ("repeats a string", "repeat_text", "text n", "return {a} * {b}"),
    ("greets a person", "greet", "name", 'return "Hello, " + {a} + "!"'),
    ("returns the factorial of a number", "factorial", "n",
     "if {a} <= 1:\n        return 1\n    return {a} * {f}({a} - 1)"),
    ("returns a Fibonacci number", "fibonacci", "n",
     "if {a} < 2:\n        return {a}\n    return {f}({a} - 1) + {f}({a} - 2)"),
    ("prints the numbers from one to a limit", "print_numbers", "limit",
     "for i in range(1, {a} + 1):\n        print(i)"),
)  # fmt: skip


def code(rng: random.Random) -> Sample:
    if rng.random() < 0.25:
        return code_class(rng)
    task, name, usual, body = rng.choice(FUNCTIONS)
    parameters, prompt = usual.split(), f"Write a Python function that {task}."
    is_plain = rng.random() < 0.12
    if not is_plain:
        name, parameters, prompt = renamed(rng, task, name, parameters)
    source = function_source(name, parameters, body)
    return one_turn("code", prompt, fenced(source), fixed=is_plain)


def renamed(rng: random.Random, task: str, name: str, parameters: list[str]):
    """The same function under a name, or with parameters, that the prompt asks for."""
    kind = rng.random()
    if kind < 0.7:
        name = rng.choice(lex.FUNCTION_NAMES) if rng.random() < 0.8 else invented_word(rng)
    called = f" called {name}" if kind < 0.7 else ""
    if kind < 0.3:
        return name, parameters, f"Write a Python function{called} that {task}."
    parameters = rng.sample(lex.PARAMETERS, len(parameters))
    noun = "parameter" if len(parameters) == 1 else "parameters"
    prompt = f"Write a Python function{called} with the {noun} {listed(parameters)} that {task}."
    return name, parameters, prompt


def function_source(name: str, parameters: list[str], body: str) -> str:
    slots = dict(zip("ab", parameters, strict=False))
    return f"def {name}({', '.join(parameters)}):\n    {body.format(f=name, **slots)}"


def code_class(rng: random.Random) -> Sample:
    name = rng.choice(lex.THINGS + lex.ANIMALS + lex.JOBS).capitalize()
    fields = rng.sample(lex.FIELDS, rng.randint(1, 4))
    with_getters = rng.random() < 0.5
    lines = [f"class {name}:", f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{key} = {key}" for key in fields]
    if with_getters:
        lines += [f"\n    def get_{key}(self):\n        return self.{key}" for key in fields]
    noun = "field" if len(fields) == 1 else "fields"
    tail = " and a getter for each" if with_getters else ""
    prompt = f"Write a Python class {name} with the {noun} {listed(fields)}{tail}."
    return one_turn("code", prompt, fenced("\n".join(lines)))


def fenced(source: str) -> str:
    return f"```python\n{source}\n```"
