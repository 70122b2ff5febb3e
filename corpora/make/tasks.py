# ruff: noqa: E501, S608, SIM905 (templates and word lists read best whole; the SQL is the product)
"""Nine families of small chat tasks, drawn from a stochastic grammar.

One generator makes both the chats that the shipped model pair is trained on and the prompts in
corpora/*.jsonl; the two differ by seed, and training drops any chat whose prompt is in the corpora.
Each item carries the check that its own reference answer passes, so a prompt, its answer and its
check can never drift apart.

Why the grammar looks as it does. A target of five million weights can be right only if it can copy:
names, cities, goods and two-digit numbers come from closed lists (one token each), and a prompt holds
one value of a type, or a marker beside each where it holds two. The families are meant to differ in
how well a small draft predicts the target: support replies are templates, nearly free; JSON and SQL
need a lookup per value; prose picks each word from dozens, so that a draft is rarely right.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator

NAMES = (
    "Alice Boris Carla Dario Elena Felix Greta Hugo Irene Jonas Karin Leo Maria Nadia Oscar Paula "
    "Quinn Rosa Simon Tara Umar Vera Walter Xenia Yusuf Zoe Amir Bella Cyrus Dora Emil Fiona Gavin "
    "Helga Ivan Julia Kofi Lena Milan Nora"
).split()
CITIES = (
    "Oslo Lima Cairo Delhi Paris Tokyo Quito Dakar Milan Porto Basel Bonn Turin Seoul Perth Hanoi "
    "Riga Malmo Ghent Lyon Split Accra Tunis Kyoto Boston Denver Dallas Austin Leeds Cork Bergen "
    "Vienna"
).split()
CITIES = [city for city in CITIES if city not in NAMES]
ITEMS = (
    "lamp chair table kettle tent bicycle camera mirror blanket backpack keyboard printer guitar "
    "heater toaster ladder carpet pillow helmet jacket teapot sofa desk drill speaker monitor clock "
    "basket bottle mug shelf suitcase umbrella wallet bench radio scarf racket canoe hammock"
).split()
COLOURS = "red blue green black white grey yellow purple orange brown silver pink".split()
MONTHS = "January February March April May June July August September October".split()
SHOPS = "Northwind Lumina Harbor Fernway Polaris Juniper".split()

# Prose words: many to a slot, so that the next word is a matter of chance.
NOUNS = (
    "sailor baker teacher child gardener painter stranger doctor poet miner widow pilot fisher clerk "
    "singer hunter lighthouse river bridge garden market engine letter candle violin window storm "
    "mountain forest island harbour orchard railway station library kitchen tower mill village "
    "lantern compass map boat horse dog cat crow owl fox wolf kite piano statue fountain wagon anchor "
    "shadow whistle drum ribbon feather stone mask coin key bell rope ladle plough quilt"
).split()
ADJECTIVES = (
    "old young quiet bright broken gentle hollow narrow distant golden weary proud foolish patient "
    "frozen crooked silent restless pale stubborn careful lonely clever dusty heavy strange wooden "
    "small enormous faded wild humble bitter tender sudden ancient cheerful nervous empty famous "
    "ragged solemn slender grim merry"
).split()
VERBS = (
    "watched followed carried painted forgot remembered found lost opened closed repaired stole "
    "admired feared counted measured lifted buried polished borrowed sold bought drew described "
    "ignored greeted warned helped chased trusted doubted imagined guarded cleaned moved shook heard "
    "touched studied praised hid mended"
).split()
MOVES = (
    "waited slept danced wandered laughed vanished returned whispered stumbled listened trembled "
    "sang drifted hesitated rested smiled wept paused shivered hurried knelt"
).split()
PREPOSITIONS = "near behind beside above under beyond inside across against toward past".split()
ADVERBS = (
    "slowly softly suddenly gladly bravely calmly eagerly sadly twice again alone together boldly "
    "idly kindly badly early late"
).split()
PLACES = (
    "Norland Easton Redhill Seaford Oakham Millbrook Stonegate Fairview Westport Ashby Glenmoor "
    "Highfield"
).split()
TIMES = "morning evening night winter summer autumn spring noon dawn midnight Sunday Monday".split()
SECOND = "Then Soon Meanwhile Later Afterwards Nearby Outside Upstairs".split()
THIRD = "But Yet Still However Nevertheless Instead".split()
FOURTH = "Next Besides Indeed Moreover".split()
FIFTH = "Perhaps Certainly Surely Possibly".split()
LAST = "Finally Eventually Afterward Thereafter Ultimately".split()
TEAMS = "billing network storage security payroll support legal design".split()
STATUSES = "open closed pending shipped late paid".split()
LEVELS = "low medium high urgent".split()


@dataclass(frozen=True)
class Item:
    """One chat: the messages, the reference answer, and the check that this answer passes."""

    task: str
    messages: list[dict[str, str]]
    answer: str
    check: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)


def pick(rng: Generator, options: Sequence[Any]) -> Any:
    """One of the options, each as likely as the other (Generator.choice is ten times slower)."""
    return options[int(rng.integers(len(options)))]


def chance(rng: Generator, probability: float) -> bool:
    """True with this probability."""
    return bool(rng.random() < probability)


def some(rng: Generator, options: Sequence[Any], n: int) -> list[Any]:
    """So many different options in random order."""
    return [options[int(i)] for i in rng.permutation(len(options))[:n]]


def two_digits(rng: Generator, low: int = 11, high: int = 99) -> int:
    """A number that is one token."""
    return int(rng.integers(low, high + 1))


def chat(rng: Generator, user: str, systems: Sequence[str]) -> list[dict[str, str]]:
    """A user turn, under a system turn three times out of four."""
    messages = [{"role": "user", "content": user}]
    if chance(rng, 0.75):
        messages.insert(0, {"role": "system", "content": pick(rng, systems)})
    return messages


# --- json ----------------------------------------------------------------------------------------


def json_item(rng: Generator) -> Item:
    """Read an order, a booking or a fault report into the JSON fields that were asked for."""
    name, city, code = pick(rng, NAMES), pick(rng, CITIES), f"K{two_digits(rng)}"
    number, day, month = two_digits(rng), int(rng.integers(1, 29)), pick(rng, MONTHS)
    kind = pick(rng, ("order", "booking", "fault"))
    values: dict[str, Any]
    if kind == "order":
        item, colour = pick(rng, ITEMS), pick(rng, COLOURS)
        values = {
            "customer": name,
            "city": city,
            "item": item,
            "colour": colour,
            "quantity": number,
            "ref": code,
        }
        text = pick(
            rng,
            (
                f"{name} from {city} ordered {number} pieces of the {item} in {colour} under {code}.",
                (
                    f"Order {code}: please send {number} pieces of the {colour} {item} to {name} in "
                    f"{city}."
                ),
                (
                    f"Hi, this is {name}. I need the {item}, colour {colour}, {number} pieces, sent to "
                    f"{city}. My order is {code}."
                ),
                (
                    f"We shipped {number} pieces to {city} today: the {colour} {item}, order {code}, for "
                    f"{name}."
                ),
            ),
        )
    elif kind == "booking":
        board = pick(rng, ("breakfast", "dinner", "lunch"))
        values = {
            "guest": name,
            "city": city,
            "nights": number,
            "meal": board,
            "arrival": f"{day} {month}",
            "ref": code,
        }
        text = pick(
            rng,
            (
                (
                    f"{name} books {number} nights in {city} with {board}, arriving {day} {month}, "
                    f"booking {code}."
                ),
                (
                    f"Booking {code}: guest {name}, hotel in {city}, arriving {day} {month}, {number} "
                    f"nights with {board}."
                ),
                (
                    f"Good morning, my name is {name}. I arrive in {city} on {day} {month} and stay "
                    f"{number} nights with {board}. The booking is {code}."
                ),
            ),
        )
    else:
        item, level, team = pick(rng, ITEMS), pick(rng, LEVELS), pick(rng, TEAMS)
        values = {
            "reporter": name,
            "device": item,
            "level": level,
            "team": team,
            "room": number,
            "ticket": code,
        }
        text = pick(
            rng,
            (
                (
                    f"Ticket {code}: {name} says that the {item} in room {number} is broken. Priority "
                    f"{level}, for the {team} team."
                ),
                (
                    f"{name} called about the {item} in room {number}. Sent to the {team} team as {code} "
                    f"with {level} priority."
                ),
                (
                    f"The {team} team got {code} from {name}: the {item} does not work in room {number}. "
                    f"This is {level} priority."
                ),
            ),
        )
    kept = some(rng, list(values), int(rng.integers(4, 7)))
    keys = [key for key in values if key in kept]
    expect = {key: values[key] for key in keys}
    schema = {
        "type": "object",
        "properties": {
            key: {"type": "integer" if isinstance(value, int) else "string"}
            for key, value in expect.items()
        },
        "required": keys,
        "additionalProperties": False,
    }
    ask = pick(rng, ("Fields", "Extract", "Keys"))
    user = f"{ask}: {', '.join(keys)}\nText: {text}"
    systems = ("You extract data as JSON.", "Answer with one JSON object.")
    if chance(rng, 0.5):
        check: dict[str, Any] = {"kind": "json_schema", "schema": schema, "expect": expect}
    else:
        check = {"kind": "json", "expect": expect}
    return Item("json", chat(rng, user, systems), json.dumps(expect), check, {"schema": schema})


# --- sql -----------------------------------------------------------------------------------------

# table: (text columns with their values, number columns)
TABLES: dict[str, tuple[dict[str, Sequence[str]], tuple[str, ...]]] = {
    "orders": ({"customer": NAMES, "city": CITIES, "status": STATUSES}, ("total", "quantity")),
    "products": ({"item": ITEMS, "colour": COLOURS, "shop": SHOPS}, ("price", "stock")),
    "employees": ({"name": NAMES, "team": TEAMS, "city": CITIES}, ("salary", "age", "hours")),
    "tickets": ({"reporter": NAMES, "level": LEVELS, "team": TEAMS}, ("hours", "cost")),
    "parcels": ({"sender": NAMES, "city": CITIES, "status": STATUSES}, ("weight", "cost")),
    "invoices": ({"client": NAMES, "month": MONTHS, "status": STATUSES}, ("amount", "tax")),
    "rooms": ({"city": CITIES, "colour": COLOURS, "guest": NAMES}, ("price", "beds", "nights")),
    "visits": ({"guest": NAMES, "month": MONTHS, "city": CITIES}, ("nights", "amount")),
    "repairs": ({"item": ITEMS, "level": LEVELS, "shop": SHOPS}, ("hours", "price")),
    "players": ({"name": NAMES, "city": CITIES, "colour": COLOURS}, ("goals", "age", "score")),
    "stores": ({"shop": SHOPS, "city": CITIES, "status": STATUSES}, ("sales", "staff")),
    "lessons": ({"teacher": NAMES, "month": MONTHS, "level": LEVELS}, ("hours", "score")),
}
AGGREGATES = {
    "average": "AVG",
    "total": "SUM",
    "largest": "MAX",
    "smallest": "MIN",
    "sum of": "SUM",
    "highest": "MAX",
    "lowest": "MIN",
}


def condition(
    rng: Generator, column: str, values: Sequence[str] | None
) -> tuple[str, str, Callable[[int], Any]]:
    """In words, in SQL, and a maker of column values that satisfy it."""
    if values is not None:
        value = pick(rng, values)
        if chance(rng, 0.2):
            other = [v for v in values if v != value]
            return (
                f"the {column} is not {value}",
                f"{column} <> '{value}'",
                lambda i: other[i % len(other)],
            )
        return f"the {column} is {value}", f"{column} = '{value}'", lambda _: value
    low = two_digits(rng, 20, 80)
    if chance(rng, 0.5):
        words = pick(rng, ("above", "more than", "over"))
        return f"the {column} is {words} {low}", f"{column} > {low}", lambda i: low + 1 + i
    words = pick(rng, ("below", "less than", "under"))
    return f"the {column} is {words} {low}", f"{column} < {low}", lambda i: low - 1 - i


def sql_item(rng: Generator) -> Item:
    """Turn a question about one table into a SELECT."""
    table = pick(rng, list(TABLES))
    text_columns, number_columns = TABLES[table]
    columns = some(rng, [*text_columns, *number_columns], len(text_columns) + len(number_columns))
    texts, numbers = some(rng, list(text_columns), 3), some(rng, number_columns, 2)
    shape = pick(rng, ("rows", "rows", "rows", "count", "aggregate", "group", "group", "group"))
    n_conditions = pick(rng, (0, 1, 2, 2, 3) if shape in ("rows", "group") else (1, 2, 3))
    of_conditions = some(rng, [texts[0], numbers[0], texts[2]], n_conditions)
    conditions = {c: condition(rng, c, text_columns.get(c)) for c in of_conditions}
    where_words = " and ".join(words for words, _, _ in conditions.values())
    where = " AND ".join(sql for _, sql, _ in conditions.values())
    where_words = f" where {where_words}" if where else ""
    where = f" WHERE {where}" if where else ""
    verb = pick(rng, ("Show", "List", "Find", "Give"))
    if shape == "rows":
        shown = some(rng, columns, int(rng.integers(2, 5)))
        listed = f"{', '.join(shown[:-1])} and {shown[-1]}"
        question = f"{verb} the {listed} of {table}{where_words}"
        gold = f"SELECT {', '.join(shown)} FROM {table}{where}"
        if chance(rng, 0.6):
            down = chance(rng, 0.5)
            question += f", {'highest' if down else 'lowest'} {numbers[1]} first"
            gold += f" ORDER BY {numbers[1]}{' DESC' if down else ''}"
            if chance(rng, 0.5):
                limit = int(rng.integers(2, 10))
                question += f", at most {limit} rows"
                gold += f" LIMIT {limit}"
        question += "."
    elif shape == "count":
        if chance(rng, 0.5):
            question = f"How many {table} are there{where_words}?"
            gold = f"SELECT COUNT(*) FROM {table}{where}"
        else:
            question = f"How many different {texts[1]} values are in {table}{where_words}?"
            gold = f"SELECT COUNT(DISTINCT {texts[1]}) FROM {table}{where}"
    elif shape == "aggregate":
        words = pick(rng, list(AGGREGATES))
        question = f"What is the {words} {numbers[1]} in {table}{where_words}?"
        gold = f"SELECT {AGGREGATES[words]}({numbers[1]}) FROM {table}{where}"
    else:
        if chance(rng, 0.3):
            words, call = "number of rows", "COUNT(*)"
        else:
            word = pick(rng, list(AGGREGATES))
            words, call = f"{word} {numbers[1]}", f"{AGGREGATES[word]}({numbers[1]})"
        question = f"{verb} the {words} for each {texts[1]} in {table}{where_words}"
        gold = f"SELECT {texts[1]}, {call} FROM {table}{where} GROUP BY {texts[1]}"
        if call != "COUNT(*)" and chance(rng, 0.4):
            question += ", highest first"
            gold += f" ORDER BY {call} DESC"
        question += "."
    user = f"Table: {table}({', '.join(columns)})\nQuestion: {question}"
    systems = ("You write SQL.", "Answer with one SQL query.")
    setup = table_setup(rng, table, columns, conditions)
    check = {"kind": "sql", "setup": setup, "gold": gold}
    return Item("sql", chat(rng, user, systems), f"{gold};", check)


def table_setup(
    rng: Generator,
    table: str,
    columns: list[str],
    conditions: dict[str, tuple[str, str, Callable[[int], Any]]],
) -> str:
    """A table in which the first five of twelve rows meet the conditions; numbers never repeat
    within a column, so that an ORDER BY has one right answer.
    """
    text_columns, _ = TABLES[table]
    pools = {c: some(rng, values, 4) for c, values in text_columns.items()}
    others = {c: rng.permutation(200)[:12] + 101 for c in columns if c not in text_columns}
    rows = []
    for i in range(12):
        cells = []
        for column in columns:
            if column in conditions and i < 5:
                cell = conditions[column][2](i)
            elif column in text_columns:
                cell = pools[column][(i * i + i // 3) % 4]
            elif column in conditions:
                # Around the limit on both sides, but away from the values of the first five rows.
                cell = (i - 12) if i % 2 else int(others[column][i])
            else:
                cell = int(others[column][i])
            cells.append(f"'{cell}'" if isinstance(cell, str) else str(cell))
        rows.append(f"({', '.join(cells)})")
    definitions = ", ".join(f"{c} {'VARCHAR' if c in text_columns else 'INTEGER'}" for c in columns)
    return f"CREATE TABLE {table} ({definitions}); INSERT INTO {table} VALUES {', '.join(rows)};"


# --- code ----------------------------------------------------------------------------------------

VERB_PARTS = "get make find clean check build pack scan sort fix merge read mark plan test".split()
NOUN_PARTS = (
    "price score title label order stock total value name code list data user item rate tax age "
    "time size rank"
).split()
LIST_ARGS = "values numbers scores prices sizes ages rates".split()
TEXT_ARGS = "text title label name word line".split()
ORDINALS = "first second third fourth fifth sixth".split()
NUMBER_ARGS = "price score total rate size age amount".split()


def code_item(rng: Generator) -> Item:
    """Write a small Python function from a description of its steps."""
    name = f"{pick(rng, VERB_PARTS)}_{pick(rng, NOUN_PARTS)}"
    make = pick(rng, (list_function, list_function, text_function, number_function, table_function))
    argument, words, body, samples = make(rng)
    summary = "" if "# first" in body else f'    """{words[0].upper()}{words[1:]}."""\n'
    source = f"def {name}({argument}):\n{summary}{body}"
    space: dict[str, Any] = {}
    exec(source, space)  # noqa: S102 (our own text: the reference says what its tests expect)
    tests = "\n".join(f"assert {name}({s!r}) == {space[name](s)!r}" for s in samples)
    opening = pick(rng, ("Write a Python function", "Write", "Please write a function"))
    user = f"{opening} {name}({argument}): {words}."
    systems = ("You write Python.", "Answer with Python code only.")
    return Item("code", chat(rng, user, systems), source, {"kind": "code", "tests": tests})


def list_function(rng: Generator) -> tuple[str, str, str, list[Any]]:
    """Filter, change and gather: argument, description, body, and inputs to test with."""
    argument, n, m = pick(rng, LIST_ARGS), two_digits(rng), int(rng.integers(2, 10))
    keep_words, keep = pick(
        rng,
        (
            (f"above {n}", f"x > {n}"),
            (f"below {n}", f"x < {n}"),
            (f"of at least {n}", f"x >= {n}"),
            (f"other than {n}", f"x != {n}"),
            (f"divisible by {m}", f"x % {m} == 0"),
            ("that are even", "x % 2 == 0"),
            ("that are odd", "x % 2 == 1"),
        ),
    )
    k = int(rng.integers(2, 10))
    change_words, change = pick(
        rng,
        (
            (f"times {k}", f"x * {k}"),
            (f"plus {k}", f"x + {k}"),
            (f"minus {k}", f"x - {k}"),
            ("squared", "x * x"),
            ("unchanged", "x"),
        ),
    )
    goal_words, start, step = pick(
        rng,
        (
            ("return the sum", "0", f"result += {change}"),
            ("return a list", "[]", f"result.append({change})"),
            ("return the largest", "0", f"result = max(result, {change})"),
        ),
    )
    body = (
        f"    result = {start}\n    for x in {argument}:\n        if {keep}:\n"
        f"            {step}\n    return result"
    )
    words = f"take the {argument} {keep_words}, each {change_words}, and {goal_words}"
    return argument, words, body, [[n - 1, n, n + 1, m * 6], [3, 8, 40, 95, m * n], []]


def in_steps(chosen: Sequence[tuple[str, str]], argument: str) -> tuple[str, str]:
    """Description and body of numbered steps. The ordinals are what lets a small target find the
    next step: "then" before each of them leaves it guessing which one it has done.
    """
    named = [
        (f"{ordinal} {words}", code)
        for ordinal, (words, code) in zip(ORDINALS, chosen, strict=False)
    ]
    lines = [f"    # {words}\n    {argument} = {code}" for words, code in named]
    body = "\n".join([*lines, f"    return {argument}"])
    return ", ".join(words for words, _ in named), body


def text_function(rng: Generator) -> tuple[str, str, str, list[Any]]:
    """Two to six steps on a string."""
    argument = pick(rng, TEXT_ARGS)
    a, b = some(rng, "abcdefghiklmnoprstu", 2)
    word, n = pick(rng, COLOURS), int(rng.integers(3, 10))
    steps = (
        ("strip it", f"{argument}.strip()"),
        ("lower the case", f"{argument}.lower()"),
        ("raise the case", f"{argument}.upper()"),
        ("reverse it", f"{argument}[::-1]"),
        (f"replace {a} with {b}", f'{argument}.replace("{a}", "{b}")'),
        ("drop the spaces", f'{argument}.replace(" ", "")'),
        (f"cut it to {n} letters", f"{argument}[:{n}]"),
        (f"add {word} at the end", f'{argument} + "{word}"'),
        (f"put {word} in front", f'"{word}" + {argument}'),
    )
    words, body = in_steps(some(rng, steps, int(rng.integers(2, 7))), argument)
    return argument, words, body, [" Mixed Case text ", f"{a}{b}{a} banana", word]


def number_function(rng: Generator) -> tuple[str, str, str, list[Any]]:
    """Two to six steps on a number."""
    argument = pick(rng, NUMBER_ARGS)
    a, b, c = two_digits(rng), two_digits(rng), int(rng.integers(2, 10))
    steps = (
        (f"add {a}", f"{argument} + {a}"),
        (f"subtract {b}", f"{argument} - {b}"),
        (f"multiply by {c}", f"{argument} * {c}"),
        (f"divide by {c} and round down", f"{argument} // {c}"),
        (f"cap it at {a}", f"min({argument}, {a})"),
        (f"raise it to at least {b}", f"max({argument}, {b})"),
        ("make it positive", f"abs({argument})"),
    )
    words, body = in_steps(some(rng, steps, int(rng.integers(2, 7))), argument)
    return argument, words, body, [0, 7, a + c, -b, 250]


def table_function(rng: Generator) -> tuple[str, str, str, list[Any]]:
    """Group rows by a key."""
    key, value = pick(rng, ("city", "team", "shop", "colour")), pick(rng, NUMBER_ARGS)
    n = two_digits(rng)
    lines = ["    result = {}", "    for row in rows:", f'        key = row["{key}"]']
    words = f"group the rows by {key} and "
    if chance(rng, 0.5):
        words += f"add up the {value}"
        step = f'result[key] = result.get(key, 0) + row["{value}"]'
    else:
        words += f"keep the largest {value}"
        step = f'result[key] = max(result.get(key, 0), row["{value}"])'
    if chance(rng, 0.5):
        words += f" above {n}"
        lines += [f'        if row["{value}"] > {n}:', f"            {step}"]
    else:
        lines += [f"        {step}"]
    rows = [
        {key: "north", value: n + 5},
        {key: "south", value: n - 3},
        {key: "north", value: 2 * n},
        {key: "south", value: n},
    ]
    return "rows", words, "\n".join([*lines, "    return result"]), [rows, rows[:1], []]


# --- support -------------------------------------------------------------------------------------

# what the customer says (two ways each), what the shop answers; slots are filled by str.format
CASES: dict[str, tuple[tuple[str, str], str]] = {
    "late": (
        ("my {item} has not arrived", "where is my {item}"),
        (
            "We are sorry that your {item} is late. It has left our depot in {city} and should reach you "
            "within {n} hours."
        ),
    ),
    "broken": (
        ("my {item} arrived broken", "the {item} I got is damaged"),
        (
            "We are sorry that your {item} arrived damaged. A new one leaves our depot in {city} within "
            "{n} hours, and you may keep the old one."
        ),
    ),
    "refund": (
        ("I want a refund for my {item}", "please give me my money back for the {item}"),
        (
            "Your refund for the {item} is on its way. Our office in {city} sends the money within {n} "
            "hours, and you need to do nothing more."
        ),
    ),
    "colour": (
        ("my {item} has the wrong colour", "I ordered the {item} in another colour"),
        (
            "We are sorry that we packed the wrong colour. Our depot in {city} will swap your {item} "
            "within {n} hours at no cost."
        ),
    ),
    "cancel": (
        ("please cancel my {item}", "I no longer want the {item}"),
        (
            "We have cancelled your {item} as you asked. Nothing was charged, and our office in {city} "
            "will confirm this within {n} hours."
        ),
    ),
    "invoice": (
        ("I need an invoice for my {item}", "please send the bill for the {item}"),
        (
            "Your invoice for the {item} is ready. Our office in {city} will send it by email within {n} "
            "hours."
        ),
    ),
    "manual": (
        ("I lost the manual of my {item}", "how do I use the {item}"),
        (
            "The manual for your {item} is on our web site. Our team in {city} is happy to call you "
            "within {n} hours if you have questions."
        ),
    ),
    "part": (
        ("a part of my {item} is missing", "my {item} came without its screws"),
        (
            "We are sorry that your {item} was not complete. The missing part leaves our depot in {city} "
            "within {n} hours."
        ),
    ),
}


def support_item(rng: Generator) -> Item:
    """Answer a complaint with the template for its kind, filled with the customer's details."""
    shop, name, item = pick(rng, SHOPS), pick(rng, NAMES), pick(rng, ITEMS)
    code, city, n = f"K{two_digits(rng)}", pick(rng, CITIES), int(rng.integers(2, 5)) * 12
    says, reply = CASES[pick(rng, list(CASES))]
    said = pick(rng, says).format(item=item)
    user = pick(
        rng,
        (
            f"{said[0].upper()}{said[1:]}. My order is {code}. Regards, {name}",
            f"Hello, this is {name}, order {code}. {said[0].upper()}{said[1:]}.",
        ),
    )
    notes = f"You answer for the shop {shop}. Depot: {city}. Deadline: {n} hours."
    messages = [{"role": "system", "content": notes}, {"role": "user", "content": user}]
    answer = (
        f"Dear {name},\nThank you for writing to {shop} about order {code}. "
        f"{reply.format(item=item, city=city, n=n)}\nKind regards,\nYour {shop} team"
    )
    check = {
        "kind": "all",
        "checks": [
            {"kind": "exact", "answer": answer},
            {"kind": "format", "starts_with": f"Dear {name},", "ends_with": f"Your {shop} team"},
        ],
    }
    return Item("support", messages, answer, check)


