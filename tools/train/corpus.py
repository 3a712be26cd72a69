"""The text that the reference model learns from: stories, talk and small facts, made by a grammar.

All sentences are this project's own and carry its licence; nothing is taken from a corpus. The grammar is small
enough to read and large enough that the model has to learn how words go together instead of lines by heart.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

BOS: Final = "<|bos|>"
SYSTEM: Final = "<|system|>"
USER: Final = "<|user|>"
ASSISTANT: Final = "<|assistant|>"
END: Final = "<|end|>"


def words(text: str) -> tuple[str, ...]:
    """The words of ``text``."""
    return tuple(text.split())


ANIMALS: Final = words(
    "fox bear rabbit owl mouse cat dog horse hedgehog frog duck goat crow squirrel turtle wolf"
)
ADJECTIVES: Final = words("small brave quiet clever kind old young gentle curious cheerful shy patient")
NAMES: Final = words("Anna Tom Mila Ben Clara Oscar Nina Leo Ruth Jonas Ida Paul Vera Hugo Lena Max")
PLACES: Final = {
    "forest": ("the trees were tall", "the moss was soft", "the light fell through the leaves"),
    "garden": ("the roses were red", "bees flew from flower to flower", "the grass was wet"),
    "village": ("smoke rose from the chimneys", "the streets were narrow", "everybody knew everybody"),
    "harbour": ("boats rocked on the water", "the air smelled of salt", "gulls cried over the roofs"),
    "valley": ("a river ran through it", "the fields were green", "the hills stood all around"),
    "mountain": ("the snow was deep", "the wind was cold", "the path was steep"),
    "meadow": ("the grass was high", "butterflies danced in the sun", "the clover was sweet"),
    "city": ("the lamps shone all night", "trains came and went", "the houses touched the clouds"),
}
THINGS: Final = {
    "key": "a small iron key",
    "lamp": "an old brass lamp",
    "map": "a map with a red line",
    "bell": "a silver bell",
    "book": "a book without a title",
    "letter": "a letter with no name on it",
    "seed": "a seed as big as a thumb",
    "coat": "a warm green coat",
    "boat": "a little wooden boat",
    "clock": "a clock that had stopped",
}
TIMES: Final = (
    "One morning",
    "One evening",
    "One cold night",
    "On a rainy day",
    "On the first day of spring",
    "In the autumn",
)
FEELINGS: Final = ("happy", "tired", "afraid", "proud", "lonely", "glad", "hungry", "sad")
FRUITS: Final = ("apple", "pear", "plum", "cherry", "peach", "lemon")
NUMBERS: Final = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen twenty"
)

FACTS: Final = (
    ("What color is the sky?", "The sky is blue on a clear day, and red when the sun goes down."),
    ("What color is grass?", "Grass is green."),
    ("What color is snow?", "Snow is white."),
    ("What do bees make?", "Bees make honey. They collect nectar from flowers and carry it home."),
    ("What do cows eat?", "Cows eat grass and hay."),
    ("Where do fish live?", "Fish live in water: in rivers, in lakes and in the sea."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many legs does a dog have?", "A dog has four legs."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("Why does it rain?", "Water rises from the sea, becomes a cloud, and falls down again as rain."),
    (
        "Why is the sea salty?",
        "Rivers carry a little salt from the rocks into the sea, and the salt stays there.",
    ),
    ("What is ice?", "Ice is frozen water. It melts when it gets warm."),
    ("What is the moon?", "The moon is a ball of rock that goes around the earth."),
    ("What is the sun?", "The sun is a star. It is very hot, and it gives us light."),
    ("What is bread made of?", "Bread is made of flour, water, salt and yeast."),
    ("Where does the sun rise?", "The sun rises in the east and sets in the west."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Spain?", "The capital of Spain is Madrid."),
    ("What is the capital of Germany?", "The capital of Germany is Berlin."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    (
        "What is a transformer?",
        "A transformer is a kind of neural network. It looks back at all the words before it chooses the next one.",
    ),
    ("What is a token?", "A token is a piece of text: a word, a part of a word, or a sign."),
    ("What is a cache?", "A cache keeps what was computed before, so that it need not be computed again."),
    (
        "What is IOP?",
        "IOP runs inference fleets: one gateway in front, many nodes behind it, and one service to operate them all.",
    ),
    (
        "What is the Edge?",
        "The Edge is the gateway. It takes the requests and sends each one to a node that can serve it.",
    ),
    (
        "What is a Node?",
        "A Node is the daemon beside an engine. It calls the Edge and carries the work to the engine.",
    ),
    (
        "What is a rank?",
        "A rank is one process that holds one share of the weights. All ranks work on each token together.",
    ),
    (
        "What is a lease?",
        "A lease is one unit of capacity. It is taken when a request starts and given back when it ends.",
    ),
)
OPPOSITES: Final = (
    "big small",
    "hot cold",
    "day night",
    "old new",
    "fast slow",
    "up down",
    "open closed",
    "early late",
    "full empty",
    "light dark",
    "long short",
    "happy sad",
    "wet dry",
    "hard soft",
)
HOWTOS: Final = {
    "make tea": (
        "boil some water",
        "put the tea in a cup",
        "pour the water over it",
        "wait for three minutes",
    ),
    "bake bread": (
        "mix flour, water, salt and yeast",
        "let the dough rest",
        "heat the oven",
        "bake it until it is brown",
    ),
    "plant a tree": (
        "dig a deep hole",
        "set the tree in it",
        "fill the hole with earth",
        "give it plenty of water",
    ),
    "wash a cup": (
        "fill the sink with warm water",
        "add a little soap",
        "rub the cup with a sponge",
        "let it dry",
    ),
    "write a letter": (
        "take a sheet of paper",
        "write the date and a greeting",
        "say what you want to say",
        "sign it with your name",
    ),
    "cook soup": (
        "cut the vegetables",
        "put them in a pot of water",
        "let them cook slowly",
        "add salt at the end",
    ),
    "paint a wall": (
        "cover the floor",
        "clean the wall",
        "paint from the top to the bottom",
        "let it dry for a day",
    ),
    "fix a bug": (
        "make it happen again",
        "find the smallest case",
        "change one thing at a time",
        "write a test so that it never comes back",
    ),
}
RHYMES: Final = (
    (
        "The moon is bright above the {p},",
        "it lights the way for you and me,",
        "the {a} sleeps, the night is deep,",
        "the wind goes home across the sea.",
    ),
    (
        "A {a} sat down beside a tree,",
        "as quiet as a {a} can be,",
        "it watched the rain, it watched the sun,",
        "and slept a while when day was done.",
    ),
    (
        "The winter came, the {p} was white,",
        "the {a} walked on through the night,",
        "it found a door, it found a fire,",
        "and warmed its feet and rested there.",
    ),
    (
        "Good morning, {a}, good morning, bee,",
        "good morning, {p}, good morning, tree,",
        "the day is new, the sky is wide,",
        "come out and see the world outside.",
    ),
)


def article(noun: str) -> str:
    """``noun`` with a or an."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def cap(text: str) -> str:
    """``text`` with a capital first letter."""
    return text[0].upper() + text[1:]


