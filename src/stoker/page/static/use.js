// Use: talk to one or two models side by side, export with its replay, evaluate; every action is a command line.
import { ApiError, post, postStream, remove, runPath, useGet } from "./api.js";
import { chatLine, evalLine, exportLine } from "./commands.js";
import { namesOf } from "./data.js";
import { Servers } from "./deploy.js";
import { Doing, isOn, useAction } from "./doing.js";
import { Term } from "./glossary.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { number, t, time } from "./i18n.js";
import { Lookup } from "./lookup.js";
import { address, go } from "./router.js";
import { hasTokens } from "./rows.js";
import { runName, runsAlone, withModel } from "./run_list.js";
import { remember } from "./session.js";
import { Action, Command, Field, FolderName, Loaded, NothingYet, Problem, Status, Table, Tabs, Text } from "./ui.js";

/** The sides of an address: its runs; a single run is compared with itself without its tuning, unless `alone`. */
export const sidesOf = (ids, alone) => (ids.length > 1 ? ids.slice(0, 2).map((id) => ({ id, adapter: true })) : alone ? [{ id: ids[0], adapter: true }] : [{ id: ids[0], adapter: true }, { id: ids[0], adapter: false }]);

/** What one side is sent: the questions that it has answered, each with its answer, and the new one. */
export const messagesOf = (turns, at, text) => [
  ...turns.filter((turn) => turn.answers[at]).flatMap((turn) => [{ role: "user", content: turn.text }, { role: "assistant", content: turn.answers[at] }]),
  { role: "user", content: text },
];

/** Whether a question comes back into its field: nothing was answered, as a side failed or was stopped. An answer may be empty. */
export const isTakenBack = (hasAnswer, done) => !hasAnswer && done.some((one) => one.status === "rejected");

/** What stands under a question: the answer, or why there is none. `busy` says that answers are being written. */
export function shownAnswer({ answers, isWhole }, at, busy) {
  if (answers[at]) return answers[at];
  if (isWhole?.[at]) return html`<em>${t("use.empty_answer")}</em>`;
  return busy ? t("use.thinking") : "";
}

const LIMITS = { temperature: [0, 2], max_tokens: [1, 8192] }; // those of the server

/** What is wrong with the numbers that a chat is asked with; empty for nothing. */
export function outOfLimits(values) {
  const isIn = (name, text) => text.trim() !== "" && Number(text) >= LIMITS[name][0] && Number(text) <= LIMITS[name][1];
  const wrong = Object.keys(LIMITS).find((name) => !isIn(name, values[name]));
  return wrong ? t("use.limits", { name: t(`g.${wrong}.name`), low: LIMITS[wrong][0], high: LIMITS[wrong][1] }) : "";
}

/** Whether a run of some keys has something to switch off, so that its model answers without its tuning. */
export const hasAdapter = (keys) => (keys?.["tune.method"] ?? keys?.tune ?? "full") !== "full";

const EMPTY_CHAT = { turns: [], text: "", system: "" };
const chats = new Map(); // by runs; a chat outlives a look at another tab, not a reload

/** The chat of some runs: its turns, the question that is being written, the system prompt. */
export const chatOf = (key) => chats.get(key) ?? EMPTY_CHAT;

/** Sets a part of a chat to a value, or to a function of the former one. */
export function changeChat(key, part, value) {
  const chat = chatOf(key);
  chats.set(key, { ...chat, [part]: typeof value === "function" ? value(chat[part]) : value });
}