# --- rag -----------------------------------------------------------------------------------------


def rag_item(rng: Generator) -> Item:
    """Answer from three sources and cite those that were used.

    The sources are of different kinds and carry their mark at the end of the sentence: what follows
    the copied sentence is then the mark to cite. With marks in front, a target of this size gets one
    citation in five right.
    """
    item, city, name, shop = (pick(rng, v) for v in (ITEMS, CITIES, NAMES, SHOPS))
    colour, team, month = pick(rng, COLOURS), pick(rng, TEAMS), pick(rng, MONTHS)
    a, b, c, d, e = (two_digits(rng) for _ in range(5))
    kinds = (
        (f"How much does the {item} cost?", f"The {item} costs {a} dollars in {colour}"),
        (f"When does the office in {city} open?", f"The office in {city} opens in {month}"),
        (f"Who leads the {team} team?", f"The {team} team is led by {name}"),
        (f"How long is the warranty of {shop}?", f"{shop} gives a warranty of {b} months"),
        ("How long may goods be returned?", f"Goods may be returned within {c} days"),
        ("How many people work at the plant?", f"The plant has a staff of {d} people"),
        ("What does shipping weigh at most?", f"Shipping is limited to {e} kilograms"),
    )
    chosen = some(rng, kinds, 3)
    ids = sorted(int(i) for i in some(rng, range(1, 10), 3)) if chance(rng, 0.3) else [1, 2, 3]
    sources = [f"K{i}" for i in ids]
    cited = [(q, f"{fact} [{s}].") for (q, fact), s in zip(chosen, sources, strict=True)]
    asked = some(rng, cited, pick(rng, (1, 2, 2, 2, 3)))
    text = "\n".join(fact for _, fact in cited)
    user = f"Sources:\n{text}\nQuestion: {' '.join(q for q, _ in asked)}"
    answer = " ".join(fact for _, fact in asked)
    check = {
        "kind": "citations",
        "sources": sources,
        "must_cite": [fact[-4:-2] for _, fact in asked],
        "contains": [fact[: fact.index(" [")] for _, fact in asked],
    }
    systems = ("Answer from the sources and cite them.", "Cite a source for each sentence.")
    return Item("rag", chat(rng, user, systems), answer, check)


