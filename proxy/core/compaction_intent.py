"""Recognises the intent of a client's own compaction in its words, in the languages that agents' users write.

A request for a summary names three things close together: a text to write (a summary, a handoff, a snapshot), its
subject (the conversation), and its use (another agent, a new context, lost history). A short request that follows a
conversation may name the use alone: that somebody else can take over, or that the context is nearly full.

A text about such texts (code that writes summaries, a question on a prompt, documentation for the next developer) names
the same things, but it requests other work first (``_OTHER_WORK``, ``_OTHER_TEXT``), and that tells the two apart.
"""

from __future__ import annotations

import re
from typing import Final

from proxy.core.lazy_pattern import lazy_pattern

_TITLE: Final = lazy_pattern(r"\b(?:title|headline|follow-?up|tags?|branch name|commit message)\b", re.IGNORECASE)

HEAD, TAIL = 900, 1_600
"""Characters at each end of a text that are searched for its request: between them may be a whole conversation."""

_OPENING: Final = 400
"""Characters at the beginning of a system text in which it defines the model's role."""

_NEAR: Final = 120
"""Characters around a match that are searched for other work."""

_SUMMARY: Final = lazy_pattern(
    r"\b(?:summar(?:y|ies|i[sz]e[ds]?|i[sz]ing|i[sz]ation)|condens\w+|compress\w*|distil\w*|memento|briefing"
    r"|compact(?! (?:json|form|format|table|list|view))\w*|recap\w*"
    r"|hand-?(?:off|over)(?! between the)|checkpoint|state_snapshot|continuation (?:brief|note|prompt|document))\b"
    r"|\bprogress report\b|\bnote to (?:the|your) (?:\w+ )?(?:agent|assistant|model|self)\b|\brecord all\b"
    r"|\bprompt for continuing|\bextract\b[^.\n]{0,60}\b(?:context\b|information (?:\w+ )?(?:for|to) (?:continu|resum))"
    r"|\bleave yourself (?:a|an|some)\b"
    r"|\b(?:write down|dump) (?:everything|all|what)\b|\bwrite everything\b"
    r"|\bzusammenfass\w+|\bfasse?\b[^.\n]{0,80}\bzusammen\b"
    r"|(?<!my )(?<!your )\brésum\w*|\bresum(?:en|ir|o)\b|\bresum[ae] (?:tod[ao]|la|el|esta|nuestra|a|o)\b|\briassum\w+"
    r"|\bverdicht\w*|\bübergabe\w*|\bsamenvat\w*|\bvat\b[^.\n]{0,80}\bsamen\b|\bpodsum\w+|\bsammanfatt\w*|\bözet\w*"
    r"|总结|摘要|压缩|概括|交接|要約|まとめ|요약|인수인계"
    r"|\bподвед\w+ итог|\bподыто\w+|\bрезюм\w+|\bсводк\w+|\bобобщ\w+",
    re.IGNORECASE,
)
_SUBJECT: Final = lazy_pattern(
    r"\b(?:conversations?|chats?|dialog(?:ue)?s?|discussion"
    r"|history(?! (?:table|file|page)s?\b)"
    r"(?! of (?!(?:the |all )?(?:conversation|chat|dialog|session|messages|work|this|our|your)))"
    r"|(?<!next )session|transcripts?|context|messages"
    r"|trajector(?:y|ies)|events|memory|progress|so far|task described above|whoever continues)\b"
    r"|what you (?:have )?(?:finished|did)"
    r"|\bhand-?(?:off|over)(?: \w+)? (?:for|to) (?:the next|another|an? (?:new|fresh|future)) "
    r"(?:agent|llm|model|ai|assistant|instance|session|context)\b"
    r"|\b(?:gespräch|unterhaltung|verlauf|sitzung|bisherig|conversa(?:ci|z)|historial|sesi|conversa\b|sessão|échange"
    r"|gesprek|rozmow|konversation|konuşma|oturum)"
    r"|对话|会话|历史|上下文|到目前为止|会話|セッション|これまで|대화|세션"
    r"|\b(?:разговор|диалог|бесед|переписк|сесси|сеанс)",
    re.IGNORECASE,
)
_READER = r"(?:\w+ )?(?:agent|llm|language model|model|ai|assistant|instance|session|context|conversation)\b"
_CONTINUATION: Final = lazy_pattern(
    r"\bcontinu\w+|\bresum(?:e|es|ed|ing|ption)\b|\bcarry on\b|\b(?:pick|tak)(?:e|es|s|ing)? ?(?:up|over)\b"
    r"|\bhand-?(?:off|over)\b|\bout of (?:context|room)\b|\bonly (?:memory|context|record)\b"
    r"|\b(?:replace|overwrit)\w*\b|\bcompact(?:ion|ed|ing|s)?\b|\bmaximum number of tokens\b"
    r"|\b(?:without|not?) los(?:e|ing)\b|\bpreserv\w+\b|\bstate[_ ](?:snapshot|summary)\b|\breturning later\b"
    r"|\bcontext (?:window|limit|checkpoint|summari[sz]ation|extraction|compaction)\b"
    rf"|\b(?:another|next|other|future|new|fresh) {_READER}"
    r"|\bbetween (?:a|the) (?:user|human)\b[^.\n]{0,20}\band (?:a|an|the) (?:\w+ )?(?:agent|assistant|ai|model)\b"
    r"|\b(?:fortsetz|fortfahr|weiterarbeit|weitermach|übernehm|reprend|reprise|continu|poursui|retom|prossegui|seguir\b"
    r"|weiter\w*mach|nächste[rn]? (?:agent|modell|assistent)|verder|kontynu|fortsätt|devam)"
    r"|\bfuture self\b|\bcontext (?:\w+ ){0,3}(?:reset|cleared|wiped|discarded)\b|\bprosegu"
    r"|继续|接手|后续|続け|引き継|계속|이어|\bпродолж",
    re.IGNORECASE,
)
_SUCCESSOR: Final = lazy_pattern(
    r"\b(?:(?:(?:an?|some|any|the) )?(?:other|new|next|different|fresh) |another )(?:\w+ )?(?:engineer|developer"
    r"|programmer"
    r"|person|operator|agent|model|llm|assistant|team|hire)\b|\b(?:someone|somebody) else\b|\bwhoever\b"
    r"|\b(?:colleague|co-?worker|team-?mate|successor|replacement|next in line)\b|\bfuture-?you\b"
    r"|\b(?:ander|nächste|neue)\w* (?:entwickler|ingenieur|kolleg|mitarbeit|bearbeit|person|agent|modell|assistent)"
    r"|\bjemand\w* ander|\bkolleg\w+|\bnachfolge\w*|\bperson, die|\b(?:ein|einen|den) ersatz\b"
    r"|\b(?:autre|prochaine?|nouve\w+) (?:développeu|ingénieur|personne|agent|modèle|assistant)|\bcollègue|\bsuccesseur"
    r"|\bquelqu['’]un d['’]autre|\b(?:personne|celui|celle) qui"
    r"|\b(?:otr|outr|altr|próxim|prossim|nuev|nuov|nov)[oa] (?:ingenier|engenheir|ingegner|desarrollador"
    r"|desenvolvedor|svilupp"
    r"|persona|pessoa|agent|model)|\b(?:compañer|coleg|colleg)[oahi]+\b|\balguien más|\balgu[eé]m|\bqualcun altro"
    r"|\bun altro possa"
    r"|\bandere? (?:ontwikkelaar|persoon|agent|model)|\bcollega\b|\biemand anders"
    r"|\b(?:inn|następn|now)\w+ (?:inżynier|programist|osob|agent|model)|\bkoleg\w+|\bktoś inny|\bktoś, kto"
    r"|\b(?:annan|nästa|ny) (?:utvecklare|ingenjör|person|agent|modell)|\bkollega\b|\bnågon annan"
    r"|\b(?:başka|sonraki|yeni) (?:bir )?(?:mühendis|geliştirici|kişi|biri|model)|\barkadaş|\bbaşka biri"
    r"|\b(?:друг|следующ|нов)\w+ (?:инженер|разработчик|человек|агент|модел)|\bколлег\w+|\bтого, кто|\bкто-то другой"
    r"|(?:另一|下一|其他|新的?)[位个名]?(?:工程师|开发者|同事|人|模型|助手)|别人|同事"
    r"|(?:別|次|他|新しい)の?(?:エンジニア|開発者|担当者|人|モデル)|同僚"
    r"|(?:다른|다음|새로운) (?:엔지니어|개발자|담당자|사람|모델)|동료",
    re.IGNORECASE,
)
"""Somebody else who could have the work: a person, an agent or a model, and no step, file or run."""

