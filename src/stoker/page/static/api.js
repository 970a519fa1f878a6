// What the server answers. Every change carries the session's CSRF token; errors keep their hint and place.
import { useEffect, useRef, useState } from "./html.js";
import { t } from "./i18n.js";

let csrf = "";
let signedOut = () => {};
let embedded = null; // answers by address, in a report without a server

/** An answer with a status of 400 and more; `line`, `column` and `hint` are the server's. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error.message || String(status));
    Object.assign(this, { hint: "", file: "", line: 0, column: 0, ...error, status });
  }
}

export const useAnswers = (answers) => (embedded = answers);
export const isReport = () => embedded !== null;
export const useToken = (token) => (csrf = token);
/** What is done where the session has ended, and a token is asked for. */
export const onSignedOut = (act) => (signedOut = act);

const withQuery = (path, query) => {
  const each = Object.entries(query ?? {}).flatMap(([key, value]) => [value].flat().map((one) => [key, one])); // a list is a key for each
  const values = each.filter(([, value]) => value !== undefined && value !== null);
  return values.length ? `${path}?${new URLSearchParams(values)}` : path;
};

async function reach(path, options) {
  try {
    return await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    throw error instanceof TypeError ? new Error(t("app.unreachable"), { cause: error }) : error;
  }
}

/** Asks for the session's CSRF token, which begins a session where none is asked for. */
async function renew() {
  const answer = await reach("/api/me");
  if (answer.status === 401) signedOut();
  if (answer.ok) csrf = (await answer.json()).csrf;
}

let renewing = null; // one renewal at a time: each would begin a session of its own

/** The server's answer; once more where the session had ended meanwhile, or another tab had begun one. */
async function send(method, path, { headers = {}, ...more }) {
  const sent = csrf;
  const ask = () => reach(path, { method, headers: method === "GET" ? headers : { ...headers, "X-Stoker-CSRF": csrf }, ...more });
  const answer = await ask();
  const isOver = answer.status === 401 || (answer.status === 403 && method !== "GET");
  if (!isOver || ["/api/me", "/api/login"].includes(path)) return answer;
  if (csrf === sent) await (renewing ??= renew().finally(() => (renewing = null)));
  return csrf === sent ? answer : ask();
}

async function request(method, path, { query, body, raw, signal } = {}) {
  if (embedded) {
    if (method === "GET" && path in embedded) return embedded[path];
    throw new ApiError(404, { message: path });
  }
  const answer = await send(method, withQuery(path, query), {
    headers: body === undefined ? {} : { "Content-Type": "application/json" },
    body: raw ?? (body === undefined ? undefined : JSON.stringify(body)),
    signal,
  });
  const text = await answer.text();
  const isJson = (answer.headers.get("content-type") || "").includes("json");
  const value = isJson && text ? JSON.parse(text) : text;
  if (!answer.ok) throw new ApiError(answer.status, (isJson && value.error) || { message: text.slice(0, 300) });
  return value;
}

export const get = (path, query, signal) => request("GET", path, { query, signal });
export const post = (path, body = {}, signal) => request("POST", path, { body, signal });
export const remove = (path) => request("DELETE", path);
export const patch = (path, body) => request("PATCH", path, { body });
export const patchRaw = (path, query, raw) => request("PATCH", path, { query, raw });

/**
 * Asks once a path is known, and again when it changes, every `every` ms, or when `again` is called: {data, error,
 * again, isOld}. While the query changes the last data stay, and `isOld` says that they answer another one. One question is open at a time: a slow answer is waited for, and what was asked meanwhile is asked once more.
 */
export function useGet(path, query, { every = 0 } = {}) {
  const [state, set] = useState({ data: null, error: null, key: "" });
  const ask = useRef(() => {});
  const key = path ? withQuery(path, query) : "";
  const last = useRef("");
  useEffect(() => {
    if (!path) return undefined;
    const stop = new AbortController();
    let [isOpen, isWanted] = [false, false];
    if (last.current !== path) set({ data: null, error: null, key: "" });
    else set((old) => (old.error ? { ...old, error: null } : old));
    last.current = path;
    ask.current = () => {
      isWanted = isOpen;
      if (isOpen) return;
      isOpen = true;
      get(path, query, stop.signal)
        .then(
          (data) => stop.signal.aborted || set({ data, error: null, key }),
          (error) => stop.signal.aborted || set((old) => ({ ...old, error })),
        )
        .then(() => {
          isOpen = false;
          if (isWanted && !stop.signal.aborted) ask.current();
        });
    };
    ask.current();
    return () => stop.abort();
  }, [key]);
  useEffect(() => {
    if (!every || !path || embedded) return undefined;
    const timer = setInterval(() => document.hidden || ask.current(), every);
    return () => clearInterval(timer);
  }, [every, Boolean(path)]);
  return { data: state.data, error: state.error, isOld: state.data !== null && state.key !== key, again: () => ask.current() };
}

/**
 * Posts and reads the answer as server-sent events, each handed over as soon as it is whole.
 * Returns when the stream ends.
 */
export async function postStream(path, body, onEvent, signal) {
  const answer = await send("POST", path, { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
  if (!answer.ok) {
    const error = (await answer.json().catch(() => ({}))).error;
    throw new ApiError(answer.status, error || { message: answer.statusText });
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const [events, left] = splitEvents(rest + value);
    rest = left;
    for (const event of events) onEvent(event);
  }
}

/** The JSON of whole events in a text of server-sent events, and what is left of it. */
export function splitEvents(text) {
  const blocks = text.replaceAll("\r\n", "\n").split("\n\n");
  const left = blocks.pop();
  const events = [];
  for (const block of blocks) {
    const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
    if (!data.length || data[0] === "[DONE]") continue;
    events.push(JSON.parse(data.join("\n")));
  }
  return [events, left];
}

/** The address of a run in the API. */
export const runPath = (id) => `/api/runs/${encodeURIComponent(id)}`;

const REOPEN = 3000; // ms before a stream is opened again that the browser has given up

/**
 * Follows a run, until the function that it returns is called. The browser reconnects by itself and sends the last id,
 * but gives up where the server answers with an error: a run that has not begun has no stream yet. A new stream begins
 * with `reset`. `onConnection` is called with the time since which a connection is lost, 0 for none.
 */
export function follow(run, onEvent, onConnection) {
  if (embedded || typeof EventSource === "undefined") return () => {};
  let source = null;
  let timer = 0;
  let since = 0;
  let [wasOpen, isAgain] = [false, false];
  const open = () => {
    source = new EventSource(`${runPath(run)}/stream`);
    source.onopen = () => {
      [since, wasOpen] = [0, true];
      onConnection(0);
      if (isAgain) onEvent("reset", {});
      isAgain = false;
    };
    source.onerror = () => {
      const isRefused = source.readyState === EventSource.CLOSED;
      if (isRefused) {
        isAgain = true;
        timer = setTimeout(open, REOPEN);
      }
      if (isRefused && !wasOpen) return; // the other questions about the run say why
      since ||= Date.now() / 1000;
      onConnection(since);
    };
    for (const kind of ["metrics", "event", "status", "reset"]) {
      source.addEventListener(kind, (message) => onEvent(kind, JSON.parse(message.data)));
    }
  };
  open();
  return () => {
    clearTimeout(timer);
    source.close();
  };
}
