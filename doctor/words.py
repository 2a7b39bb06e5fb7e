"""How a sentence is said: in English, and on a screen in Chinese where the locale is Chinese.

say("rank {rank} does not load it", rank=1) is the English sentence: a str, as files and programs
get it. It remembers its template, by which zh/ knows the Chinese one; on_screen() chooses.
"""

import os
import re


class Said(str):
    """A sentence, or a part of one."""

    template, values = "", {}

    def chinese(self):
        from .zh import SENTENCES

        known = {name: chinese(value) for name, value in self.values.items()}
        return SENTENCES.get(self.template, self.template).format(**known)


class Listed(Said):
    """Parts with something between them."""

    parts, between = (), ""

    def chinese(self):
        return self.between.join(map(str, map(chinese, self.parts)))


def say(template, **values):
    said = Said(template.format(**values))
    said.template, said.values = template, values
    return said


def listed(parts, english=", ", chinese="\u3001"):
    parts = list(parts)
    said = Listed(english.join(map(str, parts)))
    said.parts, said.between = parts, chinese
    return said


def both(parts):
    """ "0 and 1" """
    return listed(parts, " and ", " 和 ")


def clauses(parts):
    """ "rank 0 has ended, rank 1 waits" """
    return listed(parts, ", ", "\uff0c")


def chinese(value):
    """Of a sentence; of a plain name, such as that of a call, if it has one."""
    from .zh import NAMES, PATTERNS

    if isinstance(value, Said):
        return value.chinese()
    if not isinstance(value, str):
        return value
    value = NAMES.get(value, value)
    for english, other in PATTERNS:
        value = re.sub(english, other, value)
    return value


def is_chinese():
    """The locale of messages, as the C library finds it."""
    names = (os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    return next(filter(None, names), "").startswith("zh")


def on_screen(said):
    """What is printed. Between two Chinese characters, of a template and a value, is no space."""
    if not is_chinese():
        return str(said)
    return re.sub(r"(?<=[\u4e00-\u9fff\uff09]) (?=[\u4e00-\u9fff\uff08])", "", chinese(said))


def page(place):
    """Where a heading of docs/ is in the reader's language: place is bugs.md#padded-validation."""
    from .zh import HEADINGS

    if not is_chinese():
        return f"docs/{place}"
    name, _, heading = place.partition("#")
    return f"docs/{name.replace('.md', '.zh-CN.md')}#{HEADINGS.get(place, heading)}"
