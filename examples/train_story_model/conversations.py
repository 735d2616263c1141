"""Conversations: requests for stories in many turns of phrase, what people say before and after, and the answers."""

import random
from contextlib import suppress
from dataclasses import dataclass, replace

from grammar import capital, finish, render
from plots import MOOD_LINES
from stories import Story, Wish, tell, what_happened_next
from world import (
    FEARS,
    KINDS,
    MOODS,
    MORALS,
    PEOPLE,
    PLACES,
    SEA_KINDS,
    SEA_PLACES,
    TOPICS,
    Character,
    Thing,
    draw_character,
    draw_name,
    draw_skill,
    draw_thing,
    favourite,
    invented_word,
    plural,
)

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}

SYSTEM_PROMPTS = (
    "You are a friendly storyteller.",
    "You are a helpful assistant.",
    "You are a helpful assistant who tells stories.",
    "You are Paige, a storyteller. Tell short stories for children.",
    "Tell short, gentle stories.",
)

# --- Requests ------------------------------------------------------------------------------------------------

_ASK = (
    "[Please tell|Tell] me a{kind_of} story {about}[.|.|, please.]",
    "[Can|Could] you tell me a{kind_of} story {about}?",
    "[Please write|Write][| me] a{kind_of} story {about}.",
    "[I would like|I'd like|I want] [to hear |]a{kind_of} story {about}[.|, please.]",
    "[Can|Could|Would] you [please |]write a{kind_of} story {about}?",
    "[Do you know|Have you got] a{kind_of} story {about}?",
    "[Make up|Invent|Create] a{kind_of} story {about}.",
    "A{kind_of} story {about}[|, please|.]",
    "{Kind_of}story {about}",
    "[Give|Read] me a{kind_of} story {about}.",
    "[How about|What about] a{kind_of} story {about}?",
    "[Hello|Hi|Hey]! [Can you tell|Please tell|Tell] me a{kind_of} story {about}[.|, please.]",
    "[My daughter|My son|My little sister|My class] would love a{kind_of} story {about}. [Can you tell one|Do you "
    "have one]?",
)
_TITLE_WORDS = (" Give it a title.", " Please add a title.", " With a title, please.")
_SHORT = ("very short", "tiny", "really short", "quick")
_LONG = ("long", "longer", "very long")
_COLOURS = (
    "blue",
    "green",
    "purple",
    "red",
    "golden",
    "pink",
    "white",
    "black",
    "invisible",
    "talking",
    "magic",
    "flying",
)

# What the hero does or is, as a request may put it -> the plot that tells it. {M}/{T} are friend and object.
_DEEDS: tuple[tuple[str, str], ...] = (
    ("who is afraid of {fear}", "afraid"),
    ("that is scared of {fear}", "afraid"),
    ("who [loses|lost] {a_thing}", "lost_thing"),
    ("who [finds|found] {a_thing}", "found_thing"),
    ("who [is looking|looks] for a friend", "new_friend"),
    ("who has no friends", "new_friend"),
    ("who does not want to share {a_thing}", "will_not_share"),
    ("who learns to share", "will_not_share"),
    ("who [wants to make|builds|makes] {a_thing}", "keep_trying"),
    ("who [saves|rescues|helps] {a_friend}", "storm_rescue"),
    ("who boasts about {a_thing}", "boast"),
    ("who breaks {a_thing}", "broken_thing"),
    ("who hears a strange [sound|noise]", "strange_sound"),
    ("who wants to give {a_friend} a present", "gift"),
    ("who [cannot|can't] wait", "cannot_wait"),
    ("who gets three wishes", "wishes"),
    ("who [goes on|makes] a long journey", "journey"),
    ("who goes to a fair", "fair"),
    ("who learns something new", "learn_it"),
    ("who quarrels with {a_friend}", "quarrel"),
    *(
        (form, "learn_skill")
        for form in (
            "who [wants|wanted] to {skill}",
            "who learns to {skill}",
            "that wants to {skill}",
            "who dreams of learning to {skill}",
            "who [cannot|can't] {skill}",
        )
    ),
)


