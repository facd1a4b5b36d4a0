"""Makes assets/math_qa.jsonl: 200 small arithmetic word problems, the same for the same seed.

    python assets/make_math_qa.py --seed 0

They let math_qa run and be tested without a download; their shape (a short story, two or three
steps, one number) is that of GSM8K. The environment trains on the first 150 and evaluates on the
last 50. Answers are whole numbers, amounts of money and fractions.
"""

import argparse
import json
import random
from fractions import Fraction
from pathlib import Path

NAMES = ["Ada", "Bo", "Chidi", "Dana", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jun", "Kira"]
THINGS = ["apples", "stamps", "marbles", "pencils", "shells", "postcards", "buttons", "plums"]


def shared(draw: random.Random) -> tuple[str, str]:
    friends, each, left = draw.randint(2, 9), draw.randint(3, 25), draw.randint(1, 9)
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    return (
        f"{name} gives {each} {things} to each of {friends} friends and keeps {left}. "
        f"How many {things} did {name} have at first?"
    ), str(friends * each + left)


def bought(draw: random.Random) -> tuple[str, str]:
    cents, number, paid = 5 * draw.randint(5, 95), draw.randint(2, 9), 50
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    change = 100 * paid - cents * number
    return (
        f"{name} buys {number} bags of {things} at ${cents / 100:.2f} a bag and pays with "
        f"${paid}. How many dollars of change does {name} get?"
    ), f"{change / 100:.2f}"


def produced(draw: random.Random) -> tuple[str, str]:
    hourly, hours, days = 10 * draw.randint(8, 60), draw.randint(4, 12), draw.randint(2, 9)
    things = draw.choice(THINGS)
    return (
        f"A factory packs {hourly} boxes of {things} an hour, {hours} hours a day. "
        f"How many boxes does it pack in {days} days?"
    ), f"{hourly * hours * days:,}"


def eaten(draw: random.Random) -> tuple[str, str]:
    slices = draw.randint(6, 12)
    first, second = draw.randint(1, slices // 2), draw.randint(1, slices // 2 - 1)
    one, other = draw.sample(NAMES, 2)
    return (
        f"A cake is cut into {slices} equal slices. {one} eats {first} and {other} eats {second}. "
        "Which fraction of the cake is left?"
    ), str(Fraction(slices - first - second, slices))


def older(draw: random.Random) -> tuple[str, str]:
    age, times, years = draw.randint(4, 15), draw.randint(2, 4), draw.randint(2, 12)
    one, other = draw.sample(NAMES, 2)
    return (
        f"{one} is {age} years old and {other} is {times} times as old. "
        f"How old will {other} be in {years} years?"
    ), str(age * times + years)


def reduced(draw: random.Random) -> tuple[str, str]:
    price, percent = 20 * draw.randint(2, 40), draw.choice([5, 10, 15, 20, 25, 30, 40])
    return (
        f"A coat costs ${price}. In the sale it costs {percent}% less. "
        "How many dollars does it cost in the sale?"
    ), str(price * (100 - percent) // 100)


def travelled(draw: random.Random) -> tuple[str, str]:
    speed, hours, farther = 5 * draw.randint(4, 20), draw.randint(2, 9), draw.randint(5, 80)
    return (
        f"A train goes {speed} km an hour for {hours} hours and then {farther} km farther. "
        "How many km does it go in all?"
    ), str(speed * hours + farther)


def cooled(draw: random.Random) -> tuple[str, str]:
    start, fall, hours = draw.randint(-5, 12), draw.randint(2, 5), draw.randint(2, 6)
    return (
        f"At noon it is {start} degrees. Each hour it gets {fall} degrees colder. "
        f"How many degrees is it after {hours} hours?"
    ), str(start - fall * hours)


STORIES = [shared, bought, produced, eaten, older, reduced, travelled, cooled]


def make(seed: int, number: int) -> list[dict]:
    draw, rows = random.Random(seed), {}
    while len(rows) < number:
        question, answer = draw.choice(STORIES)(draw)
        rows[question] = {"question": question, "answer": answer}  # no question twice
    return list(rows.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--number", type=int, default=200, help="of problems")
    output = Path(__file__).with_name("math_qa.jsonl")
    parser.add_argument("--output", type=Path, default=output, help="the file")
    arguments = parser.parse_args()
    rows = make(arguments.seed, arguments.number)
    arguments.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
