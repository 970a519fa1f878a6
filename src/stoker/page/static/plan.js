// Plan: memory against capacity, a step in time, what it costs, and the alternatives with the reason each lost.
import { post, runPath, useGet } from "./api.js";
import { short } from "./communication.js";
import { startLine } from "./commands.js";
import { useAnswer } from "./data.js";
import { Figure, Term } from "./glossary.js";
import { html, useEffect, useState } from "./html.js";
import { bytes, duration, gib, number, percent, t } from "./i18n.js";
import { meant, stageNames } from "./job_form.js";
import { go, link } from "./router.js";
import { SETTLED, remember, rememberJob, session, useSession } from "./session.js";
import { startJob } from "./start_job.js";
import { Timeline, colourOfTime } from "./timeline.js";
import { Action, Command, Field, NothingYet, Problem, Said, Table, Waiting, useLater, useSettled } from "./ui.js";

const COLOURS = 8;
const SHORTEST = 1e-6; // s of a step that are worth a row
const word = (group, name) => {
  const key = `${group}.${name.replaceAll(" ", "_")}`;
  const found = t(key);
  return found === key ? name : found;
};

/** Parts of a whole as one stacked bar, with their numbers below; `most` is the capacity. */
export function Stack({ parts, most, label, unit, colourOf = (_, i) => `s${i % COLOURS}` }) {
  const entries = Object.entries(parts).filter(([, size]) => size > 0);
  const sum = entries.reduce((total, [, size]) => total + size, 0);
  const width = Math.max(most ?? 0, sum) || 1;
  const words = entries.map(([name, size]) => `${word("part", name)} ${unit(size)}`).join(", ");
  return html`<div class="stacked">
    <div class="stack" role="img" aria-label=${`${label}: ${words}`}>
      ${entries.map(([name, size], i) => html`<span key=${name} class=${colourOf(name, i)} style=${{ width: `${(100 * size) / width}%` }} title=${`${word("part", name)} ${unit(size)}`}></span>`)}
    </div>
    <div class="legend">${entries.map(([name, size], i) => html`<span key=${name}><i class=${colourOf(name, i)}></i>${word("part", name)} ${unit(size)}</span>`)}</div>
  </div>`;
}

/** A cause of the planner's: `tensor-parallel collectives over NVLink`. */
const causeWords = (name) => {
  const [what, over] = name.split(" over ");
  return over ? t("plan.over", { what: word("part", what), link: word("part", over) }) : word("part", what);
};

const money = (price, currency) => (price === null || price === undefined ? t("plan.no_price") : `${number(price, 3)}\u00a0${currency}`);
const seconds = (value) => `${number(value, 3)} s`;

function Memory({ plan }) {
  const stages = plan.stages ?? [{ stage: plan.fullest_stage, memory: plan.memory, memory_gib: plan.memory_gib, moment: plan.fullest_moment }];
  return html`<section class="panel" aria-labelledby="memory-title">
    <h2 id="memory-title"><${Term} id="memory_peak" label=${t("plan.memory")} /></h2>
    ${stages.map(
      (stage) => html`<div key=${stage.stage}>
        <h3>${t("plan.stage", { n: stage.stage, peak: gib(stage.memory_gib), capacity: gib(plan.capacity_gib) })}</h3>
        <${Stack} parts=${stage.memory} most=${plan.capacity_gib} label=${t("plan.memory")} unit=${gib} />
        <p class="hint">${t("plan.moment")} <${Said} text=${stage.moment} /></p>
      </div>`,
    )}
  </section>`;
}

/** The keys of `parallel` that a plan decides; others, such as `sync`, stay as they are. */
const LAYOUT = ["data", "shard", "shard_size", "tensor", "sequence", "pipeline", "schedule", "stages", "context", "context_by", "expert", "recompute", "offload", "devices"];

/** The edits of a job that make it a plan's: the change that the plan needs, its layout without earlier keys, its batch. */
export function planEdits({ job, words = "" }) {
  const [, key, text] = /^([\w.]+)=(\S+)$/.exec(words) ?? []; // others are options of the command, such as --on
  const edits = key ? [{ key, value: meant(text) }] : [];
  for (const name of LAYOUT) edits.push({ key: `parallel.${name}`, value: job.parallel?.[name] ?? null });
  for (const [name, value] of Object.entries(job.train ?? {})) edits.push({ key: `train.${name}`, value });
  return edits;
}

