"""How a model says that something is not in a document."""

import re

_WHOLE = r"(?:document|text|passage|excerpt|context|pages?|notes|source)"
_TELLS = (
    r"(?:mention|say|state|contain|provide|specify|include|give|answer|tell|indicate|disclose|address|name|list|"
    r"describe|discuss|have|show)"
)
# Fixed phrases, and sentences about the document itself.
_PLAIN = re.compile(
    rf"^\W*(?:sorry\W+|unfortunately\W+)?(?:not (?:in|found|mentioned|stated|specified|given|available)\b"
    rf"|no (?:such )?(?:information|mention|answer)\b|n/?a\W*$|none\W*$|unknown\W*$"
    rf"|i (?:do not|don['’]t|cannot|can['’]t|could not|couldn['’]t|am not|am unable)\b)"
    rf"|\b{_WHOLE}\b[^.]{{0,40}}\b(?:does not|do not|doesn['’]t|don['’]t|did not|cannot|fails to)\s+(?:\w+\s+)?{_TELLS}"
    rf"|\bnot (?:\w+\s+){{0,3}}(?:in|by|from|on) (?:the|this) (?:given |provided |input )?{_WHOLE}\b"
    rf"|\b(?:there is|has|have|contains?|provides?|gives?) no (?:\w+\s+)?(?:information|mention|answer|indication)\b"
    rf"|\b(?:cannot|can['’]t|can not|could not) be (?:determined|answered|found|inferred)\b"
    r"|^\W*nicht (?:im|in dem|in diesem) \w+|\bkeine (?:angaben?|informationen|information|antwort)\b"
    r"|\b(?:dokument|text|seiten?)\b[^.]{0,20}\b(?:enthält|erwähnt|nennt|sagt|gibt|macht)\b[^.]*\b(?:nicht|keine?n?)\b"
    r"|\bnicht (?:im|aus dem|in dem) (?:dokument|text)\b"
    r"|\b(?:document|texte)\b[^.]{0,20}\bne\b|\baucune (?:information|mention|réponse)\b"
    r"|\bpas dans le (?:document|texte)\b"
    r"|\b(?:documento|texto|testo)\b[^.]{0,20}\b(?:no|non)\b|\b(?:ninguna|nessuna) (?:información|informazione)\b"
    r"|\bno (?:está|aparece) en el (?:documento|texto)\b|\bdocument\b[^.]{0,60}\b(?:niet|geen)\b",
    re.IGNORECASE,
)
# These a document may say as well: of a price, or of an appendix.
_POSSIBLE = re.compile(
    r"\b(?:is|are|was|were)(?:\s+not|n['’]t)\s+(?:\w+\s+){0,2}(?:mentioned|stated|specified|provided|given|found|included|"
    r"indicated|available|answered|disclosed|known)\b|\b(?:it|they)\s+(?:does not|do not|doesn['’]t|don['’]t)\s+"
    rf"{_TELLS}\b|\bnicht (?:erwähnt|angegeben|genannt|bekannt)\b|\bpas (?:mentionné|précisé|indiqué)"
    r"|\bno se (?:menciona|indica|especifica)",
    re.IGNORECASE,
)


def is_refusal(statement: str, *, is_supported: bool) -> bool:
    """Whether the statement says that the document does not answer; `is_supported` if a page says the same."""
    return bool(_PLAIN.search(statement)) or (not is_supported and bool(_POSSIBLE.search(statement)))