function Chat({ runs, ids, route }) {
  const first = useGet(ids.length < 2 ? runPath(ids[0]) : "").data;
  const canCompare = hasAdapter(first?.keys);
  const alone = route.query.alone === "1" || !canCompare;
  const sides = sidesOf(ids, alone);
  const [, draw] = useState(0);
  const key = ids.join(",");
  const { turns, text, system } = chatOf(key);
  const changes = (part) => (value) => {
    changeChat(key, part, value);
    draw((n) => n + 1);
  };
  const [set, write, setSystem] = ["turns", "text", "system"].map(changes);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const stop = useRef(null);
  const came = useRef(false); // whether a part of an answer to the last question has come
  const { temperature = "0", max = "128" } = route.query;
  const sideName = (side) => t(side.adapter ? "use.tuned" : "use.untuned", { name: runName(runs.find((run) => run.id === side.id) ?? { name: side.id }) });
  const answer = async (side, at, history) => {
    const messages = messagesOf(history, at, text);
    const body = { run: side.id, adapter: side.adapter, messages, temperature: Number(temperature), max_tokens: Number(max), ...(system ? { system } : {}) };
    await postStream(
      "/api/chat",
      body,
      (event) => {
        if (event.error) throw new ApiError(502, event.error);
        const piece = event.text ?? "";
        if (piece) came.current = true;
        set((old) => old.map((turn, i) => (i === history.length ? { ...turn, answers: turn.answers.map((said, j) => (j === at ? said + piece : said)) } : turn)));
      },
      stop.current.signal,
    );
  };
  const send = async (event) => {
    event.preventDefault();
    if (!text.trim() || busy) return;
    const wrong = outOfLimits({ temperature, max_tokens: max });
    if (wrong) return void setError(new Error(wrong));
    const history = turns;
    stop.current = new AbortController();
    came.current = false;
    setError(null);
    setBusy(true);
    set([...history, { text, answers: sides.map(() => "") }]);
    write("");
    const done = await Promise.allSettled(sides.map((side, i) => answer(side, i, history)));
    const isWhole = done.map((one) => one.status === "fulfilled");
    set((old) => old.map((turn, i) => (i === history.length ? { ...turn, isWhole } : turn)));
    const failed = done.find((one) => one.status === "rejected" && one.reason.name !== "AbortError");
    if (failed) setError(failed.reason);
    if (isTakenBack(came.current, done)) {
      set(history);
      write((now) => now || text);
    }
    setBusy(false);
  };
  useEffect(() => () => stop.current?.abort(), []);
  const query = (change) => go({ query: change }, { replace: true });
  return html`<div class="row">
      <${Field} id="temperature" label=${html`<${Term} id="temperature" />`}><${Text} id="temperature" type="number" min="0" max=${LIMITS.temperature[1]} step="any" aria-label=${t("g.temperature.name")} value=${temperature} onChange=${(event) => query({ temperature: event.target.value })} /><//>
      <${Field} id="max" label=${html`<${Term} id="max_tokens" />`}><${Text} id="max" type="number" min="1" max=${LIMITS.max_tokens[1]} aria-label=${t("g.max_tokens.name")} value=${max} onChange=${(event) => query({ max: event.target.value })} /><//>
      <${Field} id="system" label=${t("use.system")}><input id="system" value=${system} onInput=${(event) => setSystem(event.target.value)} /><//>
      ${ids.length < 2 && canCompare && html`<label><input type="checkbox" checked=${!alone} onChange=${(event) => query({ alone: event.target.checked ? null : "1" })} /> ${t("use.beside_untuned")}</label>`}
    </div>
    <div class=${sides.length > 1 ? "split" : ""}>
      ${sides.map(
        (side, at) => html`<section key=${`${side.id}${side.adapter}`} aria-label=${sideName(side)}>
          <h2>${sideName(side)}</h2>
          <${Command} line=${chatLine(runs.find((run) => run.id === side.id) ?? { folder: side.id }, side.adapter, { temperature, max, system })} />
          <div class="chat" role="log" aria-live="polite" aria-busy=${busy}>
            ${turns.map((turn, i) => html`<div class="turn user" key=${`u${i}`}>${turn.text}</div><div class="turn" key=${`a${i}`} data-answer=${at}>${shownAnswer(turn, at, busy && i === turns.length - 1)}</div>`)}
          </div>
        </section>`,
      )}
    </div>
    <${Problem} error=${error} />
    <form class="row" onSubmit=${send}>
      <label class="hidden" for="question">${t("use.question")}</label>
      <input id="question" class="grow" autocomplete="off" placeholder=${t("use.question")} value=${text} onInput=${(event) => write(event.target.value)} />
      <button class="primary" id="send" aria-disabled=${busy}>${t("use.send")}</button>
      ${busy && html`<button type="button" onClick=${() => stop.current.abort()}>${t("use.stop")}</button>`}
      ${turns.length > 0 && !busy && html`<button type="button" class="quiet" onClick=${() => set([])}>${t("use.clear")}</button>`}
    </form>`;
}

