"""Texts that tokenizers get wrong: spaces, newlines, digits, code, scripts, emoji."""

TEXTS = [
    "",
    " ",
    "a",
    "The capital of France is Paris.",
    "the theory of the thing, then the other",
    "  two leading spaces, and two trailing  ",
    "one\ntwo\n\nthree\r\nfour\tfive",
    "\n\n\n",
    "1234567890 and 3.14159, 1,000,000; 0x1F",
    "don't they're I'll we've it's DON'T",
    "def add(left: int, right: int) -> int:\n    return left + right\n",
    '{"name": "agent", "values": [1, 2.5, null, true]}',
    "https://example.org/a/b?c=d&e=%20f#g",
    "Ünïcödé: naïve café, Straße, Åse",
    "Привет, мир! Γειά!",
    "你好世界。こんにちは世界。안녕하세요",
    "مرحبا بالعالم שלום עולם",
    "🙂🚀👩‍👩‍👧‍👦🇩🇪 mixed with text",
    "e\u0301 combining, zero\u200bwidth, nbsp\u00a0here",
    "__init__ snake_case CamelCase kebab-case x=y*z**2",
]
