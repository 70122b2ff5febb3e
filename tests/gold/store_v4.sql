CREATE TABLE store_version (
    version INTEGER NOT NULL           -- of this schema; a newer one is refused, not guessed at
);

-- One row per run: what was fixed before its first request.
CREATE TABLE runs (
    run_id VARCHAR PRIMARY KEY,        -- digest of what identifies the run
    created_at_ns BIGINT NOT NULL,     -- wall clock, ns since 1970-01-01 UTC
    seed BIGINT NOT NULL,              -- of every generator of the run
    corpus_digest VARCHAR NOT NULL,    -- of the prompts, in order
    rules_digest VARCHAR NOT NULL,     -- of guardrails, levels, minimum n and stopping rule
    config VARCHAR NOT NULL            -- JSON: everything else the run was started with
);

-- One row per process that wrote to a run: joins its monotonic clock to the wall clock.
CREATE TABLE anchors (
    run_id VARCHAR NOT NULL,           -- the run
    wall_ns BIGINT NOT NULL,           -- wall clock, ns since 1970-01-01 UTC
    clock_ns BIGINT NOT NULL,          -- the monotonic clock (perf_counter_ns), read together
    boot VARCHAR NOT NULL              -- since when that clock counts: the machine's boot id
);

-- One row per drive: a part of a stage that one process sent, written when it had ended.
CREATE TABLE drives (
    run_id VARCHAR NOT NULL,           -- the run
    seq BIGINT NOT NULL,               -- order within the run
    stage VARCHAR NOT NULL,            -- stage
    label VARCHAR NOT NULL,            -- in words
    routes VARCHAR[] NOT NULL,         -- whose requests went to the speculative arm
    completed BIGINT NOT NULL,         -- requests, warm-up left out
    health VARCHAR NOT NULL,           -- JSON: the client's health
    counters VARCHAR NOT NULL,         -- JSON: per arm what the server counted, or why not
    PRIMARY KEY (run_id, seq)
);

-- What each arm really ran, as captured from server and launcher.
CREATE TABLE arms (
    run_id VARCHAR NOT NULL,           -- the run
    arm VARCHAR NOT NULL,              -- target_only or speculative
    engine_config_id VARCHAR NOT NULL, -- digest of arm, engine, model and both configs
    url VARCHAR NOT NULL,              -- where it was reached; not part of the digest
    engine VARCHAR NOT NULL,           -- name and version
    model VARCHAR NOT NULL,            -- the target
    speculative_config VARCHAR,        -- JSON; NULL on the target-only arm
    config VARCHAR NOT NULL,           -- JSON: argv, server info, model digests, machine
    PRIMARY KEY (run_id, arm, engine_config_id)
);

