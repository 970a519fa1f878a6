// Compare: several runs on one axis, the keys in which their jobs differ, and which is better, with an interval.
import { get, runPath, useGet } from "./api.js";
import { evalLine } from "./commands.js";
import { dataName, figureName, metricName } from "./evaluated.js";
import { heldOutOf } from "./evaluation_curves.js";
import { Term } from "./glossary.js";
import { html, useEffect, useMemo, useState } from "./html.js";
import { number, t, time } from "./i18n.js";
import { address, go } from "./router.js";
import { Charts, POLICIES, isGoing, metricsOf } from "./run.js";
import { FindRun, SHOWN, matching, runName, runsAlone } from "./run_list.js";
import { Rollouts } from "./rollouts.js";
import { Command, Loaded, NothingYet, Problem, Status, Table, Tabs } from "./ui.js";

const MOST = 6; // as many as there are colours
const EVERY = 5000; // ms between two looks at runs that train

/** Keys whose values differ between jobs, given as the values by dotted key, with the value of each. */
export function differences(each) {
  const keys = [...new Set(each.flatMap((one) => Object.keys(one)))];
  return keys.filter((key) => new Set(each.map((one) => one[key])).size > 1).map((key) => [key, ...each.map((one) => one[key] ?? "–")]);
}

/**
 * The sentence about the difference B - A with its interval: better, worse, or undecided, as with few rows. `higher` says
 * whether more is better.
 */
export function verdict({ low, high, rows, significant }, higher = true) {
  if (!significant) return { key: "compare.cannot_tell", rows };
  const [least, most] = [Math.abs(low), Math.abs(high)].sort((a, b) => a - b);
  return { key: low > 0 === higher ? "compare.better" : "compare.worse", least, most };
}

/** The names of runs as heads of columns. */
const headsOf = (runs) => runs.map((run) => html`<span class="name">${runName(run)}</span>`);

/** The newest comparison of each pair, metric and data, from a list that begins with the oldest. */
export const newestOf = (all) => [...new Map(all.map((one) => [JSON.stringify([one.run, one.against, one.metric, one.data]), one])).values()];

/** Rows of a table with a column for each run: for each measure and data, the newest figure of each, from the evaluations of all runs. */
export function besideEachOther(runs, found) {
  const rows = new Map();
  for (const [i, list] of found.entries()) {
    for (const one of list.filter(({ against }) => !against)) {
      const at = one.subject === one.run ? i : runs.findIndex((run) => isNamed(run, one.subject));
      const key = JSON.stringify([one.of, one.metric, one.data]);
      if (at >= 0 && !rows.has(key)) rows.set(key, runs.map(() => null));
      if (at >= 0 && !(rows.get(key)[at]?.time > one.time)) rows.get(key)[at] = one;
    }
  }
  return [...rows.values()];
}

/** Whether a name is that of a run: its id, or the end of its folder's path. */
const isNamed = (run, name) => run.name === name || run.id === name || run.folder?.endsWith(`/${name}`);

/** The command line of a comparison that was made, or of one of the first two runs on held-out rows. */
export function againstLine(runs, made) {
  const [other, run] = made ? [made.against, made.run].map((name) => runs.find((one) => isNamed(one, name))) : runs;
  const data = !made || made.data === "held out" ? [] : made.higher ? ["--answers", made.data] : [made.data];
  return evalLine(run, [...data, "--against", other.folder]);
}

function Judged({ runs }) {
  const [found, set] = useState(null);
  const [error, setError] = useState(null);
  const key = runs.map((run) => run.id).join(",");
  useEffect(() => {
    const stop = new AbortController();
    Promise.all(runs.map((run) => get(`${runPath(run.id)}/evaluations`, {}, stop.signal))).then(
      (answers) => set(answers.map((answer) => answer.evaluations ?? [])),
      (caught) => stop.signal.aborted || setError(caught),
    );
    return () => stop.abort();
  }, [key]);
  if (!found) return html`<${Problem} error=${error} />`;
  const cell = (one) => (one ? `${number(one.value)}${one.low === null ? "" : ` (${number(one.low)} … ${number(one.high)})`}` : "–");
  const named = (figures) => figures.find(Boolean);
  const heldOut = runs.some((run) => Number.isFinite(run.held_out_loss)) ? [[t("g.held_out_loss.name"), ...runs.map((run) => number(run.held_out_loss))]] : [];
  const rows = besideEachOther(runs, found).map((figures) => [`${figureName({ ...named(figures), kind: "" })} · ${dataName(named(figures).data)}`, ...figures.map(cell)]);
  const differs = newestOf(found.flat().filter((one) => [one.run, one.against].every((name) => runs.some((run) => isNamed(run, name)))));
  const last = differs.reduce((newest, one) => (newest?.time > one.time ? newest : one), undefined);
  return html`<h2><${Term} id="interval" label=${t("compare.evaluations")} /></h2>
    ${differs.map((one) => {
      const said = verdict(one, one.higher ?? true);
      return html`<p class="note" key=${`${one.run} ${one.against} ${one.metric} ${one.data}`}><strong>${t(said.key, { a: one.against, b: one.run, low: said.least, high: said.most, n: said.rows, metric: metricName(one.metric) })}</strong> <span class="hint">${t("compare.measured", { step: one.step ?? "–", data: dataName(one.data), time: time(one.time) })}</span></p>`;
    })}
    <${Table} name=${t("compare.evaluations")} head=${[t("compare.metric"), ...headsOf(runs)]} empty=${t("compare.no_evaluations")} rows=${[...heldOut, ...rows]} />
    ${runs.length > 1 && html`<p class="hint">${t("compare.how")}</p><${Command} line=${againstLine(runs, last)} />`}`;
}

