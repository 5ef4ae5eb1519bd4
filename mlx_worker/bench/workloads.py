"""The prompts of the bench: six kinds of request, and how to read others from a file.

Owns the built-in prompts and the prompt file format. Leaves serving them to run.py. Pure data;
any thread.

The built-in prompts are ones that the embedded demo pair was trained to answer, and that any chat
model can. Kinds differ in how predictable the reply is, which is what a draft lives on: copying
and counting are easy, stories are hard.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_worker.errors import ConfigError, shown

Message = Mapping[str, Any]

N_EACH = 3  # requests of each workload unless told otherwise
KEYS = ("workload", "messages", "temperature")  # of a line of a prompt file
ALL = "all"  # the row of totals, so no workload may be called that


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer, and the kind of request it stands for.

    temperature  None: the bench's own
    """

    workload: str
    messages: tuple[Message, ...]
    temperature: float | None = None


def one_turn(workload: str, *texts: str) -> tuple[Prompt, ...]:
    return tuple(Prompt(workload, ({"role": "user", "content": text},)) for text in texts)


CHAT = one_turn(
    "chat",
    "What can you do?",
    "Tell me about the bear.",
    "Mia is a doctor in Oslo. Where does Mia work?",
    "My name is Grace and I live in Lisbon.",
    "What do you know about the owl?",
    "Hello, how are you?",
    "What is the capital of Portugal?",
    "Do you like green lamps?",
    "Are you a person?",
    "Linus is a baker in Vienna. What is the job of Linus?",
)
CODE = one_turn(
    "code",
    "Write a Python function that returns the factorial of a number.",
    "Write a Python class Bottle with the fields name, color and price and a getter for each.",
    "Write a Python function called helper that returns the largest item of a list.",
    "Write a Python function that returns the sum of a list.",
    "Write a Python class Teacher with the fields name, age, height and title.",
    "Write a Python function called compute that returns a Fibonacci number.",
    "Write a Python function that keeps the even numbers of a list.",
    "Write a Python function with the parameters a and n that returns the larger of two numbers.",
    "Write a Python class Lion with the fields weight, score and year and a getter for each.",
    "Write a Python function called process that returns the product of a list.",
)
JSON = one_turn(
    "json",
    "Write JSON for a person named Ada, age 36, city Paris.",
    "Write JSON for an order by Omar: 12 apples, 7 figs and 30 cherries.",
    'Write JSON for the book "The Quiet River" by Nina, year 1987, tags history, travel and art.',
    "Write JSON for these people: Ben, 41, Rome; Zoe, 8, Quito; Paul, 77, Seoul; Emil, 23, Bern.",
    "Write JSON with color = gold, price = 12, owner = baker, width = 40.",
    "Write a JSON list of red, blue, green, yellow, purple and gold.",
    "Write JSON for a person named Hugo, age 52, city Athens, job painter.",
    "Write JSON for an order by Rosa: 5 plums, 21 melons, 9 dates and 16 pears.",
    "Write JSON for these people: Iris, 30, Lima; Tom, 64, Cairo; Kai, 19, Delhi.",
    'Write JSON for the book "The Brave Lamp" by Otto, year 2011, tags art and music.',
)
EDIT = one_turn(
    "edit",
    "Replace Ada with Vera in this text:\n"
    "Ada opens the old box in the garden. The clever fox hides a red ring. Ada and Tom walk to "
    "the harbor. There is a tired horse near the castle. In the evening, Ada washes a cup.",
    "Remove the last sentence of this text:\n"
    "The lamp is yellow and bright. Carl has 45 pears and a black hat. Finn works as a cook in "
    "Milan. The slow turtle carries a green leaf. In the spring, Eva paints a door.",
    "Write every sentence of this text on a numbered line:\n"
    "Olga buys the heavy table in the market. The map is brown and clean. Max and Lena walk to "
    "the station. There is a gentle whale near the beach. Jo has 18 grapes and a pink kite.",
    'Put "The bell is white and loud." after this text:\n'
    "Sam finds the strange key in the forest. The kind duck drops a blue spoon. Ruth works as a "
    "nurse in Dublin. In the morning, Ivan cleans a mirror. The chair is gray and soft.",
    "Change castle to village in this text:\n"
    "Uma and Dan walk to the castle. There is a big lion near the castle. Fay sells the round "
    "clock in the market. The brave mouse keeps a purple coat. The castle is old and quiet.",
    "Remove the first sentence of this text:\n"
    "Kim has 63 peaches and an orange drum. The cold wolf moves a white stone. Noah carries the "
    "new letter in the school. Cleo and Bo walk to the river. The rope is gold and light.",
    "Replace stone with candle in this text:\n"
    "Dora hides the small stone in the garden. The warm cat washes a pink stone. Pia works as a "
    "singer in Prague. The stone is green and heavy. In the night, Leo sells a stone.",
    "Write every sentence of this text on a numbered line:\n"
    "The happy frog opens a red basket. Hana works as a driver in Boston. Gus and Xena walk to "
    "the farm. The pen is black and new. In the autumn, Will finds a wheel.",
    'Put "Anna has 7 melons and a blue hat." before this text:\n'
    "The dark owl keeps a gray book. Niels paints the clean door in the station. There is a slow "
    "goat near the mountain. The mirror is brown and quiet. Jack and Yuri walk to the beach.",
    "Change Marie to Sofia in this text:\n"
    "Marie drops the loud bell in the school. Marie and Alan walk to the forest. The soft rabbit "
    "buys an orange tent. Marie works as a writer in Berlin. The shoe is white and small.",
)
COUNT = one_turn(
    "count",
    "Count from 3 in steps of 4, 10 numbers.",
    "Count from 17 to 38.",
    "Count down from 40 to 22.",
    "Count from 12 in steps of 11, 18 numbers.",
    "List 15 numbers from 8 in steps of 7.",
    "Count from 45 by 3, 16 numbers.",
    "Count up from 5 to 27.",
    "Count backwards from 33 to 14.",
    "Count from 20 in steps of 9, 14 numbers.",
    "List 20 numbers from 31 in steps of 2.",
)
STORY = one_turn(
    "story",
    "Tell me a story about a fox named Leo.",
    "Write a short story about Nina the owl and a lamp.",
    "Tell me a story about Hugo the bear in the forest.",
    "Tell me a long story about a rabbit named Zoe.",
    "Write a story about Max the turtle and a boat.",
    "Tell me a short story about Ruth the cat in the castle.",
    "Write a long story about Ivan the lion and a key.",
    "Tell me a story about a whale named Olga.",
    "Tell me a story about Finn the mouse in the market.",
    "Write a story about Eva the wolf and a bell.",
)
BUILT_IN = CHAT + CODE + JSON + EDIT + COUNT + STORY