def story(
    r: random.Random, animal: str | None = None, place: str | None = None, length: int | None = None
) -> str:
    """A story of 1 to 4 paragraphs with one hero, one thing and one friend, told in order."""
    hero = animal or r.choice(ANIMALS)
    place = place or r.choice(list(PLACES))
    name = r.choice(NAMES)
    friend = r.choice([a for a in ANIMALS if a != hero])
    thing = r.choice(list(THINGS))
    adjective, other = r.sample(ADJECTIVES, 2)
    views = PLACES[place]
    opening = [
        r.choice(
            (
                f"Once upon a time there was {article(adjective)} {hero} named {name}.",
                f"There was once {article(adjective)} {hero} whose name was {name}.",
                f"{name} was {article(adjective)} {hero} who lived in a {place}.",
            )
        ),
        r.choice(
            (f"{name} lived near a {place} where {r.choice(views)}.", f"In the {place}, {r.choice(views)}.")
        ),
        r.choice(
            (
                f"Every day the {hero} went for a walk.",
                f"The {hero} liked the {place} more than anything.",
                f"{name} had everything but a friend.",
            )
        ),
    ]
    spot = r.choice(("under a stone", "beside the path", "behind the old mill", "in the grass"))
    finding = [
        f"{r.choice(TIMES)}, {name} found {THINGS[thing]} {spot}.",
        r.choice(
            (
                f'"Whose {thing} is this?" asked the {hero}.',
                f'"What a strange {thing}," said the {hero}.',
                f"The {hero} looked at the {thing} for a long time.",
            )
        ),
        r.choice(("Nobody answered.", "The wind was the only answer.", "It was very quiet.")),
    ]
    way = r.choice(("along the road", "out of the shadow", "down the hill", "over the bridge"))
    meeting = [
        f"Then {article(other)} {friend} came {way}.",
        r.choice(
            (
                f'"I have lost my {thing}," said the {friend}.',
                f'"That is my {thing}," said the {friend}. "I have looked for it everywhere."',
            )
        ),
        r.choice(
            (
                f"{name} gave the {thing} back at once.",
                f'"Here it is," said {name}, and gave it back.',
                f"The {hero} was {r.choice(('a little sad', 'glad to help'))}, and gave the {thing} back.",
            )
        ),
        r.choice(
            (
                f'"Thank you," said the {friend}. "You are very kind."',
                f"The {friend} was so {r.choice(('happy', 'glad', 'proud'))} that it danced.",
            )
        ),
    ]
    ending = [
        r.choice(
            (
                f"From that day on, the {hero} and the {friend} were friends.",
                f"So the {hero} had found a friend, and a friend is better than a {thing}.",
            )
        ),
        r.choice(
            (
                f"They sat together in the {place} and watched the stars.",
                f"They walked home together, and {r.choice(views)}.",
                f"In the evening they shared {article(r.choice(FRUITS))}.",
            )
        ),
        r.choice(
            (
                "And that is the end of the story.",
                "They were never lonely again.",
                "And if they have not moved away, they still live there.",
            )
        ),
    ]
    parts = [opening + finding, meeting, ending]
    length = length or r.choice((1, 2, 3, 3))
    if length == 1:
        return " ".join([*opening[:2], *finding[:1], *ending[-2:]])
    if length == 2:
        return " ".join([*opening, *finding[:2], *meeting[:3], ending[0]])
    return "\n\n".join(" ".join(part) for part in parts)