_TAKES_OVER: Final = lazy_pattern(
    r"\b(?:tak(?:e|es|ing)(?: (?:it|this|the work|things))? (?:over|up)|continue[sd]?|pick(?:s|ing)?(?: \w+){0,2} up"
    r"|resume[sd]?|carr(?:y|ies) on|finish(?:es)? (?:it|this)|(?:weiter|fort)(?:zu)?(?:führ|setz|mach|arbeit|fahr)\w*"
    r"|übern(?:ehm|imm)\w*|anknüpf\w*|repren\w+|relais|(?:la|prendra la) suite|poursui\w+|continu\w+|retom\w+"
    r"|segui\w*|siga\w*"
    r"|relevo|prosegu\w+|riprend\w+|subentr\w+|prosseg\w+|assum[aie]\w*|overne+m\w*|voortzet\w*|verder(?: \w+)?"
    r"|kontynu\w+|przej(?:ąć|mie|mować)|wznowi\w+|ta över|tar över|fortsätt\w*|devral\w*|devam\w*"
    r"|продолж\w+|подхват\w+|переня\w+)|接手|继续|接替|接着|引き継|続け|続行|再開|이어|계속|인계",
    re.IGNORECASE,
)
"""What such a person does with the work."""

_SENTENCE: Final = lazy_pattern(r"[^.!?。\n]+")

