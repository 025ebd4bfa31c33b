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
    "Explain {} in simple words.",
    "What are the benefits of {}?",
    "What problems can {} cause?",
    "How do I get started with {}?",
    "Give me a short history of {}.",
    "Write a letter to a friend about {}.",
    "What is the difference between {} and its alternatives?",
    "Who should care about {}, and why?",
    "Suggest ten titles for an article about {}.",
    "Write an advertisement for a course on {}.",
    "What questions do people often ask about {}?",
    "Plan a weekend that has to do with {}.",
    "Write an interview with an expert on {}.",
    "What is a good way to remember the main ideas of {}?",
    "Give two arguments for and two against {}.",
    "What will {} look like in fifty years?",
)
_TRAIN_THINGS = (
    "gravity", "bread", "a lighthouse", "the French Revolution", "photosynthesis", "chess", "a violin",
    "the desert", "electricity", "honey", "the printing press", "friendship", "a volcano", "probability",
    "the moon", "a library", "recycling", "the heart", "a train journey", "coffee", "democracy", "a spider",
    "the alphabet", "winter", "a computer program", "trade", "the ocean", "sleep", "a bridge", "music",
    "the Roman Empire", "fractions", "tea", "the telephone", "ballet", "wolves", "a hospital", "the Silk Road",
    "magnets", "rain", "swimming", "a robot", "pottery", "the brain", "taxes", "a lawyer", "cooking pasta",
    "the guitar", "antibiotics", "a castle", "the northern lights", "football", "yoga", "an airport",
    "geometry", "the internet", "a garden shed", "bees", "diplomacy", "the violin family", "knitting",
    "insulin", "a mirror", "the Amazon river", "elections", "glass", "a clock", "dinosaurs", "the euro",
    "dancing", "batteries", "an apple pie", "the Arctic", "patience", "a database", "wine", "black holes",
    "a passport", "carpentry", "storms", "the immune system", "writing a novel", "a submarine", "meditation",
    "genetics", "a zoo", "paper", "marketing", "the piano", "frogs", "rockets", "a budget", "Greek myths",
    "iron", "an orchestra", "cycling to work", "home schooling", "a museum", "chocolate", "insurance",
    "the sun", "tennis", "trees", "a job interview", "painting", "cells", "the Olympic games", "rice",
    "moral courage", "statistics", "a ferry", "the Renaissance", "salt", "dogs", "a search engine",
    "time zones", "theatre", "hiking", "vitamins", "an elevator", "justice", "the calendar", "sharks",
    "a hotel", "fashion", "algebra", "mushrooms", "online shopping", "a telescope", "jazz", "the lungs",
    "islands", "cotton", "teamwork", "a newspaper", "wind turbines", "horses", "compound interest",
    "a dictionary", "snow", "programming in Python", "loneliness", "oil", "the Great Wall", "street food",
    "plastic", "a courtroom", "birds", "remote work", "the kidney", "a lottery", "skiing", "soil", "privacy",
    "a steam engine", "potatoes", "hospitals in the Middle Ages", "video games", "pensions", "comets",
    "weddings",
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
