"""The plots: what happens, in which order, and in how many ways it may be said.

A script is read line by line (`stories.Teller`): a plain line is a sentence template (grammar.py), "? " marks a
sentence that a shorter story leaves out, "~" is where a mood may show, "@name" is one of the shared parts below, an
empty line begins a paragraph, and an indented line continues the one before.

Fields: {N} hero, {MN} friend, {h} passer-by, {o} and {of} the object without and with its adjective, {P} the place
and {at} with its preposition, {he}/{him}/{his} pronouns (the friend's with an M before), {went}/{go} how they move.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plot:
    """What a story does: the morals it can carry, the object classes it suits (empty: all), its hero's traits."""

    name: str
    morals: tuple[str, ...]
    script: str
    groups: tuple[str, ...] = ()
    adjectives: tuple[str, ...] = ()
    short: bool = False  # told only when a very short story is wanted


SHARED: dict[str, str] = {
    "opening": """
{opening}
? [Every [morning|evening], {N} [sang a little song|looked out at the world|counted the clouds|told {himself} a
    story].|{N} [loved|liked] to [collect round stones|watch the clouds|sing in the rain|listen to old stories|dance
    when nobody was looking|ask questions].|Everyone who met {N} liked {him}.|{N} was never bored.]
""",
    "scene": """
{time}, {N} {went} to {P}.
? {weather}
""",
    "closing": """
{closing}
{mood_ending}
""",
}

OPENINGS: tuple[str, ...] = (
    "Once upon a time, there was a {noun} [named|called] {N}, who lived {home}.",
    "Once upon a time, a {noun} [named|called] {N} lived {home}.",
    "There once was a {noun} [named|called] {N}. {He} lived {home}.",
    "{N} was a {noun} who lived {home}.",
    "Long ago, there lived a {noun} [named|called] {N}. {His} home was {home}.",
    "Far away, {home}, there lived a {noun} [named|called] {N}.",
    "Not so long ago, a {noun} [named|called] {N} lived {home}.",
)

# Where no mood was asked for, a story may still end with one of the usual words.
PLAIN_ENDING = "[And that is how it was.|The end.|And they all lived happily ever after.|The end.]"

MOOD_LINES: dict[str, str] = {
    "happy": "[{N} hummed a merry little tune.|What a happy day it was!|{N} felt so light and glad that {he} laughed "
    "out loud.|Everything seemed to smile that day.]",
    "funny": "[Just then {N} [slipped on a banana skin|tripped over {his} own feet] and landed in a puddle with a big "
    "splash. How everyone laughed!|{N} sneezed so hard that a passing hen fell over backwards."
    "|A very round goose marched by, wearing a saucepan on its head. Nobody knew why."
    "|{N} tried to look serious, but there was a leaf stuck on {his} nose.]",
    "sad": "[A tear rolled slowly down {N}'s cheek.|{N} felt small and sad, and the world seemed very big."
    "|It was so quiet that {N} could hear {his} own heart, and it was heavy.|{N} sighed and looked at the ground.]",
    "scary": "[Suddenly something rustled in the dark. {N} held {his} breath, but it was only the wind."
    "|Long shadows crept over the ground, and somewhere a door creaked."
    "|Two yellow eyes blinked in the darkness, and {N} shivered. It was only an owl."
    "|It was dark and silent, and {N} felt as if someone was watching.]",
    "exciting": "[{N}'s heart beat fast. What an adventure this was!|There was no time to lose!"
    "|{N} had never done anything so exciting.|Nobody could say what would happen next.]",
    "bedtime": "[Everything was soft and quiet."
    "|Somewhere a bird sang a quiet lullaby.|A soft cloud drifted slowly by.]",
}
MOOD_ENDINGS: dict[str, str] = {
    "happy": "[And everyone was happy.|It was the happiest day of the whole year.|That night {N} fell asleep with a "
    "smile.]",
    "funny": "[And whenever they thought of that day, they laughed until their bellies hurt."
    "|Even the grumpy old goat had to giggle.]",
    "sad": "[{N} was still a little sad sometimes, but {he} was not alone any more."
    "|And when a tear came, there was always a friend to wipe it away.]",
    "scary": "[And the dark did not seem so dark any more.|After that, the shadows were only shadows.]",
    "exciting": "[It had been the greatest adventure of {his} life."
    "|And they could hardly wait for the next adventure.]",
    "bedtime": "[Then {N} curled up, closed {his} eyes and fell fast asleep. Good night."
    "|The moon rose over {P}, and soon {N} was dreaming. Good night.|{N} yawned, lay down and slept until the morning. "
    "Sweet dreams.]",
}