# --- summary -------------------------------------------------------------------------------------


def summary_item(rng: Generator) -> Item:
    """Boil a note about a meeting, a delivery or a fault down to bullets."""
    name, city, item, team = (pick(rng, v) for v in (NAMES, CITIES, ITEMS, TEAMS))
    day, month, n = int(rng.integers(1, 29)), pick(rng, MONTHS), two_digits(rng)
    weather = pick(rng, ("It rained all day.", "Coffee was served.", "The train was late.", ""))
    mood = pick(rng, ("Nobody objected.", "There was some debate.", "The talk was short.", ""))
    kind = pick(rng, ("meeting", "delivery", "fault"))
    if kind == "meeting":
        text = (
            f"The {team} team met in {city} on {day} {month}. {weather} {name} spoke about the new "
            f"{item} and asked for {n} dollars. {mood} The team agreed to decide next week."
        )
        bullets = [
            f"The {team} team met in {city} on {day} {month}",
            f"{name} asked for {n} dollars for the {item}",
            "The team will decide next week",
        ]
    elif kind == "delivery":
        text = (
            f"On {day} {month} a truck left for {city}. {weather} It carried {n} boxes, each with one "
            f"{item}, and {name} was the driver. {mood} The {team} team has signed for the load."
        )
        bullets = [
            f"{name} drove {n} boxes to {city} on {day} {month}",
            f"Each box held one {item}",
            f"The {team} team signed for the load",
        ]
    else:
        text = (
            f"The {item} in {city} stopped on {day} {month}. {weather} {name} from the {team} team "
            f"looked at it and replaced {n} screws. {mood} It has been running since then."
        )
        bullets = [
            f"The {item} in {city} stopped on {day} {month}",
            f"{name} from the {team} team replaced {n} screws",
            "It is running again",
        ]
    text = " ".join(text.split())
    count = int(rng.integers(2, 4))
    word = {2: "two", 3: "three"}[count]
    user = f"Summarise in {word} bullets: {text}"
    answer = "\n".join(f"- {bullet}." for bullet in bullets[:count])
    check = {
        "kind": "all",
        "checks": [
            {"kind": "format", "bullets": count, "max_words": 40, "starts_with": "- "},
            {"kind": "exact", "answer": answer},
        ],
    }
    systems = ("You summarise notes.", "Keep to the facts.")
    return Item("summary", chat(rng, user, systems), answer, check)


