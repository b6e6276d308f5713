"""Names that only language shows, and what only looks like a name."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from proxy.core.compaction.digest import digest_of
from proxy.core.compaction.names import (
    LEAST_SEARCHED,
    STANDARD,
    TOGETHER,
    Names,
    dates,
    is_meaningless,
    proper_names,
    without_line_numbers,
)
from proxy.core.conversation import ItemText, Role
from tests.support.engine_fixtures import count_tokens


@pytest.mark.parametrize(
    ("text", "date"),
    [
        ("We met on 7 May 2023 there.", "7 May 2023"),
        ("It is due March 12, 2024, at noon.", "March 12, 2024"),
        ("Am 3. August ist es so weit.", "3. August"),
        ("我们5月20日出发", "5月20日"),
        ("5月2日", "5月2日"),
        ("출발은 5월 20일 입니다", "5월 20일"),
    ],
)
def test_a_date_in_words_keeps_its_day(text: str, date: str) -> None:
    """A month with its day is one figure."""
    assert dates(text) == [date]
    assert date in digest_of([ItemText("user", text)], 100, count_tokens).numbers


@pytest.mark.parametrize(
    ("text", "figure"),
    [
        ("It costs $1,250.50, they say.", "$1,250.50"),
        ("The sum is 12,500 in all.", "12,500"),
        ("Das macht 1.299,00 Euro.", "1.299,00"),
        ("Call +44 20 7946 0958 now.", "+44 20 7946 0958"),
        ("Or (415) 555-2671?", "(415) 555-2671"),
    ],
)
def test_amounts_and_telephone_numbers_are_one_figure(text: str, figure: str) -> None:
    """What a comma or a blank divides is not named by its parts."""
    assert digest_of([ItemText("user", text)], 100, count_tokens).numbers == (figure,)


@pytest.mark.parametrize("path", ["../util/log", "./lib/helper.js", ".github/workflows/ci.yml", "src/app.py"])
def test_a_relative_path_keeps_its_dots(path: str) -> None:
    """Dots before a path are a part of it, those of a sentence are not."""
    text = f"require('{path}') ...and/or {path}."
    assert digest_of([ItemText("assistant", text)], 100, count_tokens).names == (path,)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("I went with Caroline to the lake.", "Caroline"),
        ("She moved to New Haven, she says.", "New Haven"),
        ("Ma sœur Lucía déménage bientôt.", "Lucía"),
        ("Моя сестра Оксана переезжает.", "Оксана"),
        ("推荐你去北京都季商旅酒店吧", "北京都季商旅酒店"),
        ("我想去和平医院看看", "和平医院"),
        ("故宫和天坛都去过", "天坛"),
        ("从雍和宫坐到颐和园路", "雍和宫"),
        ("国家大剧院的票", "国家大剧院"),
        ("田中さんに聞いてください", "田中さん"),
        ("ワークショップは火曜日です", "ワークショップ"),
        ("내일 김민수씨가 옵니다", "김민수씨"),
    ],
)
def test_people_and_places_of_a_chat_are_names(text: str, name: str) -> None:
    """A chat's digest has them; beside calls, capitals and endings tell too little."""
    assert name in proper_names(text)
    message = ItemText("user", text)
    assert name in digest_of([message], 100, count_tokens).names
    assert name not in digest_of([message, ItemText("assistant", "", (("run", "{}"),))], 100, count_tokens).names


def test_where_every_noun_has_a_capital_none_is_a_name_for_it() -> None:
    """In German capitals tell nothing; what a user wrote is quoted with them."""
    assert proper_names("Die Rechnung ist noch offen, der Vertrag läuft, sagt Annika.") == []


def test_a_word_that_points_is_no_name() -> None:
    """「该酒店」 means a place that was named before, not one of that name."""
    assert proper_names("请问该酒店有停车位吗？每家餐厅都满了，某大学也一样。") == []


@pytest.mark.parametrize("name", ["\\u2014", "\\n\\t", "\\x1b", "e.g", "i.e"])
def test_what_means_nothing_is_no_name(name: str) -> None:
    """Escapes and abbreviations stand in no digest."""
    assert is_meaningless(name)
    text = f'see "{name}" and src/a.py'
    assert digest_of([ItemText("assistant", text)], 100, count_tokens).names == ("src/a.py",)


