// The tabs of a run beside its curves: what happened, samples, rollouts, data, plan, logs, job, evaluations, files.
import { isReport, post, runPath, useGet } from "./api.js";
import { reportLine, rolloutsLine } from "./commands.js";
import { evaluationCells } from "./evaluated.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { bytes, number, t, time } from "./i18n.js";
import { Measured } from "./plan.js";
import { go } from "./router.js";
import { replaceJob } from "./session.js";
import { Rollouts } from "./rollouts.js";
import { RunRows, hasTokens } from "./rows.js";
import { Action, Command, Loaded, Problem, Table } from "./ui.js";

const SHOWN_EVENTS = 500;
const LOG_PART = 256 * 1024; // bytes of a log that the server gives at once
const MOST_LOG = 1 << 20; // characters of a log that are shown
const NEAR = 8; // px from the end of a log within which it follows what is new
const EVERY = 2000; // ms between two looks at a log that grows

const plain = (event) => Object.entries(event).filter(([key, value]) => !["event", "time", "step"].includes(key) && (typeof value !== "object" || value === null));

const SIZES = ["bytes", "disk_free", "checkpoint"];

/** A detail of an event as text, in its unit. */
export function detail(key, value) {
  if (typeof value !== "number") return `${key} ${value}`;
  if (key === "began") return `${key} ${time(value)}`;
  if (SIZES.includes(key)) return `${key} ${bytes(value)}`;
  return `${key} ${number(value)}${key === "stall" || key.endsWith("seconds") ? " s" : ""}`;
}

function Events({ events }) {
  const rows = events.slice(-SHOWN_EVENTS).reverse();
  return html`<${Table}
    name=${t("run.tab.events")}
    head=${[t("run.when"), t("g.step.name"), t("run.what"), t("run.details")]}
    empty=${t("run.no_events")}
    rows=${rows.map((event) => [time(event.time), event.step === undefined ? "" : number(event.step), t(`event.${event.event}`), html`<code>${plain(event).map(([key, value]) => detail(key, value)).join(" · ")}</code>`])}
  />`;
}

function Samples({ path }) {
  const found = useGet(`${path}/samples`);
  return html`<${Loaded} of=${found}>
    ${({ samples }) =>
      samples.length === 0
        ? html`<p class="hint">${t("run.no_samples")}</p>`
        : [...samples].reverse().map(
            (at) => html`<section class="panel" key=${at.step}><h2>${t("run.at_step", { step: at.step })}</h2>
              ${at.samples.map((sample, i) => html`<div class="sample" key=${i}><p><strong>${sample.prompt ?? sample.question ?? ""}</strong></p><p>${sample.answer ?? sample.text ?? ""}</p>${sample.expected && html`<p class="hint">${t("run.expected", { text: sample.expected })}</p>`}</div>`)}
            </section>`,
          )}
  <//>`;
}

/** A log with a new part, its last characters. */
export const appended = (old, part) => (old.length + part.length > MOST_LOG ? (old + part).slice(-MOST_LOG) : old + part);

/** Whether an element is scrolled to its end. */
export const isAtEnd = ({ scrollTop, clientHeight, scrollHeight }) => scrollTop + clientHeight >= scrollHeight - NEAR;

function Logs({ path, run, route }) {
  const rank = route.query.rank ?? "";
  const [isStart, begin] = useState(false); // the beginning of the log is shown, not its end
  const [text, set] = useState("");
  const [offset, move] = useState(-LOG_PART);
  const [isCut, cut] = useState(false);
  const query = { offset: isStart ? 0 : offset, ...(rank === "" ? {} : { rank }) };
  const found = useGet(`${path}/log`, query, { every: isStart ? 0 : EVERY });
  const box = useRef(null);
  const follows = useRef(true);
  useEffect(() => {
    set("");
    move(-LOG_PART);
    cut(false);
    follows.current = !isStart;
  }, [rank, isStart]);
  useEffect(() => {
    if (!found.data) return;
    if (isStart) return set(found.data.text);
    if (offset < 0) cut(found.data.offset > LOG_PART);
    if (found.data.text) set((old) => (offset < 0 ? found.data.text : appended(old, found.data.text)));
    move(found.data.offset);
  }, [found.data]);
  useEffect(() => {
    if (box.current && follows.current) box.current.scrollTop = box.current.scrollHeight;
  }, [text]);
  const ranks = found.data?.ranks ?? [];
  return html`<div class="row">
      <label for="rank">${t("run.rank")}</label>
      <select id="rank" value=${rank} onChange=${(event) => go({ query: { rank: event.target.value } }, { replace: true })}>
        <option value="">${t("run.command_log")}</option>
        ${ranks.map((one) => html`<option key=${one} value=${String(one)}>${one}</option>`)}
      </select>
    </div>
    <${Command} line=${found.data?.command} />
    <${Problem} error=${found.error} />
    ${(isCut || isStart) && html`<p class="hint">${t(isStart ? "run.log_start" : "run.log_end", { size: bytes(LOG_PART) })} <button type="button" class="quiet" onClick=${() => begin(!isStart)}>${t(isStart ? "run.log_to_end" : "run.log_to_start")}</button></p>`}
    <pre class="log" ref=${box} tabindex="0" role="log" aria-label=${t("run.tab.logs")} onScroll=${(event) => (follows.current = !isStart && isAtEnd(event.currentTarget))}>${text || t("run.no_log")}</pre>
    ${found.data?.errors && html`<h2>${t("run.errors_log")}</h2><pre class="log" tabindex="0" aria-label=${t("run.errors_log")}>${found.data.errors}</pre>`}
    ${run.number === undefined && html`<${Stacks} path=${path} />`}`;
}

