// One run: its health, its curves with the events on them, and tabs for its other records.
import { follow, isReport, post, remove, runPath, useGet } from "./api.js";
import { Chain } from "./chain.js";
import { Chart, drawing } from "./chart.js";
import { copyLine, forkLine, moveLine, resumeLine, stopLine } from "./commands.js";
import { besideOwn, evaluatedCurves } from "./evaluation_curves.js";
import { Figure, Term, termOf } from "./glossary.js";
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { duration, gib, number, percent, t, time } from "./i18n.js";
import { ResumeWithChanges, canChange } from "./resume.js";
import { go, link } from "./router.js";
import { EditCopy, TABS } from "./run_tabs.js";
import { remember, replaceJob } from "./session.js";
import { Action, Command, Empty, Failure, Loaded, Status, Tabs } from "./ui.js";

const CURVES = ["loss", "lr", "grad_norm", "tokens_per_s", "seconds", "memory_gib", "effective"];
export const POLICIES = ["ppo", "grpo"];
/** Whether a run trains, or will do so by itself. */
export const isGoing = (run) => ["queued", "starting", "running"].includes(run.status);
/** Whether a copy of a run can go on: it has trained some steps, and ended before the last one. */
export const canCopy = (run) => !isGoing(run) && run.step > 0 && run.status !== "done";
/** Whether a job has no run: it waits, is starting, or ended before. One with stages has their runs. */
export const isWithoutRun = (run) => run.number !== undefined && !run.stages?.length;
/** Whether a run is known to have events; a job of the queue has none. */
export const hasEvents = ({ data, error }) => error?.status !== 404 && data !== null && data.number === undefined;
const OF_A_JOB = ["logs", "job"]; // tabs of a job without a run of its own
const NO_CHAT = ["reward", "module"]; // their models write no answers
const NO_CURVES = ["step", "tokens", "trained_tokens", "time", "samples", "first_sample", "data_seconds", "stall"]; // of all tasks
const LEVELS = { failed: "bad", fault: "bad", hung: "bad", gpu_fault: "bad", node_lost: "bad", rolled_back: "warn", spike: "warn", skipped: "warn", not_finite: "warn", alarm: "warn", interrupted: "warn", stopped: "warn", slow: "warn" };
const ON_CURVE = ["saved", "evaluated", "resumed", ...Object.keys(LEVELS)];
const EVERY = 1000; // ms after which one asks what happened
const CURVES_EVERY = 2000; // ms between two looks at the curves while a run goes on
const DENSE = 20_000; // steps from which on a curve changes more slowly than that

/** Milliseconds after which the curves of a run are asked for again: as a long one hardly changes, 20 seconds at most. */
export const paceOf = (steps) => CURVES_EVERY * Math.min(10, Math.max(1, steps / DENSE));

/** Events that belong to a step, as marks. */
export const marksOf = (events) =>
  events
    .filter((event) => Number.isFinite(event.step) && ON_CURVE.includes(event.event) && event.where !== "memory")
    .map((event) => ({ step: event.step, level: LEVELS[event.event] ?? "ok", event: event.event }));

/** What the health card says of one side, with numbers in the units that their names say. */
export function healthWords({ key, value = {} }) {
  const args = {};
  for (const [name, number_] of Object.entries(value)) {
    if (["effective", "lost"].includes(name)) args[name] = percent(number_);
    else if (name.endsWith("_gib")) args[name] = gib(number_);
    else if (name.endsWith("seconds")) args[name] = name.startsWith("wall") ? duration(number_) : `${number(number_, 3)} s`;
    else args[name] = number(number_);
  }
  if (value.planned_seconds) args.slower = percent(value.seconds / value.planned_seconds - 1, 0);
  if (key.startsWith("health.faults")) args.list = Object.entries(value).map(([event, n]) => `${t(`event.${event}`)} × ${n}`).join(", ");
  return t(key, args);
}

const OF_STEPS = ["memory", "speed", "goodput"]; // aspects of the health that need measured steps

/** How a run is all in all: ok, warn, bad, or none where nothing is known yet. */
export function healthLevel(health, status) {
  const levels = health.map((one) => one.level);
  if (status === "failed" || levels.includes("bad")) return "bad";
  if (status === "interrupted" || levels.includes("warn")) return "warn";
  return ["queued", "starting"].includes(status) || (status !== "done" && !health.some((one) => OF_STEPS.includes(one.what))) ? "none" : "ok";
}

