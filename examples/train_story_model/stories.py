"""Stories, coherent by construction: a plot (plots.py) decides what happens, templates decide how it is said.

Every plot has the same cast (a hero, a friend, a passer-by), one object and one place, so whatever a request names
can be put into any plot that suits it, and is certain to occur in the text.
"""

import random
from dataclasses import dataclass, field, replace
from functools import cache
from zlib import crc32

from grammar import capital, finish, render
from plots import MOOD_ENDINGS, MOOD_LINES, OPENINGS, PLAIN_ENDING, PLOTS, SHARED, Plot
from world import (
    COMMON_PLACES,
    ELDERS,
    FEARS,
    INDOORS,
    KINDS,
    MORALS,
    OBJECT_CLASSES,
    SEA_KINDS,
    SEA_PLACES,
    TIMES,
    WEATHER,
    Character,
    Place,
    Thing,
    draw_character,
    draw_skill,
    draw_thing,
    favourite,
)

HELD_OUT_ONE_IN = 23
PLOT_BY_NAME: dict[str, Plot] = {plot.name: plot for plot in PLOTS}
TOPIC_PLOTS = frozenset({"wondering", "play_about_it", "a_big_question"})
VERY_SHORT = 0.1  # a wish with less detail than this gets one of the plots of a few sentences


def is_held_out(kind: str, noun: str) -> bool:
    """True for the pairs of hero and object that training never sees together; evaluation sees only these."""
    return crc32(f"{kind}/{noun}".encode()) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Wish:
    """What a request asks for. None or "" leaves it to the storyteller."""

    hero: Character | None = None
    friend: Character | None = None
    thing: Thing | None = None
    place: Place | None = None
    mood: str = ""
    moral: str = ""
    topic: str = ""  # neither someone nor something to hold: the story is about wondering about it
    plot: str = ""
    fear: str = ""  # for the plot "afraid"
    skill: str = ""  # for the plot "learn_skill"
    other_plot: str = ""  # a plot that was told before and must not be this one
    detail: float = 0.5  # share of the optional sentences told: 0 is a very short story, 1 a long one
    title: bool = False
    any_trait: bool = True  # the hero's adjective was not asked for: one that suits the plot may take its place


@dataclass(frozen=True)
class Story:
    """A told story and the facts in it, from which questions about it can be answered."""

    text: str
    title: str
    hero: Character
    friend: Character
    thing: Thing
    place: Place
    moral: str
    plot: str


@cache
def _lines(script: str) -> tuple[str, ...]:
    """The script's lines, with indented ones joined to the line they continue."""
    return tuple(script.strip("\n").replace("\n    ", " ").split("\n"))


@dataclass
class Teller:
    """Reads scripts and collects the story's sentences, paragraph by paragraph."""

    rng: random.Random
    fields: dict[str, str]
    mood: str
    detail: float
    paragraphs: list[list[str]] = field(default_factory=lambda: [[]])

    def read(self, script: str) -> None:
        for line in _lines(script):
            if not line:
                self.paragraphs.append([])
            elif line[0] == "@":
                self.read(SHARED[line[1:]])
            elif line[0] == "~":
                if self.mood:
                    self.say(MOOD_LINES[self.mood])
            elif line[0] == "?":
                if self.rng.random() < self.detail:
                    self.say(line[2:])
            else:
                self.say(line)

    def say(self, template: str) -> None:
        self.paragraphs[-1].append(render(template, self.fields, self.rng))

    def text(self) -> str:
        return "\n\n".join(finish(" ".join(sentences)) for sentences in self.paragraphs if sentences)


def weather_at(place: Place, rng: random.Random) -> str:
    """A template for the weather, one that fits under the sea and under a roof too."""
    if place.sea:
        return "[It was a bright day above the waves|The water was calm and clear], and {sight}."
    if place.name in INDOORS:
        outside = "Outside it was [raining|windy|snowing|cold], but inside it was cosy"
        return f"[{outside}|It was nice to be inside], and {{sight}}."
    return rng.choice(WEATHER)


def _titled(words: str, small: tuple[str, ...] = ()) -> str:
    return " ".join(w if w in {"of", "the", "a", "and", *small} else capital(w) for w in words.split())


