# SPDX-License-Identifier: Apache-2.0
"""The words of `shifting_prefs`: topics with values, sentence frames, people, small talk.

All of it was made up for this data set and lies in words/. A topic is a block of lines:
`label | area | act`, then `value = sign`, where a sign names things by which the value is known without
its name and without the words of the question. A frame is `key.form = text`; several lines of one key
are alternatives. Form "sim" speaks in the question's own words, form "dis" in signs only. Frames of one
kind say nothing of order ("switched to"), so that a frame alone never tells new from old. Small talk,
which holds no topic, is `user = assistant`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Topic:
    label: str  # what a question asks for: "hot drink"
    area: str  # the field it lies in: "hot drinks"
    act: str  # what one does with a value, with {v}
    values: tuple[str, ...]
    signs: dict[str, str]  # value -> things that give it away


@dataclasses.dataclass(frozen=True)
class Language:
    cues: tuple[str, ...]  # of the present, for evidence and distractors alike
    people: tuple[str, ...]
    spare: str  # a person who holds no topic; minimal pairs need one
    me: str
    guests: tuple[str, ...]
    conditions: tuple[tuple[str, str], ...]
    months: tuple[str, ...]
    date: str


LANGUAGES = {
    "en": Language(
        cues=(" these days", " at the moment", " lately", " right now"),
        people=(
            *("my sister", "my brother", "my neighbour", "my colleague", "my cousin"),
            *("my aunt", "my uncle", "my flatmate", "my boss", "my dentist"),
        ),
        spare="my landlord",
        me="me",
        guests=("Ilse", "Marek", "Tove", "Idris", "Nell", "Oskar"),
        conditions=(
            ("on weekdays", "at weekends"),
            ("when I am alone", "when I have company"),
            ("when it rains", "when the sun shines"),
            ("in the first half of the month", "in the second half of the month"),
        ),
        months=(
            *("January", "February", "March", "April", "May", "June", "July"),
            *("August", "September", "October", "November", "December"),
        ),
        date="{day} {month} {year}",
    ),
    "zh": Language(
        cues=("这阵子", "目前", "近来", "眼下"),
        people=("我姐姐", "我弟弟", "我邻居", "我同事", "我表妹", "我姑姑"),
        spare="我房东",
        me="我",
        guests=("小鹿", "老魏", "阿蓉", "志远"),
        conditions=(
            ("工作日", "周末"),
            ("一个人的时候", "朋友来的时候"),
            ("下雨天", "大晴天"),
            ("上半月", "下半月"),
        ),
        months=tuple(str(i) for i in range(1, 13)),
        date="{year}年{month}月{day}日",
    ),
    "es": Language(
        cues=(" últimamente", " en estos momentos", " hoy en día", " estos días"),
        people=("mi hermana", "mi hermano", "mi vecina", "mi colega", "mi prima", "mi tío"),
        spare="mi casero",
        me="mí",
        guests=("Irune", "Mateo", "Alba", "Nuño"),
        conditions=(
            ("entre semana", "los fines de semana"),
            ("a solas", "en compañía"),
            ("cuando llueve", "cuando hace sol"),
        ),
        months=(
            *("enero", "febrero", "marzo", "abril", "mayo", "junio", "julio"),
            *("agosto", "septiembre", "octubre", "noviembre", "diciembre"),
        ),
        date="{day} de {month} de {year}",
    ),
}


def _topics(name: str) -> tuple[Topic, ...]:
    found = []
    for block in _text(f"topics_{name}").split("\n\n"):
        head, *rows = block.split("\n")
        label, area, act = head.split(" | ")
        signs = dict(row.split(" = ") for row in rows)
        found.append(Topic(label, area, act, tuple(signs), signs))
    return tuple(found)


def _frames(name: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in _text(f"frames_{name}").split("\n"):
        key, frame = line.split(" = ", 1)
        found[key] = (*found.get(key, ()), frame)
    return found


def _talk(name: str) -> tuple[tuple[str, str], ...]:
    return tuple(tuple(line.split(" = ")) for line in _text(f"talk_{name}").split("\n"))


def _text(name: str) -> str:
    return (Path(__file__).with_name("words") / f"{name}.txt").read_text("utf-8").strip()


# dev tunes what is trained on train: other users, topics and values, the frames of train. The
# telegraphic en_notes and all Spanish have no counterpart outside test.
SPLIT_FAMILIES = {
    "train": {"en": ("en_plain", "en_talk"), "zh": ("zh_plain",)},
    "dev": {"en": ("en_plain", "en_talk"), "zh": ("zh_plain",)},
    "test": {
        "en": ("en_account", "en_banter", "en_notes"),
        "zh": ("zh_story",),
        "es": ("es_plain",),
    },
}
TOPICS = {
    split: {language: _topics(f"{language}_{split}") for language in of}
    for split, of in SPLIT_FAMILIES.items()
}
FAMILIES = {
    name: _frames(name)
    for of in SPLIT_FAMILIES.values()
    for families in of.values()
    for name in families
}
TALK = {
    (language, split): _talk(f"{language}_{split}")
    for split in ("train", "test")  # dev has that of train
    for language in SPLIT_FAMILIES[split]
}
THINGS = {language: tuple(_text(f"things_{language}").split(", ")) for language in LANGUAGES}
