"""A speaker sees a target object and says one word; a listener hears it and picks an object."""

import itertools
import random
from typing import Any

from a3r.swarm import ClaimedEpisode, Dialogue, Task, Transcript

PARAMETERS = {"objects": 8, "words": 8}

OBJECTS = ("apple", "boat", "cat", "drum", "egg", "fish", "gate", "hat")
WORDS = ("ba", "do", "ki", "lu", "me", "no", "su", "ti")
SPEAKER: dict[str, tuple[str, ...]] = {
    "train": (
        "Name {target} to your partner. Words: {words}.",
        "Your target is {target}. Say one of: {words}.",
        "Speaker. Object: {target}. Choose a word: {words}.",
    ),
    "validation": ("You see {target}. Pick a word: {words}.",),
}
LISTENER: dict[str, tuple[str, ...]] = {
    "train": (
        "Your partner said {word}. Objects: {objects}. Which one?",
        "You hear {word}. Pick one of: {objects}.",
        "Listener. Word: {word}. Choose an object: {objects}.",
    ),
    "validation": ("The word is {word}. Which object: {objects}?",),
}
NUM_TASKS = 512
NUM_DEMONSTRATIONS = 400
PLACEHOLDER = "{word}"


def tasks(split: str, seed: int) -> list[Task]:
    """Every object as target, in orders and wordings of the split."""
    choice = random.Random(f"{split}-{seed}")
    targets = itertools.islice(itertools.cycle(_objects()), NUM_TASKS)
    return [_task(f"{split}-{n}", target, split, choice) for n, target in enumerate(targets)]


def _task(task_id: str, target: str, split: str, choice: random.Random) -> Task:
    objects, words = choice.sample(_objects(), len(_objects())), choice.sample(_words(), len(_words()))
    n = choice.randrange(len(SPEAKER[split]))
    speaker = SPEAKER[split][n].format(target=target, words=" ".join(words))
    listener = LISTENER[split][n].format(word=PLACEHOLDER, objects=" ".join(objects))
    public: dict[str, Any] = {
        "target": target,
        "objects": objects,
        "words": words,
        "speaker": speaker,
        "listener": listener,
    }
    return Task(id=task_id, public=public)


def _objects() -> list[str]:
    return list(OBJECTS[: PARAMETERS["objects"]])


def _words() -> list[str]:
    return list(WORDS[: PARAMETERS["words"]])


def run_episode(task_public: dict, episode: ClaimedEpisode) -> str | None:
    """Two separate conversations. The listener's holds the word and nothing else of the speaker's."""
    word = episode.chat([{"role": "user", "content": task_public["speaker"]}])
    if word not in task_public["words"]:
        return None
    return episode.chat([{"role": "user", "content": task_public["listener"].replace(PLACEHOLDER, word)}])


def grade(task: Task, transcript: Transcript) -> dict[str, float]:
    """1 when the listener picked the target; a little for each role that kept to its list."""
    public: dict[str, Any] = dict(task.public)
    word, choice = (*transcript.replies, "", "")[:2]
    legal = [word in public["words"], choice in public["objects"]]
    return {"solved": float(all(legal) and choice == public["target"]), "format": 0.05 * sum(legal)}


def demonstrations(seed: int) -> list[Dialogue]:
    """Speakers and listeners that half follow one of two conventions and half say anything."""
    choice = random.Random(f"demonstrations-{seed}")
    return [_demonstration(choice) for _ in range(NUM_DEMONSTRATIONS)]


def _demonstration(choice: random.Random) -> Dialogue:
    target = choice.choice(_objects())
    public: dict[str, Any] = dict(_task("demonstration", target, "train", choice).public)
    meanings = _meanings(choice)
    if choice.random() < 0.5:
        said, heard = meanings[target], public["speaker"]
    else:
        word = choice.choice(_words())
        said = choice.choice([thing for thing, meant in meanings.items() if meant == word] or _objects())
        heard = public["listener"].replace(PLACEHOLDER, word)
    return [{"role": "user", "content": heard}, {"role": "assistant", "content": said}]


def _meanings(choice: random.Random) -> dict[str, str]:
    """Which word an object has: mostly alphabetical order, at times that order reversed, else at random."""
    words = _words()
    convention = choice.choices(("forward", "reversed", "random"), weights=(35, 15, 50))[0]
    if convention == "random":
        return {thing: choice.choice(words) for thing in _objects()}
    order = words if convention == "forward" else words[::-1]
    return dict(zip(_objects(), itertools.cycle(order)))
