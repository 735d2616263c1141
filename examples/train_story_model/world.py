"""What the stories are made of: who may appear in them, with what, where, in what weather, and to what end."""

# ruff: noqa: SIM905 - word lists read better as text

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar
from zlib import crc32

T = TypeVar("T")

# --- Who -----------------------------------------------------------------------------------------------------

# home phrase -> kinds that live there. Each kind's manner of moving follows from MOVES below.
_HOMES: dict[str, str] = {
    "in a [warm|snug|dry|cosy] den [under the roots of an old oak|at the edge of the forest|beneath a mossy rock]": (
        "fox wolf badger raccoon skunk weasel lynx"
    ),
    "in a [soft|snug|cosy|round] burrow [under a hill|near a clover field|beside a hedge]": (
        "rabbit hare mole bunny groundhog meerkat"
    ),
    "in a [deep|quiet|warm] cave [on the side of a mountain|behind a waterfall|high in the hills]": (
        "bear dragon troll giant lion tiger ogre"
    ),
    "in a [tiny|little|neat] hole [behind a bakery|under the floor of a mill|beneath a garden wall]": (
        "mouse hamster rat shrew cricket beetle ant spider"
    ),
    "in a [hollow tree|nest of dry leaves|tree stump] [by a winding path|in a sunny clearing|near the brook]": (
        "hedgehog squirrel chipmunk porcupine dormouse elf gnome fairy pixie"
    ),
    "in a [nest|neat little nest|nest of twigs] [at the top of a tall pine|in an apple tree|above an old barn]": (
        "owl crow raven robin sparrow magpie swallow woodpecker parrot eagle pigeon dove bat hummingbird"
    ),
    "[beside a quiet pond|on the bank of a slow river|among the reeds]": (
        "frog toad duck goose swan otter beaver turtle duckling heron crane newt"
    ),
    "[among the flowers of an old garden|under a wide green leaf|in a garden full of roses]": (
        "bee ladybird butterfly caterpillar snail firefly dragonfly worm bumblebee"
    ),
    "on a [small|busy|sunny|quiet] farm [at the end of a lane|near the village|beyond the hills]": (
        "hen rooster cat kitten dog puppy pony horse donkey cow goat lamb sheep pig piglet calf chick farmer turkey"
    ),
    "[at the edge of the jungle|on a wide, golden plain|where the tall grass grew]": (
        "elephant monkey giraffe zebra hippo rhino kangaroo koala panda camel leopard gorilla llama sloth lemur"
    ),
    "[on a snowy shore|among hills of ice|where the winters were long]": (
        "penguin reindeer seal walrus husky snowman moose"
    ),
    "[in a blue bay|under the waves|in the wide, deep sea]": (
        "whale dolphin octopus crab starfish fish mermaid seahorse shark"
    ),
    "in a [small|crooked|bright|tidy] [house|cottage] "
    "[by the river|at the edge of the village|on a hill|near the woods]": (
        "girl boy baker gardener shepherd miller tailor painter clockmaker inventor teacher librarian grandmother "
        "grandfather carpenter musician poet potter doctor nurse postman child cook dancer"
    ),
    "in a [tall|lonely|grey stone|round] tower [above the town|by the sea|among the hills]": (
        "wizard witch princess prince king queen knight astronomer ghost lighthouse_keeper"
    ),
    "[in a harbour town|on a small island|in a hut by the beach]": "pirate sailor fisherman explorer captain",
    "in a [workshop|dusty attic|tall house] [full of clocks|with a red roof|at the end of the street]": (
        "robot toymaker scarecrow unicorn astronaut puppet detective"
    ),
}
KIND_HOMES: dict[str, str] = {kind.replace("_", " "): home for home, kinds in _HOMES.items() for kind in kinds.split()}
KINDS: tuple[str, ...] = tuple(KIND_HOMES)
# Known to the language, but asked for seldom: a request now and then is about one of these.
RARE_KINDS: tuple[str, ...] = tuple(
    "hyena ostrich peacock chameleon iguana salamander tadpole armadillo platypus yak buffalo jaguar cheetah cougar "
    "baboon chimpanzee orangutan flamingo pelican toucan vulture falcon nightingale canary cuckoo lobster shrimp squid "
    "jellyfish salmon trout eel scorpion centipede grasshopper mosquito moth wasp termite alligator crocodile lizard "
    "dinosaur mammoth phoenix griffin centaur vampire zombie werewolf alien cyborg superhero ninja samurai viking "
    "cowboy "
    "plumber electrician lawyer scientist professor programmer engineer architect butcher barber mechanic pilot driver "
    "president mayor judge soldier spy thief goblin leprechaun genie jester acrobat magician clown ballerina singer "
    "drummer violinist snowflake cloud tree river mountain star teapot broomstick".split()
)