_TITLES = (
    "{N} and the {OF}",
    "The {KIND} and the {O}",
    "{N} and {MN}",
    "The {OF}",
    "{N}'s {OF}",
    "The {NOUN} {AT}",
)


def _subject(wish: Wish) -> str:
    """What a wish is most about: the key of the habits in its story."""
    if wish.thing:
        return wish.thing.noun
    if wish.hero:
        return wish.hero.kind
    return wish.topic or wish.moral or (wish.place.name if wish.place else "") or wish.mood or wish.other_plot


def _place_for(hero: Character, subject: str, rng: random.Random) -> Place:
    places = SEA_PLACES if hero.kind in SEA_KINDS and rng.random() < 0.8 else COMMON_PLACES
    name = favourite([place.name for place in places], subject or hero.kind, rng)
    return next(place for place in places if place.name == name)


def _cast(wish: Wish, plot: Plot, rng: random.Random, held_out: bool | None) -> tuple[Character, Character, Thing]:
    """Hero, friend and object: those wished for, and others that go with them and with the plot."""
    trait = rng.choice(plot.adjectives) if plot.adjectives else None
    hero = wish.hero
    if hero is None:
        hero = draw_character(rng, favourite(KINDS, _subject(wish), rng, 0.4), adjective=trait)
    if wish.hero and wish.any_trait and trait and rng.random() < 0.8:
        hero = replace(hero, adjective=trait)
    friend = wish.friend
    while friend is None or friend.name == hero.name:
        if wish.friend:
            friend = draw_character(rng, wish.friend.kind, adjective=wish.friend.adjective)
        else:
            # Mostly a "she" and a "he", so that pronouns are clear.
            female = not hero.female if rng.random() < 0.75 else hero.female
            if rng.random() < 0.4:
                friend = draw_character(rng, favourite(KINDS, "friend of " + hero.kind, rng, 1.0))
            else:
                friend = draw_character(rng, female=female)
            if friend.kind == hero.kind:
                friend = None
    thing = wish.thing or draw_thing(rng, groups=plot.groups, key=hero.kind)
    while held_out is not None and is_held_out(hero.kind, thing.noun) != held_out:
        if wish.thing is None:
            thing = draw_thing(rng, groups=plot.groups)
        elif wish.hero is None:
            hero = draw_character(rng, adjective=hero.adjective, female=hero.female)
            if hero.name == friend.name or hero.kind == friend.kind:
                hero = replace(hero, name=hero.name + "y")
        else:
            raise LookupError(f"{hero.kind} and {thing.noun} belong to the other split")
    return hero, friend, thing