const Health = ({ health, status }) =>
  html`<aside class="panel" aria-labelledby="health-title">
    <h2 id="health-title">${t("health.title")}</h2>
    <p role="status"><strong>${t(`health.all.${healthLevel(health, status)}`)}</strong></p>
    <ul class="health">${health.map((one) => html`<li key=${one.what} class=${one.level}><strong>${t(`health.${one.what}`)}</strong> ${healthWords(one)}</li>`)}</ul>
  </aside>`;

function Buttons({ run, again }) {
  const [said, say] = useState("");
  const act = (what, body) => async () => {
    const answer = await post(`${runPath(run.id)}/${what}`, body);
    say(answer.command ?? "");
    if (what === "delete" || answer.gone) {
      remember({ run: "" });
      return go({ place: "train", run: "" });
    }
    if (answer.yaml) {
      replaceJob(answer);
      return go({ place: "start", run: "job", tab: "" });
    }
    if (answer.id && answer.id !== run.id) go({ place: "train", run: answer.id, tab: "" });
    return again();
  };
  const isRunning = isGoing(run);
  const hasRun = run.number === undefined; // of a job that has not begun, or has stages, there is a number in the queue alone
  const goesOn = run.stage_of?.id || !hasRun ? run.command : resumeLine(run); // a stage goes on with its whole job
  const forget = () => remove(`/api/queue/${run.number}`).then(() => (remember({ run: "" }), go({ place: "train", run: "", tab: "" })));
  return html`<div class="actions">
      ${isRunning
        ? run.stopping
          ? html`<${Action} key="now" id="stop-now" label=${t("run.stop_now")} confirm=${t("run.stop_sure")} line=${stopLine(run)} onPress=${act("stop", { now: true })} />`
          : html`<${Action} key="stop" id="stop" label=${t("run.stop")} line=${stopLine(run)} onPress=${act("stop")} />`
        : run.status !== "done" && html`<${Action} id="resume" label=${t("run.resume")} kind="primary" line=${goesOn} onPress=${act("resume")} />`}
      ${!isRunning && !hasRun && html`<${EditCopy} run=${run} />`}
      ${!isRunning && isWithoutRun(run) && html`<${Action} id="forget" label=${t("run.forget")} confirm=${t("run.forget_sure")} onPress=${forget} />`}
      ${hasRun && html`
      ${run.step > 0 && !NO_CHAT.includes(run.task) && html`<a class=${run.status === "done" ? "button primary" : "button"} id="talk" href=${link({ place: "use", run: run.id, tab: "" })}>${t(run.task === "ranking" ? "run.score" : "run.talk")}</a>`}
      <${Action} id="fork" label=${t("run.fork")} line=${forkLine(run, `${run.folder}-fork`)} onPress=${act("fork")} />
      ${canCopy(run) && html`<${Action} id="fork-newest" label=${t("run.fork_newest")} line=${copyLine(run)} onPress=${act("fork", { from: "newest" })} />`}
      <a class="button" href=${link({ place: "compare", run: run.id, tab: "" })}>${t("run.compare")}</a>`}
      ${!isRunning && !isWithoutRun(run) && html`<${Action} id="delete" label=${t("run.delete")} confirm=${t("run.delete_sure")} line=${moveLine(run)} onPress=${act("delete")} />`}
    </div>
    ${canChange(run, isRunning) && html`<${ResumeWithChanges} key=${run.id} run=${run} onPress=${(changes) => act("resume", { changes })()} />`}
    ${isRunning && run.stopping && html`<p class="note" role="status">${t("run.stopping")}</p>`}
    ${said && html`<div role="status"><p class="hint">${t("run.did")}</p><${Command} line=${said} /></div>`}`;
}

function Controls({ route }) {
  const { smooth = "0", log, axis = "step", zoom } = route.query;
  const set = (query) => go({ query }, { replace: true });
  return html`<div class="row">
    <label for="smooth">${t("chart.smooth", { share: percent(Number(smooth), 0) })}</label>
    <input id="smooth" type="range" min="0" max="0.99" step="0.01" value=${smooth} onInput=${(event) => set({ smooth: event.target.value === "0" ? null : event.target.value })} />
    ${!isReport() && html`<label for="axis">${t("chart.axis")}</label>
    <select id="axis" value=${axis} onChange=${(event) => set({ axis: event.target.value === "step" ? null : event.target.value, zoom: null })}>
      ${["step", "tokens", "seconds"].map((name) => html`<option key=${name} value=${name}>${t(`axis.${name}`)}</option>`)}
    </select>`}
    <label><input type="checkbox" checked=${log === "1"} onChange=${(event) => set({ log: event.target.checked ? "1" : null })} /> ${t("chart.log")}</label>
    ${zoom && html`<button type="button" onClick=${() => set({ zoom: null })}>${t("chart.all")}</button>`}
  </div>`;
}