_CONTEXT_FULL: Final = lazy_pattern(
    r"\bcontext(?: (?:window|budget|length))? (?:(?:is|was|will|gets?|has|nearly|almost|about|be|been"
    r"|to) ){0,4}(?:full|exhausted|dropped|cleared|wiped|discarded|out)\b"
    r"|\b(?:hit|hitting|reach\w*|near\w*|at) (?:the|our|your) context (?:limit|window)"
    r"|\b(?:kontext|contexte|contexto|contesto|kontekst|bağlam|контекст)\w*\b[^.!?\n]{0,30}\b(?:voll|erschöpft|gelöscht"
    r"|geleert|verworfen|plein|effac|satur|épuis|borr|apaga|cancell|gewist|wymaza|llen[oa]|agota|pien|esaur"
    r"|chei[oa]|esgot|pełn|wyczerp|slut|исчерп"
    r"|заполн|законч"
    r"|заканч|dol)"
    r"|\b(?:earlier|previous|old|all|these)(?: \w+)? (?:messages|turns|history|conversation) (?:\w+ ){0,5}"
    r"(?:dropped|cleared|deleted|discarded|removed|forgotten)\b|\b(?:forget|lose) this (?:conversation|session|chat)\b"
    r"|\byour memory (?:will be|is) \w+"
    r"|\b(?:verlauf|gespräch|nachrichten)\b[^.!?\n]{0,40}\b(?:gelöscht|verworfen|entfernt|vergessen)"
    r"|上下文[^。!?\n]{0,20}(?:满|耗尽|不足|用完)|コンテキスト[^。!?\n]{0,20}(?:一杯|いっぱい|足り|満)|컨텍스트[^.!?\n]{0,20}(?:찼|차|부족)",
    re.IGNORECASE,
)
"""The context that is nearly full, or a history that is about to go."""

_OTHER_TEXT: Final = lazy_pattern(
    r"\A\W*document\b|\b(?:anleitung|dokumentier|dokumentation|kommentier|kommentare|übersetz|erklär|tests?\b"
    r"|schreib\w* (?:\w+ )?(?:code|mail)|documenta|documentation|commenta|traduis|explique|pruebas|escribe c"
    r"|traduce|explica|implement"
    r"|traduci|spiega|testes|traduza|explique|uitleg|vertaal|document(?:eer|atie)|testy|przetłumacz|wyjaśnij|dokumentac"
    r"|översätt|förklara|test(?:er)?\b|belgele|çevir|açıkla|refactor|refaktor|factoriz|comments?\b|guide\b|tutorial)"
    r"|документац|переведи|объясни|тест|文档|注释|测试|翻译|解释|ドキュメント|テスト|翻訳|説明|문서화|테스트|번역|설명",
    re.IGNORECASE,
)
"""Words of other work, in the languages of the words above: a text for people, code, an explanation."""