def describe(r: random.Random, place: str) -> str:
    """Three or four sentences about a place."""
    views = list(PLACES[place])
    r.shuffle(views)
    return " ".join(
        (
            f"The {place} is {r.choice(('quiet', 'beautiful', 'wide and open', 'very old'))}.",
            f"When I was there, {views[0]} and {views[1]}.",
            f"{cap(article(r.choice(ADJECTIVES)))} {r.choice(ANIMALS)} lives there.",
            r.choice(
                (f"In the evening, {views[2]}.", "You should go and see it.", "I would like to go back.")
            ),
        )
    )


def ask_story(r: random.Random) -> tuple[str, str]:
    animal, place = r.choice(ANIMALS), r.choice(list(PLACES))
    form = r.randrange(4)
    if form == 0:
        return r.choice(
            (
                f"Tell me a story about {article(animal)}.",
                f"Can you tell me a story about {article(animal)}?",
                f"Write a story about {article(animal)}.",
            )
        ), story(r, animal)
    if form == 1:
        return f"Tell me a story about {article(animal)} in a {place}.", story(r, animal, place)
    if form == 2:
        return r.choice(("Tell me a short story.", "Tell me a short story, please.")), story(r, length=1)
    return r.choice(
        ("Tell me a story.", "Tell me a long story.", "Tell me a story, please.", "Write a story.")
    ), story(r, length=3)