def _hero_words(hero: Character, rng: random.Random, any_trait: bool) -> str:
    noun = hero.kind if any_trait else hero.noun
    roll = rng.random()
    if roll < 0.12 and any_trait:
        return plural(noun)
    if roll < 0.30:
        return render("a {n} [named|called] {N}", {"n": noun, "N": hero.name}, rng)
    if roll < 0.36 and hero.kind in PEOPLE:
        return hero.name
    if roll < 0.39 and any_trait:
        return f"my {noun} {hero.name}"
    return "the " + noun if rng.random() < 0.06 else "a " + noun


def _thing_words(thing: Thing, rng: random.Random) -> tuple[str, Thing]:
    """A request's words for an object: with its adjective (then the story keeps it) or without."""
    if thing.adjective and rng.random() < 0.4:
        return "a " + thing.full, thing
    return ("the " if rng.random() < 0.06 else "a ") + thing.noun, thing


@dataclass(frozen=True)
class Request:
    text: str
    wish: Wish


def draw_request(rng: random.Random) -> Request:
    """A request for a story, in one of many forms, with what it commits the story to."""
    mood = rng.choice(tuple(MOODS)) if rng.random() < 0.2 else ""
    moral, place, topic, fear, skill, plot = "", None, "", "", "", ""
    hero: Character | None = None
    friend: Character | None = None
    thing: Thing | None = None
    any_trait = True

    shape = rng.random()
    if shape < 0.05:
        about = ""
    elif shape < 0.13:
        topic = rng.choice(TOPICS) if rng.random() < 0.6 else _odd_topic(rng)
        about = "about " + topic
    elif shape < 0.16:
        about, hero, friend, thing = _two_friends(rng)
    elif shape < 0.26:
        hero = draw_character(rng)
        thing = draw_thing(rng)
        friend = _someone_else(hero, rng)
        deed, plot = rng.choice(_DEEDS)
        fear = rng.choice(FEARS)
        skill = render(draw_skill(rng), {}, rng)
        words, thing = _thing_words(thing, rng)
        about = render(
            "about a {noun} " + deed,
            {"noun": hero.kind, "fear": fear, "skill": skill, "a_thing": words, "a_friend": "a " + friend.kind},
            rng,
        )
        if "{a_thing}" not in deed:
            thing = None
        if "{a_friend}" not in deed:
            friend = None
        if "{fear}" not in deed:
            fear = ""
        if "{skill}" not in deed:
            skill = ""
    else:
        parts: list[str] = []
        if rng.random() < 0.85:
            any_trait = rng.random() < 0.7
            adjective = None if any_trait or rng.random() < 0.6 else rng.choice(_COLOURS)
            kind = invented_word(rng) if rng.random() < 0.07 else ""
            hero = draw_character(rng, kind, adjective=adjective)
            if not hero.adjective:
                any_trait = True
            parts.append(_hero_words(hero, rng, any_trait))
            if parts[0] == hero.name:
                hero = replace(hero, kind="girl" if hero.female else "boy")
                any_trait = True
        if rng.random() < 0.28 and hero is not None:
            friend = _someone_else(hero, rng)
            whose = (
                "a"
                if hero.kind not in PEOPLE or friend.kind in PEOPLE or rng.random() < 0.6
                else "her"
                if hero.female
                else "his"
            )
            parts.append(f"{whose} {friend.kind}" + (f" named {friend.name}" if rng.random() < 0.15 else ""))
        if rng.random() < (0.6 if len(parts) < 2 else 0.3) or not parts:
            thing = draw_thing(rng, invented_word(rng) if rng.random() < 0.1 else "")
            words, thing = _thing_words(thing, rng)
            parts.append(words)
        joined = " and ".join(parts) if len(parts) < 3 else f"{parts[0]}, {parts[1]} and {parts[2]}"
        about = "about " + joined
        if len(parts) == 1 and hero is None and rng.random() < 0.3:
            about = "with " + joined
        elif len(parts) == 2 and hero is not None and friend is None and parts[0][:2] == "a " and rng.random() < 0.25:
            about = f"about {parts[0]} {rng.choice(('with', 'who has', 'who finds', 'that finds'))} {parts[1]}"
            if "finds" in about:
                plot = "found_thing"
    if not topic and rng.random() < (0.18 if about else 0.5):
        place = rng.choice(SEA_PLACES if hero is not None and hero.kind in SEA_KINDS and rng.random() < 0.5 else PLACES)
        if about:
            about += rng.choice((" ", " ", " set ", ", set ")) + place.at
        else:
            about = rng.choice((place.at, "set " + place.at, "that takes place " + place.at, "about " + place.name))
    if not plot and not topic and rng.random() < 0.18:
        moral = rng.choice(tuple(MORALS))
        asked = rng.choice(MORALS[moral].asked)
        if about:
            about += render("[ that teaches {m}| with a lesson about {m}| and {m}]", {"m": asked}, rng)
        else:
            about = "about " + asked

    detail, length = rng.choice((0.3, 0.5, 0.7)), ""
    roll = rng.random()
    if roll < 0.07:
        detail, length = 0.0, rng.choice(_SHORT)
    elif roll < 0.14:
        detail, length = 1.0, rng.choice(_LONG)
    elif roll < 0.45:
        length = rng.choice(("short", "little", "nice", "new"))
    if mood and length not in ("little", "nice", "new"):
        kind_of = f"{length} {rng.choice(MOODS[mood])}".strip()
    elif mood:
        kind_of = rng.choice(MOODS[mood])
    else:
        kind_of = length
    if length in _SHORT and plot:  # the plots of a few sentences have no deeds
        detail, kind_of = 0.2, kind_of.replace(length, "").strip()
    fields = {
        "kind_of": " " + kind_of if kind_of else "",
        "Kind_of": capital(kind_of) + " " if kind_of else "",
        "about": about,
    }
    text = finish(render(rng.choice(_ASK), fields, rng))
    for mark in ".?,":
        text = text.replace(" " + mark, mark)
    title = rng.random() < 0.1
    if title:
        text = text.rstrip() + ("" if text[-1] in ".?!" else ".") + rng.choice(_TITLE_WORDS)
    if rng.random() < 0.12:
        text = text.lower().rstrip(".!?") if rng.random() < 0.6 else text.rstrip(".!")
    wish = Wish(
        hero=hero, friend=friend, thing=thing, place=place, mood=mood, moral=moral, topic=topic, plot=plot, fear=fear,
        skill=skill,
        detail=detail, title=title, any_trait=any_trait,
    )  # fmt: skip
    return Request(text.strip(), wish)