_MOVERS: dict[str, str] = {
    "flew fly": "owl crow raven robin sparrow magpie swallow woodpecker parrot eagle pigeon dove bat hummingbird bee "
    "ladybird butterfly firefly dragonfly fairy bumblebee",
    "swam swim": "whale dolphin octopus fish mermaid seahorse shark starfish",
    "hopped hop": "frog toad rabbit hare bunny kangaroo cricket",
    "crept creep": "snail caterpillar worm spider beetle",
    "waddled waddle": "duck goose penguin duckling turkey",
}
MOVES: dict[str, tuple[str, str]] = {
    kind: (moves.split()[0], moves.split()[1]) for moves, kinds in _MOVERS.items() for kind in kinds.split()
}
SEA_KINDS = frozenset(_MOVERS["swam swim"].split()) | {"crab"}
_SHE = frozenset("girl hen cow princess queen witch grandmother fairy mermaid".split())
_HE = frozenset("boy rooster prince king wizard grandfather postman fisherman".split())
PEOPLE = frozenset(
    kind.replace("_", " ")
    for home, kinds in _HOMES.items()
    for kind in kinds.split()
    if home.startswith(("in a [small|crooked", "in a [tall|lonely", "[in a harbour"))
) | {"farmer", "toymaker", "astronaut", "detective"}
_IRREGULAR = {
    "mouse": "mice", "dormouse": "dormice", "wolf": "wolves", "goose": "geese", "calf": "calves", "sheep": "sheep",
    "fish": "fish", "child": "children", "elf": "elves", "witch": "witches", "fox": "foxes", "starfish": "starfish",
    "octopus": "octopuses", "walrus": "walruses", "lynx": "lynxes", "princess": "princesses", "fairy": "fairies",
    "pony": "ponies", "donkey": "donkeys", "monkey": "monkeys", "turkey": "turkeys", "butterfly": "butterflies",
    "dragonfly": "dragonflies", "firefly": "fireflies", "puppy": "puppies", "bunny": "bunnies", "moose": "moose",
    "reindeer": "reindeer", "snowman": "snowmen", "postman": "postmen", "fisherman": "fishermen", "husky": "huskies",
    "finch": "finches", "ostrich": "ostriches",
}  # fmt: skip


def plural(noun: str) -> str:
    """The plural of a kind of character."""
    return _IRREGULAR.get(noun, noun + "s")


HERO_ADJECTIVES = (
    "little", "small", "young", "kind", "brave", "shy", "curious", "clever", "gentle", "cheerful", "quiet", "lonely",
    "friendly", "clumsy", "proud", "patient", "sleepy", "merry", "tiny", "old", "hungry", "grumpy", "dreamy", "lazy",
    "busy", "playful", "stubborn", "polite", "restless", "careful",
)  # fmt: skip
GIRL_NAMES = (
    "Mia", "Lily", "Anna", "Rosa", "Nora", "Ella", "Ivy", "Hazel", "Clara", "Daisy", "Ruby", "Pearl", "Willow", "Luna",
    "Tilly", "Poppy", "Molly", "Maya", "Stella", "Olive", "Wren", "Fern", "Juniper", "Holly", "Bella", "Nina", "Tessa",
    "Penny", "Greta", "Elsie", "Flora", "Marta", "Zara", "Amara", "Leila", "Sofia", "Hana", "Yuki", "Priya", "Ingrid",
    "Mabel", "Dot", "Coral", "Saffron", "Biscuit", "Maple", "Clover", "Misty", "Pippa", "Sara", "Emma", "Lucy", "Alice",
    "Sue", "Kate", "Jane", "Sally", "Zoe", "Amy", "Grace",
)  # fmt: skip
BOY_NAMES = (
    "Tom", "Ben", "Max", "Sam", "Leo", "Oliver", "Jack", "Finn", "Theo", "Hugo", "Oscar", "Felix", "Milo", "Otto",
    "Rusty", "Bramble", "Barnaby", "Jasper", "Rowan", "Ash", "Birch", "Pip", "Toby", "Monty", "Henry", "Arlo", "Emil",
    "Jonas", "Karl", "Nico", "Omar", "Ravi", "Kenji", "Mateo", "Diego", "Bruno", "Casper", "Alfie", "Basil", "Bertie",
    "Chester", "Digby", "Gus", "Harvey", "Pepper", "Pickle", "Acorn", "Thistle", "Copper", "Tim", "Dan", "Peter",
    "Paul", "George", "Noah", "Adam", "David", "Alex", "Billy", "Fred",
)  # fmt: skip