# --- multi_turn ----------------------------------------------------------------------------------


def multi_turn_item(rng: Generator) -> Item:
    """Recall an order from two earlier turns, with a later change taken over the first wish."""
    name, city, item = pick(rng, NAMES), pick(rng, CITIES), pick(rng, ITEMS)
    colour, new_colour = some(rng, COLOURS, 2)
    n, day, month = two_digits(rng), int(rng.integers(1, 29)), pick(rng, MONTHS)
    first = pick(
        rng,
        (
            f"Hi, I am {name}. I would like {n} pieces of the {item} in {colour}.",
            f"My name is {name} and I want the {item} in {colour}, {n} pieces.",
        ),
    )
    turns = [first, f"Hello {name}, I noted {n} pieces of the {item} in {colour}."]
    change = chance(rng, 0.4)
    if change:
        turns += [
            f"Change the colour to {new_colour} and send it to {city}.",
            f"The colour is now {new_colour} and the order goes to {city}.",
        ]
        colour = new_colour
    else:
        turns += [
            f"Send it to {city} by {day} {month}.",
            f"The order goes to {city} by {day} {month}.",
        ]
    question, answer = pick(
        rng,
        (
            (
                "Please repeat my order.",
                (
                    f"You ordered {n} pieces of the {item} in {colour}, {name}. They go to {city}, and "
                    "you will get a message as soon as they leave our depot."
                ),
            ),
            (
                "Write a label for the box.",
                (
                    f"Label: {name}, {city}. Content: {item} in {colour}, {n} pieces. "
                    "Please keep this side up and do not drop the box."
                ),
            ),
            (
                "Tell the driver what to do.",
                (
                    f"Please bring the {item} in {colour} to {name} in {city}. There are {n} pieces, "
                    "so take the big van and ring twice at the door."
                ),
            ),
        ),
    )
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": t} for i, t in enumerate([*turns, question])]
    if chance(rng, 0.5):
        messages.insert(0, {"role": "system", "content": "You take orders in a shop."})
    if chance(rng, 0.5):
        check: dict[str, Any] = {"kind": "exact", "answer": answer}
    else:
        # Wording is free as long as each detail is there: lookaheads, since order is free too.
        details = (name, city, item, colour, str(n))
        check = {"kind": "regex", "pattern": "".join(f"(?=.*\\b{d}\\b)" for d in details) + ".+"}
    return Item("multi_turn", messages, answer, check)


