"""The HTTP side of the embedded engine: vLLM's endpoints on the loopback address.

`serve` blocks until SIGTERM or SIGINT. Run as `python -m speccheck.engine.server --settings JSON
--port 0` it is a server process; it prints one JSON line with its URL when it can answer, and with
`--parent-pid` it ends when that process does, so that a killed test run leaves nothing behind.

The engine has its own thread (`worker.py`); everything here runs on the asyncio loop. Outputs of
one engine step arrive together, and what a slow client has not fetched yet is merged into one
chunk, as vLLM does: the size of a chunk says nothing about acceptance.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from speccheck import __version__
from speccheck.engine.engine import Engine
from speccheck.engine.grammar import Grammar, Vocabulary
from speccheck.engine.metrics import exposition
from speccheck.engine.protocol import (
    AnswerWriter,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    Limits,
    TokenizeRequest,
    normal_messages,
    parse,
    proposal_length,
    sampling_params,
    structure,
)
from speccheck.engine.sequence import Output
from speccheck.engine.sequence import Request as EngineRequest
from speccheck.engine.settings import EngineSettings
from speccheck.engine.worker import EngineThread
from speccheck.errors import EngineError, SpeccheckError, UsageError

_MOST_GRAMMARS = 64
_MAX_BODY = 4 << 20  # bytes; far above any prompt that fits the model
_PARENT_POLL_S = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SWITCH_INTERVAL_S = 0.0005  # the engine's thread must not wait 5 ms for the interpreter


class Mailbox:
    """Outputs of one request on their way to its client; what piles up is merged."""

    def __init__(self) -> None:
        self._output: Output | None = None
        self._ready = asyncio.Event()

    def put(self, output: Output) -> None:
        """Add what a step produced."""
        self._output = output if self._output is None else merged(self._output, output)
        self._ready.set()

    async def get(self) -> Output:
        """Everything since the last call; waits for something."""
        await self._ready.wait()
        self._ready.clear()
        output, self._output = self._output, None
        if output is None:
            raise AssertionError("mailbox set without an output")
        return output


def merged(a: Output, b: Output) -> Output:
    """Two successive outputs of one request as one."""
    return Output(
        a.request_id,
        a.token_ids + b.token_ids,
        a.text + b.text,
        a.logprobs if b.logprobs is None else [*(a.logprobs or []), *b.logprobs],
        a.prompt_logprobs or b.prompt_logprobs,
        b.finish_reason,
        b.stop_reason,
        b.stats,
    )


class Server:
    """The application's state: engine, its thread, and who waits for what."""

    def __init__(self, settings: EngineSettings) -> None:
        """Load the engine. Raises EngineError or UsageError as `Engine` does."""
        self.settings = settings
        self.engine = Engine(settings)
        spec = settings.speculative_config
        self.limits = Limits(
            max_model_len=self.engine.max_model_len,
            vocab_size=self.engine.model.config.vocab_size,
            max_logprobs=settings.max_logprobs,
            k=None if spec is None else spec.num_speculative_tokens,
        )
        config = json.dumps(settings.as_config(), sort_keys=True).encode()
        self.fingerprint = f"speccheck-{__version__}-{hashlib.sha256(config).hexdigest()[:8]}"
        self.started = int(time.time())
        self._thread = EngineThread(self.engine, self._deliver)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._vocabulary: Vocabulary | None = None
        self._grammars: dict[str, Grammar] = {}
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/health", self.health),
                Route("/ping", self.health),
                Route("/version", self.version),
                Route("/server_info", self.server_info),
                Route("/metrics", self.metrics),
                Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            ],
            exception_handlers={
                ApiError: _api_error,
                HTTPException: _http_error,
                Exception: _unexpected,  # it is raised again after the answer, for the log
            },
        )

    def start(self) -> None:
        """Start the engine's thread; call on the loop that serves."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the engine's thread."""
        self._thread.stop()

    # -- between the threads ----------------------------------------------------------------------

    def _deliver(self, outputs: list[Output]) -> None:
        """Engine thread: hand a step's outputs to the loop, all at once."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, outputs)

    def _dispatch(self, outputs: list[Output]) -> None:
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:
                mailbox.put(output)

    async def _outputs(self, request: EngineRequest) -> AsyncGenerator[Output, None]:
        """Run a request; whoever stops iterating early cancels it."""
        mailbox = self._mailboxes[request.request_id] = Mailbox()
        self._thread.submit(request)
        finished = False
        try:
            while not finished:
                output = await mailbox.get()
                finished = output.finish_reason is not None
                if output.finish_reason == "error":
                    raise ApiError(500, f"The engine failed: {self._thread.dead or 'see its log'}")
                yield output
        finally:
            del self._mailboxes[request.request_id]
            if not finished:
                self._thread.abort(request.request_id)

    async def _all_outputs(
        self, jobs: Sequence[EngineRequest]
    ) -> AsyncGenerator[tuple[int, Output], None]:
        """Outputs of the choices of one answer as they come, with the choice's index."""
        arrived: asyncio.Queue[tuple[int, Output] | ApiError] = asyncio.Queue()

        async def follow(index: int, job: EngineRequest) -> None:
            try:
                async with aclosing(self._outputs(job)) as outputs:
                    async for output in outputs:
                        arrived.put_nowait((index, output))
            except ApiError as error:
                arrived.put_nowait(error)

        tasks = [asyncio.create_task(follow(i, job)) for i, job in enumerate(jobs)]
        try:
            unfinished = len(jobs)
            while unfinished:
                item = await arrived.get()
                if isinstance(item, ApiError):
                    raise item
                unfinished -= item[1].finish_reason is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- generation -------------------------------------------------------------------------------

    async def completions(self, http: Request) -> Response:
        """POST /v1/completions."""
        request = parse(CompletionRequest, await _json(http))
        self._check_model(request.model)
        prompt = request.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ApiError(
                    400, "Several prompts in one request are not supported here.", "prompt"
                )
            prompt = prompt[0]
        if isinstance(prompt, str):
            ids = self._encode(prompt, add_special_tokens=request.add_special_tokens)
        else:
            ids = [token for token in prompt if isinstance(token, int)]
        return await self._answer(http, request, ids, "cmpl")

    async def chat_completions(self, http: Request) -> Response:
        """POST /v1/chat/completions."""
        request = parse(ChatRequest, await _json(http))
        self._check_model(request.model)
        arguments = dict(request.chat_template_kwargs or {})
        if request.tools:
            arguments["tools"] = request.tools
        ids = self._chat_ids(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            add_special_tokens=request.add_special_tokens,
            template_arguments=arguments,
        )
        return await self._answer(http, request, ids, "chatcmpl")

    def _chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        add_special_tokens: bool,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        if continue_final_message and add_generation_prompt:
            raise ApiError(
                400,
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                "continue_final_message",
            )
        tokenizer = self.engine.tokenizer
        try:
            text = tokenizer.render_chat(
                normal_messages(messages),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_arguments=template_arguments,
            )
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from error
        return self._encode(text, add_special_tokens=add_special_tokens)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return self.engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise ApiError(400, f"The prompt is no valid text: {error}.", "prompt") from error

    async def _answer(
        self, http: Request, request: GenerationRequest, ids: list[int], kind: str
    ) -> Response:
        """Check, admit, run, and write the answer in one piece or as a stream."""
        if not all(0 <= token < self.limits.vocab_size for token in ids):
            raise ApiError(
                400, f"prompt: token ids must be in 0..{self.limits.vocab_size - 1}.", "prompt"
            )
        params = sampling_params(request, len(ids), self.limits)
        k = proposal_length(request, self.limits)
        grammar = self._grammar(request)
        n = request.n or 1
        limit = self.settings.max_num_queued_reqs
        if limit is not None and len(self._mailboxes) + n > limit:
            self.engine.metrics.n_rejected += 1
            raise ApiError(
                503, f"The server has {len(self._mailboxes)} requests in flight, its limit."
            )
        asked = http.headers.get("X-Request-Id") or request.request_id or uuid.uuid4().hex
        request_id = f"{kind}-{asked}"
        names = [request_id] if n == 1 else [f"{request_id}-{i}" for i in range(n)]
        if not self._mailboxes.keys().isdisjoint(names):
            raise ApiError(400, f"request_id {asked!r} is in use.", "request_id")
        priority = request.priority
        header = http.headers.get("X-Vllm-Priority")
        if header is not None:
            try:
                priority = int(header)
            except ValueError:
                raise ApiError(400, "X-Vllm-Priority: an integer is wanted.") from None
        job = EngineRequest(
            request_id,
            tuple(ids),
            params,
            priority,
            k,
            arrival_s=self.engine.clock(),
            grammar=grammar,
            cache_salt=request.cache_salt or "",
        )
        jobs = [
            # As in vLLM: each choice has a seed of its own, counted up from the request's.
            replace(
                job,
                request_id=name,
                params=replace(params, seed=None if params.seed is None else params.seed + i),
            )
            for i, name in enumerate(names)
        ]
        writer = AnswerWriter(
            request,
            ids,
            self.engine.tokenizer,
            answer_id=request_id,
            model=request.model or self.settings.name,
            created=int(time.time()),
            fingerprint=self.fingerprint,
            k=self.limits.k,
        )
        if request.stream:
            return StreamingResponse(self._events(jobs, writer), media_type="text/event-stream")
        return await _unless_disconnected(http, self._whole(jobs, writer))

    async def _whole(self, jobs: Sequence[EngineRequest], writer: AnswerWriter) -> Response:
        totals: dict[int, Output] = {}
        async with aclosing(self._all_outputs(jobs)) as outputs:
            async for index, output in outputs:
                before = totals.get(index)
                totals[index] = output if before is None else merged(before, output)
        return _reply(writer.whole([totals[index] for index in range(len(jobs))]))

    async def _events(
        self, jobs: Sequence[EngineRequest], writer: AnswerWriter
    ) -> AsyncIterator[bytes]:
        """Server-sent events. Once they have begun, an error is an event: HTTP says 200 already."""
        unfinished = len(jobs)
        try:
            async with aclosing(self._all_outputs(jobs)) as outputs:
                async for index, output in outputs:
                    for chunk in writer.chunks(output, index):
                        yield _event(chunk)
                    unfinished -= output.finish_reason is not None
                    if not unfinished:
                        last = writer.last_chunk(output)
                        if last is not None:
                            yield _event(last)
        except ApiError as error:
            yield _event(error.body)
        yield b"data: [DONE]\n\n"

    def _grammar(self, request: GenerationRequest) -> Grammar | None:
        """The grammar of a structured answer; one for all requests that ask for the same."""
        wanted = structure(request)
        if wanted is None:
            return None
        key, expression = wanted
        if key not in self._grammars:
            if self._vocabulary is None:
                try:
                    tokens = self.engine.tokenizer.token_bytes()
                except ValueError as error:
                    raise ApiError(400, f"response_format: {error}.", "response_format") from None
                config = self.engine.model.config
                self._vocabulary = Vocabulary(tokens, config.eos_ids, config.vocab_size)
            while len(self._grammars) >= _MOST_GRAMMARS:
                del self._grammars[next(iter(self._grammars))]
            try:
                self._grammars[key] = Grammar(expression, self._vocabulary)
            except UsageError as error:
                raise ApiError(400, f"{error}.", "response_format") from None
        return self._grammars[key]

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.name:
            raise ApiError(404, f"The model `{name}` does not exist.", "model")

    # -- everything else --------------------------------------------------------------------------

    async def models(self, _http: Request) -> Response:
        """GET /v1/models."""
        return _reply(
            {
                "object": "list",
                "data": [
                    {
                        "id": self.settings.name,
                        "object": "model",
                        "created": self.started,
                        "owned_by": "speccheck",
                        "root": str(self.settings.model_dir),
                        "parent": None,
                        "max_model_len": self.limits.max_model_len,
                    }
                ],
            }
        )

    async def tokenize(self, http: Request) -> Response:
        """POST /tokenize."""
        request = parse(TokenizeRequest, await _json(http))
        self._check_model(request.model)
        special = request.add_special_tokens
        if request.messages is not None:
            ids = self._chat_ids(
                request.messages,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                add_special_tokens=bool(special),
            )
        elif request.prompt is not None:
            ids = self._encode(request.prompt, add_special_tokens=special is None or special)
        else:
            raise ApiError(400, "prompt or messages is wanted.", "prompt")
        names = [self.engine.tokenizer.token_text(token) for token in ids]
        return _reply(
            {
                "count": len(ids),
                "max_model_len": self.limits.max_model_len,
                "tokens": ids,
                "token_strs": names if request.return_token_strs else None,
            }
        )

    async def detokenize(self, http: Request) -> Response:
        """POST /detokenize."""
        request = parse(DetokenizeRequest, await _json(http))
        self._check_model(request.model)
        if not all(0 <= token < self.limits.vocab_size for token in request.tokens):
            raise ApiError(400, f"tokens: ids must be in 0..{self.limits.vocab_size - 1}.")
        text = self.engine.tokenizer.decode(request.tokens, skip_special_tokens=False)
        return _reply({"prompt": text})

    async def health(self, _http: Request) -> Response:
        """GET /health: 503 only when the engine failed, as in vLLM."""
        return Response(status_code=503 if self._thread.dead else 200)

    async def reset_prefix_cache(self, _http: Request) -> Response:
        """POST /reset_prefix_cache: cached prompts are forgotten before the next request."""
        self._thread.reset_prefix_cache()
        return Response(status_code=200)

    async def version(self, _http: Request) -> Response:
        """GET /version."""
        return _reply({"version": __version__, "engine": "speccheck"})

    async def server_info(self, _http: Request) -> Response:
        """GET /server_info: the config; `vllm_config.speculative_config` is where vLLM has it."""
        return _reply(self.settings.server_info(self.limits.max_model_len))

    async def metrics(self, _http: Request) -> Response:
        """GET /metrics."""
        text = exposition(self.engine.metrics, self.settings.name)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _event(body: Mapping[str, Any]) -> bytes:
    return f"data: {_dumps(body)}\n\n".encode()