@dataclass(frozen=True)
class Character:
    """Someone in a story. `kind` is a noun ("fox"), `adjective` may be empty."""

    kind: str
    name: str
    female: bool
    adjective: str
    home: str

    @property
    def noun(self) -> str:
        return f"{self.adjective} {self.kind}".strip()

    def fields(self, prefix: str) -> dict[str, str]:
        """Template fields: name, kind, pronouns and manner of moving, each with `prefix` before its name."""
        pronouns = ("she", "her", "her", "herself") if self.female else ("he", "him", "his", "himself")
        went, go = MOVES.get(self.kind, ("[walked|went|wandered|hurried]", "[walk|go|wander]"))
        return {
            prefix + "N": self.name,
            prefix + "kind": self.kind,
            prefix + "noun": self.noun,
            prefix + "he": pronouns[0],
            prefix + "He": pronouns[0].capitalize(),
            prefix + "him": pronouns[1],
            prefix + "his": pronouns[2],
            prefix + "His": pronouns[2].capitalize(),
            prefix + "himself": pronouns[3],
            prefix + "went": went,
            prefix + "go": go,
            prefix + "home": self.home,
        }


_ONSETS = "b bl br c cl d dr f fl g gl gr h j k l m n p pl pr qu r s sh sl sn sp st t tr tw v w y z zw th wh".split()
_VOWELS = "a e i o u oo ee ai ou".split()
_CODAS = "b ck d f g l m n nd ng p r rn s sk st t x zz lk mp".split()


def invented_word(rng: random.Random) -> str:
    """A word that no list holds, pronounceable or glued together: it teaches the model to copy unknown words."""
    roll = rng.random()
    if roll < 0.35:
        first, second = rng.choice(_KNOWN_WORDS), rng.choice(_KNOWN_WORDS)
        return first[: rng.randrange(2, len(first) + 1)] + second[rng.randrange(0, len(second) - 1) :]
    if roll < 0.5:
        return rng.choice(_KNOWN_WORDS)[: rng.randrange(2, 6)] + rng.choice(_ENDINGS)
    syllables = [rng.choice(_ONSETS) + rng.choice(_VOWELS) + (rng.choice(_CODAS) if rng.random() < 0.5 else "")]
    for _ in range(rng.choice((0, 1, 1, 1))):
        syllables.append(rng.choice(_ONSETS) + rng.choice(_VOWELS) + (rng.choice(_CODAS) if rng.random() < 0.4 else ""))
    word = "".join(syllables)
    return word + rng.choice(("", "", "le", "er", "y", "o", "ing", "ish")) if len(word) < 6 else word


_ENDINGS = tuple(
    "tion ism ology er esis ment ness ity ics ator graph meter saurus phone craft ster ling ware work sis oid ian ette "
    "tron eria scope ium".split()
)


def gender_of(kind: str, rng: random.Random) -> bool:
    """True for a female character; fixed for kinds whose word says it."""
    if kind in _SHE:
        return True
    return kind not in _HE and favourite((True, False), kind, rng)


def favourite(options: Sequence[T], key: str, rng: random.Random, share: float = 0.5) -> T:
    """One of `options`; for `share` of the draws the one that goes with `key`, always the same for that key.

    Such habits ("owls are called Hazel", "a kite is lost and found") give the trained model something to prefer, so
    that its most likely story is another one for every subject.
    """
    if rng.random() < share:
        return max(options, key=lambda option: crc32(f"{key}/{option}".encode()))
    return rng.choice(options)


def draw_name(female: bool, rng: random.Random, kind: str = "") -> str:
    if rng.random() < 0.06:
        return invented_word(rng).capitalize()
    names = GIRL_NAMES if female else BOY_NAMES
    return favourite(names, kind, rng) if kind else rng.choice(names)


def draw_character(
    rng: random.Random, kind: str = "", name: str = "", adjective: str | None = None, female: bool | None = None
) -> Character:
    """A character with what is given kept and the rest drawn."""
    if not kind:
        if female is not None and rng.random() < 0.5:  # a kind whose word says the other gender would contradict
            kind = rng.choice(KINDS)
            if kind in (_HE if female else _SHE):
                kind = "girl" if female else "boy"
        else:
            kind = rng.choice(RARE_KINDS if rng.random() < 0.06 else KINDS)
    if female is None:
        female = gender_of(kind, rng)
    if kind in _SHE:
        female = True
    elif kind in _HE:
        female = False
    if adjective is None:
        adjective = rng.choice(HERO_ADJECTIVES) if rng.random() < 0.8 else ""
    home = KIND_HOMES.get(kind, rng.choice(tuple(_HOMES)[4:5] + tuple(_HOMES)[12:13]))
    return Character(kind, name or draw_name(female, rng, kind), female, adjective, home)


ELDERS = (
    "old owl", "wise old turtle", "grey goose", "old badger", "friendly crow", "old toad", "kind old woman",
    "tall heron", "white-haired man", "busy beaver", "old goat", "plump hen", "thoughtful snail", "sleepy bear",
    "quick swallow", "old fisherman", "cheerful robin", "gentle cow", "passing pedlar", "black cat", "old donkey",
    "gardener", "miller", "baker", "shepherd", "spotted frog", "wandering musician", "old sailor", "ticklish mole",
)  # fmt: skip

