"""Questions: some to train on, next to those that the target makes up itself, and others to measure on."""

from __future__ import annotations

import itertools

_TRAIN_FORMS = (
    "What is {}?",
    "Describe {} to a child.",
    "Write a short poem about {}.",
    "List five facts about {}.",
    "Why does {} matter?",
    "Write a paragraph about {}.",
    "How would you teach {} in school?",
    "Tell me a story in which {} plays a part.",
)
_TRAIN_THINGS = (
    "gravity", "bread", "a lighthouse", "the French Revolution", "photosynthesis", "chess", "a violin", "the desert",
    "electricity", "honey", "the printing press", "friendship", "a volcano", "probability", "the moon", "a library",
    "recycling", "the heart", "a train journey", "coffee", "democracy", "a spider", "the alphabet", "winter",
    "a computer program", "trade", "the ocean", "sleep", "a bridge", "music", "the Roman Empire", "fractions",
)  # fmt: skip
_HELD_OUT_FORMS = (
    "Explain how {} works.",
    "Give me three tips about {}.",
    "What are the advantages and disadvantages of {}?",
    "Summarize what is known about {} in four sentences.",
    "Write an email to a colleague about {}.",
    "Compare {} with something similar.",
    "What should a beginner know about {}?",
    "Write a dialogue between two people who disagree about {}.",
    "How has {} changed over time?",
    "Name a common mistake with {} and how to avoid it.",
)
_HELD_OUT_THINGS = (
    "a bicycle", "vaccination", "solar power", "public speaking", "gardening", "a microscope", "saving money",
    "the water cycle", "running a marathon", "machine learning", "cheese", "city traffic", "learning Spanish",
    "a refrigerator", "earthquakes", "camping", "the stock market", "photography", "a healthy breakfast", "whales",
)  # fmt: skip

TRAIN = tuple(form.format(thing) for thing, form in itertools.product(_TRAIN_THINGS, _TRAIN_FORMS))
HELD_OUT = tuple(form.format(thing) for thing, form in itertools.product(_HELD_OUT_THINGS, _HELD_OUT_FORMS))