_TEXT_ONLY: Final = lazy_pattern(
    rf"\b(?:another|next|other|future|new|fresh) {_READER}|\bwhoever continues\b"
    r"|\bcontext (?:checkpoint|window)\b|\bout of context\b"
    r"|\bmaximum number of tokens\b|\breplace\w* (?:\w+ ){0,3}(?:conversation|history|context|messages)\b"
    r"|\b(?:history|conversation) (?:\w+ ){0,3}(?:replaced|discarded|cleared|removed)\b"
    r"|\bonly (?:memory|context|record|with the summary)\b|\bonly the summary\b"
    r"|(?:do not|don['’]t|never|without) (?:call|us|invok|run)(?:e|ing)? (?:(?:a|any|your) )?tools?\b|\btext only\b"
    r"|\bno tools?\b(?! results?| outputs?)|\btools are disabled\b|\bfuture self\b"
    r"|\bkeine (?:\w+ )?(?:werkzeuge|tools)\b|\bauc?un outil\b|\b(?:ninguna|nenhuma) (?:herramienta|ferramenta)\b"
    r"|\bnessuno strumento\b"
    r"|(?:不要|不得|请勿)调用|[只仅]输出|新的?(?:会话|对话)|后续模型|ツールは?を?(?:呼び|使)|新しい(?:会話|セッション)"
    r"|도구를? (?:호출|사용)하지|새(?:로운)? (?:세션|대화)|\bнов(?:ый|ого|ом|ой) (?:агент|сеанс|сесси)|\bдругой агент"
    r"|\bне (?:вызыва|использу)\w* инструмент",
    re.IGNORECASE,
)
"""Words of a request that has tools but excludes calls, or whose answer another context will read."""

_OTHER_WORK: Final = lazy_pattern(
    r"\b(?:function|script|class|method|endpoint|widget|dashboard|tests?|command|feature|implement\w*"
    r"|refactor\w*|fix|bug|add|docs?"
    r"|documentation|readme|commit|translat\w+|explain|review|article|essay|e-?mail|boss|manager|tweet|blog|images?"
    r"|meetings?|interview|podcast|lecture|phone call"
    r"|paragraph|judge|score|evaluate|grad(?:e|ing)|classify|titles?|headline|follow-?up|tags?|branch name|prompt of"
    r"|this prompt|this code)\b|\b(?:how|why) (?:do|does|did|can|is|are|to)\b|\bwhat (?:do|does|is|are) th|\bhere is\b"
    r"|[\w/-]+\.(?:md|txt|json|py|[jt]sx?|go|rs|java|ya?ml|toml)\b|\b(?:in|into) [\w./-]+/(?!\w)"
    r"|函数|代码|翻译|解释|文章",
    re.IGNORECASE,
)
"""Words of a request for other work: code, an answer to a question on such texts, a text for other people."""

_QUESTION: Final = lazy_pattern(r"[^.!\n]{0,200}\?")
_POLITE_REQUEST: Final = lazy_pattern(r"\b(?:can|could|would|will) you\b", re.IGNORECASE)
"""A sentence that ends in a question mark is a question about a summary, unless it begins like this."""

_FOLLOW_UP: Final = lazy_pattern(
    r"^\W*(?:this (?:session|conversation) is being continued|this is what\b"
    r"|this is (?:a|the|my|our|your) (?:\w+ )?(?:summary|hand-?off|handover|notes?)\b"
    r"|another language model|here is|i (?:have )?pasted"
    r"|continue\b|the previous|(?:is|are|was|were|does|did|do|has|have) (?:the|this|that|my|our|your)\b)",
    re.IGNORECASE,
)
"""Beginnings of messages that contain a finished summary, or ask a question about one."""

_CONTINUED: Final = lazy_pattern(r"\W*this (?:session|conversation) is being continued", re.IGNORECASE)
"""The beginning of a message in which a client puts a finished summary, and what it asks for behind it."""

_RECAP: Final = lazy_pattern(
    r"\b(?:summari[sz]e|condense|compact|(?:create|write|provide|produce|generate|give)\b[^.:\n]{0,80}\bsummary)\b"
    r"[^.:\n]{0,80}"
    r"\b(?:conversation|chat|dialog(?:ue)?|discussion|history|transcript|session|context|messages|so far)\b"
    r"(?! (?:of|in|from|between|with|about|below|as)\b)",
    re.IGNORECASE,
)
"""A request to summarise the conversation, without words on the summary's use."""

_PASTED: Final = lazy_pattern(r":\s*\S.{40}|\n\s*\n.{40}", re.DOTALL)
"""A text behind a colon or an empty line that is long enough to be pasted text: the subject may be that."""

