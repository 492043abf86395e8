"""Names of the running scalars: what the decoding loop knows of a prefix without any hidden state."""

SCALARS = (
    "log_tokens",
    "log_paragraphs",
    "mean_logprob",
    "min_logprob",
    "paragraph_mean_logprob",
    "paragraph_min_logprob",
    "entropy",
)
"""Column order of every `scalars` feature.

`log_*` are log(1 + count); log-probabilities are raw (before temperature, truncation and processors) and in nats;
`entropy` is that of the next-token distribution, in nats.
"""
