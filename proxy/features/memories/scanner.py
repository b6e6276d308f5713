"""Refuses memories that read as an order to a model: to ignore other orders, to reveal, to send, or to hide something.

A memory is read by every later conversation of its project, so a planted one would reach each of them. This is a cheap
first filter and no defence: an order in other words passes. Tools cannot plant memories because only the caller, its
user and, in projects that allow it, the model write any (``provenance``).

The kinds of orders are those of https://genai.owasp.org/llmrisk/llm01-prompt-injection/.
"""

from __future__ import annotations

import re
import unicodedata
from string import ascii_lowercase
from typing import Final

from proxy.core.lazy_pattern import lazy_pattern

INVISIBLE: Final = lazy_pattern(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0e\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
    "|(?<=[ -~])[\u200c\u200d]|[\u200c\u200d](?=[ -~])"
)
"""Characters that people cannot see and models read: controls, directions, tags, variation selectors except that of
emoji, joiners, and lone surrogates, which cannot be stored.

Persian, Indic scripts and emoji need joiners, so only a joiner beside an ASCII character counts.
"""

_JOINERS: Final = str.maketrans("", "", "\u200c\u200d")

_CONFUSABLE: Final = str.maketrans(
    "авекмнорстухіѕјԁԛԝһɡαβεικνορτυχ0134578@$ᴀʙᴄᴅᴇꜰɢʜɪᴊᴋʟᴍɴᴏᴘǫʀꜱᴛᴜᴠᴡʏᴢı"
    + "".join(chr(first + at) for first in (0x1F150, 0x1F170, 0x1F1E6) for at in range(26)),
    "abekmhopctyxisjdqwhgabeiknoptuxoieastbasabcdefghijklmnopqrstuvwyzi" + 3 * ascii_lowercase,
)
"""Letters that look like others, small capitals, and letters in circles, squares and flags.

https://www.unicode.org/reports/tr39/ lists all.
"""

_SPACED: Final = lazy_pattern(r"(?<!\w)(?:[^\W\d_][\s.\-_*]+){5,}[^\W\d_](?!\w)")
"""Words whose letters are spaced out."""

_BETWEEN: Final = r"(?:\W+\w+){0,6}?\W+"
"""At most six words between a verb and its object."""

_OVERRIDE_VERBS: Final = (
    r"(?:ignor\w*|disregard\w*|forget|overrid\w*|overrule\w*|bypass\w*|neglect|skip|discard|violate|suspend|"
    r"vergiss|vergesst|ignorier\w*|missachte\w*|umgeh\w*|olvida\w*|descarta\w*|omite|oublie\w*|neglige\w*|"
    r"dimentica\w*|esqueca\w*|desconsidere|pomin|zignoruj|negeer|vergeet)"
)
_RULES: Final = (
    r"(?:instruct\w*|instruc\w*|instrukc\w*|anweisung\w*|direct(?:ion|ive)s?|guid(?:eline|ance)\w*|rules?|regeln?|"
    r"regles?|reglas?|regole|regras?|polic(?:y|ies)|restriction\w*|safeguards?|guardrails?|safety|constraints?|prompts?|"
    r"orders?|commands?|consignes?|istruzioni|vorgaben|befehle|memories|context|everything above|all of the above|"
    r"what (?:you were|the user|came)|anything (?:you were|above|before))"
)
_SECRETS: Final = (
    r"(?:system\W?(?:prompt|message|instruct\w*)|systemprompt|(?:initial|hidden|secret|original|developer) "
    r"(?:prompt|instruct\w*|message)|your (?:prompt|instruct\w*|rules|configuration)|api\W?keys?|passwords?|passwor\w*|"
    r"credentials?|secrets?|access tokens?|tokens?|private keys?|ssh keys?|\.env|env(?:ironment)? variables?|"
    r"conversation history|chat history|contrasena\w*|mot\w* de passe|passwort\w*|geheimnisse)"
)
_REVEAL_VERBS: Final = (
    r"(?:reveal|disclose|leak|expose|print|output|repeat|recite|display|show|dump|tell|echo|list|include|quote|"
    r"translate|summari[sz]e|encode|verrate?|zeige?|nenne|revele\w*|revela\w*|muestra|affiche\w*|mostra|imprime)"
)
_SEND_VERBS: Final = (
    r"(?:send|post|upload|forward|transmit|exfiltrat\w*|e?mail|submit|report|deliver|copy|push|leak|curl|wget|fetch|"
    r"sende?|schicke?|envoie\w*|envia\w*|invia|transmet\w*)"
)
_PLACES: Final = (
    r"(?:https?://|ftp://|www\.|[\w.-]+@[\w-]+\.\w|webhook|attacker|external (?:server|endpoint|address|url)|"
    r"(?:my|our|this|the following) (?:server|endpoint|url|address)|pastebin|ngrok|discord|telegram|"
    r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3})"
)
_DATA: Final = (
    r"(?:conversation|history|messages?|files?|contents?|data|keys?|secrets?|tokens?|passwords?|code|prompt|everything|"
    r"credentials?|results?|output|anything|answers?|database|env)"
)