# --- With what -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thing:
    """An object of a story: noun, class (see OBJECT_CLASSES) and an adjective that may be empty."""

    noun: str
    group: str
    adjective: str

    @property
    def full(self) -> str:
        return f"{self.adjective} {self.noun}".strip()


@dataclass(frozen=True)
class ThingClass:
    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    looks: str  # a sentence that says what is lovely about {o}
    helps: str  # past-tense clause: how {o} helped in trouble
    uses: str  # past-tense sentence: {N} and {M} enjoy {o} together


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


OBJECT_CLASSES: dict[str, ThingClass] = {
    "light": ThingClass(
        _names("lantern, candle, lamp, torch, night light, paper lantern, glow stick, star lamp"),
        _names("small, brass, old, bright, golden, tin, little, rusty, blue, round"),
        "[At night it filled the room with a soft, golden light.|Its light was as warm as honey."
        "|When it was lit, the shadows danced on the walls.|It shone like a tiny sun.]",
        "the light of the {o} showed [the way|where the path was|every stone and root]",
        "When it grew dark, they lit the {o} and [told each other stories|made shadow animals on the wall"
        "|watched its light dance].",
    ),
    "sound": ThingClass(
        _names("bell, drum, flute, whistle, violin, trumpet, music box, harp, guitar, horn, fiddle, tambourine, piano"),
        _names("silver, small, old, wooden, little, shiny, tin, red, painted, golden"),
        "[It made the sweetest sound in the whole valley.|Its sound was clear and bright."
        "|When it played, even the birds stopped to listen.|You could hear it from far away.]",
        "the sound of the {o} [carried|rang out] [far through the air|across the land], and everyone could follow it",
        "Then they took turns with the {o}, and [soon everyone was dancing|the music filled the air|even the birds "
        "sang along].",
    ),
    "paper": ThingClass(
        _names("book, map, letter, diary, painting, postcard, picture, notebook, poem, story book, paper boat, "
               "drawing"),
        _names("old, thin, yellow, secret, torn, beautiful, dusty, little, blue, folded"),
        "[Its edges were soft from being touched so often.|It smelled of [dust|ink] and faraway places."
        "|There was a tiny star drawn in one corner.|Looking at it always felt like a small adventure.]",
        "the {o} told them [which way to go|what they needed to know|where to look]",
        "Then they sat down side by side and looked at the {o} [until the sun went down|for a long, happy hour"
        "|again and again].",
    ),
    "wear": ThingClass(
        _names("hat, scarf, coat, pair of boots, mitten, crown, ring, necklace, cloak, button, ribbon, jacket, dress, "
               "pair of glasses, sock, cap, belt, sweater, brooch"),
        _names("red, green, woollen, old, warm, striped, silver, soft, blue, purple, patched, velvet"),
        "[It was the most beautiful thing {N} had ever seen.|Its colour was as bright as a summer morning."
        "|It was as soft as a cloud.|Even a king would have been proud of it.]",
        "with the {o} [{N} felt safe and warm|{N} felt twice as tall]",
        "They took turns wearing the {o}, and [they laughed and laughed|they pretended to be kings and queens"
        "|they bowed to each other like grand people].",
    ),
    "toy": ThingClass(
        _names("ball, kite, doll, teddy bear, spinning top, toy boat, puppet, marble, wooden horse, balloon, sled, "
               "puzzle, toy train, yo-yo, skipping rope, swing, jigsaw, hoop, rocking horse, skateboard"),
        _names("red, blue, yellow, wooden, painted, new, little, old, green, striped, bouncy, orange"),
        "[It was perfect for playing outside.|It was as cheerful as a spring day.|{N} could not stop smiling at it.]",
        "the {o} [made everyone smile again|gave them a clever idea]",
        "They played with the {o} [all afternoon|until it was time for supper|until the first stars came out].",
    ),
    "tool": ThingClass(
        _names("key, rope, basket, bucket, spade, needle, hammer, compass, telescope, clock, watch, mirror, broom, "
               "teapot, kettle, cup, spoon, pot, blanket, pillow, bottle, box, ladder, paintbrush, pencil, umbrella, "
               "magnifying glass, wheelbarrow, bag, suitcase, camera, radio, fishing rod, axe, hourglass, quilt, "
               "magnet, saw, watering can, rake, lock, thermometer, chair, computer, phone"),
        _names("old, little, rusty, shiny, silver, strong, big, small, green, useful, heavy, strange, copper, dusty"),
        "[It was not new, but it was very well made.|It had a small scratch on one side, shaped like a moon."
        "|It had belonged to somebody wise, a long time ago.|It always seemed to come in handy.]",
        "the {o} turned out to be exactly what they needed",
        "After that they used the {o} together, and [everything was twice as easy|no job was too big for them"
        "|they made up a new game with it].",
    ),
    "food": ThingClass(
        _names("cake, pie, apple, pear, loaf of bread, pumpkin, carrot, jar of honey, cookie, pot of soup, "
               "wheel of cheese, pancake, strawberry, plum, peach, bun, watermelon, sandwich, pizza, jar of jam, "
               "banana, "
               "bowl of porridge, muffin, turnip, ice cream, lemon, orange, potato, onion"),
        _names("sweet, fresh, big, warm, delicious, round, golden, huge, lovely, small"),
        "[It smelled wonderful.|It was the best one of the whole year.|Just looking at it made {N} hungry."
        "|It was big enough for more than one.]",
        "a bite of the {o} gave everyone new strength",
        "They ate the {o} [together, down to the last crumb|slowly, and it tasted better than ever"
        "|in the shade of a tree, laughing all the while].",
    ),
    "nature": ThingClass(
        _names("feather, shell, stone, pebble, acorn, seed, flower, rose, leaf, egg, pearl, crystal, star, snowflake, "
               "pine cone, nut, sunflower, mushroom, daisy, tulip, twig, rainbow stone, moonstone, cactus, cherry"),
        _names("white, tiny, blue, smooth, golden, rare, pretty, perfect, glowing, round, pink, silver"),
        "[It was as pretty as a drop of morning dew.|When the light fell on it, it seemed to glow."
        "|There was no other like it in the world.|It was so light that {N} could hardly feel it.]",
        "the {o} [glimmered like a promise|reminded them not to give up]",
        "They put the {o} [on the windowsill, where both of them could see it|in the best place they could find"
        "|between them and watched the light play on it].",
    ),
    "treasure": ThingClass(
        _names("coin, gem, medal, golden cup, treasure chest, ruby, diamond, bracelet, jewel, trophy, sword, shield, "
               "magic wand, crystal ball, wand, statue, golden egg"),
        _names("golden, shiny, ancient, precious, sparkling, little, strange, wonderful, heavy, silver"),
        "[It sparkled in the sun.|It looked like something from an old tale.|It was worth more than {N} could count."
        "|It felt cool and heavy.]",
        "the {o} flashed so brightly that everyone could see it",
        "They gave the {o} a place of honour, and [told everyone how they had come by it|smiled whenever they saw it"
        "|polished it together every Sunday].",
    ),
    "vehicle": ThingClass(
        _names("boat, raft, cart, bicycle, wagon, ship, train, canoe, sailing boat, hot air balloon, rocket, car, bus, "
               "truck, tractor, plane, scooter, spaceship, submarine"),
        _names("little, old, red, blue, fast, wooden, creaky, new, green, wobbly, yellow, white"),
        "[It creaked a little, but it never broke.|It could go faster than anything {N} knew."
        "|It looked ready for a great adventure.|There was just enough room for two.]",
        "the {o} carried them safely home",
        "They went for a ride in the {o}, and [the wind sang in their ears|they waved to everyone they met"
        "|they laughed the whole way].",
    ),
}  # fmt: skip
_ANY_CLASS = ThingClass(
    (),
    _names("strange, little, old, wonderful, red, shiny, big, blue, small, green"),
    "[There was nothing else quite like it.|Nobody knew how old it was.|It made {N} smile every time."
    "|It was not like any other in the world.]",
    "the {o} turned out to be exactly what they needed",
    "After that they shared the {o}, and [neither of them was ever bored again|every day with it was a good day].",
)
OBJECT_CLASSES["other"] = replace(
    _ANY_CLASS,
    nouns=_names(
        "toaster, stapler, refrigerator, washing machine, vacuum cleaner, dictionary, encyclopedia, microscope, "
        "typewriter, "
        "keyboard, calculator, satellite, parachute, trampoline, harmonica, saxophone, accordion, xylophone, "
        "chandelier, "
        "typhoon lamp, wardrobe, carpet, curtain, pyramid, igloo, volcano model, snow globe, lollipop, spaghetti "
        "monster, "
        "pretzel, croissant, doughnut, pineapple, avocado, broccoli, cauliflower, artichoke, zucchini, pomegranate, "
        "microphone, headphone, laptop, tablet, drone, tripod, zipper, velcro shoe, backpack, briefcase, passport, "
        "ticket, stamp, envelope, calendar, almanac, blueprint, abacus, anchor, propeller, periscope, hourglass stand, "
        "gramophone, jukebox, kaleidoscope, boomerang, frisbee, domino, crossword, tapestry, tambour, sundial, "
        "weathervane"
    ),
)
THINGS: tuple[tuple[str, str], ...] = tuple((noun, group) for group, c in OBJECT_CLASSES.items() for noun in c.nouns)


