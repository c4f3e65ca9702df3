"""Short clean English about a handful of topics, for the demo: a question, and an answer put together by a grammar.

A topic has ways to ask, and slots; an answer takes one sentence of each slot, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Topic:
    questions: tuple[str, ...]
    slots: tuple[tuple[str, ...], ...]
    """An empty sentence leaves its slot out."""
    thought: str
    """What a thinking model says to itself first."""


TOPICS = (
    Topic(
        (
            "Explain what an octavo is.",
            "What is an octavo?",
            "Tell me what an octavo is.",
            "What does the word octavo mean?",
        ),
        (
            (
                "An octavo is a book made of sheets that are folded three times.",
                "An octavo is a book size.",
                "An octavo is a small book whose sheets are folded into eight leaves.",
            ),
            (
                "Each sheet gives eight leaves, which are sixteen pages.",
                "One printed sheet becomes eight leaves, or sixteen pages.",
            ),
            ("The name comes from the Latin word for eight.", "The word comes from Latin and means in eighths."),
            ("Most books on your table are about this size.", "It is small enough to hold in one hand.", ""),
        ),
        "They ask about a book size.",
    ),
    Topic(
        ("What is a quarto?", "Explain what a quarto is.", "Tell me what a quarto is."),
        (
            ("A quarto is a book made of sheets that are folded two times.", "A quarto is a larger book size."),
            ("Each sheet gives four leaves, which are eight pages.",),
            ("An octavo is half as large.", "Fold the sheet once more and you have an octavo.", ""),
        ),
        "They ask about a book size.",
    ),
    Topic(
        ("What is a folio?", "Explain what a folio is.", "Tell me what a folio is."),
        (
            ("A folio is a large book made of sheets that are folded once.",),
            ("Each sheet gives two leaves, which are four pages.",),
            ("Old maps and church books were often folios.", "It is too heavy to read in bed.", ""),
        ),
        "They ask about a book size.",
    ),
    Topic(
        ("How is a book made?", "Tell me how a book is made.", "How do you make a book?"),
        (
            ("First the pages are printed on large sheets of paper.", "It begins with large sheets of printed paper."),
            ("Then each sheet is folded and cut.", "The sheets are folded until the pages are in order."),
            ("The folded sheets are sewn together.", "A thread holds the folded sheets together."),
            ("At last the book gets a cover.", "A cover keeps the pages safe."),
        ),
        "I should go step by step.",
    ),
    Topic(
        ("Tell me about printing.", "How does printing work?", "What is printing?"),
        (
            ("Printing puts ink on paper.", "Printing makes many copies of one page."),
            (
                "Small metal letters are set in lines and covered with ink.",
                "The letters are set by hand, line by line.",
            ),
            ("Then a press pushes the paper onto the letters.", "A press brings paper and ink together."),
            ("One press can print thousands of pages in a day.", "This is how books became cheap.", ""),
        ),
        "They ask about a craft.",
    ),
    Topic(
        ("How do I fold paper?", "Tell me about folding paper.", "How often can I fold a sheet of paper?"),
        (
            ("Lay the sheet on a table and bring two edges together.", "Take a clean sheet and match its corners."),
            ("Press the fold with your finger.", "Run a finger along the fold to make it sharp."),
            ("Every fold makes twice as many layers.", "After three folds there are eight layers."),
            ("After seven folds it becomes too thick.", ""),
        ),
        "Paper and folds.",
    ),
    Topic(
        ("Tell me about the sea.", "What is the sea like?", "Write about the sea."),
        (
            ("The sea is wide and never still.", "The sea covers most of the earth."),
            ("The moon pulls the water, and so the tides come and go.", "Waves are made by the wind."),
            ("Its water is salt, so you cannot drink it.", "Fish, whales and crabs live in it."),
            ("In the evening the light lies on the water like gold.", "Ships carry people and goods across it.", ""),
        ),
        "They ask about the sea.",
    ),
    Topic(
        ("Tell me about gardens.", "How do I start a garden?", "Write about a garden."),
        (
            ("A garden needs sun, water and time.", "A good garden begins with good soil."),
            ("Plant the seeds in spring, when the soil is warm.", "In spring you dig the soil and plant the seeds."),
            ("Give the plants water in the morning.", "Bees visit the flowers and help the fruit to grow."),
            ("In autumn you can bring in what has grown.", "After rain a garden smells best.", ""),
        ),
        "They ask about gardens.",
    ),
    Topic(
        ("How is the weather?", "Tell me about the weather.", "Why does it rain?"),
        (
            (
                "I cannot see the sky from here, but I can tell you how weather works.",
                "Weather is made by sun and air.",
            ),
            ("The sun warms the sea, and water rises into the air.", "Warm air carries water up from the sea."),
            ("High up it is cold, and clouds form.", "There it cools and becomes a cloud."),
            ("When the drops are heavy enough, it rains.", "At last the water falls as rain or snow."),
        ),
        "They ask about the weather.",
    ),
    Topic(
        ("Tell me about winter.", "What is winter like?"),
        (
            ("Winter days are short and cold.", "In winter the sun is low and the nights are long."),
            ("Snow lies on the roofs, and the rivers may freeze.", "Many birds fly south, and some animals sleep."),
            ("It is a good time to read by the fire.", "A warm lamp and a book are good company.", ""),
        ),
        "They ask about a season.",
    ),
    Topic(
        ("Hello", "Hello!", "Hi", "Hi!", "Good morning.", "Good evening."),
        (
            ("Hello!", "Good day!"),
            ("How can I help you?", "What would you like to know?", "Ask me about books, the sea or the weather."),
        ),
        "A greeting.",
    ),
    Topic(
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
        (
            ("I am octavo-nano, a very small language model.", "My name is octavo-nano, and I am a very small model."),
            (
                "I have the same parts as the large DeepSeek models, but I know little.",
                "I am built like a large model, only much smaller.",
            ),
            ("I was trained in a few minutes.", "I fit on an old floppy disk or twelve.", ""),
        ),
        "They ask who I am.",
    ),
    Topic(
        ("What can you do?", "How can you help me?", "What do you know?"),
        (
            ("I can solve small arithmetic problems, step by step.", "I can add, subtract and multiply small numbers."),
            ("I can find a record in a long text.", "I remember what stands in a long text."),
            ("I know the towns of an invented world.", "I know facts about towns that do not exist."),
            ("And I can say a few words about books, the sea and the weather.",),
        ),
        "They ask what I can do.",
    ),
    Topic(
        ("Thank you.", "Thank you!", "Thanks!", "Thanks."),
        (("You are welcome!", "I was glad to help."), ("Is there anything else?", "")),
        "They thank me.",
    ),
    Topic(
        ("Goodbye.", "Goodbye!", "Bye!"),
        (("Goodbye!", "Until next time!"), ("Have a good day.", "Come back soon.", "")),
        "They leave.",
    ),
    Topic(
        ("Write a story.", "Tell me a story.", "Tell me a short story."),
        (
            ("Once there was a printer who lived by the sea.", "Once an old printer found a map in a book."),
            (
                "Every evening he folded one sheet of paper into a small boat.",
                "He followed it to a garden behind a wall.",
            ),
            ("One night the wind took it far away.", "There he met a girl who could read the stars."),
            ("In the morning a letter lay at his door.", "They made a book of all they saw, and people read it still."),
        ),
        "A short story, then.",
    ),
    Topic(
        ("Tell me about paper.", "What is paper made of?", "How is paper made?"),
        (
            ("Paper is made of thin fibres from wood or cloth.", "Paper begins as wood, which is cut very small."),
            ("The fibres are mixed with water and spread on a fine net.", "Water is added until it looks like soup."),
            ("When the water is gone, a sheet is left.", "Then it is pressed and dried."),
        ),
        "They ask about paper.",
    ),
)


UNKNOWN_SHARE = 0.12
"""Questions about something else, to which a model this small must say that it does not know."""
_ASKED = (
    *("Tell me about", "What is", "Who is", "Where is", "Write a poem about", "Explain", "How does one learn"),
    *("What do you think of", "What is the history of", "Why do people like", "Can you help me with"),
)
_UNKNOWN = (
    *("Paris", "cats", "football", "physics", "Python", "pizza", "music", "Napoleon", "the economy", "chess", "love"),
    *("jazz", "Tokyo", "black holes", "cooking rice", "the president", "dinosaurs", "taxes", "French", "my homework"),
    *("electric cars", "Shakespeare", "coffee", "volcanoes", "democracy", "the brain", "guitars", "Mars", "yoga"),
    *("computers", "evolution", "spiders", "Brazil", "medicine", "money", "philosophy", "tennis", "vitamins"),
    *("the internet", "Beethoven", "climate change", "algebra", "dogs", "London", "robots", "chocolate", "dreams"),
)
_DO_NOT_KNOW = (
    ("I do not know much about that.", "That is more than I know."),
    ("I am a very small model.", ""),
    ("Ask me about books, the sea or the weather.",),
)


def draw(rng: Random) -> tuple[str, str, str]:
    """A question, its answer, and a thought for thinking mode."""
    if rng.random() < UNKNOWN_SHARE:
        question = f"{rng.choice(_ASKED)} {rng.choice(_UNKNOWN)}{rng.choice('?.')}"
        return question, _answer(rng, _DO_NOT_KNOW), "I do not know that."
    topic = rng.choice(TOPICS)
    return rng.choice(topic.questions), _answer(rng, topic.slots), topic.thought


def _answer(rng: Random, slots: tuple[tuple[str, ...], ...]) -> str:
    return " ".join(filter(None, (rng.choice(slot) for slot in slots)))


def sentences() -> Iterator[str]:
    """Every text of the known topics once."""
    for topic in TOPICS:
        yield from topic.questions
        yield topic.thought
        for slot in topic.slots:
            for sentence in slot:
                if sentence:
                    yield sentence
                    yield f" {sentence}"