/** The job at hand becomes that of a plan. */
const takePlan = async (yaml, plan) => rememberJob({ yaml: (await post("/api/edit", { yaml, edits: planEdits(plan) })).yaml });

function Answer({ answer, yaml }) {
  const { plan, run } = answer;
  const take = (other) => takePlan(yaml, other);
  const step = (other) => number(other.step_time_s, 3);
  const binds = (answer.binds ?? []).filter((bind) => bind.seconds >= SHORTEST);
  return html`<div class="figures">
      <${Figure} id="step_time_s" value=${seconds(plan.step_time_s)} />
      <${Figure} id="tokens_per_s" value=${number(plan.tokens_per_s, 3)} note=${t("plan.full_rows")} />
      <${Figure} id="memory_peak" value=${gib(plan.memory_gib)} level=${plan.fits ? "" : "bad"} note=${t("plan.of", { capacity: gib(plan.capacity_gib) })} />
      <${Figure} id="mfu" value=${percent(plan.mfu)} />
      <${Figure} id="hours" value=${duration(run.hours === null ? null : run.hours * 3600)} />
      <${Figure} id="price" value=${money(run.price, run.currency)} />
      <${Figure} id="interruptions" value=${number(run.interruptions, 2)} note=${t("plan.effective", { share: percent(run.effective) })} />
    </div>
    <p>${t("plan.layout")} <code>${plan.description}</code> · ${t(plan.fits ? "plan.fits" : "plan.too_large")}</p>
    <${Memory} plan=${plan} />
    <section class="panel" aria-labelledby="time-title">
      <h2 id="time-title">${t("plan.one_step", { seconds: seconds(plan.step_time_s) })}</h2>
      <${Stack} parts=${plan.time} most=${plan.step_time_s} label=${t("plan.time")} unit=${short} colourOf=${colourOfTime} />
      ${plan.timeline && html`<${Timeline} timeline=${plan.timeline} />`}
      ${binds.length > 0 && html`<${Table} name=${t("plan.binds")} head=${[t("plan.bound_by"), t("plan.seconds"), t("plan.because")]} rows=${binds.map((bind) => [word("part", bind.resource), short(bind.seconds), bind.causes.map((cause) => causeWords(cause.name)).join(", ")])} />`}
    </section>
    ${answer.alternatives?.length > 0 && html`<h2>${t("plan.alternatives")}</h2>
    <${Table}
      name=${t("plan.alternatives")}
      head=${[t("plan.layout"), t("plan.lost_because"), html`<${Term} id="step_time_s" />`, html`<${Term} id="memory_peak" />`, html`<${Term} id="price" />`, ""]}
      rows=${answer.alternatives.map((other) => [html`<code>${other.description}</code>`, html`<${Said} text=${other.reason} />`, `${step(other)} s`, gib(other.memory_gib), money(other.price, run.currency), html`<${Action} label=${t("plan.take")} onPress=${() => take(other)} />`])}
    />`}
    ${answer.helps?.length > 0 && html`<h2>${t("plan.helps")}</h2>
    <${Table} name=${t("plan.helps")} head=${[t("plan.change"), t("plan.gain"), t("plan.memory"), ""]} rows=${answer.helps.map((help) => [html`<${Said} text=${help.change} />`, percent(help.gain), gib(help.memory_gib), html`<${Action} label=${t("plan.take")} onPress=${() => take(help)} />`])} />`}`;
}

/** Nothing fits: what comes nearest, and what would make it fit. */
const Nothing = ({ answer, yaml }) =>
  html`<p class="problem" role="alert">${t("plan.nothing_fits")}</p>
    ${answer.nearest && html`<${Memory} plan=${answer.nearest} />`}
    <${Table} name=${t("plan.helps")} head=${[t("plan.change"), t("plan.memory"), ""]} rows=${(answer.changes ?? []).map((change) => [html`<${Said} text=${change.what} /> <code>${change.words}</code>`, gib(change.memory_gib), html`<${Action} label=${t("plan.take")} onPress=${() => takePlan(yaml, change)} />`])} />`;

