"""Errors that people met and posted, beside the recordings: facts about providers, each with where it was seen.

They were collected and judged after the first rules were written, and before any was changed for them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Met:
    """One answer: what it means (``None``: nothing of ours), and the limit and prompt it states in tokens."""

    origin: str
    status: int
    body: str
    kinds: tuple[str | None, ...]
    limit: int | None = None
    prompt: int | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def too_long(self) -> bool:
        """Whether a smaller view would help."""
        return self.kinds[0] in {"input", "input_plus_output", "payload"}


def _oai(message: str, **more: object) -> str:
    return json.dumps({"error": {"message": message, "type": "invalid_request_error", **more}}, ensure_ascii=False)


IN, BOTH, BYTES, CAP, RATE, NONE = "input", "input_plus_output", "payload", "output_cap", "rate_limit", None
OTHER = (None, RATE, CAP)
HTML = "<html>\r\n<head><title>{0}</title></head>\r\n<body>\r\n<center><h1>{0}</h1></center>\r\n<hr><center>nginx</center>\r\n</body>\r\n</html>"

TOO_LONG = [
    Met("OpenHands/OpenHands#9252 (SambaNova)", 400, _oai("The maximum context length of DeepSeek-V3-0324 is 32768. However, answering your request will take 39732 tokens. Please reduce the length of the messages or the specified max_completion_tokens value."), (IN, BOTH), 32768),
    Met("cline/cline#5140 (Cerebras)", 400, json.dumps({"message": "Please reduce the length of the messages or completion. Current length is 42328 while limit is 40000", "type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"}), (IN,), 40000),
    Met("OpenHands/OpenHands#1902 (Groq)", 400, _oai("Please reduce the length of the messages or completion.", param="messages", code="context_length_exceeded"), (IN,)),
    Met("MoonshotAI/kimi-cli#2011", 400, _oai("Invalid request: Your request exceeded model token limit: 262144 (requested: 269030)"), (IN,), 262144, 269030),
    Met("MoonshotAI/MoonshotAI-Cookbook#18", 400, _oai("model max length exceeded, max length:8192"), (IN,), 8192),
    Met("MoonshotAI/kimi-code#1862", 400, _oai("total message size 2100954 exceeds limit 2097152"), (BYTES,)),
    Met("jjleng/copilot-more#35", 400, '{"error":{"message":"prompt token count of 93854 exceeds the limit of 90000","param":"","code":"","type":""}}', (IN,), 90000, 93854),
    Met("microsoft/copilot-intellij-feedback#94", 400, '{"error":{"message":"prompt token count of 138898 exceeds the limit of 64000","code":"model_max_prompt_tokens_exceeded"}}', (IN,), 64000, 138898),
    Met("microsoft/vscode-copilot-release#1456", 400, '{"error":{"message":"Message exceeds token limit."}}', (IN,)),
    Met("cline/cline#2115 (GitHub Models)", 413, '{"error":{"code":"tokens_limit_reached","message":"Request body too large for gpt-4o model. Max size: 8000 tokens.","details":"Request body too large for gpt-4o model. Max size: 8000 tokens."}}', (IN,), 8000),
    Met("danny-avila/LibreChat#2402", 400, _oai("Prompt token count of 5677 exceeds max token count of 4095."), (IN,), 4095, 5677),
    Met("AIAnytime/Zephyr-7B-beta-RAG-Demo#3", 500, '{"detail":"Number of tokens (2662) exceeded maximum context length (512)."}', (IN,), 512, 2662),
    Met("abetlen/llama-cpp-python#120", 500, '{"error":{"message":"Requested tokens exceed context window of 512","type":"internal_server_error","param":null,"code":null}}', (IN,), 512),
    Met("THUDM/LongBench#104", 400, '{"object":"error","message":"This model\'s maximum context length is 131072 tokens. However, you requested 351430 tokens. Please reduce the length of the messages or completion.","type":"BadRequestError","param":null,"code":400}', (IN,), 131072),
    Met("esengine/DeepSeek-Reasonix#9696 (Volcengine)", 400, _oai("Input length 1048826 exceeds the maximum length 1048566. Request id: 021788256632854add9fca5277b8939d33af9a0f1789d6cf09b11"), (IN,), 1048566, 1048826),
    Met("AIDotNet/OpenCowork#82 (vLLM)", 400, _oai("This model's maximum context length is 262144 tokens. However, you requested 128000 output tokens and your prompt contains at least 134145 input tokens, for a total of at least 262145 tokens. Please reduce the length of the input prompt or the number of requested output tokens. (parameter=input_tokens, value=134145)", param="input_tokens", code=400), (BOTH,), 262144, 134145),
    Met("QwenLM/Qwen3#1321 (SGLang)", 400, '{"object":"error","message":"The input (61709 tokens) is longer than the model\'s context length (40960 tokens).","type":"BadRequestError","param":null,"code":400}', (IN,), 40960, 61709),
    Met("sgl-project/sglang#7515", 400, '{"detail":"Token indices sequence length is longer than the specified maximum sequence length for this model (18294 > 16384). Running this sequence through the model will result in indexing errors"}', (IN,), 16384, 18294),
    Met("FoundationAgents/OpenManus#62", 400, _oai("This model's maximum context length is 8192 tokens. However, you requested 8213 tokens (6683 in the messages, 730 in the functions, and 800 in the completion). Please reduce the length of the messages, functions, or completion.", param="messages", code="context_length_exceeded"), (BOTH,), 8192, 7413),
    Met("musistudio/claude-code-router#895", 400, _oai("Error from provider(deepseek,deepseek-chat: 400): " + _oai("This model's maximum context length is 131072 tokens. However, you requested 131329 tokens (123137 in the messages, 8192 in the completion). Please reduce the length of the messages or completion.", param=None, code="invalid_request_error") + "Error: Error from provider(deepseek,deepseek-chat: 400): at nt (/opt/router/dist/cli.js:80:11)"), (BOTH,), 131072, 123137),
    Met("egoist/chatwise-releases#917 (OpenRouter, Bedrock)", 400, '{"error":{"message":"Provider returned error","code":400,"metadata":{"raw":"{\\"message\\":\\"input length and `max_tokens` exceed context limit: 149674 + 64000 > 204658, decrease input length or `max_tokens` and try again\\"}","provider_name":"Amazon Bedrock"}},"user_id":"user_2uq"}', (BOTH,), 204658, 149674),
    Met("PaddlePaddle/ERNIE-SDK#336", 400, '{"error_code":336103,"error_msg":"prompt tokens too long","id":"as-1"}', (IN,)),
    Met("langgenius/dify#1435", 400, '{"code":"completion_request_error","message":"Query or prefix prompt is too long, you can reduce the prefix prompt, or shrink the max token, or switch to a llm with a larger token limit size.","status":400}', (IN,)),
    Met("ddalcu/mlx-serve#66", 400, '{"type":"error","error":{"type":"invalid_request_error","message":"Prompt exceeds maximum context length"}}', (IN,)),
    Met("ryanadoty/Amazon-Bedrock-Amazon-RDS-POC#9", 400, '{"message":"Malformed input request: expected maxLength: 42000, actual: 46735, please reformat your input and try again."}', (BYTES, IN), None, None, (("x-amzn-errortype", "ValidationException"),)),
    Met("cohere-ai/sandbox-topically#4", 400, '{"message":"too many tokens: total number of tokens (prompt and prediction) cannot exceed 2048 - received 6354. Try using a shorter prompt or a smaller max_tokens value."}', (IN, BOTH), 2048),
    Met("Cohere chat, client code", 400, '{"id":"5a3b","message":"too many tokens: size limit exceeded by 1195 tokens. Try using shorter or fewer inputs, or setting prompt_truncation=\'AUTO\'."}', (IN,)),
    Met("stanford-crfm/helm#2079 (Together)", 422, '{"error":{"message":"Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 2019 `inputs` tokens and 30 `max_new_tokens`","type":"invalid_request_error","param":null,"code":null}}', (BOTH,), 2048, 2019),
    Met("NVIDIA TensorRT-LLM executor", 500, '{"error":"Encountered error for requestId 1: Prompt length (9000) exceeds maximum input length (8192)."}', (IN,), 8192, 9000),
    Met("mlc-ai/web-llm, MLC server", 400, '{"object":"error","message":"ContextWindowSizeExceededError: Prompt tokens exceed context window size: number of prompt tokens: 5000; context window size: 4096\\nConsider shortening the prompt, or increase `context_window_size`.","code":null}', (IN,), 4096, 5000),
    Met("theroyallab/tabbyAPI", 400, '{"detail":{"error":{"message":"Prompt length 9000 is greater than max_seq_len 8192","trace":"Traceback (most recent call last): prompt"}}}', (IN,), 8192, 9000),
    Met("iFlytek Spark, error table", 200, '{"error":{"code":10907,"message":"token数量超过上限。对话历史+问题的字数太多，需要精简输入"}}', (IN,)),
    Met("Baidu Qianfan, error table", 400, '{"error_code":336007,"error_msg":"the max input characters is 11200"}', (BYTES,)),
    Met("Naver HyperCLOVA X, error table", 400, '{"status":{"code":"40003","message":"Text too long"},"result":null}', (IN, BYTES)),
    Met("Yandex Foundation Models", 400, '{"error":{"grpcCode":3,"httpCode":400,"message":"number of input tokens must be no more than 8192, got 10001","httpStatus":"Bad Request","details":[]}}', (IN,), 8192, 10001),
    Met("Snowflake Cortex", 400, '{"message":"max tokens of 8192 exceeded","request_id":"1"}', (IN,), 8192),
    Met("Apple Foundation Models bridge", 400, '{"error":{"type":"exceededContextWindowSize","message":"The request could not be completed."}}', (IN,)),
    Met("onnxruntime-genai", 500, '{"error":"input sequence_length (9000) is >= max_length (8192)"}', (IN,), 8192, 9000),
    Met("Vercel AI Gateway", 400, '{"error":{"message":"prompt is too long: 208310 tokens > 200000 maximum","type":"AI_APICallError","param":{"statusCode":400,"name":"GatewayInternalServerError"}}}', (IN,), 200000, 208310),
    Met("Portkey", 400, '{"error":{"message":"openai error: This model\'s maximum context length is 16385 tokens. However, your messages resulted in 20010 tokens. Please reduce the length of the messages.","type":"invalid_request_error","param":"messages","code":"context_length_exceeded"},"provider":"openai"}', (IN,), 16385, 20010),
    Met("Cloudflare Workers AI", 400, '{"errors":[{"message":"AiError: AiError: The estimated number of input and maximum output tokens (24650) exceeded this model context window limit (24000). (8f3ac2d1-0000-4000-8000-2a7b3f1c9d10)","code":5021}],"success":false,"result":{},"messages":[]}', (BOTH, IN), 24000),
    Met("dyad-sh/dyad#403 (LiteLLM, Vertex)", 400, json.dumps({"error": "litellm.BadRequestError: VertexAIException BadRequestError - b'{\\n \"error\": {\\n \"code\": 400,\\n \"message\": \"The input token count (1066750) exceeds the maximum number of tokens allowed (1048575).\",\\n \"status\": \"INVALID_ARGUMENT\"\\n }\\n}\\n'"}), (IN,), 1048575, 1066750),
    Met("GoogleCloudPlatform/kubectl-ai#249", 500, "Error: reading streaming LLM response: Error 400, Message: The input token count (2002605) exceeds the maximum number of tokens allowed (1048576)., Status: INVALID_ARGUMENT, Details: []", (IN,), 1048576, 2002605),
    Met("HKUSTDial, Python repr in a gateway", 500, _oai("Error code: 400 - {'object': 'error', 'message': \"This model's maximum context length is 4096 tokens. However, your messages resulted in 4658 tokens. Please reduce the length of the messages.\", 'code': 40303}"), (IN,), 4096, 4658),
    Met("stackblitz-labs/bolt.diy#564, lower case", 500, "this model's maximum context length is 65536 tokens. however, you requested 69648 tokens (69648 in the messages, 0 in the completion). please reduce the length of the messages or completion.", (IN,), 65536, 69648),
    Met("sjzar/chatlog#30", 400, '{"code":20015,"message":"length of prompt_tokens (163280) must be less than max_seq_len (32768).","data":null}', (IN,), 32768, 163280),
    Met("nginx in front of a server", 413, HTML.format("413 Request Entity Too Large"), (BYTES,)),
    Met("AWS API Gateway", 413, '{"message":"Request Too Long"}', (BYTES, IN)),
    Met("fastify", 413, '{"statusCode":413,"code":"FST_ERR_CTP_BODY_TOO_LARGE","error":"Payload Too Large","message":"Request body is too large"}', (BYTES,)),
    Met("pydantic in a gateway", 422, '{"detail":[{"type":"string_too_long","loc":["body","messages",0,"content"],"msg":"String should have at most 100000 characters","input":"prompt is too long: 5 tokens > 4 maximum","ctx":{"max_length":100000}}]}', (BYTES,)),
    Met("LM Studio SDK", 400, '{"error":"The number of tokens to keep from the initial prompt is greater than the context length (n_keep: 10028>= n_ctx: 4096). Try to load the model with a larger context length, or provide a shorter input."}', (IN,), 4096, 10028),
    Met("Mistral, La Plateforme", 400, '{"object":"error","message":"Prompt contains 33021 tokens and 0 draft tokens, too large for model with 32768 maximum context length","type":"invalid_request_prompt","param":null,"code":"3051"}', (IN,), 32768, 33021),
    Met("PPIO, Novita", 400, '{"code":400,"reason":"INVALID_REQUEST_BODY","message":"the sum of prompt length and max_tokens must not exceed 32768","metadata":{}}', (BOTH,), 32768),
    Met("constructed: French", 400, _oai("Votre requête dépasse la fenêtre de contexte du modèle (32768 jetons)."), (IN,), 32768),
    Met("constructed: German", 400, _oai("Die Eingabe ist zu lang: 9000 Token überschreiten das Kontextfenster von 8192 Token."), (IN,), 8192, 9000),
    Met("constructed: Spanish", 400, _oai("La entrada es demasiado larga: 9000 tokens superan el máximo de 8192."), (IN,), 8192, 9000),
    Met("constructed: Russian", 400, _oai("Длина запроса превышает максимальную длину контекста модели: 8192 токенов."), (IN,), 8192),
    Met("constructed: Japanese", 400, _oai("入力トークン数（9000）が最大コンテキスト長（8192）を超えています。"), (IN,), 8192, 9000),
    Met("constructed: Korean", 400, _oai("입력이 너무 깁니다. 최대 컨텍스트 길이는 8192 토큰입니다."), (IN,), 8192),
    Met("constructed: Chinese, with figures", 400, _oai("输入的token数量(9000)超过了模型的最大上下文长度(8192)"), (IN,), 8192, 9000),
]

LOOK_ALIKES = [
    Met("Taewan-P/gpt_mobile#284 (OpenRouter)", 402, _oai("This request requires more credits, or fewer max_tokens. You requested up to 16384 tokens, but can only afford 3919. To increase, visit https://openrouter.ai/settings/credits and upgrade to a paid account", code=402), OTHER),
    Met("anomalyco/opencode#12219 (OpenRouter)", 402, _oai("Prompt tokens limit exceeded: 230799 > 91442. To increase, visit https://openrouter.ai/settings/keys and create a key with a higher monthly limit", code=402), OTHER),
    Met("continuedev/continue#10218 (Groq)", 413, _oai("Request too large for model `llama-3.3-70b-versatile` in organization `org_01` service tier `on_demand` on tokens per minute (TPM): Limit 12000, Requested 14137, please reduce your message size and try again. Need more tokens? Upgrade to Dev Tier today at https://console.groq.com/settings/billing", code="rate_limit_exceeded"), (RATE,)),
    Met("RooCodeInc/Roo-Code#5729 (Groq)", 400, _oai("`max_tokens` must be less than or equal to `16384`, the maximum value for `max_tokens` is less than the `context_window` for this model", param="max_tokens"), (CAP,)),
    Met("charmbracelet/crush#946 (Bedrock)", 400, '{"message":"The maximum tokens you requested exceeds the model limit of 32768. Try again with a maximum tokens value that is lower than 32768."}', (CAP, None)),
    Met("cline/cline#13229 (DeepInfra)", 400, _oai("max_tokens=32000 cannot be greater than max_model_len=max_total_tokens=28672. Please request fewer output tokens. (parameter=max_tokens, value=32000)"), (CAP,)),
    Met("OpenDataBox/CrackSQL#27 (embeddings)", 400, '{"error":{"message":"Requested 453357 tokens, max 300000 tokens per request","type":"max_tokens_per_request","param":null,"code":"max_tokens_per_request"}}', OTHER),
    Met("aurelio-labs/semantic-router#297 (embeddings)", 400, '{"object":"error","message":"Too many tokens in batch. Max is 16384 got 17555","type":"invalid_request_error","param":null,"code":null}', OTHER),
    Met("langchain-ai/langchain#9112 (embeddings)", 400, _oai("Too many inputs. The max number of inputs is 16. We hope to increase the number of inputs per request soon."), OTHER),
    Met("openai-php/client#171 (embeddings)", 400, _oai("'$.input' is invalid. Please check the API reference: https://platform.openai.com/docs/api-reference."), OTHER),
    Met("aws-samples/bedrock-access-gateway#41 (embeddings)", 400, '{"message":"Malformed input request: #/texts/41: expected maxLength: 2048, actual: 2310, please reformat your input and try again."}', OTHER),
    Met("Anthropic, image", 400, '{"type":"error","error":{"type":"invalid_request_error","message":"messages.0.content.1.image.source.base64: image exceeds 5 MB maximum: 6966192 bytes > 5242880 bytes"}}', OTHER),
    Met("Anthropic, image dimensions", 400, '{"type":"error","error":{"type":"invalid_request_error","message":"messages.6.content.0.image.source.base64.data: At least one of the image dimensions exceed max allowed size: 8000 pixels"}}', OTHER),
    Met("Anthropic, output", 400, '{"type":"error","error":{"type":"invalid_request_error","message":"max_tokens: 64000 > 8192, which is the maximum allowed number of output tokens for claude-3-5-sonnet-20241022"}}', (CAP,)),
    Met("Anthropic, thinking", 400, '{"type":"error","error":{"type":"invalid_request_error","message":"`max_tokens` must be greater than `thinking.budget_tokens`. Please consult our documentation"}}', OTHER),
    Met("OpenAI, tool call id", 400, '{"error":{"message":"Invalid \'messages[3].tool_calls[0].id\': string too long. Expected a string with maximum length 40, but got a string with length 51 instead.","type":"invalid_request_error","param":"messages[3].tool_calls[0].id","code":"string_above_max_length"}}', OTHER),
    Met("OpenAI, tool description", 400, '{"error":{"message":"Invalid \'tools[3].function.description\': string too long. Expected a string with maximum length 1024, but got a string with length 1300 instead.","type":"invalid_request_error","param":"tools[3].function.description","code":"string_above_max_length"}}', OTHER),
    Met("OpenAI, too many messages", 400, '{"error":{"message":"Invalid \'messages\': array too long. Expected an array with maximum length 2048, but got an array with length 2100 instead.","type":"invalid_request_error","param":"messages","code":"array_above_max_length"}}', OTHER),
    Met("OpenAI, stop sequences", 400, '{"error":{"message":"Invalid \'stop\': array too long. Expected an array with maximum length 4, but got an array with length 9 instead.","type":"invalid_request_error","param":"stop","code":"array_above_max_length"}}', OTHER),
    Met("a Go gateway", 504, '{"error":{"message":"Post \\"http://upstream/v1/chat/completions\\": context deadline exceeded (Client.Timeout exceeded while awaiting headers)"}}', OTHER),
    Met("a Go gateway", 500, '{"error":"context canceled"}', OTHER),
    Met("an OOM", 500, '{"error":"CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.69 GiB total capacity; 20.11 GiB already allocated)"}', OTHER),
    Met("nginx, headers", 400, HTML.format("400 Request Header Or Cookie Too Large"), OTHER),
    Met("nginx, URI", 414, HTML.format("414 Request-URI Too Large"), OTHER),
    Met("Cloudflare", 524, "<!DOCTYPE html><html><head><title>api.example.org | 524: A timeout occurred</title></head><body>A timeout occurred</body></html>", OTHER),
    Met("Gemini, free tier", 429, '{"error":{"code":429,"message":"You exceeded your current quota, please check your plan and billing details. * Quota exceeded for metric: generativelanguage.googleapis.com/generate_content_free_tier_input_token_count, limit: 250000, model: gemini-2.5-flash","status":"RESOURCE_EXHAUSTED"}}', (RATE,)),
    Met("Azure, S0", 429, '{"error":{"code":"429","message":"Requests to the ChatCompletions_Create Operation under Azure OpenAI API version 2024-02-01 have exceeded token rate limit of your current OpenAI S0 pricing tier. Please retry after 20 seconds."}}', (RATE,)),
    Met("Azure, content filter", 400, '{"error":{"message":"The response was filtered due to the prompt triggering Azure OpenAI\'s content management policy. Please modify your prompt and retry.","type":null,"param":"prompt","code":"content_filter","status":400}}', OTHER),
    Met("LiteLLM, budget", 400, '{"error":{"message":"Budget has been exceeded! Current cost: 10.1, Max budget: 10.0","type":"budget_exceeded","param":null,"code":"400"}}', OTHER),
    Met("LiteLLM, parallel", 429, '{"error":{"message":"Max parallel request limit reached Crossed TPM / RPM / Max Parallel Request Limit. Hit limit for api_key: 1. tpm_limit: 100000, current_tpm: 100001","type":"None","param":"None","code":"429"}}', (RATE,)),
    Met("Scaleway", 416, '{"error":{"message":"max_completion_tokens is limited to 8192 for this model","type":"range_not_satisfiable"}}', (CAP, None)),
    Met("Bedrock, tools", 400, '{"message":"The model returned the following errors: tools: Number of tools exceeds the limit of 64"}', OTHER),
    Met("Anthropic, pairs", 400, '{"type":"error","error":{"type":"invalid_request_error","message":"messages.18: `tool_use` ids were found without `tool_result` blocks immediately after: toolu_01. Each `tool_use` block must have a corresponding `tool_result` block in the next message."}}', OTHER),
    Met("Anthropic, PDF", 400, '{"type":"error","error":{"type":"invalid_request_error","message":"A maximum of 100 PDF pages may be provided."}}', OTHER),
    Met("vLLM, images", 400, '{"object":"error","message":"At most 1 image(s) may be provided in one request.","type":"BadRequestError","param":null,"code":400}', OTHER),
    Met("Mistral, rate", 429, '{"object":"error","message":"Service tier capacity exceeded for this model.","type":"service_tier_capacity_exceeded","param":null,"code":"3505"}', OTHER),
    Met("OpenAI, function name", 400, _oai("Function name exceeds 64 characters", param="functions"), OTHER),
    Met("a model that is not there", 404, _oai("The model `llama-3-8b-instruct-262k-context-length` does not exist", code="model_not_found"), OTHER),
    Met("vLLM, at start", 500, '{"error":{"message":"To serve at least one request with the model\'s max seq len (262144), 24.00 GiB KV cache is needed, which is larger than the available KV cache memory (11.2 GiB).","type":"InternalServerError","code":500}}', OTHER),
    Met("quota, in Chinese", 429, _oai("您的账户余额不足，token 额度已超出上限"), OTHER),
    Met("temperature", 400, _oai("temperature is too high: maximum value is 2", param="temperature"), OTHER),
]

MET = TOO_LONG + LOOK_ALIKES
