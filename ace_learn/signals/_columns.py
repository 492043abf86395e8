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

ACCEPTANCE = ("draft_log_odds", "acceptance_slope", "acceptance_intercept")
"""Column order of every `acceptance` feature: how sure the drafter is, and what the estimator makes of it.

`draft_log_odds`: logit(max p) of the drafter's law p, as late as its hidden states are (`DraftStates`): a function of
the prefix. `acceptance_*`: slope and first intercept of the acceptance estimator when the row was read: they move with
traffic, and in a data set they stand still.
"""

COLUMNS = {"scalars": SCALARS, "candidates": CANDIDATES, "acceptance": ACCEPTANCE}
"""Feature source -> its columns, for the sources that derived signals may read."""