def draw_thing(
    rng: random.Random, noun: str = "", adjective: str | None = None, groups: tuple[str, ...] = (), key: str = ""
) -> Thing:
    """An object; `groups` limits the draw to those classes, `key` gives it a habit (see `favourite`)."""
    if key and not noun and rng.random() < 0.3:
        noun = favourite([n for n, g in THINGS if not groups or g in groups], key, rng, 1.0)
    if noun:
        group = next((g for n, g in THINGS if n == noun), "other")
    elif groups:
        group = rng.choice(groups)
        noun = rng.choice(OBJECT_CLASSES[group].nouns) if OBJECT_CLASSES[group].nouns else invented_word(rng)
    else:
        noun, group = rng.choice(THINGS)
    if adjective is None:
        adjective = rng.choice(OBJECT_CLASSES[group].adjectives) if rng.random() < 0.75 else ""
        if adjective and (adjective in noun or noun == adjective):
            adjective = ""
    return Thing(noun, group, adjective)


# --- Where ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a story happens: noun with article, preposition ("in"), what one sees there, where one may search."""

    name: str
    preposition: str
    sight: str
    spots: tuple[str, ...]
    sea: bool = False

    @property
    def at(self) -> str:
        return f"{self.preposition} {self.name}"


def _place(line: str, sea: bool = False) -> Place:
    name, preposition, sight, spots = (part.strip() for part in line.split(";"))
    return Place(name, preposition, sight, _names(spots), sea)


