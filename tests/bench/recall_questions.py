"""Questions about what left a view, for ``tests.bench.recall``: how they are drawn, and what answers them.

Nothing is asked of a model, and every draw is seeded. A ``Question`` is a query as a model would write it, and the
``evidence``: a text that the page has to show.

- ``drawn`` takes them from any chat. It draws sentences of user and assistant items. Half of the queries are words of
  that sentence, the other half words of the item before it, which it answers. Of the eight rarest words three are
  drawn, and each loses or gets an ending; in scripts without spaces, three pieces of two to four characters are joined.
  A question whose words all stand in another item as well is not asked: nobody could tell what it is about.
- ``talk`` generates a chat of two people over many days, and asks for times, places and amounts that one of them named
  once: in other forms of the words, and half of the time in words that only the turn before the answer holds.
- ``entities_needed`` are what the real continuation of an agent's session needs and its view no longer has.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench import metrics

Message = dict[str, Any]

MOST_OF_A_CHAT = 60
"""Questions that are drawn of one conversation at most."""

RAREST, WORDS = 8, 3
SENTENCE = re.compile(r"[^.!?。！？\n]+[.!?。！？]?")
UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0e7f]{2,}")
WORD = re.compile(r"[A-Za-z]{4,}")
SHORTEST, LONGEST = 24, 300
"""Characters of a sentence that can be evidence; a third of that in scripts without spaces."""


@dataclass(frozen=True)
class Question:
    """A query, and the text that answers it. ``kind`` says how it was drawn."""

    query: str
    evidence: str
    kind: str


def drawn(name: str, messages: Sequence[Message]) -> list[Question]:
    """Return the questions of one chat."""
    pick = random.Random(name)
    texts = [metrics.content(message) for message in messages]
    parts = [set(_parts(text)) for text in texts]
    frequency = Counter(part for each in parts for part in each)
    questions: list[Question] = []
    places = [at for at, message in enumerate(messages) if at and message["role"] in ("user", "assistant")]
    for at in pick.sample(places, len(places)):
        sentences = [part.strip() for part in SENTENCE.findall(texts[at]) if _is_evidence(part.strip())]
        if not sentences or len(questions) == MOST_OF_A_CHAT:
            continue
        evidence = pick.choice(sentences)
        asks_before = pick.random() < 0.5
        source = texts[at - 1][-LONGEST:] if asks_before else evidence
        chosen = sorted(set(_parts(source)), key=lambda part: (frequency[part], part))[:RAREST]
        if len(chosen) < WORDS:
            continue
        words = pick.sample(chosen, WORDS)
        if sum(parts[other].issuperset(words) for other in range(len(texts))) > 1:
            continue
        kind = "answer to the words" if asks_before else "the words themselves"
        questions.append(Question(_query(words, pick), evidence, kind))
    return questions


def _is_evidence(sentence: str) -> bool:
    least = SHORTEST // 3 if UNSPACED.search(sentence) else SHORTEST
    return least <= len(sentence) <= LONGEST


def _parts(text: str) -> Iterator[str]:
    """Yield the words of *text* that a query may use, pieces of three characters in scripts without spaces."""
    for word in WORD.findall(text):
        yield word.lower()
    for run in UNSPACED.findall(text):
        yield from (run[at : at + 3] for at in range(0, len(run) - 2, 2))


def _query(words: Sequence[str], pick: random.Random) -> str:
    """Return a query of *words*, each in another form."""
    if UNSPACED.search(words[0]):
        return "".join(words)
    return " ".join(_other_form(word) if pick.random() < 0.5 else word for word in words)


def _other_form(word: str) -> str:
    for ending in ("ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 4:
            return word.removesuffix(ending)
    return word + "s"


PEOPLE = ("Amira", "Boris", "Chen", "Dilek", "Elena", "Farid", "Greta", "Hiro", "Ines", "Jonas")
PLACES = ("Lisbon", "Graz", "Bergen", "Ghent", "Porto", "Tartu", "Bologna", "Utrecht", "Seville", "Brno")
THINGS = (
    "kayak", "pottery class", "violin", "greenhouse", "telescope", "marathon", "vegetable garden", "choir", "motorbike",
    "sailing licence", "photo exhibition", "beehive", "cooking course", "tent", "climbing group", "drawing lessons",
    "puppy", "book club", "theatre play", "old camper", "chess tournament", "food stall", "knitting circle", "blog",
)  # fmt: skip
DEEDS = (("visited", "visit"), ("started", "start"), ("painted", "paint"), ("planned", "plan"), ("joined", "join"))
DEEDS += (("moved", "move"), ("tried", "try"), ("organised", "organise"), ("studied", "study"), ("stopped", "stop"))
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SMALL_TALK = (
    "{other}: That sounds lovely, {one}! I hope the weather holds for it.",
    "{one}: My {thing} keeps me busy these days, as you know.",
    "{other}: I was thinking about {place} again, it must be beautiful there at this time of the year.",
    "{one}: Thanks, that means a lot to me. How is your family doing?",
    "{other}: They are fine! The kids talk about the {thing} all the time.",
    "{one}: Work was exhausting this week, but I took a long walk on {day}.",
    "{other}: You should rest more, really. Shall we talk about the {thing} another time?",
    "{one}: I saw some photos from {place} and thought of you.",
)


def talk(seed: int) -> tuple[list[Message], list[Question]]:
    """Return a chat of about 300 turns, and the questions about it."""
    pick = random.Random(seed)
    one, other = pick.sample(PEOPLE, 2)
    turns: list[str] = [f"{one}: Hey {other}! It is good to hear from you. What have you been up to?"]
    questions: list[Question] = []
    for thing in pick.sample(THINGS, len(THINGS)):
        asks = (_plain_fact, _asked_fact, _late_fact)
        for tell in pick.sample(asks, 2):
            turns += _small_talk(pick, one, other)
            exchange, question = tell(pick, *pick.sample((one, other), 2), thing)
            turns += exchange
            questions.append(question)
    turns += [turn for _ in range(12) for turn in _small_talk(pick, one, other)]
    roles = {one: "user", other: "assistant"}
    return [{"role": roles[turn.partition(":")[0]], "content": turn} for turn in turns], questions


def _small_talk(pick: random.Random, one: str, other: str) -> list[str]:
    facts = {"thing": pick.choice(THINGS), "place": pick.choice(PLACES), "day": pick.choice(DAYS)}
    turns = pick.sample(SMALL_TALK, pick.randrange(2, 6))
    return [turn.format(one=one, other=other, **facts) for turn in turns]


def _plain_fact(pick: random.Random, one: str, other: str, thing: str) -> tuple[list[str], Question]:
    """A fact in one turn, asked for in another form of its words."""
    (past, base), place, day = pick.choice(DEEDS), pick.choice(PLACES), f"{pick.choice(DAYS)} the {_date(pick)}"
    fact = f"{one}: On {day} I {past} something new in {place}, and it was all because of the {thing}."
    return [fact, f"{other}: Wow, how did that feel?"], Question(
        f"When did {one} {base} something in {place} because of the {thing}s?", fact, "the words themselves"
    )


def _asked_fact(pick: random.Random, one: str, other: str, thing: str) -> tuple[list[str], Question]:
    """A fact whose subject only the turn before it names."""
    amount, day = pick.randrange(100, 9_999), f"{pick.choice(DAYS)} the {_date(pick)}"
    question = f"{other}: How much did you pay for the {thing} in the end? You were comparing prices for so long."
    fact = f"{one}: It was {amount} euros, and I could take it home on {day}."
    return [question, fact], Question(f"What did {one} pay for the {thing}?", fact, "answer to the words")


def _late_fact(pick: random.Random, one: str, other: str, thing: str) -> tuple[list[str], Question]:
    """A fact that is told once its listener wants to hear it."""
    place, day = pick.choice(PLACES), f"{pick.choice(DAYS)} the {_date(pick)}"
    fact = f"{one}: We are all going to meet in {place} on {day}, everybody is invited!"
    turns = [f"{one}: I have news about the {thing} that we were planning.", f"{other}: Oh, tell me!", fact]
    return turns, Question(f"Where is {one}'s news about planning the {thing}?", fact, "two turns after the words")


def _date(pick: random.Random) -> str:
    return f"{pick.randrange(1, 28)}th"


def entities_needed(history: Sequence[Message], future: Sequence[Message], view: Sequence[Message]) -> list[Question]:
    """Return what *future* needs of *history* and *view* no longer has, each under its own name.

    A name that only stands inside longer words, such as the figures of ``HAT028``, is no name that anybody asks for.
    """
    in_view, text = metrics.Held(view), "\n".join(map(metrics.plain, history))
    missing = [name for name in metrics.needed_later(history, future) if not in_view.has(name)]
    whole = [name for name in missing if re.search(rf"(?<!\w){re.escape(name)}", text)]
    return [Question(name, name, "an agent's entity") for name in whole]
