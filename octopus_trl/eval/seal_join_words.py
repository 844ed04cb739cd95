"""Word lists of the seal join world: short, disjoint, each one token of the world's tokenizer."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """amber ashen bleak blue bold brave brisk broad calm coral crisp curly damp dark dim dusky
    faint fair fleet fond frank gaunt glad gold grand gray green grim hardy hazel husky idle ivory
    jade keen lean lilac lone loud lucky mild misty muted neat noble olive pale plain proud quick
    quiet rapid red royal ruddy rusty sharp sleek slim snowy stark swift"""
)
NOUNS = _words(
    """adder aspen badger birch bison briar cedar cod crane crow deer dove eagle elk elm fern finch
    fir fox frog goose gull hare hawk heron holly ibex ivy jay kite lark lily lion lynx maple mink
    mole moth newt oak otter owl pike pine quail raven reed robin rook stork swan teal toad trout
    viper vole wasp whale wolf wren yew"""
)
KINDS = ("depot", "station", "guild", "office")
CLASSES = _words("quarry harbor garden forge market mill bridge tower stable vault chapel orchard")
THINGS = _words("yard gate roof hall lamp bench fence barn path well")
STATES = _words("light shut clean busy bare full wet dusty")
TIMES = _words("spring summer autumn winter march june")

# Crockford's base 32 less the digits that look like letters: 24 letters and 8 digits.
SYMBOLS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"

# What pages, prompts, tool calls and their answers say besides names.
PROTOCOL = _words(
    """the a of is at in and to for no not this it its with by on you your are each
    steward seal seals chair names edition current withdrawn former see also
    class find page open search query docid read thread threads id ids wait
    fork task rewind turn note commit result done budget tokens forked mounted committed running
    status hits call tool tools error user assistant system place then
    order most all turns rewound nothing new refused"""
)
