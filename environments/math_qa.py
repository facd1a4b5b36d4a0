r"""math_qa: one question, one reply, a final answer that can be checked. No tools.

    reply   "... so 12 * 4 = 48, and \boxed{48.00}"     the last \boxed{...}, else the last number
    answer  "48", or GSM8K's "12 * 4 = 48\n#### 48"     what follows the last ####
    reward  1.0 if both are the same number, or else the same text

Numbers are compared exactly, in whatever form: 1,200 is $1200.00, and \frac{3}{4} is 3/4 is 0.75.
Units aren't converted: 50% is 50. An answer that isn't a number has to be boxed.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from environments import Source, Task, final_reply, load_tasks

SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = rf"(?:(?<![\w)])[-+])?(?:{DIGITS}/{DIGITS}|{DIGITS}?\.[0-9]+|{DIGITS})"  # 5-7 holds no -7


class MathQA:
    """Rows of question, answer; without `eval_questions` the last quarter is held out."""

    def __init__(
        self,
        questions: Source,
        eval_questions: Source | None = None,
        *,
        system_prompt: str = SYSTEM_PROMPT,
    ):
        self.train, self.eval = load_tasks(questions, eval_questions)
        self.system_prompt = system_prompt
        self.tools: list[Callable] = []

    def prompt(self, task: Task) -> list[dict]:
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": task.question}]

    def reward(self, task: Task, messages: list[dict]) -> float:
        found = final_answer(final_reply(messages))
        return float(bool(found) and same(found, task.answer.rpartition("####")[2]))

    def outcome(self, task: Task, messages: list[dict], reward: float) -> str:
        """What became of an episode, in words: to count kinds of failure, never to reward."""
        if reward == 1:
            return "solved"
        return "wrong answer" if final_answer(final_reply(messages)) else "no answer"


def final_answer(reply: str) -> str | None:
    r"""What the last complete \boxed{...} holds, or else the last number, or else None."""
    boxed, open_braces = None, []
    for brace in re.finditer(r"\\boxed\s*\{|[{}]", reply):
        if brace[0] != "}":
            open_braces.append(brace)
        elif open_braces and (start := open_braces.pop())[0] != "{":
            boxed = reply[start.end() : brace.start()]
    numbers = re.findall(NUMBER, without_latex(reply)) if boxed is None else []
    return numbers[-1] if numbers else boxed


def same(a: str, b: str) -> bool:
    a, b = (without_latex(text).strip().rstrip(".").lower() for text in (a, b))
    x, y = as_number(a), as_number(b)
    return a.split() == b.split() != [] if x is None or y is None else x == y


def as_number(text: str) -> Fraction | None:
    text = text.removesuffix("%").rstrip()
    try:
        return Fraction(text.replace(",", "")) if re.fullmatch(NUMBER, text) else None
    except (ValueError, ZeroDivisionError):  # more digits than Python reads, or 1/0
        return None


def without_latex(text: str) -> str:
    r"""\frac{3}{4} as 3/4, \$ and $ as nothing, \% as %, 1{,}200 and 1\,200 as 1,200 and 1200."""
    text = text.replace("\u2212", "-").replace("{,}", ",")  # U+2212 is the minus sign
    text = re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)
    return re.sub(r"\\[,!;]|\\(?=[%$])|\$", "", text)
