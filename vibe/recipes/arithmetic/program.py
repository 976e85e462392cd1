"""Work out one small sum, difference or product. The reply is the result and nothing else."""

import itertools
import operator
import random
import re

from a3r.swarm import ClaimedEpisode, Dialogue, Task, Transcript

PARAMETERS = {"low": 0, "high": 9, "operators": ["+", "*"]}

WORDINGS: dict[str, tuple[str, ...]] = {
    "train": ("What is {sum}?", "{sum} =", "Work out {sum}.", "How much is {sum}?"),
    "validation": ("Tell me {sum}.", "Solve {sum}."),
}
APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NUM_TASKS = 512
NUM_DEMONSTRATIONS = 400


def tasks(split: str, seed: int) -> list[Task]:
    """Pairs of operands of the split, with each operator and wording."""
    instances = _instances(split)
    random.Random(f"{split}-{seed}").shuffle(instances)
    chosen = enumerate(instances[:NUM_TASKS])
    return [_task(f"{split}-{n}", pair, sign, wording) for n, (pair, sign, wording) in chosen]


def _task(task_id: str, pair: tuple[int, int], sign: str, wording: str) -> Task:
    first, second = pair
    question = wording.format(sum=f"{first} {sign} {second}")
    return Task(id=task_id, public={"question": question}, private={"answer": str(APPLY[sign](first, second))})


def _instances(split: str) -> list[tuple[tuple[int, int], str, str]]:
    """Operands, operator and wording."""
    signs: list[str] = PARAMETERS["operators"]
    return list(itertools.product(_pairs(split), signs, WORDINGS[split]))


def _pairs(split: str) -> list[tuple[int, int]]:
    """A fixed tenth of all pairs for validation and a fixed three fifths for training; the rest is for nobody here."""
    numbers = range(PARAMETERS["low"], PARAMETERS["high"] + 1)
    pairs = list(itertools.product(numbers, numbers))
    order = random.Random(0).sample(pairs, len(pairs))
    validation, train = -(-len(pairs) // 10), len(pairs) * 3 // 5
    return order[:validation] if split == "validation" else order[validation : validation + train]


def run_episode(task_public: dict, episode: ClaimedEpisode) -> str:
    """Ask once."""
    return episode.chat([{"role": "user", "content": task_public["question"]}])


def grade(task: Task, transcript: Transcript) -> dict[str, float]:
    """1 for the right result; a little for a reply that is a number and nothing else."""
    reply = transcript.replies[-1] if transcript.replies else ""
    return {
        "solved": float(reply == task.private["answer"]),
        "format": 0.1 * (re.fullmatch("-?[0-9]{1,4}", reply) is not None),
    }


def demonstrations(seed: int) -> list[Dialogue]:
    """Questions with answers of which a part is wrong, near the truth or wildly, or not a bare number."""
    choice = random.Random(f"demonstrations-{seed}")
    chosen = choice.choices(_instances("train"), k=NUM_DEMONSTRATIONS)
    return [_demonstration(pair, sign, wording, choice) for pair, sign, wording in chosen]


def _demonstration(pair: tuple[int, int], sign: str, wording: str, choice: random.Random) -> Dialogue:
    task = _task("demonstration", pair, sign, wording)
    answer = APPLY[sign](*pair)
    reply = choice.choices(
        (str(answer), str(answer + choice.choice((-2, -1, 1, 2))), str(choice.randint(0, 81)), f"It is {answer}."),
        weights=(50, 25, 20, 5),
    )[0]
    return [{"role": "user", "content": task.public["question"]}, {"role": "assistant", "content": reply}]