-- One row per request attempt, never updated. Missing is NULL, never 0.
CREATE TABLE receipts (
    receipt_id VARCHAR PRIMARY KEY,    -- digest of run, stage, phase, arm, prompt, repeat, attempt
    run_id VARCHAR NOT NULL,           -- the run
    stage VARCHAR NOT NULL,            -- replay, shadow or canary; sweep, calibration, probe
    phase VARCHAR NOT NULL,            -- part of the stage: greedy, sampled, aa, c8, c8-k5 ...
    arm VARCHAR NOT NULL,              -- target_only or speculative: the server that answered
    route VARCHAR NOT NULL,            -- class of traffic that is switched on and off
    prompt_id VARCHAR NOT NULL,        -- in the corpus
    pair_id VARCHAR NOT NULL,          -- joins the arms' receipts of one prompt
    repeat BIGINT NOT NULL,            -- 0 for the first time the prompt is sent in the phase
    attempt BIGINT NOT NULL,           -- 0; a retry would be a receipt of its own
    block BIGINT NOT NULL,             -- time block (ABBA), 0 where there are none
    warm_up BOOLEAN NOT NULL,          -- driven but kept out of estimates
    mirror BOOLEAN NOT NULL,           -- copy of primary traffic, its output discarded
    target_model VARCHAR NOT NULL,     -- model (and revision) of the target
    proposer VARCHAR,                  -- draft model or drafting method
    algorithm VARCHAR,                 -- verification algorithm
    draft_sampling VARCHAR,            -- how the proposer picks: greedy or probabilistic
    k BIGINT,                          -- proposal length
    engine VARCHAR NOT NULL,           -- name and version
    engine_config_id VARCHAR NOT NULL, -- of table arms
    policy_version VARCHAR NOT NULL,   -- of the eligibility policy
    temperature DOUBLE NOT NULL,       -- as sent
    top_p DOUBLE NOT NULL,             -- as sent; 1 is off
    top_k BIGINT NOT NULL,             -- as sent; 0 is off
    min_p DOUBLE NOT NULL,             -- as sent; 0 is off
    seed BIGINT,                       -- as sent
    frequency_penalty DOUBLE NOT NULL, -- as sent; 0 is off
    presence_penalty DOUBLE NOT NULL,  -- as sent; 0 is off
    repetition_penalty DOUBLE NOT NULL,-- as sent; 1 is off
    stop_count BIGINT NOT NULL,        -- number of stop strings
    response_format VARCHAR,           -- kind of structured output asked for
    logprobs BIGINT,                   -- number of top logprobs asked for
    task VARCHAR NOT NULL,             -- cohort: task type
    language VARCHAR NOT NULL,         -- cohort
    priority VARCHAR NOT NULL,         -- cohort: normal or protected
    prompt_band VARCHAR NOT NULL,      -- cohort: by prompt tokens
    output_band VARCHAR NOT NULL,      -- cohort: by expected output length
    temperature_band VARCHAR NOT NULL, -- cohort: greedy, low, mid or high
    features VARCHAR NOT NULL,         -- cohort: sampling features, sorted, comma-joined
    concurrency BIGINT NOT NULL,       -- cohort: offered concurrency
    prompt_tokens BIGINT,              -- as the server counted
    cached_tokens BIGINT,              -- of the prompt, found in a prefix cache
    completion_tokens BIGINT,          -- delivered: by token ids, else by the server's usage
    reasoning_tokens BIGINT,           -- of the completion
    proposed_tokens BIGINT,            -- drafted
    accepted_tokens BIGINT,            -- drafted and accepted
    discarded_tokens BIGINT,           -- drafted and not accepted
    target_passes BIGINT,              -- decode passes of the target, prefill excluded
    verify_steps BIGINT,               -- passes that checked drafts
    acceptance_histogram BIGINT[],     -- entry j: verify steps that accepted exactly j
    counts_source VARCHAR NOT NULL,    -- engine, counters, estimated or none
    counts_note VARCHAR NOT NULL,      -- why there are no counts
    scheduled_ns BIGINT NOT NULL,      -- intended send time, clock of the run's first anchor
    sent_ns BIGINT,                    -- real send time
    first_token_ns BIGINT,             -- first chunk with token ids (else content or reasoning)
    first_content_ns BIGINT,           -- first chunk with visible text
    last_token_ns BIGINT,              -- last chunk with token ids (else output)
    done_ns BIGINT,                    -- end of the attempt
    server_queue_ms DOUBLE,            -- in the server's queue, by its own account
    max_chunk_gap_ns BIGINT,           -- longest wait between two chunks with output
    chunks BIGINT,                     -- with output; a chunk is not a token
    outcome VARCHAR NOT NULL,          -- ok, error, rejected, incomplete or cancelled
    http_status BIGINT,                -- NULL where no reply came
    error_class VARCHAR,               -- unsupported_parameter, stream_error, timeout ...
    error_message VARCHAR,             -- one line, clipped, without keys
    finish_reason VARCHAR,             -- as the server said
    stop_reason VARCHAR,               -- as the server said: stop string or token id
    decision VARCHAR NOT NULL,         -- policy: speculate, target_only or fell_back
    decision_reason VARCHAR NOT NULL,  -- one line
    output_digest VARCHAR,             -- of the token ids, of the text where there are none
    warnings VARCHAR[] NOT NULL        -- what did not add up
);
CREATE INDEX receipts_by_phase ON receipts (run_id, stage, phase);

-- Receipts with their times in seconds, computed and never stored.
CREATE VIEW timings AS SELECT *,
    (first_token_ns - sent_ns) / 1e9 AS ttft_s,            -- send to first token
    (last_token_ns - sent_ns) / 1e9 AS e2e_s,              -- send to last token
    (last_token_ns - scheduled_ns) / 1e9 AS effective_s,   -- our own waiting counts
    (first_token_ns - scheduled_ns) / 1e9 AS queue_age_s,  -- how long it waited to be served
    (sent_ns - scheduled_ns) / 1e9 AS lag_s,               -- how late the client was
    CASE WHEN completion_tokens >= 2 AND last_token_ns <> first_token_ns
        THEN (last_token_ns - first_token_ns) / 1e9 / (completion_tokens - 1)
    END AS tpot_s                                          -- per token after the first
FROM receipts;

-- Answers in full: in replay and probe only, or where the user asked. User content.
CREATE TABLE texts (
    receipt_id VARCHAR PRIMARY KEY,    -- of table receipts
    text VARCHAR NOT NULL,             -- visible answer
    token_ids BIGINT[],                -- all tokens, reasoning included; NULL where not sent
    accepted_per_step BIGINT[],        -- accepted in each verify step; NULL where not sent
    drafted_per_step BIGINT[],         -- drafted in each verify step; NULL where not sent
    details VARCHAR                    -- JSON: log-probabilities, further choices, tool calls
);

-- Which of two answers a judge or a reviewer preferred, arms hidden. Information only.
CREATE TABLE preferences (
    run_id VARCHAR NOT NULL,           -- the run
    seq BIGINT NOT NULL,               -- order of writing; the last verdict on a pair stands
    given_at_ns BIGINT NOT NULL,       -- wall clock, ns since 1970-01-01 UTC
    source VARCHAR NOT NULL,           -- judge or human
    who VARCHAR NOT NULL,              -- the judge's model, or the reviewer
    pair_id VARCHAR NOT NULL,          -- joins the arms' receipts of the two answers
    verdict VARCHAR NOT NULL,          -- target_only, speculative, tie or unclear
    note VARCHAR NOT NULL,             -- comment, or why it is unclear
    PRIMARY KEY (run_id, seq)
);