/** The stacks of all processes when one hung. */
function Stacks({ path }) {
  const found = useGet(`${path}/stacks`);
  const stacks = found.data?.stacks ?? [];
  if (!stacks.length) return null;
  return html`<h2>${t("run.stacks")}</h2>${stacks.map((stack) => html`<details key=${stack.name ?? stack.rank}><summary>${stack.name ?? t("run.rank_n", { n: stack.rank })}</summary><pre class="log" tabindex="0">${stack.text}</pre></details>`)}`;
}

/** A button that makes a copy of a run's job the one at hand. */
export function EditCopy({ run }) {
  const edit = async () => {
    const name = `${run.name}-2`;
    replaceJob(await post(`${runPath(run.id)}/fork`, { from: "job", name }));
    go({ place: "start", run: "job", tab: "" });
  };
  return html`<${Action} label=${t("run.edit_copy")} onPress=${edit} />`;
}

function JobText({ run }) {
  return html`${!isReport() && html`<${EditCopy} run=${run} />`}<pre class="log" tabindex="0" aria-label=${t("job.yaml")}>${run.job}</pre>`;
}

function Evaluations({ path }) {
  const found = useGet(`${path}/evaluations`);
  return html`<${Loaded} of=${found}>${({ evaluations }) => html`<${Table} name=${t("run.tab.evaluations")} head=${[t("compare.metric"), t("compare.value"), t("g.interval.name"), t("data.rows")]} empty=${t("run.no_evaluations")} rows=${evaluations.map(evaluationCells)} />`}<//>`;
}

function Audited({ path }) {
  const found = useGet(`${path}/audit`);
  const names = ["rows_in", "rows_used", "rows_cut", "tokens_lost", "rows_dropped", "tokens", "trained_tokens", "duplicates"];
  return html`<${Loaded} of=${found}>
    ${(audit) => html`<div class="figures">${names.filter((name) => audit[name] !== undefined).map((name) => html`<div class="figure" key=${name}><span>${t(`g.${name}.name`)}</span><span class="number">${number(audit[name])}</span></div>`)}</div>`}
  <//>`;
}

const Seen = ({ path, run, route }) => html`<${Audited} path=${path} />${hasTokens(run.task) && html`<${RunRows} path=${path} run=${run} route=${route} />`}`;

function Files({ path, run }) {
  const found = useGet(`${path}/files`);
  return html`<p>${t("run.report_about")}</p><${Command} line=${reportLine(run)} />
    <${Loaded} of=${found}>${({ files }) => html`<${Table} name=${t("run.tab.files")} head=${[t("data.name"), t("data.size"), t("run.when")]} rows=${files.map((file) => [html`<code>${file.name}</code>`, bytes(file.size), time(file.modified)])} />`}<//>`;
}

const RolloutTab = ({ path, run, route }) => html`<${Command} line=${rolloutsLine(run, route.query.step ?? run.step)} /><${Rollouts} path=${path} route=${route} />`;
const PlanTab = ({ run }) => html`<${Measured} run=${run.id} />`;

export const TABS = isReport()
  ? { events: Events, samples: Samples, plan: PlanTab, evaluations: Evaluations, job: JobText }
  : { events: Events, samples: Samples, rollouts: RolloutTab, seen: Seen, plan: PlanTab, logs: Logs, job: JobText, evaluations: Evaluations, files: Files };