/** The stages of a job: the layout, memory and time of each, and the totals. */
function StagePlans({ stages, total }) {
  const rows = stages.map(({ name, task, resident, plan, run }) => [
    name,
    html`${t(`task.${task}`)} <span class="hint">${resident.join(", ")}</span>`,
    plan ? html`<code>${plan.description}</code>` : t("plan.nothing_fits"),
    gib(plan?.memory_gib),
    plan ? seconds(plan.step_time_s) : "–",
    duration(run?.steps_known ? run.seconds : null),
  ]);
  rows.push([t("plan.total"), "", "", gib(total.memory_gib), "", duration(total.seconds)]);
  const head = [t("run.name"), t("run.task"), t("plan.layout"), html`<${Term} id="memory_peak" />`, html`<${Term} id="step_time_s" />`, html`<${Term} id="hours" />`];
  return html`<${Table} name=${t("plan.chain")} head=${head} rows=${rows} />`;
}

/** A ranking model: what its hosts hold, and its embedding tables. */
function RankingPlan({ plan }) {
  const sizes = [
    [t("plan.on_host", { capacity: bytes(plan.host_memory) }), plan.on_host],
    [t(plan.served ? "plan.on_server" : "plan.on_process"), plan.memory.total],
    [t("plan.tower"), plan.tower],
    [word("part", "checkpoint copies"), plan.checkpoint],
    [t("plan.sent"), plan.sent.total],
  ];
  return html`<p class=${plan.fits ? "" : "problem"} role=${plan.fits ? undefined : "alert"}>${t("plan.processes", { n: plan.processes })} · ${t(plan.fits ? "plan.fits" : "plan.too_large")}</p>
    <${Table} name=${t("plan.needs")} head=${[t("plan.needs"), t("data.size")]} rows=${sizes.map(([what, size]) => [what, bytes(size)])} />
    <h2>${t("plan.tables")}</h2>
    <${Table} name=${t("plan.tables")} head=${[t("run.name"), t("data.rows"), t("data.size")]} rows=${plan.tables.map((table) => [html`<code>${table.name}</code>`, number(table.rows), bytes(table.bytes)])} />`;
}

const NODE = 8; // devices
/** The numbers of devices to choose from: a part of a node, or whole nodes. */
export const SIZES = Array.from({ length: 2 * NODE - 1 }, (_, i) => (i < NODE ? i + 1 : (i - NODE + 2) * NODE));

const isFile = (device) => /\.ya?ml$/.test(device);

/** A number of devices, beyond one node that of whole nodes. */
const wholeNodes = (devices) => (devices > NODE ? Math.ceil(devices / NODE) * NODE : devices);

/** The cluster of an address: `local`, a cluster's file, or devices of a kind on nodes of eight. */
export function clusterOf(devices, device) {
  if (!device || device === "local") return "local";
  if (isFile(device)) return device;
  const nodes = Math.ceil(devices / NODE);
  return nodes > 1 ? `${nodes}x${NODE}x${device}` : `1x${devices}x${device}`;
}

function Stages({ yaml }) {
  const names = stageNames(yaml);
  if (!names.length) return null;
  return html`<h2>${t("plan.chain")}</h2><ol class="graph">${names.map((name) => html`<li key=${name}>${name}</li>`)}</ol>`;
}

/** Memory and time of a step as predicted, and as measured if something was. */
export function measuredRows(predicted, measured) {
  const of = 2 ** 30;
  const row = (id, text, planned, found) => [html`<${Term} id=${id} />`, text(planned), ...(measured ? [text(found), percent(found / planned - 1)] : [])];
  return [
    row("memory_peak", (size) => gib(size / of), predicted.peak, measured?.memory),
    row("step_time_s", seconds, predicted.seconds, measured?.seconds),
  ];
}