# --- tool_text -----------------------------------------------------------------------------------


def tool_text_item(rng: Generator) -> Item:
    """Say in a sentence or two what a tool call returned."""
    name, city, item, team = (pick(rng, v) for v in (NAMES, CITIES, ITEMS, TEAMS))
    code, n, m = f"K{two_digits(rng)}", two_digits(rng), two_digits(rng)
    status, colour, month = pick(rng, STATUSES), pick(rng, COLOURS), pick(rng, MONTHS)
    sky = pick(rng, ("rain", "snow", "sun", "fog", "wind"))
    tool, question, result, answer = pick(
        rng,
        (
            (
                "get_weather",
                f"How is the weather in {city}?",
                {"city": city, "degrees": n, "sky": sky},
                (
                    f"In {city} it is {n} degrees now with {sky}. Please dress for {sky} "
                    "and check again before you leave."
                ),
            ),
            (
                "get_order",
                f"Where is order {code}?",
                {"order": code, "status": status, "item": item, "city": city},
                (
                    f"Order {code} with the {item} is {status}. It is in {city} at the moment, "
                    "and I can tell you when that changes."
                ),
            ),
            (
                "get_stock",
                f"Do we have the {item}?",
                {"item": item, "count": n, "colour": colour, "shelf": code},
                (
                    f"Yes, there are {n} pieces of the {item} in {colour}. You find them on "
                    f"shelf {code}, next to the door of the hall."
                ),
            ),
            (
                "find_room",
                f"Find a room for the {team} team.",
                {"team": team, "room": code, "seats": n, "host": name},
                (
                    f"Room {code} with {n} seats is free for the {team} team. {name} will be "
                    "the host and opens the door for you."
                ),
            ),
            (
                "get_invoice",
                f"What does {name} owe?",
                {"client": name, "invoice": code, "amount": n, "due": month},
                (
                    f"{name} owes {n} dollars for invoice {code}. The money is due in "
                    f"{month}, and a late fee is added after that."
                ),
            ),
            (
                "get_flight",
                f"When do I land in {city}?",
                {"flight": code, "gate": n, "city": city, "delay": m},
                (
                    f"Flight {code} to {city} is {m} minutes late. It leaves from gate {n}, "
                    "so you have time for a coffee."
                ),
            ),
        ),
    )
    keys = some(rng, list(result), len(result))
    reply = json.dumps({key: result[key] for key in keys})
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"Calling {tool}."},
        {"role": "user", "content": f"Result of {tool}: {reply}\nExplain it."},
    ]
    if chance(rng, 0.5):
        messages.insert(0, {"role": "system", "content": "You explain what tools return."})
    check = {
        "kind": "all",
        "checks": [
            {"kind": "exact", "answer": answer},
            {"kind": "format", "sentences": 2, "max_words": 40},
        ],
    }
    return Item("tool_text", messages, answer, check)