PLOTS: tuple[Plot, ...] = (
    Plot(
        "lost_thing",
        morals=("gratitude", "friendship", "perseverance", "teamwork"),
        script="""
@opening
{N} had a {of}[ that {he} loved very much| that {he} loved more than anything|, and {he} took it everywhere].
? {looks}

{time}, {N} {went} to {P} and came home without the {o}.
["Oh no!" cried {N}. "Where is my {o}?"|"My {o} is gone!" cried {N}.|{N} looked everywhere, but the {o} was
    gone.]
~
{N} hurried back to {P}. {He} looked {spot}, but [it was not there|there was no {o}].
? {He} looked {spot2}, but it was not there either.
? {He} asked a {h}, but the {h} had not seen it. "Ask {MN}," said the {h}. "{MHe} knows every corner of {P}."
Then {N} met a {Mnoun} [named|called] {MN}. "[Why are you so sad|What are you looking for|What is the matter]?"
    asked {MN}.
"I have lost my {o}," [said|answered] {N}. "[Do not worry|Do not cry]," said {MN}. "[I will help you look|We
    will look together|Four eyes see more than two]."

[They looked high and low|They searched for a long time|Together they searched every corner]. [At
    last|Suddenly|Just before sunset], {MN} [called out|shouted], "[Here it is|I see something|Look]!"
[There it was|There lay the {o}], {spot3}[, safe and sound|, without a scratch|].
{N} [hugged|thanked] {MN}. "Thank you! [I would never have found it alone|You are a true friend]."
? {together}
@closing
""",
    ),
    Plot(
        "found_thing",
        morals=("honesty", "kindness"),
        adjectives=("curious", "little", "kind", "poor", "gentle"),
        script="""
@opening

@scene
There, {spot}, {he} found a {of}. "[Oh|My goodness|Look at that]!" said {N}. "[How lovely it is!|Whose {o} can
    this be?|I wonder who lost it.]"
? {looks}
{N} [wanted to keep it|would have loved to keep it|thought about keeping it]. But then {he} thought, ["Somebody
    must miss this {o} very much."|"It is not mine. I must find out whose it is."]
~

{He} asked a {h}. "It is not mine," said the {h}, "but [I heard someone crying|somebody is looking for
    something|I saw somebody sad] {at2}."
{N} {went} [on|there at once] and [found|met] a {Mnoun} [named|called] {MN}. {MN} was [crying|sitting with
    {Mhis} head in {Mhis} hands|looking at the ground].
"Is this your {o}?" asked {N}. {MN}'s eyes [lit up|grew wide]. "Yes! [My grandmother gave it to me|I have been
    looking for it all day|I thought it was gone forever]. Thank you!"
? "You could have kept it," said {MN}, "but you brought it back."

[From then on the two of them met every day.|To say thank you, {MN} invited {N} to supper.|{MN} was so glad that
    {Mhe} danced.]
? {together}
@closing
""",
    ),
    Plot(
        "new_friend",
        morals=("friendship", "courage"),
        adjectives=("lonely", "shy", "quiet", "little"),
        script="""
@opening
{N} had a {of}, but [nobody to share it with|no friend to show it to].
? {looks}
[Every evening, {he} wished for a friend.|"I wish I had a friend," {he} often said.|It is hard to have fun when
    you are all alone.]
~

@scene
There {he} saw a {Mnoun} [sitting all alone|playing all alone|who was humming a song]. {N} [was too shy to say
    hello|did not know what to say|hid {spot}].
? A {h} [came by and smiled|nodded kindly]. "Say hello," said the {h}. "Every friendship begins with hello."
So {N} took a deep breath. "Hello," {he} said. "My name is {N}. [Would you like to see my {o}|Do you want to
    play with me]?"
The {Mkind} [smiled|jumped up]. "[I would love to|Oh yes|Yes, please]! My name is {MN}. [I was lonely too|I have
    been hoping that someone would ask]."

{N} showed {MN} the {o}. {together}
? When it was time to go home, they did not want to stop. "[See you tomorrow|Until tomorrow]!" said {MN}.
@closing
""",
    ),
    Plot(
        "will_not_share",
        morals=("sharing", "friendship"),
        adjectives=("proud", "stubborn", "little", "young", "grumpy"),
        script="""
@opening
{N} had a {of}[ and was very proud of it|, the only one in the whole land]. {looks}

@scene
A {Mnoun} [named|called] {MN} came [along|by]. "[What a beautiful {o}|Oh, a {o}]! May I {try}?" asked {MN}.
"No!" said {N}. "It is mine, [all mine|only mine]." {MN} [went away sadly|lowered {Mhis} head and left].
? Then a {h} asked too, but {N} [shook {his} head|said no again]. "Mine," {he} said.
{N} sat {at} alone with the {o}. [But it was not much fun|But somehow it was no joy|But the day felt long and
    empty]. [There was nobody to laugh with|There was nobody to talk to].
~

"[What good is a {o} without a friend|What is the use of a {o} if I am all alone]?" thought {N}.
{He} ran after {MN}. "I am sorry," said {N}. "Please come back. [Let us share|I want to share with you]."
{MN} smiled. "[Thank you|I would like that very much]." {together}
@closing
""",
    ),
    Plot(
        "afraid",
        morals=("courage", "friendship"),
        adjectives=("shy", "little", "small", "timid", "careful"),
        script="""
@opening
{N} was afraid of [one thing: {fear}|{fear}].
? [When the others went to {P}, {N} always stayed behind.|{He} told nobody about it.|{N} was ashamed of it.]

One evening, {N}'s friend {MN}, a {Mnoun}, did not come home. "[{MN} must still be {at}|I last saw {MN} {at}],"
    said a {h}.
[{N} trembled.|{N}'s knees shook.|{N} swallowed hard.] {He} would have to go there, and {he} was afraid of
    {fear}. But [{MN} needed help|a friend is a friend].
{He} took {his} {of} and {went} to {P}, step by step.
~
["I am not alone," {N} told {himself}. "I have my {o}."|{N} held on to the {o} and took one more step.|"Just one
    more step," whispered {N}, and held the {o} tight.]

At last {he} found {MN} {spot}. {MN} had [hurt {Mhis} foot|lost the way|fallen asleep and woken up in the dark].
    "[You came|I knew you would come]!" cried {MN}.
{N} helped {MN} up, and {helps}. Together they went home.
? "[Were you not afraid|Was it not scary]?" asked {MN}. "Yes," said {N}, "but I came anyway."
@closing
""",
    ),
    Plot(
        "keep_trying",
        morals=("perseverance", "teamwork", "patience"),
        groups=("light", "sound", "paper", "wear", "toy", "tool", "vehicle", "other"),
        adjectives=("young", "stubborn", "dreamy", "clumsy", "patient"),
        script="""
@opening
More than anything, {N} wanted to [make|have] a {of} of {his} own.
? [{He} dreamed of it every night.|{He} thought about it all day long.|{He} had drawn it in the sand a hundred
    times.]

{time}, {N} {went} to {P} to [look for|gather] [what {he} needed|the things for it], and began to make a {o}.
? {weather}
The first {o} [fell apart|came out crooked|broke in two]. The second one was [even worse|far too small|not much
    better].
~
"[I will never learn it|It is no use|I cannot do it]," [sighed|said] {N}.
A {Mnoun} [named|called] {MN} had been watching. "[Do not give up|Try once more]," said {MN}. "[I fell a hundred
    times before I learned to {Mgo}|My mother always says that the third time is the best|Every mistake shows you
    something]."
? A {h} came by too and [brought them some tea|gave them good advice]: "Slowly, slowly. There is no hurry."

So {N} tried again, and {MN} helped. [They worked until the sun went down|They worked for three whole days|They
    measured twice and took their time]. [And then|At last], it was finished: a [real|perfect|wonderful] {o}!
"We did it!" [cried|shouted] {N}. {together}
@closing
""",
    ),
    Plot(
        "storm_rescue",
        morals=("courage", "kindness", "friendship"),
        adjectives=("brave", "little", "kind", "young"),
        script="""
@opening
{N} had a {of}. {looks}

One [night|evening], a [great|terrible] storm came. The wind [howled|roared], and the rain [beat down|fell like
    a river].
~
Then {N} heard a voice from far away. "Help! Help!" It was [coming from {P}|somewhere {at}].
"[Someone is in trouble|I must go and help]," said {N}. {He} took the {o} and {went} out into the storm.
? "Be careful!" called a {h} from a window.
[Behind a fallen tree|Under a broken branch|Between the rising waters], {N} found a {Mnoun} [named|called] {MN}.
    "[I cannot find my way home|I am stuck and cannot get out]," {Mhe} said, [shivering|shaking with cold].

"[Hold on to me|Do not be afraid]," said {N}. Step by step they made their way back, and {helps}.
[At last they were safe and dry.|Soon they were sitting in the warm, wrapped in blankets.|When they reached
    {N}'s home, the storm was almost over.] "You saved me," said {MN}.
? In the morning the sky was clear again. {together}
@closing
""",
    ),
    Plot(
        "boast",
        morals=("modesty", "friendship"),
        groups=("light", "sound", "paper", "wear", "toy", "tool", "nature", "treasure", "vehicle", "other"),
        adjectives=("proud", "clever", "restless", "young"),
        script="""
@opening
{N} [had|owned] a {of} and boasted about it all day long. "[Nobody has a better {o} than me|My {o} is the best
    in the world|I am the cleverest of all, and my {o} proves it]!" {he} said.
? A {h} only shook a wise head. "We shall see," said the {h}.

{time}, a {Mnoun} [named|called] {MN} said, "[Let us have a race to {P}|I will race you to {P}]." {N} laughed.
    "[You? You are much too slow|Against me? You will never win]!"
They set off. {N} was soon far ahead. "I have [plenty of time|all the time in the world]," {he} thought, and
    stopped to [show everyone the {o}|admire the {o}|polish the {o}].
~
But {he} talked and talked, and {MN} [went quietly by|kept going, one step after the other]. When {N} [looked
    up|started to run again], {MN} was already {at}.

{N} [turned red|hung {his} head]. "You won," {he} said quietly. "[I boasted too much|I am sorry that I
    laughed]."
"[It was a good race|That is all right]," said {MN} kindly. "[Will you show me your {o}|May I see the {o} now]?"
    {together}
@closing
""",
    ),
    Plot(
        "broken_thing",
        morals=("honesty",),
        groups=("light", "sound", "paper", "wear", "toy", "tool", "vehicle", "treasure", "other"),
        adjectives=("playful", "clumsy", "restless", "young"),
        script="""
@opening
{His} friend {MN}, a {Mnoun}, had a {of}. {looksM}

{time}, {N} was [playing|jumping about|dancing] {at} and [knocked against|bumped into|dropped] the {o}.
    [Crash|Crack|Oh no]! [It broke|Now it was broken].
Nobody had seen it. {N} [hid the {o}|put the pieces] {spot} and [ran home|went away quickly].
~
"[Have you seen my {o}|Do you know where my {o} is]?" asked {MN} later. "No," said {N}, and [{his} face grew
    hot|{his} tummy hurt|{he} could not look up].
? That night {N} could not sleep. The lie [felt like a stone|weighed more and more].

[In the morning|The next day], {N} went to {MN}. "I [must|have to] tell you something," {he} said. "I broke your
    {o}, and then I did not tell the truth. I am [so|very] sorry."
{MN} was quiet for a moment. [Then {Mhe} smiled.|Then {Mhe} nodded.] "Thank you for telling me," said {MN}. "[A
    {o} can be mended|We can mend the {o} together|I am still your friend]."
[They mended the {o} with care, and it was almost as good as new.|A {h} helped them, and soon the {o} was whole
    again.|Together they put it right, and the {o} looked even better than before.]
@closing
""",
    ),
    Plot(
        "strange_sound",
        morals=("curiosity", "courage", "friendship"),
        groups=("light", "sound", "toy", "tool", "treasure", "vehicle", "paper", "other"),
        adjectives=("curious", "sleepy", "little", "brave"),
        script="""
@opening

One [night|evening], {N} heard a strange sound. [Tap, tap, tap|Whoo, whoo|Clink, clink|Bump, bump, bump]! It
    came from {P}.
~
"[What can that be|Who is there]?" [wondered|whispered] {N}. [{He} wanted to hide, but {he} also wanted to
    know.|{He} could not sleep until {he} knew.]
? "[Perhaps it is a monster|Do not go there]," said a {h}. But {N} was too curious.
So {he} {went} to {P}, as quietly as {he} could. The sound grew louder. {N} looked {spot}, and then {spot2}.

And what did {he} see? It was [no monster at all|not a monster], only a {Mnoun} with a {of}!
"[Did I wake you|Was I too loud]?" said the {Mkind}.
"My name is {MN}. I [found|got] this {o} today, and I am trying to [find out how it works|learn what it is
    for]."
{N} laughed. "And I thought you were a monster! [May I help you|May I have a look]?"
{together}
@closing
""",
    ),
    Plot(
        "gift",
        morals=("kindness", "perseverance"),
        adjectives=("kind", "poor", "young", "gentle", "cheerful"),
        script="""
@opening
{His} best friend was {MN}, a {Mnoun}. [Tomorrow was {MN}'s birthday|It would soon be {MN}'s birthday], and {N}
    had no present.
{N} knew that {MN} had always wanted a {of}. But [{he} had no money|{his} pockets were empty].
~

{time}, {N} {went} to {P}. {He} met a {h} who [had|was selling] [just such a {o}|a {of}].
? {weather}
"I [cannot pay|have no money]," said {N}, "but I can work." So {he} [swept and carried|scrubbed and
    polished|chopped and stacked wood] all day long, [and did not complain once|until {his} back ached].
In the evening the {h} [smiled|nodded]. "You have [earned it|worked well]. Here is your {o}."

The next morning, {N} knocked at {MN}'s door. "Happy birthday!" {he} said and held out the {o}.
{MN}'s eyes [shone|filled with tears of joy]. "[It is just what I wished for|It is the best present of all]!"
    {Mhe} said.
? {together}
@closing
""",
    ),
    Plot(
        "cannot_wait",
        morals=("patience",),
        adjectives=("restless", "young", "hungry", "stubborn"),
        script="""
@opening
{N} could not wait for anything. {He} wanted everything at once.

{time}, {N} visited {MN}, a {Mnoun} who [lived|worked] {at}. {MN} was making a {of}. "[It is for you|You may
    have it when it is ready]," said {MN}, "but it [needs three days|will take me three days]."
"Three days!" [cried|groaned] {N}. "That is [much too long|an eternity]!"
~
On the first day, {N} [asked every five minutes whether it was ready|walked up and down, up and down]. On the
    second day, {he} [tried to take it when nobody was looking, and it nearly broke|pulled at it, and {MN} had to
    start again].
? "[Watch the clouds with me|Sit down beside me]," said a {h}. "Waiting is easier in good company."
On the third day, {N} [sat down and listened to the birds|watched the light change|helped {MN} sweep the floor]
    and forgot to count the hours.

"It is ready," said {MN} [at last|in the evening]. [What a beautiful {o} it was|It was the finest {o} that {N}
    had ever seen]! "[It was worth waiting for|I am glad that we waited]," said {N}.
? {together}
@closing
""",
    ),
    Plot(
        "wishes",
        morals=("gratitude", "friendship"),
        adjectives=("grumpy", "lazy", "greedy", "restless"),
        script="""
@opening
{N} was never content with what {he} had.

@scene
{He} found a {of} {spot}. When {he} touched it, a [soft|tiny] voice said, "I am a magic {o}. I will grant you
    [three wishes|three small wishes]."
"[I wish for a mountain of sweets|I wish for a hundred cakes]!" said {N} at once. [Whoosh|Poof]! But {he} ate so
    much that {his} tummy ached.
"[I wish for a golden palace|I wish for a house as big as a hill]!" said {N}. [Whoosh|Poof]! But it was [cold
    and empty|so big that {he} got lost in it], and {he} was all alone.
~

Then {N} heard a knock. It was {MN}, a {Mnoun} [who had been {his} friend for years|from next door]. "I have
    missed you," said {MN}. "I brought you some warm soup."
{N} looked at the {o} and thought for a long time. "I wish that everything was as it was before," {he} said. And
    so it was.
? They ate the soup together, and no palace in the world could have been nicer.
{N} kept the {o} [on a shelf|by the window], but [{he} never made another wish|{he} did not need its magic any
    more].
@closing
""",
    ),
    Plot(
        "journey",
        morals=("perseverance", "courage"),
        adjectives=("brave", "young", "patient", "little"),
        script="""
@opening

{time}, a {h} came to {N}. "Please carry this {of} to {MN}, the {Mkind} who lives far away {at}[|, and nobody
    else can go]."
"I will [do it|do my best]," said {N}. {He} packed [some bread and a blanket|a little food|a warm blanket] and
    set off.
? [The sun was just coming up.|A few clouds sailed along the sky.|The birds were singing.]
The way was long. [First {N} had to cross a cold stream.|First there was a steep hill to climb.|First {N} got
    lost at a crossroads.] [Then {his} feet grew tired.|Then it grew dark.|Then it began to rain.]
~
"[I could turn back|Perhaps I should go home]," thought {N}. But {he} looked at the {o} and went on.
? [A kind stranger gave {him} a place by the fire.|A star showed {him} the way.|A little bird sang to cheer
    {him} up.]

At last {N} came to {P}, and there was {MN}, a {Mnoun}. "You have brought the {o}!" cried {MN}. "[I had almost
    given up hope|I have waited so long for it]."
[That evening they had a feast.|{MN} made hot tea, and {N} told about the long way.] {together}
@closing
""",
    ),
    Plot(
        "fair",
        morals=("teamwork", "kindness", "friendship"),
        adjectives=("busy", "cheerful", "hard-working", "young"),
        script="""
@opening
[Every year|Once a year] there was a big fair {at}, and whoever brought the finest {o} won a prize. {N} had a
    {of}. "[This year I want to win|Perhaps I can win this time]!" said {N}.

On the day of the fair, {N} {went} to {P} with the {o}. {weather}
~
On the way {he} met {MN}, a {Mnoun}. {MN} was sitting by the road with a broken cart. "[I cannot go to the fair
    now|Now I shall come too late]," said {MN}.
{N} [thought of the prize|looked at the sun; it was late]. But {he} stopped. "I will help you," {he} said. "[Two
    can mend what one cannot|We will be quick]."
? They pushed and pulled and hammered. A {h} lent them a hand.
When they came to {P}, [the judges were just about to leave|it was almost too late]. ["Wait!" called
    {N}.|"Please wait for us!" called {MN}.]

[The judges looked at the {o} and nodded.|A judge had seen everything from a hill.] "The prize goes to both of
    you," they said, "for [the finest {o} and the finest friendship|helping each other]."
? {together}
@closing
""",
    ),
    Plot(
        "learn_it",
        morals=("perseverance", "patience", "gratitude"),
        groups=("sound", "toy", "vehicle", "other"),
        adjectives=("clumsy", "patient", "curious", "young"),
        script="""
@opening
On {his} birthday, {N} got a {of}. {looks} But {N} did not know [what to do with it|how to use it properly].

{time}, {N} {went} to {P} to practise. [It went all wrong|It was much harder than it looked]. [Some crows
    laughed|The others giggled], and {N} [blushed|wanted to throw the {o} away].
~
"[May I show you something|Shall I help you]?" asked a {Mnoun} [named|called] {MN}. "[I had a {o} once|I could
    not do it either, at first]."
{MN} showed {N} how to do it, [slowly|a little at a time]. Every day they met {at} and practised.
? Some days it went well, and some days it did not. "[That is how learning works|Little by little]," said {MN}.
? Even a {h} stopped to watch. "You are getting better," said the {h}.

When [summer|winter|spring] came, {N} could [do it as if it were the easiest thing in the world|do it with
    closed eyes]. "Thank you for [teaching me|not laughing at me]," {he} said. {MN} [smiled|beamed].
? {together}
@closing
""",
    ),
    Plot(
        "quarrel",
        morals=("sharing", "friendship"),
        adjectives=("stubborn", "playful", "merry", "young"),
        script="""
@opening
{N} had a friend, a {Mnoun} [named|called] {MN}.

{time}, the two friends {pairwent} to {P}. {spotcap} they saw a {of}.
? {weather}
"I saw it first!" cried {N}. "No, I did!" cried {MN}. They [pulled and pushed|quarrelled] until [both of them
    were cross|neither of them would speak to the other].
~
A {h} had heard the noise. "[Why do you shout so|What is all this about]?" asked the {h}. "[A {o} is soon found
    again, but a friend is not|You can find another {o}, but not another {MN}]."
{N} [looked at {his} feet|felt ashamed]. "I am sorry, {MN}," {he} said. "[You may have it first|Let us take
    turns]."
"I am sorry too," said {MN}. "[Let it belong to both of us|We can share it]."

[And so they did.|They shook hands on it.] {together}
@closing
""",
    ),
    Plot(
        "wondering",
        morals=("curiosity",),
        adjectives=("curious", "clever", "dreamy"),
        script="""
@opening
{time}, {N} heard someone talk about {topic}. "[How interesting|I would love to know more|I want to know
    everything about {topic}]!" {he} thought.

First {N} asked a {h}. "{topiccap}?" said the {h}. "[That is a big question|I have often wondered about that
    myself|You should ask somebody wiser than me]."
? Then {he} {went} to {P}, where {sight}, and thought about {topic} for a long time.
~
{At}, {N} met a {Mnoun} [named|called] {MN}, who carried a {of}. "Do you know [anything|something] about
    {topic}?" asked {N}.
"[Only a little|Not much]," said {MN}, "but [we could find out together|two heads are better than one|it is more
    fun to learn with a friend]."

So they [asked and read and looked|asked everyone they met|made drawings and guesses]. [The more they learned
    about {topic}, the more they wanted to know.|Every answer led to a new question, and that was the best part.]
? In the end they [wrote a song|made a little play|painted a big picture] about {topic}, and everyone clapped.
@closing
""",
    ),
    Plot(
        "play_about_it",
        morals=("curiosity", "teamwork", "perseverance"),
        adjectives=("dreamy", "cheerful", "busy", "young"),
        script="""
@opening
{N} [wanted to put on|had an idea for] a play about {topic}. "[Everyone should know about {topic}|It will be a
    great play about {topic}]!" {he} said.

{time}, {N} {went} to {P} and asked who would join in.
"[I know nothing about {topic}|Why {topic}, of all things]," said a {h}. [But {N} did not give up.|{N} only
    smiled.]
~
Then a {Mnoun} [named|called] {MN} raised a hand. "[I should like to help|I will play any part you want]," said
    {MN}, "and I have a {of} that we can use."
? {weather}
They [practised every day|painted a big sign|learned their words by heart]. [The first time, everything went
    wrong.|At first {MN} forgot every word.] But [each day it got better|little by little they learned].

On the great day, [half the village came|every seat was taken]. {N} told all about {topic}, and {MN}
    [danced|sang|played] with the {o}. [How they all clapped!|Everyone cheered.]
? "[Now I want to know more about {topic}|I never knew that {topic} could be so interesting]," said the {h}.
@closing
""",
    ),
    Plot(
        "a_song_together",
        morals=("friendship", "kindness", "sharing"),
        adjectives=("lonely", "shy", "little", "gentle"),
        short=True,
        script="""
[Once upon a time, there was a {noun} [named|called] {N}.|{N} was a {noun}.|There once was a {noun}
    [named|called] {N}.] {N} [had|owned] a {of}, but no one to share it with.
{time}, {N} {went} to {P} and met {MN}, a {Mnoun}. "[Hello there|What a fine {o}]!" said {MN}.
~
{together}
@closing
""",
    ),
    Plot(
        "a_small_find",
        morals=("honesty", "kindness"),
        adjectives=("little", "kind", "curious", "young"),
        short=True,
        script="""
[Once upon a time, a {noun} [named|called] {N}|A {noun} [named|called] {N} once|Long ago, a {noun}
    [named|called] {N}] found a {of} {at}. It lay {spot}.
"[This is not mine|Somebody must miss it]," said {N}.
~
So {he} asked everyone, until a {Mnoun} [named|called] {MN} cried, "That is my {o}! [Thank you, thank you|How
    can I ever thank you]!"
@closing
""",
    ),
    Plot(
        "one_more_try",
        morals=("perseverance", "patience", "courage", "teamwork"),
        adjectives=("stubborn", "little", "young", "brave"),
        short=True,
        script="""
There [once was|was once] a {noun} [named|called] {N}, who wanted to bring a {of} to {MN}, a {Mnoun} {at}.
The first time, {he} [fell into a stream|lost the way]. The second time, [it rained too hard|it grew too dark].
~
"[One more try|I will not give up]," said {N}. And the third time, there was {MN}, waving. "[You did it|At last,
    my {o}]!" said {MN}, and they both laughed.
@closing
""",
    ),
    Plot(
        "a_big_question",
        morals=("curiosity",),
        adjectives=("curious", "little", "clever"),
        short=True,
        script="""
[Once upon a time, there was a {noun} [named|called] {N}, who|A {noun} [named|called] {N}] wanted to know all
    about {topic}.
~
{He} asked {MN}, a {Mnoun}, {at}. "[I do not know much|That is a big question]," said {MN}, "but [let us find
    out|we can ask together]."
So they [asked and asked|read and looked], and soon they knew more about {topic} than anyone else.
@closing
""",
    ),
    Plot(
        "learn_skill",
        morals=("perseverance", "courage", "patience", "friendship"),
        adjectives=("young", "dreamy", "little", "shy", "stubborn"),
        script="""
@opening
[More than anything in the world|More than anything], {N} wanted to {skill}. "[One day I will {skill}|I want to
    {skill}]," {he} told everyone.
? "[You? You will never {skill}|That is not for you]!" [laughed the crows|said some crows and laughed].

{time}, {N} {went} to {P} and tried [for the first time|all by {himself}]. [It did not go well|It went badly],
    and {he} [fell into the grass|sat down with a sigh].
? {weather}
~
A {Mnoun} [named|called] {MN} [was watching|came by]. "Do you want to {skill}?" asked {MN}. "[I can help you|I
    know how to begin]. [First you must believe in yourself|Start with something small]."
{MN} [gave|lent] {N} a {of}. "[This will bring you luck|Keep this with you, and do not give up]," said {MN}.
So {N} practised every day {at}, with the {o} [beside {him}|close by].
? A {h} stopped and watched. "A little better every day," said the {h}.

[And one fine day|Then, one morning], {N} [could really {skill}|did it: {he} could {skill}]! {MN}
    [cheered|clapped]. "[I knew it|You did it]!"
? {together}
@closing
""",
    ),
)