function Export({ run }) {
  const detail = useGet(runPath(run.id)).data;
  const formats = detail?.formats ?? [];
  const [chosen, setFormat] = useState("");
  const format = chosen || (formats.includes("merged") ? "merged" : formats[0] ?? "merged");
  const [named, setTo] = useState(null);
  const to = named ?? `${run.name}-${format}`;
  const folder = `${run.folder.slice(0, run.folder.lastIndexOf("/"))}/exports/${to}`;
  const [id, started] = useAction("export", run.id);
  const press = async () => started((await post("/api/actions", { verb: "export", run: run.id, options: { format, ...(named === null ? {} : { to }) } })).id);
  return html`<p>${t("use.export_about")}</p>
    <div class="row">
      <${Field} id="format" label=${t("use.format")}><select id="format" value=${format} onChange=${(event) => setFormat(event.target.value)}>${formats.map((name) => html`<option key=${name} value=${name}>${t(`format.${name}`)}</option>`)}</select><//>
      <${FolderName} id="to" label=${t("use.folder")} value=${to} onChange=${(name) => setTo(name || null)} />
    </div>
    <${Action} id="export" label=${t("use.export")} kind="primary" line=${exportLine(run, format, folder)} onPress=${press} />
    <${Doing} id=${id} />`;
}

/** The first tab of a run: what its model is asked; none where it writes no answers. */
export const talkOf = (task) => (({ ranking: ["lookup"], reward: [], module: [] })[task] ?? ["chat"]);

/** Options of an evaluation, without those that have no effect together. */
export function evaluationOptions({ task, compare, answers, prompts, against }) {
  if (against) return { ...(answers ? { answers } : {}), against };
  if (answers) return { answers, ...(prompts ? { prompts } : {}) };
  return compare && hasTokens(task) ? { compare: true } : {};
}

function Evaluate({ run, runs }) {
  const [compare, set] = useState(true);
  const [prompts, setPrompts] = useState("");
  const [against, setAgainst] = useState("");
  const [id, started] = useAction("eval", run.id);
  const files = useGet("/api/data");
  const [answers, setAnswers] = useState("");
  const other = runs.find((one) => one.id === against);
  const options = evaluationOptions({ task: run.task, compare, answers, prompts, against: other ? against : "" });
  const canCompare = hasTokens(run.task) && !answers && !other;
  const words = Object.entries(options).flatMap(([name, value]) => (value === true ? [`--${name}`] : [`--${name}`, name === "against" ? other.folder : value]));
  const whole = (files.data?.data ?? []).filter((file) => file.done);
  const names = namesOf(whole);
  const uploaded = whole.map((file, i) => html`<option key=${file.id} value=${file.path}>${names[i]}</option>`);
  const press = async () => started((await post("/api/actions", { verb: "eval", run: run.id, options })).id);
  return html`<p>${t("use.eval_about")}</p>
    <div class="row">
      <label><input type="checkbox" checked=${compare && canCompare} disabled=${!canCompare} onChange=${(event) => set(event.target.checked)} /> ${t("use.eval_compare")}</label>
      <${Field} id="answers" label=${t("use.eval_answers")}><select id="answers" value=${answers} onChange=${(event) => setAnswers(event.target.value)}><option value="">${t("use.eval_held_out")}</option>${uploaded}</select><//>
      <${Field} id="prompts" label=${t("use.eval_prompts")}><select id="prompts" disabled=${!answers || Boolean(other)} value=${prompts} onChange=${(event) => setPrompts(event.target.value)}><option value="">${t("use.no_second")}</option>${uploaded}</select><//>
      <${Field} id="against" label=${t("use.eval_against")}><select id="against" value=${against} onChange=${(event) => setAgainst(event.target.value)}><option value="">${t("use.no_second")}</option>${runs.filter((one) => one.id !== run.id && one.step > 0).map((one) => html`<option key=${one.id} value=${one.id}>${runName(one)}</option>`)}</select><//>
    </div>
    <${Action} id="evaluate" label=${t("use.evaluate")} kind="primary" line=${evalLine(run, words)} onPress=${press} />
    <${Doing} id=${id} />`;
}

/** What an action has said, on request, and its end. */
function Output({ one, onStop }) {
  const [open, set] = useState(false);
  return html`<div class="row"><button type="button" class="quiet" aria-expanded=${open} onClick=${() => set(!open)}>${t("use.output")}</button>
      ${isOn(one.status) && html`<${Action} label=${t("run.stop")} onPress=${() => remove(`/api/actions/${encodeURIComponent(one.id)}`).then(onStop)} />`}</div>
    ${open && html`<${Doing} id=${one.id} />`}`;
}