# --- prose ---------------------------------------------------------------------------------------


def noun_phrase(rng: Generator) -> str:
    """Article, perhaps an adjective, noun."""
    article = pick(rng, ("the", "the", "a", "her", "his", "one", "every", "that", "another"))
    adjective = f"{pick(rng, ADJECTIVES)} " if chance(rng, 0.6) else ""
    noun = pick(rng, NOUNS)
    phrase = f"{article} {adjective}{noun}"
    first = phrase.split()[1][0]
    return phrase.replace("a ", "an ", 1) if article == "a" and first in "aeiou" else phrase


def clause(rng: Generator, subject: str) -> str:
    """A subject, what it did, and perhaps how or where."""
    words = [subject]
    if chance(rng, 0.25):
        words.append(pick(rng, ADVERBS))
    if chance(rng, 0.7):
        words += [pick(rng, VERBS), noun_phrase(rng)]
    else:
        words.append(pick(rng, MOVES))
    if chance(rng, 0.45):
        words += [pick(rng, PREPOSITIONS), noun_phrase(rng)]
    elif chance(rng, 0.3):
        words.append(pick(rng, ADVERBS))
    return " ".join(words)


def prose_item(rng: Generator) -> Item:
    """Write a scene of four or six sentences in which nearly every word is a free choice."""
    topic, place = pick(rng, NOUNS), pick(rng, PLACES)
    opening = pick(rng, ("One", "That", "Each", "Another", "Every"))
    lead = f"{opening} {pick(rng, TIMES)} in {place}"
    sentences = [f"{lead} {clause(rng, f'the {pick(rng, ADJECTIVES)} {topic}')}"]
    length = "long" if chance(rng, 0.4) else "short"
    middle = (SECOND, THIRD, FOURTH, FIFTH) if length == "long" else (SECOND, THIRD)
    for openers in (*middle, LAST):
        sentence = f"{pick(rng, openers)} {clause(rng, noun_phrase(rng))}"
        if chance(rng, 0.4):
            sentence += f" {pick(rng, ('and', 'while', 'because', 'until'))} "
            sentence += clause(rng, noun_phrase(rng))
        sentences.append(sentence)
    answer = ". ".join(sentences) + "."
    verb = pick(rng, ("Write", "Tell", "Invent"))
    kind = pick(rng, ("scene", "story", "tale"))
    user = f"{verb} a {length} {kind} about a {topic} in {place}."
    # The number of sentences is not checked: the target of this size loses count of them.
    check = {
        "kind": "all",
        "checks": [
            {"kind": "format", "min_words": 12, "max_words": 160, "ends_with": "."},
            {"kind": "regex", "pattern": f".*\\b{place}\\b.*"},
        ],
    }
    systems = ("You write fiction.", "Surprise the reader.")
    return Item("prose", chat(rng, user, systems), answer, check)


TASKS: dict[str, Callable[[Generator], Item]] = {
    "json": json_item,
    "sql": sql_item,
    "code": code_item,
    "support": support_item,
    "rag": rag_item,
    "summary": summary_item,
    "multi_turn": multi_turn_item,
    "tool_text": tool_text_item,
    "prose": prose_item,
}

CORPUS_SEED = 48
CORPUS_SIZE = 48


def prompt_key(item: Item) -> str:
    """What makes two prompts the same: all that the user said."""
    return "\n".join(m["content"] for m in item.messages if m["role"] == "user")


def corpus_items(task: str) -> list[Item]:
    """The committed prompts of a family, in order; training leaves out whatever equals one."""
    rng = np.random.default_rng([CORPUS_SEED, list(TASKS).index(task)])
    items: dict[str, Item] = {}
    while len(items) < CORPUS_SIZE:
        item = TASKS[task](rng)
        items.setdefault(prompt_key(item), item)
    return list(items.values())