@pytest.mark.parametrize("tag", ["td", "body", "button", "system-reminder", "tool-error"])
@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_an_end_tag_is_no_path(tag: str, role: Role) -> None:
    """Whatever its name is; a path of one part is one beside it."""
    text = f"see <{tag}>it</{tag}> and </{tag}>, /socket and src/a.py"
    assert digest_of([ItemText(role, text)], 100, count_tokens).names == ("/socket", "src/a.py")


def test_line_numbers_of_a_listing_are_no_figures() -> None:
    """The numbers before the lines of a file go, those inside it and those of a table stay."""
    listing = "  114\tLIMIT = 4711\n  115\tPORT = 8423\n"
    assert digest_of([ItemText("tool", listing)], 100, count_tokens).numbers == ("4711", "8423")
    assert without_line_numbers("114→a\n115→b") == "a\nb"
    table = "4711\tAnn\n8423\tBob\n"
    assert without_line_numbers(table) == table


def test_a_telephone_number_is_one_figure_and_times_come_last() -> None:
    """A number beside Chinese characters is found whole; opening hours give way to it."""
    hours = " ".join(f"{hour}:30" for hour in range(10, 24))
    digest = digest_of([ItemText("assistant", f"营业时间 {hours}。电话是010-85221888。")], 30, count_tokens)
    assert digest.numbers[0] == "010-85221888"
    assert 0 < len(digest.numbers) < 14


def test_names_of_standard_libraries_give_way() -> None:
    """Any model knows them; a file that is called alike is no such name, nor is a name of the project's own."""
    text = "os.path.join json.dumps console.log store.open_lease lease.renew_all"
    names = digest_of([ItemText("assistant", text)], 60, count_tokens).names
    assert names[:2] == ("lease.renew_all", "store.open_lease")
    assert all(STANDARD.fullmatch(name) for name in ("os.path.join", "JSON.stringify", "console.log"))
    assert not any(STANDARD.fullmatch(name) for name in ("os", "json.py", "queue.ts", "self.os"))


def test_the_end_of_a_sentence_and_the_next_word_are_no_name() -> None:
    """Some clients lose the blank between sentences. A member with a capital, as in Go, is a name."""
    text = "It needs some thought.We read fmt.Println and errors.New for better management.Overall it works"
    names = digest_of([ItemText("assistant", text)], 60, count_tokens).names
    assert set(names) == {"fmt.Println", "errors.New"}


@pytest.mark.parametrize("word", ["Jan5", "12345", "3f2a9c", "ValueError", "readFile", "Berlin", "hello", "AB12"])
def test_a_text_of_one_word_has_the_names_that_it_has_in_a_sentence(word: str) -> None:
    """A text without signs takes a shorter way, which finds the same."""
    alone, among = (Names([ItemText("user", text)], [[]], 1_000) for text in (word, f"({word})"))
    assert alone.worths() == among.worths()
    assert alone.numbers() == among.numbers()


def test_texts_that_are_searched_together_have_the_names_of_each() -> None:
    """Short and long texts in turn, in one script and in several: a name's mentions are those in each text alone."""
    roles: tuple[Role, ...] = ("user", "assistant", "tool")
    texts = (
        "See src/a.py:12, {}.",
        "{}",
        "Row_{} of 「表」 at 10:3{}.",
        "name_{} " * 200,
        "7 May 2023 or $1,250.50, {}",
    )
    entries = [
        ItemText(roles[at % 3], texts[at % len(texts)].replace("{}", str(at % 7))) for at in range(2 * TOGETHER + 5)
    ]
    together = Names(entries, [()] * len(entries), 8_000)
    alone: dict[float, Counter[str]] = defaultdict(Counter)
    numbers: set[str] = set()
    for entry in entries:
        names = Names([entry], [()], 8_000)
        numbers |= names.numbers()
        for worth, times in names.mentions.items():
            alone[worth].update(times)
    assert together.mentions == alone
    assert together.numbers() == numbers


def test_a_time_in_a_result_that_is_not_searched_any_more_is_no_name() -> None:
    """Its piece is known from the search of all short texts beside it."""
    entries = [ItemText("tool", "at 10:30"), ItemText("tool", " ".join(f"name_{at}" for at in range(LEAST_SEARCHED)))]
    names = Names(entries, [()] * len(entries), 1_000)
    assert "10:30" not in names.worths()
    assert names.numbers() == set()