_ROLE: Final = lazy_pattern(
    r"\byou(?:'re| are)\b[^.\n]{0,100}?\b(?:summari[sz]\w+|compact\w+|compress\w+|condens\w+|distil\w+)"
    r"|\byour (?:task|job|sole \w+) is to\b[^.\n]{0,80}?\b(?:summary|summari[sz]e|compress|condense|compact)"
    r"|^\W*(?:\w+ ){0,2}?(?:summari[sz]e|condense|compress|compact)\b"
    r"|^you (?:summari[sz]e|condense|compress|compact)\b|^\W*(?:context )?summar(?:y|i[sz]ation)\b"
    r"|你是[^。\n]{0,30}(?:压缩|摘要|总结)",
    re.IGNORECASE,
)
"""A system text whose subject is to summarise."""


def requests_title(system: str) -> bool:
    """Return True if the *system* text requests a title or another short text about the conversation."""
    return _TITLE.search(system[:_OPENING]) is not None


def requests_continuation(text: str) -> bool:
    """Return True if *text* requests, in its head or tail, a summary from which the conversation continues."""
    return any(_requests_summary(window, _CONTINUATION) for window in _windows(text))


def requests_text_only(text: str) -> bool:
    """Return True if *text* begins with a request for a summary and nothing else.

    It states that no tools are to be called, or that the reader of the summary will have nothing else.
    """
    head = text.strip()[:HEAD]
    return any(_requests_summary(window, _TEXT_ONLY) for window in _windows(head))


def requests_recap(text: str, *, has_history: bool) -> bool:
    """Return True if *text* requests a summary of its own conversation.

    Without history the text must not contain a pasted conversation: the summary would be of that one.
    """
    for window in _windows(text):
        recap = _RECAP.search(window)
        if recap is None or _has_other_purpose(window, recap):
            continue
        if has_history or not _PASTED.search(window, recap.end()):
            return True
    return False


def requests_handover(text: str) -> bool:
    """Return True if *text* requests what somebody else needs to take over, or what is needed when the context is full.

    It may name neither a summary nor its subject. So it must be short, and its request is one that no person makes:
    without the tools that the conversation called before.
    """
    text = text.strip()
    if len(text) > HEAD or text.endswith(("?", "？")) or _FOLLOW_UP.match(text) or _OTHER_TEXT.search(text):
        return False
    window = "".join(_windows(text))
    full = _CONTEXT_FULL.search(window)
    if full is not None:
        return not _has_other_purpose(window, full)
    for sentence in _SENTENCE.finditer(window):
        if _SUCCESSOR.search(sentence[0]) and _TAKES_OVER.search(sentence[0]):
            return not _has_other_purpose(window, sentence)
    return False


def is_summariser(text: str, *, has_history: bool) -> bool:
    """Return True if the system *text* makes the model a summariser.

    If the request *has_history*, the text must also state that work continues from the summary.
    """
    head = text.strip()[:HEAD]
    role = _ROLE.search(head[:_OPENING])
    if role is None:
        return not has_history and _requests_summary(head[:_OPENING], _CONTINUATION)
    if _has_other_purpose(head, role) or _SUBJECT.search(head, role.start(), role.end() + _NEAR) is None:
        return False
    return not has_history or _CONTINUATION.search(head) is not None


def _windows(text: str) -> list[str]:
    """Return the head and the tail of *text*, or a short text as a whole; no head if it first requests other work.

    Nothing of a message that holds a finished summary.
    """
    text = text.strip()
    if _CONTINUED.match(text) is not None:
        return []
    first_line = text.partition("\n")[0][:_NEAR]
    windows = [text]
    if len(text) > HEAD + TAIL:
        windows = [text[:HEAD], text[-TAIL:]]
    if _OTHER_WORK.search(first_line) is not None:
        return windows[1:]
    return windows


def _requests_summary(window: str, use: re.Pattern[str]) -> bool:
    """Return True if *window* requests a summary of the conversation for a *use* of it."""
    summary = _SUMMARY.search(window)
    if summary is None or _FOLLOW_UP.match(window) or _has_other_purpose(window, summary):
        return False
    return _SUBJECT.search(window) is not None and use.search(window) is not None


def _has_other_purpose(window: str, match: re.Match[str]) -> bool:
    """Return True if the words around *match*, in the same paragraph of *window*, request something else."""
    start = max(match.start() - _NEAR, window.rfind("\n\n", 0, match.start()), 0)
    if _OTHER_WORK.search(window, start, match.end() + _NEAR // 2) is not None:
        return True
    if _QUESTION.match(window, match.end()) is None:
        return False
    return _POLITE_REQUEST.search(window, start, match.start()) is None