function Chosen({ runs, route }) {
  const tab = route.tab || "curves";
  const ids = route.run;
  const details = runs.map((run) => useGet(runPath(run.id), {}, { every: isGoing(run) ? EVERY : 0 }).data);
  const happened = runs.map((run) => useGet(`${runPath(run.id)}/events`, {}, { every: isGoing(run) ? EVERY : 0 }).data?.events ?? []);
  const tick = runs.reduce((sum, run) => sum + run.step, 0); // the curves are asked for again as it changes
  const ready = details.every(Boolean);
  const rows = ready ? differences(details.map((run) => run.keys ?? {})) : [];
  const metrics = ready ? metricsOf([...new Set(details.flatMap((run) => run.metrics ?? []))]) : [];
  const extra = useMemo(() => heldOutOf(runs, happened, metrics), [happened.map((events) => events.length).join(), metrics.join()]);
  return html`<${Tabs} name=${t("place.compare")} current=${tab} items=${["curves", "keys", "evaluations", "rollouts"].map((name) => [name, t(`compare.tab.${name}`)])} />
    ${ready && tab === "curves" && html`<${Charts} runs=${runs} metrics=${metrics} extra=${extra} route=${route} tick=${tick} />`}
    ${ready && tab === "keys" && html`<${Table} name=${t("compare.tab.keys")} head=${[t("compare.key"), ...headsOf(runs)]} empty=${t("compare.same")} rows=${rows.map(([key, ...values]) => [html`<code>${key}</code>`, ...values])} />`}
    ${tab === "evaluations" && html`<${Judged} key=${ids} runs=${runs} />`}
    ${tab === "rollouts" && html`<div class="split">${runs.slice(0, 2).map((run) => html`<section key=${run.id}><h2>${runName(run)}</h2>${POLICIES.includes(run.task) ? html`<${Rollouts} path=${runPath(run.id)} route=${route} />` : html`<p class="hint">${t("rollouts.none")}</p>`}</section>`)}</div>`}`;
}

export default function Compare({ route }) {
  const found = useGet("/api/runs", {}, { every: EVERY });
  const ids = route.run ? route.run.split(",") : [];
  const toggle = (id) => {
    const next = ids.includes(id) ? ids.filter((one) => one !== id) : [...ids, id].slice(-MOST);
    go({ run: next.join(",") });
  };
  const [isOpen, setOpen] = useState(ids.length < 2); // then as the user leaves it
  return html`<h1>${t("place.compare")}</h1>
    <${Loaded} of=${found}>
      ${(answer) => {
        const runs = runsAlone(answer.runs);
        if (!runs.length) return html`<${NothingYet} title=${t("train.none")} text=${t("train.none_text")} />`;
        const chosen = ids.map((id) => runs.find((run) => run.id === id)).filter(Boolean);
        const match = matching(runs, route.query.find ?? "");
        return html`<details class="pick" open=${isOpen} onToggle=${(event) => setOpen(event.currentTarget.open)}><summary>${t("compare.pick", { n: chosen.length })}</summary>
            <${FindRun} words=${route.query.find ?? ""} />
            <${Table}
              name=${t("train.title")}
              head=${["", t("run.name"), t("run.status"), html`<${Term} id="loss" />`, html`<${Term} id="held_out_loss" />`]}
              keys=${match.slice(0, SHOWN).map((run) => run.id)}
              rows=${match.slice(0, SHOWN).map((run) => [html`<input type="checkbox" id=${`pick-${run.id}`} checked=${ids.includes(run.id)} onChange=${() => toggle(run.id)} />`, html`<label for=${`pick-${run.id}`}>${runName(run)}</label>`, html`<${Status} status=${run.status} />`, number(run.loss), number(run.held_out_loss)])}
              empty=${t("train.no_match")}
            />
            ${match.length > SHOWN && html`<p class="hint">${t("train.more", { n: match.length - SHOWN })}</p>`}
          </details>
          ${chosen.length > 0 ? html`<${Chosen} key=${chosen.map((run) => run.id).join(",")} runs=${chosen} route=${route} />` : html`<p class="hint">${t("compare.none")}</p>`}
          ${chosen.length === 2 && html`<div class="actions"><a class="button" href=${address({ place: "use", run: ids.join(","), query: { lang: route.query.lang } })}>${t("compare.talk")}</a></div>`}`;
      }}
    <//>`;
}