def _someone_else(hero: Character, rng: random.Random) -> Character:
    other = draw_character(rng, female=not hero.female if rng.random() < 0.75 else None)
    while other.kind == hero.kind or other.name == hero.name:
        other = draw_character(rng)
    return other


def _two_friends(rng: random.Random) -> tuple[str, Character | None, Character | None, Thing | None]:
    """A request about a pair: its words, and who and what it names."""
    hero = friend = None
    pair = "[two|the two] friends|two good friends|best friends|two neighbours"
    if rng.random() < 0.5:
        hero = draw_character(rng)
        friend = draw_character(rng, hero.kind)
        pair = "two " + plural(hero.kind)
        if friend.name == hero.name:
            friend = None
    thing = draw_thing(rng) if rng.random() < 0.6 else None
    words = ""
    if thing and thing.group == "vehicle":
        words = f"[ in a| with a| and a] {thing.noun}"
    elif thing:
        words = f"[ and a| with a| who find a| who share a] {thing.noun}"
    return render(f"about [{pair}]{words}", {}, rng), hero, friend, thing


def _odd_topic(rng: random.Random) -> str:
    """A subject no list holds, so that the model learns to take any subject as it comes."""
    roll = rng.random()
    if roll < 0.35:
        return invented_word(rng)
    if roll < 0.5:
        return invented_word(rng).capitalize()
    if roll < 0.75:
        return f"{rng.choice(TOPICS)} and {rng.choice(TOPICS)}"
    if roll < 0.85:
        return rng.choice(_RARE_TOPICS)
    return f"{invented_word(rng)} {rng.choice(('machines', 'theory', 'music', 'games', 'rules', 'science', 'cooking'))}"


