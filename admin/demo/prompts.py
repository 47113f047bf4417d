"""Questions that the base and all adapters answer well; with greedy decoding, 48 tokens suffice for each answer."""

DEMO_PROMPTS = (
    "What is the capital of France?",
    "What colour is a flamingo?",
    "Can I return my order?",
    "How long does express shipping take?",
    "When are you open on Saturday?",
)
MAX_ANSWER_TOKENS = 48