/** Whether a script of done actions has one; each has a comment that says when and by whom. */
export const hasActions = (script) => /^# /m.test(script);

/** All actions through the page as a script, and the outputs of exports, evaluations and submissions. */
function Done() {
  const script = useGet("/api/script", {}, { every: 3000 });
  const found = useGet("/api/actions", {}, { every: 3000 });
  const cells = (one) => [time(one.begun ?? one.time), html`<${Status} status=${one.status} />`, html`<${Command} line=${one.command} />`, html`<${Output} one=${one} onStop=${found.again} />`];
  return html`<h2>${t("use.script")}</h2>
    <${Loaded} of=${script}>${(text) => (hasActions(text) ? html`<pre class="log" tabindex="0" aria-label=${t("use.script")}>${text}</pre>` : html`<p class="hint">${t("use.no_actions")}</p>`)}<//>
    <${Loaded} of=${found}>${({ actions }) => actions.length > 0 && html`<h2>${t("use.outputs")}</h2><${Table} name=${t("use.outputs")} head=${[t("run.when"), t("run.status"), t("ui.command"), ""]} keys=${actions.map((one) => one.id)} rows=${actions.map(cells)} />`}<//>`;
}

/** A run that there is no more is forgotten; a job with stages stays, of which no stage has a model yet. */
function Unknown({ name }) {
  const { error } = useGet(runPath(name));
  useEffect(() => void (error?.status === 404 && remember({ run: "" })), [error]);
  return html`<p class="problem" role="alert">${t("use.unknown", { name })}</p>`;
}

export default function Use({ route }) {
  const found = useGet("/api/runs");
  return html`<h1>${t("place.use")}</h1>
    <${Loaded} of=${found}>
      ${(answer) => {
        const runs = runsAlone(answer.runs);
        const ids = route.run ? route.run.split(",").map((id) => withModel(id, runs)) : [];
        const usable = runs.filter((run) => run.step > 0);
        const names = [...talkOf(runs.find((one) => one.id === (ids[0] ?? usable[0]?.id))?.task), "deploy", "export", "evaluate", "actions"];
        const tab = route.tab || names[0];
        const tabs = html`<${Tabs} name=${t("place.use")} current=${tab} items=${names.map((name) => [name, t(`use.tab.${name}`)])} />`;
        if (!usable.length && tab === "deploy") return html`${tabs}<${Servers} />`; // they outlive their runs
        if (!usable.length) return html`<${NothingYet} title=${t("use.none")} text=${t("use.none_text")} />`;
        const chosen = ids.length ? ids : [usable[0].id];
        const run = runs.find((one) => one.id === chosen[0]);
        const pick = (at) => (event) => {
          const next = [...chosen];
          next[at] = event.target.value;
          location.hash = address({ ...route, run: next.filter(Boolean).join(",") });
        };
        const list = (at, empty) => html`<select id=${`model-${at}`} value=${chosen[at] ?? ""} onChange=${pick(at)}>${empty && html`<option value="">${empty}</option>`}${usable.map((one) => html`<option key=${one.id} value=${one.id}>${runName(one)}</option>`)}</select>`;
        if (!run) return html`<${Unknown} name=${chosen[0]} /><div class="row"><label for="model-0">${t("use.model")}</label>${list(0, t("use.no_second"))}</div>`;
        return html`<div class="row"><label for="model-0">${t("use.model")}</label>${list(0)}<label for="model-1">${t("use.second")}</label>${list(1, t("use.no_second"))}<span class="hint">${run.saved === null ? t("use.no_checkpoint") : t("use.checkpoint", { step: number(run.saved) })}</span></div>
          ${tabs}
          ${tab === "deploy" ? html`<${Servers} run=${run} />` : tab === "export" ? html`<${Export} key=${run.id} run=${run} />` : tab === "evaluate" ? html`<${Evaluate} key=${run.id} run=${run} runs=${runs} />` : tab === "actions" ? html`<${Done} />` : names[0] === "lookup" ? html`<${Lookup} key=${run.id} run=${run} />` : html`<${Chat} key=${chosen.join(",")} runs=${runs} ids=${chosen} route=${route} />`}`;
      }}
    <//>`;
}