_RARE_TOPICS = (
    "photosynthesis",
    "algorithms",
    "cryptography",
    "electromagnetism",
    "thermodynamics",
    "archaeology",
    "psychology",
    "linguistics",
    "economics",
    "inflation",
    "democracy",
    "astronomy",
    "evolution",
    "genetics",
    "vaccines",
    "antibiotics",
    "satellites",
    "microchips",
    "neural networks",
    "compilers",
    "databases",
    "relativity",
    "probability",
    "statistics",
    "architecture",
    "opera",
    "ballet",
    "jazz",
    "hip hop",
    "rugby",
    "badminton",
    "marathons",
    "recycling",
    "glaciers",
    "earthquakes",
    "tornadoes",
    "coral bleaching",
    "meditation",
    "insurance",
    "taxes",
    "cryptocurrency",
    "elections",
    "immigration",
    "engineering",
    "the Roman Empire",
    "the Middle Ages",
    "the Olympic Games",
    "the stock market",
    "climate change",
    "the periodic table",
    "Shakespeare",
    "Mozart",
    "Einstein",
    "Paris",
    "London",
    "Japan",
    "Brazil",
)


def answered(rng: random.Random, held_out: bool | None = False) -> tuple[Request, Story]:
    """A request that some plot suits, and the story told for it."""
    while True:
        request = draw_request(rng)
        try:
            return request, tell(request.wish, rng, held_out)
        except LookupError:
            continue


# --- Talk around the stories ---------------------------------------------------------------------------------