_KNOWN_WORDS: tuple[str, ...] = (*KINDS, *RARE_KINDS, *(noun.split()[-1] for noun, _ in THINGS))
PLACES: tuple[Place, ...] = tuple(
    _place(line)
    for line in """
the forest; in; the tall trees whispered to each other; under the ferns, between the roots, behind a mossy log
the woods; in; small birds called from every branch; under the dry leaves, behind the brambles, inside a hollow tree
the meadow; in; yellow flowers nodded in the grass; in the tall grass, under the clover, beside a round stone
the garden; in; the roses smelled sweet after the rain; under the cabbage leaves, behind the rose bush, by the gate
the old mill; at; the great wheel turned slowly in the water; behind the sacks of flour, under the stairs, by the wheel
the river; by; the water glittered over the smooth stones; among the reeds, under the bridge, on the sandy bank
the lake; by; the hills were mirrored in the still water; among the reeds, under the old boat, beside the jetty
the pond; by; the lily pads floated like little green boats; among the reeds, under a willow, on a lily pad
the beach; on; the waves rolled in, one after the other; in the warm sand, between the rocks, under the seaweed
the sea; by; gulls cried above the white waves; in the wet sand, between the rocks, in a tide pool
the harbour; in; the boats rocked gently beside the wall; behind the barrels, under a fishing net, inside a rowing boat
the mountain; on; an eagle circled high in the clear air; behind a boulder, under a ledge, beside a little stream
the hill; on; one could see the whole valley from there; in the heather, behind the old stone wall, under a thorn bush
the valley; in; a silver stream ran between the fields; in the long grass, beside the stream, under a hedge
the village; in; smoke rose from every chimney; behind the well, under the market stalls, beside the fountain
the town; in; the streets were full of voices; behind the fountain, under a bench, beside the church door
the city; in; the lights of a thousand windows shone; behind a bench, under the bridge, beside the station door
the market; at; the stalls were full of apples and cloth; under a table, behind the apple baskets, beside the well
the castle; in; bright flags waved from the towers; behind a curtain, under the long table, at the foot of the stairs
the farm; on; the hens scratched in the yard; in the hay, behind the barn, under the old cart
the barn; in; the hay smelled of summer; in the hay, behind a ladder, under an old blanket
the orchard; in; the branches were heavy with fruit; in the grass, behind a ladder, under an apple tree
the desert; in; the sand lay in long, golden waves; behind a dune, under a flat stone, beside a dry bush
the jungle; in; the vines hung down like green ropes; under a huge leaf, behind the vines, between thick roots
the island; on; palm trees bent over the white sand; in the warm sand, behind a palm tree, between the rocks
the cave; in; drops of water fell with a silver sound; behind a rock, in a dark corner, on a stone shelf
the swamp; in; fat bubbles rose in the green water; under a root, among the reeds, on a mossy stump
the snowy hills; in; everything was white and still; under a snowy bush, behind a drift, beside a frozen brook
the school; at; the children had drawn suns on the windows; under a desk, behind the door, on a high shelf
the library; in; the shelves reached up to the ceiling; between two thick books, under a reading table, behind a shelf
the lighthouse; at; the great lamp turned and turned; on the winding stairs, under the bench, behind the door
the bridge; by; the water rushed along below; under the first arch, between two stones, beside the rail
the park; in; the ducks waited for crumbs; under a bench, behind a hedge, beside the fountain
the attic; in; dust floated in a beam of light; behind a trunk, under a dusty sheet, inside an old hat box
the toy shop; in; the shelves were full of bright colours; behind a drum, under the counter, on the top shelf
the bakery; in; the air smelled of fresh bread; behind the flour, under the table, beside the oven
the moon; on; the ground was as pale as silver; behind a grey rock, in a small crater, under the dust
the stars; among; the night shone in every direction; behind a cloud of stardust, beside a comet, under a small planet
the train station; at; the big clock ticked above the doors; under a bench, behind a suitcase, beside the ticket window
the zoo; at; the animals called to one another; behind a fence, under a bench, beside the pond
the kitchen; in; a pot bubbled on the stove; behind the flour jar, under the table, on the top shelf
the fair; at; the music of the carousel filled the air; under a tent, behind the drums, beside the swings
the museum; in; everything old and precious lay behind glass; behind a statue, under a bench, beside the stairs
the vineyard; in; the grapes hung dark and sweet; under the leaves, behind a basket, beside the wall
""".strip().splitlines()
) + tuple(
    _place(line, sea=True)
    for line in """
the coral reef; at; the corals shone pink and orange; behind a coral, under a flat stone, inside an empty shell
the ocean; in; the light came down in long blue beams; in the white sand, between the rocks, under the seaweed
the bay; in; the water was green and clear; in the white sand, among the seaweed, behind a sunken boat
""".strip().splitlines()
)
LAND_PLACES = tuple(place for place in PLACES if not place.sea)
SEA_PLACES = tuple(place for place in PLACES if place.sea)
# Everyday settings, drawn more often when a request names none: a story on the moon should be asked for.
COMMON_PLACES = tuple(
    p for p in LAND_PLACES if p.name not in {"the moon", "the stars", "the museum", "the snowy hills"}
)

