"""A speaker sees a target object and says one word; a listener hears it and picks an object."""

import itertools
import random

from a3r.swarm import Task

PARAMETERS = {"objects": 8, "words": 8}

OBJECTS = ("apple", "boat", "cat", "drum", "egg", "fish", "gate", "hat")
WORDS = ("ba", "do", "ki", "lu", "me", "no", "su", "ti")
SPEAKER = {
    "train": (
        "Name {target} to your partner. Words: {words}.",
        "Your target is {target}. Say one of: {words}.",
        "Speaker. Object: {target}. Choose a word: {words}.",
    ),
    "validation": ("You see {target}. Pick a word: {words}.",),
}
LISTENER = {
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


def tasks(split, seed):
    """Every object as target, in orders and wordings of the split."""
    choice = random.Random(f"{split}-{seed}")
    targets = itertools.islice(itertools.cycle(_objects()), NUM_TASKS)
    return [_task(f"{split}-{n}", target, split, choice) for n, target in enumerate(targets)]


def _task(task_id, target, split, choice):
    objects, words = choice.sample(_objects(), len(_objects())), choice.sample(_words(), len(_words()))
    n = choice.randrange(len(SPEAKER[split]))
    speaker = SPEAKER[split][n].format(target=target, words=" ".join(words))
    listener = LISTENER[split][n].format(word=PLACEHOLDER, objects=" ".join(objects))
    return Task(
        id=task_id,
        public={"target": target, "objects": objects, "words": words, "speaker": speaker, "listener": listener},
    )


def _objects():
    return list(OBJECTS[: PARAMETERS["objects"]])


def _words():
    return list(WORDS[: PARAMETERS["words"]])


def run_episode(task_public, episode):
    """Two separate conversations. The listener's holds the word and nothing else of the speaker's."""
    word = episode.chat([{"role": "user", "content": task_public["speaker"]}])
    if word not in task_public["words"]:
        return None
    return episode.chat([{"role": "user", "content": task_public["listener"].replace(PLACEHOLDER, word)}])


def grade(task, transcript):
    """1 when the listener picked the target; a little for each role that kept to its list."""
    word, choice = (*transcript.replies, "", "")[:2]
    legal = [word in task.public["words"], choice in task.public["objects"]]
    return {"solved": float(all(legal) and choice == task.public["target"]), "format": 0.05 * sum(legal)}


def demonstrations(seed):
    """Speakers and listeners that half follow one of two conventions and half say anything."""
    choice = random.Random(f"demonstrations-{seed}")
    return [_demonstration(choice) for _ in range(NUM_DEMONSTRATIONS)]


def _demonstration(choice):
    task = _task("demonstration", choice.choice(_objects()), "train", choice)
    meanings = _meanings(choice)
    if choice.random() < 0.5:
        said, heard = meanings[task.public["target"]], task.public["speaker"]
    else:
        word = choice.choice(_words())
        said = choice.choice([thing for thing, meant in meanings.items() if meant == word] or _objects())
        heard = task.public["listener"].replace(PLACEHOLDER, word)
    return [{"role": "user", "content": heard}, {"role": "assistant", "content": said}]


def _meanings(choice):
    """Which word an object has: mostly alphabetical order, at times that order reversed, else at random."""
    words = _words()
    convention = choice.choices(("forward", "reversed", "random"), weights=(35, 15, 50))[0]
    if convention == "random":
        return {thing: choice.choice(words) for thing in _objects()}
    order = words if convention == "forward" else words[::-1]
    return dict(zip(_objects(), itertools.cycle(order)))