def ask_fact(r: random.Random) -> tuple[str, str]:
    question, answer = r.choice(FACTS)
    form = r.random()
    if form < 0.2:
        question = question[0].lower() + question[1:]
    elif form < 0.4:
        question = "Tell me: " + question[0].lower() + question[1:]
    return question, answer


def ask_sum(r: random.Random) -> tuple[str, str]:
    a, b = r.randrange(0, 11), r.randrange(0, 10)
    form = r.randrange(3)
    if form == 0:
        return f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
    if form == 1:
        return f"What is {a} + {b}?", f"{a} + {b} = {a + b}."
    a, b = max(a, b), min(a, b)
    return f"What is {a} minus {b}?", f"{a} minus {b} is {a - b}."


def ask_count(r: random.Random) -> tuple[str, str]:
    n = r.randrange(3, 21)
    if r.random() < 0.5:
        return f"Count to {n}.", ", ".join(str(i) for i in range(1, n + 1)) + "."
    return f"Count to {NUMBERS[n]} in words.", cap(", ".join(NUMBERS[1 : n + 1])) + "."


def ask_greeting(r: random.Random) -> tuple[str, str]:
    hello = r.choice(
        (
            "Hello!",
            "Hi!",
            "Hello.",
            "Hi",
            "hello",
            "Good morning!",
            "Good evening!",
            "Hello, how are you?",
            "Hi there!",
            "How are you?",
        )
    )
    return hello, r.choice(
        (
            "Hello! How can I help you today?",
            "Hello! It is good to hear from you. What would you like to talk about?",
            "Hi! I am well, thank you. Would you like to hear a story?",
            "Good day! Ask me a question, or ask me for a story.",
        )
    )


def ask_name(r: random.Random) -> tuple[str, str]:
    name = r.choice(NAMES)
    if r.random() < 0.5:
        return r.choice((f"My name is {name}.", f"Hello, I am {name}.")), r.choice(
            (f"Hello, {name}! It is nice to meet you.", f"Nice to meet you, {name}. What can I do for you?")
        )
    return r.choice(
        ("Who are you?", "What are you?", "What is your name?", "What can you do?", "Are you a robot?")
    ), r.choice(
        (
            "I am a very small language model. I live inside the reference engine, and I like to tell stories.",
            "I am a small model with a small head. I can tell stories, count, and answer simple questions.",
            "I am the reference model of IOP. I am tiny, but I am real.",
        )
    )


def ask_opposite(r: random.Random) -> tuple[str, str]:
    a, b = r.choice(OPPOSITES).split()
    if r.random() < 0.5:
        a, b = b, a
    return r.choice(
        (f"What is the opposite of {a}?", f"Tell me the opposite of {a}.")
    ), f"The opposite of {a} is {b}."


def ask_howto(r: random.Random) -> tuple[str, str]:
    what = r.choice(list(HOWTOS))
    steps = HOWTOS[what]
    question = r.choice((f"How do I {what}?", f"How can I {what}?", f"Tell me how to {what}."))
    if r.random() < 0.5:
        return question, f"First, {steps[0]}. Then {steps[1]}. After that, {steps[2]}. Finally, {steps[3]}."
    return question, f"Here is how to {what}:\n" + "\n".join(
        f"{i}. {cap(s)}." for i, s in enumerate(steps, 1)
    )


def ask_poem(r: random.Random) -> tuple[str, str]:
    animal, place = r.choice(ANIMALS), r.choice(list(PLACES))
    lines = "\n".join(r.choice(RHYMES)).format(a=animal, p=place)
    return r.choice(
        (
            f"Write a poem about {article(animal)}.",
            "Write a poem.",
            "Can you write a short poem?",
            f"Write a poem about the {place} and {article(animal)}.",
        )
    ), lines