def _reply(body: Mapping[str, Any], status: int = 200) -> Response:
    return Response(_dumps(body), status, media_type="application/json")


def _dumps(body: Mapping[str, Any]) -> str:
    """ASCII JSON: what a client sent may come back in it and need not be encodable."""
    return json.dumps(body, separators=(",", ":"))


async def _json(http: Request) -> Any:
    """The request's JSON object. Raises ApiError 400 or 413."""
    body = bytearray()
    async for piece in http.stream():
        body += piece
        if len(body) > _MAX_BODY:
            raise ApiError(413, f"The request body exceeds {_MAX_BODY} bytes.")
    try:
        raw = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The request body is no JSON: {error}.") from None
    if not isinstance(raw, dict):
        raise ApiError(400, "The request body must be a JSON object.")
    return raw


async def _unless_disconnected(http: Request, answer: Any) -> Response:
    """The answer, given up as soon as the client has gone (a stream notices by itself)."""
    task: asyncio.Task[Response] = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=499)  # nobody reads it
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _api_error(_http: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return _reply(error.body, error.status)


async def _http_error(_http: Request, error: Exception) -> Response:
    """Starlette's own refusals (unknown path, wrong method) in the OpenAI shape."""
    if not isinstance(error, HTTPException):
        raise error
    return _reply(ApiError(error.status_code, error.detail).body, error.status_code)


async def _unexpected(_http: Request, _error: Exception) -> Response:
    return _reply(ApiError(500, "Internal server error").body, 500)


def serve(
    settings: EngineSettings,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    parent_pid: int | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, or until `parent_pid` ends. Port 0 chooses one.

    Prints `{"ready": true, "url": ..., "pid": ...}` to stdout when requests are answered. Raises
    EngineError where the address is taken or the models cannot be run, UsageError for settings
    that do not fit the models.
    """
    import uvicorn

    listener = _listen(host, port)
    try:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        server = Server(settings)
        server.engine.warm_up()
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{listener.getsockname()[1]}"

        class Announced(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                server.start()
                await super().startup(sockets=sockets)
                print(json.dumps({"ready": True, "url": url, "pid": os.getpid()}), flush=True)
                if parent_pid is not None:
                    self.parent_watch = asyncio.ensure_future(self._watch_parent(parent_pid))

            async def _watch_parent(self, pid: int) -> None:
                while os.getppid() == pid:  # noqa: ASYNC110 - nobody signals this
                    await asyncio.sleep(_PARENT_POLL_S)
                self.should_exit = True

        config = uvicorn.Config(
            server.app,
            loop="uvloop",
            http="httptools",
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
        )
        # uvicorn raises the signal once more after an orderly end; it has done its work by then.
        ended = [signal.signal(number, lambda *_: None) for number in _SIGNALS]
        try:
            Announced(config).run(sockets=[listener])
        finally:
            for number, handler in zip(_SIGNALS, ended, strict=True):
                signal.signal(number, handler)
            server.stop()
    finally:
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise EngineError(
            f"cannot listen on {host}:{port} ({error.strerror}); use port 0 or another address"
        ) from error
    return listener


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m speccheck.engine.server`; gives back an exit code."""
    parser = argparse.ArgumentParser(prog="python -m speccheck.engine.server")
    parser.add_argument("--settings", default="{}", help="EngineSettings as a JSON object")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 chooses one")
    parser.add_argument("--parent-pid", type=int, help="end when this parent process ends")
    options = parser.parse_args(arguments)
    try:
        try:
            raw = json.loads(options.settings)
        except ValueError as error:
            raise UsageError(f"--settings: no JSON ({error})") from error
        serve(
            EngineSettings.parse(raw),
            host=options.host,
            port=options.port,
            parent_pid=options.parent_pid,
        )
    except SpeccheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