-- Metrics as estimated, before any rule. Derived: a stage that is run again replaces its own.
CREATE TABLE measurements (
    run_id VARCHAR NOT NULL,           -- the run
    put_by VARCHAR NOT NULL,           -- stage whose results these are
    seq BIGINT NOT NULL,               -- order within the stage
    stage VARCHAR NOT NULL,            -- stage the receipts are from
    metric VARCHAR NOT NULL,           -- name, as in rules
    route VARCHAR NOT NULL,            -- the route
    cohort VARCHAR NOT NULL,           -- readable; empty for the whole route
    value DOUBLE,                      -- NULL with n: nothing could be measured
    low DOUBLE,                        -- one-sided bound
    high DOUBLE,                       -- one-sided bound
    n BIGINT,                          -- independent units used by the method
    method VARCHAR,                    -- of the interval
    alpha DOUBLE,                      -- one-sided level of each bound
    note VARCHAR NOT NULL,             -- why nothing could be measured
    examples VARCHAR[] NOT NULL        -- receipt ids of the worst cases
);

-- Rules as judged. Derived, replaced like measurements.
CREATE TABLE findings (
    run_id VARCHAR NOT NULL,           -- the run
    put_by VARCHAR NOT NULL,           -- stage whose results these are
    seq BIGINT NOT NULL,               -- order within the stage
    stage VARCHAR NOT NULL,            -- stage the receipts are from
    rule VARCHAR NOT NULL,             -- name of the rule
    verdict VARCHAR NOT NULL,          -- pass, inconclusive, error or fail
    route VARCHAR NOT NULL,            -- the route
    cohort VARCHAR NOT NULL,           -- readable; empty for the whole route
    value DOUBLE,                      -- the estimate's, NULL with n where there is none
    low DOUBLE,                        -- one-sided bound
    high DOUBLE,                       -- one-sided bound
    n BIGINT,                          -- independent units used by the method
    method VARCHAR,                    -- of the interval
    alpha DOUBLE,                      -- one-sided level of each bound
    limit_value DOUBLE,                -- the rule's limit
    unit VARCHAR NOT NULL,             -- of value and limit
    why VARCHAR NOT NULL,              -- one sentence with number and limit
    needed BIGINT,                     -- further requests that would decide it
    counted BOOLEAN NOT NULL,          -- false for a rule in dry run
    examples VARCHAR[] NOT NULL        -- receipt ids of the worst cases
);

-- Decisions in the order they were taken; each row holds the hash of the one before.
CREATE TABLE decisions (
    run_id VARCHAR NOT NULL,           -- the run; one chain per run
    seq BIGINT NOT NULL,               -- 0, 1, 2 ... without gaps
    decided_at_ns BIGINT NOT NULL,     -- wall clock, ns since 1970-01-01 UTC
    stage VARCHAR NOT NULL,            -- stage in which it was decided
    route VARCHAR NOT NULL,            -- the route
    action VARCHAR NOT NULL,           -- promote, hold, fall_back or inconclusive
    reason VARCHAR NOT NULL,           -- one sentence
    k BIGINT,                          -- proposal length to run with
    scope VARCHAR NOT NULL,            -- loads, temperatures where less than the whole route
    findings VARCHAR NOT NULL,         -- JSON: the findings it rests on
    previous_hash VARCHAR NOT NULL,    -- hash of row seq - 1; empty for the first
    hash VARCHAR NOT NULL,             -- digest of this row with previous_hash
    PRIMARY KEY (run_id, seq)
);

-- Results of stages; the last row of a stage stands, earlier ones stay.
CREATE TABLE stages (
    run_id VARCHAR NOT NULL,           -- the run
    seq BIGINT NOT NULL,               -- order of writing within the run
    stage VARCHAR NOT NULL,            -- fixture, replay, shadow, canary or sweep
    ended_at_ns BIGINT NOT NULL,       -- wall clock, ns since 1970-01-01 UTC
    verdict VARCHAR NOT NULL,          -- pass, inconclusive, error or fail
    evidence VARCHAR NOT NULL,         -- JSON: fixture result, client health, divergences ...
    PRIMARY KEY (run_id, seq)
);

-- Server telemetry over time.
CREATE TABLE samples (
    run_id VARCHAR NOT NULL,           -- the run
    arm VARCHAR NOT NULL,              -- whose server
    at_ns BIGINT NOT NULL,             -- clock of receipts
    name VARCHAR NOT NULL,             -- series, as in /metrics
    labels VARCHAR NOT NULL,           -- JSON
    value DOUBLE NOT NULL,             -- as read
    PRIMARY KEY (run_id, arm, at_ns, name, labels)
);