def ask_place(r: random.Random) -> tuple[str, str]:
    place = r.choice(list(PLACES))
    return r.choice(
        (f"Describe the {place}.", f"What is the {place} like?", f"Tell me about the {place}.")
    ), describe(r, place)


def ask_feeling(r: random.Random) -> tuple[str, str]:
    feeling = r.choice(FEELINGS)
    question = r.choice((f"I am {feeling}.", f"I feel {feeling} today."))
    if feeling in {"happy", "proud", "glad"}:
        more = r.choice(("What happened?", "Tell me more about it.", "That is good news."))
        return question, f"I am glad that you are {feeling}. {more}"
    more = r.choice(("Would a story help?", "Rest a while, and have a cup of tea.", "Tell me what happened."))
    return question, f"I am sorry that you are {feeling}. {more}"


def ask_list(r: random.Random) -> tuple[str, str]:
    n = r.randrange(2, 6)
    what, items = r.choice((("animals", list(ANIMALS)), ("fruits", list(FRUITS)), ("names", list(NAMES))))
    chosen = r.sample(items, n)
    return (
        f"Name {NUMBERS[n]} {what}.",
        f"Here are {NUMBERS[n]} {what}: {', '.join(chosen[:-1])} and {chosen[-1]}.",
    )


def ask_repeat(r: random.Random) -> tuple[str, str]:
    words = " ".join(r.sample([*ANIMALS, *ADJECTIVES, *FRUITS, *THINGS], r.randrange(1, 5)))
    return r.choice((f"Say: {words}", f"Repeat after me: {words}")), words


def ask_thanks(r: random.Random) -> tuple[str, str]:
    return r.choice(("Thank you!", "Thanks.", "Goodbye!", "Bye.", "Good night!")), r.choice(
        (
            "You are welcome! Come back soon.",
            "It was a pleasure. Goodbye!",
            "Good night, and sleep well.",
            "You are welcome.",
        )
    )


def ask_odd(r: random.Random) -> tuple[str, str]:
    noise = (
        "".join(r.choice("abcdefghijklmnopqrstuvwxyz  ") for _ in range(r.randrange(6, 50))).strip() or "hm"
    )
    wish = r.choice(
        (noise, f"Please explain {noise}.", f"What do you think about {noise}?", f"Write code for {noise}.")
    )
    return wish, r.choice(
        (
            "I am only a small model, and I do not know that. Shall I tell you a story instead?",
            "I do not know much about that. Ask me for a story, a sum or a poem.",
        )
    )


ASKS: Final[tuple[tuple[Callable[[random.Random], tuple[str, str]], int], ...]] = (
    (ask_story, 40),
    (ask_fact, 16),
    (ask_sum, 8),
    (ask_count, 4),
    (ask_greeting, 8),
    (ask_name, 8),
    (ask_opposite, 4),
    (ask_howto, 8),
    (ask_poem, 8),
    (ask_place, 8),
    (ask_feeling, 5),
    (ask_list, 4),
    (ask_repeat, 4),
    (ask_thanks, 4),
    (ask_odd, 5),
)
SYSTEMS: Final = (
    "You are a helpful assistant.",
    "You are a friendly assistant who likes stories.",
    "You are a helpful assistant. Answer briefly.",
    "Be kind and clear.",
    "You are the reference model of IOP.",
)


def document(r: random.Random) -> str:
    """One training document: a conversation of 1 to 4 turns, or a bare text."""
    if r.random() < 0.2:
        text = story(r) if r.random() < 0.7 else describe(r, r.choice(list(PLACES)))
        return f"{BOS}{text}{END}"
    parts = [BOS]
    if r.random() < 0.4:
        parts.append(f"{SYSTEM}{r.choice(SYSTEMS)}{END}")
    kinds, weights = zip(*ASKS, strict=True)
    for _ in range(r.choice((1, 1, 2, 3))):
        question, answer = r.choices(kinds, weights)[0](r)
        parts.append(f"{USER}{question}{END}{ASSISTANT}{answer}{END}")
    return "".join(parts)
