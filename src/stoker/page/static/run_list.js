// The answers of `/api/runs`: which of them a view shows, and by what name.
import { html } from "./html.js";
import { t } from "./i18n.js";
import { go } from "./router.js";

export const SHOWN = 200; // runs of a list

/** Runs whose name, task, model or status has every word. */
export function matching(runs, words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  return runs.filter((run) => wanted.every((word) => `${runName(run)} ${run.task} ${run.model} ${run.status}`.toLowerCase().includes(word)));
}

/** The words that a list of runs is searched for, which are in the address. */
export const FindRun = ({ words }) =>
  html`<div class="row"><label for="find-run">${t("train.find")}</label><input id="find-run" type="search" value=${words} onInput=${(event) => go({ query: { find: event.target.value } }, { replace: true })} /></div>`;

/** Runs alone: a job of the queue has no curves and no model of its own. */
export const runsAlone = (runs) => runs.filter((run) => run.number === undefined);

/** Runs and jobs, without the stages of a job that is among them. */
export const wholeJobs = (runs) => runs.filter((run) => !run.stage_of?.id);

/** The name of a run; of a stage with that of its job. */
export const runName = ({ name, stage_of: job }) => (job ? `${job.name}/${name}` : name);

/** The id of the run whose model a view of `id` uses: of a job with stages that of its newest stage. */
export const withModel = (id, runs) => runs.find((run) => run.stage_of?.id === id && run.step > 0)?.id ?? id;