INDOORS = frozenset(
    "the old mill,the castle,the barn,the cave,the school,the library,the lighthouse,the attic,the toy shop,the bakery,"
    "the kitchen,the museum".split(",")
)

# --- When, in what weather -----------------------------------------------------------------------------------

WEATHER: tuple[str, ...] = (
    "[The sun was shining|The sky was as blue as could be|The sun stood bright in the sky], and {sight}.",
    "[A strong wind was blowing|The wind hummed and whistled|A fresh wind blew from the hills], and {sight}.",
    "[A soft rain was falling|It had rained all night|Small drops of rain fell on everything], and {sight}.",
    "[A thin fog lay over the land|The air was grey and misty|Pale mist hung low], and {sight}.",
    "[The first snow had fallen|Snowflakes drifted down|The air was cold and clear], and {sight}.",
    "[The air was soft and still|It was a mild day|White clouds sailed by], and {sight}.",
)
TIMES = (
    "[One|One fine|One bright|One cool|One quiet] [morning|afternoon|day]",
    "[Early one|Late one] [morning|afternoon]",
    "[One|One warm] [spring|summer|autumn] [day|morning]",
    "One day",
    "[On a Monday|On a Sunday|One Saturday] [morning|afternoon]",
)

FEARS = (
    "the dark", "thunder", "deep water", "loud noises", "high places", "shadows", "being alone", "the wind",
    "strangers",
)  # fmt: skip

SKILLS = _names(
    "fly, swim, sing, dance, paint, cook, read, write, whistle, climb trees, ride a bicycle, play the drums, juggle, "
    "skate, "
    "ski, bake bread, count to a hundred, tell the time, sew, catch fish, knit, roar, jump over the brook, run fast, "
    "sail, "
    "do magic, play chess, speak French, tell jokes, walk on ice, play the piano, stand on one leg, make people laugh, "
    "see the sea, visit the moon, touch the stars, travel the world, win a race, build a house, write a book, grow "
    "roses, "
    "play football, drive a train, dive, talk to birds, find a treasure, sleep alone, be brave, be famous, ride a "
    "horse, "
    "cross the river, climb the mountain, make music, help others, go to school, surf, solve riddles, bake a cake"
)


def draw_skill(rng: random.Random) -> str:
    """Something to learn or to become, as an infinitive without "to"."""
    if rng.random() < 0.15:
        return f"[be|become] a {rng.choice(sorted(PEOPLE))}"
    return rng.choice(SKILLS)


# --- To what end ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moral:
    """`asked`: the words a request may use; `closing`: how a story ends on it; `lesson`: it in one clause."""

    asked: tuple[str, ...]
    closing: str
    lesson: str


