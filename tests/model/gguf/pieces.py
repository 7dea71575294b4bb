"""The pieces of texts by the rules of pre-tokenizers, as the splitter of llama.cpp makes them.

They were recorded with ``unicode_regex_split`` of llama.cpp (as in llama-cpp-python 0.3.36) and the expressions of its
``src/llama-vocab.cpp``. ``|`` stands between pieces.
"""

TEXTS = (
    "I'm DON'T we'Ll 'tis",
    "a 1234567 x12",
    "  a \n\n b\r\n\t c  ",
    "$x+=1; a/b //\n",
    "e\u0301 \u0939\u093f\u0928\u094d\u0926\u0940 caf\xe9",
    "\u4f60\u597d\u3001\u4e16\u754c \u3042\u30a2 \ud55c\uad6d",
    "camelCase HTTPServer",
    "a\xa0b \u3000c",
    "<a_b> ~`^",
)

PIECES = {
    "default": (
        "I|'|m| DON|'|T| we|'|Ll| |'|tis", "a| |123|456|7| x|12", " | a| \n\n| b|\r\n\t| c|  ",
        "$|x|+=|1|;| a|/|b| |//|\n", "e|\u0301| \u0939|\u093f|\u0928|\u094d|\u0926|\u0940| caf\xe9",
        "\u4f60\u597d|\u3001|\u4e16\u754c| \u3042\u30a2| \ud55c\uad6d", "camelCase| HTTPServer", "a|\xa0|b| |\u3000|c",
        "<|a|_|b|>| |~|`|^",
    ),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4": (
        "I|'m| DON|'|T| we|'|Ll| '|tis", "a| 1234567| x|12", " | a| \n\n| b|\r\n\t| c|  ", "$|x|+=|1|;| a|/|b| //|\n",
        "e|\u0301| \u0939|\u093f|\u0928|\u094d|\u0926|\u0940| caf\xe9",
        "\u4f60\u597d|\u3001|\u4e16\u754c| \u3042\u30a2| \ud55c\uad6d", "camelCase| HTTPServer", "a|\xa0|b| |\u3000|c",
        "<|a|_|b|>| ~`^",
    ),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": (
        "I|'m| DON|'|T| we|'|Ll| '|tis", "a| |1|2|3|4|5|6|7| x|1|2", " | a| \n\n| b|\r\n\t| c|  ",
        "$|x|+=|1|;| a|/|b| //|\n", "e|\u0301| \u0939|\u093f|\u0928|\u094d|\u0926|\u0940| caf\xe9",
        "\u4f60\u597d|\u3001|\u4e16\u754c| \u3042\u30a2| \ud55c\uad6d", "camelCase| HTTPServer", "a|\xa0|b| |\u3000|c",
        "<|a|_|b|>| ~`^",
    ),
    "falcon": (
        "I|'|m| DON|'|T| we|'|Ll| |'|tis", "a| |123|456|7| x|12", " | a| \n\n| b|\r\n\t| c|  ",
        "$|x|+=|1|;| a|/|b| |//|\n", "e|\u0301| \u0939|\u093f|\u0928|\u094d|\u0926|\u0940| caf\xe9",
        "\u4f60\u597d|\u3001|\u4e16\u754c| \u3042\u30a2| \ud55c\uad6d", "camelCase| HTTPServer", "a|\xa0|b| |\u3000|c",
        "<|a|_|b|>| |~`^",
    ),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 glm4 glm5 dbrx smaug-bpe chatglm-bpe minicpm5": (
        "I|'m| DON|'T| we|'Ll| '|tis", "a| |123|456|7| x|12", " | a| \n\n| b|\r\n|\t| c|  ", "$x|+=|1|;| a|/b| //\n",
        "e|\u0301| \u0939|\u093f\u0928|\u094d\u0926|\u0940| caf\xe9",
        "\u4f60\u597d|\u3001\u4e16\u754c| \u3042\u30a2| \ud55c\uad6d", "camelCase| HTTPServer", "a|\xa0b| |\u3000c",
        "<a|_b|>| ~`^",
    ),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2": (
        "I|'m| DON|'T| we|'Ll| '|tis", "a| |1|2|3|4|5|6|7| x|1|2", " | a| \n\n| b|\r\n|\t| c|  ",
        "$x|+=|1|;| a|/b| //\n", "e|\u0301| \u0939|\u093f\u0928|\u094d\u0926|\u0940| caf\xe9",
        "\u4f60\u597d|\u3001\u4e16\u754c| \u3042\u30a2| \ud55c\uad6d", "camelCase| HTTPServer", "a|\xa0b| |\u3000c",
        "<a|_b|>| ~`^",
    ),
    "qwen35": (
        "I|'m| DON|'T| we|'Ll| '|tis", "a| |1|2|3|4|5|6|7| x|1|2", " | a| \n\n| b|\r\n|\t| c|  ",
        "$x|+=|1|;| a|/b| //\n", "e\u0301| \u0939\u093f\u0928\u094d\u0926\u0940| caf\xe9",
        "\u4f60\u597d|\u3001\u4e16\u754c| \u3042\u30a2| \ud55c\uad6d", "camelCase| HTTPServer", "a|\xa0b| |\u3000c",
        "<a|_b|>| ~`^",
    ),
    "seed-coder": (
        "I|'m| DON|'T| we|'Ll| '|tis", "a| |1|2|3|4|5|6|7| x|1|2", " | a| \n\n| b|\r\n|\t| c|  ",
        "$x|+=|1|;| a|/b| //|\n", "e|\u0301| \u0939|\u093f\u0928|\u094d\u0926|\u0940| caf\xe9",
        "\u4f60\u597d|\u3001\u4e16\u754c| \u3042\u30a2| \ud55c\uad6d", "camelCase| HTTPServer", "a|\xa0b| |\u3000c",
        "<a|_b|>| ~`^",
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": (
        "I'm| DON'T| we'Ll| '|tis", "a| |123|456|7| x|12", " | a| \n\n| b|\r\n|\t| c|  ", "$x|+=|1|;| a|/b| //\n",
        "e|\u0301| \u0939|\u093f\u0928|\u094d\u0926|\u0940| caf\xe9",
        "\u4f60\u597d|\u3001\u4e16\u754c| \u3042\u30a2| \ud55c\uad6d", "camel|Case| HTTPServer", "a|\xa0b| |\u3000c",
        "<a|_b|>| ~`^",
    ),
    "tiny_aya cohere2moe": (
        "I'm| DON'T| we'Ll| '|tis", "a| |1|234|567| x|12", " | a| \n\n| b|\r\n|\t| c|  ", "$x|+=|1|;| a|/b| //\n",
        "e\u0301| \u0939\u093f\u0928\u094d\u0926\u0940| caf\xe9",
        "\u4f60\u597d|\u3001\u4e16\u754c| \u3042\u30a2| \ud55c\uad6d", "camelCase| HTTPServer", "a|\xa0b| |\u3000c",
        "<a|_b|>| ~`^",
    ),
    "tekken": (
        "I|'m| DON|'T| we|'Ll| '|tis", "a| |1|2|3|4|5|6|7| x|1|2", " | a| \n\n| b|\r\n|\t| c|  ",
        "$x|+=|1|;| a|/b| //\n", "e|\u0301| \u0939|\u093f\u0928|\u094d\u0926|\u0940| caf\xe9",
        "\u4f60\u597d|\u3001\u4e16\u754c| \u3042\u30a2| \ud55c\uad6d", "camel|Case| HTTPServer", "a|\xa0b| |\u3000c",
        "<a|_b|>| ~`^",
    ),
    "deepseek-llm": (
        "I|'|m| DON|'|T| we|'|Ll| '|tis", "a| |1234567| x|12", " | a| |\n|\n| b|\r|\n|\t| c|  ",
        "$|x|+=|1|;| a|/|b| //|\n", "e|\u0301 |\u0939\u093f\u0928\u094d\u0926\u0940| caf|\xe9",
        "\u4f60\u597d|\u3001|\u4e16\u754c| |\u3042\u30a2| |\ud55c\uad6d", "camelCase| HTTPServer", "a|\xa0b| |\u3000c",
        "<|a|_|b|>| ~`^",
    ),
    "deepseek-coder": (
        "I|'|m| DON|'|T| we|'|Ll| '|tis", "a| |1|2|3|4|5|6|7| x|1|2", " | a| |\n|\n| b|\r|\n|\t| c|  ",
        "$|x|+=|1|;| a|/|b| //|\n", "e|\u0301| |\u0939|\u093f|\u0928|\u094d|\u0926|\u0940| caf\xe9",
        "\u4f60\u597d|\u3001|\u4e16\u754c| |\u3042\u30a2| |\ud55c\uad6d", "camelCase| HTTPServer", "a|\xa0b| |\u3000c",
        "<|a|_|b|> ~`^",
    ),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": (
        "I|'m| DON|'T| we|'Ll| '|tis", "a| |123|456|7| x|12", " | a| \n\n| b|\r\n|\t| c|  ", "$x|+=|1|;| a|/b| //\n",
        "e\u0301| \u0939\u093f\u0928\u094d\u0926\u0940| caf\xe9",
        "\u4f60\u597d|\u3001|\u4e16\u754c| |\u3042\u30a2| \ud55c\uad6d", "camelCase| HTTPServer", "a|\xa0b| |\u3000c",
        "<a|_b|>| ~`^",
    ),
    "superbpe": (
        "I'm DON'T we'Ll 'tis", "a |1|234|567| x|12", "  a \n\n b\r\n\t c  ", "$x+=|1|; a/b //\n",
        "e\u0301 \u0939\u093f\u0928\u094d\u0926\u0940 caf\xe9",
        "\u4f60\u597d\u3001\u4e16\u754c \u3042\u30a2 \ud55c\uad6d", "camelCase HTTPServer", "a\xa0b \u3000c",
        "<a_b> ~`^",
    ),
    "poro-chat bloom gpt3-finnish": (
        "I'm| DON'T| we'Ll| 'tis", "a| 1234567| x12", " | a| \n\n| b|\r\n\t| c|  ", "$x+=1;| a/b| //|\n",
        "e\u0301| \u0939\u093f\u0928\u094d\u0926\u0940| caf\xe9",
        "\u4f60\u597d|\u3001|\u4e16\u754c| \u3042\u30a2| \ud55c\uad6d", "camelCase| HTTPServer", "a|\xa0|b| \u3000|c",
        "<a_b>| ~`^",
    ),
    "viking": (
        "I'm| DON'T| we'Ll| 'tis", "a| |1|2|3|4|5|6|7| x|1|2", " | a| \n\n| b|\r\n\t| c|  ", "$x+=|1|;| a/b| //|\n",
        "e\u0301| \u0939\u093f\u0928\u094d\u0926\u0940| caf\xe9",
        "\u4f60\u597d|\u3001|\u4e16\u754c| \u3042\u30a2| \ud55c\uad6d", "camelCase| HTTPServer", "a|\xa0|b| \u3000|c",
        "<a_b>| ~`^",
    ),
    "gemma4": (
        "I'm DON'T we'Ll 'tis", "a 1234567 x12", "  a |\n\n| b\r|\n|\t c  ", "$x+=1; a/b //|\n",
        "e\u0301 \u0939\u093f\u0928\u094d\u0926\u0940 caf\xe9",
        "\u4f60\u597d\u3001\u4e16\u754c \u3042\u30a2 \ud55c\uad6d", "camelCase HTTPServer", "a\xa0b \u3000c",
        "<a_b> ~`^",
    ),
}  # fmt: skip
"""Pieces of each text, by the names of rules."""

ORIGINAL = {
    "gpt-4o llama4 kanana2 talkie minimax-m2": {4: "e\u0301| \u0939\u093f\u0928\u094d\u0926\u0940| caf\xe9"},
    "tiny_aya cohere2moe": {6: "camel|Case| HTTPServer"},
    "tekken": {4: "e\u0301| \u0939\u093f\u0928\u094d\u0926\u0940| caf\xe9"},
    "deepseek-llm": {7: "a|\xa0b| |\u3000|c"},
    "deepseek-coder": {7: "a|\xa0b| |\u3000|c"},
}  # fmt: skip
"""Pieces that differ on purpose, by the index of the text. The splitter of llama.cpp knows no letter case and no marks
in some expressions, and takes all spaces beyond ASCII for U+000B; the original tokenizers do neither."""
