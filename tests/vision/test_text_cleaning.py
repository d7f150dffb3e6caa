import pytest

from mmserve.vision.text_cleaning import clean_page_text, clean_plain_text


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("com\x02pilation", "compilation"),
        ("com\x02\r\npilation", "compilation"),
        ("Jean\x02Paul and 2019\x022020", "Jean-Paul and 2019-2020"),
        ("sepa\u00ad\nrate and co\u00adoperate", "separate and cooperate"),
        ("a dash \x02", "a dash -"),
        ("of\ufb01ce and a\ufb04uent", "office and affluent"),
        ("\ufee3\ufead\ufea3\ufe92\ufe8e", "مرحبا"),
        ("x² and ½ and Ａ and ™", "x² and ½ and Ａ and ™"),
        ("a\x00b\x07c\ufeff\uffff", "abc"),
        ("one\r\ntwo\rthree  \n\n\n\n\n\nfour\n", "one\ntwo\nthree\n\n\nfour"),
        ("lone \ud800 surrogate", "lone  surrogate"),
        ("", ""),
    ],
)
def test_page_text_is_cleaned(raw: str, clean: str) -> None:
    assert clean_page_text(raw) == clean


def test_plain_text_keeps_its_tabs_and_indents() -> None:
    assert clean_plain_text("a\tb\n    c \n") == "a\tb\n    c"