/** The range of an address: `10~200`. */
export const rangeOf = (zoom) => {
  const found = /^(-?[\d.e+]+)~(-?[\d.e+]+)$/.exec(zoom ?? "");
  return found ? [Number(found[1]), Number(found[2])] : null;
};
export const zoomOf = (range) => (range ? range.map((value) => Number(value.toPrecision(7))).join("~") : null);

/** Charts that share their axis, smoothing and zoom, all kept in the address; `extra` has further curves by chart. */
export function Charts({ runs, metrics, route, events = [], extra = {}, tick = 0 }) {
  const { smooth, log, axis = "step", zoom } = route.query;
  const range = useMemo(() => rangeOf(zoom), [zoom]);
  const onRange = (next) => go({ query: { zoom: zoomOf(next) } }, { replace: true });
  const [first, others] = [metrics.slice(0, 1), metrics.slice(1)];
  const alone = Object.keys(extra).filter((name) => !metrics.includes(name));
  return html`<${Controls} route=${route} />
    <div class="charts">
      ${[...first, ...alone, ...others].map(
        (metric) => html`<${Chart} key=${metric} runs=${runs} metric=${metric} axis=${axis} log=${log === "1"} smooth=${Number(smooth ?? 0)} events=${events} asks=${metrics.includes(metric)} extra=${extra[metric]} range=${range} onRange=${onRange} tick=${tick} />`,
      )}
    </div>`;
}

/** The metrics that are drawn: the loss, those of the task, and those of every task. */
export function metricsOf(names) {
  const ofTask = names.filter((name) => ![...CURVES, ...NO_CURVES].includes(name) && !name.startsWith("cache_"));
  const [loss, ...others] = CURVES;
  return [loss, ...ofTask, ...others].filter((name) => names.includes(name));
}

/** Tabs that a run has something for: only policies make rollouts. */
export const tabsOf = (run) => (run.number !== undefined ? OF_A_JOB : ["curves", ...Object.keys(TABS).filter((name) => name !== "rollouts" || POLICIES.includes(run.task))]);

/** Why a run does not train yet, or never will; empty for others. */
export function beginning(run) {
  const { place, after = [] } = run.queue ?? {};
  if (run.status === "queued") return after.length ? t("run.waits", { place, names: after.join(", ") }) : t("run.waits_next");
  if (run.status === "starting") return t("run.starts");
  return run.status === "failed" && isWithoutRun(run) ? t("run.never_began") : "";
}

/** A run with what its stream has said since; of two answers of one time the one that was asked for counts. */
export const newest = (run, said) => (run && said?.id === run.id && said.updated > run.updated ? { ...run, ...said } : run);

/**
 * Follows a run's stream: what it says of the run is `said`; asks again as something happens, at most every second, and
 * for curves at most every `pace` ms.
 */
function useLive(id, pace, ...again) {
  const [lost, setLost] = useState(0);
  const [said, setSaid] = useState(null);
  const [tick, setTick] = useState(0);
  const latest = useRef({});
  latest.current = { again, pace };
  useEffect(() => {
    if (!id) return undefined;
    const timers = {};
    const later = (name, wait, act) => {
      timers[name] ??= setTimeout(() => {
        delete timers[name];
        act();
      }, wait);
    };
    let status = "";
    const soon = (kind, value) => {
      if (document.hidden) return;
      if (kind === "status") setSaid(value);
      if (!["metrics", "status"].includes(kind) || (kind === "status" && value.status !== status)) {
        later("figures", EVERY, () => latest.current.again.forEach((ask) => ask()));
      }
      if (kind === "status") status = value.status;
      later("curves", latest.current.pace, () => setTick((n) => n + 1));
    };
    let end = () => {};
    const open = () => {
      end(); // browsers allow six connections to a host over all tabs: a hidden tab keeps none
      end = document.hidden ? () => {} : follow(id, soon, setLost);
    };
    const shown = () => {
      open();
      soon("shown");
    };
    open();
    document.addEventListener("visibilitychange", shown);
    return () => {
      end();
      Object.values(timers).forEach(clearTimeout);
      document.removeEventListener("visibilitychange", shown);
    };
  }, [id]);
  return { lost, said, tick };
}