# (what the user says, what the storyteller answers); both are templates.
SMALL_TALK: tuple[tuple[str, str], ...] = (
    (
        "[Hello|Hi|Hey|Hello there|Hi there|Good day|Greetings][!|.|][| How are you?]",
        "[Hello! I am Paige, a small storyteller. Would you like to hear a story?|Hello! It is nice to meet you. "
        "Shall I "
        "tell you a story?|Hi there! What would you like to hear a story about?]",
    ),
    (
        "[Good morning|Good afternoon|Good evening][!|.|]",
        "[Good day to you! Would you like to hear a story?|Hello! What a good time for a story. What should it be "
        "about?]",
    ),
    (
        "[Who are you|What are you|Who am I talking to|Introduce yourself|Tell me about yourself|What is your "
        "name|What's your "
        "name|Do you have a name][?|?|]",
        "[I am Paige, a very small language model that tells stories. Name a hero and a thing, and I will tell you "
        "one.|My "
        "name is Paige. I am a small storytelling model, and I make up short stories.]",
    ),
    (
        "[What can you do|How can you help me|What do you do|Help|What should I ask you|How does this work][?|?|]",
        "[I tell short stories. Ask me for a story about a fox and a lantern, for example, or about courage, or set "
        "in a "
        "forest.|I make up short stories. You can name a hero, a thing, a place or a lesson, and I will put it in the "
        "story.]",
    ),
    (
        "[How are you|How are you today|How do you do|How is it going][?|?|]",
        "[I am very well, thank you. Would you like to hear a story?|I am full of stories today, thank you! Shall I "
        "tell "
        "you one?]",
    ),
    (
        "[Thank you|Thanks|Thank you very much|Thanks a lot|Thank you so much][!|.|]",
        "[You are welcome! I can tell another one whenever you like.|You are very welcome. Would you like another "
        "story?]",
    ),
    (
        "[Goodbye|Bye|Bye bye|See you|Good night|See you later][!|.|]",
        "[Goodbye! Come back soon for another story.|Goodbye, and sweet dreams!]",
    ),
    (
        "[I am bored|I'm bored|I am so bored|There is nothing to do][!|.|]",
        "[A story helps against boredom. Who should it be about?|Then it is time for a story! Name a hero and a "
        "thing, and "
        "off we go.]",
    ),
    (
        "[I am sad|I'm sad|I feel sad|I had a bad day|I feel lonely|I am tired][.|.|]",
        "[I am sorry to hear that. Perhaps a gentle story would help. Shall I tell you one?|That sounds hard. I "
        "could tell "
        "you a quiet story, if you like.]",
    ),
    (
        "[I am happy|I'm happy today|I had a great day|Today is my birthday][!|.|]",
        "[How wonderful! That calls for a story. Who should it be about?|I am glad to hear that! Shall I tell you a "
        "happy "
        "story?]",
    ),
    (
        "[Are you a robot|Are you human|Are you real|Are you a person|Are you an AI|Are you alive][?|?|]",
        "[I am a small computer program that has learned to tell stories.|I am not a person. I am a very small "
        "language "
        "model, and stories are all I know.]",
    ),
    (
        "[Who made you|Where do you come from|Who trained you|How were you made][?|?|]",
        "[I come with jpaged. I was trained on stories that a program made up.|I am the small model that comes with "
        "jpaged. I learned from stories that a program wrote.]",
    ),
    (
        "[Do you like stories|Do you like telling stories|What is your favourite story|What is your favorite "
        "story][?|?|]",
        "[I like every story with a good friend in it. Shall I tell you one?|I love stories about lost things that are "
        "found again. Would you like to hear one?]",
    ),
    (
        "[How old are you|When were you born][?|?|]",
        "[I am quite new, but my stories feel old. Would you like to hear one?]",
    ),
    (
        "[Tell me a joke|Do you know a joke|Say something funny][?|.|]",
        "[Why did the owl bring a lantern? Because it wanted to be a light sleeper. My stories are better than my "
        "jokes!"
        "|What do you call a snail on a ship? A snailor! My stories are better than my jokes.]",
    ),
    (
        "[Yes|No|Maybe|Ok|Okay|Hmm|I don't know|Well][.|!|]",
        "[Shall I tell you a story? Just name a hero and a thing.|Tell me who the story should be about, and I will "
        "begin.]",
    ),
    (
        "[test|testing|asdf|?|...|hm|lol|abc|123|la la la]",
        "[Would you like to hear a story? Just name a hero and a thing.|I am ready. Who should the story be about?]",
    ),
)  # fmt: skip
_PLEASE_GO_ON = "[Yes|Yes, please|Yes please|Sure|Oh yes|Please do|Yes, I would like that|Go on|Ok|Okay][!|.|]"
_PRAISE = (
    "[That was|What] a [lovely|nice|great|beautiful|wonderful] story[!|.]",
    "[I liked it|I loved it|That was great|Very nice|Nice|Great|Wow|How sweet][!|.]",
)
_PRAISE_ANSWER = (
    "[I am glad you liked it! Would you like another one?|Thank you! I enjoyed telling it."
    "|Thank you, that is kind of you.]"
)
_ANOTHER = (
    "[Another one|One more|Another story|Again|More|One more story][, please|!|.|, please!]",
    "[Tell me another one|Can you tell me another one|Could I have another story|Tell me one more][, please.|.|?]",
)
_CONTINUE = (
    "[What happened next|And then|What happened then|What happened after that|How does it go on][?|?]",
    "[Continue|Go on|Please continue|Continue the story|Tell me more|Please go on][.|!|]",
)
_UNKNOWN = (
    "[What is|What are|What do you know about|Tell me about|Explain|Can you explain] {topic}[?|?]",
    "What is the capital of {Name}?",
    "[What is|What's|How much is] {a} [+|plus|times|minus|*] {b}?",
    "Who is {Name}?",
    "Who was {Name} {Name2}?",
    "How do I [make|build|repair|cook|find] a {thing}?",
    "Where is {Name}?",
    "Why is the [sky blue|sea salty|grass green|moon round]?",
    "What [time|day] is it?",
    "What is the weather like[| today]?",
    'Translate "{thing}" into [French|German|Spanish].',
    "Write [a program|some code|a function] [that|to] [sort|sorts|print|counts] {topic}.",
    "[When|Why] did {topic} begin?",
    "Which is better, {topic} or {topic2}?",
    "How many {kinds} are there[| in the world]?",
)
_UNKNOWN_ANSWER = (
    "[I am only a small storyteller, and I do not know that. But I could tell you a story!|I am sorry, I do not "
    "know. I only "
    "know how to tell stories. Would you like one?|That is a question for someone wiser than me. I could tell you a "
    "story "
    "instead.]"
)
_UNKNOWN_ABOUT = (
    "[I am only a small storyteller and know little about {topic}. But I could tell you a story about {topic}!|I do "
    "not know "
    "much about {topic}, but I could tell you a story about it. Would you like that?]"
)