def names(prompts: Sequence[Prompt]) -> list[str]:
    """The workloads, in order of first appearance."""
    return list(dict.fromkeys(prompt.workload for prompt in prompts))


def pick(prompts: Sequence[Prompt], workloads: Sequence[str] | None, n_each: int) -> list[Prompt]:
    """`n_each` prompts of each workload, from the start again where there are fewer.

    workloads  None means all, in their own order

    Raises ConfigError: a workload that has no prompts, or n_each below 1.
    """
    if n_each < 1:
        raise ConfigError(f"--requests: {n_each}, must be at least 1")
    known = names(prompts)
    for name in workloads or ():
        if name not in known:
            raise ConfigError(
                f"--workloads: no prompts for {shown(name)}", hint=f"one of {', '.join(known)}"
            )
    picked: list[Prompt] = []
    for name in dict.fromkeys(workloads or known):
        mine = [prompt for prompt in prompts if prompt.workload == name]
        picked += [mine[i % len(mine)] for i in range(n_each)]
    return picked


def choose(
    given: Sequence[Prompt] | None, workloads: Sequence[str] | None, n_each: int | None
) -> list[Prompt]:
    """The batch: a file's prompts, each once, or N_EACH built-in ones of each workload.

    n_each  this many of each instead

    Raises ConfigError as `pick` does.
    """
    if given is None or n_each is not None:
        return pick(given or BUILT_IN, workloads, N_EACH if n_each is None else n_each)
    pick(given, workloads, 1)  # refuses an unknown workload
    return [prompt for prompt in given if prompt.workload in (workloads or names(given))]


def repeats(prompts: Sequence[Prompt]) -> bool:
    """Whether some prompt is there twice."""
    return any(prompt in prompts[:i] for i, prompt in enumerate(prompts))


def read(path: Path | str) -> list[Prompt]:
    """Prompts from a JSON-lines file: {"workload": "mail", "messages": [{"role", "content"}, …]}.

    A line may set its own "temperature". Blank lines are skipped.

    Raises ConfigError with file and line: not readable, not JSON, or not of that shape.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as failed:
        raise ConfigError(f"{file}: {failed.strerror or failed}") from None
    except UnicodeDecodeError as broken:
        raise ConfigError(f"{file}: not UTF-8 at byte {broken.start}") from None
    # Not splitlines(): JSON strings may hold U+2028, which that would cut at.
    lines = enumerate(text.split("\n"), 1)
    prompts = [parse(line, f"{file}, line {number}") for number, line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"{file}: has no prompts")
    return prompts


def parse(line: str, where: str) -> Prompt:
    """One line of a prompt file; `where` begins the message of the ConfigError it may raise."""
    try:
        value = json.loads(line)
    except ValueError as broken:
        raise ConfigError(f"{where}: not JSON: {broken}") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{where}: must be an object with "workload" and "messages"')
    for key in value:
        if key not in KEYS:
            raise ConfigError(f"{where}: unknown key {shown(key)}", hint=", ".join(KEYS))
    workload, messages = value.get("workload"), value.get("messages")
    if not isinstance(workload, str) or not workload:
        raise ConfigError(f"{where}: workload: {shown(workload)}, must be a name")
    if workload == ALL:
        raise ConfigError(f"{where}: workload: {shown(ALL)} is the name of the totals")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages: {shown(messages)}, must be a list of messages")
    for i, message in enumerate(messages):
        check_message(message, f"{where}: messages[{i}]")
    temperature = value.get("temperature")
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if temperature is not None and not (is_number and 0 <= temperature < math.inf):
        raise ConfigError(f"{where}: temperature: {shown(temperature)}, must be at least 0")
    return Prompt(workload, tuple(messages), temperature)


def check_message(message: object, where: str) -> None:
    """A role and a text are all that the bench needs; the chat template knows the rest."""
    if not isinstance(message, dict):
        raise ConfigError(f"{where}: {shown(message)}, must be an object")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise ConfigError(f"{where}.{key}: {shown(message.get(key))}, must be a string")
