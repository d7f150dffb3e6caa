import pytest
from document_makers import PROSE

from mmserve.vision.text_quality import is_trustworthy

ENGLISH = "\n".join(PROSE)
SOUND = {
    "english": ENGLISH,
    "german": "Die Mitgliederversammlung beschloss, den Brunnen im Frühjahr zu bohren; die Kosten trägt der Verein. "
    "Über die Höhe der Beiträge wird im nächsten Jahr erneut abgestimmt, sagte die Vorsitzende zum Schluss.",
    "polish": "Zarząd przyjął sprawozdanie finansowe i podziękował wszystkim członkom za pracę w minionym roku. "
    "Następne zebranie odbędzie się w październiku, a jego porządek zostanie ogłoszony na stronie związku.",
    "vietnamese": "Cuộc họp đã thông qua ngân sách cho năm tới và cảm ơn tất cả các thành viên vì sự đóng góp của họ. "
    "Phiên họp tiếp theo sẽ được tổ chức vào tháng mười tại hội trường của thành phố.",
    "turkish": "Yönetim kurulu gelecek yılın bütçesini onayladı ve köprünün onarımı için gerekli kararı aldı. "
    "Bir sonraki toplantı ekim ayında belediye salonunda yapılacak ve tutanaklar üyelere gönderilecek.",
    "russian": "Совет утвердил бюджет на следующий год и поблагодарил всех участников за работу в этом году. "
    "Следующее заседание состоится в октябре в зале городской администрации.",
    "ukrainian": "Рада затвердила бюджет на наступний рік і подякувала всім учасникам за їхню працю цього року.",
    "greek": "Το συμβούλιο ενέκρινε τον προϋπολογισμό για το επόμενο έτος και ευχαρίστησε όλα τα μέλη.",
    "hebrew": "הוועד אישר את התקציב לשנה הבאה והודה לכל החברים על עבודתם השנה",
    "arabic": "وافق المجلس على ميزانية العام المقبل وشكر جميع الأعضاء على عملهم هذا العام",
    "chinese": "委员会批准了明年的预算，并感谢所有成员今年的工作。下一次会议将于十月举行。",
    "japanese": "委員会は来年の予算を承認し、会員の皆様に感謝しました。次の会議は十月に開かれます。",
    "hindi": "समिति ने अगले वर्ष के बजट को मंजूरी दी और सभी सदस्यों को धन्यवाद दिया।",
    "table": "DLS-44 2 118.00\nBL-07 4 23.50\nQX-9912 1 1,204.99\nZK-3 7 0.35\n" * 8,
    "code": "def readPage(rawBytes): return JsonParser(rawBytes).toDict()\nmaxRetryCount = 3\n" * 4,
    "numbers": "12.5 99 1,002 44%\n" * 20,
    "short": "Ωx",
    "nothing": " \n ",
}


def shifted(text: str, by: int) -> str:
    return "".join(
        chr((ord(c) - base + by) % 26 + base)
        if (base := 97 if c.islower() else 65) and c.isascii() and c.isalpha()
        else c
        for c in text
    )


@pytest.mark.parametrize("language", SOUND)
def test_sound_text_is_trusted(language: str) -> None:
    assert is_trustworthy(SOUND[language])


@pytest.mark.parametrize(
    "text",
    [
        "".join(chr(0x400 + ord(c)) if c > " " else c for c in ENGLISH),
        "".join(chr(0xE000 + ord(c)) if c > " " else c for c in ENGLISH),
        "".join(chr(0x180 + ord(c)) if c > " " else c for c in ENGLISH),
        "".join(chr(0x01 + ord(c) % 20) if c > " " else c for c in ENGLISH),
        "\ufffd" * 5 + ENGLISH[:50],
        shifted(ENGLISH, 1),
        shifted(ENGLISH, 13),
        SOUND["german"].encode().decode("cp1252", "ignore") * 2,
        SOUND["russian"].encode().decode("latin-1"),
        SOUND["russian"].encode("cp1251").decode("cp1252", "replace"),
    ],
    ids=[
        "cyrillic",
        "private",
        "extended",
        "controls",
        "replaced",
        "by one",
        "rot13",
        "utf8 as cp1252",
        "utf8 as latin",
        "1251",
    ],
)
def test_broken_maps_are_recognised(text: str) -> None:
    assert not is_trustworthy(text)