export function Run({ route }) {
  const path = runPath(route.run);
  const found = useGet(path, {}, { every: 5000 });
  const asks = hasEvents(found);
  const happened = useGet(asks ? `${path}/events` : "");
  const { lost, said, tick } = useLive(asks ? route.run : "", paceOf(found.data?.step ?? 0), found.again, happened.again);
  useEffect(() => void (found.error?.status === 404 && remember({ run: "" })), [found.error]);
  useEffect(() => void drawing().catch(() => {}), []); // where it does not come, the chart says so
  const events = happened.data?.events ?? [];
  const run = newest(found.data, said);
  const evaluated = useMemo(() => (run ? evaluatedCurves(events, run) : {}), [events.length, run?.id]);
  const metrics = metricsOf(run?.metrics ?? CURVES);
  const like = POLICIES.includes(run?.task) ? metrics.filter((name) => name !== "loss") : metrics; // a policy's held-out loss is another quantity
  const extra = useMemo(() => besideOwn(evaluated, like), [evaluated, like.join(), t("run.held_out")]);
  const marks = useMemo(() => marksOf(events), [events.length]);
  if (found.error?.status === 404) {
    return html`<${Empty} title=${t("run.gone")} text=${t("run.gone_text")}><a class="button primary" href=${link({ place: "train", run: "", tab: "" })}>${t("run.to_list")}</a><//>`;
  }
  return html`<${Loaded} of=${found}>
    ${() => {
      const tabs = tabsOf(run);
      const tab = tabs.includes(route.tab) ? route.tab : tabs[0];
      const Tab = TABS[tab];
      const begins = beginning(run);
      return html`<div class="row">
        <h1>${run.name}</h1><${Status} status=${run.status} />
        ${run.stage_of?.id && html`<a href=${link({ place: "train", run: run.stage_of.id, tab: "" })}>${t("run.stage_of", { name: run.stage_of.name })}</a>`}
        <span class="hint">${run.task ? t(`task.${run.task}`) : ""} ${run.model}</span>
      </div>
      ${lost > 0 && html`<p class="lost" role="alert">${t("run.lost", { since: time(lost) })}</p>`}
      <${Command} line=${run.command} />
      ${begins && html`<p class="note" role="status">${begins}</p>`}
      ${!isReport() && html`<${Buttons} run=${run} again=${found.again} />`}
      ${run.error && html`<${Failure} text=${run.error} />`}
      ${run.stages?.length > 0 && html`<${Chain} stages=${run.stages} current=${run.id} />`}
      ${run.stage && html`<p>${t("run.stages_done", { done: run.step, all: run.steps })}</p>`}
      ${run.number === undefined && html`<div class="figures">
        <${Figure} id="step" value=${number(run.step)} note=${t("plan.of", { capacity: number(run.steps) })} />
        <${Figure} id=${termOf("loss", [run])} value=${number(run.loss)} />
        <${Figure} id="held_out_loss" value=${number(run.held_out_loss)} />
        ${evaluated.auc && html`<${Figure} id="auc" value=${number(evaluated.auc.series.auc.mean.at(-1))} />`}
        ${run.seconds_left > 0 && html`<${Figure} id="seconds_left" value=${duration(run.seconds_left)} />`}
        ${run.goodput && html`<${Figure} id="effective" value=${percent(run.goodput.effective)} />`}
      </div>`}
      <${Tabs} name=${t("run.tabs")} current=${tab} items=${tabs.map((name) => [name, t(`run.tab.${name}`)])} />
      ${!Tab
        ? html`<div class="wide-left">
            <section aria-label=${t("run.tab.curves")}>
              <${Charts} runs=${[run]} metrics=${metrics} route=${route} events=${marks} extra=${extra} tick=${tick} />
              ${run.goodput && html`<h2><${Term} id="effective" label=${t("run.time_went")} /></h2><ul>${Object.entries(run.goodput.parts).map(([part, seconds]) => html`<li key=${part}>${t(`goodput.${part.replaceAll(" ", "_")}`)}: ${duration(seconds)}</li>`)}</ul>`}
            </section>
            <${Health} health=${run.health ?? []} status=${run.status} />
          </div>`
        : html`<${Tab} run=${run} path=${path} route=${route} events=${events} />`}`;
    }}
  <//>`;
}
