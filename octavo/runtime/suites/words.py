"""The closed vocabulary of the suites: names, values and filler, each a single token of octavo-nano's tokenizer."""

from __future__ import annotations

FIRST_NAMES = (
    *("Mara", "Otto", "Lena", "Hugo", "Nina", "Paul", "Rosa", "Karl", "Emma", "Felix", "Clara", "Oscar"),
    *("Anna", "Jonas", "Greta", "Simon", "Ida", "Peter", "Vera", "Martin", "Edith", "Adam", "Sara", "Lukas"),
    *("Nora", "David", "Irma", "Anton", "Julia", "Tomas", "Helen", "Victor", "Alma", "Robert", "Maria", "Stefan"),
    *("Olga", "Daniel", "Laura", "Marcus", "Eva", "Henry", "Tilda", "Conrad", "Agnes", "Walter", "Elsa", "Bruno"),
)
LAST_NAMES = (
    *("Holt", "Brand", "Stone", "Marsh", "Field", "Wells", "Hart", "Lane", "Price", "Grant", "Moss", "Reed"),
    *("Cole", "Dale", "Frost", "Hale", "Kent", "Lamb", "Mills", "North", "Park", "Shaw", "Todd", "West"),
    *("Barker", "Carter", "Fisher", "Gardner", "Hunter", "Mason", "Porter", "Turner", "Walker", "Weaver", "Parker"),
    *("Miller", "Bishop", "Burton", "Dalton", "Hilton", "Milton", "Norton", "Weston", "Ashton", "Fenton", "Sutton"),
    *("Benson", "Nelson"),
)
COLOURS = (
    *("red", "blue", "green", "white", "black", "brown", "grey", "pink", "gold", "silver", "purple", "orange"),
    *("yellow", "amber", "violet", "cream", "coral", "ivory", "navy", "olive", "teal", "rose", "rust", "plum"),
)
BIRDS = (
    *("heron", "robin", "wren", "finch", "crow", "gull", "hawk", "owl"),
    *("swan", "stork", "raven", "lark", "dove", "crane", "eagle", "swift"),
)
TREES = (
    *("oak", "elm", "ash", "birch", "cedar", "maple", "pine", "fir"),
    *("willow", "hazel", "larch", "alder", "beech", "poplar", "holly", "yew"),
)
STONES = (
    *("granite", "marble", "slate", "flint", "jade", "opal", "quartz", "basalt"),
    *("chalk", "agate", "onyx", "topaz", "garnet", "jasper", "ruby", "pearl"),
)
CRAFTS = (
    *("weaving", "printing", "baking", "carving", "fishing", "sailing", "painting", "brewing"),
    *("mining", "farming", "glazing", "tanning", "spinning", "forging", "binding", "dyeing"),
)
PLACES = tuple(
    head + tail
    for head in ("Vel", "Tas", "Kor", "Bren", "Dol", "Fen", "Gal", "Hul", "Jor", "Lan", "Nor", "Pel", "Rus", "Sil")
    for tail in ("mor", "ku", "den", "by", "vik", "na", "gard", "ling", "wick", "sund", "ra", "tov", "mere", "holm")
)
"""Invented towns, built of syllables."""

POSSESSIONS = ("key", "lamp", "box", "gate", "boat", "cart")
"""What the records of one context are about."""
COUNTED = (
    *("coins", "pears", "books", "shells", "stamps", "cards", "nuts", "beads"),
    *("eggs", "pens", "maps", "seeds", "buttons", "candles", "letters", "ribbons"),
)

ADJECTIVES = ("old", "small", "quiet", "long", "bright", "cold", "warm", "narrow", "heavy", "soft", "tall", "dark")
NOUNS = (
    *("house", "road", "river", "garden", "bridge", "wall", "window", "door", "field", "hill", "table", "street"),
    *("market", "tower", "well", "barn"),
)
PLACED = ("stands", "lies", "waits", "rests", "ends", "begins")
BESIDE = ("near", "behind", "beside", "above", "below", "under")
