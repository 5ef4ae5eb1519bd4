"""The demo corpus's words: few, so that a few million weights can learn what is done with them."""

NAMES = (
    "Ada Bo Cleo Dan Eva Finn Gus Hana Ivan Jo Kim Lena Max Nina Omar Pia Quinn Rosa Sam Tara Uma "
    "Vera Will Xena Yuri Zoe Alan Grace Linus Marie Niels Otto Paul Ruth Sofia Tom Anna Ben Carl "
    "Dora Emil Fay Hugo Iris Jack Kai Leo Mia Noah Olga"
).split()
CITIES = (
    "Paris Rome Berlin Madrid Oslo Vienna Prague Lisbon London Dublin Athens Warsaw Tokyo Cairo "
    "Lima Delhi Boston Denver Quito Seoul Bern Porto Milan Lyon Bonn"
).split()
ANIMALS = (
    "cat dog fox bear owl mouse horse rabbit duck frog goat lion turtle whale hen wolf".split()
)
COLORS = "red blue green yellow black white brown orange purple pink gray gold".split()
FRUITS = "apples pears plums grapes lemons cherries figs melons peaches dates".split()
THINGS = (
    "lamp book boat key clock map box bell chair cup drum hat kite letter mirror pen ring rope "
    "shoe spoon stone table tent wheel basket bottle bridge candle coat door"
).split()
PLACES = (
    "forest river garden village market harbor mountain beach school castle farm station".split()
)
JOBS = "baker doctor teacher pilot farmer painter nurse driver singer writer cook gardener".split()
ADJECTIVES = (
    "small big old new bright dark quiet loud warm cold happy kind brave clever slow quick soft "
    "round heavy light clean strange gentle tired"
).split()
VERBS = "finds opens carries paints washes drops sells buys hides moves cleans keeps".split()
WEATHER = "sunny rainy cloudy windy snowy foggy".split()
TOPICS = "history travel music science sport food nature art games health".split()
TIMES = "morning evening noon night spring summer autumn winter".split()
FUNCTION_NAMES = (
    "run check compute helper process solve apply convert handle work calc get_value do_it step "
    "total result measure find build make"
).split()
PARAMETERS = (
    "a b x y n m left right first second value number item text items values data words".split()
)
FIELDS = (
    "name age size color price count title owner weight height level score width brand year".split()
)
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Spain": "Madrid", "Norway": "Oslo",
    "Austria": "Vienna", "Portugal": "Lisbon", "England": "London", "Ireland": "Dublin",
    "Greece": "Athens", "Poland": "Warsaw", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima",
}  # fmt: skip
FACTS = {
    "cat": "A cat is a small animal with soft fur. Cats sleep a lot and like to hunt mice.",
    "dog": "A dog is a loyal animal. Dogs like to run, play and stay close to people.",
    "fox": "A fox is a clever animal with a thick tail. Foxes live in forests and hunt at night.",
    "bear": "A bear is a big, strong animal. Bears eat berries and fish and sleep in winter.",
    "owl": "An owl is a bird that hunts at night. Owls have big eyes and hear very well.",
    "mouse": "A mouse is a tiny animal with a long tail. Mice eat seeds and hide from cats.",
    "horse": "A horse is a big, fast animal. Horses eat grass and can carry people.",
    "rabbit": "A rabbit is a soft animal with long ears. Rabbits eat grass and jump well.",
    "duck": "A duck is a bird that swims. Ducks live near water and eat plants.",
    "frog": "A frog is a green animal that jumps. Frogs live near water and eat flies.",
    "lion": "A lion is a big cat. Lions live in groups and hunt together.",
    "turtle": "A turtle is a slow animal with a hard shell. Turtles can live a very long time.",
    "whale": "A whale is the biggest animal in the sea. Whales breathe air and sing songs.",
    "wolf": "A wolf is a wild animal like a dog. Wolves live and hunt in groups.",
}
SYLLABLES = "ba ko mi ru sa te lo vi ne da fu gi ha jo ka lu mo no pe ri su ta ve wo zi".split()
