"""Word lists of the languages that documents come in most: function words, months, numerals, negations."""

from collections.abc import Mapping


def listed(words: str) -> frozenset[str]:
    return frozenset(words.split())


FUNCTION_WORDS: Mapping[str, frozenset[str]] = {
    "en": listed(
        "a about after all also an and any are as at be been before being between both but by can could did do "
        "does during each for from further had has have he her here his how if in into is it its may more most "
        "must not of on only or other our out over per shall she should so some such than that the their them "
        "then there these they this those through to under until up upon was we were what when where which while "
        "who will with within would you your"
    ),
    "de": listed(
        "aber als am an auch auf aus bei beim bis damit dann das dass dem den denn der des die dies diese dieser "
        "dieses durch ein eine einem einen einer eines er es für haben hat hatte ihr ihre im in ist ihm ihn kann "
        "mit nach noch nun nur oder ohne sein seine seit sich sie sind so über um und unter vom von vor war waren "
        "was wenn werden wie wird wurde wurden zu zum zur zwischen"
    ),
    "fr": listed(
        "à au aux avec ce ces cette dans de des dont du elle elles en entre est et été était il ils la le les "
        "leur leurs lors mais ne nous on ou où par pas plus pour qu que qui sa sans se ses son sont sur un une "
        "vous"
    ),
    "es": listed(
        "al como con de del desde el ella en entre es esta este fue ha han hasta la las lo los más no o para pero "
        "por que se ser si sin sobre son su sus también un una y"
    ),
    "it": listed(
        "ai al alla anche che come con da dal dalla dei del della delle di è e fra gli ha hanno il in la le lo ma "
        "nel nella non o per più sono stato su tra un una"
    ),
    "nl": listed(
        "aan als bij dat de der deze die dit door een en er heeft het hij hun in is maar met naar niet of om "
        "onder ook op over te tot uit van voor was waren wat wordt worden zijn"
    ),
}
ALL_FUNCTION_WORDS = frozenset().union(*FUNCTION_WORDS.values())

# Words by which a summary speaks of its document or leads on; they claim nothing that could stand on a page.
CONNECTING_WORDS = listed(
    "according additionally addition also document documents finally first following furthermore however "
    "include included includes including key letter mention mentioned mentions moreover namely note noted "
    "notes overall page pages report reports says section states stated summary text therefore thus title "
    "titled außerdem dokument enthält ferner laut protokoll schließlich seite text zudem "
    "zusammenfassung zusätzlich"
)

NEGATIONS = listed(
    "no not never none nobody nothing neither nor without cannot nicht kein keine keinen keiner niemand nie "
    "ohne ne pas jamais aucun aucune sans non nunca ningún nada sin niet geen nooit zonder"
)

_MONTHS = (
    "january jan januar janvier enero gennaio januari",
    "february feb februar février febrero febbraio februari",
    "march mar märz mars marzo maart",
    "april apr avril abril aprile",
    "may mai mayo maggio mei",
    "june jun juni juin junio giugno",
    "july jul juli juillet julio luglio",
    "august aug août agosto augustus",
    "september sep sept septembre septiembre settembre",
    "october oct oktober octobre octubre ottobre",
    "november nov novembre noviembre",
    "december dec dezember décembre diciembre dicembre",
)
MONTHS: Mapping[str, int] = {name: number for number, names in enumerate(_MONTHS, start=1) for name in names.split()}

# A table has these in its heading, far from the numbers.
MAGNITUDES = listed("thousand million millions billion tausend millionen milliarden mille milliards millones")

# "one" and its like are left out: they are pronouns and articles as well.
_NUMERALS = {
    2: "two zwei deux",
    3: "three drei trois",
    4: "four vier quatre",
    5: "five fünf cinq",
    6: "six sechs",
    7: "seven sieben sept",
    8: "eight acht huit",
    9: "nine neun neuf",
    10: "ten zehn dix",
    11: "eleven elf onze",
    12: "twelve zwölf douze",
    13: "thirteen dreizehn treize",
    14: "fourteen vierzehn quatorze",
    15: "fifteen fünfzehn quinze",
    16: "sixteen sechzehn seize",
    17: "seventeen siebzehn",
    18: "eighteen achtzehn",
    19: "nineteen neunzehn",
    20: "twenty zwanzig vingt",
    30: "thirty dreißig trente",
    40: "forty vierzig quarante",
    50: "fifty fünfzig cinquante",
}
NUMERALS: Mapping[str, str] = {name: str(value) for value, names in _NUMERALS.items() for name in names.split()}


def guess_language(words: list[str]) -> str | None:
    """The language whose function words are most frequent among case-folded `words`; None if too few say so."""
    counts = {language: sum(word in listed for word in words) for language, listed in FUNCTION_WORDS.items()}
    ranked = sorted(counts.values())
    if ranked[-1] < 3 or ranked[-1] < 1.3 * ranked[-2]:
        return None
    return max(counts, key=lambda language: counts[language])