/** What was predicted for a run, beside what it measured. */
export function Measured({ run }) {
  const found = useGet(runPath(run));
  const { predicted, measured, line } = found.data?.plan ?? {};
  const unmeasured = html`<p class="hint">${t("plan.unmeasured")}</p>`;
  if (!predicted) return html`<${Problem} error=${found.error} />${line ? html`<p class="hint"><${Said} text=${line} /></p>` : unmeasured}`;
  const of = 2 ** 30;
  const parts = Object.fromEntries(Object.entries(predicted.memory ?? {}).map(([name, size]) => [name, size / of]));
  const most = Math.max(predicted.upper ?? 0, measured?.memory ?? 0) / of;
  return html`<${Table} name=${t("plan.predicted")} head=${["", t("plan.predicted"), ...(measured ? [t("plan.measured"), t("plan.difference")] : [])]} rows=${measuredRows(predicted, measured)} />
    <h2 class="small">${t("plan.predicted")}</h2><${Stack} parts=${parts} most=${most} label=${t("plan.predicted")} unit=${gib} />
    ${measured ? html`<h2 class="small">${t("plan.measured")}</h2><${Stack} parts=${{ process: measured.memory / of }} most=${most} label=${t("plan.measured")} unit=${gib} />` : unmeasured}
    ${line && html`<p class="hint"><${Said} text=${line} /></p>`}`;
}

/** Whether everything that a plan is for fits. */
export const fits = (answer) => (answer.stages ? answer.stages.every((stage) => stage.plan) : answer.task === "ranking" ? answer.fits : Boolean(answer.plan));

/** The answer of the planner, in the form that its job has. */
export function Answered({ answer, yaml }) {
  if (answer.stages) return html`<${StagePlans} stages=${answer.stages} total=${answer.total} />`;
  if (answer.task === "ranking") return html`<${RankingPlan} plan=${answer} />`;
  return answer.plan ? html`<${Answer} answer=${answer} yaml=${yaml} />` : html`<${Nothing} answer=${answer} yaml=${yaml} />`;
}

function Planned({ yaml, on }) {
  const { data, error, busy } = useAnswer("/api/plan", { yaml, on });
  useEffect(() => {
    if (data && fits(data) && session().yaml === yaml) remember({ planned: true });
  }, [data]);
  if (busy) return html`<${Waiting} what=${t("plan.planning")} />`;
  if (error) return html`<${Problem} error=${error} />`;
  return html`<${Command} line=${data.command} /><${Answered} answer=${data} yaml=${yaml} />`;
}

export default function Plan({ route, me }) {
  const state = useSession();
  const yaml = useSettled(state.yaml, SETTLED);
  const device = route.query.device ?? "local";
  const [devices, setDevices] = useState(wholeNodes(Number(route.query.devices ?? 1)));
  const [kind, setKind] = useState(device);
  const [typed, setTyped] = useState(null); // a plan that arrives meanwhile must not undo it
  useLater(() => go({ query: { devices: kind === "local" ? null : devices, device: kind === "local" ? null : kind } }, { replace: true }), 400, [devices, kind]);
  if (!yaml) {
    return html`<h1>${t("place.plan")}</h1><${NothingYet} title=${t("job.none")} text=${t("job.none_text")} />`;
  }
  const place = SIZES.findIndex((size) => size >= devices);
  const on = clusterOf(Number(route.query.devices ?? 1), device);
  return html`<h1>${t("plan.title", { name: state.name })}</h1>
    <div class="row">
      <${Field} id="device" label=${t("plan.device")} hint=${t("plan.device_hint")}>
        <input id="device" list="devices" aria-describedby="device-hint" value=${typed ?? kind} onInput=${(event) => setTyped(event.target.value)} onChange=${(event) => [setKind(event.target.value.trim() || "local"), setTyped(null)]} />
        <datalist id="devices">${["local", "H100", "A100-80G", "H200", "L40S", "RTX4090"].map((name) => html`<option key=${name} value=${name} />`)}</datalist>
      <//>
      <${Field} id="devices-n" label=${t("plan.devices", { n: devices })}>
        <input id="devices-n" type="range" min="0" max=${SIZES.length - 1} value=${place < 0 ? SIZES.length - 1 : place} aria-valuetext=${devices} disabled=${kind === "local" || isFile(kind)} onInput=${(event) => setDevices(SIZES[event.target.value])} />
      <//>
    </div>
    <${Planned} key=${`${on}${yaml}`} yaml=${yaml} on=${on} />
    <${Stages} yaml=${yaml} />
    <div class="actions">
      <${Action} id="start-training" label=${t("job.start")} kind="primary" line=${startLine(state.name)} disabled=${me?.role === "see"} reason=${t("job.only_see")} onPress=${() => startJob(session())} />
      <a class="button" href=${link({ place: "start", run: "job", tab: "" })}>${t("plan.back")}</a>
    </div>`;
}