def tell(wish: Wish, rng: random.Random, held_out: bool | None = False) -> Story:
    """A story that fulfils `wish`.

    `held_out` says whether hero and object must be a held-out pair (None: either). LookupError if the wish names both
    and they are of the other split, or if no plot suits it.
    """
    plots = [
        plot
        for plot in PLOTS
        if (plot.name in TOPIC_PLOTS) == bool(wish.topic)
        and (not wish.plot or wish.plot == plot.name)
        and wish.other_plot != plot.name
        and (not wish.moral or wish.moral in plot.morals)
        and (wish.plot or plot.short == (wish.detail < VERY_SHORT))
        and not (wish.mood == "bedtime" and plot.name == "storm_rescue")
        and (not plot.groups or wish.thing is None or wish.thing.group in plot.groups)
    ]
    if not plots:
        raise LookupError(f"no plot suits {wish}")
    subject = _subject(wish)
    plot = PLOT_BY_NAME[favourite([p.name for p in plots], subject, rng, 0.4)]
    moral = wish.moral or rng.choice(plot.morals)
    hero, friend, thing = _cast(wish, plot, rng, held_out)
    place = wish.place or _place_for(hero, subject, rng)

    kind_of_thing = OBJECT_CLASSES[thing.group]
    spot, spot2, spot3 = rng.sample(place.spots, 3)
    at = place.at
    fields = hero.fields("") | friend.fields("M")
    fields |= {
        "o": thing.noun,
        "of": thing.full,
        "P": place.name,
        "at": at,
        "At": capital(at),
        "at2": "[not far from here|on the other side of {P}]",
        "sight": place.sight,
        "spot": spot,
        "spot2": spot2,
        "spot3": spot3,
        "spotcap": capital(spot),
        "h": favourite([e for e in ELDERS if hero.kind not in e and friend.kind not in e], place.name, rng),
        "opening": favourite(OPENINGS, plot.name, rng),
        "time": favourite(TIMES, place.name, rng),
        "weather": weather_at(place, rng),
        "fear": wish.fear or rng.choice(FEARS),
        "skill": wish.skill or draw_skill(rng),
        "topic": wish.topic,
        "topiccap": capital(wish.topic),
        "looks": kind_of_thing.looks,
        "looksM": kind_of_thing.looks.replace("{N}", "{MN}"),
        "helps": kind_of_thing.helps,
        "together": kind_of_thing.uses,
        "try": _TRY.get(thing.group, "try it"),
        "pairwent": "[went|walked|wandered]",
        "closing": MORALS[moral].closing,
        "mood_ending": MOOD_ENDINGS[wish.mood] if wish.mood else PLAIN_ENDING if rng.random() < 0.4 else "",
    }
    teller = Teller(rng, fields, wish.mood, wish.detail)
    teller.read(plot.script)

    names = fields | {
        "O": _titled(thing.noun),
        "OF": _titled(thing.full),
        "KIND": _titled(hero.kind),
        "NOUN": _titled(hero.noun),
        "AT": _titled(at, small=(place.preposition,)),
        "T": _titled(wish.topic),
    }
    title = render("{N} and {T}" if wish.topic else rng.choice(_TITLES), names, rng)
    text = f"{title}\n\n{teller.text()}" if wish.title else teller.text()
    return Story(text, title, hero, friend, thing, place, moral, plot.name)


_TRY = {"food": "have a little of it", "nature": "hold it for a moment", "paper": "look at it with you"}
_NEXT = (
    "The next [day|morning], {N} and {MN} [met again|met early] {at}. [The sun was shining|The air was fresh], and "
    "{sight}. "
    "\"[What shall we do today|Where shall we go today]?\" asked {MN}. \"[Let us look for something new|Let us go on "
    "an "
    "adventure|Let us surprise somebody],\" said {N}. {Spot} they found a {of}. {together} [In the evening they "
    "walked home "
    "together, tired and happy.|It was another day that neither of them would forget.]",
    "[A week later|Some days later], {N} could not find {MN} anywhere. {He} looked {spot} and {spot2}. Then {he} heard "
    "laughter. {MN} had [planned|prepared] a surprise party {at}! There was [music|cake|a song] for everyone, and {MN} "
    "gave {N} a {of}. \"[You are the best friend in the world|Thank you for everything],\" said {MN}, and {N} "
    "[did not know what to say|smiled from ear to ear].",
    "After that, {N} and {MN} [told everyone about it|became famous in the whole land]. One [evening|day], a {h} "
    "came to "
    "them and asked for help. \"I have lost my {of} {at},\" said the {h}. \"[We know just what to do|We will find "
    "it],\" "
    "said {N}. They searched together, and {MN} found it {spot}. The {h} [laughed with joy|thanked them a hundred "
    "times]. "
    "\"[We make a good team|That was easy],\" said {MN}, and {N} agreed.",
)  # fmt: skip


def what_happened_next(story: Story, rng: random.Random) -> str:
    """A paragraph that carries a story on: the same two friends, a new place and a new object."""
    place = rng.choice(SEA_PLACES if story.hero.kind in SEA_KINDS else COMMON_PLACES)
    thing = draw_thing(rng)
    while is_held_out(story.hero.kind, thing.noun):
        thing = draw_thing(rng)
    spot, spot2, _ = rng.sample(place.spots, 3)
    fields = story.hero.fields("") | story.friend.fields("M")
    fields |= {
        "at": place.at, "sight": place.sight, "spot": spot, "spot2": spot2, "Spot": capital(spot), "of": thing.full,
        "o": thing.noun, "together": OBJECT_CLASSES[thing.group].uses,
        "h": rng.choice([e for e in ELDERS if story.hero.kind not in e and story.friend.kind not in e]),
    }  # fmt: skip
    return finish(render(rng.choice(_NEXT), fields, rng))