# Each with the kind of order that it matches, as the refusal names it. Texts are compared without accents.
_ORDERS: Final[tuple[tuple[str, str], ...]] = (
    ("to ignore others", rf"\b{_OVERRIDE_VERBS}\b(?:{_BETWEEN}|\s+){_RULES}"),
    (
        "to ignore others",
        r"\b(?:do not|don.?t|never|stop) (?:follow|obey|comply|listen|respect|apply)\w*\b"
        rf"(?:{_BETWEEN}|\s+)(?:{_RULES}|(?:the )?(?:user|system|developer|operator)s?)",
    ),
    (
        "to ignore others",
        r"\b(?:new|updated|real|actual|true|revised) (?:system )?(?:instructions?|prompt|rules?|task)\s*[:=]",
    ),
    (
        "to ignore others",
        r"\b(?:these|this|the following|my) (?:instructions?|rules?|memory|note)s? (?:take|takes|has|have|"
        r"override|overrides|supersede|supersedes|replace|replaces)\b",
    ),
    (
        "to be someone else",
        r"\b(?:you are now|you.re now|from now on,? you|act as|pretend (?:to be|you)|"
        r"behave (?:as|like)|roleplay as|simulate being|du bist (?:jetzt|nun|ab)|ab jetzt bist du|"
        r"tu es maintenant|ahora eres|agora voce e|sei ora)\b",
    ),
    (
        "to be someone else",
        r"\b(?:developer|debug|god|admin|root|dan|jailbreak\w*|unrestricted|unfiltered|sudo) mode\b|"
        r"\bjailbr[eo]\w+|\bdo anything now\b|\bno (?:restrictions|filters|limits|rules) (?:apply|any\s?more|from)\b|"
        r"\bwithout (?:any )?(?:restrictions|filters|safeguards|ethic\w*)\b",
    ),
    ("to reveal", rf"\b{_REVEAL_VERBS}\b(?:{_BETWEEN}|\s+){_SECRETS}"),
    ("to send", rf"\b{_SEND_VERBS}\b(?:{_BETWEEN}|\s+){_DATA}\b.{{0,80}}?{_PLACES}"),
    (
        "to send",
        rf"\b{_SEND_VERBS}\b.{{0,80}}?{_PLACES}.{{0,80}}?\b(?:with|containing|including|plus|und|con|avec)\b"
        rf"(?:{_BETWEEN}|\s+){_DATA}",
    ),
    (
        "to send",
        r"!\[[^\]]*\]\(\s*(?:https?:)?//[^)]*[?{$]|\b(?:curl|wget|nc|iwr|invoke-webrequest)\b[^\n]{0,80}"
        r"(?:https?://|-d\b|--data|\||\$\()",
    ),
    (
        "to hide it",
        r"\b(?:do not|don.?t|never|without) (?:tell|telling|inform|informing|mention|mentioning|notify|"
        r"notifying|alert|alerting|show|ask|asking)\w*\b(?:\W+\w+){0,3}?\W+(?:users?|human|operator|developer|anyone|anybody|"
        r"this (?:memory|note|instruction))\b",
    ),
    (
        "to hide it",
        r"\b(?:secretly|silently|covertly|quietly|heimlich|en secret|en secreto)\b\W+(?:\w+\W+){0,3}?"
        r"(?:send|add|include|insert|install|run|execute|delete|call|forward|upload|change|push|approve|sende|fuge)",
    ),
    (
        "to pass for a message",
        r"<\|?/?(?:im_start|im_end|system|assistant|user|endoftext|begin_of_text|tool_call|s)\|?>|"
        r"\[/?(?:inst|system|sys)\]|<<\s*/?sys\s*>>|</?(?:system|assistant|instructions?|system-reminder|tool_result)\b|"
        r"(?:^|\n)\s*(?:#+\s*)?(?:system|assistant|developer)\s*(?:message|prompt|note)?\s*:|\bend of (?:memories|user "
        r"(?:input|message)|system prompt)\b|<!--|-->",
    ),
)
_PATTERNS: Final = tuple((reason, lazy_pattern(pattern, re.DOTALL)) for reason, pattern in _ORDERS)

_ENCODED: Final = lazy_pattern(
    r"[A-Za-z0-9+/_-]{64,}={0,2}|(?:\\x[0-9a-f]{2}){8,}|(?:%[0-9a-f]{2}){12,}", re.IGNORECASE
)
"""Encodings that may hide an order; no memory needs them."""


def reason_to_refuse(text: str) -> str:
    """Return the reason to refuse *text*, such as ``an order to reveal``; empty if there is none."""
    if INVISIBLE.search(text):
        return "text with invisible characters"
    if _ENCODED.search(text) or _SPACED.search(text):
        return "encoded text"
    plain = _plain(text)
    for form in (plain, plain.translate(_CONFUSABLE)):
        for reason, pattern in _PATTERNS:
            if pattern.search(form):
                return f"an order {reason}"
    return ""


def _plain(text: str) -> str:
    """Return *text* in lower case without accents, and with compatible characters in their usual form."""
    folded = unicodedata.normalize("NFKD", text.translate(_JOINERS)).casefold()
    return "".join(letter for letter in folded if not unicodedata.category(letter).startswith("M"))
