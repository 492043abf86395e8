"""Names of what the decoding loop knows of a prefix without any hidden state."""

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

CANDIDATES = ("candidate_present", "candidate_log_repeats", "candidate_log_age", "candidate_log_changes")
"""Column order of every `candidates` feature: the answer that the thinking has stated last, if any.

`present`: 1 once a closed paragraph has stated an answer; `repeats`: how many later paragraphs stated it again;
`age`: paragraphs closed since the one that stated it first; `changes`: how often another answer took its place.
`log_*` are log(1 + count); all are 0 before the first candidate.
"""

COLUMNS = {"scalars": SCALARS, "candidates": CANDIDATES}
"""Feature source -> its columns, for the sources that derived signals may read."""