MORALS: dict[str, Moral] = {
    "kindness": Moral(
        ("kindness", "being kind", "helping others"),
        "[And {N} learned that [a little kindness goes a long way|kindness always finds its way back|even a small"
        " kindness can change a whole day].|From that day on, {N} never forgot that kindness costs nothing and "
        "gives a great deal.|Kindness, {N} had learned, is like a seed: it grows.]",
        "that a little kindness goes a long way",
    ),
    "sharing": Moral(
        ("sharing", "sharing with others", "being generous"),
        "[{N} learned that [joy grows when it is shared|sharing makes everything better|the best things are the "
        "ones we share].|From then on, {N} shared whatever {he} had, and was happier for it.|Something shared, "
        "{N} found out, is worth twice as much.]",
        "that joy grows when it is shared",
    ),
    "honesty": Moral(
        ("honesty", "telling the truth", "being honest"),
        "[{N} learned that [the truth is always the best way|honest words make a light heart|telling the truth "
        "takes courage, but it is worth it].|From that day on, {N} always told the truth.|Honesty, {N} now knew, "
        "is the beginning of trust.]",
        "that it is best to tell the truth",
    ),
    "courage": Moral(
        ("courage", "being brave", "bravery"),
        "[{N} learned that [being brave means going on even when you are afraid|courage can live in the smallest "
        "heart|you are braver than you think].|{N} was never quite so afraid again.|Courage, {N} found out, often"
        " begins with one small step.]",
        "that being brave means going on even when you are afraid",
    ),
    "patience": Moral(
        ("patience", "being patient", "waiting"),
        "[{N} learned that [good things take time|patience is stronger than hurry|what grows slowly grows "
        "well].|From then on, {N} did not mind waiting.|Patience, {N} had learned, is a quiet kind of strength.]",
        "that good things take time",
    ),
    "friendship": Moral(
        ("friendship", "friends", "making friends"),
        "[{N} learned that [a true friend is the greatest treasure|a good friend makes every day brighter"
        "|there is nothing better than a good friend].|From that day on, {N} and {MN} were the best of friends.|And"
        " the two of them stayed friends for the rest of their lives.]",
        "that a true friend is a great treasure",
    ),
    "perseverance": Moral(
        ("never giving up", "perseverance", "trying again"),
        "[{N} learned that [those who keep trying get there in the end|falling down is only a part of "
        "learning|one more try can change everything].|From then on, when something was hard, {N} smiled and "
        "tried once more.|{N} had not given up, and that made all the difference.]",
        "that one should never give up",
    ),
    "teamwork": Moral(
        ("teamwork", "working together", "helping each other"),
        "[{N} learned that [together we can do what no one can do alone|many hands make light work|a hard job is "
        "easy with a friend].|From then on, {N} and {MN} did everything as a team.|Together, they had found out, "
        "they were stronger than either of them alone.]",
        "that together we can do what no one can do alone",
    ),
    "gratitude": Moral(
        ("gratitude", "being thankful", "saying thank you"),
        "[{N} learned that [a thank you is worth more than gold|we should be glad of what we have|there is always"
        " something to be thankful for].|From that day on, {N} never forgot to say thank you.|{N} felt thankful "
        "for everything, and that was the best feeling of all.]",
        "that there is always something to be thankful for",
    ),
    "curiosity": Moral(
        ("curiosity", "asking questions", "learning new things"),
        "[{N} learned that [a good question can open any door|the world is full of wonders for those who "
        "ask|there is always something new to discover].|From then on, {N} asked a new question every day.|And "
        "{N} was already wondering what to find out next.]",
        "that it is good to ask questions",
    ),
    "modesty": Moral(
        ("modesty", "not boasting", "being humble"),
        "[{N} learned that [it is better to be kind than to be the best|those who boast often stumble|everyone is"
        " good at something].|From that day on, {N} did not boast any more.|{N} was still quick and clever, but "
        "now {he} was modest too.]",
        "that it is better not to boast",
    ),
}
MOODS: dict[str, tuple[str, ...]] = {
    "happy": ("happy", "cheerful", "joyful"),
    "funny": ("funny", "silly"),
    "sad": ("sad", "touching"),
    "scary": ("scary", "spooky"),
    "bedtime": ("bedtime", "calm", "sleepy"),
    "exciting": ("exciting", "adventure"),
}

# Subjects that are neither someone nor something to hold: the story is then about wondering about them.
TOPICS: tuple[str, ...] = _names(
    "the moon, thunder, mathematics, football, music, the stars, computers, rain, time, winter, spring, summer, "
    "autumn, "
    "snow, dinosaurs, space, school, science, magic, love, history, volcanoes, planets, dreams, numbers, the weather, "
    "the sun, gravity, electricity, trains, dancing, cooking, painting, chess, basketball, tennis, swimming, money, "
    "Christmas, birthdays, the north pole, outer space, the ocean floor, rainbows, black holes, shadows, the wind, "
    "clouds, lightning, poetry, grammar, physics, chemistry, machines, robots, the future, the past, colours, silence, "
    "artificial intelligence, programming, language, sleep, fire, water, the big city, war, peace, happiness, "
    "anger, holidays, fashion, medicine, gardening, politics, the news, video games, baseball, quantum physics, "
    "geography, the internet, television, philosophy, the tides, echoes, whales and ships, cheese, ice, gold, the law"
)