_THANKS, _FAREWELL = SMALL_TALK[5], SMALL_TALK[6]
_SUBJECT_ONLY = "[A {k} and a {o}|About a {k} and a {o}|{k}|A {k}][.|]"
_SAME_HERO = "[Another one about {N}|Tell me another story about {N}|More about {N}][, please|][.|]"
_OTHER_HERO = "[Now one about a {k}|And now with a {k}|The same with a {k}|One about a {k}][, please|][.|]"
_SHORTER = "[Make it shorter|Shorter, please|Can you make it shorter|That is too long][.|!|?]"


def _ask_about(story: Story, rng: random.Random) -> tuple[str, str]:
    """A question about a story that was told, and its answer."""
    hero, friend, thing = story.hero, story.friend, story.thing
    fields = hero.fields("") | friend.fields("M") | {
        "o": thing.noun, "of": thing.full, "at": story.place.at, "P": story.place.name,
        "lesson": MORALS[story.moral].lesson,
    }  # fmt: skip
    question, answer = rng.choice(
        (
            ("[What was the {kind} called|What was the {kind}'s name|What was the name of the {kind}"
             "|Who was the hero][?|?]",
             "[The {kind} was called {N}.|The {kind}'s name was {N}.]"),
            ("[Who was|Who is] {N}?", "{N} was [a {noun}|the {kind} in the story]."),
            ("[Who was|Who is] {MN}?", "{MN} was a {Mkind}, {N}'s friend."),
            ("[Where did it happen|Where does the story take place|Where were they][?|?]", "It happened {at}."),
            ("[What is the moral|What is the moral of the story|What can we learn from it|What did {N} learn][?|?]",
             "[{N} learned {lesson}.|The story tells us {lesson}.]"),
            ("[What thing was the story about|What was the thing in the story][?|?]", "It was about a {of}."),
            ("[Who was {N}'s friend|Who was the friend|Who was the other one][?|?]",
             "{N}'s friend was {MN}, a {Mkind}."),
        )
    )  # fmt: skip
    return finish(render(question, fields, rng)), finish(render(answer, fields, rng))


def _unknown(rng: random.Random) -> tuple[str, str, str]:
    """A question that a storyteller cannot answer, the answer, and the topic it named, if any."""
    topic = rng.choice(TOPICS) if rng.random() < 0.5 else _odd_topic(rng)
    template = rng.choice(_UNKNOWN)
    fields = {
        "topic": topic, "topic2": rng.choice(TOPICS),
        "Name": draw_name(rng.random() < 0.5, rng) if rng.random() < 0.4 else
        invented_word(rng).capitalize(), "Name2": invented_word(rng).capitalize(), "a": str(rng.randrange(100)),
        "b": str(rng.randrange(100)), "thing": draw_thing(rng).noun, "kinds": plural(rng.choice(KINDS)),
    }  # fmt: skip
    question = finish(render(template, fields, rng))
    if "{topic}" in template and "{topic2}" not in template and rng.random() < 0.6:
        return question, finish(render(_UNKNOWN_ABOUT, fields, rng)), topic
    return question, finish(render(_UNKNOWN_ANSWER, fields, rng)), ""


