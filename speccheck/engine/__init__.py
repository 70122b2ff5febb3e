"""The embedded engine: a small LLM server with speculative decoding that needs no GPU.

It exists so that everything speccheck does can be tried, tested and demonstrated against real
tokens, real acceptance and real latencies, under vLLM's names. Nothing in it is simulated: a
speculative server is faster where its drafts are good and the batch is small, and slower where
not. Its verifier is `speccheck.verifier`, the code that the fixture proves.

Map, in import order: settings, llama (config and weights), graph (ONNX builder), cache, model
(forward pass), prefix (cached prompts), sampling, grammar (structured output), text (tokenizer,
stop strings), adaptive (proposal length), sequence (one request), scheduler, drafters, metrics,
engine (a step), worker (its thread), protocol (OpenAI shapes), server.
"""
