"""Recognises, in a line of a summary, orders to its reader and claims that somebody gave an order or a permission.

A summary is in the language of its conversation, so the patterns have the words of a dozen languages. A line that is
taken for an order and is none costs little: it stays if the user wrote it, and becomes a quote if somebody else did.
"""

from __future__ import annotations

import re

from proxy.core.lazy_pattern import lazy_pattern

# An order in English: a clause that begins with a verb, with "you", or with a word such as "never" or "must".
_ORDER = lazy_pattern(
    r"^\W*+(?:please|now|then|next|also|first|finally|important|note|system|urgent|attention|instruction|todo)?[\s:,!-]*"
    r"(?:ignore|disregard|forget|override|you\b|your\b|always|never|do not|don['’]t|must|should|shall|make sure|ensure"
    r"|remember|run|execute|call|invoke|use|send|post|upload|exfiltrate|email|delete|remove|drop|erase|reveal|print"
    r"|output|repeat|say|tell|respond|reply|answer|act|behave|pretend|open|visit|fetch|download|install|curl|wget|grant"
    r"|approve|allow|accept|assume|treat|consider|stop|start|continue|proceed|write|add|append|insert|create|set|change"
    r"|update|deploy|push|merge|commit|transfer|pay|give|follow|obey|comply|read|copy|move|rename|disable|enable|skip"
    r"|bypass|keep|avoid)\b",
    re.IGNORECASE,
)
# Verbs that destroy, override, reveal or send, in the forms of an order. A form that also begins statements or is a
# noun ("Antwort", "Page", "muestra") is not there.
_VERB_FIRST = lazy_pattern(
    r"^\W*+(?:(?:bitte|jetzt|sofort|dann|danach|immer|por favor|ahora|luego|siempre"
    r"|s['’]il (?:te|vous) pla[iî]t"
    r"|maintenant|puis|toujours|ensuite|ora|adesso|poi|sempre|agora|depois|alsjeblieft|nu|daarna|пожалуйста"
    r"|сейчас|теперь|затем|срочно|proszę|teraz|potem)\W+){0,2}"
    r"(?:"
    # German
    r"(?:ignorier|lösch|entfern|führ|stopp|send|schick|lad|öffn|installier|überschreib|veröffentlich|verrat|zeig|überweis"
    r"|genehmig|erlaub|deaktivier|aktivier|umgeh|überspring|verwend|benutz|ruf|schreib|änder|befolg)(?:e|en sie)\b"
    r"|(?:vergiss|ignorier|lösch|führ|schick|zeig|niemals)\b"
    r"|(?:du|sie|ihr) (?:musst|sollst|darfst|müssen|müsst|sollen)\b"
    # French
    r"|(?:ignor|supprim|effac|envoi|exécut|lanc|révèl|publi|désactiv|contourn|autoris|oubli|écras)(?:e|es)\b"
    r"|(?:ignor|supprim|effac|envoy|exécut|lanc|install|télécharg|révél|affich|publi|vid|désactiv|activ|contourn|autoris"
    r"|approuv|accept|oubli|utilis|appel|ouvr|répond|pouss|déploy|écras|pay)ez\b|(?:supprimer|effacer|exécuter|envoyer)\b"
    r"|(?:jamais|ne (?:fais|faites)|tu dois|vous devez|veuillez)\b"
    # Spanish and Portuguese
    r"|(?:ignor|borr|elimin|ejecut|execut|env[ií]|olvid|instal|descarg|desactiv|desativ|autori[cz]|acept|aceit|remov)"
    r"(?:a|e|ar|er|ad)\b|(?:apag(?:a|ar|ue)|exclu(?:a|ir)|esqueç(?:a|am)|aprueb[ae]|aprov[ae])\b"
    r"|(?:nunca|jamás|debes|tienes que|você deve|deves|asegúrate)\b"
    # Italian and Dutch
    r"|(?:cancell|elimin|invi|dimentic|scaric|disattiv|autorizz|approv|svuot)(?:a|are|ate)\b"
    r"|(?:esegu|rimuov)(?:i|ire|ite|ere|ete)\b|(?:devi|dovete|non devi)\b"
    r"|(?:negeer|verwijder|voer|stuur|verzend|installeer|download|onthul|publiceer|gebruik|vergeet|nooit|altijd|je moet"
    r"|u moet)\b"
    # Russian, Ukrainian and Polish
    r"|(?:игнорируй|удаляй|удали|сотри|стирай|очисти|запусти|запускай|выполни|выполняй|отправь|отправляй|забудь|установи"
    r"|скачай|загрузи|раскрой|покажи|выведи|опубликуй|отключи|включи|обойди|пропусти|разреши|одобри|прими|используй|вызови"
    r"|открой|оплати|переведи|игноруй|видали|виконай|надішли)(?:те)?\b|(?:никогда|всегда|ты долж|вы долж)"
    r"|(?:zignoruj|usuń|skasuj|wykonaj|uruchom|wyślij|zapomnij|zainstaluj|pobierz|ujawnij|pokaż|wyłącz|włącz|użyj|otwórz"
    r"|zapłać)(?:cie)?\b|(?:nigdy|zawsze|musisz)\b"
    r")",
    re.IGNORECASE,
)
_ASIAN = lazy_pattern(
    # Chinese: "删除了" and "删除失败" tell what happened.
    r"^\W*+(?:忽略|无视|無視|忘记|忘記|删除|刪除|删掉|刪掉|清空|清除|发送|發送|上传|上傳|推送|绕过|繞過|泄露|洩露|转账|轉賬|执行以下|運行以下|运行以下)"
    r"(?![了过過完]|失败|失敗|成功|操作)"
    r"|^\W*+(?:立即|立刻|马上|馬上|现在就|現在就|直接)(?:执行|執行|运行|運行|删|刪|清|发|發|上|下载|安装|安裝|推|部署|输出|輸出|打印|调用|調用|授权|批准|停止)"
    r"|^\W*+(?:请|請|必须|必須|务必|務必|不要|切勿|禁止|始终|始終|总是|總是|永远|永遠|不得|你(?:必须|应|要|现在)|您(?:必须|应|要))"
    # Japanese, Korean and Turkish: the verb ends the sentence.
    r"|(?:て|で)(?:ください|下さい)|なさい|(?:せよ|(?<![むも])しろ|するな|すること)(?=\W*$)|てはいけない|なければならない|無視して"
    r"|(?:하|시|으)(?:세요|십시오)|(?:해라|하라|할 것)(?=\W*$)|해야 (?:한다|합니다)|하지 마"
    r"|\b\w+(?:malısın|melisin|malısınız|melisiniz)\b|^\W*+(?:sil|gönder|çalıştır|yoksay|unut|yükle|öde)(?:in|ın|iniz)?\b"
    # Arabic and Hindi
    r"|^\W*+(?:احذف|تجاهل|أرسل|ارسل|نفذ|شغل|امسح|انس|افتح|ثبت|لا تستخدم)\b"
    r"|(?:करें|कीजिए|करो|हटाओ|हटाएं|हटा दो|भेजो|भेजें)(?=\W*$)",
    re.IGNORECASE,
)
# A sentence to the assistant: what it must or may do now, or whose instructions it should ignore.
_ADDRESSED = lazy_pattern(
    r"\b(?:you|the (?:assistant|model|agent|ai|llm|reader|system)|assistant)\s+(?:must|should|shall|need(?:s)? to"
    r"|ha(?:ve|s) to|(?:are|is) (?:now|to|required|allowed|instructed|authori[sz]ed|permitted)|(?:may|can|will) now)\b"
    r"|\b(?:ignore|disregard|forget) (?:all|any|every|the|your|previous|prior|earlier)\b"
    r"|\b(?:new|updated|hidden|secret|additional) (?:system )?(?:instructions?|rules?|prompt)\b",
    re.IGNORECASE,
)
# A claim in English that a person in charge gave a permission or an order.
_CLAIMED = lazy_pattern(
    r"\b(?:user|human|operator|admin\w*|owner|developer|boss)s?\b.{0,60}?"
    r"\b(?:approv|authori[sz]|consent|confirm|permit|permission|allow|grant|agree|want|wish|ask|request|instruct|told"
    r"|tell|say|said|order|demand|requir|accept|prefer|insist|expect|like|need|waiv|sign(?:s|ed)? off)",
    re.IGNORECASE,
)
_AUTHORITY = (
    r"(?:\b(?:(?:be)?nutzer(?:in|s)?\b|anwender(?:in|s)?\b|betreiber(?:in|s)?\b|chef\b|entwickler(?:in|s)?\b|utilisat(?:eur|rice)"
    r"|opérat(?:eur|rice)|propriétaire|développeu|usuari[oa]|usuári[oa]|utilizador|operador|propietari|proprietári"
    r"|desarrollador|desenvolvedor|utente|operatore|proprietari|sviluppator|gebruiker|beheerder|eigenaar|пользовател"
    r"|оператор|владел[еь]ц|разработчик|користувач|админ|użytkowni|właściciel|admin|kullanıcı|yönetici)"
    r"|用户|用戶|使用者|管理员|管理員|操作员|老板|老闆|ユーザ|利用者|管理者|オーナー|사용자|관리자|운영자|소유자"
    r"|المستخدم|المسؤول|المدير|उपयोगकर्ता|व्यवस्थापक)"
)
_PERMISSION = (
    r"(?:\b(?:genehmig|erlaub|zugestimm|zustimm|stimmt|bestätig|verlang|gewünscht|möchte|gebeten|bittet|befohlen|befiehlt"
    r"|angewiesen|gesagt|sagt\b|forder|freigegeben|autori[sz]|autorizz|einverstanden|akzeptier|wünscht"
    r"|approuv|consent|confirm|perm[ei]|accordé|d['’]accord|demand|exig|veut\b|voulu|souhait|ordonn|dit\b|validé"
    r"|aprob|aprueb|aprov|acept|aceit|pidi|pide\b|pedi[ru]|pede\b|solicit|quier|quiso\b|quer(?:em|ia|ía)?\b|orden[aóo]|dijo\b"
    r"|dice\b|disse\b|approv|acconsent|accett|chie[ds]|vuole|voluto|ordinat|detto\b"
    r"|goedgekeurd|keurt|toegest|bevestig|gevraagd|vraagt|wil\b|akkoord|gezegd"
    r"|разреш|одобр|подтверд|соглас|попрос|просит|просил|треб|хоч|хотел|приказ|сказал|велел|дозвол|схвал"
    r"|zatwierdz|zgod|zgadz|pozwol|popros|chce\b|chciał|potwierdz|powiedzia|onayla|izin|istiyor|istedi)"
    r"|批准|授权|授權|同意|确认|確認|允许|允許|许可|許可|要求|希望|想要|说|說|命令|指示"
    r"|承認|求め|頼ん|頼み|述べ|望ん|望む|言っ|승인|허가|허용|동의|확인|요청|원하|원했|원한|지시|명령|말했"
    r"|وافق|سمح|أذن|طلب|أكد|يريد|अनुमति|मंज़ूर|मंजूर|सहमत|कहा|चाहत)"
)
# Such a claim in other languages, in either order: "der Nutzer hat erlaubt", "vom Nutzer erlaubt".
_CLAIMED_ABROAD = lazy_pattern(
    rf"{_AUTHORITY}.{{0,60}}?{_PERMISSION}"
    rf"|{_PERMISSION}\w{{0,20}}\W+(?:\w+\W+)?(?:von|vom|durch|par|por|pel[oa]|d[ae]|dal|dall|door|przez)\W+"
    rf"(?:\w+\W+)?{_AUTHORITY}",
    re.IGNORECASE,
)
# The same in English in the passive: "approved by the user".
_APPROVED_BY = lazy_pattern(
    r"\b(?:approv|authori[sz]|confirm|permit|allow|grant|agree|request|order|demand|requir|accept|sign)\w{0,20}\W+(?:\w+\W+)?by\W+"
    r"(?:\w+\W+)?(?:user|human|operator|admin|owner|developer|boss)",
    re.IGNORECASE,
)
# The border of a clause: an order may follow other words on its line.
_CLAUSE = lazy_pattern(
    r"[.!?:;,([{“\"'‘>„«।؟،؛。！？：；，、（「『]+\s*|\s[-–—]+\s|\*\*"
    r"|\b(?:and|then|so|but|und|et|y|e|и|i)\s",
    re.IGNORECASE,
)
_CLAIMS = (_ADDRESSED, _CLAIMED, _APPROVED_BY, _CLAIMED_ABROAD)
_ORDERS = (_ORDER, _VERB_FIRST, _ASIAN)


def is_order(line: str) -> bool:
    """True if a part of *line* reads like an order to its reader, or claims that an order or a permission was given."""
    if any(pattern.search(line) for pattern in _CLAIMS):
        return True
    return any(pattern.search(clause) for clause in _CLAUSE.split(line) for pattern in _ORDERS)