class _Chat:
    """A conversation while it is made up."""

    def __init__(self, rng: random.Random, held_out: bool | None) -> None:
        self.rng = rng
        self.held_out = held_out
        self.messages: list[Message] = []
        self.last: Story | None = None
        self.last_wish = Wish()

    def add(self, user: str, assistant: str) -> None:
        self.messages.append({"role": "user", "content": user})
        self.messages.append({"role": "assistant", "content": assistant})

    def line(self, template: str, fields: dict[str, str] | None = None) -> str:
        return finish(render(template, fields or {}, self.rng))

    def said(self, template: str) -> str:
        """Something a user may type; some type everything in lower case."""
        text = self.line(template)
        return text.lower() if self.rng.random() < 0.1 else text

    def requested_story(self) -> None:
        request, story = answered(self.rng, self.held_out)
        self.last, self.last_wish = story, request.wish
        self.add(request.text, story.text)

    def story(self, user: str, wish: Wish) -> None:
        """A story that follows from what was said before. LookupError if no plot suits the wish."""
        self.last, self.last_wish = tell(wish, self.rng, self.held_out), wish
        self.add(user, self.last.text)

    def small_talk_first(self) -> None:
        rng = self.rng
        user, assistant = rng.choice(SMALL_TALK)
        answer = self.line(assistant)
        self.add(self.said(user), answer)
        if rng.random() >= 0.6:
            return
        if rng.random() < 0.4 and any(offer in answer for offer in ("Shall I", "Would you", "could tell")):
            self.story(self.said(_PLEASE_GO_ON), Wish(detail=0.5))
        elif rng.random() < 0.25:
            user, assistant = rng.choice(SMALL_TALK)
            self.add(self.said(user), self.line(assistant))
        elif rng.random() < 0.15:  # nothing but the subject, as an answer to "Who should it be about?"
            hero = draw_character(rng)
            thing = draw_thing(rng)
            user = self.line(_SUBJECT_ONLY, {"k": hero.kind, "o": thing.noun})
            with suppress(LookupError):
                self.story(user, Wish(hero=hero, thing=thing))
        else:
            self.requested_story()

    def question_first(self) -> None:
        question, answer, topic = _unknown(self.rng)
        self.add(question, answer)
        if self.rng.random() < 0.5:
            self.story(self.said(_PLEASE_GO_ON), Wish(topic=topic))

    def follow_up(self, last: Story) -> None:
        """One more turn after a story. LookupError if the story cannot be told as the turn wants it."""
        rng = self.rng
        turn = rng.random()
        if turn < 0.22:
            # A habit for what comes after what, so that the next story is another one.
            kind = favourite(KINDS, "after " + last.hero.kind, rng)
            wish = Wish(hero=draw_character(rng, kind), other_plot=last.plot, detail=rng.choice((0.3, 0.5, 0.7)))
            self.story(self.said(rng.choice(_ANOTHER)), wish)
        elif turn < 0.36:
            self.add(self.said(rng.choice(_CONTINUE)), what_happened_next(last, rng))
        elif turn < 0.54:
            self.add(*_ask_about(last, rng))
        elif turn < 0.64:
            self.add(self.said(rng.choice(_PRAISE)), self.line(_PRAISE_ANSWER))
        elif turn < 0.74:
            self.add(self.said(_THANKS[0]), self.line(_THANKS[1]))
        elif turn < 0.80:
            self.story(self.line(_SAME_HERO, {"N": last.hero.name}), Wish(hero=last.hero))
        elif turn < 0.86:
            shorter = replace(
                self.last_wish, hero=last.hero, friend=last.friend, thing=last.thing, detail=0.0, plot="", moral="",
                fear="", skill="", title=False,
            )  # fmt: skip
            self.story(self.said(_SHORTER), shorter)
        elif turn < 0.92:
            hero = draw_character(rng)
            self.story(self.line(_OTHER_HERO, {"k": hero.kind}), Wish(hero=hero, place=last.place))
        else:
            self.requested_story()


def converse(rng: random.Random, held_out: bool | None = False) -> list[Message]:
    """One conversation, from a single request to a few turns. `held_out`: see `stories.tell`."""
    chat = _Chat(rng, held_out)
    if rng.random() < 0.08:
        chat.messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    start = rng.random()
    if start < 0.68:
        chat.requested_story()
    elif start < 0.86:
        chat.small_talk_first()
    else:
        chat.question_first()
    while chat.last is not None and rng.random() < 0.36 and len(chat.messages) < 10:
        try:
            chat.follow_up(chat.last)
        except LookupError:
            break
    if rng.random() < 0.05 and len(chat.messages) < 10:
        chat.add(chat.said(_FAREWELL[0]), chat.line(_FAREWELL[1]))
    return chat.messages


def raw_story(rng: random.Random) -> str:
    """A story as plain text, for prompts without a chat template ("Once upon a time")."""
    wish = Wish(detail=rng.choice((0.3, 0.5, 0.7)), title=rng.random() < 0.2)
    if rng.random() < 0.2:
        wish = replace(wish, mood=rng.choice(tuple(MOOD_LINES)))
    return tell(wish, rng).text
